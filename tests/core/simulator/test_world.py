"""Links whose rate changes, against bytes counted moment by moment; what a world costs."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.profiles import TableCost
from cacheflow_sgl.core.simulator.world import GBPS, Link, World
from tests.core.test_profiles import profile

rates = st.floats(0.1, 1000)
seconds = st.floats(0, 100)
change_lists = st.lists(st.tuples(seconds, rates), max_size=6).map(
    lambda changes: tuple(sorted(changes, key=lambda change: change[0]))
)


def link_of(latency_s: float, rate: float, changes: tuple[tuple[float, float], ...]) -> Link:
    return Link(latency_s, rate, changes)


links = st.builds(link_of, st.floats(0, 20), rates, change_lists)


def rate_at(link: Link, second: Fraction) -> Fraction:
    """Bytes a second at a moment, by the definition."""
    rate = link.bytes_per_s
    for at, changed in link.changes:
        if at <= second:
            rate = changed
    return Fraction(rate)


def moved(link: Link, start: Fraction, stop: Fraction) -> Fraction:
    """Bytes moved in [start, stop): an exact integral of `rate_at`, sampled between the changes."""
    edges = {start, stop, *(Fraction(at) for at, _ in link.changes if start < at < stop)}
    ascending = sorted(edges)
    return sum(
        (rate_at(link, (low + high) / 2) * (high - low) for low, high in pairwise(ascending)),
        Fraction(0),
    )


@settings(deadline=None)
@given(links, seconds, st.floats(0, 10_000))
@example(Link(0.0, 1.0, ((5.0, 10.0),)), 0.0, 5.0)  # lands at the very change
@example(Link(5.0, 1.0, ((5.0, 10.0),)), 0.0, 10.0)  # the change comes with the end of latency
@example(Link(1.0, 1.0, ((2.0, 9.0), (2.0, 4.0))), 0.0, 5.0)  # the last of two at once counts
def test_what_has_landed_is_the_rate_summed_over_time(
    link: Link, start_s: float, nbytes: float
) -> None:
    end_s = link.end_s(start_s, nbytes)
    begin = Fraction(start_s) + Fraction(link.latency_s)
    landed = moved(link, begin, max(Fraction(end_s), begin))
    assert end_s >= start_s + link.latency_s - 1e-9
    # A rounding of the end is worth a rate; the fastest is 1000 bytes a second.
    assert float(landed) == pytest.approx(nbytes, rel=1e-9, abs=1e-6)


@settings(deadline=None)
@given(links, seconds, st.floats(0, 1000), st.floats(0, 1000))
def test_more_bytes_land_later_and_a_later_start_never_overtakes(
    link: Link, start_s: float, nbytes: float, more: float
) -> None:
    end_s = link.end_s(start_s, nbytes)
    assert link.end_s(start_s, nbytes + more) >= end_s - 1e-9
    assert link.end_s(start_s + more, nbytes) >= end_s - 1e-9


@settings(deadline=None)
@given(links, seconds, st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_bytes_in_pieces_take_as_long_as_at_once_but_for_latency(
    link: Link, start_s: float, pieces: list[float]
) -> None:
    without = Link(0.0, link.bytes_per_s, link.changes)
    now = start_s
    for nbytes in pieces:
        now = without.end_s(now, nbytes)
    assert now == pytest.approx(without.end_s(start_s, sum(pieces)), rel=1e-9, abs=1e-6)


def test_a_gigabit_a_second() -> None:
    assert Link(0.5, 10 * GBPS).end_s(2.0, 2.5e9) == 4.5


def test_a_link_that_gets_slow_and_fast_again() -> None:
    link = Link(0.0, 10.0, ((10.0, 1.0), (20.0, 10.0)))
    assert link.end_s(0.0, 50.0) == 5.0
    assert link.end_s(9.0, 20.0) == 20.0  # 10 + 10 * 1
    assert link.end_s(9.0, 40.0) == 22.0
    assert link.end_s(30.0, 40.0) == 34.0


@pytest.mark.parametrize(
    ("latency_s", "rate", "changes"),
    [
        (-1.0, 1.0, ()),
        (0.0, 0.0, ()),
        (0.0, -1.0, ()),
        (0.0, 1.0, ((1.0, 0.0),)),
        (0.0, 1.0, ((1.0, 2.0), (3.0, -2.0))),
    ],
)
def test_impossible_links_are_refused(
    latency_s: float, rate: float, changes: tuple[tuple[float, float], ...]
) -> None:
    with pytest.raises(ValueError, match="latency from 0 up and positive rates"):
        Link(latency_s, rate, changes)


def test_changes_in_no_order_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        Link(0.0, 1.0, ((2.0, 2.0), (1.0, 3.0)))


def test_a_world_of_a_profile_costs_what_the_profile_says() -> None:
    measured, links = profile(), [Link(0.0, 1.0), Link(0.0, 2.0)]
    world = World.of(measured, links)
    assert world.compute.seconds(100, 200, 3) == TableCost(measured).seconds(100, 200, 3)
    assert world.compute.layers == measured.layers
    assert list(world.links) == links
    assert (world.kv_bytes_per_token, world.boundary_bytes_per_token) == (100_000, 1000)
    assert world.chunk == measured.chunk
    assert world.decode_step_s(0) == 0.01
    assert world.decode_step_s(10**6) == pytest.approx(0.01 + 0.1)


def test_decode_steps_of_a_world_are_free_where_nothing_is_said() -> None:
    world = World(TableCost(profile()), [], kv_bytes_per_token=1)
    assert world.decode_step_s(10**6) == 0.0
