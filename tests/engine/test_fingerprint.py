import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from cacheflow_sgl.engine.fingerprint import checkpoint_fingerprint


def tensors(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layer.{i}": random.standard_normal((64, 64)).astype(np.float32) for i in range(12)}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(0), folder / "model.safetensors")
    config = {"hidden_size": 64, "rope_theta": 10000.0, "_name_or_path": "me/model"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_same_bytes_same_fingerprint_wherever_they_lie(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert checkpoint_fingerprint(tmp_path / "copy") == checkpoint_fingerprint(checkpoint)


def test_b06_other_weights_of_the_same_shape_differ(checkpoint):
    before = checkpoint_fingerprint(checkpoint)
    save_file(tensors(1), checkpoint / "model.safetensors")
    assert checkpoint_fingerprint(checkpoint) != before


@pytest.mark.parametrize("layer", range(12))
def test_one_retrained_tensor_is_seen(checkpoint, layer):
    before = checkpoint_fingerprint(checkpoint)
    changed = tensors(0)
    changed[f"layer.{layer}"] *= 1.001
    save_file(changed, checkpoint / "model.safetensors")
    assert checkpoint_fingerprint(checkpoint) != before


def test_s9_a_changed_configuration_is_seen_and_an_incidental_one_is_not(checkpoint):
    before = checkpoint_fingerprint(checkpoint)
    edit_config(checkpoint, _name_or_path="you/model", transformers_version="9")
    assert checkpoint_fingerprint(checkpoint) == before
    edit_config(checkpoint, rope_theta=20000.0)
    assert checkpoint_fingerprint(checkpoint) != before


def test_other_formats_are_sampled_all_over(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    data = np.random.default_rng(0).bytes(10_000_000)
    (checkpoint / "pytorch_model.bin").write_bytes(data)
    before = checkpoint_fingerprint(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(data[:5_000_000] + bytes(5_000_000))
    assert checkpoint_fingerprint(checkpoint) != before


def test_a_single_file_is_a_checkpoint(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(1000))
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(1000))
    before = checkpoint_fingerprint(tmp_path / "m.gguf")
    (tmp_path / "other.gguf").write_bytes(b"changed")
    assert checkpoint_fingerprint(tmp_path / "m.gguf") == before


def test_no_weights_no_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_fingerprint(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + bytes(7) + b"not json"])
def test_a_damaged_header_still_has_a_fingerprint(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert checkpoint_fingerprint(tmp_path)
