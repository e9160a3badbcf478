"""Jobs as torchrun and as cpulaunch run them, and what became of them, in a form that can be compared."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.forked import Forked

HERE = Path(__file__).parent
OF_TORCHRUN = ("torch.distributed.launcher.api",)
"""What takes torchrun seconds to import."""
TIMEOUT_SECONDS = 400
INHERITED = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "PYTHONPATH")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def knows_torchrun(option):
    """Whether the installed torchrun has this option."""
    torch = find_spec("torch")
    return torch is not None and option in (Path(torch.origin).parent / "distributed/run.py").read_text()


@dataclass
class Job:
    """What a job left: its exit code, output, log files by path, and what each rank saw in each attempt."""

    code: int
    out: list[str]
    err: str
    files: dict[str, list[str]] = field(default_factory=dict)
    seen: dict[tuple[int, int], dict] = field(default_factory=dict)


def start(tool, folder, arguments, *, env=None):
    """The started job; its ranks write to `folder`/seen, its logs go below `folder`/logs."""
    (folder / "seen").mkdir(parents=True)
    (folder / "tmp").mkdir()
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environ = {**inherited, "SEEN": str(folder / "seen"), "TMPDIR": str(folder / "tmp"), **(env or {})}
    if tool == "torchrun":
        return Forked(["-m", "torch.distributed.run", *arguments], environ, modules=OF_TORCHRUN, folder=folder)
    return subprocess.Popen(
        [sys.executable, "-m", "cpulaunch", *arguments],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, folder):
    """What became of it."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    return Job(
        code=process.returncode,
        out=sorted(out.splitlines()),
        err=err,
        files=log_files(folder / "logs"),
        seen={attempt_and_rank(path): json.loads(path.read_text()) for path in (folder / "seen").glob("*.json")},
    )


def run(tool, folder, arguments, *, env=None):
    return finish(start(tool, folder, arguments, env=env), folder)


def attempt_and_rank(path):
    attempt, rank, _ = path.name.split(".")
    return int(attempt), int(rank)


def log_files(logs):
    """Path -> sorted lines; the random part of the run's folder is left out, of error files the content too."""
    files = {}
    for path in sorted(logs.rglob("*")):
        if path.is_file():
            name = re.sub(r"^(UUID|none)_[^/]+/", r"\1/", UUID.sub("UUID", str(path.relative_to(logs))))
            files[name] = [] if path.name == "error.json" else sorted(path.read_text().splitlines())
    return files


def free_port():
    """A port below the range from which the kernel chooses ports for other sockets."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(20000, 32768)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return str(port)


def eventually(condition, what="condition"):
    """What the condition came to; a deadline only keeps a broken build from hanging."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
    return value


def text_of(path):
    """The content of a file that a rank renames into place."""
    return eventually(lambda: path.exists() and path.read_text(), f"a text in {path.name}")


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
