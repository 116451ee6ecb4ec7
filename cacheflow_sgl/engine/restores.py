"""One restore inside SGLang: what it owns, and what becomes of it.

A restore brings tokens [d, N) of a request back: d is how far the device has the prefix, N how far
the host has it. Its device slots are private until the pointers meet: they are in no row of
`req_to_token` and in no node of the tree, so nobody else can see what is not there yet. At the jump
they become part of the request's row, and SGLang's next checkpoint puts them into the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cacheflow_sgl.core.geometry import Segment, Span
from cacheflow_sgl.core.plans import Plan, Way
from cacheflow_sgl.core.pointers import TwoPointers
from cacheflow_sgl.core.policies import Policy
from cacheflow_sgl.core.report import LaneLog, Outcome, RestoreReport, overlap_s


@dataclass(frozen=True)
class HostSpan:
    """Tokens of a request that the host has and the device has not.

    Attributes:
        span: [d, N), whole pages.
        slots: int64 [span.tokens], host slots in token order.
        nodes: ids of the tree nodes that own these slots; each is pinned while a load may read it.
        anchor: the last of them.
    """

    span: Span
    slots: torch.Tensor
    nodes: list[Any]
    anchor: Any


@dataclass(eq=False)
class Restore:
    """State of one restore. The scheduler thread owns it; the I/O thread claims and loads.

    Attributes:
        req: SGLang's request.
        host: where the span lies on the host.
        policy: who decides.
        plan: what was decided at the start.
        began_s: when (`time.perf_counter`).
        first: first token that `device_slots` covers.
        device_slots: int64 [N - first], private until computed or jumped over.
        pins: pinned host nodes with the receipts that unpin them.
        lock: keeps the device node of d while the request waits in the queue; once admitted, the
            request's own lock does.
        fence: device events; no load may write before they have passed.
        admitted: whether it is SGLang's chunked request; else it waits in the queue.
        late: whether the watchdog has started the compute of an all-load.
        probe: load one page only, to learn how fast the link is now.
        loading: the claim that the I/O lane loads now, and since when.
        first_load_s: when its first load began.
        decode_steps: steps that running requests were given since its last chunk.
    """

    req: Any
    host: HostSpan
    policy: Policy
    plan: Plan
    began_s: float
    pointers: TwoPointers
    first: int = 0
    device_slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    pins: list[tuple[Any, Any]] = field(default_factory=list)
    lock: Any = None
    fence: tuple[Any, ...] = ()
    admitted: bool = False
    late: bool = False
    probe: bool = False
    compute_lane: LaneLog = field(default_factory=LaneLog)
    io_lane: LaneLog = field(default_factory=LaneLog)
    loaded_bytes: int = 0
    failed_loads: int = 0
    waiting_since_s: float | None = None
    wait_s: float = 0.0
    loading: tuple[Span, float] | None = None
    first_load_s: float | None = None
    decode_steps: int = 0

    @classmethod
    def planned(
        cls, req: Any, host: HostSpan, policy: Policy, plan: Plan, *, page: int, now_s: float
    ) -> Restore:
        """A restore of one segment, that nothing has been claimed of."""
        segment = Segment(host.span.start, host.span.start, host.span.stop)
        return cls(req, host, policy, plan, now_s, TwoPointers([segment], page))

    @property
    def span(self) -> Span:
        """[d, N)."""
        return self.host.span

    @property
    def holds_compute(self) -> bool:
        """Whether the compute lane leaves it to the loads."""
        return self.plan.way is Way.LOAD and not self.late

    def may_write(self) -> bool:
        """Whether all that might still write to its device slots has ended (I/O thread)."""
        if not all(event.query() for event in self.fence):
            return False
        self.fence = ()
        return True

    @property
    def loads_ended(self) -> bool:
        """Whether all of the span has landed, or no more of it will."""
        pointers = self.pointers
        landed = pointers.loaded_tokens == self.span.tokens
        return landed or self.failed_loads > 0 or pointers.loading_stopped

    @property
    def private(self) -> Span:
        """Tokens whose device slots only this restore knows."""
        if not self.device_slots.numel():
            return Span(self.span.stop, self.span.stop)
        return Span(max(self.first, self.pointers.position), self.span.stop)

    def device_slots_of(self, span: Span) -> torch.Tensor:
        """int64 [span.tokens], the private slots of these tokens."""
        return self.device_slots[span.start - self.first : span.stop - self.first]

    def host_slots_of(self, span: Span) -> torch.Tensor:
        """int64 [span.tokens], the host slots of these tokens."""
        return self.host.slots[span.start - self.span.start : span.stop - self.span.start]

    def waits(self, now_s: float) -> None:
        """Note that compute has nothing to claim and waits for a load."""
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def goes_on(self, now_s: float) -> None:
        """Note that compute waits no more."""
        if self.waiting_since_s is not None:
            self.wait_s += now_s - self.waiting_since_s
            self.waiting_since_s = None

    def report(self, outcome: Outcome, now_s: float) -> RestoreReport:
        """What became of it."""
        return RestoreReport(
            rid=self.req.rid,
            policy=self.policy.value,
            way=self.plan.way.value,
            reason=self.plan.reason,
            outcome=outcome.value,
            start=self.span.start,
            stop=self.span.stop,
            meetings=[jump.start for jump in self.pointers.jumps],
            computed_tokens=self.pointers.computed_tokens,
            loaded_tokens=self.pointers.loaded_tokens,
            failed_tokens=self.pointers.failed_tokens,
            loaded_bytes=self.loaded_bytes,
            compute_s=self.compute_lane.busy_s,
            io_s=self.io_lane.busy_s,
            overlap_s=overlap_s(self.compute_lane, self.io_lane),
            wait_s=self.wait_s,
            restore_s=now_s - self.began_s,
            late=self.late,
            failed_loads=self.failed_loads,
            expected_s={way.value: seconds for way, seconds in self.plan.expected_s.items()},
        )

    def check_integrity(self) -> None:
        """AssertionError where two facts contradict each other."""
        self.pointers.check_integrity()
        assert self.host.slots.numel() == self.span.tokens, "host slots do not cover the span"
        covered = self.first + self.device_slots.numel()
        assert not self.device_slots.numel() or covered == self.span.stop, (
            f"device slots end at {covered}, the span at {self.span.stop}"
        )
        assert len(self.pins) == len(self.host.nodes), "a host node of the span is not pinned"
        assert self.admitted or self.lock is not None, "a queued restore holds no lock"
