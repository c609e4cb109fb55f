"""Measuring links: what the emulated presets are, and what a measurement may not do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError, ProtocolError
from p2ptrain.core.world import LoopClock, Network, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.worker.links import (
    PIECE_BYTES,
    PUSH_BYTES,
    QUIET_S,
    Prober,
    ProbeResponder,
    rate_bps,
)
from roles.worker.stage_requests import PeerAddress
from tests.roles.heal_doubles import around_of
from wire.connection import Connection
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.handshake import PeerServer, dial, local_hello, local_welcome, serve
from wire.messages import Hello, Request, Response, Welcome

pytestmark = pytest.mark.virtual_time


@dataclass
class Side:
    """A worker as far as measuring goes."""

    peer_id: str
    network: Network
    sink: ProbeResponder = field(default_factory=ProbeResponder)
    problems: list[P2PTrainError] = field(default_factory=list)
    server: PeerServer | None = None

    @property
    def world(self) -> World:
        return World(LoopClock(), self.network, RealDisk(), random.Random(1))

    @property
    def prober(self) -> Prober:
        return Prober(around_of(self.world, [], self.peer_id, "127.0.0.1"))

    async def listen(self) -> PeerAddress:
        async def decide(hello: Hello, connection: Connection) -> Welcome:
            return local_welcome(peer_id=self.peer_id, name=self.peer_id, wall=0.0)

        self.server = await serve(
            self.network,
            "0.0.0.0",
            0,
            decide=decide,
            serve=self.sink.serve,
            on_problem=lambda problem, address: self.problems.append(problem),
        )
        host = self.peer_id if isinstance(self.network, EmulatedNetwork | MemoryNetwork) else ""
        return PeerAddress(self.peer_id, host, self.server.address[1])

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()


def two_sides(preset: LinkPreset | None, seed: int = 0) -> tuple[Side, Side]:
    hub = MemoryNetwork()
    networks: list[Network] = [hub.at(name) for name in ("aa", "bb")]
    if preset is not None:
        networks = [EmulatedNetwork(network, preset, seed + number) for number, network in enumerate(networks)]
    one, other = (Side(name, network) for name, network in zip(("aa", "bb"), networks, strict=True))
    return one, other


async def test_who_is_not_there_does_not_hold_up_the_others() -> None:
    one, other = two_sides(LinkPreset("plain", 5e-3, rate_bps=1e8))
    target = await other.listen()
    hub = one.network._inner  # type: ignore[attr-defined]
    hub.silence("aa", "gone")
    began = asyncio.get_running_loop().time()
    found = await one.prober.measure(
        [PeerAddress("cc", "gone", 1), PeerAddress("dd", "bb", target.port), target], deadline_s=3
    )
    assert set(found) == {"bb"}  # the second answers under another name
    assert found["bb"].bandwidth_bps == pytest.approx(1e8, rel=0.05)
    assert asyncio.get_running_loop().time() - began == pytest.approx(3)
    await other.stop()


@pytest.mark.parametrize("is_near", [True, False])
def test_answers_that_were_read_at_once_are_no_fast_link(is_near: bool) -> None:
    millisecond_bps = 8 * PIECE_BYTES * 1e3
    steady = [0.001 * number for number in range(1, 33)]
    assert rate_bps(steady, 0.0, is_near=is_near) == pytest.approx(millisecond_bps)
    assert rate_bps([0.032] * 32, 0.0, is_near=is_near) == pytest.approx(millisecond_bps)
    late = rate_bps([*steady[:10], *[0.032] * 22], 0.0, is_near=is_near)
    assert late is not None
    assert late <= 1.01 * millisecond_bps
    assert rate_bps([0.0] * 32, 0.0, is_near=is_near) is None


async def called(side: Side, target: PeerAddress, name: str = "ee") -> Connection:
    hello = local_hello(peer_id=name, name=name, roles=["worker"], purpose="probe")
    connection, _ = await dial(side.network, target.host, target.port, hello, timeout_s=5)
    return connection


def push(connection: Connection, pieces: int) -> None:
    for number in range(pieces):
        connection.send(Request(number, "probe.sink", {"stream": number}))
        connection.send_bulk(memoryview(bytes(PIECE_BYTES)), generation=0, stream=number)


async def test_no_more_is_taken_than_a_measurement_needs() -> None:
    one, other = two_sides(None)
    target = await other.listen()
    connection = await called(one, target)
    connection.send(Request(0, "probe.turn"))
    push(connection, 2 * PUSH_BYTES // PIECE_BYTES)
    answers = 0
    with suppress(P2PTrainError):
        while True:
            await connection.expect(Response, timeout_s=60)
            answers += 1
    await connection.closed.wait()
    assert answers == 1 + PUSH_BYTES // PIECE_BYTES
    await other.stop()


@pytest.mark.parametrize(
    "rude",
    [
        lambda connection: connection.send(Request(0, "jobs.cancel")),
        lambda connection: connection.send(Request(0, "probe.sink", {"stream": 1})),
        lambda connection: (connection.send(Request(0, "probe.turn")), connection.send(Request(1, "probe.clock"))),
        lambda connection: (connection.send(Request(0, "probe.turn")), connection.send(Request(1, "probe.sink"))),
    ],
)
async def test_what_is_no_measurement_ends_the_connection(rude: Callable[[Connection], object]) -> None:
    one, other = two_sides(None)
    target = await other.listen()
    connection = await called(one, target)
    rude(connection)
    await connection.closed.wait()
    assert isinstance(other.problems[0], ProtocolError)
    assert await one.prober.measure([target], deadline_s=5)  # nobody else is kept waiting
    await other.stop()


async def test_who_takes_a_turn_and_does_nothing_keeps_the_others_waiting_for_a_while_only() -> None:
    one, other = two_sides(None)
    target = await other.listen()
    idle = await called(one, target)
    idle.send(Request(0, "probe.turn"))
    await idle.expect(Response, timeout_s=1)
    began = asyncio.get_running_loop().time()
    assert set(await one.prober.measure([target], deadline_s=20)) == {"bb"}
    assert asyncio.get_running_loop().time() - began <= QUIET_S + 1
    await other.stop()
