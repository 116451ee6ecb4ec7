"""One measured request, and what was seen of it at the client and in the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from cacheflow_sgl.bench.decodes import DecodeFigures
from cacheflow_sgl.bench.protocol import BenchError, Load, Log
from cacheflow_sgl.client import Generation, SglangClient, StreamEvent

OUTPUT_TOKENS = 4
"""Output tokens of a measured request: they are compared with the control's."""
_REPORT = "cacheflow_restore"


class SeenReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the bench reads of the engine's report of a restore; tokens, bytes and seconds.

    SGLang's own load-back reports how it was chosen and no figures.
    """

    way: str
    reason: str
    start: int | None = None
    stop: int | None = None
    meetings: list[int] = []
    loaded_tokens: int | None = None
    compute_s: float | None = None
    io_s: float | None = None
    overlap_s: float | None = None
    restore_s: float | None = None


@dataclass(frozen=True)
class ChunkTime:
    """A chunk of a prefix that was computed: tokens [start, start + rows) in `seconds`."""

    start: int
    rows: int
    seconds: float


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
    chunks: tuple[ChunkTime, ...]
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
    def link_busy_s(self) -> float:
        """Seconds spent in copies."""
        return sum(load.seconds for load in self.loads)

    @property
    def link_s(self) -> float:
        """Seconds from the start of the first copy to the end of the last."""
        return max(load.end_s for load in self.loads) - min(load.at_s for load in self.loads)


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


def prefix_chunks(log: Log, rid: str, prefix_tokens: int) -> tuple[ChunkTime, ...]:
    """What was computed of the prefix for request `rid`, in order.

    A forward that goes on behind the prefix counts with its share of the time.
    """
    chunks = []
    for forward in log.forwards:
        for part in forward.parts:
            rows = min(part.start + part.rows, prefix_tokens) - part.start
            if part.rid == rid and rows > 0:
                share = rows / sum(each.rows for each in forward.parts)
                chunks.append(ChunkTime(part.start, rows, forward.seconds * share))
    return tuple(chunks)


def seconds_in(chunks: Sequence[ChunkTime], start: int, stop: int) -> float:
    """Seconds that `chunks`, which lie front to back from token 0, take for [start, stop)."""
    tokens = [0, *accumulate(chunk.rows for chunk in chunks)]
    seconds = [0.0, *accumulate(chunk.seconds for chunk in chunks)]
    return float(np.interp(stop, tokens, seconds) - np.interp(start, tokens, seconds))


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
