"""The machine that is simulated: what forwards and loads really take.

What the planners believe may differ (`beliefs.py`); a simulation tells the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cacheflow_sgl.core.profiles import Decode, Profile, TableCost

GBPS = 1e9 / 8
"""Bytes a second of one gigabit a second."""
FREE_DECODE = Decode(base_s=0.0, per_context_token_s=0.0)


@dataclass(frozen=True, slots=True)
class Link:
    """What loads one tier: `latency_s` a load, then bytes at a rate that may change with time."""

    latency_s: float
    bytes_per_s: float
    changes: tuple[tuple[float, float], ...] = ()
    """(second, bytes a second from then on), ascending."""

    def __post_init__(self) -> None:
        rates = [self.bytes_per_s, *(rate for _, rate in self.changes)]
        if self.latency_s < 0 or min(rates) <= 0:
            raise ValueError(f"a link needs a latency from 0 up and positive rates: {self}")
        if any(later < at for (at, _), (later, _) in pairwise(self.changes)):
            raise ValueError(f"a link needs its changes in ascending order of time: {self}")

    def end_s(self, start_s: float, nbytes: float) -> float:
        """When a load of `nbytes` bytes that starts at `start_s` has landed."""
        now, rate, left = start_s + self.latency_s, self.bytes_per_s, nbytes
        for at, changed in self.changes:
            if now < at:
                if now + left / rate <= at:
                    break
                left -= (at - now) * rate
                now = at
            rate = changed
        return now + left / rate


@dataclass(frozen=True)
class World:
    """Costs of one server. Each pipeline stage has its own share of layers and its own links.

    Args:
        compute: forwards through all layers, or the first few.
        links: one per tier, fastest first.
        kv_bytes_per_token: bytes of KV of one token, all layers.
        boundary_bytes_per_token: bytes of one stage's input activations for one token.
        decode: decode steps.
        chunk: most tokens of one forward.
    """

    compute: TableCost
    links: Sequence[Link]
    kv_bytes_per_token: int
    boundary_bytes_per_token: int = 0
    decode: Decode = FREE_DECODE
    chunk: int = 512

    @classmethod
    def of(cls, profile: Profile, links: Sequence[Link]) -> World:
        """What a profile says, with links of one's own."""
        return cls(
            compute=TableCost(profile),
            links=links,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            boundary_bytes_per_token=profile.boundary_bytes_per_token,
            decode=profile.decode,
            chunk=profile.chunk,
        )

    def decode_step_s(self, context_tokens: int) -> float:
        """Seconds of a decode step of requests that hold `context_tokens` tokens together."""
        return self.decode.base_s + context_tokens * self.decode.per_context_token_s
