"""``metrics/stream/{job}``: a WebSocket that is sent a snapshot, ``ready``, and then what changes.

All readers share one ``Feed``. A reader is sent at most ``1 / INTERVAL_S`` updates a second, each with the newest state
only. The server of ``roles.http`` cuts off one that does not read, as any client; it holds about 64 KiB until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.websockets import WebSocket, WebSocketDisconnect

from p2ptrain.core.errors import P2PTrainError
from roles.http.answers import Problem
from roles.web.feed import Feed, cursors, messages

INTERVAL_S = 0.1
MOST_STREAMS = 128
SUBPROTOCOL = "p2ptrain.v1"
TRY_AGAIN = 1013
"""Close code: the seed is away for a moment."""


async def follow(feed: Feed, job: str, after_step: int, send: Callable[[str], Awaitable[None]]) -> None:
    """Send messages for ever. Raises ``Problem``, ``P2PTrainError``: the connection to the seed is lost."""
    client = await feed.client()
    places, change, ready = cursors(feed, client, job, after_step), 0, False
    while True:
        feed.check(client)
        changed = feed.changed
        found, change = feed.messages_since(change)
        for message in found:
            await send(message)
        for place in places:
            async for message in place.news():
                await send(message)
        if not ready:
            await send(next(messages("ready", [""])))
            ready = True
        await changed.wait()
        await asyncio.sleep(INTERVAL_S)  # collect further changes


async def serve_stream(socket: WebSocket, feed: Feed, job: str, after_step: int) -> None:
    """Serve one reader until it leaves. What it says is ignored."""
    offered = socket.scope.get("subprotocols", [])
    await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
    following = asyncio.create_task(follow(feed, job, after_step, socket.send_text), name="stream")
    listening = asyncio.create_task(_until_left(socket), name="wait for a reader to leave")
    try:
        await asyncio.wait({following, listening}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (following, listening):
            task.cancel()
        await asyncio.wait({following, listening})
    if following.cancelled():
        return
    error = following.exception()
    if isinstance(error, Problem | P2PTrainError):
        await socket.close(TRY_AGAIN, error.message[:100])
    elif error is not None and not isinstance(error, WebSocketDisconnect):
        raise error


async def _until_left(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
