"""Where the output of each rank goes: to files where torchrun puts them, the terminal and filtered copies.

Source: torch 2.13, torch/distributed/elastic/multiprocessing: api.py (DefaultLogsSpecs, PContext) and tail_log.py.
"""

from __future__ import annotations

import os

from cpulaunch.launch.output.routing import OutputRouting, open_metrics, open_terminal, worker_inputs
from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import OutputRoute, Stream
from cpulaunch.launch.process.descriptors import STDERR, STDOUT, StdioFds, stdio_error
from cpulaunch.launch.ranks.files import RankFiles, log_error
from cpulaunch.records.errors import LaunchError, escaped
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.launch.output.metrics import Metric

NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class FilteredRoute(OutputRoute):
    """A route that only lines with one of some words take; of a long line, what follows the first part with one."""

    def __init__(self, sink: Sink, *, prefix: bytes, words: Sequence[bytes]) -> None:
        super().__init__(sink, prefix=prefix, exclusive=False)
        self._words = tuple(words)
        self._took_last = self._was_broken = False

    def break_line(self) -> None:
        """Effect: ends the long line as any route does; the rest of one that was taken is taken too."""
        self._was_broken = self._is_inside_line
        super().break_line()

    @property
    def _is_inside_line(self) -> bool:
        return super()._is_inside_line and self._took_last

    def _send(self, data: bytes) -> None:
        lines = data.splitlines(keepends=True)
        taken = [any(word in line for word in self._words) for line in lines]
        if taken and (self._is_inside_line or self._was_broken):
            taken[0] = True
        self._was_broken = False
        matching = b"".join(line for line, is_taken in zip(lines, taken, strict=True) if is_taken)
        if matching:
            super()._send(matching)
        self._took_last = taken[-1:] == [True]


@record
class _StreamSinks:
    """Where one stream of one rank goes: its log, the terminal, and the file for lines with one of `words`.

    `prefix`: of each line in the latter two. `exclusive`: no other rank writes to the terminal.
    """

    log: Sink | None
    terminal: Sink | None
    filtered: Sink | None
    words: tuple[bytes, ...]
    prefix: bytes
    exclusive: bool

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple(sink for sink in (self.log, self.terminal, self.filtered) if sink is not None)

    def stream(self, fd: int, metric: Metric | None) -> Stream:
        """The read end of a pipe as a stream to these sinks, searched for the metric."""
        routes = [] if self.log is None else [OutputRoute(self.log, exclusive=True)]
        if self.terminal is not None:
            routes.append(OutputRoute(self.terminal, prefix=self.prefix, exclusive=self.exclusive and not self.prefix))
        if self.filtered is not None:
            routes.append(FilteredRoute(self.filtered, prefix=self.prefix, words=self.words))
        os.set_blocking(fd, False)
        if metric is None:
            return Stream(fd, routes=routes)
        from cpulaunch.launch.output.metrics import LineReader

        return Stream(fd, routes=routes, reader=LineReader(metric))


class _AttemptOutput:
    """The files of one attempt, opened one by one, and the terminal."""

    def __init__(self, plan: LaunchPlan, job: JobPlan, files: RankFiles) -> None:
        """Raises: LaunchError or OSError."""
        self._job = job
        self._files = files
        self._shown = frozenset(range(len(plan.workers))) if plan.launch.show is None else plan.launch.show
        self.terminal = open_terminal(plan, prefixed=False)
        self._logs: list[Sink] = []
        self._filtered: dict[int, Sink | None] = {}

    def open_filtered(self) -> None:
        """Effect: opens the files for lines of all ranks. Raises: LaunchError."""
        self._filtered = {stream: self._open_filtered(stream) for stream in (STDOUT, STDERR)}

    def stream_sinks(self, local_rank: int, stream: int) -> _StreamSinks:
        """Where this stream goes. Raises: LaunchError.

        Source: torch: a teed stream is written and shown, a redirected stream is only written.
        """
        streams, visible = self._job.streams, local_rank in self._shown
        writing = self._files.directory is not None
        teed = writing and bool(streams.tee[local_rank] & stream)
        written = teed or (writing and bool(streams.redirects[local_rank] & stream))
        terminal = self.terminal.out if stream == STDOUT else self.terminal.err
        filtered = self._filtered[stream] if teed and visible else None
        return _StreamSinks(
            log=self._open(os.path.join(str(local_rank), f"{NAMES[stream]}.log")) if written else None,
            terminal=terminal if visible and (teed or not written) else None,
            filtered=filtered,
            words=() if filtered is None else tuple(os.fsencode(word) for word in streams.filters[stream - 1]),
            prefix=os.fsencode(_with_host(streams.prefixes[local_rank])) if teed else b"",
            exclusive=len(self._shown) == 1,
        )

    def _open_filtered(self, stream: int) -> Sink | None:
        directory = self._files.directory
        if directory is None or not self._job.streams.filters[stream - 1]:
            return None
        return self._open(f"filtered_{NAMES[stream]}.log")

    def _open(self, name: str) -> Sink:
        """The sink of a new file in the directory of the attempt. Raises: LaunchError."""
        path = os.path.join(self._files.directory or "", name)
        try:
            sink = Sink(self._files.open_log(name), name=path)
        except OSError as error:
            raise log_error(path, error) from None
        self._logs.append(sink)
        return sink

    def all_sinks(self) -> tuple[Sink, ...]:
        """Every sink, each once."""
        sinks = (self.terminal.out, self.terminal.err, *self._logs)
        return tuple({id(sink): sink for sink in sinks}.values())


def _with_host(prefix: str) -> str:
    """The prefix with this host's name in place of its macro. Source: torch 2.15, local_elastic_agent.py."""
    name = escaped(os.uname().nodename)
    return prefix.replace("${hostname}", name).replace("$hostname", name)


def open_rank_routing(plan: LaunchPlan, job: JobPlan, files: RankFiles) -> OutputRouting:
    """The pipes and files of one attempt. Raises: LaunchError."""
    output = _AttemptOutput(plan, job, files)
    try:
        output.open_filtered()
        ranks = [
            (output.stream_sinks(worker.index, STDOUT), output.stream_sinks(worker.index, STDERR))
            for worker in plan.workers
        ]
        inputs = worker_inputs(plan)
        metrics = open_metrics(plan)
        opened = [
            _open_pipes(*streams, stdin=stdin, metric=metric)
            for streams, metric, stdin in zip(ranks, metrics, inputs, strict=True)
        ]
    except LaunchError:
        for sink in output.all_sinks():  # The attempt may go on with other files.
            sink.close()
        raise
    except OSError as error:
        raise stdio_error(error, of="ranks", count=len(plan.workers)) from None
    return OutputRouting(
        sinks=output.all_sinks(),
        stdio=tuple(stdio for stdio, _ in opened),
        streams=tuple(streams for _, streams in opened),
        logs=tuple(next((each.log.name for each in (err, out) if each.log is not None), None) for out, err in ranks),
        metrics=metrics,
        stdin=tuple(set(inputs)),
        shown=frozenset(
            worker.index for worker, (_, err) in zip(plan.workers, ranks, strict=True) if err.terminal is not None
        ),
        stderr=output.terminal.err,
    )


def _open_pipes(
    out: _StreamSinks, err: _StreamSinks, *, stdin: int, metric: Metric | None
) -> tuple[StdioFds, tuple[Stream, ...]]:
    """One rank's descriptors and streams: one pipe for both, in exact order, where both go to the same sinks."""
    read, write = os.pipe()
    if out == err and (out.sinks or metric is not None):
        return StdioFds(stdin=stdin, stdout=write, stderr=write, owned=(write,)), (out.stream(read, metric),)
    if not out.sinks and metric is None:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        return StdioFds(stdin=stdin, stdout=null, stderr=write, owned=(null, write)), (err.stream(read, None),)
    read_err, write_err = os.pipe()
    stdio = StdioFds(stdin=stdin, stdout=write, stderr=write_err, owned=(write, write_err))
    return stdio, (out.stream(read, metric), err.stream(read_err, metric))
