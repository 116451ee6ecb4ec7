"""Where KV pages live and how they move. Bytes only: no policy, no sglang, no torch."""
