"""Run by hand and by the tests: kills processes of many launches at random moments, and counts what is left.

`python -m tests.launch.process.killing --engine ranks --kills 500 --without-cgroups` prints one line of JSON.
"""

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cpulaunch.system.control_group import MOUNTS, PREFIX

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TAG = "CPULAUNCH_TEST_RUN"
LEFT_SECONDS = 2.0
"""How long after the kill a process of the launch may still run; on a machine that is busy, longer."""

HIDE_CGROUPS = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh")
TARGETS = (
    ("guard",),
    ("inner",),
    ("supervisor",),
    ("guard", "inner"),
    ("guard", "supervisor"),
    ("inner", "supervisor"),
)
ENGINES = {
    "single": (["--report", "{folder}/report.json"], ["--log-dir", "{folder}/logs"]),
    "instances": (
        ["--instances", "2"],
        ["--instances", "2", "--report", "{folder}/report.json"],
        ["--instances", "2", "--log-dir", "{folder}/logs"],
    ),
    "ranks": (["--nproc-per-node", "2"], ["--nproc-per-node", "2", "--log-dir", "{folder}/logs"]),
    "elastic": (
        [
            *("--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "{endpoint}"),
            *("--rdzv-conf", "last_call_timeout=2"),  # By default, most kills would meet the wait for another host.
        ],
    ),
}


@dataclass
class Launch:
    process: subprocess.Popen
    tag: str
    folder: Path
    targets: tuple[str, ...]
    kill_at: float


def processes(tag):
    """pid -> command line of the living processes that have the tag in their environment."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{TAG}={tag}".encode() not in Path(f"/proc/{name}/environ").read_bytes():
                continue
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if state not in "ZX":
            found[int(name)] = command
    return found


def only_child(pid):
    """The first child of a process that leads a group, as a trial start of a library does not; None if it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return next((int(child) for child in children if os.getpgid(int(child)) == int(child)), None)
    except OSError:
        return None


def chain(guard):
    """The pids of guard, inner guard and supervisor, as far as they exist."""
    inner = only_child(guard)
    supervisor = None if inner is None else only_child(inner)
    return {"guard": guard, "inner": inner, "supervisor": supervisor}


def kill(launch):
    """How many of the launch's targets were killed, at once."""
    pids = chain(launch.process.pid)
    chosen = [pids[name] for name in launch.targets if pids[name] is not None] or [pids["guard"]]
    if launch.process.poll() is not None:
        return 0
    for pid in chosen:
        send_kill(pid)
    return len(chosen)


def send_kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def start(engine, folder, prefix, targets, *, length=0.0):
    """A launch, which is to be killed at a random moment of so many seconds."""
    tag = os.urandom(8).hex()
    run = folder / tag
    for name in ("tmp", "home"):
        (run / name).mkdir(parents=True)
    options = random.choice(ENGINES[engine])
    endpoint = f"127.0.0.1:{random.randint(20000, 30000)}"
    options = [part.format(folder=run, endpoint=endpoint) for part in options]
    command = [*prefix, sys.executable, "-m", "cpulaunch", "--grace", "1", *options, str(HERE / "parent.py")]
    environ = {**os.environ, TAG: tag, "TMPDIR": str(run / "tmp"), "HOME": str(run / "home"), "PYTHONPATH": str(ROOT)}
    with open(run / "stderr", "w") as errors:
        process = subprocess.Popen(
            command, env=environ, cwd=run, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
    kill_at = time.monotonic() + random.random() * length
    return Launch(process=process, tag=tag, folder=run, targets=targets, kill_at=kill_at)


def abandoned_cgroups():
    """The cgroups of launches of which no process holds the lock any more."""
    found = set()
    for mount in MOUNTS:
        names = os.listdir(mount) if os.path.exists(f"{mount}/cgroup.procs") else []
        found |= {f"{mount}/{name}" for name in names if name.startswith(PREFIX)}
    return set(filter(is_abandoned, found))


def is_abandoned(cgroup):
    try:
        fd = os.open(cgroup, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # It is another user's.
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def leftovers(launch):
    """What is left of a launch, by kind. Effect: kills its processes and removes its files in /dev/shm."""
    found = processes(launch.tag)
    for pid in found:
        send_kill(pid)
    shared = [name for name in os.listdir("/dev/shm") if name.endswith(launch.tag)]
    for name in shared:
        os.unlink(f"/dev/shm/{name}")
    if launch.process.poll() is None:
        launch.process.kill()
    launch.process.wait()
    folders = os.listdir(launch.folder / "tmp")
    kinds = {"processes": sorted(found.values()), "folders": folders, "shared memory": shared}
    return {kind: what for kind, what in kinds.items() if what}


def typical_length(engine, folder, prefix, width):
    """How many seconds such a launch takes here, on average, where so many run side by side."""
    began = time.monotonic()
    ended = []
    for launch in [start(engine, folder, prefix, ()) for _ in range(width)]:
        launch.process.wait()
        ended.append(time.monotonic() - began)
    return sum(ended) / width


def count_leftovers(engine, kills, *, folder, prefix=(), width=6, targets=TARGETS, seconds=LEFT_SECONDS):
    """How many processes were killed, and what was left after so many seconds, by kind and targets."""
    counts, left, done = Counter(), Counter(), 0
    length = typical_length(engine, folder, prefix, width)
    while done < kills:
        count = min(width, kills - done)
        batch = [start(engine, folder, prefix, random.choice(targets), length=length) for _ in range(count)]
        for launch in sorted(batch, key=lambda each: each.kill_at):
            time.sleep(max(0.0, launch.kill_at - time.monotonic()))
            killed = kill(launch)
            counts[f"killed {killed}"] += 1
            done += killed > 0
            if not killed:
                launch.process.wait()  # It has ended, or was not that far.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(processes(launch.tag) for launch in batch):
            time.sleep(0.05)
        for launch in batch:
            for kind, what in leftovers(launch).items():
                left[f"{kind} after {'+'.join(launch.targets)}"] += 1
                print(engine, launch.targets, kind, what, launch.tag, launch.process.returncode, file=sys.stderr)
    return {"engine": engine, "kills": done, **counts, "left": dict(left), "seconds a launch": round(length, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=LEFT_SECONDS)
    parser.add_argument("--width", type=int, default=6)
    parser.add_argument("--without-cgroups", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    before = abandoned_cgroups()
    result = count_leftovers(
        arguments.engine,
        arguments.kills,
        folder=arguments.folder,
        width=arguments.width,
        seconds=arguments.seconds,
        prefix=HIDE_CGROUPS if arguments.without_cgroups else (),
    )
    print(
        json.dumps(
            {**result, "cgroups": not arguments.without_cgroups, "abandoned cgroups": len(abandoned_cgroups() - before)}
        )
    )


if __name__ == "__main__":
    main()
