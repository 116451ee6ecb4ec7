"""RecordLayout: the copies between strided pages and the contiguous payload."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_tiers import RecordLayout
from tests.tiers.pages import blank, page

layouts = st.builds(
    RecordLayout, st.integers(1, 9), st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple)
)


@given(layouts)
def test_payload_is_layers_of_concatenated_parts(layout: RecordLayout) -> None:
    parts = page("k", layout)
    payload = np.empty(layout.payload_bytes, dtype=np.uint8)
    layout.gather(parts, payload)
    expected = b"".join(part[layer].tobytes() for layer in range(layout.layers) for part in parts)
    assert payload.tobytes() == expected


@given(layouts, st.data())
def test_a_layer_range_is_one_contiguous_slice(layout: RecordLayout, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, layout.layers - 1))
    hi = data.draw(st.integers(lo + 1, layout.layers))
    parts = page("k", layout)
    payload = np.empty(layout.payload_bytes, dtype=np.uint8)
    layout.gather(parts, payload)
    offset, length = layout.layer_range(lo, hi)
    target = blank(layout, hi - lo)
    layout.scatter(payload[offset : offset + length], target)
    assert all(np.array_equal(t, p[lo:hi]) for t, p in zip(target, parts, strict=True))


@pytest.mark.parametrize("lo, hi", [(-1, 2), (2, 2), (3, 1), (0, 5)])
def test_a_layer_range_outside_is_refused(lo: int, hi: int) -> None:
    with pytest.raises(ValueError, match="layers"):
        RecordLayout(4, (8,)).layer_range(lo, hi)


@pytest.mark.parametrize("layers, parts", [(0, (8,)), (1, ()), (1, (8, 0))])
def test_an_empty_layout_is_refused(layers: int, parts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        RecordLayout(layers, parts)
