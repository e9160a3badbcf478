"""A measurement of collectives among ranks that are bound as a plan's will be. Launches that need none skip this."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import OWN_VARIABLES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.records.plan import LaunchPlan

MODULE = "cpulaunch.worker.ccl.measure"
SECONDS = 60.0
"""For a measurement of one second: importing torch, and ranks that find each other, take most of it."""
GRACE_SECONDS = 5.0
"""For it to end its ranks and to give back what they hold in /dev/shm."""
OF_A_RANK = (*OWN_VARIABLES, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CCL_LOCAL_RANK", "CCL_LOCAL_SIZE")
"""Variables of the plan's ranks that are not for those of the measurement, which are told their own."""


@record
class CollectiveTimes:
    """(bytes, gloo's seconds, ccl's seconds) of each size; or why there are none."""

    times: tuple[tuple[int, float, float], ...] = ()
    failure: str | None = None


def measure_collectives(
    plan: LaunchPlan, sizes: Sequence[int], *, interpreter: str, environ: Mapping[str, str], seconds: float = SECONDS
) -> CollectiveTimes:
    """What all-reduces of these sizes take among the plan's ranks. Effect: starts them, and waits for their end."""
    cpus = ";".join(format_cpulist(worker.cpus) for worker in plan.workers)
    command = [interpreter, "-P", "-m", MODULE, str(os.getpid()), cpus, ",".join(map(str, sizes))]
    try:
        child = subprocess.Popen(
            command,
            env=_environment(plan, environ),
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
        said, complaints = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return CollectiveTimes(failure=f"no answer within {seconds:g} s")
    finally:
        _end(child)
    return _answer(said, complaints, child.returncode)


def _environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that the plan gives its first rank, without what tells it that it is that."""
    planned = {**environ, **dict(plan.workers[0].env)}
    return {name: value for name, value in planned.items() if value is not None and name not in OF_A_RANK}


def _end(child: subprocess.Popen[str]) -> None:
    """Effect: neither it nor any of its ranks is left. It is asked first: only it can tidy up after them."""
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


def _answer(said: str, complaints: str, code: int) -> CollectiveTimes:
    for line in said.splitlines():
        try:
            answer = json.loads(line)
            if "failed" in answer:
                return CollectiveTimes(failure=str(answer["failed"]))
            times = answer["times"]
            return CollectiveTimes(times=tuple((int(count), float(gloo), float(ccl)) for count, gloo, ccl in times))
        except (ValueError, KeyError, TypeError):
            continue  # Libraries print, too.
    words = complaints.strip().splitlines()
    return CollectiveTimes(failure=words[-1].strip() if words else f"it ended with exit code {code} and said nothing")
