"""What Dynamo prints on stderr about a trace that the program has not asked for: nothing."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

PROGRAM = """
import torch
from torch import nn
from cpulaunch.worker.graph.trace import trace_call

class Profiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.profiler.record_function("forward"):
            return self.linear(x)

model, value = Profiled().eval(), torch.randn(1, 4)
with torch.no_grad():
    frozen = list(model.parameters())
    print(bool(trace_call(model, (value,), {}, inputs=[value], frozen=frozen, eager=model(value)).sources))
"""


def test_a_module_with_a_profiler_is_traced_in_silence() -> None:
    """In a process of its own, because torch prints such a note once."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
