"""Seam: pages of old weights are never served under new ones.

SGLang can replace a model's weights while it serves. The tree and the host tier are flushed by
SGLang itself; the store is ours, so its namespace moves with the weights.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .namespace import remember_served_checkpoint, updated_weights


class FollowsWeights(Protocol):
    """A backend whose namespace moves with the weights; see `storage.CacheFlowStorage`."""

    def weights_changed(self, weights: str | None, *, flushed: bool) -> None:
        """The model has other weights now."""

    def cache_flushed(self) -> None:
        """SGLang has dropped what it had cached."""


# Backends alive in this process; each enters itself. (This module must not import `storage`: the
# plugin loads it in every process, and prometheus_client must not be imported before SGLang has
# set up its multi-process directory.)
live_backends: "weakref.WeakSet[FollowsWeights]" = weakref.WeakSet()


@dataclass
class ServedWeights:
    """What has become of the weights since this process loaded them.

    Attributes:
        updates: how often they have been replaced.
        weights: identity of those loaded last (`namespace.updated_weights`), taken when they were;
            None if it cannot be told.
        flushed: whether what SGLang had cached of the weights before was dropped.
    """

    updates: int = 0
    weights: str | None = None
    flushed: bool = True


# Kept also while no backend is attached: one attached later must know.
served = ServedWeights()


def after_attachment_made(_result: None, *_args: Any, **_kwargs: Any) -> None:
    """After `StorageAttachment.__init__`: the weights are loaded, nothing is attached yet."""
    remember_served_checkpoint()


def after_disk_update(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.update_weights_from_disk`."""
    output = update(manager, request)
    _replaced(request, output, request.model_path)
    return output


def after_memory_update(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around the updates from tensors, from other processes and from a process group.

    Also around the end of an update session, where weights may have come by remote writes.
    """
    output = update(manager, request)
    _replaced(request, output, None)
    return output


def after_flush(flushed: bool, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.flush_cache`."""
    if flushed:
        served.flushed = True
        for backend in live_backends:
            backend.cache_flushed()


def _replaced(request: Any, output: Any, model_path: str | None) -> None:
    # A failed update may have replaced some of the weights: it counts as one, from nowhere known.
    served.updates += 1
    served.weights = updated_weights(model_path) if model_path and output.success else None
    served.flushed = bool(output.success and getattr(request, "flush_cache", False))
    for backend in live_backends:
        backend.weights_changed(served.weights, flushed=served.flushed)
