"""What is read of a request, from its answer and from the server's log."""

from __future__ import annotations

from typing import Any

import pytest

from cacheflow_sgl.bench.protocol import BenchError, Forward, Load, Log, Part
from cacheflow_sgl.bench.requests import (
    Answer,
    Chunk,
    Run,
    max_logprob_difference,
    prefix_chunks,
    read_answer,
    seconds_in,
)
from cacheflow_sgl.bench.rounds import Sent, read_run
from cacheflow_sgl.client import CachedTokens, Generation, StreamEvent
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.report import Interval


def answer(tokens: int, reports: Any = None, finish: str = "length") -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": [7] * tokens,
        "meta_info": {
            "prompt_tokens": 5,
            "completion_tokens": tokens,
            "e2e_latency": 1.0,
            "finish_reason": {"type": finish},
            "cacheflow_restore": reports,
        },
    }


def chunk(start: int, stop: int, start_s: float, stop_s: float) -> Chunk:
    return Chunk(Span(start, stop), Interval(start_s, stop_s))


def generation(ids: list[int], logprobs: list[float]) -> Generation:
    return Generation("", tuple(ids), tuple(logprobs), 5, CachedTokens(), "length", 1.0)


ANSWER = Answer(10.0, 2.0, generation([7], [-1.0]), None)


def test_the_first_token_counts_not_the_first_event():
    events = [
        StreamEvent(10.5, answer(0)),
        StreamEvent(11.0, answer(2)),
        StreamEvent(15.0, answer(4)),
    ]
    got = read_answer(10.0, events)
    assert (got.ttft_s, got.first_token_s, got.generation.output_ids) == (1.0, 11.0, (7,) * 4)
    assert got.report is None


@pytest.mark.parametrize("padding", [[], [None, None]])
def test_a_report_is_found_among_what_came_with_tokens(padding: list[None]):
    told = {"way": "split", "reason": "saves 40%", "start": 0, "stop": 64, "meetings": [32], "x": 1}
    report = read_answer(0.0, [StreamEvent(1.0, answer(1, [*padding, told]))]).report
    assert report is not None
    assert (report.way, report.reason, report.stop, report.meetings) == (
        "split",
        "saves 40%",
        64,
        [32],
    )


def test_sglangs_own_load_needs_no_span():
    told = {"policy": "sglang", "way": "load", "reason": "asked for"}
    report = read_answer(0.0, [StreamEvent(1.0, answer(1, [told]))]).report
    assert report is not None
    assert (report.start, report.stop, report.meetings) == (None, None, [])


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "without a token"),
        ([StreamEvent(1.0, answer(0))], "without a token"),
        ([StreamEvent(1.0, answer(1, finish="abort"))], "aborted"),
    ],
)
def test_an_answer_without_a_result_is_an_error(events: list[StreamEvent], message: str):
    with pytest.raises(BenchError, match=message):
        read_answer(0.0, events)


def test_only_the_prefix_of_the_request_counts():
    log = Log.of(
        [
            Forward([Part("me", 0, 512)], 1.0, 0.5),
            Forward([Part("other", 0, 512)], 1.5, 0.5),
            Forward([Part("me", 512, 512)], 2.0, 0.8),
            Forward([Part("me", 1024, 64)], 3.0, 0.1),
        ]
    )
    assert prefix_chunks(log, "me", 768) == (
        chunk(0, 512, 1.0, 1.5),
        chunk(512, 768, 2.0, 2.4),  # half of the forward's rows, half of its time
    )


def test_a_forward_shared_with_another_request_counts_by_its_rows():
    log = Log.of([Forward([Part("other", 0, 300), Part("me", 0, 100)], 1.0, 0.5)])
    assert prefix_chunks(log, "me", 512) == (chunk(0, 100, 1.0, 1.125),)


def test_loads_before_and_after_a_request_are_not_its_own():
    loads = [Load(1, 9.0, 0.1), Load(2, 10.0, 0.1), Load(4, 11.9, 0.1), Load(8, 12.0, 0.1)]
    run = read_run(Sent("load", "me", ANSWER), Log.of(loads), 64)
    assert run.loaded_bytes == 2 + 4


def test_seconds_of_any_span_of_measured_chunks():
    chunks = [chunk(0, 512, 0.0, 1.0), chunk(512, 1024, 5.0, 8.0)]
    assert seconds_in(chunks, Span(0, 1024)) == pytest.approx(4)
    assert seconds_in(chunks, Span(256, 768)) == pytest.approx(0.5 + 1.5)
    assert seconds_in(chunks, Span(600, 600)) == 0


def test_the_extent_of_the_lanes_has_their_gaps_the_busy_time_has_not():
    run = Run(
        ANSWER,
        chunks=(chunk(0, 64, 1.0, 2.0), chunk(64, 128, 2.5, 3.0)),
        loads=(Load(100, 1.5, 1.0), Load(100, 3.0, 1.0)),
    )
    assert (run.restore_s, run.compute_s, run.link_s, run.copying_s) == (3.0, 1.5, 2.5, 2.0)
    assert run.loaded_bytes == 200
    assert run.lane_overlap == pytest.approx(0.5 / 1.5)
    assert Run(ANSWER, run.chunks, ()).lane_overlap is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "difference"),
    [
        ([7, 8, 9], [-1.0, -2.0, -3.0], 0.0),
        ([7, 8, 9], [-1.0, -2.5, -3.0], 0.5),
        ([7, 1, 9], [-1.0, -2.25, -99.0], 0.25),  # after another token all is different
    ],
)
def test_logprobs_differ_up_to_the_first_other_token(
    ids: list[int], logprobs: list[float], difference: float
):
    control = generation([7, 8, 9], [-1.0, -2.0, -3.0])
    assert max_logprob_difference(control, generation(ids, logprobs)) == difference
