"""Spreads, paired ratios and the interval of a median."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.bench.stats import Ratio, Spread, median_interval

VALUES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=40)


def test_a_spread_describes_its_values():
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(4.0, 2.5, pytest.approx(8.95), 1.0, 10.0, 4)
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_a_drifting_machine_is_not_in_a_paired_ratio():
    reference = [1.0, 1.1, 1.5, 2.0, 4.0, 9.0]
    ratio = Ratio.paired([each * 0.5 for each in reference], reference)
    assert ratio.median == pytest.approx(0.5)
    assert ratio.interval == (pytest.approx(0.5), pytest.approx(0.5))


def test_rounds_must_pair():
    with pytest.raises(ValueError, match="zip"):
        Ratio.paired([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    # Ranks from the tables of the sign test.
    ("n", "low", "high"),
    [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (15, 4, 12), (30, 10, 21)],
)
def test_the_interval_of_a_median_is_between_known_ranks(n: int, low: int, high: int):
    values = list(range(1, n + 1))
    random.Random(n).shuffle(values)
    assert median_interval(values) == (low, high)


@given(VALUES)
def test_the_median_lies_in_its_interval(values: list[float]):
    low, high = median_interval(values)
    ratio = Ratio.paired(values, [1.0] * len(values))
    assert min(values) <= low <= ratio.median <= high <= max(values)


@pytest.mark.parametrize("n", [6, 15, 20])
def test_the_interval_covers_the_true_median_as_often_as_it_says(n: int):
    source = random.Random(0)
    samples = ([source.gauss(0, 1) for _ in range(n)] for _ in range(2000))
    intervals = [median_interval(sample) for sample in samples]
    assert sum(low <= 0 <= high for low, high in intervals) / len(intervals) >= 0.94
