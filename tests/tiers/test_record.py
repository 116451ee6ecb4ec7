"""The format of a record: what is promised to later versions."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache_tiers import RecordLayout
from hicache_tiers.record import (
    FORMAT,
    Header,
    NamespaceId,
    decode_header,
    encode_header,
    header_bytes,
    header_span,
    key_bytes,
    layer_checksums,
)


def make_header(layers: int, parts: tuple[int, ...], key: bytes, identity: str) -> Header:
    layout = RecordLayout(layers, parts)
    namespace = NamespaceId(bytes(range(16)), identity, layout)
    return Header(
        segment=2**40,
        offset=2**40,
        header_bytes=header_bytes(namespace, key),
        payload_bytes=layout.payload_bytes,
        namespace=namespace.digest,
        identity=identity,
        layers=layers,
        part_bytes=parts,
        key=key,
        checksums=bytes(8 * layers),
    )


@given(
    st.integers(1, 1200),
    st.lists(st.integers(1, 2**40), min_size=1, max_size=9).map(tuple),
    st.binary(max_size=9000),
    st.text(max_size=500),
)
def test_a_header_fits_its_room_and_comes_back(
    layers: int, parts: tuple[int, ...], key: bytes, identity: str
) -> None:
    header = make_header(layers, parts, key, identity)
    raw = encode_header(header)
    assert len(raw) == header.header_bytes and len(raw) % 4096 == 0
    assert header_span(raw[:4096]) <= len(raw)
    assert decode_header(raw, header.segment, header.offset) == header
    assert decode_header(raw, header.segment, header.offset + 4096) is None
    assert decode_header(raw, header.segment + 1, header.offset) is None


@given(st.integers(0, 300), st.integers(1, 255))
def test_a_changed_header_is_no_header(place: int, change: int) -> None:
    header = make_header(8, (64, 64), b"key", "{}")
    raw = bytearray(encode_header(header))
    used = len(bytes(raw).rstrip(b"\0"))
    raw[place % used] ^= change
    assert decode_header(bytes(raw), header.segment, header.offset) is None
    assert decode_header(bytes(raw[: used - 1]), header.segment, header.offset) is None
    assert decode_header(b"", header.segment, header.offset) is None


def test_a_usual_header_is_one_block() -> None:
    """80 layers, K and V, a SHA-256 key and a kilobyte of identity."""
    assert make_header(80, (65536, 65536), b"f" * 64, "i" * 1024).header_bytes == 4096


def test_a_checksum_covers_namespace_key_layer_and_bytes() -> None:
    layout = RecordLayout(3, (5, 4))
    payload = np.tile(np.arange(9, dtype=np.uint8), 3)  # the same bytes in every layer

    def sums(payload: np.ndarray, namespace: bytes, key: bytes, first: int = 0) -> list[bytes]:
        raw = layer_checksums(payload, layout, namespace, key, first)
        return [raw[start : start + 8] for start in range(0, len(raw), 8)]

    base = sums(payload, b"n" * 16, b"key")
    others = [
        sums(payload, b"m" * 16, b"key"),
        sums(payload, b"n" * 16, b"kez"),
        sums(payload ^ 1, b"n" * 16, b"key"),
    ]
    assert len({s for some in [base, *others] for s in some}) == 12
    assert sums(payload[9:], b"n" * 16, b"key", first=1) == base[1:]


def test_format_1_is_what_it_was() -> None:
    """Stores of this format must stay readable: change the number before these values."""
    assert FORMAT == 1
    layout = RecordLayout(2, (3, 2))
    namespace = NamespaceId.of({"model": "m", "shard": 0}, layout)
    assert namespace.identity == '{"model": "m", "shard": 0}'
    assert namespace.digest.hex() == "677fdac46ee13545cf54fc8660b40604"
    key = key_bytes("k")
    sums = layer_checksums(np.arange(10, dtype=np.uint8), layout, namespace.digest, key)
    assert sums.hex() == "a8e80cdfd952e7112311637825b91fdb"
    header = Header(3, 8192, 4096, 10, namespace.digest, namespace.identity, 2, (3, 2), key, sums)
    assert xxhash.xxh3_64_hexdigest(encode_header(header)) == "dea6b9bbe4fe656a"
