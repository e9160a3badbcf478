"""--channels-last: weights are converted where that is faster; durations are made up by a false clock."""

import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import channels_last  # noqa: E402
from cpulaunch.worker.weights import form  # noqa: E402
from tests.worker.capturing import close, installed, python_calls  # noqa: E402

pytestmark = pytest.mark.torch
SETTINGS = TorchSettings(channels_last=True)


class Images(nn.Module):
    def __init__(self, *, viewing: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.viewing = viewing

    @property
    def is_converted(self) -> bool:
        return not self.convolution.weight.is_contiguous()

    def forward(self, value: Tensor) -> Tensor:
        result = self.convolution(value)
        return result.view(result.shape[0], -1) if self.viewing else result.flatten(1)


class Clock:
    """A clock on which a call takes a second, and `converted` seconds with converted weights."""

    def __init__(self, model: Images, converted: float) -> None:
        self.now = 0.0
        model.register_forward_pre_hook(lambda *_: self.advance(converted if model.is_converted else 1.0))

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("converted", "stays"), [(0.5, True), (0.99, False), (1.5, False)])
def test_the_faster_layout_stays(tmp_path: Path, monkeypatch, converted: float, stays: bool) -> None:
    model, value, seen = Images().eval(), torch.randn(2, 3, 8, 8), set()
    monkeypatch.setattr(channels_last, "_clock", Clock(model, converted))
    with installed(tmp_path, SETTINGS, measured=True) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(30):
            close(model(value), expected)
            seen.add(model.is_converted)
        applied = [event["detail"] for event in plugin.events("applied") if event["setting"] == "channels_last"]
        assert applied == (["Images: 500 ms, 1e+03 ms before"] if stays else [])
        assert ("channels_last is not faster" in plugin.reasons()) is not stays
    assert seen == {False, True}
    assert model.is_converted is stays


@pytest.mark.parametrize("measured", [False, True])
def test_a_model_that_does_not_support_channels_last_gets_its_layout_back(tmp_path: Path, capfd, measured) -> None:
    model, value = Images(viewing=True).eval(), torch.randn(2, 3, 8, 8)
    with installed(tmp_path, SETTINGS, measured=measured) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(20):
            close(model(value), expected)
        assert not model.is_converted
    assert capfd.readouterr().err.count("--channels-last: Images does not support channels_last") == 1


def test_without_measuring_the_first_call_converts(tmp_path: Path) -> None:
    model, value = Images().eval(), torch.randn(2, 3, 8, 8)
    with installed(tmp_path, SETTINGS) as plugin:
        close(model(value), plugin.eager(model, value))
        assert model.is_converted
        assert [event["detail"] for event in plugin.events("applied")] == ["Images"]


def test_a_layout_that_the_program_has_chosen_stays(tmp_path: Path) -> None:
    model = Images().eval().to(memory_format=torch.channels_last)
    with installed(tmp_path, SETTINGS, measured=True) as plugin:
        for _ in range(30):
            model(torch.randn(2, 3, 8, 8))
        assert plugin.reasons() == ""
    assert model.is_converted


def test_calls_with_other_shapes_do_not_count(tmp_path: Path) -> None:
    model = Images().eval()
    with installed(tmp_path, SETTINGS, measured=True) as plugin:
        model(torch.randn(1, 3, 8, 8))
        for size in range(9, 300):
            model(torch.randn(2, 3, 4, size))
        assert "channels_last is not faster" in plugin.reasons()
    assert not model.is_converted


@pytest.mark.parametrize("is_fast", [False, True])
def test_calls_of_a_trial_are_in_bf16_only_where_that_is_fast(tmp_path: Path, monkeypatch, is_fast: bool) -> None:
    """Calls that do not count, as of other shapes, are many."""
    monkeypatch.setattr(form, "_fast", [is_fast])
    model, seen = Images().train(), set()
    model.register_forward_pre_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    settings = TorchSettings(channels_last=True, precision="bf16")
    with installed(tmp_path, settings, measured=True), torch.enable_grad():
        for size in range(8, 200):
            model(torch.randn(1, 3, 8, size))
    assert seen == {is_fast}


def trained(model: Images, steps: int, **options: bool) -> Tensor:
    """The weights after training on made-up images. Effect: gradients are kept between steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    torch.manual_seed(1)
    with torch.enable_grad():
        for _ in range(steps):
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return model.convolution.weight.detach().clone()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True, "fused": True}])
@pytest.mark.parametrize("converted", [0.5, 1.4])
def test_training_is_the_same_whatever_the_layout(tmp_path: Path, monkeypatch, options, converted) -> None:
    torch.manual_seed(0)
    model, other = Images().train(), Images().train()
    other.load_state_dict(model.state_dict())
    expected = trained(other, 80, **options)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, converted))
    with installed(tmp_path, SETTINGS, measured=True):
        result = trained(model, 80, **options)
    assert model.is_converted is (converted < 1)
    torch.testing.assert_close(result.contiguous(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("converted", [0.5, 1.4])
def test_weights_converted_in_inference_mode_can_be_trained(tmp_path: Path, monkeypatch, converted: float) -> None:
    model, value = Images().eval(), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, converted))
    with installed(tmp_path, SETTINGS, measured=True):
        with torch.inference_mode():
            for _ in range(20):
                model(value)
        assert model.is_converted is (converted < 1)
        with torch.enable_grad():
            model(value).sum().backward()
    assert not model.convolution.weight.is_inference()
    assert model.convolution.weight.grad is not None


class Maps(Images):
    def forward(self, value: Tensor) -> Tensor:
        return self.convolution(value)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_results_have_the_layout_that_the_program_knows(tmp_path: Path, monkeypatch, capfd, measured, training) -> None:
    model, value = Maps().train(training), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=measured) as plugin, torch.set_grad_enabled(training):
        expected = plugin.eager(model, value).flatten()
        for _ in range(60):
            result = model(value)
            close(result.view(-1), expected)
            if training:
                result.view(-1).sum().backward()
        assert not model.is_converted
    assert capfd.readouterr().err.count("results of Maps would have another memory layout") == 1


def test_results_in_channels_last_of_such_images_are_the_programs_own(tmp_path: Path, monkeypatch) -> None:
    model, value = Maps().eval(), torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=True):
        for _ in range(20):
            model(value)
    assert model.is_converted


def test_images_in_channels_last_say_nothing_of_the_results_of_others(tmp_path: Path, monkeypatch) -> None:
    model, value = Maps().eval(), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=True) as plugin:
        model(value.to(memory_format=torch.channels_last))
        expected = plugin.eager(model, value).flatten()
        for _ in range(20):
            close(model(value).view(-1), expected)


class FailingElse(Images):
    def forward(self, value: Tensor) -> Tensor:
        if not self.is_converted:
            raise ValueError("the program's own")
        result: Tensor = self.convolution(value).view(-1)
        return result


def test_an_error_in_the_own_layout_has_none_of_channels_last_as_its_context(tmp_path: Path) -> None:
    with installed(tmp_path, SETTINGS), pytest.raises(ValueError, match="own") as raised:
        FailingElse().eval()(torch.randn(2, 3, 8, 8))
    assert raised.value.__context__ is None


class Slow(Images):
    """Views its result as contiguous; a call lasts until the other thread's has begun."""

    def forward(self, value: Tensor) -> Tensor:
        result = self.convolution(value)
        time.sleep(0.002)
        return result.view(result.shape[0], -1)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("alone", [0, 5, 7])
def test_threads_may_call_the_same_model(tmp_path: Path, measured: bool, alone: int) -> None:
    model, value, failures = (Slow() if alone == 0 else Images()).eval(), torch.randn(2, 3, 8, 8), []
    with installed(tmp_path, SETTINGS, measured=measured) as plugin:
        expected = plugin.eager(model, value)

        def work(number: int) -> None:
            try:
                with torch.no_grad():
                    for _ in range(number):
                        close(model(value), expected)
            except BaseException as error:  # noqa: BLE001  The test shows it.
                failures.append(error)

        work(alone)
        threads = [threading.Thread(target=work, args=(30,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    if alone == 0:
        assert not model.is_converted


class Tables(Images):
    """Next to convolutions of images, one of volumes, and buffers of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes = nn.Conv3d(1, 2, 3)
        self.register_buffer("table", torch.randn(1, 2, 3, 4))
        self.register_buffer("wide", torch.ones(1, 1, 1, 1).expand(2, 3, 4, 5))


@pytest.mark.parametrize("converted", [0.5, 1.5])
def test_only_convolutions_of_images_are_converted(tmp_path: Path, monkeypatch, capfd, converted: float) -> None:
    model, value = Tables().eval(), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, converted))
    buffers = [(buffer, buffer.stride()) for buffer in model.buffers()]
    with installed(tmp_path, SETTINGS, measured=True):
        for _ in range(20):
            model(value)
    assert model.is_converted is (converted < 1)
    assert model.volumes.weight.is_contiguous()
    for buffer, (before, strides) in zip(model.buffers(), buffers, strict=True):
        assert buffer is before
        assert buffer.stride() == strides
    assert capfd.readouterr().err == ""


def _shared(model: Images) -> Tensor:
    return model.share_memory().convolution.weight


def _flat(model: Images) -> Tensor:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


def _array(model: Images) -> object:
    array = numpy.random.rand(8, 3, 3, 3).astype("float32")
    model.convolution.weight = nn.Parameter(torch.from_numpy(array))
    return array


def _held(model: Images) -> object:
    return model.state_dict()


@pytest.mark.parametrize("hold", [_shared, _flat, _array, _held])
@pytest.mark.parametrize("measured", [False, True])
def test_weights_whose_memory_is_held_elsewhere_stay_in_it(tmp_path: Path, monkeypatch, hold, measured) -> None:
    model, value = Images().eval(), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    held, pointer = hold(model), model.convolution.weight.data_ptr()
    with installed(tmp_path, SETTINGS, measured=measured):
        for _ in range(20):
            model(value)
    assert model.convolution.weight.data_ptr() == pointer
    assert held is not None


def test_weights_that_a_program_takes_hold_of_later_stay_in_their_memory(tmp_path: Path, monkeypatch) -> None:
    model, value = Images().eval(), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=True):
        model(value)
        held = model.convolution.weight.data
        for _ in range(20):
            model(value)
        held.zero_()
    assert not model.convolution.weight.any()


class Half(Images):
    """Returns a view of the convolution's result."""

    def forward(self, value: Tensor) -> Tensor:
        return self.convolution(value)[:, :4]


def test_results_that_get_another_layout_have_the_same_gradients(tmp_path: Path, monkeypatch) -> None:
    model, value, gradients = Half().train(), torch.randn(2, 3, 8, 8), []
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=True), torch.enable_grad():
        for _ in range(60):
            model.zero_grad()
            result = model(value)
            result.mul_(torch.arange(result.numel()).view_as(result)).sum().backward()
            gradients.append(model.convolution.weight.grad)
    assert not model.is_converted
    for gradient in gradients:
        close(gradient / gradients[0].norm(), gradients[0] / gradients[0].norm())


class Echo(Images):
    """Returns its argument next to the images' features."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value, super().forward(value)


def test_arguments_that_are_returned_stay_as_they_are(tmp_path: Path, monkeypatch) -> None:
    model = Echo().eval()
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=True):
        for _ in range(20):
            model(torch.randn(2, 3, 8, 8))
            images = torch.randn(2, 5, 5, 3).permute(0, 3, 1, 2)
            strides = images.stride()
            assert model(images)[0] is images
            assert images.stride() == strides
    assert model.is_converted


class Scaled(nn.Module):
    """A module without weights that a program makes for each call."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 2


def test_new_modules_without_convolutions_cost_the_same_however_many_models_there_are(tmp_path: Path) -> None:
    models, value, counts = [Images().eval() for _ in range(60)], torch.randn(2, 3, 8, 8), []
    with installed(tmp_path, SETTINGS, measured=True):
        for some in (models[:2], models):
            for model in some:
                model(value)
            counts.append(min(python_calls(lambda: Scaled()(value)) for _ in range(5)))
    assert counts[1] < counts[0] + 20


@pytest.mark.parametrize("training", [False, True])
def test_calls_of_a_converted_model_do_not_list_its_parts(tmp_path: Path, monkeypatch, training: bool) -> None:
    model, value, listed, modules = Images().train(training), torch.randn(2, 3, 8, 8), [], nn.Module.modules
    with installed(tmp_path, SETTINGS), torch.set_grad_enabled(training):
        for _ in range(3):
            model(value)
        assert model.is_converted
        monkeypatch.setattr(nn.Module, "modules", lambda *given: (listed.append(given[0]), modules(*given))[1])
        for _ in range(20):
            model(value)
    assert listed == []


class Compared(Images):
    """Is compared by its weights, whose comparison is no truth value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared) and bool(self.convolution.weight == other.convolution.weight)

    __hash__ = Images.__hash__


@pytest.mark.parametrize("measured", [False, True])
def test_models_are_told_apart_by_identity(tmp_path: Path, monkeypatch, measured: bool) -> None:
    model, value = Compared().eval(), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=measured) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(30):
            close(model(value), expected)
    assert model.is_converted


class Unhashable(nn.Module):
    """As a dataclass is."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def forward(self, value: Tensor) -> Tensor:
        return value * 2


def test_modules_without_a_hash_leave_others_their_parts(tmp_path: Path) -> None:
    whole, value, other = Images().eval(), torch.randn(2, 3, 8, 8), Unhashable()
    with installed(tmp_path, SETTINGS):
        other(value)
        for _ in range(3):
            whole(value)
        assert whole.is_converted
        assert whole.convolution(value).is_contiguous()
