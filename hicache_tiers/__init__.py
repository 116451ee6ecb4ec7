"""Where KV pages live and how they move. Bytes only: no policy, no sglang, no torch."""

from hicache_tiers.config import StoreConfig
from hicache_tiers.disk import DiskStore, Namespace
from hicache_tiers.errors import IntegrityError, StoreError
from hicache_tiers.layout import Parts, RecordLayout
from hicache_tiers.stats import (
    Damage,
    ErrorCounts,
    GcReport,
    NamespaceInfo,
    TierStats,
    Usage,
    VerifyReport,
)

__all__ = [
    "Damage",
    "DiskStore",
    "ErrorCounts",
    "GcReport",
    "IntegrityError",
    "Namespace",
    "NamespaceInfo",
    "Parts",
    "RecordLayout",
    "StoreConfig",
    "StoreError",
    "TierStats",
    "Usage",
    "VerifyReport",
]
