"""How the bytes of one page are ordered in a record, and the copies in and out of that order."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""Raw bytes, whatever the dtype of the cache was."""

Parts = Sequence[Bytes]
"""One page in memory: an array a part (K, V or a single latent), any strides.

The leading dimension counts layers; the bytes of ``parts[p][layer]`` in C order are that part of
that layer. Where a read asks for a layer range, the leading dimension is the length of the range.
"""


class RecordLayout(msgspec.Struct, frozen=True):
    """Sizes that fix the payload of a page: FlowKV's block-major order (layer, part, token, ...).

    All layers of a page lie together and a layer is its parts one after the other, so layers
    ``[lo, hi)`` are one contiguous range.
    """

    layers: int
    part_bytes: tuple[int, ...]
    """Bytes of each part of one layer of one page, for example ``(K bytes, V bytes)``."""

    def __post_init__(self) -> None:
        """Reject sizes that can't hold a page (`ValueError`)."""
        if self.layers < 1 or not self.part_bytes or min(self.part_bytes) < 1:
            raise ValueError(f"a record needs at least one layer and one byte a part: {self}")

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page, all parts."""
        return sum(self.part_bytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.layers * self.layer_bytes

    def layer_range(self, lo: int, hi: int) -> tuple[int, int]:
        """Offset and length in the payload of layers ``[lo, hi)``; `ValueError` if not in range."""
        if not 0 <= lo < hi <= self.layers:
            raise ValueError(f"layers [{lo}, {hi}) are not within the record's {self.layers}")
        return lo * self.layer_bytes, (hi - lo) * self.layer_bytes

    def check(self, parts: Parts, layers: int) -> None:
        """`ValueError` unless `parts` is a page of this layout with `layers` layers."""
        if len(parts) != len(self.part_bytes):
            raise ValueError(f"a page has {len(self.part_bytes)} parts here, got {len(parts)}")
        for number, (part, size) in enumerate(zip(parts, self.part_bytes, strict=True)):
            fits = part.ndim > 0 and part.shape[0] == layers and part.size == layers * size
            if part.dtype != np.uint8 or not fits:
                raise ValueError(
                    f"part {number} must be uint8 with {layers} layers of {size} bytes, "
                    f"got {part.dtype} of shape {part.shape}"
                )

    def gather(self, parts: Parts, payload: Bytes) -> None:
        """Copy `parts` into the one-dimensional `payload`, in record order."""
        for part, place in self._places(parts, payload):
            np.copyto(place, part)

    def scatter(self, payload: Bytes, parts: Parts) -> None:
        """Copy the one-dimensional `payload`, in record order, into `parts`."""
        for part, place in self._places(parts, payload):
            np.copyto(part, place)

    def _places(self, parts: Parts, payload: Bytes) -> list[tuple[Bytes, Bytes]]:
        """Each part with the view of `payload` that has its shape."""
        by_layer = payload.reshape(-1, self.layer_bytes)
        places, start = [], 0
        for part, size in zip(parts, self.part_bytes, strict=True):
            # Splitting the contiguous last axis never copies: the result is a view.
            places.append((part, by_layer[:, start : start + size].reshape(part.shape)))
            start += size
        return places
