"""A cluster over memory, and virtual time, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from p2ptrain.lab.memory import MemoryNetwork, VirtualClockLoop
from tests.roles.in_process import Cluster
from tests.roles.scripted import DEADLINE_S

LONGEST_S = 6 * 3600.0
"""Virtual time after which a test hangs: beats and deadlines go on for ever."""


class BoundedLoop(VirtualClockLoop):
    """Raises ``RuntimeError`` where a test hangs."""

    def _run_once(self) -> None:
        if self.time() > LONGEST_S:
            raise RuntimeError(f"the test still runs after {LONGEST_S:g} s of virtual time")
        super()._run_once()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a test and its fixtures. With the mark ``virtual_time`` waiting is free and exact."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": BoundedLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def never_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing that a test stops for as long as it waits for something else is not taken for hung."""
    monkeypatch.setattr("roles.compute_thread.HANG_S", 4 * DEADLINE_S)


@pytest.fixture
async def cluster(tmp_path: Path, never_hung: None) -> AsyncIterator[Cluster]:
    """A cluster whose seed runs."""
    made = Cluster(tmp_path, MemoryNetwork())
    await made.start_seed()
    yield made
    await made.close()
