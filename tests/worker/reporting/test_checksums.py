"""cpulaunch.checksum: what is reported, what it leaves alone, and that two runs' outputs can be compared by it."""

import itertools
import json
import math
import os
import subprocess
import sys

import pytest

from cpulaunch.measure.tuning.numerics import output_error, part_error, wrong_outputs
from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.worker.reporting.checksums import MAX_PARTS, SAMPLED, checksum_parts, positions

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
        ("['rest'][2]", "float64", [2]),
        ("['rest'][3]", "int", []),
    ]
    with pytest.raises(ValueError, match="at most 64"):
        checksum_parts(["text"] * (MAX_PARTS + 1))
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested too deeply"):
        checksum_parts([endless])


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


def test_a_missing_output_is_wrong():
    reference = {"a": checksum_parts(1)}
    assert "was not given" in wrong_outputs(reference, {}, max_error=1.0)
    assert "0 parts instead of 1" in wrong_outputs(reference, {"a": []}, max_error=1.0)


@pytest.mark.parametrize("broken", [{}, {"projections": 3}, {"not_finite": None}, {"sample": ["x"] * 4}])
def test_a_checksum_that_another_process_wrote_is_wrong(broken):
    (part,) = checksum_parts(torch.ones(4))
    other = {**part, "digest": "0", **broken} if broken else {}
    assert math.isinf(part_error(part, other))


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
    assert buffer["digest"] == floats["digest"] != integers["digest"]


def test_positions_are_spread():
    chosen = positions(10_000)
    assert len(chosen) == SAMPLED
    assert chosen == sorted(set(chosen))
    gaps = [later - earlier for earlier, later in itertools.pairwise(chosen)]
    assert max(gaps) < 3 * 10_000 / SAMPLED
