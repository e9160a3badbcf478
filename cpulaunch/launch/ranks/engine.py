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
    check_space,
    choose_private_path,
    make_events_directory,
    make_private_path,
    remove_run_directory,
    with_event_files,
)
from cpulaunch.launch.ranks.attempts import Attempts
from cpulaunch.launch.ranks.files import ERROR_FILE, RankFiles, RunFolder, make_rank_files, make_run_folder, rank_files
from cpulaunch.launch.ranks.port import PortReservation, check_address, check_port_free, port_holder
from cpulaunch.launch.supervision.error_file import VARIABLE, copy_error_file, read_error
from cpulaunch.launch.supervision.result import LaunchResult
from cpulaunch.records.errors import LaunchError, NoSpaceError
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import record, replace
from cpulaunch.system.libc import stop_writing
from cpulaunch.system.signals import ENDING, ending_signals, paused_after

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cpulaunch.launch.monitor.watch import Watch
    from cpulaunch.launch.supervision.options import SupervisorOptions


@record
class _RankRun:
    """What all attempts of a job share. `private`: the directory to remove after the run, if there is one.

    `environ`: that of the launcher.
    `error_file`: the file in which a caller expects the exception of a failed job; "" for none.
    """

    plan: LaunchPlan
    job: JobPlan
    specs: tuple[ExecSpec, ...]
    run_id: str
    folder: RunFolder
    private: str | None
    environ: Mapping[str, str]
    error_file: str
    memory_events: str | None
    notify: Notify
    on_started: Callable[[], None] | None


def launch_ranks(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    memory_events: str | None,
    notify: Notify,
    on_started: Callable[[], None] | None,
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
        if folder.kept and plan.launch.log_dir is None and not plan.launch.quiet:
            notify(f"logs: {folder.path}")
        run = _RankRun(
            plan=plan,
            job=job,
            specs=specs,
            run_id=run_id,
            folder=folder,
            private=private,
            environ=environ,
            error_file=environ.get(VARIABLE, ""),
            memory_events=memory_events,
            notify=notify,
            on_started=on_started,
        )
        return _supervised(run)
    finally:
        if private is not None:
            remove_run_directory(private)


def _private_directory(plan: LaunchPlan, folder: RunFolder, environ: Mapping[str, str]) -> str | None:
    """The directory for error files and events that the user does not want to keep; None if none are written."""
    if folder.path is not None and not folder.kept:
        return folder.path
    return choose_private_path(environ) if plan.launch.watched or not folder.secure else None


def random_id() -> str:
    """A random UUID as text. Source: RFC 9562, version 4; `import uuid` takes as long as planning."""
    number = int.from_bytes(os.urandom(16)) & ~(0xF << 76 | 0x3 << 62) | 4 << 76 | 2 << 62
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _supervised(run: _RankRun) -> LaunchResult:
    """How the ranks ended, in a process of its own. Effect: the first failure's exception is in the error file."""
    spares: list[str] = []
    try:
        link = fork_supervisor(
            run.notify,
            workers=len(run.specs),
            grace_seconds=run.plan.launch.grace_seconds,
            ending=ending_signals(run.job.signals),
            directory=run.private,
            logs=run.folder.path if run.folder.private and run.folder.kept else None,
            asks=True,
            shows_output=run.plan.launch.shows_output,
        )
        run = _with_directories(run)
        result, run = _run_attempts(run, link, spares)
        if result.first_failure is not None and run.error_file:
            _copy_error_file(result, run)
        return result
    except OSError as error:
        raise fd_shortage_error(error) from None
    finally:
        for path in spares:
            remove_run_directory(path)


def _with_directories(run: _RankRun) -> _RankRun:
    """The run with the descriptor of its folder.

    Effect: makes the run's directories: after the fork, because then there always is a process to remove them.
    """
    folder = run.folder.path if run.folder.private else None
    made = {path: make_private_path(path) for path in {run.private, folder} if path is not None}
    return run if folder is None else replace(run, folder=replace(run.folder, fd=made[folder]))


def _copy_error_file(result: LaunchResult, run: _RankRun) -> None:
    """Effect: the launch's own error file holds the exception that the first rank to fail recorded."""
    rank = next(each for each in result.workers if each.index == result.first_failure)
    if rank.error is None:
        return
    directory = rank_files(run.folder, restarts=(result.attempts or (1, 1))[0] - 1).of_rank(rank.index, ERROR_FILE)
    name = os.path.relpath(directory, run.folder.path)
    code = -rank.signal if rank.signal is not None else rank.exit_code or 0
    copy_error_file(name, run.error_file, exit_code=code, folder=run.folder.fd)


def _run_attempts(run: _RankRun, link: GuardLink, spares: list[str]) -> tuple[LaunchResult, _RankRun]:
    """How the ranks ended in the last attempt: they are restarted after a failure, and after a loss of their port.

    And the run with the folders of that attempt. Effect: adds those that it has made to the spares.
    """
    # After the fork: while the kernel moves this process to its cgroup.
    from cpulaunch.launch.supervision.options import SupervisorOptions

    attempts = Attempts(max_restarts=run.job.max_restarts)
    options = SupervisorOptions(
        inherited=link.inherited,
        grace_seconds=run.plan.launch.grace_seconds,
        control=link.control,
        guards=link.guards,
        memory_events=run.memory_events,
        ending_signals=ending_signals(run.job.signals),
        cgroup=link.cgroup,
        adopts_orphans=link.adopts_orphans,
        notify=run.notify,
        on_started=run.on_started,
    )
    while True:
        with PortReservation(run.job.master_port) as reservation:
            try:
                if attempts.restarts and run.private is not None:
                    check_space(run.private)
                result = _run_attempt(run, options, port=reservation.port, restarts=attempts.restarts)
            except NoSpaceError:
                if run.private is None:
                    raise
                run = _with_spare(run, spares)
                result = _run_attempt(run, options, port=reservation.port, restarts=attempts.restarts)
            lost_port = _lost_port(result, reservation)
        if result.first_failure is None or result.output_error is not None or end_requested(result, options):
            return result, run
        lead = "\n" if result.inside_line else ""
        following = attempts.following(lost_port=lost_port is not None and run.job.master_port is None)
        if following is None:
            if lost_port is not None and run.notify(lead + lost_port):
                result = replace(result, inside_line=False)
            return result, run
        if following.restarts == attempts.restarts:
            run.notify(f"{lead}{lost_port}; restarting the ranks with a new port")
        else:
            run.notify(lead + _restart_text(result, following.restarts, following.max_restarts))
        attempts = following


def _lost_port(result: LaunchResult, reservation: PortReservation) -> str | None:
    """Which process took the port of ranks that have failed and ended, as text; None if none did.

    A listener alone shows nothing: any user of the host may listen at another address of the port, or after the ranks.
    """
    from cpulaunch.launch.supervision.failure_text import found_port_in_use

    if result.first_failure is None or not found_port_in_use(result, reservation.port) or not reservation.is_taken():
        return None
    holder = port_holder(reservation.port) or "another process"
    return f"port {reservation.port} of the ranks was taken by {holder}"


def end_requested(result: LaunchResult, options: SupervisorOptions) -> bool:
    """Whether the launch is to end: by a signal that came until now, or because the guard is gone.

    Effect: a launch that Ctrl-Z has stopped waits here until a signal continues or ends it, as ranks that start would
    run in a job that the shell calls stopped. At the end, the guard asks no longer whether this process still reads;
    without a guard, the cgroup is removed.
    """
    if result.end_requested:
        return True
    poll, paused = select.poll(), result.paused
    poll.register(options.control, select.POLLIN)
    while poll.poll(None if paused else 0):
        try:
            numbers = os.read(options.control, 4096)
        except BlockingIOError:  # Another process has read it, where the pipe is not a private one.
            continue
        if not numbers and options.cgroup is not None:
            options.cgroup.remove()
        if not numbers or any(number in ENDING or number in options.ending_signals for number in numbers):
            stop_writing(options.control)
            return True
        paused = paused_after(numbers, paused=paused)
        if not paused:
            break
    return False


def _restart_text(result: LaunchResult, restarts: int, max_restarts: int) -> str:
    from cpulaunch.launch.supervision.failure_text import exit_text

    failed = next(rank for rank in result.workers if rank.index == result.first_failure)
    count = len(result.workers)
    ranks = "it" if count == 1 else f"all {count} ranks"
    attempt = f"attempt {restarts + 1} of {max_restarts + 1}"
    return f"rank {failed.rank} failed ({exit_text(failed)}): restarting {ranks}, {attempt}"


def _with_spare(run: _RankRun, spares: list[str]) -> _RankRun:
    """The run with a new private folder: another user may have filled the file system of TMPDIR. Raises: LaunchError.

    Effect: makes it, and adds it to the spares, which stay until the run is over: exceptions in them are read then.
    """
    path = choose_private_path(run.environ)
    fd = make_private_path(path)
    spares.append(path)
    return replace(run, folder=run.folder if run.folder.kept else replace(run.folder, path=path, fd=fd), private=path)


def _run_attempt(run: _RankRun, options: SupervisorOptions, *, port: int, restarts: int) -> LaunchResult:
    """How the ranks ended in one attempt. Effect: they run, with new directories for their files.

    Raises: NoSpaceError, before any rank starts.
    """
    from cpulaunch.launch.ranks.output import open_rank_routing
    from cpulaunch.launch.supervision.supervise import supervise

    files = make_rank_files(run.folder, restarts=restarts, ranks=len(run.specs), private=run.private)
    try:
        shared = {
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": run.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
        }
        specs = [with_variables(spec, {**shared, VARIABLE: files.error_file(spec.worker)}) for spec in run.specs]
        if run.private is not None and run.plan.launch.watched:
            directory = make_events_directory(run.private, [spec.worker for spec in specs])
            specs = list(with_event_files(specs, directory))
            options = replace(options, watch=_watch(run, directory))
        try:
            routing = open_rank_routing(run.plan, run.job, files)
        except LaunchError:
            if options.watch is not None:
                options.watch.close()
            raise
        result = supervise(specs, routing, options)
        return _rank_result(run, result, files, restarts)
    finally:
        files.close()


def _watch(run: _RankRun, directory: str) -> Watch:
    from cpulaunch.launch.monitor.watch import Watch

    return Watch(run.plan, directory, clock=time.monotonic)


def _rank_result(run: _RankRun, result: LaunchResult, files: RankFiles, restarts: int) -> LaunchResult:
    """The result with the ranks' numbers and recorded exceptions, which also decide which rank failed first."""
    workers = tuple(
        replace(
            worker,
            rank=planned.rank,
            error=read_error(*files.opened_error_file(worker.index)) if worker.status else None,
        )
        for worker, planned in zip(result.workers, run.plan.workers, strict=True)
    )
    result = replace(result, workers=workers, attempts=(restarts + 1, run.job.max_restarts + 1))
    if result.first_failure is None or result.output_error is not None:
        return result
    from cpulaunch.launch.supervision.failure_text import root_cause

    cause = root_cause(result)
    return replace(result, first_failure=cause.index, exit_code=cause.status)
