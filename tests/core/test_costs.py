"""Costs: what the estimates say after the samples they have seen."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.costs import (
    MIN_ROWS,
    ComputeCost,
    CorrectedCost,
    LinkCost,
    UnknownCost,
)
from cacheflow_sgl.core.profiles import TableCost
from tests.core.test_profiles import profile

CHUNK = 512
MIB = 1 << 20


def forward_s(start: int, rows: int) -> float:
    """About a small model on a CPU: 3000 tokens a second, 10 ms a forward, some attention."""
    return 0.010 + rows / 3000 + rows * (start + rows / 2) * 2e-8


def chunks_observed(count: int, *, noise: float = 0.0, seed: int = 1) -> ComputeCost:
    rng = random.Random(seed)
    cost = ComputeCost()
    for _ in range(count):
        start, rows = rng.randrange(0, 16384, CHUNK), rng.choice([CHUNK, CHUNK, CHUNK, 128])
        cost.observe(start, rows, forward_s(start, rows) * rng.lognormvariate(0, noise))
    return cost


def link_observed(count: int, seconds: float, *, noise: float = 0.0, seed: int = 1) -> LinkCost:
    rng = random.Random(seed)
    cost = LinkCost()
    for _ in range(count):
        cost.observe(MIB, seconds * rng.lognormvariate(0, noise))
    return cost


def test_nothing_is_known_before_the_first_sample() -> None:
    compute, link = ComputeCost(), LinkCost()
    assert not compute.known
    assert not link.known
    with pytest.raises(UnknownCost):
        compute.seconds(0, CHUNK)
    with pytest.raises(UnknownCost):
        link.seconds(MIB)
    with pytest.raises(UnknownCost):
        _ = link.bytes_per_s


def test_a_tiny_forward_tells_nothing_about_chunks() -> None:
    cost = ComputeCost()
    for rows in (1, 8, MIN_ROWS - 1):
        cost.observe(0, rows, 0.012)
    assert not cost.known
    cost.observe(0, CHUNK, forward_s(0, CHUNK))
    assert cost.seconds(0, CHUNK) == pytest.approx(forward_s(0, CHUNK))


def test_one_sample_is_believed_in_proportion() -> None:
    compute, link = ComputeCost(), LinkCost()
    compute.observe(0, CHUNK, 0.2)
    link.observe(MIB, 0.01)
    assert compute.seconds(0, CHUNK) == pytest.approx(0.2)
    assert compute.seconds(0, 2 * CHUNK) == pytest.approx(0.4, rel=0.02)
    assert link.seconds(4 * MIB) == pytest.approx(0.04, rel=0.02)
    assert link.bytes_per_s == pytest.approx(MIB / 0.01, rel=0.02)


def test_samples_of_one_size_give_no_base_and_no_latency() -> None:
    link = link_observed(30, 0.01, noise=0.2)
    assert link.latency_s < 0.01 * link.seconds(MIB)
    compute = ComputeCost()
    for _ in range(30):
        compute.observe(0, CHUNK, 0.2)
    assert compute.seconds(0, CHUNK // 4) == pytest.approx(0.05, rel=0.02)


def test_forwards_of_several_sizes_and_offsets_show_base_and_attention() -> None:
    cost = chunks_observed(40)
    for start, rows in ((0, 64), (0, CHUNK), (16384, CHUNK), (0, 8192)):
        assert cost.seconds(start, rows) == pytest.approx(forward_s(start, rows), rel=0.02)


def test_loads_of_several_sizes_show_the_latency() -> None:
    cost = LinkCost()
    for nbytes in (MIB // 16, MIB, 4 * MIB) * 10:
        cost.observe(nbytes, 0.001 + nbytes / 1e9)
    assert cost.latency_s == pytest.approx(0.001, rel=0.02)
    assert cost.bytes_per_s == pytest.approx(1e9, rel=0.02)


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_noise_among_loads_of_like_sizes_is_not_taken_for_latency(seed: int) -> None:
    rng = random.Random(seed)
    cost = LinkCost()
    for _ in range(16):
        nbytes = rng.choice([4, 5]) * MIB
        cost.observe(nbytes, nbytes / 1e9 * rng.lognormvariate(0, 0.2))
        assert 0.5e9 < cost.bytes_per_s < 3e9


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_noise_averages_out(seed: int) -> None:
    cost = chunks_observed(64, noise=0.1, seed=seed)
    for start in (0, 4096, 8192):
        assert cost.seconds(start, CHUNK) == pytest.approx(forward_s(start, CHUNK), rel=0.2)


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(10, 50))
def test_one_slow_forward_moves_the_prediction_by_a_few_percent(seed: int, slow: float) -> None:
    cost = chunks_observed(20, noise=0.1, seed=seed)
    before = cost.seconds(4096, CHUNK)
    cost.observe(4096, CHUNK, slow * forward_s(4096, CHUNK))
    assert cost.seconds(4096, CHUNK) == pytest.approx(before, rel=0.05)


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(10, 50))
def test_one_slow_load_moves_the_prediction_by_a_few_percent(seed: int, slow: float) -> None:
    cost = link_observed(20, 0.01, noise=0.1, seed=seed)
    before = cost.seconds(MIB)
    cost.observe(MIB, slow * 0.01)
    assert cost.seconds(MIB) == pytest.approx(before, rel=0.05)


def test_a_compilation_in_the_first_forward_is_forgotten_with_the_second() -> None:
    cost = ComputeCost()
    cost.observe(0, CHUNK, 20 * forward_s(0, CHUNK))
    cost.observe(CHUNK, CHUNK, forward_s(CHUNK, CHUNK))
    assert cost.seconds(CHUNK, CHUNK) == pytest.approx(forward_s(CHUNK, CHUNK), rel=0.1)


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.1, 0.25, 0.5, 2.0, 4.0, 10.0]))
def test_a_change_of_bandwidth_is_followed_within_six_loads(seed: int, change: float) -> None:
    rng = random.Random(seed)
    cost = link_observed(40, 0.01, noise=0.05, seed=seed)
    for _ in range(6):
        cost.observe(MIB, 0.01 * change * rng.lognormvariate(0, 0.05))
    assert cost.seconds(MIB) == pytest.approx(0.01 * change, rel=0.15)


@pytest.mark.parametrize("seed", range(12))
def test_shorter_loads_after_a_change_are_not_taken_for_latency(seed: int) -> None:
    rng = random.Random(seed)
    cost = LinkCost()
    slower = 1

    def observe(*sizes: int) -> None:
        tokens = rng.choice(sizes)
        noise = rng.lognormvariate(0, 0.05)
        cost.observe(tokens * 1000, (0.001 + slower * tokens / 6000) * noise)
        cost.seconds(1)

    for _ in range(30):
        observe(64, 512, 512, 512, 4096)
    slower = 4
    for _ in range(8):
        observe(448, 512)
    for _ in range(16):
        observe(64, 128, 192)
        assert cost.seconds(4096 * 1000) == pytest.approx(slower * 4096 / 6000, rel=0.2)


def test_a_bandwidth_that_comes_back_is_followed_back() -> None:
    cost = link_observed(40, 0.01)
    for seconds in [0.04] * 6 + [0.01] * 6:
        cost.observe(MIB, seconds)
    assert cost.seconds(MIB) == pytest.approx(0.01, rel=0.1)


def test_a_machine_that_stays_slower_is_believed_though_forwards_have_a_long_memory() -> None:
    cost = chunks_observed(64)
    for start in range(0, 6 * CHUNK, CHUNK):
        cost.observe(start, CHUNK, 2 * forward_s(start, CHUNK))
    assert cost.seconds(8192, CHUNK) == pytest.approx(2 * forward_s(8192, CHUNK), rel=0.1)


def test_a_long_run_of_short_forwards_keeps_what_is_known_of_chunks() -> None:
    rng = random.Random(3)
    cost = chunks_observed(32)
    for _ in range(500):
        rows = rng.randint(64, 127)
        cost.observe(4096, rows, forward_s(4096, rows) * rng.lognormvariate(0, 0.2))
    assert cost.seconds(4096, CHUNK) == pytest.approx(forward_s(4096, CHUNK), rel=0.15)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 17), st.integers(1, 16384), st.floats(1e-6, 100)),
        min_size=1,
        max_size=80,
    ),
    st.integers(0, 1 << 17),
    st.integers(1, 8192),
)
def test_predictions_never_fall_with_rows_or_offset(
    samples: list[tuple[int, int, float]], start: int, rows: int
) -> None:
    compute, link = ComputeCost(), LinkCost()
    for at, size, seconds in samples:
        compute.observe(at, size, seconds)
        link.observe(size, seconds)
    assert 0 < link.seconds(rows) <= link.seconds(rows + 1) < float("inf")
    assert 0 < link.bytes_per_s < float("inf")
    if compute.known:
        least = compute.seconds(start, rows)
        assert 0 < least <= compute.seconds(start, rows + 1) < float("inf")
        assert least <= compute.seconds(start + 1, rows)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        ComputeCost().observe(0, CHUNK, seconds)
    with pytest.raises(ValueError, match="positive and finite"):
        LinkCost().observe(MIB, seconds)
    with pytest.raises(ValueError, match="at least one byte"):
        LinkCost().observe(0, 1.0)


def test_loads_may_be_observed_while_others_predict() -> None:
    cost = link_observed(1, 0.01)

    def observe_many() -> None:
        for _ in range(300):
            cost.observe(MIB, 0.01)

    with ThreadPoolExecutor(2) as pool:
        observing = [pool.submit(observe_many) for _ in range(2)]
        while not all(future.done() for future in observing):
            assert cost.seconds(MIB) == pytest.approx(0.01)
        for future in observing:
            future.result()


PRIOR = TableCost(profile())


def truth_s(start: int, rows: int, layers: int | None = None) -> float:
    """A machine that is half as fast as the profile says, and 5 ms later."""
    return 0.005 + 2 * PRIOR.seconds(start, rows, layers)


def test_a_corrected_cost_is_the_profile_while_nothing_has_run() -> None:
    cost = CorrectedCost(PRIOR)
    assert cost.known
    assert cost.layers == PRIOR.layers
    for point in ((0, 1), (4096, CHUNK), (100, 77, 3), (0, CHUNK, 0)):
        assert cost.seconds(*point) == PRIOR.seconds(*point)


def test_a_tiny_forward_corrects_nothing() -> None:
    cost = CorrectedCost(PRIOR)
    cost.observe(0, MIN_ROWS - 1, 99.0)
    assert cost.seconds(0, CHUNK) == PRIOR.seconds(0, CHUNK)


def test_one_forward_scales_the_profile() -> None:
    cost = CorrectedCost(PRIOR)
    cost.observe(4096, CHUNK, 3 * PRIOR.seconds(4096, CHUNK))
    for point in ((0, CHUNK), (16384, CHUNK), (0, CHUNK, 2)):
        assert cost.seconds(*point) == pytest.approx(3 * PRIOR.seconds(*point), rel=0.05)


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(3, 50))
def test_a_corrected_cost_finds_base_and_scale_through_noise_and_strays(
    seed: int, slow: float
) -> None:
    rng = random.Random(seed)
    cost = CorrectedCost(PRIOR)
    for count in range(40):
        point = rng.randrange(0, 16384, CHUNK), rng.choice([64, CHUNK]), rng.choice([2, 8, None])
        start, rows, layers = point
        stray = slow if count % 10 == 9 else 1.0
        cost.observe(start, rows, truth_s(*point) * stray * rng.lognormvariate(0, 0.05), layers)
    for point in ((0, CHUNK, None), (8192, CHUNK, None), (8192, CHUNK, 4), (0, 4 * CHUNK, 8)):
        assert cost.seconds(*point) == pytest.approx(truth_s(*point), rel=0.12)


@pytest.mark.parametrize("factor", [0.3, 4.0])
def test_a_corrected_cost_follows_a_change_that_lasts(factor: float) -> None:
    cost = CorrectedCost(PRIOR)
    for at in range(30):
        cost.observe(CHUNK * at, CHUNK, truth_s(CHUNK * at, CHUNK))
    for at in range(6):
        cost.observe(CHUNK * at, CHUNK, factor * truth_s(CHUNK * at, CHUNK))
    assert cost.seconds(4096, CHUNK) == pytest.approx(factor * truth_s(4096, CHUNK), rel=0.1)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 600), st.floats(1e-6, 1e3)), max_size=9)
)
def test_a_corrected_cost_stays_positive(samples: list[tuple[int, int, float]]) -> None:
    cost = CorrectedCost(PRIOR)
    for start, rows, seconds in samples:
        cost.observe(start, rows, seconds)
    assert cost.seconds(0, 1, 1) > 0


def test_a_link_is_as_expected_until_a_few_loads_have_landed() -> None:
    link = LinkCost.expecting(0.001, 1e9)
    assert link.known
    for _ in range(2):
        assert (link.latency_s, link.bytes_per_s) == (0.001, pytest.approx(1e9))
        assert link.seconds(MIB) == pytest.approx(0.001 + MIB / 1e9)
        link.observe(MIB, 0.1)
    link.observe(MIB, 0.1)
    assert link.seconds(MIB) == pytest.approx(0.1, rel=0.02)
    assert link.bytes_per_s == pytest.approx(MIB / 0.1, rel=0.02)


@pytest.mark.parametrize("tier", [(-1e-9, 1e9), (0.0, 0.0), (0.0, -1.0)])
def test_a_link_that_cannot_be_is_not_expected(tier: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no link"):
        LinkCost.expecting(*tier)


@pytest.mark.parametrize("observed", [0, 20])
def test_a_corrected_span_takes_as_long_as_its_chunks(observed: int) -> None:
    cost = CorrectedCost(PRIOR)
    for at in range(observed):
        cost.observe(CHUNK * at, CHUNK, truth_s(CHUNK * at, CHUNK))
        cost.observe(CHUNK * at, 64, truth_s(CHUNK * at, 64))
    for start, stop in ((0, 0), (100, 5000), (CHUNK, 4 * CHUNK)):
        chunks = [(at, min(CHUNK, stop - at)) for at in range(start, stop, CHUNK)]
        each = [cost.seconds(at, rows, 4) for at, rows in chunks]
        assert cost.span_s(start, stop, CHUNK, 4) == pytest.approx(sum(each))
