"""One reader a trace format: from one document of a file to sessions.

A document is one line of a JSONL file, one element of a JSON array, or a whole JSON file. Readers
accept missing fields wherever a prompt can still be told, and raise FormatError where it cannot, or
where the document has the shape of another format: a format named wrongly must not pass.

| name | where it comes from |
|---|---|
| mooncake | kvcache-ai/Mooncake, FAST'25 traces: timestamp (ms), lengths, hash_ids |
| swe-agent | SWE-agent ``.traj``: ``history``, or one for each of ``attempts`` |
| mini-swe-agent | ``.traj.json``: ``messages`` (also the native model output of version 2) |
| sharegpt | ShareGPT: ``conversations`` of from/value |
| wildchat | WildChat: ``conversation`` of role/content, ``conversation_hash`` |
| lmsys | LMSYS-Chat-1M: ``conversation`` of role/content |
| openai-jsonl | request bodies, plain or in the batch form with ``custom_id`` and ``body`` |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec

from cacheflow_sgl.replay.errors import FormatError
from cacheflow_sgl.replay.messages import read_messages
from cacheflow_sgl.replay.prompts import BLOCK_TOKENS, BlockPrompt, Message, RawPrompt, TextPrompt
from cacheflow_sgl.replay.trace import Request, Session


class _MooncakeLine(msgspec.Struct):
    input_length: int
    hash_ids: list[int]
    timestamp: float | None = None
    output_length: int | None = None


def read_mooncake(value: Any, name: str) -> list[Session]:
    """One request; its ids stand for blocks of 512 tokens, the last one cut to the length."""
    try:
        line = msgspec.convert(value, _MooncakeLine)
    except msgspec.ValidationError as error:
        raise FormatError(str(error)) from None
    if line.input_length < 1:
        raise FormatError(f"input_length must be 1 or more, not {line.input_length}")
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) < blocks:
        raise FormatError(
            f"{len(line.hash_ids)} hash_ids for {line.input_length} tokens, {blocks} needed"
        )
    prompt = BlockPrompt(tuple(line.hash_ids[:blocks]), line.input_length)
    arrival = None if line.timestamp is None else line.timestamp / 1000
    return [Session(name, (Request(name, 0, prompt, arrival, line.output_length),))]


def read_swe_agent(value: Any, name: str) -> list[Session]:
    """One session for each history: a trajectory has one, or one for each attempt."""
    if isinstance(value, dict) and "history" not in value and "attempts" in value:
        attempts = value["attempts"]
        if not isinstance(attempts, list) or not attempts:
            raise FormatError("'attempts' must be a list with at least one attempt")
        return [
            session
            for index, attempt in enumerate(attempts)
            for session in _conversation(attempt, f"{name}#{index + 1}", ("history",))
        ]
    return _conversation(value, name, ("history",))


def read_mini_swe_agent(value: Any, name: str) -> list[Session]:
    """One session: the messages of a trajectory."""
    return _conversation(value, name, ("messages",), bare=True)


def read_sharegpt(value: Any, name: str) -> list[Session]:
    """One session: a conversation between a user and a model."""
    return _conversation(value, name, ("conversations", "items"), bare=True)


def read_chat(value: Any, name: str) -> list[Session]:
    """One session: a conversation of a user and a model, as in LMSYS-Chat and WildChat."""
    return _conversation(value, name, ("conversation",))


def _conversation(
    value: Any, name: str, keys: tuple[str, ...], *, bare: bool = False
) -> list[Session]:
    """The one session of a document; ``bare``: the document may be the list of messages itself."""
    if not (bare and isinstance(value, list)):
        fields = value if isinstance(value, dict) else {}
        key = next((key for key in keys if key in fields), None)
        if key is None:
            raise FormatError(f"no {' or '.join(repr(key) for key in keys)}")
        value = fields[key]
    return [_session(read_messages(value), name)]


def _session(messages: tuple[Message, ...], name: str) -> Session:
    """Turn k asks for the k-th reply, with all messages before it."""
    # A reply that nothing comes before (ShareGPT has them) was not asked for.
    counts = [i for i, message in enumerate(messages) if message.reply and i > 0]
    if not counts:
        raise FormatError("no message of the model that another message comes before")
    turns = (Request(name, k, TextPrompt(messages, n)) for k, n in enumerate(counts))
    return Session(name, tuple(turns))


def read_openai(value: Any, name: str) -> list[Session]:
    """One request; `join_turns` makes sessions of the requests that continue one another."""
    if not isinstance(value, dict):
        raise FormatError(f"a request must be an object, not {type(value).__name__}")
    if "trajectory_format" in value:
        raise FormatError("a whole trajectory, not a request")
    body = value.get("body", value)
    if not isinstance(body, dict):
        raise FormatError(f"'body' must be an object, not {type(body).__name__}")
    arrival = _seconds(value.get("timestamp", body.get("timestamp")))
    request = Request(name, 0, _openai_prompt(body), arrival, _max_tokens(body))
    return [Session(name, (request,))]


def _openai_prompt(body: dict[str, Any]) -> TextPrompt | RawPrompt:
    if "messages" in body:
        messages = read_messages(body["messages"])
        if not messages:
            raise FormatError("'messages' is empty")
        return TextPrompt(messages, len(messages))
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return RawPrompt(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return RawPrompt(tuple(prompt))
    raise FormatError("neither 'messages' nor a 'prompt' of text or token ids")


def _max_tokens(body: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        limit = body.get(key)
        if type(limit) is int and limit > 0:
            return limit
    return None


def _seconds(value: Any) -> float | None:
    """A time in seconds, from seconds, from milliseconds since 1970, or from ISO 8601."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            raise FormatError(f"timestamp {value!r} is neither a number nor ISO 8601") from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value / 1000 if value > 1e11 else float(value)
    return None


def join_turns(sessions: Iterable[Session]) -> list[Session]:
    """Sessions in which each request's messages extend those of the request before it.

    A request log has no sessions; the prompts tell them: a request whose messages start with all
    messages of an earlier request is the next turn of that one's session.
    """
    joined: list[list[Request]] = []
    tips: dict[bytes, list[Request]] = {}  # digest of the last turn's messages -> its session
    for session in sessions:
        for request in session.requests:
            if not isinstance(request.prompt, TextPrompt):
                joined.append([request])
                continue
            digests = _prefix_digests(request.prompt.messages)
            tip = next((d for d in reversed(digests[:-1]) if d in tips), None)
            turns = tips.pop(tip) if tip is not None else []
            if not turns:
                joined.append(turns)
            turns.append(request)
            tips[digests[-1]] = turns
    return [_renumbered(turns) for turns in joined]


def _prefix_digests(messages: tuple[Message, ...]) -> list[bytes]:
    running = hashlib.blake2b(digest_size=16)
    digests = []
    for message in messages:
        running.update(message.render().encode(errors="surrogatepass"))
        digests.append(running.copy().digest())
    return digests


def _renumbered(turns: list[Request]) -> Session:
    name = turns[0].session
    return Session(name, tuple(replace(r, session=name, turn=k) for k, r in enumerate(turns)))


Reader = Callable[[Any, str], list[Session]]

READERS: dict[str, Reader] = {
    "mooncake": read_mooncake,
    "swe-agent": read_swe_agent,
    "mini-swe-agent": read_mini_swe_agent,
    "sharegpt": read_sharegpt,
    "wildchat": read_chat,
    "lmsys": read_chat,
    "openai-jsonl": read_openai,
}


def detect(value: Any, file_name: str) -> str | None:
    """The format of a document, from its fields and, where they leave it open, the file's name."""
    if isinstance(value, list):
        return "mini-swe-agent" if file_name.endswith(".traj.json") else "sharegpt"
    if not isinstance(value, dict):
        return None
    if "hash_ids" in value:
        return "mooncake"
    if "history" in value or "attempts" in value:
        return "swe-agent"
    if "conversations" in value or "items" in value:
        return "sharegpt"
    if "conversation" in value:
        return "wildchat" if "conversation_hash" in value else "lmsys"
    if "messages" in value and (
        "trajectory_format" in value or "info" in value or file_name.endswith(".traj.json")
    ):
        return "mini-swe-agent"
    if "body" in value or "messages" in value or "prompt" in value:
        return "openai-jsonl"
    return None
