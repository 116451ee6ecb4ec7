"""CacheFlow in full: claims over chunk x layer, cut where the lanes are predicted to meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from cacheflow_sgl.core import cell_plans
from cacheflow_sgl.core.cells import CellClaims, ComputeCells, LoadCells
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.restores import Forward, Load, Plot, Restore
from cacheflow_sgl.core.staircase import HOLE


def staircase_restore(
    plot: Plot, *, load_only: bool = False, upstream: Restore | None = None
) -> Restore:
    """A restore over `cells.CellClaims`.

    Args:
        plot: what is restored. Where it has boundary activations, compute waits for those of its
            chunk, which are loaded first.
        load_only: compute nothing; the suffix follows the loads through the layers, as in SGLang.
        upstream: the same restore on the stage before, whose output compute waits for.
    """
    return _StaircaseRestore(plot, load_only, upstream)


class _StaircaseRestore:
    def __init__(self, plot: Plot, load_only: bool, upstream: Restore | None) -> None:
        self._plot = plot
        self._claims = CellClaims(plot.chunks, plot.layers, plot.tiers)
        self._upstream = upstream
        self._last_hole = max((j for j, t in enumerate(plot.tiers) if t == HOLE), default=-1)
        self._forward_s = [plot.forward_s(chunk, plot.layers) for chunk in plot.chunks]
        self._suffix_s = plot.forward_s(plot.suffix, plot.layers) if plot.suffix.tokens else 0.0
        self._left = {tier: 0 for tier in plot.tiers if tier != HOLE}
        """What loads may still claim, by tier: tokens times layers, so that none is exactly 0."""
        for chunk, tier in zip(plot.chunks, plot.tiers, strict=True):
            if tier != HOLE:
                self._left[tier] += chunk.tokens * plot.layers
        self._compute_left_s = sum(self._forward_s)
        self._below = [plot.layers for _ in plot.chunks]
        """Layers of each chunk that are below those which loads took from the top."""
        self._begun: set[int] = set()
        """Chunks that compute has claimed: what is left of them can only be loaded."""
        self._computing = False
        self._whole: set[int] = set()
        self._inputs: dict[int, bool] = {}
        """Chunks whose boundary activations were asked for, and whether they have landed."""
        self._last: dict[int, list[LoadCells]] = {}
        self._closing = False
        if load_only:
            self._close()

    @property
    def compute_left_s(self) -> float:
        return self._compute_left_s

    @property
    def load_left_s(self) -> float:
        last = self._last
        return max(self._left_s(tier) + self._cells_s(last.get(tier, ())) for tier in self._left)

    @property
    def step_s(self) -> float:
        chunk = self._claims.next_chunk
        return 0.0 if chunk is None else self._forward_s[chunk]

    @property
    def step_load_s(self) -> float:
        chunk = self._claims.next_chunk
        if self._closing or chunk is None or self._plot.tiers[chunk] == HOLE:
            return 0.0
        return self._plot.layer_s(chunk) * self._plot.layers

    @property
    def complete(self) -> bool:
        return self._claims.finished

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def all_claimed(self) -> bool:
        return self._closing and not self._last

    def follows_in(self, waits_s: Sequence[float]) -> float:
        lands_in = [waits_s[tier] + self._cells_s(cells) for tier, cells in self._last.items()]
        return max(lands_in, default=max(waits_s)) - self._suffix_s * (1 - 1 / self._plot.layers)

    @property
    def load_tiers(self) -> tuple[int, ...]:
        if self._closing:
            return tuple(self._last)
        tiers = tuple(tier for tier, left in self._left.items() if left)
        chunk = self._next_input()
        return tiers if chunk is None else tuple({*tiers, self._input_tier(chunk)})

    def computed(self, chunk: int) -> bool:
        return chunk in self._whole

    # -- the compute lane

    def next_forward(self, waits_s: Sequence[float]) -> Forward | None:
        chunk = self._claims.next_chunk
        if chunk is None:
            self._close()
            return None
        ceiling = self._claims.ceiling
        if not ceiling or not self._has_input(chunk):
            return None
        layers = self._layers_of(chunk, ceiling, waits_s)
        if not layers:
            its_turn = min(waits_s) < self._forward_s[chunk]
            if chunk > self._last_hole and its_turn:
                self._close()
            return None
        return self._forward(chunk, layers)

    def _layers_of(self, chunk: int, ceiling: int, waits_s: Sequence[float]) -> int:
        plot, span = self._plot, self._plot.chunks[chunk]
        if plot.tiers[chunk] == HOLE:
            return ceiling
        return cell_plans.compute_layers(
            cell_plans.NextChunk(
                compute_s=partial(plot.forward_s, span),
                ceiling=ceiling,
                compute_left_s=self._compute_left_s,
                fresh=not self._claims.loaded_cells,
                wait_s=min(waits_s[tier] for tier in self._left),
                load_layer_s=plot.layer_s(chunk),
                loads_s=max(waits_s[tier] + self._left_s(tier) for tier in self._left),
                suffix_s=self._suffix_s if chunk > self._last_hole else 0.0,
                layers=plot.layers,
            )
        )

    def _forward(self, chunk: int, layers: int) -> Forward:
        claim = self._claims.claim_compute(layers)
        assert claim is not None and claim.chunk == chunk, "what was just free was claimed"
        self._begun.add(chunk)
        self._computing = True
        self._compute_left_s -= self._forward_s[chunk] * self._below[chunk] / self._plot.layers
        tier = self._plot.tiers[chunk]
        if tier != HOLE:
            self._left[tier] -= self._plot.chunks[chunk].tokens * claim.layers
        return Forward(self._plot.chunks[chunk], claim.layers, partial(self._forward_ended, claim))

    def _forward_ended(self, claim: ComputeCells) -> None:
        self._computing = False
        self._claims.computed(claim)
        if claim.layers == self._plot.layers:
            self._whole.add(claim.chunk)

    # -- inputs of later stages

    def _has_input(self, chunk: int) -> bool:
        if self._plot.boundary_bytes_per_token:
            return self._inputs.get(chunk, False)
        if self._upstream is None or self._upstream.computed(chunk):
            return True
        if self._upstream.closing and chunk > self._last_hole:
            self._close()  # it loads that chunk, so its output will never come
        return False

    def _next_input(self) -> int | None:
        """The chunk whose boundary activation should be loaded next: compute is one ahead of it."""
        if not self._plot.boundary_bytes_per_token:
            return None
        chunk = self._claims.next_chunk
        if chunk is None:
            return None
        if chunk in self._inputs and not self._inputs[chunk]:
            chunk += 1
        return chunk if chunk < len(self._plot.chunks) and chunk not in self._inputs else None

    def _input_tier(self, chunk: int) -> int:
        return max(self._plot.tiers[chunk], 0)

    def _load_input(self, chunk: int) -> Load:
        self._inputs[chunk] = False
        span = self._plot.chunks[chunk]
        return Load(
            span=span,
            first_layer=0,
            stop_layer=0,
            tier=self._input_tier(chunk),
            nbytes=round(span.tokens * self._plot.boundary_bytes_per_token),
            ended=partial(self._inputs.__setitem__, chunk, True),
            what="boundary",
        )

    # -- links

    def next_load(self, tier: int, step_left_s: float) -> Load | None:
        if self._closing:
            cells = self._last.pop(tier, None)
            return None if cells is None else self._load(tier, cells)
        chunk = self._next_input()
        if chunk is not None and self._input_tier(chunk) == tier:
            return self._load_input(chunk)
        chunk = self._claims.next_load(tier)
        if chunk is None:
            return None
        if self._loads_win(step_left_s):
            self._close()
            return self.next_load(tier, step_left_s)
        claim = self._claims.claim_load(self._layers_to_load(chunk, tier, step_left_s), tier)
        if claim is None:
            return None
        self._count_load(claim)
        return self._load(tier, [claim])

    def _loads_win(self, step_left_s: float) -> bool:
        """Whether nothing would be computed even if the lane came here as soon as it is free."""
        left_s = max(map(self._left_s, self._left)) - step_left_s
        chunk = self._claims.next_chunk
        if chunk is None or chunk <= self._last_hole:
            return False
        if not self._claims.ceiling:
            return True  # compute can't pass the chunk before, which was loaded
        if left_s > self._suffix_s + 2 * self._forward_s[chunk]:
            return False  # far from it: not worth a closer look
        waits_s = [-step_left_s] * len(self._plot.beliefs.links)
        return not self._layers_of(chunk, self._claims.ceiling, waits_s)

    def _layers_to_load(self, chunk: int, tier: int, step_left_s: float) -> int:
        layer_s, latency_s = self._plot.layer_s(chunk), self._plot.beliefs.links[tier].latency_s
        layers = cell_plans.load_layers(
            layer_s=layer_s,
            latency_s=latency_s,
            step_s=self._forward_s[chunk],
            gap_s=self._left_s(tier) if self._computing else math.inf,
        )
        if chunk in self._begun:
            return layers
        layers = min(layers, self._passable(chunk, step_left_s))
        if not step_left_s:
            return layers
        # A load that compute would have overtaken before it landed only keeps the suffix waiting;
        # it must be in time even if the link is only half as fast.
        in_time = int(((step_left_s + self._compute_left_s) / 2 - latency_s) / layer_s)
        return min(layers, in_time)

    def _passable(self, chunk: int, step_left_s: float) -> int:
        """Layers that loads may take from the top of a chunk though compute can't pass them then.

        What lies behind in other tiers must be loaded above them as well. That has to be so when
        compute comes there, even if its links are only half as fast.
        """
        plot, below = self._plot, self._below
        if len(self._left) == 1:
            return below[chunk]  # nothing lies behind
        behind_s = dict.fromkeys(self._left, 0.0)
        for number in range(chunk + 1, len(below)):
            if plot.tiers[number] == HOLE:
                break
            behind_s[plot.tiers[number]] += plot.layer_s(number) * below[number]
        behind_s[plot.tiers[chunk]] = 0.0
        slowest_s = max(behind_s.values())
        if not slowest_s:
            return below[chunk]
        before_s = step_left_s + sum(
            self._forward_s[number] * below[number] / plot.layers
            for number in range(chunk)
            if number not in self._begun
        )
        share = min(before_s / (2 * slowest_s), 1.0)
        return below[chunk] - math.ceil(plot.layers * (1 - share))

    def _cells_s(self, cells: Sequence[LoadCells]) -> float:
        """Predicted seconds to load these, latency aside."""
        return sum(self._plot.layer_s(claim.chunk) * claim.layers for claim in cells)

    def _left_s(self, tier: int) -> float:
        """Predicted seconds to load what is unclaimed of a tier, latency aside."""
        plot = self._plot
        nbytes = self._left[tier] * plot.bytes_per_token / plot.layers
        return nbytes / plot.beliefs.links[tier].bytes_per_s

    def _count_load(self, claim: LoadCells) -> None:
        plot = self._plot
        self._left[plot.tiers[claim.chunk]] -= plot.chunks[claim.chunk].tokens * claim.layers
        if claim.chunk not in self._begun:
            self._below[claim.chunk] -= claim.layers
            self._compute_left_s -= self._forward_s[claim.chunk] * claim.layers / plot.layers

    def _load(self, tier: int, cells: list[LoadCells]) -> Load:
        chunks = self._plot.chunks
        return Load(
            span=Span(min(chunks[c.chunk].start for c in cells), chunks[cells[0].chunk].stop),
            first_layer=min(c.start for c in cells),
            stop_layer=max(c.stop for c in cells),
            tier=tier,
            nbytes=round(sum(self._plot.layer_bytes(c.chunk) * c.layers for c in cells)),
            ended=partial(self._load_ended, cells),
        )

    def _load_ended(self, cells: list[LoadCells]) -> None:
        for claim in cells:
            self._claims.landed(claim)

    def _close(self) -> None:
        """Compute nothing more: claim all that is left, to be loaded layer by layer."""
        self._closing = True
        for tier in self._left:
            while (claim := self._claims.claim_load(self._plot.layers, tier)) is not None:
                self._count_load(claim)
                self._last.setdefault(tier, []).append(claim)
        self._compute_left_s = 0.0
