"""`--graph onednn`: results are correct whatever a program does with its modules; eager calls have a reason."""

import re
import threading
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.graph import cache as modules  # noqa: E402
from tests.launch.launching import eventually  # noqa: E402
from tests.worker.capturing import Plugin, close, installed  # noqa: E402

pytestmark = pytest.mark.torch


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).eval()


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 16)))


def same(plugin: Plugin, module: nn.Module, *inputs: Tensor, rounds: int = 3) -> None:
    for value in inputs * rounds:
        close(module(value), plugin.eager(module, value))


def test_a_plain_model_is_captured(plugin: Plugin) -> None:
    same(plugin, mlp(), x(), x())
    assert plugin.captured() == ["Sequential"]


def test_each_input_signature_has_its_own_capture(plugin: Plugin) -> None:
    same(plugin, mlp(), x(4, 16), x(7, 16), x(2, 3, 16))
    assert [event["signature"] for event in plugin.events("captured")] == [
        "float32[4, 16]",
        "float32[7, 16]",
        "float32[2, 3, 16]",
    ]


def test_signatures_beyond_the_limit_run_eagerly(plugin: Plugin) -> None:
    model = mlp()
    same(plugin, model, *(x(rows, 16) for rows in range(1, 13)))
    assert len(plugin.captured()) == 8
    assert "more than 8 signatures" in plugin.reasons()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, value: Tensor) -> Tensor:
        return self.layers(value) * 2 if value.sum() > 0 else value - 1


def test_a_module_with_a_branch_on_values_runs_eagerly_and_its_submodule_is_captured(plugin: Plugin) -> None:
    same(plugin, Branch().eval(), x().abs(), -x().abs(), x())
    assert plugin.captured() == ["Sequential"]
    assert re.search(r"Dynamo: (Data-dependent branching|Dynamic control flow)", plugin.reasons())


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        while value.norm() > 1:
            value = self.layer(value) / 2
        return value


def test_a_loop_on_values_runs_eagerly(plugin: Plugin) -> None:
    same(plugin, Loop().eval(), x() * 10, x() * 0.01, x())
    assert plugin.captured() == []
    assert plugin.reasons()


class Shapeshifter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, value: Tensor, wanted: str = "tensor") -> object:
        result = self.layer(value)
        if value.dim() == 3:
            return [result, {"twice": result * 2, "none": None}]
        return (result, wanted) if wanted == "pair" else result


def test_another_structure_for_another_input(plugin: Plugin) -> None:
    model = Shapeshifter().eval()
    for _ in range(3):
        for value, wanted in ((x(), "tensor"), (x(), "pair"), (x(2, 3, 16), "tensor")):
            close(model(value, wanted=wanted), plugin.eager(model, value, wanted=wanted))
    assert len(plugin.captured()) == 3


Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    scores: Tensor
    label: str
    parts: Pair


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, batch: dict[str, Tensor], *, scale: float) -> Result:
        scores = self.layer(batch["a"]) * scale + batch["b"]
        return Result(scores=scores, label="x", parts=Pair(batch["a"], scores.argmax(-1)))


def test_dicts_in_and_dataclasses_with_named_tuples_out(plugin: Plugin) -> None:
    model = Structured().eval()
    for scale in (1.0, 2.0, 1.0, 2.0, 2.0):
        batch = {"a": x(), "b": x()}
        result = model(batch, scale=scale)
        close(result, plugin.eager(model, batch, scale=scale))
        assert result.parts.first.data_ptr() == batch["a"].data_ptr()
    assert plugin.captured() == ["Structured", "Structured"]


# Changes between calls


def bump(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.5)


def through_data(model: nn.Module) -> None:
    next(model.parameters()).data.mul_(3)


def through_numpy(model: nn.Module) -> None:
    next(model.parameters()).detach().numpy()[...] = 1


def fused_step(model: nn.Module) -> None:
    """A fused optimizer step, which torch itself does not count as a write."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def optimizer_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.enable_grad():
        model(x()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def replace_weight(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(x(16, 16))


def replace_data(model: nn.Module) -> None:
    model[0].weight.data = x(16, 16)


def replace_part(model: nn.Module) -> None:
    model[0] = nn.Linear(16, 16)


def append_part(model: nn.Module) -> None:
    model.append(nn.Linear(16, 16).eval())


def to_and_back(model: nn.Module) -> None:
    model.to(torch.float64)
    bump(model)
    model.to(torch.float32)


def add_hook(model: nn.Module) -> None:
    model[1].register_forward_hook(lambda module, args, output: output + 7)


def add_outer_hook(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def swap_activation(model: nn.Module) -> None:
    model[1] = nn.Tanh()


@pytest.mark.parametrize(
    "change",
    [
        *(bump, through_data, through_numpy, optimizer_step, fused_step, load, assign, replace_weight, replace_data),
        *(replace_part, append_part, to_and_back, add_hook, add_outer_hook, swap_activation),
    ],
)
def test_a_model_changed_between_calls(plugin: Plugin, change) -> None:
    model = mlp()
    same(plugin, model, x())
    assert plugin.captured() == ["Sequential"]
    before = plugin.eager(model, torch.ones(4, 16))
    change(model)
    assert not torch.allclose(plugin.eager(model, torch.ones(4, 16)), before)
    same(plugin, model, x(), x(), rounds=4)


def test_a_module_whose_weights_change_too_often_runs_eagerly(plugin: Plugin) -> None:
    model = mlp()
    for _ in range(40):
        same(plugin, model, x(), rounds=4)
        bump(model)
    assert "change too often" in plugin.reasons()
    assert len(plugin.captured()) <= 5


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.options = {"scale": 1.0}
        self.negative = False

    def forward(self, value: Tensor) -> Tensor:
        result = self.layer(value) * self.options["scale"]
        return -result if self.negative else result


def test_attributes_changed_between_calls(plugin: Plugin) -> None:
    model = Configured().eval()
    same(plugin, model, x())
    for negative, scale in ((True, 1.0), (True, 3.0), (False, 3.0), (False, 1.0)):
        model.negative, model.options["scale"] = negative, scale
        same(plugin, model, x())
    assert plugin.captured()


def test_calls_in_training_mode_or_with_gradients_run_eagerly(plugin: Plugin) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16))
    model(x())
    assert model[2].num_batches_tracked.item() == 1
    model.eval()
    with torch.enable_grad():
        assert model(x()).requires_grad
    assert plugin.captured() == []
    assert "it is in training mode; gradients are enabled" in plugin.reasons()
    same(plugin, model, x())
    assert plugin.captured() == ["Sequential"]
    model.train()
    model(x())
    model.eval()
    same(plugin, model, x(), x())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.layers(value) + self.seen


def test_a_module_with_state_counts_every_call_once(plugin: Plugin) -> None:
    model = Counting().eval()
    for count in range(1, 6):
        model(x())
        assert (model.calls, model.seen.item()) == (count, count)
    assert plugin.captured() == ["Sequential"]


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(value)


def test_a_python_counter_counts_every_call_once(plugin: Plugin) -> None:
    model = Remembering().eval()
    for count in range(1, 6):
        model(x())
        assert model.calls == count
    assert "it changes attributes of the module" in plugin.reasons()


def test_arguments_changed_in_place_change_once(plugin: Plugin) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, value: Tensor) -> Tensor:
            value += 1
            return self.layers(value)

    model = InPlace().eval()
    for _ in range(4):
        value = torch.zeros(4, 16)
        model(value)
        assert value.unique().tolist() == [1.0]


def test_hooks_run_at_every_call(plugin: Plugin) -> None:
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    same(plugin, model, x(), x(), rounds=2)
    assert len(seen) == 8  # Four calls here, and four eager ones to compare with.


def test_global_hooks_run_at_every_call(plugin: Plugin) -> None:
    model, seen = mlp(), []
    same(plugin, model, x())
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    model(x())
    handle.remove()
    assert seen.count(model) == 1
    assert len(seen) == 4


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) + torch.rand_like(value)


def test_the_random_numbers_of_the_program_do_not_change(plugin: Plugin) -> None:
    model = Random().eval()
    torch.manual_seed(5)
    results = [model(torch.ones(4, 16)) for _ in range(4)]
    torch.manual_seed(5)
    close(results, [plugin.eager(model, torch.ones(4, 16)) for _ in range(4)])


TABLE = torch.ones(16)


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.mask = torch.ones(16)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) * self.mask * TABLE


def test_tensor_attributes_that_are_not_buffers(plugin: Plugin) -> None:
    global TABLE
    model = Outside().eval()
    same(plugin, model, x())
    model.mask = torch.zeros(16)
    same(plugin, model, x())
    TABLE = torch.full((16,), 2.0)
    model.mask = torch.ones(16)
    same(plugin, model, x())
    TABLE.add_(1)
    same(plugin, model, x())


def test_four_threads_share_a_model(plugin: Plugin) -> None:
    """A capture waits while a weight's memory is held by another tensor, as by that of a product in another thread."""
    model = mlp()
    values = [x() for _ in range(40)]
    expected = [plugin.eager(model, value) for value in values]
    results: dict[int, Tensor] = {}

    def work(first: int) -> None:
        with torch.no_grad():
            for index in range(first, len(values), 4):
                results[index] = model(values[index])

    def share() -> bool:
        """Whether there is a capture, after calls of all threads."""
        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        close([results.pop(index) for index in range(len(values))], expected)
        return bool(plugin.captured())

    eventually(share, "a capture")
    share()
    assert plugin.captured() == ["Sequential"]


def test_the_program_may_trace_compile_export_and_copy_it(plugin: Plugin) -> None:
    import copy
    import pickle

    model, value = mlp(), x()
    same(plugin, model, value)
    expected = plugin.eager(model, value)
    close(torch.jit.trace(model, value)(value), expected)
    close(torch.compile(model, backend="eager")(value), expected)
    close(torch.compile(lambda v: model(v) + 1, backend="eager")(value), expected + 1)
    close(torch.export.export(model, (value,)).module()(value), expected)
    close(
        torch.func.functional_call(model, {"0.bias": torch.zeros(16)}, value),
        plugin.eager(torch.func.functional_call, model, {"0.bias": torch.zeros(16)}, value),
    )
    close(torch.vmap(model)(value), expected)
    close(copy.deepcopy(model)(value), expected)
    close(pickle.loads(pickle.dumps(model))(value), expected)
    same(plugin, model, value)


def test_the_programs_own_jit_settings_are_untouched(plugin: Plugin) -> None:
    before = torch._C._jit_llga_enabled()
    same(plugin, mlp(), x())
    assert plugin.captured()
    assert torch._C._jit_llga_enabled() is before


class Attributed(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.data * 2 + torch.from_numpy(value.numpy())


def test_numpy_inside_a_module(plugin: Plugin) -> None:
    same(plugin, Attributed().eval(), x(), x())


def test_a_dropped_model_is_removed_from_the_cache(plugin: Plugin) -> None:
    for _ in range(3):
        model = mlp()
        same(plugin, model, x())
        del model
    assert len(plugin.captured()) == 3


def test_a_capture_that_is_slower_is_not_used(plugin: Plugin, monkeypatch) -> None:
    monkeypatch.setattr(modules, "TOLERATED_SLOWDOWN", 0.0)
    same(plugin, mlp(), x(), x())
    assert plugin.captured() == []
    assert "eager execution is faster" in plugin.reasons()


def test_captures_do_not_exceed_the_memory_limit(tmp_path: Path, capfd) -> None:
    limits = TorchSettings(graph="onednn", graph_memory_bytes=3000)
    with installed(tmp_path, limits) as plugin:
        small, large = mlp(16), mlp(64)
        same(plugin, small, x())
        same(plugin, large, x(4, 64))
        assert plugin.captured() == ["Sequential"]
        assert "would exceed" in plugin.reasons()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_calls_run_the_fused_graph(tmp_path: Path, precision) -> None:
    """Not a graph that is optimized again without fusion, as happens if the autocast state differs from the warm-up."""
    if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN fuses nothing in bf16 on a processor without AVX-512")
    with installed(tmp_path, TorchSettings(graph="onednn", precision=precision)) as plugin:
        model = mlp(64)
        for _ in range(4):
            model(x(4, 64))
        assert plugin.captured() == ["Sequential"]
        assert "FusionGroup" in str(torch.jit.last_executed_optimized_graph())


def test_modules_on_other_devices_run_eagerly(plugin: Plugin, capfd) -> None:
    model = mlp().to("meta")
    for _ in range(3):
        assert model(x().to("meta")).device.type == "meta"
    assert plugin.captured() == []
    assert plugin.reasons() == "it is not on the CPU"
    assert capfd.readouterr().err == ""
