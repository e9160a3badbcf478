"""Running statistics that a call of a module changes, found in all of its parts."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cpulaunch.worker.tensors.mutation import restore, running_statistics  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_statistics_of_all_parts_that_train_are_found_and_restored() -> None:
    shared = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval())
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.InstanceNorm1d(4)), nn.BatchNorm1d(4))
    model.training = False
    model.register_module("none", None)
    model[0].register_module("model", model)  # A cycle.
    before = [(buffer, buffer.clone()) for buffer in (*shared[0].buffers(), *model[3].buffers())]
    found = running_statistics(model)
    assert {id(buffer) for buffer, _ in found} == {id(buffer) for buffer, _ in before}
    for buffer, _ in before:
        buffer.add_(1)
    restore(found)
    assert all(torch.equal(buffer, value) for buffer, value in before)
