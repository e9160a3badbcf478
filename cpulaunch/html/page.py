"""The frame of a page: the verdict first, then its sections."""

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from typing import Literal

from cpulaunch.html.elements.markup import Markup, element, joined
from cpulaunch.html.style import SCRIPT, STYLE
from cpulaunch.records.record import record


@record
class Headline:
    """What a page says first: a sentence, whether it is good news, and the sentences below it."""

    text: str
    tone: Literal["good", "bad", "neutral"] = "neutral"
    details: tuple[str, ...] = ()


@record
class Tile:
    """A figure worth seeing at once."""

    value: str
    label: str


def page(title: str, verdict: Headline, tiles: Iterable[Tile], sections: Iterable[Markup], *, footer: str) -> str:
    """The document. A browser runs its own script alone and loads nothing, whatever got into the text."""
    found = list(tiles)
    items = [element("li", element("b", tile.value), element("span", tile.label)) for tile in found]
    main = [
        element("p", verdict.text, _class=f"verdict {verdict.tone}"),
        *(element("p", each, _class="lead") for each in verdict.details),
        element("ul", *items, _class="tiles") if found else Markup(),
        *sections,
    ]
    header = element(
        "header", element("h1", title), element("button", "Colours", id="scheme", type="button", hidden=True)
    )
    body = element("body", header, element("main", *main), element("footer", element("p", footer)))
    return f"<!doctype html>\n{element('html', _head(title), body, lang='en')}\n"


def _head(title: str) -> Markup:
    digest = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
        element("script", Markup(SCRIPT), type="module"),
    )


def sentence(text: str) -> str:
    """A verdict or remark with a capital letter, unless the name of a side or an option begins it, and a full stop."""
    starts = ("no ", "nothing ", "compared", "interrupted")
    return f"{text[0].upper() + text[1:] if text.startswith(starts) else text}."


def section(title: str, *parts: Markup) -> Markup:
    """A section with its heading; nothing if it has no content."""
    content = joined(parts)
    return element("section", element("h2", title), content) if content else Markup()


def subsection(title: object, *parts: Markup) -> Markup:
    """A part of a section with a heading of its own; nothing if it has no content."""
    content = joined(parts)
    return element("div", element("h3", title), content) if content else Markup()


def folded(summary: str, content: Markup, *, opened: bool = False) -> Markup:
    """Content that opens at a click or key; nothing if there is none."""
    return element("details", element("summary", summary), content, open=opened) if content else Markup()
