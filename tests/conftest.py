"""Fixtures of the test bed: the tiny model, and one running server of each shape."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from cacheflow_sgl.cpu.tiny_model import write_tiny_model
from tests.harness.servers import SharedServer

# The same examples in every run, so that a change that passed here passes elsewhere. New ones are
# looked for by hand: HYPOTHESIS_PROFILE=explore scripts/test.sh ...
settings.register_profile("same", derandomize=True)
settings.register_profile("explore")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model with its default recipe."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def _server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    shared = SharedServer(request.param, tiny_model, tmp_path_factory.mktemp(request.param.name))
    with shared.process:
        yield shared


@pytest.fixture
def server(_server: SharedServer) -> SharedServer:
    """The shared server of the shape a test `uses`, with nothing cached on device or host."""
    _server.client.flush_cache()
    return _server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests of one shape together, so that each shape starts once and only one runs."""

    def shape(item: pytest.Item) -> str:
        callspec = getattr(item, "callspec", None)
        param = callspec.params.get("_server") if callspec else None
        return param.name if param else ""

    items.sort(key=shape)
