"""The token-wise engine: two pointers, as Cake and CacheFlow v1 move them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from cacheflow_sgl.core.geometry import Span, segments_of
from cacheflow_sgl.core.plans import Costs, Way
from cacheflow_sgl.core.pointers import TwoPointers
from cacheflow_sgl.core.policies import Planner, Policy
from cacheflow_sgl.core.simulator.restores import Forward, Load, Plot, Restore
from cacheflow_sgl.core.staircase import HOLE

PAGE = 64
"""Tokens of a page."""


def token_restore(plot: Plot, policy: Policy) -> Restore:
    """A restore over `pointers.TwoPointers`: `CAKE`, or `CACHEFLOW` with its start rule.

    For one stage. Loads go down through all chunks, each over the link of its tier, and are planned
    as if all came from the tier that has most of them.
    """
    return _TokenRestore(plot, policy)


class _StageCost:
    """Predicted forwards through the layers of one stage, as the token-wise planner asks."""

    known = True

    def __init__(self, plot: Plot) -> None:
        self._compute = plot.beliefs.compute
        self._layers = plot.layers

    def observe(self, start: int, rows: int, seconds: float) -> None:
        """Beliefs learn by themselves."""

    def seconds(self, start: int, rows: int) -> float:
        """Seconds of a forward."""
        return self._compute.seconds(start, rows, self._layers)


class _TokenRestore:
    def __init__(self, plot: Plot, policy: Policy) -> None:
        self._plot = plot
        self._policy = policy
        chunk = plot.chunks[0].tokens
        self._pages = [tier for tier in plot.tiers for _ in range(chunk // PAGE)]
        """The tier of each."""
        present = [tier != HOLE for tier in self._pages]
        self._loadable = sum(present) * PAGE
        """Unclaimed tokens that a tier has."""
        self._segments = segments_of(plot.span, present, PAGE)
        self._load_pointers = [segment.stop for segment in self._segments]
        self._pointers = TwoPointers(self._segments, PAGE)
        self._chunks_in = Counter(tier for tier in plot.tiers if tier != HOLE)
        ((most, _),) = self._chunks_in.most_common(1)
        costs = Costs(
            compute=_StageCost(plot),
            link=plot.beliefs.links[most],
            bytes_per_token=round(plot.bytes_per_token),
        )
        self._planner = Planner(chunk, PAGE, costs)
        self._way = self._planner.plan(policy, plot.span).way
        if self._way is Way.LOAD and not all(present):
            self._way = Way.SPLIT  # a hole can only be computed
        if self._way is Way.RECOMPUTE:
            self._pointers.stop_loading()
        self._forwards = 0
        self._in_flight = 0

    @property
    def compute_left_s(self) -> float:
        at, gap = self._pointers.position, self._pointers.gap
        plot = self._plot
        return plot.beliefs.compute.span_s(at, at + gap, plot.chunks[0].tokens, plot.layers)

    @property
    def load_left_s(self) -> float:
        stopped = self._pointers.loading_stopped
        return 0.0 if stopped else self._planner.costs.load_s(self._loadable)

    @property
    def step_s(self) -> float:
        rows = min(self._plot.chunks[0].tokens, self._pointers.gap)
        start = self._pointers.position
        return self._plot.forward_s(Span(start, start + rows), self._plot.layers) if rows else 0.0

    @property
    def step_load_s(self) -> float:
        rows = min(self._plot.chunks[0].tokens, self._pointers.gap)
        start = self._pointers.position
        if self._pointers.loading_stopped:
            return 0.0
        return self._planner.costs.load_s(self._present_tokens(Span(start, start + rows)))

    @property
    def complete(self) -> bool:
        return self._pointers.finished and not self._forwards

    @property
    def closing(self) -> bool:
        return self._way is Way.LOAD

    @property
    def all_claimed(self) -> bool:
        return self.closing and not self._pointers.gap

    def follows_in(self, waits_s: Sequence[float]) -> float:
        return max(waits_s[tier] for tier in self._chunks_in) + self.load_left_s

    @property
    def load_tiers(self) -> tuple[int, ...]:
        if self._pointers.loading_stopped or not self._pointers.gap:
            return ()
        segment = self._segment_to_load
        return () if segment is None else (self._tier_below(self._load_pointers[segment]),)

    def computed(self, chunk: int) -> bool:
        return False

    def next_forward(self, waits_s: Sequence[float]) -> Forward | None:
        pointers = self._pointers
        tokens = self._planner.compute_claim(
            self._policy,
            position=pointers.position,
            gap=pointers.gap,
            load_in_flight=self._in_flight,
        )
        claim = pointers.claim_compute(tokens)
        if claim is None:
            return None
        self._loadable -= self._present_tokens(claim)
        self._forwards += 1
        return Forward(claim, self._plot.layers, self._forward_ended)

    def _present_tokens(self, span: Span) -> int:
        """Tokens that a tier has."""
        first, stop = ((at - self._plot.span.start) // PAGE for at in (span.start, span.stop))
        return sum(tier != HOLE for tier in self._pages[first:stop]) * PAGE

    @property
    def _segment_to_load(self) -> int | None:
        """The front-most segment with room, from whose pointer down the next load goes."""
        position = self._pointers.position
        for number, segment in enumerate(self._segments):
            if self._load_pointers[number] > max(position, segment.loadable_from):
                return number
        return None

    def _tier_below(self, token: int) -> int:
        """Of the page that ends there."""
        return self._pages[(token - self._plot.span.start) // PAGE - 1]

    def _of_one_tier(self, stop: int, tokens: int) -> int:
        """How many of the tokens below `stop` a load may take: those of the first page's tier."""
        taken = PAGE
        while taken < tokens and self._tier_below(stop - taken) == self._tier_below(stop):
            taken += PAGE
        return min(taken, tokens)

    def _forward_ended(self) -> None:
        self._forwards -= 1
        self._pointers.jump()

    def next_load(self, tier: int, step_left_s: float) -> Load | None:
        segment = self._segment_to_load
        if segment is None or tier != self._tier_below(self._load_pointers[segment]):
            return None
        gap = self._pointers.gap
        tokens = gap
        if not self.closing:
            position = self._pointers.position
            tokens = self._planner.load_claim(self._policy, position=position, gap=gap)
        claim = self._pointers.claim_load(self._of_one_tier(self._load_pointers[segment], tokens))
        if claim is None:
            return None
        self._load_pointers[segment] = claim.start
        self._in_flight += claim.tokens
        self._loadable -= claim.tokens
        return Load(
            span=claim,
            first_layer=0,
            stop_layer=self._plot.layers,
            tier=tier,
            nbytes=round(claim.tokens * self._plot.bytes_per_token),
            ended=partial(self._load_ended, claim),
        )

    def _load_ended(self, claim: Span) -> None:
        self._in_flight -= claim.tokens
        self._pointers.landed(claim)
        self._pointers.jump()
