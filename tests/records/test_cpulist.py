"""The kernel's list and mask formats, as tables and as a property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.records.cpulist import MAX_ID, format_cpulist, parse_cpulist, parse_cpumask


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", set()),
        ("\n", set()),
        ("0\n\0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        (" 0 , 2 ", {0, 2}),
        ("0-8:2", {0, 2, 4, 6, 8}),
        ("0-7:1/4", {0, 4}),
        ("0-7:2/4", {0, 1, 4, 5}),
        ("1023", {1023}),
    ],
)
def test_lists(text, ids):
    assert parse_cpulist(text) == ids


@pytest.mark.parametrize(
    "text", ["a", "3-1", "-1", "1-", "0-3:0", "0-3:", "0-7:2/", "0-7:/4", "0-3:5/4", "1--2", "0x1", "٣"]
)
def test_malformed_lists(text):
    with pytest.raises(ValueError, match="malformed CPU list part"):
        parse_cpulist(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-16384," * 30_000, "names more than 32770 ids"),
        ("0-16384:1/2," * 20_000, "names more than 32770 ids"),
        ("0-16384," * 1_000_000, "a list of 8000000 characters"),
        ("0," * 100_000, "names more than 32770 ids"),
        ("9" * 5000, "malformed CPU list part '9{40}'"),
    ],
    ids=["ranges", "strides", "characters", "ids", "digits"],
)
def test_a_list_that_repeats_itself_is_refused_at_once(text, message):
    with pytest.raises(ValueError, match=message):
        parse_cpulist(text)


def test_every_id_may_be_named_by_itself():
    assert len(parse_cpulist(",".join(map(str, range(MAX_ID + 1))))) == MAX_ID + 1


def test_too_large_an_id():
    with pytest.raises(ValueError, match="99999 is above the largest id"):
        parse_cpulist("0-99999")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("00000000,000000ff\n", set(range(8))),
        ("1", {0}),
        ("80000000,00000000", {63}),
        ("", set()),
        ("0x3", {0, 1}),
        ("00000000,00000000\0", set()),
    ],
)
def test_masks(text, ids):
    assert parse_cpumask(text) == ids


@pytest.mark.parametrize("text", ["-1", "f_f", "g", "-f,00000001", "0x-1", "f" * 5000])
def test_malformed_masks(text):
    with pytest.raises(ValueError, match=r"malformed|invalid literal"):
        parse_cpumask(text)


@given(st.frozensets(st.integers(0, 2000)))
def test_round_trip(ids):
    assert parse_cpulist(format_cpulist(ids)) == ids


def test_canonical_form():
    assert format_cpulist([8, 3, 2, 1, 0]) == "0-3,8"
    assert format_cpulist([]) == ""
