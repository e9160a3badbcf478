"""The output of a job of several hosts: named pipes for each rank, as torch's agent would mix the ranks' lines.

torch's ranks inherit the agent's stdout and stderr, where another rank can write between two writes of one line. The
shim gives each rank pipes of its own instead, so that lines stay whole and a failed rank's last lines can be quoted.
What the agent shows of logs has pipes of its own too: torch prints messages whenever it wants, some from C++.
"""

from __future__ import annotations

import os

from cpulaunch.launch.hosts.agent.files import agent_pipe, logs_pipe, rank_pipe
from cpulaunch.launch.hosts.agent.messages import RankPipe
from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import OutputRoute, Stream
from cpulaunch.launch.process.descriptors import STDERR, STDOUT, StdioFds
from cpulaunch.records.record import record
from cpulaunch.system.files.writing import make_pipe, open_output_pipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


@record
class JobOutput:
    """All pipes of a job on this host. `ranks`: each rank's streams, stderr last; `pipes`: what each rank's shim gets.

    `write_ends` keep the pipes open between attempts, while no rank has them open.
    """

    sinks: tuple[Sink, ...]
    agent: StdioFds
    agent_streams: tuple[Stream, ...]
    ranks: tuple[tuple[Stream, ...], ...]
    pipes: tuple[tuple[RankPipe, ...], ...]
    write_ends: tuple[int, ...]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Every stream, the agent's stderr last."""
        return (*(stream for streams in self.ranks for stream in streams), *self.agent_streams)


def open_job_output(directory: str, ranks: Iterable[int], *, shown: Iterable[bool], stdin: int) -> JobOutput:
    """The pipes of these local ranks, made in the run's directory. Raises: OSError."""
    out = Sink.for_inherited(STDOUT, name="stdout")
    merged = os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
    err = out if merged else Sink.for_inherited(STDERR, name="stderr")
    sinks = {STDOUT: out} if merged else {STDOUT: out, STDERR: err}
    write_ends: list[int] = []
    agent_paths = {number: agent_pipe(directory, number) for number in sinks}
    shown_logs = [_stream(logs_pipe(directory, number), sink, write_ends) for number, sink in sinks.items()]
    agent_streams = [_stream(agent_paths[number], sink, write_ends) for number, sink in sinks.items()]
    agent_fds = [open_output_pipe(path) for path in agent_paths.values()]
    streams, pipes = [], []
    for local_rank, visible in zip(ranks, shown, strict=True):
        paths = {number: rank_pipe(directory, local_rank, number) for number in sinks}
        streams.append(tuple(_stream(paths[n], sink if visible else None, write_ends) for n, sink in sinks.items()))
        source = {STDOUT: STDOUT, STDERR: STDOUT if merged else STDERR}
        pipes.append(tuple(RankPipe(descriptor=n, path=paths[s], agent_path=agent_paths[s]) for n, s in source.items()))
    return JobOutput(
        sinks=tuple(sinks.values()),
        agent=StdioFds(stdin=stdin, stdout=agent_fds[0], stderr=agent_fds[-1], owned=tuple(agent_fds)),
        agent_streams=(*shown_logs, *agent_streams),
        ranks=tuple(streams),
        pipes=tuple(pipes),
        write_ends=tuple(write_ends),
    )


def _stream(path: str, sink: Sink | None, write_ends: list[int]) -> Stream:
    """The read end of a new named pipe, whose lines reach the sink whole. Effect: opens a write end that stays open."""
    read, write = make_pipe(path)
    write_ends.append(write)
    return Stream(read, routes=[] if sink is None else [OutputRoute(sink, exclusive=False)])
