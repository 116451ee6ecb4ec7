"""Format 1 of a record: a header that says all about it, then the payload.

A record is an extent of a segment file, aligned to `BLOCK` at both ends::

    offset             header: magic, format, body length, checksum | body (msgpack) | zeros
    offset + header    payload: layer after layer, each its parts in order | zeros

The header repeats the whole identity, so that the index can be rebuilt from the segments without
reading a payload, and names its own place, so that a stale copy elsewhere is never taken for a
record. Integers outside the msgpack body are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping

import msgspec
import numpy as np
import xxhash

from hicache_tiers.config import round_up
from hicache_tiers.errors import StoreError
from hicache_tiers.layout import Bytes, RecordLayout

FORMAT = 1
"""Number of this format, of records and index alike."""

MAGIC = b"CFLOWREC"
_PREFIX = struct.Struct("<8sIIQ")
_LAYER = struct.Struct("<I")
DIGEST_BYTES = 16


class NamespaceId(msgspec.Struct, frozen=True):
    """What sets the records of a namespace apart, and its hash."""

    digest: bytes
    identity: str
    """Canonical JSON of the identity, kept for people."""
    layout: RecordLayout

    @classmethod
    def of(cls, identity: Mapping[str, str | int], layout: RecordLayout) -> NamespaceId:
        """Hash an identity; `StoreError` where it isn't text and whole numbers."""
        for name, value in identity.items():
            plain = isinstance(value, (str, int)) and not isinstance(value, bool)
            if not isinstance(name, str) or not plain:
                raise StoreError(
                    f"namespace identity {name!r}: {value!r} is neither text nor a whole number; "
                    "give such values as text"
                )
        text = json.dumps(dict(identity), sort_keys=True)
        whole = json.dumps([FORMAT, layout.layers, layout.part_bytes, text])
        digest = hashlib.blake2b(whole.encode(), digest_size=DIGEST_BYTES).digest()
        return cls(digest, text, layout)


def key_bytes(key: str) -> bytes:
    """A key as bytes, whatever text it is."""
    return key.encode("utf-8", "surrogatepass")


def entry_key(namespace: bytes, key: bytes) -> bytes:
    """Key of a record in the index: 32 bytes, namespace first, for keys of any length."""
    return namespace + hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()


def layer_checksums(
    payload: Bytes, layout: RecordLayout, namespace: bytes, key: bytes, first: int = 0
) -> bytes:
    """One little-endian xxh3_64 for each layer in `payload`, which starts at layer `first`.

    Each is seeded with namespace, key and layer number, so that right bytes in a wrong place fail.
    """
    size = layout.layer_bytes
    name = namespace + key
    sums = [
        xxhash.xxh3_64_intdigest(
            payload[start : start + size].data,
            seed=xxhash.xxh3_64_intdigest(_LAYER.pack(first + start // size) + name),
        )
        for start in range(0, payload.size, size)
    ]
    return np.array(sums, dtype="<u8").tobytes()


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The body of a record's header."""

    segment: int
    offset: int
    header_bytes: int
    payload_bytes: int
    namespace: bytes
    identity: str
    layers: int
    part_bytes: tuple[int, ...]
    key: bytes
    checksums: bytes

    @property
    def extent_bytes(self) -> int:
        """Bytes of the whole record on disk."""
        return self.header_bytes + round_up(self.payload_bytes)

    @property
    def namespace_id(self) -> NamespaceId:
        """The namespace this record belongs to."""
        layout = RecordLayout(self.layers, self.part_bytes)
        return NamespaceId(self.namespace, self.identity, layout)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_INTEGER_SLACK = 128  # place and sizes, known only later, and msgpack's own bytes


def header_bytes(namespace: NamespaceId, key: bytes) -> int:
    """Bytes a header of this namespace and key takes: one `BLOCK` unless it can't."""
    variable = len(namespace.identity.encode()) + len(key) + 9 * len(namespace.layout.part_bytes)
    fixed = _PREFIX.size + _INTEGER_SLACK + DIGEST_BYTES
    return round_up(fixed + variable + 8 * namespace.layout.layers)


def encode_header(header: Header) -> bytes:
    """The header as it lies on disk, `header_bytes` long."""
    body = _encoder.encode(header)
    check = xxhash.xxh3_64_intdigest(body, seed=FORMAT)
    prefix = _PREFIX.pack(MAGIC, FORMAT, len(body), check)
    return (prefix + body).ljust(header.header_bytes, b"\0")


def header_span(start: bytes) -> int:
    """Bytes to read for the header that begins with `start` (`BLOCK` of it); 0 if none does."""
    if len(start) < _PREFIX.size:
        return 0
    magic, version, length, _ = _PREFIX.unpack_from(start)
    if magic != MAGIC or version != FORMAT:
        return 0
    return round_up(_PREFIX.size + int(length))


def decode_header(raw: bytes, segment: int, offset: int) -> Header | None:
    """The header in `raw`, or None unless it is whole and stands at this place."""
    span = header_span(raw)
    if not span or len(raw) < _PREFIX.size:
        return None
    _, version, length, check = _PREFIX.unpack_from(raw)
    body = raw[_PREFIX.size : _PREFIX.size + length]
    if len(body) != length or xxhash.xxh3_64_intdigest(body, seed=version) != check:
        return None
    try:
        header = _decoder.decode(body)
    except msgspec.DecodeError:
        return None
    return header if (header.segment, header.offset) == (segment, offset) else None
