"""Options of the storage backend: one typed structure behind the extra-config flag.

SGLang hands the text of ``--hicache-storage-backend-extra-config`` (JSON, or ``@file`` in JSON,
YAML or TOML) to every rank. The same text is validated here, in the launching process, so that a
typing error ends the start with one line instead of a traceback in a child. SGLang's own keys
travel in the same dictionary (``HybridCacheController.parse_storage_backend_extra_config``); they
are part of the structure, so they are checked as well, and passed on untouched.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from cacheflow_sgl.core.policies import Policy
from hicache_tiers import StoreConfig

FLAG = "--hicache-storage-backend-extra-config"
BACKEND = "cacheflow"

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGTP", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?I?)B?", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_MIN_CAPACITY = 64 * 1024


class OptionsError(ValueError):
    """A bad option; the message is one line naming the key, the fault and the mend."""


def default_directory() -> str:
    """Where pages go if the user names no directory: ``$XDG_CACHE_HOME/cacheflow/pages``."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(cache_home).expanduser() / "cacheflow" / "pages")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may set.

    Attributes:
        directory: folder of the disk store; made if missing; may be shared by ranks and servers.
        capacity: cap over all pages in that folder: bytes, "200GB", "1.5TiB" or "50%" (of the
            file system's size). The index beside them adds about 1%.
        namespace: tag put into the identity of every page. Needed for reuse across restarts when
            there are no weights to fingerprint (dummy weights); different tags never share pages.
        io_threads: threads that read and write records, a rank.
        io_deadline_s: seconds that one call for a batch of pages may take; what has not landed by
            then is a miss, or not stored. Below the 10 s that SGLang waits for its storage threads.
        restore: how a prefix on the host comes back: ``cacheflow`` chooses the fastest way;
            ``recompute``, ``load``, ``split`` and ``cake`` always take that one; ``sglang`` leaves
            it to SGLang.
        restore_decode_steps: steps that running requests get between two chunks of a restore. 0 is
            SGLang's own order, which computes chunks first; more bounds what a restore costs them.
        restore_trace: file for a Perfetto trace of all restores: a compute lane and an I/O lane.
        prefetch_threshold: SGLang's: fewest stored tokens worth fetching.
        prefetch_timeout_base: SGLang's: seconds a prefetch may take (policy ``timeout``).
        prefetch_timeout_per_ki_token: SGLang's: seconds added for each 1024 tokens.
        hicache_storage_pass_prefix_keys: SGLang's: hand the backend the keys before a batch.
        tp_lcm_size: SGLang's: accepted; this backend keeps one record a rank, so it has no effect.
    """

    directory: Annotated[str, msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=default_directory
    )
    capacity: int | str = "50%"
    namespace: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    io_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    io_deadline_s: Annotated[float, msgspec.Meta(gt=0, le=8)] = 5.0
    restore: Policy = Policy.CACHEFLOW
    restore_decode_steps: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    restore_trace: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    prefetch_threshold: Annotated[int, msgspec.Meta(ge=0)] = 256
    prefetch_timeout_base: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    prefetch_timeout_per_ki_token: Annotated[float, msgspec.Meta(ge=0)] = 0.25
    hicache_storage_pass_prefix_keys: bool = False
    tp_lcm_size: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def store_config(self) -> StoreConfig:
        """Configuration of the disk store these options ask for."""
        directory = Path(self.directory).expanduser()
        return StoreConfig(
            directory=directory,
            capacity_bytes=capacity_bytes(self.capacity, directory),
            io_threads=self.io_threads,
            deadline_s=self.io_deadline_s,
        )


def read_extra_config(text: str | None) -> dict[str, Any]:
    """The dictionary behind the flag's text; raises OptionsError."""
    if not text:
        return {}
    if text.startswith("@"):
        return _mapping(_read_file(Path(text[1:]).expanduser()), where=text)
    try:
        return _mapping(json.loads(text), where="the value")
    except json.JSONDecodeError as error:
        raise OptionsError(
            f'{FLAG} is not valid JSON: {error}; write \'{{"directory": "/path"}}\' or @file.json'
        ) from None


def parse_options(extra_config: dict[str, Any]) -> Options:
    """Typed options from the dictionary; raises OptionsError naming the first bad key."""
    fields = {field.name: field for field in msgspec.structs.fields(Options)}
    for key, value in extra_config.items():
        if key not in fields:
            raise OptionsError(f"{FLAG}: unknown key {key!r}; {_nearest(key, list(fields))}")
        try:
            msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError as error:
            fault = str(error)[:1].lower() + str(error)[1:]
            raise OptionsError(f"{FLAG}: {key}: {fault}; got {value!r}") from None
    options = Options(**extra_config)
    capacity_bytes(options.capacity, Path(options.directory).expanduser())
    return options


def capacity_bytes(capacity: int | str, directory: Path) -> int:
    """Bytes meant by `capacity`; a percentage is of the file system that holds `directory`."""
    text = str(capacity).strip()
    if percent := _PERCENT.fullmatch(text):
        share = float(percent[1])
        if not 0 < share <= 100:
            raise OptionsError(f'{FLAG}: capacity: {text!r} is not above 0 and up to 100: "50%"')
        amount = int(_file_system_bytes(directory) * share / 100)
    elif size := _SIZE.fullmatch(text):
        amount = int(float(size[1]) * _UNITS[size[2].upper()])
    else:
        raise OptionsError(
            f'{FLAG}: capacity: {capacity!r} is not a size; write bytes, "200GB", "1.5TiB" or "50%"'
        )
    if amount < _MIN_CAPACITY:
        raise OptionsError(
            f"{FLAG}: capacity: {capacity!r} is {amount} bytes for {directory}; "
            f"the least useful size is {_MIN_CAPACITY}"
        )
    return amount


def _file_system_bytes(directory: Path) -> int:
    """Size of the file system that holds, or will hold, `directory`."""
    existing = next((p for p in (directory, *directory.parents) if p.exists()), Path("/"))
    info = os.statvfs(existing)
    return info.f_frsize * info.f_blocks


def _read_file(path: Path) -> object:
    loaders: dict[str, Callable[[str], object]] = {
        ".json": json.loads,
        ".toml": tomllib.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
    }
    loader = loaders.get(path.suffix.lower())
    if loader is None:
        raise OptionsError(f"{FLAG}: @{path}: name it .json, .yaml, .yml or .toml")
    try:
        return loader(path.read_text())
    except OSError as error:
        raise OptionsError(f"{FLAG}: @{path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        fault = " ".join(str(error).split())
        raise OptionsError(f"{FLAG}: @{path} is not valid {path.suffix[1:]}: {fault}") from None


def _mapping(value: object, *, where: str) -> dict[str, Any]:
    if value is None:  # an empty YAML file
        return {}
    if not isinstance(value, dict):
        raise OptionsError(f"{FLAG}: {where} holds a {type(value).__name__}, not keys with values")
    return {str(key): item for key, item in value.items()}


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known keys: {', '.join(known)}"
