"""The `cacheflow` command: one function a subcommand, each in a file of its own name."""

import typer

from . import doctor, replay, serve, store, tiny_model

app = typer.Typer(
    name="cacheflow",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="CacheFlow for SGLang: bring an evicted KV-cache prefix back in the least time.",
    epilog="Start with: cacheflow doctor",
)
app.command()(doctor.doctor)
app.command(context_settings=serve.PASS_THROUGH)(serve.serve)
app.command()(replay.replay)
app.command(name="tiny-model")(tiny_model.tiny_model)
app.add_typer(store.app, name="store")


def main() -> None:
    """Console script `cacheflow`."""
    app()
