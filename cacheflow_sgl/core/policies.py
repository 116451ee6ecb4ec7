"""Who decides about a restore: the policies that a server, a request or the bench may name.

A policy makes the plan and sizes the claims of both lanes. The pointers, and so what is right, are
the same under all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cacheflow_sgl.core import plans
from cacheflow_sgl.core.geometry import Span, page_floor
from cacheflow_sgl.core.plans import Costs, Plan, Way


class Policy(enum.StrEnum):
    """What may be asked for.

    `CACHEFLOW` plans by predicted times. `RECOMPUTE`, `LOAD` and `SPLIT` are one way whatever the
    costs. `CAKE` (arXiv 2410.03065) always splits and claims whole chunks in both lanes. `SGLANG`
    leaves the prefix to SGLang's own load-back.
    """

    CACHEFLOW = "cacheflow"
    RECOMPUTE = "recompute"
    LOAD = "load"
    SPLIT = "split"
    CAKE = "cake"
    SGLANG = "sglang"


_OVERDUE_SHARE = 2.0
_OVERDUE_S = 0.005


def is_overdue(elapsed_s: float, expected_s: float | None) -> bool:
    """Whether work takes so much longer than predicted that one should not wait for it."""
    return expected_s is not None and elapsed_s > _OVERDUE_SHARE * expected_s + _OVERDUE_S


@dataclass(frozen=True)
class Planner:
    """Plans and claim sizes for one server. Tokens throughout; claims are whole pages.

    Args:
        chunk: most tokens of one forward.
        page: tokens of a page.
        costs: what is known of both lanes.
    """

    chunk: int
    page: int
    costs: Costs

    def plan(self, policy: Policy, span: Span) -> Plan:
        """The plan for `span` under a policy other than `SGLANG`."""
        if policy is Policy.CACHEFLOW:
            return plans.plan(span, chunk=self.chunk, page=self.page, costs=self.costs)
        way = Way.SPLIT if policy is Policy.CAKE else Way(policy.value)
        return plans.forced(span, way, chunk=self.chunk, page=self.page, costs=self.costs)

    def compute_claim(
        self,
        policy: Policy,
        *,
        position: int,
        gap: int,
        load_in_flight: int = 0,
        compute_in_flight_s: float = 0.0,
    ) -> int:
        """Tokens the next forward should take; see `plans.compute_claim`."""
        if policy is Policy.CAKE:
            return self._whole_chunk(gap)
        return plans.compute_claim(
            position=position,
            gap=gap,
            load_in_flight=load_in_flight,
            chunk=self.chunk,
            page=self.page,
            costs=self.costs,
            compute_in_flight_s=compute_in_flight_s,
        )

    def load_claim(self, policy: Policy, *, position: int, gap: int) -> int:
        """Tokens the next load should take; see `plans.load_claim`."""
        if policy is Policy.CAKE:
            return self._whole_chunk(gap)
        return plans.load_claim(
            position=position, gap=gap, chunk=self.chunk, page=self.page, costs=self.costs
        )

    def lone_load_claim(self, *, span: Span, gap: int) -> int:
        """Tokens the next load of an all-load should take; see `plans.lone_load_claim`."""
        return plans.lone_load_claim(
            span=span, gap=gap, chunk=self.chunk, page=self.page, costs=self.costs
        )

    def _whole_chunk(self, gap: int) -> int:
        return min(max(page_floor(self.chunk, self.page), self.page), gap)
