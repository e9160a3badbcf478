"""--dist-backend auto: collectives are measured on this host once, and the result is cached for later launches."""

from __future__ import annotations

import os
import sys

import cpulaunch
from cpulaunch.launch.trial import read_verdicts, write_verdicts
from cpulaunch.plan.plugin.timings import SIZES, CollectiveMeasurement, Timing, decode, encode
from cpulaunch.probe import Root
from cpulaunch.probe.software.oneccl import host_name, oneccl_version
from cpulaunch.profile.selection import user_folder
from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY
from cpulaunch.records.cpulist import format_cpulist

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cpulaunch.records.host import Host
    from cpulaunch.records.plan import LaunchPlan
    from cpulaunch.records.request import LaunchRequest

PREFIXES = ("CCL_", "FI_", "GLOO_", "CPULAUNCH_CCL_")
"""Variables that change the speed of collectives."""
RANK_VARIABLES = ("CCL_LOCAL_RANK", "CCL_LOCAL_SIZE")


def collective_measurement(
    host: Host,
    request: LaunchRequest,
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    measure: bool | Callable[[], bool],
    notify: Callable[[str], object],
) -> CollectiveMeasurement | None:
    """How long collectives take among the plan's ranks on this host; None if unknown and `measure` is false.

    Effect: with `measure`, measures what is unknown, stores it in the user's cache and reports it through `notify`. A
    function: measures what is known, too, and stores it if the function says afterwards that it is to be kept.
    """
    folder = user_folder(environ, "XDG_CACHE_HOME", ".cache")
    file = folder and f"{folder}/collectives"
    key = _key(host, plan, environ)
    cache = read_verdicts(file) if file else {}
    known = decode(cache.get(key))
    if not callable(measure) and (known is not None or not measure):
        return known
    fresh = _measure(request, plan, environ)
    if file and fresh.failure is None and (not callable(measure) or measure()):
        write_verdicts(file, {**read_verdicts(file), key: encode(fresh.timings)})
    backend = "keeps gloo" if fresh.failure is not None else fresh.backend
    notify(f"--dist-backend auto: {backend}: {fresh.summary}")
    return fresh


def _measure(request: LaunchRequest, plan: LaunchPlan, environ: Mapping[str, str]) -> CollectiveMeasurement:
    from cpulaunch.launch.measurement import measure_collectives

    interpreter = (request.program.interpreter if request.program else "") or sys.executable
    answer = measure_collectives(plan, SIZES, interpreter=interpreter, environ=environ)
    timings = tuple(Timing(*row) for row in answer.times)
    return CollectiveMeasurement(timings=timings, failure=answer.failure, fresh=True)


def _key(host: Host, plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """The cache key in one line: machine, versions, ranks with their CPUs, and variables."""
    root = Root()
    torch = host.torch
    planned = {**environ, **dict(plan.workers[0].env)}
    variables = sorted(
        f"{name}={value}" for name, value in planned.items() if name.startswith(PREFIXES) and name not in RANK_VARIABLES
    )
    parts = (
        host_name(root),
        host.cpu.model_name or "",
        len(host.cpus),
        "" if torch is None else torch.version,
        "" if torch is None else oneccl_version(root, torch) or "no oneCCL",
        cpulaunch.__version__,
        _build_time(f"{os.path.dirname(cpulaunch.__file__)}/{MEMORY_LIBRARY}"),
        *(format_cpulist(worker.cpus) for worker in plan.workers),
        *variables,
    )
    return ascii("|".join(map(str, parts)))


def _build_time(path: str) -> str:
    """The build time of a compiled library in nanoseconds, as text; "no library" if it is missing."""
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return "no library"
