"""The benches end to end, with the shortest possible settings."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "scripts" / "bench"
HAS_CCL = importlib.util.find_spec("torch") and any(Path(sys.prefix).glob("lib/libccl.so.2"))
BF16 = {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split()) if sys.platform == "linux" else ()
HAS_MODELS = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benches read /proc")


def _bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / name), *arguments], capture_output=True, text=True, timeout=600, check=False
    )


needs_models = pytest.mark.skipif(not HAS_MODELS, reason="needs torch and transformers")


@pytest.mark.torch
@needs_models
def test_throughput_writes_table_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--rounds", "1", "--seconds", "0.2", "--warmup-seconds", "0.2", "--models", "mlp"]
    arguments += ["--peers", "python,cpulaunch,zentorch", "--peers-folder", str(tmp_path)]
    ended = _bench("throughput", *arguments, "--json", str(result))
    assert ended.returncode == 0, ended.stderr
    assert "geometric mean" in ended.stdout
    assert (
        f"not measured: zentorch is not installed; to install: scripts/bench/setup-peers --folder {tmp_path}"
        in ended.stdout
    )
    measured = json.loads(result.read_text())
    assert len(measured["samples"]["mlp"]["cpulaunch"]) == 1
    assert measured["largest_errors"]["mlp"]["python"] == 0.0
    assert measured["eager_fp32"]["mlp"]["gflop"] == pytest.approx(8 * 2 * 512 * 512 / 1e9, rel=1e-4)
    assert measured["shares_of_ceiling"]["mlp"]["cpulaunch"] > 0
    assert measured["versions"]["torch"]
    assert "--instances 2" in measured["commands"]["cpulaunch"][0]


@pytest.mark.torch
@needs_models
def test_throughput_names_a_peer_that_fails_and_continues(tmp_path: Path) -> None:
    failing = tmp_path / "ipex" / "bin" / "ipexrun"
    failing.parent.mkdir(parents=True)
    failing.write_text("#!/bin/sh\necho failed on purpose >&2\nexit 7\n")
    failing.chmod(0o755)
    (tmp_path / "ipex" / "ready").touch()
    arguments = ["--rounds", "1", "--seconds", "0.2", "--models", "mlp", "--peers", "ipexrun,python"]
    ended = _bench("throughput", *arguments, "--peers-folder", str(tmp_path))
    assert ended.returncode == 1
    assert "failed: mlp under ipexrun: exit code 7" in ended.stdout
    assert "failed on purpose" in ended.stdout
    assert "ratio to python" in ended.stdout


@pytest.mark.torch
@needs_models
@pytest.mark.slow
@pytest.mark.skipif(not BF16, reason="this CPU has no bf16 arithmetic: three steps would take minutes")
def test_training_writes_rates_and_losses(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--models", "bert", "--peers", "python,cpulaunch-bf16,autocast", "--json", str(result)]
    ended = _bench("training", "--rounds", "1", "--seconds", "0.2", "--models", "bert", "--peers", "python")
    assert ended.returncode == 0, ended.stderr
    assert "ratio to python" in ended.stdout
    ended = _bench("training", "--rounds", "2", "--losses", "2", *arguments)
    assert ended.returncode == 0, ended.stderr
    compared = json.loads(result.read_text())["compared"]["bert"]
    assert compared["autocast"]["noises"] == 0
    assert compared["python"]["mean"] == pytest.approx(compared["cpulaunch-bf16"]["mean"], rel=0.05)


@pytest.mark.torch
@needs_models
@pytest.mark.slow
def test_programs_writes_tables_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--programs", "mlp", "--variants", "python,environment", "--rounds", "1", "--json", str(result)]
    ended = _bench("programs", *arguments, "--seconds", "0.3", "--warmup-seconds", "0.3")
    assert ended.returncode == 0, ended.stderr
    assert "below 0.98 of environment: none" in ended.stdout
    measured = json.loads(result.read_text())
    assert measured["ratios"]["environment"]["mlp"]["environment"]["median"] == 1.0
    assert measured["errors"]["mlp"]["python"] == 0.0
    assert measured["first_seconds"]["mlp"]["environment"][0] > 0


@pytest.mark.torch
@needs_models
@pytest.mark.slow
def test_generation_writes_tables_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--variants", "environment", "--rounds", "1", "--seconds", "0.2", "--warmup-seconds", "0.2"]
    ended = _bench("generation", *arguments, "--peers-folder", str(tmp_path), "--json", str(result))
    assert ended.returncode == 0, ended.stderr
    assert "not measured: llama.cpp is not installed; to install: scripts/bench/setup-peers" in ended.stdout
    measured = json.loads(result.read_text())
    assert measured["samples"]["decode"]["environment"][0] > 0
    assert measured["bandwidth_gb_per_second"] > 0


needs_ccl = pytest.mark.skipif(not HAS_CCL, reason="needs torch and oneCCL: pip install torch oneccl")


@pytest.mark.torch
@needs_ccl
@pytest.mark.slow
def test_collectives_writes_table_losses_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    # One rank: oneCCL's would spin at full speed beside other tests.
    arguments = ["--ranks", "1", "--sizes", "4096", "--widths", "8", "--rounds", "1"]
    ended = _bench("collectives", *arguments, "--json", str(result))
    assert ended.returncode == 0, ended.stderr
    assert "all-reduce 4 KiB, us" in ended.stdout
    assert "width 8, ccl: the losses of" in ended.stdout
    measured = json.loads(result.read_text())["results"]["1"]
    assert set(measured["reduce"]["4096"]) == {"gloo", "ccl", "oneccl", "bare"}
    assert measured["losses"]["8"]["oneccl"]["difference"] == 0
    assert measured["losses"]["8"]["ccl"]["difference"] == 0


@pytest.mark.torch
@needs_ccl
@pytest.mark.slow
def test_overlap_writes_table_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    ended = _bench("overlap", "--width", "64", "--layers", "2", "--rounds", "1", "--json", str(result))
    assert ended.returncode == 0, ended.stderr
    assert "step / (compute + communication)" in ended.stdout
    measured = json.loads(result.read_text())["results"]["ccl, one CPU a rank"]
    assert measured["batch"] >= 1
    assert set(measured["times"]) == {"forward", "compute", "communication", "step"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["bart"], "unknown: bart"), (["--folder"], "no folder"), (["--folder", "peers", "ipex"], "1 GB free, 6 GB are")],
)
def test_setup_of_peers_rejects_invalid_requests(arguments: list[str], message: str, tmp_path: Path) -> None:
    full_disk = tmp_path / "df"
    full_disk.write_text("#!/bin/sh\necho Avail\necho 1\n")
    full_disk.chmod(0o755)
    ended = subprocess.run(
        [str(BENCH / "setup-peers"), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert message in ended.stderr
    assert not (tmp_path / "peers" / "ipex").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "not a version of torch: ''"), (["2.x"], "not a version of torch: '2.x'"), (["--folder"], "no folder given")],
)
def test_a_version_of_torch_must_be_complete(arguments: list[str], message: str) -> None:
    script = BENCH.parent / "test-torch-version"
    ended = subprocess.run([str(script), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert message in ended.stderr


def test_startup_writes_table_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    ended = _bench(
        "startup", "--rounds", "1", "--parts", "idle,planning", "--idle-seconds", "0.2", "--json", str(result)
    )
    assert ended.returncode == 0, ended.stderr
    assert "plan 256 workers" in ended.stdout
    assert json.loads(result.read_text())["idle"]["cpu_ms"] >= 0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("throughput", ["--models", "bart"], "unknown: bart"),
        ("training", ["--peers", "ipexrun"], "unknown: ipexrun"),
        ("programs", ["--programs", "bart"], "unknown: bart"),
        ("generation", ["--types", "q2_k"], "unknown: q2_k"),
        ("startup", ["--rounds", "0"], "at least 1: 0"),
        ("collectives", ["--ranks", "0"], "at least 1: 0"),
        ("overlap", ["--width", "none"], "--width"),
    ],
)
def test_bad_arguments_are_named(name: str, arguments: list[str], message: str) -> None:
    ended = _bench(name, *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr


@pytest.mark.torch
def test_weight_kernels_writes_table_and_json(tmp_path: Path) -> None:
    library = pytest.importorskip("cpulaunch.worker.weights.library", reason="torch is not installed")
    if reason := library.missing_reason():
        pytest.skip(reason)
    result = tmp_path / "result.json"
    ended = _bench("weight_kernels", "--quick", "--rounds", "1", "--megabytes", "1", "--json", str(result))
    assert ended.returncode == 0, ended.stderr
    assert "1024x1024 int4    16" in ended.stdout
    entries = json.loads(result.read_text())["entries"]
    assert len(entries) == 2 * 3 * 4
    assert all(len(entry["samples_us"]["cpulaunch"]) == 1 for entry in entries)
    assert {entry["kind"] for entry in entries if "to bf16" in entry["samples_us"]} == {"int8", "int4"}
