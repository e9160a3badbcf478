"""Tables of what every configuration of a program measured, as `cpulaunch.measure.tuning.tables` reads them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from report import envelope, write_json

from cpulaunch.measure.samples import Sample
from cpulaunch.measure.tuning.space import Dimension, value_text

if TYPE_CHECKING:
    from cpulaunch.measure.tuning.space import Configuration

Key = frozenset[tuple[str, str]]
"""A configuration as texts."""

MODELS = ("bert", "resnet50", "vit", "gpt2", "dlrm", "mlp")
PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    **{name: (("infer.py", name), rf"{name}: ([0-9.]+) samples/s") for name in MODELS},
    "generation": (("generate.py",), r"llama: ([0-9.]+) tokens/s decode"),
}
"""By name: the program's words, and the pattern of its rate."""


@dataclass(slots=True)
class RecordedSamples:
    """What is known of a program: rates by configuration, and why others failed. `head`: the rest of the file."""

    program: str
    head: dict[str, Any]
    space: tuple[Dimension, ...]
    values: dict[Key, list[float]] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)


def combinations(space: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Every configuration of the space; settings that are left to cpulaunch are left out."""
    for values in itertools.product(*(dimension.values for dimension in space)):
        yield {each.name: value for each, value in zip(space, values, strict=True) if value is not None}


def key_of(configuration: Configuration) -> Key:
    """What stands for a configuration in a table."""
    return frozenset((name, value_text(name, value)) for name, value in configuration.items())


def read_samples(file: Path, program: str, space: tuple[Dimension, ...]) -> RecordedSamples:
    """The samples in the file; none if it does not exist. Raises: SystemExit if it is a table of another space."""
    shown = {dimension.name: list(dimension.texts()[1:]) for dimension in space}
    head = envelope("tuning-tables", settings={}, commands={}) | {
        "program": program,
        "space": shown,
        "lower_is_better": False,
    }
    recorded = RecordedSamples(program, head, space)
    if file.exists():
        data = json.loads(file.read_text())
        if data["space"] != shown or data["program"] != program or data["machine"] != head["machine"]:
            raise SystemExit(f"{file} is a table of another program, space or machine; remove it to record a new one")
        for row in data["rows"]:
            key = frozenset(row["settings"].items())
            if row["failure"] is None:
                recorded.values[key] = list(row["values"])
            else:
                recorded.failures[key] = row["failure"]
    return recorded


def record_samples(
    recorded: RecordedSamples,
    file: Path,
    configurations: Sequence[Configuration],
    launch: Callable[[Configuration], Sample],
    *,
    samples: int,
) -> None:
    """Effect: launches what has fewer samples, and has not failed, once; the file is written after each launch."""
    for configuration in configurations:
        key = key_of(configuration)
        if key in recorded.failures or len(recorded.values.get(key, ())) >= samples:
            continue
        sample = launch(configuration)
        if sample.value is None:
            recorded.failures[key] = sample.failure or "it has no figure"
            recorded.values.pop(key, None)
        else:
            recorded.values.setdefault(key, []).append(sample.value)
        write_json(file, recorded.head | {"rows": list(_rows(recorded))})


def _rows(recorded: RecordedSamples) -> Iterator[Mapping[str, Any]]:
    for key in sorted({*recorded.values, *recorded.failures}, key=sorted):
        yield {
            "settings": dict(sorted(key)),
            "values": recorded.values.get(key, []),
            "failure": recorded.failures.get(key),
        }


def slowest_and_best(recorded: RecordedSamples) -> tuple[str, str, str, str]:
    """The median rates of the default, the slowest and the best configuration, and the latter's settings."""
    if not recorded.values:
        raise SystemExit(f"{recorded.program}: every launch failed: {next(iter(recorded.failures.values()))}")
    medians = {key: median(values) for key, values in recorded.values.items()}
    best = max(medians, key=lambda key: medians[key])
    shown = " ".join(f"{name}={text}" for name, text in sorted(best)) or "(default)"
    default = medians.get(frozenset())
    return "-" if default is None else f"{default:.1f}", f"{min(medians.values()):.1f}", f"{medians[best]:.1f}", shown
