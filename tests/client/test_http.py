"""The client against an HTTP server that answers as SGLang does, well or badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cacheflow_sgl.client import CachedTokens, Generation, ServerError, SglangClient

META = {"prompt_tokens": 7, "e2e_latency": 0.5, "finish_reason": {"type": "length", "length": 2}}
METRICS = """\
# HELP sglang:cached_tokens_total Cached.
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="host",tp_rank="0"} 3.0
sglang:cached_tokens_total{cache_source="host",tp_rank="1"} 4.0
sglang:cached_tokens_total{cache_source="device",tp_rank="0"} 10.0
"""


class Answers(ThreadingHTTPServer):
    """Answers every request with what was put into it, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.body = b"{}"
        self.delay_s = 0.0
        self.asked: list[tuple[str, str, str | None, object]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        key = self.headers.get("Authorization")
        self.server.asked.append((self.command, self.path, key, body))
        time.sleep(self.server.delay_s)
        with suppress(BrokenPipeError):  # a client that gave up
            self.send_response(self.server.status)
            self.send_header("Content-Length", str(len(self.server.body)))
            self.end_headers()
            self.wfile.write(self.server.body)

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def answers() -> Iterator[Answers]:
    with Answers() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_becomes_a_generation(answers: Answers):
    meta = META | {
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None]],
        "cached_tokens_details": {"device": 1, "host": 2, "storage": 3, "storage_backend": "X"},
    }
    answers.body = json.dumps({"text": "hi", "output_ids": [11, 12], "meta_info": meta}).encode()
    got = SglangClient(answers.url).generate(
        [1, 2], max_new_tokens=2, logprobs=True, extra_key="space"
    )
    assert got == Generation("hi", (11, 12), (-0.5, -1.5), 7, CachedTokens(1, 2, 3), "length", 0.5)
    assert got.cached.total == 6
    method, path, key, body = answers.asked[0]
    assert (method, path, key) == ("POST", "/generate", None)
    assert isinstance(body, dict)
    assert (body["input_ids"], body["extra_key"], body["return_logprob"]) == ([1, 2], "space", True)
    assert body["sampling_params"]["temperature"] == 0


def test_what_sglang_leaves_out_is_empty(answers: Answers):
    meta = META | {"cached_tokens_details": None}
    answers.body = json.dumps({"text": "", "output_ids": [], "meta_info": meta}).encode()
    got = SglangClient(answers.url).generate("text")
    assert (got.logprobs, got.cached) == ((), CachedTokens())
    body = answers.asked[0][3]
    assert isinstance(body, dict)
    assert body["text"] == "text"
    assert not {"input_ids", "extra_key"} & body.keys()


def test_storage_calls_carry_the_key(answers: Answers):
    client = SglangClient(answers.url + "/", api_key="k")
    client.attach_storage("file", options={"a": 1}, prefetch_policy="timeout")
    client.detach_storage()
    client.clear_storage()
    client.flush_cache(wait_s=2)
    assert {key for _, _, key, _ in answers.asked} == {"Bearer k"}
    assert [(method, path) for method, path, _, _ in answers.asked] == [
        ("PUT", "/hicache/storage-backend"),
        ("DELETE", "/hicache/storage-backend"),
        ("POST", "/hicache/storage-backend/clear"),
        ("POST", "/flush_cache?timeout=2"),
    ]
    assert answers.asked[0][3] == {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": '{"a": 1}',
        "hicache_storage_prefetch_policy": "timeout",
    }


def test_metrics_are_summed_by_label(answers: Answers):
    answers.body = METRICS.encode()
    metrics = SglangClient(answers.url).metrics()
    assert metrics.total("sglang:cached_tokens_total") == 17
    assert metrics.total("sglang:cached_tokens_total", cache_source="host") == 7
    assert metrics.total("sglang:cached_tokens_total", cache_source="host", tp_rank="1") == 4
    assert metrics.total("sglang:cached_tokens_total", cache_source="storage") == 0
    assert metrics.total("another") == 0


def test_a_refusal_says_what_the_server_said(answers: Answers):
    answers.status, answers.body = 400, b'{"error": {"message":\n "too long"}}'
    client = SglangClient(answers.url)
    with pytest.raises(ServerError) as caught:
        client.generate("x")
    assert str(caught.value) == (
        f'POST {answers.url}/generate: HTTP 400: {{"error": {{"message": "too long"}}}}'
    )
    assert caught.value.status == 400
    assert not client.healthy()


def test_health_is_the_status(answers: Answers):
    assert SglangClient(answers.url).healthy()


@pytest.mark.parametrize("body", [b"no json", b"[1]"])
def test_an_answer_of_another_kind_is_an_error(answers: Answers, body: bytes):
    answers.body = body
    with pytest.raises(ServerError, match="/server_info: the answer is no JSON object"):
        SglangClient(answers.url).server_info()


def test_a_silent_server_is_an_error(answers: Answers):
    answers.delay_s = 0.5
    with pytest.raises(ServerError, match=r"no answer in 0\.05 s") as caught:
        SglangClient(answers.url, timeout_s=0.05).server_info()
    assert caught.value.status is None


def test_no_server_is_an_error(answers: Answers):
    client = SglangClient(answers.url)
    answers.shutdown()  # first: a thread that still polls the socket would keep it open
    answers.server_close()
    with pytest.raises(ServerError, match="refused"):
        client.server_info()
    assert not client.healthy()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://", ""])
def test_what_is_no_url_is_refused(url: str):
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        SglangClient(url)
