"""The equality check: a cache must never change what a model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheflow_sgl.client import Generation, SglangClient

TOLERANCE = 1e-3
"""Largest difference of a logprob that float32 rounding explains; chunking changes rounding."""


@dataclass(frozen=True)
class Comparison:
    """How the answers of a subject differ from those of its control.

    Attributes:
        equal_tokens: whether every answer has the same tokens.
        max_logprob_difference: largest difference of a logprob, over all tokens up to and with
            the first that differs in each answer.
    """

    equal_tokens: bool
    max_logprob_difference: float

    @property
    def same(self) -> bool:
        """Whether the subject said what the control said."""
        return self.equal_tokens and self.max_logprob_difference < TOLERANCE


def ask_all(
    client: SglangClient, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[Generation]:
    """Greedy answers to `prompts`, one after the other."""
    return [
        client.generate(prompt, max_new_tokens=max_new_tokens, logprobs=True) for prompt in prompts
    ]


def compare(control: Sequence[Generation], subject: Sequence[Generation]) -> Comparison:
    """Compare two lists of answers to the same prompts."""
    differences = [0.0]
    for expected, got in zip(control, subject, strict=True):
        pairs = zip(
            expected.output_ids, got.output_ids, expected.logprobs, got.logprobs, strict=True
        )
        for token, other, logprob, other_logprob in pairs:
            differences.append(abs(logprob - other_logprob))
            if token != other:
                break  # from here on the two answer different contexts
    tokens = [answer.output_ids for answer in control]
    return Comparison(tokens == [answer.output_ids for answer in subject], max(differences))
