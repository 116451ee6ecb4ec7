"""Seam: SGLang's storage backend interface over our tiers.

Thin: keys and page positions come in, booleans go out; the bytes move between the host pool's own
memory (`host_pages`) and a namespace of the disk store (`hicache_tiers`). It runs no collective
and raises for no I/O error: a read is right bytes or a miss, a write is stored or False. SGLang
calls it from its prefetch, backup and scheduler threads at once.

Interfaces: `HiCacheStorage` in `sglang/srt/mem_cache/hicache_storage.py`, v1 (the KV pool) and v2
(KV and extra pools).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_lora, get_model, get_spec

from hicache_tiers import DiskStore, Namespace, RecordLayout

from .host_pages import HostPages, host_pages
from .metrics import TierMetrics
from .namespace import ModelIdentity, pool_identity
from .options import parse_options
from .weight_updates import live_backends, served

logger = logging.getLogger(__name__)


class PoolStore:
    """One host pool's pages and the namespace they are stored in."""

    def __init__(self, pages: HostPages, namespace: Namespace):
        self.pages = pages
        self.namespace = namespace

    def load(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Read the pages of `keys` into the host slots given, a page's worth of them a key."""
        slots = self._page_slots(keys, host_indices)
        targets = self.pages.targets(slots)
        loaded = self.namespace.read(keys, targets)
        self.pages.landed(slots, targets, loaded)
        return loaded

    def store(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Write the pages of `keys` from the host slots given."""
        return self.namespace.write(keys, self.pages.sources(self._page_slots(keys, host_indices)))

    def _page_slots(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        slots: list[int] = host_indices[:: self.pages.page_size].tolist()
        if len(slots) != len(keys) or len(host_indices) != len(keys) * self.pages.page_size:
            raise ValueError(
                f"{len(host_indices)} host slots given for {len(keys)} pages of "
                f"{self.pages.page_size}"
            )
        return slots


class CacheFlowStorage(HiCacheStorage):
    """The `cacheflow` storage backend of one rank."""

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: Any):
        """Open the store; pools are registered by SGLang right after.

        Raises:
            OptionsError: a bad option (the launching process has refused it before).
            StoreError: the directory cannot be used.
        """
        extra_config = dict(storage_config.extra_config or {})
        extra_config.pop("file_storage_path", None)  # SGLang adds it to every backend's options
        self.options = options = parse_options(extra_config)
        self.rank_labels = {
            name: str(getattr(storage_config, name)) for name in ("tp_rank", "pp_rank", "dp_rank")
        }
        self._config = storage_config
        draft_path = get_spec().speculative_draft_model_path
        adapters = [ref.lora_path for ref in get_lora().lora_paths or []]
        self._model = ModelIdentity(get_model(), draft_path, adapters, options.namespace)
        self._store = DiskStore.open(options.store_config())
        self._used: dict[str, Namespace] = {}  # every namespace of this run, by id
        self._host_pools: dict[str, Any] = {}
        self._pools: dict[str, PoolStore] = {}
        self._stale_pages_live = False
        self._metrics = (
            TierMetrics(storage_config) if storage_config.enable_storage_metrics else None
        )
        if served.updates:
            self.weights_changed(served.weights, flushed=served.flushed)
        live_backends.add(self)
        self._say_what_is_there()

    def _say_what_is_there(self) -> None:
        usage = self._store.usage()
        logger.info(
            "cacheflow: %s holds %d pages, %.2f of %.2f GB; weights %s",
            self._store.config.directory,
            usage.records,
            usage.used_bytes / 1e9,
            usage.capacity_bytes / 1e9,
            self._model.fields()["weights"],
        )

    # ---- Pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the anchor pool (KV)."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool of the group; the anchor comes here a second time."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if self._host_pools.get(name) is not pool:
            self._host_pools[name] = pool
            self._pools[name] = self._pool_store(name, pool)

    def _pool_store(self, name: str, pool: Any) -> PoolStore:
        pages = host_pages(pool)
        anchor = self.mem_pool_host
        identity = pool_identity(self._model, self._config, name, pages, pool, anchor)
        return PoolStore(pages, self._namespace(identity, pages.layout))

    def _namespace(self, identity: dict[str, str | int], layout: RecordLayout) -> Namespace:
        namespace = self._store.namespace(identity, layout)
        return self._used.setdefault(namespace.id, namespace)

    def _kv(self) -> PoolStore:
        return self._pools[PoolName.KV.value]

    # ---- Interface v1: the KV pool ----

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Number of leading `keys` that are stored."""
        return _leading(self._kv().namespace.contains(keys))

    def exists(self, key: str) -> bool:
        """Whether the page of `key` is stored."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the KV host pool; one answer a key."""
        return self._kv().load(keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages from the KV host pool; one answer a key."""
        return self._kv().store(keys, host_indices)

    # ---- Interface v2: KV and extra pools ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Longest usable prefix of `keys` under each pool's hit policy.

        Same meaning as `HiCacheFile.batch_exists_v2`: a pool reports its own boundary, the usable
        prefix is the longest one that every pool can restore. BLOCK_GROUPS pools, which no pool of
        this SGLang is, never gate by definition and get no verdict.
        """
        kv_pages = self.batch_exists(keys)
        hits = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            stored = self._pools[str(transfer.name)].namespace.contains(keys[:kv_pages])
            reach = _restorable(stored, transfer)
            if reach:
                hits[transfer.name] = max(reach)
            restorable &= reach
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load pages of several pools; one answer a key, by pool."""
        return self._each_pool(transfers, PoolStore.load)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; one answer a key, by pool."""
        return self._each_pool(transfers, PoolStore.store)

    def _each_pool(
        self,
        transfers: list[PoolTransfer],
        move: Callable[[PoolStore, Sequence[str], torch.Tensor], list[bool]],
    ) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys, indices = transfer.keys or [], transfer.host_indices
            if keys and indices is not None:
                results[transfer.name] = move(self._pools[str(transfer.name)], keys, indices)
            else:
                results[transfer.name] = [False] * len(keys)
        return results

    # ---- Plain values: SGLang's oldest interface, kept for its callers and tools ----

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Fill the tensor `target_location` with the value of `key`; None if it is missing."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Fill each tensor of `target_locations`; None for each key that is missing."""
        targets: list[torch.Tensor] = list(target_locations or [])
        if not targets:
            return [None] * len(keys)
        namespace = self._raw_namespace(targets[0].nbytes)
        loaded = namespace.read(keys, [(_tensor_bytes(target),) for target in targets])
        return [target if ok else None for target, ok in zip(targets, loaded, strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store the tensor `value` under `key`."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store each tensor of `values`; True if all were stored."""
        tensors: list[torch.Tensor] = list(values or [])
        if not tensors:
            return False
        namespace = self._raw_namespace(tensors[0].nbytes)
        return all(namespace.write(keys, [(_tensor_bytes(tensor),) for tensor in tensors]))

    def _raw_namespace(self, value_bytes: int) -> Namespace:
        """Namespace of plain values, which have a size but no layers."""
        identity = self._model.fields() | {
            "pool": "values",
            "tp": f"{self._config.tp_rank}/{self._config.tp_size}",
            "pp": f"{self._config.pp_rank}/{self._config.pp_size}",
        }
        return self._namespace(identity, RecordLayout(1, (value_bytes,)))

    # ---- Life ----

    def weights_changed(self, weights: str | None, *, flushed: bool) -> None:
        """Move to the namespace of the new weights.

        Args:
            weights: their identity, None if it cannot be told (from memory, or half loaded).
            flushed: whether SGLang dropped the pages computed with the old weights. If not, such
                pages may still be stored, so the namespace is one of this run only and is left
                again at the next flush.
        """
        self._stale_pages_live = not flushed
        self._model.weights_changed(weights if flushed else None)
        self._pools = {name: self._pool_store(name, p) for name, p in self._host_pools.items()}

    def cache_flushed(self) -> None:
        """Leave the namespace that may hold pages of old weights, if we are in one."""
        if self._stale_pages_live:
            self.weights_changed(None, flushed=True)

    def clear(self) -> None:
        """Drop what is stored for this server; other models in the directory keep theirs."""
        for namespace in list(self._used.values()):
            namespace.clear()

    def get_stats(self) -> None:
        """Publish the tiers' counters; SGLang asks once a scheduler step, and logs none itself."""
        if self._metrics is not None:
            self._metrics.publish(self._store.stats())

    def close(self) -> None:
        """Give the store back; the directory stays."""
        live_backends.discard(self)
        self._store.close()


def _leading(flags: Sequence[bool]) -> int:
    """Number of True values before the first False."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def _restorable(stored: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Prefix lengths in pages that a pool holding the pages `stored` can restore."""
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or []))
        return {
            length
            for length in range(1, len(stored) + 1)
            if all(stored[max(0, length - window) : length])
        }
    return set(range(1, _leading(stored) + 1))


def _tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    if not tensor.is_contiguous():
        raise ValueError("plain values must be contiguous tensors")
    flat: np.ndarray = tensor.view(torch.uint8).reshape(1, -1).numpy()
    return flat
