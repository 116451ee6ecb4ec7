"""The replay as a person runs it: with a progress bar, and stopped by Ctrl-C without loss."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import TextColumn

from cacheflow_sgl.progress import progress_bar
from cacheflow_sgl.replay.report import Report, RequestRecord
from cacheflow_sgl.replay.runner import ReplayOptions, replay_async
from cacheflow_sgl.replay.trace import Trace


def replay(
    trace: Trace,
    url: str,
    options: ReplayOptions | None = None,
    *,
    api_key: str | None = None,
    console: Console | None = None,
) -> Report:
    """Replay a trace against the server at ``url``, with progress on ``console`` (default stderr).

    SIGINT and SIGTERM end it early, with what there is in the report and ``summary.interrupted``
    set. Raises ReplayError where it cannot start.
    """
    errors = TextColumn("[red]{task.fields[failed]}")
    with progress_bar(console or Console(stderr=True), errors) as progress:
        task = progress.add_task("replay", total=None, failed="")
        failed = 0

        def on_start(planned: int) -> None:
            progress.update(task, total=planned)

        def on_record(record: RequestRecord) -> None:
            nonlocal failed
            failed += record.error is not None
            progress.update(task, advance=1, failed=f"{failed} errors" if failed else "")

        async def run() -> Report:
            with _stop_on_signals() as stop:
                return await replay_async(
                    trace,
                    url,
                    options,
                    api_key=api_key,
                    stop=stop,
                    on_start=on_start,
                    on_record=on_record,
                )

        return asyncio.run(run())


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one acts as it always does."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may take signals
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def first_signal() -> None:
        stop.set()
        for each in signals:
            loop.remove_signal_handler(each)

    for each in signals:
        loop.add_signal_handler(each, first_signal)
    try:
        yield stop
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
