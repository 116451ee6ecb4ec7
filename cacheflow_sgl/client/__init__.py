"""Talking to a running SGLang server over HTTP, and starting and stopping one."""

from cacheflow_sgl.client.http import (
    CachedTokens,
    Generation,
    Metrics,
    ServerError,
    SglangClient,
    Stream,
    StreamEvent,
)
from cacheflow_sgl.client.process import ServerProcess, ServerStartError

__all__ = [
    "CachedTokens",
    "Generation",
    "Metrics",
    "ServerError",
    "ServerProcess",
    "ServerStartError",
    "SglangClient",
    "Stream",
    "StreamEvent",
]
