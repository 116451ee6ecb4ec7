"""A small synchronous client of one SGLang server.

For tests, scripts and benchmarks, which ask one thing at a time and read typed answers. The
endpoints are those of `sglang/srt/entrypoints/http_server.py` in SGLang 0.5.23.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families


class ServerError(Exception):
    """A server could not be reached, or refused a request; the message says which and why.

    Attributes:
        status: HTTP status of the answer, None where there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were not recomputed, by the tier they came from.

    The fields of `cached_tokens_details` in SGLang's `meta_info`.
    """

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        """Tokens from all tiers."""
        return self.device + self.host + self.storage


@dataclass(frozen=True)
class Generation:
    """The answer to one `/generate` request.

    Attributes:
        text: the output as the server's tokenizer spells it.
        output_ids: the output tokens.
        logprobs: natural logarithm of each output token's probability, empty if not asked for.
        prompt_tokens: tokens of the prompt.
        cached: where the prompt's reused part came from.
        finish_reason: `stop`, `length` or `abort`.
        latency_s: seconds the server spent on the request.
    """

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached: CachedTokens
    finish_reason: str
    latency_s: float

    @classmethod
    def from_answer(cls, answer: dict[str, Any]) -> Generation:
        """Read SGLang's JSON, which leaves out what does not apply."""
        meta = answer["meta_info"]
        return cls(
            text=answer["text"],
            output_ids=tuple(answer["output_ids"]),
            logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
            prompt_tokens=meta["prompt_tokens"],
            cached=msgspec.convert(meta.get("cached_tokens_details") or {}, CachedTokens),
            finish_reason=(meta.get("finish_reason") or {}).get("type", ""),
            latency_s=meta["e2e_latency"],
        )


@dataclass(frozen=True)
class StreamEvent:
    """One event of a streamed answer.

    Attributes:
        at_s: when it came, in seconds of `time.perf_counter`.
        answer: SGLang's JSON, with everything generated so far.
    """

    at_s: float
    answer: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return int(self.answer["meta_info"]["completion_tokens"])


class Stream:
    """A streamed `/generate` request on its way; iterating waits for its events.

    Closing it before its end ends the request on the server too. Iterating raises `ServerError`
    as the calls of `SglangClient` do.

    Attributes:
        sent_s: when the request was sent, in seconds of `time.perf_counter`.
    """

    def __init__(
        self, call: str, connection: http.client.HTTPConnection, sent_s: float, timeout_s: float
    ) -> None:
        self.sent_s = sent_s
        self._call = call
        self._connection = connection
        self._timeout_s = timeout_s
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        with _server_errors(self._call, self._timeout_s):
            response = self._response = self._connection.getresponse()
            if response.status != 200:
                raise _refusal(self._call, response.status, response.read())
            while line := response.readline():
                at_s = time.perf_counter()
                if line == b"data: [DONE]\n":
                    return
                if line.startswith(b"data: "):
                    yield StreamEvent(at_s, self._answer(line.removeprefix(b"data: ")))
        raise ServerError(f"{self._call}: the stream ended before its answer")

    def _answer(self, data: bytes) -> dict[str, Any]:
        try:
            answer = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ServerError(f"{self._call}: an event is no JSON object") from error
        if "error" in answer:
            raise ServerError(f"{self._call}: {answer['error'].get('message')}")
        return answer


@dataclass(frozen=True)
class Sample:
    """One value of `/metrics`."""

    name: str
    labels: dict[str, str]
    value: float


class Metrics(list[Sample]):
    """All values of one look at `/metrics`."""

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that carry `labels`; 0 where there are none."""
        return sum(
            sample.value
            for sample in self
            if sample.name == name and labels.items() <= sample.labels.items()
        )


class SglangClient:
    """Calls to the server at `url`.

    Args:
        url: such as `http://127.0.0.1:30000`.
        api_key: the key of a server that wants one. With `--admin-api-key`, that one: it opens
            the storage calls.
        timeout_s: the longest wait for an answer to any call.

    Every call raises `ServerError` when the server can't be reached, doesn't answer in time or
    refuses.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server; it should be like http://HOST:PORT")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._api_key = api_key
        self._connection_class = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._address = parts.netloc
        self._path = parts.path.rstrip("/")

    def healthy(self) -> bool:
        """Whether the server is up and its scheduler answers."""
        try:
            self._call("GET", "/health")
        except ServerError:
            return False
        return True

    def server_info(self) -> dict[str, Any]:
        """The server's arguments and the state of its schedulers."""
        return self._json("GET", "/server_info")

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 16,
        logprobs: bool = False,
        extra_key: str | None = None,
    ) -> Generation:
        """Greedy output for `prompt`, which is text or token ids.

        Requests with different values of `extra_key` share no cached prefix.
        """
        body = _greedy(prompt, max_new_tokens, logprobs)
        if extra_key is not None:
            body["extra_key"] = extra_key
        return Generation.from_answer(self._json("POST", "/generate", body))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 16,
        logprobs: bool = False,
        rid: str | None = None,
        custom_params: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Send `prompt` for greedy output that comes token by token.

        Args:
            prompt: text or token ids.
            max_new_tokens: tokens to generate.
            logprobs: whether to ask for the logprobs of the output.
            rid: name of the request, unique among those on the server; one of SGLang's by default.
            custom_params: values that plugins of the server read.
        """
        body = _greedy(prompt, max_new_tokens, logprobs) | {"stream": True}
        if rid is not None:
            body["rid"] = rid
        if custom_params is not None:
            body["sampling_params"]["custom_params"] = dict(custom_params)
        payload = msgspec.json.encode(body)
        headers = self._headers() | {"Content-Type": "application/json"}
        connection = self._connection_class(self._address, timeout=self.timeout_s)
        call = f"POST {self.url}/generate"
        sent_s = time.perf_counter()
        try:
            with _server_errors(call, self.timeout_s):
                connection.request("POST", f"{self._path}/generate", payload, headers)
        except ServerError:
            connection.close()
            raise
        return Stream(call, connection, sent_s, self.timeout_s)

    def flush_cache(self, *, wait_s: float = 30) -> None:
        """Drop every prefix from device and host; storage keeps its pages.

        Waits up to `wait_s` seconds for the server to be idle.
        """
        self._call("POST", f"/flush_cache?timeout={wait_s}")

    def metrics(self) -> Metrics:
        """The Prometheus metrics of a server started with `--enable-metrics`."""
        return Metrics(
            Sample(sample.name, sample.labels, sample.value)
            # The redirect SGLang answers for the bare path would cost a second call.
            for family in text_string_to_metric_families(self._call("GET", "/metrics/").decode())
            for sample in family.samples
        )

    def attach_storage(
        self,
        backend: str,
        *,
        options: dict[str, Any] | None = None,
        prefetch_policy: str | None = None,
    ) -> None:
        """Attach a HiCache storage backend; needs the admin key and an idle server."""
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps(options or {}),
            "hicache_storage_prefetch_policy": prefetch_policy,
        }
        self._call("PUT", "/hicache/storage-backend", body)

    def detach_storage(self) -> None:
        """Detach the storage backend; needs the admin key and an idle server."""
        self._call("DELETE", "/hicache/storage-backend")

    def clear_storage(self) -> None:
        """Remove every page from the storage backend."""
        self._call("POST", "/hicache/storage-backend/clear")

    def update_weights(self, model_path: str | Path) -> None:
        """Have the server load the weights of another checkpoint, and flush what it cached."""
        self._call("POST", "/update_weights_from_disk", {"model_path": str(model_path)})

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._call(method, path, body)
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ServerError(f"{method} {self.url}{path}: the answer is no JSON object") from error

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        headers = self._headers()
        payload = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            payload = msgspec.json.encode(body)
        connection = self._connection_class(self._address, timeout=self.timeout_s)
        call = f"{method} {self.url}{path}"
        try:
            with _server_errors(call, self.timeout_s):
                connection.request(method, self._path + path, payload, headers)
                response = connection.getresponse()
                answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise _refusal(call, response.status, answer)
        return answer


def _greedy(prompt: str | Sequence[int], max_new_tokens: int, logprobs: bool) -> dict[str, Any]:
    """Body of a `/generate` request."""
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        },
        "return_logprob": logprobs,
    }


@contextmanager
def _server_errors(call: str, timeout_s: float) -> Iterator[None]:
    """Turn what the network raises into a `ServerError` that names the call."""
    try:
        yield
    except TimeoutError as error:
        raise ServerError(f"{call}: no answer in {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{call}: {str(error) or type(error).__name__}") from error


def _refusal(call: str, status: int, answer: bytes) -> ServerError:
    said = " ".join(answer.decode(errors="replace").split())[:500]
    return ServerError(f"{call}: HTTP {status}: {said}", status)
