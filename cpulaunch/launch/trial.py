"""Trial starts: whether the worker's interpreter starts with a library preloaded. The results are cached."""

from __future__ import annotations

import os

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import NoReturn

TRIAL_SECONDS, PAUSE_SECONDS = 20.0, 0.002
TIMED_OUT = f"the trial start did not end within {TRIAL_SECONDS:g} s"
EXTERNAL_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGTERM", "SIGXCPU")
"""Signals that say nothing about the library: from Ctrl-C, a batch system, or the kernel when memory runs out."""

HEADER = "cpulaunch trials 1"
GOOD = "good"
MAX_BYTES = 1 << 18
MAX_ENTRIES = 200
"""Format and limits of the cache, a text file that is trusted only if its owner alone can write it."""

NOT_LOADED = 77
CHECK = f"""\
import os, sys
sys.exit({NOT_LOADED} * (os.fsencode(sys.argv[1]) not in open('/proc/self/maps', 'rb').read()))"""
"""An interpreter that is statically linked or has capabilities ignores preloads without a message."""


def try_preloads(
    paths: Sequence[str],
    *,
    interpreter: str,
    environ: Mapping[str, str],
    cache_file: str | None,
) -> dict[str, str | None]:
    """By path: why the library cannot be preloaded into the interpreter; None if a trial start succeeded.

    Effect: starts the interpreter for each path without a cached verdict, and caches the new verdicts. A cached
    verdict holds as long as path, size, modification time and inode of library and interpreter stay the same.
    """
    if not paths:
        return {}
    own = environ.get("LD_PRELOAD", "")
    known = read_verdicts(cache_file) if cache_file else {}
    keys = {path: _key(path, interpreter, own) for path in paths}
    reasons = {path: known[key] for path, key in keys.items() if key in known}
    unknown = [path for path in keys if path not in reasons]
    if unknown:
        with exit_codes_kept():
            trials = {path: _start(path, interpreter=interpreter, environ=environ) for path in unknown}
            verdicts = {path: _finish(path, trial) for path, trial in trials.items()}
        reasons |= {path: verdict.reason for path, verdict in verdicts.items()}
        if cache_file:
            lasting = {keys[path]: each.reason for path, each in verdicts.items() if keys[path] and each.lasting}
            write_verdicts(cache_file, known | lasting)
    return reasons


class exit_codes_kept:  # noqa: N801
    """A context in which SIGCHLD is not ignored, as the parent may have left it: that would lose exit codes."""

    def __enter__(self) -> None:
        import signal  # Here and below: verdicts are mostly cached, and then this is not needed.

        self._was_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
        if self._was_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        import signal

        if self._was_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _key(path: str, interpreter: str, own: str) -> str:
    """Both files' identity and the user's own LD_PRELOAD, in one line; empty (never cached) if a file is missing."""
    try:
        files = [(name, os.stat(name)) for name in (path, interpreter)]
    except (OSError, ValueError):
        return ""
    parts = [f"{name}\t{at.st_size}\t{at.st_mtime_ns}\t{at.st_ino}" for name, at in files]
    # ascii() escapes every special character (newline, tab, undecodable byte), so that the key stays one line.
    return ascii("\t".join([*parts, own]))


@record
class _Verdict:
    """Why a library cannot be preloaded (None: it can), and whether the next trial would have the same result.

    A time-out on a busy machine, a failed fork or a kill says nothing about the library.
    """

    reason: str | None
    lasting: bool = True


@record
class _Trial:
    """A started interpreter and the read end of its stderr."""

    pid: int
    stderr: int


def _start(path: str, *, interpreter: str, environ: Mapping[str, str]) -> _Trial | _Verdict:
    """A started trial; a verdict if it cannot start."""
    if any(separator in path for separator in " :"):
        return _Verdict(reason="its path has a space or colon, which LD_PRELOAD cannot express")
    own = environ.get("LD_PRELOAD")
    env = {**environ, "LD_PRELOAD": f"{path}:{own}" if own else path}
    check = (interpreter, "-I", "-S", "-c", CHECK, os.path.basename(os.path.realpath(path)))
    (read, write), (failed, failure) = os.pipe(), os.pipe()
    launcher = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(read)
        os.close(failed)
        return _Verdict(reason=f"{interpreter} cannot be started: {error.strerror}", lasting=False)
    else:
        if pid == 0:
            _become_trial(check, env, stderr=write, failure=failure, launcher=launcher)
    finally:
        os.close(write)
        os.close(failure)
    with open(failed, "rb") as file:  # A successful exec closes the other end.
        code = file.read()
    if code:
        os.close(read)
        os.waitpid(pid, 0)
        return _Verdict(reason=f"{interpreter} cannot be started: {os.strerror(int(code))}", lasting=False)
    return _Trial(pid=pid, stderr=read)


def _become_trial(
    check: tuple[str, ...], env: Mapping[str, str], *, stderr: int, failure: int, launcher: int
) -> NoReturn:
    """Effect: this forked child executes the check, or writes an errno to `failure`; it dies with the launcher."""
    from cpulaunch.launch.process.replace import reset_dispositions
    from cpulaunch.system.libc import die_with_parent
    from cpulaunch.system.signals import SIGKILL

    try:
        die_with_parent(SIGKILL, parent=launcher)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(stderr, 2)
        reset_dispositions()
        os.execve(check[0], check, env)
    except OSError as error:
        os.write(failure, str(error.errno).encode())
    finally:
        os._exit(127)


def _finish(path: str, trial: _Trial | _Verdict) -> _Verdict:
    """The verdict of a trial. Effect: waits for its process, and kills it after the time limit."""
    import signal
    from time import monotonic

    if isinstance(trial, _Verdict):
        return trial
    deadline = monotonic() + TRIAL_SECONDS
    output = _read_until_closed(trial.stderr, deadline)
    os.close(trial.stderr)
    status = None if output is None else _exit_status(trial.pid, deadline)
    if output is None or status is None:
        os.kill(trial.pid, signal.SIGKILL)
        os.waitpid(trial.pid, 0)
        return _Verdict(reason=TIMED_OUT, lasting=False)
    reason = _failure(status, output.decode(errors="replace").strip(), path=path)
    return _Verdict(reason=reason, lasting=-status not in {getattr(signal, name) for name in EXTERNAL_SIGNALS})


def _failure(status: int, text: str, *, path: str) -> str | None:
    """Why a trial with this exit status and stderr text failed; None if it succeeded."""
    for line in text.splitlines():
        # glibc: "ERROR: ld.so: object 'X' from LD_PRELOAD cannot be preloaded (reason): ignored."
        if "cannot be preloaded" in line and path in line:
            return line.strip()
    if status == NOT_LOADED:
        return "the interpreter starts without loading it"
    if status != 0:
        last = text.splitlines()[-1] if text else "no message"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
        return f"the trial start {how}: {last}"
    return None


def _read_until_closed(fd: int, deadline: float) -> bytes | None:
    """The first 64 KiB that were written; None unless all writers closed the pipe by the deadline."""
    import select
    from time import monotonic

    output = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (rest := deadline - monotonic()) > 0 and poll.poll(rest * 1000):
        data = os.read(fd, 1 << 16)
        if not data:
            return output
        output = (output + data)[: 1 << 16]
    return None


def _exit_status(pid: int, deadline: float) -> int | None:
    """The process's exit code, or minus the signal that killed it; None if it runs on until the deadline.

    It may have closed the pipe long before its end.
    """
    from time import monotonic, sleep

    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if monotonic() >= deadline:
            return None
        sleep(PAUSE_SECONDS)
    return os.waitstatus_to_exitcode(ended[1])


def read_verdicts(path: str) -> dict[str, str | None]:
    """By key: the verdict, None for a success. Empty if the file is absent, malformed or writable by other users."""
    from cpulaunch.system.files.caches import read_lines  # Not needed where nothing is preloaded.

    verdicts: dict[str, str | None] = {}
    for line in read_lines(path, header=HEADER, max_bytes=MAX_BYTES):
        key, tab, verdict = line.partition("\t")
        if tab:
            verdicts[key] = None if verdict == GOOD else verdict
    return verdicts


def write_verdicts(path: str, verdicts: Mapping[str, str | None]) -> None:
    """Effect: replaces the file by one with the latest verdicts, atomically; does nothing if that fails."""
    from cpulaunch.system.files.caches import replace_cache

    entries = list(verdicts.items())[-MAX_ENTRIES:]
    lines = [f"{key}\t{GOOD if verdict is None else _one_line(verdict)}" for key, verdict in entries]
    replace_cache(path, lines, header=HEADER)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500] or "failed"
