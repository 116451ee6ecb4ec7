"""scripts/quickstart: what it removes, what it says. Its whole run is in tests/acceptance."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.conftest import REPOSITORY, Checkout

DRIVER = REPOSITORY / "scripts" / "quickstart.py"


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_driver(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DRIVER, *args], capture_output=True, text=True, timeout=120, check=False
    )


def test_pages_of_an_earlier_run_are_removed(driver: ModuleType, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    driver._remove_pages(pages)  # nothing there yet
    (pages / "segments").mkdir(parents=True)
    (pages / "FORMAT").write_text("{}")
    driver._remove_pages(pages)
    assert not pages.exists()
    pages.mkdir()
    driver._remove_pages(pages)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "pages" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    result = run_driver("--out", tmp_path)
    assert result.returncode == 1
    assert result.stdout == (
        f"quickstart: {mine.parent} is not a page store of ours (no FORMAT file in it), so it is "
        "left alone; move it away, or give another --out\n"
    )
    assert mine.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [mine.parent]


def test_a_link_to_a_folder_is_left_alone(driver: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(driver.QuickstartError):
        driver._remove_pages(tmp_path / "pages")


def test_a_mistyped_option_does_not_become_a_flag_of_the_server(tmp_path: Path) -> None:
    result = run_driver("--out", tmp_path / "out", "--modle", "x")
    assert result.returncode == 2
    assert "No such option: --modle" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_log_line_shown_is_the_last_one_with_text(driver: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert driver._last_line(log) == ""
    log.write_bytes(b"x" * 5000 + b"\nloading\n 10%|#   |\r 20%|##  |\r\n\n")
    assert driver._last_line(log) == "20%|##  |"


def test_help_lists_every_option(checkout: Checkout, driver: ModuleType) -> None:
    shown = checkout.run("quickstart.sh", "--help")
    assert shown.returncode == 0
    for name in inspect.signature(driver.main).parameters:
        if name != "context":
            assert f"\n  --{name.replace('_', '-')} " in shown.stdout


def test_flags_of_the_server_reach_it_untouched(checkout: Checkout) -> None:
    checkout.run("test.sh")  # installs
    cacheflow = checkout.venv / "bin" / "cacheflow"
    cacheflow.write_text("#!/bin/sh\n")
    cacheflow.chmod(0o755)
    checkout.run("quickstart.sh", "--model", "m", "--", "--venv", "no venv", "--help")
    [call] = checkout.calls(f"{checkout.root}/scripts/quickstart.py")
    assert call.endswith("quickstart.py --model m -- --venv no venv --help")
