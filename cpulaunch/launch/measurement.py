"""A measurement of collectives among ranks bound as the plan binds them. Only launches that need one import this."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import OWN_VARIABLES
from cpulaunch.system.files.paths import without_relative_folders
from cpulaunch.system.interrupts import interruptible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.records.plan import LaunchPlan

MODULE = "cpulaunch.worker.ccl.measure"
TIMEOUT_SECONDS = 60.0
"""Measuring takes one second; importing torch and the rendezvous of the ranks take the rest."""
GRACE_SECONDS = 5.0
"""How long the measurement may take to end its ranks and to remove their files in /dev/shm."""
RANK_VARIABLES = (
    *OWN_VARIABLES,
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "CCL_LOCAL_RANK",
    "CCL_LOCAL_SIZE",
)
"""Variables of the plan's ranks that the measurement sets itself for its own ranks."""


@record
class CollectiveTimes:
    """(bytes, seconds with gloo, seconds with ccl) for each size; or why there are none."""

    times: tuple[tuple[int, float, float], ...] = ()
    failure: str | None = None


def measure_collectives(
    plan: LaunchPlan,
    sizes: Sequence[int],
    *,
    interpreter: str,
    environ: Mapping[str, str],
    seconds: float = TIMEOUT_SECONDS,
) -> CollectiveTimes:
    """How long all-reduces of these sizes in bytes take among the plan's ranks.

    Effect: starts as many ranks, bound as planned, and waits at most `seconds` for them to end.
    """
    cpus = ";".join(format_cpulist(worker.cpus) for worker in plan.workers)
    command = [interpreter, "-P", "-m", MODULE, str(os.getpid()), cpus, ",".join(map(str, sizes))]
    with interruptible():
        return _run(command, _environment(plan, environ), interpreter=interpreter, seconds=seconds)


def _run(
    command: Sequence[str], environment: Mapping[str, str], *, interpreter: str, seconds: float
) -> CollectiveTimes:
    """What the command measures. Effect: it has ended, after Ctrl-C too."""
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return CollectiveTimes(failure=f"{interpreter} cannot be started: {error.strerror}")
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return CollectiveTimes(failure=f"no answer within {seconds:g} s")
    finally:
        _end(child)
    return _parse(output, errors, child.returncode)


def _environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the plan's first rank, without the variables that number the ranks."""
    planned = {**environ, **dict(plan.workers[0].env)}
    kept = {name: value for name, value in planned.items() if value is not None and name not in RANK_VARIABLES}
    return without_relative_folders(kept)


def _end(child: subprocess.Popen[str]) -> None:
    """Effect: ends the child and its ranks: by SIGTERM first, as only the child can clean up after its ranks."""
    try:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _parse(output: str, errors: str, code: int) -> CollectiveTimes:
    """The times in the child's output; else the last line of its stderr as the failure."""
    for line in output.splitlines():
        try:
            answer = json.loads(line)
            if "failed" in answer:
                return CollectiveTimes(failure=str(answer["failed"]))
            times = answer["times"]
            return CollectiveTimes(times=tuple((int(count), float(gloo), float(ccl)) for count, gloo, ccl in times))
        except (ValueError, KeyError, TypeError):
            continue  # Libraries print to stdout, too.
    lines = errors.strip().splitlines()
    return CollectiveTimes(failure=lines[-1].strip() if lines else f"it ended with exit code {code} and no message")
