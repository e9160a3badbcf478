"""The manual pages: one for cpulaunch, one for each of its commands."""

import re
from collections.abc import Iterable, Iterator

from manuals.commands import LAUNCHES, SUMMARIES, Manual, manuals

import cpulaunch
from cpulaunch.cli.help.commands import COMMANDS
from cpulaunch.cli.help.layout import INTRODUCTION, USAGE
from cpulaunch.cli.help.options import Option

DATE = "2026-11-23"
"""Of the version in the package; mandoc wants one."""
SECTIONS = {
    "Exit codes": "EXIT STATUS",
    "Signals": "SIGNALS",
    "Read by cpulaunch": "ENVIRONMENT",
    "Files": "FILES",
}
"""Heading of docs/reference.md -> section of cpulaunch(1) with the rows of its table."""
EXAMPLES = (
    ("Run a program on this machine's cores and memory:", "cpulaunch infer.py --batch 8"),
    ("See first what would run, and why:", "cpulaunch plan infer.py --batch 8"),
    ("Two independent copies, each on half of the cores:", "cpulaunch --instances 2 serve.py"),
    ("A job with a rank for each NUMA node:", "cpulaunch --nproc-per-node numa train.py"),
)


def pages(reference: str) -> dict[str, str]:
    """Name of a page -> its text. `reference`: the text of docs/reference.md."""
    launch, *commands = manuals()
    own = [manual for manual in commands if len(manual.words) == 1]
    texts = {"cpulaunch": _main_page(launch, own, reference)}
    for manual in own:
        below = [other for other in commands if other.words[:-1] == manual.words]
        texts[manual.name] = _page(manual, below, own)
    return {name: "\n".join(lines) + "\n" for name, lines in texts.items()}


def _main_page(launch: Manual, own: Iterable[Manual], reference: str) -> Iterator[str]:
    yield from _head("cpulaunch", "run an unmodified PyTorch program on the right cores and memory")
    yield from _synopsis(line.removeprefix("Usage:").strip() for line in USAGE.splitlines())
    yield from _section("DESCRIPTION", INTRODUCTION)
    yield ".SH COMMANDS"
    for name, summary in SUMMARIES.items():
        yield from _entry(_bold(name), summary)
    yield ".SH OPTIONS"
    for group in dict.fromkeys(option.group for option in launch.options):
        yield f".SS {escaped(group)}"
        yield from _options(option for option in launch.options if option.group == group)
    for heading, section in SECTIONS.items():
        yield f".SH {section}"
        for first, second in _rows(reference, heading):
            yield from _entry(_marked(first), second)
    yield ".SH EXAMPLES"
    for number, (text, command) in enumerate(EXAMPLES):
        yield from [".PP"] if number else []
        yield from _example(text, command)
    yield from _see_also("cpulaunch", own)


def _page(manual: Manual, below: list[Manual], own: Iterable[Manual]) -> Iterator[str]:
    yield from _head(manual.name, manual.summary)
    yield from _synopsis(f"cpulaunch {each.usage}" for each in below or [manual])
    yield from _section("DESCRIPTION", manual.text)
    if below:
        yield ".SH COMMANDS"
        for other in below:
            yield from _entry(_bold(other.words[-1]), other.text)
    yield ".SH OPTIONS"
    if manual.words[0] in LAUNCHES:
        yield "The most used ones are below; \\fBcpulaunch\\fR(1) has all."
        shown = next(command for command in COMMANDS if command.name == manual.words[0]).options
        yield from _options(option for name in shown for option in manual.options if option.shown == name)
    else:
        yield from _options({option.shown: option for each in below or [manual] for option in each.options}.values())
    if manual.example:
        yield ".SH EXAMPLES"
        yield from _example("", manual.example)
    yield from _see_also(manual.name, own)


def _head(name: str, summary: str) -> Iterator[str]:
    yield '.\\" Written by scripts/generate-manuals.'
    yield f'.TH {name.upper()} 1 "{DATE}" "cpulaunch {cpulaunch.__version__}" "User Commands"'
    yield from (".ad l", ".nh")
    yield ".SH NAME"
    yield f"{escaped(name)} \\- {escaped(summary)}"


def _synopsis(lines: Iterable[str]) -> Iterator[str]:
    yield ".SH SYNOPSIS"
    for number, line in enumerate(lines):
        if number:
            yield ".br"
        name, _, rest = line.partition(" ")
        yield f"{_bold(name)} {escaped(rest)}"


def _section(name: str, text: str) -> Iterator[str]:
    yield f".SH {name}"
    yield escaped(text)


def _options(rows: Iterable[Option]) -> Iterator[str]:
    for option in rows:
        value = f" \\fI{escaped(option.metavar)}\\fR" if option.metavar else ""
        names = [_bold(name) + value for name in option.names]
        names += [_bold(option.opposite)] if option.opposite else []
        yield from _entry(", ".join(names), option.text)


def _entry(label: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield label
    first, *others = text.split("\n")
    yield _marked(first)
    for line in others:
        yield ".br"
        yield _marked(line)


def _example(text: str, command: str) -> Iterator[str]:
    if text:
        yield from (escaped(text), ".PP")
    yield from (".RS 4", ".nf", escaped(command), ".fi", ".RE")


def _see_also(name: str, own: Iterable[Manual]) -> Iterator[str]:
    yield ".SH SEE ALSO"
    others = [other for other in ("cpulaunch", *(manual.name for manual in own)) if other != name]
    yield ",\n".join(f"{_bold(other)}(1)" for other in others)


def _rows(reference: str, heading: str) -> list[tuple[str, str]]:
    """The rows of the first table under a heading of the reference."""
    lines = re.split(rf"^#+ {heading}$", reference, maxsplit=1, flags=re.MULTILINE)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, second = line.strip("| ").split(" | ", 1)
        rows.append((first, second))
    return rows


def _marked(text: str) -> str:
    """Text of the reference or of the help: code is bold, and a link is its text."""
    text = re.sub(r": \[[^\]]+\](\([^)]*\)|\[[^\]]*\])$", "", text)  # Only a hint at another page.
    text = re.sub(r"\[([^\]`]+)\](\([^)]*\)|\[[^\]]*\])", r"\1", text.replace("\\|", "|"))
    parts = text.split("`")
    return "".join(_bold(part) if number % 2 else escaped(part) for number, part in enumerate(parts))


def _bold(text: str) -> str:
    return f"\\fB{escaped(text)}\\fR"


def escaped(text: str) -> str:
    """The text without what roff reads as a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    text = text.replace("~", "\\(ti").replace("^", "\\(ha")
    return f"\\&{text}" if text.startswith(".") else text
