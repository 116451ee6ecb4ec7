"""Requests that decode beside a restore, and what the restore does to them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cacheflow_sgl.bench.prompts import random_tokens
from cacheflow_sgl.bench.protocol import BenchError
from cacheflow_sgl.client import ServerError, SglangClient

DECODE_TOKENS = 4096
"""Tokens of one decoding request: more than it can decode during any restore."""
_PROMPT_TOKENS = 32
_RUNNING_TOKENS = 4  # by then all of them decode in one batch
_WAIT_S = 60.0


@dataclass(frozen=True)
class DecodeFigures:
    """What decodes did during a restore.

    Attributes:
        requests: how many decoded.
        tpot_s: mean seconds from one token of a request to its next.
    """

    requests: int
    tpot_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests together."""
        return self.requests / self.tpot_s


@dataclass
class _Decoding:
    """One decoding request: the times at which its tokens came, in seconds of `perf_counter`."""

    times: list[float] = field(default_factory=list)
    over: bool = False
    error: ServerError | None = None


class Decodes:
    """Running decodes. Use `beside`, which starts and ends them."""

    def __init__(self, client: SglangClient, prompts: Sequence[Sequence[int]]) -> None:
        self._client = client
        self._decodings = [_Decoding() for _ in prompts]
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._decode, args=(prompt, decoding), daemon=True)
            for prompt, decoding in zip(prompts, self._decodings, strict=True)
        ]

    def start(self) -> None:
        """Start them; all decode when this returns."""
        for thread in self._threads:
            thread.start()
        self._wait_for_tokens([_RUNNING_TOKENS] * len(self._decodings))

    def figures(self, start_s: float, end_s: float) -> DecodeFigures:
        """Over the gaps between tokens that overlap [start_s, end_s); waits for the last ones."""
        with self._changed:
            counts = [len(decoding.times) for decoding in self._decodings]
        self._wait_for_tokens([count + 1 for count in counts])
        gaps = [gaps_during(each.times, start_s, end_s) for each in self._decodings]
        tpot_s = float(np.mean([gap for each in gaps for gap in each]))
        return DecodeFigures(len(self._decodings), tpot_s)

    def stop(self) -> None:
        """End them."""
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def _decode(self, prompt: Sequence[int], decoding: _Decoding) -> None:
        try:
            with self._client.stream(prompt, max_new_tokens=DECODE_TOKENS - len(prompt)) as stream:
                for event in stream:
                    with self._changed:
                        fresh = event.tokens - len(decoding.times)
                        decoding.times.extend([event.at_s] * fresh)
                        self._changed.notify_all()
                    if self._stopping:
                        return
        except ServerError as error:
            decoding.error = error
        finally:
            with self._changed:
                decoding.over = True
                self._changed.notify_all()

    def _wait_for_tokens(self, counts: Sequence[int]) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: self._over or self._have(counts), _WAIT_S)
        if self._over or not reached:
            error = next((each.error for each in self._decodings if each.error), None)
            raise BenchError(f"the decodes ended before the restore: {error or 'out of tokens'}")

    def _have(self, counts: Sequence[int]) -> bool:
        return all(
            len(decoding.times) >= count
            for decoding, count in zip(self._decodings, counts, strict=True)
        )

    @property
    def _over(self) -> bool:
        return any(decoding.over for decoding in self._decodings)


@contextmanager
def beside(client: SglangClient, count: int, source: random.Random) -> Iterator[Decodes]:
    """While open, `count` requests decode; their prompts come from `source`."""
    decodes = Decodes(client, [random_tokens(_PROMPT_TOKENS, source) for _ in range(count)])
    try:
        decodes.start()
        yield decodes
    finally:
        decodes.stop()


def gaps_during(times: Sequence[float], start_s: float, end_s: float) -> list[float]:
    """Seconds between successive times, of those pairs that overlap [start_s, end_s)."""
    return [
        after - before for before, after in pairwise(times) if after > start_s and before < end_s
    ]
