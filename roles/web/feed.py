"""What the seed tells, for all readers of the HTTP API: one connection and one subscription for all of them.

The records of state (jobs, peers, ...) are kept. Each reader of the stream has a ``Subscription`` of its own, as the
seed has one for this connection: a slow reader gets fewer updates, not older ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, TypeVar

from p2ptrain.core.errors import ConnectionLost, P2PTrainError
from roles.http.answers import RETRY_AFTER_S, Problem
from roles.seed.events import STATE_TOPICS, Subscription, Subscriptions
from wire.client import SeedClient
from wire.messages import Update
from wire.records import TOPICS, EventInfo, MetricRow, RecoveryInfo
from wire.schema import Record

R = TypeVar("R", bound=Record)
Connect = Callable[[], AbstractAsyncContextManager[SeedClient]]

AGAIN_S = 1.0
"""Pause before the next attempt to reach the seed."""
READY_S = 10.0
"""Longest wait for the seed's first update."""
SEEN_S = 2.0
"""Longest wait for a change that was just made to come back from the seed."""


class Feed:
    """The connection to the seed, and what the seed told over it. ``changed`` is set at the next change."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._problem: P2PTrainError | None = None
        self._ready = asyncio.Event()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._client: SeedClient | None = None
        self._ready.clear()
        self.changed = asyncio.Event()
        self._records: dict[str, dict[str, tuple[Record, dict[str, Any]]]] = {topic: {} for topic in STATE_TOPICS}
        self._subscriptions = Subscriptions(self._rendered)

    async def run(self) -> None:
        """Keep connected until cancelled."""
        while True:
            try:
                async with self._connect() as client:
                    await client.request("subscribe")
                    self._client = client
                    async for update in client.updates():
                        self._take(update)
            except P2PTrainError as problem:
                self._problem = problem
            finally:
                changed, subscriptions = self.changed, self._subscriptions
                self._begin_anew()
                changed.set()
                subscriptions.end(ConnectionLost("the seed was away", remedy="connect again, with after_step"))
            await asyncio.sleep(AGAIN_S)

    async def client(self) -> SeedClient:
        """The connection, once the seed has told all that there is. Raises ``Problem`` without one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S if self._client is not None else AGAIN_S):
                await self._ready.wait()
        if self._client is None or not self._ready.is_set():
            why = f": {self._problem.message}" if self._problem is not None else ""
            again = {"retry-after": str(RETRY_AFTER_S)}
            text = f"the seed does not answer{why}"
            raise Problem(503, text, code="seed_unreachable", remedy="try again in a few seconds", headers=again)
        return self._client

    def _take(self, update: Update) -> None:
        """Raises ``ProtocolError``."""
        topic = update.topic.removesuffix("-gone")
        kind = TOPICS.get(topic)
        if kind is None:
            return
        for item in update.items:
            if topic != update.topic:
                ident = str(item.get("id"))
                self._records[topic].pop(ident, None)
                self._subscriptions.touch(topic, ident)
                continue
            record = kind.from_map_untrusted(item)
            if isinstance(record, MetricRow | RecoveryInfo | EventInfo):
                self._subscriptions.add(record)
            else:
                ident = getattr(record, "id", "")
                self._records[topic][ident] = record, record.to_map()
                self._subscriptions.touch(topic, ident)
        if topic == "events":  # the seed sends its log after all records, and the log is never empty
            self._ready.set()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # ---------------------------------------------------------------------------------------------- for its readers

    def records(self, kind: type[R]) -> list[R]:
        [topic] = [topic for topic in STATE_TOPICS if TOPICS[topic] is kind]
        return [record for record, _ in self._records[topic].values() if isinstance(record, kind)]

    async def until(self, topic: str, ident: str, *, there: bool) -> None:
        """Wait for a record to come or go, for ``SEEN_S`` at most: so whoever made a change finds it in the next
        list."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while (ident in self._records[topic]) != there:
                    await self.changed.wait()

    @contextmanager
    def subscription(self) -> Iterator[Subscription]:
        """All records of state, and what changes from now on."""
        with self._subscriptions.open() as news:
            for topic, records in self._records.items():
                news.touch(topic, records)
            yield news

    def _rendered(self, topic: str, ident: str) -> dict[str, Any] | None:
        return self._records[topic].get(ident, (None, None))[1]
