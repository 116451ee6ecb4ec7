"""Pages of SGLang's host pools as bytes in record order.

A record holds a page as (layer, K|V, token, head, dim), whatever layout the host pool has
(DESIGN: FlowKV's block-major order). For the pools whose layout we know, a page is a pair of
strided views into the pool's own memory, so that storing or loading is one strided copy and no
buffer of SGLang's is needed. Any other pool (indexer, Mamba state, packed formats) is taken
through its own `get_data_page` / `set_from_flat_data_page` as one opaque record.

Layouts: `sglang/srt/mem_cache/pool_host/mha.py` and `mla.py`, `init_kv_buffer`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hicache_tiers import RecordLayout

Parts = Sequence[np.ndarray]

# Position of (layer, token, head) in one page's view of each layout; the last axis is bytes.
_AXES = {
    "layer_first": (0, 1, 2, 3),  # (layer, token, head, byte)
    "page_first": (1, 0, 2, 3),  # (token, layer, head, byte)
    "page_first_direct": (0, 1, 2, 3),  # (layer, token, head, byte), a page at a time
    "page_head": (2, 1, 0, 3),  # (head, token, layer, byte), a page at a time
}


class HostPages(Protocol):
    """Access to the pages of one host pool.

    Attributes:
        layout: shape of one record.
        order: how a record's bytes are ordered; part of the namespace.
        page_size: host slots a page.
    """

    layout: RecordLayout
    order: str
    page_size: int

    def sources(self, slots: Sequence[int]) -> list[Parts]:
        """Bytes of the pages that begin at host `slots`, to be stored."""

    def targets(self, slots: Sequence[int]) -> list[Parts]:
        """Where the pages that begin at host `slots` are to be loaded."""

    def landed(self, slots: Sequence[int], targets: list[Parts], loaded: list[bool]) -> None:
        """Called once after a load, with what `targets` gave and which pages were read."""


def host_pages(pool: Any) -> HostPages:
    """Page access for an SGLang host pool (`HostKVCache`)."""
    buffers = _known_buffers(pool)
    if buffers is None:
        return OpaquePages(pool)
    return StridedPages(buffers, pool.layout, pool.page_size)


class StridedPages:
    """Pages of an MHA, GQA or MLA pool in a known layout: views, no copies."""

    order = "layer,part,token,head,byte"

    def __init__(self, buffers: Sequence[torch.Tensor], layout: str, page_size: int):
        """Wrap `buffers`: K and V, or one latent; without the leading K|V axis."""
        self.page_size = page_size
        self._host_layout = layout
        # Byte views share the pool's memory; numpy knows no bfloat16 or float8.
        self._buffers = [buffer.view(torch.uint8).numpy() for buffer in buffers]
        first = [self._page(buffer, 0) for buffer in self._buffers]
        layers = first[0].shape[0]
        self.layout = RecordLayout(layers, tuple(page.nbytes // layers for page in first))

    def _page(self, buffer: np.ndarray, slot: int) -> np.ndarray:
        """View (layer, token, head, byte) of the page beginning at host `slot`."""
        if self._host_layout == "layer_first":
            page = buffer[:, slot : slot + self.page_size]
        elif self._host_layout == "page_first":
            page = buffer[slot : slot + self.page_size]
        else:
            page = buffer[slot // self.page_size]
        return page.transpose(_AXES[self._host_layout])

    def sources(self, slots: Sequence[int]) -> list[Parts]:
        """See `HostPages.sources`."""
        return [tuple(self._page(buffer, slot) for buffer in self._buffers) for slot in slots]

    def targets(self, slots: Sequence[int]) -> list[Parts]:
        """See `HostPages.targets`."""
        return self.sources(slots)

    def landed(self, slots: Sequence[int], targets: list[Parts], loaded: list[bool]) -> None:
        """Nothing to do: the bytes were copied into the pool itself."""


class OpaquePages:
    """Pages of any other pool: one flat run of bytes whose order only SGLang knows.

    A logical anchor (`LogicalHostPool`) has pages without bytes; of those one zero byte is stored,
    since what SGLang asks of them is whether they are there.
    """

    def __init__(self, pool: Any):
        """Wrap `pool`, whose host layout is part of the order."""
        self._pool = pool
        self._page_bytes = pool.get_dummy_flat_data_page().nbytes
        self.page_size = pool.page_size
        self.order = f"opaque:{type(pool).__name__}:{pool.layout}"
        self.layout = RecordLayout(1, (max(1, self._page_bytes),))

    def sources(self, slots: Sequence[int]) -> list[Parts]:
        """See `HostPages.sources`; the bytes are copies."""
        if not self._page_bytes:
            return self.targets(slots)
        return [(_flat_bytes(self._pool.get_data_page(slot)),) for slot in slots]

    def targets(self, slots: Sequence[int]) -> list[Parts]:
        """See `HostPages.targets`; buffers of our own, put into the pool by `landed`."""
        return [(np.zeros((1, self.layout.payload_bytes), np.uint8),) for _ in slots]

    def landed(self, slots: Sequence[int], targets: list[Parts], loaded: list[bool]) -> None:
        """Hand the loaded pages to the pool."""
        for slot, (data,), ok in zip(slots, targets, loaded, strict=True):
            if ok and self._page_bytes:
                page = self._pool.get_dummy_flat_data_page()
                _flat_bytes(page)[:] = data
                self._pool.set_from_flat_data_page(slot, page)


def _flat_bytes(page: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = page.contiguous().view(torch.uint8).reshape(1, -1).numpy()
    return flat


def _known_buffers(pool: Any) -> list[torch.Tensor] | None:
    """K and V (or the latent) of a pool whose layout we know, else None."""
    from sglang.srt.mem_cache.pool_host.mha import (
        AsymmetricMHATokenToKVPoolHost,
        MHATokenToKVPoolHost,
    )
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    # Exact types: a subclass may keep scales or other state beside the buffers.
    if pool.layout not in _AXES:
        return None
    if type(pool) in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost):
        return [pool.k_buffer, pool.v_buffer]
    # With decode context parallelism a slot is not a row: only the pool itself finds a page.
    if type(pool) is MLATokenToKVPoolHost and pool.dcp_size == 1 and pool.layout != "page_head":
        return [pool.kv_buffer]
    return None
