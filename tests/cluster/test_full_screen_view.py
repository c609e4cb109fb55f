"""What the full-screen view of ``p2ptrain up`` says of what happens below it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from p2ptrain.cluster.training_run import FullScreenView
from p2ptrain.core.errors import JobFailed
from tests.tui.demo import DemoSource
from tui.app import SERVING


async def seen(
    view: FullScreenView,
    work: Coroutine[Any, Any, None],
    standing: asyncio.Event | None = None,
) -> list[tuple[str, str]]:
    """Severities and texts of the notices that are there once ``work`` has ended, while the view stands; ``standing``
    is set when it does."""
    task, found = asyncio.ensure_future(work), list[tuple[str, str]]()

    async def stands() -> bool:
        async with view.app.run_test(notifications=True) as pilot:
            if standing is not None:
                standing.set()
            await asyncio.wait({task})
            await pilot.pause()
            notices = list(view.app._notifications)
            found.extend((notice.severity, f"{notice.title}: {notice.message}") for notice in notices)
            assert all(notice.time_left > 86_400 for notice in notices), "somebody may look tomorrow"
            return True

    view.app.run_async = stands  # type: ignore[method-assign, assignment]
    view.app.source = DemoSource(None)
    assert await view.show(task) is True
    return found


async def ends(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (JobFailed("the seed ended: no room", remedy="make some"), "error The run has failed: the seed ended: no room"),
        (None, "information The run has ended: q closes the view"),
    ],
)
async def test_that_it_is_over_is_said_within_the_view(problem: Exception | None, said: str) -> None:
    ((severity, text),) = await seen(FullScreenView(1), ends(problem))
    assert f"{severity} {text}".startswith(said)
    assert "q closes the view" in text
    assert ("make some" in text) == ("no room" in text)


async def test_trouble_meanwhile_is_said_within_the_view_and_what_is_usual_is_not() -> None:
    view = FullScreenView(1)

    async def goes_on() -> None:
        view.show_notice("info", "workers start")
        view.show_notice("warning", "the drafter ended")
        await asyncio.Event().wait()

    async def stopped() -> None:
        going = asyncio.ensure_future(goes_on())
        await asyncio.sleep(0)
        going.cancel()

    found = await seen(view, stopped())
    assert ("warning", "Trouble: the drafter ended") in found
    assert not any("workers start" in text for _, text in found)


async def test_what_is_served_is_shown_with_how_to_ask() -> None:
    view, standing = FullScreenView(1), asyncio.Event()

    async def serves() -> None:
        await standing.wait()
        view.show_served("p2ptrain chat")

    found = await seen(view, serves(), standing)
    assert ("information", "The models are served: p2ptrain chat") in found
    assert view.app.view == SERVING
    assert view.app.has_class("-serving")
