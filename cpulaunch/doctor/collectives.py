"""The check of collectives: how the ranks of one host exchange data over the backend "ccl"."""

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.findings import WITH_COMPILER, Finding, advice, ok, skipped

ADMINISTRATORS_ONLY = 2
"""From this ptrace_scope on, only administrators may read another process. Source: kernel, LSM/Yama.rst."""


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
    if obstacle is None and facts.oneccl_problem:
        found = f"ccl works on this host, but not between hosts: {engine} cannot be loaded, so gloo is used there"
        return advice(found, why=facts.oneccl_problem, fix="pip install --upgrade 'cpulaunch[ccl]'")
    if obstacle is None:
        between = (
            "one host only, without oneCCL" if facts.oneccl is None else f"{engine} (it can be loaded) between hosts"
        )
        found = f"ccl works: shared memory between ranks on this host, {between}"
        missing = facts.missing_library_reason
        if not missing:
            return ok(found)
        found = "ccl leaves collectives on one host to gloo, which is slower than shared memory"
        return advice(found, why=missing, fix=WITH_COMPILER)
    why, fix = obstacle
    return advice("ccl leaves collectives on one host to gloo, which is slower than shared memory", why=why, fix=fix)


def _obstacle(facts: Facts) -> tuple[str, str] | None:
    """Why ranks cannot share memory, and the command that permits it; None if they can."""
    if facts.may_copy is False:
        why = "a system call filter (for example a container's) blocks process_vm_readv"
        return why, "docker run --cap-add SYS_PTRACE ..."
    if facts.ptrace_scope is not None and facts.ptrace_scope >= ADMINISTRATORS_ONLY:
        why = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: only administrators may read another process"
        return why, "sudo sysctl kernel.yama.ptrace_scope=1" + (" after a reboot" if facts.ptrace_scope > 2 else "")
    return None
