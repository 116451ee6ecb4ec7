"""A checkout with the real scripts and a Python that only pretends, for fast tests of both."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Notes every call in $CALLS. `-m venv` makes an environment with a copy of itself; pip and pytest
# end as $PIP_STATUS and $PYTEST_STATUS (by mark expression: "FAST ENGINE") say.
STUB = r"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
"-m venv "*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/has-pip" ;;
"-m pip --version") [ -e "$(dirname "$0")/../has-pip" ] ;;
"-m pip install "*) exit "${PIP_STATUS:-0}" ;;
"-m pytest "*"and not engine "*) exit "${PYTEST_STATUS%% *}" ;;
"-m pytest "*) exit "${PYTEST_STATUS##* }" ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """Where the scripts lie, and what they call."""

    root: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.root.parent / "python"

    def calls(self, start: str) -> list[str]:
        """The calls of any Python so far whose arguments begin with `start`."""
        log = self.root.parent / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(start)]

    def run(
        self, script: str, *args: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        stubs = {"PYTHON": str(self.python), "CALLS": str(self.root.parent / "calls")}
        return subprocess.run(
            [self.root / "scripts" / script, *args],
            env={**os.environ, **stubs, "PYTEST_STATUS": "0 0", **env},
            cwd=cwd or self.root.parent,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "a folder" / "check out")
    (made.root / "scripts").mkdir(parents=True)
    for name in ["lib.sh", "test.sh", "quickstart.sh", "constraints.txt"]:
        shutil.copy2(REPOSITORY / "scripts" / name, made.root / "scripts")
    shutil.copy2(REPOSITORY / "pyproject.toml", made.root)
    made.python.write_text(STUB)
    made.python.chmod(0o755)
    return made
