"""Figures of repeated runs: spreads, and paired ratios with an interval of their median."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

_CONFIDENCE = 0.95


class Spread(msgspec.Struct, frozen=True):
    """A distribution, in the unit of its values."""

    mean: float
    median: float
    p95: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The distribution of `values`. `ValueError` where there are none."""
        if not values:
            raise ValueError("no values")
        median, p95 = (float(p) for p in np.percentile(values, [50, 95]))
        mean = float(np.mean(values))
        return cls(mean, median, p95, min(values), max(values), len(values))


class Ratio(msgspec.Struct, frozen=True):
    """Median of paired ratios, and the interval in which the true median lies."""

    median: float
    interval: tuple[float, float]

    @classmethod
    def paired(cls, values: Sequence[float], references: Sequence[float]) -> Ratio:
        """Of each value over the reference of the same round.

        What drifts from round to round, as a machine does, is not in it.
        """
        ratios = [value / reference for value, reference in zip(values, references, strict=True)]
        return cls(float(np.median(ratios)), median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95% interval of the median, by order statistics: no assumption on the distribution.

    Up to five values are too few for 95%: then it is their whole range, of confidence 1 - 2**(1-n).
    """
    ordered, n = sorted(values), len(values)
    outside = 0.0  # probability that the true median lies below the value of rank `rank`
    rank = 0
    while 2 * (outside + math.comb(n, rank) / 2**n) <= 1 - _CONFIDENCE:
        outside += math.comb(n, rank) / 2**n
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[n - rank]
