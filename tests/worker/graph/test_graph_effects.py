"""`--graph onednn`: shared memory of results, changes made by calls, and unusual tensors and modules."""

import gc
import weakref
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from cpulaunch.worker.graph import capture  # noqa: E402
from tests.worker.capturing import Plugin, close  # noqa: E402

pytestmark = pytest.mark.torch


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("spread", torch.ones(16))
        self.notes = {"calls": 0}

    def forward(self, value: Tensor) -> object:
        return self.layers(value)


# Results that a program changes in place


class WithConstant(Net):
    def forward(self, value: Tensor) -> object:
        return self.layers(value), self.layers[0].weight * 2, torch.arange(5)


def test_a_result_that_depends_on_no_argument_is_new_at_every_call(plugin: Plugin) -> None:
    model, value = WithConstant().eval(), torch.randn(4, 16)
    expected = plugin.eager(model, value)
    for _ in range(4):
        result = model(value)
        close(result, expected)
        for tensor in result:
            tensor.add_(1)


class TimesOne(Net):
    def forward(self, value: Tensor) -> object:
        return self.layers(value), value * 1


def test_a_copy_of_an_argument_stays_a_copy(plugin: Plugin) -> None:
    model = TimesOne().eval()
    for _ in range(4):
        value = torch.randn(4, 16)
        before = value.clone()
        model(value)[1].add_(1)
        close(value, before)


class WithViews(Net):
    def forward(self, value: Tensor) -> object:
        scores = self.layers(value)
        return scores, scores.t(), scores[1], value.view(-1)


def test_views_of_a_result_or_an_argument_stay_views(plugin: Plugin) -> None:
    model = WithViews().eval()
    for _ in range(4):
        value = torch.randn(4, 16)
        scores, transposed, row, flat = model(value)
        close((scores, transposed, row, flat), plugin.eager(model, value))
        scores.fill_(2)
        flat[0] = 7
        assert transposed.eq(2).all()
        assert row.eq(2).all()
        assert value[0, 0] == 7
    assert plugin.captured() == ["WithViews"]


class Calling(Net):
    """Returns what a function makes of its result and its arguments."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> object:
        return self.function(self.layers(values[0]), *values)


def apart(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(map(torch.randn, shapes))


def shared(rows: int) -> tuple[Tensor, Tensor]:
    value = torch.randn(rows, 16)
    return value, value[2:]


CHANGED_CALLS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "arguments that no longer share memory": (
        lambda result, value, part: (result, part.view(-1)),
        shared(8),
        apart((8, 16), (6, 16)),
    ),
    "an argument that begins later in its memory": (
        lambda result, value: (result, value.as_strided((4,), (1,), 0)),
        apart((8, 16)),
        (torch.randn(9, 16)[1:],),
    ),
    "another row": (
        lambda result, value, row: (result, torch.select(result, 0, row)),
        (*apart((8, 16)), torch.tensor(1)),
        (*apart((8, 16)), torch.tensor(3)),
    ),
    "other rows": (
        lambda result, value, row: (result, value[row : row + 1]),
        (*apart((8, 16)), torch.tensor(1)),
        (*apart((8, 16)), torch.tensor(3)),
    ),
}


@pytest.mark.parametrize("name", CHANGED_CALLS)
def test_views_follow_calls_that_have_the_same_signature(plugin: Plugin, name: str) -> None:
    function, first, later = CHANGED_CALLS[name]
    model = Calling(function).eval()
    for values in (first, first, first, first, later, later):
        close(model(*values), plugin.eager(model, *values))
    assert plugin.captured()


def test_a_result_in_two_places_is_one_tensor(plugin: Plugin) -> None:
    model = Calling(lambda result, value: (result, [result])).eval()
    for _ in range(4):
        first, [second] = model(torch.randn(4, 16))
        assert first is second
    assert plugin.captured() == ["Calling"]


def test_an_argument_in_place_of_its_alias_is_not_returned(plugin: Plugin) -> None:
    """TorchScript leaves detach out; gaps keep the alias from being made again."""
    model = Calling(lambda result, value: (result, value.detach())).eval()
    for _ in range(4):
        value = torch.randn(4, 32)[:, ::2]
        assert model(value)[1] is not value


def test_large_results_are_not_copied(plugin: Plugin, monkeypatch) -> None:
    """The memory of a large tensor that is freed is that of the next one."""
    monkeypatch.setattr(capture, "_copying", lambda *arguments: pytest.fail("copied"))
    model = mlp()
    for _ in range(4):
        model(torch.randn(1 << 16, 16))
    assert plugin.captured() == ["Sequential"]


class Flat(Net):
    def forward(self, value: Tensor) -> object:
        return (self.layers(value) * 0 + value).view(-1).view_as(value), value.t()


def test_an_argument_with_gaps_is_followed(plugin: Plugin) -> None:
    model = Flat().eval()
    for _ in range(4):
        value = torch.randn(8, 32)[::2, ::2]
        result, transposed = model(value)
        value.fill_(3)
        assert transposed.eq(3).all()
        assert not result.eq(3).all()


class Noting(Net):
    def forward(self, value: Tensor, options: dict[str, int] | None = None) -> object:
        return self.layers(value), options if options is not None else self.notes


def test_an_object_returned_by_every_call_is_the_same_object(plugin: Plugin) -> None:
    model, options = Noting().eval(), {"a": 1}
    for _ in range(4):
        assert model(torch.randn(4, 16))[1] is model.notes
        assert model(torch.randn(4, 16), options)[1] is options


class Twice(Net):
    def forward(self, value: Tensor) -> object:
        result = [self.layers(value)]
        return result, result


def test_a_list_returned_twice_is_one_list(plugin: Plugin) -> None:
    model = Twice().eval()
    for _ in range(4):
        first, second = model(torch.randn(4, 16))
        assert first is second


class WithGradients(Net):
    def forward(self, value: Tensor) -> object:
        with torch.enable_grad():
            return self.layers(value)


def test_a_module_that_enables_gradients_itself(plugin: Plugin) -> None:
    model = WithGradients().eval()
    for _ in range(4):
        assert model(torch.randn(4, 16)).requires_grad


# What a call changes


class BehindTheCounter(Net):
    def forward(self, value: Tensor) -> object:
        value.data.add_(1)
        return self.layers(value)


class InPlace(Net):
    def forward(self, value: Tensor) -> object:
        value += 1
        return self.layers(value)


@pytest.mark.parametrize("kind", [BehindTheCounter, InPlace])
def test_arguments_without_version_counters_change_once(plugin: Plugin, kind: type[Net]) -> None:
    model = kind().eval()
    with torch.inference_mode():
        for _ in range(4):
            value = torch.zeros(4, 16)
            model(value)
            assert value.unique().tolist() == [1.0]


class Statistics(Net):
    def forward(self, value: Tensor) -> object:
        return functional.batch_norm(self.layers(value), self.average, self.spread, training=True)


def test_running_statistics_change_once(plugin: Plugin) -> None:
    model, other = Statistics().eval(), Statistics().eval()
    other.load_state_dict(model.state_dict())
    for _ in range(4):
        value = torch.randn(4, 16)
        close(model(value), plugin.eager(other, value))
        close(model.average, other.average)


class Lottery(Net):
    def forward(self, value: Tensor) -> object:
        return torch.where(torch.rand(4, 1) > 2, value, self.layers(value))


def test_unused_random_numbers_are_drawn_once(plugin: Plugin) -> None:
    model, after = Lottery().eval(), []
    for call in (model, lambda value: plugin.eager(model, value)):
        torch.manual_seed(3)
        for _ in range(4):
            call(torch.ones(4, 16))
        after.append(torch.rand(1))
    close(*after)


def test_writes_through_a_view_of_a_weight_are_detected(plugin: Plugin) -> None:
    model = mlp()
    for change in (lambda: 0, lambda: model[0].weight[1:].data.zero_(), lambda: model[2].bias[2:].numpy().fill(7)):
        change()
        for _ in range(3):
            value = torch.randn(4, 16)
            close(model(value), plugin.eager(model, value))
    assert plugin.captured()


# Unusual tensors and modules


def test_sparse_and_nested_arguments(plugin: Plugin) -> None:
    class Graph(Net):
        def forward(self, value: Tensor) -> object:
            return torch.sparse.mm(value, self.layers[0].weight)

    sparse, nested = torch.randn(4, 16).to_sparse_csr(), torch.nested.nested_tensor([torch.randn(2, 16)])
    graph, model = Graph().eval(), mlp()
    for _ in range(3):
        close(graph(sparse), plugin.eager(graph, sparse))
        close(model(nested)[0], plugin.eager(model, nested)[0])


def test_sparse_and_inference_weights(plugin: Plugin) -> None:
    class Graph(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(4).to_sparse())

        def forward(self, value: Tensor) -> object:
            return torch.sparse.mm(self.edges, self.layers(value))

    with torch.inference_mode():
        frozen = mlp()
    for model in (Graph().eval(), frozen):
        for _ in range(3):
            value = torch.randn(4, 16)
            close(model(value), plugin.eager(model, value))
    assert "cannot be detected" in plugin.reasons()


def test_a_class_with_its_own_parameters_method(plugin: Plugin) -> None:
    class Own(Net):
        def parameters(self, kind: str) -> list[Tensor]:
            return []

    model = Own().eval()
    for _ in range(3):
        value = torch.randn(4, 16)
        close(model(value), plugin.eager(model, value))


def test_padding_skipped_by_the_encoder_of_torch(plugin: Plugin) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    for padded in (0, 0, 0, 2, 3):
        value, mask = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
        mask[1, 6 - padded :] = True
        close(model(value, src_key_padding_mask=mask), plugin.eager(model, value, src_key_padding_mask=mask))


def test_the_memory_of_a_dropped_model_is_freed(plugin: Plugin) -> None:
    model = mlp()
    weight = weakref.ref(model[0].weight)
    for _ in range(3):
        model(torch.randn(4, 16))
    assert plugin.captured() == ["Sequential"]
    del model
    gc.collect()
    assert weight() is None


# Methods and modes


class Scaling(Net):
    def scaled(self, value: Tensor) -> Tensor:
        return value * 2

    def forward(self, value: Tensor) -> object:
        return self.scaled(self.layers(value))


class Inheriting(Scaling):
    pass


@pytest.mark.parametrize(("kind", "name"), [(Inheriting, "forward"), (Scaling, "scaled"), (nn.Linear, "forward")])
def test_methods_replaced_in_a_class(plugin: Plugin, monkeypatch, kind: type[nn.Module], name: str) -> None:
    model, plain = Inheriting().eval(), getattr(kind, name)
    for number in range(6):
        if number == 3:
            monkeypatch.setattr(kind, name, lambda self, value: plain(self, value) * 5)
        value = torch.randn(4, 16)
        close(model(value), plugin.eager(model, value))
    assert plugin.captured()


def test_a_function_mode_sees_every_operation_once(plugin: Plugin) -> None:
    seen: list[object] = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model, counts = mlp(), []
    for call in (model, model, model, lambda value: plugin.eager(model, value)):
        seen.clear()
        with Seeing():
            call(torch.ones(4, 16))
        counts.append(len(seen))
    assert len(set(counts)) == 1


def test_operations_that_dynamo_cannot_trace_log_nothing(plugin: Plugin, caplog) -> None:
    class Surviving(Net):
        def forward(self, value: Tensor) -> object:
            try:
                return self.layers(value) + torch.ones(3)
            except RuntimeError:
                return self.layers(value)

    model, value = Surviving().eval(), torch.randn(4, 16)
    for _ in range(3):
        close(model(value), plugin.eager(model, value))
    assert "failed while attempting" not in caplog.text
