"""Which worker's output goes where, decided and opened before anything starts."""

from __future__ import annotations

import os
import stat

from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import OutputRoute, Stream
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.launch.output.metrics import LineReader, Metric

STDIN, STDOUT, STDERR = 0, 1, 2


@record
class StdioFds:
    """The descriptors one worker gets as 0, 1 and 2; `owned` are closed once it has them."""

    stdin: int
    stdout: int
    stderr: int
    owned: tuple[int, ...]


@record
class OutputRouting:
    """All sinks, and for each worker its descriptors, its streams (stderr last), its log's path and its figure."""

    sinks: tuple[Sink, ...]
    stdio: tuple[StdioFds, ...]
    streams: tuple[tuple[Stream, ...], ...]
    logs: tuple[str | None, ...]
    metrics: tuple[Metric | None, ...]
    stdin: int


@record
class Terminal:
    """The launcher's own stdout and stderr; one sink if they are the same file."""

    out: Sink
    err: Sink
    prefixed: bool

    @property
    def merged(self) -> bool:
        return self.out is self.err


def open_output_routing(plan: LaunchPlan) -> OutputRouting:
    """The pipes and files of a launch. Raises: LaunchError if a log cannot be written or there are too many pipes."""
    logs = open_logs(plan)
    try:
        return _open_routing(plan, logs)
    except OSError as error:
        source = error.strerror
        raise LaunchError("no pipes for the workers", value=len(logs), source=source, hint="ulimit -n 4096") from None


def _open_routing(plan: LaunchPlan, logs: Sequence[Sink | None]) -> OutputRouting:
    shown = [plan.launch.show is None or worker.index in plan.launch.show for worker in plan.workers]
    terminal = open_terminal(prefixed=sum(shown) > 1)
    stdin = worker_stdin(len(plan.workers))
    metrics = open_metrics(plan)
    wired = [
        _open_pipes(_Destinations(worker.index, terminal if visible else None, log, metric), stdin=stdin)
        for worker, visible, log, metric in zip(plan.workers, shown, logs, metrics, strict=True)
    ]
    own = {id(sink): sink for sink in (terminal.out, terminal.err, *logs) if sink is not None}
    return OutputRouting(
        sinks=tuple(own.values()),
        stdio=tuple(stdio for stdio, _ in wired),
        streams=tuple(streams for _, streams in wired),
        logs=tuple(None if log is None else log.name for log in logs),
        metrics=metrics,
        stdin=stdin,
    )


def close_output_routing(routing: OutputRouting) -> None:
    """Effect: what is open of it when its streams have ended is closed."""
    for sink in routing.sinks:
        sink.close()
    os.close(routing.stdin)


def open_metrics(plan: LaunchPlan) -> tuple[Metric | None, ...]:
    """For each worker what --metric looks for, if anything."""
    if plan.launch.metric is None:
        return (None,) * len(plan.workers)
    from cpulaunch.launch.output.metrics import Metric

    return tuple(Metric(plan.launch.metric) for _ in plan.workers)


def worker_stdin(workers: int) -> int:
    """What workers read: one worker reads what cpulaunch would (a file or pipe), several nothing.

    Nobody reads a terminal: workers are in process groups of their own, which the terminal would stop. A
    program that asks questions runs without logs, in cpulaunch's place.
    """
    if workers == 1 and not os.isatty(STDIN):
        return os.dup(STDIN)
    return os.open(os.devnull, os.O_RDONLY)


def open_standard_descriptors() -> None:
    """Effect: 0, 1 and 2 are open (on the null device if they were closed), so that no pipe becomes one of them."""
    for fd in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest free number, which is this one.
            os.set_inheritable(fd, True)


def log_path(log_dir: str, index: int) -> str:
    """Where a worker's log is."""
    return os.path.join(log_dir, f"worker-{index}.log")


def open_logs(plan: LaunchPlan) -> Sequence[Sink | None]:
    """A new, empty log for each worker; None for all without a log directory. Raises: LaunchError."""
    log_dir = plan.launch.log_dir
    if log_dir is None:
        return [None] * len(plan.workers)
    # Non-blocking: a named pipe that nobody reads is an error at once, not a launch that no signal can end.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    path = log_dir
    try:
        os.makedirs(log_dir, exist_ok=True)
        logs = []
        for worker in plan.workers:
            path = log_path(log_dir, worker.index)
            logs.append(Sink(os.open(path, flags, 0o666), name=path))
        for log in logs:  # Not before all could be opened: else the last run's logs would be lost for nothing.
            path = log.name
            if stat.S_ISREG(os.fstat(log.fd).st_mode):
                os.ftruncate(log.fd, 0)
    except OSError as error:
        hint = "--log-dir needs a directory that can be written"
        raise LaunchError("log cannot be written", value=path, source=error.strerror, hint=hint) from None
    return logs


def open_terminal(*, prefixed: bool) -> Terminal:
    """The sinks for this launch's own stdout and stderr. Raises: OSError."""
    out = Sink.of_descriptor(STDOUT, name="stdout")
    err = out if _same_file(STDOUT, STDERR) else Sink.of_descriptor(STDERR, name="stderr")
    return Terminal(out=out, err=err, prefixed=prefixed)


def _same_file(one: int, other: int) -> bool:
    a, b = os.fstat(one), os.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


@record(kw_only=False)
class _Destinations:
    """Where one worker's output goes: the terminal, a log, a figure, or none of them."""

    index: int
    terminal: Terminal | None
    log: Sink | None
    metric: Metric | None

    def stream(self, fd: int, shown: Sink | None, *, alone_in_log: bool) -> Stream:
        """The read end of a pipe, on its way to all these places."""
        prefix = b"[%d] " % self.index if self.terminal is not None and self.terminal.prefixed else b""
        routes = [OutputRoute(self.log, alone=alone_in_log)] if self.log else []
        if shown is not None:
            routes.append(OutputRoute(shown, prefix=prefix, alone=not prefix))
        os.set_blocking(fd, False)
        return Stream(fd, routes=routes, reader=self._reader())

    def _reader(self) -> LineReader | None:
        if self.metric is None:
            return None
        from cpulaunch.launch.output.metrics import LineReader

        return LineReader(self.metric)


def _open_pipes(destinations: _Destinations, *, stdin: int) -> tuple[StdioFds, tuple[Stream, ...]]:
    """One worker's descriptors and streams: one pipe for both where both go to the same places, in exact order."""
    terminal = destinations.terminal
    read, write = os.pipe()
    if terminal is None and destinations.log is None and destinations.metric is None:
        null = os.open(os.devnull, os.O_WRONLY)
        stdio = StdioFds(stdin=stdin, stdout=null, stderr=write, owned=(null, write))
        return stdio, (destinations.stream(read, None, alone_in_log=True),)
    if terminal is None or terminal.merged:
        stdio = StdioFds(stdin=stdin, stdout=write, stderr=write, owned=(write,))
        return stdio, (destinations.stream(read, None if terminal is None else terminal.out, alone_in_log=True),)
    read_err, write_err = os.pipe()
    stdio = StdioFds(stdin=stdin, stdout=write, stderr=write_err, owned=(write, write_err))
    out = destinations.stream(read, terminal.out, alone_in_log=False)
    return stdio, (out, destinations.stream(read_err, terminal.err, alone_in_log=False))
