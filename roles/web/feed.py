"""What the seed tells, kept for all readers of the HTTP API: one connection and one subscription for all of them.

Records of state (jobs, peers, ...) are kept in the order of their last change, so that a reader who was told of all
changes up to a number takes the later ones. Of metrics, events and recoveries the newest rows are kept, numbered as
they came. A reader that is further behind asks the seed for the rows after its last one (``Cursor``). So a reader has
no queue of its own, and a slow one gets fewer updates, not older ones.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from p2ptrain.core.errors import P2PTrainError
from roles.http.answers import RETRY_AFTER_S, Problem, json_bytes
from wire.client import SeedClient
from wire.messages import Update
from wire.records import TOPICS, EventInfo, MetricRow, RecoveryInfo
from wire.schema import Record

R = TypeVar("R", bound=Record)
Row = MetricRow | EventInfo | RecoveryInfo
Connect = Callable[[], AbstractAsyncContextManager[SeedClient]]

STATE_TOPICS = ("cluster", "peers", "jobs", "checkpoints", "parts", "serving")
KEPT_ROWS = 1000
"""Rows that are kept of one kind, of metrics and recoveries for each job."""
KEPT_GONE = 4096
"""Removed records that are remembered, for readers that were not told yet. A reader that is so far behind that it
misses one would have been closed before."""
PAGE_ROWS = 200
"""Rows in an answer of the seed."""
RECENT_EVENTS = 100
MESSAGE_BYTES = 48 << 10
"""A message for a reader has a record more at most."""
AGAIN_S = 1.0
"""Pause before the next attempt to reach the seed."""
READY_S = 10.0
"""Longest wait for the seed's first update."""
SEEN_S = 2.0
"""Longest wait for a change that was just made to come back from the seed."""


class _Kept(NamedTuple):
    """A record of state; ``record`` is None if it is gone. ``change``: the number of its last change."""

    change: int
    record: Record | None
    text: str


class _Rows:
    """The newest rows of one kind, with their JSON. ``start``: the number of the first row that is kept."""

    def __init__(self) -> None:
        self.start = 0
        self.kept: deque[tuple[Row, str]] = deque()

    def add(self, row: Row) -> None:
        self.kept.append((row, _json(row)))
        if len(self.kept) > KEPT_ROWS:
            self.kept.popleft()
            self.start += 1


class Feed:
    """The connection to the seed, and what the seed told over it.

    Attributes:
        rows: (topic, job) → the newest rows; the job of events is empty.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._client: SeedClient | None = None
        self._problem: P2PTrainError | None = None
        self._ready = asyncio.Event()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._ready.clear()
        self._changed = asyncio.Event()
        self._changes = 0
        self._state: dict[str, dict[str, _Kept]] = {topic: {} for topic in STATE_TOPICS}
        self._gone: deque[tuple[str, str]] = deque()
        self.rows: defaultdict[tuple[str, str], _Rows] = defaultdict(_Rows)

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
                before, self._client = self._changed, None
                self._begin_anew()
                before.set()  # readers see that the connection is another one
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

    def check(self, client: SeedClient) -> None:
        """Raise ``Problem`` if this connection is no longer the one to the seed: all that is kept is another's."""
        if self._client is not client:
            raise Problem(503, "the seed was away", code="seed_unreachable", remedy="connect again, with after_step")

    # ------------------------------------------------------------------------------------------- what the seed says

    def _take(self, update: Update) -> None:
        """Raises ``ProtocolError``."""
        topic = update.topic.removesuffix("-gone")
        kind = TOPICS.get(topic)
        if kind is None:
            return
        self._changes += 1
        if topic != update.topic:
            for item in update.items:
                self._remove(topic, str(item.get("id")))
        else:
            for item in update.items:
                record = kind.from_map_untrusted(item)
                if isinstance(record, MetricRow | RecoveryInfo | EventInfo):
                    self.rows[topic, "" if isinstance(record, EventInfo) else record.job].add(record)
                else:
                    self._keep(topic, getattr(record, "id", ""), record)
        if topic == "events":  # the seed sends its log after all records, and the log is never empty
            self._ready.set()
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def _keep(self, topic: str, ident: str, record: Record) -> None:
        self._state[topic].pop(ident, None)  # the changed ones are last
        self._state[topic][ident] = _Kept(self._changes, record, _json(record))

    def _remove(self, topic: str, ident: str) -> None:
        self._state[topic].pop(ident, None)
        self._state[topic][ident] = _Kept(self._changes, None, json_bytes({"id": ident}).decode())
        self._gone.append((topic, ident))
        if len(self._gone) > KEPT_GONE:
            topic_, ident_ = self._gone.popleft()
            if (old := self._state[topic_].get(ident_)) is not None and old.record is None:
                del self._state[topic_][ident_]
        if topic == "jobs":
            for rows in ("metrics", "recoveries"):
                self.rows.pop((rows, ident), None)

    # ---------------------------------------------------------------------------------------------- for its readers

    @property
    def changed(self) -> asyncio.Event:
        """Is set at the next change. Take it before reading what there is."""
        return self._changed

    def records(self, topic: str) -> list[Record]:
        return [kept.record for kept in self._state[topic].values() if kept.record is not None]

    def record(self, topic: str, ident: str) -> Record | None:
        kept = self._state[topic].get(ident)
        return kept.record if kept is not None else None

    async def until(self, seen: Callable[[], bool]) -> None:
        """Wait for ``seen``, for ``SEEN_S`` at most: so whoever made a change finds it in the next list."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while not seen():
                    await self._changed.wait()

    def messages_since(self, change: int) -> tuple[list[str], int]:
        """The messages that bring a reader up to date, and the number of the last change. 0: all there is."""
        found: list[str] = []
        for topic in STATE_TOPICS:
            later: list[_Kept] = []
            for kept in reversed(self._state[topic].values()):
                if kept.change <= change:
                    break
                later.append(kept)
            later.reverse()
            found += messages(topic, (kept.text for kept in later if kept.record is not None))
            if change:  # to who knows nothing yet nothing is gone
                found += messages(f"{topic}-gone", (kept.text for kept in later if kept.record is None))
        return found, self._changes


def records_of(feed: Feed, kind: type[R], topic: str) -> list[R]:
    return [record for record in feed.records(topic) if isinstance(record, kind)]


@dataclass(slots=True)
class Cursor:
    """A reader's place among the rows of one kind, of the job ``job``.

    Attributes:
        after: the key of the last row that it has: a step, an id or a number.
        wall: the time of that row, if it is known. A job that went back to a checkpoint repeats steps, later.
        fetch: asks the seed for the next rows after a key.
        at: number of the next row among the kept ones; None: the rows before them come from the seed first.
    """

    feed: Feed
    client: SeedClient
    topic: str
    job: str
    key: str
    after: int
    fetch: Callable[[int], Awaitable[list[Row]]]
    wall: float | None = None
    at: int | None = None
    _joined: bool = False

    async def news(self) -> AsyncIterator[str]:
        """Yield messages until the reader is up to date. Raises ``Problem``, ``P2PTrainError``."""
        while self.at is None or self.at < self._rows.start:
            fetched, caught_up = await self._older()
            if caught_up:
                self.at, self._joined = self._rows.start, False
            for message in messages(self.topic, map(_json, fetched)):
                yield message
        rows = self._rows
        count = rows.start + len(rows.kept) - self.at
        self.at += count
        new = [pair for pair in list(islice(reversed(rows.kept), count))[::-1] if self._is_new(pair[0])]
        if new:
            self.after, self.wall = getattr(new[-1][0], self.key), new[-1][0].wall
        for message in messages(self.topic, (text for _, text in new)):
            yield message

    @property
    def _rows(self) -> _Rows:
        self.feed.check(self.client)
        return self.feed.rows[self.topic, self.job]

    async def _older(self) -> tuple[list[Row], bool]:
        """The next rows that are older than the kept ones, and whether these are all."""
        rows = await self.fetch(self.after)
        kept = self._rows.kept
        older = [row for row in rows if not kept or getattr(row, self.key) < getattr(kept[0][0], self.key)]
        if older:
            self.after, self.wall = getattr(older[-1], self.key), older[-1].wall
        return older, len(older) < len(rows) or not rows  # an answer may hold fewer rows than asked for

    def _is_new(self, row: Row) -> bool:
        """Whether the reader lacks a kept row. The seed may have told the first of them in its answer, too."""
        if not self._joined:
            behind = getattr(row, self.key) <= self.after
            self._joined = not behind or (self.wall is not None and row.wall > self.wall)
        return self._joined


def cursors(feed: Feed, client: SeedClient, job: str, after_step: int) -> list[Cursor]:
    """Of the rows that a reader of ``job`` is sent."""

    async def metrics(after: int) -> list[Row]:
        return [*await client.metrics(job, after, PAGE_ROWS)]

    async def recoveries(after: int) -> list[Row]:
        return [row for row in await client.recoveries(job, PAGE_ROWS) if row.number > after]

    async def events(after: int) -> list[Row]:
        return [*await client.events(after, PAGE_ROWS if after >= 0 else RECENT_EVENTS)]

    return [
        Cursor(feed, client, "metrics", job, "step", after_step, metrics),
        Cursor(feed, client, "recoveries", job, "number", -1, recoveries),
        Cursor(feed, client, "events", "", "id", -RECENT_EVENTS, events),
    ]


def messages(topic: str, texts: Iterable[str]) -> Iterator[str]:
    """``{"topic": topic, "items": [...]}`` of records in JSON, in as few messages as ``MESSAGE_BYTES`` allows."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > MESSAGE_BYTES:
            yield _message(topic, batch)
            batch, size = [], 0
    if batch:
        yield _message(topic, batch)


def _message(topic: str, texts: list[str]) -> str:
    return f'{{"topic":"{topic}","items":[{",".join(texts)}]}}'


def _json(record: Record) -> str:
    return json_bytes(record.to_map()).decode()
