"""The tiny model: the same bytes for the same recipe, and an output that hangs on the context."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from cacheflow_sgl.cli.main import app
from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model
from tests.harness.prompts import random_prompt
from tests.harness.reference import Reference

SMALL = Recipe(layers=1, hidden=64, heads=4, kv_heads=1, vocab=512)


def hashes(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def test_a_recipe_gives_the_same_bytes_in_every_process(tmp_path: Path):
    write_tiny_model(tmp_path / "here", SMALL)
    code = (
        "import sys; from pathlib import Path\n"
        "from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model\n"
        f"write_tiny_model(Path(sys.argv[1]), {SMALL!r})"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "there")],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
        timeout=120,
    )
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there")


def test_another_seed_gives_other_weights_and_the_same_tokenizer(tmp_path: Path):
    first = hashes(write_tiny_model(tmp_path / "a", SMALL))
    other = hashes(write_tiny_model(tmp_path / "b", Recipe(**{**vars(SMALL), "seed": 1})))
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


def test_the_default_is_small_and_readable(tiny_model: Path):
    assert sum(path.stat().st_size for path in tiny_model.iterdir()) < 40e6
    modes = {path.stat().st_mode & 0o777 for path in tiny_model.iterdir()}
    assert len(modes) == 1
    config = json.loads((tiny_model / "config.json").read_text())
    assert config["max_position_embeddings"] == 32768


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_it_in_its_own_dtype(tmp_path: Path, dtype: str):
    recipe = Recipe(**{**vars(SMALL), "dtype": dtype})
    reference = Reference(write_tiny_model(tmp_path / "m", recipe))
    assert reference.dtype == getattr(torch, dtype)
    assert len(reference.generate([1, 2, 3], max_new_tokens=3).output_ids) == 3


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def test_greedy_output_does_not_run_in_circles(reference: Reference):
    for seed in range(2):
        output = reference.generate(random_prompt(300, seed), max_new_tokens=24).output_ids
        assert len(set(output)) >= 18


@pytest.mark.parametrize("changed", [slice(0, 16), slice(128, 192)])
def test_every_part_of_the_context_counts(reference: Reference, changed: slice):
    prompt = random_prompt(320, seed=5)
    other = list(prompt)
    other[changed] = random_prompt(changed.stop - changed.start, seed=6)
    first, second = (reference.generate(p, max_new_tokens=1) for p in (prompt, other))
    assert abs(first.logprobs[0] - second.logprobs[0]) > 0.05


def test_generated_tokens_are_printable(tiny_model: Path, reference: Reference):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    output = reference.generate(random_prompt(100, seed=8), max_new_tokens=24).output_ids
    texts = [tokenizer.decode([token]) for token in output]
    assert all(text and text.isascii() and text.isprintable() for text in texts)
    assert tokenizer.eos_token_id not in output


def test_the_tokenizer_gives_text_back(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len(tokenizer) == Recipe().vocab
    text = "def f(x):\n    return  x + 1  # naïve 日本 🙂 The END"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())


def test_the_chat_template_marks_every_turn(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_tiny_model_is_replaced_and_anything_else_is_kept(tmp_path: Path):
    directory = tmp_path / "m"
    write_tiny_model(directory, SMALL)
    before = hashes(directory)
    write_tiny_model(directory, Recipe(**{**vars(SMALL), "seed": 3}))
    assert hashes(directory) != before

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="--force"):
        write_tiny_model(tmp_path / "other", SMALL)
    assert (tmp_path / "other" / "config.json").read_text() == "{}"
    write_tiny_model(tmp_path / "other", SMALL, force=True)
    assert hashes(tmp_path / "other") == before

    with pytest.raises(NotADirectoryError):
        write_tiny_model(tmp_path / "m" / "config.json", SMALL)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": 100}, "hidden is 100"),
        ({"kv_heads": 3}, "kv_heads is 3"),
        ({"vocab": 100}, "vocab is 100"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_an_impossible_recipe_is_refused(values, named: str):
    with pytest.raises(ValueError, match=named):
        Recipe(**values)


def test_the_command_writes_it_or_says_why_not(tmp_path: Path):
    run = CliRunner().invoke
    small = ["--layers", "1", "--hidden", "64", "--kv-heads", "1", "--vocab", "512"]
    assert run(app, ["tiny-model", str(tmp_path / "m"), *small]).exit_code == 0
    assert hashes(tmp_path / "m") == hashes(write_tiny_model(tmp_path / "n", SMALL))
    refused = run(app, ["tiny-model", str(tmp_path), *small])
    assert refused.exit_code == 1
    assert "holds something that is not a tiny model" in refused.output
    refused = run(app, ["tiny-model", str(tmp_path / "x"), "--layers", "0"])
    assert (refused.exit_code, (tmp_path / "x").exists()) == (1, False)
