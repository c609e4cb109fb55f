"""Requests over a connection that carries other messages too: numbered, and matched with their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, Refused
from wire.messages import Message, Request, Response


class Calls:
    """The requests of one side that wait for their answers."""

    def __init__(self) -> None:
        self._pending: dict[int, asyncio.Future[Response]] = {}
        self._last_id = 0

    async def ask(
        self, send: Callable[[Message], object], method: str, params: dict[str, Any], *, whom: str, timeout_s: float
    ) -> dict[str, Any]:
        """Send a request to ``whom`` and wait for the result.

        Raises:
            Refused: what it answered. DeadlineExceeded, ConnectionLost: it did not.
        """
        self._last_id += 1
        number = self._last_id
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            send(Request(number, method, params))
            async with asyncio.timeout(timeout_s):
                response = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{whom} did not answer {method} within {timeout_s:g} s") from None
        finally:
            del self._pending[number]
        if response.error_code:
            raise Refused(response.error_code, f"{whom}: {response.error_message}", remedy=response.error_remedy)
        return response.result

    def answered(self, response: Response) -> bool:
        """Hand an answer to its caller; one that nobody waits for any more, or ever did, is dropped: whether it was
        wanted."""
        answer = self._pending.get(response.id)
        if answer is None or answer.done():
            return False
        answer.set_result(response)
        return True

    def lost(self, whom: str) -> None:
        """No answer will come."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(f"{whom} is gone"))
