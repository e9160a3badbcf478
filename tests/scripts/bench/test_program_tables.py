"""What scripts/bench/programs prints and computes, without running a program."""

import importlib.util
import math
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import program_tables
import pytest
from commands import BenchError, Command
from peers import BenchContext
from program_runs import PROGRAMS, PacedRun
from program_tables import (
    format_bypassed,
    format_ratios,
    format_shortfalls,
    format_values,
    geometric_means,
    ratios_to,
    summarise,
)
from variants import DEFAULT_VARIANTS, VARIANTS

SAMPLES = {
    "mlp": {"python": [50.0, 40.0], "environment": [100.0, 80.0], "graph": [90.0, 76.0], "int8": [200.0, 240.0]},
    "lstm": {"python": [10.0, 10.0], "environment": [10.0, 20.0], "graph": [10.0, 20.0]},
}


def test_ratios_are_taken_within_a_round() -> None:
    ratios = ratios_to(SAMPLES, "environment")
    assert ratios["mlp"]["graph"].median == pytest.approx((0.9 + 0.95) / 2)
    assert ratios["lstm"]["python"].largest == 1.0
    assert ratios_to({"mlp": {"python": [1.0]}}, "environment") == {}


def test_a_variant_without_all_rounds_is_left_out() -> None:
    assert list(ratios_to({"mlp": {"environment": [1.0, 2.0], "graph": [1.0]}}, "environment")["mlp"]) == [
        "environment"
    ]


def test_means_name_how_many_programs_they_cover() -> None:
    assert geometric_means(ratios_to(SAMPLES, "environment"))["int8"] == pytest.approx(2.5)
    assert format_ratios(SAMPLES, "environment").splitlines()[-1].endswith("2.50 (1 of 2)")


def test_programs_below_the_line_are_marked_and_listed() -> None:
    table = format_ratios(SAMPLES, "environment")
    assert "<0.93 (0.90-0.95)" in table
    assert "<" not in format_ratios(SAMPLES, "python")
    assert format_shortfalls(SAMPLES).splitlines() == [
        "below 0.98 of environment: mlp under graph 0.93 (0.90-0.95)",
        "below 0.98 of python: none",
    ]
    assert format_shortfalls({"mlp": {"environment": [1.0], "graph": [0.985]}}).endswith("none")


def test_programs_that_are_slower_than_plain_python_are_marked_and_listed_too() -> None:
    """As slow as `environment` is no comfort where that is slower than no launcher at all."""
    samples = {"mlp": {"python": [2.0], "environment": [1.0], "control": [1.0], "O2": [1.5], "O3": [2.5]}}
    listed = "below 0.98 of python: mlp under environment 0.50 (0.50-0.50); mlp under O2 0.75 (0.75-0.75)"
    assert format_shortfalls(samples).splitlines() == ["below 0.98 of environment: none", listed]
    assert "<0.50 (0.50-0.50)" in format_ratios(samples, "python")
    assert len(summarise(samples)["below_python"]) == 2  # type: ignore[arg-type]


def test_the_control_shows_noise_and_is_never_a_shortfall() -> None:
    samples = {"mlp": {"environment": [1.0, 1.0], "control": [0.9, 0.9], "graph": [0.9, 0.9]}}
    assert format_shortfalls(samples) == "below 0.98 of environment: mlp under graph 0.90 (0.90-0.90)"
    assert format_ratios(samples, "environment").splitlines()[-2].split()[-4:-2] == ["0.90", "(0.90-0.90)"]


def test_summary_has_both_references() -> None:
    summary = summarise(SAMPLES)
    assert set(summary["ratios"]) == {"environment", "python"}  # type: ignore[call-overload]
    assert summary["below"] == ["mlp under graph 0.93 (0.90-0.95)"]


def test_a_missing_value_is_a_dash() -> None:
    table = format_values("error", {"a": {"x": 0.5, "y": 1.0}, "b": {"y": 2.0}}, "%.1f")
    assert table.splitlines()[-1].split() == ["b", "-", "2.0"]


PROGRAM = """
import sys
print("first result: 2.500 s\\nready", flush=True)
for _ in sys.stdin:
    print("t5: 8.53 tokens/s", flush=True)
print("t5: 1.0e-03 largest error")
"""


def paced(program: str, *, timeout_seconds: float = 20.0) -> PacedRun:
    return PacedRun(Command(argv=(sys.executable, "-c", program)), timeout_seconds=timeout_seconds)


def test_ratios_to_bypassed_calls_are_collected_while_a_program_warms_up() -> None:
    program = PROGRAM.replace("ready", "t5: 0.9850 of bypassed\\nt5: 1.0150 of bypassed\\nready")
    with paced(program) as run:
        assert run.bypassed_ratios == [0.985, 1.015]
        table = format_bypassed({"t5": {"graph": run.bypassed_ratios, "bf16": []}, "mlp": {"graph": []}})
    assert [line.split() for line in table.splitlines()[1:]] == [["t5", "1.000", "(0.985-1.015)"]]


def test_a_program_measures_windows_on_request() -> None:
    with paced(PROGRAM) as run:
        assert run.first_seconds == 2.5
        assert [run.measure(), run.measure()] == [(8.53, "tokens/s")] * 2
        assert run.compare() == (1e-3, None)


def bench() -> ModuleType:
    loader = SourceFileLoader("programs_bench", str(Path(program_tables.__file__).parent / "programs"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Endless:
    def __init__(self) -> None:
        self.windows = 0

    def measure(self) -> tuple[float, str]:
        self.windows += 1
        return 1.0, "tokens/s"

    def compare(self) -> tuple[None, None]:
        return None, None

    def close(self) -> None:
        pass

    def __enter__(self) -> "Endless":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    first_seconds = 1.0
    bypassed_ratios = (0.5, 0.75)


@pytest.mark.parametrize(("round_seconds", "windows"), [("0", 5), ("1000", 7)])
def test_rounds_end_with_the_time_for_them_but_not_before_the_fifth(
    monkeypatch: pytest.MonkeyPatch, round_seconds: str, windows: int
) -> None:
    run = Endless()
    module = bench()
    monkeypatch.setattr(module, "start_program", lambda *_: run)
    options = module.parse_arguments(["--rounds", "7", "--round-seconds", round_seconds, "--variants", "environment"])
    tables = ("samples", "first_seconds", "bypassed", "errors", "agreements", "failures")
    results = module.Results(**{name: {"mlp": {}} for name in tables})
    module.measure_program(results, "mlp", options, None)
    assert results.samples["mlp"]["environment"] == [1.0] * windows
    assert results.bypassed["mlp"]["environment"] == [0.5, 0.75]


@pytest.mark.parametrize("errors", [(float("nan"), 0.5), (0.5, float("nan"))])
def test_an_error_that_is_no_number_is_the_largest(errors: tuple[float, float]) -> None:
    module = bench()
    tables = ("samples", "first_seconds", "bypassed", "errors", "agreements", "failures")
    results = module.Results(**{name: {"mlp": {}} for name in tables})
    for error in errors:
        module._add_comparison(results, "O2", "mlp", error, None)
    assert math.isnan(results.errors["mlp"]["O2"])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('out of luck')", r"(?s)exit code 1.*out of luck"),
        ("print('first result: soon s')", "no figure"),
        ("print('first result: 1.0 s')", "exit code 0"),
        ("import time; time.sleep(60)", "silent for 0.5 s"),
    ],
)
def test_a_program_that_does_not_get_ready_is_an_error(program: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        paced(program, timeout_seconds=0.5 if "sleep" in program else 20.0)


def test_a_program_that_ended_between_windows_is_an_error_and_no_more() -> None:
    with paced(PROGRAM.split("for")[0]) as run:
        run._process.wait()
        with pytest.raises(BenchError, match="it ended"):
            run.measure()


def test_a_program_that_fails_later_is_an_error() -> None:
    with paced(PROGRAM.replace("t5: 8.53 tokens/s", "some/s")) as run, pytest.raises(BenchError, match="no rate"):
        run.measure()
    with paced(PROGRAM.split("for")[0]) as run, pytest.raises(BenchError, match=r"it ended|exit code 0"):
        run.measure()
    with paced(PROGRAM + "sys.exit(3)") as run, pytest.raises(BenchError, match="exit code 3"):
        run.compare()


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        ("environment", ""),
        ("graph+bf16", " --graph onednn --precision bf16"),
        ("int8", " --weights int8"),
        ("O3", " -O3"),
    ],
)
def test_a_variant_starts_the_program_with_its_flags(variant: str, flags: str) -> None:
    (command,) = VARIANTS[variant].launch(["program.py"], BenchContext(instances=1, folder=Path())).commands
    assert str(command).endswith(f"cpulaunch{flags} program.py")
    assert "int4" not in DEFAULT_VARIANTS


@pytest.mark.torch
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs torch and transformers")
def test_every_program_of_the_list_exists() -> None:
    import program

    assert tuple(program.PROGRAMS) == PROGRAMS
    assert len(program.PROGRAMS) >= 16


@pytest.mark.torch
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs torch and transformers")
def test_results_are_compared_by_values_and_choices() -> None:
    import torch
    from cases.results import compared

    tokens, other = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    assert compared([tokens], [other]) == (5.0, 0.75)
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    error, agreement = compared([logits], [logits.flip(1)])
    assert error == pytest.approx(0.8)
    assert agreement == 0.0
