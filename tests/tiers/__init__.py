"""Tests of hicache_tiers."""
