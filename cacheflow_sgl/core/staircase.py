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
once) takes these, the token-wise and the layer-wise split the rest of the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cacheflow_sgl.core.geometry import Span

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

HOLE = -1
"""The tier of a chunk that no tier has."""


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
    raised, lowered = _clamp_changes(grid, split)
    longest = _longest_through(grid, paths)[:, :, None]
    raised_s = (longest + raised).max(axis=0)
    lowered_s = (longest + lowered).max(axis=0)
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


def _clamp_changes(grid: Grid, split: _Ints) -> tuple[_Floats, _Floats]:
    """(1 + links, J, L + 1), twice: seconds that compute and each link get more by each clamp.

    First for raising the chunks up to j to at least k, then for lowering those from j on.
    """
    each = np.arange(grid.chunks)
    alone = np.empty((1 + len(grid.on_link), *grid.compute_s.shape))
    alone[0] = grid.compute_s - grid.compute_s[each, split, None]
    load = grid.load_s - grid.load_s[each, split, None]
    np.multiply(load, grid.on_link[:, :, None], out=alone[1:])
    upward = np.arange(grid.layers + 1) > split[:, None]
    sums = np.zeros((len(alone), grid.chunks + 1, grid.layers + 1))
    np.cumsum(alone * upward, axis=1, out=sums[:, 1:])
    raised = sums[:, 1:] - sums[:, grid.segment_starts[grid.segment]]
    np.cumsum(alone * ~upward, axis=1, out=sums[:, 1:])
    lowered = sums[:, grid.segment_stops[grid.segment]] - sums[:, :-1]
    return raised, lowered


def _longest_through(grid: Grid, paths: _Floats) -> _Floats:
    """(1 + links, J): seconds of the longest path that computes chunk j's segment, or loads it."""
    compute = np.maximum.accumulate(paths.max(axis=1))[:-1]
    load = np.maximum.accumulate(paths[::-1], axis=0)[::-1][1:]
    return np.vstack([compute, load.T])[:, grid.segment]
