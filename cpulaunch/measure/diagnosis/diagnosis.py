"""The diagnosis of a launch: its processes, its bottlenecks, and how far the figures can be trusted. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.advice import ADVICE
from cpulaunch.measure.diagnosis.bottlenecks import LEAST_SECOND, LEAST_SHARE, bottlenecks, diagnosed
from cpulaunch.measure.diagnosis.rates import Ceilings, rates
from cpulaunch.measure.diagnosis.selection import absence, chosen
from cpulaunch.records.host import count_text, size_text
from cpulaunch.records.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.measure.diagnosis.bottlenecks import Bottleneck, ProcessDiagnosis, ProcessLimits
    from cpulaunch.measure.diagnosis.figures import ProcessFigures

MANY_OTHERS = 0.15
FEW_STEPS = 4
MUCH_MEMORY = 0.4
"""Of all memory, in batches that have been loaded ahead: the program and its workers need some too."""


@record
class Ending:
    """How far the program came. `states`: any of its processes. `failure`: how it ended, if not well.

    `unmeasured`: why a process could not be measured. `ignored`: files of figures that were left out. `warm_up`: the
    steps that do not count.
    """

    states: frozenset[str] = frozenset()
    failure: str | None = None
    unmeasured: str | None = None
    ignored: int = 0
    warm_up: int = 5


NO_ENDING = Ending()


@record
class Diagnosis:
    """What was found. `first` and `second` None: nothing stands out. `rates`: of the main process.

    `absence`: why there are no processes.
    """

    processes: tuple[ProcessDiagnosis, ...] = ()
    first: Bottleneck | None = None
    second: Bottleneck | None = None
    rates: Mapping[str, float] = {}
    remarks: tuple[str, ...] = ()
    absence: str = ""

    @property
    def main(self) -> ProcessDiagnosis | None:
        """The process of the first bottleneck, else the first one."""
        if not self.processes:
            return None
        return self.processes[0 if self.first is None else self.first.process]

    def seconds(self, found: Bottleneck) -> float:
        """The time of a step of the process that a bottleneck is about."""
        return self.processes[found.process].shares.seconds


def diagnosis_of(
    figures: Sequence[ProcessFigures],
    machines: Mapping[int, ProcessLimits],
    default: ProcessLimits,
    ceilings: Ceilings,
    memory_bytes: int | None = None,
    *,
    ending: Ending = NO_ENDING,
) -> Diagnosis:
    """The diagnosis. `machines`: by the worker's index. `ceilings`: what this machine can do.

    `memory_bytes`: what all processes together may use.
    """
    ordered = sorted(chosen(figures), key=lambda each: (each.rank is None, each.rank, each.index, each.pid))
    processes = tuple(diagnosed(each, _shared(each, ordered, machines.get(each.index, default))) for each in ordered)
    found = bottlenecks(processes)
    first = next((each for each in found if each.share >= LEAST_SHARE), None)
    rest = [each for each in found if first is not None and each is not first and each.share >= LEAST_SECOND]
    main = processes[0 if first is None else first.process] if processes else None
    return Diagnosis(
        processes=processes,
        first=first,
        second=rest[0] if rest else None,
        rates={} if main is None else _rates(main, ceilings, ordered),
        absence="" if processes else absence(figures, ending.states, ending.warm_up, ending.unmeasured),
        remarks=(
            *_failure_notices(ending),
            *_trust_notices(processes),
            *loader_memory_notices(processes, memory_bytes),
        ),
    )


def _shared(figures: ProcessFigures, all_figures: Sequence[ProcessFigures], machine: ProcessLimits) -> ProcessLimits:
    """What a process was given, with the running threads of the others on its CPUs."""
    shared_threads = shared_cpus = 0
    for each in all_figures:
        is_other = each is not figures and _at_the_same_time(each, figures)
        if is_other and each.reachable_cpus & figures.reachable_cpus and (threads := _running_threads(each)):
            shared_threads += threads
            shared_cpus |= each.reachable_cpus
    return replace(machine, shared_threads=shared_threads, shared_cpus=shared_cpus)


def _running_threads(figures: ProcessFigures) -> int:
    """How many threads of a process want to run at a time: fewer than it has if it often waits for something else."""
    wanted = figures.wanted_cpus
    return figures.threads if wanted <= 0 else min(figures.threads, round(wanted))


def _at_the_same_time(one: ProcessFigures, other: ProcessFigures) -> bool:
    return one.started < other.ended and other.started < one.ended


def _rates(main: ProcessDiagnosis, ceilings: Ceilings, all_figures: Sequence[ProcessFigures]) -> dict[str, float]:
    """The rates of a process; none where other programs held up its threads, and with them its operations."""
    if main.shares.others >= MANY_OTHERS:
        return {}
    return rates(main.figures, ceilings, sharers=_sharers(main.figures, all_figures))


def _sharers(figures: ProcessFigures, all_figures: Sequence[ProcessFigures]) -> int:
    """How many of the measured processes used the machine while this one did."""
    return sum(each is figures or _at_the_same_time(each, figures) for each in all_figures)


def sentence(found: Bottleneck, seconds: float) -> str:
    """A bottleneck in one sentence: what it is, where, its share, and what addresses it with its most effect."""
    advice = ADVICE[found.kind]
    where = f" at {found.place}" if found.place else ""
    rule = f" (rule {advice.rule})" if advice.rule else ""
    return (
        f"{advice.name}, {found.share:.0%} of a step of {step_time(seconds)}: {advice.text.format(detail=found.detail)}"
        f"{where}; {advice.option}{rule} would make steps at most {_times(found.speedup)} times as fast"
    )


def _times(speedup: float) -> str:
    return f"{speedup:.2g}" if speedup < 10 else f"{speedup:.0f}"


def step_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _failure_notices(ending: Ending) -> list[str]:
    remarks = []
    if ending.failure is not None:
        remarks.append(f"the program did not end well after these steps: {ending.failure}")
    if ending.unmeasured is not None:
        remarks.append(f"another process could not be measured: {ending.unmeasured}")
    if ending.ignored:
        files = f"{count_text(ending.ignored, 'file')} of figures {'was' if ending.ignored == 1 else 'were'}"
        remarks.append(f"{files} left out: malformed, or more than is read of a launch")
    return remarks


def _trust_notices(processes: Sequence[ProcessDiagnosis]) -> list[str]:
    remarks = []
    others = max((each.shares.others for each in processes), default=0.0)
    if others >= MANY_OTHERS:
        remarks.append(
            f"other programs took the CPU for {others:.0%} of the time, which is left out; measure again when the "
            "machine is idle"
        )
    if any(each.figures.steps < FEW_STEPS for each in processes):
        remarks.append("there were few steps; more give surer shares")
    seen = min((float(each.figures.window.get("part", 1.0)) for each in processes if each.figures.window), default=1.0)
    if seen < 1:
        remarks.append(f"of what the profiler saw, the first {seen:.1%} were looked at: there were too many operations")
    failure = next((each.figures.window_failure for each in processes if each.figures.window_failure), "")
    if failure:
        remarks.append(f"the profiler saw nothing: {failure}")
    return remarks


def loader_memory_notices(processes: Sequence[ProcessDiagnosis], memory_bytes: int | None) -> list[str]:
    """The warning that batches which have been loaded ahead may fill the memory: before the kernel ends the program."""
    held = sum(each.figures.loader_bytes for each in processes)
    if not memory_bytes or held < MUCH_MEMORY * memory_bytes:
        return []
    largest = max(processes, key=lambda each: each.figures.loader_bytes).figures
    each_text = f"{count_text(largest.loader_workers or 0, 'worker')} x prefetch {largest.prefetched} x "
    each_text += size_text(largest.batch_bytes) + (f", {len(processes)} processes" if len(processes) > 1 else "")
    return [
        f"batches loaded ahead may take {size_text(held)} of {size_text(memory_bytes)} of memory ({each_text}): "
        "--prefetch 1 or fewer --dataloader-workers, before the kernel ends the program"
    ]


def overhead(process: ProcessDiagnosis) -> float | None:
    """The time that the profiler added, as a share of all measured steps; None if it is not known.

    What other threads took from the process, in these steps and in the others, is left out.
    """
    figures = process.figures
    seconds = max(0.0, figures.seconds - min(figures.sum("thread_delay"), 0.99 * figures.seconds))
    window = figures.window or {}
    delay = float(window.get("delay", 0.0)) / max(1e-9, float(window.get("part", 1.0)))
    profiled = max(0.0, figures.profiled_seconds - delay)
    if not figures.profiled_steps or not figures.steps or seconds + profiled <= 0:
        return None
    return max(0.0, profiled - seconds / figures.steps * figures.profiled_steps) / (seconds + profiled)
