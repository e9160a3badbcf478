"""What made a run slow, as far as its workers and the kernel told: rules on a launch that has ended. Pure.

A rule takes what is known of one worker and returns what it found in one sentence, or None.
"""

from __future__ import annotations

from math import inf

from cpulaunch.records.cpulist import MAX_ID, format_cpulist, parse_cpulist
from cpulaunch.records.host import size_text
from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import OFFERED_LOAD
from cpulaunch.system.process_snapshot import openmp_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, TypeAlias

    from cpulaunch.launch.monitor.watch import Observation
    from cpulaunch.launch.supervision.result import LaunchResult
    from cpulaunch.records.host import Throttling
    from cpulaunch.records.plan import LaunchPlan, WorkerPlan

    Rule: TypeAlias = Callable[["ObservedWorker"], str | None]

REMOTE_SHARE, REMOTE_BYTES = 0.1, 64 << 20
"""Memory on other NUMA nodes than the worker's: at least this share, and so many bytes."""
THROTTLED_SHARE = 0.05
"""Of a quota's periods, in which it held processes back."""
LEAST_PERIODS = 20
GROWTH, GROWTH_BYTES, LEAST_SAMPLES = 0.2, 64 << 20, 10
"""Growth of memory over the second half of a run, in which every sample is larger than the one before it.

Ten samples take more than a minute: in a shorter run, a program that grows may still be loading its data.
"""
MOST_REASON = 120


@record
class RunFinding:
    """What one rule found. `workers`: their numbers; none if it is about the whole launch."""

    rule: str
    text: str
    fix: str
    workers: frozenset[int] = frozenset()

    @property
    def line(self) -> str:
        """The finding in a line for the terminal."""
        who = f"worker{'s' * (len(self.workers) != 1)} {format_cpulist(self.workers)}: " if self.workers else ""
        return f"finding: {who}{self.text}; {self.fix} ({self.rule})"


@record
class ObservedWorker:
    """A worker's plan, what was seen of it, and its process with the plugin. `preload`: its LD_PRELOAD."""

    plan: WorkerPlan
    observation: Observation
    preload: str = ""

    @property
    def main(self) -> Mapping[str, Any]:
        """The last snapshot of the process with the plugin; empty if there is none."""
        pid = self.observation.report.main_pid or -1
        return self.observation.report.live.get(pid) or self.observation.samples.get(pid) or {}


def findings(
    plan: LaunchPlan, result: LaunchResult, throttling: Throttling | None, *, preload: str = ""
) -> tuple[RunFinding, ...]:
    """All findings of a launch; those of several workers with the same words count once.

    `preload`: LD_PRELOAD of the launch, which a worker inherits unless its plan sets or removes it.
    """
    found: dict[tuple[str, str], set[int]] = {}
    plans = {worker.index: worker for worker in plan.workers}
    for worker in result.workers:
        if worker.observation is None or worker.index not in plans:
            continue
        planned = plans[worker.index]
        inherited = dict(planned.env).get("LD_PRELOAD", preload) or ""
        seen = ObservedWorker(plan=planned, observation=worker.observation, preload=inherited)
        for name, rule in RULES.items():
            text = _applied(rule, seen)
            if text is not None:
                found.setdefault((name, text), set()).add(worker.index)
    return (
        *_of_quota(throttling),
        *(
            RunFinding(rule=name, text=text, fix=FIXES[name], workers=frozenset(workers))
            for (name, text), workers in found.items()
        ),
    )


def _applied(rule: Rule, seen: ObservedWorker) -> str | None:
    """What the rule finds; None too where another process wrote events in another form."""
    try:
        return rule(seen)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):  # The last for sizes beyond measure.
        return None


def _of_quota(throttling: Throttling | None) -> Iterator[RunFinding]:
    if throttling is None or throttling.periods < LEAST_PERIODS:
        return
    share = throttling.throttled / throttling.periods
    if share >= THROTTLED_SHARE:
        text = f"the CPU quota held it back in {share:.0%} of its periods"
        yield RunFinding(rule="throttled", text=text, fix=FIXES["throttled"])


def two_openmp_runtimes(seen: ObservedWorker) -> str | None:
    """Two OpenMP runtimes in one process, neither preloaded: each has threads of its own on the same CPUs."""
    kinds = {kind for path in seen.main.get("openmp", ()) if (kind := openmp_kind(path))}
    if len(kinds) < 2 or any(openmp_kind(path) for path in seen.preload.replace(":", " ").split()):
        return None
    return f"two OpenMP runtimes in one process: {' and '.join(sorted(kinds))}"


def one_cpu_loaders(seen: ObservedWorker) -> str | None:
    """Processes with a worker's own program that may run on one CPU only, though the worker has several."""
    main = seen.main
    if len(seen.plan.loader_cpus or seen.plan.cpus) < 2 or not main:
        return None
    children = [
        each
        for pid, each in seen.observation.samples.items()
        if pid != seen.observation.report.main_pid and each.get("command") == main.get("command")
    ]
    masks = [frozenset().union(*(parse_cpulist(part["cpus"]) for part in each["threads"])) for each in children]
    bound = [mask for mask in masks if len(mask) == 1]
    if len(bound) < 2 or len(frozenset().union(*bound)) > 1:
        return None
    return f"{len(bound)} child processes may run on CPU {format_cpulist(bound[0])} only"


def remote_pages(seen: ObservedWorker) -> str | None:
    """Memory on NUMA nodes that are not the worker's."""
    pages = {_numa_node(node): int(size) for node, size in (seen.main.get("pages") or {}).items()}
    total, own = sum(pages.values()), seen.plan.numa_nodes
    if not own or seen.plan.mempolicy == "interleave":
        return None
    remote = sum(size for node, size in pages.items() if node not in own)
    if remote < REMOTE_BYTES or remote < REMOTE_SHARE * total:
        return None
    return (
        f"{size_text(remote)} of its memory, {remote / total:.0%}, are on other NUMA nodes than {format_cpulist(own)}"
    )


def _numa_node(text: str) -> int:
    """The number. Raises: ValueError if it is no id: hashes of larger numbers can be made to collide."""
    node = int(text)
    if not 0 <= node <= MAX_ID:
        raise ValueError(f"{node} is no id up to {MAX_ID}")
    return node


def low_precision_fallback(seen: ObservedWorker) -> str | None:
    """Autocast to a type whose products run in slow reference kernels on this CPU."""
    for facts in seen.observation.report.conditions.values():
        name = facts.get("slow_precision")
        if isinstance(name, str):
            return f"matrix products in {name[:8]} run in slow reference kernels on this CPU"
    return None


def graph_breaks(seen: ObservedWorker) -> str | None:
    """Breaks in the graphs of torch.compile, with the most frequent reason."""
    counts: dict[str, int] = {}
    for facts in seen.observation.report.conditions.values():
        for reason, count in (facts.get("graph_breaks") or {}).items():
            counts[str(reason)] = counts.get(str(reason), 0) + int(count)
    if not counts:
        return None
    total, first = sum(counts.values()), max(counts, key=lambda reason: counts[reason])
    shown = " ".join(first.split())[:MOST_REASON]
    return f"torch.compile broke its graphs {total} time{'s' * (total != 1)}, most often: {shown}"


def growing_memory(seen: ObservedWorker) -> str | None:
    """Memory of the process that grew from sample to sample in the second half of the run."""
    sizes = list(seen.observation.memory.get(seen.observation.report.main_pid or -1, ()))
    later = sizes[len(sizes) // 2 :]
    if len(sizes) < LEAST_SAMPLES or later != sorted(set(later)):
        return None
    growth = later[-1] - later[0]
    if growth < GROWTH_BYTES or growth < GROWTH * later[0]:
        return None
    return f"its memory kept growing, from {size_text(later[0])} to {size_text(later[-1])}"


def overloaded(seen: ObservedWorker) -> str | None:
    """Requests that arrive faster than they are served: their queue grew to the end of the run."""
    load = seen.observation.report.metrics.get(OFFERED_LOAD, 0.0)
    if not 1 <= load < inf:
        return None
    return f"its requests need {load:.2f} times the time in which they arrive: latencies depend on how long the run is"


RULES: Mapping[str, Rule] = {
    "two-openmp-runtimes": two_openmp_runtimes,
    "one-cpu-loaders": one_cpu_loaders,
    "remote-pages": remote_pages,
    "low-precision-fallback": low_precision_fallback,
    "graph-breaks": graph_breaks,
    "growing-memory": growing_memory,
    "overloaded": overloaded,
}
FIXES: Mapping[str, str] = {
    "two-openmp-runtimes": "--openmp intel or llvm preloads a single one",
    "one-cpu-loaders": "remove OMP_PROC_BIND, KMP_AFFINITY and GOMP_CPU_AFFINITY, or use --affinity mask",
    "remote-pages": "--membind bind, or load data after binding",
    "low-precision-fallback": "leave out --precision on this machine",
    "graph-breaks": "TORCH_LOGS=graph_breaks shows where",
    "growing-memory": "keep no tensors of past steps: loss.item() or detach()",
    "overloaded": "a lower rate has latencies of its own",
    "throttled": "--threads of the quota, or a larger quota",
}


def findings_json(found: Sequence[RunFinding]) -> list[dict[str, Any]]:
    """The findings as JSON data."""
    return [{"rule": each.rule, "workers": sorted(each.workers), "text": each.text, "fix": each.fix} for each in found]
