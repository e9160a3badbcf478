"""What distinguishes one instance from the others: variables, and words in its arguments and --env values."""

from __future__ import annotations

from cpulaunch.plan.variables.resolve import per_worker
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import INSTANCE_VARIABLES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.records.plan import VariableRequest

MAX_PORT = 65535
MAX_DIGITS, MAX_SHOWN = 20, 40
PORT = "port:"
OPENING, CLOSING = "{", "}"


@record
class Instance:
    """One instance of a launch: its number, how many there are, and its CPUs."""

    index: int
    count: int
    cpus: frozenset[int]

    def expand(self, text: str) -> str:
        """The text with {instance}, {instances}, {cpus} and {port:N} replaced, and {{instance}} by {instance}.

        All other braces stay. Raises: UsageError if a port is too large.
        """
        if OPENING not in text:
            return text
        pieces, rest = [], text
        while OPENING in rest:
            before, _, rest = rest.partition(OPENING)
            escaped = rest.startswith(OPENING)
            name, closed, after = rest[escaped:].partition(CLOSING)
            value = self._value(name) if closed else None
            if value is None or (escaped and not after.startswith(CLOSING)):
                pieces += [before, OPENING]
                continue
            pieces += [before, f"{OPENING}{name}{CLOSING}" if escaped else value]
            rest = after[escaped:]
        return "".join((*pieces, rest))

    def _value(self, name: str) -> str | None:
        """What the name between braces stands for; None if it is not one of the four."""
        if name.startswith(PORT) and name[len(PORT) :].isdecimal():
            return str(_port(name[len(PORT) :], name, offset=self.index))
        return {"instance": str(self.index), "instances": str(self.count), "cpus": format_cpulist(self.cpus)}.get(name)


def _port(digits: str, name: str, *, offset: int) -> int:
    """The port that is so many above the one in these digits. Raises: UsageError if there is none."""
    number = int(digits[:MAX_DIGITS]) + offset  # int() takes 4,300 digits at most.
    if number > MAX_PORT or len(digits) > MAX_DIGITS:
        source = f"{{{name[:MAX_SHOWN]}}}"
        raise UsageError("no such port", value=number, source=source, hint=f"ports go up to {MAX_PORT}")
    return number


def instances(cpus: Sequence[frozenset[int]]) -> tuple[Instance, ...]:
    """The instances on these CPUs."""
    return tuple(Instance(index=index, count=len(cpus), cpus=own) for index, own in enumerate(cpus))


def identity_variables(each: Sequence[Instance]) -> tuple[VariableRequest, ...]:
    """CPULAUNCH_INSTANCE and CPULAUNCH_INSTANCES."""
    if not each:
        return ()
    name, names = INSTANCE_VARIABLES
    values = [str(instance.index) for instance in each]
    return (
        per_worker(name, values, origin="default", reason="the number of the instance, from 0"),
        per_worker(names, [str(len(each))] * len(each), origin="default", reason="how many instances there are"),
    )
