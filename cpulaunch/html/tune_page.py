"""The page of a search for settings, from its JSON: what is best, how sure that is, and how it was found."""

from __future__ import annotations

import shlex

from cpulaunch.charts.model import is_drawable
from cpulaunch.charts.tune_charts import (
    baseline_chart,
    final_round_chart,
    finalists_chart,
    importance_chart,
    options_text,
    trials_chart,
)
from cpulaunch.html.ceilings import RateFigure, ceilings
from cpulaunch.html.elements.charts import drawn_charts
from cpulaunch.html.elements.markup import Markup, code, element, number_text, table, value_of
from cpulaunch.html.page import Headline, Tile, folded, page, section, sentence
from cpulaunch.html.sides import core_maps, difference_section, inside_sides

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from cpulaunch.charts.model import Chart
    from cpulaunch.html.sides import PageMachine, PageSide

    Json = Mapping[str, Any]


REFERENCE = "the reference's (plain Python, or -O0 for a job of ranks)"


def tune_page(search: Json, *, machine: PageMachine, sides: Sequence[PageSide]) -> str:
    """The page of a search. `sides`: the default and, if there is one, the winner."""
    sections = [
        _use(search["winner"]),
        section("Final round", *_drawn(finalists_chart(search), final_round_chart(search)), _finalists(search)),
        section("Trials", *_drawn(trials_chart(search), importance_chart(search)), _trials(search)),
        _failures(search),
        difference_section(sides),
        core_maps(sides),
        *inside_sides(sides),
        section("The default between trials", *_drawn(baseline_chart(search))),
        _space(search),
        ceilings(machine.calibration, list(_rates(search))),
        _provenance(search),
    ]
    return page(
        f"cpulaunch tune: {' '.join(map(str, [*search['options'], *search['program']]))}",
        _headline(search),
        _tiles(search),
        sections,
        footer=f"cpulaunch {search['cpulaunch']} on {search['host']}, {machine.name}, {search['started']}. "
        "--json prints the same facts as data.",
    )


def _drawn(*charts: Chart | None) -> list[Markup]:
    return drawn_charts(each for each in charts if each is not None)


def _headline(search: Json) -> Headline:
    winner = search["winner"]
    sure = winner is not None and winner["confirmed"]
    details = (_outputs(search), *(f"{each}." for each in search["warnings"]))
    return Headline(text=sentence(str(search["verdict"])), tone="good" if sure else "neutral", details=details)


def _outputs(search: Json) -> str:
    """Whether the trials' outputs were compared, and what error was allowed."""
    if not search["outputs"]:
        return "Outputs were not compared: the program calls no cpulaunch.checksum(), and --output was not given."
    if search["max_error"] is None:
        return f"The outputs of every trial were compared with {REFERENCE}; no setting may change numerics."
    allowed = number_text(search["max_error"])
    return f"Outputs were compared with {REFERENCE}; a relative error of {allowed} was allowed."


def _tiles(search: Json) -> Iterable[Tile]:
    winner, trials = search["winner"], search["trials"]
    if winner is not None and is_drawable(winner["ratio"]):
        sure = "" if winner["confirmed"] else ", not confirmed"
        yield Tile(value=number_text(winner["ratio"]), label=f"times as good as the default{sure}")
    yield Tile(value=str(len(trials)), label="trial" if len(trials) == 1 else "trials")
    failed = sum(each["state"] == "failed" for each in trials)
    yield Tile(value=str(failed), label="failed trial" if failed == 1 else "failed trials")
    yield Tile(value=str(len(search["final"]["default"])), label="rounds in the final round")
    yield Tile(value=_duration(search["seconds"]), label="in total")


def _duration(seconds: float) -> str:
    return f"{number_text(round(seconds, 1))} s" if seconds < 600 else f"{number_text(round(seconds / 60))} min"


def _use(winner: Json | None) -> Markup:
    """The settings of the winner, the profile that has them, and the command line that uses it."""
    if winner is None:
        return Markup()
    settings = [[code(name), code(value)] for name, value in winner["settings"].items()]
    parts = [table("The settings that were found", ("Setting", "Value"), settings)]
    if winner["profile"] is not None:
        parts.append(element("p", "They are in the profile ", code(winner["profile"]), "."))
    if winner["command"] is not None:
        parts.append(element("p", "Use them: ", code(shlex.join(map(str, winner["command"])))))
    return section("What to use", *parts)


def _finalists(search: Json) -> Markup:
    rows = []
    for each in search["final"]["finalists"]:
        interval = "too few rounds"
        if each["low"] is not None and each["high"] is not None:
            interval = f"{number_text(each['low'])} to {number_text(each['high'])}"
        state = interval if each["failure"] is None else f"failed: {each['failure']}"
        rows.append([code(options_text(each["options"])), number_text(each["ratio"]), value_of(state), each["rounds"]])
    heads = ("Options", "Times the default", "95 % interval", "Rounds")
    return table("The best trials, measured again in turn with the default", heads, rows, numeric=(1, 3))


def _trials(search: Json) -> Markup:
    rows = [
        [
            str(each["number"] + 1),
            code(options_text(each["options"])),
            value_of(each["state"]),
            number_text(each["ratio"]),
            value_of(", ".join(number_text(value) for value in each["values"])),
            value_of("; ".join(map(str, each["disturbed"]))),
        ]
        for each in search["trials"]
    ]
    heads = ("Trial", "Options", "State", "Times the default", "Figures", "Disturbed by")
    return folded("All trials", table("Every trial", heads, rows, numeric=(0, 3)))


def _failures(search: Json) -> Markup:
    rows = [
        [str(each["number"] + 1), code(options_text(each["options"])), value_of(each["failure"] or "")]
        for each in search["trials"]
        if each["state"] == "failed"
    ]
    content = table("They never win", ("Trial", "Options", "Reason"), rows)
    return section("Failed trials", content)


def _space(search: Json) -> Markup:
    rows = [[code(each["setting"]), code(", ".join(map(str, each["values"])))] for each in search["space"]]
    return section("What was searched", table("Settings and the values that were open", ("Setting", "Values"), rows))


def _rates(search: Json) -> Iterable[RateFigure]:
    """The metrics of the reference and of the best trial, for the shares of ceilings."""
    if search["reference"] is not None:
        for name, value in search["reference"]["metrics"].items():
            yield RateFigure(label="plain Python", metric=str(name), value=value)
    winner = search["winner"]
    trial = next((t for t in search["trials"] if winner is not None and t["settings"] == winner["settings"]), None)
    if trial is not None:
        for name, value in trial["metrics"].items():
            yield RateFigure(label=options_text(trial["options"]), metric=str(name), value=value)


def _provenance(search: Json) -> Markup:
    facts = {**search["machine"], **search["versions"]}
    rows = [[value_of(name), value_of(value)] for name, value in facts.items()]
    content = table("The result holds for these; a launch warns if they are others", ("Fact", "Value"), rows)
    return section("Machine and versions", content)
