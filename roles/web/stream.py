"""``metrics/stream/{job}``: a WebSocket that is sent a snapshot, ``ready``, and then what changes.

A reader is sent at most ten updates a second, each with the newest state only. The server of ``roles.http`` cuts off
one that does not read, as any client; one that falls too far behind is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from p2ptrain.core.errors import P2PTrainError
from roles.http.answers import Problem, json_bytes, while_wanted
from roles.web.feed import Feed
from wire.records import JobInfo
from wire.schema import Record

PAGE_ROWS = 100
"""Rows of the record in one message."""
SUBPROTOCOL = "p2ptrain.v1"
TRY_AGAIN = 1013
"""Close code: the seed is away for a moment."""

_PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "metrics": lambda row: (row["generation"] or 0, row["step"]),
    "recoveries": lambda row: row["number"],
    "events": lambda row: row["id"],
}
"""Topic → the place of a row among its kind, which only grows. A job that goes back does so in a new generation."""


async def follow(feed: Feed, job: JobInfo, after_step: int, send: Callable[[str], Awaitable[None]]) -> None:
    """Send messages for ever. Raises ``Problem``, ``P2PTrainError``: the connection to the seed is lost."""
    client = await feed.client()
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

    with feed.subscription() as news:
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


async def serve_stream(socket: WebSocket, feed: Feed, job: JobInfo, after_step: int, stopping: asyncio.Event) -> None:
    """Serve one reader until it leaves. What it says is ignored."""
    offered = socket.scope.get("subprotocols", [])
    await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
    try:
        await while_wanted(socket.receive, follow(feed, job, after_step, socket.send_text), stopping)
    except WebSocketDisconnect:
        pass
    except (Problem, P2PTrainError) as error:
        await socket.close(TRY_AGAIN, error.message[:100])
