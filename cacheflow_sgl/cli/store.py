"""`cacheflow store`: look into a directory of stored pages, check it, tidy it."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from cacheflow_sgl.engine.options import FLAG, OptionsError, capacity_bytes, default_directory
from hicache_tiers import DiskStore, StoreError

from .output import JsonOption, console, error_console, fail, write_json

app = typer.Typer(
    no_args_is_help=True,
    help="Look into a directory of stored pages, check it, tidy it.",
    epilog="Safe while servers use the directory.",
)

DirectoryArgument = Annotated[
    Path, typer.Argument(help="The directory given as option 'directory'.", show_default=True)
]
_DEFAULT = Path(default_directory())


@app.command()
def ls(directory: DirectoryArgument = _DEFAULT, json_path: JsonOption = None) -> None:
    """List what is stored: one row for each model, shard and pool.

    Example: cacheflow store ls /data/kv
    """
    with _opened(directory) as store:
        usage, namespaces = store.usage(), store.namespaces()
    table = Table(box=None, header_style="bold")
    for title in ("namespace", "weights", "pool", "tp", "pp", "page", "dtype"):
        table.add_column(title)
    for title in ("pages", "MB", "last used"):
        table.add_column(title, justify="right")
    for info in namespaces:
        known = [
            str(info.identity.get(key, "-")) for key in ("pool", "tp", "pp", "page_size", "dtype")
        ]
        table.add_row(
            info.id[:8],
            str(info.identity.get("weights", "-"))[:12],
            *known,
            str(info.records),
            f"{info.disk_bytes / 1e6:.1f}",
            _ago(info.newest_access),
        )
    console.print(table)
    console.print(
        f"{usage.records} pages, {usage.used_bytes / 1e6:.1f} MB in {usage.segments} segments, "
        f"index {usage.index_bytes / 1e6:.1f} MB",
        highlight=False,
    )
    write_json(json_path, {"usage": usage, "namespaces": namespaces})


@app.command()
def verify(directory: DirectoryArgument = _DEFAULT, json_path: JsonOption = None) -> None:
    """Read every stored page and check each of its layers; change nothing.

    Exit status 0 if all is well, 1 if a page is damaged (a server would miss it and recompute).

    Example: cacheflow store verify /data/kv --json report.json
    """
    with _opened(directory) as store, Progress(console=error_console, transient=True) as progress:
        task = progress.add_task("verifying", total=None)
        report = store.verify(
            lambda done, total: progress.update(task, completed=done, total=total)
        )
    for damage in report.damaged:
        console.print(f"damaged: {damage.namespace[:8]} {damage.key}: {damage.why}", markup=False)
    console.print(
        f"{report.records} pages read, {report.payload_bytes / 1e6:.1f} MB, "
        f"{len(report.damaged)} damaged",
        highlight=False,
    )
    write_json(json_path, report)
    if report.damaged:
        raise typer.Exit(1)


@app.command()
def gc(
    directory: DirectoryArgument = _DEFAULT,
    capacity: Annotated[
        str | None,
        typer.Option(help='Evict the least recently used down to this: bytes, "200GB" or "50%".'),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Sweep what dead servers left behind and apply a capacity.

    Example: cacheflow store gc /data/kv --capacity 200GB
    """
    with _opened(directory) as store:
        limit = None if capacity is None else capacity_bytes(capacity, store.config.directory)
        report = store.gc(limit)
    console.print(
        f"sealed {report.sealed_segments} segments, removed {report.stray_files} stray files, "
        f"{report.lost_records} lost and {report.evicted_records} least recently used pages; "
        f"freed {report.freed_bytes / 1e6:.1f} MB",
        highlight=False,
    )
    write_json(json_path, report)


@contextmanager
def _opened(directory: Path) -> Iterator[DiskStore]:
    try:
        store = DiskStore.open_existing(directory.expanduser())
    except StoreError as error:
        fail(str(error))
    try:
        yield store
    except StoreError as error:
        fail(str(error))
    except OptionsError as error:
        fail(str(error).replace(f"{FLAG}: ", "--"))
    finally:
        store.close()


def _ago(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = datetime.datetime.now(datetime.UTC).timestamp() - moment
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
