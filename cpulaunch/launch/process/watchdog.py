"""The outer guard's watch over the supervisor: forwards signals, and notices when it misses one, or a failure."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import time

from cpulaunch.system.control_group import is_frozen
from cpulaunch.system.files.reading import read_proc
from cpulaunch.system.libc import receive_at_once, send_at_once
from cpulaunch.system.process_state import (
    EXIT_CODE,
    GROUP,
    PARENT,
    STATE,
    THREADS,
    all_threads_ended,
    process_ids,
    stat_fields,
)
from cpulaunch.system.signals import OPPOSITES, SIGCONT, SIGINT, SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.launch.process.child_watch import ChildWatch

ANSWER_SECONDS = 0.7
"""How long after the grace period a supervisor may take to read a signal that ends the launch."""

INTERRUPT_SECONDS = 0.5
"""How long after the first SIGINT others are no second one: `timeout` sends it to its child, then to its group."""

MAX_UNREAD = 64
"""How many signals the pipe may hold before others than ending ones are dropped, so that it has room for those."""

QUESTION, QUESTION_SECONDS = 0, 5.0
"""A number that is no signal, and how long the supervisor may take to read it: while it kills thousands, seconds."""

REPORT_SECONDS = 60.0
"""How long a supervisor whose workers have all ended may take for reports: a file system may hang."""

CHECK_SECONDS = 5.0
"""Between two looks at the supervisor's children, which take the guard less than half a millisecond for two."""


class FailureWatch:
    """Notices a worker that has failed while the supervisor does not, and so does not end the launch.

    A worker may block the supervisor for ever: by a trace, a frozen cgroup, a file in /proc that cannot be read. What
    is counted is looks, not seconds: on a machine that was suspended, the supervisor may not have run either.
    """

    def __init__(
        self,
        child: int,
        *,
        guards: int,
        grace_seconds: float,
        of_launchers: bool = False,
        reaps: bool = True,
        proc: str = "/proc",
    ) -> None:
        """`child`: the first of so many guards, each the parent of the next one; the last is the supervisor's.

        `of_launchers`: the supervisor's children are launchers, whose children are workers too. `reaps`: it reaps what
        it adopts, so that what it leaves unreaped is a worker whose end it has missed.
        """
        self._child = child
        self._guards = guards
        self._of_launchers = of_launchers
        self._reaps = reaps
        self._proc = proc
        self._most = 2 + int((grace_seconds + ANSWER_SECONDS) / CHECK_SECONDS)
        self._looks: dict[int, int] = {}
        self._ended: int | None = None
        """The supervisor's pid if it had ended at the last look."""
        self.sees_hidden_end = False
        """Whether a child of the supervisor had ended, at the last look, of which nothing tells the supervisor."""

    def failure(self, *, answers: bool = True) -> int | None:
        """The exit code, or minus the signal, of a worker that was unreaped at too many looks; None if there is none.

        `answers`: whether the supervisor reads what tells it to look for hidden ends. Effect: looks.
        """
        children = self._children_of_supervisor() if self._reaps else []
        hidden = frozenset(filter(self._is_hidden, children))
        self.sees_hidden_end = bool(hidden)
        seen = [pid for pid in children if not (answers and pid in hidden)]
        for launcher in children if self._of_launchers else ():
            seen += filter(self._leads_its_group, self._unseen_by(launcher))
        failures = {pid: code for pid in seen if (code := self._failure_of(pid))}
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in failures}
        return next((failures[pid] for pid, looks in self._looks.items() if looks > self._most), None)

    def missed_end(self) -> int | None:
        """The exit code, or minus the signal, of the supervisor if it had ended at two looks; None otherwise.

        Then the guard above it does not run, as a process traces or freezes that. Effect: looks.
        """
        before, self._ended = self._ended, None
        try:
            pid = self._supervisor()
            if not all_threads_ended(pid, proc=self._proc):
                return None
            code = os.waitstatus_to_exitcode(int(stat_fields(f"{self._proc}/{pid}")[EXIT_CODE]))
        except (OSError, IndexError, ValueError, OverflowError):
            return None
        self._ended = pid
        return code if before == pid else None

    def _children_of_supervisor(self) -> list[int]:
        """The pids of the supervisor's children; empty if the kernel lists none."""
        try:
            if os.readlink(f"{self._proc}/self") != str(os.getpid()):
                return []  # This is the /proc of another pid namespace.
            return self._children_of(self._supervisor())
        except (OSError, IndexError):
            return []

    def _supervisor(self) -> int:
        """The supervisor's pid, ended or not. Raises: OSError, IndexError."""
        pid = self._child
        for _ in range(self._guards):
            pid = self._children_of(pid)[0]
        return pid

    def _children_of(self, pid: int) -> list[int]:
        return process_ids(read_proc(f"{self._proc}/{pid}/task/{pid}/children").split())

    def _unseen_by(self, launcher: int) -> list[int]:
        """The launcher's children whose ends it does not see: all while it is traced or frozen, else hidden ones."""
        try:
            children = self._children_of(launcher)
            is_traced = stat_fields(f"{self._proc}/{launcher}")[STATE] == b"t"
        except (OSError, IndexError):
            return []
        if is_traced or (any(map(self._failure_of, children)) and is_frozen(launcher, self._proc)):
            return children
        return list(filter(self._is_hidden, children))

    def _is_hidden(self, pid: int) -> bool:
        """Whether the process has ended, and is not the supervisor's to reap before a tracer lets go of a thread."""
        try:
            fields = stat_fields(f"{self._proc}/{pid}")
            is_shown = fields[STATE] == b"Z" and int(fields[THREADS]) == 1
        except (OSError, IndexError, ValueError):
            return False
        return not is_shown and all_threads_ended(pid, proc=self._proc)

    def _leads_its_group(self, pid: int) -> bool:
        """Whether the process can be a rank: torch's agent starts each in a session, whose group it cannot leave."""
        try:
            return int(stat_fields(f"{self._proc}/{pid}")[GROUP]) == pid
        except (OSError, IndexError, ValueError):
            return False

    def _failure_of(self, pid: int) -> int | None:
        """How an unreaped process failed, of whatever group; None if it has not ended, or well.

        One that another process than its parent (PTRACE_TRACEME) traces is not the supervisor's to reap.
        """
        folder = f"{self._proc}/{pid}"
        try:
            fields = stat_fields(folder)
            if fields[STATE] != b"Z" or (int(fields[THREADS]) > 1 and not self._is_hidden(pid)):
                return None
            tracer = read_proc(f"{folder}/status").partition(b"\nTracerPid:")[2].split()[0]
            if tracer not in (b"0", fields[PARENT]):
                return None
            return os.waitstatus_to_exitcode(int(fields[EXIT_CODE])) or _hidden_failure(folder)
        except (OSError, IndexError, ValueError, OverflowError):
            return None


def _hidden_failure(folder: str) -> int | None:
    """Minus SIGKILL for a process of this user whose exit code the kernel hides; None for others. Raises: OSError.

    The kernel shows a 0 then, and asks here for the same right: of a process that is not dumpable, or has capabilities.
    Source: Linux, fs/proc/array.c, do_task_stat; fs/proc/namespaces.c, proc_ns_readlink; prctl(2), PR_SET_DUMPABLE.
    """
    try:
        os.readlink(f"{folder}/ns/user")
    except PermissionError:
        users = read_proc(f"{folder}/status").partition(b"\nUid:")[2].partition(b"\n")[0].split()
        return -SIGKILL if set(users) == {b"%d" % os.geteuid()} else None
    return None


class Watchdog:
    """Forwards signals through a pipe, and knows how many of them the supervisor has read.

    A worker may stop the supervisor, trace it, or block it otherwise: then the signal that is to end the launch stays
    in the pipe, or if the worker does so only at that signal, a question that follows it after the grace period.
    """

    def __init__(
        self,
        control: int,
        *,
        unread: int,
        ending: frozenset[int],
        grace_seconds: float,
        asks: bool = False,
        failures: FailureWatch | None = None,
    ) -> None:
        """Effect: makes the write end of the pipe, `control`, return at once when it is full.

        `unread`: its read end, which tells how many bytes are left in it, and is never read here. `asks`: whether the
        supervisor is asked questions, until it stops writing to its end.
        """
        os.set_blocking(control, False)
        self._control = control
        self._unread = unread
        self._ending = ending
        self._grace_seconds = grace_seconds
        self._asks = asks
        self._failures = failures
        self._next_look = _now() + CHECK_SECONDS
        self._interrupted_at: float | None = None
        """When the first SIGINT came."""
        self._is_paused = False
        """Whether the supervisor was told of SIGTSTP, and not of SIGCONT since."""
        self._written = 0
        self._awaited: int | None = 0
        """How many bytes have to be read for the first unanswered ending signal to be answered; None: it never is."""
        self._deadline: float | None = None
        self._first = 0
        self._reporting = False
        self.complaint: str | None = None
        """Why `next_signal` returned None, as a line for the user."""
        self.exit_code: int | None = None
        """The launch's exit code if `next_signal` returned None."""

    def forward(self, number: int) -> None:
        """Effect: the supervisor can read the signal, unless it ends no launch and so many are unread already.

        A SIGCONT is not dropped that takes back a SIGTSTP, as the workers would stay stopped. A SIGINT is dropped that
        comes within INTERRUPT_SECONDS of the first one: the supervisor kills at the next one that it reads.
        """
        is_second = False
        if number == SIGINT and self._interrupted_at is None:
            self._interrupted_at = _now()
        elif number == SIGINT and self._interrupted_at is not None:
            if _now() < self._interrupted_at + INTERRUPT_SECONDS:
                return
            is_second = True
        is_urgent = number in self._ending or (number == SIGCONT and self._is_paused)
        if not is_urgent and self._unread_bytes() >= MAX_UNREAD:
            return
        written = self._write(number)
        if number in OPPOSITES and written:
            self._is_paused = number != SIGCONT
        self._written += written
        if number in self._ending:
            self._expect_answer(number, self._written if written else None, kills=is_second)

    def _write(self, number: int) -> int:
        """1; 0 if it will never be read: a worker has filled the pipe, or ended it."""
        try:
            send_at_once(self._control, number)
        except OSError:
            return 0
        return 1

    def _expect_answer(self, number: int, awaited: int | None, *, kills: bool) -> None:
        """Effect: sets the deadline for the first unanswered signal; one after it that `kills` brings it near."""
        if self._deadline is None or self._answered():
            self._awaited, self._first = awaited, number
            self._deadline = _now() + self._grace_seconds + ANSWER_SECONDS
            return
        if self._awaited is None:  # What the supervisor could not read the first time, it may read now.
            self._awaited = awaited
        if kills:
            self._deadline = min(self._deadline, _now() + ANSWER_SECONDS)
        elif self._reporting:
            self._deadline = min(self._deadline, _now() + self._grace_seconds + ANSWER_SECONDS)

    def next_signal(self, watch: ChildWatch) -> int | None:
        """The next signal that arrives; None if by its deadline the supervisor has not read an ending one.

        None too if it has not noticed that a worker failed.
        From then on it is None again and again: what a process holds at its end may need more than one kill.
        """
        while not (self._is_overdue() or self._has_missed_a_failure()):
            number = watch.next_signal(self._wait_seconds())
            if number is not None:
                return number
        self._deadline = _now() + ANSWER_SECONDS
        if self.complaint is None:
            self.exit_code = 128 + self._first
            self.complaint = f"the supervisor did not read signal {self._first} in time; all workers were killed"
            if self._reporting:
                self.complaint = f"reports were not written in time after signal {self._first}"
        return None

    def _has_missed_a_failure(self) -> bool:
        """Whether a worker has failed long ago, and the supervisor has not reaped it; or its guard not that one."""
        if self._failures is None or self.complaint is not None or _now() < self._next_look:
            return False
        self._next_look = _now() + CHECK_SECONDS
        if (code := self._failures.missed_end()) is not None:
            self.exit_code = code if code >= 0 else 128 - code
            self.complaint = "a guard that is held did not notice the end of the supervisor; all workers were killed"
            return True
        code = self._failures.failure(answers=self._unread_bytes() == 0)
        if self._failures.sees_hidden_end:
            self._written += self._write(QUESTION)  # The supervisor looks for such ends whenever it reads.
        if code is None:
            return False
        self.exit_code = code if code > 0 else 128 - code
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        self.complaint = f"the supervisor did not notice that a worker failed ({how}); all workers were killed"
        return True

    def _wait_seconds(self) -> float | None:
        """How long to wait for a signal; None: until there is one."""
        look = None if self._failures is None or self.complaint is not None else max(0.0, self._next_look - _now())
        return min((each for each in (look, self._seconds_left()) if each is not None), default=None)

    def _is_overdue(self) -> bool:
        """Whether the deadline has passed without an answer. Effect: once it is answered, sets the next one, if any."""
        if self._seconds_left() != 0.0:
            return False
        if self.complaint is not None or not self._answered():
            return True
        self._ask()
        return False

    def _ask(self) -> None:
        """Effect: the supervisor has to read a question by the next deadline, or if its workers have ended, to end.

        It has none where the launch asks no questions, or cannot know whether the workers have ended.
        """
        self._deadline = None
        supervising = self._is_supervising() if self._asks else None
        if supervising:
            written = self._write(QUESTION)
            self._written += written
            self._awaited = self._written if written else None
            self._deadline = _now() + QUESTION_SECONDS
        elif supervising is not None:
            self._reporting, self._awaited = True, None
            self._deadline = _now() + REPORT_SECONDS

    def _is_supervising(self) -> bool | None:
        """Whether the supervisor has not stopped writing to its end, to which it writes nothing; None of a pipe."""
        try:
            return bool(receive_at_once(self._control))
        except BlockingIOError:
            return True
        except OSError:
            return None

    def _seconds_left(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - _now())

    def _answered(self) -> bool:
        """Whether the supervisor has read as many bytes as it has to."""
        if self._awaited is None:
            return False
        return self._written - self._unread_bytes() >= self._awaited

    def _unread_bytes(self) -> int:
        """How many bytes the supervisor has not read. Source: ioctl_pipe(2) and unix(7), FIONREAD."""
        return int.from_bytes(fcntl.ioctl(self._unread, termios.FIONREAD, bytes(4)), sys.byteorder)


def _now() -> float:
    return time.monotonic()
