"""The errors a user can meet, each with the exit code it ends with."""


class CpulaunchError(Exception):
    """Something cpulaunch could not do: what, the value seen, where it came from, what to do."""

    exit_code = 125

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
        """Two lines at most: `error: what: value (source)` and `hint: …`."""
        first = f"error: {self.what}"
        if self.value is not None:
            first += f": {self.value}"
        if self.source is not None:
            first += f" ({self.source})"
        return _line(first) if self.hint is None else f"{_line(first)}\nhint: {_line(self.hint)}"


def _line(text: str) -> str:
    """The text in one line: line ends and control characters of a file's name or content are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class UsageError(CpulaunchError):
    """A command line, profile or combination of settings that cannot be meant."""

    exit_code = 2


class ProbeError(CpulaunchError):
    """A file of the machine that exists and does not parse."""


class LaunchError(CpulaunchError):
    """The plan is fine; carrying it out failed."""


class NotExecutableError(CpulaunchError):
    """The program exists and cannot be executed."""

    exit_code = 126


class NotFoundError(CpulaunchError):
    """The program does not exist."""

    exit_code = 127
