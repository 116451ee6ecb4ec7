"""Decisions: geometry, costs, plans, pointers, bounds. Pure: no sglang, no torch, no I/O."""
