"""What the scripts install, and what a failed or interrupted installation leaves behind."""

from __future__ import annotations

from pathlib import Path

from tests.scripts.conftest import Checkout


def installs(checkout: Checkout) -> int:
    return len(checkout.calls("-m pip install"))


def test_the_second_run_installs_nothing(checkout: Checkout) -> None:
    first = checkout.run("test.sh")
    assert (first.returncode, first.stderr) == (0, "")
    assert (checkout.venv / "bin" / "python").exists()
    [call] = checkout.calls("-m pip install")
    assert f"--constraint {checkout.root}/scripts/constraints.txt" in call
    assert call.endswith(f"--editable {checkout.root}[dev]")

    second = checkout.run("test.sh")
    assert second.returncode == 0
    assert f"environment {checkout.venv} is up to date" in second.stdout
    assert installs(checkout) == 1


def test_a_change_of_what_is_needed_installs_again(checkout: Checkout) -> None:
    checkout.run("test.sh")
    with (checkout.root / "scripts" / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    checkout.run("test.sh")
    assert installs(checkout) == 2


def test_a_failing_pip_ends_the_run_and_the_next_run_tries_again(checkout: Checkout) -> None:
    failed = checkout.run("test.sh", PIP_STATUS="1")
    assert failed.returncode == 2
    assert failed.stderr == (
        f"test.sh: pip could not install into {checkout.venv}: "
        "see its lines above, then run this again\n"
    )
    assert not checkout.calls("-m pytest")
    assert "install" in failed.stdout.splitlines()[-1]  # how long it took

    again = checkout.run("test.sh")
    assert again.returncode == 0
    assert installs(checkout) == 2
    assert len(checkout.calls("-m venv")) == 1


def test_after_a_failed_change_the_old_stamp_is_not_believed(checkout: Checkout) -> None:
    """Half of the new requirements may be installed: going back is a change, too."""
    checkout.run("test.sh")
    constraints = checkout.root / "scripts" / "constraints.txt"
    before = constraints.read_bytes()
    constraints.write_bytes(before + b"# changed\n")
    checkout.run("test.sh", PIP_STATUS="1")
    constraints.write_bytes(before)
    checkout.run("test.sh")
    assert installs(checkout) == 3


def test_an_environment_that_has_no_pip_yet_is_completed(checkout: Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    half_made = checkout.venv / "bin" / "python"
    half_made.write_bytes(checkout.python.read_bytes())
    half_made.chmod(0o755)
    assert checkout.run("test.sh").returncode == 0
    assert len(checkout.calls("-m venv")) == installs(checkout) == 1


def test_a_place_where_no_environment_can_be_made_is_one_line(checkout: Checkout) -> None:
    checkout.venv.write_text("a file")
    result = checkout.run("test.sh")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f"test.sh: cannot make an environment in {checkout.venv}; "
        "remove it, or give another with --venv"
    )
    assert installs(checkout) == 0


def test_venv_is_another_place_relative_to_the_caller(checkout: Checkout, tmp_path: Path) -> None:
    assert checkout.run("test.sh", "--venv", "my env", cwd=tmp_path).returncode == 0
    assert (tmp_path / "my env" / ".cacheflow-installed").exists()
    assert not checkout.venv.exists()


def test_the_quickstart_stops_where_pip_fails(checkout: Checkout) -> None:
    failed = checkout.run("quickstart.sh", PIP_STATUS="1")
    assert failed.returncode == 2
    assert failed.stderr.startswith("quickstart.sh: pip could not install")
    assert "doctor" not in failed.stdout
