"""Axes: every value lies on them, and their numbers are round, few and inside."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.charts.scale import MAX_TICKS, Scale, scale_of

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, max_size=5))
def test_every_value_lies_on_its_axis(values):
    scale = scale_of(values)
    assert scale.low < scale.high
    assert all(0 <= scale.share(each) <= 1 for each in values)


@given(st.lists(st.floats(min_value=-1e12, max_value=1e12, allow_subnormal=False), min_size=1, max_size=5))
def test_numbers_are_few_and_inside(values):
    scale = scale_of(values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= MAX_TICKS + 1
    assert all(scale.low <= each <= scale.high for each in ticks)
    assert sorted(set(ticks)) == list(ticks)


@given(st.floats(min_value=1e-3, max_value=1e12), st.floats(min_value=1e-9, max_value=1.0))
def test_texts_tell_the_numbers_apart(start, width):
    texts = [text for _, text in scale_of([start, start * (1 + width)]).labelled()]
    assert len(texts) == len(set(texts)) >= 1


def test_rounds_have_whole_numbers():
    assert Scale(low=0.5, high=1.5).labelled(whole=True) == ((1, "1"),)
    assert [text for _, text in Scale(low=0.5, high=12.5).labelled(whole=True)][-1] == "12"


def test_numbers_are_round():
    assert scale_of([1.0, 5.0]).ticks() == (1, 2, 3, 4, 5)
    assert scale_of([0.91, 1.32]).ticks() == (0.9, 1.0, 1.1, 1.2, 1.3)
    assert scale_of([2.0, 90.0]).ticks() == (2, 5, 10, 20, 50, 100)
    assert scale_of([1e-6, 1e6]).ticks()[-1] <= 1e7


def test_a_wide_range_is_logarithmic():
    scale = scale_of([0.01, 1.0, 100.0])
    assert scale.logarithmic
    assert math.isclose(scale.share(1.0), 0.5)
    assert not scale_of([1.0, 19.0]).logarithmic
    assert not scale_of([0.0, 1000.0]).logarithmic
    assert Scale(low=0.0, high=2.0).share(5.0) == 1
