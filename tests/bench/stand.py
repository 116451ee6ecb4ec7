"""A server without a model: it answers by a clock of its own, exactly as fast as it is told.

Forwards of a chunk take a base and a time per row, that grows with the context; loads go at the
rate that the control sets. What it does under each policy is the ideal of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cacheflow_sgl.bench.protocol import Forward, Load, Log, Part
from cacheflow_sgl.client import StreamEvent

BYTES_PER_TOKEN = 100
PAGE = 64
CHUNK = 512
OVERHEAD_S = 0.01
SUFFIX_S = 0.02


@dataclass
class AnsweredStream:
    """A stream whose events are known."""

    sent_s: float
    events: list[StreamEvent]

    def __iter__(self) -> Iterator[StreamEvent]:
        return iter(self.events)


@dataclass
class Stand:
    """Both ends at once: what the bench asks of a client, and of a control.

    Attributes:
        now_s: its clock, shared by all times it gives.
        row_s: seconds a row of a forward.
        drift: factor on `row_s` after each request.
        link_share: part of the throttle that loads reach.
        extra_s: by policy, what its requests take longer.
        reports: whether restores are reported.
        lost_tokens: tokens of the prefix that its host has lost.
        wrong_policy: under which the output is another one.
    """

    now_s: float = 100.0
    row_s: float = 0.001
    drift: float = 1.0
    link_share: float = 1.0
    extra_s: dict[str, float] = field(default_factory=dict)
    reports: bool = True
    lost_tokens: int = 0
    wrong_policy: str | None = None
    rate: float | None = None
    asked: list[str] = field(default_factory=list)
    host: list[Sequence[int]] = field(default_factory=list)
    device: list[Sequence[int]] = field(default_factory=list)
    log: list[Forward | Load] = field(default_factory=list)

    # -- the control

    def set_rate(self, bytes_per_s: float | None) -> None:
        self.rate = bytes_per_s

    def evict_device(self) -> None:
        self.device.clear()

    def new_log(self) -> Log:
        log, self.log = Log.of(self.log), []
        return log

    # -- the client

    @contextmanager
    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        logprobs: bool,
        rid: str,
        custom_params: dict[str, str] | None,
    ) -> Iterator[AnsweredStream]:
        policy = (custom_params or {}).get("cacheflow_restore", "none")
        self.asked.append(policy)
        sent_s = self.now_s
        prefix = (len(prompt) - 1) // PAGE * PAGE
        on_device, on_host = prompt in self.device, prompt in self.host
        meeting = 0 if on_device or on_host else prefix
        self.now_s += OVERHEAD_S + self.extra_s.get(policy, 0.0)
        if on_host and not on_device:
            meeting = self.restore(rid, prefix, policy)
        elif not on_device:
            self.compute(rid, 0, prefix)
        self.forward(rid, prefix, len(prompt) - prefix, SUFFIX_S)
        self.host.append(prompt)
        self.device.append(prompt)
        cached = {
            "device": prefix if on_device else 0,
            "host": 0 if on_device else max(0, prefix - meeting - self.lost_tokens),
        }
        report = {"way": self.way(policy), "reason": "told", "start": 0, "stop": prefix}
        report["meetings"] = [meeting]
        answer: dict[str, Any] = {
            "text": "",
            "output_ids": [7, 8 if policy == self.wrong_policy else 9],
            "meta_info": {
                "prompt_tokens": len(prompt),
                "completion_tokens": 2,
                "e2e_latency": self.now_s - sent_s,
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-0.5, 7, None], [-1.0, 9, None]],
                "cached_tokens_details": cached,
                "cacheflow_restore": [report] if self.reports and on_host else [],
            },
        }
        events = [StreamEvent(self.now_s, answer), StreamEvent(self.now_s + 1, answer)]
        self.now_s += 2
        self.row_s *= self.drift
        yield AnsweredStream(sent_s, events)

    # -- inside

    @staticmethod
    def way(policy: str) -> str:
        ways = {"recompute": "recompute", "load": "load", "sglang": "load"}
        return ways.get(policy, "split")

    def restore(self, rid: str, prefix: int, policy: str) -> int:
        """Do it, and say where the pointers met."""
        meeting = {"recompute": prefix, "load": 0, "split": prefix // 2}[self.way(policy)]
        start_s = self.now_s
        if meeting < prefix:
            self.load(prefix - meeting)
        loaded_s, self.now_s = self.now_s, start_s
        self.compute(rid, 0, meeting)
        self.now_s = max(self.now_s, loaded_s)
        return meeting

    def load(self, tokens: int) -> None:
        nbytes = tokens * BYTES_PER_TOKEN
        seconds = nbytes / (self.rate * self.link_share) if self.rate else 0.01
        self.log.append(Load(nbytes, self.now_s, seconds))
        self.now_s += seconds

    def compute(self, rid: str, start: int, stop: int) -> None:
        for at in range(start, stop, CHUNK):
            rows = min(CHUNK, stop - at)
            self.forward(rid, at, rows, rows * self.row_s)

    def forward(self, rid: str, start: int, rows: int, seconds: float) -> None:
        self.log.append(Forward([Part(rid, start, rows)], self.now_s, seconds))
        self.now_s += seconds
