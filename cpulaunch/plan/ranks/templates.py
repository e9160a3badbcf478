"""Torch elastic's macros in arguments and output prefixes, without `string.Template`, which imports `re`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def substitute(text: str, values: Mapping[str, str]) -> str:
    """The text with known $name and ${name} replaced by their values, and $$ by $; the rest is unchanged.

    Source: Python's string.Template.safe_substitute, with which torch elastic replaces local_rank in the arguments
    of a program and role_name, rank and local_rank in a prefix.
    """
    head, *parts = text.split("$")
    pieces = [head]
    rest = iter(parts)
    for part in rest:
        if not part:  # "$$", or a "$" at the end.
            pieces.append("$" + next(rest, ""))
            continue
        braced = part.startswith("{")
        name = _identifier(part[braced:])
        end = braced + len(name) + braced
        known = name in values and (not braced or part[end - 1 : end] == "}")
        pieces.append(values[name] + part[end:] if known else "$" + part)
    return "".join(pieces)


def _identifier(text: str) -> str:
    """The ASCII identifier that the text begins with; "" if it begins with none."""
    if not text or text[0].isdigit():
        return ""
    length = next(
        (at for at, sign in enumerate(text) if not (sign.isascii() and (sign.isalnum() or sign == "_"))), None
    )
    return text[:length]
