"""What keeps oneDNN Graph from compiling a graph, makes it slow or compute something else, and what is done."""

import time
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor, nn  # noqa: E402

from cpulaunch.worker.fusion import trial  # noqa: E402
from cpulaunch.worker.fusion.exclusion import everything, fusible, leave_out, misread, observed_kinds  # noqa: E402
from cpulaunch.worker.fusion.portable import (  # noqa: E402
    PortableGraph,
    function_of,
    fusible_function_of,
    graph_of,
    portable,
)
from cpulaunch.worker.fusion.trial import (  # noqa: E402
    LOW_ROUNDING,
    DifferentResultError,
    SlowerError,
    _check_results,
    _moved_value,
    compile_and_run,
)

pytestmark = pytest.mark.torch
torch.manual_seed(0)
WEIGHT, SCALE, NUMBER, ONES = torch.randn(16, 16), torch.randn(16), torch.tensor(2.0), torch.ones(16)


def graph(function: Callable[..., object], *inputs: Tensor) -> PortableGraph:
    class Module(nn.Module):
        def forward(self, *values: Tensor) -> object:
            return function(*values)

    with torch.no_grad():
        return portable(torch.jit.freeze(torch.jit.trace(Module().eval(), inputs, check_trace=False)))


@pytest.fixture
def fused() -> Iterator[None]:
    """As in the process of an attempt, which the helper forks."""
    autocast = torch._C._jit_set_autocast_mode(False)
    yield
    torch._C._jit_set_llga_enabled(False)
    torch._C._jit_set_autocast_mode(autocast)


OPERANDS = {
    "layer scale": lambda x: x + SCALE * F.linear(x, WEIGHT),
    "scaled residual": lambda x: x * SCALE + F.linear(x, WEIGHT),
    "a bias before": lambda x: SCALE + F.linear(x, WEIGHT),
    "one element": lambda x: x * SCALE[:1] + F.linear(x, WEIGHT),
    "three dimensions": lambda x: F.linear(x, WEIGHT) * SCALE.view(1, 1, 16),
    "a number before": lambda x: NUMBER * F.linear(x, WEIGHT),
    "a sum with a number before": lambda x: NUMBER + F.linear(x, WEIGHT),
    "the same twice": lambda x: (F.linear(x, WEIGHT) * SCALE + SCALE) * SCALE,
}


@pytest.mark.parametrize("name", OPERANDS)
def test_constant_operands_are_fused_with_products(fused: None, name: str) -> None:
    """Nothing is left out, and the graph computes what it computes unfused."""
    x = torch.randn(2, 5, 16)
    source = graph(OPERANDS[name], x)
    compile_and_run(source, [x], frozenset())
    with torch.no_grad():
        assert torch.allclose(fusible_function_of(graph_of(source))(x), OPERANDS[name](x), atol=1e-5)


BIAS = torch.randn(8, 8, 4)
LAYOUTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "a permuted constant": (lambda x, y: (x @ x.mT) * 0.5 + BIAS.permute(2, 0, 1)[None], False),
    "a permuted factor": (lambda x, y: (x @ x.mT) * BIAS.permute(2, 0, 1)[None], False),
    "a permuted argument": (lambda x, y: (x @ x.mT) * 0.5 + y.permute(2, 0, 1)[None], False),
    "a permuted result": (lambda x, y: (x @ x.mT) * 0.5 + torch.sin(y).permute(2, 0, 1)[None], False),
    "a transposed argument beside linear": (lambda x, y: F.linear(x, WEIGHT[:8]) + y.permute(2, 1, 0)[None], False),
    "a transposed factor beside linear": (lambda x, y: F.linear(x, WEIGHT[:8]) * y.permute(2, 1, 0)[None], False),
    "an expanded argument": (lambda x, y: (x @ x.mT) * 0.5 + y.permute(2, 0, 1)[:1][None].expand(1, 4, 8, 8), True),
    "all in the same order": (lambda x, y: (x @ x.mT) * 0.5 + torch.sin(y).view(4, 8, 8), True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_operands_laid_out_in_another_way_are_not_fused(fused: None, name: str) -> None:
    """oneDNN Graph would take them as laid out like the product."""
    function, is_fused = LAYOUTS[name]
    x, y = torch.randn(2, 4, 8, 16), torch.randn(8, 8, 4)
    source = graph(function, x, y)
    with torch.no_grad():
        seen = observed_kinds(source, [x, y])
    left_out = frozenset(seen["others"]) | frozenset(seen["misread"])
    kinds = {fusible(graph_of(source))[position].kind() for position in left_out}
    assert bool(kinds & {"aten::add", "aten::mul"}) is not is_fused
    compile_and_run(source, [x, y], left_out)
    changed = graph_of(source)
    leave_out(changed, left_out)
    compiled = fusible_function_of(changed)
    torch._C._jit_set_llga_enabled(True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(compiled(x, y), function(x, y), atol=1e-4)


KERNEL = torch.randn(4, 4, 1, 1)
ROWS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "a number per item": (lambda x, y: F.linear(x, WEIGHT) * y[..., :1, :1], False),
    "a number per place": (lambda x, y: torch.relu(x @ WEIGHT) + y[:, :1, :, :1], False),
    "rows of each item": (lambda x, y: F.linear(x, WEIGHT) * 0.5 + y[:, :1], False),
    "the same row for all": (lambda x, y: F.linear(x, WEIGHT) * y[:1, :1, :1], True),
    "a number per row": (lambda x, y: F.linear(x, WEIGHT) * y[..., :1], True),
    "a row per item of three dimensions": (lambda x, y: F.linear(x[0], WEIGHT) * y[0, :, :1], True),
    "a number per item of three dimensions": (lambda x, y: F.linear(x[0], WEIGHT) * y[0, :, :1, :1], False),
    "a mask beside the scores of attention": (lambda x, y: (x @ x.mT) * 0.5 + y[:, :1, :1, :8], True),
    "a number per channel": (lambda x, y: F.conv2d(x, KERNEL) * y[..., :1, :1], True),
}


@pytest.mark.parametrize("name", ROWS)
def test_operands_for_some_rows_of_a_product_are_not_fused(fused: None, name: str) -> None:
    """oneDNN Graph makes one matrix of a product's rows, and would take the first ones of the operand."""
    function, is_fused = ROWS[name]
    x, y = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    source = graph(function, x, y)
    seen = observed_kinds(source, [x, y])
    kinds = [fusible(graph_of(source))[position].kind() for position in seen["others"]]
    assert bool(kinds) is not is_fused
    changed = graph_of(source)
    leave_out(changed, seen["others"])
    compiled = fusible_function_of(changed)
    torch._C._jit_set_llga_enabled(True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(compiled(x, y), function(x, y), atol=1e-4)


def test_two_constants_stay_the_operands(fused: None) -> None:
    """Of a number and a tensor, which TorchScript does not add up where their sum is written to."""

    def function(x: Tensor) -> Tensor:
        total = NUMBER + SCALE
        total[:8].mul_(2)
        return F.linear(x, WEIGHT) + total

    x = torch.randn(4, 16)
    with torch.no_grad():
        result = fusible_function_of(graph_of(graph(function, x)))(x)
    assert torch.allclose(result, function(x), atol=1e-5)


@pytest.mark.parametrize("number", [torch.tensor(2.0), torch.tensor(3), torch.tensor(True)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_numbers_in_first_place_keep_the_dtype_where_nothing_is_fused(
    fused: None, kind: torch.dtype, number: Tensor
) -> None:
    x = torch.randn(4, 16).to(kind)
    source = graph(lambda x: ((number + torch.tanh(x)) * 2, number * torch.tanh(x)), x)
    compile_and_run(source, [x], everything(source))


@pytest.mark.parametrize(("steps", "scale"), [(torch.arange(16), 0.5), (torch.arange(16), 2), (torch.ones(16), -3)])
def test_scaled_sums_where_nothing_is_fused(fused: None, steps: Tensor, scale: float) -> None:
    x = torch.randn(4, 16)
    source = graph(lambda x: torch.add(F.linear(x, WEIGHT), steps, alpha=scale) + 1, x)
    compile_and_run(source, [x], everything(source))


def blocks(left_out: list[int], source: PortableGraph) -> int:
    changed = graph_of(source)
    leave_out(changed, left_out)
    return len([node for node in changed.nodes() if node.kind() == "prim::If"])


def test_neighbours_share_a_block() -> None:
    """A block for each operation took 36 s for a model of 330 operations."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.relu(x.transpose(0, 1)) * 2
        return x

    x = torch.randn(4, 4)
    source = graph(chain, x)
    count = len(everything(source))
    assert blocks(list(range(count)), source) == 1
    assert blocks([0, 1, count - 1], source) == 2
    assert blocks([], source) == 0


@pytest.mark.parametrize("seed", range(8))
def test_blocks_change_no_value(seed: int) -> None:
    """Values of a block are used in it, between blocks and as results; constants by several blocks."""

    def net(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = F.layer_norm(F.linear(x, WEIGHT), (16,))
        b, c = (a * 2 + x).chunk(2, -1)
        d = torch.cat([F.gelu(b), c], -1)
        e = torch.softmax(d @ d.transpose(0, 1), -1) @ a
        f = F.layer_norm(e.view(x.shape[0], 4, 4).permute(0, 2, 1).reshape(x.shape[0], 16), (16,))
        return torch.relu(f) + a, e, b.abs()

    x = torch.randn(6, 16)
    source = graph(net, x)
    torch.manual_seed(seed)
    for left_out in (
        everything(source),
        frozenset(index for index in everything(source) if torch.rand(()) < 0.5),
        frozenset({seed}),
    ):
        changed = graph_of(source)
        leave_out(changed, left_out)
        assert len(fusible(changed)) == len(everything(source)) - len(left_out)
        with torch.no_grad():
            function = function_of(changed)
            for _ in range(3):
                for result, expected in zip(function(x), net(x), strict=True):
                    assert torch.allclose(result, expected, atol=1e-5)


def test_operations_with_several_results_are_left_out() -> None:
    x = torch.randn(1, 2, 8, 8)
    source = graph(lambda x: F.max_pool2d(torch.relu(x), 2, return_indices=True), x)
    changed = graph_of(source)
    leave_out(changed, everything(source))
    assert not fusible(changed)
    function = function_of(changed)
    for _ in range(3):
        for result, expected in zip(function(x), F.max_pool2d(torch.relu(x), 2, return_indices=True), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("value", [torch.arange(16), torch.randn(16), torch.arange(16).bfloat16()])
@pytest.mark.parametrize("number", [0.5, 3, -0.1, 0, 1, 1e30])
def test_numbers_beside_what_is_not_fused(fused: None, value: Tensor, number: float) -> None:
    """torch would make an integer of 0.5 beside integers, in the blocks too."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x * number, x + number, (x + 1) * number, x / (number or 2))

    source = graph(function, value)
    compile_and_run(source, [value], everything(source))
    changed = graph_of(source)
    leave_out(changed, everything(source))
    torch._C._jit_set_llga_enabled(True)
    run = fusible_function_of(changed)
    for _ in range(3):
        for result, expected in zip(run(value), function(value), strict=True):
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected)


def test_what_makes_a_graph_compute_something_else_is_left_out(fused: None, monkeypatch) -> None:
    """The helper inherits nothing of this process, so the search is driven here, with a fusion that negates `exp`."""

    def negating(changed: object) -> object:
        kinds = [node.kind() for node in fusible(changed)]
        function = function_of(changed)
        return (lambda *inputs: -function(*inputs)) if "aten::exp" in kinds else function

    monkeypatch.setattr(trial, "fusible_function_of", negating)
    x = torch.randn(4, 16)
    source = graph(lambda x: torch.exp(F.linear(x, WEIGHT)).abs() + 1, x)
    [place] = [index for index, node in enumerate(fusible(graph_of(source))) if node.kind() == "aten::exp"]
    with pytest.raises(DifferentResultError, match="computes something else"):
        compile_and_run(source, [x], frozenset())
    assert compile_and_run(source, [x], frozenset({place})) >= 0


def test_what_makes_a_graph_slow_is_left_out(fused: None, monkeypatch) -> None:
    """As products for which oneDNN has a reference kernel only."""

    def slow(changed: object) -> object:
        kinds = [node.kind() for node in fusible(changed)]
        function = function_of(changed)

        def run(*inputs: Tensor) -> object:
            end = time.thread_time() + 0.1
            while time.thread_time() < end:
                pass
            return function(*inputs)

        return run if "aten::exp" in kinds else function

    monkeypatch.setattr(trial, "fusible_function_of", slow)
    x = torch.randn(4, 16)
    source = graph(lambda x: torch.exp(F.linear(x, WEIGHT)).abs() + 1, x)
    [place] = [index for index, node in enumerate(fusible(graph_of(source))) if node.kind() == "aten::exp"]
    with pytest.raises(SlowerError):
        compile_and_run(source, [x], frozenset())
    assert compile_and_run(source, [x], frozenset({place})) >= 0


@pytest.mark.parametrize(
    ("result", "expected", "differs"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, 2.01]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, float("inf")]), False),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([1, 3]), torch.tensor([1, 2]), False),
        (torch.zeros(0), torch.zeros(0), False),
        (torch.zeros(2), torch.zeros(2), False),
        (torch.zeros(2).bfloat16(), torch.ones(2).bfloat16(), True),
    ],
)
def test_when_results_count_as_different(result: Tensor, expected: Tensor, differs: bool) -> None:
    if not differs:
        _check_results([result], [expected], list)
        return
    with pytest.raises(DifferentResultError):
        _check_results([result], [expected], lambda: [expected])


def test_results_that_rounding_decides_do_not_differ() -> None:
    """The zeros are a mean that rounding makes, say; the ones next to it are compared all the same."""
    rounded, ones = torch.tensor([1e-8, -2e-8]), torch.ones(2)
    _check_results([rounded, ones], [-rounded, ones], lambda: [rounded * 3, ones])
    with pytest.raises(DifferentResultError):
        _check_results([rounded, -ones], [-rounded, ones], lambda: [rounded * 3, ones])


def test_results_in_bf16_may_differ_by_more() -> None:
    result, expected = torch.tensor([1.0, 2.1]).bfloat16(), torch.tensor([1.0, 2.0]).bfloat16()
    _check_results([result], [expected], list, LOW_ROUNDING.tolerance)


def test_values_are_moved_but_for_whole_numbers() -> None:
    mask = torch.tensor([0.0, 1.0, -torch.inf, torch.finfo(torch.float32).min])
    assert torch.equal(_moved_value(mask, 0.5), mask)
    weights = torch.full((100,), 0.5)
    moved = _moved_value(weights, 0.5)
    assert float(moved.min()) >= 0.25
    assert 0 < float((weights - moved).max()) <= 0.25


@pytest.mark.parametrize("other", [torch.ones(2).double(), torch.ones(1)])
def test_another_type_or_shape_differs(other: Tensor) -> None:
    with pytest.raises(DifferentResultError, match=r"for torch\.float32"):
        _check_results([other], [torch.ones(2)], lambda: [torch.ones(2)])


def test_a_graph_whose_result_is_rounding_is_fused(fused: None) -> None:
    """The sum of a normalized row is zero but for rounding, whose sign may be another one."""

    def net(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = F.layer_norm(F.gelu(F.linear(x, WEIGHT)), (16,), ONES, ONES - 1)
        return rows.sum(-1), torch.sign(rows.sum(-1))

    x = torch.randn(64, 16)
    source = graph(net, x)
    assert compile_and_run(source, [x], misread(graph_of(source))) >= 0


def test_a_number_stays_the_second_operand_of_a_constant(fused: None) -> None:
    """TorchScript has no product of a number and a tensor in this order."""
    source = PortableGraph(
        text="""graph(%x : Tensor, %scale : Tensor):
  %size : int = aten::dim(%x)
  %product : Tensor = aten::mul(%scale, %size)
  %result : Tensor = aten::add(%x, %product, %size)
  return (%result)""",
        inputs=1,
        constants=(torch.tensor(2.0),),
    )
    assert torch.equal(fusible_function_of(graph_of(source))(torch.ones(2)), torch.full((2,), 3.0))


def test_random_numbers_do_not_differ(fused: None) -> None:
    """The sum is left out: oneDNN Graph cannot take an operand that torch's profile does not know."""
    x = torch.randn(4, 16)
    source = graph(lambda x: F.linear(x, WEIGHT) + torch.rand(4, 16) * 9, x)
    compile_and_run(source, [x], frozenset({2}))


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: x + 0,
        lambda x: x * 1.0,
        lambda x: x * 1,
        lambda x: x - 0.0,
        lambda x: x / 1,
        lambda x: 0 + x,
        lambda x: torch.add(x, 0, alpha=2),
        lambda x: x * ONES[0],
        lambda x: ONES[0] * x,
        lambda x: x + torch.zeros(()),
    ],
)
def test_what_is_written_to_a_sum_with_zero_changes_no_input(fused: None, copied: Callable[[Tensor], Tensor]) -> None:
    """TorchScript omits the sum, so that the capture changed what the program had given."""

    def net(x: Tensor) -> Tensor:
        y = copied(x)
        y[:, :8].mul_(2)
        return F.linear(y, WEIGHT)

    x = torch.randn(4, 16)
    source, expected, before = graph(net, x.clone()), net(x), x.clone()
    compile_and_run(source, [x], misread(graph_of(source)))
    torch._C._jit_set_llga_enabled(True)
    with torch.no_grad():
        run = fusible_function_of(graph_of(source))
        for _ in range(3):
            assert torch.allclose(run(x), expected, atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("x", "write"),
    [
        (torch.randn(4, 16), lambda y: torch.mul(y, 2, out=y)),
        (torch.arange(64).view(4, 16), lambda y: y.__ior__(1)),
        (torch.arange(64).view(4, 16), lambda y: y.__ilshift__(1)),
    ],
)
def test_any_way_of_writing_to_a_sum_with_zero_changes_no_input(
    fused: None, x: Tensor, write: Callable[[Tensor], Tensor]
) -> None:
    before = x.clone()
    source = graph(lambda x: F.linear(write(x + 0).float(), WEIGHT), x.clone())
    compile_and_run(source, [x], misread(graph_of(source)))
    assert torch.equal(x, before)


def test_a_graph_that_changes_what_it_is_given_is_refused(fused: None, monkeypatch) -> None:
    def writing(changed: object) -> object:
        function = function_of(changed)
        return lambda x: function(x.mul_(1))

    monkeypatch.setattr(trial, "fusible_function_of", writing)
    x = torch.randn(4, 16)
    with pytest.raises(DifferentResultError, match="changes what it is given"):
        compile_and_run(graph(lambda x: F.linear(x, WEIGHT), x), [x], frozenset())
