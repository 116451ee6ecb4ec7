"""A request alone on every modelled GPU and model, against the least that both lanes need."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cacheflow_sgl.core.bounds import meeting_point_bound
from cacheflow_sgl.core.profiles import load_profile
from cacheflow_sgl.core.simulator.requests import Evicted, together
from cacheflow_sgl.core.simulator.setup import Setup
from cacheflow_sgl.core.simulator.simulation import Simulation
from cacheflow_sgl.core.simulator.world import Link, World
from tests.core.test_profiles import FILES

CHUNK, SUFFIX = 512, 64
PROFILES = {path.stem: load_profile(path) for path in FILES}
MODELLED = [name for name, profile in PROFILES.items() if profile.source == "modelled"]


@dataclass(frozen=True)
class Point:
    """One restore and the best that it could be, in seconds."""

    first_token_s: float
    restore_s: float
    """Without the suffix."""
    bound_s: float
    chunk_load_s: float


def point(name: str, balance: float, tokens: int) -> Point:
    """Restore on a link that loads the prefix `balance` times as fast as it is computed."""
    profile = PROFILES[name]
    compute = World.of(profile, []).compute
    token_s = compute.span_s(0, tokens, CHUNK) / balance / tokens
    world = World.of(profile, [Link(0.0, profile.kv_bytes_per_token / token_s)])
    requests = together([tokens + SUFFIX])
    (served,) = Simulation(world, Setup(), requests, Evicted(SUFFIX)).run().served
    chunks = [(CHUNK, compute.seconds(start, CHUNK)) for start in range(0, tokens, CHUNK)]
    return Point(
        first_token_s=served.first_token_s,
        restore_s=served.first_token_s - compute.seconds(tokens, SUFFIX),
        bound_s=meeting_point_bound(chunks, token_s).seconds,
        chunk_load_s=CHUNK * token_s,
    )


BALANCES = (0.5, 0.7, 1.0, 1.4, 2.0)
LENGTHS = tuple(512 << doublings for doublings in range(9))


def test_there_are_profiles() -> None:
    assert len(MODELLED) >= 12


@pytest.mark.parametrize("name", MODELLED)
def test_a_restore_is_near_the_bound(name: str) -> None:
    """3% and a chunk are asked for; an eighth of that chunk is enough where all is predictable."""
    # Each profile meets every balance and every length, all twelve together most pairs.
    turn = MODELLED.index(name)
    for at, tokens in enumerate(LENGTHS):
        balance = BALANCES[(at + turn) % len(BALANCES)]
        found = point(name, balance, tokens)
        assert found.restore_s <= 1.03 * found.bound_s + found.chunk_load_s / 8, (balance, tokens)
        assert found.first_token_s >= found.bound_s, (balance, tokens)
