"""Small worlds for the simulator's tests, where seconds can be counted by hand.

A chunk has 128 tokens, the model 4 layers, and a token 8 bytes of KV in a layer: 4096 bytes a
chunk. By default a forward of a chunk takes 1 s and a load of one, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cacheflow_sgl.core.profiles import Decode, TableCost
from cacheflow_sgl.core.simulator.requests import Found, Request
from cacheflow_sgl.core.simulator.world import FREE_DECODE, Link, World
from tests.core.test_profiles import profile

CHUNK, LAYERS = 128, 4
CELL_BYTES = CHUNK * 8
"""Bytes of one layer of a chunk."""
CHUNK_BYTES = CELL_BYTES * LAYERS


def cost(chunk_s: float = 1.0, *, rise: float = 0.0, base_s: float = 0.0) -> TableCost:
    """Forwards of `base_s` and `chunk_s` a chunk, the latter longer by `rise` a chunk before it."""

    def seconds(start: int, rows: int, layers: int) -> float:
        return base_s + chunk_s * (1 + rise * start / CHUNK) * rows / CHUNK * layers / LAYERS

    return TableCost(profile(seconds, starts=(0, CHUNK), rows=(64, CHUNK), layers=(1, LAYERS)))


def link(chunk_s: float = 1.0, latency_s: float = 0.0) -> Link:
    """A link that takes `chunk_s` for a chunk."""
    return Link(latency_s, CHUNK_BYTES / chunk_s)


def world(
    compute: TableCost | None = None,
    *links: Link,
    decode: Decode = FREE_DECODE,
    boundary_bytes_per_token: int = 0,
) -> World:
    """A world with these costs; one link of 1 s a chunk where none is given."""
    return World(
        compute=compute or cost(),
        links=links or (link(),),
        kv_bytes_per_token=CHUNK_BYTES // CHUNK,
        boundary_bytes_per_token=boundary_bytes_per_token,
        decode=decode,
        chunk=CHUNK,
    )


@dataclass(frozen=True)
class Placed:
    """Prefixes that lie where one says, by id of their request; nothing is remembered."""

    found: Mapping[int, Found]

    def find(self, request: Request) -> Found:
        return self.found[request.rid]

    def prefilled(self, request: Request) -> None:
        pass


def placed(*tiers: tuple[int, ...]) -> Placed:
    """Nothing on the device; the chunks of requests 0, 1, ... in these tiers."""
    return Placed({rid: Found(0, places) for rid, places in enumerate(tiers)})
