"""Seam: what a scheduler step does while a restore waits for a load.

Functions here are around-hooks of SGLang's `Scheduler` and of its invariant checker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .radix_cache import REQUEST_KEY, CacheFlowRadixCache

_IDLE_WAIT_S = 0.01
"""A step that has nothing else to do waits this long for loads, then looks at its inbox."""


def new_prefill_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kw: Any) -> Any:
    """Around `Scheduler._get_new_batch_prefill_raw`; gives (batch or None, running batch)."""
    cache = scheduler.tree_cache
    if not isinstance(cache, CacheFlowRadixCache) or not cache.restores:
        return original(scheduler, *args, **kw)
    running = kw["running_batch"] if "running_batch" in kw else args[-1]
    if _decodes_first(cache, scheduler, running):
        return None, running
    batch, running = original(scheduler, *args, **kw)
    if batch is None:
        # SGLang would spin, and a spinning interpreter slows the I/O lane.
        idle = running.is_empty() and not scheduler.last_batch and bool(cache.restores)
        if idle and cache.wait_for_load(_IDLE_WAIT_S):
            batch, running = original(scheduler, *args, **kw)
    if batch is not None:
        _leave_parked_out(batch)
    return batch, running


def _decodes_first(cache: CacheFlowRadixCache, scheduler: Any, running: Any) -> bool:
    """Whether running requests get another step before the restore's next chunk."""
    chunked, options = scheduler.chunked_req, cache.options
    restore = cache.restores.get(chunked.rid) if chunked is not None else None
    if restore is None or options is None or running.is_empty():
        return False
    if restore.decode_steps < options.restore_decode_steps:
        restore.decode_steps += 1
        return True
    restore.decode_steps = 0
    return False


def _leave_parked_out(batch: Any) -> None:
    """Undo what SGLang notes of its chunked request when that is parked and others are admitted.

    It counts a chunk in flight (`inflight_middle_chunks`) for any chunked request there is, and
    would then take the request's last chunk for one in the middle. A patched SGLang does not.
    """
    chunked = batch.chunked_req
    if chunked is not None and chunked not in batch.reqs:
        chunked.inflight_middle_chunks -= 1
        batch.chunked_req = None
        batch.contains_last_prefill_chunk = True


def uncached_sizes(original: Callable[..., Any], checker: Any) -> tuple[int, int]:
    """Around `SchedulerInvariantChecker._get_total_uncached_sizes`: private slots are no leak."""
    full, sliding = original(checker)
    cache = checker.tree_cache
    private = cache.private_tokens if isinstance(cache, CacheFlowRadixCache) else 0
    return full + private, sliding


def is_request_level(original: Callable[..., bool], streamer: Any, key: str) -> bool:
    """Around `SchedulerOutputStreamer.is_request_level_customized_info_key`.

    A restore report is told once a request, not sliced over its tokens.
    """
    return key == REQUEST_KEY or original(streamer, key)
