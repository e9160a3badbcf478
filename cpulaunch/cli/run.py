"""run and plan: probe, merge, plan, try the preloads, then print or launch."""

from __future__ import annotations

import os
import sys

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.launch.process.program import check_program, check_sharable, find_executable
from cpulaunch.launch.run import launch, notify_on_stderr
from cpulaunch.launch.trial import try_preloads
from cpulaunch.plan.planner import make_plan, preload_candidates
from cpulaunch.probe import Root, probe_host
from cpulaunch.profile.selection import chosen_layers, profile_warnings, user_folder, user_profile_dir
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import CpulaunchError, UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.request import LaunchRequest, Layer, merge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.launch.supervision.result import LaunchResult

ONE_RANK = Layer(origin="default", values={"nproc_per_node": 1})
"""What torchrun starts where nobody says how many."""
PROFILE_FOLDERS = ("HOME", "XDG_CONFIG_HOME")


def run(tokens: Sequence[str], environ: Mapping[str, str], *, only_plan: bool, torchrun: bool = False) -> int:
    """The exit code of `run`, `plan` or `torchrun` with these arguments. Raises: CpulaunchError."""
    line = command_line(tokens, environ, torchrun=torchrun)
    if line.switches & {"--help", "--version"}:
        return _show_help(line)
    printed = only_plan or line.emit is not None or bool(line.switches & {"--dry-run", "--json"})
    if not printed:
        _check_runnable(line, environ)
    host, plan = _decide(line, environ, wait_for_dns=not printed)
    _refuse_degraded(plan)
    if printed:
        _print_plan(plan, host, line, environ)
        return 0
    return _carry_out(plan, host, line, environ)


def command_line(tokens: Sequence[str], environ: Mapping[str, str], *, torchrun: bool = False) -> CommandLine:
    """What was typed, and what torchrun's variables add to it. Raises: UsageError."""
    interpreter = worker_python(environ)
    line = parse_command_line(tokens, interpreter=interpreter, torchrun=torchrun)
    if line.sysroot is None and any(name.startswith("PET_") for name in environ):
        from cpulaunch.cli.pet_variables import with_pet_variables

        line = with_pet_variables(line, environ, interpreter=interpreter)
    return line


def worker_python(environ: Mapping[str, str]) -> str:
    """The path of the Python that workers run: $PYTHON_EXEC (as written if it cannot be found), else this one.

    Source: torchrun, which reads PYTHON_EXEC too.
    """
    asked = environ.get("PYTHON_EXEC", "")
    if not asked:
        return sys.executable
    try:
        return os.path.abspath(find_executable(asked, environ))
    except CpulaunchError:
        return asked


def _show_help(line: CommandLine) -> int:
    from cpulaunch.cli import terminal

    if "--version" in line.switches:
        import cpulaunch

        terminal.show(f"cpulaunch {cpulaunch.__version__}")
        return 0
    from cpulaunch.cli.usage import run_help

    terminal.show(run_help(terminal.width()), end="")
    return 0


def _check_runnable(line: CommandLine, environ: Mapping[str, str]) -> None:
    if line.program is None:
        raise UsageError(
            "no program to run",
            value="nothing after the options",
            source="command line",
            hint="cpulaunch SCRIPT [ARGS...]",
        )
    if line.sysroot is not None:
        raise UsageError(
            "a captured machine can be planned for, not run on",
            value=line.sysroot,
            source="--sysroot",
            hint="use `cpulaunch plan`",
        )
    check_program(line.program, environ)


def _decide(line: CommandLine, environ: Mapping[str, str], *, wait_for_dns: bool) -> tuple[Host, LaunchPlan]:
    """`wait_for_dns`: the plan is to run, so that what may take its time to appear is waited for."""
    interpreter = line.program.interpreter if line.program else sys.executable
    if line.sysroot is not None:
        # Nothing of this process reaches a captured machine's plan; where profiles are kept does.
        environ = {name: environ[name] for name in PROFILE_FOLDERS if name in environ}
    host = probe_host(_root(line), interpreter=interpreter, environ=environ, detail="launch")
    request = request_for(line, host, environ)
    if host.gpus and request.distributed:
        host = _with_nvml(host, request)
    if host.sysroot is None and (request.settings.nnodes or (1, 1))[1] > 1:
        from cpulaunch.cli.rendezvous_route import with_route

        request = with_route(request, wait_for_dns=wait_for_dns, notify=notify_on_stderr)
    trials = _trials(host, request, environ)
    plan = make_plan(host, request, trials=trials)
    if plan.unmeasured and host.sysroot is None:
        from cpulaunch.cli.collective_timings import collective_measurement

        found = collective_measurement(
            host, request, plan, environ=environ, start=wait_for_dns, notify=notify_on_stderr
        )
        plan = make_plan(host, request, trials=trials, measurement=found)
    return host, plan


def _with_nvml(host: Host, request: LaunchRequest) -> Host:
    from cpulaunch.plan.gpus.assignment import may_use_gpus

    if not may_use_gpus(host, request):
        return host
    from cpulaunch.probe.gpus.nvml import with_nvml

    return with_nvml(host)


def _root(line: CommandLine) -> Root:
    if line.sysroot is None:
        return Root()
    from cpulaunch.cli.sysroot import machine_root

    return machine_root(line.sysroot)


def request_for(line: CommandLine, host: Host, environ: Mapping[str, str]) -> LaunchRequest:
    """The command line over the profiles it names or that match the host."""
    asked = [Layer(origin="cli", values=line.values, reasons=line.reasons), *line.layers]
    scheduled = _scheduled(asked, host, environ)
    names: tuple[str, ...] = line.values.get("profile", ("auto",))
    folder = user_profile_dir(environ)
    layers, label = chosen_layers(names, host, config_dir=folder)
    return merge(
        [*asked, *scheduled, *layers, *((ONE_RANK,) if line.job else ())],
        program=line.program,
        profile=label,
        environ=environ,
        warnings=profile_warnings(names, host, config_dir=folder),
        notices=line.notices,
    )


def _scheduled(asked: Sequence[Layer], host: Host, environ: Mapping[str, str]) -> tuple[Layer, ...]:
    """What a scheduler that started this process adds to what was asked for."""
    chosen = {name: value for layer in reversed(asked) for name, value in layer.values.items()}
    if "scheduler" not in chosen and "SLURM_JOB_ID" not in environ:
        return ()
    from cpulaunch.schedulers.layer import scheduler_layer
    from cpulaunch.schedulers.task import Machine

    limits = host.limits
    machine = Machine(
        cpus=len(limits.affinity),
        host_cpus=len(limits.cpuset or host.cpus),
        nodefile=_nodefile(environ) if chosen.get("scheduler") == "pbs" else None,
    )
    layer = scheduler_layer(environ, chosen, machine)
    return () if layer is None else (layer,)


def _nodefile(environ: Mapping[str, str]) -> str | None:
    """The text of PBS's list of hosts; None where it is not to be read, as on all but the job's first host."""
    try:
        with open(environ.get("PBS_NODEFILE", ""), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _trials(host: Host, request: LaunchRequest, environ: Mapping[str, str]) -> dict[str, str | None] | None:
    if host.sysroot is not None:
        return None
    paths = [candidate.path for candidate in preload_candidates(host, request)]
    interpreter = request.program.interpreter if request.program else ""
    return try_preloads(
        paths, interpreter=interpreter or sys.executable, environ=environ, cache_file=_trial_cache(environ)
    )


def _trial_cache(environ: Mapping[str, str]) -> str | None:
    folder = user_folder(environ, "XDG_CACHE_HOME", ".cache")
    return folder and f"{folder}/trials"


def _print_plan(plan: LaunchPlan, host: Host, line: CommandLine, environ: Mapping[str, str]) -> None:
    from cpulaunch.cli import terminal
    from cpulaunch.view import plan_view

    if "--json" in line.switches:
        terminal.print_json(plan_view.plan_json(plan))
    elif line.emit is not None:
        terminal.show(_emitted(plan, host, line), end="")
    else:
        terminal.show(plan_view.plan_text(plan, host, width=terminal.width(), color=terminal.color(environ)))


def _emitted(plan: LaunchPlan, host: Host, line: CommandLine) -> str:
    """The plan in the form asked for by --emit. Raises: UsageError."""
    if line.emit == "slurm":
        from cpulaunch.emit.slurm import slurm_script

        return slurm_script(plan, host, line)
    if line.emit == "k8s":
        from cpulaunch.emit.kubernetes import k8s_manifest

        return k8s_manifest(plan, host, line)
    from cpulaunch.emit.shell import plan_script

    return plan_script(plan)


def _refuse_degraded(plan: LaunchPlan) -> None:
    if plan.launch.strict and plan.warnings:
        raise CpulaunchError(
            "the plan is degraded",
            value=plan.warnings[0],
            source="--strict",
            hint="drop --strict, or follow the warning",
        )


def _carry_out(plan: LaunchPlan, host: Host, line: CommandLine, environ: Mapping[str, str]) -> int:
    if line.program is not None:
        check_sharable(line.program, workers=len(plan.workers))
    for notice in line.notices:
        notify_on_stderr(notice)
    for warning in plan.warnings:
        notify_on_stderr(f"warning: {warning}")
    if "--verbose" in line.switches:
        from cpulaunch.cli import terminal
        from cpulaunch.view import plan_view

        terminal.complain(plan_view.plan_text(plan, host, width=terminal.width(), color=False))
    if plan.launch.report is not None:
        from cpulaunch.cli.report import check_report

        check_report(plan.launch.report)
    events = host.limits.memory_events
    result = launch(plan, environ=environ, memory_events=events and f"/{events}")
    if result.exit_code:
        from cpulaunch.cli.terminal import complain
        from cpulaunch.launch.supervision.failure_text import summary

        complain("\n".join(summary(result)))
    return _finish(plan, result) if plan.launch.watched else result.exit_code


def _finish(plan: LaunchPlan, result: LaunchResult) -> int:
    """The exit code of a watched launch. Effect: what was seen is told."""
    import cpulaunch
    from cpulaunch.cli.report import tell_the_rest

    return tell_the_rest(plan, result, version=cpulaunch.__version__)
