"""The engine for several hosts: torch elastic's agent, supervised; each rank starts through a shim that binds it.

The launcher imports no torch. It writes down what the agent and each rank are to do, supervises the agent as it would
any worker (so that nothing outlives this launch), and reads the agent's report.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys

from cpulaunch.launch.hosts.agent.files import orders_file, private_logs, rank_file
from cpulaunch.launch.hosts.output import JobOutput, open_job_output
from cpulaunch.launch.hosts.result import job_result, observed_ranks, read_report
from cpulaunch.launch.hosts.shim import rank_orders
from cpulaunch.launch.process.bind import UNBOUND, Notify
from cpulaunch.launch.process.exec_spec import NOT_INHERITED, ExecSpec, prepare_exec_specs
from cpulaunch.launch.process.program import child_environ, find_executable
from cpulaunch.launch.process.run_directory import (
    events_path,
    make_event_files,
    make_named_directory,
    make_private_directory,
    name_private_directory,
    remove_run_directory,
)
from cpulaunch.launch.ranks.files import unwritable, writes_logs
from cpulaunch.records.errors import LaunchError, UsageError
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import EVENTS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cpulaunch.launch.supervision.result import LaunchResult

AGENT = 0
"""The index of the one worker that is supervised here."""

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Read by torch's agent. Unless it is 1, a host that joins a running job waits forever: the address of rank 0's store
is written in the first round of the rendezvous only. Seen with torch 2.13, DynamicRendezvousHandler.next_rendezvous."""

AGENT_GRACE_SECONDS = 5.0
"""What the agent gets, after the ranks' own grace has passed, to end and to report."""


def launch_hosts(
    plan: LaunchPlan, *, environ: Mapping[str, str], memory_events: str | None, notify: Notify
) -> LaunchResult:
    """How the ranks of this host ended.

    Effect: as `launch`: the calling process becomes the guard of a supervisor, in which the result returns.
    Raises: LaunchError, UsageError, NotFoundError or NotExecutableError, with nothing left running.
    """
    job = _job(plan)
    specs = prepare_exec_specs(plan, environ, notify=notify)
    interpreter = find_executable(job.interpreter or sys.executable, environ, what="Python interpreter")
    logs = _log_directory(plan, job, environ, notify)
    directory = name_private_directory(environ)
    try:
        own_stores = OWN_STORES not in environ and hosts_may_join(job)
        agent = _agent_exec_spec(interpreter, directory, {**environ, OWN_STORES: "1"} if own_stores else environ)
        orders = agent_orders(plan, directory, logs=logs or private_logs(directory))
        run = _HostRun(plan=plan, specs=specs, agent=agent, orders=orders, directory=directory)
        result, output = _supervised(run, memory_events=memory_events, notify=notify)
        observation = observed_ranks(directory, [spec.worker for spec in specs]) if plan.launch.watched else ()
        return job_result(job, result, report=read_report(directory), output=output, succeeded=observation)
    finally:
        remove_run_directory(directory)
        if plan.launch.log_dir is None and logs is not None:
            _remove_if_empty(logs)  # No rank ever started.


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        return


def _job(plan: LaunchPlan) -> JobPlan:
    """The job. Raises: UsageError for what torch's agent, which starts the ranks, cannot carry out."""
    launch = plan.launch
    asked = {"--report": launch.report, "--metric": launch.metric, "--start-barrier": launch.start_barrier or None}
    for flag, value in asked.items():
        if value is not None:
            raise UsageError("not available for a job of several hosts", value=flag, hint=f"leave {flag} away")
    if plan.job is None:
        raise LaunchError("no job in the plan")
    return plan.job


def hosts_may_join(job: JobPlan) -> bool:
    """Whether a host may come while others already run."""
    least, most = job.hosts
    return job.rendezvous.backend != "static" and most > 1 and (least < most or job.max_restarts > 0)


def _agent_exec_spec(interpreter: str, directory: str, environ: Mapping[str, str]) -> ExecSpec:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent", "main.py")
    return ExecSpec(
        worker=AGENT,
        path=interpreter,
        argv=(interpreter, "-u", program, directory),
        environ=child_environ(environ, NOT_INHERITED),
        binding=UNBOUND,
    )


def _log_directory(plan: LaunchPlan, job: JobPlan, environ: Mapping[str, str], notify: Notify) -> str | None:
    """Where torch makes this run's folder of logs that were asked for; None if none were. Raises: LaunchError."""
    log_dir = plan.launch.log_dir
    if log_dir is None:
        if not writes_logs(plan, job):
            return None
        log_dir = make_private_directory(environ)
        notify(f"logs: {log_dir}")
    elif log_dir != os.devnull:
        try:
            os.makedirs(log_dir, exist_ok=True)
        except OSError as error:
            raise unwritable(log_dir, error) from None
    return log_dir


@record
class _HostRun:
    """What is supervised, and what it is told through the run's directory."""

    plan: LaunchPlan
    specs: Sequence[ExecSpec]
    agent: ExecSpec
    orders: Mapping[str, Any]
    directory: str


def _supervised(run: _HostRun, *, memory_events: str | None, notify: Notify) -> tuple[LaunchResult, JobOutput]:
    """How the agent ended, and what came out of the ranks, in a process of its own."""
    from cpulaunch.launch.output.routing import OutputRouting, open_standard_descriptors, worker_stdin
    from cpulaunch.launch.process.descriptors import fd_shortage_error, raise_fd_limit
    from cpulaunch.launch.process.guard import become_guarded
    from cpulaunch.launch.process.spawn import Inherited
    from cpulaunch.launch.supervision.supervise import SupervisorOptions, supervise

    open_standard_descriptors()
    descriptor_limit = raise_fd_limit(2 * len(run.specs))
    try:
        guarded = become_guarded(notify, directory=run.directory)
        stdin = worker_stdin(len(run.specs))
        output = _prepare_files(run, stdin=stdin)
        routing = OutputRouting(
            sinks=output.sinks,
            stdio=(output.agent,),
            streams=(output.streams,),
            logs=(None,),
            metrics=(None,),
            stdin=stdin,
        )
        options = SupervisorOptions(
            inherited=Inherited(signal_mask=guarded.signal_mask, descriptor_limit=descriptor_limit),
            grace_seconds=run.plan.launch.grace_seconds + AGENT_GRACE_SECONDS,
            control=guarded.control,
            memory_events=memory_events,
            ending_signals=_ending_signals(run.plan),
        )
        return supervise((run.agent,), routing, options), output
    except OSError as error:
        raise fd_shortage_error(error) from None


def _prepare_files(run: _HostRun, *, stdin: int) -> JobOutput:
    """The pipes of the job's output. Raises: LaunchError or OSError.

    Effect: the run's directory has all its files. It is made here, by the supervisor, so that there is always one of
    supervisor and guard to remove it.
    """
    ranks = [spec.worker for spec in run.specs]
    make_named_directory(run.directory)
    if run.plan.launch.watched:  # Here only under --strict: whether each rank's torch did as it was told.
        make_event_files(run.directory, ranks)
    try:
        output = open_job_output(run.directory, ranks, shown=_shown(run.plan), stdin=stdin)
        write_orders(run, output)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise LaunchError(
            "the files of this run cannot be written",
            value=run.directory,
            source=error.strerror,
            hint="set TMPDIR to a directory that has room and can hold named pipes",
        ) from None
    return output


def _ending_signals(plan: LaunchPlan) -> frozenset[int]:
    """The numbers of --signals-to-handle; Ctrl-C always ends a job, as a terminal has no other way."""
    numbers = (getattr(signal, name, None) for name in (*_job(plan).signals, "SIGINT"))
    return frozenset(int(number) for number in numbers if number is not None)


def _shown(plan: LaunchPlan) -> list[bool]:
    return [plan.launch.show is None or worker.index in plan.launch.show for worker in plan.workers]


def write_orders(run: _HostRun, output: JobOutput) -> None:
    """Effect: what the agent and each rank are to do is in the run's directory. Raises: OSError."""
    for worker, spec, pipes in zip(run.plan.workers, run.specs, output.pipes, strict=True):
        agents_own = () if OWN_STORES in spec.environ else ((OWN_STORES, None),)
        events = ((EVENTS_VARIABLE, events_path(run.directory, spec.worker)),) if run.plan.launch.watched else ()
        changes = (*NOT_INHERITED, *worker.env, *agents_own, *events)
        _write(rank_file(run.directory, spec.worker), rank_orders(spec, changes, pipes))
    _write(orders_file(run.directory), run.orders)


def _write(path: str, orders: Mapping[str, Any]) -> None:
    with open(path, "x") as file:
        json.dump(orders, file)


def agent_orders(plan: LaunchPlan, directory: str, *, logs: str) -> dict[str, Any]:
    """What the agent is to do."""
    job = _job(plan)
    shim = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")
    # torch replaces $macros in what it passes on.
    command = [part.replace("$", "$$") for part in (sys.executable, "-I", "-S", shim, directory)]
    return {
        "job": _job_orders(job, grace_seconds=plan.launch.grace_seconds),
        "logs": {
            "specs": job.logs_specs,
            "dir": logs,
            "redirects": job.streams.redirects,
            "tee": job.streams.tee,
            "filter": None if plan.launch.show is None else sorted(plan.launch.show),
        },
        "shim": [sys.executable, *command[1:]],
    }


def _job_orders(job: JobPlan, *, grace_seconds: float) -> dict[str, Any]:
    return {
        "hosts": job.hosts,
        "host_rank": job.host_rank,
        "local_world_size": job.local_world_size,
        "role": job.role,
        "backend": job.rendezvous.backend,
        "endpoint": job.rendezvous.endpoint,
        "run_id": job.rendezvous.id or os.urandom(8).hex(),
        "conf": dict(job.rendezvous.conf),
        "local_addr": job.local_addr,
        "max_restarts": job.max_restarts,
        "monitor_interval": job.monitor_interval_seconds,
        "start_method": job.start_method,
        "event_log_handler": job.event_log_handler,
        "virtual_local_rank": job.virtual_local_rank,
        "signals_to_handle": ",".join(job.signals),
        "shutdown_timeout": -int(-grace_seconds // 1),
        "duplicate_stdout_filters": list(job.streams.filters[0]),
        "duplicate_stderr_filters": list(job.streams.filters[1]),
        "log_line_prefix_template": job.streams.prefix,
    }
