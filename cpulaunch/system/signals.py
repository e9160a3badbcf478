"""Signals: their numbers, which of them a launcher passes on to its workers, and which end a launch."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
    from collections.abc import Iterable
else:
    import _signal as signal  # Without the enumerations of `signal` itself, which take as long as planning.

SIGKILL = int(getattr(signal, "SIGKILL", 9))
SIGCONT = int(getattr(signal, "SIGCONT", 18))
SIGTSTP = int(getattr(signal, "SIGTSTP", 20))
SIGTERM = int(signal.SIGTERM)
SIGINT = int(signal.SIGINT)
"""Numbers that decisions name, also where the operating system lacks them (Windows)."""

ENDING = frozenset(
    number for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if (number := getattr(signal, name, None)) is not None
)
"""Signals that end a launch; the others are passed on to the workers, which decide what they mean."""

NOT_PASSED_ON = (
    *("SIGKILL", "SIGSTOP"),  # cannot be caught
    *("SIGCHLD", "SIGPIPE", "SIGTTIN", "SIGTTOU"),  # about this process itself
    *("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS"),  # its own faults: must not be blocked
)


FIRST_REAL_TIME = int(getattr(signal, "SIGRTMIN", 1 << 16))
OPPOSITES = {SIGTSTP: frozenset({SIGCONT}), SIGCONT: frozenset({SIGTSTP})}
"""What a signal takes back. Source: Linux, kernel/signal.c, prepare_signal."""


def ending_signals(names: Iterable[str]) -> frozenset[int]:
    """The numbers of these signals, and SIGINT: Ctrl-C always ends a job, as a terminal has no other way."""
    numbers = (getattr(signal, name, None) for name in (*names, "SIGINT"))
    return frozenset(int(number) for number in numbers if number is not None)


def merged(numbers: Iterable[int]) -> list[int]:
    """These signals in their order, each once, as the kernel merges pending ones: a process may send thousands.

    SIGINT is kept twice, as the second one kills; SIGTSTP and SIGCONT are kept again after each other; real-time
    signals are all kept, as by the kernel, which limits how many are pending. Source: signal(7).
    """
    kept: list[int] = []
    pending: set[int] = set()
    for number in numbers:
        if number in pending:
            continue
        if number < FIRST_REAL_TIME and (number != SIGINT or SIGINT in kept):
            pending.add(number)
        pending -= OPPOSITES.get(number, frozenset())
        kept.append(number)
    return kept


def paused_after(numbers: bytes, *, paused: bool) -> bool:
    """Whether a launch is paused after these signals: the last SIGTSTP or SIGCONT decides, if there is one."""
    stop, resume = numbers.rfind(SIGTSTP), numbers.rfind(SIGCONT)
    return paused if stop == resume else stop > resume


def passed_on(numbers: Iterable[int]) -> frozenset[int]:
    """Those of the signals that a launcher passes on: not the ones that it ignores since its start (nohup, `&`)."""
    excluded = {getattr(signal, name, None) for name in NOT_PASSED_ON}
    return frozenset(
        int(number) for number in numbers if number not in excluded and signal.getsignal(number) != signal.SIG_IGN
    )
