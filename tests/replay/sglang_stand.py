"""An HTTP server that answers as SGLang 0.5.23 does, and misbehaves when a prompt asks for it.

A token is one byte of text (or one id). What a prompt contains decides how it is answered:
``%slow`` waits until the stand is told to go on, ``%reject`` streams an error event, ``%500``
answers HTTP 500, ``%drop`` closes the connection, ``%short`` ends the stream early, ``%garbage``
streams no JSON, ``%odd`` streams JSON without meta_info, ``%abort`` finishes as aborted.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web


class SglangStand:
    """The server, in a thread of its own; ``bodies`` and ``events`` tell what it saw."""

    def __init__(
        self, *, tokenizes: bool = True, tiers: bool = True, key: str | None = None
    ) -> None:
        self.tokenizes = tokenizes
        self.tiers = tiers
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.events: list[tuple[str, str]] = []  # ("start" | "end", text of the prompt)
        self.seen: set[Any] = set()
        self.slow_started = threading.Event()
        self.url = ""
        self._cancelled = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._release = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> SglangStand:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=10)
        return self

    def __exit__(self, *args: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def go_on(self) -> None:
        """Let ``%slow`` prompts be answered."""
        self._loop.call_soon_threadsafe(self._release.set)

    def close(self) -> None:
        """Stop listening, as a server that is gone."""
        if not self._runner.sites:
            return
        asyncio.run_coroutine_threadsafe(self._site.stop(), self._loop).result(timeout=10)

    def wait_cancelled(self) -> None:
        """Wait until the server has seen a client leave."""
        assert self._cancelled.wait(10), "no client left"

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._check_key], client_max_size=64 << 20)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _check_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "stand", "is_generation": True})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"version": "0.5.23", "page_size": 1, "max_req_input_len": 4000, "api_key": "secret"}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.json_response({"message": "no tokenizer"}, status=500)
        ids = list((await request.json())["prompt"].encode())
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 4096})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        text = body.get("text", "")
        if "%500" in text:
            return web.json_response({"error": {"message": "out of\nluck"}}, status=500)
        self.events.append(("start", text))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(request, response, body, text)
        except asyncio.CancelledError:
            self._cancelled.set()
            raise
        finally:
            self.events.append(("end", text))
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], text: str
    ) -> None:
        async def send(data: Any) -> None:
            line = data if isinstance(data, bytes) else json.dumps(data).encode()
            await response.write(b"data: " + line + b"\n\n")

        if "%slow" in text:
            self.slow_started.set()
            await self._release.wait()
        if "%reject" in text:
            await send({"error": {"message": "too long", "code": 400}})
        elif "%garbage" in text:
            await send(b"{no json")
        elif "%odd" in text:
            await send({"text": "no meta"})
        else:
            count = body["sampling_params"]["max_new_tokens"]
            for done in range(1, count + 1):
                await send(self._event(body, done, count, abort="%abort" in text))
                if "%drop" in text:
                    assert request.transport is not None
                    request.transport.abort()
                if "%short" in text:
                    return
        await send(b"[DONE]")

    def _event(self, body: dict[str, Any], done: int, count: int, *, abort: bool) -> dict[str, Any]:
        """Half of a prompt was cached once the same prompt was seen: in three tiers."""
        tokens = body.get("input_ids") or list(body["text"].encode())
        if done == 1:
            body["cached"] = len(tokens) // 2 if tuple(tokens) in self.seen else 0
            self.seen.add(tuple(tokens))
        cached = body["cached"]
        reason = {"type": "abort", "message": "gone"} if abort else {"type": "length"}
        meta: dict[str, Any] = {
            "prompt_tokens": len(tokens),
            "completion_tokens": done,
            "cached_tokens": cached,
            "finish_reason": reason if done == count else None,
        }
        if self.tiers:
            storage = cached // 3
            host = cached // 4
            details = {"device": cached - storage - host, "host": host, "storage": storage}
            meta["cached_tokens_details"] = details if cached else None
        return {"text": "x" * done, "meta_info": meta}
