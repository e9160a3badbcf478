"""ipex.optimize through the plugin, in an environment with intel_extension_for_pytorch, and its errors anywhere."""

import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from cpulaunch.records.torch_settings import TorchSettings
from tests.worker.applying import case, events, run_cases, run_python

pytest.importorskip("torch", reason="torch is not installed here")
from cpulaunch.worker.features import ipex
from tests import json_output

pytestmark = pytest.mark.torch

try:
    RELEASE = metadata.version("intel_extension_for_pytorch")
except metadata.PackageNotFoundError:
    RELEASE = None

MADE = Path(__file__).parents[3] / ".venv-ipex"
"""The environment that scripts/test makes, with the extra ipex: other tests need a newer torch than Intel's package."""

WITH_IPEX = str(MADE / "bin/python") if (MADE / "installed-extra").exists() else RELEASE and sys.executable
with_ipex = pytest.mark.skipif(
    not WITH_IPEX, reason="no interpreter with intel_extension_for_pytorch; scripts/test makes one on x86-64 Linux"
)

MODEL = """
    import collections
    import torch
    torch.manual_seed(0)
    Pair = collections.namedtuple("Pair", "first second")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(),
                torch.nn.Linear(16 * 36, 8))
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            return self.body(x)

    x = torch.randn(4, 3, 8, 8)
    def largest(a, b):
        return (a.float() - b.float()).abs().max().item()
"""
CASES = {
    "fp32": (
        """
        model = Net().eval()
        with torch.no_grad():
            plain = model(x)          # The first call runs the model itself and optimizes a copy.
            before = model.calls
            again = model(x)
        print(model.calls == before, largest(plain, again) < 1e-4, again.dtype)
        """,
        {},
        "True True torch.float32",
    ),
    "bf16": (
        """
        model = Net().eval()
        with torch.no_grad():
            plain = model(x)
            before = model.calls
            again = model(x)
        print(model.calls == before, 0 < largest(plain, again) < 5e-2, again.dtype)
        """,
        {"precision": "bf16"},
        "True True torch.float32",
    ),
    "training": (
        """
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
        optimizer.step()
        print(model.calls, model.body[0].weight.grad is not None, model.training)
        """,
        {},
        "1 True True",
    ),
    "gradients in eval mode": (
        """
        model = Net().eval()
        model(x).sum().backward()
        model(x)
        print(model.calls, model.body[0].weight.grad is not None)
        """,
        {},
        "2 True",
    ),
    "graphs made by the program, and losses": (
        """
        traced = torch.jit.trace(Net().eval(), x, check_trace=False)
        loss = torch.nn.MSELoss().eval()
        with torch.no_grad():
            print(largest(traced(x), traced(x)), loss(x, x).item())
        """,
        {},
        "0.0 0.0",
    ),
    "weights changed": (
        """
        model = Net().eval()
        with torch.no_grad():
            first = model(x); model(x)
            for parameter in model.parameters():
                parameter.mul_(0.5)
            changed = model(x)
            print(largest(first, changed) > 1e-3, largest(changed, Net.forward(model, x)) < 1e-6)
        """,
        {},
        "True True",
    ),
    "hooks": (
        """
        model = Net().eval()
        hook_calls = []
        model.body[0].register_forward_hook(lambda *_: hook_calls.append(1))
        with torch.no_grad():
            for _ in range(3):
                model(x)
        print(len(hook_calls), model.calls)
        """,
        {},
        "3 3",
    ),
}
WARNINGS = {"weights changed": "its weights or hooks were changed", "hooks": "it has hooks"}
OPTIMIZED = {"fp32", "bf16", "weights changed"}
CPU = set(Path("/proc/cpuinfo").read_text().split()) if sys.platform == "linux" else set()
if not CPU & {"avx_ne_convert", "avx512dq"}:  # Intel's package refuses to pack bf16 weights for such a CPU.
    CASES["bf16"] = (*CASES["bf16"][:2], "False True torch.float32")
    WARNINGS["bf16"] = "BF16 weight prepack needs the cpu support"
    OPTIMIZED.remove("bf16")


def refusal(tmp_path, before="", **settings):
    (outcome,) = run_cases({"": case("print('alive')", before=before, ipex=True, **settings)}, tmp_path).values()
    assert (outcome.code, outcome.out) == (0, "alive\n"), outcome.err
    (line,) = outcome.err.splitlines()
    return line


@pytest.mark.skipif(RELEASE is not None, reason="intel_extension_for_pytorch is installed here")
def test_without_ipex_the_warning_recommends_graph_onednn(tmp_path):
    assert "--ipex: intel_extension_for_pytorch is not installed" in (line := refusal(tmp_path))
    assert "--graph onednn" in line


def test_a_release_for_another_torch_is_never_imported(tmp_path):
    """Importing such a release exits the process."""
    site = tmp_path / "site"
    folder = site / "intel_extension_for_pytorch-9.9.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: intel_extension_for_pytorch\nVersion: 9.9.0\n")
    (site / "intel_extension_for_pytorch.py").write_text("import os; os._exit(127)\n")
    line = refusal(tmp_path, before=f"sys.path.insert(0, {str(site)!r})")
    assert "intel_extension_for_pytorch 9.9.0 is not compatible with torch" in line


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"graph": "onednn"}, "cannot be combined with --graph onednn"), ({"precision": "fp16"}, "fp16")],
)
def test_unsupported_settings_are_an_error(settings, reason):
    with pytest.raises(RuntimeError, match=reason):
        ipex.install(TorchSettings(ipex=True, **settings))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ipex")
    cases = {}
    for name, (program, settings, _) in CASES.items():
        file = folder / name
        file.touch()
        code = textwrap.dedent(MODEL) + textwrap.dedent(program)
        cases[name] = case(code, env={"CPULAUNCH_EVENTS": str(file)}, ipex=True, threads=1, **settings)
    ran = run_cases(cases, folder, interpreter=WITH_IPEX)
    return {name: (outcome, events(folder / name)) for name, outcome in ran.items()}


@with_ipex
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_models_are_optimized_only_where_results_stay_correct(outcomes, name):
    outcome, reported = outcomes[name]
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == CASES[name][2]
    assert len(outcome.cpulaunch_lines) == (name in WARNINGS), outcome.err
    assert WARNINGS.get(name, "") in outcome.err
    captured = [event for event in reported if event["event"] == "captured" and event["module"] == "Net"]
    assert len(captured) == (name in OPTIMIZED)


@with_ipex
@pytest.mark.slow
def test_a_launch_optimizes_an_unedited_program(tmp_path):
    program, report = tmp_path / "infer.py", tmp_path / "report.json"
    calls = (
        "model = Net().eval()\nwith torch.no_grad():\n    for _ in range(3):\n        model(x)\nprint(model.calls)\n"
    )
    program.write_text(textwrap.dedent(MODEL) + calls)
    done = run_python("-m", "cpulaunch", "--ipex", "--report", report, program, argv=(WITH_IPEX,))
    assert (done.code, done.out) == (0, "1\n"), done.err
    (worker,) = json_output.read("report", report.read_text())["workers"]
    assert worker["settings"]["ipex"]["state"] == "applied"
