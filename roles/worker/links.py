"""Measures latency and bandwidth of the link to another worker.

The measuring worker dials the other's port with purpose ``probe``. The answering side (``ProbeResponder``) answers
``probe.clock`` requests, each of which makes a round trip. When it is the caller's turn (``probe.turn``), it accepts
bulk frames, one with each ``probe.sink`` request, and answers each when it has arrived.

Latency is half the shortest of a few round trips on an open connection. Bandwidth is the rate of the answers to pieces
that were sent all at once. Link delays are in every answer, so they cancel out.

No measurement may slow a step down. A push is at most ``PUSH_BYTES`` and is given up after ``PUSH_S``. A worker pushes
to one other at a time, and accepts one push at a time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from p2ptrain.core.errors import NetworkError, P2PTrainError, ProtocolError
from ring.planning.measurements import LinkQuality
from ring.planning.ring_plan import NEAR_RTT_S
from roles.line import wait_unless_closed
from roles.worker.context import PeerContext
from roles.worker.stage_requests import PeerAddress
from wire.connection import Connection
from wire.messages import Hello, RefusalCode, Refuse, Request, Response
from wire.schema import Bound, Declared, instance_untrusted

PIECE_BYTES = 32 << 10
PUSH_BYTES = 1 << 20
"""With ``PUSH_S``, the limit of one measurement's load on a link: a tenth of a second of 100 Mbit/s."""
PUSH_S = 0.5
MAX_ASKED = 16
"""Peers in one request."""
MAX_DEADLINE_S = 60.0
MAX_CALLERS = 32
"""Probe connections that a worker serves at a time; further ones are refused as busy."""
QUIET_S = 5.0
"""A probe connection without a request for so long is closed; no measuring worker is that slow."""


# ----------------------------------------------------------------------------------------------------------- answering


class ProbeResponder:
    """A worker's answering side, shared by all of its callers."""

    def __init__(self) -> None:
        self._callers = 0
        self._turn = asyncio.Lock()

    def decide(self, hello: Hello) -> Refuse | None:
        if self._callers >= MAX_CALLERS and "worker" in hello.roles:
            return Refuse(RefusalCode.BUSY, "others measure links to this worker", "try again in a second")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Answer one probe connection until it closes, falls silent, or has pushed all. Raises ``ProtocolError``."""
        self._callers += 1
        try:
            await self._answer(connection)
        except (NetworkError, TimeoutError):
            return  # the usual end: the caller closes the connection
        finally:
            self._callers -= 1

    async def _answer(self, connection: Connection) -> None:
        while True:
            request = await connection.expect(Request, timeout_s=QUIET_S)
            if request.method == "probe.turn":
                async with asyncio.timeout(QUIET_S):
                    await self._turn.acquire()
                try:
                    connection.send(Response(request.id))
                    await self._accept_push(connection)
                finally:
                    self._turn.release()
                return
            if request.method != "probe.clock":
                raise ProtocolError(f"a probe sent the unsupported request {request.method[:80]!r}")
            connection.send(Response(request.id))

    async def _accept_push(self, connection: Connection) -> None:
        into, arrived = memoryview(bytearray(PIECE_BYTES)), asyncio.Event()
        for _ in range(PUSH_BYTES // PIECE_BYTES):
            request = await connection.expect(Request, timeout_s=QUIET_S)
            stream = request.params.get("stream")
            if request.method != "probe.sink" or not isinstance(stream, int) or not 0 <= stream < 2**31:
                raise ProtocolError("a push must consist of probe.sink requests, each with a valid stream")
            arrived.clear()
            connection.post(into, generation=0, stream=stream, done=arrived.set)
            if not await wait_unless_closed(connection, arrived.wait(), QUIET_S):
                connection.abort()  # so that nothing lands in this memory later
                return
            connection.send(Response(request.id))


# ----------------------------------------------------------------------------------------------------------- measuring


class MeasureLinks(Declared):
    """Request ``links.measure``, of the seed or of a split model's client."""

    peers: Annotated[list[PeerAddress], Bound(1, MAX_ASKED)]
    deadline_s: Annotated[float, Bound(0, MAX_DEADLINE_S)]


class Prober:
    """A worker's measuring side."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._now = context.world.clock.now
        self._push = asyncio.Lock()  # one push at a time

    async def answer(self, params: dict[str, Any]) -> dict[str, Any]:
        """Answer ``links.measure``. Raises ``ProtocolError``: invalid parameters."""
        asked = instance_untrusted(MeasureLinks, params, lenient=True)
        found = await self.measure(asked.peers, deadline_s=asked.deadline_s)
        return {"links": [asdict(link) | {"peer": peer_id} for peer_id, link in found.items()]}

    async def measure(self, targets: Sequence[PeerAddress], *, deadline_s: float) -> dict[str, LinkQuality]:
        """Return peer id → what was measured within ``deadline_s``. Peers that were not reached are missing.

        All latencies are measured at once and bandwidths one after the other. If time runs out, the bandwidths of the
        last ``targets`` are missing.
        """
        found: dict[str, LinkQuality] = {}
        tasks = [asyncio.create_task(self._measure(target, found), name="links.measure") for target in targets]
        try:
            await asyncio.wait(tasks, timeout=deadline_s)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, P2PTrainError):
                raise result
        return found

    async def _measure(self, target: PeerAddress, found: dict[str, LinkQuality]) -> None:
        hello, at = self._context.hello("probe"), (target.host, target.port)
        connection, _ = await self._context.dial(target.peer, *at, hello, timeout_s=MAX_DEADLINE_S)  # or deadline_s
        try:
            latency_s = await self._latency_s(connection)
            found[target.peer] = LinkQuality(latency_s)
            async with self._push:
                found[target.peer] = LinkQuality(latency_s, await self._pushed_bps(connection, latency_s))
        finally:
            connection.abort()

    async def _latency_s(self, connection: Connection) -> float:
        now, round_trips_s = self._now, list[float]()
        # On a far link two are enough: the variation is small beside the latency.
        while len(round_trips_s) < (5 if sum(round_trips_s) < 0.3 else 2):
            began = now()
            connection.send(Request(len(round_trips_s), "probe.clock"))
            await connection.expect(Response, timeout_s=MAX_DEADLINE_S)
            round_trips_s.append(now() - began)
        return min(round_trips_s) / 2

    async def _pushed_bps(self, connection: Connection, latency_s: float) -> float | None:
        """Push ``PUSH_BYTES`` and return the rate in bits per second. None if too little arrived."""
        pieces, payload, answered = PUSH_BYTES // PIECE_BYTES, memoryview(bytes(PIECE_BYTES)), list[float]()
        connection.send(Request(0, "probe.turn"))
        await connection.expect(Response, timeout_s=MAX_DEADLINE_S)
        due_at = self._now() + 2 * latency_s
        for number in range(pieces):
            connection.send(Request(number, "probe.sink", {"stream": number}))
            connection.send_bulk(payload, generation=0, stream=number)
        with suppress(NetworkError, TimeoutError):  # broken or out of time: use what arrived
            async with asyncio.timeout(PUSH_S + 2 * latency_s):
                await self._collect_answers(connection, pieces, answered)
        return rate_bps(answered, due_at, is_near=2 * latency_s < NEAR_RTT_S)

    async def _collect_answers(self, connection: Connection, pieces: int, answered: list[float]) -> None:
        heard_bytes, at = 0, 0.0
        for number in range(pieces):
            response = await connection.expect(Response, timeout_s=MAX_DEADLINE_S)
            if response.id != number:
                raise ProtocolError(f"an answer to piece {response.id}, expected piece {number}")
            if connection.bytes_in > heard_bytes:  # else it was read together with the answer before it
                heard_bytes, at = connection.bytes_in, self._now()
            answered.append(at)


def rate_bps(answered: Sequence[float], due_at: float, *, is_near: bool) -> float | None:
    """Return bits per second from the times at which pieces were answered. None if there are too few.

    The result is the median rate over all runs of a quarter of the pieces. The first runs are left out, because slow
    start holds them back. A lost segment makes a pause and then a burst; the median ignores both. Runs that were
    answered at once, as by a busy relay, count only if all were.

    Args:
        due_at: the time at which the first answer could have come. All pieces took at least the time since then.
        is_near: slow start does not matter, and no rate is higher than that of all pieces since ``due_at``.
    """
    if len(answered) < 3:
        return None
    run = max(2, len(answered) // 4)
    starts = range(min(run, len(answered) - 1 - run), len(answered) - run)
    seconds = [answered[start + run] - answered[start] for start in starts]
    rates = [8 * PIECE_BYTES * run / took_s for took_s in seconds if took_s > 0]
    if (is_near or not rates) and (took_s := answered[-1] - due_at) > 0:
        most = 8 * PIECE_BYTES * len(answered) / took_s
        rates = [min(rate, most) for rate in rates or [most]]
    return statistics.median(rates) if rates else None
