import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.report import Interval, LaneLog
from cacheflow_sgl.engine.timeline import Timeline
from tests.core.test_report import REPORT


def lane(*work: tuple[float, float, int, int]) -> LaneLog:
    """A lane from (start_s, stop_s, first token, last token + 1)."""
    log = LaneLog()
    for start_s, stop_s, start, stop in work:
        log.add(Interval(start_s, stop_s), Span(start, stop))
    return log


COMPUTE = lane((100.0, 100.3, 0, 512), (100.3, 100.6, 512, 1024), (100.6, 100.8, 1024, 1536))
IO = lane((100.01, 100.4, 2816, 4096), (100.4, 100.9, 1536, 2816))


def while_open(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text() + "]")


def names(events: list[dict[str, Any]], phase: str) -> list[str]:
    return [event["name"] for event in events if event["ph"] == phase]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "restores.json"


def test_the_file_can_be_read_at_any_time(path):
    timeline = Timeline(path, rank=0)
    assert names(while_open(path), "X") == []
    for restores in (1, 2):
        timeline.add(REPORT, COMPUTE, IO)
        assert len(names(while_open(path), "X")) == 5 * restores
    timeline.close()
    timeline.close()
    timeline.add(REPORT, COMPUTE, IO)
    assert len(names(json.loads(path.read_text()), "X")) == 10


def test_a_restore_is_drawn_in_two_lanes_of_its_rank(path):
    timeline = Timeline(path, rank=3)
    timeline.add(REPORT, COMPUTE, IO)
    timeline.close()
    events = json.loads(path.read_text())
    (process,) = (event for event in events if event["name"] == "process_name")
    assert process["args"] == {"name": "rank 3"}
    assert {event["pid"] for event in events} == {process["pid"]}
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert lanes.keys() == {"compute", "I/O"}

    work = [event for event in events if event["ph"] == "X"]
    assert [e["name"] for e in work if e["tid"] == lanes["compute"]] == [
        "tokens 0-512",
        "tokens 512-1024",
        "tokens 1024-1536",
    ]
    assert [(e["ts"], e["dur"], e["args"]) for e in work if e["tid"] == lanes["I/O"]] == [
        (100_010_000, 390_000, {"rid": "r1", "tokens": 1280}),
        (100_400_000, 500_000, {"rid": "r1", "tokens": 1280}),
    ]


def marks(path: Path, report: Any, compute: LaneLog, io: LaneLog) -> list[tuple[str, int]]:
    timeline = Timeline(path, rank=0)
    timeline.add(report, compute, io)
    timeline.close()
    events = json.loads(path.read_text())
    return [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]


def test_decision_and_meeting_are_marked(path):
    assert marks(path, REPORT, COMPUTE, IO) == [
        ("split: split saves 43%", 100_000_000),
        ("met at token 1536", 100_900_000),
    ]
    decision = next(event for event in json.loads(path.read_text()) if event["ph"] == "i")
    assert decision["args"] == REPORT.as_dict()


def test_each_segment_meets_at_its_own_time(path):
    # A hole at 1024-1536: loads of the first segment end at 1024, compute goes on behind them.
    report = msgspec.structs.replace(REPORT, meetings=[512, 2048])
    compute = lane((1.0, 2.0, 0, 512), (4.0, 5.0, 1024, 1536), (5.0, 6.0, 1536, 2048))
    io = lane((1.0, 3.0, 512, 1024), (3.0, 5.5, 2048, 4096))
    assert marks(path, report, compute, io)[1:] == [
        ("met at token 512", 3_000_000),
        ("met at token 2048", 6_000_000),
    ]


def test_a_restore_without_work_draws_nothing(path):
    assert marks(path, REPORT, LaneLog(), LaneLog()) == []


def test_a_restore_by_loads_alone_meets_at_its_start(path):
    report = msgspec.structs.replace(REPORT, way="load", reason="forced", meetings=[0])
    assert marks(path, report, LaneLog(), lane((1, 2, 2048, 4096), (2, 3, 0, 2048))) == [
        ("load: forced", 1_000_000),
        ("met at token 0", 3_000_000),
    ]


@given(
    times=st.lists(st.floats(0, 1e6), min_size=2, max_size=20, unique=True).map(sorted),
    rid=st.text(),
)
def test_work_one_after_another_never_overlaps_in_the_file(tmp_path_factory, times, rid):
    path = tmp_path_factory.mktemp("timeline") / "restores.json"
    pairs = pairwise(times)
    compute = lane(*((start, stop, 64 * i, 64 * i + 64) for i, (start, stop) in enumerate(pairs)))
    timeline = Timeline(path, rank=0)
    timeline.add(msgspec.structs.replace(REPORT, rid=rid), compute, LaneLog())
    timeline.close()
    work = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    assert len(work) == len(times) - 1
    assert all(event["args"]["rid"] == rid for event in work)
    for event, following in pairwise(work):
        assert event["dur"] >= 0
        assert event["ts"] + event["dur"] == following["ts"]


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_one_warning_and_no_half_event(path, caplog):
    timeline = Timeline(path, rank=0)
    timeline.add(REPORT, COMPUTE, IO)
    with caplog.at_level(logging.WARNING), file_limit(path.stat().st_size + 300):
        for _ in range(3):
            timeline.add(REPORT, COMPUTE, IO)
    timeline.add(REPORT, COMPUTE, IO)  # off for good, whatever room there is again
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert len(names(while_open(path), "X")) == 5
    timeline.close()


@pytest.mark.parametrize("name", ["missing/restores.json", ".", "nul\0.json"])
def test_a_bad_path_costs_one_warning(tmp_path, name, caplog):
    timeline = Timeline(tmp_path / name, rank=0)
    for _ in range(2):
        timeline.add(REPORT, COMPUTE, IO)
    timeline.close()
    assert len(caplog.records) == 1


def test_a_number_that_json_lacks_switches_the_timeline_off(path, caplog):
    timeline = Timeline(path, rank=0)
    endless = msgspec.structs.replace(REPORT, expected_s={"load": float("inf")})
    timeline.add(endless, COMPUTE, IO)
    timeline.add(REPORT, COMPUTE, IO)
    timeline.close()
    assert len(caplog.records) == 1
    assert names(while_open(path), "X") == []
