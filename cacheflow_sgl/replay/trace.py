"""A trace: sessions of turns, and the pure steps that shape it before it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice

from cacheflow_sgl.replay.errors import ReplayError
from cacheflow_sgl.replay.prompts import BlockPrompt, Message, Prompt, TextPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of one session.

    ``arrival_s`` counts from the start of the trace; None means as soon as the turn before it
    has ended. ``max_new_tokens`` is what the trace says, None where it does not say.
    """

    session: str
    turn: int
    prompt: Prompt
    arrival_s: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that are sent one after the other."""

    name: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """A part of a trace that was skipped, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Trace:
    """What was loaded: the sessions, in the order of the files, and what had to be skipped.

    ``note`` is one line about what a folder was read as, empty where there is nothing to tell.
    """

    name: str
    format: str
    sessions: tuple[Session, ...]
    broken: tuple[Broken, ...] = field(default=())
    note: str = ""

    def requests(self) -> Iterator[Request]:
        """All requests, session by session."""
        for session in self.sessions:
            yield from session.requests

    def first(self, sessions: int | None = None, requests: int | None = None) -> Trace:
        """The first ``sessions`` sessions, and of them the first ``requests`` requests."""
        left = requests
        kept = []
        for session in islice(self.sessions, sessions):
            turns = session.requests[:left]
            left = None if left is None else left - len(turns)
            if turns:
                kept.append(Session(session.name, turns))
        return replace(self, sessions=tuple(kept))

    def scaled(self, scale: float) -> Trace:
        """Blocks and prompts ``scale`` times as long; ReplayError where there are no blocks."""
        self._must_hold(BlockPrompt, "--scale", "prompts made of hash ids (Mooncake)")
        return self._map_prompts(lambda p: p.scaled(scale) if isinstance(p, BlockPrompt) else p)

    def clipped(self, max_tokens: int) -> Trace:
        """Block prompts cut at their end. Text has no length in tokens before a tokenizer sees it,
        so text is clipped when it is sent.
        """
        return self._map_prompts(
            lambda p: p.clipped(max_tokens) if isinstance(p, BlockPrompt) else p
        )

    def with_context(self, context: str) -> Trace:
        """``context`` in front of every chat prompt."""
        return self._map_prompts(
            lambda p: replace(p, context=context) if isinstance(p, TextPrompt) else p
        )

    def shared_context(self, max_bytes: int) -> str:
        """A fixed agent context of about ``max_bytes`` bytes of UTF-8.

        Made of the tool outputs of all sessions (what a model is given after its first reply), or
        of all messages where there are none; numbered, so that a second round over the same
        material is not the same text. ReplayError where the trace has no chat messages.
        """
        self._must_hold(TextPrompt, "--shared-context-tokens", "chat messages")
        material = self._tool_outputs() or [m.text for s in self.sessions for m in _messages(s)]
        if not any(text.strip() for text in material):
            raise ReplayError("--shared-context-tokens: the messages of this trace hold no text")
        parts = ["[system]\nReference material for this work.\n"]
        size = len(parts[0])
        for number in count():
            if size >= max_bytes:
                break
            parts.append(f"\n[reference {number + 1}]\n{material[number % len(material)]}\n")
            size += len(parts[-1].encode())
        whole = "".join(parts).encode()[:max_bytes]
        return whole.decode(errors="ignore") + "\n\n"

    def _tool_outputs(self) -> list[str]:
        outputs = []
        for session in self.sessions:
            messages = _messages(session)
            start = next((i for i, m in enumerate(messages) if m.reply), len(messages))
            outputs += [m.text for m in messages[start:] if m.role != "assistant"]
        return outputs

    def _must_hold(self, kind: type, option: str, what: str) -> None:
        if not any(isinstance(request.prompt, kind) for request in self.requests()):
            raise ReplayError(f"{option} needs {what}; this is a {self.format} trace without them")

    def _map_prompts(self, change: Callable[[Prompt], Prompt]) -> Trace:
        def changed(session: Session) -> Session:
            turns = (replace(r, prompt=change(r.prompt)) for r in session.requests)
            return Session(session.name, tuple(turns))

        return replace(self, sessions=tuple(changed(session) for session in self.sessions))


def _messages(session: Session) -> tuple[Message, ...]:
    """The longest run of messages a session holds (its turns share them)."""
    runs = [r.prompt.messages for r in session.requests if isinstance(r.prompt, TextPrompt)]
    return max(runs, key=len, default=())
