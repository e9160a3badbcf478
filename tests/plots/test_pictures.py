"""Pictures of charts: files of their kind, the same for the same charts, whatever the text and numbers in them."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from cpulaunch.charts.compare_charts import compare_charts
from cpulaunch.charts.model import BarChart, LostPoint, Point, PointChart, Series
from cpulaunch.charts.tune_charts import tune_charts
from cpulaunch.plots.picture import check_plots, picture
from cpulaunch.records.errors import CpulaunchError
from tests.html import hostile

PNG = b"\x89PNG\r\n\x1a\n"
needs_matplotlib = pytest.mark.usefixtures("matplotlib")


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'cpulaunch[plots]'")


def texts(svg):
    return "".join(ElementTree.fromstring(svg).itertext())


@needs_matplotlib
@pytest.mark.parametrize("text", [*hostile.ATTACKS[:6], "$x^", "_hidden", "日本語 \\frac", "%s {0}"], ids=range(10))
def test_any_text_is_shown_as_it_is(text):
    svg = picture(compare_charts(hostile.comparison(text)), title=text, kind="svg")
    assert "95 % interval" in texts(svg)
    assert ElementTree.fromstring(svg).find(".//{*}script") is None


@needs_matplotlib
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e308, 1e308, 0.0, 10**400])
def test_any_number_has_a_picture(number):
    comparison = hostile.comparison(rounds=8)
    for each in comparison["rounds"][::2]:
        each["samples"] = [{**sample, "value": number} for sample in each["samples"]]
    comparison["comparisons"][0] |= {"ratio": number, "low": number, "high": number}
    assert picture(compare_charts(comparison), title="", kind="png").startswith(PNG)


@needs_matplotlib
@pytest.mark.parametrize("trials", [0, 3, 1000])
def test_a_search_has_a_picture(trials):
    found = texts(picture(tune_charts(hostile.search("a setting", trials=trials)), title="", kind="svg"))
    assert ("best so far" in found) is (trials > 0)
    assert all(each in found for each in ("Importance of settings", "final round", "between trials"))


@needs_matplotlib
def test_the_same_charts_make_the_same_file():
    charts = compare_charts(hostile.comparison())
    assert len({picture(charts, title="a", kind="svg") for _ in range(2)}) == 1


@needs_matplotlib
def test_settings_of_the_user_change_nothing(matplotlib):
    charts = compare_charts(hostile.comparison())
    usual = picture(charts, title="a", kind="svg")
    with matplotlib.rc_context({"font.size": 30, "text.usetex": False, "axes.facecolor": "red"}):
        assert picture(charts, title="a", kind="svg") == usual


@needs_matplotlib
def test_every_kind_of_chart_is_drawn():
    points = tuple(Point(x=float(x), y=10.0**x, marked=x == 2) for x in range(4))
    charts = [
        BarChart(title="no bars", bars=()),
        PointChart(title="no points", x_title="trial", series=()),
        PointChart(
            title="all of it",
            x_title="trial",
            series=(
                Series(label="dots", points=points, trend=(1.0, 100.0)),
                Series(label="line", points=points, joined=True),
                Series(label="steps", points=points, steps=True, dots=False),
            ),
            band=(2.0, 3.0),
            reference=1.0,
            marks="cut short",
            lost=(LostPoint(x=2.0, text="it crashed"),),
        ),
    ]
    found = texts(picture(charts, title="", kind="svg"))
    assert all(
        each in found for each in ("no bars", "no points", "line", "steps", "dots, cut short", "failed", "1,000")
    )
    assert picture([], title="nothing", kind="png").startswith(PNG)


def test_a_missing_matplotlib_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CpulaunchError) as error:
        check_plots("--svg")
    assert "--svg needs matplotlib" in str(error.value)
    assert "pip install 'cpulaunch[plots]'" in str(error.value)


@needs_matplotlib
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.write_text("backend: module://strangers\n")])
def test_what_lies_in_the_current_folder_is_not_read(tmp_path, make):
    """A stranger's pipe of this name in /tmp kept a finished search from writing its pictures, and from ending."""
    make(tmp_path / "matplotlibrc")
    code = "from cpulaunch.plots.picture import picture; picture([], title='a', kind='png')\n"
    code += "import matplotlib, os; print(matplotlib.rcParams['backend'] == 'module://strangers', os.getcwd())"
    assert run(code, tmp_path) == (f"False {tmp_path}\n", "")


def run(code, folder, environ=None):
    """What a Python prints in a folder, to both outputs."""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout, done.stderr


@needs_matplotlib
@pytest.mark.parametrize("name", ["MPLCONFIGDIR", "XDG_CACHE_HOME"])
def test_a_relative_folder_for_matplotlibs_fonts_is_below_the_current_one(tmp_path, name):
    """Root's was in "/", and others had no place for them."""
    (tmp_path / "relative").mkdir()
    code = "from cpulaunch.plots.picture import picture; picture([], title='a', kind='png')\n"
    code += f"import matplotlib, os; print(matplotlib.get_cachedir(), os.environ[{name!r}])"
    said, _ = run(code, tmp_path, {"MPLCONFIGDIR": "", name: "relative"})
    assert said.startswith(f"{tmp_path}/relative")
    assert said.endswith(" relative\n")
