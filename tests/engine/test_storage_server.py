"""The storage backend inside real servers: right answers, whatever becomes of the pages."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cacheflow_sgl.client import Generation, ServerError, SglangClient
from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model
from hicache_tiers import DiskStore
from tests.harness.equality import ask_all, compare
from tests.harness.prompts import PAGE, random_prompt
from tests.harness.reference import Reference
from tests.harness.servers import DEFAULT, FAILING, TWO_RANKS, SharedServer, uses

pytestmark = pytest.mark.engine

NEW_TOKENS = 6
PROMPT = random_prompt(1100, seed=21)
PAGES = len(PROMPT) // PAGE
TOKENS = PAGES * PAGE


@pytest.fixture(scope="module")
def control(tiny_model: Path) -> list[Generation]:
    """What the model says to `PROMPT`, computed without SGLang."""
    return [Reference(tiny_model).generate(PROMPT, max_new_tokens=NEW_TOKENS)]


@contextmanager
def attached(server: SharedServer, directory: Path) -> Iterator[Path]:
    """Our backend on `directory` while open, attached over HTTP."""
    options = {
        "directory": str(directory),
        "capacity": "1GiB",
        "prefetch_threshold": PAGE,
        "restore": "sglang",  # so that all that is stored is also loaded
    }
    server.client.attach_storage("cacheflow", options=options, prefetch_policy="wait_complete")
    try:
        yield directory
    finally:
        server.client.flush_cache()  # which waits until the server is idle, as a detach wants it
        server.client.detach_storage()


def same_as(control: list[Generation], answers: list[Generation]) -> bool:
    comparison = compare(control, answers)
    print(comparison)
    return comparison.same


def fill(server: SharedServer, prompt: list[int] = PROMPT) -> None:
    """Have the pages of `prompt` stored, and nothing left on device and host."""
    before = server.stored_tokens()
    server.client.generate(prompt, max_new_tokens=1)
    server.wait_until_stored(before + len(prompt) // PAGE * PAGE)
    server.client.flush_cache()


def tier(client: SglangClient, series: str, **labels: str) -> float:
    return client.metrics().total(f"cacheflow:tier_{series}_total", tier="disk", **labels)


def damage(directory: Path, page: int) -> None:
    """Flip a byte of one stored page, at a depth of `page` records."""
    (segment,) = [path for path in (directory / "segments").rglob("*") if path.is_file()]
    with segment.open("r+b") as file:
        file.seek(segment.stat().st_size * (2 * page + 1) // (2 * PAGES))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


@uses(DEFAULT, TWO_RANKS)
def test_a_prefix_comes_back_from_disk(server, control, tmp_path):
    with attached(server, tmp_path / "kv"):
        fill(server)
        restored = ask_all(server.client, [PROMPT], NEW_TOKENS)
    assert restored[0].cached.storage == TOKENS
    assert same_as(control, restored)


@uses(DEFAULT)
def test_b01_a_damaged_page_is_recomputed_counted_and_written_again(server, control, tmp_path):
    with attached(server, tmp_path / "kv") as directory:
        fill(server)
        errors = tier(server.client, "errors", kind="corrupt")
        damage(directory, page=5)
        stored = server.stored_tokens()
        answers = ask_all(server.client, [PROMPT], NEW_TOKENS)
        assert same_as(control, answers)
        assert answers[0].cached.storage < TOKENS
        assert tier(server.client, "errors", kind="corrupt") == errors + 1
        server.wait_until_stored(stored + PAGE)
        server.client.flush_cache()
        again = ask_all(server.client, [PROMPT], NEW_TOKENS)
        assert again[0].cached.storage == TOKENS
        assert same_as(control, again)


@uses(DEFAULT)
def test_b08_namespaces_of_requests_stay_apart(server, tmp_path):
    def storage_tokens(**key: str) -> int:
        answer = server.client.generate(PROMPT, max_new_tokens=1, **key)
        server.client.flush_cache()
        return answer.cached.storage

    with attached(server, tmp_path / "kv"):
        before = server.stored_tokens()
        server.client.generate(PROMPT, max_new_tokens=1, extra_key="A")
        server.wait_until_stored(before + TOKENS)
        server.client.flush_cache()
        assert storage_tokens(extra_key="A") == TOKENS
        assert storage_tokens(extra_key="B") == 0
        assert storage_tokens() == 0


@uses(DEFAULT)
def test_attach_refuses_bad_options_and_goes_on_serving(server, tmp_path):
    cases = [
        ({"directroy": "/x"}, "did you mean 'directory'"),
        ({"io_threads": 0}, "io_threads: expected `int` >= 1"),
        ({"directory": "/dev/null"}, "it is a file, not a directory"),
    ]
    for options, found in cases:
        with pytest.raises(ServerError, match=f"HTTP 400: .*{found}"):
            server.client.attach_storage("cacheflow", options=options)
    with attached(server, tmp_path / "kv"):
        fill(server)
        assert server.client.generate(PROMPT, max_new_tokens=1).cached.storage == TOKENS


@uses(DEFAULT)
def test_clear_drops_what_was_stored(server, tmp_path):
    with attached(server, tmp_path / "kv"):
        fill(server)
        server.client.clear_storage()
        assert server.client.generate(PROMPT, max_new_tokens=1).cached.storage == 0


@uses(DEFAULT)
def test_attached_again_it_finds_what_it_stored_before(server, tmp_path):
    with attached(server, tmp_path / "kv"):
        fill(server)
    with attached(server, tmp_path / "kv"):
        assert server.client.generate(PROMPT, max_new_tokens=1).cached.storage == TOKENS


@uses(DEFAULT)
def test_b22_counters_say_what_happened(server, tmp_path):
    with attached(server, tmp_path / "kv"):
        names = ("hits", "misses", "read_bytes", "written_records", "declined", "evicted")
        before = {name: tier(server.client, name) for name in names}
        fill(server)
        assert tier(server.client, "misses") - before["misses"] >= PAGES  # asked for when new
        before["misses"] = tier(server.client, "misses")
        answer = server.client.generate(PROMPT, max_new_tokens=1)
        grown = {name: tier(server.client, name) - before[name] for name in names}
    assert answer.cached.storage == TOKENS == grown["hits"] * PAGE
    assert grown["written_records"] == PAGES
    assert grown["read_bytes"] > 0
    assert (grown["declined"], grown["evicted"], grown["misses"]) == (0, 0, 0)


@uses(DEFAULT)
def test_b06_new_weights_at_run_time_never_meet_old_pages(server, control, tiny_model, tmp_path):
    other = write_tiny_model(tmp_path / "other", Recipe(seed=1))
    other_control = [Reference(other).generate(PROMPT, max_new_tokens=NEW_TOKENS)]
    with attached(server, tmp_path / "kv"):
        fill(server)
        try:
            server.client.update_weights(other)
            answers = ask_all(server.client, [PROMPT], NEW_TOKENS)
            assert answers[0].cached.storage == 0
            assert same_as(other_control, answers)
            assert not same_as(control, answers)
        finally:
            server.client.update_weights(tiny_model)
        answers = ask_all(server.client, [PROMPT], NEW_TOKENS)
        assert answers[0].cached.storage == TOKENS  # its own pages of before
        assert same_as(control, answers)


@uses(FAILING)
def test_random_failures_and_delays_never_change_an_answer(server, tiny_model):
    """SGLang's own injector around our backend, from the start of the server."""
    prompts = [random_prompt(300 + 40 * number, seed=100 + number) for number in range(6)]
    reference = Reference(tiny_model)
    expected = [reference.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            one = lambda prompt: ask_all(server.client, [prompt], NEW_TOKENS)[0]  # noqa: E731
            answers = list(pool.map(one, prompts))
        assert same_as(expected, answers)
        server.client.flush_cache()
    assert tier(server.client, "hits") > 0


@uses(FAILING)
def test_a_restart_finds_everything_that_was_stored(server, control):
    """Also what a killed server has left: the directory is never closed in order here."""
    directory = server.directory / "launch-pages"
    for _ in range(8):  # the injector lets some writes fail; a page not stored is written again
        server.client.generate(PROMPT, max_new_tokens=1)
        server.client.flush_cache()
    acknowledged = tier(server.client, "written_records")
    assert acknowledged > 0
    server.process.kill()
    server.process.start()
    store = DiskStore.open_existing(directory)
    try:
        store.check_integrity()
        report = store.verify()
        assert report.records >= acknowledged
        assert not report.damaged
    finally:
        store.close()
    restored = []
    for _ in range(8):
        restored += ask_all(server.client, [PROMPT], NEW_TOKENS)
        server.client.flush_cache()
    assert max(answer.cached.storage for answer in restored) > 0
    assert same_as(control * len(restored), restored)
    assert json.loads((directory / "FORMAT").read_text())["format"] == 1
