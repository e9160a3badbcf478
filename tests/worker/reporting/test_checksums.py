"""cpulaunch.checksum: what is reported, what it leaves alone, and that two runs' outputs can be compared by it."""

import itertools
import json
import math
import os
import subprocess
import sys
from fractions import Fraction

import pytest

from cpulaunch.launch.monitor.worker_report import MAX_LINE
from cpulaunch.measure.tuning.outputs.numerics import output_error, part_error, wrong_outputs
from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.worker.reporting.checksums import (
    ALL_BLOCKS,
    CHUNK,
    MAX_PARTS,
    ROW,
    SAMPLED,
    SEED,
    checksum_parts,
    positions,
)

torch = pytest.importorskip("torch", reason="tensors need torch")


def run(code, **environ):
    inherited = {name: value for name, value in os.environ.items() if name != EVENTS_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | environ, capture_output=True, text=True, timeout=60
    )


def test_without_a_launch_nothing_is_computed_or_imported():
    code = (
        "import cpulaunch, sys; cpulaunch.checksum(object()); print('hashlib' in sys.modules, 'torch' in sys.modules)"
    )
    assert run(code).stdout == "False False\n"


def test_the_last_one_of_a_name_is_reported(tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text("")
    code = "import cpulaunch\nfor step in range(300): cpulaunch.checksum(step, 'steps')\ncpulaunch.checksum('end')"
    assert run(code, **{EVENTS_VARIABLE: str(file)}).stderr == ""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    last = {event["name"]: event["value"][0] for event in events}
    assert last["steps"]["sample"] == [299.0]
    assert last["output"]["type"] == "str"
    assert len(events) < 110


@pytest.mark.parametrize("name", [" ", "a\nb"])
def test_a_broken_name_is_refused_without_a_launch_too(name):
    result = run(f"import cpulaunch; cpulaunch.checksum(1, {name!r})")
    assert "the name of a checksum must be a single printable line" in result.stderr


@pytest.mark.parametrize("value", [object(), {1, 2}, 3j])
def test_a_value_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match="a checksum is of"):
        checksum_parts(value)


def test_parts_are_named_by_their_place_and_limited():
    parts = checksum_parts({"logits": torch.ones(2, 3), "rest": [None, "text", (1, 2.5), True]})
    assert [(part["place"], part["type"], part["shape"]) for part in parts] == [
        ("['logits']", "float32", [2, 3]),
        ("['rest'][0]", "NoneType", [4]),
        ("['rest'][1]", "str", [4]),
        ("['rest'][2]", "float", [2]),
        ("['rest'][3]", "int", []),
    ]
    with pytest.raises(ValueError, match="at most 64"):
        checksum_parts(["text"] * (MAX_PARTS + 1))
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested too deeply"):
        checksum_parts([endless])


def test_the_order_in_which_a_mapping_was_filled_does_not_count():
    one, other = {"a": 1.5, "b": [2, 3], 4: "c"}, {4: "c", "b": [2, 3], "a": 1.5}
    assert checksum_parts(one) == checksum_parts(other)


TENSORS = [
    torch.arange(10),
    torch.tensor(0.5),
    torch.zeros(0, 3),
    torch.tensor([1 + 2j]).conj(),
    torch.eye(4).to_sparse(),
    torch.randn(5, 7).t(),
    torch.randn(3000, dtype=torch.bfloat16),
    torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    torch.randn(3, requires_grad=True),
    torch.tensor([True, False]),
    torch.tensor([math.nan, math.inf, 1.0]),
]


def test_the_most_parts_are_short_enough_to_be_read():
    parts = checksum_parts([torch.randn(1 << 17).exp()] * MAX_PARTS)
    assert len(json.dumps({"event": "checksum", "name": "x" * 99, "value": parts})) < MAX_LINE / 2
    assert 2 * MAX_PARTS < sum(len(part["blocks"]) for part in parts) <= ALL_BLOCKS + MAX_PARTS


def test_joined_blocks_are_those_of_larger_ones():
    value = torch.randn(1 << 17, generator=torch.Generator().manual_seed(4))
    (alone,) = checksum_parts(value)
    (joined, *_) = checksum_parts([value] * MAX_PARTS)
    count = len(alone["blocks"]) // len(joined["blocks"])
    for number, block in enumerate(joined["blocks"]):
        own = alone["blocks"][number * count : (number + 1) * count]
        assert block[0] == max(each[0] for each in own)
        assert block[1] == pytest.approx(math.hypot(*(each[1] for each in own)))
        assert block[2:] == pytest.approx([math.fsum(each) for each in zip(*own, strict=True)][2:], abs=1e-7)
    other = value.clone()
    other[70_000:70_100] += 3.0
    assert part_error(joined, checksum_parts([other] * MAX_PARTS)[0]) > 0.1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_its_parts(layout):
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    found = checksum_parts({"a": torch.nested.nested_tensor(rows, layout=layout)})
    assert [each.pop("place") for each in found] == ["['a'][0]", "['a'][1]"]
    assert found == [{name: fact for name, fact in each.items() if name != "place"} for each in checksum_parts(rows)]


def pair_of_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("make", [lambda: torch.empty(3, device="meta"), pair_of_tensors])
def test_a_tensor_without_memory_is_refused(make):
    with pytest.raises(TypeError, match="of tensors with values"):
        checksum_parts(make())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.int8])
def test_every_type_of_integers_is_taken(dtype):
    assert checksum_parts(torch.tensor([1, 0, 1]).to(dtype))[0]["sample"] == [1, 0, 1]


@pytest.mark.parametrize("value", [torch.tensor([1 + 2j]), torch.tensor([1 + 2j, 3 - 1j])])
def test_bits_that_negate_or_conjugate_are_heeded(value):
    assert checksum_parts(value.conj().imag) == checksum_parts(-value.imag.clone())
    assert checksum_parts(value.conj()) == checksum_parts(value.conj().resolve_conj())


def test_zeros_of_either_sign_and_any_nan_are_the_same():
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FFFFFFF], dtype=torch.int32)
    payloads, plain = bits.view(torch.float32), torch.full((3,), math.nan)
    for one, other in ((torch.zeros(9), -torch.zeros(9)), (payloads, plain)):
        first, second = {"a": checksum_parts(one)}, {"a": checksum_parts(other)}
        assert first != second
        assert wrong_outputs(first, second, max_error=None) is None


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}")
def test_any_tensor_equals_itself_and_is_json(tensor):
    before = tensor.detach().clone()
    state = torch.get_rng_state()
    first, second = checksum_parts(tensor), checksum_parts(tensor)
    assert first == second == json.loads(json.dumps(first, allow_nan=False))
    assert output_error({"a": first}, {"a": second}) == 0.0
    assert torch.equal(torch.get_rng_state(), state)
    same = (
        torch.isclose(tensor.detach().to_dense(), before.to_dense(), equal_nan=True) if not tensor.is_quantized else 1
    )
    assert torch.as_tensor(same).all()


def test_settings_of_the_program_do_not_change_a_checksum():
    value = torch.randn(2048, 512)
    first = checksum_parts(value)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert checksum_parts(value) == first
    with torch.device("meta"):
        assert checksum_parts(value) == first


def plain_blocks(value, generator):
    """What is kept of the blocks of a small tensor, by its definition."""
    scaled = value.to(torch.float64) / value.abs().max()
    drawn = [torch.randint(0, 2, (count, 8), generator=generator, dtype=torch.int8) for count in (1024, 3)]
    columns, own = (each.double() * 2 - 1 for each in drawn)
    rows = torch.nn.functional.pad(scaled, (0, 3 * 1024 - value.numel())).reshape(3, 1024)
    projections = (rows @ columns) * own
    return [[float(r.abs().max()), float(r.norm()), *p.tolist()] for r, p in zip(rows, projections, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_are_what_they_are_defined_as(dtype):
    value = torch.randn(2500, generator=torch.Generator().manual_seed(1)).to(dtype)
    (part,) = checksum_parts(value)
    expected = plain_blocks(value.double(), torch.Generator().manual_seed(SEED))
    assert len(part["blocks"]) == 3
    for found, wanted in zip(part["blocks"], expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + ROW + 1])
def test_no_element_is_left_out_where_chunks_end(size):
    value = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (part,) = checksum_parts(value)
    assert part["largest"] == float(value.abs().max())
    norm = math.hypot(*(block[1] for block in part["blocks"])) * part["largest"]
    assert norm == pytest.approx(float(value.norm()), rel=1e-9)
    other = value.clone()
    other[-1] = math.nan
    (broken,) = checksum_parts(other)
    assert (broken["not_finite"], part["not_finite"]) == ([1, 0], [0, 0])
    assert broken["blocks"] == checksum_parts(other.nan_to_num())[0]["blocks"]


@pytest.mark.parametrize("size", [7, 1000, 1 << 20, (1 << 20) + 77])
@pytest.mark.parametrize("relative", [1e-6, 1e-3, 0.1])
def test_the_error_of_noise_is_estimated(size, relative):
    generator = torch.Generator().manual_seed(size)
    value = torch.randn(size, dtype=torch.float64, generator=generator)
    noise = torch.randn(size, dtype=torch.float64, generator=generator) * relative
    error = part_error(*checksum_parts(value), *checksum_parts(value + noise))
    assert relative / 5 < error < relative * 5


def test_one_wrong_row_outside_the_sample_is_found():
    value = torch.ones(1000, 100)
    other = value.clone()
    untouched = {position // 100 for position in positions(value.numel())}
    row = next(row for row in range(1000) if row not in untouched)
    other[row] = 0.0
    assert part_error(*checksum_parts(value), *checksum_parts(other)) > 1e-3


CASES = [
    # reference, found, allowed error -> what is said of it
    (torch.ones(4), torch.ones(4) + 1e-6, None, None),
    (torch.ones(4), torch.ones(4) + 1e-3, None, "differs by 0.001"),
    (torch.ones(4), torch.ones(4) + 1e-3, 1e-2, None),
    (torch.ones(4), torch.ones(5), 1.0, "more than rounding"),
    (torch.ones(4), torch.tensor([1.0, 1, 1, math.nan]), 1.0, "more than rounding"),
    (torch.arange(64), torch.arange(64), None, None),
    (torch.arange(64), torch.arange(64) + 1, None, "differs by 1"),
    (torch.arange(64), torch.arange(64) - (torch.arange(64) == 3).int(), 0.05, None),
    ("a text", "a text", None, None),
    ("a text", "b text", 0.5, "more than rounding"),
    (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), None, None),
    (torch.zeros(4), torch.ones(4), 0.5, "differs by 1"),
]


@pytest.mark.parametrize(("reference", "found", "allowed", "said"), CASES)
def test_what_is_wrong_is_said(reference, found, allowed, said):
    verdict = wrong_outputs({"a": checksum_parts(reference)}, {"a": checksum_parts(found)}, max_error=allowed)
    assert (verdict is None) if said is None else said in verdict


def row_of_images(wrong):
    """Probabilities of 2000 images, one of which has another class."""
    logits = torch.zeros(2000, 1000)
    logits[torch.arange(2000), torch.arange(2000) % 1000] = 10.0
    if wrong:
        logits[700] = logits[700].roll(1)
    return logits.softmax(1)


def one_wrong(size):
    """Random numbers, one of which is another one in the second tensor."""
    value = torch.randn(size, generator=torch.Generator().manual_seed(3))
    other = value.clone()
    place = next(each for each in range(size) if each not in positions(size))
    other[place] -= 1.76 * value.abs().max()
    return value, other


INFINITE, NAN = math.inf, math.nan
EXTREME = torch.linspace(-1, 1, 1000, dtype=torch.float64)
SAMPLED_OUT = torch.ones(1000, dtype=torch.float64).scatter(0, torch.tensor(positions(1000)), 0.0)
WRONG = {
    "signs of infinity": (torch.tensor([1, INFINITE, -2]), torch.tensor([1, -INFINITE, -2]), 1.0),
    "so in a list": ([1.0, INFINITE, -2.0], [1.0, -INFINITE, -2.0], 1.0),
    "so in a long list": ([1.0] * 99 + [INFINITE], [1.0] * 99 + [-INFINITE], 1.0),
    "places of NaN": (torch.tensor([NAN, 0, 5]), torch.tensor([0, NAN, 5]), 1.0),
    "places of NaN in a long list": ([NAN, 0.0] * 99, [0.0, NAN] * 99, 1.0),
    "tiny values": (EXTREME * 1e-170, EXTREME * -1e-170, 0.5),
    "subnormal values": (EXTREME * 1e-320, EXTREME * -1e-320, 0.5),
    "huge values": (EXTREME * 1e200, EXTREME * 1e200 * (1 - 2 * SAMPLED_OUT), 0.5),
    "the largest floats": (EXTREME * 1.7e308, EXTREME * 1.7e308 * (1 - 2 * SAMPLED_OUT), 0.5),
    "so in a list of floats": ((EXTREME * 1e200).tolist(), (EXTREME * 1e200 * (1 - 2 * SAMPLED_OUT)).tolist(), 0.5),
    "one of a million": (*one_wrong(1_000_000), 0.01),
    "one image": (row_of_images(wrong=False), row_of_images(wrong=True), 0.05),
    "an accuracy beside a count": ([1_000_000, 0.93], [1_000_000, 0.10], 0.01),
    "a count beside an accuracy": ([3, 0.93], [4, 0.93], 0.5),
    "large integers": ([10**400, 0.5], [10**400 + 1, 0.5], 0.5),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_found_wherever_they_are(name):
    reference, found, allowed = WRONG[name]
    first, second = checksum_parts(reference), checksum_parts(found)
    assert wrong_outputs({"a": first}, {"a": second}, max_error=allowed) is not None
    assert first == json.loads(json.dumps(first, allow_nan=False)) == checksum_parts(reference)


def rounded(dtype):
    """A tensor, and what one unit in the last place makes of some of its elements."""
    value = torch.randn(2000, generator=torch.Generator().manual_seed(5)).to(dtype)
    real = torch.view_as_real(value) if dtype.is_complex else value
    step = torch.finfo(dtype).eps
    other = (real.to(torch.float64) * (1 + step)).to(real.dtype)
    return value, torch.view_as_complex(other) if dtype.is_complex else other


FLOATS = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("name", FLOATS)
def test_rounding_of_every_type_is_accepted(name):
    reference, found = rounded(getattr(torch, name))
    assert wrong_outputs({"a": checksum_parts(reference)}, {"a": checksum_parts(found)}, max_error=None) is None
    wrong = {"a": checksum_parts(-reference.to(torch.complex64 if "complex" in name else torch.float32))}
    assert wrong_outputs({"a": checksum_parts(reference)}, wrong, max_error=None) is not None


def test_a_number_of_python_has_the_rounding_of_fp32():
    loss = torch.tensor(0.3, dtype=torch.float32)
    reference, found = checksum_parts(loss.item()), checksum_parts((loss * (1 + 8.4e-8)).item())
    assert reference != found
    assert wrong_outputs({"loss": reference}, {"loss": found}, max_error=None) is None


NUMPY_ALONE = """
import json, sys, numpy
from cpulaunch.measure.tuning.outputs.numerics import wrong_outputs
from cpulaunch.worker.reporting.checksums import checksum_parts
kinds = {}
for kind in ("e", "f", "d", "g", "F", "D", ">f4", "i4", "?"):
    value = numpy.arange(1, 200).astype(kind)
    other = (value * (1 + 1e-7)).astype(kind) if value.dtype.kind == "f" and kind in "ef" else value
    (part,), (found,) = checksum_parts(value), checksum_parts(other)
    assert wrong_outputs({"a": [part]}, {"a": [found]}, max_error=None) is None, kind
    (turned,) = checksum_parts(value[::-1])
    (expected,) = checksum_parts(value[::-1].copy())
    assert turned == expected
    kinds[kind] = part["type"]
assert "torch" not in sys.modules
print(json.dumps(kinds))
"""


def test_arrays_keep_their_types_without_torch():
    pytest.importorskip("numpy", reason="arrays need numpy")
    found = json.loads(run(NUMPY_ALONE).stdout)
    assert found["f"] == found[">f4"] == "float32"
    assert (found["e"], found["g"], found["F"], found["D"]) == ("float16", "float64", "complex64", "complex128")


def test_any_number_and_any_strides_are_taken():
    numpy = pytest.importorskip("numpy", reason="arrays need numpy")
    array = numpy.arange(12.0).reshape(3, 4)
    for each in (
        array[::-1],
        array.T,
        array[:, ::2],
        array.astype(">f4"),
        array.astype("g"),
        array.astype("f4")[0, 0],
        array[:0],
    ):
        assert checksum_parts(each) == checksum_parts(numpy.array(each, dtype=each.dtype.newbyteorder("=")))
    for number in (10**400, -(10**5000), [10**400] * 100, [10**400, 0.5], [10**400] * 100 + [0.5], Fraction(10**400)):
        assert json.loads(json.dumps(checksum_parts(number), allow_nan=False)) == checksum_parts(number)
    with pytest.raises(TypeError, match="a checksum is of arrays of numbers"):
        checksum_parts(numpy.array(["text"]))


def test_a_missing_output_is_wrong():
    reference = {"a": checksum_parts(1)}
    assert "was not given" in wrong_outputs(reference, {}, max_error=1.0)
    assert "0 parts instead of 1" in wrong_outputs(reference, {"a": []}, max_error=1.0)


@pytest.mark.parametrize("broken", [{}, {"blocks": 3}, {"blocks": [[]]}, {"not_finite": None}, {"sample": ["x"] * 4}])
def test_a_checksum_that_another_process_wrote_is_wrong(broken):
    (part,) = checksum_parts(torch.ones(4))
    other = {**part, "digest": "0", **broken} if broken else {}
    assert math.isinf(part_error(part, other))


@pytest.mark.parametrize("blocks", [[[1.0, 0.0]], [[1.0, 1.0]]])
def test_a_checksum_without_a_norm_or_projections_is_wrong(blocks):
    part = {**checksum_parts(torch.ones(100))[0], "blocks": blocks}
    assert math.isinf(part_error(part, {**part, "digest": "0"}))


def test_arrays_and_lists_are_compared_like_tensors():
    numpy = pytest.importorskip("numpy", reason="arrays need numpy")
    (array,) = checksum_parts(numpy.arange(6.0).reshape(2, 3))
    (tensor,) = checksum_parts(torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    assert array == tensor
    code = (
        "import array, json, sys; from cpulaunch.worker.reporting.checksums import checksum_parts as parts\n"
        "print(json.dumps(parts([array.array('d', [1, 2]), [1.0, 2.0], [1, 2]]))); assert 'torch' not in sys.modules"
    )
    buffer, floats, integers = json.loads(run(code).stdout)
    assert (buffer["type"], buffer["sample"]) == ("float64", [1.0, 2.0])
    assert (floats["type"], floats["numbers"]) == ("float", [1.0, 2.0])
    assert (integers["type"], integers["sample"]) == ("int", [1, 2])
    assert len({buffer["digest"], floats["digest"], integers["digest"]}) == 3


def test_positions_are_spread():
    chosen = positions(10_000)
    assert len(chosen) == SAMPLED
    assert chosen == sorted(set(chosen))
    gaps = [later - earlier for earlier, later in itertools.pairwise(chosen)]
    assert max(gaps) < 3 * 10_000 / SAMPLED
