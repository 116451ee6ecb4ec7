from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from cacheflow_sgl.engine import namespace
from cacheflow_sgl.engine.namespace import ModelIdentity, new_run_id, pool_identity


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


def identity(path, tag=None, draft=None, **changes):
    return ModelIdentity(model(path, **changes), draft, tag).fields()


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


def test_weight_updates_move_on_and_a_known_checkpoint_comes_back_to_its_own(checkpoints):
    subject = ModelIdentity(model(checkpoints[0]), None, None)
    start = subject.fields()
    subject.weights_changed(str(checkpoints[1]))
    assert subject.fields() == identity(checkpoints[1])
    subject.weights_changed(str(checkpoints[0]))
    assert subject.fields() == start


def test_updates_from_memory_never_meet_any_other_weights(checkpoints):
    subject = ModelIdentity(model(checkpoints[0]), None, "tag")
    seen = [subject.fields()]
    for _ in range(3):
        subject.weights_changed(None)
        assert subject.fields() not in seen
        seen.append(subject.fields())


def shard(**changes):
    fields = {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "is_mla_model": False}
    fields |= {"attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1}
    return SimpleNamespace(**(fields | changes))


def test_shards_pools_and_page_sizes_are_apart_but_mla_ranks_share(checkpoints):
    subject = ModelIdentity(model(checkpoints[0]), None, None)
    pages = SimpleNamespace(order="o", page_size=64)
    pool = SimpleNamespace(dtype="torch.bfloat16", storage_format_tag=None)

    def of(name="kv", pages=pages, pool=pool, **changes):
        return pool_identity(subject, shard(**changes), name, pages, pool)

    tagged = SimpleNamespace(dtype="torch.bfloat16", storage_format_tag="packed")
    others = [
        of(tp_rank=1),
        of(tp_size=4),
        of(pp_size=2),
        of(attn_cp_size=2),
        of(name="swa"),
        of(pages=SimpleNamespace(order="o", page_size=16)),
        of(pages=SimpleNamespace(order="other", page_size=64)),
        of(pool=tagged),
    ]
    assert of() not in others
    assert all(others.count(other) == 1 for other in others)
    assert of(is_mla_model=True) == of(is_mla_model=True, tp_rank=1)
    assert of("mamba", is_mla_model=True) != of("mamba", is_mla_model=True, tp_rank=1)


def test_no_run_id_still_means_no_reuse(monkeypatch, checkpoints):
    monkeypatch.delenv(namespace.RUN_ID_VARIABLE, raising=False)
    assert identity(checkpoints[0], load_format="dummy") != identity(
        checkpoints[0], load_format="dummy"
    )
