"""What the HTTP API gets of the seed in whose process it runs: answers to requests, and the stream of one job.

A reader of ``metrics/stream/{job}`` is sent a snapshot, ``ready``, and then what changes: at most ten updates a second,
each with the newest state only. The server of ``roles.http`` cuts off one that does not read, as any client; one that
falls too far behind is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from p2ptrain.core.errors import ConnectionLost, Refused
from roles.http.answers import json_bytes
from roles.seed.overview import Overview
from roles.seed.server import Seed
from wire.client import SeedClient, SeedRequests
from wire.messages import Request
from wire.records import JobInfo

Connect = Callable[[], AbstractAsyncContextManager[SeedClient]]

PAGE_ROWS = 100
"""Rows of the record in one message."""
NO_ROW = (-1, -1)
_PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "metrics": lambda row: (row["generation"] or 0, row["step"]),
    "recoveries": lambda row: row["number"],
    "events": lambda row: row["id"],
}
"""Topic → the place of a row among its kind, which only grows. A job that goes back does so in a new generation."""


class LocalRequests(SeedRequests):
    """The requests of operators, without a connection. The seed's own deadlines limit them."""

    def __init__(self, seed: Seed) -> None:
        self._seed = seed

    async def request(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float = 20.0
    ) -> dict[str, Any]:
        if self._seed.acceptor.closed:
            raise ConnectionLost("the seed is stopping", remedy="try again when it is back")
        answer = await self._seed.operator_api.answer(Request(1, method, params or {}))
        if answer.error_code:
            raise Refused(answer.error_code, answer.error_message, remedy=answer.error_remedy)
        return answer.result


async def follow(
    overview: Overview, client: SeedRequests, job: JobInfo, after_step: int, send: Callable[[str], Awaitable[None]]
) -> None:
    """Send messages for ever. Raises ``P2PTrainError``: the reader is too slow, or the seed stops."""
    last: dict[str, Any] = {"metrics": NO_ROW, "recoveries": -1, "events": -1}

    def is_new(topic: str, item: dict[str, Any]) -> bool:
        """Whether the reader lacks this row, which may have been on record already when it came."""
        if (topic != "events" and item["job"] != job.id) or (place := _PLACES[topic](item)) <= last[topic]:
            return False
        last[topic] = place
        return True

    async def tell(topic: str, items: Iterable[dict[str, Any]]) -> None:
        if news := [item for item in items if topic not in _PLACES or is_new(topic, item)]:
            await send(json_bytes({"topic": topic, "items": news}).decode())

    with overview.watching() as updates:
        for update in list(updates.drain()):
            await tell(update.topic, update.items)
        while rows := await client.metrics(job.id, after_step, PAGE_ROWS):
            after_step = rows[-1].step
            await tell("metrics", (row.to_map() for row in rows))
        if last["metrics"] == NO_ROW:
            last["metrics"] = job.generation, after_step
        await tell("recoveries", [row.to_map() for row in await client.recoveries(job.id, PAGE_ROWS)])
        await tell("events", [row.to_map() for row in await client.events(-PAGE_ROWS, PAGE_ROWS)])
        await send('{"topic":"ready","items":[]}')
        async for round_updates in updates.rounds():
            for update in round_updates:
                await tell(update.topic, update.items)
