"""The native engine: all ranks of a job on this host, started, ended and restarted together, without torch."""

from __future__ import annotations

import os
import select
import time

from cpulaunch.launch.process.bind import Notify
from cpulaunch.launch.process.descriptors import fd_shortage_error
from cpulaunch.launch.process.exec_spec import ExecSpec, prepare_exec_specs, with_variables
from cpulaunch.launch.process.guard import GuardLink, fork_supervisor
from cpulaunch.launch.process.run_directory import (
    make_event_files,
    make_private_directory,
    make_unique_directory,
    remove_run_directory,
    with_event_files,
)
from cpulaunch.launch.ranks.files import RankFiles, RunFolder, make_rank_files, make_run_folder, rank_files
from cpulaunch.launch.ranks.output import open_rank_routing
from cpulaunch.launch.ranks.port import PortReservation, check_address, check_port_free, port_holder
from cpulaunch.launch.supervision.error_file import VARIABLE, copy_error_file, read_error
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.launch.supervision.supervise import SupervisorOptions, ending_signals, supervise
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import fields, record
from cpulaunch.system.signals import ENDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from cpulaunch.launch.monitor.watch import Watch

MOST_LOST_PORTS = 3
"""Somebody who takes port after port from us does not do so by chance."""


@record
class _RankRun:
    """What all attempts of a job share. `private`: the directory that is gone afterwards, if there is one.

    `error_file`: where the launch itself is to tell of its failure, "" for nowhere.
    """

    plan: LaunchPlan
    job: JobPlan
    specs: tuple[ExecSpec, ...]
    run_id: str
    folder: RunFolder
    private: str | None
    error_file: str
    memory_events: str | None
    notify: Notify


def launch_ranks(
    plan: LaunchPlan, *, environ: Mapping[str, str], memory_events: str | None, notify: Notify
) -> LaunchResult:
    """How the ranks ended in the last attempt. As `launch`, it returns in a forked child of this process.

    Raises: LaunchError, NotFoundError or NotExecutableError.
    """
    job = plan.job
    assert job is not None
    specs = prepare_exec_specs(plan, environ, notify=notify)
    check_address(job.master_addr)
    check_port_free(job.master_port)
    run_id = job.rendezvous.id or random_id()
    folder = make_run_folder(plan, job, environ=environ, run_id=run_id)
    private = _private_directory(plan, folder, environ)
    try:
        if folder.kept and plan.launch.log_dir is None:
            notify(f"logs: {folder.path}")
        run = _RankRun(
            plan=plan,
            job=job,
            specs=specs,
            run_id=run_id,
            folder=folder,
            private=private,
            error_file=environ.get(VARIABLE, ""),
            memory_events=memory_events,
            notify=notify,
        )
        return _supervised(run)
    finally:
        if private is not None:
            remove_run_directory(private)


def _private_directory(plan: LaunchPlan, folder: RunFolder, environ: Mapping[str, str]) -> str | None:
    """Where error files and events go that nobody asked to keep."""
    if folder.path is not None and not folder.kept:
        return folder.path
    return make_private_directory(environ) if plan.launch.watched else None


def random_id() -> str:
    """A random UUID as text. Source: RFC 9562, version 4; `import uuid` takes as long as planning."""
    number = int.from_bytes(os.urandom(16)) & ~(0xF << 76 | 0x3 << 62) | 4 << 76 | 2 << 62
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _supervised(run: _RankRun) -> LaunchResult:
    """How the ranks ended, supervised in a process of its own."""
    try:
        link = fork_supervisor(run.notify, workers=len(run.specs), directory=run.private)
        result = _attempts(run, link)
    except OSError as error:
        raise fd_shortage_error(error) from None
    if result.first_failure is not None and run.error_file:
        _copy_error_file(result, run)
    return result


def _copy_error_file(result: LaunchResult, run: _RankRun) -> None:
    """Effect: whoever gave this launch an error file finds in it what the first rank to fail wrote."""
    rank = next(each for each in result.workers if each.index == result.first_failure)
    if rank.error is None:
        return
    files = rank_files(run.folder, restarts=(result.attempts or (1, 1))[0] - 1)
    code = -rank.signal if rank.signal is not None else rank.exit_code or 0
    copy_error_file(files.error_file(rank.index), run.error_file, exit_code=code)


def _attempts(run: _RankRun, link: GuardLink) -> LaunchResult:
    """How the ranks ended at last: restarted after a failure, or because somebody else took their port."""
    restarts = lost_ports = 0
    options = SupervisorOptions(
        inherited=link.inherited,
        grace_seconds=run.plan.launch.grace_seconds,
        control=link.control,
        memory_events=run.memory_events,
        ending_signals=ending_signals(run.job),
    )
    while True:
        with PortReservation(run.job.master_port) as reservation:
            result = _attempt(run, options, port=reservation.port, restarts=restarts)
            taken = _taken(result, reservation)
        if result.first_failure is None or result.output_error is not None or end_requested(result, options):
            return result
        if taken is not None and run.job.master_port is None and lost_ports < MOST_LOST_PORTS:
            lost_ports += 1
            run.notify(f"{taken}: the ranks are started again with another one")
        elif restarts < run.job.max_restarts:
            restarts += 1
            run.notify(_restarting(result, restarts, run.job.max_restarts))
        else:
            if taken is not None:
                run.notify(taken)
            return result


def _taken(result: LaunchResult, reservation: PortReservation) -> str | None:
    """Who listens on the port of ranks that failed and are gone, in words; None: nobody does."""
    if result.first_failure is None or not reservation.is_taken():
        return None
    holder = port_holder(reservation.port)
    return f"{'another process' if holder is None else holder} listens on the ranks' port {reservation.port}"


def end_requested(result: LaunchResult, options: SupervisorOptions) -> bool:
    """Whether a signal that ends launches came by now, after the ranks ended too, or the launcher is gone."""
    if result.end_requested:
        return True
    poll = select.poll()
    poll.register(options.control, select.POLLIN)
    if not poll.poll(0):
        return False
    numbers = os.read(options.control, 4096)
    return not numbers or any(number in ENDING or number in options.ending_signals for number in numbers)


def _restarting(result: LaunchResult, restarts: int, most: int) -> str:
    from cpulaunch.launch.supervision.failure_text import exit_text

    failed = next(rank for rank in result.workers if rank.index == result.first_failure)
    count = len(result.workers)
    whom = "it is started again" if count == 1 else f"the {count} ranks are started again"
    return f"rank {failed.rank} failed ({exit_text(failed)}): {whom}, attempt {restarts + 1} of {most + 1}"


def _attempt(run: _RankRun, options: SupervisorOptions, *, port: int, restarts: int) -> LaunchResult:
    """How the ranks ended in one attempt."""
    files = make_rank_files(run.folder, restarts=restarts, ranks=len(run.specs))
    specs = [
        with_variables(spec, _variables(run, files, spec.worker, port=port, restarts=restarts)) for spec in run.specs
    ]
    watch = None
    if run.private is not None and run.plan.launch.watched:
        watch, specs = _watched(run, specs)
    values = {name: getattr(options, name) for name in fields(SupervisorOptions)} | {"watch": watch}
    result = supervise(specs, open_rank_routing(run.plan, run.job, files), SupervisorOptions(**values))
    return _told(run, result, files, restarts)


def _variables(run: _RankRun, files: RankFiles, local_rank: int, *, port: int, restarts: int) -> dict[str, str]:
    """What a rank is told that is not known before it starts."""
    return {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        VARIABLE: files.error_file(local_rank),
    }


def _watched(run: _RankRun, specs: list[ExecSpec]) -> tuple[Watch, list[ExecSpec]]:
    """The watch over one attempt, and its ranks' starts that tell it things."""
    from cpulaunch.launch.monitor.watch import Watch

    directory = make_unique_directory(str(run.private), "told-")
    make_event_files(directory, [spec.worker for spec in specs])
    watch = Watch(run.plan, directory, clock=time.monotonic, notify=run.notify)
    return watch, list(with_event_files(specs, directory))


def _told(run: _RankRun, result: LaunchResult, files: RankFiles, restarts: int) -> LaunchResult:
    """The result with what the ranks wrote of their failures, and the one that failed first by that."""
    workers = tuple(_of_rank(worker, run.plan.workers[at].rank, files) for at, worker in enumerate(result.workers))
    told = _with(result, workers=workers, attempts=(restarts + 1, run.job.max_restarts + 1))
    if told.first_failure is None or told.output_error is not None:
        return told
    from cpulaunch.launch.supervision.failure_text import root_cause

    cause = root_cause(told)
    return _with(told, first_failure=cause.index, exit_code=cause.status)


def _with(result: LaunchResult, **changes: Any) -> LaunchResult:
    return LaunchResult(**{name: getattr(result, name) for name in fields(LaunchResult)} | changes)


def _of_rank(worker: WorkerResult, rank: int | None, files: RankFiles) -> WorkerResult:
    error = read_error(files.error_file(worker.index)) if worker.status else None
    values = {name: getattr(worker, name) for name in fields(WorkerResult)}
    return WorkerResult(**values | {"rank": rank, "error": error})
