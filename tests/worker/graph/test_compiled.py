"""`--graph inductor`: the weights in what torch has compiled."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.graph.capture import Call  # noqa: E402
from cpulaunch.worker.graph.precision import Precision  # noqa: E402
from cpulaunch.worker.graph.weights import Weights  # noqa: E402
from cpulaunch.worker.tensors.owners import counts_owners  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not counts_owners(), reason="this torch does not count owners"),
]


def test_weights_in_compiled_code_are_not_held_by_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps that code: no other call could be captured, and none again after a change of the weights."""
    import torch._inductor.codecache as codecache
    import torch._inductor.config as inductor

    from cpulaunch.worker.graph.compiled import Compiler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path), raising=False)
    model = nn.Linear(8, 8, bias=False).eval()  # No loop that a C++ compiler would have to compile.
    with torch.no_grad(), inductor.patch(freezing=False):
        compiler = Compiler(TorchSettings(graph="inductor"), Precision(None))
        for rows in (2, 3):
            value, weights = torch.randn(rows, 8), Weights(model)
            assert not weights.are_held_elsewhere()
            call = Call(module=model, args=(value,), kwargs={}, inputs=[value])
            captured = compiler.capture(call, model(value), weights)
            torch.testing.assert_close(captured.run(call), model(value))
    assert not weights.are_held_elsewhere()
    of_program = model.weight.detach()
    assert weights.are_held_elsewhere()
    del of_program
