"""What a study is about: the program, the machine and the versions; equal ones have one study."""

from __future__ import annotations

import json
from hashlib import sha256

from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from cpulaunch.measure.samples import MetricChoice
    from cpulaunch.measure.tuning.space import Dimension

DIGITS = 16
FORMAT = 2
"""Of the trials in a study: those of another one cannot be gone on with."""


@record
class StudyIdentity:
    """Everything that a study's results depend on. `program`: its words; `content`: the digest of the script.

    `machine`, `versions`: facts by name. `options`: those of all launches. `conditions`: what else makes figures differ
    that cannot be compared, as JSON data: the figure's direction, the default's plan, variables of the caller, ...
    """

    program: tuple[str, ...]
    content: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    options: tuple[str, ...]
    metric: MetricChoice | None
    max_error: float | None
    space: tuple[Dimension, ...]
    folder: str
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def machine_key(self) -> str:
        """The name of the folder with this machine's studies."""
        return _digest(dict(self.machine))

    @property
    def key(self) -> str:
        """The name of the study's folder among them."""
        words = (list(self.program), self.content, dict(self.versions), list(self.options), self.folder)
        space = [[each.name, list(each.texts())] for each in self.space]
        metric = None if self.metric is None else repr(self.metric)
        return _digest([FORMAT, *words, metric, self.max_error, space, dict(self.conditions)])


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode(errors="surrogatepass")).hexdigest()[:DIGITS]


def content_digest(data: bytes) -> str:
    """What stands for a script's content."""
    return sha256(data).hexdigest()[:DIGITS]
