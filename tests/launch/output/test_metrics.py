"""--metric: a pattern's name, the last number in the output, sums, and how they are written."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.launch.output.metrics import (
    LINE_BYTES,
    MOST_SKIPPED,
    LineReader,
    Metric,
    metric_line,
    metric_name,
    short_number,
    totals,
)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"samples/s: ([0-9.]+)", "samples/s"),
        (r"throughput:\s*([\d.]+)", "throughput"),
        (r"^\s*Throughput \(samples/s\)\s*=\s*(\d+)", "Throughput (samples/s)"),
        (r".*tokens/s: (\S+)", "tokens/s"),
        (r"([0-9.]+)\s*images/s", "images/s"),
        (r"(\d+(?:\.\d+)?) it/s$", "it/s"),
        (r"(?P<speed>\d+) it/s", "it/s"),
        (r"samples\.per\.s (\d+)", "samples.per.s"),
        (r"loss \[(\d+)\]", "loss"),
        (r"(?i)loss: (\d+)", "loss"),
        (r"(\d+)", "metric"),
        (r"(?:a|b) (\d+)", "metric"),
        (r"a|b (\d+)", "metric"),
        (r"[(]x (\d+)", "metric"),
    ],
)
def test_a_metric_is_named_by_the_plain_text_beside_its_group(pattern, name):
    assert metric_name(pattern) == name


def metric(pattern, *chunks):
    found = Metric(pattern)
    reader = LineReader(found)
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    return found


@pytest.mark.parametrize(
    ("chunks", "value"),
    [
        ([], None),
        ([b"x 1\n"], 1),
        ([b"x 1\nx 2\ny 3\n"], 2),
        ([b"x 1 x 2\n"], 2),
        ([b"x", b" ", b"1", b"5\n"], 15),
        ([b"x 1"], 1),
        ([b"x 1\n", b"x 2"], 2),
        ([b"x 1\rx 2\r"], 2),
        ([b"x 1\r\n"], 1),
        ([b"x 1\nx nothing\n"], 1),
        ([b"x nan\nx inf\n"], None),
        ([b"x 1\nx nan\n"], None),
        ([b"x 1\n", b"x -inf x n/a\n"], None),
        ([b"x nan\nx 2\n"], 2),
        ([b"x 1\nx 1.7e308\n"], None),
        ([b"x 1\nx -1.7e308\n"], None),
        ([b"x 1e300\n"], 1e300),
        ([b"x -1.5e3\n"], -1500),
        ([b"\xff\xfe x 7 \xff\n"], 7),
        ([b"." * (3 * LINE_BYTES), b" x 1\n"], 1),
    ],
)
def test_the_last_number_counts(chunks, value):
    assert metric(r"x (\S+)", *chunks).value == value


def test_values_of_many_workers_have_a_sum():
    found = metric(r"x (\S+)", b"x 1e300\n")
    (total, _), *_ = totals({"x": found.value} for _ in range(10_000)).values()
    assert math.isfinite(total)


def test_text_that_is_no_number_is_remembered():
    found = metric(r"x (\S+)", b"x n/a\n")
    assert (found.value, found.rejected) == (None, "n/a")


def test_a_long_line_takes_no_more_memory_than_its_end():
    reader = LineReader(Metric("x (y)"))
    for _ in range(100):
        reader.feed(b"." * LINE_BYTES)
    assert len(reader._partial) <= LINE_BYTES


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr("cpulaunch.launch.output.metrics.SEARCH_SECONDS", 0.05)


BACKTRACKING = r"(?:a+)+b ([0-9])"


@pytest.mark.usefixtures("short_limit")
def test_a_pattern_that_backtracks_for_ever_is_given_up_and_leaves_no_value():
    found = Metric(BACKTRACKING)
    began = time.process_time()
    slow = [b"a" * length for length in range(40, 45)]
    found.search([b"aab 1", *slow, b"aab 2"])
    assert (found.value, found.abandoned) == (2, False)
    found.search([b"aab 1", *slow])
    found.search([b"aab 3"])
    assert (found.value, found.abandoned, found.skipped) == (None, True, MOST_SKIPPED)
    assert time.process_time() - began < 2


@pytest.mark.usefixtures("short_limit")
def test_one_line_that_takes_too_long_is_skipped():
    found = Metric(BACKTRACKING)
    found.search([b"aab 1", b"a" * 40])
    assert (found.value, found.skipped, found.abandoned) == (1, 1, False)


def test_signals_that_leave_no_room_for_a_search_skip_its_line():
    """Each that arrives while one is handled takes a frame more: Python ends the search by RecursionError."""

    class Flooded:
        def findall(self, text):
            if text == "x: 2":
                raise RecursionError
            return ["1"]

    found = Metric("x: ([0-9])")
    found._pattern = Flooded()
    found.search([b"x: 1", b"x: 2"])
    assert (found.value, found.skipped, found.abandoned) == (1, 1, False)


def test_a_line_without_end_costs_little_more_than_its_copy():
    reader, data = LineReader(Metric(r"samples/s: ([0-9.]+)")), b"." * LINE_BYTES
    began = time.process_time()
    for _ in range(1 << 12):
        reader.feed(data)
    assert time.process_time() - began < 1  # 256 MB; split by a regular expression they took 2.5 s and more


def test_lines_that_are_repeated_in_a_read_are_searched_once():
    reader, data = LineReader(Metric(r"samples/s: ([0-9.]+)")), b"x\n" * (LINE_BYTES // 2)
    began = time.process_time()
    for _ in range(1 << 7):
        reader.feed(data)
    assert time.process_time() - began < 1  # 8 MB; with a search of each line they took 2.3 s
    assert metric(r"x (\d)", b"x 1\nx 2\nx 1\ny\nx 2\nx 1\ny\n").value == 1


def test_a_pattern_is_matched_against_whole_lines():
    assert metric(r"^x (\d+)$", b"ax 1\nx 2\nx 3b\n").value == 2


def test_an_optional_group_that_matched_nothing_is_no_number():
    assert metric(r"x(\d+)?", b"x\n").value is None


@given(st.lists(st.sampled_from([b"x 1", b"x 22", b"\n", b"\r", b" x", b" 3", b"y"]), max_size=12), st.integers(1, 7))
def test_the_size_of_reads_does_not_matter(parts, size):
    output = b"".join(parts)
    cut = [output[at : at + size] for at in range(0, len(output), size)]
    assert metric(r"x (\d+)", *cut).value == metric(r"x (\d+)", output).value


def test_sums_are_over_the_workers_that_have_the_metric():
    assert totals([{"a": 18.9}, {}, {"a": 18.6, "b": 1.0}]) == {
        "a": (37.5, (18.9, None, 18.6)),
        "b": (1.0, (None, None, 1.0)),
    }


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([18.9, 18.6], "a: 37.5 (18.9 + 18.6)"),
        ([18.9], "a: 18.9"),
        ([None, 18.9], "a: 18.9"),
        ([1.0] * 8, "a: 8 (1 + 1 + 1 + 1 + 1 + 1 + 1 + 1)"),
        ([float(n) for n in range(1, 10)], "a: 45 (9 workers, 1 to 9)"),
    ],
)
def test_a_metric_is_one_line(values, line):
    assert metric_line("a", sum(value or 0 for value in values), values) == line


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *[
            (37.5, "37.5"),
            (18.93456, "18.93"),
            (12835.4, "12835"),
            (0.00123456, "0.001235"),
            (0, "0"),
            (-3.25, "-3.25"),
        ],
        *[(123456789012345.0, "123456789012345"), (1e15, "1e+15"), (-1e300, "-1e+300")],
    ],
)
def test_numbers_are_short(number, text):
    assert short_number(number) == text


@given(st.floats(min_value=-1e308, max_value=1e308))
def test_short_numbers_are_near(number):
    assert math.isclose(float(short_number(number)), number, rel_tol=1e-3)
