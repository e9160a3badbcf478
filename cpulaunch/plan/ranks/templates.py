"""Torch elastic's macros in arguments and prefixes, without `string.Template`, which imports `re`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def substitute(text: str, values: Mapping[str, str]) -> str:
    """The text with $name and ${name} replaced where the name is known, and $$ by $; all else stays.

    Source: Python's string.Template.safe_substitute, with which torch elastic replaces local_rank in the arguments
    of a program and role_name, rank and local_rank in a prefix.
    """
    head, *parts = text.split("$")
    made = [head]
    waiting = iter(parts)
    for part in waiting:
        if not part:  # "$$", or a last "$".
            made.append("$" + next(waiting, ""))
            continue
        braced = part.startswith("{")
        name = _identifier(part[braced:])
        end = braced + len(name) + braced
        known = name in values and (not braced or part[end - 1 : end] == "}")
        made.append(values[name] + part[end:] if known else "$" + part)
    return "".join(made)


def _identifier(text: str) -> str:
    """The name that the text begins with: ASCII letters, digits and _, no digit first; "" if with none."""
    if not text or text[0].isdigit():
        return ""
    length = next(
        (at for at, each in enumerate(text) if not (each.isascii() and (each.isalnum() or each == "_"))), None
    )
    return text[:length]
