"""Opening: what survives, what is rebuilt, what is refused; and B20, many records."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_tiers import (
    DiskStore,
    RecordLayout,
    StoreConfig,
    StoreError,
    rebuild,
)
from hicache_tiers.index import why_damaged
from hicache_tiers.segments import segment_path
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    disk_bytes,
    finish,
    keys_of,
    python,
    read,
    segments_of,
    write,
)

Open = Callable[..., DiskStore]


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def half_written(path: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def scribbled(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(5):
            file.seek(rng.randrange(path.stat().st_size // 4096) * 4096)
            file.write(rng.randbytes(4096))


def emptied(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def deleted(path: Path, rng: random.Random) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("damage", [cut, half_written, scribbled, emptied, deleted])
def test_b20_a_damaged_index_is_rebuilt(
    open_store: Open, directory: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    keys = keys_of(60)
    store = open_store(segment_bytes=8 * RECORD)
    assert all(write(store.namespace(IDENTITY, LAYOUT), keys))
    other = store.namespace({"model": "other"}, RecordLayout(700, (3,)))
    assert all(write(other, keys[:2]))
    store.namespace(IDENTITY, LAYOUT).forget(keys[5:10])
    listed = [info.identity for info in store.namespaces()]
    store.close()
    for round_ in range(3):
        damage(directory / "index" / "data.mdb", random.Random(round_))
        store = open_store(segment_bytes=8 * RECORD)
        namespace = store.namespace(IDENTITY, LAYOUT)
        hits = read(namespace, keys)
        assert hits[:5] + hits[10:] == [True] * 55
        assert all(read(store.namespace({"model": "other"}, RecordLayout(700, (3,))), keys[:2]))
        assert sorted(map(str, listed)) == sorted(str(i.identity) for i in store.namespaces())
        assert disk_bytes(directory) <= store.usage().used_bytes
        store.check_integrity()
        assert all(write(namespace, keys_of(3, 1000 + round_)))
        store.close()


def test_damage_that_would_kill_lmdb_is_seen_before(open_store: Open, directory: Path) -> None:
    store = open_store()
    assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(60)))
    store.close()
    index = directory / "index"
    whole = (index / "data.mdb").read_bytes()
    assert why_damaged(index) is None
    damaged = {
        "cut to two pages": whole[:8192],
        "cut by one page": whole[:-4096],
        "cut within the first page": whole[:100],
        "zeros but for the meta pages": whole[:8192] + bytes(len(whole) - 8192),
        "garbage but for the meta pages": whole[:8192] + random.Random(0).randbytes(len(whole)),
        "other meta pages": bytes(8192) + whole[8192:],
    }
    for content in damaged.values():
        (index / "data.mdb").write_bytes(content)
        assert why_damaged(index) is not None
    (index / "data.mdb").write_bytes(damaged["cut by one page"])
    assert why_damaged(index) == "it is cut short", "by its length: a long index is not walked"
    (index / "data.mdb").write_bytes(whole)
    assert why_damaged(index) is None


def test_a_rebuild_leaves_out_what_was_never_complete(open_store: Open, directory: Path) -> None:
    """A record cut off by a crash, an empty file, a file of another kind."""
    store = open_store()
    keys = keys_of(5)
    write(store.namespace(IDENTITY, LAYOUT), keys)
    store.close()
    (path,) = segments_of(directory)
    os.truncate(path, 5 * RECORD - 4096)
    segment_path(directory / "segments", 7).touch()
    stranger = directory / "segments" / "000000" / "notes.txt"
    stranger.write_text("not ours")
    shutil.rmtree(directory / "index")
    store = open_store()
    assert read(store.namespace(IDENTITY, LAYOUT), keys) == [True] * 4 + [False]
    assert store.stats().errors.corrupt == 0
    assert [p.name for p in segments_of(directory)] == [path.name]
    assert stranger.exists()
    assert write(store.namespace(IDENTITY, LAYOUT), keys) == [True] * 5
    assert len(segments_of(directory)) == 2


def test_a_rebuild_frees_what_it_cannot_use(open_store: Open, directory: Path) -> None:
    store = open_store()
    keys = keys_of(5)
    write(store.namespace(IDENTITY, LAYOUT), keys)
    store.close()
    (path,) = segments_of(directory)
    with path.open("r+b") as file:
        file.seek(2 * RECORD + 20)
        file.write(b"the header of the third record")
    shutil.rmtree(directory / "index")
    store = open_store()
    assert read(store.namespace(IDENTITY, LAYOUT), keys) == [True] * 2 + [False] + [True] * 2
    assert disk_bytes(directory) == 4 * RECORD


def test_a_rebuild_that_is_killed_is_done_again(
    open_store: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segment_bytes=RECORD)
    keys = keys_of(6)
    write(store.namespace(IDENTITY, LAYOUT), keys)
    store.close()
    shutil.rmtree(directory / "index")
    add_segment = rebuild._add_segment
    left = [3]

    def stop(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return add_segment(*args)

    monkeypatch.setattr(rebuild, "_add_segment", stop)
    with pytest.raises(KeyboardInterrupt):
        open_store(segment_bytes=RECORD)
    monkeypatch.undo()
    assert all(read(open_store(segment_bytes=RECORD).namespace(IDENTITY, LAYOUT), keys))


def test_a_segment_file_that_never_got_its_id_is_removed(open_store: Open, directory: Path) -> None:
    store = open_store()
    write(store.namespace(IDENTITY, LAYOUT), keys_of(2))
    store.close()
    unborn = segment_path(directory / "segments", 1)
    unborn.touch()
    open_store()
    assert not unborn.exists()


OTHER_USER = """
import sys
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig, StoreError
try:
    DiskStore.open(StoreConfig(directory=Path(sys.argv[1]), capacity_bytes=1 << 26))
except StoreError as error:
    print(error)
"""


def test_an_index_lost_under_its_users_is_not_rebuilt_beside_them(
    open_store: Open, directory: Path
) -> None:
    store = open_store()
    namespace = store.namespace(IDENTITY, LAYOUT)
    write(namespace, keys_of(3))
    (directory / "index" / "data.mdb").rename(directory / "index" / "away")
    said = finish(python(OTHER_USER, directory)).strip()
    assert "other processes use the store; stop them" in said and "\n" not in said
    assert all(read(namespace, keys_of(3)))
    (directory / "index" / "away").rename(directory / "index" / "data.mdb")


def test_b20_many_records(
    open_store: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No listing on the way, few entries a directory, work by look-up that doesn't grow."""
    layout = RecordLayout(2, (16,))
    count = 20_000
    store = open_store(capacity_bytes=1 << 30, segment_bytes=64 * 8192)
    namespace = store.namespace(IDENTITY, layout)
    keys = keys_of(count)
    pages = [np.zeros((2, 16), dtype=np.uint8)]
    listings: list[object] = []
    for name in ("listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real: (listings.append(a), real(*a))[1])
    for start in range(0, count, 1000):
        batch = keys[start : start + 1000]
        assert all(namespace.write(batch, [pages] * 1000))
    assert all(namespace.contains(keys))
    assert not any(namespace.contains([key + "x" for key in keys[:128]]))
    target = [np.ones((2, 16), dtype=np.uint8)]
    assert all(namespace.read(keys[::100], [target] * 200))
    assert not listings
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    assert max(len(list(folder.iterdir())) for folder in folders) < 4096
    listings.clear()
    assert store.usage().records == count
    store.close()
    reopened = open_store(capacity_bytes=1 << 30, segment_bytes=64 * 8192)
    assert all(reopened.namespace(IDENTITY, layout).contains(keys))
    assert not listings, "reopening lists nothing either"


def test_segment_names_spread_over_directories() -> None:
    root = Path("segments")
    paths = [segment_path(root, number) for number in range(0, 3_000_000, 97)]
    assert len(set(paths)) == len(paths)
    assert len({path.parent for path in paths}) < 4096
    assert segment_path(root, 1023).parent == segment_path(root, 0).parent
    assert segment_path(root, 1024).parent != segment_path(root, 0).parent


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"format": 999, "index_limit_bytes": 1}', "format 999, this version reads 1"),
        ("not json", "not readable as a store format"),
        ("{}", "not readable as a store format"),
        ("\xff\xfe", "not readable as a store format"),
    ],
)
def test_another_format_is_refused_and_left_alone(
    open_store: Open, directory: Path, content: str, said: str
) -> None:
    open_store().close()
    path = directory / "FORMAT"
    path.write_bytes(content.encode("latin-1"))
    before = sorted(directory.rglob("*"))
    with pytest.raises(StoreError, match=said) as raised:
        open_store()
    assert "\n" not in str(raised.value) and str(directory) in str(raised.value)
    assert sorted(directory.rglob("*")) == before
    assert path.read_bytes() == content.encode("latin-1")


def test_the_format_file_is_json(store: DiskStore, directory: Path) -> None:
    found = json.loads((directory / "FORMAT").read_text())
    assert found == {
        "format": 1,
        "index_limit_bytes": 64 << 20,
        "written_by": "hicache_tiers",
    }


def test_b23_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"file, not a directory|Not a directory") as raised:
            DiskStore.open(StoreConfig(directory=path, capacity_bytes=1 << 20))
        assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    assert (tmp_path / "file").read_text() == ""


UNWRITABLE = """
import os, sys
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig, StoreError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in sys.argv[1:]:
    try:
        DiskStore.open(StoreConfig(directory=Path(name), capacity_bytes=1 << 20))
    except StoreError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_b23_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    said = finish(python(UNWRITABLE, closed, closed / "missing" / "parent")).splitlines()
    assert len(said) == 2
    assert all("Permission denied" in line and "give a writable directory" in line for line in said)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_b23_parents_are_made_and_nothing_is_open_to_others(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        store = DiskStore.open(StoreConfig(directory=tmp_path / "a" / "b", capacity_bytes=1 << 20))
        assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(3)))
        made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
        assert len(made) >= 8
        for path in made:
            assert path.stat().st_mode & 0o077 == 0, path
        store.close()
    finally:
        os.umask(old)


OPENER = """
import sys
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig
from tests.tiers.pages import *
store = DiskStore.open(StoreConfig(directory=Path(sys.argv[1]), capacity_bytes=1 << 24))
namespace = store.namespace(IDENTITY, LAYOUT)
assert all(write(namespace, keys_of(4, int(sys.argv[2])))), store.stats()
store.close()
"""


def test_b23_all_ranks_may_start_at_once(directory: Path) -> None:
    for process in [python(OPENER, directory, rank) for rank in range(4)]:
        finish(process)
    store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 24))
    assert all(read(store.namespace(IDENTITY, LAYOUT), keys_of(7)))
    store.check_integrity()
    store.close()


@pytest.mark.parametrize(
    "setting", [{"capacity_bytes": 0}, {"segment_bytes": 0}, {"io_threads": 0}, {"deadline_s": 0.0}]
)
def test_settings_that_cannot_work(tmp_path: Path, setting: dict[str, int]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        StoreConfig(**({"directory": tmp_path, "capacity_bytes": 1} | setting))


def test_an_unreadable_row_is_a_miss_and_the_next_open_rebuilds(
    open_store: Open, directory: Path
) -> None:
    store = open_store()
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(3)
    write(namespace, keys)
    opened = store._now()
    assert opened is not None
    with opened.resources.index.writing() as txn:
        txn._put("entries", namespace._name(keys[1]), b"\xc1")
    assert namespace.contains(keys[:1]) == [True]
    assert namespace.contains(keys[1:2]) == read(namespace, keys[1:2]) == [False]
    assert write(namespace, keys[1:2]) == [False]
    store.close()
    store = open_store()
    assert all(read(store.namespace(IDENTITY, LAYOUT), keys))


def test_a_rebuild_beyond_the_index_limit_keeps_the_newest(
    open_store: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = RecordLayout(200, (1,))  # large rows
    store = open_store(segment_bytes=5 * RECORD)
    keys = keys_of(150)
    assert all(write(store.namespace(IDENTITY, layout), keys))
    used = store.usage().used_bytes
    store.close()
    last = segments_of(directory)[-1]
    path = directory / "FORMAT"
    path.write_text(path.read_text().replace(str(64 << 20), str(256 << 10)))
    shutil.rmtree(directory / "index")
    keeper = DiskStore.open_existing(directory)
    said = [record.message for record in caplog.records if "size limit" in record.message]
    kept = read(keeper.namespace(IDENTITY, layout), keys)
    assert kept == [False] * (150 - sum(kept)) + [True] * sum(kept)
    assert 10 < sum(kept) < 150
    assert len(said) == 1 and f"the {30 - len(segments_of(directory))} oldest segments" in said[0]
    assert disk_bytes(directory) <= keeper.usage().used_bytes < used
    keeper.check_integrity()
    opened = keeper._now()
    assert opened is not None
    with opened.resources.index.reading() as txn:
        assert txn.next_segment() == int(last.stem, 16) + 1
    keeper.close()


def test_strange_things_among_the_segments(open_store: Open, directory: Path) -> None:
    """They are left alone, and stop neither a rebuild nor a write."""
    store = open_store(segment_bytes=2 * RECORD)
    keys = keys_of(4)
    write(store.namespace(IDENTITY, LAYOUT), keys)
    store.close()
    segments = directory / "segments"
    os.utime(segments_of(directory)[0], (-1000, -1000))
    strange = [segment_path(segments, number) for number in (2, 3, 9, 1 << 64)]
    strange[3].parent.mkdir()
    strange[0].mkdir()
    os.mkfifo(strange[1], mode=0o600)
    strange[2].symlink_to("nowhere")
    strange[3].write_bytes(b"x")
    for name in ("kept", "rebuilt"):
        if name == "rebuilt":
            shutil.rmtree(directory / "index")
        store = open_store(segment_bytes=2 * RECORD)
        namespace = store.namespace(IDENTITY, LAYOUT)
        assert all(read(namespace, keys))
        assert all(write(namespace, keys_of(4, 100 if name == "kept" else 200)))
        store.check_integrity()
        assert store.gc().stray_files == 0
        store.close()
    assert all(os.path.lexists(path) for path in strange)
