"""torch elastic's agent for one host, run as a program by the Python that has torch.

Everything it has to say goes into a report, which the launcher that supervises it reads: an error of its own, or how
the ranks ended. The ranks it starts are shims (shim.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType
    from typing import Any

FAILED = 125
ALONE_SECONDS = 1.0
QUIET = "TORCH_CPP_LOG_LEVEL"
"""What torch's C++ code logs while it waits for hosts, with a trace of its own calls for each attempt."""


def main(arguments: Sequence[str]) -> int:
    """The exit code of `agent.py DIRECTORY`: the first failed rank's. Effect: writes the report."""
    from cpulaunch.launch.hosts.agent.files import orders_file, report_file
    from cpulaunch.records.errors import CpulaunchError

    directory = arguments[0]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch handles it once there are ranks; before, it just ends this.
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Unless --signals-to-handle names them: torch does it then.
        signal.signal(number, _pass_on)
    end_promptly()
    with open(orders_file(directory)) as file:
        orders = json.load(file)
    try:
        report = run_agent(orders)
    except CpulaunchError as error:
        report = {"exit_code": error.exit_code, "error": [error.what, error.value, error.source, error.hint]}
    try:
        with open(report_file(directory), "w") as file:
            json.dump(report, file)
    except OSError as error:  # The exit code still tells whether the ranks failed.
        _notify(f"what became of the ranks cannot be written down: {error}")
    return int(report["exit_code"])


def run_agent(orders: Mapping[str, Any]) -> dict[str, Any]:
    """What the report says. Raises: LaunchError or UsageError."""
    from cpulaunch.launch.hosts.agent.rendezvous import Meeting, meet, wait_for_endpoint

    meeting = Meeting(orders["job"])
    wait_for_endpoint(meeting, _notify)
    _import_torch(quiet="LOGLEVEL" not in os.environ)
    from cpulaunch.launch.hosts.agent.config import check_event_handler, launch_config, make_logs_specs
    from cpulaunch.launch.hosts.agent.errors import explained
    from cpulaunch.launch.hosts.agent.failures import job_report

    with explained(meeting):
        check_event_handler(orders["job"]["event_log_handler"])
        logs_specs = make_logs_specs(orders["logs"])
        store = meet(meeting)
        config = launch_config(orders["job"], meeting.conf, logs_specs)
        report = job_report(lambda: _elastic_launch(config, orders["shim"]), logs_specs=logs_specs)
        del store  # The server that all hosts' agents talk to lived as long as the job.
    return report


def _elastic_launch(config: Any, shim: Sequence[str]) -> None:
    """Effect: the job runs to its end. Raises: what torch raises."""
    from torch.distributed.launcher.api import elastic_launch

    elastic_launch(config, shim[0])(*shim[1:], "${local_rank}", str(os.getpid()))


def _import_torch(*, quiet: bool) -> None:
    """Effect: torch is there, and logs nothing that the report will say better. Raises: LaunchError."""
    from cpulaunch.records.errors import LaunchError

    asked = os.environ.get(QUIET)
    if quiet:
        os.environ.setdefault(QUIET, "FATAL")
    try:
        import torch.distributed.elastic
        import torch.distributed.launcher.api  # noqa: F401
    except ImportError as error:
        raise LaunchError(
            "several hosts need torch in the Python that runs the program",
            value=sys.executable,
            source=str(error),
            hint="install torch there, or set PYTHON_EXEC to a Python that has it",
        ) from None
    if quiet:
        _silence()
    if asked is None:
        os.environ.pop(QUIET, None)  # The ranks log as they would.


def _silence() -> None:
    """Effect: torch's Python code logs only what is critical; its events ("torchelastic-events-...") stay."""
    import logging

    loggers = (logging.getLogger(name) for name in list(logging.root.manager.loggerDict))
    for logger in loggers:
        if logger.name.partition(".")[0] == "torch":
            for handler in logger.handlers:
                handler.setLevel(logging.CRITICAL)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Effect: the ranks, each of which torch starts in a group of its own, have the signal."""
    from cpulaunch.launch.process.processes import children_of, signal_group

    for pid in children_of(os.getpid()):
        signal_group(pid, number)


def end_promptly() -> None:
    """Effect: a signal that ends the job ends this process too where torch cannot: while it waits in its store.

    There no Python code runs, a signal's handler neither, for as long as five minutes at the end of a job.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_ranks, args=(read,), daemon=True).start()


def _end_after_ranks(read: int) -> None:
    """Effect: after a signal other than those passed on, this process ends a second after its last rank."""
    from cpulaunch.launch.process.processes import own_children

    while (number := os.read(read, 1)[0]) in (signal.SIGUSR1, signal.SIGUSR2):
        continue
    alone_since = time.monotonic()
    while time.monotonic() - alone_since < ALONE_SECONDS:
        if own_children():
            alone_since = time.monotonic()
        time.sleep(ALONE_SECONDS / 10)
    os._exit(128 + number)


def _notify(line: str) -> None:
    os.write(2, f"cpulaunch: {line}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    # This package's modules and no others of its directory, whose names may be another's.
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.insert(
        0,
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))),
    )
    __import__("cpulaunch")
    del sys.path[0]
    sys.exit(main(sys.argv[1:]))
