"""Fixtures of the server's tests. One server, in one event loop, serves all tests that want it as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from server.settings import Settings
from tests.server.harness import Live, live, settings_with, until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if pytest_asyncio.is_async_test(item) and "server" in item.path.parts[-2:]:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """For a test that starts its own server."""
    return settings_with(tmp_path)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    settings = settings_with(tmp_path_factory.mktemp("shared"))
    engine = dataclasses.replace(settings.engine, extra=("--worlds", "64"))
    async with live(dataclasses.replace(settings, engine=engine)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def server(shared_server: Live) -> AsyncIterator[Live]:
    """The shared server, without sessions before and after."""
    await until(lambda: shared_server.core.link.ready)
    yield shared_server
    sessions = shared_server.core.sessions
    for session in sessions.living():
        sessions.stop(session, "the test is over")
    await until(lambda: all(session.history.over for session in sessions))
