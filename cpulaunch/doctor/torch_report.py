"""What the worker's torch says of itself, asked in a process of its own."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 120.0
"""A cold `import torch` from a network file system took 40 s (ecmwf/anemoi-core issue 1327)."""

QUESTION = """\
import json, sys
sys.path[:] = [folder for folder in sys.path if folder]  # not the current folder's torch.py
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    print(json.dumps({"absent": True}))
    sys.exit()
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
files = {line.split(None, 5)[5].strip() for line in maps.splitlines() if line.count("/")}
names = ("libgomp", "libiomp5", "libomp")
print(json.dumps({
    "version": str(torch.__version__),
    "mkl": torch.backends.mkl.is_available(),
    "onednn": torch.backends.mkldnn.is_available(),
    "openmp": torch.backends.openmp.is_available(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "openmp_files": sorted(name for name in files if name.rsplit("/", 1)[-1].startswith(names)),
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a program ended and what it wrote; `exit_code` None: it could not be started or did not end."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""


Runner = Callable[[Sequence[str], Mapping[str, str]], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch said of itself."""

    version: str
    mkl: bool
    onednn: bool
    openmp: bool
    capability: str
    threads: int
    openmp_files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTorch:
    """A torch that does not import, and its last words."""

    reason: str


def run_program(argv: Sequence[str], environ: Mapping[str, str]) -> Answer:
    """What a program answered. Effect: starts it and waits for its end, at most SECONDS."""
    try:
        done = subprocess.run(
            list(argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(exit_code=None, stderr=f"no answer within {SECONDS:g} s")
    except OSError as error:
        return Answer(exit_code=None, stderr=f"{argv[0]} cannot be started: {error.strerror}")
    return Answer(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def ask_torch(interpreter: str, environ: Mapping[str, str], *, run: Runner) -> TorchFacts | BrokenTorch | None:
    """What the interpreter's torch says of itself; None if it has no torch."""
    answer = run([interpreter, "-c", QUESTION], environ)
    if answer.exit_code != 0:
        return BrokenTorch(reason=_last_words(answer))
    try:
        # Imports may print too: the answer is the last line.
        said = json.loads(answer.stdout.strip().splitlines()[-1])
        return None if said.get("absent") is True else _facts(said)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        return BrokenTorch(reason="it answered nothing that can be read")


def _facts(said: Mapping[str, Any]) -> TorchFacts:
    return TorchFacts(
        version=str(said["version"]),
        mkl=bool(said["mkl"]),
        onednn=bool(said["onednn"]),
        openmp=bool(said["openmp"]),
        capability=str(said["capability"]),
        threads=int(said["threads"]),
        openmp_files=tuple(str(name) for name in said["openmp_files"]),
    )


def _last_words(answer: Answer) -> str:
    """The last line of stderr, which for an exception is its type and message; else how the program ended."""
    lines = answer.stderr.strip().splitlines()
    if lines:
        return lines[-1].strip()
    if answer.exit_code is not None and answer.exit_code < 0:
        return f"killed by signal {-answer.exit_code}"
    return f"ended with exit code {answer.exit_code}"
