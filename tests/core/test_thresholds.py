"""L_delta: the same as by the planners, one prefix after the other."""

from __future__ import annotations

import pytest

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.profiles import TableCost, derived_thresholds
from cacheflow_sgl.core.roofline import GPUS, MODELS, modelled_profile
from cacheflow_sgl.core.staircase import Grid, layer_plan, token_plan
from cacheflow_sgl.core.thresholds import MOST_TOKENS, layer_threshold
from tests.core.test_profiles import profile

CHUNK = 4096
"""Few chunks up to `MOST_TOKENS`, so that the planners are quick."""


@pytest.mark.parametrize(("gpu", "model"), [("h100", "qwen3-8b"), ("l40s", "qwen3-30b-a3b")])
@pytest.mark.parametrize("gbps", [5.0, 40.0, 400.0])
def test_it_is_the_last_prefix_where_the_layer_wise_plan_is_no_slower(gpu, model, gbps):
    shape = MODELS[model]
    modelled = modelled_profile(GPUS[gpu], shape, command="", date="", versions={})
    cost = TableCost(modelled)
    chunks = [Span(at, at + CHUNK) for at in range(0, MOST_TOKENS, CHUNK)]
    longest = 0
    for count in range(1, len(chunks) + 1):
        grid = Grid.of(
            chunks[:count],
            shape.layers,
            cost.table,
            bytes_per_token_layer=shape.kv_bytes_per_token / shape.layers,
            links=[(0.0, gbps * 1e9 / 8)],
            tier=[0] * count,
        )
        if layer_plan(grid).seconds <= token_plan(grid).seconds * (1 + 1e-9):
            longest = count * CHUNK
    found = layer_threshold(
        cost, bandwidth_gbps=gbps, kv_bytes_per_token=shape.kv_bytes_per_token, chunk=CHUNK
    )
    assert found == longest
    assert 0 < found < MOST_TOKENS


def test_of_one_layer_all_is_loaded_while_a_chunk_takes_longer_to_compute():
    """Layer-wise is then all or nothing; the first chunk computed would be the later plan."""
    flat = profile(lambda start, rows, layers: rows * 1e-4, layers=(1,))
    compute_s = 0.0512
    for each in derived_thresholds(flat):
        load_s = 512 * flat.kv_bytes_per_token / (each.bandwidth_gbps * 1e9 / 8)
        assert each.tokens == 512 * int(compute_s / load_s + 1e-9)
