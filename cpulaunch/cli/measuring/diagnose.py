"""The command diagnose: launch the program once with its steps measured, and name its bottleneck."""

from __future__ import annotations

import os
import sys

import cpulaunch
from cpulaunch.cli.help.commands import command_named
from cpulaunch.cli.measuring.diagnose_arguments import parse_diagnose
from cpulaunch.cli.measuring.outputs import OutputFiles, check_outputs, write_outputs
from cpulaunch.cli.measuring.own_options import shown_words
from cpulaunch.cli.measuring.progress import ProgressLine
from cpulaunch.measure.diagnosis.bottlenecks import ProcessLimits
from cpulaunch.measure.diagnosis.changes.change_json import change_json
from cpulaunch.measure.diagnosis.changes.change_text import change_text
from cpulaunch.measure.diagnosis.changes.changes import changed
from cpulaunch.measure.diagnosis.changes.document import read_document
from cpulaunch.measure.diagnosis.diagnosis import Ending, diagnosis_of
from cpulaunch.measure.diagnosis.diagnosis_json import diagnosis_json
from cpulaunch.measure.diagnosis.diagnosis_text import LABELS, diagnosis_text
from cpulaunch.measure.diagnosis.folder import MAX_TRACE_BYTES, read_trace
from cpulaunch.measure.diagnosis.launching import diagnose_launched, diagnose_plain
from cpulaunch.measure.diagnosis.rates import Ceilings
from cpulaunch.measure.execution import plain_command
from cpulaunch.measure.measuring_process import measuring_process
from cpulaunch.records.errors import CpulaunchError, UsageError
from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import DiagnosisRequest
from cpulaunch.system.files.outputs import TRACE, check_path, save_output
from cpulaunch.view.hidden_values import hidden_names
from cpulaunch.view.text import painter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cpulaunch.cli.measuring.diagnose_arguments import DiagnoseLine
    from cpulaunch.cli.measuring.services import Services
    from cpulaunch.measure.diagnosis.diagnosis import Diagnosis
    from cpulaunch.measure.diagnosis.launching import DiagnosedLaunch
    from cpulaunch.measure.execution import LaunchSetup
    from cpulaunch.records.command_line import CommandLine
    from cpulaunch.records.host import Host
    from cpulaunch.records.plan import LaunchPlan
    from cpulaunch.system.files.special import FileId

COMMAND = command_named("diagnose")
NOT_LAUNCHED = frozenset({"--json", "--brief", "--dry-run", "--help", "--version"})
"""Options of a launch with which nothing would be launched."""
FAILED, INTERRUPTED = 1, 130
LOCAL_DISTANCE = 10
"""Of a NUMA node to itself. Source: ACPI, SLIT."""


class NotDiagnosedError(CpulaunchError):
    """The program failed, or ended, before enough of its steps could be measured."""

    exit_code = FAILED


def diagnose(arguments: Sequence[str], services: Services) -> int:
    """The exit code of `diagnose`. Effect: launches the program. Raises: CpulaunchError."""
    line = parse_diagnose(arguments)
    if line.help:
        return services.print_help(COMMAND)
    if line.compared is not None:
        return _compare(line.compared, services, json=line.json)
    parsed = services.parse(line.launch)
    _check_launch(parsed)
    parsed = services.resolve(parsed)
    direct = None if line.trace is None else check_path(TRACE, line.trace)
    files = check_outputs(OutputFiles(html=line.html))
    host, plan = services.host_and_plan(parsed)
    progress = ProgressLine(services.environ, width=services.width)
    try:
        with measuring_process(services.notify, services.environ) as setup:
            progress.show("measuring the program's steps")
            launched = _launched(line, parsed, plan, setup)
            found = _diagnosis(launched, line, parsed, plan, host)
            main = None if line.trace is None else found.main
            trace = None if main is None else read_trace(setup.folder, main.figures.pid)
    except KeyboardInterrupt:
        services.notify("interrupted: no diagnosis")
        return INTERRUPTED
    finally:
        progress.clear()
    if not found.processes:
        raise NotDiagnosedError("the program could not be diagnosed", value=launched.failure or found.absence)
    program = shown_words(line.launch, hidden_names(parsed))
    shown = diagnosis_json(found, program=program, version=cpulaunch.__version__, host=os.uname().nodename)
    _print(found, shown, line, services)
    error = None if line.trace is None else _trace_error(line.trace, trace, direct=direct)
    if error is not None:
        services.notify(f"error: {error}")
    failure = write_outputs(files, services, page=lambda: _page(shown, host), charts=lambda: (), title="")
    return failure if error is None else FAILED


def _page(shown: Mapping[str, Any], host: Host) -> str:
    from cpulaunch.html.diagnose_page import diagnose_page

    return diagnose_page(shown, machine=host.cpu.model_name or host.arch, labels=LABELS)


def _compare(paths: tuple[str, str], services: Services, *, json: bool) -> int:
    """Zero. Raises: CpulaunchError if a file holds no diagnosis."""
    before, after = map(read_document, paths)
    found = changed(before, after)
    if json:
        services.print_json(change_json(found, paths, version=cpulaunch.__version__))
    else:
        strong = painter("bold", color=services.color)
        services.print_text(change_text(found, width=services.width, strong=strong))
    return 0


def _diagnosis(
    launched: DiagnosedLaunch, line: DiagnoseLine, parsed: CommandLine, plan: LaunchPlan, host: Host
) -> Diagnosis:
    return diagnosis_of(
        launched.figures,
        {} if _is_plain(line, parsed) else _machines(plan, host),
        _whole_machine(host),
        _ceilings(host),
        host.limits.memory_bytes or host.memory_bytes,
        ending=Ending(
            states=launched.states,
            failure=launched.failure,
            unmeasured=launched.unmeasured,
            ignored=launched.ignored,
            warm_up=line.warm_up,
        ),
    )


def _check_launch(parsed: CommandLine) -> None:
    """Raises: UsageError if these options launch nothing."""
    found = parsed.switches & NOT_LAUNCHED
    if found or parsed.emit is not None or parsed.sysroot is not None:
        named = min(found) if found else "--emit" if parsed.emit is not None else "--sysroot"
        raise UsageError(f"a diagnosis with {named} starts nothing", hint=f"leave {named} out")


def _is_plain(line: DiagnoseLine, parsed: CommandLine) -> bool:
    """Whether Python alone runs the program: no option of a launch is given."""
    return not parsed.values and not parsed.switches and not line.defaults


def _launched(line: DiagnoseLine, parsed: CommandLine, plan: LaunchPlan, setup: LaunchSetup) -> DiagnosedLaunch:
    request = DiagnosisRequest(
        folder=setup.folder,
        steps=line.steps,
        warm_up=line.warm_up,
        trace=line.trace is not None,
        to_end=line.to_end,
    )
    if parsed.program is None or not _is_plain(line, parsed):
        python = sys.executable if parsed.python is None else parsed.python.path
        return diagnose_launched(line.launch, request, setup.child, python=python, limit=line.budget_seconds)
    search_path = dict(plan.workers[0].env).get("PYTHONPATH")
    command = plain_command(parsed.program)
    return diagnose_plain(command, request, setup.child, search_path=search_path, limit=line.budget_seconds)


def _machines(plan: LaunchPlan, host: Host) -> Mapping[int, ProcessLimits]:
    """What the plan gives each worker."""
    whole = _whole_machine(host)
    return {
        worker.index: replace(whole, cpus=worker.cpus, threads=None) if worker.cpus else whole
        for worker in plan.workers
    }


def _whole_machine(host: Host) -> ProcessLimits:
    """What all processes may use together."""
    nodes = {cpu.id: cpu.numa_node for cpu in host.cpus if cpu.numa_node is not None}
    budget = host.limits.budget
    return ProcessLimits(cpus=budget.cpus, threads=budget.threads, nodes=nodes, remote_slowdown=_remote_slowdown(host))


def _remote_slowdown(host: Host) -> float:
    """How much longer a read from another NUMA node takes, by the firmware's distances; 1 with one node."""
    distances = [
        distance for node in host.numa_nodes for other, distance in dict(node.distances).items() if other != node.id
    ]
    return max(distances, default=LOCAL_DISTANCE) / LOCAL_DISTANCE


def _ceilings(host: Host) -> Ceilings:
    """What this machine can do, as calibrated."""
    caches = [each for each in host.caches if each.cpus & host.limits.budget.cpus]
    last = max((each.level for each in caches), default=0)
    cache_bytes = sum(each.bytes or 0 for each in caches if each.level == last)
    if host.calibration is None:
        return Ceilings(cache_bytes=cache_bytes)
    return Ceilings(
        products=host.calibration.values("products"),
        bandwidth=max(host.calibration.values("read bandwidth").values(), default=None),
        cache_bytes=cache_bytes,
    )


def _trace_error(path: str, trace: bytes | None, *, direct: FileId | None) -> CpulaunchError | None:
    """Why there is no trace at `path`, if there is none. Effect: writes it."""
    if trace is None:
        return CpulaunchError("there is no trace", hint="the program must make a few steps under the profiler")
    if len(trace) > MAX_TRACE_BYTES:
        return CpulaunchError(
            f"the trace has more than {MAX_TRACE_BYTES >> 20} MiB", hint="measure fewer steps: --steps N"
        )
    return save_output(TRACE, path, trace, direct=direct)


def _print(found: Diagnosis, shown: Mapping[str, Any], line: DiagnoseLine, services: Services) -> None:
    if line.json:
        services.print_json(shown)
    else:
        strong = painter("bold", color=services.color)
        services.print_text(diagnosis_text(found, width=services.width, strong=strong))
