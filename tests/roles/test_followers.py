"""What a standby is sent, batch by batch, and for whom the log is kept."""

from __future__ import annotations

import pytest

from roles.seed import feed, followers
from tests.roles.test_standby import Played, play


def test_a_standby_may_come_when_another_one_has_followed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "MAX_LOGGED", 60)  # a day's, with these pages
    monkeypatch.setattr(followers, "TIDY_S", 0.02)
    monkeypatch.setattr(followers, "BATCH_ROWS", 20)
    monkeypatch.setattr(feed, "BATCH_ROWS", 20)

    async def script(cluster: Played) -> None:
        await cluster.begin(standbys=1)
        await cluster.goes_on(100)
        cluster.c.follow("seed")
        await cluster.in_step(cluster.c)

    play(script)
