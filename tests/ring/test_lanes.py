"""Lanes: how much goes out in a turn of the loop, and over transports that are not ours."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import Probe
from ring import collectives
from ring.codecs import codec_named
from ring.collectives import Schedule, Send
from ring.lanes import TURN_BYTES, Flow, Lane
from tests.ring.local import local_ring
from wire import transport
from wire.connection import Connection
from wire.transport import can_watch

SUB_CHUNK_BYTES = 64 << 10
TURNS = 5


class BottomlessConnection:
    """To a kernel that takes all at once, as it does where a codec is slower than the link."""

    unsent_bytes = 0
    on_drained = None

    def __init__(self) -> None:
        self.sent_bytes = 0

    def send_bulk(self, payload: memoryview, *, generation: int, stream: int) -> None:
        self.sent_bytes += payload.nbytes


def lane_to(right: BottomlessConnection, left: Any = Any) -> Lane:
    def fail(connection: Connection, error: P2PTrainError) -> None:
        raise error

    owner: Any = SimpleNamespace(
        world=SimpleNamespace(probe=Probe()),
        view=SimpleNamespace(generation=1),
        links=SimpleNamespace(take_failure=fail),
        moved=lambda flow: None,
    )
    return Lane(owner, left, cast(Connection, right))


def long_flow(done: asyncio.Event) -> Flow:
    """It waits for nobody."""
    array = np.zeros(TURNS * TURN_BYTES, np.uint8)
    sends = [Send(start, start + SUB_CHUNK_BYTES) for start in range(0, array.size, SUB_CHUNK_BYTES)]
    return Flow(Schedule(sends, ()), array, "uint8", 1, SUB_CHUNK_BYTES, done.set)


async def test_a_long_flow_leaves_the_loop_its_turns():
    right, done = BottomlessConnection(), asyncio.Event()
    lane_to(right).submit(long_flow(done))
    sent_bytes = [0]
    while not done.is_set():
        sent_bytes.append(right.sent_bytes)
        await asyncio.sleep(0)
    assert right.sent_bytes == TURNS * TURN_BYTES
    assert max(np.diff(sent_bytes)) <= TURN_BYTES
    assert len(sent_bytes) <= TURNS + 2, "turns without work"


class SlowConnection(BottomlessConnection):
    """To a kernel that takes what it was given only when told to."""

    def send_bulk(self, payload: memoryview, *, generation: int, stream: int) -> None:
        super().send_bulk(payload, generation=generation, stream=stream)
        self.unsent_bytes = payload.nbytes


class Arrivals:
    """From a left neighbour: what was posted arrives when the test says so."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []

    def post(self, into: memoryview, *, generation: int, stream: int, done: Callable[[], None]) -> None:
        self.posted.append(done)


async def test_memory_is_the_callers_again_only_when_the_kernel_has_taken_it_all():
    left, right, done = Arrivals(), SlowConnection(), asyncio.Event()
    array = np.zeros(2 * SUB_CHUNK_BYTES, np.uint8)
    lane = lane_to(right, left)
    schedule = collectives.all_gather(0, 2, array.size, SUB_CHUNK_BYTES)
    lane.submit(Flow(schedule, array, "uint8", 1, SUB_CHUNK_BYTES, done.set))
    assert right.sent_bytes == SUB_CHUNK_BYTES
    left.posted.pop()()
    assert not done.is_set(), "all is received, and what was sent is still borrowed"
    right.unsent_bytes = 0
    lane._drained()
    assert done.is_set()


@pytest.mark.parametrize("codec", [None, "int8"])
async def test_a_ring_over_the_loops_own_transports(codec, monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(transport, "can_watch", lambda loop: False)
    async with local_ring(3, transport.TcpNetwork(), sub_chunk_bytes=16 << 10, streams=2) as members:
        buffers = [np.full(300_000, rank + 1, np.float32) for rank in range(3)]
        operations = [
            member.session.submit(buffer, codec=codec_named(codec) if codec else None)
            for member, buffer in zip(members, buffers, strict=True)
        ]
        async with asyncio.timeout(30):
            await asyncio.gather(*operations)
    assert all(np.allclose(buffer, 6, rtol=1e-2) for buffer in buffers)
    assert len({buffer.tobytes() for buffer in buffers}) == 1


def test_sockets_that_cannot_send_from_several_places_are_left_to_the_loop(monkeypatch):
    """Windows' selector loop watches sockets, but they have no ``sendmsg``."""
    loop = asyncio.new_event_loop()
    try:
        assert can_watch(loop)
        monkeypatch.setattr(socket, "socket", object)
        assert not can_watch(loop)
    finally:
        monkeypatch.undo()
        loop.close()
