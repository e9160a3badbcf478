"""A launcher in a process of its own for the launch tests, and checks of processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from cpulaunch.launch.process.watchdog import INTERRUPT_SECONDS

HERE = Path(__file__).parent
DEADLINE_SECONDS = 240


def python(code, *args):
    """The argv of a Python worker."""
    return [sys.executable, "-u", "-c", textwrap.dedent(code), *args]


def shell(code):
    return ["/bin/sh", "-c", code]


def eventually(condition, what="condition"):
    """Waits until the condition holds; a deadline only keeps a broken build from hanging."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
    return value


def interrupt_again(process):
    """The exit code of a launch after more than one Ctrl-C: others soon after the first one do not count."""
    while process.poll() is None:
        time.sleep(INTERRUPT_SECONDS)
        process.send_signal(signal.SIGINT)
    return process.wait()


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def sleeps(pid):
    """Whether the process is not woken for two seconds, by a count of switches: earlier work may take any time."""
    before = switches(pid)
    time.sleep(2)
    return switches(pid) == before


def switches(pid):
    """How often the process has been scheduled."""
    with open(f"/proc/{pid}/status") as file:
        return [line for line in file if "ctxt_switches" in line]


class Launcher:
    """Starts the driver on plans; `pids` are those that workers wrote to files of the test's directory."""

    def __init__(self, tmp_path):
        self.dir = tmp_path
        self.started = []

    def start(self, *workers, memory_events=None, prefix=(), env=None, popen=None, **launch):
        described = [worker if isinstance(worker, dict) else {"argv": worker} for worker in workers]
        plan = {"workers": described, "launch": launch, "memory_events": memory_events}
        path = self.dir / f"plan-{len(self.started)}.json"
        path.write_text(json.dumps(plan))
        process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "driver.py"), str(path)],
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "cwd": self.dir,
                "env": {**os.environ, "PYTHONPATH": str(HERE.parent.parent), **(env or {})},
                **(popen or {}),
            },
        )
        self.started.append(process)
        return process

    def run(self, *workers, **options):
        process = self.start(*workers, **options)
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
        return Outcome(process.returncode, out, err)

    def end(self):
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()

    def pid(self, name):
        """The pid that a worker wrote to a file of this name."""
        path = self.dir / name
        text = eventually(lambda: path.exists() and path.read_text().strip(), f"a pid in {name}")
        return int(text)


class Outcome:
    def __init__(self, code, out, err):
        self.code = code
        self.out = out
        self.err = err

    @property
    def lines(self):
        return self.out.decode().splitlines()

    @property
    def error(self):
        return self.err.decode()


def refusing(*calls, code):
    """A command line under which the kernel refuses these system calls with this errno."""
    return [sys.executable, str(HERE / "refusing.py"), ",".join(calls), str(code)]


INHERITING = """
import os, sys
for _ in range(int(sys.argv[1])):
    os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def inheriting(descriptors, limit):
    """A command line for a launch that inherits so many more descriptors, under a limit on open files."""
    command = f'ulimit {limit}; exec "$@"'
    return ["/bin/bash", "-c", command, "bash", sys.executable, "-c", INHERITING, str(descriptors)]
