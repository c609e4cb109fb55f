"""What is kept open while a person types."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest

from p2ptrain.cli import kept_open
from p2ptrain.cli.kept_open import KeptOpen
from p2ptrain.core.errors import Unreachable


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, ``close`` waits for the thread's end."""
    monkeypatch.setattr(kept_open, "_ENDED_S", 60.0)


class Door:
    def __init__(self) -> None:
        self.left_on = ""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        try:
            yield "open"
        finally:
            await asyncio.sleep(0)
            self.left_on = threading.current_thread().name


def test_it_lives_on_its_loop_until_it_is_closed_and_is_left_there() -> None:
    door = Door()
    kept = KeptOpen(door.opened, name="door")
    assert kept.value == "open"

    async def where() -> str:
        return threading.current_thread().name

    assert asyncio.run_coroutine_threadsafe(where(), kept.loop).result(30) == "door"
    assert not door.left_on
    kept.close()
    assert door.left_on == "door"
    kept.close()  # once more does nothing


def test_what_cannot_be_opened_says_why() -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        raise Unreachable("nobody is there")
        yield

    with pytest.raises(Unreachable, match="nobody is there"):
        KeptOpen(opened, name="door")


def test_whoever_gives_up_waiting_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, ended = threading.Event(), threading.Event()

    @asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        opening.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.set()

    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            assert opening.wait(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(kept_open, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        KeptOpen(opened, name="door")
    assert ended.is_set()
