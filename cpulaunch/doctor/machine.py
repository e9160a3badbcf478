"""The checks of the machine: each a pure function from the facts to a finding."""

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.findings import GIB, MIB, Finding, advice, ok, problem, skipped
from cpulaunch.records.host import FEATURES, Library, count_text, size_text

INSTALL = {
    "debian": "apt-get install libtcmalloc-minimal4",
    "fedora": "dnf install gperftools-libs",
    "rhel": "dnf install gperftools-libs",
    "suse": "zypper install gperftools",
    "arch": "pacman -S gperftools",
}
"""Family of distributions -> the command that installs tcmalloc."""
MOST_CONTRADICTIONS = 4


def _install_command(facts: Facts) -> str:
    commands = (command for name, command in INSTALL.items() if name in facts.distribution)
    return next(commands, "conda install -c conda-forge gperftools")


def _libraries(facts: Facts, kind: str) -> tuple[Library, ...]:
    return tuple(library for library in facts.host.libraries if library.kind == kind)


def allocator(facts: Facts) -> tuple[Finding, ...]:
    """Whether an allocator that is faster than the C library's can be preloaded."""
    found = _libraries(facts, "allocator")
    usable = [library for library in found if library.untrusted is None]
    if usable:
        return ok(", ".join(dict.fromkeys(library.name for library in usable)) + f" ({usable[0].path})")
    if found:
        return advice(
            f"{found[0].path} is not preloaded",
            why=f"{found[0].untrusted}: others could run code in your programs",
            fix=_install_command(facts),
        )
    return advice(
        "only the C library's allocator",
        why="tcmalloc and jemalloc reuse the memory of freed tensors instead of returning it to the kernel",
        fix=_install_command(facts),
    )


def openmp(facts: Facts) -> tuple[Finding, ...]:
    """Whether Intel's or LLVM's OpenMP runtime can be preloaded where it is better than torch's own."""
    found = [library for library in _libraries(facts, "openmp") if library.name in ("intel", "llvm")]
    usable = [library for library in found if library.untrusted is None]
    if usable:
        only_asked = "" if usable[0].name == "intel" else ": --openmp llvm uses it"
        return ok(", ".join(dict.fromkeys(library.name for library in usable)) + f" ({usable[0].path}){only_asked}")
    if facts.host.arch != "x86_64":
        return ok("torch's own runtime, which is the best choice here")
    if facts.host.torch is not None and "libiomp5" in (facts.host.torch.bundled_openmp or ""):
        return ok("torch includes Intel's runtime")
    if found:
        return advice(
            f"{found[0].path} is not preloaded",
            why=f"{found[0].untrusted}: others could run code in your programs",
            fix="pip install intel-openmp",
        )
    return advice(
        "only torch's own libgomp",
        why="Intel's runtime starts parallel regions faster, and the time its threads spin can be set",
        fix="pip install intel-openmp",
    )


def two_runtimes(facts: Facts) -> tuple[Finding, ...]:
    """Whether one process would load several OpenMP runtimes, each with its own threads."""
    preloaded = [
        path
        for path in facts.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        if path.rsplit("/", 1)[-1].startswith(("libgomp", "libiomp5", "libomp"))
    ]
    if len(preloaded) > 1:
        return problem(
            "LD_PRELOAD names " + " and ".join(preloaded),
            why="two OpenMP runtimes in one process compete for cores, and some combinations crash",
            fix="unset LD_PRELOAD",
        )
    if facts.bundled_openmp:
        packages = list(dict.fromkeys(folder.removesuffix(".libs") for folder, _ in facts.bundled_openmp))
        names = ", ".join(packages[:4]) + (", ..." if len(packages) > 4 else "")
        return advice(
            f"in {names}",
            why="a program that uses both torch and these packages runs two thread pools on the same cores",
            fix="see which runtimes load: python -m threadpoolctl -i torch "
            + " ".join(packages[:2]).replace("scikit_learn", "sklearn"),
        )
    return ok("one OpenMP runtime per process")


def huge_pages(facts: Facts) -> tuple[Finding, ...]:
    """Whether --huge-pages can have an effect."""
    mode = facts.host.kernel.transparent_hugepage
    if mode is None:
        return ok("unknown: the kernel does not report it")
    if mode != "never":
        return ok(mode)
    return advice(
        "never",
        why="without huge pages, large tensors cause a page fault per 4 KiB, and --huge-pages has no effect",
        fix="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _nodes_with_cpus(facts: Facts) -> int:
    return sum(bool(node.cpus) for node in facts.host.numa_nodes)


def numa_balancing(facts: Facts) -> tuple[Finding, ...]:
    """Whether the kernel moves pages that bound workers have already placed."""
    if _nodes_with_cpus(facts) < 2:
        return ok("no effect with a single NUMA node")
    if not facts.host.kernel.numa_balancing:
        return ok("off")
    return advice(
        "on",
        why="workers are bound and their memory is local, so the kernel's page scans only cost time",
        fix="sudo sysctl kernel.numa_balancing=0",
    )


def governor(facts: Facts) -> tuple[Finding, ...]:
    """Whether cores run at full speed without delay."""
    chosen = facts.host.kernel.governor
    if chosen is None:
        return ok("not adjustable here (controlled by the hypervisor or the firmware)")
    if chosen == "performance":
        return ok(chosen)
    return advice(
        chosen,
        why="cores raise their frequency only after some load, so short requests run slowly",
        fix="sudo cpupower frequency-set -g performance",
    )


def smt_siblings(facts: Facts) -> tuple[Finding, ...]:
    """Whether other programs may run on the SMT siblings of this process's CPUs."""
    allowed = facts.host.limits.budget.cpus
    cores: dict[int, set[int]] = {}
    for cpu in facts.host.cpus:
        cores.setdefault(cpu.core, set()).add(cpu.id)
    own = [cpus for cpus in cores.values() if cpus & allowed]
    halves = [cpus for cpus in own if not cpus <= allowed]
    if not halves:
        return ok("all SMT siblings are available")
    return advice(
        f"{len(halves)} of {count_text(len(own), 'core')} only partly available",
        why="another program on the other SMT sibling can halve the speed of a core",
        fix="use a cpuset of whole cores (kubelet --cpu-manager-policy-options=full-pcpus-only=true)",
    )


def shared_memory(facts: Facts) -> tuple[Finding, ...]:
    """Whether /dev/shm has room for the batches of DataLoader workers, and for the page of an OpenMP runtime."""
    if not facts.live:
        return skipped("not available for a captured machine")
    if facts.shm is None:
        return skipped("there is no /dev/shm here")
    found = f"{size_text(facts.shm.total_bytes)}, {size_text(facts.shm.free_bytes)} free"
    why = "DataLoader workers pass batches through it, OpenMP runtimes write to it; when it is full SIGBUS kills them"
    fix = "docker run --shm-size=8g ..., or sudo mount -o remount,size=8g /dev/shm"
    if facts.shm.total_bytes <= 64 * MIB:
        return problem(found, why=why + " (64 MiB is Docker's default)", fix=fix)
    if facts.shm.free_bytes < 64 * MIB:
        return problem(found, why=why, fix="remove leftover files from /dev/shm (ls -l /dev/shm)")
    if facts.shm.total_bytes < GIB:
        return advice(found, why=why, fix=fix)
    return ok(found)


def memory_policy(facts: Facts) -> tuple[Finding, ...]:
    """Whether workers can be bound to the memory of their NUMA nodes."""
    if _nodes_with_cpus(facts) < 2:
        return ok("not needed on one NUMA node")
    permission = facts.host.kernel.mempolicy
    if permission == "permitted":
        return ok("permitted")
    if permission == "unknown":
        return skipped("unknown for a captured machine")
    return advice(
        "not permitted",
        why="memory is placed where it is first touched, which is mostly right because CPUs are still bound",
        fix="docker run --cap-add SYS_NICE ...",
    )


def cpu_quota(facts: Facts) -> tuple[Finding, ...]:
    """Whether programs see more CPUs than their quota pays for."""
    quota, cpus = facts.host.limits.quota, len(facts.host.limits.budget.cpus)
    if quota is None:
        return ok("none")
    threads = facts.host.limits.budget.threads
    found = f"a quota of {quota.cpus:.4g} CPUs on {cpus} CPUs"
    if quota.cpus >= cpus:
        return ok(found)
    return advice(
        found,
        why=f"programs that start {cpus} threads are throttled; cpulaunch starts {threads}",
        fix="add a cpuset to the quota (docker run --cpuset-cpus, kubelet --cpu-manager-policy=static)",
    )


def swap(facts: Facts) -> tuple[Finding, ...]:
    """Whether memory has been swapped out."""
    if facts.swap is None:
        return ok("unknown: the kernel does not report it")
    if facts.swap.total_bytes == 0:
        return ok("none")
    used = facts.swap.total_bytes - facts.swap.free_bytes
    found = f"{size_text(used)} of {size_text(facts.swap.total_bytes)} in use"
    if used < 256 * MIB:
        return ok(found)
    return advice(
        found,
        why="a step that accesses swapped memory can take a thousand times longer",
        fix="free memory, then: sudo swapoff -a && sudo swapon -a",
    )


def cpu_features(facts: Facts) -> tuple[Finding, ...]:
    """Whether the kernel offers every instruction set that the processor reports by CPUID."""
    reported = facts.cpuid_features
    if reported is None:
        return skipped("only on this machine")
    hidden = [name for name in FEATURES if name in reported - facts.host.cpu.isa]
    if not hidden:
        return ok(f"{len(facts.host.cpu.isa)} of those that torch uses, as the processor reports them")
    return advice(
        f"the kernel hides {', '.join(hidden)}",
        why="the processor reports them and /proc/cpuinfo does not: torch may not run its kernels for them",
        fix="a newer kernel, and no clearcpuid= in /proc/cmdline",
    )


def cpu_topology(facts: Facts) -> tuple[Finding, ...]:
    """Whether the kernel's files on sockets, cores, caches and NUMA nodes agree, and if not, which ones count."""
    if not facts.contradictions:
        return ok("the kernel's files agree")
    shown = facts.contradictions[:MOST_CONTRADICTIONS]
    more = len(facts.contradictions) - len(shown)
    return advice(
        "; ".join(shown) + (f"; {more} more" if more else ""),
        why="workers are placed by these files, and some of them are wrong",
        fix="compare with lscpu -e; if cpulaunch probe shows another machine than yours, use --cpus and --numa-nodes",
    )
