"""Prompts for the tiny model."""

from __future__ import annotations

import random

from cacheflow_sgl.cpu.tiny_model import Recipe

PAGE = 64
"""Page size of every test server, in tokens."""


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids that share no page with those of another seed."""
    source = random.Random(seed)
    # Below the special tokens, which come last.
    return [source.randrange(Recipe().vocab - 3) for _ in range(tokens)]
