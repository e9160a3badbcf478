"""Whose tensors hold a weight's memory: those of a capture, which a graph keeps too, are not the program's."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.worker.graph.trace import trace_call  # noqa: E402
from cpulaunch.worker.tensors import owners  # noqa: E402
from cpulaunch.worker.tensors.access import is_in_array, is_receiving  # noqa: E402
from cpulaunch.worker.tensors.owners import is_held_elsewhere, own_view  # noqa: E402
from cpulaunch.worker.weights.entry import ResidentWeight  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not hasattr(torch._C, "_storage_Use_Count"), reason="this torch does not count owners"),
]


class Scaled(nn.Module):
    """A graph that reads a tensor."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self._tensors = (scale,)

    def forward(self, x: Tensor) -> Tensor:
        return x * self._tensors[0]


def test_a_view_of_a_capture_is_not_the_programs() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    assert not is_held_elsewhere(weight)
    views = [own_view(weight), own_view(weight)]
    assert not is_held_elsewhere(weight)
    of_program = weight.data
    assert is_held_elsewhere(weight)
    del of_program
    views.pop()
    assert not is_held_elsewhere(weight)
    of_program = weight.detach()
    assert is_held_elsewhere(weight)
    del of_program
    assert not is_held_elsewhere(weight)


def test_a_view_that_only_a_graph_holds_is_known() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    graph = torch.jit.freeze(torch.jit.trace(Scaled(own_view(weight)).eval(), torch.randn(8)))
    assert not is_held_elsewhere(weight)
    torch.testing.assert_close(graph(torch.ones(8)), weight.detach())
    of_program = weight.data
    assert is_held_elsewhere(weight)
    del of_program, graph
    assert not is_held_elsewhere(weight)


def test_a_traced_call_leaves_weights_to_be_packed() -> None:
    model, value = nn.Linear(8, 8).eval(), torch.randn(1, 8)
    with torch.no_grad():
        frozen, eager = list(model.parameters()), model(value)
        traced = trace_call(model, (value,), {}, inputs=[value], frozen=frozen, eager=eager)
    assert traced.sources
    assert not is_held_elsewhere(model.weight)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_weight_is_not_held_by_the_program(kind: str, transposed: bool) -> None:
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(2, 64)
    entry = ResidentWeight(weight, kind, transposed=transposed)
    with torch.no_grad():
        entry.make(weight, x, None, nn.functional.linear)
    assert entry.form is not None
    assert not is_in_array(weight)
    assert not is_receiving(weight)
    assert not is_held_elsewhere(weight)
    of_program = weight.data
    assert is_held_elsewhere(weight)
    del of_program


def test_memory_that_a_weight_has_left_is_kept_for_threads_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, narrow = torch.nn.Parameter(torch.randn(4, 3, 2, 2)), torch.nn.Parameter(torch.randn(4, 3, 1, 1))
    expected, address = weight.detach().clone(), weight.data_ptr()
    monkeypatch.setattr(owners, "_left", [])
    with torch.no_grad():
        owners.move(weight, torch.channels_last)
        owners.move(narrow, torch.channels_last)
    assert weight.equal(expected)
    assert not weight.is_contiguous()
    ((_, left),) = owners._left
    assert left.data_ptr() == address
    assert left.equal(expected)
    assert not owners.is_held_elsewhere(weight)
    assert not owners.is_held_elsewhere(narrow)
    owners.free_left_memory()
    assert owners._left
    monkeypatch.setattr(owners, "LEFT_SECONDS", -1.0)
    owners.free_left_memory()
    assert not owners._left


def test_storages_that_are_gone_take_no_memory() -> None:
    """A program may compute another bias for each product."""
    kept = [torch.randn(8) for _ in range(3 * owners.MANY)]
    views = [own_view(each) for each in kept[:8]]
    for each in kept:
        own_view(each)
    assert len(owners._own) <= owners.MANY
    assert not any(is_held_elsewhere(each) for each in kept[:8])
    del views
