"""The page of a comparison, from its JSON: which side is better, all samples, and what the sides differ in."""

from __future__ import annotations

from cpulaunch.charts.compare_charts import compare_charts
from cpulaunch.html.ceilings import RateFigure, ceilings
from cpulaunch.html.elements.charts import drawn_charts
from cpulaunch.html.elements.markup import Markup, element, number_text, table, value_of
from cpulaunch.html.page import Headline, Tile, folded, page, section, sentence
from cpulaunch.html.sides import PageMachine, PageSide, core_maps, difference_section, inside_sides
from cpulaunch.records.host import count_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, Literal

    Json = Mapping[str, Any]

TONES: dict[str, Literal["good", "bad"]] = {"better": "good", "worse": "bad"}


def compare_page(comparison: Json, *, machine: PageMachine, sides: Sequence[PageSide]) -> str:
    """The page of a comparison. `sides`: what is known of each, in the order of the comparison."""
    charts = drawn_charts(compare_charts(comparison))
    sections = [
        section("Verdict in figures", *charts[:1], _sides_table(comparison)),
        section("Samples", *charts[1:], _samples_table(comparison)),
        _failures(comparison),
        _disturbances(comparison),
        difference_section(sides),
        core_maps(sides),
        *inside_sides(sides),
        ceilings(machine.calibration, _figures(comparison)),
    ]
    return page(
        f"cpulaunch compare: {' '.join(comparison['program'])}",
        _headline(comparison),
        _tiles(comparison),
        sections,
        footer=f"cpulaunch {comparison['cpulaunch']} on {comparison['host']}, {machine.name}. "
        "--json prints the same facts as data.",
    )


def _figures(comparison: Json) -> list[RateFigure]:
    if comparison["metric"] is None:
        return []
    name = comparison["metric"]["name"]
    return [RateFigure(label=side["label"], metric=name, value=side["median"]) for side in comparison["sides"]]


def _headline(comparison: Json) -> Headline:
    """The verdict that is certain, and largest, then those on the other sides, then the remarks."""
    remarks = tuple(sentence(str(each)) for each in comparison["remarks"])
    found = sorted(comparison["comparisons"], key=_weight, reverse=True)
    if not found:
        return Headline(text="No verdict: no round was completed.", tone="bad", details=remarks)
    texts = [sentence(each["text"]) for each in found]
    return Headline(text=texts[0], tone=TONES.get(found[0]["verdict"], "neutral"), details=(*texts[1:], *remarks))


def _weight(estimate: Json) -> tuple[int, float]:
    """What puts a verdict first: it is a good one, it is certain, the ratio is large."""
    return {"better": 2, "worse": 1}.get(estimate["verdict"], 0), estimate["ratio"]


def _tiles(comparison: Json) -> Iterable[Tile]:
    rounds = comparison["rounds"]
    for each in comparison["comparisons"][:3]:
        label = f"times as good: {comparison['sides'][each['side']]['label']}"
        yield Tile(value=number_text(each["ratio"]), label=label)
    yield Tile(value=str(len(rounds)), label="round" if len(rounds) == 1 else "rounds")
    disturbed = sum(any(sample["disturbed"] for sample in each["samples"]) for each in rounds)
    yield Tile(value=str(disturbed), label="disturbed round" if disturbed == 1 else "disturbed rounds")
    yield Tile(value=f"{number_text(round(comparison['seconds'], 1))} s", label="in total")


def _sides_table(comparison: Json) -> Markup:
    estimates = {each["side"]: each for each in comparison["comparisons"]}
    name = "Figure" if comparison["metric"] is None else comparison["metric"]["name"]
    rows = [_side_row(side, estimates.get(number)) for number, side in enumerate(comparison["sides"])]
    heads = ("Side", f"Median, {name}", "Spread", "Drift", "Ratio", "95 % interval")
    return table("The sides; the ratio is to the first one", heads, rows, numeric=(1, 2, 3, 4, 5))


def _side_row(side: Json, estimate: Json | None) -> list[object]:
    interval = "the reference" if estimate is None else "too few rounds"
    if estimate is not None and estimate["low"] is not None:
        interval = f"{number_text(estimate['low'])} to {number_text(estimate['high'])}"
    return [
        value_of(side["label"]),
        number_text(side["median"]),
        "" if side["spread"] is None else f"{side['spread']:.1%}",
        "none" if side["drift"] is None else f"{side['drift']:+.1%}",
        "1" if estimate is None else number_text(estimate["ratio"]),
        interval,
    ]


def _samples_table(comparison: Json) -> Markup:
    """All samples, folded."""
    labels = [side["label"] for side in comparison["sides"]]
    rows = []
    for number, each in enumerate(comparison["rounds"], start=1):
        order = ", ".join(str(side + 1) for side in each["order"])
        rows.append([str(number), order, *(number_text(sample["value"]) for sample in each["samples"])])
    heads = ("Round", "Order of sides", *labels)
    return folded("All samples", table("The figure of each launch", heads, rows, numeric=range(2, 2 + len(labels))))


def _failures(comparison: Json) -> Markup:
    rows = [
        [
            value_of(comparison["sides"][each["side"]]["label"]),
            "first launch" if each["round"] == 0 else str(each["round"]),
            value_of(each["text"]),
        ]
        for each in comparison["failures"]
    ]
    return section("Failed launches", table("Launches without a figure", ("Side", "Round", "Reason"), rows))


def _disturbances(comparison: Json) -> Markup:
    rows = []
    for number, each in enumerate(comparison["rounds"], start=1):
        for side, sample in zip(comparison["sides"], each["samples"], strict=True):
            if sample["disturbed"]:
                rows.append([str(number), value_of(side["label"]), value_of("; ".join(map(str, sample["disturbed"])))])
    if not rows:
        return Markup()
    rounds = len({row[0] for row in rows})
    text = f"{rounds} of {count_text(len(comparison['rounds']), 'round')} had a disturbed launch. They count: leaving "
    text += "them out could favour the side that disturbs itself less."
    content = table("Disturbed launches", ("Round", "Side", "What disturbed it"), rows)
    return section("Disturbances", element("p", text), folded("Disturbed launches", content))
