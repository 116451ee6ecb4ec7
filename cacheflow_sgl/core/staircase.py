"""Plans over chunk x layer cells: which layers of each chunk are computed, which are loaded.

A plan is a split: chunk j is computed through layers [0, k_j), its layers [k_j, L) are loaded.
Computing a chunk needs the layers below of all chunks before it, so k_j never rises within a
segment: a run of holes (k = L: no tier has them, maybe none) and the loadable chunks behind it.
CacheFlow (arXiv 2604.25080) has the token-wise split (L, .., L, 0, .., 0) and the layer-wise one
(k, .., k); both are staircases.

Links load in parallel, front to back over segments, and never wait. One compute lane goes through
the segments; it enters one when all before it is computed and loaded. So a restore takes as long as
its longest path: link t loads segments [0, s), then segments [s, S) are computed. Each path is a
sum over chunks of C_j[k_j] or W_j[k_j], and the makespan T is the largest of the 1 + S * links.

With prices p >= 0 on the paths, summing to 1, T >= sum of p * path >= its least value over all
staircases. That one separates by chunk up to the order of the k_j, so a dynamic programme solves
it: F_j[k] = g_j[k] + min over k' >= k of F_{j-1}[k'] with g_j = a_j C_j + b_j W_j. The best prices
give a lower bound on T and splits that balance the paths but for a chunk or so. A local search over
clamps (chunks up to j raised to at least k, or chunks from j on lowered to at most k, all (j, k) at
once) takes their mean and the token-wise split the rest of the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cacheflow_sgl.core.geometry import Span

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

HOLE = -1
"""The tier of a chunk that no tier has."""

_PLAN_GAP = 1e-3
"""Share of its time by which a plan may be above the lower bound and be taken at once."""
_BOUND_GAP = 1e-6
"""Share of the bound by which better prices might still raise it."""
_ROUNDS = 200
_TINY = 1e-9
"""Share of a sum of times that is taken for a rounding error."""
_NO_TIME_S = 1e-12
"""So little that it is as good as no time."""


class ForwardTable(Protocol):
    """Seconds of forwards of `rows` tokens at offset `start` through `layers` layers."""

    def __call__(self, starts: _Ints, rows: _Ints, layers: _Ints, /) -> _Floats:
        """Element by element; the three broadcast against each other."""
        ...


@dataclass(frozen=True, eq=False)
class Grid:
    """What each way of splitting each chunk of a restore costs: J chunks of L layers.

    `ValueError` where the shapes don't fit, a time is negative or not finite, or computing no layer
    takes time.
    """

    compute_s: _Floats
    """(J, L + 1): seconds to compute layers [0, k) of chunk j."""
    load_s: _Floats
    """(J, L + 1): seconds its link needs for the rest when layers [0, k) are computed.

    That is layers [k, L), and boundary activations where these must be loaded to compute the
    others. Ignored for a hole.
    """
    tier: _Ints
    """(J,): number of the link that loads chunk j, or `HOLE`."""

    def __post_init__(self) -> None:
        shape = self.compute_s.shape
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
            raise ValueError(f"a grid has at least one chunk and one layer, not the shape {shape}")
        if self.load_s.shape != shape or self.tier.shape != shape[:1]:
            raise ValueError(
                f"shapes of compute, load and tier differ: {shape}, {self.load_s.shape}, "
                f"{self.tier.shape}"
            )
        for name, seconds in (("compute", self.compute_s), ("load", self.load_s)):
            if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
                raise ValueError(f"{name} times must be finite and not negative")
        if self.compute_s[:, 0].any():
            raise ValueError("to compute no layer must take no time")
        if (self.tier < HOLE).any():
            raise ValueError(f"tiers are numbered from 0, or {HOLE} for a hole")

    @classmethod
    def of(
        cls,
        chunks: Sequence[Span],
        layers: int,
        forward: ForwardTable,
        *,
        bytes_per_token_layer: float,
        links: Sequence[tuple[float, float]],
        tier: Sequence[int],
        boundary_bytes_per_token: float = 0.0,
    ) -> Grid:
        """The grid of `chunks` from what a forward and the links cost.

        Args:
            chunks: the chunks of the restore, front to back.
            layers: layers of the model, or of this pipeline stage.
            forward: seconds of a forward.
            bytes_per_token_layer: bytes of KV of one token in one layer.
            links: (latency in seconds, bytes a second) of each; the latency is paid once a chunk.
            tier: which link loads each chunk, or `HOLE`.
            boundary_bytes_per_token: bytes that must be loaded of each token that is computed.

        Raises:
            ValueError: no chunk, a tier without a link, or times a grid can't have.
        """
        if any(number >= len(links) for number in tier):
            raise ValueError(f"tiers {sorted(set(tier))}, but only {len(links)} links")
        starts = np.array([[chunk.start] for chunk in chunks], dtype=np.int64)
        rows = np.array([[chunk.tokens] for chunk in chunks], dtype=np.int64)
        through = np.arange(layers + 1, dtype=np.int64)
        compute_s = np.zeros((len(chunks), layers + 1))
        compute_s[:, 1:] = forward(starts, rows, through[1:])
        token_bytes = float(bytes_per_token_layer) * (layers - through)
        token_bytes[1:] += boundary_bytes_per_token
        nbytes = rows * token_bytes
        costs = np.array([*links, (0.0, np.inf)])  # the last for holes, whose tier is -1
        latency, rate = costs[list(tier)].T[:, :, None]
        load_s = np.where(nbytes > 0, latency + nbytes / rate, 0.0)
        return cls(compute_s, load_s, np.array(tier, dtype=np.int64))

    @property
    def chunks(self) -> int:
        """How many chunks, J."""
        return len(self.compute_s)

    @property
    def layers(self) -> int:
        """How many layers, L."""
        return int(self.compute_s.shape[1]) - 1

    @cached_property
    def holes(self) -> npt.NDArray[np.bool_]:
        """(J,): which chunks can only be computed."""
        return np.equal(self.tier, HOLE)

    @cached_property
    def segment_starts(self) -> _Ints:
        """(S,): first chunk of each segment: the first of all, and each hole behind a loadable."""
        first = self.holes.copy()
        first[1:] &= ~self.holes[:-1]
        first[0] = True
        return np.flatnonzero(first)

    @cached_property
    def segment_stops(self) -> _Ints:
        """(S,): first chunk behind each segment."""
        return np.append(self.segment_starts[1:], self.chunks)

    @cached_property
    def segment(self) -> _Ints:
        """(J,): number of the segment of each chunk."""
        return np.repeat(np.arange(len(self.segment_starts)), self._segment_chunks)

    @property
    def _segment_chunks(self) -> _Ints:
        return self.segment_stops - self.segment_starts

    @cached_property
    def on_link(self) -> npt.NDArray[np.bool_]:
        """(links, J): which chunks each link loads; one link at least, even if it loads none."""
        links = np.arange(max(int(self.tier.max()) + 1, 1))
        on_link: npt.NDArray[np.bool_] = links[:, None] == self.tier
        return on_link

    def paths(self, splits: _Ints) -> _Floats:
        """(.., S + 1, links): seconds of each path under each of the splits, (.., J).

        [s, t]: link t loads s segments, the rest is computed. The pure compute path, s = 0, is
        there once for each link.
        """
        each = np.arange(self.chunks)
        compute = np.add.reduceat(self.compute_s[each, splits], self.segment_starts, axis=-1)
        chunk_loads = self.on_link * self.load_s[each, splits][..., None, :]
        loads = np.add.reduceat(chunk_loads, self.segment_starts, axis=-1)
        paths = np.zeros((*splits.shape[:-1], len(self.segment_starts) + 1, len(self.on_link)))
        paths[..., 1:, :] = np.swapaxes(loads.cumsum(axis=-1), -1, -2)
        paths[..., :-1, :] += compute[..., ::-1].cumsum(axis=-1)[..., ::-1, None]
        return paths


@dataclass(frozen=True)
class Staircase:
    """A plan for one restore."""

    split: tuple[int, ...]
    """Layers computed of each chunk."""
    seconds: float
    """From the start until all is computed and loaded."""
    compute_s: float
    """Seconds the compute lane is busy."""
    load_s: float
    """Seconds the busiest link is busy."""


def makespan(grid: Grid, split: Sequence[int]) -> float:
    """Seconds that a restore takes under a split; `ValueError` where it is no staircase."""
    return float(grid.paths(_checked(grid, split)).max())


def token_plan(grid: Grid) -> Staircase:
    """The best found split of whole chunks, each computed or loaded; exact for one segment."""
    ends = [0, grid.layers]
    whole = Grid(grid.compute_s[:, ends], grid.load_s[:, ends], grid.tier)
    return _staircase(grid, grid.layers * _polished(whole, whole.holes.astype(np.int64)))


def layer_plan(grid: Grid) -> Staircase:
    """The best split with one k for all chunks but holes."""
    splits = np.where(grid.holes, grid.layers, np.arange(grid.layers + 1)[:, None])
    seconds = grid.paths(splits).max(axis=(1, 2))
    return _staircase(grid, splits[seconds.argmin()])


def staircase_plan(grid: Grid, start: Staircase | None = None) -> Staircase:
    """The best found staircase, never worse than `token_plan` or `layer_plan`.

    With `start`, a plan made for this restore before some chunks at its front or tail were done,
    the search starts from its part for the remaining ones only: much cheaper, and never worse than
    keeping to it.
    """
    if start is not None and len(start.split) >= grid.chunks:
        return _staircase(grid, _polished(grid, _remaining(grid, start)))
    dual = _Dual(grid, _PLAN_GAP)
    best = layer_plan(grid)
    starts = [token_plan(grid), _staircase(grid, dual.balanced_split())]
    for plan in sorted(starts, key=lambda plan: plan.seconds):
        polished = _staircase(grid, _polished(grid, np.array(plan.split)))
        best = min(best, polished, key=lambda plan: plan.seconds)
        if best.seconds <= dual.bound * (1 + _PLAN_GAP):
            break
    return best


def lower_bound(grid: Grid) -> float:
    """Seconds that no split of this grid can beat, nor a mixture of splits.

    The value of the Lagrangian dual; valid even where the search for the best prices ends early.
    """
    return _Dual(grid, _BOUND_GAP).bound


def _checked(grid: Grid, split: Sequence[int]) -> _Ints:
    ks = np.asarray(split, dtype=np.int64)
    if ks.shape != grid.tier.shape or ks.min() < 0 or ks.max() > grid.layers:
        raise ValueError(
            f"a split of this grid is {grid.chunks} numbers of layers up to {grid.layers}, "
            f"not {tuple(split)}"
        )
    if (ks[grid.holes] < grid.layers).any() or not _descends(grid, ks):
        raise ValueError(f"no staircase, or one that loads a hole: {tuple(split)}")
    return ks


def _descends(grid: Grid, split: _Ints) -> bool:
    """Whether no chunk has more computed layers than the one before it in its segment."""
    rises = split[1:] > split[:-1]
    rises[grid.segment_starts[1:] - 1] = False
    return not rises.any()


def _staircase(grid: Grid, split: _Ints) -> Staircase:
    paths = grid.paths(split)
    return Staircase(
        tuple(split.tolist()), float(paths.max()), float(paths[0, 0]), float(paths[-1].max())
    )


def _polished(grid: Grid, split: _Ints) -> _Ints:
    """The split after the best clamp, again and again until none gains."""
    paths = grid.paths(split)
    while True:
        changed = _best_clamp(grid, split, paths)
        new_paths = grid.paths(changed)
        if not new_paths.max() < paths.max():
            return split
        split, paths = changed, new_paths


def _best_clamp(grid: Grid, split: _Ints, paths: _Floats) -> _Ints:
    """The split with one clamp: chunks of a segment up to j at least k, or from j on at most k."""
    raised_s, lowered_s = _clamped_s(grid, split, paths)
    lowered_s[grid.holes] = np.inf
    changed = split.copy()
    if raised_s.min() < lowered_s.min():
        j, k = divmod(int(raised_s.argmin()), grid.layers + 1)
        part = changed[grid.segment_starts[grid.segment[j]] : j + 1]
        np.maximum(part, k, out=part)
    else:
        j, k = divmod(int(lowered_s.argmin()), grid.layers + 1)
        part = changed[j : grid.segment_stops[grid.segment[j]]]
        np.minimum(part, k, out=part)
    return changed


def _clamped_s(grid: Grid, split: _Ints, paths: _Floats) -> tuple[_Floats, _Floats]:
    """(J, L + 1), twice: seconds after each clamp that raises, and after each that lowers.

    A clamp changes one sum of compute times and one of load times a link, those of its segment;
    each path has the one or one of the others in it.
    """
    each = np.arange(grid.chunks)
    upward = np.arange(grid.layers + 1) > split[:, None]
    compute = grid.compute_s - grid.compute_s[each, split, None]
    load = grid.load_s - grid.load_s[each, split, None]
    lanes = [compute, *(load * loads[:, None] for loads in grid.on_link)]
    raised_s, lowered_s = np.zeros((2, *compute.shape))
    for alone, longest in zip(lanes, _longest_through(grid, paths), strict=True):
        raised, lowered = alone * upward, alone * ~upward
        for first, stop in zip(grid.segment_starts, grid.segment_stops, strict=True):
            from_front, from_tail = raised[first:stop], lowered[first:stop][::-1]
            np.cumsum(from_front, axis=0, out=from_front)
            np.cumsum(from_tail, axis=0, out=from_tail)
        raised += longest[:, None]
        lowered += longest[:, None]
        np.maximum(raised_s, raised, out=raised_s)
        np.maximum(lowered_s, lowered, out=lowered_s)
    return raised_s, lowered_s


def _longest_through(grid: Grid, paths: _Floats) -> _Floats:
    """(1 + links, J): seconds of the longest path that computes chunk j's segment, or loads it."""
    compute = np.maximum.accumulate(paths.max(axis=1))[:-1]
    load = np.maximum.accumulate(paths[::-1], axis=0)[::-1][1:]
    return np.vstack([compute, load.T])[:, grid.segment]


def _remaining(grid: Grid, start: Staircase) -> _Ints:
    """The best stretch of an earlier split that is as long as this grid, made a staircase of it."""
    splits = np.lib.stride_tricks.sliding_window_view(np.array(start.split), grid.chunks).copy()
    splits = np.minimum(splits, grid.layers)
    splits[:, grid.holes] = grid.layers
    for first, stop in zip(grid.segment_starts, grid.segment_stops, strict=True):
        np.minimum.accumulate(splits[:, first:stop], axis=1, out=splits[:, first:stop])
    best: _Ints = splits[grid.paths(splits).max(axis=(1, 2)).argmin()]
    return best


class _Dual:
    """The prices whose cheapest staircase is dearest, by column generation (Dantzig and Wolfe).

    A mixture of splits with weights q has the makespan z = max over paths of sum of q_i * path_i.
    With x = q / z the best one solves: the largest sum of x with sum of x_i * path_i <= 1 for every
    path. Its revised simplex method needs one split at a time, the cheapest under the prices that
    the basis implies; where that one costs no less than the mixture, both are optimal.
    """

    def __init__(self, grid: Grid, gap: float) -> None:
        """Search until bound and mixture are within the share `gap` of each other."""
        self._grid = grid
        size = 1 + len(grid.segment_starts) * len(grid.on_link)
        self._inverse = np.eye(size)
        self._amounts = np.ones(size)  # x of the columns in the basis; slack at first
        self._columns = np.full(size, -1)  # which split each of these is, or slack
        self._splits: list[_Ints] = []
        self._paths = np.empty((0, size))
        self.bound = 0.0
        prices = np.full(size, 1 / size)
        for _ in range(_ROUNDS):
            self._add(prices)
            values = self._optimum()
            mixture_s = 1 / values.sum()
            if self.bound >= mixture_s * (1 - gap) - _NO_TIME_S:
                break
            prices = values * mixture_s

    def balanced_split(self) -> _Ints:
        """The mixture's mean, rounded: a staircase as all its parts are."""
        used = self._columns >= 0
        parts = np.array(self._splits)[self._columns[used]]
        weights = self._amounts[used] / self._amounts[used].sum()
        mean: _Ints = np.rint(weights @ parts).astype(np.int64)
        return mean

    def _add(self, prices: _Floats) -> None:
        """Take the cheapest split under the prices as a column."""
        grid = self._grid
        by_path = np.zeros((len(grid.segment_starts) + 1, len(grid.on_link)))
        by_path[0, 0] = prices[0]
        by_path[1:] = prices[1:].reshape(by_path[1:].shape)
        split = _cheapest(grid, by_path)
        paths = grid.paths(split)
        column = np.append(paths[0, 0], paths[1:])
        self.bound = max(self.bound, float(prices @ column))
        self._splits.append(split)
        self._paths = np.vstack([self._paths, np.maximum(column, _NO_TIME_S)])

    def _optimum(self) -> _Floats:
        """Pivot until no column gains; the value of each path: what x grows by per second of it."""
        values: _Floats = np.zeros(len(self._columns))
        for _ in range(_ROUNDS):  # where paths are equal, pivots might go in circles
            values = (self._columns >= 0) @ self._inverse
            slack, split = int(values.argmin()), int((self._paths @ values).argmin())
            if values[slack] < -_TINY / self._paths.max():
                self._pivot(self._inverse[:, slack].copy(), -1)
            elif self._paths[split] @ values < 1 - _TINY:
                self._pivot(self._inverse @ self._paths[split], split)
            else:
                break
        return np.maximum(values, 0.0)

    def _pivot(self, column: _Floats, number: int) -> None:
        """Take a column, given in terms of the basis, into the basis."""
        positive = column > _TINY * column.max()
        room = np.where(positive, self._amounts, np.inf) / np.where(positive, column, 1.0)
        row = int(room.argmin())
        self._inverse[row] /= column[row]
        self._amounts[row] /= column[row]
        column[row] = 0.0
        self._inverse -= np.outer(column, self._inverse[row])
        self._amounts -= column * self._amounts[row]
        self._columns[row] = number


def _cheapest(grid: Grid, prices: _Floats) -> _Ints:
    """The staircase of the least sum of price * path; prices as `Grid.paths` has them."""
    by_segment = prices.sum(axis=1).cumsum()[:-1]
    compute = by_segment[grid.segment]
    load = prices[::-1].cumsum(axis=0)[::-1][1:][grid.segment, grid.tier]
    costs = compute[:, None] * grid.compute_s + load[:, None] * grid.load_s
    costs[grid.holes, :-1] = np.inf
    split: _Ints = costs.argmin(axis=1)
    if not _descends(grid, split):
        for first, stop in zip(grid.segment_starts, grid.segment_stops, strict=True):
            split[first:stop] = _cheapest_descent(costs[first:stop])
    return split


def _cheapest_descent(costs: _Floats) -> _Ints:
    """The k that never rise from row to row, with the least sum of costs[row, k]."""
    last = costs.shape[1] - 1
    totals = costs[:, ::-1].copy()  # from the last k down, so that those not below k come first
    least = np.empty(last + 1)
    for above, row in pairwise(totals):
        np.minimum.accumulate(above, out=least)
        row += least
    split = np.empty(len(costs), dtype=np.int64)
    reach = last + 1
    for row in range(len(costs) - 1, -1, -1):
        at = int(totals[row, :reach].argmin())
        split[row] = last - at
        reach = at + 1
    return split
