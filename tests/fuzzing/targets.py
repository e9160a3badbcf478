"""What scripts/fuzz throws bytes at: input from other people and programs, and what must hold for each.

A target either accepts its input or raises one of the documented errors, whose message is one sentence and one hint;
it takes little time, and never ends in a traceback.
"""

import json
import os
import shlex
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.cli.pet_variables import with_pet_variables
from cpulaunch.cli.run import _emit, request_for
from cpulaunch.launch.monitor.worker_report import read_event_file
from cpulaunch.launch.supervision.error_file import read_error
from cpulaunch.plan.planner import make_plan
from cpulaunch.probe import probe_host
from cpulaunch.profile.file import profile_errors, read_profile
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.endpoint import split_endpoint, with_brackets
from cpulaunch.records.errors import CpulaunchError, escaped
from cpulaunch.records.host import Host
from cpulaunch.schedulers.layer import scheduler_layer
from cpulaunch.schedulers.slurm_lists import MOST_HOSTS, expand_counts, expand_hosts
from cpulaunch.schedulers.task import Machine
from cpulaunch.view.host_view import probe_json, probe_text
from cpulaunch.view.machine_svg import machine_svg
from cpulaunch.view.plan_view import plan_json, plan_text
from tests.roots import MemoryRoot, RootSpec, root_files

MAX_SECONDS = 2.0
"""CPU time for one input of at most 4 KiB; what cannot be computed within it is refused."""

LONGEST_MESSAGE = 1300
FILES = root_files(RootSpec(sockets=2, numa_per_socket=2, smt=2, cgroup="v2", quota_cpus=6.5))
HOST = probe_host(MemoryRoot(FILES), interpreter="/venv/bin/python", environ={}, detail="full")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A function that takes bytes, with examples of valid input and words of its language."""

    check: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = (CpulaunchError,)
    separator: bytes = b""


def run(target: Target, data: bytes, *, max_seconds: float = MAX_SECONDS) -> None:
    """Raises: AssertionError, or whatever the target lets escape, if the input is not dealt with as promised."""
    began = time.process_time()
    try:
        target.check(data)
    except target.errors as error:
        check_message(error)
    took = time.process_time() - began
    assert took < max_seconds, f"it took {took:.1f} s"


def check_message(error: Exception) -> None:
    """Raises: AssertionError unless the message is one sentence that a terminal can show."""
    text = str(error)
    first, _, rest = text.partition("\n")
    assert first, "an empty message"
    assert escaped(first) == first, f"control characters: {first!r}"
    assert len(first) <= LONGEST_MESSAGE, f"a message of {len(first)} characters"
    assert not rest or (rest.startswith("hint: ") and "\n" not in rest), f"more than a hint: {rest!r}"


def text_of(data: bytes) -> str:
    """The text as Python reads arguments and variables: bytes that are not UTF-8 become surrogates."""
    return data.decode("utf-8", "surrogateescape").replace("\0", "")


# Command lines


def check_command_line(data: bytes) -> None:
    tokens = [text_of(part) for part in data.split(b"\0")]
    torchrun = tokens[:1] == ["torchrun"]
    line = parse_command_line(tokens[torchrun:], interpreter="/venv/bin/python", torchrun=torchrun)
    show_plan(line, {})


def show_plan(line: CommandLine, environ: Mapping[str, str]) -> None:
    """Effect: plans for a captured machine, and writes the plan in every form."""
    request = request_for(line, HOST, environ)
    plan = make_plan(HOST, request)
    json.dumps(plan_json(plan))
    plan_text(plan, HOST, width=80, color=False)
    if line.emit is not None and line.program is not None:
        _emit(plan, HOST, line)


def command_line(text: str) -> bytes:
    return "\0".join(shlex.split(text)).encode()


COMMAND_LINES = (
    "--instances 2 --cores-per-instance 2 infer.py --batch 8",
    "-O3 --graph onednn --weights int8 --precision bf16 infer.py",
    "--nproc-per-node 4 --master-port 29500 --dist-backend gloo train.py",
    "torchrun --nnodes=2:4 --nproc-per-node=auto --rdzv-id=7 --rdzv-backend=c10d --rdzv-endpoint=host:29400 -m train",
    "--cpus 0-3,8-11:2 --numa-nodes 0 --smt --grace 2.5 --env A=b --env-file x infer.py",
    "--metric 'loss=(\\d+)' --report r.json --log-dir logs --show 0 infer.py",
    "--emit slurm --nnodes 2 --nproc-per-node 2 --tee 0:1,1:3 --redirects 3 train.py",
    "--emit k8s --instances 2 -- infer.py",
    "--emit sh --no-python --instances 3 ./server",
    "--dataloader-workers auto --prefetch 2 --persistent-workers --fused-optimizers train.py",
)
OPTIONS = tuple(sorted({word for line in COMMAND_LINES for word in shlex.split(line)}))


# Profiles


def check_profile(data: bytes) -> None:
    with _file(data) as path:
        for error in profile_errors(path):
            check_message(error)
        read_profile(path)


PROFILE_WORDS = (
    *("[settings.", "[env.", "[applies]", "[[applies]]", "]\n", "value = ", "reason = ", "source = ", "kind = "),
    *('"intent"', '"server"', "summary = ", "arch = ", "'''", '"""', "{", "}", "[", ",", "1e999", "0x", "inf"),
    *("1979-05-27", "instances", "optimize", "OMP_NUM_THREADS", "\\u001b", "\n", "9" * 5000),
)


# Captured machines


def check_sysroot(data: bytes) -> None:
    files = dict(FILES)
    names = sorted(FILES)
    for change in data.split(b"\0\0"):
        number, _, content = change.partition(b"=")
        files[names[int.from_bytes(number[:2], "big") % len(names)]] = content.decode("utf-8", "replace")
    host = probe_host(MemoryRoot(files), interpreter="/venv/bin/python", environ={}, detail="full")
    show_machine(host)


def show_machine(host: Host) -> None:
    """Effect: writes the machine in every form. Raises: AssertionError, ParseError if one is not well-formed."""
    json.dumps(probe_json(host))
    text = probe_text(host, width=80, color=False)
    assert all(escaped(line) == line for line in text.splitlines()), "control characters"
    ElementTree.fromstring(machine_svg(host))
    request = request_for(parse_command_line(["--instances", "2", "x.py"], interpreter="python"), host, {})
    plan_text(make_plan(host, request), host, width=80, color=False)


SYSROOT_SEEDS = tuple(
    place.to_bytes(2, "big") + b"=" + FILES[name].encode()[:500] for place, name in enumerate(sorted(FILES))
)[::23]


# Files of workers


def check_events(data: bytes) -> None:
    with _file(data) as path:
        report = read_event_file(path)
    json.dumps([dict(report.metrics), report.settings, [*report.captured, *report.weights]])


def check_error_file(data: bytes) -> None:
    with _file(data) as path:
        read_error(path)


# Schedulers and rendezvous


def check_hosts(data: bytes) -> None:
    assert len(expand_hosts(text_of(data))) <= MOST_HOSTS


def check_counts(data: bytes) -> None:
    assert len(expand_counts(text_of(data))) <= MOST_HOSTS


def check_scheduler(data: bytes) -> None:
    lines = (text_of(line).partition("=") for line in data.split(b"\n"))
    environ = {name: value for name, _, value in lines if name}
    machine = Machine(cpus=8, host_cpus=16, nodefile=environ.pop("nodefile", None))
    for name in ("auto", "slurm", "mpi", "pbs"):
        try:
            scheduler_layer(environ, {"scheduler": name}, machine)
        except CpulaunchError as error:
            check_message(error)


def check_rendezvous(data: bytes) -> None:
    endpoint, _, rest = text_of(data).partition("\n")
    split_endpoint(endpoint, default_port=29400)
    with_brackets(endpoint)
    options = [f"--rdzv-endpoint={endpoint}", "--nnodes=2", f"--rdzv-conf={rest}", "--rdzv-backend=c10d", "x.py"]
    show_plan(parse_command_line(options, interpreter="python"), {})


def check_pet_variables(data: bytes) -> None:
    lines = (text_of(line).partition("=") for line in data.split(b"\n"))
    environ = {name: value for name, _, value in lines if name.startswith("PET_")}
    line = parse_command_line(["x.py"], interpreter="python")
    show_plan(with_pet_variables(line, environ, interpreter="python"), environ)


@dataclass
class _file:  # noqa: N801
    """A context: the path of a file with the data."""

    data: bytes
    path: str = field(default="")

    def __enter__(self) -> str:
        fd, self.path = tempfile.mkstemp(prefix="cpulaunch-fuzz-", suffix=".toml")
        with open(fd, "wb") as file:
            file.write(self.data)
        return self.path

    def __exit__(self, *_: object) -> None:
        os.unlink(self.path)


SLURM = b"""SLURM_JOB_ID=7
SLURM_STEP_ID=0
SLURM_STEP_NUM_TASKS=4
SLURM_NTASKS=4
SLURM_PROCID=1
SLURM_LOCALID=1
SLURM_NODEID=0
SLURM_STEP_NUM_NODES=2
SLURM_STEP_NODELIST=n[1-2]
SLURM_STEP_TASKS_PER_NODE=2(x2)
SLURM_JOB_CPUS_PER_NODE=8(x2)"""
MPI = b"""OMPI_COMM_WORLD_RANK=1
OMPI_COMM_WORLD_SIZE=2
OMPI_COMM_WORLD_LOCAL_RANK=1
OMPI_COMM_WORLD_LOCAL_SIZE=2"""
PBS = b"PBS_JOBID=3\nPBS_NODENUM=0\nPBS_TASKNUM=1\nPBS_NODEFILE=x\nnodefile=n1"
EVENTS = (
    b'{"event": "start", "pid": 7, "time": 1.5}\n{"event": "applied", "pid": 7, "setting": "threads", "detail": "4"}\n',
    b'{"event": "metric", "pid": 7, "name": "loss", "value": 0.5}\n{"event": "captured", "pid": 7, "module": "M"}\n',
)
ERROR = (
    b'{"message": {"message": "RuntimeError: x", "extraInfo": {"py_callstack": "a\\nb", "timestamp": "1700000000"}}}'
)
JSON_WORDS = (
    '{"',
    '":',
    "[" * 50,
    "]",
    "}",
    "1e999",
    "NaN",
    "9" * 5000,
    "\\u0000",
    "\\ud800",
    "null",
    '"pid"',
    '"event"',
)

TARGETS: dict[str, Target] = {
    "command-line": Target(
        check=check_command_line, seeds=tuple(map(command_line, COMMAND_LINES)), words=OPTIONS, separator=b"\0"
    ),
    "profile": Target(
        check=check_profile,
        seeds=tuple(path.read_bytes() for path in sorted((ROOT / "profiles").glob("*.toml"))),
        words=PROFILE_WORDS,
    ),
    "sysroot": Target(
        check=check_sysroot,
        seeds=SYSROOT_SEEDS,
        words=("-1", "0-3", ",", "0-16384,", "f" * 40, "99999999999999999999", "\x1b[2J", "max 100000", "\n", "-"),
        separator=b"\0\0",
    ),
    "events": Target(check=check_events, seeds=EVENTS, words=JSON_WORDS, errors=()),
    "error-file": Target(check=check_error_file, seeds=(ERROR,), words=JSON_WORDS, errors=()),
    "hosts": Target(
        check=check_hosts,
        seeds=(b"n[01-03,7],m1", b"r[1-2]c[0-1]"),
        words=("[", "]", ",", "-", "0-65535", "[1-2]" * 9),
        errors=(ValueError,),
    ),
    "counts": Target(
        check=check_counts, seeds=(b"2(x2),1",), words=("(x", ")", ",", "65536", "9" * 30), errors=(ValueError,)
    ),
    "scheduler": Target(
        check=check_scheduler,
        seeds=(SLURM, MPI, PBS),
        words=tuple(line.decode() for seed in (SLURM, MPI, PBS) for line in seed.splitlines()),
        separator=b"\n",
    ),
    "rendezvous": Target(
        check=check_rendezvous,
        seeds=(b"host:29400\njoin_timeout=5,store_type=file", b"[::1]:29400\n", b"fe80::1%eth0:1\nis_host=1"),
        words=(":", "[", "]", "%", "=", ",", "65536", "9" * 5000, "::", "\n", "join_timeout", "is_host", "timeout"),
    ),
    "pet-variables": Target(
        check=check_pet_variables,
        seeds=(b"PET_NNODES=1:2\nPET_NPROC_PER_NODE=gpu\nPET_RDZV_ENDPOINT=h:1\nPET_STANDALONE=1\nPET_LOG_DIR=x",),
        words=("PET_", "NNODES", "NODE_RANK", "MAX_RESTARTS", "MONITOR_INTERVAL", "=", "\n", "1:", "-1", "9" * 5000),
        separator=b"\n",
    ),
}
