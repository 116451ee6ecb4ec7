"""What the replay asks a server before it starts: who it is, and how its tokenizer counts.

Endpoints follow ``srt/entrypoints/http_server.py`` of SGLang 0.5.23: ``/model_info``,
``/server_info`` (older servers: with ``get_`` in front) and ``/v1/tokenize``.
"""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase
from typing import Any

import aiohttp
import msgspec

from cacheflow_sgl.replay.client import connection_problem
from cacheflow_sgl.replay.errors import ReplayError
from cacheflow_sgl.replay.prompts import Alphabet

# An answer to these takes milliseconds, but a server in a long prefill step answers after it.
_ASK_TIMEOUT = aiohttp.ClientTimeout(total=120, sock_connect=10)

# /server_info is the whole configuration of a server; the report keeps what explains its figures.
_SERVER_FIELDS = (
    "version",
    "device",
    "dtype",
    "kv_cache_dtype",
    "page_size",
    "chunked_prefill_size",
    "tp_size",
    "pp_size",
    "dp_size",
    "max_total_num_tokens",
    "max_req_input_len",
    "enable_hierarchical_cache",
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_mem_layout",
    "hicache_io_backend",
    "hicache_storage_backend",
    "hicache_storage_prefetch_policy",
    "disable_overlap_schedule",
)


class TokenizeError(Exception):
    """The server did not tokenize a text."""


class Server:
    """A running SGLang server, seen through one HTTP session.

    ``url`` may lack the scheme: http:// is assumed. ReplayError where it is no URL of a server.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = _with_scheme(url)
        self.http = http

    async def describe(self) -> dict[str, Any]:
        """Its model and the part of its configuration that matters here.

        Raises ReplayError where no SGLang server answers.
        """
        model = await self._first_answer("/model_info", "/get_model_info")
        if "model_path" not in model:
            raise ReplayError(f"{self.url} is no SGLang server: /model_info names no model_path")
        found: dict[str, Any] = {"model": model["model_path"]}
        try:
            config = await self._first_answer("/server_info", "/get_server_info")
        except ReplayError:
            return found  # a router in front of servers may not pass it on
        found.update({key: config[key] for key in _SERVER_FIELDS if config.get(key) is not None})
        return found

    async def _first_answer(self, *paths: str) -> dict[str, Any]:
        problem = ""
        for path in paths:
            try:
                async with self.http.get(self.url + path, timeout=_ASK_TIMEOUT) as response:
                    if response.status == 200:
                        return msgspec.json.decode(await response.read(), type=dict[str, Any])
                    problem = f"HTTP {response.status}"
                    if response.status in (401, 403):
                        problem += "; the server wants a key, give it with --api-key"
                        break
            except aiohttp.InvalidURL:
                raise ReplayError(_not_a_url(self.url)) from None
            except aiohttp.ClientConnectionError as error:
                raise ReplayError(
                    f"no server at {self.url} ({connection_problem(error)}); "
                    "start one with `cacheflow serve` or name it with --url"
                ) from None
            except TimeoutError:
                raise ReplayError(f"{self.url}{path}: no answer in time") from None
            except (ValueError, aiohttp.ClientError) as error:
                problem = f"not an SGLang answer ({error})"
        raise ReplayError(f"{self.url}{paths[0]}: {problem}")

    async def tokenize(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text; ``special`` adds what /generate adds (a BOS, if the model has).

        Raises TokenizeError where the server does not answer with ids.
        """
        body = {"prompt": text, "add_special_tokens": special}
        try:
            async with self.http.post(
                self.url + "/v1/tokenize", json=body, timeout=_ASK_TIMEOUT
            ) as response:
                if response.status != 200:
                    raise TokenizeError(f"/v1/tokenize answered HTTP {response.status}")
                answer = msgspec.json.decode(await response.read(), type=dict[str, Any])
                return msgspec.convert(answer.get("tokens"), list[int])
        except (TimeoutError, ValueError, aiohttp.ClientError) as error:
            raise TokenizeError(f"/v1/tokenize: {error or type(error).__name__}") from None

    async def alphabet(self) -> Alphabet:
        """Ids for synthetic prompts: those the tokenizer itself gives for plain words.

        They are valid for the model and none is special, which a vocabulary size alone does not
        tell (and SGLang does not report it).
        """
        pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
        words = [f" {p}" for p in pairs] + [p.upper() for p in pairs]
        try:
            return Alphabet(await self.tokenize("".join(words), special=False))
        except (TokenizeError, ValueError) as error:
            raise ReplayError(
                f"token ids are needed and the server gives none ({error}): say --vocab-size"
            ) from None


def _with_scheme(url: str) -> str:
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    if not full.lower().startswith(("http://", "https://")):
        raise ReplayError(_not_a_url(url))
    return full


def _not_a_url(url: str) -> str:
    return f"--url: {url!r} is no URL of a server; write http://HOST:PORT"
