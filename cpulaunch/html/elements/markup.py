"""Elements of HTML whose text, of any author, cannot become markup, reorder a line or fill the page."""

from collections.abc import Iterable
from html import escape
from math import isfinite

from cpulaunch.records.errors import escaped
from cpulaunch.records.host import size_text

MAX_TEXT = 2000
"""Characters of one value that are shown."""
MAX_ROWS = 200
"""Rows of a table that are shown."""
MAX_LISTED = 12
"""Texts that a sentence lists."""
VOID = ("meta", "br", "wbr")


class Markup(str):
    """Text that is HTML. Only this module, and what draws pictures, makes one from a plain text."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children that are no Markup are escaped; an attribute's name loses its leading underscore.

    An attribute is left out if it is None or False, and has no value if it is True.
    """
    given = {key: value for key, value in attributes.items() if value is not None and value is not False}
    words = [name, *(_attribute(key, value) for key, value in given.items())]
    start = f"<{' '.join(words)}>"
    return Markup(start if name in VOID else f"{start}{joined(children)}</{name}>")


def _attribute(name: str, value: object) -> str:
    name = name.removeprefix("_").replace("_", "-")
    return name if value is True else f'{name}="{escape(shown(value))}"'


def joined(children: Iterable[object]) -> Markup:
    """The children one after another; those that are no Markup are escaped."""
    return Markup("".join(each if isinstance(each, Markup) else escape(shown(each)) for each in children))


def shown(value: object) -> str:
    """A value in one line: control characters and marks of direction escaped, the end of a long one left out."""
    text = str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text):,} characters)"
    return escaped(text)


def value_of(value: object) -> Markup:
    """A value of another program, set apart so that its direction of writing does not change the line around it."""
    return element("bdi", value)


def code(value: object) -> Markup:
    """A name or value in the font of code."""
    return element("code", value_of(value))


def number_text(value: object) -> str:
    """A number with about four digits; an empty text for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    try:
        number = float(value)
    except OverflowError:
        return "more than 1e308"
    if not isfinite(number):
        return str(number)
    large = 1000 <= abs(number) < 1e15
    return f"{number:,.0f}" if large else f"{number:.4g}"


def bytes_text(value: object) -> str:
    """A number of bytes with its unit; an empty text for what is no number, or no memory has."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        return ""
    return size_text(value)


def table(
    caption: str, heads: Iterable[str], rows: Iterable[Iterable[object]], *, numeric: Iterable[int] = ()
) -> Markup:
    """A table that scrolls by itself where it is too wide; nothing without rows. `numeric`: columns of numbers."""
    found, right = list(rows), set(numeric)
    if not found:
        return Markup()
    titles = list(heads)
    body = [element("tr", *_cells(row, titles, right), role="row") for row in found[:MAX_ROWS]]
    head = element(
        "tr", *(element("th", title, scope="col", _class=_kind(place, right)) for place, title in enumerate(titles))
    )
    parts = [element("caption", caption), element("thead", head), element("tbody", *body)]
    note = element("p", f"{len(found) - MAX_ROWS:,} more rows are left out.", _class="note")
    return joined(
        [scrolling(caption, element("table", *parts, role="table")), note if len(found) > MAX_ROWS else Markup()]
    )


def _cells(row: Iterable[object], titles: Iterable[str], right: set[int]) -> Iterable[Markup]:
    """The cells of a row; each has its column's title, which is shown beside it where the page is narrow."""
    for place, (cell, title) in enumerate(zip(row, titles, strict=True)):
        content = cell if isinstance(cell, Markup) else element("span", cell)
        yield element("td", content, role="cell", data_title=title, _class=_kind(place, right))


def _kind(place: int, right: set[int]) -> str | None:
    return "number" if place in right else None


def bullets(texts: Iterable[object]) -> Markup:
    """A list of values of other programs, the first ones of many; nothing without any."""
    found = list(texts)
    items = [element("li", value_of(text)) for text in found[:MAX_ROWS]]
    if len(found) > MAX_ROWS:
        items.append(element("li", f"{len(found) - MAX_ROWS:,} more are left out.", _class="note"))
    return element("ul", *items) if items else Markup()


def listed(texts: Iterable[object]) -> str:
    """Texts in a sentence, the first ones of many."""
    found = [str(text) for text in texts]
    more = f" and {len(found) - MAX_LISTED:,} more" if len(found) > MAX_LISTED else ""
    return ", ".join(found[:MAX_LISTED]) + more


def scrolling(label: str, content: Markup) -> Markup:
    """Content that scrolls sideways in a region of its own, by keys too, where it is wider than the page."""
    return element("div", content, _class="scroll", tabindex="0", role="region", aria_label=label)
