"""Fixtures of the tests that run SGLang's classes in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine.restore_cache import Stand


@pytest.fixture
def make_stand() -> Iterator[Callable[..., Stand]]:
    """Build a `Stand`: cache, pools and requests of one scheduler process."""
    from tests.engine.restore_cache import Stand  # imports sglang: seconds, so not at collection

    stands: list[Stand] = []

    def make(**sizes: Any) -> Stand:
        stands.append(Stand(**sizes))
        return stands[-1]

    yield make
    for stand in stands:
        stand.close()
