"""One measured request, and what was seen of it at the client and in the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from cacheflow_sgl.bench.decodes import DecodeFigures
from cacheflow_sgl.bench.protocol import BenchError, Load, Log
from cacheflow_sgl.client import Generation, SglangClient, StreamEvent
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.report import Interval, LaneLog, overlap_s

OUTPUT_TOKENS = 4
"""Output tokens of a measured request: they are compared with the control's."""
_REPORT = "cacheflow_restore"


class SeenReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the bench reads of the engine's report of a restore; tokens.

    Its times the bench takes itself. SGLang's own load-back is reported without a span.
    """

    way: str
    reason: str
    start: int | None = None
    stop: int | None = None
    meetings: list[int] = []


@dataclass(frozen=True)
class Chunk:
    """A chunk of a prefix that was computed: which tokens, and when."""

    span: Span
    interval: Interval

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.interval.seconds


@dataclass(frozen=True)
class Answer:
    """A request as the client saw it.

    Attributes:
        sent_s: when it was sent, in seconds of `time.perf_counter`.
        ttft_s: seconds from then to its first token.
        generation: the whole answer.
        report: the engine's report, None where the answer carries none.
    """

    sent_s: float
    ttft_s: float
    generation: Generation
    report: SeenReport | None

    @property
    def first_token_s(self) -> float:
        """When its first token came."""
        return self.sent_s + self.ttft_s


@dataclass(frozen=True)
class Run:
    """One measured request of one variant.

    Attributes:
        answer: what the client saw.
        chunks: what was computed of the prefix, front to back.
        loads: the copies from host to device until the first token.
        decodes: what the decodes beside it did, None where there were none.
    """

    answer: Answer
    chunks: tuple[Chunk, ...]
    loads: tuple[Load, ...]
    decodes: DecodeFigures | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.answer.ttft_s

    @property
    def compute_s(self) -> float:
        """Seconds of forwards over the prefix."""
        return sum(chunk.seconds for chunk in self.chunks)

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were copied to the device."""
        return sum(load.nbytes for load in self.loads)

    @property
    def copying_s(self) -> float:
        """Seconds spent in copies."""
        return sum(load.seconds for load in self.loads)

    @property
    def link_s(self) -> float:
        """Seconds from the start of the first copy to the end of the last."""
        return _extent_s([load.interval for load in self.loads])

    @property
    def restore_s(self) -> float:
        """Seconds from the start of the first forward or copy of the prefix to the end of the last.

        `ValueError` where there was none, as in a hit.
        """
        intervals = [chunk.interval for chunk in self.chunks]
        return _extent_s([*intervals, *(load.interval for load in self.loads)])

    @property
    def lane_overlap(self) -> float | None:
        """Part of the less busy lane's time in which the other was busy too; None for one lane."""
        compute = _lane(chunk.interval for chunk in self.chunks)
        io = _lane(load.interval for load in self.loads)
        if not compute.busy or not io.busy:
            return None
        return overlap_s(compute, io) / min(compute.busy_s, io.busy_s)


def _lane(intervals: Iterable[Interval]) -> LaneLog:
    return LaneLog([(interval, Span(0, 0)) for interval in intervals])


def _extent_s(intervals: Sequence[Interval]) -> float:
    return max(each.stop_s for each in intervals) - min(each.start_s for each in intervals)


def ask(
    client: SglangClient, prompt: Sequence[int], *, rid: str, policy: str | None = None
) -> Answer:
    """Send a request, under a restore policy or the server's own, and read its answer.

    Raises:
        ServerError: the server refused it or broke off.
    """
    params = {_REPORT: policy} if policy else None
    with client.stream(
        prompt, max_new_tokens=OUTPUT_TOKENS, logprobs=True, rid=rid, custom_params=params
    ) as stream:
        events = list(stream)
    return read_answer(stream.sent_s, events)


def read_answer(sent_s: float, events: Sequence[StreamEvent]) -> Answer:
    """The answer of a stream that has ended; `BenchError` where it holds no token."""
    if not events or not events[-1].tokens:
        raise BenchError("the server answered without a token")
    first = next(event for event in events if event.tokens)
    generation = Generation.from_answer(events[-1].answer)
    if generation.finish_reason == "abort":
        raise BenchError("the server aborted a request")
    return Answer(sent_s, first.at_s - sent_s, generation, _report(events[-1].answer))


def prefix_chunks(log: Log, rid: str, prefix_tokens: int) -> tuple[Chunk, ...]:
    """What was computed of the prefix for request `rid`, in order.

    A forward that goes on behind the prefix counts with its share of the time.
    """
    chunks = []
    for forward in log.forwards:
        for part in forward.parts:
            span = Span(part.start, max(part.start, min(part.start + part.rows, prefix_tokens)))
            if part.rid == rid and span.tokens:
                share = span.tokens / sum(each.rows for each in forward.parts)
                stop_s = forward.at_s + share * forward.seconds
                chunks.append(Chunk(span, Interval(forward.at_s, stop_s)))
    return tuple(chunks)


def seconds_in(chunks: Sequence[Chunk], span: Span) -> float:
    """Seconds of `span` in `chunks`, which lie front to back from token 0."""
    tokens = [0, *(chunk.span.stop for chunk in chunks)]
    seconds = [0.0, *accumulate(chunk.seconds for chunk in chunks)]
    return float(np.interp(span.stop, tokens, seconds) - np.interp(span.start, tokens, seconds))


def max_logprob_difference(control: Generation, subject: Generation) -> float:
    """Largest difference of a logprob up to and with the first token that differs."""
    largest = 0.0
    pairs = zip(
        control.output_ids, subject.output_ids, control.logprobs, subject.logprobs, strict=True
    )
    for token, other, logprob, other_logprob in pairs:
        largest = max(largest, abs(logprob - other_logprob))
        if token != other:
            break  # from here on the two continue different texts
    return largest


def _report(answer: dict[str, Any]) -> SeenReport | None:
    reports = answer["meta_info"].get(_REPORT) or ()
    found = next((report for report in reports if report), None)
    return msgspec.convert(found, SeenReport) if found else None
