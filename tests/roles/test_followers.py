"""What a standby is sent, batch by batch, and for whom the log is kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.world import LoopClock
from roles.seed import feed, followers
from roles.seed.feed import BATCH_BYTES, Change
from roles.seed.followers import Followers
from roles.seed.store import JobRecord, Records, Store
from tests.roles.test_standby import Played, play

ROW_BYTES = 8000


class Whole(Exception):
    """The copy is."""


@dataclass
class Taker:
    """A follower that takes everything at once."""

    sent_bytes: list[int]
    taken: int = -1
    copied: bool = False
    in_step: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, changes: list[Change], *, whole: bool) -> None:
        self.sent_bytes.append(len(feed.packed(changes)))
        if whole:
            raise Whole


async def test_a_batch_of_a_first_copy_is_as_large_as_a_batch_may_be(tmp_path: Path) -> None:
    store = await Store.open(RealDisk(), tmp_path / "seed")
    for number in range(300):
        record = JobRecord(f"j{number}", "n", "p", "sync", 1, 1, 1, 1, float(number))
        await store.call(Records.add_job, record, "x" * ROW_BYTES)
    made = Followers(
        clock=LoopClock(),
        store=store,
        authority=None,
        term=0,
        changed=lambda: None,
        touch=lambda peer_id: None,
        note=lambda *what: None,
    )
    taker = Taker([])
    try:
        with pytest.raises(Whole):
            await made._feed(cast(Any, taker))
    finally:
        await store.close()
    assert sum(taker.sent_bytes) > 300 * ROW_BYTES
    assert max(taker.sent_bytes) < BATCH_BYTES + 2 * ROW_BYTES


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
