"""Recorded tables: what every configuration of a space measured, from which a search can be replayed."""

from __future__ import annotations

import random

from cpulaunch.measure.samples import Sample
from cpulaunch.measure.tuning.space import Dimension, parse_variation
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from cpulaunch.measure.tuning.space import Configuration


@record
class RecordedTable:
    """A table: the space, and by configuration the samples of its launches, or why it failed."""

    name: str
    space: tuple[Dimension, ...]
    lower_is_better: bool
    samples: Mapping[frozenset[tuple[str, Any]], tuple[float, ...] | str]

    def median_speed(self, configuration: Configuration) -> float:
        """The median speed of a configuration; 0 for one that failed."""
        found = self.samples[frozenset(configuration.items())]
        if isinstance(found, str):
            return 0.0
        middle = sorted(found)[len(found) // 2]
        return 1 / middle if self.lower_is_better else middle

    @property
    def best_speed(self) -> float:
        """The largest median speed of all configurations."""
        return max(self.median_speed(dict(each)) for each in self.samples)

    def launch(self, configuration: Configuration, draw: random.Random) -> Sample:
        """One of the configuration's samples, drawn."""
        found = self.samples[frozenset(configuration.items())]
        if isinstance(found, str):
            return Sample(value=None, seconds=1.0, failure=found)
        value = draw.choice(found)
        return Sample(value=value, seconds=value if self.lower_is_better else 1.0)


def read_table(data: Mapping[str, Any]) -> RecordedTable:
    """The table in JSON data, as scripts/bench/tuning-tables writes it."""
    space = []
    for name, values in data["space"].items():
        ((_, parsed),) = parse_variation(f"{name}={','.join(values)}").items()
        space.append(Dimension(name=name, values=(None, *parsed)))
    places = {dimension.name: dict(zip(dimension.texts(), dimension.values, strict=True)) for dimension in space}
    samples = {}
    for row in data["rows"]:
        configuration = frozenset((name, places[name][text]) for name, text in row["settings"].items())
        samples[configuration] = row["failure"] or tuple(row["values"])
    return RecordedTable(
        name=data["program"], space=tuple(space), lower_is_better=data["lower_is_better"], samples=samples
    )
