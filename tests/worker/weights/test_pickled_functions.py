"""Functions of torch that the plugin replaces: a program that keeps or passes them on has torch's own elsewhere."""

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.tensors.access import watch_access  # noqa: E402
from cpulaunch.worker.tensors.parameter_views import watch_views  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights  # noqa: E402

pytestmark = pytest.mark.torch


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.kept: list[Any] = []

    def forward(self, value: Tensor) -> Tensor:
        self.kept = [F.linear, F.conv2d, torch.addmm]
        result: Tensor = self.kept[0](value, self.layer.weight, self.layer.bias)
        return result


def test_functions_that_a_call_keeps_are_pickled_and_copied_as_torchs_own() -> None:
    model, value, store = Keeping().eval(), torch.randn(4, 16), ResidentWeights("fp32", TorchSettings())
    expected, plain = model(value), list(model.kept)
    with torch.no_grad(), store.active(model):
        torch.testing.assert_close(model(value), expected)
    assert model.kept[0] is not plain[0]
    assert [each.__name__ for each in model.kept] == ["linear", "conv2d", "addmm"]
    assert pickle.loads(pickle.dumps(model)).kept == plain
    assert copy.deepcopy(model).kept == plain


class Watching:
    changed = False


@pytest.mark.parametrize("name", ["Tensor.numpy", "to_dlpack", "_fused_adam_", "nn.Parameter.view"])
def test_functions_that_stay_replaced_are_pickled_by_torchs_names(name: str) -> None:
    watch_access(Watching(), [torch.ones(1)])
    watch_views(lambda parameter: None)
    function: Any = torch
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        pytest.skip(f"this torch has no torch.{name}")
    pickled = pickle.dumps(function)
    assert b"cpulaunch" not in pickled
    assert pickle.loads(pickled) is function
