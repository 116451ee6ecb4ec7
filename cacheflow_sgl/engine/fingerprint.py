"""Identity of a checkpoint: which weights made these KV pages?

Not the display name: two checkpoints may be served under one name, and one checkpoint under two.
The configuration is `config.json`, its like and the model's own code, in full. The weights are, of
every weight file, its name, its size, its header, the middle of its tensors and samples all over
it, so that retrained weights of the same shape differ. Up to 128 MiB are read, all of a smaller
checkpoint: under 2 s for any model. Of a larger one, a change of single rows can go unseen: the
option `namespace` tells such checkpoints apart. (A hub's snapshot links to files named by the hash
of their content; there the name says it all.)
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

# Files that shape the forward pass, hashed whole; they are small.
_CONFIG_NAMES = (
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "params.json",
    "adapter_config.json",
)
# Keys of config.json that say who wrote the file, not what the model computes.
_INCIDENTAL_KEYS = ("_name_or_path", "transformers_version", "_commit_hash")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 16 * 1024
_MAX_SAMPLES = 8192
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_READERS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Checkpoint(msgspec.Struct, frozen=True):
    """What a checkpoint is.

    Attributes:
        config: hex digest of what shapes the forward pass.
        weights: hex digest of the weight files.
        tensors: names of its tensors; None where the format does not tell.
    """

    config: str
    weights: str
    tensors: frozenset[str] | None


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path` (a folder, or one GGUF file); None if it holds no weight file.

    Raises:
        OSError: a file can be seen but not read.
    """
    folder = path if path.is_dir() else path.parent
    candidates = folder.iterdir() if path.is_dir() else [path]
    weights = sorted(
        (file for file in candidates if file.suffix in _WEIGHT_SUFFIXES),
        key=lambda file: file.name,
    )
    if not weights:
        return None
    samples = max(1, _MAX_SAMPLES // len(weights))
    with ThreadPoolExecutor(_READERS) as readers:
        read = list(readers.map(lambda file: _read_weight_file(file, samples), weights))
    digest = hashlib.blake2b(b"".join(part for part, _ in read), digest_size=16)
    named = all(names is not None for _, names in read)
    tensors = frozenset(name for _, names in read for name in names or ()) if named else None
    return Checkpoint(_config_digest(folder), digest.hexdigest(), tensors)


def _config_digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    code = sorted(path.name for path in folder.glob("*.py"))  # of models with remote code
    for name in (*_CONFIG_NAMES, *code):
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + _config_bytes(folder / name))
    return digest.hexdigest()


def content_fingerprint(path: str | None) -> str:
    """What a setting means that may name a file: the file's digest, else the text itself."""
    if path and Path(path).is_file():
        return _read_weight_file(Path(path), _MAX_SAMPLES)[0].hex()
    return str(path)


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


def _read_weight_file(path: Path, samples: int) -> tuple[bytes, list[str] | None]:
    """Digest of a weight file, and the names of its tensors where its format tells."""
    digest = hashlib.blake2b(path.name.encode() + b"\0", digest_size=16)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        header, spans = _safetensors_header(descriptor, size, path.suffix)
        names = None if spans is None else sorted(spans)
        if (content := _content_name(path)) is not None:
            digest.update(content.encode())
            return digest.digest(), names
        digest.update(f"{size}\0".encode() + header)
        # A quarter for the middles of tensors, so that none is missed; the rest evenly.
        middles = _spread(sorted((spans or {}).values()), max(1, samples // 4))
        for offset in sorted({*middles, *_even_offsets(size, samples)}):
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
    finally:
        os.close(descriptor)
    return digest.digest(), names


def _content_name(path: Path) -> str | None:
    """The content's hash, where `path` is a hub's link to a file named by it."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if _SHA256.fullmatch(name) else None


def _safetensors_header(
    descriptor: int, size: int, suffix: str
) -> tuple[bytes, dict[str, int] | None]:
    """Header bytes, and the offset of each tensor's middle by name; None for other formats."""
    if suffix != ".safetensors" or size < 8:
        return b"", None
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(size, _MAX_HEADER_BYTES):
        return b"", None
    header = os.pread(descriptor, length, 8)
    try:
        tensors = json.loads(header)
        spans = {n: entry["data_offsets"] for n, entry in tensors.items() if n != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged
        return header, None
    return header, {name: 8 + length + (start + end) // 2 for name, (start, end) in spans.items()}


def _even_offsets(size: int, count: int) -> range:
    """Where samples begin, evenly spread; all of the file if `count` samples hold it."""
    return range(0, size, max(_SAMPLE_BYTES, -(-size // count)))


def _spread(offsets: list[int], count: int) -> list[int]:
    """At most `count` of `offsets`, evenly spread."""
    return offsets[:: max(1, -(-len(offsets) // count))]
