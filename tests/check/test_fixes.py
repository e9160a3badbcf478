"""Fixes keep the way a call is written, and change no text that they cannot change well."""

import importlib.util
import subprocess
import sys

import pytest

from cpulaunch.check.inspect_text import findings
from cpulaunch.check.table import rule_named

if any(importlib.util.find_spec(name) is None for name in ("libcst", "torchfix")):
    pytest.skip("the extra `check` is not installed", allow_module_level=True)

HEAD = "from torch import nn\nnet = nn.Sequential("


IMPORTS = "import torch\nfrom torch import nn\n"
NET = """class Net(nn.Module):
    def __init__(self):
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x)

"""
DDP = f"{NET}net = nn.parallel.DistributedDataParallel("


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(n):\n    return(torch.ones(n).cuda())\n", 'def f(n):\n    return(torch.ones(n, device="cuda"))\n'),
        ("def f(n):\n    return(torch.ones(n)\n      .cuda())", 'def f(n):\n    return(torch.ones(n, device="cuda"))'),
        (
            "def f(n):\n    x = \\\n  torch.ones(n)\\\n  .cuda()",
            'def f(n):\n    x = \\\n  torch.ones(n, device="cuda")',
        ),
        ("\x0cdef f(n):\r\treturn torch.ones(n).cuda()\r", '\x0cdef f(n):\r\treturn torch.ones(n, device="cuda")\r'),
        ("def f(n): return 'ä𝄞', torch.ones(n,).cuda()", "def f(n): return 'ä𝄞', torch.ones(n, device=\"cuda\",)"),
        (
            "def f(n):\n    return torch.zeros(len(torch.ones(n).cuda())).cuda()",
            'def f(n):\n    return torch.zeros(len(torch.ones(n, device="cuda")), device="cuda")',
        ),
        (
            "for n in m:\n  match torch.ones(n).cuda():\n    case x: await y; x = torch.eye(n).cuda()",
            'for n in m:\n  match torch.ones(n, device="cuda"):\n    case x: await y; x = torch.eye(n, device="cuda")',
        ),
        ("def f(n): return torch.ones(n).to( 'cuda:0' )", "def f(n): return torch.ones(n, device='cuda:0')"),
        ('def f(n): return torch.ones(n).to("cuda")', 'def f(n): return torch.ones(n, device="cuda")'),
        (
            "def f(n):\n    return torch.ones(\n        n,  # rows\n    ).cuda()",
            'def f(n):\n    return torch.ones(\n        n,  # rows\n        device="cuda",\n    )',
        ),
        ("def f(n):\n    return (torch.ones(n)  # mask\n        .cuda())", None),
        ("def f(n):\n    return f'{torch.ones(n).cuda()}'", None),
        ('def f(n):\n    return f"{torch.ones(n).cuda()}"', None),
        (f"{DDP}Net(), find_unused_parameters=True)", f"{DDP}Net())"),
        (f"{DDP}Net(), find_unused_parameters=True, dim=0)", f"{DDP}Net(), dim=0)"),
        (f"{DDP}\n    Net(),\n    find_unused_parameters=True,\n)", f"{DDP}\n    Net(),\n)"),
        (f"{DDP}\n    Net(),\n    find_unused_parameters=True\n)", f"{DDP}\n    Net()\n)"),
        (f"{DDP}\n    Net(),  # kept\n    find_unused_parameters=True,\n)", f"{DDP}\n    Net(),  # kept\n)"),
        (f"{DDP}\n    Net(),  # kept\n    find_unused_parameters=True\n)", f"{DDP}\n    Net()  # kept\n)"),
        (f"{DDP}\n    Net(),\n    find_unused_parameters=True,  # kept\n)", f"{DDP}\n    Net(),  # kept\n)"),
        (f"{DDP}\n    Net(),  # one\n    find_unused_parameters=True,  # two\n)", None),
    ],
)
def test_a_fix_changes_its_call_and_no_character_around_it(before: str, after: str | None) -> None:
    from cpulaunch.check.fixes import fixed

    rules = [rule_named(name) for name in ("tensor-on-device", "find-unused-parameters")]
    found = findings(IMPORTS + before, rules)
    assert found
    new, count = fixed(IMPORTS + before, found)
    assert new == IMPORTS + (before if after is None else after)
    assert (count > 0) is (after is not None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)"),
        ("nn.Linear(2, 2,)", "nn.Linear(2, 2, bias=False,)"),
        ("nn.Linear( 2, 2 )", "nn.Linear( 2, 2, bias=False )"),
        ("nn.Linear(2, 2, bias = True)", "nn.Linear(2, 2, bias = False)"),
        ("nn.Linear(2, bias=True, out_features=2)", "nn.Linear(2, bias=False, out_features=2)"),
        ("nn.Linear(\n    2,\n    2,\n)", "nn.Linear(\n    2,\n    2,\n    bias=False,\n)"),
        ("nn.Linear(\n    2,\n    2\n)", "nn.Linear(\n    2,\n    2,\n    bias=False\n)"),
        ("nn.Linear(2,\n          2)", "nn.Linear(2,\n          2, bias=False)"),
        (
            "nn.Linear(  # in\n    2,\n    2,  # out\n)",
            "nn.Linear(  # in\n    2,\n    2,  # out\n    bias=False,\n)",
        ),
        ("nn.Linear(\n    2,\n    2  # out\n)", "nn.Linear(\n    2,\n    2,  # out\n    bias=False\n)"),
        ("nn.Linear(2, 2,  # out\n          )", "nn.Linear(2, 2,  # out\n          bias=False,\n          )"),
        ("nn.Linear(2, 2  # out\n          )", "nn.Linear(2, 2,  # out\n          bias=False\n          )"),
        (
            "nn.Linear(\n    2,\n    2,\n    # more\n)",
            "nn.Linear(\n    2,\n    2,\n    # more\n    bias=False,\n)",
        ),
        ("nn.Linear(\r\n    2,\r\n    2,\r\n)", "nn.Linear(\r\n    2,\r\n    2,\r\n    bias=False,\r\n)"),
    ],
)
def test_an_added_argument_is_written_as_the_others(before: str, after: str) -> None:
    from cpulaunch.check.fixes import fixed

    rest = ", nn.BatchNorm1d(2))  # kept\n"
    text = HEAD + before + rest
    new, count = fixed(text, findings(text, [rule_named("bias-before-norm")]), unsafe=True)
    assert (new, count) == (HEAD + after + rest, 1)
    assert fixed(new, findings(new, [rule_named("bias-before-norm")]), unsafe=True) == (new, 0)


DEEP = {
    "or": "0" + " or 0" * 20_000,
    "comprehension": ("[1" + " for a in b" * 250 + " for a in ") * 80 + "b" + "]" * 80,
}


@pytest.mark.parametrize("deep", DEEP.values(), ids=DEEP)
def test_a_call_that_would_overflow_the_stack_is_passed_over_and_others_are_not(tmp_path, deep):
    """As libcst parses it, the process ends by SIGSEGV."""
    load = "from torch.utils.data import DataLoader\n"
    load += f"for batch in DataLoader(data, batch_size={deep}):\n    net(batch).backward()"
    made = f"def f(n):\n    return torch.ones({deep}).cuda()\n"
    (tmp_path / "deep.py").write_text(f"{IMPORTS}{load}\n{made}torch.autograd.set_detect_anomaly(True)\n")
    (tmp_path / "other.py").write_text(f"{IMPORTS}def f(n):\n    return torch.ones(n).cuda()\n")
    command = [sys.executable, "-m", "cpulaunch", "check", "--fix", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "anomaly" in done.stdout
    assert (tmp_path / "other.py").read_text() == f'{IMPORTS}def f(n):\n    return torch.ones(n, device="cuda")\n'
