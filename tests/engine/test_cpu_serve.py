"""Real servers on the CPU say what a plain model says, whatever tier the cache comes from."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cacheflow_sgl.client import Generation, ServerError
from tests.harness.equality import Comparison, ask_all, compare
from tests.harness.prompts import PAGE, random_prompt
from tests.harness.reference import Reference
from tests.harness.servers import (
    DEFAULT,
    NO_OVERLAP,
    TWO_RANKS,
    SharedServer,
    uses,
)

pytestmark = pytest.mark.engine

# One shorter than a chunk, one of several chunks, neither a multiple of the page.
PROMPTS = [random_prompt(331, seed=1), random_prompt(1100, seed=2)]
NEW_TOKENS = 6
PAGES = [len(prompt) // PAGE * PAGE for prompt in PROMPTS]


@pytest.fixture(scope="module")
def control(tiny_model: Path) -> list[Generation]:
    """What the model says to `PROMPTS`, computed without SGLang."""
    reference = Reference(tiny_model)
    return [reference.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]


def ask(server: SharedServer, prompt: list[int]) -> Generation:
    return ask_all(server.client, [prompt], NEW_TOKENS)[0]


def is_same(comparison: Comparison) -> bool:
    print(comparison)  # shown where an assertion fails
    return comparison.same


@uses(DEFAULT, NO_OVERLAP, TWO_RANKS)
def test_a_server_says_what_transformers_says(server: SharedServer, control: list[Generation]):
    computed = ask_all(server.client, PROMPTS, NEW_TOKENS)
    assert [answer.cached.total for answer in computed] == [0, 0]
    assert is_same(compare(control, computed))

    cached = ask_all(server.client, PROMPTS, NEW_TOKENS)
    assert [answer.cached.device for answer in cached] == PAGES
    assert is_same(compare(control, cached))


@uses(DEFAULT, NO_OVERLAP, TWO_RANKS)
def test_an_evicted_prefix_comes_back_from_the_host(
    server: SharedServer, control: list[Generation]
):
    ask_all(server.client, PROMPTS, NEW_TOKENS)
    server.evict_device()
    restored = ask_all(server.client, PROMPTS, NEW_TOKENS)
    assert [answer.cached.host for answer in restored] == PAGES
    assert is_same(compare(control, restored))


@uses(DEFAULT)
def test_the_check_fails_when_loaded_kv_is_spoiled(server: SharedServer, control: list[Generation]):
    ask_all(server.client, PROMPTS, NEW_TOKENS)
    server.evict_device()
    with server.spoiled_loads():
        restored = ask_all(server.client, PROMPTS, NEW_TOKENS)
    assert [answer.cached.host for answer in restored] == PAGES
    assert not is_same(compare(control, restored))


@uses(DEFAULT)
@pytest.mark.parametrize("backend", ["file", "cacheflow"])
def test_a_flushed_prefix_comes_back_from_storage(
    server: SharedServer, control: list[Generation], backend: str
):
    options = {
        "directory": str(server.directory / "pages"),
        "capacity": "1GiB",
        "restore": "load",  # so that all that is stored is also loaded
    }
    server.client.attach_storage(
        backend,
        options={} if backend == "file" else options,
        prefetch_policy="wait_complete",
    )
    try:
        stored = server.stored_tokens()
        ask_all(server.client, PROMPTS, NEW_TOKENS)
        server.wait_until_stored(stored + sum(PAGES))
        server.client.flush_cache()
        restored = ask_all(server.client, PROMPTS, NEW_TOKENS)
        assert [answer.cached.storage for answer in restored] == PAGES
        assert is_same(compare(control, restored))

        server.client.flush_cache()
        with server.spoiled_loads():
            spoiled = ask_all(server.client, PROMPTS, NEW_TOKENS)
        assert not is_same(compare(control, spoiled))
    finally:
        server.client.detach_storage()


@uses(DEFAULT, TWO_RANKS)
def test_requests_in_one_batch_do_not_mix(server: SharedServer, control: list[Generation]):
    # One of the two has a cached prefix, the other none, and both share prefill batches.
    ask_all(server.client, PROMPTS[:1], NEW_TOKENS)
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt), PROMPTS * 2))
    assert is_same(compare(control * 2, answers))


@uses(DEFAULT)
def test_text_chat_and_namespaces(server: SharedServer):
    text = "the tiny model reads bytes and letters, and " * 12
    first = server.client.generate(text, extra_key="one", max_new_tokens=4)
    assert len(first.output_ids) == 4
    assert first.text
    assert server.client.generate(text, extra_key="two").cached.total == 0
    assert server.client.generate(text, extra_key="one").cached.device > 0


@uses(DEFAULT)
def test_the_client_names_what_the_server_refuses(server: SharedServer):
    with pytest.raises(ServerError, match=r"HTTP 400: .*longer than") as caught:
        server.client.generate(random_prompt(40_000, seed=3))
    assert caught.value.status == 400
    with pytest.raises(ServerError, match="/hicache/storage-backend: HTTP 400"):
        server.client.attach_storage("no-such-backend")


@uses(DEFAULT)
def test_metrics_count_what_was_asked(server: SharedServer):
    # Counted in the launching process, which loses its counts when something imports
    # prometheus_client before SGLang has set the directory its processes share.
    before = server.client.metrics().total("sglang:prompt_tokens_total")
    server.client.generate(random_prompt(100, seed=uuid.uuid4().int))
    after = server.client.metrics()
    assert after.total("sglang:prompt_tokens_total") - before == 100
    assert after.total("sglang:prompt_tokens_total", model_name="another") == 0


@uses(DEFAULT)
def test_the_server_info_tells_the_device(server: SharedServer):
    info = server.client.server_info()
    assert (info["device"], info["version"]) == ("cpu", "0.5.23")
    assert server.process.pid is not None
    assert os.getpgid(server.process.pid) == server.process.pid
