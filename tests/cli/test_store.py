import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cacheflow_sgl.cli.main import app
from hicache_tiers import DiskStore, RecordLayout, StoreConfig

run = CliRunner().invoke
LAYOUT = RecordLayout(2, (4096, 4096))
IDENTITY = {"weights": "0123456789abcdef", "pool": "kv", "tp": "0/1", "pp": "0/1", "page_size": 64}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store of four pages of one model and one of another."""
    store = DiskStore.open(StoreConfig(directory=tmp_path / "kv", capacity_bytes=10**8))
    for tag, count in (("a", 4), ("b", 1)):
        namespace = store.namespace(IDENTITY | {"tag": tag}, LAYOUT)
        pages = [tuple(np.full((2, 4096), n, np.uint8) for _ in range(2)) for n in range(count)]
        assert all(namespace.write([f"key{n}" for n in range(count)], pages))
    store.close()
    return tmp_path / "kv"


def report(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out.json").read_text())


def test_ls_shows_each_namespace(directory, tmp_path):
    result = run(app, ["store", "ls", str(directory), "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert "5 pages" in result.output
    assert sorted(info["records"] for info in report(tmp_path)["namespaces"]) == [1, 4]
    assert report(tmp_path)["namespaces"][0]["identity"]["pool"] == "kv"


@pytest.mark.parametrize("layer", [0, 1])
def test_verify_finds_a_flipped_byte_in_any_layer(directory, tmp_path, layer):
    arguments = ["store", "verify", str(directory), "--json", str(tmp_path / "out.json")]
    assert run(app, arguments).exit_code == 0
    assert report(tmp_path)["damaged"] == []
    (segment,) = [path for path in (directory / "segments").rglob("*") if path.is_file()]
    content = bytearray(segment.read_bytes())
    content[4096 + layer * 8192 + 100] ^= 1
    segment.write_bytes(content)
    result = run(app, arguments)
    assert result.exit_code == 1
    assert "1 damaged" in result.output
    assert [damage["key"] for damage in report(tmp_path)["damaged"]] == ["key0"]


def test_gc_applies_a_capacity(directory, tmp_path):
    assert run(app, ["store", "gc", str(directory)]).exit_code == 0
    store = DiskStore.open_existing(directory)
    used = store.usage().used_bytes
    assert store.usage().records == 5, "without a capacity nothing is evicted"
    store.close()
    arguments = ["--capacity", "70000", "--json", str(tmp_path / "out.json")]
    result = run(app, ["store", "gc", str(directory), *arguments])
    assert result.exit_code == 0, result.output
    store = DiskStore.open_existing(directory)
    usage = store.usage()
    store.check_integrity()
    store.close()
    assert 0 < usage.records < 5
    assert usage.used_bytes <= 70000
    assert report(tmp_path)["evicted_records"] == 5 - usage.records
    assert report(tmp_path)["freed_bytes"] == used - usage.used_bytes


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_a_folder_without_a_store_is_named_and_left_alone(tmp_path, command):
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "other", tmp_path / "missing"):
        result = run(app, ["store", command, str(path)])
        assert result.exit_code == 2
        assert str(path) in result.output.replace("\n", "")
    assert list((tmp_path / "other").iterdir()) == []
    assert not (tmp_path / "missing").exists()


def test_a_bad_capacity_is_one_line(directory):
    result = run(app, ["store", "gc", str(directory), "--capacity", "lots"])
    assert result.exit_code == 2
    assert "cacheflow: --capacity: 'lots' is not a size" in result.output
