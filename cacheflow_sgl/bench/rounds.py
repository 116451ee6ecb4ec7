"""Rounds of a restore bench: every variant once a round, alternating in one server."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cacheflow_sgl.bench import decodes
from cacheflow_sgl.bench.decodes import DecodeFigures
from cacheflow_sgl.bench.options import RestoreOptions
from cacheflow_sgl.bench.prompts import random_tokens
from cacheflow_sgl.bench.protocol import BenchError, Control, Log
from cacheflow_sgl.bench.requests import Answer, Run, ask, prefix_chunks
from cacheflow_sgl.client import Generation, SglangClient

_CALIBRATIONS = 3
_WARM_UPS = 3
_SLOW_LINK = 0.25
"""Below this balance a load takes so long that only one kind of it is measured."""
_LEARNERS = ("cacheflow", "cake", "split")
"""Variants that decide by rates the engine has learnt."""


@dataclass(frozen=True)
class Round:
    """Every variant once.

    Attributes:
        runs: by variant.
        hit_ttft_s: time to first token where the prefix lay on the device: what is left of a
            request when the restore takes no time.
    """

    runs: Mapping[str, Run]
    hit_ttft_s: float


@dataclass(frozen=True)
class Case:
    """One prefix length.

    Attributes:
        prefix_tokens: its length.
        prompt: prefix and suffix.
        control: the answer of the server when it had cached nothing.
        prefix_bytes: KV of the prefix on the device.
    """

    prefix_tokens: int
    prompt: Sequence[int]
    control: Generation
    prefix_bytes: int


@dataclass(frozen=True)
class Measurement:
    """All rounds of one prefix length at one balance, with the link throttled to a rate."""

    case: Case
    balance: float
    bytes_per_s: float
    rounds: Sequence[Round]


@dataclass(frozen=True)
class Sent:
    """A request that was answered: its variant, its name on the server, and what came back."""

    variant: str
    rid: str
    answer: Answer
    decodes: DecodeFigures | None = None


def planned_requests(options: RestoreOptions) -> int:
    """How many requests `Bench.measure` sends: the length of its progress."""
    balances = 0
    for balance in options.balances:
        variants = measured_variants(options.variants, balance)
        rounds = options.repeats * (len(variants) + 1)
        balances += _CALIBRATIONS + len(warm_up_order(variants)) + rounds
    return len(options.prefix_tokens) * (1 + 1 + balances)


def measured_variants(variants: Sequence[str], balance: float) -> list[str]:
    """What is measured at a balance: both kinds of load, but on a slow link our own alone."""
    return [each for each in variants if each != "sglang" or balance >= _SLOW_LINK]


def warm_up_order(variants: Sequence[str]) -> list[str]:
    """Runs that are not counted: every variant once, those that learn more often, at the end."""
    learners = [variant for variant in variants if variant in _LEARNERS][:1]
    return [*variants, *learners * (_WARM_UPS - 1)] if learners else [*variants]


def round_order(variants: Sequence[str], number: int) -> list[str]:
    """The order of a round: each variant comes at each place, and after different ones."""
    shift = number % len(variants)
    order = [*variants[shift:], *variants[:shift]]
    return order[::-1] if number // len(variants) % 2 else order


class Bench:
    """A bench on a running server that no one else uses.

    Between requests the device is evicted, so a prefix lies on the host only.

    Args:
        client: calls to the server.
        control: its throttle, eviction and log.
        options: what to measure.
        on_request: called after each request.
    """

    def __init__(
        self,
        client: SglangClient,
        control: Control,
        options: RestoreOptions,
        on_request: Callable[[], None],
    ) -> None:
        self._client = client
        self._control = control
        self._options = options
        self._on_request = on_request
        self._source = random.Random(options.seed)
        self._numbers = itertools.count()

    def measure(self) -> Iterator[Measurement]:
        """Measure every prefix length at every balance.

        Raises:
            BenchError: the server did not do what it was asked for; the message says what.
            ServerError: the server refused a request or broke off.
        """
        for prefix_tokens in self._options.prefix_tokens:
            case = self._prepare(prefix_tokens)
            for balance in self._options.balances:
                variants = measured_variants(self._options.variants, balance)
                # The machine drifts, so each balance is set by a fresh look at compute.
                rate = case.prefix_bytes * balance / self._recompute_s(case)
                self._control.set_rate(rate)
                for variant in warm_up_order(variants):
                    self._run(case, variant)
                rounds = [
                    self._round(case, round_order(variants, number))
                    for number in range(self._options.repeats)
                ]
                yield Measurement(case, balance, rate, rounds)

    def _prepare(self, prefix_tokens: int) -> Case:
        """Bring the prefix to the host, and learn what everything is measured against."""
        prompt = random_tokens(prefix_tokens + self._options.suffix_tokens, self._source)
        self._control.set_rate(None)
        cold = ask(self._client, prompt, rid=f"bench-{next(self._numbers)}-control").generation
        self._on_request()
        if cold.cached.total:
            raise BenchError("the server had cached a prompt that it never saw")
        self._control.evict_device()
        case = Case(prefix_tokens, prompt, cold, 0)
        return replace(case, prefix_bytes=self._run(case, "sglang").loaded_bytes)

    def _recompute_s(self, case: Case) -> float:
        """Seconds of forwards over the prefix, now."""
        recomputes = [self._run(case, "recompute") for _ in range(_CALIBRATIONS)]
        return float(np.median([run.compute_s for run in recomputes]))

    def _round(self, case: Case, order: Sequence[str]) -> Round:
        runs: dict[str, Run] = {}
        hit_ttft_s = 0.0
        for variant in order:
            sent = self._send(case, variant)
            if not runs:
                hit_ttft_s = self._hit(case)
            runs[variant] = self._seen(case, sent)
        return Round(runs, hit_ttft_s)

    def _run(self, case: Case, variant: str) -> Run:
        return self._seen(case, self._send(case, variant))

    def _hit(self, case: Case) -> float:
        """Ask again for what is on the device now; seconds to the first token."""
        answer = self._send(case, "sglang").answer
        if answer.generation.cached.device != case.prefix_tokens:
            raise BenchError(
                f"the device kept {answer.generation.cached.device} of {case.prefix_tokens} "
                "prefix tokens after a restore"
            )
        return answer.ttft_s

    def _send(self, case: Case, variant: str) -> Sent:
        rid = f"bench-{next(self._numbers)}-{variant}"
        count = self._options.decodes
        figures = None
        if count:
            with decodes.beside(self._client, count, self._source) as running:
                answer = ask(self._client, case.prompt, rid=rid, policy=variant)
                figures = running.figures(answer.sent_s, answer.first_token_s)
        else:
            answer = ask(self._client, case.prompt, rid=rid, policy=variant)
        self._on_request()
        return Sent(variant, rid, answer, figures)

    def _seen(self, case: Case, sent: Sent) -> Run:
        """Evict the device, and read what the server logged of a request."""
        self._control.evict_device()
        run = read_run(sent, self._control.new_log(), case.prefix_tokens)
        check_run(sent.variant, run, case.prefix_tokens)
        return run


def read_run(sent: Sent, log: Log, prefix_tokens: int) -> Run:
    """What the log says of a request, which was the only one that restored."""
    answer = sent.answer
    chunks = prefix_chunks(log, sent.rid, prefix_tokens)
    loads = [load for load in log.loads if answer.sent_s <= load.at_s < answer.first_token_s]
    return Run(answer, chunks, tuple(loads), sent.decodes)


def check_run(variant: str, run: Run, prefix_tokens: int) -> None:
    """`BenchError` unless the server restored the whole prefix, and in the way asked for."""
    report, cached = run.answer.report, run.answer.generation.cached
    if variant == "recompute":
        computed = sum(chunk.span.tokens for chunk in run.chunks)
        if computed != prefix_tokens:
            raise BenchError(
                f"asked to recompute {prefix_tokens} tokens, the server computed {computed}: "
                "does its plugin restore?"
            )
    elif variant == "sglang":
        if cached.total != prefix_tokens or not run.loads:
            raise BenchError(
                f"SGLang found {cached.total} of {prefix_tokens} prefix tokens on the host"
            )
    elif report is None:
        raise BenchError(f"no report came with policy {variant}: does the server's plugin restore?")
    elif (report.start, report.stop) not in ((0, prefix_tokens), (None, None)):
        raise BenchError(
            f"policy {variant} restored [{report.start}, {report.stop}) of {prefix_tokens} tokens"
        )
