"""Decisions: geometry, costs, plans, claims, batches, bounds, and a simulator around them. Pure."""
