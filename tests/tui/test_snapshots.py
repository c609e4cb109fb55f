"""What the app looks like. After a wanted change: ``pytest --snapshot-update tests/tui/test_snapshots.py``; look."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.pilot import Pilot

from tests.tui.demo import DemoCluster, DemoSource
from tui.app import P2PTrainApp

SMALL, MIDDLE, LARGE, HUGE = (80, 24), (120, 40), (160, 48), (200, 60)
SCENES: dict[str, tuple[tuple[int, int], list[str]]] = {
    "small": (SMALL, []),
    "large": (LARGE, []),
    "jobs": (SMALL, ["3"]),
    "help": (SMALL, ["question_mark"]),
    "confirm": (SMALL, ["x"]),
    "create": (SMALL, ["n", *"ti"]),
    "restore": (MIDDLE, ["R", "down"]),
    "filter": (SMALL, ["slash", *"la"]),
    "filtered": (HUGE, ["slash", *"la", "enter"]),
    "chat-small": (SMALL, ["c", *"why", "enter"]),
    "chat-middle": (MIDDLE, ["c", *"why", "enter"]),
    "chat-huge": (HUGE, ["c", *"why", "enter"]),
    "chains": (LARGE, ["5"]),
    "serving": (LARGE, ["6"]),
    "events": (SMALL, ["4"]),
    "lost": (SMALL, []),
}


@pytest.mark.parametrize("scene", SCENES)
def test_how_it_looks(snap_compare: Callable[..., bool], scene: str):
    size, pressed = SCENES[scene]
    source = DemoSource(DemoCluster(6, serving=scene.startswith(("serving", "chat"))))
    for piece in ("A ring sums\nin parts.\n\n", "Each member passes on what it has."):
        source.pieces.put_nowait(piece)
    app = P2PTrainApp(source, refresh_hz=0)

    async def run_before(pilot: Pilot[None]) -> None:
        await pilot.pause()
        if scene == "lost":
            source.lose()
            source.clock.time += 2
        app.refresh_panels()
        await pilot.press(*pressed)
        await pilot.pause()
        app.refresh_panels()
        await pilot.pause()
        app.clear_notifications()
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=run_before)
