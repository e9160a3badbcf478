"""`--graph onednn`: modules that keep tensors in dicts and lists, as tables of attention biases by device."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.worker.graph.weights import Weights, contained  # noqa: E402
from tests.worker.capturing import Plugin  # noqa: E402

pytestmark = pytest.mark.torch


class Biased(nn.Module):
    """Keeps what it computes of a parameter, as LeViT and EfficientFormer do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("index", torch.randint(4, (16,)))
        self.kept: dict[str, Tensor] = {}
        self.scales = [torch.ones(16), torch.full((16,), 2.0)]

    def forward(self, x: Tensor) -> Tensor:
        key = str(x.device)
        if key not in self.kept:
            self.kept[key] = self.bias[self.index]
        return self.layers(x + self.kept[key]) * self.scales[1]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Biased()
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


@torch.no_grad()
def called(module: nn.Module, count: int = 8) -> None:
    for _ in range(count):
        x = torch.randn(4, 16)
        assert torch.allclose(module(x), Plugin.eager(module, x), atol=1e-5)


@pytest.mark.parametrize("kind", [Biased, Outer])
def test_they_are_captured_as_a_whole(plugin: Plugin, kind: type[nn.Module]) -> None:
    called(kind().eval())
    assert plugin.captured() == [kind.__name__], plugin.reasons()


def replace_entry(module: Biased) -> None:
    module.kept["cpu"] = torch.randn(16)


def clear(module: Biased) -> None:
    with torch.no_grad():
        module.bias.add_(1)
    module.kept.clear()


def replace_dict(module: Biased) -> None:
    module.kept = {"cpu": torch.randn(16)}


def write(module: Biased) -> None:
    module.kept["cpu"].add_(3)


def write_data(module: Biased) -> None:
    module.kept["cpu"].data.add_(3)


def write_array(module: Biased) -> None:
    module.kept["cpu"].detach().numpy()[:] += 3


def replace_item(module: Biased) -> None:
    module.scales[1] = torch.full((16,), 5.0)


def shorten(module: Biased) -> None:
    del module.scales[0]
    module.scales.append(torch.full((16,), 7.0))


CHANGES = (replace_entry, clear, replace_dict, write, write_data, write_array, replace_item, shorten)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_call(plugin: Plugin, change: Callable[[Biased], None]) -> None:
    module = Biased().eval()
    called(module)
    assert plugin.captured() == ["Biased"], plugin.reasons()
    change(module)
    called(module)
    change(module)
    called(module, 2)


def test_memory_that_the_program_holds_too_is_not_taken_for_constant() -> None:
    module = Biased().eval()
    array = module.scales[1].numpy()
    with torch.no_grad():
        module(torch.randn(4, 16))
    assert [each.key for each in contained(module, [])] == ["cpu", 0]
    array[:] = 3


def test_what_a_capture_does_not_read_may_change() -> None:
    """As lists of results that a program keeps in its modules."""
    module = Biased().eval()
    weights = Weights(module)
    module.scales[0] = torch.zeros(16)
    module.kept["meta"] = torch.zeros(16)
    assert weights.unchanged()
    weights.watch([each for each in contained(module, []) if each.key == 1])
    assert weights.unchanged()
    module.kept["cuda"] = torch.zeros(16)
    assert weights.unchanged()
    module.scales.append(torch.zeros(16))
    assert not weights.unchanged()


class Twice(nn.Module):
    """Reads a tensor where another container, or the module itself, has it too."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.own = kept
        self.other, self.read = [kept], [kept]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x) + self.read[0])


class SharedDict(Twice):
    def __init__(self, kept: Tensor) -> None:
        super().__init__(kept)
        self.other = self.read = {0: torch.randn(16)}


def replace_read(module: Twice) -> None:
    new = torch.randn(16)
    module.read[0] = nn.Parameter(new) if isinstance(module.own, nn.Parameter) else new


def replace_read_container(module: Twice) -> None:
    module.read = {0: torch.randn(16)}


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (Twice(torch.randn(16)), replace_read),
        (Twice(nn.Parameter(torch.randn(16))), replace_read),
        (SharedDict(torch.randn(16)), replace_read_container),
    ],
)
def test_a_change_is_seen_where_the_tensor_is_read(
    plugin: Plugin, module: Twice, change: Callable[[Twice], None]
) -> None:
    called(module.eval())
    assert plugin.captured() == [type(module).__name__], plugin.reasons()
    change(module)
    called(module)
    assert len(plugin.captured()) == 2, plugin.reasons()


def test_repeated_captures_watch_a_tensor_once() -> None:
    module = Biased().eval()
    weights = Weights(module)
    for _ in range(3):
        weights.watch(contained(module, weights.tensors))
        assert weights.unchanged()
        count = len(weights.tensors)
    weights.watch(contained(module, weights.tensors))
    assert len(weights.tensors) == count


def test_what_may_change_unseen_is_not_taken_for_constant() -> None:
    """Memory of arrays and other processes, and tensors without a version counter or a storage."""
    module = Biased().eval()
    array = torch.ones(16).numpy()
    with torch.inference_mode():
        module(torch.randn(4, 16))
    assert module.kept["cpu"].is_inference()
    module.scales = [torch.from_numpy(array), torch.ones(16).share_memory_(), torch.eye(4).to_sparse()]
    assert contained(module, []) == []


def test_a_sparse_tensor_that_is_not_read_prevents_no_capture(plugin: Plugin) -> None:
    module = Biased().eval()
    module.scales.append(torch.eye(4).to_sparse())
    called(module)
    assert plugin.captured() == ["Biased"], plugin.reasons()
