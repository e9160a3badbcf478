"""Trial starts: does the worker's interpreter start with a library preloaded? Answers are remembered."""

from __future__ import annotations

import os

from cpulaunch.launch.trial_cache import read_verdicts, write_verdicts
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRIAL_SECONDS = 20.0
TIMED_OUT = f"the trial start did not end within {TRIAL_SECONDS:g} s"
NOT_ITS_FAULT = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGTERM", "SIGXCPU")
"""Signals that come from outside: a Ctrl-C, a batch system, the kernel out of memory."""

NOT_LOADED = 77
CHECK = f"import sys; sys.exit({NOT_LOADED} * (sys.argv[1] not in open('/proc/self/maps').read()))"
"""A statically linked interpreter, or one with capabilities, ignores preloads without a word."""


def try_preloads(
    paths: Sequence[str],
    *,
    interpreter: str,
    environ: Mapping[str, str],
    cache_file: str | None,
) -> dict[str, str | None]:
    """Why each library cannot be preloaded into the interpreter; None where a trial start succeeded.

    Verdicts are kept in `cache_file` under the identity (path, size, times, inode) of both files, so a
    changed file is tried again. Effect: starts the interpreter for what is not known yet.
    """
    if not paths:
        return {}
    own = environ.get("LD_PRELOAD", "")
    known = read_verdicts(cache_file) if cache_file else {}
    keys = {path: _key(path, interpreter, own) for path in paths}
    verdicts = {path: known[key] for path, key in keys.items() if key in known}
    unknown = [path for path in keys if path not in verdicts]
    if unknown:
        trials = [_start(path, interpreter=interpreter, environ=environ) for path in unknown]
        fresh = {trial.path: _verdict(trial) for trial in trials}
        verdicts |= {path: verdict.refused for path, verdict in fresh.items()}
        if cache_file:
            lasting = {keys[path]: each.refused for path, each in fresh.items() if keys[path] and each.lasts}
            write_verdicts(cache_file, known | lasting)
    return verdicts


def _key(path: str, interpreter: str, own: str) -> str:
    """What a verdict depends on, in one line; empty (never cached) if that cannot be said."""
    try:
        files = [(name, os.stat(name)) for name in (path, interpreter)]
    except (OSError, ValueError):
        return ""
    parts = [f"{name}\t{at.st_size}\t{at.st_mtime_ns}\t{at.st_ino}" for name, at in files]
    # repr keeps every odd character (newline, tab, undecodable byte) inside the one line.
    return ascii("\t".join([*parts, own]))


@record
class _Verdict:
    """Why a library cannot be preloaded (None: it can), and whether that will be so next time.

    A busy machine's time-out, a process that was not to be had or was killed say nothing about the library.
    """

    refused: str | None
    lasts: bool = True


@record
class _Trial:
    """A started interpreter (`pid`) and the read end of its stderr, or the verdict without one."""

    path: str
    pid: int = 0
    stderr: int = -1
    verdict: _Verdict | None = None


def _start(path: str, *, interpreter: str, environ: Mapping[str, str]) -> _Trial:
    import signal  # Here and below: verdicts are mostly known, and then nothing of this is needed.

    if any(separator in path for separator in " :"):
        reason = "its path has a space or colon, which LD_PRELOAD cannot express"
        return _Trial(path=path, verdict=_Verdict(refused=reason))
    own = environ.get("LD_PRELOAD")
    env = {**environ, "LD_PRELOAD": f"{path}:{own}" if own else path}
    check = [interpreter, "-I", "-S", "-c", CHECK, os.path.basename(os.path.realpath(path))]
    read, write = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, write, 2),
    ]
    try:
        pid = os.posix_spawn(interpreter, check, env, file_actions=actions, setsigdef=[signal.SIGPIPE])
    except OSError as error:
        os.close(read)
        reason = f"{interpreter} cannot be started: {error.strerror}"
        return _Trial(path=path, verdict=_Verdict(refused=reason, lasts=False))
    finally:
        os.close(write)
    return _Trial(path=path, pid=pid, stderr=read)


def _verdict(trial: _Trial) -> _Verdict:
    """What came of the trial. Effect: its process has ended."""
    import signal

    if trial.verdict is not None:
        return trial.verdict
    said, in_time = _read_until_closed(trial.stderr)
    os.close(trial.stderr)
    if not in_time:
        os.kill(trial.pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(trial.pid, 0)[1])
    if not in_time:
        return _Verdict(refused=TIMED_OUT, lasts=False)
    reason = _reason(status, said.decode(errors="replace").strip(), path=trial.path)
    return _Verdict(refused=reason, lasts=-status not in {getattr(signal, name) for name in NOT_ITS_FAULT})


def _reason(status: int, text: str, *, path: str) -> str | None:
    """Why a trial that ended so, and wrote this, failed; None if it succeeded."""
    for line in text.splitlines():
        # glibc: "ERROR: ld.so: object 'X' from LD_PRELOAD cannot be preloaded (reason): ignored."
        if "cannot be preloaded" in line and path in line:
            return line.strip()
    if status == NOT_LOADED:
        return "the interpreter starts without loading it"
    if status != 0:
        last = text.splitlines()[-1] if text else "no message"
        return f"the trial start {_ended(status)}: {last}"
    return None


def _ended(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"


def _read_until_closed(fd: int) -> tuple[bytes, bool]:
    """What was written (its first 64 KiB) and whether all writers closed within the time limit."""
    import select
    from time import monotonic

    deadline = monotonic() + TRIAL_SECONDS
    said = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0.0, deadline - monotonic()) * 1000):
        data = os.read(fd, 1 << 16)
        if not data:
            return said, True
        said = (said + data)[: 1 << 16]
    return said, False
