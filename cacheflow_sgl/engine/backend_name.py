"""Seam: make `cacheflow` a storage backend that SGLang knows by name.

SGLang keeps four lists: the choices of the flag, the factory's registry, the factory's way to
construct each built-in, and the names whose pages move by the zero-copy v1 calls. A patched
SGLang (patches/) has our name in all four; then nothing is entered a second time.
"""

import argparse
import logging
from collections.abc import Callable
from typing import Any

from .namespace import is_rank_sharded
from .options import BACKEND

logger = logging.getLogger(__name__)

STORAGE_MODULE = "cacheflow_sgl.engine.storage"
STORAGE_CLASS = "CacheFlowStorage"

_FLAG = "--hicache-storage-backend"


def add_flag_choice(_result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: accept our name, and say so in the help text."""
    # SGLang evaluates the flag's declaration anew for every parser, so the parser is the only
    # object that can be changed; argparse offers no public way to an action already added.
    action = next(a for a in parser._actions if _FLAG in a.option_strings)
    choices = list(action.choices or ())
    if BACKEND not in choices:
        action.choices = [*choices, BACKEND]
        action.help = f"{action.help} Plugin: {BACKEND} (disk store; see `cacheflow doctor`)."


def register_backend() -> None:
    """Enter our class, imported on first use, into SGLang's factory."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    if BACKEND not in StorageBackendFactory._registry:
        StorageBackendFactory.register_backend(BACKEND, STORAGE_MODULE, STORAGE_CLASS)


def create_backend(
    create: Callable[..., Any],
    factory: type,
    backend_name: str,
    backend_class: type,
    storage_config: Any,
    mem_pool_host: Any,
) -> Any:
    """Around `StorageBackendFactory._create_builtin_backend`, which refuses names it lacks."""
    if backend_name == BACKEND:
        return backend_class(storage_config, mem_pool_host)
    return create(factory, backend_name, backend_class, storage_config, mem_pool_host)


def use_v1_pages(
    _result: None, controller: Any, storage_backend: str, *_args: Any, **_kwargs: Any
) -> None:
    """After `HiCacheController.attach_storage_backend`: move pages by `batch_get_v1/set_v1`.

    Otherwise SGLang copies each page through a flat buffer of its own. The storage threads look
    the functions up at each use, and no request can be in flight during an attach.
    """
    if storage_backend == BACKEND:
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy


def back_up_own_shard(should_backup: Callable[..., bool], controller: Any, transfer: Any) -> bool:
    """Around `HybridCacheController.should_backup`: of an MLA model, too, each rank its own.

    SGLang lets one rank write what all ranks hold alike, and knows by backend name which keep the
    rank-sharded pools apart; ours does.
    """
    if should_backup(controller, transfer):
        return True
    entry = controller.mem_pool_host.entry_map.get(transfer.name)
    return (
        controller.storage_backend_type == BACKEND
        and entry is not None
        and is_rank_sharded(str(transfer.name), entry.host_pool)
    )


def use_storable_layout(_result: None, server_args: Any) -> None:
    """After `resolve_storage_layout_compatibility`: replace the one layout we cannot store.

    `page_first_kv_split` (Ascend) keeps K, V and indexer in buffers of different shapes that
    SGLang offers no page access for; every other layout is taken as it is.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    if cfg.hicache_storage_backend != BACKEND or cfg.hicache_mem_layout != "page_first_kv_split":
        return
    declare_resolution(server_args, "cacheflow", hicache_mem_layout="page_first_direct")
    logger.warning(
        "%s cannot store --hicache-mem-layout page_first_kv_split; using page_first_direct", BACKEND
    )
