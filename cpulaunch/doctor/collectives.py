"""The check of collectives: how the ranks of one host exchange data over the backend "ccl"."""

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.findings import WITH_COMPILER, Finding, advice, ok, skipped


def collectives(facts: Facts) -> tuple[Finding, ...]:
    """Whether `--dist-backend ccl` works here, and by which means it exchanges data."""
    if not facts.live:
        return skipped("not available for a captured machine")
    if not facts.is_linux or facts.host.arch != "x86_64":
        return skipped("the backend ccl is for x86-64 Linux")
    if facts.torch is None:
        return skipped("torch is not installed")
    engine = "oneCCL" if facts.oneccl is None else f"oneCCL {facts.oneccl}"
    if facts.oneccl_problem:
        found = f"ccl works on this host, but not between hosts: {engine} cannot be loaded, so gloo is used there"
        return advice(found, why=facts.oneccl_problem, fix="pip install --upgrade 'cpulaunch[ccl]'")
    if facts.missing_library_reason:
        found = "ccl leaves collectives on one host to gloo, which is slower than shared memory"
        return advice(found, why=facts.missing_library_reason, fix=WITH_COMPILER)
    between = "one host only, without oneCCL" if facts.oneccl is None else f"{engine} (it can be loaded) between hosts"
    return ok(f"ccl works: shared memory between ranks on this host, {between}")
