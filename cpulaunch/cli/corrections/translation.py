"""A command line of another launcher as one of cpulaunch."""

from __future__ import annotations

import os

from cpulaunch.cli.corrections.foreign_options import EACH_HOST, EQUIVALENTS, VALUES, Equivalent
from cpulaunch.cli.corrections.programs import is_python_name
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MODULES = {
    "torch.backends.xeon.run_cpu": "run_cpu",
    "intel_extension_for_pytorch.cpu.launch": "ipexrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}
"""Modules that are launchers when Python runs them with -m."""
_SUBCOMMANDS = {"accelerate": ("launch",), "ipexrun": ("cpu", "xpu")}
_MEMORY = "--numa-nodes {value} --membind bind"
_MPI = {
    "-n": Equivalent(1, "--nproc-per-node {value}"),
    "-np": Equivalent(1, "--nproc-per-node {value}"),
    "--np": Equivalent(1, "--nproc-per-node {value}"),
    "-c": Equivalent(1, "--nproc-per-node {value}"),
    "-H": Equivalent(1, None, EACH_HOST),
    "-N": Equivalent(1, "--nproc-per-node {value}"),
}
_NUMACTL = {
    "-m": Equivalent(1, _MEMORY),
    "--membind": Equivalent(1, _MEMORY),
    "-c": Equivalent(1, "--numa-nodes {value}"),
    "-l": Equivalent(0, "--membind none"),
}
_OWN: Mapping[str, Mapping[str, Equivalent]] = {
    "numactl": _NUMACTL,
    "taskset": {"-c": Equivalent(0, ""), "--cpu-list": Equivalent(0, ""), "-a": Equivalent(0, "")},
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "run_cpu": {},
    "ipexrun": {},
    "accelerate": {},
    "deepspeed": {},
    "torchrun": {},
}
"""Launcher -> options that mean something else there than in the table for all."""
BINDERS = ("numactl", "taskset")
"""Launchers whose program is any command; the others start Python scripts, and MPI either."""


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
        self.options: list[str] = []
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
            self.command = ["torchrun"]
            return [word for word in rest if word not in ("--use_env", "--use-env")]
        rest = self._read_options(tool, rest)
        if tool == "taskset" and rest:
            self._add("--cpus", _cpus(rest[0]))
            rest = rest[1:]
        return self.read(rest) if tool in (*BINDERS, "mpirun", "mpiexec") else list(rest)

    def _assign(self, name: str, value: str) -> None:
        if name == "OMP_NUM_THREADS":
            self._add("--threads", value)
        else:
            self._add("--env", f"{name}={value}")

    def _read_options(self, tool: str, words: Sequence[str]) -> list[str]:
        """The words behind the launcher's options. Effect: adds what the options are in cpulaunch."""
        rest = list(words)
        while rest and rest[0].startswith("-") and rest[0] != "-":
            typed = rest.pop(0)
            if typed == "--":
                break
            name, equals, value = typed.partition("=")
            if tool in BINDERS and not typed.startswith("--") and len(name) > 2:
                name, equals, value = typed[:2], "=", typed[2:].lstrip("=")
            found = self._equivalent(tool, name)
            if found is None:
                rest = self._keep(tool, typed, name, rest)
                continue
            if found.values and not equals:
                if not rest:
                    raise UsageError(f"{typed} needs a value", source=tool)
                value = rest.pop(0)
            self._take(typed if equals else f"{typed} {value}".strip(), value, found)
        return rest

    def _equivalent(self, tool: str, name: str) -> Equivalent | None:
        own = _OWN[tool].get(self.canonical(name)) or _OWN[tool].get(name)
        if own is not None or (name == "-m" and tool not in BINDERS):
            return own
        return EQUIVALENTS.get(self.canonical(name))

    def _keep(self, tool: str, typed: str, name: str, rest: list[str]) -> list[str]:
        """The words behind an option that cpulaunch has too. Raises: UsageError if it does not."""
        flag = self.canonical(name)
        count = None if tool in BINDERS else self.values(flag)
        if count is None:
            raise UsageError(
                f"{tool} option without counterpart", value=typed, hint="leave it out, and see docs/migrating.md"
            )
        _, equals, value = typed.partition("=")
        values = [value] if equals else rest[:count]
        words = VALUES.get(flag[2:].replace("-", "_"), {})
        self._add(flag, *(words.get(each, each) for each in values))
        return rest if equals else rest[count:]

    def _take(self, typed: str, value: str, found: Equivalent) -> None:
        options = (found.by_value or {}).get(value, found.options)
        remark = found.remark.format(value=value)
        if options is None or (remark and not found.by_value):
            self.notes.append(f"{typed}: {remark}")
        for flag in _flags((options or "").format(value=value).split()):
            self._add(*flag)

    def _add(self, flag: str, *values: str) -> None:
        """Effect: adds an option; one that is given again replaces the first, but for --env."""
        if flag.startswith("-O"):
            self.options = [each for each in self.options if not each.startswith("-O")]
        if flag != "--env" and flag in self.options:
            at = self.options.index(flag)
            del self.options[at : at + 1 + len(values)]
        self.options += [flag, *values]


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
    name = os.path.basename(words[0])
    if is_python_name(name) and len(words) > 2 and words[1] == "-m" and words[2] in _MODULES:
        return _MODULES[words[2]], words[3:]
    if name not in _OWN:
        return None, words
    rest = words[1:]
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


def _cpus(text: str) -> str:
    """The CPUs of taskset's list or mask. Raises: UsageError."""
    if text.isdecimal() or not text.strip("0123456789,-"):
        return text
    try:
        mask = int(text.replace(",", ""), 16)
    except ValueError:
        raise UsageError("not a CPU mask", value=text, source="taskset", hint="taskset -c LIST") from None
    return format_cpulist(frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1))


def translation(
    words: Sequence[str], *, canonical: Callable[[str], str], values: Callable[[str], int | None]
) -> Translation:
    """The command line of cpulaunch that does what these words do. Raises: UsageError.

    `values`: how many values an option of cpulaunch takes; None for a name that is unknown.
    """
    translator = _Translator(canonical, values)
    program = translator.read(words)
    options = translator.options
    if "--cpus" in options and "--numa-nodes" in options and "--membind" in options:
        at = options.index("--numa-nodes")
        nodes = options[at + 1]
        del options[at : at + 2]
        translator.notes.append(f"--membind bind confines memory to the NUMA nodes of --cpus, not to {nodes}")
    return Translation(words=(*translator.command, *options, *program), notes=tuple(translator.notes))
