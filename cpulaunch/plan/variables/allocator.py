"""Variables for the preloaded memory allocator, for huge pages and for torch's compile workers."""

from __future__ import annotations

from cpulaunch.plan.placement.memory import memory_budget
from cpulaunch.plan.variables.resolve import per_worker
from cpulaunch.records.host import Host
from cpulaunch.records.plan import VariableRequest
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
"""Arenas for large blocks too, purging in the background. Source: jemalloc TUNING.md."""
JEMALLOC_HUGE = "oversize_threshold:1,background_thread:true,metadata_thp:always,thp:always"

_HUGE_PAGES = {
    "mimalloc": (("MIMALLOC_ALLOW_LARGE_OS_PAGES", "1"),),
    "default": (("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),),
}
"""The variable with which each allocator uses huge pages; tcmalloc has none.

Source: mimalloc readme; glibc manual, "Memory Allocation Tunables".
"""

COMPILE_WORKER_BYTES = 1 << 30
"""Memory to allow for one compile worker: a Python with torch and a C++ compiler. Source: FBGEMM issue 6009."""
MAX_COMPILE_WORKERS = 32
"""torch's own upper limit. Source: torch._inductor.config.decide_compile_threads."""


def allocator_variables(request: LaunchRequest, allocator: str) -> tuple[VariableRequest, ...]:
    """Variables of the allocator and, with --huge-pages, of torch's own memory."""
    huge = request.settings.huge_pages
    origin = request.origin("huge_pages") if huge else "default"
    requests = []
    if allocator == "jemalloc":
        reason = "large blocks use the normal arenas, freed memory is purged in the background" + (
            ", huge pages" if huge else ""
        )
        value = JEMALLOC_HUGE if huge else JEMALLOC
        requests.append(VariableRequest(name="MALLOC_CONF", value=value, origin=origin, reason=reason))
    if huge:
        reason = request.reasons.get("huge_pages", "huge pages mean fewer TLB misses for large tensors")
        for name, value in (("THP_MEM_ALLOC_ENABLE", "1"), *_HUGE_PAGES.get(allocator, ())):
            requests.append(VariableRequest(name=name, value=value, origin=origin, reason=reason))
    return tuple(requests)


def huge_page_warnings(host: Host, request: LaunchRequest) -> tuple[str, ...]:
    """A warning if the command line requests huge pages and the kernel never gives any."""
    if request.origin("huge_pages") != "cli" or not request.settings.huge_pages:
        return ()
    if host.kernel.transparent_hugepage != "never":
        return ()
    return (
        "--huge-pages has no effect: /sys/kernel/mm/transparent_hugepage/enabled is 'never' (root can set 'madvise')",
    )


def compile_threads(host: Host, cpu_limits: Sequence[int]) -> VariableRequest:
    """The number of compile workers of each worker: one per core, within its share of memory and torch's limit."""
    budget = memory_budget(host)
    share = MAX_COMPILE_WORKERS if budget is None else budget // len(cpu_limits) // COMPILE_WORKER_BYTES
    most = max(1, min(MAX_COMPILE_WORKERS // len(cpu_limits) if len(cpu_limits) > 1 else MAX_COMPILE_WORKERS, share))
    return per_worker(
        "TORCHINDUCTOR_COMPILE_THREADS",
        [str(min(count, most)) for count in cpu_limits],
        origin="default",
        reason="one per core of the worker, limited to 1 per GiB of memory and 32 for all workers",
    )
