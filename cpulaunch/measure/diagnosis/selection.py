"""Which processes a diagnosis is about, and why there are none. Pure."""

from __future__ import annotations

from cpulaunch.records.torch_settings import IN_THREADS, LOADED, STEPPING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.measure.diagnosis.figures import ProcessFigures

STEPS = ("loader", "backward", "module", "optimizer")
"""What ends steps, from what says least of a program to what says most."""
UNMEASURED = 2
"""Steps besides the warm-up that do not count: with the first one time begins, and counters begin after another."""


def chosen(figures: Sequence[ProcessFigures]) -> list[ProcessFigures]:
    """The measured processes that do what the program is for: helpers beside a training only call modules."""
    measured = [each for each in figures if each.steps > 0]
    ranks = [each for each in measured if each.rank is not None]
    most = max((_level(each) for each in ranks or measured), default=0)
    return [each for each in measured if _level(each) >= most or each.rank is not None]


def _level(figures: ProcessFigures) -> int:
    return STEPS.index(figures.step) if figures.step in STEPS else 0


def absence(
    figures: Sequence[ProcessFigures], states: frozenset[str], warm_up: int, unmeasured: str | None = None
) -> str:
    """Why no process was measured, in words. `states`: how far any of them came. `unmeasured`: what went wrong."""
    if unmeasured is not None:
        return f"its steps could not be measured: {unmeasured}"
    seen = max((each.seen_steps for each in figures), default=0)
    if seen:
        least = UNMEASURED + 1 + warm_up
        return f"too few steps: {seen} were seen, and {least} are needed with --warm-up {warm_up}"
    if STEPPING in states:
        return (
            "its steps were not measured: the process that made them ended before enough of them had been seen, by a "
            "signal, os._exit or os.exec, which leave no time to say how many"
        )
    if IN_THREADS in states:
        return (
            "no step was seen: modules are called only in other threads than the one that loads torch, and none of "
            "these makes enough calls, as in a server with a new thread for each request; measure it with a pool of "
            "threads"
        )
    if LOADED not in states:
        return "no step was seen: no process loaded torch, or none with cpulaunch's plugin (as with python -I or -S)"
    return (
        "no step was seen: outside the functions that torch.compile or torch.jit compiled, no optimizer made a step, "
        "and no call of a module, backward pass or fetch of a batch was repeated"
    )
