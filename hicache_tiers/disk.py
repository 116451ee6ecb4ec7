"""The disk tier: pages as checksummed records in segment files, found by an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from hicache_tiers.config import StoreConfig
from hicache_tiers.layout import Parts, RecordLayout
from hicache_tiers.stats import GcReport, NamespaceInfo, TierStats, Usage, VerifyReport


class DiskStore:
    """A directory of KV pages, shared by any number of threads, processes and ranks.

    A write becomes visible by one index commit, after its bytes are in the segment file; a read
    is the right bytes or a miss. Neither raises for I/O trouble.
    """

    @classmethod
    def open(cls, config: StoreConfig) -> Self:
        """Open the directory, made if it is missing.

        One store per directory and process, reference-counted: a second open returns the same
        one, each open needs its `close`. `StoreError` where the directory can't be used.
        """
        raise NotImplementedError

    def namespace(self, identity: Mapping[str, str | int], layout: RecordLayout) -> Namespace:
        """The records of one identity: model fingerprint, dtype, page size, shard and the like.

        Identity, layout and format version are hashed together; anything that differs is another
        namespace. `StoreError` for an identity that isn't text and whole numbers.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Drop every record of the directory, all namespaces."""
        raise NotImplementedError

    def stats(self) -> TierStats:
        """Counters of this process."""
        raise NotImplementedError

    def usage(self) -> Usage:
        """What the directory holds now, over all processes."""
        raise NotImplementedError

    def namespaces(self) -> list[NamespaceInfo]:
        """The namespaces of the directory, newest access first."""
        raise NotImplementedError

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every record and check header and every layer; nothing is changed.

        `progress` is called with (records done, records in all).
        """
        raise NotImplementedError

    def gc(self) -> GcReport:
        """Sweep dead owners' leftovers, drop what is unreachable, apply the cap."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """`IntegrityError` where index and segments contradict each other; for quiet moments."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back this open; the last one seals the segment and closes the index."""
        raise NotImplementedError


class Namespace:
    """The records of one identity and layout. Every call is safe from any thread."""

    layout: RecordLayout

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key has a record now. One index look-up a key, no disk access."""
        raise NotImplementedError

    def read(
        self, keys: Sequence[str], targets: Sequence[Parts], layers: range | None = None
    ) -> list[bool]:
        """Copy each record, or its `layers` only, into its target.

        True only where every byte landed and its checksum holds; after False the content of
        that target is undefined. `targets[i]` has one uint8 array a part whose leading dimension
        is ``len(layers)`` (all layers by default). Nothing writes into a target once this has
        returned. Only misuse raises (`ValueError`: shapes, a range outside the layout).
        """
        raise NotImplementedError

    def write(self, keys: Sequence[str], sources: Sequence[Parts]) -> list[bool]:
        """Store each page: True where it is published, or was there already.

        Only misuse raises (`ValueError`: shapes).
        """
        raise NotImplementedError

    def forget(self, keys: Sequence[str]) -> None:
        """Drop the records of these keys, where there are any."""
        raise NotImplementedError
