"""What planners believe: what is true, what is wrong, and what they learn."""

from __future__ import annotations

import pytest

from cacheflow_sgl.core.simulator.beliefs import Beliefs
from tests.core.simulator.worlds import CHUNK, CHUNK_BYTES, LAYERS, cost, link, world


def observe(beliefs: Beliefs, forward_s: float, load_s: float, times: int = 20) -> None:
    for at in range(times):
        layers = 1 + at % LAYERS
        beliefs.observe_forward(0, CHUNK, layers, forward_s * layers / LAYERS)
        beliefs.observe_load(1, CHUNK_BYTES * (1 + at % 3), load_s * (1 + at % 3))


def believed(beliefs: Beliefs) -> list[float]:
    """Seconds of a chunk: forwards through all layers and one, loads from each tier."""
    return [
        beliefs.compute.seconds(0, CHUNK, LAYERS),
        beliefs.compute.seconds(0, CHUNK, 1),
        *(each.seconds(CHUNK_BYTES) for each in beliefs.links),
    ]


def test_exact_is_true_and_stays_so() -> None:
    mine = world(cost(2.0), link(0.5, latency_s=0.25), link(3.0))
    beliefs = Beliefs.exact(mine)
    assert believed(beliefs) == pytest.approx([2.0, 0.5, 0.75, 3.0])
    observe(beliefs, 8.0, 9.0)
    assert believed(beliefs) == pytest.approx([2.0, 0.5, 0.75, 3.0])


def test_fixed_is_wrong_and_stays_so() -> None:
    beliefs = Beliefs.fixed(cost(4.0), [link(0.5), link(3.0)])
    observe(beliefs, 8.0, 9.0)
    assert believed(beliefs) == pytest.approx([4.0, 1.0, 0.5, 3.0])


def test_learning_starts_with_what_it_is_given_and_ends_with_what_is_true() -> None:
    beliefs = Beliefs.learning(cost(4.0), [link(0.5), link(3.0)])
    assert believed(beliefs) == pytest.approx([4.0, 1.0, 0.5, 3.0])
    observe(beliefs, 8.0, 9.0)
    assert believed(beliefs) == pytest.approx([8.0, 2.0, 0.5, 9.0], rel=0.05)


def test_servers_do_not_share_what_they_learn() -> None:
    mine = world(cost(), link(), link())
    first, second = Beliefs.learning(mine.compute, mine.links), Beliefs.exact(mine)
    observe(first, 8.0, 9.0)
    assert believed(second) == pytest.approx([1.0, 0.25, 1.0, 1.0])
