"""The supervisor handles signals in time, however long it takes to search the output for a metric."""

import subprocess

import pytest

from tests.launch.launching import python

READING = """
    import os, sys, time
    from signal import SIGTERM
    from cpulaunch.launch.output.routing import OutputRouting
    from cpulaunch.launch.output.streams import Stream
    from cpulaunch.launch.process.bind import UNBOUND
    from cpulaunch.launch.process.descriptors import StdioFds
    from cpulaunch.launch.process.exec_spec import ExecSpec
    from cpulaunch.launch.process.spawn import Inherited
    from cpulaunch.launch.supervision.supervisor import Supervisor, SupervisorOptions
    from cpulaunch.system.libc import private_pipe

    control, guard = private_pipe()
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
    done = subprocess.run(python(READING, str(workers)), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[None, 15]\n", done.stderr
