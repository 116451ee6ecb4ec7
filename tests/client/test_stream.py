"""Streamed answers, from a server that sends what each test says, event by event."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cacheflow_sgl.client import ServerError, SglangClient


class Streaming(ThreadingHTTPServer):
    """Sends `lines` in chunks; `gone` is set once a client has left in the middle."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.lines: list[bytes] = []
        self.endless = False
        self.asked: dict[str, object] = {}
        self.may_go_on = threading.Event()
        self.gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Streaming

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for line in self.server.lines:
                self.chunk(line)
            while self.server.endless:
                self.chunk(event(1))
        except OSError:
            self.server.gone.set()
            return
        self.server.may_go_on.wait(10)
        self.chunk(b"")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def event(tokens: int) -> bytes:
    answer = {"output_ids": [7] * tokens, "meta_info": {"completion_tokens": tokens}}
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


@pytest.fixture
def server() -> Iterator[Streaming]:
    with Streaming() as streaming:
        thread = threading.Thread(target=streaming.serve_forever, args=(0.02,))
        thread.start()
        yield streaming
        streaming.may_go_on.set()
        streaming.endless = False
        streaming.shutdown()
        thread.join()


def test_events_come_as_they_are_sent_not_at_the_end(server: Streaming):
    server.lines = [event(1)[:9], event(1)[9:], event(2) + event(3)]
    with SglangClient(server.url).stream([1, 2]) as stream:
        events = iter(stream)
        got = [next(events) for _ in range(3)]  # the server has not ended its answer yet
        assert [each.tokens for each in got] == [1, 2, 3]
        assert got[2].answer["output_ids"] == [7, 7, 7]
        times = [stream.sent_s, *(each.at_s for each in got)]
        assert times == sorted(times)


def test_the_end_of_the_answer_ends_the_events(server: Streaming):
    server.lines = [event(1), b"data: [DONE]\n\n"]
    with SglangClient(server.url).stream([1]) as stream:
        assert [each.tokens for each in stream] == [1]


def test_a_request_says_what_it_was_told_to(server: Streaming):
    server.lines = [b"data: [DONE]\n\n"]
    client = SglangClient(server.url)
    with client.stream(
        [1, 2], max_new_tokens=5, logprobs=True, rid="me", custom_params={"a": "b"}
    ) as stream:
        assert list(stream) == []
    asked = server.asked
    assert (asked["input_ids"], asked["rid"], asked["stream"]) == ([1, 2], "me", True)
    assert asked["return_logprob"] is True
    sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    assert asked["sampling_params"] == sampling | {"custom_params": {"a": "b"}}


def test_what_was_not_asked_for_is_not_sent(server: Streaming):
    server.lines = [b"data: [DONE]\n\n"]
    with SglangClient(server.url).stream("text") as stream:
        assert list(stream) == []
    assert server.asked.keys() == {"text", "sampling_params", "return_logprob", "stream"}


def test_a_client_that_leaves_ends_the_connection(server: Streaming):
    server.endless = True
    with SglangClient(server.url).stream([1]) as stream:
        next(iter(stream))
    assert server.gone.wait(10)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([event(1)], "the stream ended before its answer"),
        ([b'data: {"error": {"message": "too long"}}\n\n'], "too long"),
        ([b"data: no json\n\n"], "an event is no JSON object"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error(server: Streaming, lines: list[bytes], message: str):
    server.lines = lines
    server.may_go_on.set()
    with (
        SglangClient(server.url).stream([1]) as stream,
        pytest.raises(ServerError, match=message),
    ):
        list(stream)


def test_a_refusal_says_what_the_server_said(server: Streaming):
    server.status, server.lines = 400, [b"input is too long"]
    server.may_go_on.set()
    with SglangClient(server.url).stream([1]) as stream, pytest.raises(ServerError) as caught:
        list(stream)
    assert str(caught.value) == f"POST {server.url}/generate: HTTP 400: input is too long"
    assert caught.value.status == 400


def test_a_silent_server_is_an_error(server: Streaming):
    with (
        SglangClient(server.url, timeout_s=0.05).stream([1]) as stream,
        pytest.raises(ServerError, match=r"no answer in 0\.05 s"),
    ):
        list(stream)


def test_no_server_is_an_error(server: Streaming):
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(ServerError, match="refused"):
        SglangClient(url).stream([1])
