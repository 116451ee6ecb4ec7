import subprocess
import sys

import msgspec
import pytest
from prometheus_client import REGISTRY

from cacheflow_sgl.engine.restore_metrics import RestoreMetrics
from tests.core.test_report import REPORT

REASONS = ("no_memory", "sliding_window")


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> dict[str, str]:
    # The registry is the process's: each test has a rank of its own.
    return {"tp_rank": request.node.name, "pp_rank": "1", "dp_rank": "0"}


def series(rank: dict[str, str]) -> dict[tuple[str, ...], float]:
    """All samples of the rank: (name, the labels beside the rank) -> value."""
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k not in rank)): sample.value
        for metric in REGISTRY.collect()
        if metric.name.startswith("cacheflow:restore")
        for sample in metric.samples
        if rank.items() <= sample.labels.items() and not sample.name.endswith("_created")
    }


def test_every_series_exists_at_zero_from_the_start(rank):
    RestoreMetrics(rank, REASONS)
    found = series(rank)
    assert set(found.values()) == {0}
    buckets = {key for key in found if key[0] == "cacheflow:restore_seconds_bucket"}
    ways = ("recompute", "load", "split")
    assert found.keys() - buckets == {
        ("cacheflow:restored_tokens_total", "computed"),
        ("cacheflow:restored_tokens_total", "loaded"),
        ("cacheflow:restore_lane_busy_seconds_total", "compute"),
        ("cacheflow:restore_lane_busy_seconds_total", "io"),
        ("cacheflow:restore_overlap_seconds_total",),
        ("cacheflow:restore_late_total",),
        ("cacheflow:restore_failed_loads_total",),
        *(("cacheflow:restore_fallbacks_total", reason) for reason in REASONS),
        *(
            ("cacheflow:restores_total", outcome, way)
            for way in ways
            for outcome in ("restored", "recomputed", "aborted", "retracted")
        ),
        *((f"cacheflow:restore_seconds_{part}", way) for part in ("count", "sum") for way in ways),
    }
    bounds = sorted(float(le) for _, le, way in buckets if way == "load")
    assert bounds[0] <= 0.005
    assert 60 in bounds


def test_a_finished_restore_is_counted_and_adds_to_those_before(rank):
    metrics = RestoreMetrics(rank)
    failing = msgspec.structs.replace(REPORT, late=True, failed_loads=3)
    for report in (REPORT, failing):
        metrics.finished(report)
    RestoreMetrics(rank)  # made again in the same process, it goes on where the series stand
    found = series(rank)
    assert found["cacheflow:restored_tokens_total", "computed"] == 2 * REPORT.computed_tokens
    assert found["cacheflow:restored_tokens_total", "loaded"] == 2 * REPORT.loaded_tokens
    busy = "cacheflow:restore_lane_busy_seconds_total"
    assert found[busy, "compute"] == pytest.approx(2 * REPORT.compute_s)
    assert found[busy, "io"] == pytest.approx(2 * REPORT.io_s)
    overlap = found[("cacheflow:restore_overlap_seconds_total",)]
    assert overlap == pytest.approx(2 * REPORT.overlap_s)
    assert found["cacheflow:restores_total", "restored", "split"] == 2
    assert found[("cacheflow:restore_late_total",)] == 1
    assert found[("cacheflow:restore_failed_loads_total",)] == 3
    assert found["cacheflow:restore_seconds_count", "split"] == 2
    assert found["cacheflow:restore_seconds_sum", "split"] == pytest.approx(2 * REPORT.restore_s)


@pytest.mark.parametrize("outcome", ["aborted", "retracted"])
def test_the_time_of_a_prefix_that_never_got_complete_is_not_observed(rank, outcome):
    RestoreMetrics(rank).finished(msgspec.structs.replace(REPORT, outcome=outcome))
    found = series(rank)
    assert found["cacheflow:restores_total", outcome, "split"] == 1
    assert found["cacheflow:restore_seconds_count", "split"] == 0
    assert found["cacheflow:restored_tokens_total", "computed"] == REPORT.computed_tokens


def test_requests_on_the_own_path_of_sglang_are_counted_by_reason(rank):
    metrics = RestoreMetrics(rank, REASONS)
    metrics.fell_back("no_memory")
    metrics.fell_back("no_memory")
    found = series(rank)
    name = "cacheflow:restore_fallbacks_total"
    assert [found[name, reason] for reason in REASONS] == [2, 0]


def test_ranks_are_counted_apart(rank):
    other = rank | {"dp_rank": "1"}
    RestoreMetrics(rank).finished(REPORT)
    RestoreMetrics(other)
    assert set(series(other).values()) == {0}


def test_wrong_labels_are_refused():
    with pytest.raises(ValueError):
        RestoreMetrics({"tp_rank": "0"})


def test_prometheus_is_imported_on_first_use_only():
    # Imported before SGLang sets its directory, it would count in memory for good.
    code = "import sys, cacheflow_sgl.engine.restore_metrics; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "prometheus_client" not in run.stdout.split()
