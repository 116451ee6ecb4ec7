"""What a forward and a load cost, in seconds, learned from those that have just run.

Both costs are sums of a few non-negative terms. They are fitted to the last samples by least
squares on relative errors, so that a small sample counts as much as a large one. Recent samples
weigh more, stray ones hardly anything, and a change that lasts wins within a few samples.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from cacheflow_sgl.core.profiles import TableCost

_Array = npt.NDArray[np.float64]

MIN_ROWS = 64
"""Smallest forward that is a sample: a smaller one mostly shows the base, and a rate guessed from
it would be several times too slow for a chunk."""

_WINDOW = 64
_ROUNDS = 12
_STRAY = 0.25
"""A sample this far off its prediction (1.25x or 1/1.25x) counts half."""
_CHANGE = 1.4
_CHANGE_SAMPLES = 4
"""This many samples in a row, all this factor off to the same side, are a change and not strays."""
_BELIEVED_SHARE = 0.5
"""Base, latency and attention are believed to be no part of the time, give or take this share.
It decides only where the samples don't: all of one size, or sizes that noise makes alike."""
_DOUBT = 0.08
"""Squared relative errors added to those seen, so that few samples are taken for noisy ones."""
_FEW = 3
"""This many loads that were measured are believed rather than what was expected of the link."""
_FASTEST = 1e15
"""Bytes a second at which a link whose samples show no cost per byte is taken."""


class UnknownCost(LookupError):  # noqa: N818
    """Nothing has been measured yet that a prediction could stand on."""


class _Sample(NamedTuple):
    terms: tuple[float, ...]
    seconds: float
    size_class: int


@dataclass
class _Fit:
    """Non-negative factors of the terms of a cost. Any thread may add samples and predict.

    The first term is the constant one, the second the one that is believed when samples can't tell.
    """

    half_life: float
    """Samples after which a sample weighs half."""
    samples: list[_Sample] = field(default_factory=list)
    _factors: tuple[float, ...] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, terms: tuple[float, ...], seconds: float) -> None:
        """Take a sample; when the window is full the oldest of the most common size goes.

        So a long run of short forwards doesn't push out what is known of full chunks.
        """
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"a measured time must be positive and finite, not {seconds}")
        with self._lock:
            self.samples.append(_Sample(terms, seconds, math.frexp(terms[1])[1]))
            self._factors = None
            if len(self.samples) > _WINDOW:
                sizes = [sample.size_class for sample in self.samples]
                del self.samples[sizes.index(Counter(sizes).most_common(1)[0][0])]

    def factors(self) -> tuple[float, ...]:
        """Seconds per unit of each term; fitted when asked for the first time after a sample."""
        with self._lock:
            if self._factors is None:
                self._factors = self._fitted()
            return self._factors

    def _fitted(self) -> tuple[float, ...]:
        if not self.samples:
            raise UnknownCost("nothing measured yet")
        terms = np.array([sample.terms for sample in self.samples])
        seconds = np.array([sample.seconds for sample in self.samples])
        weights = 0.5 ** (np.arange(len(seconds) - 1, -1, -1) / self.half_life)
        factors = _robust_factors(terms, seconds, weights)
        change = _lasting_change(seconds / (terms @ factors))
        if change is not None:
            # The shape of what was known still holds, its level doesn't. The samples are moved to
            # the new one for good: a mixture of levels would soon pass for another shape.
            since, ratio = change
            seconds[:since] *= ratio
            for at, sample in enumerate(self.samples[:since]):
                self.samples[at] = sample._replace(seconds=sample.seconds * ratio)
            factors = _robust_factors(terms, seconds, weights)
        return tuple(factors.tolist())


def _robust_factors(terms: _Array, seconds: _Array, weights: _Array) -> _Array:
    """Iteratively reweighted: errors relative to the prediction, strays nearly without weight.

    It starts with errors relative to the measured time, which favours the fast samples: what strays
    (a compilation, a busy neighbour) is nearly always slow.
    """
    scale: _Array = seconds
    trust = weights
    variance = _STRAY**2
    factors = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        last = factors
        factors = _non_negative(terms / scale[:, None], seconds / scale, trust, variance)
        scale = terms @ factors
        off = np.maximum(scale / seconds, seconds / scale) - 1
        trust = weights / (1 + (off / _STRAY) ** 2)
        variance = (float(trust @ off**2) + _DOUBT) / float(trust.sum())
        if (np.abs(factors - last) <= 1e-4 * factors).all():
            break
    return factors


def _non_negative(terms: _Array, target: _Array, weights: _Array, variance: float) -> _Array:
    """Exact non-negative weighted least squares for two or three terms.

    The noisier the samples (`variance` of relative errors), the more weighs what is believed.
    """
    weighted = terms * weights[:, None]
    gram = weighted.T @ terms
    norms = np.sqrt(np.diag(gram))
    gram /= np.outer(norms, norms)
    goal = (weighted.T @ target) / norms
    believed_zero = np.full(len(norms), variance / _BELIEVED_SHARE**2 / weights.sum())
    believed_zero[1] = 0.0
    gram += np.diag(believed_zero + 1e-12)
    solution = np.linalg.solve(gram, goal)
    if (solution < 0).any():
        solution = _best_subset(gram, goal)
    return np.asarray(solution / norms)


def _best_subset(gram: _Array, goal: _Array) -> _Array:
    """The best solution among those with some factors zero and none negative."""
    best = np.zeros(len(goal))
    least = math.inf
    for size in range(1, len(goal)):
        for chosen in combinations(range(len(goal)), size):
            candidate = np.zeros(len(goal))
            rows = list(chosen)
            candidate[rows] = np.linalg.solve(gram[np.ix_(rows, rows)], goal[rows])
            error = float(candidate @ gram @ candidate - 2 * goal @ candidate)
            if (candidate >= 0).all() and error < least:
                best, least = candidate, error
    return best


def _lasting_change(ratios: _Array) -> tuple[int, float] | None:
    """Since which sample all are off to one side, and by what factor; None if too few are."""
    for away in (ratios > _CHANGE, ratios < 1 / _CHANGE):
        inside = np.flatnonzero(~away)
        since = int(inside[-1]) + 1 if len(inside) else 0
        if len(ratios) - since >= _CHANGE_SAMPLES:
            return since, float(np.median(ratios[since:]))
    return None


class ForwardCost(Protocol):
    """What plans ask of compute: `ComputeCost`, `CorrectedCost` and `profiles.TableCost` are it."""

    def observe(self, start: int, rows: int, seconds: float) -> None:
        """Take note of a forward that has run; a cost that is given for good learns nothing."""

    def seconds(self, start: int, rows: int) -> float:
        """Predicted seconds of a forward of `rows` tokens at offset `start`.

        `UnknownCost` where `known` is false.
        """

    @property
    def known(self) -> bool:
        """Whether `seconds` has something to stand on."""


class ComputeCost:
    """Seconds of one forward: base + rows * a + rows * (start + rows / 2) * b, all non-negative.

    The last term is attention: each row reads the KV of the tokens before it. Any thread may use
    it.
    """

    def __init__(self) -> None:
        self._fit = _Fit(half_life=32)

    def observe(self, start: int, rows: int, seconds: float) -> None:
        """Learn from a forward of `rows` tokens at offset `start` that took `seconds`.

        Forwards of less than `MIN_ROWS` rows are ignored.

        Raises:
            ValueError: `seconds` is not positive and finite.
        """
        if rows >= MIN_ROWS:
            self._fit.add(_forward_terms(start, rows), seconds)

    def seconds(self, start: int, rows: int) -> float:
        """Predicted seconds of a forward of `rows` tokens at offset `start`.

        Raises:
            UnknownCost: no forward has been observed yet.
        """
        base, per_row, per_read = self._fit.factors()
        return base + rows * per_row + rows * (start + rows / 2) * per_read

    @property
    def known(self) -> bool:
        """Whether `seconds` has something to stand on."""
        return bool(self._fit.samples)


def _forward_terms(start: int, rows: int) -> tuple[float, ...]:
    return 1.0, float(rows), rows * (start + rows / 2)


class CorrectedCost:
    """Seconds of one forward by a profile, corrected by those that ran: base + scale * profile.

    Neither is negative. While none has run it is the profile itself. Any thread may use it.
    """

    known = True
    """There is always something to stand on."""

    def __init__(self, prior: TableCost) -> None:
        self.layers = prior.layers
        """All layers of the model."""
        self._prior = prior
        self._fit = _Fit(half_life=32)

    def observe(self, start: int, rows: int, seconds: float, layers: int | None = None) -> None:
        """Learn from a forward of `rows` tokens at `start` through `layers` layers (None: all).

        Forwards of less than `MIN_ROWS` rows are ignored.

        Raises:
            ValueError: `seconds` is not positive and finite.
        """
        if rows >= MIN_ROWS:
            self._fit.add((1.0, self._prior.seconds(start, rows, layers)), seconds)

    def seconds(self, start: int, rows: int, layers: int | None = None) -> float:
        """Predicted seconds of a forward of `rows` tokens at `start` through `layers` layers."""
        prior_s = self._prior.seconds(start, rows, layers)
        if not self._fit.samples:
            return prior_s
        base, scale = self._fit.factors()
        return base + scale * prior_s

    def span_s(self, start: int, stop: int, chunk: int, layers: int | None = None) -> float:
        """Predicted seconds to compute tokens [start, stop) one chunk after the other."""
        prior_s = self._prior.span_s(start, stop, chunk, layers)
        if not self._fit.samples:
            return prior_s
        base, scale = self._fit.factors()
        return base * -(-(stop - start) // chunk) + scale * prior_s


class LinkCost:
    """Seconds to load `nbytes`: latency + nbytes / bandwidth. Any thread may use it."""

    def __init__(self) -> None:
        self._fit = _Fit(half_life=8)
        self._expected: tuple[float, ...] | None = None

    @classmethod
    def expecting(cls, latency_s: float, bytes_per_s: float) -> LinkCost:
        """A link that is taken to be so until its first few loads (`_FEW`) have been observed.

        Raises:
            ValueError: the latency is negative or the rate not positive.
        """
        if latency_s < 0 or not bytes_per_s > 0:
            raise ValueError(f"no link: latency {latency_s} s, {bytes_per_s} bytes a second")
        link = cls()
        link._expected = latency_s, 1 / bytes_per_s
        return link

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from a load of `nbytes` bytes that kept the link busy for `seconds`.

        Of loads that overlap, each counts from when the one before it has ended.

        Raises:
            ValueError: `nbytes` is less than 1, or `seconds` is not positive and finite.
        """
        if nbytes < 1:
            raise ValueError(f"a load has at least one byte, not {nbytes}")
        self._fit.add((1.0, float(nbytes)), seconds)

    def seconds(self, nbytes: int) -> float:
        """Predicted seconds to load `nbytes` bytes in one go.

        Raises:
            UnknownCost: no load has been observed yet.
        """
        return self.latency_s + nbytes / self.bytes_per_s

    @property
    def latency_s(self) -> float:
        """Seconds a load takes beside its bytes; `UnknownCost` if nothing was observed."""
        return self._factors()[0]

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second, finite and positive; `UnknownCost` if nothing was observed."""
        return 1 / max(self._factors()[1], 1 / _FASTEST)

    @property
    def known(self) -> bool:
        """Whether `seconds` has something to stand on."""
        return self._expected is not None or bool(self._fit.samples)

    def _factors(self) -> tuple[float, ...]:
        if self._expected is not None and len(self._fit.samples) < _FEW:
            return self._expected
        return self._fit.factors()
