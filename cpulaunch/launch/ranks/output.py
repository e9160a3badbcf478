"""Which rank's output goes where: to torchrun's files, the terminal and the filtered copies.

Source: torch 2.13, torch/distributed/elastic/multiprocessing: api.py (DefaultLogsSpecs, PContext) and tail_log.py.
"""

from __future__ import annotations

import os

from cpulaunch.launch.output.routing import OutputRouting, Terminal, open_metrics, open_terminal, worker_stdin
from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import OutputRoute, Stream
from cpulaunch.launch.process.descriptors import StdioFds
from cpulaunch.launch.ranks.files import RankFiles, log_error
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.launch.output.metrics import Metric

OUT, ERR = 1, 2
NAMES = {OUT: "stdout", ERR: "stderr"}


class FilteredRoute(OutputRoute):
    """The way of those lines that hold one of some words."""

    def __init__(self, sink: Sink, *, prefix: bytes, words: Sequence[bytes]) -> None:
        super().__init__(sink, prefix=prefix, exclusive=False)
        self._words = tuple(words)

    def _send(self, data: bytes) -> None:
        lines = data.splitlines(keepends=True)
        wanted = b"".join(line for line in lines if any(word in line for word in self._words))
        if wanted:
            super()._send(wanted)


@record
class _Way:
    """Where one stream of one rank goes; `prefix` and `filtered` are for what is shown."""

    log: Sink | None
    shown: Sink | None
    prefix: bytes
    filtered: Sink | None
    words: tuple[bytes, ...]

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple(sink for sink in (self.log, self.shown, self.filtered) if sink is not None)

    def routes(self, *, alone: bool) -> list[OutputRoute]:
        """`alone`: nobody else writes to the terminal."""
        routes = [] if self.log is None else [OutputRoute(self.log, exclusive=True)]
        if self.shown is not None:
            routes.append(OutputRoute(self.shown, prefix=self.prefix, exclusive=alone and not self.prefix))
        if self.filtered is not None:
            routes.append(FilteredRoute(self.filtered, prefix=self.prefix, words=self.words))
        return routes


class _Opening:
    """The files of one attempt, opened as they are asked for."""

    def __init__(self, plan: LaunchPlan, job: JobPlan, files: RankFiles) -> None:
        self._job = job
        self._files = files
        self._shown = frozenset(range(len(plan.workers))) if plan.launch.show is None else plan.launch.show
        self.terminal: Terminal = open_terminal(prefixed=False)
        self.alone = len(self._shown) == 1
        self._filtered = {stream: self._open_filtered(stream) for stream in (OUT, ERR)}

    def way(self, local_rank: int, stream: int) -> _Way:
        """Where this stream goes. Source: torch: what is teed is written and shown, what is redirected only written.

        Raises: LaunchError.
        """
        streams, visible = self._job.streams, local_rank in self._shown
        writing = self._files.directory is not None
        teed = writing and bool(streams.tee[local_rank] & stream)
        written = teed or (writing and bool(streams.redirects[local_rank] & stream))
        terminal = self.terminal.out if stream == OUT else self.terminal.err
        filtered = self._filtered[stream] if teed and visible else None
        return _Way(
            log=_open(self._files.of_rank(local_rank, f"{NAMES[stream]}.log")) if written else None,
            shown=terminal if visible and (teed or not written) else None,
            prefix=streams.prefixes[local_rank].encode() if teed else b"",
            filtered=filtered,
            words=() if filtered is None else tuple(word.encode() for word in streams.filters[stream - 1]),
        )

    def _open_filtered(self, stream: int) -> Sink | None:
        directory = self._files.directory
        if directory is None or not self._job.streams.filters[stream - 1]:
            return None
        return _open(os.path.join(directory, f"filtered_{NAMES[stream]}.log"))

    def sinks(self, ways: Sequence[tuple[_Way, _Way]]) -> tuple[Sink, ...]:
        """All of them, each once."""
        opened = [self.terminal.out, self.terminal.err, *(sink for sink in self._filtered.values() if sink is not None)]
        opened += [sink for pair in ways for way in pair for sink in way.sinks]
        return tuple({id(sink): sink for sink in opened}.values())


def _open(path: str) -> Sink:
    """A new file. Raises: LaunchError."""
    try:
        return Sink(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666), name=path)
    except OSError as error:
        raise log_error(path, error) from None


def open_rank_routing(plan: LaunchPlan, job: JobPlan, files: RankFiles) -> OutputRouting:
    """The pipes and files of one attempt. Raises: LaunchError if there can be none."""
    opening = _Opening(plan, job, files)
    try:
        stdin = worker_stdin(len(plan.workers))
        ways = [(opening.way(worker.index, OUT), opening.way(worker.index, ERR)) for worker in plan.workers]
        metrics = open_metrics(plan)
        wired = [
            _wire(*pair, stdin=stdin, alone=opening.alone, metric=f) for pair, f in zip(ways, metrics, strict=True)
        ]
    except OSError as error:
        source = error.strerror
        raise LaunchError(
            "no pipes for the ranks", value=len(plan.workers), source=source, hint="ulimit -n 4096"
        ) from None
    return OutputRouting(
        sinks=opening.sinks(ways),
        stdio=tuple(stdio for stdio, _ in wired),
        streams=tuple(streams for _, streams in wired),
        logs=tuple(next((way.log.name for way in (err, out) if way.log is not None), None) for out, err in ways),
        metrics=metrics,
        stdin=stdin,
    )


def _wire(
    out: _Way, err: _Way, *, stdin: int, alone: bool, metric: Metric | None
) -> tuple[StdioFds, tuple[Stream, ...]]:
    """One rank's descriptors and streams: one pipe for both where both go the same way, in exact order."""
    read, write = os.pipe()
    if out == err and (out.sinks or metric is not None):
        stdio = StdioFds(stdin=stdin, stdout=write, stderr=write, owned=(write,))
        return stdio, (_stream(read, out, alone=alone, metric=metric),)
    if not out.sinks and metric is None:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        stdio = StdioFds(stdin=stdin, stdout=null, stderr=write, owned=(null, write))
        return stdio, (_stream(read, err, alone=alone, metric=None),)
    read_err, write_err = os.pipe()
    stdio = StdioFds(stdin=stdin, stdout=write, stderr=write_err, owned=(write, write_err))
    streams = _stream(read, out, alone=alone, metric=metric), _stream(read_err, err, alone=alone, metric=metric)
    return stdio, streams


def _stream(fd: int, way: _Way, *, alone: bool, metric: Metric | None) -> Stream:
    os.set_blocking(fd, False)
    if metric is None:
        return Stream(fd, routes=way.routes(alone=alone))
    from cpulaunch.launch.output.metrics import LineReader

    return Stream(fd, routes=way.routes(alone=alone), reader=LineReader(metric))
