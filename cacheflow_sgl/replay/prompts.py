"""Prompts as a trace holds them; they become text or token ids only when they are sent.

A trace of ten thousand requests of 100k tokens does not fit in memory as token ids, and the turns
of one session share almost all of their text. So a prompt keeps what the trace says (messages,
hash ids) and renders on demand. Rendering is pure: the same prompt gives the same bytes on every
machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 512  # what one Mooncake hash id stands for


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; ``reply`` marks what the model said, so what a turn asks for."""

    role: str
    text: str
    reply: bool = False

    def render(self) -> str:
        """The message in our own plain chat form, which no tokenizer has special ids for."""
        return f"[{self.role}]\n{self.text}\n\n"


REPLY_HEADER = "[assistant]\n"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The first ``count`` messages of a session, then the header of the reply.

    The reply, once it is a message, is rendered after the same header, so the text of turn k+1
    literally starts with the text of turn k. ``messages`` is shared by all turns of a session.
    """

    messages: tuple[Message, ...]
    count: int
    context: str = ""

    def text(self) -> str:
        """The prompt as it is sent."""
        history = "".join(message.render() for message in self.messages[: self.count])
        return self.context + history + REPLY_HEADER


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt the trace gives literally (a completion request), as text or as token ids."""

    content: str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt known only by the hash ids of its blocks (Mooncake).

    Invariant: every block but the last is full, ``0 < length <= len(hash_ids) * block_tokens``.
    Equal ids give equal tokens, so two prompts share exactly the prefix their ids share.
    """

    hash_ids: tuple[int, ...]
    length: int
    block_tokens: int = BLOCK_TOKENS

    def scaled(self, scale: float) -> BlockPrompt:
        """The prompt with blocks ``scale`` times as long; shared prefixes scale with it."""
        block = max(1, round(self.block_tokens * scale))
        full = len(self.hash_ids) - 1
        last = max(1, round((self.length - full * self.block_tokens) * scale))
        return BlockPrompt(self.hash_ids, full * block + last, block)

    def clipped(self, max_tokens: int) -> BlockPrompt:
        """The first ``max_tokens`` tokens of the prompt."""
        length = min(self.length, max_tokens)
        blocks = -(-length // self.block_tokens)
        return replace(self, hash_ids=self.hash_ids[:blocks], length=length)

    def token_ids(self, alphabet: Alphabet, seed: int) -> list[int]:
        """The ``length`` token ids."""
        blocks = (alphabet.draw(f"{seed}:{i}", self.block_tokens) for i in self.hash_ids)
        ids: list[int] = np.concatenate(list(blocks))[: self.length].tolist()
        return ids


Prompt = TextPrompt | RawPrompt | BlockPrompt


class Alphabet:
    """The token ids that synthetic prompts are made of: valid for the model, none of them special.

    Made from ids the server's own tokenizer returned, or from a vocabulary size.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: npt.NDArray[np.int64] = np.array(sorted(set(ids)), dtype=np.int64)
        if self.ids.size < 2:
            raise ValueError(f"an alphabet needs two ids or more, got {self.ids.size}")

    @classmethod
    def of_vocabulary(cls, vocab_size: int) -> Alphabet:
        """The middle three quarters: tokenizers keep their special ids at the two ends."""
        return cls(range(vocab_size // 8, max(vocab_size - vocab_size // 8, 2)))

    def draw(self, key: str, count: int) -> npt.NDArray[np.int64]:
        """``count`` ids that depend on ``key`` alone.

        SHAKE-128 rather than a random generator: its output is fixed by a standard, so traces
        replay the same on every machine and with every numpy.
        """
        stream = hashlib.shake_128(key.encode()).digest(4 * count)
        drawn: npt.NDArray[np.int64] = self.ids[np.frombuffer(stream, "<u4") % self.ids.size]
        return drawn
