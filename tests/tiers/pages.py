"""Pages with known bytes, system calls that fail on demand, and processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hicache_tiers import DiskStore, Namespace, RecordLayout
from hicache_tiers.record import entry_key, key_bytes
from hicache_tiers.syscalls import Syscalls
from hicache_tiers.tables import Entry

LAYOUT = RecordLayout(4, (768, 256))
"""A page of 4 KiB: with its header a record takes 8 KiB on disk."""

RECORD = 8192
IDENTITY: dict[str, str | int] = {"model": "fingerprint", "dtype": "bf16", "shard": 0}


def page(key: str, layout: RecordLayout = LAYOUT) -> list[np.ndarray]:
    """The page of a key: bytes that follow from the key alone."""
    rng = np.random.default_rng([*key_bytes(key), layout.payload_bytes])
    return [
        rng.integers(0, 256, (layout.layers, size), dtype=np.uint8) for size in layout.part_bytes
    ]


def blank(layout: RecordLayout = LAYOUT, layers: int | None = None) -> list[np.ndarray]:
    """A target filled with a pattern that no test stores."""
    count = layout.layers if layers is None else layers
    return [np.full((count, size), 0xAA, dtype=np.uint8) for size in layout.part_bytes]


def keys_of(count: int, start: int = 0) -> list[str]:
    return [f"{number:064x}" for number in range(start, start + count)]


def write(namespace: Namespace, keys: Sequence[str]) -> list[bool]:
    return namespace.write(keys, [page(key, namespace.layout) for key in keys])


def read(namespace: Namespace, keys: Sequence[str]) -> list[bool]:
    """Read, and check that every hit brought the bytes of its key and nothing else."""
    targets = [blank(namespace.layout) for _ in keys]
    hits = namespace.read(keys, targets)
    for key, target, hit in zip(keys, targets, hits, strict=True):
        if hit:
            expected = page(key, namespace.layout)
            assert all(map(np.array_equal, target, expected)), f"wrong bytes for {key}"
    return hits


def segments_of(directory: Path) -> list[Path]:
    return sorted((directory / "segments").glob("*/*.seg"))


def disk_bytes(directory: Path) -> int:
    """Blocks of the segment files; files that vanish meanwhile count nothing."""
    total = 0
    for path in segments_of(directory):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def entry_of(store: DiskStore, namespace: Namespace, key: str) -> Entry:
    opened = store._now()
    assert opened is not None
    with opened.resources.index.reading() as txn:
        entry = txn.entry(entry_key(bytes.fromhex(namespace.id), key_bytes(key)))
    assert entry is not None
    return entry


def file_of(directory: Path, entry: Entry) -> Path:
    return directory / "segments" / f"{entry.segment >> 10:06x}" / f"{entry.segment:010x}.seg"


class Faults(Syscalls):
    """Real system calls with a hook before each: it may raise, wait, or return a limit.

    A limit returned by the hook of `pread` or `pwrite` cuts the call short.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[..., int | None]] = {}
        self.counts: Counter[str] = Counter()

    def _before(self, name: str, *args: Any) -> int | None:
        self.counts[name] += 1
        hook = self.hooks.get(name)
        return hook(*args) if hook else None

    def open(self, path: str, flags: int) -> int:
        self._before("open", path, flags)
        return super().open(path, flags)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        limit = self._before("pread", fd, buffer, offset)
        return super().pread(fd, buffer[:limit], offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        limit = self._before("pwrite", fd, buffer, offset)
        return super().pwrite(fd, buffer[:limit], offset)

    def punch(self, fd: int, offset: int, length: int) -> None:
        self._before("punch", fd, offset, length)
        super().punch(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        self._before("ftruncate", fd, length)
        super().ftruncate(fd, length)

    def unlink(self, path: str) -> None:
        self._before("unlink", path)
        super().unlink(path)


def failing(code: int, times: int | None = None) -> Callable[..., None]:
    """A hook that raises this errno, always or the first few times."""
    left = [times]

    def hook(*_: object) -> None:
        if left[0] is None or left[0] > 0:
            if left[0] is not None:
                left[0] -= 1
            raise OSError(code, os.strerror(code))

    return hook


ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *args: object) -> subprocess.Popen[str]:
    """Run code in a fresh interpreter that can import these helpers."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60.0) -> str:
    """Output of a process that must succeed in time."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out
