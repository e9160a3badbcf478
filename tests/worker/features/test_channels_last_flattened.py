"""--channels-last where a program, or torch, flattens weights and gradients, or counts calls in running statistics."""

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from tests.worker.capturing import Plugin, close, installed  # noqa: E402

pytestmark = pytest.mark.torch
SETTINGS = TorchSettings(channels_last=True)


def network(*, viewing: bool = False) -> nn.Sequential:
    """A small network; with `viewing`, it views the result of its convolution as contiguous."""
    torch.manual_seed(0)
    end = Viewing() if viewing else nn.Flatten()
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), end)


class Viewing(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.view(len(value), -1)


def is_converted(model: nn.Sequential) -> bool:
    return not model[0].weight.is_contiguous()


@pytest.mark.parametrize("viewing", [False, True])
def test_running_statistics_see_each_batch_once(tmp_path: Path, viewing: bool) -> None:
    model, plain = network(viewing=viewing), network(viewing=viewing)
    with installed(tmp_path, SETTINGS), torch.enable_grad():
        for _ in range(3):
            value = torch.randn(4, 3, 8, 8)
            close(model(value), Plugin.eager(plain, value))
        assert is_converted(model) is not viewing
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        close(one, other)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_flattens_gradients_trains_as_in_the_other_layout(tmp_path: Path, search) -> None:
    def trained(model: nn.Sequential) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)
        model.double()  # In fp32 a line search makes another step of each rounding.
        value = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(value).square().mean()
            loss.backward()
            return loss

        with torch.enable_grad():
            for _ in range(2):
                optimizer.step(closure)
        return [parameter.detach() for parameter in model.parameters()]

    with installed(tmp_path, SETTINGS) as plugin:
        model = network()
        found = trained(model)
        assert is_converted(model)
        for one, other in zip(found, plugin.eager(trained, network()), strict=True):
            close(one, other, tolerance=1e-3)


@pytest.mark.parametrize(
    "flattened",
    [
        lambda model: nn.utils.parameters_to_vector(model.parameters()),
        lambda model: torch.cat([parameter.view(-1) for parameter in model.parameters()]),
        lambda model: torch.cat([parameter.view(size=(parameter.numel(),)) for parameter in model.parameters()]),
    ],
)
def test_weights_may_be_flattened_after_a_conversion(tmp_path: Path, flattened) -> None:
    model, value = network().eval(), torch.randn(4, 3, 8, 8)
    expected, elements = Plugin.eager(model, value), torch.cat([each.flatten() for each in model.parameters()])
    with installed(tmp_path, SETTINGS):
        close(model(value), expected)
        assert is_converted(model)
        close(flattened(model).detach(), elements.detach())
        assert not is_converted(model)
        close(model(value), expected)
        model[0].weight.view(-1).fill_(0.5)
        assert (model[0].weight == 0.5).all()


def test_a_view_that_no_layout_allows_is_an_error(tmp_path: Path) -> None:
    model = network().eval()
    with installed(tmp_path, SETTINGS):
        model(torch.randn(4, 3, 8, 8))
        with pytest.raises(RuntimeError, match="invalid for input"):
            model[0].weight.view(5, -1)
        with pytest.raises(RuntimeError, match="invalid for input"):
            model[0].bias.view(5, -1)


def test_compiled_code_flattens_parameters(tmp_path: Path) -> None:
    model = network().eval()
    with installed(tmp_path, SETTINGS):
        model(torch.randn(4, 3, 8, 8))
        compiled = torch.compile(lambda weight: weight.view(-1).sum(), backend="eager", fullgraph=True)
        close(compiled(model[0].bias), model[0].bias.sum())


class OfTwoModes(nn.Module):
    """Does something in one mode that it does not do in the other."""

    def __init__(self, viewing: bool, *, ends_as_images: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.viewing, self.ends_as_images = viewing, ends_as_images

    def forward(self, value: Tensor) -> Tensor:
        result = self.norm(self.convolution(value))
        if self.training is not self.viewing:
            return result.flatten(1)
        return result if self.ends_as_images else result.view(len(result), -1)

    @property
    def is_converted(self) -> bool:
        return not self.convolution.weight.is_contiguous()


@pytest.mark.parametrize("viewing", [False, True])
@pytest.mark.parametrize("ends_as_images", [False, True])
def test_a_model_that_stays_converted_may_not_support_it_in_its_other_mode(
    tmp_path: Path, viewing: bool, ends_as_images: bool
) -> None:
    model, plain = (OfTwoModes(viewing, ends_as_images=ends_as_images) for _ in range(2))
    seen = []
    with installed(tmp_path, SETTINGS), torch.enable_grad():
        for training in (not viewing, viewing, not viewing, viewing):
            value = torch.randn(4, 3, 8, 8)
            result, expected = model.train(training)(value), Plugin.eager(plain.train(training), value)
            close(result, expected)
            assert result.stride() == expected.stride()
            seen.append(model.is_converted)
    assert seen == [True, False, False, False]
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        close(one, other)


class Ending(nn.Module):
    """Ends a model that computes images; `end`, which makes numbers of them at first, may be replaced at any call."""

    def __init__(self) -> None:
        super().__init__()
        self.end: Callable[[Tensor], Tensor] = lambda images: images.mean((2, 3))

    def forward(self, value: Tensor) -> Tensor:
        return self.end(value)


@pytest.mark.parametrize("end", [lambda images: images, lambda images: images.view(-1)], ids=["images", "view"])
def test_a_model_that_stays_converted_may_not_support_it_at_a_later_call(tmp_path: Path, end) -> None:
    model, value = nn.Sequential(*network()[:3], Ending()).eval(), torch.randn(4, 3, 8, 8)
    with installed(tmp_path, SETTINGS):
        for _ in range(3):
            close(model(value), Plugin.eager(model, value))
        assert is_converted(model)
        model[-1].end = end
        result = model(value)
        assert not is_converted(model)
        expected = Plugin.eager(model, value)
        close(result, expected)
        assert result.stride() == expected.stride()


@pytest.mark.parametrize("before", ["not called", "called", "called while its weights are held"])
@pytest.mark.parametrize("end", [lambda images: images, lambda images: images.view(-1)], ids=["images", "view"])
def test_a_part_that_the_program_calls_by_itself_has_results_in_its_own_layout(
    tmp_path: Path, before: str, end
) -> None:
    part = nn.Sequential(*network()[:3], Ending()).eval()
    model, value = nn.Sequential(part, nn.Softmax(-1)).eval(), torch.randn(4, 3, 8, 8)
    with installed(tmp_path, SETTINGS):
        held = [part[0].weight.data] if "held" in before else []
        if before != "not called":
            close(part(value), Plugin.eager(part, value))
            held.clear()
        for called in (model, part, model):
            close(called(value), Plugin.eager(called, value))
        assert is_converted(part)
        part[-1].end = end
        for _ in range(3):
            result, expected = part(value), Plugin.eager(part, value)
            assert not is_converted(part)
            close(result, expected)
            assert result.stride() == expected.stride()
            close(model(value), Plugin.eager(model, value))


def test_a_part_that_trains_in_a_model_in_eval_mode_sees_each_batch_once(tmp_path: Path) -> None:
    """It was not there when the model was converted, and the repeated call is the first one that it sees."""
    model, plain, value = network().eval(), network().eval(), torch.randn(4, 3, 8, 8)
    with installed(tmp_path, SETTINGS):
        for _ in range(3):
            close(model(value), Plugin.eager(plain, value))
        assert is_converted(model)
        for each in (model, plain):
            each[3] = nn.Sequential(nn.BatchNorm2d(8).train(), Viewing())
        close(model(value), Plugin.eager(plain, value))
        assert not is_converted(model)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        close(one, other)
