"""Rows of a restore bench, from its rounds. Pure: what a figure means is defined here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from cacheflow_sgl.bench.requests import Run, SeenReport, max_logprob_difference, seconds_in
from cacheflow_sgl.bench.rounds import Measurement, Round
from cacheflow_sgl.bench.stats import Ratio, Spread
from cacheflow_sgl.core.bounds import meeting_point_bound

LEAST_LANE_RATE = 0.95
"""A run whose loads reach less than this part of the throttle says nothing about a balance."""

Interval = tuple[float, float]
T = TypeVar("T")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one balance. Times in seconds; None is what does not apply or was not reported.

    Ratios are medians of ratios paired by round, each with its 95% interval. What the lanes did is
    timed by the bench's own hooks in the server, not taken from the engine's report.

    Attributes:
        balance: (time to recompute the prefix) / (time to load it), as asked for.
        balance_reached: the same, measured in the rounds.
        ttft_s: time to first token over all rounds; `ttft_each_s` has them in order.
        bound_s: least time of any two-pointer restore with the lanes of the same round, and the
            suffix after it: the exact meeting point of that round's recompute chunks and the rate
            its load reached, plus the TTFT of the request where the prefix lay on the device.
        ratio_to_bound: TTFT / bound.
        ratio_to_best_single: TTFT / that of `best_single`, the single way (recompute or load) of
            the smaller median.
        restore_s: median time from the first forward or copy of the prefix to the end of the last.
        choice: how the restores were done; `split 14, load 1` where not all the same way.
        reason: why, in the engine's words, most frequent one. Of `load`: which of both loads it is.
        throttle_bytes_per_s: rate that the link was set to.
        lane_rate_reached: what the load of this measurement reached, as part of that.
        void: it reached too little, so the balance is not what it says.
        meet_tokens: median of the meeting point: first loaded token.
        outputs_equal: the tokens of every output are those of the control.
        max_abs_dlogprob: largest difference of a logprob from the control's.
        compute_busy, io_busy: median part of the restore in which the lane was busy.
        lane_overlap: median part of the less busy lane's time in which the other was busy too.
        compute_slowdown: seconds of its forwards / those of recompute for the same tokens.
        io_slowdown: seconds a byte of its copies / those of load.
        decode_tpot_s: median time per output token of the decodes beside the restore.
        decode_tokens_per_s: median throughput of all of them.
    """

    policy: str
    mode: str = "token"
    tier: str = "host"
    balance: float
    balance_reached: float
    batch: int = 1
    tp: int = 1
    pp: int = 1
    boundary: str | None = None
    prefix_tokens: int
    suffix_tokens: int
    ttft_s: Spread
    ttft_each_s: list[float]
    bound_s: float
    ratio_to_bound: float
    ratio_to_bound_interval: Interval
    best_single: str
    ratio_to_best_single: float
    ratio_to_best_single_interval: Interval
    restore_s: float
    choice: str
    reason: str
    throttle_bytes_per_s: float
    lane_rate_reached: float
    void: bool
    meet_tokens: float | None
    outputs_equal: bool
    max_abs_dlogprob: float
    compute_busy: float
    io_busy: float
    lane_overlap: float | None
    compute_slowdown: float | None
    io_slowdown: float | None
    decodes: int = 0
    decode_tpot_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_tpot_ratio_to_recompute: float | None = None
    decode_tpot_ratio_to_recompute_interval: Interval | None = None
    decode_tpot_ratio_to_load: float | None = None
    decode_tpot_ratio_to_load_interval: Interval | None = None


@dataclass(frozen=True)
class _Reference:
    """What the rows of one measurement are compared with.

    Attributes:
        load: variant that the `load` row is.
        best_single: variant of the better single way.
        bounds_s: of each round.
    """

    load: str
    best_single: str
    bounds_s: Sequence[float]


def rows_of(measurement: Measurement, policies: Sequence[str]) -> list[Row]:
    """One row for each of `policies`."""
    rounds = measurement.rounds
    loads = [variant for variant in ("sglang", "load") if variant in rounds[0].runs]
    load = min(loads, key=lambda variant: _median_ttft(rounds, variant))
    best_single = min(("recompute", load), key=lambda variant: _median_ttft(rounds, variant))
    bounds_s = [bound_s(each, load, measurement.case.prefix_bytes) for each in rounds]
    reference = _Reference(load, best_single, bounds_s)
    return [_row(measurement, policy, reference) for policy in policies]


def bound_s(measured: Round, load: str, prefix_bytes: int) -> float:
    """Least TTFT of any two-pointer restore with the lanes that a round measured.

    Args:
        measured: the round.
        load: its variant that shows what the link can do.
        prefix_bytes: KV of the prefix.
    """
    chunks = measured.runs["recompute"].chunks
    tokens = sum(chunk.span.tokens for chunk in chunks)
    loading = measured.runs[load]
    seconds_per_token = loading.link_s / loading.loaded_bytes * prefix_bytes / tokens
    lanes = meeting_point_bound([(c.span.tokens, c.seconds) for c in chunks], seconds_per_token)
    return lanes.seconds + measured.hit_ttft_s


def _row(measurement: Measurement, policy: str, reference: _Reference) -> Row:
    case, rounds, throttle = measurement.case, measurement.rounds, measurement.bytes_per_s
    variant = reference.load if policy == "load" else policy
    runs = _runs(rounds, variant)
    recomputes, loadings = _runs(rounds, "recompute"), _runs(rounds, reference.load)
    to_bound = Ratio.paired([run.ttft_s for run in runs], reference.bounds_s)
    to_best = _ttft_ratio(runs, _runs(rounds, reference.best_single))
    lane_rate = float(np.median([run.loaded_bytes / run.link_s for run in loadings]))
    outputs = [run.answer.generation for run in runs]
    choice, reason = _choice(runs, variant)
    return Row(
        policy=policy,
        balance=measurement.balance,
        balance_reached=balance_reached(measurement, reference.load),
        prefix_tokens=case.prefix_tokens,
        suffix_tokens=len(case.prompt) - case.prefix_tokens,
        ttft_s=Spread.of([run.ttft_s for run in runs]),
        ttft_each_s=[run.ttft_s for run in runs],
        bound_s=float(np.median(reference.bounds_s)),
        ratio_to_bound=to_bound.median,
        ratio_to_bound_interval=to_bound.interval,
        best_single=reference.best_single,
        ratio_to_best_single=to_best.median,
        ratio_to_best_single_interval=to_best.interval,
        restore_s=float(np.median([run.restore_s for run in runs])),
        choice=choice,
        reason=reason,
        throttle_bytes_per_s=throttle,
        lane_rate_reached=lane_rate / throttle,
        void=lane_rate < LEAST_LANE_RATE * throttle,
        meet_tokens=_median(_reports(runs), lambda report: next(iter(report.meetings), None)),
        outputs_equal=all(output.output_ids == case.control.output_ids for output in outputs),
        max_abs_dlogprob=max(max_logprob_difference(case.control, output) for output in outputs),
        compute_busy=float(np.median([run.compute_s / run.restore_s for run in runs])),
        io_busy=float(np.median([run.copying_s / run.restore_s for run in runs])),
        lane_overlap=_median(runs, lambda run: run.lane_overlap),
        compute_slowdown=_median(list(zip(runs, recomputes, strict=True)), _compute_slowdown),
        io_slowdown=_median(list(zip(runs, loadings, strict=True)), _io_slowdown),
        **_decode_figures(runs, recomputes, loadings),
    )


def balance_reached(measurement: Measurement, load: str) -> float:
    """Median of (seconds to recompute the prefix) / (seconds to load it) in the rounds."""
    prefix_bytes = measurement.case.prefix_bytes

    def balance(measured: Round) -> float:
        loading = measured.runs[load]
        load_s = loading.link_s / loading.loaded_bytes * prefix_bytes
        return measured.runs["recompute"].compute_s / load_s

    return float(np.median([balance(each) for each in measurement.rounds]))


def _decode_figures(
    runs: Sequence[Run], recomputes: Sequence[Run], loadings: Sequence[Run]
) -> dict[str, Any]:
    """Fields of a row that tell of the decodes beside its restores; none where there were none."""
    figures, beside_recompute, beside_load = (
        [run.decodes for run in of if run.decodes] for of in (runs, recomputes, loadings)
    )
    if not figures:
        return {}
    tpots_s = [each.tpot_s for each in figures]
    to_recompute = Ratio.paired(tpots_s, [each.tpot_s for each in beside_recompute])
    to_load = Ratio.paired(tpots_s, [each.tpot_s for each in beside_load])
    return {
        "decodes": figures[0].requests,
        "decode_tpot_s": float(np.median(tpots_s)),
        "decode_tokens_per_s": float(np.median([each.tokens_per_s for each in figures])),
        "decode_tpot_ratio_to_recompute": to_recompute.median,
        "decode_tpot_ratio_to_recompute_interval": to_recompute.interval,
        "decode_tpot_ratio_to_load": to_load.median,
        "decode_tpot_ratio_to_load_interval": to_load.interval,
    }


def _choice(runs: Sequence[Run], variant: str) -> tuple[str, str]:
    """The ways of the restores, and the most frequent reason."""
    if variant == "sglang":
        return "load", "SGLang's own load-back"
    if variant == "load":
        return "load", "our own load"
    reports = _reports(runs)
    ways = Counter(report.way for report in reports).most_common()
    if not ways:
        return variant, "as asked"
    choice = ways[0][0] if len(ways) == 1 else ", ".join(f"{way} {count}" for way, count in ways)
    return choice, Counter(report.reason for report in reports).most_common(1)[0][0]


def _runs(rounds: Sequence[Round], variant: str) -> list[Run]:
    return [each.runs[variant] for each in rounds]


def _reports(runs: Sequence[Run]) -> list[SeenReport]:
    return [run.answer.report for run in runs if run.answer.report is not None]


def _median_ttft(rounds: Sequence[Round], variant: str) -> float:
    return float(np.median([run.ttft_s for run in _runs(rounds, variant)]))


def _ttft_ratio(runs: Sequence[Run], references: Sequence[Run]) -> Ratio:
    return Ratio.paired([run.ttft_s for run in runs], [run.ttft_s for run in references])


def _median(items: Iterable[T], value: Callable[[T], float | None]) -> float | None:
    """Median of what the items that have a value have; None where none has."""
    values = [found for item in items if (found := value(item)) is not None]
    return float(np.median(values)) if values else None


def _compute_slowdown(pair: tuple[Run, Run]) -> float | None:
    run, recompute = pair
    if not run.chunks:
        return None
    return run.compute_s / sum(seconds_in(recompute.chunks, chunk.span) for chunk in run.chunks)


def _io_slowdown(pair: tuple[Run, Run]) -> float | None:
    run, loading = pair
    if not run.loads:
        return None
    alone = loading.copying_s / loading.loaded_bytes
    return run.copying_s / run.loaded_bytes / alone
