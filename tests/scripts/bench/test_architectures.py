"""How scripts/bench/architectures makes models small, reads what became of them, and judges their results."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

import pytest
from sweep.configs import SMALL, small_values
from sweep.outcomes import Outcome, counts, format_outcomes, format_progress, kind_of, read_lines, settled

BENCH = Path(__file__).parents[3] / "scripts" / "bench"
HAS_MODELS = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
needs_models = pytest.mark.skipif(not HAS_MODELS, reason="needs torch and transformers")


def _captured(module: str) -> dict[str, str]:
    return {"event": "captured", "module": module}


def _eager(module: str, reason: str) -> dict[str, str]:
    return {"event": "eager", "module": module, "reason": reason}


@pytest.mark.parametrize(
    ("events", "kind", "reason"),
    [
        ([_captured("Bert")], "whole", ""),
        ([_eager("Bert", "a sort"), _captured("Bert")], "whole", ""),
        ([_eager("Bert", "a sort"), _captured("Layer"), _captured("Layer")], "parts", "a sort; 2 captures: 2 Layer"),
        ([_eager("Bert", "eager execution is faster: 1 ms, captured 2 ms")], "not faster", "eager execution is faster"),
        ([_eager("Bert", "calls without captured graphs are faster")], "not faster", "calls without"),
        ([_eager("Layer", "a sort")], "eager", "a sort"),
        ([], "pending", ""),
    ],
)
def test_events_say_how_a_model_was_captured(events: list[dict[str, str]], kind: str, reason: str) -> None:
    found, text = kind_of(events, "Bert")
    assert found == kind
    assert text.startswith(reason)


def test_a_death_is_attributed_to_the_model_that_was_started() -> None:
    bert = Outcome(name="bert", kind="whole", calls=8)
    lines = [json.dumps({"start": "bert"}), json.dumps(asdict(bert)), json.dumps({"start": "t5"})]
    assert read_lines("\n".join(lines)) == ([bert], "t5")
    assert read_lines("\n".join(lines[:2])) == ([bert], None)
    cut = "\n".join([*lines, '{"name": "t5", "ki'])
    assert read_lines(cut) == ([bert], "t5")


@pytest.mark.skipif(sys.platform != "linux", reason="the benches read /proc")
@pytest.mark.parametrize(
    ("ending", "limit", "kind", "reason"),
    [("sys.exit(3)", 60.0, "died", "exit code 3"), ("time.sleep(60)", 0.0, "not finished", "no result for 0 s")],
)
def test_a_death_is_told_from_a_model_without_a_result(
    ending: str, limit: float, kind: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = SourceFileLoader("architectures_bench", str(BENCH / "architectures"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    bench = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, bench)
    loader.exec_module(bench)
    monkeypatch.setattr(bench, "MODEL_SECONDS", limit)

    def command(mode: str, names: list[str], results: Path) -> list[str]:
        lines = f"import sys, time; open({str(results)!r}, 'a').write('{{\"start\": \"t5\"}}\\n'); {ending}"
        return [sys.executable, "-c", lines]

    sweep = SimpleNamespace(folder=tmp_path, wait_seconds=0.0, command=command)
    for mode, expected in (("captured", kind), ("plain", "not built")):
        (outcome,) = bench.run_models(sweep, mode, ["t5"])
        assert (outcome.name, outcome.kind, outcome.reason) == ("t5", expected, reason)


def test_results_that_differ_are_settled_by_fp64() -> None:
    wrong = Outcome(name="t5", kind="wrong", reason="call 2: tensor 0 differs", otherwise="parts")
    near, far = Outcome(name="t5", kind="eager"), Outcome(name="t5", kind="wrong", reason="far from fp64")
    assert settled([wrong], {})[0] == wrong
    assert settled([wrong], {"t5": near})[0].kind == "parts"
    assert settled([wrong], {"t5": far})[0].reason == "call 2: tensor 0 differs; far from fp64"


def test_outcomes_are_sorted_by_kind_and_counted() -> None:
    outcomes = [
        Outcome(name="t5", kind="died", reason="exit code -11"),
        Outcome(name="bert", kind="whole", calls=8),
        Outcome(name="sam", kind="not built", reason="no ids"),
    ]
    assert counts(outcomes) == {"whole": 1, "died": 1, "not built": 1}
    lines = format_outcomes(outcomes).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["bert", "t5", "sam"]
    assert lines[2].endswith("exit code -11")
    assert lines[-1].split() == ["2", "models", "run"]
    assert format_progress(outcomes) == "whole: bert; died: t5; not built: sam"


def test_only_numbers_of_a_configuration_are_made_small() -> None:
    default = {"hidden_size": 768, "num_layers": True, "n_head": None, "name": "x", "eos_token_id": 50_256}
    values = small_values({**default, "pad_token_id": 30_000, "bos_token_id": 1})
    assert values == {"hidden_size": 64, "n_head": 4, "eos_token_id": 3, "pad_token_id": 0}
    assert small_values({}, "led") == {"attention_window": 8}
    assert SMALL["vocab_size"] == 256


@pytest.mark.torch
@needs_models
def test_results_are_judged_by_fp64_where_they_differ() -> None:
    import torch
    from sweep.judgement import distance, wrong_reason

    exact, plain = torch.tensor([1.0, 2.0]), torch.tensor([1.001, 2.0])
    assert distance(plain, plain) == 0.0
    assert distance(torch.tensor([float("nan"), 1.0]), exact) == float("inf")
    assert wrong_reason([plain], [plain], None) is None
    assert "without a result in fp64" in str(wrong_reason([exact], [plain], None))
    assert wrong_reason([exact], [plain], [exact.double()]) is None
    assert "is allowed" in str(wrong_reason([exact + 1], [plain], [exact.double()]))
    assert wrong_reason([], [plain], None) == "0 tensors instead of 1"


@pytest.mark.torch
@needs_models
def test_at_least_ninety_text_models_are_listed() -> None:
    from sweep.models import names_of, smallest

    names = names_of("transformers")
    assert len(names) >= 90
    assert {"bert", "gpt2", "llama", "t5"} <= set(names)
    assert smallest(["net_large", "net_tiny", "net_nano_long"]) == "net_nano_long"
    assert smallest(["net101", "net26"]) == "net26"


@pytest.mark.torch
@needs_models
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "mixtral"])
def test_a_small_model_is_built_and_called(name: str) -> None:
    import torch
    from sweep.models import build, inputs_of, tensors_in

    model = build("transformers", name)
    assert not model.training
    with torch.no_grad():
        result = model(**inputs_of("transformers", model, 0, cache=True))
    # Besides the last states: keys and values of two layers, for models that have a cache.
    assert len(tensors_in(result)) == {"bert": 2, "gpt2": 5, "t5": 10, "mixtral": 5}[name]


@pytest.mark.torch
@needs_models
def test_a_model_that_cannot_be_built_says_why() -> None:
    from sweep.models import UnbuildableError, build

    with pytest.raises(UnbuildableError, match="cannot be built"):
        build("transformers", "no-such-model")


@pytest.mark.torch
@needs_models
def test_every_capture_can_be_used() -> None:
    code = (
        "from sweep.forcing import use_every_capture; use_every_capture(); "
        "from cpulaunch.worker.graph import cache, eligibility; "
        "print(cache.TOLERATED_SLOWDOWN, eligibility.FREE_SECONDS, eligibility.SMALL_SECONDS)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=False)
    assert ended.stdout == "inf inf inf\n", ended.stderr


@pytest.mark.torch
@needs_models
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benches read /proc")
def test_the_sweep_writes_table_and_json(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--libraries", "transformers,timm", "--only", "bert", "--json", str(result), "--wait-seconds", "5"]
    ended = subprocess.run(
        [sys.executable, str(BENCH / "architectures"), *arguments, "--peers-folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"not run: timm is not installed; to install: scripts/bench/setup-peers --folder {tmp_path}" in ended.stdout
    (outcome,) = json.loads(result.read_text())["outcomes"]["transformers"]
    assert outcome["name"] == "bert"
    assert outcome["kind"] not in ("wrong", "failed", "died", "not finished", "not built"), outcome


@pytest.mark.torch
@needs_models
@pytest.mark.skipif(sys.platform != "linux", reason="the benches read /proc")
def test_a_sweep_of_no_model_is_an_error() -> None:
    arguments = ["--libraries", "transformers", "--only", "no-such-model"]
    command = [sys.executable, str(BENCH / "architectures"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "error: no model is named no-such-model; --list prints the names\n"
