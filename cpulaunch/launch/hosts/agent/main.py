"""torch elastic's agent for one host, run as a program by the Python that has torch.

Its result is a report that the launcher, which supervises it, reads: an error of its own, or how the ranks ended.
The ranks it starts are shims (shim.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

    from cpulaunch.launch.hosts.agent.messages import AgentConfig, AgentReport

EXIT_DELAY_SECONDS = 1.0
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that reach the ranks and end nothing, unless --signals-to-handle names them: then torch handles them."""
CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Of torch's C++ code, which logs a stack trace for each attempt while it waits for hosts."""


def main(arguments: Sequence[str]) -> int:
    """The exit code of `main.py DIRECTORY`: the first failed rank's. Effect: writes the report."""
    from cpulaunch.launch.hosts.agent.files import agent_config_file, agent_report_file
    from cpulaunch.launch.hosts.agent.messages import AgentConfig, AgentError, AgentReport, read_message, write_message
    from cpulaunch.records.errors import CpulaunchError
    from cpulaunch.system.files.folders import open_private
    from cpulaunch.system.files.reading import mark_lost, note_time

    folder = open_private(arguments[0])  # A rank may rename it.
    config_name, report_name = agent_config_file(""), agent_report_file("")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch handles it once there are ranks; before, it ends this process.
    for number in FORWARDED:
        signal.signal(number, _forward_to_ranks)
    start_exit_thread()
    config = read_message(config_name, AgentConfig, folder=folder)
    try:
        report = run_agent(config, folder, begin_end=lambda: note_time(config_name, time.time(), folder=folder))
    except CpulaunchError as error:
        value = None if error.value is None else str(error.value)
        parts = AgentError(what=error.what, value=value, source=error.source, hint=error.hint)
        report = AgentReport(exit_code=error.exit_code, error=parts)
    try:
        write_message(report_name, report, folder=folder)
    except OSError as error:  # The exit code still tells whether the ranks failed.
        _notify(f"cannot write how the ranks ended: {error}")
        if report.error is not None:
            _notify(f"error: {report.error.what}")
        with suppress(OSError):
            mark_lost(report_name, folder=folder)
    return report.exit_code


def run_agent(config: AgentConfig, folder: int, *, begin_end: Callable[[], None]) -> AgentReport:
    """How the job ended on this host; calls `begin_end` before it ends the ranks. Raises: LaunchError or UsageError.

    `folder`: the run's directory.
    """
    from cpulaunch.launch.hosts.agent.rendezvous import HostRendezvous, compare_hosts, wait_for_endpoint
    from cpulaunch.launch.hosts.agent.stores import check_servers_of_c10d, keep_stores_on_loopback, with_checked_file
    from cpulaunch.records.record import replace

    config = replace(config, job=with_checked_file(config.job))
    rendezvous = HostRendezvous(config.job)
    wait_for_endpoint(rendezvous, _notify)
    _import_torch(quiet="LOGLEVEL" not in os.environ)
    from cpulaunch.launch.hosts.agent.config import check_event_handler, launch_config, make_logs_specs
    from cpulaunch.launch.hosts.agent.ends import end_ranks_within
    from cpulaunch.launch.hosts.agent.errors import translated_errors
    from cpulaunch.launch.hosts.agent.failures import job_report, read_any_error_file
    from cpulaunch.launch.hosts.agent.log_tail import open_outputs, show_regular_logs

    if config.job.hosts[1] == 1:
        keep_stores_on_loopback()
    check_servers_of_c10d()
    read_any_error_file()
    show_regular_logs(open_outputs(folder))
    killed = end_ranks_within(config.grace_seconds, begin=begin_end)

    with translated_errors(rendezvous):
        check_event_handler(config.job.event_log_handler)
        logs_specs = make_logs_specs(config)
        store, conf = compare_hosts(rendezvous)
        torch_config = launch_config(config, conf, logs_specs)
        report = job_report(lambda: _elastic_launch(torch_config, config.shim), logs_specs=logs_specs)
        del store  # Until here: the server that all hosts' agents use lives as long as the store.
    return replace(report, killed=tuple(killed))


def _elastic_launch(torch_config: Any, shim: Sequence[str]) -> None:
    """Effect: the job runs to its end. Raises: what torch raises."""
    from torch.distributed.launcher.api import elastic_launch

    elastic_launch(torch_config, shim[0])(*shim[1:], "${local_rank}", str(os.getpid()))


def _import_torch(*, quiet: bool) -> None:
    """Effect: imports torch; if `quiet`, without the logs that repeat what the report says. Raises: LaunchError."""
    from cpulaunch.records.errors import LaunchError

    inherited = os.environ.get(CPP_LOG_LEVEL)
    if quiet:
        os.environ.setdefault(CPP_LOG_LEVEL, "FATAL")
    try:
        import torch.distributed.elastic
        import torch.distributed.launcher.api  # noqa: F401
    except ImportError as error:
        raise LaunchError(
            "a job of several hosts needs torch in the Python that runs the program",
            value=sys.executable,
            source=str(error),
            hint="install torch there, or set PYTHON_EXEC to a Python that has it",
        ) from None
    if quiet:
        _quiet_torch_loggers()
    if inherited is None:
        os.environ.pop(CPP_LOG_LEVEL, None)  # The ranks inherit the environment and log as usual.


def _quiet_torch_loggers() -> None:
    """Effect: torch's Python code logs only critical messages; its events ("torchelastic-events-...") stay."""
    import logging

    loggers = (logging.getLogger(name) for name in list(logging.root.manager.loggerDict))
    for logger in loggers:
        if logger.name.partition(".")[0] == "torch":
            for handler in logger.handlers:
                handler.setLevel(logging.CRITICAL)


def _forward_to_ranks(number: int, frame: FrameType | None) -> None:
    """Effect: the ranks, each of which torch starts in a process group of its own, get the signal."""
    from cpulaunch.launch.process.processes import signal_group
    from cpulaunch.system.process_state import children_of

    for pid in children_of(os.getpid()):
        signal_group(pid, number)


def start_exit_thread() -> None:
    """Effect: a signal that ends the job ends this process too while torch waits in its store.

    There torch runs no Python code, and so no signal handler, for as long as five minutes at the end of a job.
    """
    from cpulaunch.system.libc import private_pipe

    read, write = private_pipe()  # Ranks could write to any other, or read what a signal has written.
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_exit_after_ranks, args=(read,), daemon=True).start()


def _exit_after_ranks(read: int) -> None:
    """Effect: after a signal other than the forwarded ones, this process ends a second after its last rank."""
    from cpulaunch.launch.process.processes import own_children

    while (number := os.read(read, 1)[0]) in FORWARDED:
        continue
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < EXIT_DELAY_SECONDS:
        if own_children():
            idle_since = time.monotonic()
        time.sleep(EXIT_DELAY_SECONDS / 10)
    os._exit(128 + number)


def _notify(line: str) -> None:
    from cpulaunch.records.errors import escaped_lines

    os.write(2, f"cpulaunch: {escaped_lines(line)}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    # Only the package is imported from here: other modules of these directories may have the names of the user's.
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10, which may run torch, has no such flag.
        del sys.path[0]
    sys.path.insert(
        0,
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))),
    )
    __import__("cpulaunch")
    del sys.path[0]
    sys.exit(main(sys.argv[1:]))
