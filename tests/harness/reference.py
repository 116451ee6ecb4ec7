"""The tiny model in plain transformers: what every server must say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cacheflow_sgl.client import CachedTokens, Generation


class Reference:
    """A checkpoint on the CPU, run without SGLang."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self.dtype: torch.dtype = self._model.dtype

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Generation:
        """The greedy answer to token ids, with logprobs."""
        tokens: list[int] = []
        logprobs: list[float] = []
        fresh, cache = list(prompt), None
        for _ in range(max_new_tokens):
            output = self._model(
                torch.tensor([fresh]), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            distribution = output.logits[0, -1].log_softmax(-1)
            fresh = [int(distribution.argmax())]
            tokens += fresh
            logprobs.append(float(distribution[fresh[0]]))
        return Generation(
            text="",
            output_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            prompt_tokens=len(prompt),
            cached=CachedTokens(),
            finish_reason="length",
            latency_s=0.0,
        )
