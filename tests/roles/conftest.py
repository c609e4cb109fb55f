"""A cluster over memory for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2ptrain.lab.memory import MemoryNetwork
from tests.roles.in_process import Cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster whose seed runs."""
    made = Cluster(tmp_path, MemoryNetwork())
    await made.start_seed()
    yield made
    await made.close()
