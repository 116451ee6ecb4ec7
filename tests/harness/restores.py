"""Asking a server for restores, and checking that nothing of one is left."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cacheflow_sgl.client import Generation
from tests.harness.equality import compare
from tests.harness.servers import SharedServer

NEW_TOKENS = 6
BYTES_PER_TOKEN = 4096
"""KV of the tiny model."""

KEY = "cacheflow_restore"


@dataclass(frozen=True)
class Answer:
    """An answer, and what became of the restore of its prefix.

    Attributes:
        generation: what was said.
        report: the fields of its `RestoreReport`; empty where nothing was restored.
        meta: SGLang's `meta_info`.
    """

    generation: Generation
    report: dict[str, Any]
    meta: dict[str, Any]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Answer:
        """Read SGLang's JSON."""
        meta = answer["meta_info"]
        (report,) = meta.get(KEY) or [{}]
        return cls(Generation.from_answer(answer), report, meta)

    def same_as(self, control: Answer) -> bool:
        """Whether it says what the control says."""
        comparison = compare([control.generation], [self.generation])
        print(comparison, self.report, self.generation.cached)
        return comparison.same


def body(
    prompt: Sequence[int],
    policy: str | None = None,
    *,
    tokens: int = NEW_TOKENS,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A greedy `/generate` request that names a restore policy; `fields` are added to it."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **(sampling or {})}
    if policy is not None:
        params["custom_params"] = {KEY: policy}
    return {
        "input_ids": list(prompt),
        "sampling_params": params,
        "return_logprob": True,
        **fields,
    }


def post(server: SharedServer, path: str, content: dict[str, Any]) -> Any:
    """The answer to a call that the client does not have."""
    request = urllib.request.Request(
        server.client.url + path,
        json.dumps(content).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer admin"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read() or b"null")


def ask(
    server: SharedServer, prompt: Sequence[int], policy: str | None = None, **how: Any
) -> Answer:
    """Send a request as of `body` and wait for its answer."""
    return Answer.of(post(server, "/generate", body(prompt, policy, **how)))


def fill(server: SharedServer, *prompts: Sequence[int], **how: Any) -> list[Answer]:
    """Compute prompts anew and leave them on the host alone; their answers are controls."""
    answers = [ask(server, prompt, **how) for prompt in prompts]
    assert all(answer.generation.cached.total == 0 for answer in answers)
    server.evict_device()
    return answers


def set_rate(server: SharedServer, tokens_per_s: float | None) -> None:
    """Have the link bring so many tokens a second; as many as it can for None."""
    server.link.set_rate(tokens_per_s and tokens_per_s * BYTES_PER_TOKEN)


@contextmanager
def checked(server: SharedServer) -> Iterator[SharedServer]:
    """Around a test: it starts with everything empty, and gives everything back.

    Everything is evicted, not flushed: what is locked, pinned or lost stays, and is seen.
    """
    server.client.metrics()  # a server that has died is told at once
    set_rate(server, None)
    server.faults.set()
    before = server.faults.emptied()
    yield server
    server.client.metrics()
    set_rate(server, None)
    server.faults.set()
    after = server.faults.emptied()
    assert not server.faults.broken()
    assert (after.device_free, after.host_free) == (before.device_free, before.host_free)
    assert (after.private, after.restores, after.running) == (0, {}, 0)
