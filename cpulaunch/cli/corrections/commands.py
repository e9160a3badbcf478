"""Commands of cpulaunch that are typed behind options, in another form, or with a slip of the finger."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INSPECTION = ("probe", "profiles", "doctor", "calibrate", "check")
FOREIGN = ("ipexrun", "run_cpu")
ARGUMENTS_ONLY = ("translate", "completion")
"""Commands without options."""
MEASURING = ("compare", "tune", "diagnose")
OTHER = (*MEASURING, *ARGUMENTS_ONLY, *FOREIGN)
LAUNCH = ("run", "plan", "torchrun")
OTHER_FORMS = {
    "profile": "profiles",
    "preset": "profiles",
    "presets": "profiles",
    "lint": "check",
    "topology": "probe",
    "info": "probe",
    "hw": "probe",
    "explain": "plan",
    "autotune": "tune",
    "hypertune": "tune",
    "optimize": "tune",
    "search": "tune",
    "sweep": "tune",
    "tuning": "tune",
    "bench": "compare",
    "benchmark": "compare",
    "measure": "compare",
    "versus": "compare",
    "profiler": "diagnose",
    "trace": "diagnose",
    "analyze": "diagnose",
    "bottleneck": "diagnose",
    "launch": "run",
    "start": "run",
    "exec": "run",
}
"""Words that other tools use -> the command. Nothing runs for them: the message names the command."""
SAME = {"profile": "profiles"}
"""Forms that run, because they can mean nothing else."""
OF_PROFILES = ("list", "show", "validate")
"""What `profiles` is followed by. With something else, such as a script, `profile` asks where time goes."""
SHARED_OPTIONS = {"--json": 0, "--sysroot": 1}
"""Options that inspection commands have too, with the number of their values."""
SIMILAR = 0.7


def restated(word: str, before: Sequence[str], after: Sequence[str], *, plans: bool, ranks: bool) -> list[str] | None:
    """The command line, its command first, if the program's name is a command; None if it is not.

    `before`, `after`: what was typed before and after the word. `plans`: nothing is to be started; `ranks`: torchrun
    was typed. Raises: UsageError if the command has no such options.
    """
    if _asks_where_time_goes(word, after):
        return None
    word = SAME.get(word, word)
    if word == "version":
        return ["--version"]
    if word == "help":
        return help_of_command(after) or ["--help", *after]
    if word in LAUNCH:
        command = "torchrun" if ranks or word == "torchrun" else "run"
        return [command, *(["--dry-run"] if plans or word == "plan" else []), *before, *after]
    if word in FOREIGN:
        return [word, *(["--dry-run"] if plans else []), *before, *after]
    if word in INSPECTION:
        _check_shared(word, before, after)
        return [word, *after, *before]
    if word in MEASURING:
        return [word, *before, *after]
    if word in ARGUMENTS_ONLY:
        _check_shared(word, before, after, shared={})
        return [word, *after]
    return None


def help_of_command(words: Sequence[str]) -> list[str] | None:
    """The command line that shows the help of the command that these words name; None if they name none."""
    command = SAME.get(words[0], words[0]) if words else "help"
    if command in ("help", "version"):
        return ["--help"] if words else None
    if command in LAUNCH:
        return [command, "--help", *words[1:]]
    if command in (*INSPECTION, *OTHER):
        return [command, *(word for word in words[1:] if not word.startswith("-")), "--help"]
    return None


def _check_shared(
    command: str, before: Sequence[str], after: Sequence[str], *, shared: Mapping[str, int] = SHARED_OPTIONS
) -> None:
    """Raises: UsageError if an option in front of a command is none of those that it has too."""
    from shlex import join

    position = 0
    while position < len(before):
        name, equals, _ = before[position].partition("=")
        if name not in shared:
            right = join(("cpulaunch", command, *after))
            raise UsageError(f"{command} takes no {name}", hint=right)
        position += 1 if equals else 1 + shared[name]


def suggestion(word: str, before: Sequence[str], after: Sequence[str]) -> str | None:
    """A hint with the command line that was probably meant; None if the word is not like any command."""
    from difflib import get_close_matches
    from shlex import join

    known = [*LAUNCH, *INSPECTION, *OTHER, *OTHER_FORMS, "help", "version"]
    close = get_close_matches(word.lower(), known, n=1, cutoff=SIMILAR)
    if not close:
        return None
    command = OTHER_FORMS.get(close[0], close[0])
    command = "diagnose" if _asks_where_time_goes(close[0], after) else command
    options = () if command in (*INSPECTION, *ARGUMENTS_ONLY) else without_secrets(before)
    return f"did you mean {join(('cpulaunch', command, *options, *after))}?"


def _asks_where_time_goes(word: str, after: Sequence[str]) -> bool:
    """Whether `profile` is followed by a program, and so is no preset."""
    followed = next((each for each in after if not each.startswith("-")), OF_PROFILES[0])
    return word == "profile" and followed not in OF_PROFILES


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words without the values that --env gives."""
    hidden = []
    for word, previous in zip(words, ["", *words], strict=False):
        start = "--env=" if word.startswith("--env=") else ""
        name, equals, _ = word.removeprefix(start).partition("=")
        hidden.append(f"{start}{name}=..." if equals and (start or previous == "--env") else word)
    return hidden
