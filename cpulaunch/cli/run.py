"""The commands run, plan and torchrun: probe, merge the settings, plan, then print the plan or launch it."""

from __future__ import annotations

import os
import sys

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.launch.process.program import check_program, check_shareable, find_executable, find_python
from cpulaunch.launch.run import launch
from cpulaunch.launch.trial import try_preloads
from cpulaunch.plan.planner import make_plan, preload_candidates
from cpulaunch.probe import Root, probe_host
from cpulaunch.profile.selection import chosen_layers, profile_warnings, user_folder, user_profile_dir
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import CpulaunchError, UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import replace
from cpulaunch.records.request import LaunchRequest, Layer, Program, WorkerPython, merge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    Dispatch: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], int]

TORCHRUN_DEFAULTS = Layer(origin="default", values={"nproc_per_node": 1})
"""torchrun starts one rank by default."""
PROFILE_FOLDER_VARIABLES = ("HOME", "XDG_CONFIG_HOME")


def run(
    tokens: Sequence[str],
    environ: Mapping[str, str],
    *,
    only_plan: bool,
    torchrun: bool = False,
    dispatch: Dispatch | None = None,
) -> int:
    """The exit code of `run`, `plan` or `torchrun` with these arguments. Raises: CpulaunchError.

    `dispatch` runs a whole command line: that of a command which is typed behind options.
    """
    line = read_command_line(tokens, environ, torchrun=torchrun)
    if line.switches & {"--help", "--version"}:
        command = "plan" if only_plan else "torchrun" if torchrun else "run"
        return _print_help(line, environ, command=command, dispatch=dispatch)
    only_plan = only_plan or line.only_plan
    starts = not only_plan or (line.emit == "sh" and line.sysroot is None)  # Such a script starts the program itself.
    if _may_be_no_script(line.program):
        from cpulaunch.cli.corrections.recognize import other_command, recognized

        other = other_command(line, tokens, only_plan=only_plan)
        if other is not None and dispatch is not None:
            return dispatch(other, environ)
        line = recognized(line, tokens, environ, only_plan=not starts)
    if starts:
        _check_runnable(line, environ)
    notify = notifier(environ, json="--json" in line.switches)
    host, plan = _make_plan(line, environ, will_run=not only_plan, notify=notify)
    if plan.launch.strict and plan.warnings:
        raise CpulaunchError(
            "a warning, treated as an error",
            value=plan.warnings[0],
            source="--strict",
            hint="follow the warning, or drop --strict",
        )
    if only_plan:
        _print_plan(plan, host, line, environ)
        if line.python is not None and line.python.notice and not plan.launch.quiet:
            notify(line.python.notice)
        return 0
    return _launch(plan, host, line, environ, notify=notify)


def notifier(environ: Mapping[str, str], *, json: bool, seconds: float | None = None) -> Callable[[str], bool]:
    """A function that prints one message to stderr, within so many seconds; it needs no descriptor for an import."""
    from cpulaunch.cli import terminal

    if json:
        from cpulaunch.view.message_view import notice_json

        return lambda text: terminal.notify_json(notice_json(text), lead=text[: text[:1] == "\n"], seconds=seconds)
    return lambda text: terminal.notify(text, environ, seconds=seconds)


def read_command_line(tokens: Sequence[str], environ: Mapping[str, str], *, torchrun: bool = False) -> CommandLine:
    """The parsed command line with torchrun's variables (PET_*) as a layer below it. Raises: UsageError."""
    line = parse_command_line(tokens, interpreter=sys.executable, torchrun=torchrun)
    python = worker_python(environ, line.values.get("python"), live=line.sysroot is None)
    if line.program is not None and line.program.interpreter:
        line = replace(line, program=replace(line.program, interpreter=python.path))
    if line.sysroot is None and any(name.startswith("PET_") for name in environ):
        from cpulaunch.cli.pet_variables import with_pet_variables

        line = with_pet_variables(line, environ, interpreter=python.path)
    return replace(line, python=python)


def worker_python(environ: Mapping[str, str], requested: str | None = None, *, live: bool = True) -> WorkerPython:
    """The Python that workers run: the requested one, $PYTHON_EXEC, the active environment's, or this one.

    `requested`: a Python, or the folder of its environment; shells leave the "~" of `--python=~/env`. `live`: workers
    run on this machine.
    Source: torchrun, which reads PYTHON_EXEC too. Raises: NotFoundError or NotExecutableError for the requested one.
    """
    if requested is not None:
        path = find_python(os.path.expanduser(requested), environ) if live else requested
        return WorkerPython(path=path, origin="cli", reason="--python")
    exported = environ.get("PYTHON_EXEC", "")
    if exported:
        try:
            path = os.path.abspath(find_executable(exported, environ))
        except CpulaunchError:
            path = exported
        return WorkerPython(path=path, origin="environment", reason="PYTHON_EXEC")
    if not live or all(environ.get(name) in (None, "", sys.prefix) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")):
        return WorkerPython(path=sys.executable, origin="default", reason="cpulaunch's own environment")
    from cpulaunch.probe.software.interpreters import choose_python

    return choose_python(Root(), environ)


def _may_be_no_script(program: Program | None) -> bool:
    """Whether the target may be a command of cpulaunch, another program, or a script that does not exist."""
    if program is None or program.kind != "script" or program.target == "-":
        return False
    return not (program.target.endswith(".py") and os.path.exists(program.target))


def _print_help(line: CommandLine, environ: Mapping[str, str], *, command: str, dispatch: Dispatch | None) -> int:
    """Exit code 0. Effect: shows the version, or the help on what follows --help. Raises: NotFoundError."""
    if "--version" in line.switches:
        import cpulaunch
        from cpulaunch.cli import terminal

        terminal.print_text(f"cpulaunch {cpulaunch.__version__}")
        return 0
    from cpulaunch.cli.corrections.commands import help_of_command
    from cpulaunch.cli.usage import print_help

    words = () if line.program is None else (line.program.target, *line.program.args)
    other = help_of_command(words)
    if other is not None and dispatch is not None:
        return dispatch(other, environ)
    return print_help(words[0] if words else None, environ, command=command)


def _check_runnable(line: CommandLine, environ: Mapping[str, str]) -> None:
    if line.program is None:
        raise UsageError("no script given", hint="cpulaunch [OPTIONS] SCRIPT [ARGS...]")
    if line.sysroot is not None:
        raise UsageError(
            "cannot run on a captured machine", value=line.sysroot, source="--sysroot", hint="cpulaunch plan"
        )
    if line.python is not None and line.python.origin == "environment":
        check_program(line.program, environ, python=f"Python interpreter ({line.python.reason})")
    else:
        check_program(line.program, environ)


def with_program(line: CommandLine, environ: Mapping[str, str]) -> CommandLine:
    """The command line with its program as a launch runs it. Raises: CpulaunchError if it cannot start."""
    if _may_be_no_script(line.program):
        from cpulaunch.cli.corrections.recognize import recognized

        line = recognized(line, (), environ, only_plan=False)
    _check_runnable(line, environ)
    return line


def check_launch(line: CommandLine, environ: Mapping[str, str]) -> tuple[Host, LaunchPlan]:
    """The host and the plan of a launch that is made later. Raises: CpulaunchError if it cannot be made as it is."""
    _check_runnable(line, environ)
    return _make_plan(line, environ, will_run=False, notify=lambda text: None)


def _make_plan(
    line: CommandLine, environ: Mapping[str, str], *, will_run: bool, notify: Callable[[str], object]
) -> tuple[Host, LaunchPlan]:
    """The host and the plan for it. With `will_run` it waits for DNS and measures what is not known yet."""
    interpreter = line.program.interpreter if line.program else sys.executable
    if line.sysroot is not None:  # A captured machine's plan depends on this process's profiles only.
        environ = {name: environ[name] for name in PROFILE_FOLDER_VARIABLES if name in environ}
    host = probe_host(_root(line), interpreter=interpreter, environ=environ, detail="launch")
    python = None if host.sysroot is not None else line.python
    if python is not None and (python.path != sys.executable or host.torch is None):
        from cpulaunch.probe.software.interpreters import missing_torch, with_plugin_path

        line = replace(line, warnings=(*line.warnings, *missing_torch(host, line.program, python, environ)))
        host = with_plugin_path(host, python.path)
    caches = user_folder(environ, "XDG_CACHE_HOME", ".cache")
    if caches and host.sysroot is None and os.path.exists(f"{caches}/calibration"):
        from cpulaunch.measure.calibration.cache import with_calibration

        host = with_calibration(host, caches)
    request = request_for(line, host, environ)
    if host.gpus and request.distributed:
        host = _with_nvml(host, request)
    if host.sysroot is None and (request.settings.nnodes or (1, 1))[1] > 1:
        from cpulaunch.cli.rendezvous_route import with_route

        request = with_route(request, wait_for_dns=will_run, notify=notify)
    trials = _trials(host, request, environ)
    plan = make_plan(host, request, trials=trials)
    if plan.unmeasured and host.sysroot is None:
        from cpulaunch.cli.collective_timings import collective_measurement

        note = (lambda text: None) if plan.launch.quiet else notify
        measurement = collective_measurement(host, request, plan, environ=environ, measure=will_run, notify=note)
        plan = make_plan(host, request, trials=trials, measurement=measurement)
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
    """The command line merged with the scheduler's variables and the profiles it names or that match the host."""
    typed = [Layer(origin="cli", values=line.values, reasons=line.reasons), *line.layers]
    names: tuple[str, ...] = line.values.get("profile", ())
    folder = user_profile_dir(environ)
    profiles, label = chosen_layers(names, host, config_dir=folder)
    defaults = (TORCHRUN_DEFAULTS,) if line.torchrun else ()
    layers = (*typed, *_scheduler_layers(typed, host, environ), *profiles, *defaults)
    if any("optimize" in layer.values for layer in layers):
        from cpulaunch.plan.levels import with_level

        layers, label = with_level(layers, host)
    request = merge(
        layers,
        program=line.program,
        profile=label,
        environ=environ,
        warnings=(*line.warnings, *profile_warnings(names, host, config_dir=folder)),
        notices=line.notices,
    )
    runs_python = host.sysroot is None and line.program is not None and line.program.kind != "command"
    return replace(request, python=line.python) if runs_python else request


def _scheduler_layers(typed: Sequence[Layer], host: Host, environ: Mapping[str, str]) -> tuple[Layer, ...]:
    """The layer of the scheduler that started this process; empty if none did, or its variables do not apply."""
    chosen = {name: value for layer in reversed(typed) for name, value in layer.values.items()}
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
    """The text of the file $PBS_NODEFILE; None if it cannot be read, as on all hosts but the job's first."""
    from cpulaunch.system.files.reading import read_start

    try:
        return read_start(environ.get("PBS_NODEFILE", ""), max_bytes=1 << 24, links=True).decode("utf-8", "replace")
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
    from cpulaunch.view.hidden_values import hidden_names, without_values

    shown = without_values(plan, hidden_names(line))
    if "--json" in line.switches:
        terminal.print_json(plan_view.plan_json(shown))
        return
    brief = "--brief" in line.switches
    if line.emit is not None:
        terminal.print_text(_emit(plan, host, line), end="")
    else:
        view = plan_view.brief_text if brief else plan_view.plan_text
        terminal.print_text(view(shown, host, width=terminal.width(), color=terminal.color(environ)))
    for warning in shown.warnings if brief or line.emit is not None else ():
        terminal.notify(f"warning: {warning}", environ)


def _notes(plan: LaunchPlan, line: CommandLine) -> list[str]:
    """What is worth knowing of a launch, and no warning."""
    from cpulaunch.cli.terminal import has_input

    notes = [*line.notices, *([line.python.notice] if line.python and line.python.notice else [])]
    if len(plan.workers) > 1 and plan.launch.stdin is None and has_input():
        notes.append(f"standard input is not passed to {len(plan.workers)} workers; --stdin 0 passes it to worker 0")
    return notes


def _emit(plan: LaunchPlan, host: Host, line: CommandLine) -> str:
    """The plan in the format that --emit names. Raises: UsageError."""
    from cpulaunch.emit.formats import emitted_text
    from cpulaunch.view.hidden_values import hidden_names, without_variables

    hidden = hidden_names(line)
    return emitted_text(plan, host, without_variables(line, hidden), hidden=hidden)


def _import_end(plan: LaunchPlan) -> None:
    """Effect: what follows a launch is imported: at its end the package may have been replaced or removed."""
    import cpulaunch.launch.supervision.failure_text

    if plan.job is not None:
        import json  # noqa: F401  # For exceptions that ranks record.
    if plan.launch.watched:
        import cpulaunch.cli.report
        import cpulaunch.view.hidden_values
    if plan.launch.html is not None:
        import cpulaunch.html.run_page
        import cpulaunch.view.machine_svg  # noqa: F401


def _launch(
    plan: LaunchPlan,
    host: Host,
    line: CommandLine,
    environ: Mapping[str, str],
    *,
    notify: Callable[[str], bool],
) -> int:
    """The exit code of the launch. Effect: runs the plan and reports on it."""
    from cpulaunch.cli import terminal

    if line.program is not None:
        check_shareable(line.program, workers=len(plan.workers))
    for note in () if plan.launch.quiet else _notes(plan, line):
        notify(note)
    for warning in plan.warnings:
        notify(f"warning: {warning}")
    if "--verbose" in line.switches:
        from cpulaunch.view import plan_view
        from cpulaunch.view.hidden_values import hidden_names, without_values

        shown = without_values(plan, hidden_names(line))
        view = plan_view.brief_text if "--brief" in line.switches else plan_view.plan_text
        terminal.write_stderr(view(shown, host, width=terminal.width(), color=False))
    before = None
    if plan.launch.reported:
        from cpulaunch.cli.report import check_reports

        before = check_reports(plan)
    events = host.limits.memory_events and f"/{host.limits.memory_events}"
    during = notifier(environ, json="--json" in line.switches, seconds=terminal.DURING_SECONDS)
    result = launch(plan, environ=environ, memory_events=events, notify=during, on_started=lambda: _import_end(plan))
    seconds = terminal.NOTICE_SECONDS if result.end_requested else None
    notify = notifier(environ, json="--json" in line.switches, seconds=seconds)
    if result.exit_code:
        from cpulaunch.launch.supervision.failure_text import summary

        lines = ["", *summary(result)] if result.inside_line else summary(result)
        if terminal.write_stderr("\n".join(lines), seconds=seconds):
            result = replace(result, inside_line=False)
    if not plan.launch.watched:
        return result.exit_code
    from cpulaunch.cli.report import finish_watched_launch
    from cpulaunch.view.hidden_values import hidden_names, without_values

    return finish_watched_launch(without_values(plan, hidden_names(line)), host, result, before, environ, notify=notify)
