"""The commands probe, profiles, doctor and check; arguments.py parses run, plan and torchrun."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from cpulaunch.cli import terminal
from cpulaunch.cli.run import notifier, read_command_line, request_for, worker_python
from cpulaunch.cli.sysroot import machine_root
from cpulaunch.probe import Root, probe_host
from cpulaunch.probe.software.interpreters import with_plugin_path
from cpulaunch.profile.file import profile_errors, read_profile
from cpulaunch.profile.selection import find_profile, user_folder, user_profile_dir, user_profiles
from cpulaunch.records.errors import CpulaunchError, UsageError
from cpulaunch.records.host import CalibrationFigure, Host, size_text
from cpulaunch.records.request import WorkerPython
from cpulaunch.system.files.writing import write_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.measure.calibration.calibrate import RunResult

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=HELP_OPTIONS
)
profiles = typer.Typer(rich_markup_mode=None, help="List, show or validate profiles.")
app.add_typer(profiles, name="profiles")

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Sysroot = Annotated[
    str, typer.Option(metavar="DIR", help="Read the captured machine under DIR instead of this machine.")
]


def run_app(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of probe, profiles, doctor or check. Raises: UsageError for an invalid command line."""
    try:
        words = [*arguments, "--help"] if list(arguments) == ["profiles"] else list(arguments)
        code = app(words, prog_name="cpulaunch", standalone_mode=False, obj=environ)
    except TyperException as error:
        raise _usage_error(error, arguments[0]) from None
    return code if isinstance(code, int) else 0


def _usage_error(error: TyperException, command: str) -> UsageError:
    """typer's error in the words that other commands have."""
    hint = f"cpulaunch {command} --help"
    option = getattr(error, "option_name", None)
    known = getattr(error, "possibilities", None)  # None: the option exists.
    if option is not None and known is not None:
        return UsageError("unknown option", value=option, hint=f"did you mean {' or '.join(known)}?" if known else hint)
    message = error.format_message().rstrip(".").replace(f"Option {option!r}", str(option))
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def host_at(sysroot: str, context: typer.Context, python: WorkerPython | None = None) -> Host:
    """The facts about this machine as its workers' Python sees it, or about the captured one under `sysroot`."""
    root = machine_root(sysroot)
    python = python or worker_python(context.obj, live=root.live)
    return probe_host(root, interpreter=python.path, environ=context.obj if root.live else {}, detail="full")


@app.command()
def probe(
    context: typer.Context,
    json: Json = False,
    sysroot: Sysroot = "/",
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Write the map as an SVG file.")] = None,
) -> None:
    """Show a machine: cores, caches, NUMA nodes, limits, libraries."""
    from cpulaunch.measure.calibration.cache import with_calibration
    from cpulaunch.view.host_view import probe_json, probe_text
    from cpulaunch.view.machine_svg import machine_svg

    host = host_at(sysroot, context)
    caches = user_folder(context.obj, "XDG_CACHE_HOME", ".cache")
    if caches and host.sysroot is None:
        host = with_calibration(host, caches)
    if svg is not None:
        _write(svg, machine_svg(host))
    if json:
        terminal.print_json(probe_json(host))
    elif svg is None:
        terminal.print_text(probe_text(host, width=terminal.width(), color=terminal.color(context.obj)))


def _write(path: str, text: str) -> None:
    try:
        write_output(path, text.encode(), mode=0o666)
    except OSError as error:
        raise CpulaunchError(
            "cannot write the SVG file", value=f"{path}: {error.strerror}", source="--svg", hint="give a writable path"
        ) from None


@app.command()
def doctor(
    context: typer.Context,
    json: Json = False,
    sysroot: Sysroot = "/",
    python: Annotated[str | None, typer.Option(metavar="PATH", help="Check this Python, or environment.")] = None,
) -> int:
    """Check this machine and its Python environment; for every problem, show why it matters and how to fix it."""
    from cpulaunch.doctor.report import doctor_report

    root = Root(sysroot)
    chosen = worker_python(context.obj, python, live=root.live)
    host = host_at(sysroot, context, chosen)
    if root.live:
        host = with_plugin_path(host, chosen.path)
    report = doctor_report(host, root=root, python=chosen, environ=context.obj)
    if json:
        terminal.print_json(report.as_json())
    else:
        terminal.print_text(report.as_text(width=terminal.width(), color=terminal.color(context.obj)))
    return report.exit_code


@app.command()
def check(  # noqa: PLR0913  # one parameter for each option
    context: typer.Context,
    paths: Annotated[list[str] | None, typer.Argument(metavar="PATH")] = None,
    json: Json = False,
    output_format: Annotated[
        str, typer.Option("--format", metavar="text|json|sarif|github", help="Print findings in this format.")
    ] = "text",
    fix: Annotated[bool, typer.Option("--fix", help="Change what can be changed without other results.")] = False,
    unsafe_fixes: Annotated[
        bool, typer.Option("--unsafe-fixes", help="Change also what alters checkpoints or random numbers.")
    ] = False,
    select: Annotated[str, typer.Option(metavar="IDS", help="Apply these rules only.")] = "",
    ignore: Annotated[str, typer.Option(metavar="IDS", help="Leave these rules out.")] = "",
    explain: Annotated[str | None, typer.Option(metavar="ID", help="Explain a rule, with examples.")] = None,
) -> int:
    """Find in a program's source what makes it slow: where, why, and the fix."""
    from cpulaunch.check.output.command import checked, explained, words

    if explain is not None:
        terminal.print_text(explained(explain, width=terminal.width()))
        return 0
    text, code = checked(
        paths or (),
        output="json" if json else output_format,
        rules=(words(select), words(ignore)),
        fix="unsafe" if unsafe_fixes else "safe" if fix else "none",
        page=(terminal.width(), terminal.color(context.obj)),
        notify=notifier(context.obj, json=json),
    )
    terminal.print_text(text)
    return code


@app.command()
def calibrate(
    context: typer.Context,
    json: Json = False,
    python: Annotated[str | None, typer.Option(metavar="PATH", help="Measure this Python's torch.")] = None,
) -> int:
    """Measure for seconds what this machine does with its torch; `auto` choices and reports use the figures."""
    from functools import partial

    from cpulaunch.measure.calibration.cache import FILE, write_calibration
    from cpulaunch.measure.calibration.calibrate import calibration_of
    from cpulaunch.view.calibration_view import calibration_json, calibration_text

    chosen = worker_python(context.obj, python)
    host = host_at("/", context, chosen)
    if host.torch is None:
        raise CpulaunchError("cannot calibrate: no torch", value=chosen.path, hint="--python PATH names another Python")
    all_reduce = partial(_all_reduce, host, context.obj, chosen.path)
    found = calibration_of(host, python=chosen.path, environ=context.obj, more=(all_reduce,))
    folder = user_folder(context.obj, "XDG_CACHE_HOME", ".cache")
    if folder and found.figures:
        write_calibration(f"{folder}/{FILE}", host, found)
    if json:
        terminal.print_json(calibration_json(found, host))
    else:
        terminal.print_text(calibration_text(found, host))
        for failure in found.failures:
            terminal.notify(f"warning: {failure}", context.obj)
    return 0 if found.figures else CpulaunchError.exit_code


JOB = ("--nproc-per-node", "2", "--dist-backend", "auto", "-m", "cpulaunch")
"""The job whose ranks an all-reduce is measured among: its program never starts."""


def _silent(text: str) -> None:
    """Effect: none; the figures are printed with the others."""


def _all_reduce(host: Host, environ: Mapping[str, str], python: str) -> "RunResult":
    """Microseconds of all-reduces between two ranks, which --dist-backend auto uses too; or why there are none.

    What others disturbed is not remembered for --dist-backend auto.
    """
    from cpulaunch.cli.collective_timings import collective_measurement
    from cpulaunch.measure.calibration.calibrate import DisturbanceWatch, RunResult
    from cpulaunch.plan.planner import make_plan

    try:
        request = request_for(read_command_line(("--python", python, *JOB), environ), host, environ)
        plan = make_plan(host, request)
    except CpulaunchError as error:
        return RunResult(figures=(), failures=(f"all-reduce: {error}",))
    watch = DisturbanceWatch(host.limits.budget)
    measured = collective_measurement(
        host, request, plan, environ=environ, measure=lambda: not watch.reasons(), notify=_silent
    )
    if measured is None or measured.failure is not None:
        return RunResult(figures=(), failures=(f"all-reduce: {measured.failure if measured else 'unknown'}",))
    figures = tuple(
        CalibrationFigure("all-reduce", f"{backend}, {size_text(each.size_bytes)}", 1e6 * seconds)
        for each in measured.timings
        for backend, seconds in (("gloo", each.gloo_seconds), ("ccl", each.ccl_seconds))
    )
    return RunResult(figures=figures, failures=(), reasons=watch.reasons())


@profiles.command("list")
def list_profiles(context: typer.Context, json: Json = False, sysroot: Sysroot = "/") -> None:
    """List all profiles and mark those that apply to this machine."""
    from cpulaunch.view.profile_view import list_json, list_text

    host, own = host_at(sysroot, context), user_profiles(user_profile_dir(context.obj))
    if json:
        terminal.print_json(list_json(host, own=own))
    else:
        terminal.print_text(list_text(host, own=own, width=terminal.width()))


@profiles.command("show")
def show_profile(context: typer.Context, name: str, json: Json = False) -> None:
    """Show a profile: every setting with its reason, source and date."""
    from cpulaunch.view.profile_view import show_json, show_text

    profile = find_profile(name, config_dir=user_profile_dir(context.obj))
    if json:
        terminal.print_json(show_json(profile))
    else:
        terminal.print_text(show_text(profile, width=terminal.width()))


@profiles.command("validate")
def validate_profile(context: typer.Context, file: str, json: Json = False) -> int:
    """Check a profile file; report the file, line and key of every error."""
    from cpulaunch.view.profile_view import validate_json, validate_text

    errors = profile_errors(file)
    if json:
        terminal.print_json(validate_json(file, errors or read_profile(file)))
        return errors[-1].exit_code if errors else 0
    for error in errors[:-1]:
        terminal.notify(f"error: {error}", context.obj)
    if errors:
        raise errors[-1]
    terminal.print_text(validate_text(file, read_profile(file)))
    return 0
