"""`cpulaunch --graph onednn` as a user types it: an unedited program, its report, and --strict."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import json_output

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = """
import sys
import torch
if (trials := sys.modules.get("cpulaunch.worker.fusion.trials")) is not None:
    trials.WAIT = True  # A program this short would end before its graph has been tried in another process.
if (eligibility := sys.modules.get("cpulaunch.worker.graph.eligibility")) is not None:
    eligibility.SMALL_SECONDS = eligibility.FREE_SECONDS = float("inf")  # Whatever a call takes on a busy machine.
from torch import nn

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, value):
        return self.layers(value) if value.sum() > 0 else -value

torch.manual_seed(0)
model = {"plain": lambda: Branch().layers, "branch": Branch}[KIND]().eval()
with torch.no_grad():
    for _ in range(4):
        result = model(torch.ones(64, 256))
print("type", type(result).__name__, result.dtype)
print(f"sum: {result.double().sum():.6f}")
if KIND == "plain":
    with torch.no_grad():
        model[2].weight.mul_(2)
        for _ in range(4):
            result = model(torch.ones(64, 256))
    print(f"changed: {result.double().sum():.6f}")
"""


def launch(folder: Path, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
    program = folder / "infer.py"
    program.write_text(f"KIND = {kind!r}\n" + PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CPULAUNCH", "OMP"))}
    return subprocess.run(
        [sys.executable, "-m", "cpulaunch", *options, str(program)],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONWARNINGS": "ignore"},
        timeout=300,
    )


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The output and the report of the program without --graph."""
    folder = tmp_path_factory.mktemp("without")
    result = launch(folder, "plain", "--report", str(folder / "report.json"))
    assert result.returncode == 0, result.stderr
    return result.stdout, (folder / "report.json").read_text()


def test_the_report_says_what_was_captured(tmp_path: Path, without: tuple[str, str]) -> None:
    report = tmp_path / "report.json"
    result = launch(tmp_path, "plain", "--graph", "onednn", "--report", str(report), "--metric", r"sum: (\S+)")
    assert result.returncode == 0, result.stderr
    assert "type Tensor torch.float32" in result.stdout
    content = json_output.read("report", report.read_text())
    (worker,) = content["workers"]
    graph = worker["graph"]
    # On some CPUs eager products of this size are faster, which the report then gives as the reason.
    assert {one["module"] for one in graph["captured"] + graph["eager"]} == {"Sequential"}
    assert worker["plugin"] == "loaded"
    assert worker["settings"]["graph"] == {"state": "applied", "detail": "onednn"}
    assert worker["binding"]["as_planned"] is True
    assert content["metrics"]["sum"]["sum"] == pytest.approx(float(without[0].split("sum: ")[1].split()[0]), rel=1e-3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler (g++)")
def test_inductor_with_weights_that_change(tmp_path: Path, without: tuple[str, str]) -> None:
    report = tmp_path / "report.json"
    result = launch(tmp_path, "plain", "--graph", "inductor", "--report", str(report))
    assert result.returncode == 0, result.stderr
    for word in ("sum: ", "changed: "):
        value, expected = (float(text.split(word)[1].split()[0]) for text in (result.stdout, without[0]))
        assert value == pytest.approx(expected, rel=1e-3)
    (worker,) = json_output.read("report", report.read_text())["workers"]
    modules = worker["graph"]["captured"] + worker["graph"]["eager"]
    reasons = (
        *("eager execution is faster", "calls without captured graphs are faster"),
        *("its weights changed", "its weights change too often"),
    )
    assert modules
    assert all("engine" in one or one["reason"].startswith(reasons) for one in modules), modules


def test_without_the_flag_nothing_is_captured(without: tuple[str, str]) -> None:
    (worker,) = json_output.read("report", without[1])["workers"]
    assert (worker["graph"]["captured"], worker["graph"]["eager"], worker["graph"]["seconds"]) == ([], [], None)
    assert worker["chosen"] == []


def test_a_module_that_cannot_be_captured_prints_one_warning(tmp_path: Path) -> None:
    result = launch(tmp_path, "branch", "--graph", "onednn")
    assert result.returncode == 0
    assert "type Tensor torch.float32" in result.stdout
    lines = [line for line in result.stderr.splitlines() if "--graph" in line]
    assert len(lines) == 1
    assert "Branch cannot be captured as a whole, so its parts are tried" in lines[0]
    assert re.search("Dynamo: (Data-dependent branching: Detected|Dynamic control flow)", lines[0])  # The latter: 2.5.


def test_strict_stops_a_program_that_cannot_be_captured(tmp_path: Path) -> None:
    result = launch(tmp_path, "branch", "--graph", "onednn", "--strict")
    assert result.returncode == 125
    assert "stopped because of --strict" in result.stderr
    assert "type" not in result.stdout
