"""What the app looks like. After a wanted change: ``pytest --snapshot-update tests/tui/test_snapshots.py``; look."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.pilot import Pilot

from tests.tui.demo import DemoCluster, DemoSource
from tui.app import P2PTrainApp

SIZES = {"80x24": (80, 24), "160x48": (160, 48)}
Compare = Callable[..., bool]


def frozen(cluster: DemoCluster | None = None) -> P2PTrainApp:
    source = DemoSource(cluster or DemoCluster(6))
    return P2PTrainApp(source, clock=source.clock, refresh_hz=0)


def keys(*pressed: str, lost: bool = False) -> Callable[[Pilot[None]], object]:
    async def run_before(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, P2PTrainApp)
        assert isinstance(app.source, DemoSource)
        await pilot.pause()
        if lost:
            app.source.lose()
            app.source.clock.time += 2
        app.refresh_panels()
        await pilot.press(*pressed)
        await pilot.pause()
        app.refresh_panels()
        await pilot.pause()
        app.clear_notifications()
        await pilot.pause()

    return run_before


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", SIZES)
def test_first_sight(snap_compare: Compare, size: str, theme: str):
    pressed = ["d"] if theme == "light" else []
    assert snap_compare(frozen(), terminal_size=SIZES[size], run_before=keys(*pressed))


@pytest.mark.parametrize("view", ["2", "3", "4"])
def test_the_other_views_of_a_small_terminal(snap_compare: Compare, view: str):
    assert snap_compare(frozen(), terminal_size=SIZES["80x24"], run_before=keys(view))


@pytest.mark.parametrize("key", ["question_mark", "c"], ids=["help", "confirm"])
def test_dialogs(snap_compare: Compare, key: str):
    assert snap_compare(frozen(), terminal_size=SIZES["80x24"], run_before=keys(key))


def test_a_lost_seed(snap_compare: Compare):
    assert snap_compare(frozen(), terminal_size=SIZES["80x24"], run_before=keys(lost=True))


def test_no_peers(snap_compare: Compare):
    assert snap_compare(frozen(DemoCluster(0)), terminal_size=SIZES["80x24"], run_before=keys())


def test_many_peers(snap_compare: Compare):
    assert snap_compare(frozen(DemoCluster(64)), terminal_size=SIZES["160x48"], run_before=keys())


@pytest.mark.parametrize("size", SIZES)
def test_chains(snap_compare: Compare, size: str):
    assert snap_compare(frozen(), terminal_size=SIZES[size], run_before=keys("5"))


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", SIZES)
def test_serving(snap_compare: Compare, size: str, theme: str):
    pressed = ["d", "6"] if theme == "light" else ["6"]
    cluster = DemoCluster(6, serving=True)
    assert snap_compare(frozen(cluster), terminal_size=SIZES[size], run_before=keys(*pressed))


def test_no_chain(snap_compare: Compare):
    cluster = DemoCluster(6)
    cluster.parts = list  # type: ignore[method-assign]
    assert snap_compare(frozen(cluster), terminal_size=SIZES["80x24"], run_before=keys("5"))


def test_a_long_chain(snap_compare: Compare):
    assert snap_compare(frozen(DemoCluster(64)), terminal_size=SIZES["160x48"], run_before=keys("5"))
