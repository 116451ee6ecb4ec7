"""Prometheus series of the tiers, in SGLang's own exposition.

SGLang sets up prometheus_client's multi-process directory before it starts its ranks, so counters
made in a scheduler process appear at the server's `/metrics` beside SGLang's. It is imported here
on first use only: imported before that directory is set, it would count in memory for good, and
SGLang's own series would be lost, too. Counters only grow; labels hold rank and tier, never a
request.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from hicache_tiers import TierStats

if TYPE_CHECKING:
    from prometheus_client import Counter

_LABELS = ("tp_rank", "pp_rank", "dp_rank", "tier")

# Field of TierStats -> what an operator reads.
_SERIES = {
    "hits": "Pages read from the tier.",
    "misses": "Pages asked of the tier that it could not give.",
    "read_bytes": "Bytes of pages read from the tier.",
    "written_records": "Pages written to the tier.",
    "written_bytes": "Bytes of pages written to the tier.",
    "declined": "Pages the tier would not take (larger than its capacity, or index full).",
    "evicted": "Pages evicted to stay under the capacity.",
    "evicted_bytes": "Bytes freed by eviction.",
}
_ERROR_KINDS = ("read", "write", "corrupt", "timeout")


@cache  # a second series of one name would be refused when the backend is attached again
def _counters() -> Mapping[str, "Counter"]:
    from prometheus_client import Counter

    return {
        name: Counter(f"cacheflow:tier_{name}", text, labelnames=_LABELS)
        for name, text in _SERIES.items()
    }


@cache
def _errors() -> "Counter":
    from prometheus_client import Counter

    return Counter(
        "cacheflow:tier_errors",
        "Failed operations of the tier, by kind; each is a miss or an unstored page, no more.",
        labelnames=(*_LABELS, "kind"),
    )


class TierMetrics:
    """Publishes the growth of one rank's tier counters."""

    def __init__(self, config: Any, tier: str = "disk"):
        """Make every series appear at zero; `config` is SGLang's `HiCacheStorageConfig`."""
        labels = (str(config.tp_rank), str(config.pp_rank), str(config.dp_rank), tier)
        self._counters = {name: counter.labels(*labels) for name, counter in _counters().items()}
        self._errors = {kind: _errors().labels(*labels, kind) for kind in _ERROR_KINDS}
        self._published = TierStats()

    def publish(self, stats: TierStats) -> None:
        """Add what has been counted since the last call; quick where that is nothing."""
        if stats == self._published:
            return
        for name, counter in self._counters.items():
            counter.inc(getattr(stats, name) - getattr(self._published, name))
        for kind, counter in self._errors.items():
            counter.inc(getattr(stats.errors, kind) - getattr(self._published.errors, kind))
        self._published = stats
