"""The `cacheflow` command: one function a subcommand, each in a file of its own name."""

import multiprocessing
import sys

import typer

from . import doctor
from .output import fail

app = typer.Typer(
    name="cacheflow",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Start with: cacheflow doctor",
)
app.command()(doctor.doctor)


@app.callback()
def root() -> None:
    """CacheFlow for SGLang: bring an evicted KV-cache prefix back in the least time."""


def _add_commands() -> str | None:
    """Add all commands but `doctor`; what is missing if the installation is broken."""
    try:
        from . import bench, profile, replay, serve, simulate, store, tiny_model
    except (ImportError, OSError) as error:
        return " ".join(str(error).split())
    app.command(context_settings=serve.PASS_THROUGH)(serve.serve)
    app.command()(replay.replay)
    app.command()(simulate.simulate)
    app.command(name="tiny-model")(tiny_model.tiny_model)
    app.add_typer(bench.app, name="bench")
    app.add_typer(profile.app, name="profile")
    app.add_typer(store.app, name="store")
    return None


# Processes that a command starts import this module anew, but need no commands, nor their imports.
_missing = _add_commands() if multiprocessing.current_process().name == "MainProcess" else None


def main() -> None:
    """Console script `cacheflow`."""
    if _missing is not None and sys.argv[1:2] != ["doctor"]:
        try:
            fail(f"{_missing}; see `cacheflow doctor`")
        except typer.Exit as end:
            sys.exit(end.exit_code)
    app()
