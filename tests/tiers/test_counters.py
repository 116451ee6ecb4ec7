"""B22: what the store counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from hicache_tiers import DiskStore, TierStats
from tests.tiers.pages import IDENTITY, LAYOUT, RECORD, blank, keys_of, read, segments_of, write


def flat(stats: TierStats) -> dict[str, int]:
    fields = msgspec.structs.asdict(stats)
    return fields | {
        f"error {k}": v for k, v in msgspec.structs.asdict(fields.pop("errors")).items()
    }


def test_b22_counters_say_what_happened_and_only_grow(
    open_store: Callable[..., DiskStore], directory: Path
) -> None:
    store = open_store(capacity_bytes=32 * RECORD, segment_bytes=8 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    assert set(flat(store.stats()).values()) == {0}, "every series exists from the start"
    seen = [flat(store.stats())]

    def grown() -> dict[str, int]:
        seen.append(flat(store.stats()))
        change = {name: seen[-1][name] - seen[-2][name] for name in seen[-1]}
        assert min(change.values()) >= 0
        return {name: amount for name, amount in change.items() if amount}

    keys = keys_of(4)
    write(namespace, keys)
    assert grown() == {"written_records": 4, "written_bytes": 4 * 4096}
    write(namespace, keys)
    namespace.contains(keys)
    assert grown() == {}
    namespace.contains(keys_of(10))
    assert grown() == {"misses": 6}
    read(namespace, keys_of(6))
    assert grown() == {"hits": 4, "misses": 2, "read_bytes": 4 * 4096}
    namespace.read(keys[:1], [blank(layers=1)], range(3, 4))
    assert grown() == {"hits": 1, "read_bytes": 1024}
    read(namespace, keys_of(5, 100))
    assert grown() == {"misses": 5}
    os.truncate(segments_of(directory)[0], 3 * RECORD + 100)
    read(namespace, keys)
    assert grown() == {"hits": 3, "read_bytes": 3 * 4096, "misses": 1, "error corrupt": 1}
    write(namespace, keys_of(60, 200))
    change = grown()
    assert change["written_records"] == 60
    assert change["evicted_bytes"] == change["evicted"] * RECORD > 0
    kept = sum(namespace.contains(keys_of(300)))
    assert kept == 3 + 60 - change["evicted"]


def test_a_snapshot_stays_as_it_was(store: DiskStore) -> None:
    namespace = store.namespace(IDENTITY, LAYOUT)
    before = store.stats()
    write(namespace, keys_of(2))
    read(namespace, keys_of(3))
    assert before == TierStats()
    assert store.stats() != before
