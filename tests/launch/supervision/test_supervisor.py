"""The supervisor handles signals in time, however long it takes to search the output for a metric."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from cpulaunch.launch.supervision.state_machine import SignalArrived, SupervisionState, WorkerEnded, step
from cpulaunch.launch.supervision.supervisor import Supervisor
from cpulaunch.system.libc import is_linux
from cpulaunch.system.signals import ENDING, SIGTERM
from tests.launch.launching import python
from tests.strangers import UID, needs_root

COMMON = """
    import os, sys, time
    from signal import SIGTERM
    from cpulaunch.launch.output.routing import OutputRouting
    from cpulaunch.launch.output.streams import Stream
    from cpulaunch.launch.process.bind import UNBOUND
    from cpulaunch.launch.process.descriptors import StdioFds
    from cpulaunch.launch.process.exec_spec import ExecSpec
    from cpulaunch.launch.process.spawn import Inherited
    from cpulaunch.launch.supervision.options import SupervisorOptions
    from cpulaunch.launch.supervision.supervisor import Supervisor
    from cpulaunch.system.libc import private_pipe

    control, guard = private_pipe()
"""
READING = """
    seen = []

    class Reader:
        def feed(self, data):
            seen.append(supervisor.state.ended_by)
            os.write(guard, bytes([SIGTERM]))

        def finish(self):
            pass

    def stream():
        read, write = os.pipe()
        os.write(write, b"line")
        os.set_blocking(read, False)
        return Stream(read, routes=[], reader=Reader())

    argv = ("/bin/sleep", "600")
    specs = [ExecSpec(worker=0, path=argv[0], argv=argv, environ={}, binding=UNBOUND)][: int(sys.argv[1])]
    streams = (stream(), stream())
    routing = OutputRouting(sinks=(), stdio=(), streams=(streams,), logs=(), metrics=(), stdin=())
    options = SupervisorOptions(inherited=Inherited(signal_mask=frozenset()), grace_seconds=600, control=control)
    with Supervisor(routing, options, clock=time.monotonic, wall_clock=time.time) as supervisor:
        supervisor.start(specs, [StdioFds(stdin=0, stdout=1, stderr=2, owned=())] * len(specs))
        supervisor.run()
    print(seen)
"""


@pytest.mark.parametrize("workers", [1, 0], ids=["while a worker runs", "after all have ended"])
def test_a_signal_is_handled_before_more_output_is_read(workers):
    done = subprocess.run(
        python(COMMON + READING, str(workers)), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[None, 15]\n", done.stderr


IMPORTING = """
    from types import SimpleNamespace

    passed = []
    cgroup = SimpleNamespace(wait_until_inside=lambda *, meanwhile: passed.append(meanwhile))
    watch = SimpleNamespace(register=lambda poll: None, close=lambda: None)
    routing = OutputRouting(sinks=(), stdio=(), streams=(), logs=(), metrics=(), stdin=())
    for each in (None, watch):
        options = SupervisorOptions(
            inherited=Inherited(signal_mask=frozenset()),
            grace_seconds=600,
            control=control,
            cgroup=cgroup,
            watch=each,
            on_started=print,
        )
        with Supervisor(routing, options, clock=time.monotonic, wall_clock=time.time) as supervisor:
            supervisor.start((), ())
    print(passed == [print, None])
"""


def test_reports_are_not_imported_before_the_workers_start():
    """It takes longer than the kernel takes to move the supervisor into its cgroup."""
    done = subprocess.run(python(COMMON + IMPORTING), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n", done.stderr


RECEIVER = """
    import fcntl, threading
    from cpulaunch.launch.output.sink import Sink
    from cpulaunch.launch.output.streams import OutputRoute

    SIZE, GRACE = 1 << 18, 0.5
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    found = []

    def receive():
        while supervisor.state.ended_by is None:
            time.sleep(0.01)
        while data := os.read(received, 1 << 16):
            found.append(data)

    class Reader:
        seen = 0

        def feed(self, data):
            if not self.seen:
                os.write(guard, bytes([SIGTERM]))
            self.seen += len(data)

        def finish(self):
            pass

    reads, runs, ends = (sys.argv[1:] == [case] for case in ("reads", "runs", "ends"))
    output, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, SIZE)
    os.write(write, bytes(SIZE))
    os.set_blocking(output, False)
    sink = Sink(sent, name="the receiver")
    stream = Stream(output, routes=[OutputRoute(sink, exclusive=True)], reader=Reader())
    argv = ("/bin/sleep", "600")
    specs = [ExecSpec(worker=0, path=argv[0], argv=argv, environ={}, binding=UNBOUND)] if runs or ends else []
    routing = OutputRouting(sinks=(sink,), stdio=(), streams=((stream,),), logs=(), metrics=(), stdin=())
    options = SupervisorOptions(
        inherited=Inherited(signal_mask=frozenset()),
        grace_seconds=GRACE + 600 * ends,
        control=control,
        ending_seconds=lambda failed: 600 * ends,
    )
    clock = (lambda: 0.0) if reads else time.monotonic  # A busy machine lets no time pass.
    begun = time.monotonic()
    with Supervisor(routing, options, clock=clock, wall_clock=time.time) as supervisor:
        supervisor.start(specs, [StdioFds(stdin=0, stdout=1, stderr=2, owned=())] * len(specs))
        receiver = threading.Thread(target=receive, daemon=True)
        if reads:
            receiver.start()
        supervisor.run()
    seconds = time.monotonic() - begun
    os.close(sent)
    if reads:
        receiver.join()
    print(sum(map(len, found)) == (SIZE if reads else 0), seconds < GRACE + 10)
"""


@pytest.mark.skipif(not is_linux(), reason="only Linux makes pipes larger")
@pytest.mark.parametrize("case", ["reads", "reads nothing", "runs", "ends"])
def test_a_signal_leaves_the_receiver_of_output_some_time(case):
    """`reads`: it does, from the signal on. Else it never does: the workers have ended, or one still `runs`.

    `ends`: a launcher has time of its own to end, which the receiver does not get.
    """
    done = subprocess.run(python(COMMON + RECEIVER, case), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True True\n", done.stderr


FULL = """
    from cpulaunch.launch.output.sink import Sink
    from cpulaunch.launch.output.streams import OutputRoute

    def stream(sink, text):
        read, write = os.pipe()
        os.write(write, text)
        os.set_blocking(read, False)
        return Stream(read, routes=[OutputRoute(sink, exclusive=False)])

    sinks = (Sink(os.open("/dev/full", os.O_WRONLY), name="the full one"), Sink(1, name="the other"))
    streams = (stream(sinks[0], b"first"), stream(sinks[1], b"last words"))
    routing = OutputRouting(sinks=sinks, stdio=(), streams=(streams,), logs=(), metrics=(), stdin=())
    options = SupervisorOptions(inherited=Inherited(signal_mask=frozenset()), grace_seconds=600, control=control)
    with Supervisor(routing, options, clock=time.monotonic, wall_clock=time.time) as supervisor:
        supervisor.start([], [])
        supervisor.run()
        os.write(2, supervisor.output_error.filename.encode())
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_what_one_output_does_not_take_at_the_end_keeps_no_other_from_its_last_line():
    done = subprocess.run(python(COMMON + FULL), capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == ("last words", "the full one")


WITHOUT_OUTPUT = """
    argv = ("/bin/sh", "-c", sys.argv[1])
    spec = ExecSpec(worker=0, path=argv[0], argv=argv, environ={}, binding=UNBOUND)
    routing = OutputRouting(sinks=(), stdio=(), streams=((),), logs=(), metrics=(), stdin=())
    options = SupervisorOptions(inherited=Inherited(signal_mask=frozenset()), grace_seconds=600, control=control)
    with Supervisor(routing, options, clock=time.monotonic, wall_clock=time.time) as supervisor:
        supervisor.start([spec], [StdioFds(stdin=0, stdout=1, stderr=2, owned=())])
"""
BYTES = """
        os.write(guard, bytes(range(65, 256)) + bytes([0, 32, 33]))
        supervisor.run()
    print(supervisor.statuses)
"""
CHILDREN = """
        def children():
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                return len(file.read().split())
        for _ in range(1000):
            if os.fork() == 0:
                os._exit(0)
        time.sleep(1)
        supervisor._wait()
        print(children() > 1)
        supervisor.run()
    print(supervisor.statuses)
"""
OF_ANOTHER_USER = """
        os.write(guard, bytes([SIGTERM]))
        supervisor._notify = print
        os.setresuid(UID, UID, UID)
        supervisor.state = replace(supervisor.state, grace_seconds=0.1)
        supervisor.run()
    print(supervisor.statuses, *supervisor.pids.values())
"""


@needs_root
def test_a_worker_that_may_not_be_signalled_is_left():
    """As a setuid program: here it is not the worker but the supervisor that becomes another user."""
    code = OF_ANOTHER_USER.replace("UID", str(UID))
    start = f"{COMMON}    from cpulaunch.records.record import replace\n{WITHOUT_OUTPUT}{code}"
    command = python(start, "exec sleep 600 >&- 2>&-")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *_, pid = done.stdout.split()
    os.kill(int(pid), signal.SIGKILL)
    said = f"worker 0 runs as another user and could not be ended: process {pid} is left"
    assert done.stdout.splitlines() == [said, f"{{0: -9}} {pid}"]


def test_a_number_that_is_no_signal_is_ignored():
    """A process with a copy of the guard's end of the pipe may write any byte."""
    done = subprocess.run(python(COMMON + WITHOUT_OUTPUT + BYTES, "exit 4"), capture_output=True, text=True, check=True)
    assert done.stdout == "{0: 4}\n", done.stderr


@pytest.mark.skipif(not os.path.exists(f"/proc/self/task/{os.getpid()}/children"), reason="needs Linux's /proc")
def test_children_that_end_all_the_time_delay_nothing_else():
    """A worker may start children of the supervisor (CLONE_PARENT) faster than they are reaped."""
    code = python(COMMON + WITHOUT_OUTPUT + CHILDREN, "sleep 3; exit 4")
    done = subprocess.run(code, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n{0: 4}\n", done.stderr


def said_after_ctrl_c(state, now):
    """What a supervisor says some time after a SIGINT has arrived, up to the number of seconds."""
    said = []
    supervisor = SimpleNamespace(state=state, _notify=said.append, _clock=lambda: now)
    Supervisor._say_what_is_left(supervisor)
    return [line.partition(" for ")[0] for line in said]


@pytest.mark.parametrize(
    ("deadlines", "seconds"),
    [
        ({0: 140.0}, "31 seconds"),
        ({0: 109.1, 1: 110.0}, "1 second"),
        ({0: 109.01}, None),  # As with --grace 1.
        ({0: 105.5}, None),  # The supervisor had no CPU for so long, or was stopped.
        ({}, None),
    ],
)
def test_after_ctrl_c_the_rest_of_the_grace_period_is_named(deadlines, seconds):
    """Some of it may be over, as the launch ends since a SIGTERM."""
    state = SupervisionState(grace_seconds=40, groups=frozenset({0, 1}), deadlines=deadlines, interrupted=True)
    expected = [] if seconds is None else [f"interrupted: waiting up to {seconds}"]
    assert said_after_ctrl_c(state, 109.01) == expected


@pytest.mark.parametrize(("ending", "expected"), [(ENDING, ["interrupted: waiting up to 28 seconds"]), ({SIGTERM}, [])])
def test_nothing_is_said_of_the_end_after_a_ctrl_c_that_is_only_forwarded(ending, expected):
    """A worker that has ended has a deadline for the processes that it left, but the others run on."""
    state = SupervisionState(grace_seconds=30, groups=frozenset({0, 1}), ending_signals=frozenset(ending))
    for event, at in ((WorkerEnded(0, failed=False), 100.0), (SignalArrived(signal.SIGINT), 100.5)):
        state, _ = step(state, event, at)
    assert said_after_ctrl_c(state, 102.5) == expected
