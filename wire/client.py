"""The operator's connection to a seed: what the command line and the TUI use to ask, to order and to watch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Self

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.ids import new_id
from p2ptrain.core.world import Network
from wire.address import DEFAULT_PORT as DEFAULT_PORT
from wire.address import parse_address as parse_address
from wire.connection import Connection, Received
from wire.handshake import dial, local_hello
from wire.messages import Message, Refuse, Request, Response, Update, Welcome

SILENCE_S = 15.0
"""After this long without a frame the seed is asked whether it is still there, and has as long again to answer."""
MAX_UPDATES = 1024
"""Updates that may wait for a viewer. To drop one would leave it with a wrong picture: the connection ends instead."""


class SeedClient:
    """Operator connection to a seed.

    Attributes:
        welcome: how the seed introduced itself.
        connection: the connection underneath, for bulk probes.
    """

    def __init__(self, connection: Connection, welcome: Welcome, *, silence_s: float = SILENCE_S) -> None:
        self.connection = connection
        self.welcome = welcome
        self._silence_s = silence_s
        self._last_id = 0
        self._pending: dict[int, asyncio.Future[Response]] = {}
        self._updates: deque[Update] = deque()
        self._news = asyncio.Event()
        self._lost: ConnectionLost | None = None
        self._receiver = asyncio.get_running_loop().create_task(self._receive_all(), name="wire.client.receive")

    @classmethod
    async def connect(
        cls, network: Network, host: str, port: int, *, name: str, peer_id: str = "", timeout_s: float = 5.0
    ) -> Self:
        """Dial a seed as an operator. Raises as ``wire.handshake.dial``.

        Args:
            peer_id: on an encrypted network, whom this operator's certificate names.
        """
        hello = local_hello(peer_id=peer_id or new_id(), name=name, roles=[], purpose="operator")
        return cls(*await dial(network, host, port, hello, timeout_s=timeout_s, expect_role="seed"))

    async def request(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Ask, and wait for the answer's result. Requests may overlap.

        Raises:
            Refused: the seed answered with an error, its code, message and remedy.
            DeadlineExceeded: no answer came in time; the connection lives on.
            ConnectionLost: the connection ended.
        """
        request_id = self._send(method, params or {})
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = answer
        try:
            async with asyncio.timeout(timeout_s):
                response = await answer
        except TimeoutError:
            message = f"the seed did not answer {method} within {timeout_s:g} s"
            raise DeadlineExceeded(message, remedy="it may be overloaded; try again") from None
        finally:
            del self._pending[request_id]
        if response.error_code:
            raise Refused(response.error_code, response.error_message, remedy=response.error_remedy)
        return response.result

    async def updates(self) -> AsyncIterator[Update]:
        """What changes, from ``request("subscribe")`` on, for one reader.

        Raises:
            ConnectionLost: always, in the end.
        """
        while True:
            while self._updates:
                yield self._updates.popleft()
            if self._lost is not None:
                raise self._lost.with_traceback(None)
            self._news.clear()
            await self._news.wait()  # the receiving task ends it at the latest when the seed falls silent

    async def close(self) -> None:
        """Close the connection; whoever waits gets ``ConnectionLost``. Never raises, may be called twice."""
        await self.connection.close()
        await asyncio.wait([self._receiver])  # it ends with the connection

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._last_id += 1
        self.connection.send(Request(self._last_id, method, params))
        return self._last_id

    async def _receive_all(self) -> None:
        try:
            while True:
                self._take((await self._receive()).message)
        except P2PTrainError as error:
            self.connection.abort(error)
            self._lost = ConnectionLost(error.message, remedy=error.remedy)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(self._lost.message, remedy=self._lost.remedy))
        self._news.set()

    async def _receive(self) -> Received:
        """The next frame. A silent seed is asked once for its clock, whatever it answers; then it counts as lost."""
        with suppress(DeadlineExceeded):
            return await self.connection.receive(timeout_s=self._silence_s)
        self._send("probe.clock", {})
        return await self.connection.receive(timeout_s=self._silence_s)

    def _take(self, message: Message) -> None:
        if isinstance(message, Update):
            if len(self._updates) >= MAX_UPDATES:
                raise ConnectionLost(f"this viewer fell {MAX_UPDATES} updates behind", remedy="connect again")
            self._updates.append(message)
            self._news.set()
        elif isinstance(message, Response) and 0 < message.id <= self._last_id:
            answer = self._pending.get(message.id)  # None: its caller gave up waiting, or nobody cares
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif not isinstance(message, Refuse):  # that one explains the end that follows it
            raise ProtocolError(f"the seed sent an operator {type(message).__name__}, which answers nothing")
