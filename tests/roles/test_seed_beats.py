"""How often neighbours beat, and when a seed counts a silent worker as lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2ptrain.core.errors import DeadlineExceeded
from p2ptrain.lab.memory import run_virtual
from ring.detector import FailureDetector, beat_defaults
from roles.seed.peers import ConnectedPeer, ring_beats
from wire.connection import Received
from wire.handshake import local_hello
from wire.messages import Heartbeat

NEAR, FAR = beat_defaults(0.1), beat_defaults(80.0)


class Quiet:
    """A connection on which beats come when a script says so."""

    close_cause = None

    def __init__(self) -> None:
        self.last_heard = 0.0
        self.inbox: asyncio.Queue[Received] = asyncio.Queue()

    def beat(self) -> None:
        self.last_heard = asyncio.get_running_loop().time()
        self.inbox.put_nowait(Received(Heartbeat(1, 0, 0, "idle"), 0, 0))

    async def receive(self, *, timeout_s: float) -> Received:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.inbox.get()
        except TimeoutError:
            raise DeadlineExceeded("nothing came") from None


def link(rtt_ms: float = 0.1) -> ConnectedPeer:
    heartbeat_s, death_s = beat_defaults(rtt_ms)
    detector = FailureDetector(heartbeat_s=heartbeat_s, death_s=death_s)
    hello = local_hello(peer_id="a", name="a", roles=["worker"], purpose="peer")
    connection: Any = Quiet()
    return ConnectedPeer(connection, hello, "h", 1, rtt_ms, 0.0, detector)


@pytest.mark.parametrize(
    ("links", "latencies_s", "expected"),
    [
        ([], [], (0.0, 0.0)),
        ([link(0.1), link(80.0)], [None, None], FAR),
        ([link(0.1), link(80.0)], [1e-4, None], FAR),
        ([link(0.1), link(80.0)], [1e-4, 1e-4], NEAR),
        ([link(0.1), link(0.1)], [0.04, 1e-4], NEAR),
    ],
    ids=["nobody", "unmeasured", "half measured", "slow only to join", "never more than before"],
)
def test_a_ring_beats_as_its_own_ways_allow(links, latencies_s, expected):
    assert ring_beats(links, latencies_s) == expected


async def heard(of: ConnectedPeer) -> float:
    """Take messages until the worker counts as lost; when that was."""
    try:
        while True:
            await of.receive()
    except DeadlineExceeded:
        return asyncio.get_running_loop().time()


async def beating(of: ConnectedPeer, gaps: list[float]) -> None:
    for gap in gaps:
        await asyncio.sleep(gap)
        of.connection.beat()  # type: ignore[attr-defined]


def test_a_steady_worker_that_falls_silent_is_lost_after_two_seconds():
    async def main() -> None:
        worker = link()
        lost = asyncio.create_task(heard(worker))
        await beating(worker, [0.25] * 40)
        assert await lost == pytest.approx(10.0 + 2.0)

    run_virtual(main())


def test_a_seed_that_slept_doubts_itself_first():
    async def main() -> None:
        worker = link()
        lost = asyncio.create_task(heard(worker))
        await beating(worker, [0.25] * 20)
        loop: Any = asyncio.get_running_loop()
        await asyncio.sleep(0.1)
        loop._now += 60.0  # stopped: beats lie unread
        await asyncio.sleep(0.5)
        assert not lost.done()
        await beating(worker, [0.25] * 4)
        assert not lost.done()
        lost.cancel()

    run_virtual(main())
