"""A diagnosis in words: the bottlenecks, where the time went, and remarks. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.diagnosis import overhead, sentence
from cpulaunch.records.errors import escaped
from cpulaunch.view.text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cpulaunch.measure.diagnosis.bottlenecks import ProcessDiagnosis
    from cpulaunch.measure.diagnosis.diagnosis import Diagnosis

LABELS = {
    "data": "waiting for data",
    "collective": "collectives",
    "products": "matrix products",
    "low_products": "products, low precision",
    "moving": "other operations",
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
LEAST = 0.005
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
        lines += wrapped(escaped(f"second: {sentence(found.second, main.shares.seconds)}"), width)
    lines += ["", *_table(main, found), ""]
    for remark in (*_measured(main), *found.remarks):
        lines += wrapped(escaped(remark), width)
    return "\n".join(lines)


def first_line(found: Diagnosis) -> str:
    """The first bottleneck in a sentence, or that nothing stands out."""
    main = found.main
    seconds = 0.0 if main is None else main.shares.seconds
    if found.first is not None:
        return f"first bottleneck: {sentence(found.first, seconds)}"
    if main is not None and main.shares.unknown >= UNKNOWN:
        return f"not known: the profiler did not see where {main.shares.unknown:.0%} of a step went"
    of_ceiling = found.rates.get("of_ceiling")
    rate = "" if of_ceiling is None else f" at {of_ceiling:.0%} of what this machine can do"
    products = 0.0 if main is None else main.shares.products
    return f"nothing stands out: {products:.0%} of a step are matrix products{rate}"


def _table(main: ProcessDiagnosis, found: Diagnosis) -> Iterator[str]:
    """A bar for each part of the time."""
    shares = main.shares
    for name, label in sorted(LABELS.items(), key=lambda item: -getattr(shares, item[0])):
        share = getattr(shares, name)
        if share >= LEAST:
            rate = _rate(found) if name == "products" else ""
            yield f"  {label:24}{share:5.0%}  {'█' * round(share * BAR)}{rate}".rstrip()


def _rate(found: Diagnosis) -> str:
    rate, of_ceiling = found.rates.get("products"), found.rates.get("of_ceiling")
    if rate is None:
        return ""
    return f"  {rate:.0f} GFLOP/s" + ("" if of_ceiling is None else f", {of_ceiling:.0%} of the ceiling")


def _measured(main: ProcessDiagnosis) -> list[str]:
    figures = main.figures
    rank = "" if figures.rank is None else f" of rank {figures.rank}"
    added = overhead(main)
    profiler = "" if added is None else f"; the profiler saw {figures.profiled_steps} and added {added:.1%}"
    what = {"optimizer": "an optimizer's step", "module": "a module's call", "backward": "a backward pass"}
    ends = what.get(figures.step, "a batch")
    return [f"{figures.steps} steps{rank} were measured, each ends with {ends}{profiler}."]
