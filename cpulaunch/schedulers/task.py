"""A process that a scheduler started, and how the scheduler's variables are read."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError, quoted
from cpulaunch.records.record import record
from cpulaunch.records.value_types import MAX_COUNT, MAX_HOSTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    T = TypeVar("T")

FIRST_PORT = 61000
"""The first port above Linux's ephemeral range. Source: Linux, ip-sysctl.rst, ip_local_port_range (32768-60999)."""
PORTS = 4493
"""Number of ports in use, up to 65492; a prime, so that consecutive job ids get different ports."""
MOST_DIGITS = 18
"""Digits of the longest accepted number: no count or id is longer, and int() fails for very long ones."""
IGNORE_HINT = "use --scheduler none to ignore the scheduler's variables"


@record
class Machine:
    """Facts that the scheduler's variables are compared with.

    `cpus`: CPUs this process may run on. `host_cpus`: CPUs of its host. `nodefile`: the text of the file
    $PBS_NODEFILE; None if it cannot be read.
    """

    cpus: int
    host_cpus: int
    nodefile: str | None = None


@record
class SchedulerTask:
    """One of the processes that a scheduler started for a job, with its ranks.

    `first_host`: the name of the job's first host; None if unknown. `port_seed`: a number that all processes of this
    job share and other jobs do not, and the text of how it is made; None if unknown. `own_cpus`: the scheduler bound
    this process to CPUs that no other process has. `host_rank`: None if unknown.
    """

    scheduler: str
    launcher: str
    """The command that started the processes, such as srun."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: int
    host_rank: int | None
    job: str
    first_host: str | None
    port_seed: tuple[int, str] | None
    one_per_host: bool
    own_cpus: bool = False
    sources: Mapping[str, str]
    """The variable that each property was read from."""
    warnings: tuple[str, ...] = ()


def port_of(seed: tuple[int, str]) -> tuple[int, str]:
    """The port that all processes of a job choose, and the reason with the formula."""
    number, formula = seed
    return FIRST_PORT + number % PORTS, f"{FIRST_PORT} + ({formula}) mod {PORTS}, the same in all processes of this job"


def number_of(text: str) -> int:
    """A number for a name: its digits as a number, else its bytes as one big-endian number."""
    written = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if written else int.from_bytes(text.encode(errors="surrogateescape"), "big")


def check_ranks(launcher: str, *, rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    """Raises: UsageError if the numbers are inconsistent (from different steps, or edited by hand) or absurd."""
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise UsageError(
            f"{launcher}'s variables are inconsistent",
            value=f"rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}",
            source="environment",
            hint=IGNORE_HINT,
        )
    if local_world_size > MAX_COUNT or world_size > MAX_COUNT * MAX_HOSTS:
        raise UsageError(
            f"{launcher} started more processes than can be planned for",
            value=f"{world_size} in all, {local_world_size} on this host; at most {MAX_COUNT} on one host",
            source="environment",
            hint=IGNORE_HINT,
        )


def shared_text(cpus: int, ranks: int) -> str:
    """How ranks divide CPUs they share with unknown other ranks, as a clause of a warning."""
    return f"each uses 1/{ranks} of its {cpus} CPUs; the rest stay idle"


class Variables:
    """A scheduler's variables, read through a table: property -> the variables that hold it, the best first."""

    def __init__(self, environ: Mapping[str, str], table: Mapping[str, tuple[str, ...]]) -> None:
        self.environ = environ
        self.table = table
        self.sources: dict[str, str] = {}

    def text(self, what: str) -> str | None:
        """The property as it is written; None if no variable holds it."""
        for name in self.table[what]:
            if self.environ.get(name):
                self.sources[what] = name
                return self.environ[name]
        return None

    def number(self, what: str) -> int | None:
        """The property as a number; None if no variable holds it. Raises: UsageError if it is not a number."""
        return self.parsed(what, _natural)

    def parsed(self, what: str, parse: Callable[[str], T]) -> T | None:
        """The parsed property; None if no variable holds it. Raises: UsageError naming a malformed variable."""
        text = self.text(what)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise UsageError(
                f"invalid value {quoted(text)} in {self.sources[what]}",
                value=error,
                source="environment",
                hint=IGNORE_HINT,
            ) from None

    def required(self, what: str, *, error: str, hint: str) -> int:
        """The property as a number. Raises: UsageError with the text `error` if no variable holds it."""
        number = self.number(what)
        if number is None:
            raise UsageError(error, value=f"{self.table[what][0]} is not set", source="environment", hint=hint)
        return number


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ValueError("expected a whole number")
    return int(text)
