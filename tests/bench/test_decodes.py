"""Decodes beside a restore, on streams that the test feeds."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from cacheflow_sgl.bench.decodes import DecodeFigures, beside, gaps_during
from cacheflow_sgl.bench.protocol import BenchError
from cacheflow_sgl.client import ServerError, StreamEvent


class Fed:
    """A stream of what is put into it: (time, tokens so far), an error, or None at its end.

    Between these it repeats the last event, so that a client that wants to leave wakes up.
    """

    def __init__(self) -> None:
        self.feed: queue.Queue[tuple[float, int] | ServerError | None] = queue.Queue()
        self.closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()

    def __iter__(self) -> Iterator[StreamEvent]:
        item: tuple[float, int] | ServerError | None = (0.0, 0)
        while item is not None:
            if isinstance(item, ServerError):
                raise item
            yield StreamEvent(item[0], {"meta_info": {"completion_tokens": item[1]}})
            with suppress(queue.Empty):
                item = self.feed.get(timeout=0.02)


@dataclass
class Client:
    streams: list[Fed] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)

    def stream(self, prompt: list[int], *, max_new_tokens: int) -> Fed:
        assert len(prompt) + max_new_tokens == 4096
        self.prompts.append(prompt)
        return self.streams[len(self.prompts) - 1]


def client(*starts: list[tuple[float, int] | ServerError | None]) -> Client:
    streams = [Fed() for _ in starts]
    for stream, items in zip(streams, starts, strict=True):
        for item in items:
            stream.feed.put(item)
    return Client(streams)


def test_gaps_that_overlap_a_time_count_whole():
    times = [1.0, 2.0, 3.0, 7.0, 8.0, 9.0]
    assert gaps_during(times, 2.5, 7.5) == [1.0, 4.0, 1.0]
    assert gaps_during(times, 3.0, 7.0) == [4.0]
    assert gaps_during(times, 4.0, 5.0) == [4.0]


def test_figures_are_over_the_gaps_of_all_decodes():
    decoding = client([(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4)], [(0.0, 1), (3.0, 4)])
    with beside(decoding, 2, random.Random(0)) as running:  # type: ignore[arg-type]
        feeding = threading.Timer(0.05, lambda: [s.feed.put((7.0, 5)) for s in decoding.streams])
        feeding.start()
        figures = running.figures(3.5, 6.0)
        feeding.join()
    assert figures == DecodeFigures(requests=2, tpot_s=4.0)
    assert figures.tokens_per_s == 0.5
    assert all(stream.closed.is_set() for stream in decoding.streams)
    assert decoding.prompts[0] != decoding.prompts[1]


def test_tokens_that_come_together_are_as_many_gaps():
    decoding = client([(0.0, 4), (6.0, 7)])
    with beside(decoding, 1, random.Random(0)) as running:  # type: ignore[arg-type]
        feeding = threading.Timer(0.05, lambda: decoding.streams[0].feed.put((7.0, 8)))
        feeding.start()
        figures = running.figures(1.0, 5.0)
        feeding.join()
    assert figures.tpot_s == 6.0


@pytest.mark.parametrize(
    ("end", "message"),
    [(None, "out of tokens"), (ServerError("the server is gone"), "the server is gone")],
)
def test_decodes_that_end_are_an_error(end: ServerError | None, message: str):
    decoding = client([(0.0, 4)], [(0.0, 2), end])
    with (
        pytest.raises(BenchError, match=message),
        beside(decoding, 2, random.Random(0)),  # type: ignore[arg-type]
    ):
        raise AssertionError("the decodes do not run")
