"""CacheFlow for SGLang: restore evicted KV-cache prefixes by loading and recomputing at once."""

__version__ = "0.1.0"
