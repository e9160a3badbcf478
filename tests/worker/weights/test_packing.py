"""Packed weights: sizes, exact values, errors of quantization, and weights that cannot be packed."""

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.weights import library, packing  # noqa: E402
from cpulaunch.worker.weights.packing import GROUP, Packed, few_rows, many_rows, pack, unpack  # noqa: E402

pytestmark = pytest.mark.torch

KINDS = ("fp32", "bf16", "int8", "int4")
BYTES = {"fp32": 4 * 6 * 64, "bf16": 2 * 6 * 64, "int8": 6 * 64 + 4 * 6, "int4": 6 * 32 + 2 * 6 * 2}


def random_weight(rows: int = 6, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_has_its_shape_and_bytes(kind, dtype):
    packed = pack(random_weight().to(dtype), kind)
    assert (packed.rows, packed.columns, packed.bytes) == (6, 64, BYTES[kind])
    assert unpack(packed, dtype).shape == (6, 64)
    assert unpack(packed, dtype).dtype == dtype


@pytest.mark.parametrize(("kind", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_weight_of_the_type_is_not_copied(kind, dtype):
    weight = torch.nn.Parameter(random_weight().to(dtype))
    packed = pack(weight, kind)
    assert packed.data.data_ptr() == weight.data_ptr()
    assert not packed.data.requires_grad
    assert pack(weight.t(), kind).data.is_contiguous()


def test_fp32_and_bf16_keep_their_values():
    weight = random_weight()
    assert torch.equal(unpack(pack(weight, "fp32"), torch.float32), weight)
    assert torch.equal(unpack(pack(weight, "bf16"), torch.float32), weight.bfloat16().float())
    assert torch.equal(unpack(pack(weight.bfloat16(), "fp32"), torch.bfloat16), weight.bfloat16())


@pytest.mark.parametrize("columns", [1, 31, 64, 1000])
def test_int8_is_within_half_a_step(columns):
    weight = random_weight(9, columns)
    packed = pack(weight, "int8")
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert packed.data.abs().max() == 127
    assert ((unpack(packed, torch.float32) - weight).abs() <= steps * 0.5001).all()


def test_int8_rounds_to_the_nearest_even():
    packed = pack(torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0]]), "int8")
    assert packed.data.tolist() == [[127, 0, 2, -2, -127]]


def test_int4_keeps_values_that_it_can_hold():
    values = torch.arange(-8, 8).repeat(4, 4).float()  # Both groups have all values; the scales differ.
    weight = values * torch.tensor([0.25, 3.0, 1e-20, 1e20])[:, None].bfloat16().float()
    assert torch.equal(unpack(pack(weight, "int4"), torch.float32), weight)


def test_int4_is_better_than_plain_rounding():
    weight = random_weight(64, 256)
    groups = weight.view(64, -1, GROUP)
    steps = groups.abs().amax(-1, keepdim=True) / 7
    plain = (groups / steps).round() * steps - groups
    error = (unpack(pack(weight, "int4"), torch.float32) - weight).square().mean()
    assert error < 0.85 * plain.square().mean()


def test_the_first_half_of_an_int4_group_is_in_the_low_nibbles():
    packed = pack(torch.tensor([[*range(-8, 8), *range(7, -9, -1)]]).float(), "int4")
    assert packed.data.tolist() == [[value | (15 - value) << 4 for value in range(16)]]
    assert packed.scales.tolist() == [[1.0]]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zeros_stay_zeros(kind):
    assert not unpack(pack(torch.zeros(3, 64), kind), torch.float32).any()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_large_weights_are_quantized_in_parts(kind, monkeypatch):
    weight = random_weight(11, 96)
    whole = pack(weight, kind)
    monkeypatch.setattr(packing, "_CHUNK", 200)
    parts = pack(weight, kind)
    assert torch.equal(parts.data, whole.data)
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize(
    ("weight", "kind", "reason"),
    [
        (torch.zeros(4, 33), "int4", "multiple of 32 columns, not 33"),
        (torch.full((1, 32), float("nan")), "int8", "not a number"),
        (torch.full((1, 32), float("inf")), "int4", "infinite"),
        (torch.zeros(4), "fp32", "not a matrix"),
        (torch.zeros(4, 4, dtype=torch.float64), "fp32", "float64"),
        (torch.zeros(4, 4, device="meta"), "bf16", "CPU memory"),
        (torch.zeros(4, 4), "int2", "unknown type"),
    ],
)
def test_what_cannot_be_packed_is_an_error(weight, kind, reason):
    with pytest.raises(ValueError, match=reason):
        pack(weight, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0)])
def test_empty_weights_can_be_packed(kind, shape):
    packed = pack(torch.zeros(shape), kind)
    assert unpack(packed, torch.bfloat16).shape == shape
    assert many_rows(packed).shape == shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (6, 64), (70, 320)])
def test_many_rows_are_the_rounded_values(kind, missing, rows, columns, monkeypatch):
    if missing:
        monkeypatch.setattr(library, "LIBRARY", "/no/such/library.so")
    packed = pack(random_weight(rows, columns), kind)
    found = many_rows(packed)
    expected = unpack(packed, torch.float32 if kind == "fp32" else torch.bfloat16)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_int8_of_odd_columns_has_many_rows():
    packed = pack(random_weight(33, 77), "int8")
    assert torch.equal(many_rows(packed), unpack(packed, torch.bfloat16))


def test_many_rows_use_the_given_memory():
    packed = pack(random_weight(), "int4")
    out = torch.empty(6, 64, dtype=torch.bfloat16)
    assert many_rows(packed, out) is out
    with pytest.raises(ValueError, match="do not fit"):
        many_rows(packed, out[:5])
    with pytest.raises(ValueError, match="float32"):
        many_rows(packed, out.float())


def test_without_the_library_there_is_no_function_and_a_reason(monkeypatch, tmp_path):
    packed: Packed = pack(random_weight(), "int8")
    monkeypatch.setattr(library, "LIBRARY", str(tmp_path / "libcpulaunch_linear.so"))
    assert few_rows(packed, None) is None
    assert library.missing_reason() == "cpulaunch was installed without a C compiler"


def test_a_damaged_library_is_a_reason(monkeypatch, tmp_path):
    damaged = tmp_path / "libcpulaunch_linear.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(library, "LIBRARY", str(damaged))
    assert library.library() is None
    assert "libcpulaunch_linear.so cannot be loaded" in library.missing_reason()
