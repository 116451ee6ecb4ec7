"""Seam: pages of old weights are never served under new ones.

SGLang can replace a model's weights while it serves. The tree and the host tier are flushed by
SGLang itself; the store is ours, so its namespace moves with the weights.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol


class FollowsWeights(Protocol):
    """A backend whose namespace moves with the weights; see `storage.CacheFlowStorage`."""

    def weights_changed(self, model_path: str | None, *, flushed: bool) -> None:
        """The model has other weights now."""

    def cache_flushed(self) -> None:
        """SGLang has dropped what it had cached."""


# Backends alive in this process; each enters itself. (This module must not import `storage`: the
# plugin loads it in every process, and prometheus_client must not be imported before SGLang has
# set up its multi-process directory.)
live_backends: "weakref.WeakSet[FollowsWeights]" = weakref.WeakSet()


def after_disk_update(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.update_weights_from_disk`."""
    output = update(manager, request)
    _switch(request, output, request.model_path)
    return output


def after_memory_update(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around the updates from tensors, from other processes and from a process group.

    Also around the end of an update session, where weights may have come by remote writes.
    """
    output = update(manager, request)
    _switch(request, output, None)
    return output


def after_flush(flushed: bool, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.flush_cache`."""
    if flushed:
        for backend in live_backends:
            backend.cache_flushed()


def _switch(request: Any, output: Any, model_path: str | None) -> None:
    # A failed update may have replaced some of the weights: it counts as a change, too.
    flushed = bool(output.success and getattr(request, "flush_cache", False))
    for backend in live_backends:
        backend.weights_changed(model_path, flushed=flushed)
