"""Points over rounds or trials, as a picture that grows with the page: places are percentages, sizes are pixels."""

from __future__ import annotations

from itertools import pairwise

from cpulaunch.charts.scale import horizontal_scale, vertical_scale
from cpulaunch.html.elements.markup import Markup, element, joined, number_text, value_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cpulaunch.charts.model import Point, PointChart, Series
    from cpulaunch.charts.scale import Scale

COLOURS = 6
SHAPES = ("circle", "square", "diamond")
SIZE = 4.0
"""Half the size of a point, in pixels."""


def point_chart(chart: PointChart) -> Markup:
    """The chart with its legend and axes; nothing without points."""
    if not any(series.shown for series in chart.series) and not chart.lost:
        return Markup()
    across, up = horizontal_scale(chart), vertical_scale(chart)
    parts = [
        *_frame(chart, up),
        *(part for number, series in enumerate(chart.series) for part in _series(series, number, across, up)),
        *(_cross(across.share(each.x), each.text) for each in chart.lost),
    ]
    picture = element("svg", *parts, role="img", aria_label=_description(chart))
    return element(
        "figure",
        element("figcaption", chart.title),
        _legend(chart),
        element(
            "div",
            _ticks(up, "up", "bottom"),
            picture,
            _ticks(across, "across", "left", whole=True),
            _class="plot",
        ),
        element("p", chart.x_title, _class="axis"),
        _class="points",
    )


def _description(chart: PointChart) -> str:
    """What a reader hears who does not see the picture."""
    parts = []
    for series in chart.series:
        values = [point.y for point in series.shown]
        if values:
            least, most = number_text(min(values)), number_text(max(values))
            parts.append(f"{series.label}: {len(values)} points from {least} to {most}")
    return f"{chart.title}. {'; '.join(parts)}"


def _legend(chart: PointChart) -> Markup:
    items = [
        element("li", _swatch(number, series), value_of(series.label))
        for number, series in enumerate(chart.series)
        if len(chart.series) > 1 or chart.band or chart.marks
    ]
    if chart.marks:
        hollow = _shape(0.5, 0.5, number=0, marked=True)
        items.append(element("li", element("svg", hollow, _class="swatch", aria_hidden="true"), chart.marks))
    if chart.lost:
        cross = _cross_at("50%", "50%")
        items.append(element("li", element("svg", cross, _class="swatch", aria_hidden="true"), "failed"))
    if chart.band:
        low, high = map(number_text, chart.band)
        items.append(element("li", element("span", _class="swatch band"), f"95 % interval, {low} to {high}"))
    return element("ul", *items, _class="legend") if items else Markup()


def _swatch(number: int, series: Series) -> Markup:
    line = _line((0.0, 0.5), (1.0, 0.5), f"joined s{number % COLOURS}") if series.joined or series.steps else Markup()
    dot = _shape(0.5, 0.5, number=number) if series.dots else Markup()
    return element("svg", line, dot, _class="swatch", aria_hidden="true")


def _frame(chart: PointChart, up: Scale) -> Iterable[Markup]:
    """The interval, the lines at the axis' numbers, and the line at the reference."""
    if chart.band is not None:
        low, high = (up.share(each) for each in chart.band)
        height = max(high - low, 0.004)
        yield element(
            "rect", _class="band", x="0", width="100%", y=_percent(max(0.0, 1 - low - height)), height=_percent(height)
        )
    for tick in up.ticks():
        yield _line((0.0, up.share(tick)), (1.0, up.share(tick)), "grid")
    if chart.reference is not None:
        yield _line((0.0, up.share(chart.reference)), (1.0, up.share(chart.reference)), "reference")


def _series(series: Series, number: int, across: Scale, up: Scale) -> Iterable[Markup]:
    colour = f"s{number % COLOURS}"
    places = [(across.share(point.x), up.share(point.y)) for point in series.shown]
    if series.joined or series.steps:
        for start, end in pairwise(places):
            corner = (end[0], start[1]) if series.steps else end
            yield _line(start, corner, f"joined {colour}")
            if corner != end:
                yield _line(corner, end, f"joined {colour}")
    if series.trend is not None and places:
        first, last = (up.share(each) for each in series.trend)
        yield _line((places[0][0], first), (places[-1][0], last), f"trend {colour}")
    if series.dots:
        for point, (x, y) in zip(series.shown, places, strict=True):
            yield _shape(x, y, number=number, marked=point.marked, text=_point_text(series, point))


def _point_text(series: Series, point: Point) -> str:
    more = f" ({point.text})" if point.text else ""
    return f"{series.label}, {number_text(point.x)}: {number_text(point.y)}{more}"


def _shape(x: float, y: float, *, number: int, marked: bool = False, text: str = "") -> Markup:
    shape = SHAPES[number % len(SHAPES)]
    classes = f"dot s{number % COLOURS} {shape}{' marked' if marked else ''}"
    title = element("title", text) if text else Markup()
    place_x, place_y = _percent(x), _percent(1 - y)
    if shape == "circle":
        return element("circle", title, _class=classes, cx=place_x, cy=place_y, r=SIZE)
    return element("rect", title, _class=classes, x=place_x, y=place_y, width=2 * SIZE - 1, height=2 * SIZE - 1)


def _cross(x: float, text: str) -> Markup:
    return _cross_at(_percent(x), "98%", element("title", text))


def _cross_at(x: str, y: str, title: Markup | None = None) -> Markup:
    return element("text", title or Markup(), "×", _class="lost", x=x, y=y)


def _line(start: tuple[float, float], end: tuple[float, float], name: str) -> Markup:
    (x1, y1), (x2, y2) = start, end
    return element("line", _class=name, x1=_percent(x1), y1=_percent(1 - y1), x2=_percent(x2), y2=_percent(1 - y2))


def _ticks(scale: Scale, name: str, edge: str, *, whole: bool = False) -> Markup:
    """The numbers beside an axis. `whole`: those of rounds and trials, of which there are no halves."""
    found = scale.labelled(whole=whole)
    widest = max((text for _, text in found), key=len, default="")
    spans = [element("span", text, style=f"{edge}:{_percent(scale.share(each))}") for each, text in found]
    return element("div", element("i", widest), joined(spans), _class=f"ticks {name}", aria_hidden="true")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
