"""L_delta: up to which prefix the layer-wise plan is the better one (CacheFlow, arXiv 2604.25080).

Token-wise computes whole chunks at the front and loads the others: few long steps, but it spares
the late chunks, whose attention costs most. Layer-wise computes the first k layers of every chunk
and loads the rest: it balances the lanes to a layer, but pays for late chunks too. So short
prefixes are for layer-wise, and from some length on token-wise wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from cacheflow_sgl.core.profiles import TableCost

_Array = npt.NDArray[np.float64]

BANDWIDTHS_GBPS = (10.0, 25.0, 40.0, 80.0, 100.0)
"""10^9 bits a second of the links that a profile tells L_delta for."""
MOST_TOKENS = 131072
"""Longest prefix that is looked at; an L_delta of this says "at least"."""


def layer_threshold(
    cost: TableCost, *, bandwidth_gbps: float, kv_bytes_per_token: int, chunk: int
) -> int:
    """Longest prefix that layer-wise restores no later than token-wise, in tokens.

    Both are at their best, over one link without latency; a multiple of `chunk`, from 0 up to
    `MOST_TOKENS`.

    Args:
        cost: seconds of forwards.
        bandwidth_gbps: 10^9 bits a second of the link.
        kv_bytes_per_token: of all layers.
        chunk: tokens of a forward.
    """
    chunk_load_s = chunk * kv_bytes_per_token / (bandwidth_gbps * 1e9 / 8)
    chunks = MOST_TOKENS // chunk
    through = np.arange(cost.layers + 1)
    each = cost.table(chunk * np.arange(chunks)[:, None], chunk, through)
    computed = np.vstack([np.zeros(cost.layers + 1), each.cumsum(axis=0)])  # [chunks, layers]
    layer_wise = _layer_wise_s(computed, chunk_load_s)
    token_wise = _token_wise_s(computed[:, -1], chunk_load_s)
    # Equal plans may differ in the last bits of their sums.
    no_later = np.flatnonzero(layer_wise <= token_wise * (1 + 1e-9))
    return int(no_later[-1]) * chunk


def _layer_wise_s(computed: _Array, chunk_load_s: float) -> _Array:
    """Least seconds to restore the first 0, 1, ... chunks with one split for all."""
    chunks, layers = computed.shape[0] - 1, computed.shape[1] - 1
    loaded_share = 1 - np.arange(layers + 1) / layers
    loads = np.outer(np.arange(chunks + 1) * chunk_load_s, loaded_share)
    return np.asarray(np.maximum(computed, loads).min(axis=1))


def _token_wise_s(computed: _Array, chunk_load_s: float) -> _Array:
    """Least seconds to restore the first 0, 1, ... chunks with whole ones computed up to one."""
    count = np.arange(len(computed))
    loads = (count[:, None] - count) * chunk_load_s
    seconds = np.where(loads >= 0, np.maximum(computed, loads), np.inf)
    return np.asarray(seconds.min(axis=1))
