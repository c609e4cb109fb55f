"""The circuits of a member or an operator, which its seed arranges (``wire.circuits``, ``roles.seed.circuits``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from p2ptrain.core.background import Background
from p2ptrain.core.errors import P2PTrainError
from wire.address import advertised_host
from wire.circuits import CircuitNetwork
from wire.messages import CALLER, Circuit, CircuitOffer, CircuitOrder

OPEN, MADE = "circuits.open", "circuits.made"
"""Requests to the seed: for a circuit to ``peer``, and with the ``way`` of a ``circuit``; empty: it was not made."""
RELAYS = "relays"
"""Capability in a ``Hello``: the member relays circuits of others."""
Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class SeedCircuits:
    """Has the seed arrange the circuits of a network.

    Args:
        ask: sends a request to the seed, with a deadline.
        seed_at: returns host and port at which the seed was dialled.
    """

    def __init__(self, network: CircuitNetwork, ask: Ask, seed_at: Callable[[], tuple[str, int]]) -> None:
        self._network, self._ask, self._seed_at = network, ask, seed_at
        self._tasks = Background()
        network.request, network.on_way = self._open, self._report

    async def stop(self) -> None:
        await self._tasks.stop()

    def take(self, message: CircuitOffer | CircuitOrder) -> None:
        """Carry out what the seed asks of this peer, in the background."""
        if isinstance(message, CircuitOffer):
            self._tasks.start(self._join(message), "circuit")
            return
        with suppress(P2PTrainError):  # its ends are refused, and the caller reports it
            self._network.expect_circuit(message.id, message.lives_s, message.peers)

    async def _open(self, peer_id: str) -> Circuit:
        result = await self._ask(OPEN, {"peer": peer_id})
        return self._located(Circuit.from_map_untrusted(result.get("circuit")))

    async def _join(self, offer: CircuitOffer) -> None:
        circuit, way = self._located(offer.circuit), ""
        with suppress(P2PTrainError):
            if not offer.trial:
                await self._network.accept(circuit)
                return
            way = await self._network.try_direct(circuit)
        if offer.trial:
            self._report(circuit, way)

    def _report(self, circuit: Circuit, way: str) -> None:
        if circuit.side == CALLER:
            self._tasks.start(self._tell(circuit, way), "report a circuit")

    async def _tell(self, circuit: Circuit, way: str) -> None:
        with suppress(P2PTrainError):  # without a report the seed learns less
            await self._ask(MADE, {"circuit": circuit.id, "way": way})

    def _located(self, circuit: Circuit) -> Circuit:
        """The circuit with a meeting point as it is dialled from here: the seed has no host yet. This end itself,
        without a relay and a port, keeps none."""
        if not circuit.relay and not circuit.port:
            return circuit
        host, port = self._seed_at()
        return replace(circuit, host=advertised_host(host, circuit.host), port=circuit.port or port)
