"""The operators' connections: which requests there are, and how their answers are sent.

``peer_requests``, ``job_requests`` and ``record_requests`` carry them out, and check every parameter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, ProtocolError, Refused
from roles.seed.peers import NAME_CHARS, clipped, did_you_mean
from wire.client import answer_to
from wire.connection import Connection
from wire.messages import Request, Response

Params = dict[str, Any]
Result = dict[str, Any]
Method = Callable[[Params, Any], Awaitable[Result]]
"""Carries out a request with these parameters. The second argument is the connection that it came over."""

IDLE_S = 120.0
"""An operator that neither asks nor watches for this long is disconnected. Clients ask for the clock more often."""
_SLOW = frozenset({"links.list", "checkpoints.restore", "checkpoints.delete", "jobs.plan"})


def text_of(params: Params, name: str, limit: int) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise Refused("bad-parameter", f"{name} must be text", remedy=f"give {name}")
    if len(value) > limit or len(value.encode(errors="replace")) > limit:
        raise Refused("bad-parameter", f"{name} has more than {limit} bytes", remedy="make it shorter")
    return value


def label_of(params: Params, name: str) -> str:
    label = clipped(text_of(params, name, NAME_CHARS), NAME_CHARS)
    if not label:
        raise Refused("bad-parameter", f"{name} has no printable characters", remedy=f"give {name}")
    return label


def whole_of(params: Params, name: str, default: int | None, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``. If it is missing: ``default``, or ``Refused`` if that is None."""
    value = params.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise Refused("bad-parameter", f"{name} must be a whole number from {least} to {most}", remedy=f"change {name}")
    return value


class OperatorApi:
    """Answers operators.

    Args:
        methods: by the names of the requests.
        watch: sends updates over a connection until cancelled.
    """

    def __init__(self, methods: Mapping[str, Method], watch: Callable[[Connection], Coroutine[Any, Any, None]]) -> None:
        self._methods, self._watch = methods, watch

    async def serve(self, connection: Connection) -> None:
        """Serve one operator until it disconnects. Answers come in order, except those that wait for a worker."""
        watching: asyncio.Task[None] | None = None
        slow: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    received = await connection.receive(timeout_s=IDLE_S)
                except DeadlineExceeded:
                    if watching is None or watching.done():
                        raise
                    continue  # it only watches; its updates end if the operator stops reading
                request = received.message
                if not isinstance(request, Request):
                    raise ProtocolError(f"unexpected message {type(request).__name__} from an operator")
                if request.method == "subscribe":
                    connection.send(Response(request.id))
                    watching = watching or asyncio.create_task(self._watch(connection), name="watch")
                elif request.method in _SLOW:  # answers to other requests show the operator that the seed is alive
                    if slow is not None:
                        await slow
                    slow = asyncio.create_task(self._answer_later(request, connection), name=request.method)
                else:
                    connection.send(await self.answer(request, connection))
        finally:
            if tasks := [task for task in (watching, slow) if task is not None]:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _answer_later(self, request: Request, connection: Connection) -> None:
        response = await self.answer(request, connection)
        with suppress(ConnectionLost):  # ``serve`` sees the loss too
            connection.send(response)

    async def answer(self, request: Request, connection: Connection | None = None) -> Response:
        """``connection``: None if it comes from this process, which asks nothing about a connection."""
        return await answer_to(request, self._result(request, connection))

    async def _result(self, request: Request, connection: Connection | None) -> Result:
        method = self._methods.get(request.method)
        if method is None:
            hint = did_you_mean(request.method, self._methods)
            raise Refused("unknown-method", f"there is no request {clipped(request.method, 80)!r}{hint}")
        return await method(request.params, connection)
