"""`DiskStore.check`: what a launcher asks before any process opens the store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_tiers import DiskStore, StoreConfig, StoreError
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    finish,
    keys_of,
    python,
    read,
    segments_of,
    write,
)

Open = Callable[..., DiskStore]


def check(directory: Path, capacity_bytes: int = 1 << 20) -> None:
    DiskStore.check(StoreConfig(directory=directory, capacity_bytes=capacity_bytes))


def test_a_missing_directory_is_made_and_can_be_opened(open_store: Open, directory: Path) -> None:
    check(directory / "a" / "b")
    assert (directory / "a" / "b").stat().st_mode & 0o777 == 0o700
    store = open_store(directory=directory / "a" / "b", capacity_bytes=1 << 40)
    assert store.usage().index_limit_bytes == 64 << 30, "the limit is the opener's to set"
    assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(2)))


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


LEAVES_A_SEGMENT = """
import os, sys
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig
from tests.tiers.pages import *
store = DiskStore.open(StoreConfig(directory=Path(sys.argv[1]), capacity_bytes=1 << 26))
assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(40)))
os._exit(0)
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_stored_stays_as_it_is(open_store: Open, directory: Path, damaged: bool) -> None:
    """With a cap below what is there, a dead owner's segment, a larger index limit to be had."""
    finish(python(LEAVES_A_SEGMENT, directory))
    if damaged:
        os.truncate(directory / "index" / "data.mdb", 5000)
    before = content(directory)
    for capacity in (2 * RECORD, 1 << 40):
        check(directory, capacity)
        assert content(directory) == before
    assert len(segments_of(directory)) == 1
    assert all(read(open_store().namespace(IDENTITY, LAYOUT), keys_of(40)))


def test_a_store_in_use_may_be_checked(open_store: Open, directory: Path) -> None:
    store = open_store()
    namespace = store.namespace(IDENTITY, LAYOUT)
    assert all(write(namespace, keys_of(3)))
    check(directory)
    (directory / "index" / "data.mdb").rename(directory / "index" / "away")
    with pytest.raises(StoreError, match="other processes use the store"):
        check(directory)
    (directory / "index" / "away").rename(directory / "index" / "data.mdb")
    check(directory)
    assert all(write(namespace, keys_of(6))) and all(read(namespace, keys_of(6)))


@pytest.mark.parametrize("content", ['{"format": 999, "index_limit_bytes": 1}', "not json"])
def test_it_refuses_as_an_open_does(open_store: Open, directory: Path, content: str) -> None:
    open_store().close()
    (directory / "FORMAT").write_text(content)
    shutil.rmtree(directory / "index")
    said = []
    for refusing in (check, lambda path: open_store(directory=path)):
        with pytest.raises(StoreError) as raised:
            refusing(directory)
        said.append(str(raised.value))
        with pytest.raises(StoreError, match="file, not a directory"):
            refusing(directory / "FORMAT" / "below")
        with pytest.raises(StoreError, match="file, not a directory"):
            refusing(directory / "FORMAT")
    assert said[0] == said[1]
    assert not (directory / "index").exists()


NOBODY = """
import os, sys
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig, StoreError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in sys.argv[1:]:
    try:
        DiskStore.check(StoreConfig(directory=Path(name), capacity_bytes=1 << 20))
    except StoreError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_no_permission(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(0o755)
    closed, other, index = (tmp_path / name for name in ("closed", "other", "index"))
    closed.mkdir(mode=0o555)
    for path in (other, index):
        DiskStore.open(StoreConfig(directory=path, capacity_bytes=1 << 20)).close()
    for path in [index, *index.rglob("*")]:
        os.chown(path, 65534, 65534)
    os.chown(index / "index" / "data.mdb", 0, 0)
    paths = (closed, closed / "missing" / "parent", other, index)
    said = finish(python(NOBODY, *paths)).splitlines()
    assert len(said) == 4
    assert all("Permission denied" in line and "give a writable directory" in line for line in said)
