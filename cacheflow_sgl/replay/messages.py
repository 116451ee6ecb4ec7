"""Reading one chat message, as liberally as the traces of the world need it.

Accepted: OpenAI chat messages (content as text, as a list of parts, or missing; tool calls),
ShareGPT turns (``from`` / ``value``), and items of the OpenAI Responses API, which mini-swe-agent
writes into its trajectories as they are.
"""

from __future__ import annotations

import json
from typing import Any

from cacheflow_sgl.replay.errors import FormatError
from cacheflow_sgl.replay.prompts import Message

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
}


def read_messages(values: Any) -> tuple[Message, ...]:
    """All messages of a list; raises FormatError naming the first one that is not a message."""
    if not isinstance(values, list):
        raise FormatError(f"messages must be a list, not {type(values).__name__}")
    messages = []
    for index, value in enumerate(values):
        try:
            messages.append(read_message(value))
        except FormatError as error:
            raise FormatError(f"message {index}: {error}") from None
    return tuple(messages)


def read_message(value: Any) -> Message:
    """One message; a demonstration (SWE-agent's ``is_demo``) is context, not a reply to replay."""
    if not isinstance(value, dict):
        raise FormatError(f"a message must be an object, not {type(value).__name__}")
    role = _role(value)
    return Message(role, _text(value), reply=role == "assistant" and not value.get("is_demo"))


def _role(value: dict[str, Any]) -> str:
    role = value.get("role") or value.get("from")
    if isinstance(role, str):
        return _ROLES.get(role.lower(), role.lower())
    if value.get("object") == "response":
        return "assistant"
    if value.get("type") == "function_call_output":
        return "tool"
    raise FormatError("a message has neither 'role' nor 'from'")


def _text(value: dict[str, Any]) -> str:
    for key in ("content", "value", "output"):
        if value.get(key) is not None:
            body = _content(value[key])
            break
    else:
        body = ""
    calls = [_call(call) for call in _listed(value.get("tool_calls"))]
    calls += [_call(value["function_call"])] if value.get("function_call") else []
    return "\n".join(part for part in (body, *calls) if part)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, (_part(part) for part in content)))
    return _compact(content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return _compact(part)
    if part.get("type") == "function_call":
        return _call(part)
    for key in ("text", "content", "summary"):
        if part.get(key) is not None:
            return _content(part[key])
    return f"[{part.get('type', 'part')}]"  # an image or a sound: only its place is kept


def _call(call: Any) -> str:
    if not isinstance(call, dict):
        return _compact(call)
    function = call.get("function", call)
    if not isinstance(function, dict):
        return _compact(call)
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else _compact(arguments)
    return f"[call {function.get('name', '')}] {text}"


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
