"""The page and the pictures that a search for settings ends with."""

from __future__ import annotations

from cpulaunch.charts.tune_charts import options_text, tune_charts
from cpulaunch.cli.measuring.outputs import write_outputs
from cpulaunch.measure.tuning.space import options_of
from cpulaunch.records.errors import CpulaunchError

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

    Json = Mapping[str, Any]


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
