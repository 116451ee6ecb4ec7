"""One streamed request to /generate, timed as a user sees it."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


@dataclass(slots=True)
class Answer:
    """What came back; times in seconds since the request was sent.

    ``error`` is a kind (``http 500``, ``timeout``, ``connect``, ``dropped``, ``garbage``,
    ``abort``), None where all went well. ``details`` is ``cached_tokens_details`` of SGLang's
    ``meta_info``, which is None where nothing was cached and missing on servers without it.
    """

    ttft_s: float | None = None
    ttlt_s: float | None = None
    first_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    error: str | None = None
    message: str | None = None

    def take(self, event: dict[str, Any], at_s: float) -> None:
        """Account for one event; SGLang's counts are cumulative."""
        if event.get("error") is not None:
            error = event["error"] if isinstance(event["error"], dict) else {}
            self.fail(f"http {error.get('code', 400)}", str(error.get("message", event["error"])))
            return
        meta = event["meta_info"]
        tokens = int(meta["completion_tokens"])
        if tokens > self.output_tokens:
            if self.ttft_s is None:
                self.ttft_s, self.first_tokens = at_s, tokens
            self.ttlt_s = at_s
        self.output_tokens = tokens
        self.prompt_tokens = int(meta["prompt_tokens"])
        self.cached_tokens = int(meta.get("cached_tokens") or 0)
        self.details = meta.get("cached_tokens_details") or {}
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            self.fail("abort", str(reason.get("message", "aborted by the server")))
        self.finished = self.finished or reason is not None

    def fail(self, kind: str, message: str) -> None:
        """Record an error; the first one counts."""
        if self.error is None:
            self.error, self.message = kind, " ".join(message.split())[:300]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first event, None where nothing followed it."""
        following = self.output_tokens - self.first_tokens
        if self.ttft_s is None or self.ttlt_s is None or following < 1:
            return None
        return (self.ttlt_s - self.ttft_s) / following


async def generate(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout_s: float
) -> Answer:
    """POST a body to ``url``/generate and read its stream; errors are in the answer, not raised."""
    answer = Answer()
    payload = msgspec.json.encode(body | {"stream": True})
    headers = {"Content-Type": "application/json"}
    start = time.perf_counter()
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.post(f"{url}/generate", data=payload, headers=headers) as response,
        ):
            if response.status != 200:
                body_text = await response.text(errors="replace")
                answer.fail(f"http {response.status}", _message(body_text))
                return answer
            async for data in _events(response):
                answer.take(msgspec.json.decode(data), time.perf_counter() - start)
    except TimeoutError:
        answer.fail("timeout", f"no complete answer in {timeout_s:g} s")
    except aiohttp.ClientConnectorError as error:
        answer.fail("connect", connection_problem(error))
    except aiohttp.ClientError as error:
        answer.fail("dropped", f"{type(error).__name__}: {error}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        answer.fail("garbage", f"not an SGLang event: {type(error).__name__}: {error}")
    if not answer.finished:
        answer.fail("dropped", "the stream ended before the answer was complete")
    return answer


def connection_problem(error: aiohttp.ClientError) -> str:
    """What the system says, such as "Connection refused", without aiohttp's frame around it."""
    cause = getattr(error, "os_error", None)
    if not isinstance(cause, OSError) or isinstance(cause, ssl.SSLError):
        return str(error)  # no number of the system's
    # asyncio replaces the text of a refusal by its own; a resolver's numbers are below zero.
    if cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return cause.strerror or str(error)


def _message(body: str) -> str:
    """What an error response says: SGLang's message, or the body where it has none."""
    try:
        said = msgspec.json.decode(body)
    except ValueError:
        return body
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return said if isinstance(said, str) else body


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event, up to the [DONE] that ends SGLang's streams."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            yield data
