"""The lines of a TOML text: that of each key, which the standard library's parser does not provide, and long ones."""

import re
from collections.abc import Iterator, Mapping, Sequence

Path = tuple[str | int, ...]
MAX_LINE = 2_000
"""Limit on the characters of a line: the standard library takes a minute for a key of 30,000 dotted parts."""

_TOKEN = re.compile(
    r"""
    (?P<string> \"{3} (?: \\. | [^\\] )*? \"{3,5} | '{3} .*? '{3,5} | " (?: \\. | [^"\\\n] )* " | ' [^'\n]* ' )
    | (?P<comment> \#[^\n]* )
    | (?P<newline> \n )
    | (?P<bare> [A-Za-z0-9_-]+ )
    | (?P<mark> \[\[ | \]\] | [\[\]{}=.,] )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def long_line(text: str) -> tuple[int, int] | None:
    """The number (from 1) and the length of the first line that is longer than the limit; None if there is none."""
    lines = enumerate(text.split("\n"), 1)
    return next(((number, len(line)) for number, line in lines if len(line) > MAX_LINE), None)


def key_lines(text: str) -> Mapping[Path, int]:
    """The line (from 1) of every table and key of a valid TOML text, by path.

    The second table of `[[applies]]` is ("applies", 1). Keys inside an inline table are not listed.
    """
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for number, statement in _statements(text):
        if statement[0] in ("[", "[["):
            table = _resolve(_keys(statement[1:]), counts)
            if statement[0] == "[[":
                counts[table] = counts.get(table, -1) + 1
                lines.setdefault(table, number)
                table = (*table, counts[table])
            lines.setdefault(table, number)
        elif "=" in statement:
            keys = _keys(statement[: statement.index("=")])
            for length in range(1, len(keys) + 1):
                lines.setdefault((*table, *keys[:length]), number)
    return lines


def line_of(path: Sequence[str | int], lines: Mapping[Path, int]) -> int | None:
    """The line of the longest prefix of a path that has one; None if there is none."""
    for length in range(len(path), 0, -1):
        if (line := lines.get(tuple(path[:length]))) is not None:
            return line
    return None


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """The first line and the tokens of each statement; a statement continues while brackets are open."""
    line, start, depth = 1, 1, 0
    tokens: list[str] = []
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind == "newline" and depth <= 0:
            if tokens:
                yield start, tokens
            tokens, depth = [], 0
        elif kind in ("string", "bare", "mark"):
            start = start if tokens else line
            tokens.append(token)
            if kind == "mark":
                depth += token.count("[") + token.count("{") - token.count("]") - token.count("}")
        line += token.count("\n")
    if tokens:
        yield start, tokens


def _keys(tokens: Sequence[str]) -> Path:
    return tuple(_unquoted(token) for token in tokens if token not in (".", "]", "]]"))


def _unquoted(token: str) -> str:
    return token[1:-1] if token[:1] in ("'", '"') else token


def _resolve(path: Path, counts: Mapping[Path, int]) -> Path:
    """The path of a table header, with the current index of each array of tables in it."""
    resolved: Path = ()
    for position, key in enumerate(path):
        resolved = (*resolved, key)
        if position < len(path) - 1 and resolved in counts:
            resolved = (*resolved, counts[resolved])
    return resolved
