"""Starting and stopping a server of one's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from cacheflow_sgl.client.http import ServerError, SglangClient

_HOST = "127.0.0.1"
_SERVE = (sys.executable, "-c", "from cacheflow_sgl.cli.main import main; main()", "serve")
_POLL_S = 0.25
_LOG_LINES = 25


class ServerStartError(ServerError):
    """A server died while starting, or was not ready in time; the message ends with its log."""


class ServerProcess:
    """A server started by `cacheflow serve`, and all processes it starts.

    Owns a process group: `stop` ends every process in it, so none outlives this object when
    used as a context manager, which starts on entry and stops on exit.

    Args:
        model: directory or name of the model.
        flags: further flags of `sglang serve`.
        env: variables added to this process's environment.
        log_path: file that output is appended to.
        port: port of 127.0.0.1 to listen on; a free one by default. A restart keeps it.
        admin_key: the server's admin key, which opens the storage calls of `client`.
        start_timeout_s: the longest wait for a server to be ready.
    """

    def __init__(
        self,
        model: str | Path,
        flags: Sequence[str] = (),
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        admin_key: str | None = None,
        start_timeout_s: float = 300,
    ) -> None:
        self.port = port or _free_port()
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.client = SglangClient(f"http://{_HOST}:{self.port}", api_key=admin_key)
        self._command = [*_SERVE, "--model-path", str(model), "--host", _HOST]
        self._command += ["--port", str(self.port)]
        self._command += ["--admin-api-key", admin_key] if admin_key else []
        self._command += flags
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id of the server, which is also its group's; None while it isn't running."""
        return self._process.pid if self._process else None

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self.client.url

    def start(self) -> None:
        """Start the server and return once it is ready and idle.

        Raises:
            ServerStartError: it died or was not ready in time; nothing of it is left.
        """
        if self._process is not None:
            raise RuntimeError(f"the server on port {self.port} is already running")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float = 20) -> None:
        """End the server: SIGTERM, then SIGKILL for what is left of its group.

        SIGTERM goes to the server alone, which ends its own children; sent to the group it
        would look to SGLang like a crash of its scheduler. Returns when the port is free.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass  # the group is killed below
        finally:  # also where Ctrl-C ends the wait
            _kill_group(process.pid)
            process.wait()
        _wait_until(lambda: not _is_listening(self.port), 10)

    def kill(self) -> None:
        """End the whole group at once with SIGKILL, as a crash of the machine would."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process.pid)
            process.wait()
            _wait_until(lambda: not _is_listening(self.port), 10)

    def restart(self) -> None:
        """Stop the server and start it again, on the same port with the same flags."""
        self.stop()
        self.start()

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while not self.client.healthy():
            if (status := process.poll()) is not None:
                raise ServerStartError(f"the server ended with status {status}; {self._said()}")
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"the server was not ready in {self.start_timeout_s:g} s; {self._said()}"
                )
            time.sleep(_POLL_S)
        # SGLang's own warm-up and the probe behind /health may still run, and would share a
        # batch with the first request. A flush succeeds only when nothing does.
        try:
            self.client.generate([1], max_new_tokens=2)
            self.client.flush_cache()
        except ServerError as error:
            raise ServerStartError(
                f"the server does not answer ({error}); {self._said()}"
            ) from None

    def _said(self) -> str:
        return f"{self.log_path} ends with:\n{self.log_tail()}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((_HOST, port)) == 0


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
    _wait_until(lambda: not _group_exists(group), 10)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
