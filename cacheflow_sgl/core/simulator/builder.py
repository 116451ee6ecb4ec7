"""Which restore a request gets on each stage, by the engine that is simulated."""

from __future__ import annotations

import math
from itertools import takewhile

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.policies import Policy
from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.jobs import Progress
from cacheflow_sgl.core.simulator.requests import Found, Request
from cacheflow_sgl.core.simulator.restores import Plot, Restore
from cacheflow_sgl.core.simulator.setup import Boundary, Engine, Setup
from cacheflow_sgl.core.simulator.staircase_restore import staircase_restore
from cacheflow_sgl.core.simulator.token_restore import token_restore
from cacheflow_sgl.core.simulator.world import World
from cacheflow_sgl.core.staircase import HOLE


class Builder:
    """Makes the restores of one simulation."""

    def __init__(self, world: World, setup: Setup, beliefs: Beliefs) -> None:
        self._world = world
        self._setup = setup
        self._beliefs = beliefs
        self._layers = world.compute.layers // setup.stages

    def stages(self, request: Request, found: Found, now_s: float) -> list[Progress]:
        """How a request begins on every stage."""
        tiers = self._wanted(found)
        stop = found.device_tokens + len(tiers) * self._world.chunk
        if not tiers:
            return [Progress(None, stop, now_s) for _ in range(self._setup.stages)]
        restores: list[Restore] = []
        for stage in range(self._setup.stages):
            plot = self._plot(stage, request, found.device_tokens, tiers)
            restores.append(self._restore(plot, restores[-1] if restores else None))
        return [Progress(restore, stop, math.inf) for restore in restores]

    def _wanted(self, found: Found) -> tuple[int, ...]:
        """What the engine brings back: SGLang stops at the first hole, recompute brings nothing."""
        if self._setup.engine is Engine.RECOMPUTE:
            return ()
        if self._setup.engine is Engine.LOAD:
            return tuple(takewhile(lambda tier: tier != HOLE, found.tiers))
        return found.tiers

    def _plot(self, stage: int, request: Request, start: int, tiers: tuple[int, ...]) -> Plot:
        chunk, stages = self._world.chunk, self._setup.stages
        chunks = [Span(start + j * chunk, start + (j + 1) * chunk) for j in range(len(tiers))]
        stop = chunks[-1].stop
        stored = stage > 0 and self._setup.boundary is Boundary.EXACT
        return Plot(
            chunks=chunks,
            tiers=tiers,
            layers=self._layers,
            bytes_per_token=self._world.kv_bytes_per_token / stages,
            boundary_bytes_per_token=self._world.boundary_bytes_per_token if stored else 0.0,
            beliefs=self._beliefs,
            suffix=Span(stop, min(stop + chunk, request.prompt_tokens)),
        )

    def _restore(self, plot: Plot, before: Restore | None) -> Restore:
        if self._setup.engine is Engine.CAKE:
            return token_restore(plot, Policy.CAKE)
        if self._setup.engine is Engine.LOAD:
            return staircase_restore(plot, load_only=True)
        upstream = before if self._setup.boundary is Boundary.OFF else None
        if self._setup.engine is Engine.STAIRCASE:
            return staircase_restore(plot, upstream=upstream)
        if plot.span.tokens > self._setup.layer_threshold:
            return token_restore(plot, Policy.CACHEFLOW)
        return staircase_restore(plot)
