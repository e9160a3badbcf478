"""How a setting and its value are written: as text on a command line, as a TOML value in a profile."""

from __future__ import annotations

from cpulaunch.records.cpulist import format_cpulist, parse_cpulist
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_COUNT = 1 << 14
"""Largest number of workers, cores or threads: as many as CPUs that a list can name."""
MAX_HOSTS = 1 << 16
MAX_NUMBER = (1 << 31) - 1
MAX_DIGITS = 20
MAX_SECONDS = 1_000_000
"""Eleven days; poll(2) takes at most twice as long."""
MAX_PATTERN = 2000
SMALL = 10
"""A maximum below it is part of the help and of every message."""


@record
class ValueType:
    """How values of one type are written. `from_text` and `from_toml` raise ValueError that says what they expect.

    `to_text` returns the text that `from_text` reads back; a repeatable type has one text for each of its parts.
    """

    metavar: str
    from_text: Callable[[str], Any]
    from_toml: Callable[[object], Any]
    to_text: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()
    flag: bool = False
    repeatable: bool = False


@record
class SettingSpec:
    """How one setting is written and explained. `group` is its heading in the help."""

    name: str
    value_type: ValueType
    default: Any
    group: str
    help: str
    in_profile: bool

    @property
    def flag(self) -> str:
        """The setting's long option."""
        return "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str:
        """The option that switches a switch off, such as `--no-smt`."""
        return "--no-" + self.flag[2:]

    def arguments(self, value: Any) -> list[str]:
        """The words of a command line that give the setting this value."""
        if self.value_type.flag:
            return [self.flag if value else self.negative_flag]
        parts = [(part,) for part in value] if self.value_type.repeatable else [value]
        return [word for part in parts for word in (self.flag, self.value_type.to_text(part))]


def _plain(text: str) -> str:
    """The text of a number. Raises: ValueError for spellings that only Python accepts ("1_0", "٢")."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return text


def _integer(minimum: int, text: str, maximum: int) -> int:
    expected = f"from {minimum} to {maximum}" if maximum < SMALL else f"of at least {minimum}"
    try:
        value = int(_plain(text))
    except ValueError:
        raise ValueError(f"expected a whole number {expected}") from None
    if value < minimum or value > maximum:
        expected = expected if value < minimum else f"from {minimum} to {maximum}"
        raise ValueError(f"expected a whole number {expected}")
    return value


def _toml_integer(minimum: int, value: object, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number")
    return _integer(minimum, str(value), maximum)


def integer(*, minimum: int, maximum: int = MAX_NUMBER) -> ValueType:
    """Whole numbers from `minimum` up to `maximum`, which is shown in the help if it is small."""
    return ValueType(
        metavar=f"{minimum}-{maximum}" if maximum < SMALL else "N",
        from_text=lambda text: _integer(minimum, text, maximum),
        from_toml=lambda value: _toml_integer(minimum, value, maximum),
    )


def size(*, minimum: int) -> ValueType:
    """Whole numbers of workers, cores, threads and the like, from `minimum` up to MAX_COUNT."""
    return integer(minimum=minimum, maximum=MAX_COUNT)


def _count(words: tuple[str, ...], text: str) -> int | str:
    try:
        return text if text in words else _integer(1, text, MAX_COUNT)
    except ValueError as error:
        raise ValueError(f"{error}, or {'one of ' * (len(words) > 1)}{', '.join(words)}") from None


def _toml_count(words: tuple[str, ...], value: object) -> int | str:
    return value if isinstance(value, str) and value in words else _toml_integer(1, value, MAX_COUNT)


def literal_words(annotation: object) -> tuple[str, ...]:
    """The words of a Literal type, which is given as the text of its annotation."""
    return tuple(str(annotation).split('"')[1::2])


def count(annotation: object) -> ValueType:
    """A whole number from 1 to MAX_COUNT or one of the words of a Literal type."""
    words = literal_words(annotation)
    return ValueType(
        metavar="|".join(("N", *words)),
        from_text=lambda text: _count(words, text),
        from_toml=lambda value: _toml_count(words, value),
    )


def _number(minimum: float, text: str) -> float:
    try:
        value = float(_plain(text))
    except ValueError:
        raise ValueError(f"expected a number of at least {minimum:g}") from None
    if not minimum <= value < float("inf"):
        raise ValueError(f"expected a finite number of at least {minimum:g}")
    if value > MAX_SECONDS:
        raise ValueError(f"expected at most {MAX_SECONDS} seconds")
    return value


def _toml_number(minimum: float, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number")
    return _number(minimum, str(value))


def number(*, minimum: float) -> ValueType:
    """Seconds from `minimum` up to MAX_SECONDS."""
    return ValueType(
        metavar="SECONDS",
        to_text=lambda value: str(value).removesuffix(".0"),
        from_text=lambda text: _number(minimum, text),
        from_toml=lambda value: _toml_number(minimum, value),
    )


def _choice(choices: tuple[str, ...], value: object) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError("expected one of " + ", ".join(choices))
    return value


def choice(annotation: object) -> ValueType:
    """One of the words of a Literal type."""
    choices = literal_words(annotation)

    def one_of(value: object) -> str:
        return _choice(choices, value)

    return ValueType(metavar="|".join(choices), from_text=one_of, from_toml=one_of, choices=choices)


def _toml_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _text_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"


def _toml_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a string")
    return _text(value)


def _text(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("expected a non-empty value")
    return text


def _word(text: str) -> str:
    """The text, which other programs and other hosts get as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text in UTF-8") from None
    return _text(text)


def _cpulist(text: str) -> frozenset[int]:
    ids: set[int] = set()
    for part in text.split(","):
        found = parse_cpulist(part)
        if twice := found & ids:
            raise ValueError(f"{format_cpulist(twice)} is listed twice")
        ids |= found
    if not ids:
        raise ValueError("expected a list such as 0-3,8")
    return frozenset(ids)


def _shown(text: str) -> frozenset[int]:
    return frozenset() if text == "none" else _cpulist(text)


def _stdin(text: str) -> str:
    try:
        return text if text in ("all", "none") else str(_integer(0, text, MAX_COUNT))
    except ValueError:
        raise ValueError("expected the number of a worker, all or none") from None


def _shown_to_text(ids: frozenset[int]) -> str:
    return format_cpulist(ids) if ids else "none"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ValueError("expected one or more names separated by commas")
    return names


def _filters(text: str) -> tuple[str, ...]:
    """The texts between commas; a double comma stands for one comma. Source: torchrun, comma_separated_list."""
    filters = tuple(part.replace("\0", ",") for part in _text(text).replace(",,", "\0").split(","))
    if not all(filters):
        raise ValueError("expected one or more texts separated by commas")
    return filters


def _assignment(text: str) -> tuple[tuple[str, str], ...]:
    name, equals, value = text.partition("=")
    if not (equals and name) or "\0" in text:
        raise ValueError("expected NAME=VALUE")
    return ((name, value),)


def _range(text: str) -> tuple[int, int]:
    """The bounds of "MIN:MAX" or of a single number. Source: torchrun --nnodes."""
    first, colon, last = text.partition(":")
    try:
        low = _integer(1, first, MAX_HOSTS)
        high = _integer(1, last, MAX_HOSTS) if colon else low
    except ValueError:
        raise ValueError(f"expected N or MIN:MAX, whole numbers from 1 to {MAX_HOSTS}") from None
    if high < low:
        raise ValueError("expected MIN:MAX with MIN not larger than MAX")
    return low, high


def _port(text: str) -> int:
    try:
        return _integer(0, text, 65535)
    except ValueError:
        raise ValueError("expected a port number from 0 to 65535") from None


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(part.strip().partition("=") for part in _word(text).split(","))
    if not all(name and equals and value for name, equals, value in pairs):
        raise ValueError("expected one or more K=V separated by commas")
    for name, _, value in pairs:
        if value.isdecimal() and (len(value) > MAX_DIGITS or int(value) > MAX_NUMBER):
            raise ValueError(f"expected {name} of at most {MAX_NUMBER}")
    return tuple((name, value) for name, _, value in pairs)


def _is_natural(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def _streams(text: str) -> int | tuple[tuple[int, int], ...]:
    """One number for all ranks, or (local rank, number) pairs. Source: torchrun --redirects."""
    if text in ("0", "1", "2", "3"):
        return int(text)
    pairs = [part.partition(":") for part in text.split(",")]
    if not all(_is_natural(rank) and which in ("0", "1", "2", "3") for rank, _, which in pairs):
        raise ValueError("expected 0, 1 (stdout), 2 (stderr), 3 (both) or RANK:N,RANK:N")
    return tuple((int(rank), int(which)) for rank, _, which in pairs)


def _pattern(text: str) -> str:
    import re

    if len(text) > MAX_PATTERN:
        raise ValueError(f"expected a regular expression of at most {MAX_PATTERN} characters")
    try:
        groups = re.compile(_text(text)).groups
    except (re.error, OverflowError) as error:
        raise ValueError(f"expected a regular expression ({error})") from None
    except (RecursionError, MemoryError):
        raise ValueError("expected a regular expression (too many nested groups)") from None
    if groups != 1:
        raise ValueError("expected a regular expression with exactly one group, which matches the number")
    return text


def _never(value: object) -> Any:
    raise ValueError("cannot be set in a profile")


def _joined(parts: Iterable[str]) -> str:
    return ",".join(parts)


def _pairs_to_text(pairs: tuple[tuple[str, str], ...]) -> str:
    return _joined(f"{name}={value}" for name, value in pairs)


def _filters_to_text(filters: tuple[str, ...]) -> str:
    return _joined(each.replace(",", ",,") for each in filters)


def _range_to_text(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}:{high}"


def _streams_to_text(streams: int | tuple[tuple[int, int], ...]) -> str:
    return str(streams) if isinstance(streams, int) else _joined(f"{rank}:{which}" for rank, which in streams)


FLAG = ValueType(
    metavar="", from_text=_text_bool, from_toml=_toml_bool, to_text=lambda on: "true" if on else "false", flag=True
)
FILE = ValueType(metavar="FILE", from_text=_text, from_toml=_toml_text)
PYTHON = ValueType(metavar="PATH", from_text=_text, from_toml=_never)
DIRECTORY = ValueType(metavar="DIR", from_text=_text, from_toml=_toml_text)
PATTERN = ValueType(metavar="REGEX", from_text=_pattern, from_toml=_never)
CPULIST = ValueType(metavar="LIST", from_text=_cpulist, from_toml=_never, to_text=format_cpulist)
STDIN = ValueType(metavar="N|all|none", from_text=_stdin, from_toml=_never)
SHOWN = ValueType(metavar="LIST|none", from_text=_shown, from_toml=_never, to_text=_shown_to_text)
WORD = ValueType(metavar="TEXT", from_text=_word, from_toml=_toml_text)
WORDS = ValueType(metavar="TEXT,...", from_text=_names, from_toml=_never, to_text=_joined)
FILTERS = ValueType(metavar="TEXT,...", from_text=_filters, from_toml=_never, to_text=_filters_to_text)
RANGE = ValueType(metavar="N|MIN:MAX", from_text=_range, from_toml=_never, to_text=_range_to_text)
PORT = ValueType(metavar="PORT", from_text=_port, from_toml=_never)
PAIRS = ValueType(metavar="K=V,...", from_text=_pairs, from_toml=_never, to_text=_pairs_to_text)
STREAMS = ValueType(metavar="N|RANK:N,...", from_text=_streams, from_toml=_never, to_text=_streams_to_text)
NAMES = ValueType(metavar="NAME|FILE|auto|none", from_text=_names, from_toml=_never, to_text=_joined)
ASSIGNMENTS = ValueType(metavar="K=V", from_text=_assignment, from_toml=_never, to_text=_pairs_to_text, repeatable=True)
