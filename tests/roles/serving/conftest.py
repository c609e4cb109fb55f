"""Workers and a client for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .scene import Scene, scene_of


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Four workers, ``w0`` to ``w3``."""
    async with scene_of(tmp_path) as made:
        yield made
