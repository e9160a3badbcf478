"""The part of `--emit sh` for the ranks of one host: it finds a port, and the first failure ends all ranks."""

from shlex import quote

from cpulaunch.records.errors import UsageError
from cpulaunch.records.plan import JobPlan, LaunchPlan

_PORT_PROGRAM = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
_ENVIRONMENT = """
# Variables that all ranks share.
MASTER_PORT={port} || exit 125
export MASTER_PORT
export TORCHELASTIC_RUN_ID={run_id} TORCHELASTIC_RESTART_COUNT=0
unset TORCHELASTIC_ERROR_FILE
"""
WAIT_FOR = """
wait_for() {  # argument: process id; returns the exit code of the process when it has ended
    launch_signal=
    wait "$1"
    launch_code=$?
    # A signal interrupted the wait. Most shells know the code also of a worker that has ended since.
    while [ -n "$launch_signal" ]; do
        launch_signal=
        wait "$$" 2>/dev/null  # No child. In bash, a signal just after a wait interrupts the next one.
        wait "$1" 2>/dev/null
        launch_again=$?
        case $launch_again in 127 | -*) ;; *) launch_code=$launch_again ;; esac  # It is not known any more.
    done
    case $launch_code in -*) launch_code=138 ;; esac  # bash has lost it.
    return "$launch_code"
}
"""
_RANK = """
decide() {  # argument: the exit code of the script, unless an earlier failure or signal decided it
    is_own 2>/dev/null && [ ! -e "$launch_dir/first" ] && (set -C; echo "$1" >"$launch_dir/first") 2>/dev/null
}

stop() {  # argument: exit code, unless a rank or a signal has ended the job
    launch_stopped=${launch_stopped:-$1}
    decide "$1"
    kill $launch_pids 2>/dev/null
}

remember() {  # the code of the rank that ended the job, as a program may remove the file
    is_own 2>/dev/null && [ -f "$launch_dir/first" ] && [ -s "$launch_dir/first" ] || return 0
    read -r launch_stopped 2>/dev/null <"$launch_dir/first"
}

rank() {  # argument: the worker's function; starts nothing once the job has ended, and loses no signal meanwhile
    launch_rank= launch_signal=
    trap 'launch_signal=1; [ -z "$launch_rank" ] || kill "$launch_rank" 2>/dev/null' HUP TERM
    { [ -e "$launch_dir/first" ] || "$1"; } &
    launch_rank=$!
    if [ -n "$launch_signal" ] || [ -e "$launch_dir/first" ]; then kill "$launch_rank" 2>/dev/null; fi
    wait_for "$launch_rank" && exit
    decide "$launch_code"
    kill -USR1 "$launch_script" 2>/dev/null
    exit "$launch_code"
}

is_own() {  # whether the folder is the script's: others may have put one, or a link, in its place
    [ ! -L "$launch_dir" ] && [ -O "$launch_dir" ] && return 0  # In a trap of bash, return alone is of what was before.
    echo "$launch_dir is gone or another user's: set TMPDIR to a folder that only you can write" >&2
    return 1
}

clean() {  # removes no more than is known; a rank may yet make a file
    is_own 2>/dev/null || return
    for pid in $launch_pids; do
        rm -f "$launch_dir/first" "$launch_dir/alive"
        rmdir "$launch_dir" 2>/dev/null && break
    done
}

launch_script=$$
launch_pids= launch_stopped=
launch_dir=$(mktemp -d) && is_own || exit 125
trap 'launch_signal=1; stop 129' HUP
trap 'launch_signal=1; stop 130' INT
trap 'launch_signal=1; stop 143' TERM
trap 'launch_signal=1; remember; kill $launch_pids 2>/dev/null' USR1

"""
_WAIT = """
[ ! -e "$launch_dir/first" ] || kill $launch_pids 2>/dev/null

# If this script is killed, its end of this pipe closes, and this reader ends the ranks. The reader is not a child of
# the script, because bash may wait for any child if a signal arrives just when the process it waits for ends.
launch_pipe=
# Of exec alone, an error would end the script and leave the ranks.
if is_own && mkfifo "$launch_dir/alive" && command exec 9<>"$launch_dir/alive"; then
    # What is open is looked at: others may have put a link there meanwhile.
    if [ -p /dev/fd/9 ] || [ ! -d /dev/fd ]; then launch_pipe=1; fi
fi
if [ -z "$launch_pipe" ]; then
    kill $launch_pids 2>/dev/null
    for pid in $launch_pids; do
        wait_for "$pid"
    done
    clean
    exit 125
fi
(
    trap '' HUP INT TERM
    {
        exec 9>&-
        read -r launch_word || { stop 137; clean; }
    } <"$launch_dir/alive" >/dev/null 2>&1 &
)

launch_failed=0
for pid in $launch_pids; do
    # Of ranks that the script ended (143), or whose code bash lost at a signal (138), the code says nothing.
    wait_for "$pid" || case $launch_failed in 0 | 138 | 143) launch_failed=$launch_code ;; esac
done
echo over >&9
launch_status=125
if { [ ! -e "$launch_dir" ] && [ ! -L "$launch_dir" ]; } || is_own; then  # A program that clears TMPDIR removes it.
    launch_status=${launch_stopped:-$launch_failed}
    # It is empty where there was no space, and no file if a program has put something else there.
    [ ! -f "$launch_dir/first" ] || [ ! -s "$launch_dir/first" ] || read -r launch_status <"$launch_dir/first"
fi
case $launch_status in "" | *[!0-9]* | ????*) launch_status=1 ;; esac
clean
exit "$launch_status"
"""


def check_job_script(plan: LaunchPlan) -> None:
    """Raises: UsageError if torch's agent starts the ranks, as in a job of several hosts."""
    if plan.job is not None and plan.job.engine == "elastic":
        hosts = plan.job.hosts[1]
        raise UsageError(
            "--emit sh supports one host only" if hosts > 1 else "--emit sh cannot start torch's agent",
            value=f"--nnodes {hosts}" if hosts > 1 else "a plug-in of torch elastic",
            source="--emit sh",
            hint="run cpulaunch on every host, or use --emit slurm",
        )


def unsupported_options(job: JobPlan) -> list[str]:
    """The options of the job that the script does not support."""
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
        else f'"$({quote(job.interpreter or "python3")} -I -c {quote(_PORT_PROGRAM)})"'
    )
    run_id = "cpulaunch-$$" if job.rendezvous.id is None else quote(job.rendezvous.id)
    indexes = [worker.index for worker in plan.workers]
    starts = [f'rank worker_{index} &\nlaunch_pids="$launch_pids $!"' for index in indexes]
    return (
        _ENVIRONMENT.format(port=port, run_id=run_id)
        + "\n".join([(WAIT_FOR + _RANK).rstrip("\n"), "", *starts])
        + "\n"
        + _WAIT
    )
