"""The event log, and the subscriptions of operators: updates are coalesced, and sent in bounded frames.

A subscription stores *which* records changed, and asks for their present state when it sends. So a slow reader gets
fewer updates, not older ones. Rows of metrics, events and recoveries wait in bounded queues. A reader that falls
further behind, or reads nothing for ``PATIENCE_S``, is disconnected with a reason.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError
from p2ptrain.core.world import Clock
from roles.seed.peers import clip
from roles.seed.store import Records, SeedStore
from wire.messages import Update
from wire.records import EventInfo, MetricRow, RecoveryInfo

INTERVAL_S = 0.1
PATIENCE_S = 5.0
MAX_ROWS = 4000
STATE_TOPICS = ("cluster", "peers", "jobs", "checkpoints", "parts", "serving")

RECENT_EVENTS = 100
LEVELS = frozenset({"info", "warning", "error"})
AnnouncedRow = MetricRow | EventInfo | RecoveryInfo
_TOPICS: dict[type, str] = {MetricRow: "metrics", EventInfo: "events", RecoveryInfo: "recoveries"}
Map = dict[str, Any]
Render = Callable[[str, str], Map | None]
"""(topic, id) → the record as a map; None if it was deleted."""


class Subscription:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._dirty: dict[str, dict[str, None]] = {topic: {} for topic in STATE_TOPICS}
        self._rows: dict[str, deque[Map]] = {"metrics": deque(), "events": deque(), "recoveries": deque()}
        self._news = asyncio.Event()
        self._problem: P2PTrainError | None = None

    def touch(self, topic: str, ids: Iterable[str]) -> None:
        self._dirty[topic].update(dict.fromkeys(ids))
        self._news.set()

    def add(self, rows: Iterable[AnnouncedRow]) -> None:
        for row in rows:
            queue = self._rows[_TOPICS[type(row)]]
            if len(queue) >= MAX_ROWS:
                text = f"the subscriber is more than {MAX_ROWS} rows behind"
                self.end(DeadlineExceeded(text, remedy="connect again"))
                return
            queue.append(row.to_map())
        self._news.set()

    def end(self, problem: P2PTrainError) -> None:
        """Have ``rounds`` raise ``problem``."""
        self._problem = problem
        self._news.set()

    async def rounds(self) -> AsyncIterator[Iterator[Update]]:
        """Yield what is new, once there is something. Raises ``DeadlineExceeded`` if the reader is too slow, and what
        ``end`` was given."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._problem is not None:
                raise self._problem.with_traceback(None)
            yield self.drain()
            await asyncio.sleep(INTERVAL_S)  # collect further changes

    def drain(self) -> Iterator[Update]:
        """What is new. All that led to a state comes before it: who waits for a job's end reads why."""
        states = list[Update]()
        for topic, ids in self._dirty.items():
            found = {item_id: self._render(topic, item_id) for item_id in ids}
            states += _updates(topic, (item for item in found.values() if item is not None))
            states += _updates(f"{topic}-gone", ({"id": item_id} for item_id in ids if found[item_id] is None))
            ids.clear()
        for topic, queue in self._rows.items():
            rows = list(queue)
            queue.clear()
            yield from _updates(topic, rows)
        yield from states


class Announcements:
    """Tells all subscribers what changed, and stores the rows that are announced. ``recent``: the newest events.

    ``on_event`` is called with each new event.
    """

    def __init__(self, clock: Clock, store: SeedStore, render: Render, on_event: Callable[[EventInfo], None]) -> None:
        self.recent: deque[EventInfo] = deque(maxlen=RECENT_EVENTS)
        self._clock, self._store, self._render, self._on_event = clock, store, render, on_event
        self._subscriptions: list[Subscription] = []
        self._last_id = 0

    async def load(self) -> None:
        """Read the newest events from the store, and continue its numbers. Raises ``StorageError``."""
        self._last_id = await self._store.call(Records.last_event_id)
        self.recent.extend(await self._store.call(Records.events, self._last_id - RECENT_EVENTS, RECENT_EVENTS))

    def touch(self, topic: str, *ids: str) -> None:
        """Announce that these records of a topic are new, changed or deleted."""
        for subscription in self._subscriptions:
            subscription.touch(topic, ids)

    def add(self, row: AnnouncedRow) -> None:
        self._store.add(row)
        for subscription in self._subscriptions:
            subscription.add((row,))

    def note(self, level: str, kind: str, text: str, peer: str = "", job: str = "", *, age_s: float = 0.0) -> None:
        """Add an event, which happened ``age_s`` ago."""
        self._last_id += 1
        level, wall = level if level in LEVELS else "info", self._clock.wall() - age_s
        event = EventInfo(self._last_id, wall, level, clip(kind, 24), clip(text), peer, job)
        self.recent.append(event)
        self.add(event)
        self._on_event(event)

    def end(self, problem: P2PTrainError) -> None:
        for subscription in self._subscriptions:
            subscription.end(problem)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """A subscription to all changes within the block."""
        subscription = Subscription(self._render)
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)


def newest_that_fit(items: Iterable[Map]) -> list[Map]:
    return first_that_fit(reversed(list(items)))[::-1]


def first_that_fit(items: Iterable[Map]) -> list[Map]:
    """As many items as fit an answer: with 40 KiB of them the whole answer fits a control frame."""
    limit_bytes = 40 << 10
    chosen: list[Map] = []
    for item in items:
        limit_bytes -= len(msgpack.packb(item))
        if limit_bytes < 0:
            break
        chosen.append(item)
    return chosen


def _updates(topic: str, items: Iterable[Map]) -> Iterator[Update]:
    batch: list[Map] = []
    size_bytes = 0
    for item in items:
        item_bytes = len(msgpack.packb(item))
        # 24 KiB of packed items: the whole frame stays well below 32 KiB.
        if batch and size_bytes + item_bytes > (24 << 10):
            yield Update(topic, batch)
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += item_bytes
    if batch:
        yield Update(topic, batch)
