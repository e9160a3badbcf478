"""The launchers and tools that the benches compare: a table of recipes that build commands and their environment."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from commands import BenchError, Command, Peer
from machine import free_cores

BIN = Path(sys.executable).parent
"""Programs of the environment under test: the folder of this interpreter."""

SETUP = "scripts/bench/setup-peers"
"""The script that creates the environments named in the table."""


def default_folder() -> Path:
    """The folder in which setup-peers creates the environments of other tools by default."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "cpulaunch-peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchContext:
    """Shared by all peers of a run: copies for launchers that start several, and the folder of other tools."""

    instances: int
    folder: Path

    def bin(self, environment: str) -> Path:
        """The folder with the programs of another environment."""
        return self.folder / environment / "bin"


Launch = Callable[[Sequence[str], BenchContext], Peer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a peer starts a program, in which precision it computes, and which other environment it needs.

    `adapts`: what it changes inside torch takes effect in the seconds after the first calls.
    """

    launch: Launch
    precision: Literal["fp32", "bf16"] = "fp32"
    environment: str | None = None
    adapts: bool = False


def _python(*flags: str, environment: str | None = None) -> Launch:
    """One copy on all cores; the flags of the program stand for edits by its author."""

    def launch(program: Sequence[str], context: BenchContext) -> Peer:
        python = context.bin(environment) / "python" if environment else sys.executable
        return Peer(commands=(Command(argv=(str(python), *program, *flags)),), copies=1)

    return launch


def _cpulaunch(*flags: str, several: bool) -> Launch:
    def launch(program: Sequence[str], context: BenchContext) -> Peer:
        count = ("--instances", str(context.instances)) if several else ()
        argv = (tool("cpulaunch"), *count, *flags, *program)
        return Peer(commands=(Command(argv=argv),), copies=context.instances if several else 1)

    return launch


def _run_cpu(*, several: bool) -> Launch:
    def launch(program: Sequence[str], context: BenchContext) -> Peer:
        copies = context.instances if several else 1
        argv = (sys.executable, "-m", "torch.backends.xeon.run_cpu", "--ninstances", str(copies), *program)
        return Peer(commands=(Command(argv=argv, env=_activated(BIN)),), copies=copies)

    return launch


def _ipexrun(*flags: str, several: bool) -> Launch:
    def launch(program: Sequence[str], context: BenchContext) -> Peer:
        copies = context.instances if several else 1
        tool = context.bin("ipex") / "ipexrun"
        argv = (str(tool), "--ninstances", str(copies), *flags, *program)
        return Peer(commands=(Command(argv=argv, env=_activated(tool.parent)),), copies=copies)

    return launch


def _activated(programs: Path) -> dict[str, str]:
    """The variable that `activate` sets; run_cpu and ipexrun look for libraries in $VIRTUAL_ENV/lib."""
    return {"VIRTUAL_ENV": str(programs.parent)}


def _torchrun(program: Sequence[str], context: BenchContext) -> Peer:
    argv = (tool("torchrun"), "--standalone", "--nproc-per-node", str(context.instances), *program)
    return Peer(commands=(Command(argv=argv),), copies=context.instances)


def _numactl(program: Sequence[str], context: BenchContext) -> Peer:
    """The recipe of tuning guides: equal shares of the cores, local memory, bound threads, tcmalloc, Intel OpenMP."""
    cores = free_cores()
    instances = context.instances
    share = len(cores) // instances
    if share == 0:
        raise BenchError(f"{instances} instances need {instances} cores; {len(cores)} are available")
    commands = []
    for first in range(0, share * instances, share):
        cpus = ",".join(map(str, cores[first : first + share]))
        argv = ("numactl", f"--physcpubind={cpus}", "--localalloc", sys.executable, *program)
        commands.append(Command(argv=argv, env=_tuning_guide_environment(share)))
    return Peer(commands=tuple(commands), copies=instances)


def _tuning_guide_environment(threads: int) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": "granularity=fine,compact,1,0",
        "KMP_BLOCKTIME": "1",
    }
    libraries = [ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")]
    intel_openmp = BIN.parent / "lib" / "libiomp5.so"
    libraries.append(str(intel_openmp) if intel_openmp.exists() else None)
    found = [library for library in libraries if library]
    return environment | ({"LD_PRELOAD": ":".join(found)} if found else {})


def tool(name: str) -> str:
    """Path of a program in the environment under test."""
    return str(BIN / name)


_GRAPH = ("--graph", "onednn")
_BF16 = (*_GRAPH, "--precision", "bf16")
_COMPILED = ("--compile", "inductor")
_ZEN = ("--compile", "zentorch")
_AUTOCAST = ("--autocast", "bf16")
_IPEX = ("--auto-ipex", "--dtype", "bfloat16")

PEERS: dict[str, Recipe] = {
    "python": Recipe(launch=_python()),
    "run_cpu": Recipe(launch=_run_cpu(several=True)),
    "run_cpu-1": Recipe(launch=_run_cpu(several=False)),
    "torchrun": Recipe(launch=_torchrun),
    "numactl": Recipe(launch=_numactl),
    "inductor": Recipe(launch=_python(*_COMPILED)),
    "inductor-bf16": Recipe(launch=_python(*_COMPILED, *_AUTOCAST), precision="bf16"),
    "zentorch": Recipe(launch=_python(*_ZEN, environment="zentorch"), environment="zentorch"),
    "zentorch-bf16": Recipe(
        launch=_python(*_ZEN, *_AUTOCAST, environment="zentorch"), precision="bf16", environment="zentorch"
    ),
    "ipexrun": Recipe(launch=_ipexrun(*_IPEX, several=True), precision="bf16", environment="ipex"),
    "ipexrun-1": Recipe(launch=_ipexrun(*_IPEX, several=False), precision="bf16", environment="ipex"),
    "cpulaunch": Recipe(launch=_cpulaunch(several=True)),
    "cpulaunch-1": Recipe(launch=_cpulaunch(several=False)),
    "cpulaunch-graph": Recipe(launch=_cpulaunch(*_GRAPH, several=True), adapts=True),
    "cpulaunch-graph-1": Recipe(launch=_cpulaunch(*_GRAPH, several=False), adapts=True),
    "cpulaunch-bf16": Recipe(launch=_cpulaunch(*_BF16, several=True), adapts=True, precision="bf16"),
    "cpulaunch-bf16-1": Recipe(launch=_cpulaunch(*_BF16, several=False), adapts=True, precision="bf16"),
}
"""Name -> recipe. A bench adds its own variants with `modified_program` and `with_flags`."""


def modified_program(*flags: str) -> Recipe:
    """One copy under plain python, with these flags of the program, which stand for edits by its author."""
    return Recipe(launch=_python(*flags), precision="bf16" if "bf16" in flags else "fp32")


def with_flags(*flags: str) -> Recipe:
    """One instance under cpulaunch with these flags of cpulaunch."""
    return Recipe(launch=_cpulaunch(*flags, several=False), precision="bf16" if "bf16" in flags else "fp32")


def missing_peers(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Peer -> the command that installs its missing environment or program; complete peers are left out."""
    needed = {name: PEERS[name].environment for name in names}
    hints = {
        name: f"{SETUP} --folder {folder} {environment}"
        for name, environment in needed.items()
        if environment and not (folder / environment / "ready").exists()
    }
    if "numactl" in names and not shutil.which("numactl"):
        hints["numactl"] = "apt-get install numactl"
    return hints
