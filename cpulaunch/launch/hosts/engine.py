"""The engine for several hosts: torch elastic's agent, supervised; each rank starts through a shim that binds it.

The launcher imports no torch. It writes configurations for the agent and for each rank, supervises the agent like any
worker (so that nothing outlives this launch), and reads the agent's report.
"""

from __future__ import annotations

import os
import sys
import time

from cpulaunch.launch.hosts.agent.files import (
    agent_config_file,
    agent_report_file,
    private_logs,
    private_store,
    rank_config_file,
)
from cpulaunch.launch.hosts.agent.messages import AgentConfig, RankConfig, RankPipe, write_message
from cpulaunch.launch.hosts.output import JobOutput, open_job_output
from cpulaunch.launch.hosts.result import job_result, observed_ranks, read_report
from cpulaunch.launch.process.bind import UNBOUND, Notify
from cpulaunch.launch.process.descriptors import fd_shortage_error, is_fd_shortage
from cpulaunch.launch.process.exec_spec import NOT_INHERITED, ExecSpec, prepare_exec_specs
from cpulaunch.launch.process.processes import signal_process
from cpulaunch.launch.process.program import child_environ, find_executable
from cpulaunch.launch.process.run_directory import (
    choose_private_path,
    events_path,
    in_run_directory,
    make_event_files,
    make_private_path,
    remove_run_directory,
)
from cpulaunch.launch.ranks.files import log_error, writes_logs
from cpulaunch.records.endpoint import is_file_store
from cpulaunch.records.errors import LaunchError, UsageError
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import record, replace
from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.system.files.folders import remove_if_empty
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.shared_memory import SharedMemorySearches, remove_shared_memory
from cpulaunch.system.files.writing import create
from cpulaunch.system.signals import ending_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cpulaunch.launch.supervision.result import LaunchResult

FOLDER = os.path.dirname(os.path.abspath(__file__))

AGENT = 0
"""The index of the one worker that is supervised here."""

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Read by torch's agent. Unless it is 1, a host that joins a running job waits forever: the address of rank 0's store
is written in the first round of the rendezvous only. Seen with torch 2.13, DynamicRendezvousHandler.next_rendezvous."""

AGENT_GRACE_SECONDS = 5.0
"""How long the agent may take to end and to report, after the grace period of the ranks."""


@record
class _HostRun:
    """The agent to supervise, the ranks that it starts, and the run's directory, where both find their messages.

    `logs`: the directory for kept logs, if the user names none.
    """

    plan: LaunchPlan
    specs: Sequence[ExecSpec]
    agent: ExecSpec
    config: AgentConfig
    directory: str
    logs: str | None


def launch_hosts(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    memory_events: str | None,
    notify: Notify,
    on_started: Callable[[], None] | None,
) -> LaunchResult:
    """How the ranks of this host ended.

    Effect: as `launch`: the calling process becomes the guard of a supervisor, in which the result returns.
    Raises: LaunchError, UsageError, NotFoundError or NotExecutableError, with nothing left running.
    """
    job = _supported_job(plan)
    specs = prepare_exec_specs(plan, environ, notify=notify)
    interpreter = find_executable(job.interpreter or sys.executable, environ, what="Python interpreter")
    logs = _own_logs(plan, job, environ, notify)
    directory = choose_private_path(environ)
    try:
        own_stores = OWN_STORES not in environ and hosts_may_join(job)
        run = _HostRun(
            plan=plan,
            specs=specs,
            agent=_agent_exec_spec(interpreter, directory, {**environ, OWN_STORES: "1"} if own_stores else environ),
            config=agent_config(plan, job, directory, log_dir=logs or _given_logs(plan) or private_logs(directory)),
            directory=directory,
            logs=logs,
        )
        searches = SharedMemorySearches()
        result, output = _supervised(run, memory_events=memory_events, notify=notify, on_started=on_started)
        succeeded = observed_ranks(directory, [spec.worker for spec in specs]) if plan.launch.watched else ()
        report = read_report(directory)
        if report is not None:  # The supervisor has ended what used it.
            killed = frozenset(pid for pid in report.killed if not signal_process(pid, 0))  # Others may have it now.
            remove_shared_memory(killed, since=searches.since)
        return job_result(job, result, report=report, output=output, succeeded=succeeded)
    finally:
        remove_run_directory(directory)
        if logs is not None:
            remove_if_empty(logs)  # No rank ever started.


def _supported_job(plan: LaunchPlan) -> JobPlan:
    """The plan's job. Raises: UsageError for flags that torch's agent, which starts the ranks, cannot carry out."""
    launch = plan.launch
    given = {
        "--report": launch.report,
        "--html": launch.html,
        "--metric": launch.metric,
        "--start-barrier": launch.start_barrier or None,
    }
    for flag, value in given.items():
        if value is not None:
            raise UsageError("not available for a job of several hosts", value=flag, hint=f"omit {flag}")
    if plan.job is None:
        raise LaunchError("no job in the plan")
    return plan.job


def hosts_may_join(job: JobPlan) -> bool:
    """Whether a host may join the job while others already run."""
    fewest, most = job.hosts
    return job.rendezvous.backend != "static" and most > 1 and (fewest < most or job.max_restarts > 0)


def _agent_exec_spec(interpreter: str, directory: str, environ: Mapping[str, str]) -> ExecSpec:
    return ExecSpec(
        worker=AGENT,
        path=interpreter,
        argv=(interpreter, "-u", os.path.join(FOLDER, "agent", "main.py"), directory),
        environ=child_environ(environ, NOT_INHERITED),
        binding=UNBOUND,
    )


def agent_config(plan: LaunchPlan, job: JobPlan, directory: str, *, log_dir: str) -> AgentConfig:
    """What the agent is to run; the rendezvous has an id, and a file if it needs one: torch's own would stay."""
    rendezvous = replace(job.rendezvous, id=job.rendezvous.id or os.urandom(8).hex())
    if rendezvous.backend == "c10d" and is_file_store(dict(rendezvous.conf)) and not rendezvous.endpoint:
        rendezvous = replace(rendezvous, endpoint=private_store(directory))
    # torch replaces $macros in the arguments it passes on.
    arguments = [part.replace("$", "$$") for part in ("-I", "-S", os.path.join(FOLDER, "shim.py"), directory)]
    return AgentConfig(
        job=replace(job, rendezvous=rendezvous),
        log_dir=log_dir,
        shown=None if plan.launch.show is None else tuple(sorted(plan.launch.show)),
        grace_seconds=plan.launch.grace_seconds,
        shim=(sys.executable, *arguments),
    )


def _own_logs(plan: LaunchPlan, job: JobPlan, environ: Mapping[str, str], notify: Notify) -> str | None:
    """The path of a directory for logs that the user wants without naming one; None if there are none.

    Effect: none but the message: the supervisor makes it, because then another process can remove it.
    """
    if plan.launch.log_dir is not None or not writes_logs(plan, job):
        return None
    path = choose_private_path(environ)
    if not plan.launch.quiet:
        notify(f"logs: {path}")
    return path


def _given_logs(plan: LaunchPlan) -> str | None:
    """The directory for logs that the user named. Effect: it exists. Raises: LaunchError."""
    log_dir = plan.launch.log_dir
    if log_dir is not None and log_dir != os.devnull:
        try:
            os.close(open_folder(log_dir, make=0o777))
        except OSError as error:
            raise log_error(log_dir, error) from None
    return log_dir


def _supervised(
    run: _HostRun, *, memory_events: str | None, notify: Notify, on_started: Callable[[], None] | None
) -> tuple[LaunchResult, JobOutput]:
    """How the agent ended, and the output of the ranks, in a process of its own."""
    from cpulaunch.launch.process.guard import fork_supervisor

    try:
        ending = ending_signals(run.config.job.signals)
        grace_seconds = run.plan.launch.grace_seconds + AGENT_GRACE_SECONDS
        link = fork_supervisor(
            notify,
            workers=2 * len(run.specs),
            grace_seconds=grace_seconds,
            ending=ending,
            directory=run.directory,
            logs=run.logs,
            asks=True,
            of_launchers=True,
            shows_output=run.plan.launch.shows_output,
        )
        from cpulaunch.launch.output.routing import OutputRouting, worker_stdin
        from cpulaunch.launch.supervision.options import SupervisorOptions
        from cpulaunch.launch.supervision.supervise import supervise

        stdin = worker_stdin(len(run.specs))
        output = _prepare_files(run, stdin=stdin)
        routing = OutputRouting(
            sinks=output.sinks,
            stdio=(output.agent,),
            streams=(output.streams,),
            logs=(None,),
            metrics=(None,),
            stdin=(stdin,),
            stderr=output.sinks[-1],
        )
        options = SupervisorOptions(
            inherited=link.inherited,
            grace_seconds=grace_seconds,
            control=link.control,
            guards=link.guards,
            memory_events=memory_events,
            ending_signals=ending,
            cgroup=link.cgroup,
            adopts_orphans=link.adopts_orphans,
            of_launchers=True,
            on_started=on_started,
            ending_seconds=lambda failed: _ending_seconds(run.directory, failed),
        )
        return supervise((run.agent,), routing, options), output
    except OSError as error:
        raise fd_shortage_error(error) from None


def _ending_seconds(directory: str, failed: bool) -> float:
    """AGENT_GRACE_SECONDS, which are the agent's alone, and for how long it has been ending ranks if it has `failed`.

    It notes when it began as the time of its configuration's last change, which ranks may change too.
    """
    if not failed:
        return AGENT_GRACE_SECONDS
    name, folder = in_run_directory(agent_config_file(directory))
    try:
        begun = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    except OSError:
        return AGENT_GRACE_SECONDS
    return max(0.0, time.time() - begun) + AGENT_GRACE_SECONDS  # noqa: TID251 - that of files


def _prepare_files(run: _HostRun, *, stdin: int) -> JobOutput:
    """The pipes of the job's output. Raises: LaunchError or OSError.

    Effect: makes the run's directory and all its files. The supervisor does so, because then either it or the guard
    is always there to remove them.
    """
    ranks = [spec.worker for spec in run.specs]
    for path in (run.directory, run.logs):
        if path is not None:
            make_private_path(path)
    if run.plan.launch.watched:  # Here only under --strict, to know whether each rank's torch applied its settings.
        make_event_files(run.directory, ranks)
    try:
        output = open_job_output(run.directory, ranks, shown=_shown(run.plan), stdin=stdin)
        _write_messages(run, output)
    except OSError as error:
        if is_fd_shortage(error):
            raise
        raise LaunchError(
            "cannot write the files of this run",
            value=run.directory,
            source=error.strerror,
            hint="set TMPDIR to a directory with free space that supports named pipes",
        ) from None
    return output


def _shown(plan: LaunchPlan) -> list[bool]:
    return [plan.launch.show is None or worker.index in plan.launch.show for worker in plan.workers]


def _write_messages(run: _HostRun, output: JobOutput) -> None:
    """Effect: the configurations of the agent and of each rank are in the run's directory. Raises: OSError."""
    for worker, spec, pipes in zip(run.plan.workers, run.specs, output.pipes, strict=True):
        own_stores = () if OWN_STORES in spec.environ else ((OWN_STORES, None),)  # Set for the agent alone.
        events = ((EVENTS_VARIABLE, events_path(run.directory, spec.worker)),) if run.plan.launch.watched else ()
        env = (*NOT_INHERITED, *worker.env, *own_stores, *events)
        write_message(rank_config_file(run.directory, spec.worker), rank_config(spec, env, pipes))
    write_message(agent_config_file(run.directory), run.config)
    os.close(create(agent_report_file(run.directory)))  # For a mark, if the agent finds no space for its report.


def rank_config(spec: ExecSpec, env: Sequence[tuple[str, str | None]], pipes: Sequence[RankPipe]) -> RankConfig:
    """What a rank's shim does, with these changes to the agent's environment."""
    policy = spec.binding.policy
    return RankConfig(
        path=spec.path,
        argv=spec.argv,
        env=tuple(env),
        cpus=tuple(sorted(spec.binding.cpus)),
        policy=None if policy is None else (policy.mode, tuple(sorted(policy.numa_nodes))),
        pipes=tuple(pipes),
    )
