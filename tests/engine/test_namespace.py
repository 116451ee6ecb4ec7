import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from cacheflow_sgl.engine import namespace
from cacheflow_sgl.engine.namespace import (
    ModelIdentity,
    new_run_id,
    pool_identity,
    updated_weights,
)


def model(path, **changes):
    fields = {
        "model_path": str(path),
        "revision": None,
        "load_format": "auto",
        "dtype": "float32",
        "quantization": None,
        "quantization_param_path": None,
        "modelopt_quant": None,
        "kv_cache_dtype": "auto",
        "qsa_indexer_dtype": "auto",
        "model_impl": "auto",
        "json_model_override_args": "{}",
        "model_loader_extra_config": "{}",
        "modelopt_checkpoint_restore_path": None,
        "rl_quant_profile": None,
        "decrypted_config_file": None,
        "download_dir": None,
        "quantize_and_serve": False,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture
def checkpoints(tmp_path):
    folders = []
    for seed in (0, 1):
        folder = tmp_path / f"checkpoint-{seed}"
        folder.mkdir()
        random = np.random.default_rng(seed)
        weights = {"w": random.standard_normal((8, 8)).astype(np.float32)}
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text('{"rope_theta": 10000.0}')
        folders.append(folder)
    return folders


def identity(path, tag=None, draft=None, adapters=(), **changes):
    return ModelIdentity(model(path, **changes), draft, adapters, tag).fields()


@pytest.fixture
def serving(monkeypatch):
    """Make this process one that serves the checkpoint given, as SGLang's scheduler does."""
    from sglang.srt import runtime_context

    monkeypatch.setattr(namespace, "_remembered", {})

    def serve(path) -> ModelIdentity:
        served = model(path)
        monkeypatch.setattr(runtime_context, "get_model", lambda: served)
        namespace.remember_served_checkpoint()
        return ModelIdentity(served, None, (), None)

    return serve


def test_the_same_checkpoint_is_the_same_model(checkpoints):
    assert identity(checkpoints[0]) == identity(checkpoints[0])
    assert identity(checkpoints[0]) != identity(checkpoints[1])


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_scaling": {"factor": 4.0}}'},
    ],
)
def test_s9_what_changes_kv_changes_the_model(checkpoints, change):
    assert identity(checkpoints[0], **change) != identity(checkpoints[0])


def test_the_content_of_a_settings_file_counts(checkpoints, tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text('{"0": 1.0}')
    first = identity(checkpoints[0], quantization_param_path=str(scales))
    scales.write_text('{"0": 2.0}')
    assert identity(checkpoints[0], quantization_param_path=str(scales)) != first


def test_the_models_own_code_counts(checkpoints):
    first = identity(checkpoints[0])
    (checkpoints[0] / "modeling_mine.py").write_text("x = 1")
    assert identity(checkpoints[0]) != first


def test_the_snapshot_fingerprinted_is_the_one_in_the_download_directory(checkpoints, tmp_path):
    """Two download directories hold different weights of one hub name."""

    def download(directory: Path, checkpoint: Path) -> str:
        revision = "a" * 40
        repository = directory / "models--me--model"
        shutil.copytree(checkpoint, repository / "snapshots" / revision)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revision)
        return str(directory)

    one, two = (download(tmp_path / f"hub-{i}", c) for i, c in enumerate(checkpoints))
    assert identity("me/model", download_dir=one) == identity(checkpoints[0])
    assert identity("me/model", download_dir=two) == identity(checkpoints[1])


def test_the_order_of_override_keys_does_not_matter(checkpoints):
    one, two = '{"a": 1, "b": 2}', '{"b": 2, "a": 1}'
    assert identity(checkpoints[0], json_model_override_args=one) == identity(
        checkpoints[0], json_model_override_args=two
    )


def test_tag_and_draft_count(checkpoints):
    plain = identity(checkpoints[0])
    assert identity(checkpoints[0], tag="a") != plain
    assert identity(checkpoints[0], tag="a") != identity(checkpoints[0], tag="b")
    assert identity(checkpoints[0], draft=str(checkpoints[1])) != plain


def test_weights_that_cannot_be_fingerprinted_are_not_reused_by_the_next_run(checkpoints, caplog):
    new_run_id()
    first = identity(checkpoints[0], load_format="dummy")
    assert identity(checkpoints[0], load_format="dummy") == first  # every rank of one run agrees
    new_run_id()
    assert identity(checkpoints[0], load_format="dummy") != first
    assert "will not be reused after a restart" in caplog.text


def test_a_tag_vouches_for_them(checkpoints):
    first = identity(checkpoints[0], tag="mine", load_format="dummy")
    new_run_id()
    assert identity(checkpoints[0], tag="mine", load_format="dummy") == first


def test_a_model_that_is_nowhere_on_this_machine_is_not_reused(tmp_path):
    first = identity(tmp_path / "no-such-model")
    new_run_id()
    assert identity(tmp_path / "no-such-model") != first


def test_weight_updates_move_on_and_a_known_checkpoint_comes_back_to_its_own(checkpoints, serving):
    subject = serving(checkpoints[0])
    start = subject.fields()
    subject.weights_changed(updated_weights(str(checkpoints[1])))
    assert subject.fields() == identity(checkpoints[1])
    subject.weights_changed(updated_weights(str(checkpoints[0])))
    assert subject.fields() == start


def test_an_update_replaces_the_weights_and_not_the_configuration(checkpoints, serving):
    """SGLang goes on computing with the configuration it started with."""
    (checkpoints[1] / "config.json").write_text('{"rope_theta": 99.0}')
    subject = serving(checkpoints[0])
    subject.weights_changed(updated_weights(str(checkpoints[1])))
    assert subject.fields() != identity(checkpoints[1])
    assert subject.fields() != identity(checkpoints[0])


def test_an_update_of_some_tensors_only_is_of_unknown_weights(checkpoints, serving):
    weights = {"other": np.zeros((2, 2), np.float32)}
    save_file(weights, checkpoints[1] / "model.safetensors")
    serving(checkpoints[0])
    assert updated_weights(str(checkpoints[1])) is None
    assert updated_weights(str(checkpoints[1] / "missing")) is None


def test_updates_from_memory_never_meet_any_other_weights(checkpoints):
    subject = ModelIdentity(model(checkpoints[0]), None, (), "tag")
    seen = [subject.fields()]
    for _ in range(3):
        subject.weights_changed(None)
        assert subject.fields() not in seen
        seen.append(subject.fields())


def test_weights_saved_over_the_served_ones_are_not_taken_for_them(checkpoints, serving):
    """A backend attached later gets the identity of the files as they were when loaded."""
    loaded = serving(checkpoints[0]).fields()
    shutil.copy(checkpoints[1] / "model.safetensors", checkpoints[0])
    assert identity(checkpoints[0]) == loaded
    # Once the weights have been updated from there, the files count as they are now.
    assert updated_weights(str(checkpoints[0])) == identity(checkpoints[1])["weights"]


def test_the_draft_model_changes_with_the_weights(checkpoints):
    subject = ModelIdentity(model(checkpoints[0]), str(checkpoints[1]), (), None)
    before = subject.fields()
    subject.weights_changed("known")
    assert subject.fields()["draft"] != before["draft"]


def test_b08_an_adapter_retrained_in_place_is_another_model(checkpoints):
    adapter = str(checkpoints[1])
    plain, first = identity(checkpoints[0]), identity(checkpoints[0], adapters=[adapter])
    assert first != plain
    weights = {"w": np.ones((8, 8), np.float32)}
    save_file(weights, checkpoints[1] / "model.safetensors")
    assert identity(checkpoints[0], adapters=[adapter]) not in (plain, first)


def shard(**changes):
    fields = {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "is_mla_model": False}
    fields |= {"attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1}
    return SimpleNamespace(**(fields | changes))


def test_shards_pools_and_page_sizes_are_apart_but_mla_ranks_share(checkpoints):
    subject = ModelIdentity(model(checkpoints[0]), None, (), None)
    pages = SimpleNamespace(order="o", page_size=64)
    plain = {"dtype": "torch.bfloat16", "storage_format_tag": None}
    plain |= {"start_layer": 0, "end_layer": 8}
    pool = SimpleNamespace(**plain)

    def of(name="kv", pages=pages, pool=pool, **changes):
        return pool_identity(subject, shard(**changes), name, pages, pool, anchor=moved)

    layerless = SimpleNamespace(dtype="torch.bfloat16", storage_format_tag=None)
    tagged = SimpleNamespace(**(plain | {"storage_format_tag": "packed"}))
    moved = SimpleNamespace(**(plain | {"start_layer": 2, "end_layer": 10}))
    others = [
        of(tp_rank=1),
        of(tp_size=4),
        of(pp_size=2),
        of(attn_cp_size=2),
        of(name="swa"),
        of(pages=SimpleNamespace(order="o", page_size=16)),
        of(pages=SimpleNamespace(order="other", page_size=64)),
        of(pool=tagged),
        of(pool=moved),
    ]
    assert of(pool=layerless)["layers"] == "2-10"
    assert of() not in others
    assert all(others.count(other) == 1 for other in others)
    assert of(is_mla_model=True) == of(is_mla_model=True, tp_rank=1)
    assert of("mamba", is_mla_model=True) != of("mamba", is_mla_model=True, tp_rank=1)


def test_no_run_id_still_means_no_reuse(monkeypatch, checkpoints):
    monkeypatch.delenv(namespace.RUN_ID_VARIABLE, raising=False)
    assert identity(checkpoints[0], load_format="dummy") != identity(
        checkpoints[0], load_format="dummy"
    )
