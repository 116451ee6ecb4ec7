import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from cacheflow_sgl.engine.fingerprint import read_checkpoint


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
    assert read_checkpoint(tmp_path / "copy") == read_checkpoint(checkpoint)


def test_b06_other_weights_of_the_same_shape_differ(checkpoint):
    before = read_checkpoint(checkpoint)
    save_file(tensors(1), checkpoint / "model.safetensors")
    assert read_checkpoint(checkpoint) != before


@pytest.mark.parametrize("layer", range(12))
def test_one_retrained_tensor_is_seen(checkpoint, layer):
    before = read_checkpoint(checkpoint)
    changed = tensors(0)
    changed[f"layer.{layer}"] *= 1.001
    save_file(changed, checkpoint / "model.safetensors")
    assert read_checkpoint(checkpoint) != before


@pytest.mark.parametrize("row", [0, 17, 63])
def test_one_retrained_row_of_a_small_checkpoint_is_seen(checkpoint, row):
    before = read_checkpoint(checkpoint)
    changed = tensors(0)
    changed["layer.3"][row] += 1
    save_file(changed, checkpoint / "model.safetensors")
    assert read_checkpoint(checkpoint) != before


def test_s9_a_changed_configuration_is_seen_and_an_incidental_one_is_not(checkpoint):
    before = read_checkpoint(checkpoint)
    edit_config(checkpoint, _name_or_path="you/model", transformers_version="9")
    assert read_checkpoint(checkpoint) == before
    edit_config(checkpoint, rope_theta=20000.0)
    assert read_checkpoint(checkpoint) != before


def test_other_formats_are_sampled_all_over(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    data = np.random.default_rng(0).bytes(10_000_000)
    (checkpoint / "pytorch_model.bin").write_bytes(data)
    before = read_checkpoint(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(data[:5_000_000] + bytes(5_000_000))
    assert read_checkpoint(checkpoint) != before


def test_configuration_and_weights_are_told_apart(checkpoint):
    before = read_checkpoint(checkpoint)
    edit_config(checkpoint, rope_theta=20000.0)
    after = read_checkpoint(checkpoint)
    assert (after.weights, after.tensors) == (before.weights, before.tensors)
    assert after.config != before.config
    assert before.tensors == frozenset(tensors(0))


def test_a_hub_link_is_known_by_the_hash_it_points_to(checkpoint, tmp_path):
    """Even a change that no sample would see."""
    file = checkpoint / "model.safetensors"

    def link_to(name: str) -> None:
        blob = tmp_path / "blobs" / name
        blob.parent.mkdir(exist_ok=True)
        save_file(tensors(0), blob)
        file.unlink()
        file.symlink_to(blob)

    link_to("a" * 64)
    before = read_checkpoint(checkpoint)
    link_to("b" * 64)
    assert read_checkpoint(checkpoint).weights != before.weights
    assert read_checkpoint(checkpoint).tensors == before.tensors


def test_a_single_file_is_a_checkpoint(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(1000))
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(1000))
    before = read_checkpoint(tmp_path / "m.gguf")
    (tmp_path / "other.gguf").write_bytes(b"changed")
    assert read_checkpoint(tmp_path / "m.gguf") == before


def test_no_weights_no_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_checkpoint(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + bytes(7) + b"not json"])
def test_a_damaged_header_still_has_a_fingerprint(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert read_checkpoint(tmp_path)
