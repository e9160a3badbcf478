"""Two hosts on one machine: network namespaces with an address each, joined by a veth pair."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEADLINE_SECONDS = 480
MARK = "CPULAUNCH_TEST_MARK"
LEAKY = ("OMP_NUM_THREADS", "LD_PRELOAD", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "MKL_NUM_THREADS")


def denied():
    """Why network namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "no program ip"
    name = f"cl{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return made.stderr.strip()
    veth = ["link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b"]
    try:
        tried = subprocess.run(["ip", "-n", name, *veth], capture_output=True, text=True, check=False)
        return tried.stderr.strip() or None
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def eventually(condition, what):
    """Waits until the condition holds; the deadline only keeps a broken build from hanging."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)
    return value


def marked(mark):
    """The live processes whose environment, as they were executed, has the mark."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if wanted in (process / "environ").read_bytes() + b"\0":
                    found.append(int(process.name))
            except OSError:
                continue
    return found


class Network:
    """Two hosts, `a` (10.77.0.1) and `b` (10.77.0.2); what runs on them is ended when it closes."""

    def __init__(self, directory):
        self.dir = directory
        self.id = f"cl{secrets.token_hex(4)}"
        self.runs = []

    def open(self):
        for host in ("a", "b"):
            self._ip("netns", "add", self._namespace(host))
            self._ip("-n", self._namespace(host), "link", "set", "lo", "up")
        a, b = f"{self.id}a", f"{self.id}b"
        self._ip("-n", a, "link", "add", "up0", "type", "veth", "peer", "name", "up0", "netns", b)
        for host, address in (("a", "10.77.0.1/24"), ("b", "10.77.0.2/24")):
            self._ip("-n", self._namespace(host), "addr", "add", address, "dev", "up0")
            self._ip("-n", self._namespace(host), "link", "set", "up0", "up")

    def close(self):
        for run in self.runs:
            run.end()
        for host in ("a", "b"):
            subprocess.run(["ip", "netns", "del", self._namespace(host)], capture_output=True, check=False)

    def _ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def _namespace(self, host):
        return f"{self.id}{host}"

    def listeners(self, host):
        """The TCP sockets that listen on a host, and whose they are, as `ss` prints them."""
        command = ["ip", "netns", "exec", self._namespace(host), "ss", "-Htlnp"]
        return subprocess.run(command, capture_output=True, check=True).stdout

    def start(self, host, *command, env=None):
        """A command on a host; its own pid is the run's."""
        run = Run(self, host, len(self.runs), ["ip", "netns", "exec", self._namespace(host), *command], env or {})
        self.runs.append(run)
        return run

    def cpulaunch(self, host, *arguments, env=None):
        return self.start(host, sys.executable, "-m", "cpulaunch", *map(str, arguments), env=env)

    def torchrun(self, host, *arguments, env=None):
        return self.start(host, sys.executable, "-m", "torch.distributed.run", *map(str, arguments), env=env)


class Machines(Network):
    """Two hosts with names, processes and a /dev/shm of their own: as far apart as one kernel lets them be."""

    def start(self, host, *command, env=None):
        line = f'hostname {self.id}{host} && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        apart = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return super().start(host, *apart, "sh", "-c", line, "sh", *command, env=env)


class Local:
    """This machine as the only host, without a network of its own."""

    def __init__(self, directory):
        self.dir = directory
        self.id = f"cl{secrets.token_hex(4)}"
        self.runs = []

    def cpulaunch(self, *arguments):
        run = Run(self, "this", len(self.runs), [sys.executable, "-m", "cpulaunch", *map(str, arguments)], {})
        self.runs.append(run)
        return run

    def close(self):
        for run in self.runs:
            run.end()


class Run:
    """One launcher on a host, its output in files."""

    def __init__(self, network, host, number, command, env):
        self.host = host
        self.mark = f"{network.id}-{number}"
        self._out, self._err = network.dir / f"run-{number}.out", network.dir / f"run-{number}.err"
        inherited = {name: value for name, value in os.environ.items() if name not in LEAKY}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=network.dir,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**inherited, "PYTHONPATH": str(ROOT), "TMPDIR": str(network.dir), MARK: self.mark, **env},
            )

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text()

    @property
    def reports(self):
        """The whole lines of stdout that are JSON, as the ranks of these tests write them."""
        return [json.loads(line) for line in self.out.split("\n")[:-1] if line.startswith("{")]

    def wait(self):
        """The exit code; all that was said if it does not come."""
        try:
            return self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"host {self.host} hangs:\n{self.out}\n{self.err}") from None

    def kill(self):
        """Effect: the process the user started is killed, and nothing else."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def gone(self):
        """Effect: waits until nothing is left of it on this host."""
        eventually(lambda: not marked(self.mark), f"nothing left on host {self.host}: {marked(self.mark)}")

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in marked(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
