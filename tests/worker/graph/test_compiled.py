"""`--graph inductor`: the weights in what torch has compiled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_weights_that_the_compiler_leaves_in_cycles_are_not_held_by_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it does with those of a normalization that it folds into a convolution."""
    import torch._inductor.config as inductor

    from cpulaunch.worker.graph.compiled import Compiler

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            left = [module.weight.detach()]
            left.append(left)
            return function(module, args, kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    model, value = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    weights = Weights(model)
    with torch.no_grad(), inductor.patch(freezing=False):
        call = Call(module=model, args=(value,), kwargs={}, inputs=[value])
        Compiler(TorchSettings(graph="inductor"), Precision(None)).capture(call, model(value), weights)
    assert not weights.are_held_elsewhere()
