"""scripts/test.sh: its exit status is that of the tests it ran."""

from __future__ import annotations

import pytest

from tests.scripts.conftest import Checkout


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [("0 0", 0), ("1 0", 1), ("0 1", 1), ("5 0", 0), ("0 5", 0), ("5 1", 1)],
)
def test_narrowed_by_arguments(checkout: Checkout, statuses: str, expected: int) -> None:
    result = checkout.run("test.sh", "-k", "word", PYTEST_STATUS=statuses)
    assert (result.returncode, result.stderr) == (expected, "")
    assert all(call.endswith(" -k word") for call in checkout.calls("-m pytest"))
    assert len(checkout.calls("-m pytest")) == 2


def test_a_typo_that_selects_nothing_fails(checkout: Checkout) -> None:
    result = checkout.run("test.sh", "-k", "typo", PYTEST_STATUS="5 5")
    assert (result.returncode, result.stderr) == (2, "test.sh: no test matches: -k typo\n")


def test_without_arguments_both_runs_must_find_tests(checkout: Checkout) -> None:
    assert checkout.run("test.sh", PYTEST_STATUS="0 5").returncode == 5


@pytest.mark.parametrize(
    ("args", "marks"), [([], "not bench and not full"), (["--full"], "not bench")]
)
def test_full_adds_the_slow_ones(checkout: Checkout, args: list[str], marks: str) -> None:
    checkout.run("test.sh", *args)
    fast, engine = checkout.calls("-m pytest")
    assert f"-m {marks} and not engine --" in fast
    assert f"-m {marks} and engine --" in engine
