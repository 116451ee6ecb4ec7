"""Where the prefix of an experiment lies, and requests that come together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.simulator.requests import Evicted, Found, Request, together


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 600), st.integers(0, 3))
def test_as_many_chunks_as_fit_before_the_suffix_and_never_the_whole_prompt(
    prompt: int, suffix: int, chunk: int, tier: int
) -> None:
    found = Evicted(suffix, chunk, tier).find(Request(0, 0.0, prompt))
    prefix = chunk * len(found.tiers)
    assert found.device_tokens == 0
    assert set(found.tiers) <= {tier}
    assert prefix < prompt
    if found.tiers:
        assert prefix <= prompt - suffix
    assert prefix + chunk > prompt - max(suffix, 1)  # one more would not fit


def test_a_prefix_in_chunks_of_512() -> None:
    assert Evicted(64).find(Request(0, 0.0, 1088)) == Found(0, (0, 0))
    assert Evicted(64).find(Request(0, 0.0, 1087)) == Found(0, (0,))
    assert Evicted(0).find(Request(0, 0.0, 1024)) == Found(0, (0,))


def test_nothing_is_remembered() -> None:
    evicted, request = Evicted(64, 512), Request(0, 0.0, 1088, blocks=(7, 8))
    before = evicted.find(request)
    evicted.prefilled(request)
    assert evicted.find(request) == before


@pytest.mark.parametrize("output_tokens", [1, 20])
def test_together_means_at_second_0_with_ids_in_order(output_tokens: int) -> None:
    assert together(iter([10, 20]), output_tokens) == [
        Request(0, 0.0, 10, output_tokens),
        Request(1, 0.0, 20, output_tokens),
    ]
    assert together([5])[0].output_tokens == 1
