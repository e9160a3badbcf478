"""Variables for the memory allocator that will be loaded, huge pages, and torch's compile workers."""

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
    "mimalloc": ("MIMALLOC_ALLOW_LARGE_OS_PAGES", "1"),
    "default": ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
}
"""The switch of each allocator; tcmalloc has none.

Source: mimalloc readme; glibc manual, "Memory Allocation Tunables".
"""

COMPILE_WORKER_BYTES = 1 << 30
"""Memory to allow for one compile worker: a Python with torch and a C++ compiler. Source: FBGEMM issue 6009."""
MOST_COMPILE_WORKERS = 32
"""torch's own upper limit. Source: torch._inductor.config.decide_compile_threads."""


def allocator_variables(request: LaunchRequest, allocator: str) -> tuple[VariableRequest, ...]:
    """Settings of the allocator and, with --huge-pages, of torch's own."""
    huge = request.settings.huge_pages
    origin = request.origin("huge_pages") if huge else "default"
    variable_requests = []
    if allocator == "jemalloc":
        reason = "no dedicated arena for large blocks, purge in the background" + (", huge pages" if huge else "")
        variable_requests.append(
            VariableRequest(name="MALLOC_CONF", value=JEMALLOC_HUGE if huge else JEMALLOC, origin=origin, reason=reason)
        )
    if huge:
        reason = request.reasons.get("huge_pages", "huge pages: fewer TLB misses on large tensors")
        variable_requests.append(VariableRequest(name="THP_MEM_ALLOC_ENABLE", value="1", origin=origin, reason=reason))
        if allocator in _HUGE_PAGES:
            name, value = _HUGE_PAGES[allocator]
            variable_requests.append(VariableRequest(name=name, value=value, origin=origin, reason=reason))
    return tuple(variable_requests)


def huge_page_warnings(host: Host, request: LaunchRequest) -> tuple[str, ...]:
    """A warning if huge pages are asked for on the command line and the kernel gives none."""
    if request.origin("huge_pages") != "cli" or not request.settings.huge_pages:
        return ()
    if host.kernel.transparent_hugepage != "never":
        return ()
    return (
        "--huge-pages has no effect: /sys/kernel/mm/transparent_hugepage/enabled is never (root can write madvise)",
    )


def compile_threads(host: Host, cores: Sequence[int]) -> VariableRequest:
    """torch.compile's workers: one per core of the worker, within its share of the memory and torch's limit."""
    budget = memory_budget(host)
    share = MOST_COMPILE_WORKERS if budget is None else budget // len(cores) // COMPILE_WORKER_BYTES
    most = max(1, min(MOST_COMPILE_WORKERS // len(cores) if len(cores) > 1 else MOST_COMPILE_WORKERS, share))
    return per_worker(
        "TORCHINDUCTOR_COMPILE_THREADS",
        [str(min(count, most)) for count in cores],
        origin="default",
        reason="one per core of the worker, 1 GiB of memory for each, at most 32 in all workers together",
    )
