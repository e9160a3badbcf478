"""The ranks of one host as a POSIX shell script: their port, and that the first failure ends them all."""

from shlex import quote

from cpulaunch.errors import UsageError
from cpulaunch.plan.model import JobPlan, LaunchPlan

_PORT_PROGRAM = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
_ENVIRONMENT = """
# What every rank is told beside its own variables.
MASTER_PORT={port} || exit 125
export MASTER_PORT
export TORCHELASTIC_RUN_ID={run_id} TORCHELASTIC_RESTART_COUNT=0
unset TORCHELASTIC_ERROR_FILE
"""
_RANK = """
rank() {  # worker's function: its exit code; a failure tells the script
    launch_rank=
    trap '[ -z "$launch_rank" ] || kill "$launch_rank" 2>/dev/null' TERM
    "$1" &
    launch_rank=$!
    wait "$launch_rank"
    launch_code=$?
    while kill -0 "$launch_rank" 2>/dev/null; do  # a signal ended the wait, not the rank
        wait "$launch_rank"
        launch_code=$?
    done
    [ "$launch_code" -eq 0 ] || kill -USR1 "$launch_script" 2>/dev/null
    exit "$launch_code"
}

finish() {  # process id; the failure that came first is the exit code, not that of ranks which were told to end
    wait "$1"
    launch_code=$?
    while kill -0 "$1" 2>/dev/null; do
        wait "$1"
        launch_code=$?
    done
    if [ "$launch_code" -ne 0 ]; then
        case $launch_status in 0 | 143) launch_status=$launch_code ;; esac
    fi
}

launch_script=$$
launch_status=0
launch_pids=
launch_ended=
trap 'launch_ended=1; kill $launch_pids 2>/dev/null' HUP INT TERM USR1
"""


def check_job_script(plan: LaunchPlan) -> None:
    """Raises: UsageError for a job of several hosts, whose ranks only an agent on each host can start."""
    if plan.job is not None and plan.job.engine == "elastic":
        raise UsageError(
            "a shell script starts the ranks of one host",
            value=f"--nnodes {plan.job.hosts[1]}" if plan.job.hosts[1] > 1 else "a plug-in of torch elastic",
            source="--emit sh",
            hint="run cpulaunch on every host, or --emit slurm",
        )


def lost_of_job(job: JobPlan) -> list[str]:
    """Options of the job that the script leaves out."""
    streams = job.streams
    return [
        *(["--max-restarts"] if job.max_restarts else []),
        *(["--redirects"] if any(streams.redirects) else []),
        *(["--tee"] if any(streams.tee) else []),
        *(["--duplicate-*-filters"] if any(streams.filters) else []),
    ]


def job_script(plan: LaunchPlan, job: JobPlan) -> str:
    """The part of the script that starts all ranks and waits for them."""
    port = (
        str(job.master_port)
        if job.master_port
        else f'"$({quote(job.interpreter or "python3")} -c {quote(_PORT_PROGRAM)})"'
    )
    run_id = "cpulaunch-$$" if job.rendezvous.id is None else quote(job.rendezvous.id)
    indexes = [worker.index for worker in plan.workers]
    starts = [f'rank worker_{index} &\nlaunch_pids="$launch_pids $!"' for index in indexes]
    wait = ['[ -z "$launch_ended" ] || kill $launch_pids 2>/dev/null']
    wait += ["for pid in $launch_pids; do", '    finish "$pid"', "done", 'exit "$launch_status"', ""]
    return _ENVIRONMENT.format(port=port, run_id=run_id) + "\n".join([_RANK, *starts, *wait])
