"""The child processes of a calibration, as a list made before any of them starts."""

from __future__ import annotations

from cpulaunch.plan.variables.allocator import JEMALLOC
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.records.host import Host, Library

ALL_NODES = "all NUMA nodes"
DEFAULT_ALLOCATOR, DEFAULT_RUNTIME = "default", "gnu"
UNSET = (
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"),
    *("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "KMP_HW_SUBSET", "KMP_LIBRARY", "MKL_DYNAMIC", "MKL_CBWR"),
    *("MKL_DOMAIN_NUM_THREADS", "MKL_VERBOSE", "ONEDNN_VERBOSE", "DNNL_VERBOSE"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "MALLOC_PERTURB_", "MALLOC_CHECK_"),
    *("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    *("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
)
"""Variables of the caller that would change what is measured for all programs of this user."""
LEAST_READ = 1 << 28
READ_TIMES_CACHES = 4
"""The memory that is read is so many times as large as the last caches, which would serve a part of it otherwise."""
MOST_READ_SHARE = 1 / 4
"""Of all memory."""


@record
class CalibrationRun:
    """One process: the parts it measures with the subjects of their figures, its libraries, CPUs and memory.

    `read_bytes`: how much memory it reads if that is a part.
    """

    parts: tuple[tuple[str, str], ...]
    preloads: tuple[str, ...] = ()
    cpus: str = ""
    numa_node: str = ""
    threads: int = 1
    read_bytes: int = LEAST_READ

    @property
    def words(self) -> tuple[str, str, str, str]:
        """The arguments of cpulaunch.worker.calibration.main."""
        parts = ",".join(f"{part}={subject}" for part, subject in self.parts)
        return parts, self.cpus, self.numa_node, str(self.read_bytes)

    @property
    def variables(self) -> tuple[tuple[str, str | None], ...]:
        """What is set in its environment; what the plan sets for libraries is set, what the
        caller set that would change the measurement is unset.
        """
        threads = str(self.threads)
        return (
            ("LD_PRELOAD", ":".join(self.preloads) or None),
            ("OMP_NUM_THREADS", threads),
            ("MKL_NUM_THREADS", threads),
            ("KMP_BLOCKTIME", "1"),
            ("MALLOC_CONF", JEMALLOC),
            *((name, None) for name in UNSET),
        )


def calibration_runs(host: Host, dispatch: str | None) -> tuple[CalibrationRun, ...]:
    """The runs for a machine and its trusted libraries. `dispatch`: the MKL dispatch library, where it applies."""
    cpus = _one_per_core(host, host.limits.budget.cpus)
    threads = max(1, min(len(cpus), host.limits.budget.threads))
    whole = CalibrationRun(parts=(), cpus=format_cpulist(cpus), threads=threads, read_bytes=read_bytes(host, cpus))
    libraries = [each for each in host.libraries if not each.untrusted]
    allocators = _first_of_each([each for each in libraries if each.kind == "allocator"])
    runtimes = _first_of_each([each for each in libraries if each.kind == "openmp"])
    plain = tuple((name, name) for name in ("fp32", "bf16", "int8"))
    ordinary = (*plain, ("read", ALL_NODES), ("allocation", DEFAULT_ALLOCATOR), ("parallel", _own_runtime(host)))
    runs = [_with(whole, ordinary)]
    if dispatch is not None:
        runs.append(_with(whole, (("fp32", "fp32 with MKL dispatch"),), dispatch))
    runs += [
        _with(whole, (("parallel", each.name),), each.path) for each in runtimes if each.name != _own_runtime(host)
    ]
    runs += [_with(whole, (("allocation", each.name),), each.path) for each in allocators]
    return (*runs, *_node_runs(host, threads))


def _with(whole: CalibrationRun, parts: tuple[tuple[str, str], ...], *preloads: str) -> CalibrationRun:
    return replace(whole, parts=parts, preloads=preloads)


def read_bytes(host: Host, cpus: frozenset[int]) -> int:
    """How much memory is read by these CPUs so that their caches do not hold it."""
    data = [each for each in host.caches if each.type != "Instruction" and each.cpus & cpus]
    last = max((each.level for each in data), default=0)
    cached = sum(each.bytes or 0 for each in data if each.level == last)
    known = (host.limits.memory_bytes, sum(node.memory_bytes or 0 for node in host.numa_nodes) or None)
    most = min((each for each in known if each is not None), default=0) * MOST_READ_SHARE
    return max(LEAST_READ, min(READ_TIMES_CACHES * cached, int(most)))


def _own_runtime(host: Host) -> str:
    bundled = "" if host.torch is None else host.torch.bundled_openmp or ""
    return "intel" if "libiomp5" in bundled else DEFAULT_RUNTIME


def _node_runs(host: Host, threads: int) -> list[CalibrationRun]:
    """A run on each NUMA node that has CPUs and memory for this process; none on a machine of one."""
    if len(host.numa_nodes) < 2:
        return []
    runs = []
    for node in host.numa_nodes:
        cpus = _one_per_core(host, host.limits.budget.cpus & node.cpus)
        if cpus and node.memory_bytes != 0:
            part = (("read", f"NUMA node {node.id}"),)
            count = min(len(cpus), threads)
            size = min(read_bytes(host, cpus), max(LEAST_READ, int(MOST_READ_SHARE * (node.memory_bytes or 0))))
            runs.append(
                CalibrationRun(
                    parts=part, cpus=format_cpulist(cpus), numa_node=str(node.id), threads=count, read_bytes=size
                )
            )
    return runs


def _one_per_core(host: Host, cpus: frozenset[int]) -> frozenset[int]:
    lowest: dict[int, int] = {}
    for cpu in sorted((cpu for cpu in host.cpus if cpu.id in cpus), key=lambda cpu: cpu.id):
        lowest.setdefault(cpu.core, cpu.id)
    return frozenset(lowest.values())


def _first_of_each(libraries: list[Library]) -> list[Library]:
    return list({each.name: each for each in reversed(libraries)}.values())[::-1]
