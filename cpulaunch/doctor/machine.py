"""The checks of doctor on the machine: each a pure function of the facts to what was found, why, and what fixes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cpulaunch.doctor.facts import Facts
from cpulaunch.records.host import Library, size_text

Status = Literal["ok", "advice", "problem", "skipped"]
MIB, GIB = 1 << 20, 1 << 30
WITH_COMPILER = "install a C compiler, then: pip install --force-reinstall --no-cache-dir cpulaunch"
"""What brings the libraries that an installation without one lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found. `why` and `fix` (a command, or what to change) are for advice and problems."""

    status: Status
    found: str
    why: str | None = None
    fix: str | None = None


Check = Callable[[Facts], tuple[Finding, ...]]


def _ok(found: str) -> tuple[Finding, ...]:
    return (Finding(status="ok", found=found),)


def _advice(found: str, *, why: str, fix: str) -> tuple[Finding, ...]:
    return (Finding(status="advice", found=found, why=why, fix=fix),)


def _problem(found: str, *, why: str, fix: str) -> tuple[Finding, ...]:
    return (Finding(status="problem", found=found, why=why, fix=fix),)


def skipped(why: str) -> tuple[Finding, ...]:
    """A check that could not be made, and why."""
    return (Finding(status="skipped", found=why),)


INSTALL = {
    "debian": "apt-get install libtcmalloc-minimal4",
    "fedora": "dnf install gperftools-libs",
    "rhel": "dnf install gperftools-libs",
    "suse": "zypper install gperftools",
    "arch": "pacman -S gperftools",
}
"""How each family of distributions installs tcmalloc."""


def _install_command(facts: Facts) -> str:
    commands = (command for name, command in INSTALL.items() if name in facts.distribution)
    return next(commands, "conda install -c conda-forge gperftools")


def _libraries(facts: Facts, kind: str) -> tuple[Library, ...]:
    return tuple(library for library in facts.host.libraries if library.kind == kind)


def allocator(facts: Facts) -> tuple[Finding, ...]:
    """Whether a faster allocator than the C library's can be preloaded."""
    found = _libraries(facts, "allocator")
    usable = [library for library in found if library.untrusted is None]
    if usable:
        return _ok(", ".join(dict.fromkeys(library.name for library in usable)) + f" ({usable[0].path})")
    if found:
        return _advice(
            f"{found[0].path} is not preloaded",
            why=f"{found[0].untrusted}: whoever writes there would run code in your programs",
            fix=_install_command(facts),
        )
    return _advice(
        "only the C library's",
        why="tensors come and go: tcmalloc or jemalloc keep their memory instead of asking the kernel again",
        fix=_install_command(facts),
    )


def openmp(facts: Facts) -> tuple[Finding, ...]:
    """Whether Intel's or LLVM's OpenMP runtime can be preloaded where it is better than torch's own."""
    found = [library for library in _libraries(facts, "openmp") if library.name in ("intel", "llvm")]
    usable = [library for library in found if library.untrusted is None]
    if usable:
        only_asked = "" if usable[0].name == "intel" else ": --openmp llvm uses it"
        return _ok(", ".join(dict.fromkeys(library.name for library in usable)) + f" ({usable[0].path}){only_asked}")
    if facts.host.arch != "x86_64":
        return _ok("torch's own: the best choice here")
    if facts.host.torch is not None and "libiomp5" in (facts.host.torch.bundled_openmp or ""):
        return _ok("torch brings Intel's")
    if found:
        return _advice(
            f"{found[0].path} is not preloaded",
            why=f"{found[0].untrusted}: whoever writes there would run code in your programs",
            fix="pip install intel-openmp",
        )
    return _advice(
        "only torch's own libgomp",
        why="Intel's runtime starts parallel regions faster and waits in a way that can be set in milliseconds",
        fix="pip install intel-openmp",
    )


def two_runtimes(facts: Facts) -> tuple[Finding, ...]:
    """Whether one process would have several OpenMP runtimes, each with its own threads."""
    preloaded = [
        path
        for path in facts.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        if path.rsplit("/", 1)[-1].startswith(("libgomp", "libiomp5", "libomp"))
    ]
    if len(preloaded) > 1:
        return _problem(
            "LD_PRELOAD names " + " and ".join(preloaded),
            why="two OpenMP runtimes in one process: each has its own threads, and some pairs crash",
            fix="unset LD_PRELOAD",
        )
    if facts.bundled_openmp:
        packages = list(dict.fromkeys(folder.removesuffix(".libs") for folder, _ in facts.bundled_openmp))
        names = ", ".join(packages[:4]) + (", ..." if len(packages) > 4 else "")
        return _advice(
            f"own runtime in: {names}",
            why="a program that computes with torch and with these has two pools of threads on the same cores",
            fix="python -m threadpoolctl -i torch " + " ".join(packages[:2]).replace("scikit_learn", "sklearn"),
        )
    return _ok("one OpenMP runtime a process")


def huge_pages(facts: Facts) -> tuple[Finding, ...]:
    """Whether --huge-pages can have an effect."""
    mode = facts.host.kernel.transparent_hugepage
    if mode is None:
        return _ok("the kernel does not say")
    if mode != "never":
        return _ok(mode)
    return _advice(
        "never",
        why="large tensors cost a page fault for every 4 KiB, and --huge-pages has no effect",
        fix="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _nodes_with_cpus(facts: Facts) -> int:
    return sum(bool(node.cpus) for node in facts.host.numa_nodes)


def numa_balancing(facts: Facts) -> tuple[Finding, ...]:
    """Whether the kernel moves pages that bound workers have already placed."""
    if _nodes_with_cpus(facts) < 2:
        return _ok("one NUMA node: it has no effect")
    if not facts.host.kernel.numa_balancing:
        return _ok("off")
    return _advice(
        "on",
        why="workers are bound and their pages local: the kernel's scans only cost page faults",
        fix="sudo sysctl kernel.numa_balancing=0",
    )


def governor(facts: Facts) -> tuple[Finding, ...]:
    """Whether cores run at full speed at once."""
    chosen = facts.host.kernel.governor
    if chosen is None:
        return _ok("not ours to choose (virtual machine, or the firmware decides)")
    if chosen == "performance":
        return _ok(chosen)
    return _advice(
        chosen,
        why="cores speed up only after they were busy for a while: short requests run slow",
        fix="sudo cpupower frequency-set -g performance",
    )


def smt_siblings(facts: Facts) -> tuple[Finding, ...]:
    """Whether somebody else may run on the other half of our cores."""
    allowed = facts.host.limits.budget.cpus
    cores: dict[int, set[int]] = {}
    for cpu in facts.host.cpus:
        cores.setdefault(cpu.core, set()).add(cpu.id)
    ours = [cpus for cpus in cores.values() if cpus & allowed]
    halves = [cpus for cpus in ours if not cpus <= allowed]
    if not halves:
        return _ok("whole cores")
    return _advice(
        f"{len(halves)} of {len(ours)} cores are given in part",
        why="what runs on a core's other sibling takes half its speed, and it may not be yours",
        fix="kubelet --cpu-manager-policy-options=full-pcpus-only=true, or a cpuset of whole cores",
    )


def shared_memory(facts: Facts) -> tuple[Finding, ...]:
    """Whether DataLoader workers can hand tensors over."""
    if not facts.live:
        return skipped("not part of a captured machine")
    if facts.shm is None:
        return skipped("there is no /dev/shm here")
    found = f"{size_text(facts.shm.total_bytes)}, {size_text(facts.shm.free_bytes)} free"
    why = "DataLoader workers hand batches over in it; when it is full they die of SIGBUS"
    fix = "docker run --shm-size=8g ..., or sudo mount -o remount,size=8g /dev/shm"
    if facts.shm.total_bytes <= 64 * MIB:
        return _problem(found, why=why + " (64 MiB is Docker's default)", fix=fix)
    if facts.shm.free_bytes < 64 * MIB:
        return _problem(found, why=why, fix="ls -l /dev/shm, and remove what is left over there")
    if facts.shm.total_bytes < GIB:
        return _advice(found, why=why, fix=fix)
    return _ok(found)


def memory_policy(facts: Facts) -> tuple[Finding, ...]:
    """Whether workers' memory can be placed."""
    if _nodes_with_cpus(facts) < 2:
        return _ok("one NUMA node: nothing to place")
    permission = facts.host.kernel.mempolicy
    if permission == "permitted":
        return _ok("may be set")
    if permission == "unknown":
        return skipped("only the machine itself can tell")
    return _advice(
        "may not be set",
        why="memory goes where it is first touched: mostly right, as CPUs are still bound",
        fix="docker run --cap-add SYS_NICE ...",
    )


def cpu_quota(facts: Facts) -> tuple[Finding, ...]:
    """Whether programs see more CPUs than they may use."""
    quota, cpus = facts.host.limits.quota, len(facts.host.limits.budget.cpus)
    if quota is None:
        return _ok("none")
    threads = facts.host.limits.budget.threads
    found = f"{quota.cpus:.4g} CPUs of time, {cpus} CPUs to run on"
    if quota.cpus >= cpus:
        return _ok(found)
    return _advice(
        found,
        why=f"other programs start {cpus} threads and are throttled; cpulaunch starts {threads}",
        fix="a cpuset beside the quota: docker run --cpuset-cpus, kubelet --cpu-manager-policy=static",
    )


def swap(facts: Facts) -> tuple[Finding, ...]:
    """Whether memory is on disk."""
    if facts.swap is None:
        return _ok("the kernel does not say")
    if facts.swap.total_bytes == 0:
        return _ok("none")
    used = facts.swap.total_bytes - facts.swap.free_bytes
    found = f"{size_text(used)} of {size_text(facts.swap.total_bytes)} in use"
    if used < 256 * MIB:
        return _ok(found)
    return _advice(
        found,
        why="a step that touches memory on disk takes a thousand times longer",
        fix="free memory, then: sudo swapoff -a && sudo swapon -a",
    )
