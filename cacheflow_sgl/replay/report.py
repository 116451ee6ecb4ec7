"""The report of a replay: typed, written as JSON, read back to compare runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cacheflow_sgl.files import write_atomically
from cacheflow_sgl.replay.client import Answer
from cacheflow_sgl.replay.errors import ReplayError
from cacheflow_sgl.replay.trace import Request


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was sent, how long it took, where its prompt's KV came from.

    Times in seconds; ``arrival_s`` (as replayed) and ``sent_s`` count from the start of the replay.
    ``late_s`` is how long it waited for a free session slot. The five token counts that follow
    ``prompt_tokens`` add up to it.
    """

    session: str
    turn: int
    arrival_s: float | None
    sent_s: float
    late_s: float
    ttft_s: float | None
    tpot_s: float | None
    ttlt_s: float | None
    output_tokens: int
    prompt_tokens: int
    device: int
    host: int
    storage: int
    cached_tier_unknown: int
    recomputed: int
    error: str | None = None
    message: str | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        answer: Answer,
        *,
        arrival_s: float | None,
        sent_s: float,
        late_s: float,
    ) -> RequestRecord:
        """The record of an answer (``cached_tokens_details`` counts tokens by tier)."""
        tiers = {t: int(answer.details.get(t) or 0) for t in ("device", "host", "storage")}
        known = sum(tiers.values())
        cached = max(answer.cached_tokens, known)
        return cls(
            session=request.session,
            turn=request.turn,
            arrival_s=arrival_s,
            sent_s=sent_s,
            late_s=late_s,
            ttft_s=answer.ttft_s,
            tpot_s=answer.tpot_s,
            ttlt_s=answer.ttlt_s,
            output_tokens=answer.output_tokens,
            prompt_tokens=answer.prompt_tokens,
            **tiers,
            cached_tier_unknown=cached - known,
            recomputed=answer.prompt_tokens - cached,
            error=answer.error,
            message=answer.message,
        )


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in seconds; None throughout where there was nothing to measure."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stats:
        """The distribution of the values that are there."""
        present = [value for value in values if value is not None]
        if not present:
            return cls()
        p50, p90, p95, p99 = (float(p) for p in np.percentile(present, [50, 90, 95, 99]))
        mean = float(np.mean(present))
        return cls(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=max(present))


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """All errors of one kind."""

    kind: str
    count: int
    first: str


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of the prompts came from, in tokens."""

    device: int = 0
    host: int = 0
    storage: int = 0
    cached_tier_unknown: int = 0
    recomputed: int = 0


TIERS = msgspec.structs.fields(Tokens)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A replay in figures. Times and token counts are over the requests that went well."""

    requests: int
    succeeded: int
    failed: int
    not_sent: int
    interrupted: bool
    broken_lines: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_s: Stats
    tpot_s: Stats
    ttlt_s: Stats
    tokens: Tokens
    errors: list[Errors]
    notes: list[str]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What was replayed against what, so that a figure can be reproduced."""

    trace: str
    format: str
    url: str
    started: str
    cacheflow_version: str
    python: str
    options: dict[str, Any]
    server: dict[str, Any]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as in the JSON file."""

    environment: Environment
    summary: Summary
    requests: list[RequestRecord]

    def write(self, path: str | Path) -> None:
        """Write JSON; the file is either the whole report or what was there before."""
        target = Path(path)
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        try:
            write_atomically(target, data)
        except OSError as error:
            raise ReplayError(f"{target}: cannot write the report: {error.strerror}") from None

    @classmethod
    def read(cls, path: str | Path) -> Report:
        """Read a report that `write` wrote; ReplayError where it is none."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise ReplayError(f"{path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ReplayError(f"{path}: not a replay report: {error}") from None


def summarize(
    records: Sequence[RequestRecord],
    *,
    planned: int,
    duration_s: float,
    interrupted: bool,
    broken_lines: int,
    notes: Sequence[str] = (),
) -> Summary:
    """The figures over the records of a replay of ``planned`` requests."""
    good = [record for record in records if record.error is None]
    output = sum(record.output_tokens for record in good)
    sums = {field.name: sum(getattr(r, field.name) for r in good) for field in TIERS}
    return Summary(
        requests=planned,
        succeeded=len(good),
        failed=len(records) - len(good),
        not_sent=planned - len(records),
        interrupted=interrupted,
        broken_lines=broken_lines,
        duration_s=duration_s,
        input_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=output,
        output_tokens_per_s=output / duration_s if duration_s > 0 else 0.0,
        ttft_s=Stats.of(record.ttft_s for record in good),
        tpot_s=Stats.of(record.tpot_s for record in good),
        ttlt_s=Stats.of(record.ttlt_s for record in good),
        tokens=Tokens(**sums),
        errors=_errors(records),
        notes=[*notes, *_observations(records)],
    )


def _errors(records: Iterable[RequestRecord]) -> list[Errors]:
    by_kind: dict[str, list[str]] = {}
    for record in records:
        if record.error is not None:
            by_kind.setdefault(record.error, []).append(record.message or "")
    return [Errors(kind=k, count=len(m), first=m[0]) for k, m in sorted(by_kind.items())]


def _observations(records: Sequence[RequestRecord]) -> list[str]:
    """What a reader of the figures should know about them."""
    notes = []
    if any(r.cached_tier_unknown for r in records):
        notes.append("the server does not say which tier some cached tokens came from")
    late = max((r.late_s for r in records if r.arrival_s is not None), default=0.0)
    if late > 1:
        notes.append(
            f"requests went out up to {late:.1f} s after their arrival time; "
            "more --concurrency keeps to the trace"
        )
    return notes
