"""Both benches end to end, as short as they can be."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
HAS_MODELS = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benches read /proc")


def _bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / name), *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.torch
@pytest.mark.skipif(not HAS_MODELS, reason="needs torch and transformers")
def test_throughput_writes_table_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--rounds", "1", "--seconds", "0.2", "--models", "mlp", "--peers", "python,cpulaunch", "--json"]
    ended = _bench("throughput", *arguments, str(result))
    assert ended.returncode == 0, ended.stderr
    assert "geometric mean" in ended.stdout
    measured = json.loads(result.read_text())
    assert len(measured["samples"]["mlp"]["cpulaunch"]) == 1
    assert measured["versions"]["torch"]
    assert "--instances 2" in measured["commands"]["cpulaunch"][0]


def test_startup_writes_table_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    ended = _bench(
        "startup", "--rounds", "1", "--parts", "idle,planning", "--idle-seconds", "0.2", "--json", str(result)
    )
    assert ended.returncode == 0, ended.stderr
    assert "plan 256 workers" in ended.stdout
    assert json.loads(result.read_text())["idle"]["cpu_ms"] >= 0


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [("throughput", ["--models", "bart"], "unknown: bart"), ("startup", ["--rounds", "0"], "at least 1: 0")],
)
def test_bad_arguments_are_named(name: str, arguments: list[str], complaint: str) -> None:
    ended = _bench(name, *arguments)
    assert ended.returncode == 2
    assert complaint in ended.stderr
