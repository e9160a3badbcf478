"""The check of collectives: how the ranks of one host exchange data over the backend "ccl"."""

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.findings import MIB, WITH_COMPILER, Finding, advice, ok, skipped
from cpulaunch.records.host import count_text

RANK_BYTES = 26 * MIB
"""Free space in /dev/shm that each rank of oneCCL 2022.1 needs; the backend does not start with less."""
ADMINISTRATORS_ONLY = 2
"""From this ptrace_scope on, only administrators may read another process. Source: kernel, LSM/Yama.rst."""
INSTALL = "pip install 'cpulaunch[ccl]'"


def collectives(facts: Facts) -> tuple[Finding, ...]:
    """Whether `--dist-backend ccl` works here, and by which means it exchanges data."""
    if not facts.live:
        return skipped("not available for a captured machine")
    if facts.may_copy is None or facts.host.arch != "x86_64":
        return skipped("the backend ccl is for x86-64 Linux")
    if facts.torch is None:
        return skipped("torch is not installed")
    engine = "oneCCL" if facts.oneccl is None else f"oneCCL {facts.oneccl}"
    obstacle = _obstacle(facts)
    if obstacle is None:
        between = "one host only, without oneCCL" if facts.oneccl is None else f"{engine} between hosts"
        found = f"ccl works: direct memory access between ranks on this host, {between}"
        missing = facts.missing_library_reason
        if not missing:
            return ok(found)
        return advice(
            found, why=f"{missing}: tensors on one host are reduced in Python, which is slower", fix=WITH_COMPILER
        )
    why, fix = obstacle
    if facts.oneccl is None:
        return advice(
            "only gloo works: ranks cannot access one another's memory, and there is no oneCCL", why=why, fix=INSTALL
        )
    if (room := _room(facts)) < 2:
        short = f"oneCCL, the only way here ({why}), needs {RANK_BYTES // MIB} MiB of /dev/shm per rank"
        found = f"ccl: /dev/shm has room for {count_text(room, 'rank')} of {engine}"
        return advice(found, why=short, fix="docker run --shm-size=1g ...")
    return advice(f"ccl works through {engine}, which is slower than direct memory access", why=why, fix=fix)


def _obstacle(facts: Facts) -> tuple[str, str] | None:
    """Why ranks cannot use one another's memory, and the command that permits it; None if they can."""
    if facts.may_copy is False:
        why = "a system call filter (for example a container's) blocks process_vm_readv"
        return why, "docker run --cap-add SYS_PTRACE ..."
    if facts.ptrace_scope is not None and facts.ptrace_scope >= ADMINISTRATORS_ONLY:
        why = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: only administrators may read another process"
        return why, "sudo sysctl kernel.yama.ptrace_scope=1" + (" after a reboot" if facts.ptrace_scope > 2 else "")
    return None


def _room(facts: Facts) -> int:
    """Number of ranks for which /dev/shm has room."""
    return 0 if facts.shm is None else facts.shm.free_bytes // RANK_BYTES
