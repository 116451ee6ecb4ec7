"""`cacheflow doctor`: is everything there, and if not, what is the mend?

Imports at its top only what the command line itself needs: it must still run where a library or
SGLang is missing or broken, to say so.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from cacheflow_sgl.engine import version as engine_version

from .output import JsonOption, console, write_json

Status = Literal["ok", "note", "fault"]
_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "fault": "red"}
_PLUGIN_GROUP = "sglang.srt.plugins"
_LIBRARIES = ("torch", "numpy", "lmdb", "xxhash", "msgspec", "aiohttp", "prometheus-client")


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        check: what was looked at.
        status: "ok", "note" (works, worth knowing) or "fault" (will not work).
        detail: what was found.
        mend: what to do about it; empty where nothing needs doing.
    """

    check: str
    status: Status
    detail: str
    mend: str = ""


def doctor(
    extra_config: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The options you mean to serve with: JSON or @file, "
            "as for SGLang's --hicache-storage-backend-extra-config.",
        ),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Look at the installation and name each fault with its mend.

    Exit status 0 if nothing is at fault, else 1.

    Options: directory, capacity, namespace, io_threads, io_deadline_s and SGLang's own
    prefetch_threshold, prefetch_timeout_base, prefetch_timeout_per_ki_token,
    hicache_storage_pass_prefix_keys, tp_lcm_size. README has a line on each.

    Example: cacheflow doctor --extra-config '{"directory": "/data/kv", "capacity": "500GB"}'
    """
    findings = [finding for check in _checks(extra_config) for finding in check()]
    for finding in findings:
        mend = f" -> {finding.mend}" if finding.mend else ""
        style = _STYLES[finding.status]
        console.print(
            f"[{style}]{finding.status:<5}[/] {finding.check:<10} {escape(finding.detail + mend)}",
            highlight=False,
            soft_wrap=True,
        )
    write_json(json_path, {"findings": findings})
    if any(finding.status == "fault" for finding in findings):
        raise typer.Exit(1)


def _checks(extra_config: str | None) -> list[Callable[[], list[Finding]]]:
    return [
        _python,
        _sglang,
        _libraries,
        _device,
        _plugin,
        _backend_name,
        _patches,
        lambda: _directory(extra_config),
    ]


def _python() -> list[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    return [Finding("python", "ok", f"{found} at {sys.executable}")]


def _sglang() -> list[Finding]:
    try:
        engine_version.check_sglang_version()
    except engine_version.UnsupportedSGLangError as error:
        what, _, mend = str(error).removeprefix("cacheflow: ").partition(": ")
        return [Finding("sglang", "fault", what, mend)]
    return [Finding("sglang", "ok", f"{engine_version.SUPPORTED}, the supported version")]


def _libraries() -> list[Finding]:
    findings, versions = [], []
    for name in _LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
            importlib.import_module(name.replace("-", "_"))
        except (importlib.metadata.PackageNotFoundError, ImportError, OSError) as error:
            fault = " ".join(f"{name}: {error}".split())
            findings.append(Finding("libraries", "fault", fault, f"pip install {name}"))
    if not findings:
        findings.append(Finding("libraries", "ok", ", ".join(versions)))
    if importlib.util.find_spec("matplotlib") is None:
        mend = "pip install 'cacheflow-sgl[plot]'"
        findings.append(Finding("libraries", "note", "no matplotlib: --plot will not work", mend))
    return findings


def _device() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError):
        return []  # named under libraries
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        count = torch.cuda.device_count()
        return [Finding("device", "ok", f"{count} GPU: {', '.join(sorted(names))}")]
    return [
        Finding(
            "device",
            "note",
            "no GPU: SGLang runs on the CPU, for trying things out",
            "serve with `cacheflow serve`, which supplies what SGLang lacks there",
        )
    ]


def _plugin() -> list[Finding]:
    names = [entry.name for entry in importlib.metadata.entry_points(group=_PLUGIN_GROUP)]
    if "cacheflow" not in names:
        mend = "install this package: pip install cacheflow-sgl"
        return [Finding("plugin", "fault", f"no `cacheflow` in group {_PLUGIN_GROUP}", mend)]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "cacheflow" not in [name.strip() for name in allowed.split(",")]:
        detail = f"SGLANG_PLUGINS={allowed} leaves out cacheflow"
        return [Finding("plugin", "fault", detail, "add cacheflow to SGLANG_PLUGINS")]
    return [Finding("plugin", "ok", "SGLang finds the cacheflow plugin")]


def _backend_name() -> list[Finding]:
    """Ask SGLang's own parser, as its command line would."""
    if engine_version.installed_sglang() is None:
        return []  # named under sglang
    try:
        importlib.import_module("cacheflow_sgl.engine.plugin")
    except (ImportError, OSError):
        return []  # named under libraries
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang's, about hardware that is not here
            _parse_as_sglang()
    except (argparse.ArgumentError, ImportError, AttributeError, OSError) as error:
        fault = " ".join(str(error).split())
        mend = "reinstall the supported sglang, or apply the patches: scripts/apply_patches.py"
        return [Finding("backend", "fault", f"SGLang does not accept `cacheflow`: {fault}", mend)]
    return [Finding("backend", "ok", "SGLang accepts --hicache-storage-backend cacheflow")]


def _parse_as_sglang() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    parser.parse_args(["--model-path", "x", "--hicache-storage-backend", "cacheflow"])


def _patches() -> list[Finding]:
    script = Path(__file__).parents[2] / "scripts" / "apply_patches.py"
    if not script.is_file():
        return [Finding("patches", "ok", "not shipped with the wheel; the plugin needs none")]
    check = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    detail = " ".join((check.stdout + check.stderr).split())
    if check.returncode == 0:
        return [Finding("patches", "ok", detail)]
    if ": not applied;" in detail:
        return [Finding("patches", "ok", "not applied; the plugin needs none")]
    return [Finding("patches", "fault", detail, "see patches/README.md")]


def _directory(extra_config: str | None) -> list[Finding]:
    try:
        from cacheflow_sgl.engine import options as engine_options
        from hicache_tiers import DiskStore, StoreError
    except (ImportError, OSError):
        return []  # named under libraries
    try:
        options = engine_options.parse_options(engine_options.read_extra_config(extra_config))
    except engine_options.OptionsError as error:
        return [Finding("options", "fault", str(error).removeprefix(f"{engine_options.FLAG}: "))]
    directory = Path(options.directory).expanduser()
    if not directory.exists():
        detail = f"{directory} is not there yet; a server makes it at its start"
        return [Finding("directory", "ok", detail)]
    try:
        DiskStore.check(options.store_config())
        store = DiskStore.open_existing(directory)
    except StoreError as error:
        return [Finding("directory", "fault", str(error))]
    usage = store.usage()
    store.close()
    detail = f"{directory}: {usage.records} pages, {usage.used_bytes / 1e9:.2f} GB"
    free = shutil.disk_usage(directory).free + usage.used_bytes
    if options.store_config().capacity_bytes > free:
        room = f"{detail}; the capacity is more than the {free / 1e9:.0f} GB it can have there"
        return [Finding("directory", "note", room, "pages beyond that will not be stored")]
    return [Finding("directory", "ok", detail)]
