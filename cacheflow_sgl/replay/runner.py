"""The replay itself: sessions side by side, the turns of each in order, at the trace's times."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import aiohttp

from cacheflow_sgl import __version__
from cacheflow_sgl.replay.client import Answer, generate
from cacheflow_sgl.replay.errors import ReplayError
from cacheflow_sgl.replay.prompts import Alphabet, BlockPrompt, RawPrompt
from cacheflow_sgl.replay.report import Environment, Report, RequestRecord, summarize
from cacheflow_sgl.replay.server import Server, TokenizeError
from cacheflow_sgl.replay.trace import Request, Session, Trace

_DEFAULT_BYTES_PER_TOKEN = 4.0  # where the server does not tokenize: what BPEs do on English
_MAX_EVENT_BYTES = 16 << 20  # an event repeats the whole text so far


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed.

    Raises ReplayError for an impossible value. ``arrival``: the trace's times, ``speed`` times
    as fast, or each request as soon as its session and a slot allow. ``concurrency``: sessions at
    the same time. ``scale``: of block traces. ``max_prompt_tokens`` clips a prompt at its end;
    ``max_new_tokens`` caps what the trace asks for. ``sessions`` and ``limit`` (requests) take the
    first ones. ``vocab_size`` is for servers that do not tokenize. ``timeout_s`` is per request.
    """

    arrival: Literal["original", "asap"] = "original"
    speed: float = 1.0
    concurrency: int = 8
    scale: float = 1.0
    shared_context_tokens: int = 0
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 16
    sessions: int | None = None
    limit: int | None = None
    seed: int = 0
    vocab_size: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("seed", "arrival") or value is None:
                continue
            may_be_zero = name == "shared_context_tokens"
            if value < 0 or (value == 0 and not may_be_zero):
                flag = f"--{name.removesuffix('_s').replace('_', '-')}"
                raise ReplayError(f"{flag} must be {'0 or more' if may_be_zero else 'positive'}")
        if self.arrival not in ("original", "asap"):
            raise ReplayError(f"--arrival must be original or asap, not {self.arrival!r}")


async def replay_async(
    trace: Trace,
    url: str,
    options: ReplayOptions | None = None,
    *,
    api_key: str | None = None,
    stop: asyncio.Event | None = None,
    on_start: Callable[[int], None] = lambda planned: None,
    on_record: Callable[[RequestRecord], None] = lambda record: None,
) -> Report:
    """Replay a trace against the server at ``url``.

    Errors of single requests are in the report. Setting ``stop`` ends the replay: requests in
    flight are dropped (the server aborts them) and count as not sent. ``on_start`` is told the
    number of requests, ``on_record`` each record. Raises ReplayError where it cannot start.
    """
    options = options or ReplayOptions()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        # A kept connection that the server closes just then would look like a dropped request.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        read_bufsize=_MAX_EVENT_BYTES,
    ) as http:
        server = Server(url, http)
        described = await server.describe()
        shaped, notes = await _shape(trace, options, server)
        notes += _too_long(shaped, described.get("max_req_input_len"))
        run = _Run(server, options, await _alphabet(shaped, options, server), on_record)
        planned = sum(1 for _ in shaped.requests())
        on_start(planned)
        started = datetime.now(UTC)
        interrupted = await _until_stopped(run.play(shaped), stop or asyncio.Event())
        return Report(
            environment=Environment(
                trace=trace.name,
                format=trace.format,
                url=server.url,
                started=started.isoformat(timespec="seconds"),
                cacheflow_version=__version__,
                python=platform.python_version(),
                options=asdict(options),
                server=described,
            ),
            summary=summarize(
                run.records,
                planned=planned,
                duration_s=run.now(),
                interrupted=interrupted,
                broken_lines=len(trace.broken),
                notes=notes,
            ),
            requests=run.records,
        )


async def _shape(trace: Trace, options: ReplayOptions, server: Server) -> tuple[Trace, list[str]]:
    """The trace as the options want it, and notes for the report.

    The shared context is made before sessions are selected, so it does not depend on how many.
    """
    notes: list[str] = []
    if options.scale != 1.0:
        trace = trace.scaled(options.scale)
    if options.shared_context_tokens:
        per_token, note = await _bytes_per_token(trace, server)
        notes += note
        context = trace.shared_context(round(options.shared_context_tokens * per_token))
        trace = trace.with_context(context)
    if options.max_prompt_tokens is not None:
        trace = trace.clipped(options.max_prompt_tokens)
    return trace.first(options.sessions, options.limit), notes


async def _bytes_per_token(trace: Trace, server: Server) -> tuple[float, list[str]]:
    sample = trace.shared_context(32 << 10)
    try:
        return len(sample.encode()) / len(await server.tokenize(sample, special=False)), []
    except (TokenizeError, ZeroDivisionError) as error:
        note = f"shared context sized at {_DEFAULT_BYTES_PER_TOKEN:g} bytes a token ({error})"
        return _DEFAULT_BYTES_PER_TOKEN, [note]


async def _alphabet(trace: Trace, options: ReplayOptions, server: Server) -> Alphabet | None:
    """Ids for the block prompts of a trace, None where it has none."""
    if not any(isinstance(request.prompt, BlockPrompt) for request in trace.requests()):
        return None
    if options.vocab_size is not None:
        return Alphabet.of_vocabulary(options.vocab_size)
    return await server.alphabet()


def _too_long(trace: Trace, limit: int | None) -> list[str]:
    lengths = [r.prompt.length for r in trace.requests() if isinstance(r.prompt, BlockPrompt)]
    over = sum(1 for length in lengths if limit is not None and length > limit)
    if not over:
        return []
    return [
        f"{over} prompts are longer than the {limit} tokens this server takes; "
        "--scale or --max-prompt-tokens makes them fit"
    ]


async def _until_stopped(work: Any, stop: asyncio.Event) -> bool:
    """Run to the end or to ``stop``, whichever is first; returns whether it was stopped."""
    running = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # a defect of ours must not look like a finished replay
            return False
        return True
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)


class _Run:
    """One pass over a trace: its clock, its session slots, the records so far."""

    def __init__(
        self,
        server: Server,
        options: ReplayOptions,
        alphabet: Alphabet | None,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self.records: list[RequestRecord] = []
        self._server = server
        self._options = options
        self._alphabet = alphabet
        self._on_record = on_record
        self._slots = asyncio.Semaphore(options.concurrency)
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the replay started."""
        return time.perf_counter() - self._start

    async def play(self, trace: Trace) -> None:
        """Start the sessions in order of arrival, each as its time comes and a slot is free."""
        sessions = sorted(trace.sessions, key=lambda s: self._arrival(s.requests[0]) or 0.0)
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for session in sessions:
                await self._wait_for(self._arrival(session.requests[0]))
                await self._slots.acquire()
                tasks.create_task(self._play_session(session))

    async def _play_session(self, session: Session) -> None:
        try:
            due = self._arrival(session.requests[0]) or 0.0
            for request in session.requests:
                arrival = self._arrival(request)
                await self._wait_for(arrival)
                await self._send(request, arrival, max(due, arrival or 0.0))
                due = self.now()
        finally:
            self._slots.release()

    async def _send(self, request: Request, arrival: float | None, due: float) -> None:
        try:
            body = await self._body(request)
        except TokenizeError as error:
            sent, answer = self.now(), Answer(error="tokenize", message=str(error))
        else:
            sent = self.now()
            answer = await generate(
                self._server.http, self._server.url, body, self._options.timeout_s
            )
        late = max(sent - due, 0.0)
        record = RequestRecord.of(request, answer, arrival_s=arrival, sent_s=sent, late_s=late)
        self._on_record(record)
        self.records.append(record)

    async def _body(self, request: Request) -> dict[str, Any]:
        """The request as /generate takes it; greedy, and as long as the trace says."""
        cap = self._options.max_new_tokens
        wanted = request.max_new_tokens or cap
        sampling = {"temperature": 0, "max_new_tokens": min(wanted, cap), "ignore_eos": True}
        return {**await self._prompt(request), "sampling_params": sampling}

    async def _prompt(self, request: Request) -> dict[str, Any]:
        prompt = request.prompt
        most = self._options.max_prompt_tokens
        if isinstance(prompt, BlockPrompt):
            assert self._alphabet is not None
            return {"input_ids": prompt.token_ids(self._alphabet, self._options.seed)}
        content = prompt.content if isinstance(prompt, RawPrompt) else prompt.text()
        if not isinstance(content, str):
            return {"input_ids": list(content[:most])}
        # A token is at least one byte, so only a text of more bytes can be too long.
        if most is not None and len(content.encode()) > most:
            ids = await self._server.tokenize(content, special=True)
            return {"input_ids": ids[:most]}
        return {"text": content}

    def _arrival(self, request: Request) -> float | None:
        """When the request is due in this replay, None for as soon as possible."""
        if request.arrival_s is None or self._options.arrival == "asap":
            return None
        return request.arrival_s / self._options.speed

    async def _wait_for(self, moment: float | None) -> None:
        if moment is not None:
            await asyncio.sleep(max(moment - self.now(), 0.0))
