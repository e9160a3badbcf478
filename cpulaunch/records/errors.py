"""The errors that end a command, each with its exit code, and how text of any origin is quoted in them."""

MAX_QUOTED = 80
"""Characters of a value that a message shows."""

MAX_PART = 400
"""Characters of each part of a message: of a longer one, such as an argument of megabytes, the ends are shown."""

SPACES = "\xa0\u202f\u3000"
"""Spaces of French and Japanese text; str.isprintable knows the ASCII space alone."""


class CpulaunchError(Exception):
    """Something cpulaunch cannot do: what, the value seen, its source, and a hint on what to do."""

    exit_code = 125
    kind = "failure"
    """What JSON calls errors of this class."""

    def __init__(
        self,
        what: str,
        *,
        value: object | None = None,
        source: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.value = value
        self.source = source
        self.hint = hint

    def __str__(self) -> str:
        """`what: value (source)`, and a second line `hint: …` if there is one."""
        return self.summary if self.hint is None else f"{self.summary}\nhint: {_ends(self.hint)}"

    @property
    def summary(self) -> str:
        """`what: value (source)`, in one line."""
        value = "" if self.value is None else f": {_ends(str(self.value))}"
        source = "" if self.source is None else f" ({_ends(self.source)})"
        return f"{_ends(self.what)}{value}{source}"


def _ends(text: str) -> str:
    """The text in one line, of which the middle is left out if it is long."""
    half = MAX_PART // 2
    line = escaped(text if len(text) <= MAX_PART else f"{text[:half]} ... {text[-half:]}")
    return line if len(line) <= MAX_PART + 5 else f"{line[:half]} ... {line[-half:]}"


def escaped(text: str) -> str:
    """The text in one line: line ends and control characters, such as those of a file name, are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in SPACES else ascii(each)[1:-1] for each in text)


def escaped_lines(text: str) -> str:
    """The text with its line ends; its other control characters are escaped."""
    return "\n".join(map(escaped, text.split("\n")))


def quoted(text: str, *, limit: int = MAX_QUOTED) -> str:
    """The text in quotes and without control characters; of a long one the beginning."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}..."


class UsageError(CpulaunchError):
    """A command line, profile or combination of settings that is invalid."""

    exit_code = 2
    kind = "usage"


class ProbeError(CpulaunchError):
    """A file that describes the machine exists and cannot be parsed."""

    kind = "machine"


class LaunchError(CpulaunchError):
    """A valid plan could not be carried out."""

    kind = "launch"


class NoSpaceError(LaunchError):
    """The files of a run do not fit into the place for them: there may be another one."""


LEAVE_FOLDERS = "the program must leave the folders of cpulaunch in TMPDIR as they are"
"""A hint where one of them is missing."""


class NotExecutableError(CpulaunchError):
    """The program exists but cannot be executed."""

    exit_code = 126
    kind = "not-executable"


class NotFoundError(CpulaunchError):
    """The program does not exist."""

    exit_code = 127
    kind = "not-found"
