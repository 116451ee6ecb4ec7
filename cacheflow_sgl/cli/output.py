"""What every command prints and writes the same way."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

from cacheflow_sgl.files import write_atomically

console = Console()
error_console = Console(stderr=True)

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON."),
]


def write_json(path: Path | None, content: Any) -> None:
    """Write `content` (msgspec types and builtins) to `path`, all or nothing; None does nothing."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(content), indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + b"\n")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def fail(message: str, status: int = 2) -> NoReturn:
    """End the command with one line on stderr."""
    line = f"cacheflow: {message}"
    error_console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)
