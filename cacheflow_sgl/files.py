"""Writing result files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file: whoever reads `path` finds all of `data` or what was there before.

    A new file gets the permissions that the umask leaves it. What is no regular file, such as
    `/dev/stdout`, is written to as it is.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
