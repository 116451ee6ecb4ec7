"""Talking to a running SGLang server over HTTP, and starting and stopping one."""
