"""The page of a diagnosis, from its JSON: the bottleneck, where a step's time went, operations and ranks."""

from __future__ import annotations

from cpulaunch.charts.diagnose_charts import own_seconds, parts_chart, process_name, work_chart
from cpulaunch.html.elements.charts import drawn_charts
from cpulaunch.html.elements.markup import Markup, bullets, bytes_text, code, element, number_text, table, value_of
from cpulaunch.html.page import Headline, Tile, folded, page, section, subsection
from cpulaunch.records.host import count_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    Json = Mapping[str, Any]

STEPS = {
    "optimizer": "a step of the optimizer",
    "module": "a call of a module",
    "backward": "a backward pass",
    "loader": "a batch",
}
PARTS = {
    "data-wait": "data",
    "decode": "data",
    "synchronization": "synchronization",
    "tiny-operations": "tiny",
    "python-loop": "tiny",
    "python-code": "python",
    "waiting": "waiting",
    "slow-collective": "collective",
    "oversubscribed": "delayed",
    "python-threads": "delayed",
    "low-precision": "low_products",
    "memory-bound": "moving",
}
"""Bottleneck -> the part of a step in which it shows most."""
RATES = (
    ("Matrix products", "products", "GFLOP/s", "of_ceiling"),
    ("Element-wise operations, on more than the caches hold", "bandwidth", "GB/s", "of_bandwidth"),
)


def diagnose_page(diagnosis: Json, *, machine: str, labels: Mapping[str, str]) -> str:
    """The page of a diagnosis. `machine`: its processor, in a line. `labels`: what the parts of a step are called."""
    main = diagnosis["processes"][0 if diagnosis["first"] is None else diagnosis["first"]["process"]]
    sections = [
        section("What to do about it", _bottlenecks(diagnosis)),
        section("Where the time of a step goes", *_parts(diagnosis, main, labels), _rates(diagnosis["rates"])),
        section("Operations", _operations(main)),
        _processes(diagnosis["processes"], labels),
        section("What makes the figures less sure", bullets(diagnosis["remarks"])),
    ]
    return page(
        f"cpulaunch diagnose: {' '.join(map(str, diagnosis['program']))}",
        _headline(diagnosis),
        _tiles(diagnosis, main),
        sections,
        footer=f"cpulaunch {diagnosis['cpulaunch']} on {diagnosis['host']}, {machine}. "
        "--json prints the same facts as data.",
    )


def _headline(diagnosis: Json) -> Headline:
    """What the bottleneck is and its share; below that the rest of the sentence, and the second bottleneck."""
    first, text = diagnosis["first"], str(diagnosis["verdict"])
    details = [] if diagnosis["second"] is None else [f"Second: {diagnosis['second']['text']}."]
    if first is not None:
        name, _, rest = str(first["text"]).partition(": ")
        details = [_sentence(rest), *details] if rest else details
        return Headline(text=f"First bottleneck: {name}.", details=tuple(details))
    is_good = text.startswith("nothing stands out")
    return Headline(text=_sentence(text), tone="good" if is_good else "neutral", details=tuple(details))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _tiles(diagnosis: Json, main: Json) -> Iterable[Tile]:
    yield Tile(value=time_text(main["step_seconds"]), label=f"a step, which ends with {STEPS.get(main['step'], '?')}")
    if diagnosis["first"] is not None:
        first = diagnosis["first"]
        yield Tile(value=f"{first['share']:.0%}", label=f"of it: {first['name']}")
        yield Tile(value=_times(first["speedup_at_most"]), label="times as fast without that, at most")
    yield Tile(value=number_text(main["steps"]), label="steps were measured")
    yield Tile(value=number_text(main["threads"]), label="compute threads")
    if len(diagnosis["processes"]) > 1:
        yield Tile(value=number_text(len(diagnosis["processes"])), label="processes")
    if main["loader_bytes"]:
        yield Tile(value=bytes_text(main["loader_bytes"]), label="of batches loaded ahead")


def time_text(seconds: float) -> str:
    """A time of a step with its unit."""
    if seconds >= 1:
        return f"{number_text(seconds)} s"
    return f"{number_text(1e3 * seconds)} ms" if seconds >= 1e-3 else f"{number_text(1e6 * seconds)} µs"


def _times(speedup: float) -> str:
    """A speed-up with two digits: it is what a step could gain at most."""
    return f"{speedup:.2g}" if speedup < 10 else number_text(speedup)


def _bottlenecks(diagnosis: Json) -> Markup:
    """The first and the second bottleneck, with what each could bring."""
    rows = [
        [
            element("span", f"{order}: ", value_of(each["name"])),
            f"{each['share']:.0%}",
            _times(each["speedup_at_most"]),
            code(each["place"]) if each["place"] is not None else "not known",
            element("span", value_of(each["option"]), *_rule(each["rule"])),
        ]
        for order, each in (("first", diagnosis["first"]), ("second", diagnosis["second"]))
        if each is not None
    ]
    heads = ("Bottleneck", "Share of a step", "Times as fast without it, at most", "Place", "Remedy")
    return table("Bottlenecks, the largest first", heads, rows, numeric=(1, 2))


def _rule(rule: str | None) -> tuple[object, ...]:
    return () if rule is None else (" (rule ", code(rule), " of cpulaunch check)")


def _parts(diagnosis: Json, main: Json, labels: Mapping[str, str]) -> list[Markup]:
    best = None if diagnosis["first"] is None else PARTS.get(diagnosis["first"]["kind"])
    whose = "" if len(diagnosis["processes"]) < 2 else f" Of {process_name(main)}."
    added = main["profiler_overhead"]
    seen = f"Torch's profiler saw {count_text(main['profiled_steps'], 'step')}"
    note = f"{seen}." if added is None else f"{seen}, and added {added:.1%} to the time of all."
    rows = [
        [labels.get(name, name), f"{share:.1%}", time_text(share * main["step_seconds"])]
        for name, share in sorted(main["shares"].items(), key=lambda item: -item[1])
    ]
    figures = table("All parts of a step", ("Part", "Share", "Time in a step"), rows, numeric=(1, 2))
    return [
        *drawn_charts([parts_chart(main, labels, best=best)]),
        element("p", f"{note}{whose}", _class="note"),
        folded("Figures", figures),
    ]


def _rates(rates: Json) -> Markup:
    rows = [
        [
            name,
            f"{number_text(rates[key])} {unit}",
            f"{rates[share]:.0%}" if share in rates else "not calibrated",
        ]
        for name, key, unit, share in RATES
        if key in rates
    ]
    if "hidden" in rates:
        rows.append(["Collectives, while the process computes", f"{rates['hidden']:.0%} of their time", ""])
    heads = ("Operations", "Rate", "Share of what the machine can do")
    return table("How fast it computed and moved data", heads, rows, numeric=(1,))


def _operations(main: Json) -> Markup:
    """The operations that took longest, for each step that the profiler saw.

    Such a step takes longer than the mean step, by what the profiler adds and by the time that other programs take,
    which the mean leaves out: an operation's share is of the time that the profiler saw.
    """
    steps, seconds = main["examined_steps"], main["examined_seconds"]
    rows = [
        [
            code(each["name"]),
            number_text(each["count"] / steps),
            time_text(each["seconds"] / steps),
            f"{min(1.0, each['seconds'] / seconds):.1%}",
        ]
        for each in main["operations"]
        if steps > 0 and seconds > 0
    ]
    heads = ("Operation", "Calls in a step", "Time in a step", "Of a step under the profiler")
    caption = "The operations that took longest under the profiler, with those inside them"
    return table(caption, heads, rows, numeric=(1, 2, 3))


def _processes(processes: list[Json], labels: Mapping[str, str]) -> Markup:
    """The processes beside one another, if there are several: which one the others wait for."""
    chart = work_chart(processes)
    if chart is None:
        return Markup()
    shown = [name for name in labels if any(each["shares"].get(name, 0.0) >= 0.05 for each in processes)]
    heads = ("Process", "Steps", "A step", "Without waiting", *(labels[name].capitalize() for name in shown))
    rows = [
        [
            process_name(each),
            number_text(each["steps"]),
            time_text(each["step_seconds"]),
            time_text(own_seconds(each)),
            *(f"{each['shares'].get(name, 0.0):.0%}" for name in shown),
        ]
        for each in processes
    ]
    figures = table("Parts of each one's step", heads, rows, numeric=range(1, len(heads)))
    title = "Ranks" if all(each["rank"] is not None for each in processes) else "Processes"
    return section(title, *drawn_charts([chart]), subsection("Figures of each", figures))
