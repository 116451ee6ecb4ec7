"""Prometheus series of the restores, in SGLang's own exposition.

As in `metrics.py`, prometheus_client is imported on first use only, in a scheduler process.
Counters only grow; labels hold rank and words of small fixed sets, never a request.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from cacheflow_sgl.core.plans import Way
from cacheflow_sgl.core.report import Outcome, RestoreReport

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

_RANK = ("tp_rank", "pp_rank", "dp_rank")
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

# Series -> its labels beside the rank, and what an operator reads.
_SERIES = {
    "restored_tokens": (
        ("way",),
        "Prefix tokens brought back to the device, by what brought them; also by restores that "
        "ended early.",
    ),
    "restore_lane_busy_seconds": (("lane",), "Seconds in which a lane worked on a restore."),
    "restore_overlap_seconds": (
        (),
        "Seconds in which both lanes worked on the same restore.",
    ),
    "restores": (("way", "outcome"), "Restores, by the way chosen at the start and their end."),
    "restore_fallbacks": (
        ("reason",),
        "Requests with an evicted prefix that took SGLang's own path, by reason.",
    ),
    "restore_late": ((), "Restores whose first load was late, so that compute started."),
    "restore_failed_loads": ((), "Loads of restores that failed; their tokens were computed."),
}


@cache  # a second series of one name would be refused
def _counters() -> Mapping[str, "Counter"]:
    from prometheus_client import Counter

    return {
        name: Counter(f"cacheflow:{name}", text, labelnames=(*_RANK, *labels))
        for name, (labels, text) in _SERIES.items()
    }


@cache
def _seconds() -> "Histogram":
    from prometheus_client import Histogram

    return Histogram(
        "cacheflow:restore_seconds",
        "Seconds from the decision to the prefix being complete on the device.",
        labelnames=(*_RANK, "way"),
        buckets=_SECONDS,
    )


class RestoreMetrics:
    """Counts one rank's restores."""

    def __init__(self, labels: Mapping[str, str], fallback_reasons: Iterable[str] = ()) -> None:
        """Make every series appear at zero.

        `labels` holds tp_rank, pp_rank and dp_rank; ValueError for others. `fallback_reasons`
        are the words that `fell_back` will be called with.
        """
        self._labels = dict(labels)
        for name in ("restore_overlap_seconds", "restore_late", "restore_failed_loads"):
            self._counter(name)
        for way in ("computed", "loaded"):
            self._counter("restored_tokens", way=way)
        for lane in ("compute", "io"):
            self._counter("restore_lane_busy_seconds", lane=lane)
        for chosen in Way:
            _seconds().labels(**self._labels, way=chosen.value)
            for outcome in Outcome:
                self._counter("restores", way=chosen.value, outcome=outcome.value)
        for reason in fallback_reasons:
            self._counter("restore_fallbacks", reason=reason)

    def finished(self, report: RestoreReport) -> None:
        """Count a restore that has ended, well or not; once each."""
        self._counter("restored_tokens", way="computed").inc(report.computed_tokens)
        self._counter("restored_tokens", way="loaded").inc(report.loaded_tokens)
        self._counter("restore_lane_busy_seconds", lane="compute").inc(report.compute_s)
        self._counter("restore_lane_busy_seconds", lane="io").inc(report.io_s)
        self._counter("restore_overlap_seconds").inc(report.overlap_s)
        self._counter("restores", way=report.way, outcome=report.outcome).inc()
        self._counter("restore_late").inc(report.late)
        self._counter("restore_failed_loads").inc(report.failed_loads)
        # A plain recompute is left to SGLang once it is chosen: how long it takes is not seen.
        if report.complete and report.way != Way.RECOMPUTE:
            _seconds().labels(**self._labels, way=report.way).observe(report.restore_s)

    def fell_back(self, reason: str) -> None:
        """Count a request that took SGLang's own path; `reason` is a fixed snake_case word."""
        self._counter("restore_fallbacks", reason=reason).inc()

    def _counter(self, name: str, **labels: str) -> "Counter":
        return _counters()[name].labels(**self._labels, **labels)
