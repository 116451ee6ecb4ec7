"""Namespace of stored pages: everything that must be equal for one server to use another's KV.

A page is only as good as its identity: weights, configuration, overrides that change KV, KV
dtype, page size, byte order and shard coordinates (DESIGN section 6). The tokens, and a request's
`extra_key` and `cache_salt`, are in SGLang's page keys already.
"""

import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

from .fingerprint import checkpoint_fingerprint
from .host_pages import HostPages

logger = logging.getLogger(__name__)

# Set in the launching process and inherited by every rank, so that ranks that share pages (MLA)
# agree on an identity even where there are no weights to fingerprint.
RUN_ID_VARIABLE = "CACHEFLOW_RUN_ID"

# Fields of SGLang's `model` configuration that change KV for the same checkpoint.
_KV_OVERRIDES = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "modelopt_quant",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
    "model_impl",
)


def new_run_id() -> None:
    """Give the server about to be launched an identity of its own."""
    os.environ[RUN_ID_VARIABLE] = uuid.uuid4().hex


class ModelIdentity:
    """Which model's KV this server stores; changes when its weights change at run time."""

    def __init__(self, model: Any, draft_path: str | None, tag: str | None):
        """Identify a model.

        Args:
            model: SGLang's `model` configuration (`runtime_context.get_model()`).
            draft_path: checkpoint of a speculative draft model, whose KV is stored beside.
            tag: the user's own `namespace` option.
        """
        self._tag = tag
        self._model = model
        self._draft_path = draft_path
        self._updates = 0
        self._weights = self._identify(
            self._model.model_path, self._model.revision, self._model.load_format
        )

    def fields(self) -> dict[str, str | int]:
        """The identity, readable, ready to be hashed into a namespace."""
        overrides = {name: str(getattr(self._model, name)) for name in _KV_OVERRIDES}
        identity: dict[str, str | int] = {
            "weights": self._weights,
            "overrides": json.dumps(overrides, sort_keys=True),
            "model_overrides": _canonical_json(self._model.json_model_override_args),
        }
        if self._draft_path:
            identity["draft"] = self._identify(self._draft_path, None, "auto")
        if self._tag:
            identity["tag"] = self._tag
        return identity

    def weights_changed(self, model_path: str | None) -> None:
        """Move on after a run-time weight update; `model_path` is None if it came from memory."""
        self._updates += 1
        if model_path is None:
            self._weights = self._unknown_weights()
        else:
            self._weights = self._identify(model_path, None, "auto")

    def _identify(self, model_path: str, revision: str | None, load_format: str) -> str:
        checkpoint = None if load_format == "dummy" else _local_checkpoint(model_path, revision)
        fingerprint = None
        if checkpoint is not None:
            try:
                fingerprint = checkpoint_fingerprint(checkpoint)
            except OSError as error:
                logger.warning("cacheflow: cannot fingerprint %s: %s", checkpoint, error)
        if fingerprint is not None:
            return fingerprint
        if self._tag and not self._updates:  # the user vouches for the weights served at start
            return f"tag:{self._tag}"
        logger.warning(
            "cacheflow: no weight files to fingerprint for %r (load format %s): stored pages will "
            "not be reused after a restart; set the option 'namespace' to vouch for the weights",
            model_path,
            load_format,
        )
        return self._unknown_weights()

    def _unknown_weights(self) -> str:
        run_id = os.environ.get(RUN_ID_VARIABLE) or uuid.uuid4().hex
        return f"run:{run_id}:{self._updates}"


def pool_identity(
    model: ModelIdentity, config: Any, pool_name: str, pages: HostPages, pool: Any
) -> dict[str, str | int]:
    """Identity of the pages of one host pool on this rank.

    Args:
        model: what is served.
        config: SGLang's `HiCacheStorageConfig`, for the shard coordinates.
        pool_name: SGLang's `PoolName` value, "kv" for the anchor.
        pages: access to the pool, for byte order and page size.
        pool: the host pool, for its dtype and page format tag.
    """
    identity = model.fields() | {
        "pool": pool_name,
        "dtype": str(pool.dtype).removeprefix("torch."),
        "order": pages.order,
        "page_size": pages.page_size,
        "pp": f"{config.pp_rank}/{config.pp_size}",
        "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        "dcp": f"{config.dcp_rank}/{config.dcp_size}",
    }
    # Every TP rank holds the same MLA latent, but its own slice of heads and of Mamba state.
    if not config.is_mla_model or pool_name == "mamba":
        identity["tp"] = f"{config.tp_rank}/{config.tp_size}"
    if pool.storage_format_tag is not None:
        identity["page_format"] = pool.storage_format_tag
    return identity


def _local_checkpoint(model_path: str, revision: str | None) -> Path | None:
    """The checkpoint on this machine: the path itself, or the hub's local snapshot."""
    path = Path(model_path)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _canonical_json(text: str | None) -> str:
    return json.dumps(json.loads(text or "{}"), sort_keys=True)
