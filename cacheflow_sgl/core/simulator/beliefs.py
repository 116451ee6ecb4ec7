"""What the planners of a simulated server believe, exact or wrong, fixed or learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheflow_sgl.core.costs import CorrectedCost, LinkCost
from cacheflow_sgl.core.profiles import TableCost
from cacheflow_sgl.core.simulator.world import Link, World


@dataclass(frozen=True)
class Beliefs:
    """Predicted costs of forwards and of loads, one link a tier."""

    compute: TableCost | CorrectedCost
    links: Sequence[LinkCost]
    learns: bool = False

    @classmethod
    def exact(cls, world: World) -> Beliefs:
        """What is true at the start, for good."""
        return cls(world.compute, _expected(world.links))

    @classmethod
    def fixed(cls, compute: TableCost, links: Sequence[Link]) -> Beliefs:
        """These for good, right or wrong."""
        return cls(compute, _expected(links))

    @classmethod
    def learning(cls, prior: TableCost, links: Sequence[Link]) -> Beliefs:
        """These at the start, corrected by every forward and load."""
        return cls(CorrectedCost(prior), _expected(links), learns=True)

    def observe_forward(self, start: int, rows: int, layers: int, seconds: float) -> None:
        """Learn from a forward, where this learns."""
        if isinstance(self.compute, CorrectedCost):
            self.compute.observe(start, rows, seconds, layers)

    def observe_load(self, tier: int, nbytes: int, seconds: float) -> None:
        """Learn from a load, where this learns."""
        if self.learns:
            self.links[tier].observe(nbytes, seconds)


def _expected(links: Sequence[Link]) -> list[LinkCost]:
    return [LinkCost.expecting(link.latency_s, link.bytes_per_s) for link in links]
