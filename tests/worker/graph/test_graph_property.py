"""Random small modules: captured results equal eager ones in values, types and structure."""

import tempfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from tests.worker.capturing import close, installed  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WIDTH = 8
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "softmax": lambda: nn.Softmax(dim=-1),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.5),
    "identity": nn.Identity,
    "residual": lambda: Residual(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())),
    "gate": lambda: Gate(),
    "conv": lambda: Convolution(),
    "sign": lambda: BySign(),
}


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Tensor) -> Tensor:
        return value + self.inner(value)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, value: Tensor) -> Tensor:
        return torch.where(value > 0, value * self.weight, value * self.scale)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Conv1d(2, 1, 1))

    def forward(self, value: Tensor) -> Tensor:
        flat = value.reshape(-1, 1, WIDTH)
        return self.layers(flat).reshape(value.shape)


class BySign(nn.Module):
    """Control flow that depends on values: cannot be captured as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) if value.mean() > 0 else -value


SHAPES = {
    "tensor": lambda value: value,
    "tuple": lambda value: (value, value.argmax(-1)),
    "dict": lambda value: {"a": value, "b": [value.sum(), None, 3]},
    "view": lambda value: (value[..., :2], value.transpose(0, -1)),
}


class Whole(nn.Module):
    def __init__(self, names: list[str], shape: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in names))
        self.shape = shape

    def forward(self, value: Tensor, *, shift: float = 0.0) -> object:
        return SHAPES[self.shape](self.layers(value + shift))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.sampled_from([(3, WIDTH), (2, 3, WIDTH), (1, WIDTH)]), min_size=1, max_size=2),
    st.sampled_from([0.0, 1.5, -2.0]),
    st.integers(0, 2**31),
)
def test_captured_results_equal_eager_results(names, shape, sizes, shift, seed) -> None:
    torch.manual_seed(seed)
    model = Whole(names, shape).eval()
    with tempfile.TemporaryDirectory() as folder, installed(Path(folder), TorchSettings(graph="onednn")) as plugin:
        for _ in range(3):
            for size in sizes:
                value = torch.randn(size)
                close(model(value, shift=shift), plugin.eager(model, value, shift=shift), tolerance=1e-3)
        assert plugin.captured() or plugin.reasons()
