"""Prompts that any model has tokens for."""

from __future__ import annotations

import random

_IDS = range(256, 2000)  # above the special and byte tokens of small vocabularies, below their end


def random_tokens(count: int, source: random.Random) -> list[int]:
    """Token ids drawn from `source`."""
    return source.choices(_IDS, k=count)
