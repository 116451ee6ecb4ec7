"""Replaying recorded traces against an SGLang server."""
