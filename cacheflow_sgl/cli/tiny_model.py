"""`cacheflow tiny-model`: write the tiny model of `cacheflow_sgl.cpu.tiny_model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model

_DEFAULT = Recipe()


def tiny_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the model.")],
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = _DEFAULT.layers,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = _DEFAULT.hidden,
    heads: Annotated[int, typer.Option(help="Query heads.")] = _DEFAULT.heads,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = _DEFAULT.kv_heads,
    vocab: Annotated[int, typer.Option(help="Tokens, 512 to 16384.")] = _DEFAULT.vocab,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = _DEFAULT.dtype,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = _DEFAULT.seed,
    force: Annotated[bool, typer.Option("--force", help="Write into any directory.")] = False,
) -> None:
    """Write a tiny random Qwen3 with a tokenizer, to try a server without a GPU.

    The same options give the same bytes. The output is nonsense, but it depends
    on every token of the context, so a wrong KV cache shows.

    Example: write it to the directory tiny, and serve it with pages in kv.

    \b
    cacheflow tiny-model tiny
    flags=(--page-size 64 --enable-hierarchical-cache
        --hicache-storage-backend cacheflow
        --hicache-storage-prefetch-policy wait_complete
        --hicache-storage-backend-extra-config '{"directory": "kv"}')
    cacheflow serve tiny "${flags\\[@]}"
    """
    try:
        recipe = Recipe(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            vocab=vocab,
            dtype=dtype,
            seed=seed,
        )
        write_tiny_model(directory, recipe, force=force)
    except (ValueError, OSError) as error:
        typer.echo(f"cacheflow tiny-model: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"wrote {directory}: Qwen3, {layers} layers, {dtype}, seed {seed}")
