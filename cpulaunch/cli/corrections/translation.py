"""A command line of another launcher as one of cpulaunch."""

from __future__ import annotations

import os

from cpulaunch.cli.corrections.foreign_options import VALUES, Equivalent
from cpulaunch.cli.corrections.launchers import BINDERS, MPI, TABLES, Given, full_name, meaning
from cpulaunch.cli.corrections.programs import is_python_name
from cpulaunch.records.cpulist import format_cpulist, parse_cpulist, parse_cpumask
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MODULES = {
    "torch.backends.xeon.run_cpu": "run_cpu",
    "intel_extension_for_pytorch.cpu.launch": "ipexrun",
    "intel_extension_for_pytorch.launch": "ipexrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}
"""Modules that are launchers when Python runs them with -m."""
_ADDS_LOCAL_RANK = "torch.distributed.launch"
_SUBCOMMANDS = {"accelerate": ("launch",), "ipexrun": ("cpu", "xpu")}


@record
class Translation:
    """The words after `cpulaunch`, and what they leave out or change, one line each."""

    words: tuple[str, ...]
    notes: tuple[str, ...] = ()


class _Translator:
    """Collects cpulaunch's options while it reads the words of one launcher after another."""

    def __init__(self, canonical: Callable[[str], str], values: Callable[[str], int | None]) -> None:
        self.canonical = canonical
        self.values = values
        self.options: list[tuple[str, ...]] = []
        self.notes: list[str] = []
        self.command: list[str] = []

    def read(self, words: Sequence[str]) -> list[str]:
        """The words of the program. Raises: UsageError for an option that is unknown."""
        while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
            self._assign(*words[0].split("=", 1))
            words = words[1:]
        tool, rest = _launcher(words)
        if tool is None:
            return _program(words)
        if tool == "torchrun":
            return self._torchrun(words, rest)
        if words[len(words) - len(rest) - 1] == "xpu":
            self.notes.append("xpu: the process is bound to CPU cores; your program chooses the GPU")
        given, rest = self._given(tool, rest)
        reading = meaning(tool, given)
        self.notes += reading.notes
        for option in reading.options:
            self._add(*option)
        for each in reading.given:
            self._take(tool, each)
        if tool == "taskset" and rest:
            self._add("--cpus", _cpus(rest[0], is_list=any(each.name in ("-c", "--cpu-list") for each in given)))
            rest = rest[1:]
        if tool in MPI and ":" in rest:
            raise UsageError("one launch starts one program", value=":", source=tool, hint="translate each of them")
        return self.read(rest) if tool in (*BINDERS, *MPI) else list(rest)

    def _torchrun(self, words: Sequence[str], rest: Sequence[str]) -> list[str]:
        """The words of torchrun, whose options are cpulaunch's, without the one that only the older launcher has."""
        self.command = ["torchrun"]
        at = 0
        while at < len(rest) and rest[at].startswith("-") and self.canonical(rest[at]) not in ("--use-env", "--"):
            count = self.values(self.canonical(rest[at].partition("=")[0]))
            if count is None:  # An abbreviation: what follows is its value, unless it is an option.
                count = not "".join(rest[at + 1 : at + 2]).startswith("-")
            at += 1 + (0 if "=" in rest[at] else count)
        if at < len(rest) and self.canonical(rest[at]) == "--use-env":
            return [*rest[:at], *rest[at + 1 :]]
        if _ADDS_LOCAL_RANK in words[: len(words) - len(rest)]:
            self.notes.append("the program gets no argument --local-rank; LOCAL_RANK is in its environment")
        return list(rest)

    def _assign(self, name: str, value: str) -> None:
        if name == "OMP_NUM_THREADS" and value.isdecimal():
            self._add("--threads", value)
        else:
            self._add("--env", f"{name}={value}")

    def _given(self, tool: str, words: Sequence[str]) -> tuple[list[Given], list[str]]:
        """The launcher's options, and the words behind them. Raises: UsageError for an option that is unknown."""
        given, rest = [], list(words)
        while rest and rest[0].startswith("-") and rest[0] != "-":
            typed = rest.pop(0)
            if typed == "--":
                break
            name, equals, value = typed.partition("=")
            clustered = tool in BINDERS and not typed.startswith("--") and len(name) > 2
            if clustered:
                name, equals, value = typed[:2], "=", typed[2:].removeprefix("=")
            name = full_name(tool, self.canonical(name) if name.startswith("--") else name)
            count = self._value_count(tool, typed, name)
            if clustered and not count:
                rest.insert(0, f"-{value}")
                typed, equals, value = name, "", ""
            if count and not equals:
                if len(rest) < count:
                    raise UsageError(f"{typed} needs a value", source=tool)
                value, rest = "=".join(rest[:count]), rest[count:]
            given.append(Given(typed if equals else f"{typed} {value}".strip(), name, value))
        return given, rest

    def _value_count(self, tool: str, typed: str, name: str) -> int:
        """How many values follow this option. Raises: UsageError if neither the launcher nor cpulaunch has it."""
        if name in TABLES[tool]:
            return TABLES[tool][name].values
        flag = self.canonical(name)
        may_be_own = tool not in BINDERS and (name.startswith("--") or name in ("-m", "-h", "-q"))
        count = self.values(flag) if may_be_own else None
        if count is None:
            hint = "leave it out; cpulaunch's own options: cpulaunch --help all"
            raise UsageError(f"{tool} option without counterpart", value=typed, hint=hint)
        return count

    def _take(self, tool: str, given: Given) -> None:
        """Effect: adds what the option is in cpulaunch."""
        found = TABLES[tool].get(given.name)
        if found is not None:
            return self._translate(given, found)
        flag = self.canonical(given.name)
        words = VALUES.get(flag[2:].replace("-", "_"), {})
        has_value = bool(self.values(flag)) or given.typed.endswith("=")
        return self._add(flag, *([words.get(given.value, given.value)] if has_value else ()))

    def _translate(self, given: Given, found: Equivalent) -> None:
        options = (found.by_value or {}).get(given.value, found.options)
        remark = found.remark.format(value=given.value)
        if options is None or (remark and not found.by_value):
            self.notes.append(f"{given.typed}: {remark}")
        for flag in _flags((options or "").split()):
            self._add(*(word.format(value=given.value) for word in flag))

    def _add(self, flag: str, *values: str) -> None:
        """Effect: adds an option; one that is given again replaces the first, but for --env."""
        replaced = [each for each in self.options if each[0] == flag or each[0][:2] == flag[:2] == "-O"]
        self.options = [each for each in self.options if flag == "--env" or each not in replaced]
        self.options.append((flag, *values))


def _flags(words: Sequence[str]) -> list[list[str]]:
    """The words as options with their values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found


def _launcher(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The launcher that the words start, and what follows its name; None if they start the program."""
    if not words:
        return None, words
    name, rest = os.path.basename(words[0]), words[1:]
    if is_python_name(name):
        rest = rest[1:] if rest[:1] == ["-u"] else rest
        if rest[:1] != ["-m"] or not rest[1:] or rest[1] not in _MODULES:
            return None, words
        name, rest = _MODULES[rest[1]], rest[2:]
    if name not in TABLES:
        return None, words
    return name, rest[1:] if rest[:1] and rest[0] in _SUBCOMMANDS.get(name, ()) else rest


def _program(words: Sequence[str]) -> list[str]:
    """The program's words for cpulaunch: without `python`, and with --no-python for another command."""
    if not words:
        return []
    if not is_python_name(os.path.basename(words[0])):
        return list(words) if words[0].endswith(".py") else ["--no-python", *words]
    rest = [*words[1:]]
    if rest[:1] == ["-u"]:
        rest = rest[1:]
    return ["--no-python", *words] if rest[:1] and rest[0].startswith("-") and rest[0] != "-m" else rest


def _cpus(text: str, *, is_list: bool) -> str:
    """The CPUs of taskset's mask, or list, which -c announces. Raises: UsageError."""
    try:
        cpus = parse_cpulist(text) if is_list else parse_cpumask(text.removeprefix("0x"))
    except ValueError:
        cpus = frozenset()
    if not cpus:
        what = "list" if is_list else "mask"
        raise UsageError(f"not a CPU {what}", value=text, source="taskset", hint="taskset -c LIST")
    return format_cpulist(cpus)


def translation(
    words: Sequence[str], *, canonical: Callable[[str], str], values: Callable[[str], int | None]
) -> Translation:
    """The command line of cpulaunch that does what these words do. Raises: UsageError.

    `values`: how many values an option of cpulaunch takes; None for a name that is unknown.
    """
    translator = _Translator(canonical, values)
    program = translator.read(list(words))
    options = (word for option in translator.options for word in option)
    return Translation(words=(*translator.command, *options, *program), notes=tuple(dict.fromkeys(translator.notes)))
