"""A diagnosis in words: the bottlenecks, where the time went, and remarks. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.diagnosis import overhead, sentence
from cpulaunch.records.errors import escaped
from cpulaunch.view.text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cpulaunch.measure.diagnosis.bottlenecks import ProcessDiagnosis
    from cpulaunch.measure.diagnosis.diagnosis import Diagnosis

LABELS = {
    "data": "waiting for data",
    "collective": "collectives",
    "products": "matrix products",
    "low_products": "products, low precision",
    "moving": "moving data",
    "computing": "other computations",
    "access": "parts of tensors",
    "allocation": "making tensors",
    "synchronization": "reading single numbers",
    "tiny": "tiny operations",
    "overhead": "calling operations",
    "python": "Python between them",
    "waiting": "waiting outside torch",
    "delayed": "ready, without a CPU",
    "unknown": "not known",
}
RATES = {
    "products": ("products", "GFLOP/s", "of_ceiling", "the ceiling"),
    "moving": ("bandwidth", "GB/s", "of_bandwidth", "the bandwidth"),
}
"""Part of the time -> its rate, the unit, the share of the machine's rate, and what that is called."""
LEAST = 0.005
MUCH_COMPUTING = 0.1
UNKNOWN = 0.5
"""Of a step: from this on, nothing can be said to stand out or not."""
BAR = 30


def diagnosis_text(found: Diagnosis, *, width: int, strong: Callable[[str], str]) -> str:
    """All of a diagnosis. `strong`: writes the first bottleneck so that it is seen first."""
    main = found.main
    if main is None:
        return "\n".join(strong(line) for line in wrapped(found.absence, width))
    lines = [strong(line) for line in wrapped(escaped(first_line(found)), width)]
    if found.second is not None:
        lines += wrapped(escaped(f"second: {sentence(found.second, found.seconds(found.second))}"), width)
    lines += ["", *_table(main, found), ""]
    for remark in (*_measured(main), *found.remarks):
        lines += wrapped(escaped(remark), width)
    return "\n".join(lines)


def first_line(found: Diagnosis) -> str:
    """The first bottleneck in a sentence, or that nothing stands out."""
    if found.first is not None:
        return f"first bottleneck: {sentence(found.first, found.seconds(found.first))}"
    main = found.main
    if main is None:
        return found.absence
    if main.shares.unknown >= UNKNOWN:
        return f"not known: the profiler did not see where {main.shares.unknown:.0%} of a step went{_why_unseen(main)}"
    of_ceiling = found.rates.get("of_ceiling")
    rate = "" if of_ceiling is None else f" at {of_ceiling:.0%} of what this machine can do"
    return f"nothing stands out: {main.shares.products:.0%} of a step are matrix products{rate}{_computations(main)}"


def _why_unseen(main: ProcessDiagnosis) -> str:
    """What to do where the program ended before the profiler's turn."""
    figures = main.figures
    if figures.profiled_steps or figures.window_failure:
        return ""
    steps = f"the program ended after {figures.seen_steps} steps"
    return f", as {steps}; it looks after --warm-up, half of --steps and half a second of steps"


def _computations(main: ProcessDiagnosis) -> str:
    """What else computes, if that takes much of the time: compiled graphs, decompositions, operators of extensions."""
    share = main.shares.computing
    return "" if share < MUCH_COMPUTING else f", {share:.0%} other computations"


def _table(main: ProcessDiagnosis, found: Diagnosis) -> Iterator[str]:
    """A bar for each part of the time."""
    shares = main.shares
    for name, label in sorted(LABELS.items(), key=lambda item: -getattr(shares, item[0])):
        share = getattr(shares, name)
        if share >= LEAST:
            yield f"  {label:24}{share:5.0%}  {'█' * round(min(1.0, share) * BAR)}{_rate(name, found)}".rstrip()


def _rate(name: str, found: Diagnosis) -> str:
    """The rate of an operation's part of the time, after its bar."""
    text = rate_text(name, found.rates)
    return f"  {text}" if text else ""


def rate_text(name: str, rates: Mapping[str, float]) -> str:
    """The rate at which a part of the time computed or moved data; empty if it is not known."""
    if name == "collective" and "hidden" in rates:
        return f"{rates['hidden']:.0%} of their time is hidden"
    kind, unit, share_name, ceiling = RATES.get(name, ("", "", "", ""))
    rate, share = rates.get(kind), rates.get(share_name)
    if rate is None:
        return ""
    figure = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{figure} {unit}" + ("" if share is None else f", {share:.0%} of {ceiling}")


def _measured(main: ProcessDiagnosis) -> list[str]:
    figures = main.figures
    rank = "" if figures.rank is None else f" of rank {figures.rank}"
    added = overhead(main)
    profiler = "" if added is None else f"; the profiler saw {figures.profiled_steps} and added {added:.1%}"
    what = {"optimizer": "an optimizer's step", "module": "a module's call", "backward": "a backward pass"}
    ends = what.get(figures.step, "a batch")
    return [f"{figures.steps} steps{rank} were measured, each ends with {ends}{profiler}."]
