"""The SGLang adapter: one file a seam. Policy lives in core, bytes in hicache_tiers."""
