"""`sglang.Engine` in a process that activated the CPU device itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cacheflow_sgl.client import Generation
from tests.harness.equality import compare
from tests.harness.prompts import random_prompt
from tests.harness.reference import Reference

pytestmark = pytest.mark.engine

_SCRIPT = """
import json, sys, time
from pathlib import Path

from cacheflow_sgl import cpu
from hicache_tiers import DiskStore

if __name__ == "__main__":
    cpu.activate()
    import sglang

    model, prompt, pages = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        max_total_tokens=2048,
        page_size=64,
        enable_hierarchical_cache=True,
        hicache_storage_backend="cacheflow",
        hicache_storage_backend_extra_config=json.dumps({"directory": str(pages)}),
        hicache_storage_prefetch_policy="wait_complete",
    )

    def ask():
        sampling = {"temperature": 0, "max_new_tokens": 6}
        return engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)

    computed = ask()
    store = DiskStore.open_existing(pages)
    give_up = time.monotonic() + 60
    while store.usage().records < len(prompt) // 64:
        assert time.monotonic() < give_up
        time.sleep(0.2)
    store.close()
    while not engine.flush_cache().success:  # refused until the scheduler is idle
        time.sleep(0.2)
    restored = ask()
    engine.shutdown()
    print(json.dumps([computed, restored]))
"""


def test_an_engine_with_our_backend_says_what_transformers_says(tiny_model: Path, tmp_path: Path):
    prompt = random_prompt(700, seed=4)
    script = tmp_path / "main.py"
    script.write_text(_SCRIPT)
    arguments = [str(tiny_model), json.dumps(prompt), str(tmp_path / "kv")]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    computed, restored = (Generation.from_answer(answer) for answer in answers)
    assert (computed.cached.total, restored.cached.storage) == (0, 700 // 64 * 64)
    assert compare([Reference(tiny_model).generate(prompt, 6)] * 2, [computed, restored]).same
