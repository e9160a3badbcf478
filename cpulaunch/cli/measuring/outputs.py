"""The page and the pictures that a measurement ends with."""

from __future__ import annotations

from types import MappingProxyType

from cpulaunch.records.record import record, replace
from cpulaunch.system.files.outputs import PAGE, PICTURES, Output, check_path, save_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cpulaunch.charts.model import Chart
    from cpulaunch.cli.measuring.services import Services
    from cpulaunch.html.sides import PageMachine, PageSide
    from cpulaunch.plots.picture import PictureKind
    from cpulaunch.records.command_line import CommandLine
    from cpulaunch.records.errors import CpulaunchError
    from cpulaunch.system.files.special import FileId

NONE: Mapping[str, FileId | None] = MappingProxyType({})


@record
class OutputFiles:
    """Where to write the page and the pictures; None: nowhere. `direct`: the pipes or devices that were there before.

    Others are replaced: the program may have put them there.
    """

    html: str | None = None
    svg: str | None = None
    png: str | None = None
    direct: Mapping[str, FileId | None] = NONE

    @property
    def pictures(self) -> tuple[tuple[PictureKind, str], ...]:
        """The kinds and paths of the pictures."""
        kinds: tuple[tuple[PictureKind, str | None], ...] = (("svg", self.svg), ("png", self.png))
        return tuple((kind, path) for kind, path in kinds if path is not None)


@record
class PageFacts:
    """The machine and the sides of a page, as their plans have them."""

    machine: PageMachine
    sides: tuple[PageSide, ...]


def output_files(given: Mapping[str, str]) -> OutputFiles:
    """The files that a command's options name."""
    return OutputFiles(html=given.get("--html"), svg=given.get("--svg"), png=given.get("--png"))


def check_outputs(files: OutputFiles) -> OutputFiles:
    """The files, with the paths of pipes and devices.

    Raises: CpulaunchError if a file cannot be written, or what draws pictures is missing.
    """
    found = [] if files.html is None else [(PAGE, files.html)]
    for kind, path in files.pictures:
        from cpulaunch.plots.picture import check_plots

        check_plots(f"--{kind}")
        found.append((PICTURES[kind], path))
    return replace(files, direct={path: check_path(output, path) for output, path in found})


def write_outputs(
    files: OutputFiles,
    services: Services,
    *,
    page: Callable[[], str],
    charts: Callable[[], Sequence[Chart]],
    title: str,
) -> int:
    """Zero, or the exit code of what could not be written. Effect: writes the files, and says so."""
    code = 0
    for output, path, error in _written(files, page, charts, title):
        services.notify(f"{output.name}: {path}" if error is None else f"error: {error}")
        code = code or (0 if error is None else error.exit_code)
    return code


def _written(
    files: OutputFiles, page: Callable[[], str], charts: Callable[[], Sequence[Chart]], title: str
) -> Iterator[tuple[Output, str, CpulaunchError | None]]:
    if files.html is not None:
        yield PAGE, files.html, _saved(PAGE, files.html, page(), files)
    for kind, path in files.pictures:
        from cpulaunch.plots.picture import picture

        yield PICTURES[kind], path, _saved(PICTURES[kind], path, picture(charts(), title=title, kind=kind), files)


def _saved(output: Output, path: str, content: str | bytes, files: OutputFiles) -> CpulaunchError | None:
    return save_output(output, path, content, direct=files.direct[path])


def page_facts(services: Services, sides: Sequence[tuple[str, CommandLine | None]]) -> PageFacts:
    """What is known of sides before they are measured, by their labels and command lines; None: Python alone."""
    from cpulaunch.html.sides import PageMachine, PageSide
    from cpulaunch.view.hidden_values import hidden_names, without_values
    from cpulaunch.view.machine_svg import machine_drawing
    from cpulaunch.view.plan_view import core_owners, plan_json

    machine, found = PageMachine(name="?"), []
    for label, line in sides:
        if line is None:
            found.append(PageSide(label=label))
            continue
        host, plan = services.host_and_plan(line)
        owners = core_owners(plan)
        core_map = machine_drawing(host, owners) if owners else None
        shown = plan_json(without_values(plan, hidden_names(line)))
        found.append(PageSide(label=label, plan=shown, core_map=core_map))
        machine = PageMachine(name=host.cpu.model_name or host.arch, calibration=host.calibration)
    return PageFacts(machine=machine, sides=tuple(found))
