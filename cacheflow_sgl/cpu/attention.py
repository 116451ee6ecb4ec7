"""Extend attention that costs rows x context.

SGLang's `torch_native` backend attends from every position of a request, the cached prefix
included, and throws the prefix rows away. A chunk at offset 8k then costs as much as a prefill
of 8k tokens, which distorts each comparison of loading with recomputing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """`TorchNativeAttnBackend._run_sdpa_forward_extend`, from the new rows only.

    Causal self-attention over the paged cache is done here; sliding windows, encoders and
    cross attention go to `original` unchanged.

    Args:
        query: [rows of all requests, query heads, head size].
        output: like `query`, with the head size of V; filled and returned.
        k_cache, v_cache: [slots, KV heads, head size].
        req_to_token: [request slots, context], the cache slot of each position.
        req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens: [requests], where
            `seq_lens` is prefix plus rows.
    """
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if windowed or not causal or is_cross_attn or encoder_lens is not None:
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )
    start = 0
    for request, context, prefix, rows in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_prefix_lens.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    ):
        slots = req_to_token[request, :context]
        output[start : start + rows] = _attend(
            query[start : start + rows],
            k_cache[slots].to(query.dtype),
            v_cache[slots].to(query.dtype),
            prefix,
            scaling,
            enable_gqa,
        )
        start += rows
    return output


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefix: int,
    scaling: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Row i of `query` sees positions 0 to `prefix` + i. All are [tokens, heads, head size]."""
    mask = None
    if prefix:
        rows, context = query.shape[0], keys.shape[0]
        mask = torch.ones(rows, context, dtype=torch.bool, device=query.device).tril_(prefix)
    # Batch and heads lead in SDPA: [1, heads, tokens, head size].
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=enable_gqa,
    )
    return attended.squeeze(0).transpose(0, 1)
