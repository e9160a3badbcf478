"""The compiled products against a reference in fp64, on every instruction set of this CPU."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import cpulaunch  # noqa: E402
from cpulaunch.worker.weights import library  # noqa: E402
from cpulaunch.worker.weights.packing import _multiplier, few_rows, pack, unpack  # noqa: E402

LOADED = library.library()
KINDS = ("fp32", "bf16", "int8", "int4")
DTYPES = (torch.float32, torch.bfloat16)
LIB = Path(cpulaunch.__path__[0], "lib")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
IOMP = Path(sys.prefix, "lib/libiomp5.so")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(LOADED is None, reason=library.missing_reason() or "the library is loaded"),
]


@pytest.fixture(autouse=True)
def own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def on(instructions, packed, bias=None):
    """The function of these instructions."""
    return _multiplier(packed, bias, SimpleNamespace(instructions=instructions, multiply=LOADED.multiply))


def every_instruction_set():
    return range(1, LOADED.instructions + 1)


def check(result, x, packed, bias=None):
    """The result is within the rounding of sums in fp32, and of one rounding to the type of x."""
    weight = unpack(packed, torch.float64 if packed.scales is None else torch.float32).double()
    reference = x.double() @ weight.t() + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.abs().t() + (0 if bias is None else bias.double().abs())
    tolerance = 2.0**-23 * (packed.columns / 8 + 16) * magnitude + 1e-37
    if x.dtype == torch.bfloat16:
        tolerance = tolerance + 2.0**-8 * (reference.abs() + tolerance)
    assert result.dtype == x.dtype
    assert result.shape == reference.shape
    assert ((result.double() - reference).abs() <= tolerance).all()


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    count=st.integers(1, 16),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None)
def test_products_equal_the_reference(kind, rows, columns, count, dtype, has_bias, seed):
    random = torch.Generator().manual_seed(seed)
    columns = -(-columns // 32) * 32 if kind == "int4" else columns
    packed = pack(torch.randn(rows, columns, generator=random), kind)
    x = torch.randn(count, columns, generator=random).to(dtype)
    bias = torch.randn(rows, generator=random) if has_bias else None
    for instructions in every_instruction_set():
        check(on(instructions, packed, bias)(x), x, packed, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_products_equal_the_reference(kind, dtype):
    packed = pack(torch.randn(1023, 2080), kind)
    x = torch.randn(5, 2080).to(dtype)  # More than the library converts on the stack.
    check(few_rows(packed, None)(x), x, packed)


@given(
    kind=st.sampled_from(["int8", "int4"]),
    rows=st.integers(1, 9),
    columns=st.integers(1, 300),
    count=st.integers(1, 5),
    power=st.floats(0, 12),
    size=st.floats(-36, 30),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None)
def test_activations_of_uneven_and_extreme_sizes(kind, rows, columns, count, power, size, seed):
    """An error may reach 2^-23 of the largest activation, times the weights; see also the next test."""
    random = torch.Generator().manual_seed(seed)
    columns = -(-columns // 32) * 32 if kind == "int4" else columns
    packed = pack(torch.randn(rows, columns, generator=random), kind)
    x = torch.randn(count, columns, generator=random)
    x = (x.sign() * x.abs() ** power).clamp(-1e3, 1e3) * 10.0**size
    weight = unpack(packed, torch.float32).double()
    lost = 2.0**-23 * x.double().abs().amax(1, keepdim=True) * weight.abs().sum(1)
    rounded = 2.0**-23 * (columns / 8 + 16) * (x.double().abs() @ weight.abs().t())
    for instructions in every_instruction_set():
        result = on(instructions, packed)(x)
        assert ((result.double() - x.double() @ weight.t()).abs() <= rounded + lost + 1e-37).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("columns", [64, 1024, 1056, 4096])
@pytest.mark.parametrize("outliers", [1, 5])
@pytest.mark.parametrize("size", [30.0, 1e3, 1e5, 1e9, 1e36])
def test_large_activations_of_zero_weights_take_nothing_from_the_others(kind, columns, outliers, size):
    """As of a pruned or masked column. In bits of the typical activations, at least eight must be left."""
    weight = torch.randn(8, columns)
    places = torch.randperm(columns)[:outliers]
    weight[:, places] = 0
    packed = pack(weight, kind)
    x = torch.randn(2, columns)
    plain = x.clone()
    plain[:, places] = 0
    x[:, places] = size
    exact = unpack(packed, torch.float32).double()
    exact[:, places] = 0  # int4 has no scale for a group of zeros alone, and rounds others.
    for instructions in every_instruction_set():
        expected, result = plain.double() @ exact.t(), on(instructions, packed)(x).double()
        assert ((result - expected).norm() <= 2.0**-8 * expected.norm()).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("columns", [32, 64, 96, 128, 160, 192, 288, 320, 1024])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_whole_numbers_are_multiplied_exactly(kind, columns, count):
    largest = 127 if kind == "int8" else 7
    weight = torch.randint(-largest, largest + 1, (11, columns)).float()
    weight[:, ::32] = largest if kind == "int8" else -8  # The scales are 1.
    packed = pack(weight, kind)
    assert torch.equal(unpack(packed, torch.float32), weight)
    x = torch.randint(-127, 128, (count, columns)).float()
    x[:, 5] = 127
    for instructions in every_instruction_set():
        assert torch.equal(on(instructions, packed)(x).double(), x.double() @ weight.double().t())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_that_are_multiplied_in_another_way_do_not_change_their_neighbours(kind):
    packed = pack(torch.randn(13, 2048), kind)
    x = torch.randn(6, 2048)
    x[1], x[3, 7], x[5] = 0.0, float("inf"), 0.0
    x[5, 3] = 3e37  # All others are zeros.
    run = few_rows(packed, None)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(run(x).nan_to_num(), torch.cat([run(row[None]) for row in x]).nan_to_num())
        assert run(x)[1].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 4, 7])
def test_results_do_not_depend_on_the_number_of_threads(kind, dtype, count):
    packed = pack(torch.randn(1031, 416), kind)
    x = torch.randn(count, 416).to(dtype)
    for instructions in every_instruction_set():
        run = on(instructions, packed)
        torch.set_num_threads(1)
        alone = run(x)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(run(x), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_result_among_other_rows(kind):
    packed = pack(torch.randn(67, 224), kind)
    x = torch.randn(9, 224)
    run = few_rows(packed, None)
    assert torch.equal(run(x), torch.cat([run(row[None]) for row in x]))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (1, 1, 1, 64), (0, 64), (2, 0, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_are_kept(shape, dtype):
    packed = pack(torch.randn(10, 64), "bf16")
    x = torch.randn(shape).to(dtype)
    check(few_rows(packed, None)(x), x, packed)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_weights(kind):
    bias = torch.tensor([1.0, 2.0])
    run = few_rows(pack(torch.zeros(2, 0), kind), bias)
    assert torch.equal(run(torch.zeros(3, 0)), bias.expand(3, 2))
    assert few_rows(pack(torch.zeros(0, 32), kind), None)(torch.zeros(3, 32)).shape == (3, 0)


def test_activations_need_not_be_contiguous():
    packed = pack(torch.randn(10, 64), "int8")
    run = few_rows(packed, None)
    for x in (torch.randn(64, 3).t(), torch.randn(3, 128)[:, ::2], torch.randn(1, 64).expand(4, 64)):
        assert torch.equal(run(x), run(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_reaches_its_results_only(kind, value, dtype):
    weight = torch.randn(6, 96)
    weight[0] = 1.0  # No zero, so that infinity stays infinity.
    packed = pack(weight, kind)
    for column in (0, 17, 95):
        x = torch.randn(3, 96).to(dtype)
        x[1, column] = value
        for instructions in every_instruction_set():
            result = on(instructions, packed)(x)
            assert torch.equal(result[1, 0], torch.tensor(value, dtype=dtype)) or (
                value != value and result[1].isnan().all()
            )
            assert result[0].isfinite().all()
            assert result[2].isfinite().all()


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_row_of_weights_that_is_not_finite_does_not_reach_its_neighbours(kind):
    weight = torch.randn(9, 37)
    weight[4] = float("nan")
    for instructions in every_instruction_set():
        result = on(instructions, pack(weight, kind))(torch.randn(2, 37))
        assert result.isnan().any(0).tolist() == [row == 4 for row in range(9)]


def test_a_nan_in_bf16_stays_one():
    payload = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    run = few_rows(pack(torch.eye(1), "fp32"), payload)
    assert run(torch.zeros(1, 1, dtype=torch.bfloat16)).isnan().all()


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 63),
        torch.zeros(1, 64, dtype=torch.float64),
        torch.zeros(1, 64, dtype=torch.float16),
        torch.zeros(()),
        torch.zeros(1, 64, device="meta"),
    ],
)
def test_other_activations_are_errors(x):
    run = few_rows(pack(torch.zeros(4, 64), "fp32"), None)
    run(torch.zeros(1, 64))  # Its shape is known now.
    with pytest.raises(ValueError, match="activations"):
        run(x)


def test_many_shapes_are_supported():
    run = few_rows(pack(torch.ones(4, 8), "fp32"), None)
    for size in range(200):
        assert run(torch.ones(size, 8)).shape == (size, 4)


def test_the_function_keeps_its_weights_alive():
    run = few_rows(pack(torch.ones(64, 64), "int8"), torch.ones(64))
    torch.full((64, 64), 7, dtype=torch.int8)
    assert torch.allclose(run(torch.ones(1, 64)), torch.full((1, 64), 65.0))


def test_python_threads_can_call_at_the_same_time():
    packed = pack(torch.randn(513, 256), "int4")
    run = few_rows(packed, None)
    inputs = [torch.randn(2, 256) for _ in range(4)]
    expected = [run(x) for x in inputs]
    wrong = []

    def repeat(x, result):
        wrong.extend(1 for _ in range(100) if not torch.equal(run(x), result))

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


THREADS = """
import json, os, re, torch
from cpulaunch.worker.weights import library
from cpulaunch.worker.weights.packing import few_rows, pack
def state():
    with open("/proc/self/maps") as maps:
        return sorted(set(re.findall(r"\\S*/lib[gi]?omp\\S*", maps.read()))), len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
packed = pack(torch.ones(4096, 1024), "int8")
x = torch.ones(1 << 20).cos()
before = state()
result = few_rows(packed, None)(torch.ones(1, 1024))
print(json.dumps([before, state(), bool((result == 1024).all())]))
"""


@pytest.mark.parametrize("preload", ["", pytest.param(str(IOMP), marks=pytest.mark.skipif(
    not IOMP.exists(), reason="intel-openmp is not installed"))])  # fmt: skip
def test_products_run_on_the_threads_of_torch(preload):
    environment = {**os.environ, "LD_PRELOAD": preload}
    output = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, check=True
    )
    before, after, is_right = json.loads(output.stdout)
    runtimes, threads = before
    assert is_right
    assert runtimes
    assert any("iomp5" in runtime for runtime in runtimes) == bool(preload)
    assert threads >= 3
    assert after == before


def test_without_an_openmp_runtime_the_library_is_not_loaded():
    code = f"import ctypes; ctypes.CDLL({library.LIBRARY!r})"
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    failed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "undefined symbol" in failed.stderr


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_library_of_another_version_is_not_used(tmp_path):
    for source in (*LIB.glob("linear_*"),):
        text = source.read_text()
        (tmp_path / source.name).write_text(text.replace(f"#define VERSION {library.VERSION} ", "#define VERSION 0 "))
    target = tmp_path / "libcpulaunch_linear.so"
    command = [COMPILER, "-O0", "-std=gnu11", "-shared", "-fPIC", "-o", target, tmp_path / "linear_kernels.c"]
    subprocess.run(command, check=True)
    assert library.load(str(target)) == "libcpulaunch_linear.so belongs to another version of cpulaunch"
