"""The compiled library computes the same bits as the Python implementation, and its errors are reported."""

import os
import shutil
import subprocess
import time
from ctypes import sizeof
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch
from ccl_threads import LIBRARY, SECONDS, barrier_of, together
from torch.distributed import ReduceOp

import cpulaunch
from cpulaunch.records.ccl_defaults import MEMORY_LIBRARY_VERSION
from cpulaunch.worker.ccl.memory.native import CHUNK_BYTES, NativeBarrier, NativePath, load, open_path
from cpulaunch.worker.ccl.memory.native import LIBRARY as NATIVE
from cpulaunch.worker.ccl.memory.shared_barrier import PAYLOAD_BYTES, SharedBarrier, Slot
from cpulaunch.worker.ccl.wire.errors import CclError
from cpulaunch.worker.ccl.wire.reductions import TYPES, find_reduction, packed_call

LIB = Path(cpulaunch.__path__[0], "lib")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
REDUCTIONS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not Path(NATIVE).is_file(), reason="cpulaunch was installed without a C compiler"),
]


def test_the_compiled_library_is_loaded():
    assert LIBRARY is not None


def values(dtype, count, rank):
    """Random values of every kind: all bits for integers; infinities and NaNs among floats."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(0, 3, (count,), generator=generator, dtype=torch.uint8).view(torch.bool)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=dtype)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64) * 10.0 ** (count % 7)
    drawn[rank::50], drawn[rank::70], drawn[rank::90] = float("nan"), float("inf"), -float("inf")
    return drawn.to(dtype)


def bits(tensor):
    """The bytes of a tensor, with all NaNs replaced by one number, as NaNs have many bit patterns."""
    return tensor.nan_to_num(nan=12345.0).view(torch.uint8) if tensor.is_floating_point() else tensor.view(torch.uint8)


def reduced(dtype, count, operation):
    def rank_does(barrier):
        path, reduction = open_path(barrier, SECONDS), find_reduction(getattr(ReduceOp, operation), dtype)
        tensor, call = values(dtype, count, barrier.rank), packed_call("all_reduce", dtype, count)
        if not path.all_reduce_at_once(call, tensor, reduction):
            path.all_reduce(call, tensor, reduction)
        return bits(tensor)

    return rank_does


@pytest.mark.parametrize("kind", ["native", "mixed"])
@pytest.mark.parametrize("operation", REDUCTIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_reduce_equals_that_in_python_to_the_bit(dtype, operation, kind):
    if dtype == torch.bool and operation == "AVG":
        pytest.skip("bools have no average")
    for size in (2, 3):
        for count in (0, 1, 33, 1000, PAYLOAD_BYTES + 7):
            rank_does = reduced(dtype, count, operation)
            expected, *_ = together(size, rank_does)
            results = together(size, rank_does, kind=kind)
            assert all(torch.equal(result, expected) for result in results), (size, count)


@pytest.mark.parametrize("kind", ["python", "native", "mixed"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [100, 2 * CHUNK_BYTES])
def test_reduce_and_reduce_scatter(count, size, kind):
    root = size - 1

    def rank_does(barrier):
        path, reduction = open_path(barrier, SECONDS), find_reduction(ReduceOp.SUM, torch.int64)
        row = torch.arange(count * size) * (barrier.rank + 1)
        part, whole = torch.empty(count, dtype=torch.int64), row.clone()
        path.reduce_scatter(packed_call("reduce_scatter", torch.int64, count), part, row, reduction)
        path.reduce(packed_call("reduce", torch.int64, count, root=root), whole, reduction, root=root)
        return part, whole, row

    total = torch.arange(count * size) * sum(range(1, size + 1))
    for rank, (part, whole, row) in enumerate(together(size, rank_does, kind=kind)):
        assert torch.equal(part, total[rank * count : (rank + 1) * count])
        assert torch.equal(whole, total if rank == root else row)


def test_native_ranks_use_the_native_path():
    assert together(2, lambda barrier: type(open_path(barrier, SECONDS)), kind="native") == [NativePath] * 2


def test_a_late_rank_wakes_the_waiting_one_and_its_data_is_reduced():
    def rank_does(barrier):
        path, tensor = open_path(barrier, SECONDS), torch.full((5,), barrier.rank + 1.0)
        call, reduction = packed_call("all_reduce", torch.float32, 5), find_reduction(ReduceOp.SUM, torch.float32)
        if barrier.rank == 1:
            deadline = time.monotonic() + SECONDS
            while not barrier._sleepers[1][1].value and time.monotonic() < deadline:
                pass
            assert barrier._sleepers[1][1].value, "rank 0 does not sleep before rank 1 arrives"
        path.all_reduce_at_once(call, tensor, reduction)
        return tensor.tolist()

    def with_short_polls(barrier):
        if isinstance(barrier, NativeBarrier):
            barrier._native.poll_nanoseconds = 1000
            barrier._native.spin_nanoseconds = 0
        return rank_does(barrier)

    assert together(2, with_short_polls, kind="native") == [[3.0] * 5] * 2


def test_the_error_for_inaccessible_memory_names_its_rank():
    def rank_does(barrier):
        path, reduction = open_path(barrier, SECONDS), find_reduction(ReduceOp.SUM, torch.float32)
        tensor = torch.zeros(PAYLOAD_BYTES)
        if barrier.rank == 0:
            path.all_reduce(packed_call("all_reduce", torch.float32, PAYLOAD_BYTES), tensor, reduction)
        else:
            barrier.synchronize(packed_call("all_reduce", torch.float32, PAYLOAD_BYTES), SECONDS, values=(8, 0))

    error, _ = together(2, rank_does, kind="native")
    assert isinstance(error, CclError)
    assert "the memory of rank 1 of the group" in str(error)
    assert "Bad address" in str(error)


def test_the_slot_layout_is_that_of_the_library():
    source = (LIB / "ccl_memory.c").read_text()
    assert "offsetof(struct slot, announcements) == 32 && sizeof(struct slot) == 96" in source
    assert (Slot.announcements.offset, sizeof(Slot)) == (32, 96)
    memory = bytearray(1 << 20)
    barrier = barrier_of("native", memory, 1, 2)
    assert isinstance(barrier, SharedBarrier)
    assert [each.slot for each in barrier._native.ranks[:2]] == [address.value for address in barrier._addresses]


def test_bytes_are_averaged_over_many_ranks():
    reduction, many = find_reduction(ReduceOp.AVG, torch.int8), 200
    tensor = torch.tensor([100, -128, 0, 127], dtype=torch.int8)
    reduction.finish(tensor, many)
    assert tensor.tolist() == [0, 0, 0, 0]


def test_spinning_can_be_disabled():
    def rank_does(barrier):
        barrier.synchronize(bytes(16), SECONDS)
        assert barrier.cpus() == os.sched_getaffinity(0)
        barrier.disable_spinning()
        return barrier._native.spin_nanoseconds

    assert together(2, rank_does, kind="native") == [0, 0]


def test_a_missing_or_foreign_library_is_ignored(tmp_path):
    assert load(str(tmp_path / "none.so")) is None
    assert load(find_library("c") or "libc.so.6") is None
    (tmp_path / "text.so").write_text("not a library")
    assert load(str(tmp_path / "text.so")) is None


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_library_of_another_version_is_ignored(tmp_path):
    text = (LIB / "ccl_memory.c").read_text()
    for version, is_taken in ((MEMORY_LIBRARY_VERSION, True), (MEMORY_LIBRARY_VERSION + 1, False)):
        source, target = tmp_path / f"{version}.c", tmp_path / f"{version}.so"
        source.write_text(text.replace(f"#define VERSION {MEMORY_LIBRARY_VERSION} ", f"#define VERSION {version} "))
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-fwrapv", "-o", target, source], check=True)
        assert (load(str(target)) is not None) == is_taken
