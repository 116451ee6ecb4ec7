"""`cacheflow serve`: SGLang's server, on a GPU as it is, on a CPU with what it lacks there."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer
import yaml

from cacheflow_sgl import cpu

_BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
_POOL_TOKENS = 65536
_SGLANG = "import sys; from sglang.cli.main import main; sys.exit(main())"

# SGLang's own backends want a model; those that others add may not.
_MODEL_TYPES = (None, "auto", "llm", "diffusion")
_INFORMATIVE = {"-h", "--help", "--version"}

# Typer settings of the command: what it doesn't know belongs to SGLang.
PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["-h", "--help"],
}


class NoModelError(Exception):
    """The command line names no model, nor does its `--config` file. The message is one line."""


@dataclass(frozen=True)
class Hardware:
    """What `plan` needs to know of the machine.

    Attributes:
        accelerator: torch's name of it (`cuda`, also for ROCm; `xpu`, `npu`, ...), None without.
        cores: ids of the cores this process may use.
    """

    accelerator: str | None
    cores: tuple[int, ...]


@dataclass(frozen=True)
class ServePlan:
    """How to start the server.

    Attributes:
        argv: the command, program first.
        environ: its whole environment.
        notes: what was added to the user's flags and environment, for people to read.
    """

    argv: list[str]
    environ: dict[str, str]
    notes: list[str] = field(default_factory=list)


def serve(context: typer.Context) -> None:
    """Start SGLang's server, with a GPU or without.

    Takes the flags of `sglang serve`, which all go there unchanged; a model that
    only a --config file names is passed on as --model-path. Where there is no
    GPU, or with --device cpu, the environment and the flags that SGLang needs on
    a CPU are added, unless you gave them. What was added is printed in one line.

    Example: keep pages in the directory kv, and find them after a restart.

    \b
    flags=(--page-size 64 --enable-hierarchical-cache
        --hicache-storage-backend cacheflow
        --hicache-storage-prefetch-policy wait_complete
        --hicache-storage-backend-extra-config '{"directory": "kv"}')
    cacheflow serve Qwen/Qwen3-8B "${flags\\[@]}"

    All flags: sglang serve --help
    """
    # An array in the example, no backslashes: help lines end in spaces, which would follow them.
    try:
        planned = plan(context.args, os.environ, detect_hardware())
    except NoModelError as error:
        typer.echo(f"cacheflow serve: {error}", err=True)
        raise typer.Exit(2) from None
    if planned.notes:
        print(f"cacheflow serve: {'; '.join(planned.notes)}", file=sys.stderr, flush=True)
    # The server takes over this process: signals and the exit status need no relay.
    os.execve(planned.argv[0], planned.argv, planned.environ)


def detect_hardware() -> Hardware:
    """Ask torch for the accelerator, and the system for the cores."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    cores = sorted(os.sched_getaffinity(0))
    return Hardware(accelerator.type if accelerator else None, tuple(cores))


def plan(args: Sequence[str], environ: Mapping[str, str], hardware: Hardware) -> ServePlan:
    """Decide the device, and what SGLang needs there beyond the user's own flags.

    Args:
        args: flags of `sglang serve`; a model may come first. Never changed, only added to.
        environ: the environment to start from.
        hardware: what the machine has.

    Raises:
        NoModelError: SGLang would end with a traceback for want of a model.
    """
    flags = _read_flags(args)
    planned = ServePlan([sys.executable, "-c", _SGLANG, "serve", *args], dict(environ))
    _name_model(planned, flags, args)
    if flags.device not in (None, "cpu") or (
        # A platform plugin of SGLang's knows hardware that torch does not.
        flags.device is None and (hardware.accelerator or environ.get("SGLANG_PLATFORM"))
    ):
        return planned

    cpu.prepare(planned.environ)
    reason = "as --device cpu says" if flags.device else "no GPU found"
    planned.notes.append(f"running on the CPU, {reason}")
    if hardware.accelerator == "cuda":
        # SGLang asks torch, not the flag, which kernels to import.
        planned.environ["CUDA_VISIBLE_DEVICES"] = ""
        planned.notes.append("hid the GPUs")
    added: list[str] = []
    if flags.device is None:
        added += ["--device", "cpu"]
    if flags.dtype is None and _checkpoint_dtype(flags.model) == "float32":
        # SGLang's `auto` would turn float32 into float16, which CPUs compute slowly.
        added += ["--dtype", "float32"]
    if flags.max_total_tokens is None and flags.mem_fraction_static is None:
        # SGLang would fill the memory with the KV pool and leave none for the host pool.
        added += ["--max-total-tokens", str(_POOL_TOKENS)]
    if added:
        planned.argv.extend(added)
        planned.notes.append(f"added {' '.join(added)}")
    ranks = flags.tp * flags.pp * flags.dp
    if ranks > 1 and _BIND_VARIABLE not in environ:
        bind = _share_cores(hardware.cores, ranks)
        planned.environ[_BIND_VARIABLE] = bind
        planned.notes.append(f"set {_BIND_VARIABLE}={bind}")
    return planned


def _read_flags(args: Sequence[str]) -> argparse.Namespace:
    """The few flags the plan depends on, from the command line or from a `--config` file."""
    # Like SGLang's own parser this one takes abbreviations, such as --tp for --tp-size.
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--max-total-tokens")
    parser.add_argument("--mem-fraction-static")
    parser.add_argument("--model-path", "--model", dest="model")
    parser.add_argument("--model-type")
    parser.add_argument("--tp-size", "--tensor-parallel-size", dest="tp", type=int, default=1)
    parser.add_argument("--pp-size", "--pipeline-parallel-size", dest="pp", type=int, default=1)
    parser.add_argument("--dp-size", "--data-parallel-size", dest="dp", type=int, default=1)
    problem = None
    try:
        flags, _ = parser.parse_known_args(args)
        # Spelled otherwise, as in --config=FILE, SGLang reads no file.
        if flags.config and "--config" in args:
            flags, _ = parser.parse_known_args([*_settings(flags.config), *args])
    except (argparse.ArgumentError, ValueError) as error:
        # A flag or a file that SGLang will refuse too, with a better message than ours.
        flags, _ = parser.parse_known_args([])
        problem = str(error)
    if flags.model is None and args and not args[0].startswith("-"):
        flags.model = args[0]
    flags.problem = problem
    return flags


def _settings(config: str) -> list[str]:
    """The flags that a `--config` file holds; ValueError, of one line, where it cannot be read."""
    try:
        content = yaml.safe_load(Path(config).read_text()) or {}
    except OSError as error:
        raise ValueError(f"{config}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{config}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{config}: not a mapping of flags to values")
    flags = ((str(key).replace("_", "-"), value) for key, value in content.items())
    return [f"--{flag}={value}" for flag, value in flags if value is not None]


def _name_model(planned: ServePlan, flags: argparse.Namespace, args: Sequence[str]) -> None:
    """See to it that the command line names a model.

    SGLang chooses its backend before it reads a `--config` file, and ends with a traceback where
    only the file names the model.
    """
    if _names_model(args) or _INFORMATIVE & set(args) or flags.model_type not in _MODEL_TYPES:
        return
    if flags.model is None:
        why = f" ({flags.problem})" if flags.problem else ""
        raise NoModelError(
            f"no model given{why}; name it first, cacheflow serve MODEL, or with --model-path"
        )
    planned.argv.extend(["--model-path", flags.model])
    source = f", from {flags.config}" if flags.config else ""
    planned.notes.append(f"added --model-path {flags.model}{source}")


def _names_model(args: Sequence[str]) -> bool:
    """Whether SGLang finds a model among `args`, as `sglang/cli/utils.py` looks for it."""
    if args and not args[0].startswith("-"):
        return True
    return any(
        arg.startswith(("--model-path=", "--model="))
        or (arg in ("--model-path", "--model") and number + 1 < len(args))
        for number, arg in enumerate(args)
    )


def _checkpoint_dtype(model: str | None) -> str | None:
    """The dtype a local checkpoint declares, None for a model that is not a directory here."""
    try:
        config = json.loads(Path(model or "", "config.json").read_text())
    except (OSError, ValueError):
        return None
    declared = config.get("dtype") or config.get("torch_dtype")
    return declared if isinstance(declared, str) else None


def _share_cores(cores: Sequence[int], ranks: int) -> str:
    """One entry a rank: its own share of `cores`, or one core in turn if they are too few."""
    share = len(cores) // ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks)
    )
