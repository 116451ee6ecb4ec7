"""What is written is read back, whatever the layout, the strides and the keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_tiers import DiskStore, Namespace, RecordLayout, StoreConfig, StoreError
from tests.tiers.pages import IDENTITY, LAYOUT, blank, keys_of, page, read, segments_of, write

quick = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@quick
@given(
    layers=st.integers(1, 80),
    part_shapes=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=3
    ),
    keys=st.lists(st.text(max_size=300), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_any_layout_any_strides_any_keys(
    store: DiskStore,
    layers: int,
    part_shapes: list[tuple[int, int, int]],
    keys: list[str],
    data: st.DataObject,
) -> None:
    layout = RecordLayout(layers, tuple(int(np.prod(shape)) for shape in part_shapes))
    namespace = store.namespace(IDENTITY, layout)

    def strided(fill: int | None) -> list[np.ndarray]:
        # Axes in another order in memory, every second element: what host pools look like.
        parts = []
        for tokens, heads, dim in part_shapes:
            base = np.zeros((tokens, layers, heads, 2 * dim), dtype=np.uint8)
            part = base[..., ::2].transpose(1, 0, 2, 3)
            if fill is not None:
                part[...] = np.random.default_rng(fill).integers(0, 256, part.shape)
            parts.append(part)
        return parts

    sources = [strided(number) for number in range(len(keys))]
    assert all(namespace.write(keys, sources))
    targets = [strided(None) for _ in keys]
    assert all(namespace.read(keys, targets))
    for target, source in zip(targets, sources, strict=True):
        assert all(map(np.array_equal, target, source))

    lo = data.draw(st.integers(0, layers - 1))
    hi = data.draw(st.integers(lo + 1, layers))
    parts = [[np.zeros((hi - lo, *shape), dtype=np.uint8) for shape in part_shapes] for _ in keys]
    assert all(namespace.read(keys, parts, range(lo, hi)))
    for got, source in zip(parts, sources, strict=True):
        assert all(np.array_equal(g, s[lo:hi]) for g, s in zip(got, source, strict=True))
    namespace.forget(keys)
    assert not any(namespace.contains(keys))


def test_presence_is_a_mask_not_a_prefix(namespace: Namespace) -> None:
    keys = keys_of(18)
    assert all(write(namespace, keys[10:]))  # S1: the tail only
    assert namespace.contains(keys) == [False] * 10 + [True] * 8
    assert read(namespace, keys) == [False] * 10 + [True] * 8


def test_a_key_given_twice_is_stored_once(store: DiskStore, namespace: Namespace) -> None:
    key, other = keys_of(2)
    assert write(namespace, [key, other, key]) == [True] * 3
    assert write(namespace, [key]) == [True]
    assert store.stats().written_records == 2
    assert read(namespace, [key, key, other]) == [True] * 3


def test_namespaces_are_apart(store: DiskStore) -> None:
    layouts = [LAYOUT, RecordLayout(4, (256, 768)), RecordLayout(8, (384, 128))]
    identities = [IDENTITY, IDENTITY | {"shard": 1}, IDENTITY | {"shard": "0"}, {}]
    spaces = [store.namespace(identity, LAYOUT) for identity in identities]
    spaces += [store.namespace(IDENTITY, layout) for layout in layouts[1:]]
    assert len({space.id for space in spaces}) == len(spaces)
    (key,) = keys_of(1)
    for number, space in enumerate(spaces):
        assert not any(other.contains([key])[0] for other in spaces[number:])
        assert write(space, [key]) == [True]
    for space in spaces:
        assert read(space, [key]) == [True]
    spaces[0].clear()
    assert [space.contains([key])[0] for space in spaces] == [False] + [True] * 5
    store.clear()
    assert not any(space.contains([key])[0] for space in spaces)
    assert store.usage().records == store.usage().namespaces == 0


def test_order_of_the_identity_does_not_matter(store: DiskStore) -> None:
    turned = dict(reversed(list(IDENTITY.items())))
    assert store.namespace(turned, LAYOUT).id == store.namespace(IDENTITY, LAYOUT).id


@pytest.mark.parametrize("value", [1.5, None, True, b"x"])
def test_an_identity_of_other_types_is_refused(store: DiskStore, value: object) -> None:
    with pytest.raises(StoreError, match="neither text nor a whole number"):
        store.namespace({"dtype": value}, LAYOUT)  # type: ignore[dict-item]


def test_misuse_is_an_error_before_anything_is_stored(namespace: Namespace) -> None:
    keys = keys_of(2)
    good, short = page(keys[0]), [part[:3] for part in page(keys[1])]
    with pytest.raises(ValueError, match="part 0 must be uint8 with 4 layers of 768 bytes"):
        namespace.write(keys, [good, short])
    with pytest.raises(ValueError, match="2 parts"):
        namespace.write(keys, [good, good[:1]])
    with pytest.raises(ValueError, match="2 keys but 1 pages"):
        namespace.write(keys, [good])
    with pytest.raises(ValueError, match="uint8"):
        namespace.write(keys[:1], [[part.view(np.int8) for part in good]])
    assert namespace.contains(keys) == [False, False]
    for layers in (range(5), range(2, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match=r"layers|range"):
            namespace.read(keys[:1], [blank()], layers)


def test_nothing_to_do(namespace: Namespace) -> None:
    assert namespace.contains([]) == namespace.read([], []) == namespace.write([], []) == []


def test_a_closed_store_misses_and_refuses(directory: Path) -> None:
    store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 20))
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(2)
    assert all(write(namespace, keys))
    store.close()
    assert (
        namespace.contains(keys) == read(namespace, keys) == write(namespace, keys) == [False] * 2
    )
    namespace.forget(keys)
    with pytest.raises(StoreError, match="closed"):
        store.usage()
    assert store.stats().written_records == 2


def test_listing_names_what_is_stored(store: DiskStore, namespace: Namespace) -> None:
    other = store.namespace({"model": "second"}, LAYOUT)
    write(namespace, keys_of(3))
    write(other, keys_of(5))
    infos = {info.id: info for info in store.namespaces()}
    info = infos[namespace.id]
    assert (info.identity, info.layers, info.part_bytes) == (IDENTITY, 4, (768, 256))
    assert (info.records, info.disk_bytes) == (3, 3 * 8192)
    assert infos[other.id].records == 5
    assert store.namespaces()[0].id == other.id
    report = store.verify()
    assert (report.records, report.payload_bytes, report.damaged) == (8, 8 * 4096, ())


def test_headers_grow_with_layers_and_keys(store: DiskStore, directory: Path) -> None:
    layout = RecordLayout(1500, (2,))
    namespace = store.namespace(IDENTITY, layout)
    keys = ["k" * 9000, "l"]
    assert all(write(namespace, keys)) and all(read(namespace, keys))
    assert store.verify().damaged == ()
    assert len(segments_of(directory)) == 1
