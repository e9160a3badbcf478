"""The settings that the worker plugin applies inside torch, passed from the planner in one environment variable."""

from __future__ import annotations

from cpulaunch.records.record import fields, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from cpulaunch.records.settings import CompileMode, Graph, Precision, WeightType

VARIABLE = "CPULAUNCH_WORKER"
"""Holds encoded TorchSettings. Must be set before the worker's `import torch`."""

EVENTS_VARIABLE = "CPULAUNCH_EVENTS"
"""Path of the file to which a worker and its children append events as JSON lines; unset: no events are written."""
RATE_VARIABLE = "CPULAUNCH_REQUEST_RATE"
"""Requests per second of cpulaunch.requests(), set by `tune --rate`."""
OFFERED_LOAD = "offered load"
"""Metric of cpulaunch.requests(): the time that the requests need, as a multiple of that in which they arrive.

From 1 on the queue grows as long as requests arrive: percentiles of latencies say how long that was.
"""

INSTANCE_VARIABLES = ("CPULAUNCH_INSTANCE", "CPULAUNCH_INSTANCES")
"""The number of an instance, and how many there are; what an instance starts inherits them."""

OWN_VARIABLES = (VARIABLE, EVENTS_VARIABLE, "CPULAUNCH_WORKER_PID")
"""Variables that a launch and its workers' plugin set; a nested launch does not inherit them."""


@record
class TorchSettings:
    """One worker's settings. A field that is also a setting (settings.py) has its meaning and values.

    `cpus` and `loader_cpus` are cpulists; if empty, the worker is not bound, or its DataLoader workers use its CPUs.
    With `restore_preload`, programs that the worker starts get `ld_preload` as LD_PRELOAD (None: unset).
    `graph_memory_bytes` limits this worker's copies of weights, in captured graphs and those that `weights` keeps;
    None: no limit is known. `level_precision`: a level chose `precision`, for models on the CPU alone.
    `compile_cache` is this worker's folder in the cache of compiled code; None: all of it.
    """

    index: int = 0
    threads: int | None = None
    compile_cache: str | None = None
    cpus: str = ""
    loader_cpus: str = ""
    restore_preload: bool = False
    ld_preload: str | None = None
    strict: bool = False

    graph: Graph = "off"
    graph_signatures: int = 8
    graph_memory_bytes: int | None = None
    compile_mode: CompileMode | None = None
    graph_budget: float = 60.0
    precision: Precision | None = None
    level_precision: bool = False
    weights: WeightType | None = None
    release_weights: bool = False
    channels_last: bool = False
    inference_mode: bool = False
    debug_apis: bool = True
    flush_denormal: bool = False
    interop_threads: int | None = None
    cudnn_benchmark: bool = False
    mmap_weights: bool = False
    fused_optimizers: bool = False
    ddp_bucket_mb: int | None = None
    ipex: bool = False

    dataloader_workers: int | None = None
    pin_memory: bool = False
    prefetch: int | None = None
    persistent_workers: bool = False

    loopback_store: bool = False
    """All ranks are on this host, so the store of rank 0 is to listen on loopback only."""
    dist_backend: Literal["gloo", "ccl", "mpi"] | None = None
    """Backend of CPU collectives (the planner resolves `auto`); None: the program's choice."""


def encode(settings: TorchSettings) -> str:
    """The settings that differ from the defaults, as a JSON object. The json module would slow down each launch."""
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
    """The settings in the text that `encode` wrote; names that another version wrote are ignored.

    Raises: ValueError if the text is not a JSON object.
    """
    import json

    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    known = fields(TorchSettings)
    return TorchSettings(**{name: value for name, value in values.items() if name in known})


DIAGNOSIS_VARIABLE = "CPULAUNCH_DIAGNOSIS"
"""Holds an encoded DiagnosisRequest. Inherited by all processes that the program starts: any of them may train."""


@record
class DiagnosisRequest:
    """What a diagnosis asks of the plugin. `steps`: to measure without the profiler, besides those that it sees.

    `folder`: where each process writes its figures; it is private. `phase_seconds`: steps that take longer than this
    together are enough, but for two. `trace`: write the profiler's trace too. `to_end`: let the program finish.
    """

    folder: str
    steps: int = 20
    warm_up: int = 5
    phase_seconds: float = 10.0
    trace: bool = False
    to_end: bool = False


FIGURES, FETCHES, TRACES = "figures-", "fetches-", "trace-"
"""How the names of the files begin in the folder of a request: of a process, of a DataLoader worker, and traces."""


def figures_name(start: str, worker: int, pid: int) -> str:
    """The name of a process's file of figures or fetches: it tells the workers of a launch apart."""
    return f"{start}{worker}-{pid}.json"


LOADED, IN_THREADS, STEPPING = "loaded-", "threads-", "steps-"
"""How the names of empty files begin that say how far a process has come, with its id behind.

It has loaded torch; modules are called in other threads than the one that did; it makes steps.
"""
FAILED = "failed-"
"""How the name of a file begins that says why a process could not be measured, with its id behind."""


def encode_request(request: DiagnosisRequest) -> str:
    """The request as a JSON object."""
    import json

    return json.dumps({name: getattr(request, name) for name in fields(DiagnosisRequest)})


def decode_request(text: str) -> DiagnosisRequest:
    """The request in the text that `encode_request` wrote. Raises: ValueError or TypeError."""
    import json

    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    known = fields(DiagnosisRequest)
    return DiagnosisRequest(**{name: value for name, value in values.items() if name in known})
