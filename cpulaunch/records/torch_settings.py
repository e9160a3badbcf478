"""What the worker plugin is to do inside torch: decided by the planner, carried by one environment variable."""

from __future__ import annotations

from cpulaunch.records.record import fields, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from cpulaunch.records.settings import CompileMode, Graph, Precision

VARIABLE = "CPULAUNCH_WORKER"
"""Holds encoded TorchSettings. Must be set before the worker's `import torch`."""

EVENTS_VARIABLE = "CPULAUNCH_EVENTS"
"""Path of the file to which a worker and its children append events, one JSON object a line; unset: nobody reads."""

OWN_VARIABLES = (VARIABLE, EVENTS_VARIABLE, "CPULAUNCH_WORKER_PID")
"""What a launch and the plugin inside its workers set; nothing that a launch within a launch may inherit."""


@record
class TorchSettings:
    """One worker's settings. The fields named like a row of settings.py have its meaning and values.

    `cpus` and `loader_cpus` are cpulists; empty: not bound, and the worker's own. `ld_preload` is what programs that
    the worker starts get as LD_PRELOAD (None: unset) if `restore_preload`. `graph_memory_bytes` bounds the frozen
    copies of weights that this worker's captured graphs may hold (None: nobody knows how much memory there is).
    """

    index: int = 0
    threads: int | None = None
    cpus: str = ""
    loader_cpus: str = ""
    restore_preload: bool = False
    ld_preload: str | None = None
    strict: bool = False

    graph: Graph = "off"
    graph_signatures: int = 8
    graph_memory_bytes: int | None = None
    compile_mode: CompileMode | None = None
    precision: Precision | None = None
    channels_last: bool = False
    inference_mode: bool = False
    debug_apis: bool = True
    flush_denormal: bool = False
    interop_threads: int | None = None
    cudnn_benchmark: bool = False
    mmap_weights: bool = False
    fused_optimizers: bool = False
    ipex: bool = False

    dataloader_workers: int | None = None
    pin_memory: bool = False
    prefetch: int | None = None
    persistent_workers: bool = False

    dist_backend: Literal["gloo", "ccl", "mpi"] | None = None
    """What CPU collectives run on; empty: what the program asks for. `auto` is decided before."""


def encode(settings: TorchSettings) -> str:
    """The settings that differ from the defaults, as a flat JSON object (without importing json: the hot path)."""
    defaults = {name: entry.default for name, entry in fields(TorchSettings).items()}
    values = {name: getattr(settings, name) for name in defaults}
    chosen = {name: value for name, value in values.items() if value != defaults[name]}
    return "{" + ",".join(f'"{name}":{_json(value)}' for name, value in chosen.items()) + "}"


def _json(value: str | int | None) -> str:
    """Source: RFC 8259; in strings only the quote, the backslash and control characters must be escaped."""
    if isinstance(value, str):
        return '"' + "".join(_ESCAPES.get(letter, letter) for letter in value) + '"'
    return {"None": "null", "True": "true", "False": "false"}.get(text := str(value), text)


_ESCAPES = {chr(code): f"\\u{code:04x}" for code in (*range(32), ord('"'), ord("\\"))}


def decode(text: str) -> TorchSettings:
    """The settings an environment variable holds; unknown names are left out (another version wrote them).

    Raises: ValueError if it is not a JSON object.
    """
    import json

    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    known = fields(TorchSettings)
    return TorchSettings(**{name: value for name, value in values.items() if name in known})
