import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.report import Interval, LaneLog, Outcome, RestoreReport, overlap_s

REPORT = RestoreReport(
    rid="r1",
    policy="cacheflow",
    way="split",
    reason="split saves 43%",
    outcome="restored",
    start=0,
    stop=4096,
    meetings=[1536],
    computed_tokens=1536,
    loaded_tokens=2560,
    failed_tokens=0,
    loaded_bytes=2560 * 1024,
    compute_s=0.5000001,
    io_s=0.6,
    overlap_s=0.5,
    wait_s=0.1,
    restore_s=0.65,
    late=False,
    failed_loads=0,
    expected_s={"recompute": 1.00000049, "load": 1.2, "split": 0.6},
)

# Whole seconds, so that looking once into each second is exact.
HORIZON = 30
intervals = st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)).map(
    lambda ends: Interval(min(ends), max(ends))
)
logs = st.lists(intervals, max_size=8)


def lane(busy: list[Interval]) -> LaneLog:
    log = LaneLog()
    for interval in busy:
        log.add(interval, Span(0, 64))
    return log


def busy_seconds(busy: list[Interval]) -> set[int]:
    return {
        second
        for second in range(HORIZON)
        if any(each.start_s < second + 0.5 < each.stop_s for each in busy)
    }


@given(logs)
def test_a_lane_is_busy_as_long_as_samples_find_it_busy(busy):
    assert lane(busy).busy_s == len(busy_seconds(busy))


@given(logs)
def test_united_intervals_ascend_with_gaps_between_them(busy):
    united = list(lane(busy).united())
    assert all(a.stop_s < b.start_s for a, b in pairwise(united))


@given(logs, logs)
def test_lanes_overlap_where_samples_find_both_busy(ours, theirs):
    a, b = lane(ours), lane(theirs)
    assert overlap_s(a, b) == overlap_s(b, a) == len(busy_seconds(ours) & busy_seconds(theirs))


@given(logs)
def test_a_lane_overlaps_itself_whenever_it_is_busy(busy):
    assert overlap_s(lane(busy), lane(busy)) == lane(busy).busy_s


def test_tokens_of_a_lane_add_up():
    log = LaneLog()
    assert (log.tokens, log.busy_s) == (0, 0)
    log.add(Interval(2, 3), Span(512, 1024))
    log.add(Interval(0, 1), Span(64, 128))
    assert (log.tokens, log.busy_s) == (576, 2)


def test_an_interval_does_not_end_before_it_starts():
    assert Interval(1.5, 2).seconds == 0.5
    assert Interval(1, 1).seconds == 0
    for stop in (0.5, float("nan")):
        with pytest.raises(ValueError, match="cannot end"):
            Interval(1, stop)


def test_a_report_is_plain_json_with_rounded_seconds():
    plain = REPORT.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert list(plain) == [each.name for each in msgspec.structs.fields(RestoreReport)]
    assert plain["compute_s"] == 0.5
    assert plain["expected_s"] == {"recompute": 1.0, "load": 1.2, "split": 0.6}
    assert plain["meetings"] == [1536]
    assert plain["late"] is False


def test_words_of_an_enumeration_become_plain_text():
    report = msgspec.structs.replace(
        REPORT, outcome=Outcome.RECOMPUTED, expected_s={Outcome.RESTORED: 1.0}
    )
    plain = report.as_dict()
    assert type(plain["outcome"]) is str
    assert [type(key) for key in plain["expected_s"]] == [str]


@pytest.mark.parametrize(
    ("outcome", "complete"),
    [("restored", True), ("recomputed", True), ("aborted", False), ("retracted", False)],
)
def test_only_some_outcomes_complete_the_prefix(outcome, complete):
    assert msgspec.structs.replace(REPORT, outcome=outcome).complete is complete
