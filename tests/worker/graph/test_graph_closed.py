"""Functions that Dynamo is told not to look into: what they check and read is checked and read at each call.

PYTEST_DONT_REWRITE: Dynamo would not know the assertions of modules.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.worker.graph import dynamo  # noqa: E402
from tests.worker.capturing import Net, Plugin, close  # noqa: E402

pytestmark = pytest.mark.torch

allow_in_graph, constant = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
SCALE = [1.0]


def limited(value: Tensor) -> Tensor:
    torch._assert_async((value.abs() < 100).all())
    return value * SCALE[0]


class Instance:
    __name__ = "instance"  # Dynamo asks for it.

    def __call__(self, value: Tensor) -> Tensor:
        return limited(value)

    def method(self, value: Tensor) -> Tensor:
        return limited(value)


class Limiting(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return limited(value)


class LimitingClass(Limiting):
    pass


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return limited(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


allow_in_graph(Function)


class Traced(torch.autograd.Function):
    """It is an ordinary one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def limited_leaf() -> Callable[[Tensor], Tensor] | None:
    """A function that is marked as `leaf_function`; None where torch has none, as before 2.12."""
    from torch._dynamo import decorators

    if not hasattr(decorators, "leaf_function"):
        return None

    @decorators.leaf_function
    def leaf(value: Tensor) -> tuple[Tensor]:
        if value.abs().max() > 100:
            raise AssertionError("too large")
        return (value * SCALE[0],)

    @leaf.register_fake
    def _(value: Tensor) -> tuple[Tensor]:
        return (value * 1,)

    return lambda value: leaf(value)[0]


@allow_in_graph
def checked(value: Tensor) -> None:
    torch._assert_async((value.abs() < 100).all())


def checking(value: Tensor) -> Tensor:
    checked(value)
    return value * SCALE[0]


@allow_in_graph
def doubled(value: Tensor) -> Tensor:
    return value * 2


def named_as_of_torch(function: Callable[..., Any]) -> Any:
    return functools.wraps(torch.nn.functional.relu)(function)


CLOSED: dict[str, Any] = {
    "instance": allow_in_graph(Instance()),
    "method": allow_in_graph(Instance().method),
    "partial": allow_in_graph(functools.partial(limited)),
    "module": allow_in_graph(Limiting()),
    "class of a module": allow_in_graph(LimitingClass)(),
    "function of autograd": lambda value: Function.apply(value),
    "method of a function of autograd": Function.apply,
    "named as one of torch's": allow_in_graph(named_as_of_torch(lambda value: limited(value))),
    "named as one of torch's, by torch": allow_in_graph(named_as_of_torch(torch.no_grad()(limited))),
    "leaf": limited_leaf(),
    "without a result": checking,
}
"""Functions that check their argument and read a global."""


@constant
def scale() -> float:
    return SCALE[0]


class Scaling(Net):
    @constant
    def scale(self) -> float:
        return SCALE[0]

    def factor(self, value: Tensor) -> float:
        return self.scale()


CONSTANTS: dict[str, Callable[[], float]] = {
    "function": scale,
    "named as one of torch's": constant(named_as_of_torch(lambda: SCALE[0])),
}


class Using(Net):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = [function]  # Modules are no parts of it.

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(self.function[0](value))


@pytest.fixture(autouse=True)
def _scale() -> Iterator[None]:
    SCALE[0] = 1.0
    yield
    SCALE[0] = 1.0


def captured_model(plugin: Plugin, model: nn.Module) -> Tensor:
    """The argument of calls of a model after which it, or its parts, are captured."""
    value = torch.randn(4, 16)
    for _ in range(5):
        close(model(value), plugin.eager(model, value))
    assert plugin.captured(), plugin.reasons()
    return value


def captured_use(plugin: Plugin, name: str) -> tuple[nn.Module, Tensor]:
    """A model that uses this closed function, and the argument of the calls after which its parts are captured."""
    if CLOSED[name] is None:
        pytest.skip("this torch has no such functions")
    model = Using(CLOSED[name]).eval()
    return model, captured_model(plugin, model)


@pytest.mark.parametrize("name", CLOSED)
def test_a_global_that_a_closed_function_reads_is_read_at_each_call(plugin: Plugin, name: str) -> None:
    model, value = captured_use(plugin, name)
    SCALE[0] = 2.0
    close(model(value), plugin.eager(model, value))


@pytest.mark.parametrize("name", CLOSED)
def test_what_a_closed_function_checks_is_checked_at_each_call(plugin: Plugin, name: str) -> None:
    model, value = captured_use(plugin, name)
    with pytest.raises((AssertionError, RuntimeError)):
        model(value + 1000)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_global_that_a_constant_function_reads_is_read_at_each_call(plugin: Plugin, name: str) -> None:
    model = Using(lambda value: value * CONSTANTS[name]()).eval()
    value = captured_model(plugin, model)
    assert plugin.captured() == ["Sequential"]
    SCALE[0] = 2.0
    close(model(value), plugin.eager(model, value))


def test_a_global_that_a_constant_method_reads_is_read_at_each_call(plugin: Plugin) -> None:
    model = Scaling().eval()
    value = captured_model(plugin, model)
    assert plugin.captured() == ["Sequential"]
    SCALE[0] = 2.0
    close(model(value), plugin.eager(model, value))


OPEN: dict[str, Any] = {
    "function of autograd": lambda value: Traced.apply(value),
    "operator": allow_in_graph(torch.ops.aten.tanh.default),
    "function in C++": allow_in_graph(torch.sigmoid),
    "function of torch's": allow_in_graph(torch.nn.functional.silu),
}


@pytest.mark.parametrize("name", OPEN)
def test_functions_whose_result_depends_on_their_arguments_alone_are_captured(plugin: Plugin, name: str) -> None:
    captured_model(plugin, Using(OPEN[name]).eval())
    assert plugin.captured() == ["Using"], plugin.reasons()


def test_closed_functions_of_packages_that_are_known_as_pure_are_captured(plugin: Plugin, monkeypatch) -> None:
    monkeypatch.setattr(dynamo, "PURE", (__name__.partition(".")[0],))
    captured_model(plugin, Using(doubled).eval())
    assert plugin.captured() == ["Using"], plugin.reasons()
