"""The check of doctor on collectives: how ranks of one host would move data over the backend "ccl"."""

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.machine import MIB, WITH_COMPILER, Finding, skipped

RANK_BYTES = 26 * MIB
"""What a rank of oneCCL 2022.1 must find free in /dev/shm; the backend refuses to start with less."""
ADMINISTRATORS_ONLY = 2
"""The ptrace_scope from which on only administrators may read another process. Source: kernel, LSM/Yama.rst."""
INSTALL = "pip install 'cpulaunch[ccl]'"


def collectives(facts: Facts) -> tuple[Finding, ...]:
    """Whether `--dist-backend ccl` can be had, and how it would move data."""
    if not facts.live:
        return skipped("not part of a captured machine")
    if facts.may_copy is None or facts.host.arch != "x86_64":
        return skipped("the backend ccl is for x86-64 Linux")
    if facts.torch is None:
        return skipped("torch is not installed")
    engine = "no oneCCL" if facts.oneccl is None else f"oneCCL {facts.oneccl}"
    lock = _lock(facts)
    if lock is None:
        only = ": one host only" if facts.oneccl is None else " for several hosts"
        found = f"ccl: ranks may use one another's memory; {engine}{only}"
        if not facts.no_library:
            return (Finding(status="ok", found=found),)
        return (_advice(found, f"{facts.no_library}: Python reduces tensors on one host, slower", WITH_COMPILER),)
    why, fix = lock
    if facts.oneccl is None:
        return (_advice(f"no ccl, gloo only: {engine}, and ranks may not use one another's memory", why, INSTALL),)
    if (room := _room(facts)) < 2:
        short = f"{RANK_BYTES // MIB} MiB of /dev/shm for each rank of oneCCL, which is the only way: {why}"
        found = f"ccl: /dev/shm has room for {room} rank{'s' * (room != 1)} of {engine}"
        return (_advice(found, short, "docker run --shm-size=1g ..."),)
    return (_advice(f"ccl: {engine}, slower than ranks that use one another's memory", why, fix),)


def _advice(found: str, why: str, fix: str) -> Finding:
    return Finding(status="advice", found=found, why=why, fix=fix)


def _lock(facts: Facts) -> tuple[str, str] | None:
    """Why ranks may not use one another's memory, and what lets them; None if they may."""
    if facts.may_copy is False:
        why = "a filter of system calls, such as a container's, forbids process_vm_readv"
        return why, "docker run --cap-add SYS_PTRACE ..."
    if facts.ptrace_scope is not None and facts.ptrace_scope >= ADMINISTRATORS_ONLY:
        why = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: only administrators may read another process"
        return why, "sudo sysctl kernel.yama.ptrace_scope=1" + (" after a reboot" if facts.ptrace_scope > 2 else "")
    return None


def _room(facts: Facts) -> int:
    """How many ranks /dev/shm has room for."""
    return 0 if facts.shm is None else facts.shm.free_bytes // RANK_BYTES
