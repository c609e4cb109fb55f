"""A caller, an answerer and a relay that are connected by circuits, and what stands for their seed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from p2ptrain.core.errors import P2PTrainError, Unreachable
from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from tests.wire.doubles import HOST
from wire.circuits import CircuitNetwork, peer_host
from wire.handshake import serve
from wire.messages import ANSWERER, CALLER, Circuit
from wire.relay import RelayLimits
from wire.transport import Address

CALLING, ANSWERING = "a1", "b2"


@dataclass(frozen=True)
class NamedListener:
    """A listener that is reached by circuits."""

    inner: Listener
    open: set[Listener]

    @property
    def address(self) -> Address:
        return peer_host(ANSWERING), self.inner.address[1]

    async def close(self) -> None:
        self.open.discard(self.inner)
        await self.inner.close()


class ThreePeers:
    """A network whose every connection is a circuit: ``a1`` dials, ``b2`` listens, ``relay`` relays.

    Args:
        inner: network of all, or that of each by its name.
        reversed_: the caller itself is the meeting point.

    Attributes:
        circuits: those of the caller, as the seed made them. ways: what it was told of each.
        problems: what the relay's listener reports. failures: what the answerer could not join.
        alter: changes a circuit before an end gets it.
    """

    def __init__(
        self,
        inner: Network | Callable[[str], Network],
        *,
        limits: RelayLimits | None = None,
        reversed_: bool = False,
        tries_direct: bool = False,
    ) -> None:
        network_of = inner if callable(inner) else lambda name: inner
        self.caller, self.answerer = CircuitNetwork(network_of(CALLING)), CircuitNetwork(network_of(ANSWERING))
        self.relay = CircuitNetwork(network_of("relay"), limits=limits)
        self.caller.request = self._request
        self.circuits: list[Circuit] = []
        self.ways: list[str] = []
        self.caller.on_way = lambda circuit, way: self.ways.append(way)
        self.problems: list[P2PTrainError] = []
        self.failures: list[P2PTrainError] = []
        self.alter: Callable[[Circuit], Circuit] = lambda circuit: circuit
        self._options: dict[str, Any] = {"tries_direct": tries_direct}
        self._reversed = reversed_
        self._host = ("a1" if reversed_ else "relay") if callable(inner) else HOST
        self._meeting: Any = None
        self._open: set[Listener] = set()
        self._ids = itertools.count(1)
        self._accepting: set[asyncio.Task[None]] = set()

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        await self.caller.connect(peer_host(ANSWERING), port, factory, timeout_s=timeout_s)

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        listener = await self.answerer.listen(host, port, factory, on_problem)
        self._open.add(listener)
        return NamedListener(listener, self._open)

    async def meeting_address(self) -> Address:
        """Where the meeting point listens, as a peer does."""
        if self._meeting is None:
            self._meeting = await serve(
                self.caller if self._reversed else self.relay,
                HOST if self._host == HOST else "0.0.0.0",
                0,
                decide=_decide,
                serve=_serve,
                on_problem=lambda error, address: self.problems.append(error),
            )
        return self._host, self._meeting.address[1]

    async def _request(self, peer_id: str) -> Circuit:
        assert peer_id == ANSWERING
        if not self._open:
            raise Unreachable("connection refused", remedy="is p2ptrain running there?")
        host, port = await self.meeting_address()
        name = "" if self._reversed else "relay"
        circuit_id = f"{next(self._ids):064x}"
        to_answerer = Circuit(circuit_id, CALLING, ANSWERING, ANSWERER, host, port, name, **self._options)
        to_caller = Circuit(circuit_id, CALLING, ANSWERING, CALLER, host, port, name, **self._options)
        if self._reversed:
            to_caller = Circuit(circuit_id, CALLING, ANSWERING, CALLER)
        else:
            self.relay.expect_circuit(circuit_id, 5.0, (CALLING, ANSWERING))
        self.circuits.append(to_caller)
        task = asyncio.get_running_loop().create_task(self._accept(self.alter(to_answerer)))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)
        return self.alter(to_caller)

    async def _accept(self, circuit: Circuit) -> None:
        try:
            await self.answerer.accept(circuit)
        except P2PTrainError as error:
            self.failures.append(error)

    async def close(self) -> None:
        if self._meeting is not None:
            await self._meeting.close()
        for network in (self.caller, self.answerer, self.relay):
            await network.close()
        for task in list(self._accepting):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _decide(hello: Any, connection: Any) -> Any:
    raise AssertionError("nobody says hello to the relay")


async def _serve(connection: Any, hello: Any) -> None: ...
