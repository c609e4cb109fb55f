"""``metrics/stream/{job}``: a WebSocket that is sent a snapshot, ``ready``, and then what changes.

A reader is sent at most ten updates a second, each with the newest state only. The server of ``roles.http`` cuts off
one that does not read, as any client; one that falls too far behind is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from roles.http.answers import json_bytes
from roles.seed.server import Seed
from wire.client import SeedRequests
from wire.records import JobInfo
from wire.schema import Record

PAGE_ROWS = 100
"""Rows of the record in one message."""

_PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "metrics": lambda row: (row["generation"] or 0, row["step"]),
    "recoveries": lambda row: row["number"],
    "events": lambda row: row["id"],
}
"""Topic → the place of a row among its kind, which only grows. A job that goes back does so in a new generation."""


async def follow(
    seed: Seed, client: SeedRequests, job: JobInfo, after_step: int, send: Callable[[str], Awaitable[None]]
) -> None:
    """Send messages for ever. Raises ``P2PTrainError``: the reader is too slow, or the seed stops."""
    last: dict[str, Any] = {"metrics": (job.generation, after_step), "recoveries": -1, "events": -1}

    async def tell(topic: str, items: Sequence[dict[str, Any]]) -> None:
        await send(json_bytes({"topic": topic, "items": items}).decode())

    async def tell_record(topic: str, rows: Sequence[Record]) -> None:
        items = [row.to_map() for row in rows]
        if items:
            last[topic] = _PLACES[topic](items[-1])
            await tell(topic, items)

    def is_new(topic: str, item: dict[str, Any]) -> bool:
        """Whether the reader lacks this row, which may have been on record already when it came."""
        if (topic != "events" and item["job"] != job.id) or (place := _PLACES[topic](item)) <= last[topic]:
            return False
        last[topic] = place
        return True

    with seed.watching() as news:
        for update in list(news.drain()):
            await tell(update.topic, update.items)
        while rows := await client.metrics(job.id, after_step, PAGE_ROWS):
            after_step = rows[-1].step
            await tell_record("metrics", rows)
        await tell_record("recoveries", await client.recoveries(job.id, PAGE_ROWS))
        await tell_record("events", await client.events(-PAGE_ROWS, PAGE_ROWS))
        await tell("ready", [])
        async for updates in news.rounds():
            for update in updates:
                topic = update.topic
                items = [item for item in update.items if topic not in _PLACES or is_new(topic, item)]
                if items:
                    await tell(topic, items)
