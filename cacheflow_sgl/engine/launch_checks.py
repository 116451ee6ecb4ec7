"""Seam: refuse a bad configuration where the user can see it.

A plugin exception is swallowed by SGLang's loader, and an error inside a scheduler is a traceback
in a child process. So version, options and directory are checked in the launching process before
any child starts, and at run-time attach before the scheduler touches its storage state (there the
answer becomes HTTP 400).
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

from hicache_tiers import DiskStore, StoreError

from .namespace import new_run_id
from .options import BACKEND, OptionsError, parse_options, read_extra_config
from .version import UnsupportedSGLangError, check_sglang_version

logger = logging.getLogger(__name__)


def check_extra_config(text: str | None) -> None:
    """Raise OptionsError in one line unless `text` is usable, the directory included."""
    options = parse_options(read_extra_config(text))
    try:
        DiskStore.check(options.store_config())
    except StoreError as error:
        raise OptionsError(f"directory: {error}") from None


def validate_server_args(server_args: Any) -> None:
    """Check one `ServerArgs` record; raises a one-line error if it asks for our backend wrongly.

    Called by the plugin in the launching process, and by SGLang's own resolution pipeline where
    the source patch is applied.
    """
    new_run_id()  # also for a backend attached later
    if server_args.hicache_storage_backend != BACKEND:
        return
    check_sglang_version()
    check_extra_config(server_args.hicache_storage_backend_extra_config)
    if not server_args.enable_hierarchical_cache:
        logger.warning(
            "--hicache-storage-backend %s has no effect without --enable-hierarchical-cache",
            BACKEND,
        )


def check_command_line(prepare: Callable[..., Any], argv: list[str]) -> Any:
    """Around `prepare_server_args`: end the process with one line and status 2 on bad options."""
    server_args = prepare(argv)
    try:
        validate_server_args(server_args)
    except (OptionsError, UnsupportedSGLangError) as error:
        print(_one_line(error), file=sys.stderr)
        raise SystemExit(2) from None
    return server_args


def check_record(resolve: Callable[..., None], server_args: Any) -> None:
    """Around `ServerArgs.resolve_once` (`sglang.Engine`): raise ValueError on bad options."""
    if not getattr(server_args, "_resolution_finished", False):
        try:
            validate_server_args(server_args)
        except (OptionsError, UnsupportedSGLangError) as error:
            raise ValueError(_one_line(error)) from None
    resolve(server_args)


def check_attach(
    attach: Callable[..., tuple[bool, str]],
    attachment: Any,
    storage_backend: str,
    storage_backend_extra_config_json: str | None = None,
    **policies: Any,
) -> tuple[bool, str]:
    """Around `StorageAttachment.attach`: refuse bad options before anything is changed.

    SGLang's attach makes process groups, which every rank must enter: so the ranks agree first.
    """
    if storage_backend == BACKEND:
        refusal = ""
        try:
            check_extra_config(storage_backend_extra_config_json)
        except OptionsError as error:
            refusal = _one_line(error)
        if not _all_ranks_agree(attachment._cache, not refusal):
            return False, refusal or f"{BACKEND}: another rank refused; its log says why"
    return attach(attachment, storage_backend, storage_backend_extra_config_json, **policies)


def _all_ranks_agree(cache: Any, agreed: bool) -> bool:
    """MIN over the TP ranks of `agreed`; `cache` is the `UnifiedRadixCache` of this rank."""
    import torch

    vote = torch.tensor([agreed], dtype=torch.int)
    cache._all_reduce_attn_groups(vote, torch.distributed.ReduceOp.MIN)
    if not agreed:
        logger.error("cacheflow: this rank refuses to attach the storage backend")
    return bool(vote.item())


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text.startswith(f"{BACKEND}:") else f"{BACKEND}: {text}"
