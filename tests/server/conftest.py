"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.settings import Settings
from tests.server.harness import Live, live, settings_with


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_with(tmp_path)


@pytest.fixture
async def server(settings: Settings) -> AsyncIterator[Live]:
    async with live(settings) as running:
        yield running
