"""SGLang's host-to-device KV transfers as index copies.

`sglang/srt/mem_cache/pool_host/mha.py` and `mla.py` import these functions from
`sgl_kernel.kvcacheio` on CUDA, ROCm and XPU only; on a CPU the names don't exist. Signatures
follow `sgl_kernel/kvcacheio.py`: `lf`, `pf` and `ph` are the host layouts layer_first,
page_first and page_head, and the device side is always layer_first. In all of them:

- `src_indices`, `dst_indices`: int64 [tokens], slots on either side, whole pages.
- a device layer, or a layer of a layer_first host pool: [slots, heads, head size].
- page_first host buffer: [slots, layers, heads, head size].
- page_first_direct host buffer: [pages, layers, page, heads, head size].
- page_head host buffer: [pages, heads, page, layers, head size].
- `*_layers` given as a tensor: uint64 [layers], the addresses of packed layers.
- `item_size`: bytes of one token in one layer of K or of V.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """layer_first, either way, any number of layers."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer out of page_first_direct buffers; one device layer for each buffer."""
    pages, offsets = _split(src_indices, page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[:, layer_id][pages, offsets]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """All layers into page_first_direct buffers; the layers of the first buffer come first."""
    pages, offsets = _split(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for position, src in enumerate(src_ptrs):
        buffer, layer = divmod(position, layers)
        dst_ptrs[buffer][:, layer][pages, offsets] = src[src_indices]


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
) -> None:
    """One layer of K and V, layer_first."""
    dst_k[dst_indices] = src_k[src_indices]
    dst_v[dst_indices] = src_v[src_indices]


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int
) -> None:
    """One layer of one buffer, layer_first."""
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer of K and V out of page_first buffers."""
    dst_k[dst_indices] = src_k[:, layer_id][src_indices]
    dst_v[dst_indices] = src_v[:, layer_id][src_indices]


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer out of one page_first buffer."""
    dst[dst_indices] = src[:, layer_id][src_indices]


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    """One layer of K and V out of page_head buffers."""
    pages, offsets = _split(src_indices, page_size)
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[..., layer_id, :][pages, :, offsets]


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """All layers of K and V, layer_first on both sides."""
    transfer_kv_all_layer_mla(
        src_k_layers, dst_k_layers, src_indices, dst_indices, item_size, num_layers
    )
    transfer_kv_all_layer_mla(
        src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers
    )


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """All layers of one buffer, layer_first on both sides."""
    for src, dst in zip(
        _rows_at(src_layers, src_indices, item_size),
        _rows_at(dst_layers, dst_indices, item_size),
        strict=True,
    ):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers of K and V into page_first buffers."""
    for src_layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers of one buffer into a page_first buffer."""
    rows = dst.flatten(2).view(torch.uint8)
    for layer, src in enumerate(_rows_at(src_layers, src_indices, item_size)):
        rows[:, layer][dst_indices] = src[src_indices]


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    """All layers of K and V into page_head buffers."""
    pages, offsets = _split(dst_indices, page_size)
    for src_layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        bytes_of = dst.view(torch.uint8)
        for layer, src in enumerate(_rows_at(src_layers, src_indices, item_size)):
            heads = src[src_indices].unflatten(1, (head_num, -1))
            bytes_of[..., layer, :][pages, :, offsets] = heads


def _split(indices: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    return indices // page_size, indices % page_size


def _rows_at(addresses: Tensor, indices: Tensor, item_size: int) -> list[Tensor]:
    """Each layer as uint8 [slots, item_size], long enough for `indices`, sharing its memory."""
    slots = int(indices.max()) + 1
    return [
        torch.frombuffer(
            (ctypes.c_uint8 * (slots * item_size)).from_address(address), dtype=torch.uint8
        ).view(slots, item_size)
        for address in addresses.tolist()
    ]


_TRANSFERS: tuple[Callable[..., None], ...] = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer,
    transfer_kv_per_layer_mla,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_per_layer_ph_lf,
    transfer_kv_all_layer,
    transfer_kv_all_layer_mla,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_all_layer_lf_ph,
)


def install(*modules: str) -> None:
    """Define the transfers in SGLang's `modules` where it has not imported its own."""
    for name in modules:
        module: Any = importlib.import_module(name)
        for transfer in _TRANSFERS:
            if not hasattr(module, transfer.__name__):
                setattr(module, transfer.__name__, transfer)
