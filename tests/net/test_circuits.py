"""Circuits between real machines: behind routers of each kind, behind a firewall, over IPv6, in one home."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.net.namespaces import Internet, Machine, namespaces
from tests.wire.doubles import Recorder
from wire.circuits import CircuitNetwork, peer_host
from wire.messages import ANSWERER, CALLER, DIRECT, PUNCHED, RELAYED, Circuit
from wire.transport import TcpNetwork, every_interface

__all__ = ["namespaces"]
PORT = 7339


@pytest.fixture
def net(namespaces: None) -> Iterator[Internet]:
    with Internet() as made:
        yield made


class Meeting:
    """Two ends and a relay, each on a machine of its own; an end calls, the other answers, and both echo."""

    def __init__(
        self,
        caller: Machine,
        answerer: Machine,
        relay: Machine,
        *,
        ipv6: bool = False,
        exchange: Callable[[Recorder], Awaitable[str]] | None = None,
    ) -> None:
        self._exchange = exchange or _echo
        self._caller, self._answerer, self._relay = caller, answerer, relay
        self._place = relay.address6 if ipv6 else relay.address
        self._done = threading.Event()
        self._relay_ready = threading.Event()
        self._answerer_ready = threading.Event()

    def ways(self) -> tuple[str, str]:
        """Connect, carry bytes both ways, and return the way that each end saw."""
        relaying = self._relay.run(self._relay_circuit)
        answering = self._answerer.run(self._answer)
        calling = self._caller.run(self._call)
        try:
            return calling.result(60), answering.result(60)
        finally:
            self._done.set()
            relaying.result(20)

    def _circuit(self, side: str) -> Circuit:
        return Circuit("ab" * 32, "a1", "b2", side, self._place, PORT, "relay", tries_direct=True)

    async def _relay_circuit(self) -> None:
        network = CircuitNetwork(TcpNetwork())
        listener = await network.listen(every_interface(), PORT, Recorder)
        network.expect_circuit("ab" * 32, 10.0, ("a1", "b2"))
        self._relay_ready.set()
        await asyncio.to_thread(self._done.wait, 60)
        await listener.close()
        await network.close()

    async def _call(self) -> str:
        await asyncio.to_thread(self._answerer_ready.wait, 10)
        network, end = CircuitNetwork(TcpNetwork()), Recorder()

        async def request(peer_id: str) -> Circuit:
            return self._circuit(CALLER)

        network.request = request
        await network.connect(peer_host("b2"), PORT, lambda: end, timeout_s=10)
        return await self._exchange(end)

    async def _answer(self) -> str:
        await asyncio.to_thread(self._relay_ready.wait, 10)
        network, end = CircuitNetwork(TcpNetwork()), Recorder()
        async with AsyncExitStack() as stack:
            listener = await network.listen(every_interface(), PORT, lambda: end)
            stack.push_async_callback(listener.close)
            self._answerer_ready.set()
            await network.accept(self._circuit(ANSWERER))
            return await self._exchange(end)


async def _echo(end: Recorder) -> str:
    text = b"0123456789" * 20_000
    end.transport.write(text)
    assert await end.until_received(len(text)) == text
    way: str = end.transport.get_extra_info("way")
    assert (end.transport.get_extra_info("rtt_s") is None) == (way == RELAYED)
    end.transport.close()
    await end.until_lost()
    return way


def router(kind: str) -> dict[str, Any]:
    return {"router": kind}


@pytest.mark.parametrize(
    ("one", "other", "way"),
    [
        (router("keeps ports"), router("keeps ports"), PUNCHED),
        (router("keeps ports"), {"firewall": True, "rejects": True}, DIRECT),
        ({"firewall": True}, router("double"), PUNCHED),
        ({"firewall": True}, {"firewall": True}, DIRECT),
        (router("double"), router("keeps ports"), PUNCHED),
        (router("keeps ports"), router("symmetric"), RELAYED),
        (router("symmetric"), router("symmetric"), RELAYED),
        ({**router("symmetric"), "ipv6": True, "firewall": True}, {**router("symmetric"), "ipv6": True}, DIRECT),
        ({"ipv4": False, "ipv6": True, "firewall": True}, {"ipv6": True, "firewall": True}, DIRECT),
    ],
)
def test_two_ends_find_the_best_way(net: Internet, one: dict[str, Any], other: dict[str, Any], way: str) -> None:
    relay = net.machine("relay", ipv6=True)
    ipv6 = not one.get("ipv4", True)
    callers, answerers = Meeting(net.machine("a", **one), net.machine("b", **other), relay, ipv6=ipv6).ways()
    assert callers == way
    assert (answerers == RELAYED) == (way == RELAYED)


def test_two_machines_of_one_home_connect_within_it(net: Internet) -> None:
    relay, one = net.machine("relay"), net.machine("a", router="symmetric")
    assert Meeting(one, net.machine("b", home=one), relay).ways() == (DIRECT, DIRECT)
