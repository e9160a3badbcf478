"""The file that a program writes: what of its text may differ, and by how much."""

import json
import math
import os
import time
import tracemalloc

import pytest

from cpulaunch.measure.tuning.outputs.numerics import part_error, wrong_outputs
from cpulaunch.measure.tuning.outputs.output_file import MAX_BYTES, MAX_TEXT_BYTES, OutputFile, file_parts

ROWS = "".join(f"{1700000000 + row},{row % 7},{row / 10:.3f}\n" for row in range(100))
OTHER_LABELS = "".join(f"{1700000000 + row},{(row + 1) % 7},{row / 10:.3f}\n" for row in range(100))
ONE_LABEL = ROWS.replace("1700000050,1,", "1700000050,2,")
LOGITS = [((number * 37) % 101 - 50) / 7 for number in range(101)]

CASES = {
    # reference, found, allowed error -> whether something is wrong
    "an accuracy beside a count": (
        '{"samples": 1000000, "accuracy": 0.93}',
        '{"samples": 1000000, "accuracy": 0.10}',
        0.01,
    ),
    "so in lines": ("samples: 1000000\naccuracy: 0.93\n", "samples: 1000000\naccuracy: 0.9\n", 0.01),
    "so in a list": ("[1000000, 0.93]", "[1000000, 0.10]", 0.01),
    "so in a text of JSON": ('{"log": "of 1000000 rows 0.93"}', '{"log": "of 1000000 rows 0.10"}', 0.01),
    "labels beside times": (ROWS, OTHER_LABELS, 0.5),
    "one label, nothing allowed": (ROWS, ONE_LABEL, None),
    "a count": ('{"correct": 930}', '{"correct": 931}', 0.01),
    "a sign": ("loss -0.5", "loss 0.5", 0.5),
    "a large integer": (f"{10**400}", f"{10**400 + 1}", 0.01),
    "not finite": ('{"loss": NaN}', '{"loss": 1.0}', 1.0),
    "beyond floats": ("1e400", "2e400", 1.0),
    "a number more": ("[1, 2]", "[1, 2, 3]", 1.0),
    "another key": ('{"1": 0.5}', '{"2": 0.5}', 1.0),
    "a key twice": ('{"a": 1.5, "a": 2.5}', '{"a": 3.5, "a": 2.5}', 0.1),
    "lines of JSON": (
        '{"id": 1, "score": 0.5}\n{"id": 2, "score": 0.7}',
        '{"id": 1, "score": 0.5}\n{"id": 2, "score": 0.1}',
        0.1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_number_is_found_beside_any_other(name):
    reference, found, allowed = CASES[name]
    assert wrong_outputs(parts(reference), parts(found), max_error=allowed) is not None
    assert wrong_outputs(parts(reference), parts(reference), max_error=allowed) is None


RIGHT = {
    "rounding": ('{"loss": 0.693147, "count": 5}', '{"loss": 0.693148, "count": 5}', None),
    "rounding of small ones among many": (json.dumps(LOGITS), json.dumps([each + 1e-7 for each in LOGITS]), None),
    "one label of a hundred": (ROWS, ONE_LABEL, 0.02),
    "a number without its fraction": ("loss 1", "loss 0.99999", None),
    "nothing but noise": ("difference 1e-13", "difference 3e-13", None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_rounding_or_the_allowed_error_explains_is_accepted(name):
    reference, found, allowed = RIGHT[name]
    assert wrong_outputs(parts(reference), parts(found), max_error=allowed) is None


def test_a_wrong_number_is_named_by_its_key():
    verdict = wrong_outputs(parts(CASES["labels beside times"][0]), parts(OTHER_LABELS), max_error=0.1)
    assert verdict == "output 'result (column 2 of 3)' differs by 1; 0.1 is allowed"


LONG = "key" * 30_000
HOSTILE = {
    "digits that are no number": "01" * 10_000 + "b",
    "digits between points": "1." * 100_000,
    "a long key of many": json.dumps({LONG: {f"k{number}": number for number in range(3000)}}),
    "a line of numbers": "1 " * 100_000,
    "a deep list": "[" * 800 + "1," * 20_000 + "1" + "]" * 800,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_file_takes_little_time_and_memory(name):
    data = HOSTILE[name].encode()
    tracemalloc.start()
    began = time.process_time()
    try:
        file_parts(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 10


@pytest.mark.parametrize("values", [{"a": 0.5, "b": 0.7}, [0.5, 0.7], "of 0.5 and 0.7"])
def test_numbers_below_a_long_key_are_told_apart(values):
    reference, swapped = (
        json.dumps({LONG: each}) for each in (values, json.loads(json.dumps(values).replace("5", "9")))
    )
    assert wrong_outputs(parts(reference), parts(swapped), max_error=0.1) is not None
    assert wrong_outputs(parts(reference), parts(reference), max_error=None) is None
    if isinstance(values, dict):
        assert len(file_parts(reference.encode())) == 3


def test_other_files_are_compared_by_their_bytes():
    assert wrong_outputs({"a": file_parts(b"\0\1")}, {"a": file_parts(b"\0\2")}, max_error=1.0) is not None
    assert wrong_outputs({"a": file_parts(b"\0\1")}, {"a": file_parts(b"\0\1")}, max_error=None) is None


def test_a_large_file_is_compared_to_its_last_byte(tmp_path):
    path = tmp_path / "out.bin"
    file, found = OutputFile(str(path)), []
    for last in (b"a", b"b", b"a"):
        file.mark()
        path.write_bytes(b"1" * MAX_TEXT_BYTES + last)
        found.append(file.outputs())
    assert found[0][str(path)][0]["shape"] == [MAX_TEXT_BYTES + 1]
    assert wrong_outputs(found[0], found[1], max_error=1.0) is not None
    assert wrong_outputs(found[0], found[2], max_error=None) is None


def test_a_sparse_file_of_any_size_is_not_read(tmp_path):
    path = tmp_path / "out.bin"
    file = OutputFile(str(path))
    file.mark()
    path.touch()
    os.truncate(path, MAX_BYTES + 1)
    assert file.outputs() is None


def test_a_forged_shape_takes_no_memory():
    part = {"type": "int64", "shape": ["x", 1 << 62], "sample": [1], "digest": "a"}
    assert part_error(part, {**part, "digest": "b"}) == math.inf


def parts(text):
    return {"result": file_parts(text.encode())}
