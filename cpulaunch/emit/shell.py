"""`--emit sh`: a POSIX shell script that starts the plan's workers without cpulaunch."""

from collections.abc import Collection, Iterable
from shlex import quote

from cpulaunch.emit.shell_ranks import WAIT_FOR, check_job_script, job_script, unsupported_options
from cpulaunch.emit.shell_variables import is_identifier, required_variables
from cpulaunch.plan.command import numactl_options
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.plan import LaunchPlan, WorkerPlan

_HEAD = """\
#!/bin/sh
# Written by cpulaunch: the plan as a shell script. It binds with numactl, or with taskset if numactl is missing.
"""
_BIND = """
bind() {  # arguments: CPUs, numactl's memory option or "", command
    launch_cpus=$1 launch_memory=$2
    shift 2
    if command -v numactl >/dev/null; then
        exec numactl -C "$launch_cpus" $launch_memory "$@"
    elif command -v taskset >/dev/null; then
        exec taskset -c "$launch_cpus" "$@"
    fi
    echo "neither numactl nor taskset is installed: the worker is not bound" >&2
    exec "$@"
}
"""
_WAIT = """
finish() {  # argument: process id; the first worker to fail, in their order, decides the exit code
    wait_for "$1"
    if [ "$launch_status" -eq 0 ] && [ "$launch_code" -ne 0 ]; then
        launch_status=$launch_code
        kill $launch_pids 2>/dev/null
    fi
}

launch_status=0
"""


def plan_script(plan: LaunchPlan, *, hidden: Collection[str] = ()) -> str:
    """A script that starts the plan's workers with their environment and binding, and ends with their exit code.

    `hidden`: variables that the script takes from the environment of its caller, and ends if they are not set.
    Raises: UsageError if the plan has no program.
    """
    if not all(worker.argv for worker in plan.workers):
        raise UsageError("no program to start", source="--emit sh", hint="cpulaunch plan --emit sh SCRIPT")
    check_job_script(plan)
    bound = any(_binds(plan, worker) for worker in plan.workers)
    parts = [
        _HEAD,
        *_unsupported_comment(plan),
        *required_variables(hidden),
        _BIND if bound else "",
        *(_function(plan, worker, hidden) for worker in plan.workers),
    ]
    indexes = [worker.index for worker in plan.workers]
    if plan.job is not None and plan.job.engine == "native":
        parts.append(job_script(plan, plan.job))
    else:
        parts.append(f"\nworker_{indexes[0]}\n" if len(indexes) == 1 else _start_and_wait(indexes))
    return "".join(parts)


def _unsupported_comment(plan: LaunchPlan) -> Iterable[str]:
    """A comment that names the options that the script does not support; nothing if it supports all."""
    options = plan.launch
    unsupported = [
        *(["--report"] if options.report else []),
        *(["--html"] if options.html else []),
        *(["--metric"] if options.metric else []),
        *(["--start-barrier"] if options.start_barrier else []),
        *(["--log-dir"] if options.log_dir else []),
        *(["--show"] if options.show is not None else []),
        *(["--strict"] if options.strict else []),
        *([] if plan.job is None else unsupported_options(plan.job)),
    ]
    if unsupported:
        yield f"# This script leaves out {', '.join(unsupported)}.\n"
        yield "# It neither prefixes lines of output nor ends processes that a worker leaves behind.\n"


def _binds(plan: LaunchPlan, worker: WorkerPlan) -> bool:
    return plan.launch.binder == "native" and bool(worker.cpus)


def _function(plan: LaunchPlan, worker: WorkerPlan, hidden: Collection[str]) -> str:
    """The shell function that starts one worker in place of its shell."""
    changes = [(name, value) for name, value in worker.env if name not in hidden]
    lines = [
        f"    unset {name}" if value is None else f"    export {name}={quote(value)}"
        for name, value in changes
        if is_identifier(name)
    ]
    by_env = [f"{name}={value}" for name, value in changes if not is_identifier(name)]
    command = " ".join(quote(word) for word in (*(("env", *by_env) if by_env else ()), *worker.argv))
    if _binds(plan, worker):
        memory = " ".join(numactl_options(worker.mempolicy, worker.numa_nodes))
        command = f"bind {format_cpulist(worker.cpus)} {quote(memory)} {command}"
    else:
        command = f"exec {command}"
    return "\n".join(["", f"worker_{worker.index}() {{", *lines, f"    {command}", "}", ""])


def _start_and_wait(indexes: list[int]) -> str:
    starts = [f'worker_{index} &\nlaunch_pids="$launch_pids $!"' for index in indexes]
    # Background jobs of a script ignore SIGINT and SIGQUIT (POSIX sh, 2.11), so they are sent SIGTERM.
    trap = "trap 'launch_signal=1; kill $launch_pids 2>/dev/null' HUP INT TERM"
    wait = ["for pid in $launch_pids; do", '    finish "$pid"', "done", 'exit "$launch_status"', ""]
    return "\n".join([WAIT_FOR + _WAIT + "launch_pids=", *starts, trap, *wait])
