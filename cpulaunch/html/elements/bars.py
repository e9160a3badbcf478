"""Horizontal bars with intervals, as elements that grow with the page and are read out as their numbers."""

from collections.abc import Sequence

from cpulaunch.charts.model import MAX_BARS, Bar, is_drawable
from cpulaunch.html.elements.markup import Markup, element, joined, number_text, value_of


def bar_chart(caption: str, bars: Sequence[Bar], *, reference: float | None = None) -> Markup:
    """The bars from zero on one scale. A figure below zero, or that is no number, has no bar.

    `reference`: a value with a line of its own.
    """
    shown = bars[:MAX_BARS]
    ends = [each for bar in shown for each in (bar.value, bar.high)]
    top = max((_drawable(each) for each in [*ends, reference]), default=0.0) or 1.0
    more = f"{len(bars) - MAX_BARS:,} more are left out." if len(bars) > MAX_BARS else ""
    return element(
        "figure",
        element("figcaption", caption),
        element("ul", *(_bar(bar, top, reference) for bar in shown), _class="bars"),
        element("p", more, _class="note") if more else Markup(),
    )


def _bar(bar: Bar, top: float, reference: float | None) -> Markup:
    drawn = [element("span", _class="fill best" if bar.best else "fill", style=_length("width", bar.value, top))]
    text = f"{number_text(bar.value)} {bar.unit}".strip()
    if bar.low is not None and bar.high is not None:
        low, high = _drawable(bar.low), _drawable(bar.high)
        place = f"{_length('left', low, top)};{_length('width', max(high - low, 0.0), top)}"
        drawn.append(element("span", _class="interval", style=place))
        text += f" ({number_text(bar.low)} to {number_text(bar.high)})"
    if reference is not None:
        drawn.append(element("span", _class="reference", style=_length("left", reference, top)))
    return element(
        "li",
        element("span", value_of(bar.label), _class="label"),
        element("span", joined(drawn), _class="track", aria_hidden="true"),
        element("span", text, _class="value"),
    )


def _drawable(value: float | None) -> float:
    return max(float(value), 0.0) if value is not None and is_drawable(value) else 0.0


def _length(name: str, value: float | None, top: float) -> str:
    return f"{name}:{100 * (_drawable(value) / top):.2f}%"
