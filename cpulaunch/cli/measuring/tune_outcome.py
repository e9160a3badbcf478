"""The end of a tuning: the profile, the command line that uses it, the default's and the winner's plans, the page."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime

from cpulaunch.charts.tune_charts import options_text, tune_charts
from cpulaunch.cli.measuring.outputs import write_outputs
from cpulaunch.cli.measuring.own_options import shown_words
from cpulaunch.measure.comparison_text import metric_label
from cpulaunch.measure.tuning.outcome.past import write_about
from cpulaunch.measure.tuning.outcome.result import kept_ratio
from cpulaunch.measure.tuning.outcome.tuned_profile import (
    arguments_digest,
    in_profile,
    on_command_line,
    one_line,
    profile_name,
    profile_text,
    shown_program,
)
from cpulaunch.measure.tuning.space import options_of
from cpulaunch.profile.file import read_profile
from cpulaunch.profile.selection import user_profile_dir
from cpulaunch.records.errors import CpulaunchError, UsageError
from cpulaunch.records.record import replace
from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.writing import check_output, write_output
from cpulaunch.view.hidden_values import hidden_names, without_values
from cpulaunch.view.plan_view import plan_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from cpulaunch.cli.measuring.services import Services
    from cpulaunch.cli.measuring.tune_search import Planner, TuneProgram
    from cpulaunch.html.sides import PageSide
    from cpulaunch.measure.samples import Sample
    from cpulaunch.measure.tuning.outcome.result import TuneResult
    from cpulaunch.measure.tuning.space import Configuration
    from cpulaunch.system.files.special import FileId

    Json = Mapping[str, Any]

TOOL = "cpulaunch tune"
UNCONFIRMED = "not confirmed"


def finished_result(result: TuneResult, program: TuneProgram, planner: Planner, services: Services) -> TuneResult:
    """The result with its plans, profile and command. Effect: writes the profile, and what the study is about."""
    kept = result.kept
    result = replace(result, default_plan=_plan_data(program, planner))
    _remember(result, services)
    if kept is None:
        return result
    result = replace(result, plan=_plan_data(program, planner, *options_of(kept)))
    if not in_profile(kept):
        return replace(result, command=_command(program, *options_of(kept)))
    name, path = _place(program, services, result.identity.folder, confirmed=not result.unconfirmed)
    failure = _save(path, result, kept, direct=program.line.saves_directly)
    if failure is not None:
        services.notify(f"warning: {failure}")
        text = str(failure.summary)
        return replace(result, command=_command(program, *options_of(kept)), warnings=(*result.warnings, text))
    result = replace(result, profile=path)
    found = path if _is_path(name) and "," not in path else name  # The current folder may be gone.
    if planner.effect_of(*_with_profile(found, program, kept)) == planner.effect(kept):
        return replace(result, command=_command(program, *_with_profile(name, program, kept)))
    text = "variables or profiles here override a part of the profile: the command line gives the options instead"
    return replace(result, command=_command(program, *options_of(kept)), warnings=(*result.warnings, text))


def _with_profile(profile: str, program: TuneProgram, kept: Configuration) -> tuple[str, ...]:
    """The words for a launch with this profile above those of the search, and with what no profile holds."""
    chosen = ",".join((profile, *program.parsed.values.get("profile", ())))
    return ("--profile", chosen, *options_of(on_command_line(kept)))


def _plan_data(program: TuneProgram, planner: Planner, *words: str) -> dict[str, Any] | None:
    try:
        plan = planner.plan(*words)
    except CpulaunchError:
        return None
    return plan_json(without_values(plan, hidden_names(program.parsed)))


def _remember(result: TuneResult, services: Services) -> None:
    """Effect: later searches find this one."""
    winner = result.found.final.winner
    try:
        write_about(result.study, result.identity, {} if winner is None else winner.configuration)
    except OSError as error:
        services.notify(f"warning: cannot write what the study is about: {result.study}: {error.strerror}")


def _command(program: TuneProgram, *words: str) -> tuple[str, ...]:
    """The command line with these words, in which --env's values are hidden."""
    fixed = shown_words(program.line.options, hidden_names(program.parsed))
    return ("cpulaunch", *fixed, *words, *program.line.program)


def _place(program: TuneProgram, services: Services, here: str, *, confirmed: bool) -> tuple[str, str]:
    """What --profile is to be given, and the path of the file.

    `here`: the current folder at the start, which the program may have removed.
    """
    folder = user_profile_dir(services.environ)
    if program.line.save is not None:
        return program.line.save, _saved_path(program.line.save, folder, here)
    target = program.line.program[-1] if program.parsed.program is None else program.parsed.program.target
    name = profile_name(target)
    if folder is None:
        return f"./{name}.toml", os.path.join(here, f"{name}.toml")
    number = 1
    while not _may_write(shown := name if number == 1 else f"{name}-{number}", program, folder, confirmed=confirmed):
        number += 1
    return shown, os.path.join(folder, f"{shown}.toml")


def _saved_path(wanted: str, folder: str | None, here: str) -> str:
    """The path of the file that --save names. `folder`: that of the user's profiles; None: there is none."""
    if _is_path(wanted) or folder is None:
        return os.path.normpath(os.path.join(here, wanted))
    return os.path.join(folder, f"{wanted}.toml")


def _is_path(profile: str) -> bool:
    """Whether --profile takes this for a file, and not for the name of a profile."""
    return "/" in profile or profile.endswith(".toml")


def check_save(wanted: str | None, environ: Mapping[str, str]) -> FileId | None:
    """The pipe or device where --save says; None: there is none.

    Raises: UsageError if --save names no file that can be made, or one that no search has written.
    """
    if wanted is None:
        return None
    path = _saved_path(wanted, user_profile_dir(environ), os.getcwd())
    if os.path.isdir(path):
        raise UsageError("--save names a directory", value=path, hint="--save NAME, or --save FILE.toml")
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError("--save names a file that cannot be written", value=path, hint="name another one")
    if os.path.isfile(path) and (_provenance_in(path) or {}).get("tool") != TOOL:
        raise UsageError("--save names a file that no search has written", value=path, hint="name another one")
    try:
        return check_output(path) if os.path.exists(path) and not os.path.isfile(path) else None
    except OSError as error:
        shown = f"{path} ({error.strerror})"
        raise UsageError("--save names a file that cannot be written", value=shown, hint="name another one") from None


def _may_write(name: str, program: TuneProgram, folder: str, *, confirmed: bool) -> bool:
    """Whether there is no profile of this name but one of an earlier search for this program, of which no more is known
    than of this one."""
    path = os.path.join(folder, f"{name}.toml")
    found = _provenance_in(path)
    if found is None:
        return not os.path.lexists(path)
    is_own = found.get("tool") == TOOL and found.get("program") == one_line(shown_program(program.line.program))
    return is_own and (confirmed or found.get("samples") == UNCONFIRMED)


def _provenance_in(path: str) -> dict[str, str] | None:
    """How the profile at this path was measured; None if there is none that can be read."""
    try:
        return dict(read_profile(path).provenance)
    except CpulaunchError:
        return None


def _save(path: str, result: TuneResult, kept: Configuration, *, direct: FileId | None) -> CpulaunchError | None:
    """The error if the profile cannot be written.

    Effect: writes it, in place of a pipe too unless it is `direct`; what is not confirmed replaces only its like.
    """
    if result.unconfirmed and os.path.lexists(path) and (_provenance_in(path) or {}).get("samples") != UNCONFIRMED:
        return CpulaunchError("the profile was not replaced: what was found is not confirmed", value=path)
    text = _profile(result, kept)
    try:
        os.close(open_folder(os.path.dirname(path), make=0o700))
        write_output(path, text.encode(errors="backslashreplace"), mode=0o666, direct=direct)
    except OSError as error:
        return CpulaunchError("the profile cannot be written", value=f"{path}: {error.strerror}", hint="--save FILE")
    return None


def _profile(result: TuneResult, kept: Configuration) -> str:
    ratio = kept_ratio(result) or 1.0
    winner = result.found.final.winner
    estimate = None if winner is None else winner.estimate
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        reason = f"{ratio:.2f} times as good as the default, with the others of this profile"
        interval, samples = f"{estimate.low:.3f}-{estimate.high:.3f}", f"{estimate.rounds} rounds with the default"
        summary = f"{ratio:.2f} times as good as the default"
    else:
        reason, interval, samples = "best so far in a search that was interrupted", "", UNCONFIRMED
        summary = "best so far in a search that was interrupted, not confirmed"
    name = os.path.basename(shown_program(result.identity.program))
    return profile_text(
        kept,
        summary=f"found by {TOOL} for {name}: {summary}",
        reason=reason,
        provenance=_provenance(result) | {"speedup": f"{ratio:.3f}", "interval": interval, "samples": samples},
        date=datetime.now(UTC).date().isoformat(),
    )


def _provenance(result: TuneResult) -> dict[str, str]:
    identity, found = result.identity, result.found
    return {
        "tool": TOOL,
        "program": shown_program(identity.program),
        "arguments": arguments_digest(identity.program),
        "options": shlex.join(result.options),
        **identity.machine,
        **identity.versions,
        "metric": "" if found.choice is None else metric_label(found.choice),
        "max_error": "" if result.goal.max_error is None else f"{result.goal.max_error:g}",
    }


class LastWorkers:
    """The workers of each configuration's last launch, as its report has them."""

    def __init__(self) -> None:
        self._workers: dict[tuple[str, ...], list[Any]] = {}

    def keep(self, configuration: Configuration, sample: Sample) -> None:
        """Effect: remembers the workers of a launch that succeeded."""
        if sample.report is not None and sample.failure is None:
            self._workers[options_of(configuration)] = list(sample.report.get("workers") or ())

    def of(self, configuration: Configuration) -> list[Any]:
        """The workers; none if no launch of this search reported any."""
        return self._workers.get(options_of(configuration), [])


def write_tune_outputs(
    result: TuneResult, data: Json, program: TuneProgram, planner: Planner, services: Services, workers: LastWorkers
) -> int:
    """Zero, or the exit code of what could not be written. Effect: writes the page and the pictures asked for."""

    def page() -> str:
        from cpulaunch.html.sides import PageMachine
        from cpulaunch.html.tune_page import tune_page

        host = program.host
        machine = PageMachine(name=host.cpu.model_name or host.arch, calibration=host.calibration)
        sides = [_side("the default", data["default_plan"], program, planner, {}, workers)]
        if result.kept is not None and data["winner"] is not None:
            label, plan = options_text(data["winner"]["options"]), data["winner"]["plan"]
            sides.append(_side(label, plan, program, planner, result.kept, workers))
        return tune_page(data, machine=machine, sides=sides)

    return write_outputs(
        program.line.files,
        services,
        page=page,
        charts=lambda: tune_charts(data),
        title=f"cpulaunch tune: {' '.join(program.line.program)}",
    )


def _side(
    label: str,
    plan: Json | None,
    program: TuneProgram,
    planner: Planner,
    configuration: Configuration,
    workers: LastWorkers,
) -> PageSide:
    from cpulaunch.html.sides import PageSide
    from cpulaunch.view.machine_svg import machine_drawing
    from cpulaunch.view.plan_view import core_owners

    try:
        owners = core_owners(planner.plan(*options_of(configuration)))
    except CpulaunchError:
        owners = {}
    core_map = machine_drawing(program.host, owners) if owners else None
    return PageSide(label=label, plan=plan, core_map=core_map, workers=workers.of(configuration))
