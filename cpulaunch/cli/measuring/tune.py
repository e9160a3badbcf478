"""The command tune: check the options, search, write what is best to a profile, and say what was found."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from datetime import UTC, datetime

import cpulaunch
from cpulaunch.cli.help.commands import command_named
from cpulaunch.cli.measuring.outputs import check_outputs
from cpulaunch.cli.measuring.own_options import shown_words
from cpulaunch.cli.measuring.progress import ProgressLine
from cpulaunch.cli.measuring.tune_arguments import parse_tune
from cpulaunch.cli.measuring.tune_outcome import LastWorkers, check_save, finished_result, write_tune_outputs
from cpulaunch.cli.measuring.tune_search import Planner, studies_folder, study_identity, tuned_program
from cpulaunch.measure.execution import plain_command, take_sample
from cpulaunch.measure.measuring_process import measuring_process
from cpulaunch.measure.samples import MetricChoice, Sample, Side
from cpulaunch.measure.tuning.outcome.past import changes_since, past_configurations, past_studies
from cpulaunch.measure.tuning.outcome.result import TuneResult, result_json
from cpulaunch.measure.tuning.outcome.result_text import result_text
from cpulaunch.measure.tuning.outputs.output_file import OutputFile
from cpulaunch.measure.tuning.space import options_of
from cpulaunch.measure.tuning.tuner import TuneMeans, Tuner
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import RATE_VARIABLE
from cpulaunch.view.hidden_values import hidden_names
from cpulaunch.view.text import painter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpulaunch.cli.measuring.services import Services
    from cpulaunch.cli.measuring.tune_search import TuneProgram
    from cpulaunch.measure.execution import LaunchSetup
    from cpulaunch.measure.tuning.identity import StudyIdentity
    from cpulaunch.measure.tuning.space import Configuration

COMMAND = command_named("tune")
INTERRUPTED = 130
SEED = 1
EXTRA = "optuna"


def tune(arguments: Sequence[str], services: Services) -> int:
    """The exit code of `tune`. Effect: launches the program, writes the study and the profile.

    Raises: CpulaunchError, before anything is launched, or if the program fails under the default.
    """
    line = parse_tune(arguments, services.value_count)
    if line.help:
        return services.print_help(COMMAND)
    if importlib.util.find_spec(EXTRA) is None:
        raise CpulaunchError("tune needs optuna, which is not installed", hint="pip install 'cpulaunch[tune]'")
    line = replace(line, files=check_outputs(line.files))
    line = replace(line, saves_directly=check_save(line.save, services.environ))
    program = tuned_program(line, services, python=sys.executable)
    planner = Planner(program, services)
    identity = study_identity(program, planner)
    workers = LastWorkers()
    rate = line.goal.rate
    environ = {**services.environ, **({} if rate is None else {RATE_VARIABLE: repr(rate)})}
    with measuring_process(services.notify, environ) as setup:
        setup = replace(setup, python=program.python, budget=program.host.limits.budget)
        result = _searched(program, planner, identity, services, setup=setup, workers=workers)
    result = finished_result(result, program, planner, services)
    data = result_json(result)
    if line.json:
        services.print_json(data)
    else:
        strong = painter("bold", color=services.color)
        services.print_text(result_text(result, width=services.width, strong=strong))
    failure = write_tune_outputs(result, data, program, planner, services, workers)
    return INTERRUPTED if result.found.ended == "interrupted" else failure


def _searched(
    program: TuneProgram,
    planner: Planner,
    identity: StudyIdentity,
    services: Services,
    *,
    setup: LaunchSetup,
    workers: LastWorkers,
) -> TuneResult:
    """What was found. Effect: launches the program, and writes the study."""
    root = studies_folder(services.environ)
    folder = os.path.join(root, identity.machine_key, identity.key)
    from cpulaunch.measure.tuning.database import database_errors
    from cpulaunch.measure.tuning.study import Study, make_folder

    started = datetime.now(UTC).isoformat(timespec="seconds")
    past = past_studies(root)
    warnings = tuple(f"since the last search for this program: {text}" for text in changes_since(past, identity))
    for text in warnings:
        services.notify(f"warning: {text}; the search begins anew")
    folder = make_folder(folder)
    with database_errors(folder):
        study = Study(folder, identity.space, seed=SEED, fresh=program.line.fresh)
    output = None if program.line.output is None else OutputFile(program.line.output)
    progress = ProgressLine(services.environ, width=services.width)
    means = TuneMeans(
        space=identity.space,
        take=_launcher(program, setup, output, workers),
        effect=planner.effect,
        clock=lambda: time.monotonic() - setup.child.pauses.seconds,
        progress=progress.show,
        seed=int.from_bytes(os.urandom(4)),
        written=None if output is None else output.outputs,
        levels=services.levels(program.host),
        past=past_configurations(past, identity, identity.space),
    )
    try:
        with database_errors(folder):
            found = Tuner(means, program.line.limits, program.line.goal).run(study)
    finally:
        progress.clear()
        study.close()
    return TuneResult(
        identity=identity,
        options=tuple(shown_words(program.line.options, hidden_names(program.parsed))),
        goal=program.line.goal,
        limits=program.line.limits,
        found=found,
        version=cpulaunch.__version__,
        host=os.uname().nodename,
        started=started,
        study=folder,
        warnings=warnings,
    )


def _launcher(
    program: TuneProgram, setup: LaunchSetup, output: OutputFile | None, workers: LastWorkers
) -> Callable[[Configuration | None, MetricChoice | None, float], Sample]:
    """A function that launches a configuration, or the reference for None, and returns its sample."""

    def side(configuration: Configuration | None) -> Side:
        if configuration is not None:
            return Side(label="", options=(*program.options, *options_of(configuration)))
        if program.is_job:  # Python alone starts no ranks.
            return Side(label="", options=("-O0", *program.options))
        return Side(label="", plain=True)

    environ = {**setup.child.environ, **dict(program.parsed.values.get("env", ()))}
    plain = () if program.parsed.program is None else plain_command(program.parsed.program)
    plain_setup = replace(setup, child=replace(setup.child, environ=environ), plain=plain)

    def take(configuration: Configuration | None, choice: MetricChoice | None, limit_seconds: float) -> Sample:
        chosen = side(configuration)
        if output is not None:
            output.mark()
        sample = take_sample(
            chosen,
            program.line.program,
            choice=choice or MetricChoice(),
            limit_seconds=limit_seconds,
            setup=plain_setup if chosen.plain else setup,
        )
        if configuration is not None:
            workers.keep(configuration, sample)
        return sample

    return take
