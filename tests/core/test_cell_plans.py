"""How many layers each lane takes next, against what every cut would be predicted to take."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.cell_plans import NextChunk, compute_layers, load_layers
from cacheflow_sgl.core.plans import MARGIN


def errors(plan: NextChunk) -> tuple[tuple[float, float], ...]:
    """What may be wrong with predicted times of compute and of loads."""
    return (1.0, 1.0), (1.0, 2.0 if plan.fresh else 2.5), (1.25, 0.8)


def chunk(
    *,
    layers: int = 32,
    ceiling: int | None = None,
    chunk_s: float = 1.0,
    base_s: float = 0.0,
    left_s: float | None = None,
    fresh: bool = True,
    wait_s: float = 0.0,
    load_layer_s: float = 1 / 32,
    loads_s: float = 1.0,
    suffix_s: float = 0.2,
) -> NextChunk:
    """By default the last chunk, whose link is as fast as its forward."""
    return NextChunk(
        compute_s=lambda cut: base_s + chunk_s * cut / layers,
        ceiling=layers if ceiling is None else ceiling,
        compute_left_s=base_s + chunk_s if left_s is None else left_s,
        fresh=fresh,
        wait_s=wait_s,
        load_layer_s=load_layer_s,
        loads_s=loads_s,
        suffix_s=suffix_s,
        layers=layers,
    )


def finish_s(plan: NextChunk, cut: int, compute: float = 1.0, link: float = 1.0) -> float:
    """When the suffix ends: it waits for the forward, and for its first and last layer's loads."""
    suffix_s = compute * plan.suffix_s
    loads_s = link * (plan.loads_s - cut * plan.load_layer_s)
    computed_s = compute * plan.compute_s(cut) if cut else 0.0
    return max(
        computed_s + suffix_s,
        loads_s / plan.layers + suffix_s,
        loads_s + suffix_s / plan.layers,
    )


def regret(plan: NextChunk, cut: int) -> float:
    """The worst, over what loading or computing all that is left takes under the same error."""
    worst = 0.0
    for compute, link in errors(plan):
        all_s = compute * (plan.compute_left_s + plan.suffix_s)
        single_s = min(finish_s(plan, 0, compute, link), all_s)
        worst = max(worst, finish_s(plan, cut, compute, link) / single_s)
    return worst


seconds = st.floats(0.01, 10)


@st.composite
def chunks(draw: st.DrawFn) -> NextChunk:
    """Loads of this chunk and of more; no more than 16 layers, so that every cut is looked at."""
    layers = draw(st.integers(1, 16))
    ceiling = draw(st.integers(1, layers))
    layer_s, chunk_s, base_s = draw(seconds) / layers, draw(seconds), draw(st.floats(0, 0.5))
    return chunk(
        layers=layers,
        ceiling=ceiling,
        chunk_s=chunk_s,
        base_s=base_s,
        left_s=base_s + chunk_s * draw(st.floats(1, 5)),
        fresh=draw(st.booleans()),
        wait_s=draw(st.sampled_from([0.0, 0.0, 0.1, 2.0])),
        load_layer_s=layer_s,
        loads_s=layer_s * ceiling + draw(st.sampled_from([0.0, 0.1, 1.0, 20.0])),
        suffix_s=draw(st.sampled_from([0.0, 0.1, 1.0])),
    )


@settings(deadline=None, max_examples=300)
@given(chunks())
def test_the_cut_that_ends_first_of_those_that_no_error_makes_bad(plan: NextChunk) -> None:
    found, cuts = compute_layers(plan), range(plan.ceiling + 1)
    assert found in cuts
    expected_s = {cut: finish_s(plan, cut) for cut in cuts}
    if plan.compute_s(plan.ceiling) * 1.25 <= plan.wait_s * 0.8:
        assert found == plan.ceiling, "it is done before its link is free"
        return
    if all(
        compute * (plan.compute_s(plan.ceiling) + plan.suffix_s)
        <= link * (plan.loads_s - plan.ceiling * plan.load_layer_s)
        for compute, link in errors(plan)
    ):
        assert found == plan.ceiling, "the loads are sure to end last"
        assert expected_s[found] <= min(expected_s.values()) + 1e-9
        return
    bearable = [cut for cut in cuts if regret(plan, cut) <= 1.03]
    if not bearable:
        assert regret(plan, found) <= min(regret(plan, cut) for cut in cuts) + 1e-9
        return
    assert regret(plan, found) <= 1.03
    best_s = min(expected_s[cut] for cut in bearable)
    if found:
        assert expected_s[found] <= best_s + 1e-9
        assert 0 not in bearable or best_s <= (1 - MARGIN) * expected_s[0] + 1e-9
    else:
        assert best_s >= (1 - MARGIN) * expected_s[0] - 1e-9


@settings(deadline=None)
@given(chunks(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_unit_of_time_does_not_matter(plan: NextChunk, unit: float) -> None:
    scaled = NextChunk(
        compute_s=lambda cut: unit * plan.compute_s(cut),
        ceiling=plan.ceiling,
        compute_left_s=unit * plan.compute_left_s,
        fresh=plan.fresh,
        wait_s=unit * plan.wait_s,
        load_layer_s=unit * plan.load_layer_s,
        loads_s=unit * plan.loads_s,
        suffix_s=unit * plan.suffix_s,
        layers=plan.layers,
    )
    assert compute_layers(scaled) == compute_layers(plan)


@pytest.mark.parametrize("suffix_s", [0.0, 0.2, 5.0])
@pytest.mark.parametrize("layers", [1, 4, 32, 80])
def test_the_ends_of_the_range(layers: int, suffix_s: float) -> None:
    far = chunk(layers=layers, loads_s=100.0, load_layer_s=1 / layers, suffix_s=suffix_s)
    assert compute_layers(far) == layers, "loads take long after it"
    assert compute_layers(replace(far, ceiling=1)) == 1
    instant = replace(far, loads_s=0.0, load_layer_s=0.0)
    assert compute_layers(instant) == 0, "nothing is left to load"


def test_a_single_chunk_is_cut_where_both_lanes_end_together() -> None:
    """C * k / L = W * (L - k) / L, equal at half, whatever comes behind needs all layers."""
    assert compute_layers(chunk(suffix_s=0.0)) == 16


def test_a_cut_keeps_what_a_slow_link_could_spoil_small() -> None:
    """Best is 24. But a link that halves would need 1.5 s for the rest, and all can be computed in
    1 s; 28 is the first cut of 16ths that leaves no more than that."""
    assert compute_layers(chunk(suffix_s=0.0, loads_s=3.0, load_layer_s=3 / 32)) == 28


def test_a_suffix_hides_the_last_loads_so_that_less_is_computed() -> None:
    cuts = [compute_layers(chunk(suffix_s=suffix_s)) for suffix_s in (0.0, 0.2, 0.4, 0.6)]
    assert cuts == sorted(cuts, reverse=True)
    assert cuts[0] > cuts[-1]
    assert compute_layers(chunk(suffix_s=2.0)) == 0, "all loads hide behind it"


def test_a_small_gain_is_left_to_the_loads() -> None:
    """Of 1 s of loads a tenth has to be saved, or the GPU is left free."""
    # Computing 4 of 32 layers saves 12%; 6 would not be done in time if the GPU were slower.
    assert compute_layers(chunk(chunk_s=4.0, left_s=4.0, suffix_s=0.0)) == 4
    # Here it would be 2, for 6%.
    assert compute_layers(chunk(chunk_s=7.0, left_s=7.0, suffix_s=0.0)) == 0


def test_a_forward_that_ends_before_its_link_is_free_costs_nothing() -> None:
    waits = chunk(loads_s=2.0, wait_s=1.99, suffix_s=2.0)
    assert compute_layers(replace(waits, wait_s=0.0)) < 32
    assert compute_layers(waits) == 32


def test_where_every_cut_may_be_bad_the_one_that_is_least_bad() -> None:
    plan = chunk(left_s=0.5, chunk_s=3.0, suffix_s=0.0)
    cuts = range(0, 33, 2)
    assert min(regret(plan, cut) for cut in cuts) > 1.03
    assert compute_layers(plan) == min(cuts, key=lambda cut: regret(plan, cut))


# -- loads

positive = st.floats(1e-3, 10)


def layers_of(layer_s: float, latency_s: float, step_s: float, gap_s: float) -> int:
    return load_layers(layer_s=layer_s, latency_s=latency_s, step_s=step_s, gap_s=gap_s)


@settings(deadline=None)
@given(positive, st.floats(0, 1), positive, positive | st.just(math.inf), st.floats(1, 4))
@example(1.0, 0.0, 10.0, math.inf, 1.0)
def test_more_where_a_step_or_the_gap_is_longer_and_less_where_the_link_is_slower(
    layer_s: float, latency_s: float, step_s: float, gap_s: float, more: float
) -> None:
    count = layers_of(layer_s, latency_s, step_s, gap_s)
    assert count >= 1
    assert layers_of(layer_s, latency_s, step_s * more, gap_s) >= count
    assert layers_of(layer_s, latency_s, step_s, gap_s * more) >= count
    assert layers_of(layer_s, latency_s * more, step_s, gap_s) >= count
    assert layers_of(layer_s * more, latency_s, step_s, gap_s) <= count
    most_s = max(step_s / 2, 4 * latency_s)
    assert count == 1 or (count - 0.5) * layer_s <= min(most_s, gap_s / 2) + 1e-9


@pytest.mark.parametrize(
    ("latency_s", "step_s", "gap_s", "layers"),
    [
        (0.0, 2.0, math.inf, 10),  # half a step
        (0.0, 2.0, 100.0, 10),
        (0.0, 2.0, 2.0, 5),  # a quarter of the gap
        (0.1, 0.2, 100.0, 4),  # four latencies
        (0.1, 0.2, 0.6, 3),  # but no more than half of the gap
        (0.0, 0.1, 100.0, 1),  # at least one
        (0.0, 2.0, 0.0, 1),
    ],
)
def test_a_load_of_layers_of_a_tenth_of_a_second(
    latency_s: float, step_s: float, gap_s: float, layers: int
) -> None:
    assert layers_of(0.1, latency_s, step_s, gap_s) == layers
