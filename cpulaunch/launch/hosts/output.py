"""The output of a job of several hosts: a named pipe for each rank, as torch's agent would mix them all into one.

torch's ranks share the agent's stdout and stderr, where two writes of one line let another rank's in between. The shim
gives each rank a pipe of its own instead, so that lines stay whole and a failed rank's last lines can be quoted.
"""

from __future__ import annotations

import os

from cpulaunch.launch.hosts.agent.files import agent_pipe, rank_pipe
from cpulaunch.launch.output.routing import STDERR, STDOUT, StdioFds
from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import OutputRoute, Stream
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


@record
class JobOutput:
    """All pipes of a job on this host. `ranks` are each rank's streams, stderr last; `pipes` what its shim is told.

    `held` keeps the pipes open while no rank is there, from one attempt to the next.
    """

    sinks: tuple[Sink, ...]
    agent: StdioFds
    agent_streams: tuple[Stream, ...]
    ranks: tuple[tuple[Stream, ...], ...]
    pipes: tuple[dict[int, tuple[str, str]], ...]
    held: tuple[int, ...]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Every stream, the agent's stderr last."""
        return (*(stream for streams in self.ranks for stream in streams), *self.agent_streams)


def open_job_output(directory: str, ranks: Iterable[int], *, shown: Iterable[bool], stdin: int) -> JobOutput:
    """The pipes of these local ranks, made in the run's directory. Raises: OSError."""
    out = Sink.of_descriptor(STDOUT, name="stdout")
    merged = os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
    err = out if merged else Sink.of_descriptor(STDERR, name="stderr")
    sinks = {STDOUT: out} if merged else {STDOUT: out, STDERR: err}
    held: list[int] = []
    shared = {number: agent_pipe(directory, number) for number in sinks}
    agent_streams = tuple(_stream(shared[number], sink, held) for number, sink in sinks.items())
    stdio = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in shared.values()]
    streams, pipes = [], []
    for local_rank, visible in zip(ranks, shown, strict=True):
        own = {number: rank_pipe(directory, local_rank, number) for number in sinks}
        streams.append(tuple(_stream(own[number], sink if visible else None, held) for number, sink in sinks.items()))
        pipes.append({n: (own[n if n in own else STDOUT], shared[n if n in own else STDOUT]) for n in (STDOUT, STDERR)})
    return JobOutput(
        sinks=tuple(sinks.values()),
        agent=StdioFds(stdin=stdin, stdout=stdio[0], stderr=stdio[-1], owned=tuple(stdio)),
        agent_streams=agent_streams,
        ranks=tuple(streams),
        pipes=tuple(pipes),
        held=tuple(held),
    )


def _stream(path: str, sink: Sink | None, held: list[int]) -> Stream:
    """The read end of a new named pipe, whose lines reach the sink whole. Effect: holds the pipe open."""
    os.mkfifo(path, 0o600)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    held.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    return Stream(read, routes=[] if sink is None else [OutputRoute(sink, alone=False)])
