from types import SimpleNamespace

import msgspec
from prometheus_client import REGISTRY

from cacheflow_sgl.engine.metrics import TierMetrics
from hicache_tiers import ErrorCounts, TierStats

RANK = {"tp_rank": "3", "pp_rank": "1", "dp_rank": "0", "tier": "disk"}


def value(series: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"cacheflow:tier_{series}_total", RANK | labels)


def test_b22_every_series_exists_from_the_start_and_only_grows():
    config = SimpleNamespace(tp_rank=3, pp_rank=1, dp_rank=0)
    metrics = TierMetrics(config)
    fields = [f.name for f in msgspec.structs.fields(TierStats) if f.name != "errors"]
    kinds = [f.name for f in msgspec.structs.fields(ErrorCounts)]
    assert [value(name) for name in fields] == [0] * len(fields)
    assert [value("errors", kind=kind) for kind in kinds] == [0] * len(kinds)

    counts = {name: number for number, name in enumerate(fields, start=1)}
    errors = ErrorCounts(**{kind: number for number, kind in enumerate(kinds, start=1)})
    stats = TierStats(**counts, errors=errors)
    for _ in range(2):  # publishing the same again adds nothing
        metrics.publish(stats)
        assert {name: value(name) for name in fields} == counts
        assert value("errors", kind="corrupt") == errors.corrupt

    # A backend attached again in the same process goes on where the series stand.
    TierMetrics(config).publish(TierStats(hits=10))
    assert value("hits") == counts["hits"] + 10
