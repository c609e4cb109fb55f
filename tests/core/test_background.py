"""Work that is started while its task group ends: it does not begin, and nothing is left of it."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.core.background import start_in


async def test_a_group_that_ends_takes_no_more() -> None:
    ran: list[str] = []
    standing = asyncio.Event()

    async def work(name: str) -> None:
        ran.append(name)
        standing.set()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            assert start_in(group, work("early"), "early") is not None
            group.create_task(ends_with_more(group))
            await asyncio.Event().wait()

    async def ends_with_more(group: asyncio.TaskGroup) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            late = work("late")
            assert start_in(group, late, "late") is None
            with pytest.raises(RuntimeError, match="already awaited"):  # it is closed, so Python does not warn of it
                await late

    running = asyncio.create_task(run())
    await standing.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ran == ["early"]
