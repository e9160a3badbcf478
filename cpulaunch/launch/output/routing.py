"""Where each worker's output goes: pipes, logs and the terminal, all opened before any worker starts."""

from __future__ import annotations

import os

from cpulaunch.launch.output.sink import Sink, SinkError
from cpulaunch.launch.output.streams import OutputRoute, Stream
from cpulaunch.launch.process.descriptors import STDERR, STDIN, STDOUT, StdioFds, stdio_error
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import record
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.writing import open_log, reopen_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpulaunch.launch.output.metrics import LineReader, Metric
    from cpulaunch.launch.process.bind import Notify

LINE_SECONDS = 0.2
"""How long a message waits for the reader of stderr to take the rest of a worker's line, before it stands inside it.

With the time that writing the message may take, it is less than ANSWER_SECONDS of the watchdog: no signal is read
meanwhile."""


@record
class OutputRouting:
    """All sinks of a launch, the descriptors that workers read (`stdin`), and for each worker one entry of the others.

    `stdio`: its descriptors; `streams`: its output, stderr last; `logs`: the path of its log; `metrics`: its metric.
    """

    sinks: tuple[Sink, ...]
    stdio: tuple[StdioFds, ...]
    streams: tuple[tuple[Stream, ...], ...]
    logs: tuple[str | None, ...]
    metrics: tuple[Metric | None, ...]
    stdin: tuple[int, ...]
    rotated: tuple[Sink, ...] = ()
    """Logs that SIGUSR1 opens again."""
    shown: frozenset[int] = frozenset()
    """The workers whose output is on the terminal."""
    stderr: Sink | None = None
    """Where workers' lines go to the launcher's own stderr."""

    def between_lines(self, notify: Notify | None, failed: Callable[[SinkError], None]) -> Notify | None:
        """A function that prints a message between lines of the workers; a line that does not end in time is broken.

        Then the message begins with a newline. Its effect: calls `failed` if the end of a line cannot be written.
        """
        if notify is None:
            return None

        def notify_between_lines(text: str) -> bool:
            lead = ""
            try:
                if self.stderr is not None and not self.stderr.end_line(LINE_SECONDS):
                    lead = "\n"
            except SinkError as error:
                failed(error)
            written = notify(lead + text)
            if lead and written and self.stderr is not None:
                self.stderr.line_was_broken()
            return written

        return notify_between_lines

    def end_line(self) -> None:
        """Effect: what the workers have written to the launcher's own stderr ends in a whole line, if it is taken."""
        try:
            if self.stderr is not None:
                self.stderr.end_line(LINE_SECONDS)
        except SinkError:
            return


@record
class Terminal:
    """The sinks for the launcher's own stdout and stderr; one sink if both are the same file."""

    out: Sink
    err: Sink
    prefixed: bool

    @property
    def merged(self) -> bool:
        return self.out is self.err


def open_output_routing(plan: LaunchPlan) -> OutputRouting:
    """The pipes and files of a launch. Raises: LaunchError if a log cannot be written or descriptors run out."""
    logs = open_logs(plan)
    try:
        return _open_routing(plan, logs)
    except OSError as error:
        raise stdio_error(error, of="workers", count=len(logs)) from None


def _open_routing(plan: LaunchPlan, logs: Sequence[Sink | None]) -> OutputRouting:
    shown = [plan.launch.show is None or worker.index in plan.launch.show for worker in plan.workers]
    terminal = open_terminal(plan, prefixed=sum(shown) > 1)
    inputs = worker_inputs(plan)
    metrics = open_metrics(plan)
    opened = [
        _open_pipes(_Destinations(worker.index, terminal if visible else None, log, metric), stdin=stdin)
        for worker, visible, log, metric, stdin in zip(plan.workers, shown, logs, metrics, inputs, strict=True)
    ]
    own = {id(sink): sink for sink in (terminal.out, terminal.err, *logs) if sink is not None}
    return OutputRouting(
        sinks=tuple(own.values()),
        stdio=tuple(stdio for stdio, _ in opened),
        streams=tuple(streams for _, streams in opened),
        logs=tuple(None if log is None else log.name for log in logs),
        metrics=metrics,
        stdin=tuple(set(inputs)),
        shown=frozenset(worker.index for worker, visible in zip(plan.workers, shown, strict=True) if visible),
        rotated=tuple(log for log in logs if log is not None),
        stderr=terminal.err,
    )


def close_output_routing(routing: OutputRouting) -> None:
    """Effect: closes the sinks and the workers' stdin. The streams close by themselves as they end."""
    for sink in routing.sinks:
        sink.close()
    for fd in routing.stdin:
        os.close(fd)


def open_metrics(plan: LaunchPlan) -> tuple[Metric | None, ...]:
    """One metric for each worker; None for all without --metric."""
    if plan.launch.metric is None:
        return (None,) * len(plan.workers)
    from cpulaunch.launch.output.metrics import Metric

    return tuple(Metric(plan.launch.metric) for _ in plan.workers)


def worker_inputs(plan: LaunchPlan) -> list[int]:
    """For each worker the descriptor that it reads, as --stdin says: cpulaunch's own, or nothing."""
    chosen, count = plan.launch.stdin, len(plan.workers)
    if chosen is None:
        return [worker_stdin(count)] * count
    null = os.open(os.devnull, os.O_RDONLY)
    own = null if os.isatty(STDIN) else os.dup(STDIN)
    return [own if chosen == "all" or str(worker.index) == chosen else null for worker in plan.workers]


def worker_stdin(workers: int) -> int:
    """The descriptor that workers read: a single worker reads cpulaunch's file or pipe, several read nothing.

    No worker reads a terminal: it would stop them, as they are in process groups of their own. A program that asks
    questions runs without logs, in the launcher's place.
    """
    if workers == 1 and not os.isatty(STDIN):
        return os.dup(STDIN)
    return os.open(os.devnull, os.O_RDONLY)


def log_path(log_dir: str, index: int) -> str:
    """The path of a worker's log."""
    return os.path.join(log_dir, f"worker-{index}.log")


def open_logs(plan: LaunchPlan) -> Sequence[Sink | None]:
    """The log of each worker, which is appended to; None for all without a log directory. Raises: LaunchError."""
    log_dir = plan.launch.log_dir
    if log_dir is None:
        return [None] * len(plan.workers)
    path = log_dir
    try:
        os.close(open_folder(log_dir, make=0o777))
        logs = []
        for worker in plan.workers:
            path = log_path(log_dir, worker.index)
            logs.append(Sink(_open_log(path, open_log), name=path))
    except OSError as error:
        hint = "--log-dir needs a writable directory"
        raise LaunchError("log cannot be written", value=path, source=error.strerror, hint=hint) from None
    return logs


def _open_log(path: str, opener: Callable[..., int]) -> int:
    """A descriptor that appends to the file, as rotating logs requires, and as two launches need to share it.

    `opener`: `open_log` or `reopen_log`. Effect: makes the folder of the file. Raises: OSError.
    """
    folder = open_folder(os.path.dirname(path), make=0o777)
    try:
        return opener(os.path.basename(path), folder=folder)
    finally:
        os.close(folder)


def reopen_logs(routing: OutputRouting) -> None:
    """Effect: the logs are written to new files where theirs were renamed.

    One stays as it is if it cannot be opened, or if something else than a file is in its place.
    """
    for log in routing.rotated:
        try:
            new = _open_log(log.name, reopen_log)
        except OSError:
            continue
        os.dup2(new, log.fd, inheritable=False)
        os.close(new)


def open_terminal(plan: LaunchPlan, *, prefixed: bool) -> Terminal:
    """The sinks for this launch's own stdout and stderr; only stderr if a report goes to stdout. Raises: OSError."""
    if plan.launch.reports_on_stdout:
        err = Sink.for_inherited(STDERR, name="stderr")
        return Terminal(out=err, err=err, prefixed=prefixed)
    out = Sink.for_inherited(STDOUT, name="stdout")
    same = os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
    err = out if same else Sink.for_inherited(STDERR, name="stderr")
    return Terminal(out=out, err=err, prefixed=prefixed)


@record(kw_only=False)
class _Destinations:
    """Where one worker's output goes: the terminal, a log, a metric, or none of them."""

    index: int
    terminal: Terminal | None
    log: Sink | None
    metric: Metric | None

    def stream(self, fd: int, shown: Sink | None, *, sole_writer: bool) -> Stream:
        """The read end of a pipe, routed to the log, the metric and `shown`. `sole_writer`: no other writes the log."""
        prefix = b"[%d] " % self.index if self.terminal is not None and self.terminal.prefixed else b""
        routes = [OutputRoute(self.log, exclusive=sole_writer)] if self.log else []
        if shown is not None:
            routes.append(OutputRoute(shown, prefix=prefix, exclusive=not prefix))
        os.set_blocking(fd, False)
        return Stream(fd, routes=routes, reader=self._reader())

    def _reader(self) -> LineReader | None:
        if self.metric is None:
            return None
        from cpulaunch.launch.output.metrics import LineReader

        return LineReader(self.metric)


def _open_pipes(destinations: _Destinations, *, stdin: int) -> tuple[StdioFds, tuple[Stream, ...]]:
    """One worker's descriptors and streams.

    stdout and stderr share one pipe where both have the same destinations, which keeps their exact order.
    """
    terminal = destinations.terminal
    read, write = os.pipe()
    if terminal is None and destinations.log is None and destinations.metric is None:
        null = os.open(os.devnull, os.O_WRONLY)
        stdio = StdioFds(stdin=stdin, stdout=null, stderr=write, owned=(null, write))
        return stdio, (destinations.stream(read, None, sole_writer=True),)
    if terminal is None or terminal.merged:
        stdio = StdioFds(stdin=stdin, stdout=write, stderr=write, owned=(write,))
        return stdio, (destinations.stream(read, None if terminal is None else terminal.out, sole_writer=True),)
    read_err, write_err = os.pipe()
    stdio = StdioFds(stdin=stdin, stdout=write, stderr=write_err, owned=(write, write_err))
    out = destinations.stream(read, terminal.out, sole_writer=False)
    return stdio, (out, destinations.stream(read_err, terminal.err, sole_writer=False))
