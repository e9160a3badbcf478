"""The ranks of one host as a POSIX shell script: their port, and that the first failure ends them all."""

from shlex import quote

from cpulaunch.records.errors import UsageError
from cpulaunch.records.plan import JobPlan, LaunchPlan

_PORT_PROGRAM = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
_ENVIRONMENT = """
# What every rank is told beside its own variables.
MASTER_PORT={port} || exit 125
export MASTER_PORT
export TORCHELASTIC_RUN_ID={run_id} TORCHELASTIC_RESTART_COUNT=0
unset TORCHELASTIC_ERROR_FILE
"""
_RANK = """
decided() {  # exit code: the script's, unless another failure or signal came before
    (set -C; echo "$1" >"$launch_dir/first") 2>/dev/null
}

stop() {  # exit code
    decided "$1"
    kill $launch_pids 2>/dev/null
}

ended() {  # process id: returns when it has ended, with its exit code
    wait "$1"
    launch_code=$?
    while kill -0 "$1" 2>/dev/null; do  # a signal ended the wait, not the process
        wait "$1"
        launch_code=$?
    done
    return "$launch_code"
}

rank() {  # worker's function; it starts nothing once the job is over, and misses no signal while it starts
    launch_rank=
    trap '[ -z "$launch_rank" ] || kill "$launch_rank" 2>/dev/null' HUP TERM
    { [ -e "$launch_dir/first" ] || "$1"; } &
    launch_rank=$!
    [ ! -e "$launch_dir/first" ] || kill "$launch_rank" 2>/dev/null
    ended "$launch_rank" && exit
    decided "$launch_code"
    kill -USR1 "$launch_script" 2>/dev/null
}

launch_script=$$
launch_pids=
launch_dir=$(mktemp -d) || exit 125
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'kill $launch_pids 2>/dev/null' USR1

"""
_WAIT = """
[ ! -e "$launch_dir/first" ] || kill $launch_pids 2>/dev/null

# Should this script be killed, its end of this pipe closes, and the ranks are ended from here. No child of the
# script: bash can wait for any child when a signal and the end of the one it waits for come together.
mkfifo "$launch_dir/alive" || stop 125
exec 9<>"$launch_dir/alive"
(
    trap '' HUP INT TERM
    {
        exec 9>&-
        read -r launch_word || { stop 137; rm -rf "$launch_dir"; }
    } <"$launch_dir/alive" >/dev/null 2>&1 &
)

for pid in $launch_pids; do
    ended "$pid"
done
launch_status=0
[ ! -e "$launch_dir/first" ] || read -r launch_status <"$launch_dir/first"
echo over >&9
rm -rf "$launch_dir"
exit "${launch_status:-1}"
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
    return _ENVIRONMENT.format(port=port, run_id=run_id) + "\n".join([_RANK.rstrip("\n"), "", *starts]) + "\n" + _WAIT
