"""Servers that start, fail to start, and end: no process and no port stays taken."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cacheflow_sgl.client import ServerProcess, ServerStartError

pytestmark = pytest.mark.engine


def processes_of(log_path: Path) -> list[str]:
    """Ids of the processes that write to the log, which all of a server's do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            outputs = {str((process / "fd" / stream).readlink()) for stream in ("1", "2")}
        except OSError:
            continue  # it ended, or is not ours to look into
        if str(log_path) in outputs:
            found.append(process.name)
    return found


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    return True


def test_a_server_that_dies_is_reported_with_its_last_words(tiny_model: Path, tmp_path: Path):
    flags = ["--hicache-storage-backend", "nosuch"]
    server = ServerProcess(tiny_model, flags, log_path=tmp_path / "logs" / "server.log")
    with pytest.raises(ServerStartError) as caught:
        server.start()
    first, *log = str(caught.value).splitlines()
    assert first == f"the server ended with status 2; {server.log_path} ends with:"
    # Both SGLang's list of choices and our own backend in it.
    assert "invalid choice: 'nosuch' (choose from 'file'" in log[-1]
    assert "'cacheflow'" in log[-1]
    assert server.pid is None
    assert not processes_of(server.log_path)


def test_a_server_that_takes_too_long_is_ended(tiny_model: Path, tmp_path: Path):
    server = ServerProcess(tiny_model, log_path=tmp_path / "server.log", start_timeout_s=3)
    with pytest.raises(ServerStartError, match=r"the server was not ready in 3 s"):
        server.start()
    assert not processes_of(server.log_path)
    assert is_free(server.port)


@pytest.mark.full
def test_a_server_restarts_on_its_port_and_ends_for_good(tiny_model: Path, tmp_path: Path):
    server = ServerProcess(tiny_model, log_path=tmp_path / "server.log", env={"MINE": "yes"})
    with server:
        first = server.client.generate([5, 6, 7]).output_ids
        assert b"MINE=yes" in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        with pytest.raises(RuntimeError, match="already running"):
            server.start()
        pid, url = server.pid, server.url
        server.restart()
        assert (server.pid != pid, server.url) == (True, url)
        assert server.client.generate([5, 6, 7]).output_ids == first
        server.kill()
        assert not processes_of(server.log_path)
        assert not server.client.healthy()
        server.start()
    assert not processes_of(server.log_path)
    assert is_free(server.port)
    server.stop()  # a second time is no error
