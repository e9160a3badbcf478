"""What every scheduler's variables come down to, and how they are read."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    T = TypeVar("T")

FIRST_PORT = 61000
"""Above the ports that Linux gives out by itself. Source: Linux, ip-sysctl.rst, ip_local_port_range (32768-60999)."""
PORTS = 4493
"""A prime: consecutive job ids get different ports, up to 65492."""
MOST_DIGITS = 18
"""Longer numbers are no counts or ids of a scheduler, and int() refuses the longest."""


@record
class Machine:
    """What the scheduler's variables are compared with: CPUs this process may run on, and those of its whole host.

    `nodefile`: the text of PBS_NODEFILE; None where it cannot be read.
    """

    cpus: int
    host_cpus: int
    nodefile: str | None = None


@record
class SchedulerTask:
    """One process of several that a scheduler started: its place among them, and the job they belong to.

    `master`: the first host's name, None if nothing says it. `port_id`: a number that all processes of this job know
    and other jobs have not, and what it is made of. `own_cpus`: it was bound to CPUs that no other process has.
    `host_rank` None: its host's number is not told.
    """

    scheduler: str
    starter: str
    """The program that starts processes, as its user types it."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: int
    host_rank: int | None
    job: str
    master: str | None
    port_id: tuple[int, str] | None
    one_per_host: bool
    own_cpus: bool = False
    sources: Mapping[str, str]
    """By property, the variable it was read from."""
    warnings: tuple[str, ...] = ()


def port_of(identity: tuple[int, str]) -> tuple[int, str]:
    """The port all processes of a job choose, and the formula in words."""
    number, name = identity
    return FIRST_PORT + number % PORTS, f"{FIRST_PORT} + ({name}) mod {PORTS}: the same in all processes of this job"


def number_of(text: str) -> int:
    """A number for a name: the number it is written as, or its bytes read as one."""
    written = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if written else int.from_bytes(text.encode(errors="surrogateescape"), "big")


def check_place(starter: str, *, rank: int, world_size: int, local_rank: int, here: int) -> None:
    """Raises: UsageError if no rank can be at this place: the variables are of different steps, or changed by hand."""
    if not (rank < world_size and local_rank < here <= world_size):
        raise UsageError(
            f"{starter}'s variables contradict each other",
            value=f"rank {rank} of {world_size}, {local_rank} of {here} on this host",
            source="your environment",
            hint="--scheduler none ignores the scheduler's variables",
        )


def shared_text(cpus: int, ranks: int) -> str:
    """What a rank takes that does not know which others it shares its CPUs with."""
    return f"each takes 1/{ranks} of its own {cpus}, and the rest stay idle"


class Variables:
    """A scheduler's variables, read through its table: property -> the names it may have, the best first."""

    def __init__(self, environ: Mapping[str, str], table: Mapping[str, tuple[str, ...]]) -> None:
        self.environ = environ
        self.table = table
        self.sources: dict[str, str] = {}

    def text(self, what: str) -> str | None:
        """The property as it is written; None if no variable has it."""
        for name in self.table[what]:
            if self.environ.get(name):
                self.sources[what] = name
                return self.environ[name]
        return None

    def number(self, what: str) -> int | None:
        """The property as a number. Raises: UsageError if it is none."""
        return self.parsed(what, _natural)

    def parsed(self, what: str, parse: Callable[[str], T]) -> T | None:
        """The property, parsed. Raises: UsageError naming the variable if that fails."""
        text = self.text(what)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise UsageError(
                f"{self.sources[what]} cannot be read: {error}",
                value=repr(text),
                source="your environment",
                hint="--scheduler none ignores the scheduler's variables",
            ) from None

    def needed(self, what: str, *, missing: str, hint: str) -> int:
        """The number of a property that must be there. Raises: UsageError saying `missing` if it is not."""
        number = self.number(what)
        if number is None:
            raise UsageError(missing, value=f"{self.table[what][0]} is not set", source="your environment", hint=hint)
        return number


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ValueError("expected a whole number")
    return int(text)
