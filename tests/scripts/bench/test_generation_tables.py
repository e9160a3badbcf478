"""What scripts/bench/generation computes, and the file that it writes for llama.cpp."""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import llama_shape
import pacing
import pytest
from generation_pacing import measure
from generation_tables import TYPES, compare, format_samples, limit
from llama_shape import bytes_per_token
from peers import default_folder
from variants import VARIANTS

BENCH = Path(__file__).parents[3] / "scripts" / "bench"
LLAMA_PYTHON = default_folder() / "llama" / "bin" / "python"
SAMPLES = {"python": [10.0, 20.0], "int8": [40.0, 40.0], "llama.cpp q8_0": [50.0, 80.0], "llama.cpp f32": [20.0, 20.0]}


def test_a_token_reads_all_matrices_but_the_embedding() -> None:
    layer = 2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 2816 * 1024
    assert bytes_per_token("f32") == 4 * (8 * layer + 32_000 * 1024)
    assert bytes_per_token("bf16") == bytes_per_token("f32") / 2
    assert bytes_per_token("q4_0") / bytes_per_token("q8_0") == pytest.approx(18 / 34)


def test_the_limit_is_bandwidth_over_bytes() -> None:
    assert limit("int8", 10.0) == pytest.approx(10e9 / bytes_per_token("q8_0"))
    assert limit("python", 10.0) == limit("llama.cpp f32", 10.0)


def test_runners_are_compared_with_llama_cpp_of_their_type() -> None:
    compared = {each.runner: each for each in compare(SAMPLES, 10.0)}
    assert compared["int8"].to_python == pytest.approx(3.0)
    assert compared["int8"].to_llama == pytest.approx(0.65)
    assert compared["python"].to_llama == pytest.approx(0.75)
    assert compared["int8"].of_limit == pytest.approx(40 / limit("int8", 10.0))
    (alone,) = compare({"bf16": [1.0]}, None)
    assert (alone.to_python, alone.to_llama, alone.of_limit) == (None, None, None)


def test_the_table_has_a_row_for_each_runner() -> None:
    lines = format_samples("decode", SAMPLES, 10.0).splitlines()
    assert lines[0].split()[:2] == ["decode", "type"]
    assert lines[2].startswith("int8")
    assert "q8_0" in lines[2]
    assert lines[2].endswith("%")
    assert "limit" not in format_samples("prefill", SAMPLES)
    assert format_samples("prefill", {"bf16": [1.0]}).split()[-2:] == ["-", "-"]


def test_every_variant_has_a_type() -> None:
    assert set(VARIANTS) <= set(TYPES)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that lets so many seconds pass, by the clock of the measurement."""
    passed = [0.0]
    monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=lambda: sum(passed)))
    return passed.append


def test_decoding_leaves_out_the_first_token(take: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, int]] = []
    options = argparse.Namespace(seconds=0.0, warmup_seconds=0.0, rendezvous=None, copies=1)

    def generate(prompt: int, tokens: int) -> None:
        calls.append((prompt, tokens))
        take(tokens * 1e-4)

    measure(generate, options)
    assert set(calls) == {(64, 48), (64, 1), (256, 1)}
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["llama: 10000.00 tokens/s decode", "llama: 2560000.00 tokens/s prefill"]


def test_a_window_in_which_noise_hides_decoding_is_an_error(take: Callable[[float], None]) -> None:
    options = argparse.Namespace(seconds=0.0, warmup_seconds=0.0, rendezvous=None, copies=1)
    with pytest.raises(SystemExit, match="too much noise"):
        measure(lambda prompt, tokens: take(0.01 if tokens == 1 else 0.001), options)


@pytest.fixture
def bench() -> ModuleType:
    loader = SourceFileLoader("generation_bench", str(BENCH / "generation"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("failing", "samples", "flags"),
    [
        ({(): [1]}, 2, [["--no-repack"], ["--no-repack"]]),
        ({(): [2]}, None, [[]]),
        ({(): [1], ("--no-repack",): [1]}, None, []),
    ],
    ids=["the first round decides", "no mixture", "both ways fail"],
)
def test_all_rounds_of_llama_cpp_are_measured_in_one_way(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, failing, samples: int | None, flags: list[list[str]]
) -> None:
    tried: dict[tuple[str, ...], int] = {}
    measured: list[list[str]] = []

    def run(runner: str, options: object, folder: Path, flags: tuple[str, ...] | list[str] = ()) -> dict[str, float]:
        tried[tuple(flags)] = tried.get(tuple(flags), 0) + 1
        if tried[tuple(flags)] in failing.get(tuple(flags), ()):
            raise bench.BenchError("exit code -4")
        measured.append(list(flags))
        return {"decode": 1.0, "prefill": 1.0}

    monkeypatch.setattr(bench, "measure", run)
    results, runner = bench.Results(), "llama.cpp q8_0"
    for _ in range(2):
        bench.add_run(results, runner, argparse.Namespace(), Path())
    assert len(results.samples["decode"].get(runner, [])) == (samples or 0)
    assert (runner in results.failures) == (samples is None)
    assert measured == flags
    assert (runner in results.notes) == (samples == 2)


@pytest.mark.skipif(
    not importlib.util.find_spec("gguf"), reason="needs the package gguf (scripts/bench/setup-peers llama)"
)
def test_the_gguf_file_is_read_back_in_this_environment(tmp_path: Path) -> None:
    _read_back(sys.executable, tmp_path)


@pytest.mark.skipif(not LLAMA_PYTHON.exists(), reason="needs scripts/bench/setup-peers llama")
def test_the_gguf_file_is_read_back(tmp_path: Path) -> None:
    _read_back(str(LLAMA_PYTHON), tmp_path)


def _read_back(python: str, folder: Path) -> None:
    code = """
import sys, gguf
from pathlib import Path
from llama_file import write_file
write_file(Path(sys.argv[1]), "q8_0", layers=1)
reader = gguf.GGUFReader(sys.argv[1])
for tensor in reader.tensors:
    print(tensor.name, tensor.tensor_type.name, *tensor.shape)
print("layers", reader.fields["llama.block_count"].contents())
"""
    command = [python, "-c", code, str(folder / "model.gguf")]
    ended = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert f"blk.0.ffn_down.weight Q8_0 {llama_shape.FEED_FORWARD} {llama_shape.WIDTH}" in lines
    assert f"output.weight Q8_0 {llama_shape.WIDTH} {llama_shape.VOCABULARY}" in lines
    assert "output_norm.weight F32 1024" in lines
    assert lines[-1] == "layers 1"
    assert len(lines) == 2 + len(llama_shape.MATRICES) + 2 + 1 + 1
