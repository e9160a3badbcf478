"""A picture of charts, as the content of a file. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import warnings
from contextlib import contextmanager

from cpulaunch.charts.model import BarChart
from cpulaunch.plots.panels import BAR_INCHES, POINTS_INCHES, STYLE, TITLE_INCHES, draw_bars, draw_points
from cpulaunch.records.errors import CpulaunchError, escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Literal, TypeAlias

    from cpulaunch.charts.model import Chart

    PictureKind: TypeAlias = Literal["svg", "png"]

WIDTH_INCHES = 9.0
DOTS_PER_INCH = 120
MAX_TITLE = 100

FOLDERS = ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HOME")
"""Where matplotlib keeps its fonts and its settings: relative to the current folder, if not absolute."""


def check_plots(option: str) -> None:
    """Raises: CpulaunchError if matplotlib, which draws what this option asks for, is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CpulaunchError(
            f"{option} needs matplotlib", value="it is not installed", hint="pip install 'cpulaunch[plots]'"
        )


def picture(charts: Sequence[Chart], *, title: str, kind: PictureKind) -> bytes:
    """The charts below one another, as the content of an SVG or PNG file, the same for the same charts.

    Raises: CpulaunchError if matplotlib is missing.
    """
    check_plots(f"--{kind}")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # Its first use tells of a font cache.
    with _elsewhere():
        import matplotlib as mpl
        from matplotlib.figure import Figure

    defaults = {name: value for name, value in mpl.rcParamsDefault.items() if not name.startswith("backend")}
    with mpl.rc_context({**defaults, **STYLE}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of characters that its font lacks, and of figures beyond all measure.
        heights = [_height(each) for each in charts]
        figure = Figure(figsize=(WIDTH_INCHES, max(1.0, sum(heights) + TITLE_INCHES)), layout="constrained")
        figure.suptitle(escaped(title)[:MAX_TITLE], x=0.01, ha="left", fontsize=10)
        places = figure.subplots(max(1, len(charts)), 1, squeeze=False, height_ratios=heights or [1.0])
        for chart, (place,) in zip(charts, places, strict=False):
            if isinstance(chart, BarChart):
                draw_bars(place, chart)
            else:
                draw_points(place, chart)
        if not charts:
            places[0][0].set_axis_off()
        content = io.BytesIO()
        facts = {"Date": None} if kind == "svg" else {}
        figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=facts)
    return content.getvalue()


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Effect: inside, the current folder is "/", and variables with folders of matplotlib name those that they did.

    matplotlib would open a matplotlibrc of the current folder. Another user may have put it there, or a named pipe, and
    no picture has anything of it. Source: matplotlib 3.10, matplotlib_fname, _get_config_or_cache_dir.
    """
    relative = {name: value for name in FOLDERS if (value := os.environ.get(name)) and not os.path.isabs(value)}
    try:
        absolute = {name: os.path.abspath(value) for name, value in relative.items()}
        here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    except OSError:  # Nothing in it can be opened then.
        yield
        return
    try:
        os.environ.update(absolute)
        os.chdir("/")
        yield
    finally:
        os.environ.update(relative)
        os.fchdir(here)
        os.close(here)


def _height(chart: Chart) -> float:
    return TITLE_INCHES + BAR_INCHES * max(2, len(chart.bars)) if isinstance(chart, BarChart) else POINTS_INCHES
