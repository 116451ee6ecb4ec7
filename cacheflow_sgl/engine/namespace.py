"""Namespace of stored pages: everything that must be equal for one server to use another's KV.

A page is only as good as its identity: weights, configuration, overrides that change KV, KV
dtype, page size, byte order and shard coordinates (DESIGN section 6). The tokens, and a request's
`extra_key` and `cache_salt`, are in SGLang's page keys already.
"""

import json
import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from .fingerprint import Checkpoint, content_fingerprint, read_checkpoint
from .host_pages import HostPages

logger = logging.getLogger(__name__)

# Set in the launching process and inherited by every rank, so that ranks that share pages (MLA)
# agree on an identity even where there are no weights to fingerprint.
RUN_ID_VARIABLE = "CACHEFLOW_RUN_ID"

# Fields of SGLang's `model` configuration that change KV for the same checkpoint.
_KV_SETTINGS = (
    "dtype",
    "quantization",
    "modelopt_quant",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
    "model_impl",
    "load_format",
    "model_loader_extra_config",
    "quantize_and_serve",
)
# Fields that may name a file whose content does.
_KV_FILES = (
    "quantization_param_path",
    "modelopt_checkpoint_restore_path",
    "rl_quant_profile",
    "decrypted_config_file",
)
# Formats whose weights are the files beside config.json; any other may come from anywhere.
_FILE_FORMATS = (
    "auto",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "pt",
    "npcache",
    "mistral",
    "gguf",
    "bitsandbytes",
    "layered",
    "presharded",
)


def new_run_id() -> None:
    """Give the server about to be launched an identity of its own."""
    os.environ[RUN_ID_VARIABLE] = uuid.uuid4().hex


# Checkpoints read when this process had just loaded them, by model path.
_remembered: dict[str, Checkpoint] = {}


def remember_served_checkpoint() -> None:
    """Read the checkpoint being served while its files are surely those just loaded.

    A backend attached hours later must not take what has been saved there since for it.
    """
    from sglang.srt.runtime_context import get_model

    model = get_model()
    if model.load_format in _FILE_FORMATS and model.model_path not in _remembered:
        checkpoint = _find(model.model_path, model.revision, model.download_dir)
        if checkpoint is not None:
            _remembered[model.model_path] = checkpoint


def updated_weights(model_path: str) -> str | None:
    """Identity of the weights just loaded from `model_path` over the served ones.

    None if they cannot be told: a checkpoint of other tensors leaves some of the old ones in place.
    """
    from sglang.srt.runtime_context import get_model

    served = _remembered.get(get_model().model_path)
    loaded = _find(model_path, None, get_model().download_dir)
    if served is None or loaded is None or loaded.tensors is None:
        return None
    return loaded.weights if loaded.tensors == served.tensors else None


class ModelIdentity:
    """Which model's KV this server stores; changes when its weights change at run time.

    The configuration is what the process started with: an update replaces the weights only.
    """

    # How often weights have changed in this process: numbers those that have no fingerprint, also
    # over detach and attach. Equal on all ranks, which see the same changes.
    _changes: ClassVar[int] = 0

    def __init__(
        self, model: Any, draft_path: str | None, adapters: Sequence[str], tag: str | None
    ):
        """Identify a model.

        Args:
            model: SGLang's `model` configuration (`runtime_context.get_model()`).
            draft_path: checkpoint of a speculative draft model, whose KV is stored beside.
            adapters: paths of the LoRA adapters given at start. SGLang names them by name and path
                in its page keys, the same at every start, whatever they hold.
            tag: the user's own `namespace` option.
        """
        self._download_dir = model.download_dir
        self._tag = tag
        settings = {name: str(getattr(model, name)) for name in _KV_SETTINGS}
        settings |= {name: content_fingerprint(getattr(model, name)) for name in _KV_FILES}
        self._weights, config = self._at_start(model.model_path, model.revision, model.load_format)
        self._fixed = {
            "config": config,
            "settings": json.dumps(settings, sort_keys=True),
            "model_overrides": _canonical_json(model.json_model_override_args),
        }
        if adapters:
            self._fixed["adapters"] = ",".join(sorted(self._both(path) for path in adapters))
        if tag:
            self._fixed["tag"] = tag
        self._draft = self._both(draft_path) if draft_path else None

    def fields(self) -> dict[str, str | int]:
        """The identity, readable, ready to be hashed into a namespace."""
        identity: dict[str, str | int] = {"weights": self._weights, **self._fixed}
        if self._draft is not None:
            identity["draft"] = self._draft
        return identity

    def weights_changed(self, weights: str | None) -> None:
        """Move on after a run-time weight update.

        Args:
            weights: what `updated_weights` said of them; None if they came from memory.
        """
        ModelIdentity._changes += 1
        self._weights = weights or _unknown(self._changes)
        if self._draft is not None:  # an update may be for the draft model, too
            self._draft = _unknown(self._changes)

    def _both(self, path: str) -> str:
        return ":".join(self._at_start(path, None, "auto"))

    def _at_start(self, path: str, revision: str | None, load_format: str) -> tuple[str, str]:
        """Weights and configuration of a checkpoint as this process loaded it."""
        checkpoint = _remembered.get(path)
        if checkpoint is None and load_format in _FILE_FORMATS:
            checkpoint = _find(path, revision, self._download_dir)
        if checkpoint is not None:
            return checkpoint.weights, checkpoint.config
        if self._tag:  # the user vouches for what is served at start
            return f"tag:{self._tag}", ""
        logger.warning(
            "cacheflow: no weight files to fingerprint for %r (load format %s): stored pages will "
            "not be reused after a restart; set the option 'namespace' to vouch for the weights",
            path,
            load_format,
        )
        return _unknown(self._changes), ""


def _unknown(changes: int) -> str:
    """A name for weights of this run of the server only."""
    run_id = os.environ.get(RUN_ID_VARIABLE) or uuid.uuid4().hex
    return f"run:{run_id}:{changes}"


def _find(model_path: str, revision: str | None, download_dir: str | None) -> Checkpoint | None:
    path = _local_checkpoint(model_path, revision, download_dir)
    if path is None:
        return None
    try:
        return read_checkpoint(path)
    except OSError as error:
        logger.warning("cacheflow: cannot fingerprint %s: %s", path, error)
        return None


def pool_identity(
    model: ModelIdentity, config: Any, pool_name: str, pages: HostPages, pool: Any, anchor: Any
) -> dict[str, str | int]:
    """Identity of the pages of one host pool on this rank.

    Args:
        model: what is served.
        config: SGLang's `HiCacheStorageConfig`, for the shard coordinates.
        pool_name: SGLang's `PoolName` value, "kv" for the anchor.
        pages: access to the pool, for byte order and page size.
        pool: the host pool, for its dtype and page format tag.
        anchor: the pool of KV, which knows the layers of this stage.
    """
    identity = model.fields() | {
        "pool": pool_name,
        "dtype": str(pool.dtype).removeprefix("torch."),
        "order": pages.order,
        "page_size": pages.page_size,
        "pp": f"{config.pp_rank}/{config.pp_size}",
        "layers": _layers(pool, anchor),
        "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        "dcp": f"{config.dcp_rank}/{config.dcp_size}",
    }
    if not config.is_mla_model or is_rank_sharded(pool_name, pool):
        identity["tp"] = f"{config.tp_rank}/{config.tp_size}"
    if pool.storage_format_tag is not None:
        identity["page_format"] = pool.storage_format_tag
    return identity


def _layers(pool: Any, anchor: Any) -> str:
    """Layers a pool covers: stages of equal size may be cut anywhere. Mamba pools do not say."""
    source = pool if hasattr(pool, "start_layer") else anchor
    return f"{source.start_layer}-{source.end_layer}"


def is_rank_sharded(pool_name: str, pool: Any) -> bool:
    """Whether TP ranks of an MLA model hold different bytes in this pool.

    They hold the same latent, but each its own heads (an MHA draft model) and Mamba state.
    """
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    return pool_name == "mamba" or isinstance(pool, MHATokenToKVPoolHost)


def _local_checkpoint(
    model_path: str, revision: str | None, download_dir: str | None
) -> Path | None:
    """The checkpoint on this machine: the path itself, or the hub snapshot SGLang loads."""
    path = Path(model_path)
    if path.exists():
        return path
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None  # a hub with another cache
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model_path, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _canonical_json(text: str | None) -> str:
    return json.dumps(json.loads(text or "{}"), sort_keys=True)
