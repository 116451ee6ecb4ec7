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

pytestmark = [pytest.mark.engine, pytest.mark.full]

_SCRIPT = """
import json, sys

from cacheflow_sgl import cpu

if __name__ == "__main__":
    cpu.activate()
    import sglang

    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", max_total_tokens=2048
    )
    sampling = {"temperature": 0, "max_new_tokens": 6}
    answer = engine.generate(
        input_ids=json.loads(sys.argv[2]), sampling_params=sampling, return_logprob=True
    )
    engine.shutdown()
    print(json.dumps(answer))
"""


def test_an_engine_says_what_transformers_says(tiny_model: Path, tmp_path: Path):
    prompt = random_prompt(700, seed=4)
    script = tmp_path / "main.py"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model), json.dumps(prompt)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = Generation.from_answer(json.loads(done.stdout.splitlines()[-1]))
    assert compare([Reference(tiny_model).generate(prompt, 6)], [answer]).same
