"""A seed as far as operators can tell: it answers what a test tells it to, and keeps what it was asked."""

from __future__ import annotations

from typing import Any

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, Refused
from p2ptrain.core.world import Network
from wire.connection import Connection
from wire.handshake import PeerServer, local_welcome, serve
from wire.messages import Hello, Message, Refuse, Request, Response, Welcome

PATIENCE_S = 3600.0


class FakeSeed:
    """Answers requests over a network.

    Attributes:
        answers: method → what to answer: a result, or a refusal. ``answer_for`` knows the others.
        asked: methods and parameters, in order.
        silent: methods that are never answered.
        refuse: what callers are refused with.
        problems: connections that went wrong.
    """

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any] | Refused] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.silent: set[str] = set()
        self.refuse: Refuse | None = None
        self.problems: list[P2PTrainError] = []
        self._server: PeerServer | None = None

    async def start(self, network: Network, host: str, port: int) -> tuple[str, int]:
        """Listen. Returns the address."""
        self._server = await serve(
            network, host, port, decide=self.decide, serve=self._serve, on_problem=self._note_problem
        )
        return self._server.address

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.close()

    def _note_problem(self, problem: P2PTrainError, address: tuple[str, int]) -> None:
        self.problems.append(problem)

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self.refuse or local_welcome(peer_id="5eed", name="fake", cluster_id="c1", wall=0.0)

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        while True:
            try:
                message = (await connection.receive(timeout_s=PATIENCE_S)).message
            except ConnectionLost:
                return
            if not isinstance(message, Request):
                self.take(connection, message)
                continue
            self.asked.append((message.method, message.params))
            if message.method in self.silent:
                continue
            answer = self.answer(message)
            if isinstance(answer, Refused):
                connection.send(Response(message.id, {}, answer.code, answer.message, answer.remedy))
                continue
            connection.send(Response(message.id, answer))
            if message.method == "subscribe":
                self.subscribed(connection)

    def answer(self, request: Request) -> dict[str, Any] | Refused:
        answer = self.answers.get(request.method)
        return self.answer_for(request) if answer is None else answer

    def answer_for(self, request: Request) -> dict[str, Any] | Refused:
        return Refused("unknown-method", f"no answer for {request.method}")

    def take(self, connection: Connection, message: Message) -> None:
        """Any message but requests."""

    def subscribed(self, connection: Connection) -> None: ...
