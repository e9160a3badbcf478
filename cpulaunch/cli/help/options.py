"""Every option of run, plan and torchrun as a row: the help, the shell completions and the manual show the same."""

from __future__ import annotations

from cpulaunch.records.record import record
from cpulaunch.records.value_types import SettingSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LAST_GROUP = "Help, plan and program"
"""The heading of the options that are no settings."""
LONG = 64
"""Columns that a summary may have before it is cut."""


@record
class Option:
    """An option as it is typed and explained.

    `shown`: the name that the help lists, which changes the default. `opposite`: the other form of a switch. `metavar`
    is empty if the option takes no value.
    """

    shown: str
    short: tuple[str, ...] = ()
    opposite: str = ""
    metavar: str = ""
    text: str
    group: str
    repeatable: bool = False

    @property
    def label(self) -> str:
        """The option with its value, as the help shows it."""
        return f"{self.shown} {self.metavar}".rstrip()

    @property
    def names(self) -> tuple[str, ...]:
        """All that may be typed for it, but for its opposite."""
        return (*self.short, self.shown)

    @property
    def words(self) -> tuple[str, ...]:
        """The values that can be listed: the words of the metavar, and the numbers of a small range."""
        first, dash, last = self.metavar.partition("-")
        if dash and first.isdigit() and last.isdigit():
            return tuple(map(str, range(int(first), int(last) + 1)))
        return tuple(word for word in self.metavar.split("|") if word.islower())

    @property
    def summary(self) -> str:
        """The text in one line of about LONG columns."""
        line = self.text.split("\n")[0].split(" (default: ")[0].split("; ")[0]
        for cut in (": ", " ("):
            head = line.partition(cut)[0]
            if len(line) > LONG and head.count("(") == head.count(")") and len(head.split()) > 1:
                line = head
        return line


def option_rows(
    specs: Iterable[SettingSpec],
    *,
    texts: Mapping[str, tuple[str, str]],
    switches: Mapping[str, str],
    short: Mapping[str, str],
) -> tuple[Option, ...]:
    """All options in the order of the help.

    `texts`, `switches`: the options that are no settings, with a value (metavar, help) and without. `short`: a short
    option -> the long one.
    """
    rows = [_of_setting(spec, _short(short, spec.flag)) for spec in specs]
    rows += [
        Option(shown=flag, metavar=metavar, text=text, group=LAST_GROUP, short=_short(short, flag))
        for flag, (metavar, text) in texts.items()
    ]
    rows += [
        Option(shown=flag, text=text, group=LAST_GROUP, short=_short(short, flag)) for flag, text in switches.items()
    ]
    return tuple(rows)


def _short(short: Mapping[str, str], flag: str) -> tuple[str, ...]:
    return tuple(name for name, long in short.items() if long == flag)


def _of_setting(spec: SettingSpec, short: tuple[str, ...]) -> Option:
    off = spec.value_type.flag and bool(spec.default)
    other = spec.flag if off else spec.negative_flag
    return Option(
        shown=spec.negative_flag if off else spec.flag,
        short=short,
        opposite=other if spec.value_type.flag else "",
        metavar=spec.value_type.metavar,
        text=_text(spec),
        group=spec.group,
        repeatable=spec.value_type.repeatable,
    )


def _text(spec: SettingSpec) -> str:
    """The help text with the default behind its first line, unless the text names it."""
    if not spec.default or spec.value_type.flag or "(default:" in spec.help:
        return spec.help
    first, *others = spec.help.split("\n")
    return "\n".join([f"{first} (default: {spec.value_type.to_text(spec.default)})", *others])
