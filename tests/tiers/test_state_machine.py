"""Any sequence of calls against a dictionary, with the invariants checked after each."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_tiers import DiskStore, Namespace, StoreConfig
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    blank,
    disk_bytes,
    keys_of,
    page,
    read,
    write,
)

KEYS = keys_of(40)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=12)


class StoreMachine(RuleBasedStateMachine):
    """A store of about 24 records and two namespaces; the model knows what may be there."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.capacity = 24 * RECORD
        self.evicted_before = 0
        self.stored: list[set[str]] = [set(), set()]
        self.complete = True  # nothing was evicted since the model was last emptied

    @initialize(segment_records=st.sampled_from([1, 2, 5]))
    def start(self, segment_records: int) -> None:
        self.segment_bytes = segment_records * RECORD
        self.open()

    def open(self) -> None:
        self.store = DiskStore.open(
            StoreConfig(
                directory=self.directory,
                capacity_bytes=self.capacity,
                segment_bytes=self.segment_bytes,
                io_threads=2,
            )
        )
        identities = (IDENTITY, IDENTITY | {"shard": 1})
        self.spaces: list[Namespace] = [self.store.namespace(i, LAYOUT) for i in identities]

    @rule(space=st.integers(0, 1), keys=some_keys)
    def write(self, space: int, keys: list[str]) -> None:
        assert all(write(self.spaces[space], keys))
        self.stored[space].update(keys)

    @rule(space=st.integers(0, 1), keys=some_keys)
    def read(self, space: int, keys: list[str]) -> None:
        hits = read(self.spaces[space], keys)
        assert hits == self.spaces[space].contains(keys)
        self.compare(space, keys, hits)

    @rule(space=st.integers(0, 1), key=st.sampled_from(KEYS), lo=st.integers(0, 3))
    def read_upper_layers(self, space: int, key: str, lo: int) -> None:
        target = blank(layers=LAYOUT.layers - lo)
        (hit,) = self.spaces[space].read([key], [target], range(lo, LAYOUT.layers))
        self.compare(space, [key], [hit])
        if hit:
            for got, whole in zip(target, page(key), strict=True):
                assert (got == whole[lo:]).all()

    def compare(self, space: int, keys: list[str], hits: list[bool]) -> None:
        for key, hit in zip(keys, hits, strict=True):
            assert not hit or key in self.stored[space], f"{key} came from nowhere"
            assert hit or key not in self.stored[space] or not self.complete, f"{key} is lost"

    @rule(space=st.integers(0, 1), keys=some_keys)
    def forget(self, space: int, keys: list[str]) -> None:
        self.spaces[space].forget(keys)
        assert not any(self.spaces[space].contains(keys))
        self.stored[space].difference_update(keys)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.stored = [set(), set()]
        self.complete = self.store.stats().evicted == 0
        assert self.store.usage().records == 0

    @rule(space=st.integers(0, 1))
    def clear_namespace(self, space: int) -> None:
        self.spaces[space].clear()
        self.stored[space] = set()

    @rule()
    def reopen(self) -> None:
        before = [space.contains(KEYS) for space in self.spaces]
        self.store.close()
        self.open()
        assert [space.contains(KEYS) for space in self.spaces] == before

    @precondition(lambda self: self.complete)
    @rule()
    def rebuild(self) -> None:
        """Lose the index: every record that was there comes back, dropped ones may as well."""
        self.store.close()
        shutil.rmtree(self.directory / "index")
        self.open()
        for space, stored in zip(self.spaces, self.stored, strict=True):
            assert all(space.contains(sorted(stored)))
            space.forget([key for key in KEYS if key not in stored])

    @rule()
    def collect(self) -> None:
        before = [space.contains(KEYS) for space in self.spaces]
        report = self.store.gc()
        assert report.stray_files == report.lost_records == 0
        assert [space.contains(KEYS) for space in self.spaces] == before

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "store"):
            return
        if self.store.stats().evicted:
            self.complete = False
        self.store.check_integrity()
        assert self.store.stats().errors == type(self.store.stats().errors)()
        assert disk_bytes(self.directory) <= self.store.usage().used_bytes <= self.capacity

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
