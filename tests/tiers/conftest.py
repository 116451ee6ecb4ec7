from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_tiers import DiskStore, Namespace, StoreConfig
from tests.tiers.pages import IDENTITY, LAYOUT, Faults

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_store(directory: Path) -> Iterator[Callable[..., DiskStore]]:
    """Open the store of this test; what is still open at the end is checked and closed."""
    opened: list[DiskStore] = []

    def open_(calls: Faults | None = None, **settings: Any) -> DiskStore:
        config = StoreConfig(**({"directory": directory, "capacity_bytes": 64 * MIB} | settings))
        store = DiskStore.open(config, calls)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        if store._now() is not None:
            store.check_integrity()
            store.close()


@pytest.fixture
def store(open_store: Callable[..., DiskStore]) -> DiskStore:
    return open_store()


@pytest.fixture
def namespace(store: DiskStore) -> Namespace:
    return store.namespace(IDENTITY, LAYOUT)
