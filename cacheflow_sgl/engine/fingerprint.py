"""Identity of a checkpoint: which weights made these KV pages?

Not the display name: two checkpoints may be served under one name, and one checkpoint under two.
The fingerprint covers `config.json` and its like in full, and of every weight file its name, its
size, its header and a small sample from the middle of its tensors, so that retrained weights of
the same shape differ. Bounded to a few thousand small reads: under 2 s for any model.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Files that shape the forward pass, hashed whole; they are small.
_CONFIG_NAMES = ("config.json", "hf_quant_config.json", "quantize_config.json", "params.json")
# Keys of config.json that say who wrote the file, not what the model computes.
_INCIDENTAL_KEYS = ("_name_or_path", "transformers_version", "_commit_hash")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 4096
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_READERS = 8


def checkpoint_fingerprint(checkpoint: Path) -> str | None:
    """Hex digest of a checkpoint (a folder, or one GGUF file); None if it holds no weight file.

    Raises:
        OSError: a file can be seen but not read.
    """
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    candidates = folder.iterdir() if checkpoint.is_dir() else [checkpoint]
    weights = sorted(
        (path for path in candidates if path.suffix in _WEIGHT_SUFFIXES),
        key=lambda path: path.name,
    )
    if not weights:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name in _CONFIG_NAMES:
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + _config_bytes(folder / name))
    budget = max(1, _MAX_SAMPLES // len(weights))
    with ThreadPoolExecutor(_READERS) as readers:
        for part in readers.map(lambda path: _weight_file_digest(path, budget), weights):
            digest.update(part)
    return digest.hexdigest()


def _config_bytes(path: Path) -> bytes:
    """The file's content, without key order and incidental keys where it is a JSON object."""
    text = path.read_bytes()
    try:
        content = json.loads(text)
    except ValueError:
        return text
    if isinstance(content, dict):
        content = {key: item for key, item in content.items() if key not in _INCIDENTAL_KEYS}
    return json.dumps(content, sort_keys=True).encode()


def _weight_file_digest(path: Path, samples: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        header, offsets = _safetensors_header(descriptor, size, path.suffix)
        digest.update(header)
        for offset in _spread(offsets or _even_offsets(size, samples), samples):
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
    finally:
        os.close(descriptor)
    return digest.digest()


def _safetensors_header(descriptor: int, size: int, suffix: str) -> tuple[bytes, list[int]]:
    """Header bytes and the offset of every tensor's middle; empty for other formats."""
    if suffix != ".safetensors" or size < 8:
        return b"", []
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(size, _MAX_HEADER_BYTES):
        return b"", []
    header = os.pread(descriptor, length, 8)
    try:
        tensors = json.loads(header)
    except ValueError:
        return header, []
    spans = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
    return header, sorted(8 + length + (start + end) // 2 for start, end in spans)


def _even_offsets(size: int, count: int) -> list[int]:
    return [size * index // count for index in range(count)]


def _spread(offsets: list[int], count: int) -> Iterator[int]:
    """At most `count` of `offsets`, evenly spread."""
    step = max(1, -(-len(offsets) // count))
    yield from offsets[::step]
