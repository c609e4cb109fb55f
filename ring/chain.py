"""The running chain of stages of one view: activations go to the next stage, gradients to the previous one.

Connections. Each stage dials the next stage and accepts the previous one, on channels that only chains have. *Bulk*
connections carry activations one way and gradients the other; if there are several, micro-batches use them in turn. The
*beat* connection, and how the chain ends, are the same as in a ring (``ring.neighbours``).

Payloads. All payloads of one kind have the same size, known to both ends. Each is one bulk frame whose stream number
counts the micro-batches of all steps. A bounded number of buffers is posted or in use; then TCP holds the sender back.
Sending never blocks: a payload waits in a queue until the transport holds nothing of the previous one. It must not
change until the kernel has it.

Round trips. When a chain forms, each stage sends the next one a payload of activations and gets a payload of gradients
back, ``PINGS`` times. The shortest round trip is the cost of the hop for a micro-batch.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import ConnectionLost, P2PTrainError
from p2ptrain.core.world import World
from ring.links import ThisMember, Topology, connect_neighbours
from ring.neighbours import AT_WORK, Neighbour, NeighbourLinks
from ring.planning.schedule import OperationKind, StageSchedule
from ring.view import View
from wire.connection import Connection
from wire.frame import MAX_BULK_BYTES

PINGS = 3  # the first one finds TCP with its smallest window
EXTRA_PATIENCE = 0.1
"""Extra patience for each stage beyond the awaited neighbour, as a share of the patience. So the stage next to a
stuck one gives up first."""

_STREAMS = 1 << 32
_FIRST_STREAM = PINGS


Payload = npt.NDArray[np.uint8]
"""Shape (bytes,), contiguous: encoded activations or gradients of one micro-batch."""


class Hop:
    """The payloads of a chain to and from one neighbour, in order."""

    def __init__(self, chain: Chain, neighbour: Neighbour) -> None:
        self.neighbour, self._chain, self._generation = neighbour, chain, chain.view.generation
        self._expected: deque[int] = deque()  # streams that no buffer is posted for yet
        self._nbytes = self._max_buffers = 0  # size of a buffer; the most held at a time
        self._held_buffers = 0  # posted, full or in use
        self._posted: set[int] = set()
        self._arrived: dict[int, Payload] = {}
        self._waiting: dict[int, asyncio.Future[Payload]] = {}
        self._queues: dict[Connection, deque[tuple[int, Payload]]] = {bulk: deque() for bulk in neighbour.bulks}
        self._sending: dict[Connection, Payload] = {}  # given to the transport, perhaps not yet all in the kernel
        self._flushing: asyncio.Future[None] | None = None
        self._stopped = False
        for bulk in neighbour.bulks:
            bulk.on_drained = partial(self._drained, bulk)

    @property
    def heard_at(self) -> float:
        return max(bulk.last_heard for bulk in self.neighbour.bulks)

    @property
    def flushed(self) -> bool:
        return not self._sending and not any(self._queues.values())

    @property
    def unsent_bytes(self) -> int:
        queued = sum(payload.nbytes for queue in self._queues.values() for _, payload in queue)
        return queued + sum(bulk.unsent_bytes for bulk in self.neighbour.bulks)

    def expects(self, connection: Connection) -> bool:
        return any(self._bulk(stream) is connection for stream in (*self._posted, *self._expected))

    # -------------------------------------------------------------------------------------------------------- receiving

    def expect(self, streams: Sequence[int], nbytes: int, *, buffers: int) -> None:
        """Expect these payloads of ``nbytes`` each, in this order, with at most ``buffers`` of them posted, full or
        in use. All earlier expected payloads must have arrived."""
        self._expected.extend(streams)
        self._nbytes, self._max_buffers = nbytes, buffers
        self._post()

    def arrival(self, stream: int) -> asyncio.Future[Payload]:
        """A future of the payload, the caller's until ``release``. Only one caller may ask for a stream."""
        future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        if stream in self._arrived:
            future.set_result(self._arrived.pop(stream))
        else:
            self._waiting[stream] = future
        return future

    def release(self) -> None:
        """Note that a payload is no longer in use."""
        self._held_buffers -= 1
        self._post()

    def _post(self) -> None:
        while self._expected and not self._stopped and self._held_buffers < self._max_buffers:
            stream, buffer = self._expected.popleft(), np.empty(self._nbytes, np.uint8)
            self._held_buffers += 1
            self._posted.add(stream)
            bulk = self._bulk(stream)
            try:
                done = partial(self._take, stream, buffer)
                bulk.post(buffer.data, generation=self._generation, stream=stream, done=done)
            except P2PTrainError as error:
                self._chain.links.take_failure(bulk, error)
                return

    def _take(self, stream: int, buffer: Payload) -> None:
        if self._stopped:
            return
        self._posted.discard(stream)
        self._chain.progress += 1
        waiting = self._waiting.pop(stream, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(buffer)
        else:
            self._arrived[stream] = buffer

    # ---------------------------------------------------------------------------------------------------------- sending

    def send(self, stream: int, payload: Payload) -> None:
        """Queue ``payload`` for the next turn of the loop, so that the caller can first give its compute thread a task.
        It must not change until all is flushed."""
        bulk = self._bulk(stream)
        self._queues[bulk].append((stream, payload))
        asyncio.get_running_loop().call_soon(self._pump, bulk)

    def all_flushed(self) -> asyncio.Future[None]:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_future()
        self._resolve_flushed()
        return self._flushing

    def _bulk(self, stream: int) -> Connection:
        bulks = self.neighbour.bulks
        return bulks[stream % len(bulks)]

    def _drained(self, bulk: Connection) -> None:
        self._chain.progress += 1
        self._pump(bulk)

    def _pump(self, bulk: Connection) -> None:
        while not self._stopped and not bulk.unsent_bytes:
            self._sending.pop(bulk, None)
            if not self._queues[bulk]:
                break
            stream, payload = self._queues[bulk].popleft()
            self._sending[bulk] = payload
            try:
                bulk.send_bulk(payload.data, generation=self._generation, stream=stream)
            except P2PTrainError as error:
                self._chain.links.take_failure(bulk, error)
                return
        self._resolve_flushed()

    def _resolve_flushed(self) -> None:
        if self._flushing is not None and not self._flushing.done() and self.flushed:
            self._flushing.set_result(None)

    def stop(self) -> None:
        """Touch no memory from now on, whatever still arrives. Futures that are waited for fail."""
        self._stopped = True
        for bulk in self.neighbour.bulks:
            bulk.on_drained = None
            self._queues[bulk].clear()
        for future in (*self._waiting.values(), self._flushing):
            if future is not None and not future.done():
                future.set_exception(self._chain.links.failure())
                future.exception()  # marks it as retrieved: perhaps nobody awaits it any more
        self._waiting.clear()


class Chain:
    """A stage's place in the chain of one view. ``form`` makes it; ``close`` or the loss of a neighbour ends it.

    Attributes:
        stage, stages: this member's stage, counted from 0, and the number of stages.
        round_trip_s: of the hop to the next stage, 0 on the last one: time of activations there and gradients back,
            without computing.
        broken: resolves to ``RingBroken`` when the chain has ended, for whatever reason.
        progress: payloads received and sent so far, plus what the owner adds; every heartbeat carries it.
    """

    def __init__(
        self,
        *,
        world: World,
        view: View,
        rank: int,
        before: Neighbour | None,
        after: Neighbour | None,
        activation_bytes: int,
        gradient_bytes: int,
    ) -> None:
        self.view = view
        self.stage, self.stages = view.stage_of(rank), view.stages
        self.activation_bytes, self.gradient_bytes = activation_bytes, gradient_bytes
        self.round_trip_s = 0.0
        self.progress = 0
        self._now = world.clock.now
        self._waits: dict[Hop, str] = {}  # what this stage waits for
        self._next_stream = _FIRST_STREAM
        self._streams: range | None = None  # of the current step
        self.links = NeighbourLinks(self, world.clock, view, rank, left=before, right=after, what="chain")
        self.broken = self.links.broken
        self._before, self._after = (Hop(self, neighbour) if neighbour else None for neighbour in (before, after))

    # ---------------------------------------------------------------------------------------------- forming and ending

    @classmethod
    async def form(
        cls,
        me: ThisMember,
        view: View,
        *,
        activation_bytes: int,
        gradient_bytes: int,
        timeout_s: float,
    ) -> Chain:
        """Connect to both neighbours, and measure the hops to them.

        Args:
            view: as for ``RingSession.form``. The stages are the members of this one's replica.
            activation_bytes, gradient_bytes: encoded size of one micro-batch, the same on every hop.

        Raises:
            ValueError: this peer is no member, or a payload is too large.
            Refused, NeighbourAway, DeadlineExceeded, ConnectionLost, ProtocolError: see ``RingSession.form``.
        """
        now, rank = me.world.clock.now, view.rank_of(me.peer_id)
        if rank is None or max(activation_bytes, gradient_bytes) > MAX_BULK_BYTES:
            raise ValueError(f"{me.peer_id} is no member, or a payload of {activation_bytes} bytes is too large")
        began, stage = now(), view.stage_of(rank)
        after = view.members[rank + 1] if stage + 1 < view.stages else None
        before = view.members[rank - 1] if stage else None
        me.inbound.announced(view, Topology.CHAIN, before.peer_id if before is not None else "")
        to_after, from_before = await connect_neighbours(
            me, view, Topology.CHAIN, dialled=after, dialling=before, timeout_s=timeout_s
        )
        chain = cls(
            world=me.world,
            view=view,
            rank=rank,
            before=from_before,
            after=to_after,
            activation_bytes=activation_bytes,
            gradient_bytes=gradient_bytes,
        )
        try:
            await chain._measure(timeout_s - (now() - began))
        except BaseException:  # also cancelled in the instant when all were there: nobody else could close the chain
            chain.close("forming the chain failed at this stage")
            raise
        chain.links.begin_beats()
        return chain

    def close(self, reason: str = "the view ended") -> None:
        """Leave the chain without waiting (see ``links.wait_closed``). A step in progress fails, on every stage."""
        orderly = self._streams is None and all(hop.flushed for hop in self._hops)
        self.links.close(f"this stage left the chain: {reason}", reason, orderly=orderly)

    def abandon(self, reason: str) -> None:
        """End the chain in the middle of a step: buffers are still posted and payloads still borrowed."""
        self.links.give_up(None, ConnectionLost(reason))

    def blame(self, kind: OperationKind, error: P2PTrainError) -> None:
        """Count the neighbour that sent the payload for an operation of ``kind`` as lost: the payload was invalid."""
        hop = self._before if kind is OperationKind.FORWARD else self._after
        assert hop is not None, "the chain has no neighbour on this side"
        self.links.give_up(hop.neighbour, error)

    # ----------------------------------------------------------------------------------------------------------- a step

    def begin(self, schedule: StageSchedule) -> None:
        """Begin a step: payloads of its micro-batches may arrive from now on. All stages begin the same steps in order.
        Raises ``ConnectionLost``, ``ProtocolError``, ``DeadlineExceeded``: the chain was broken before."""
        self._check_open()
        assert self._streams is None, "a step is under way"
        if self._next_stream + schedule.micro_batches > _STREAMS:
            self._next_stream = _FIRST_STREAM
        self._streams = range(self._next_stream, self._next_stream + schedule.micro_batches)
        self._next_stream, count_buffers = self._streams.stop, schedule.count_receive_buffers
        if self._before is not None:
            self._before.expect(self._streams, self.activation_bytes, buffers=count_buffers(self.stage - 1))
        if self._after is not None and schedule.backward:
            self._after.expect(self._streams, self.gradient_bytes, buffers=count_buffers(self.stage))

    async def receive(self, kind: OperationKind, index: int, *, patience_s: float) -> Payload | None:
        """Wait for the input of the operation of ``kind`` on micro-batch ``index``; None if it needs no payload. The
        payload belongs to the caller until ``release``.

        Raises:
            DeadlineExceeded: no byte of a payload came for ``patience_s`` plus ``EXTRA_PATIENCE``: the neighbour is
                stuck.
            ConnectionLost, ProtocolError: the chain broke; ``broken`` names the suspect.
        """
        hop = self._before if kind is OperationKind.FORWARD else self._after
        if hop is None:
            return None
        what = f"{'activations' if kind is OperationKind.FORWARD else 'gradients'} of micro-batch {index}"
        return await self._receive(hop, self._stream(index), what, patience_s)

    def release(self, kind: OperationKind, payload: Payload | None) -> None:
        """Note that a payload from ``receive`` is no longer in use, so that another one may come."""
        hop = self._before if kind is OperationKind.FORWARD else self._after
        if hop is not None and payload is not None and not self.broken.done():
            hop.release()

    def send(self, kind: OperationKind, index: int, payload: Payload) -> None:
        """Send the output of the operation of ``kind`` on micro-batch ``index``, without waiting. ``payload`` must not
        change until ``finish`` returned.

        Raises:
            ConnectionLost, ProtocolError, DeadlineExceeded: the chain was broken before.
        """
        hop = self._after if kind is OperationKind.FORWARD else self._before
        assert hop is not None, "the chain has no neighbour on this side"
        self._check_open()
        hop.send(self._stream(index), payload)

    async def finish(self, *, patience_s: float) -> None:
        """Wait until the kernel has all that was sent; then the step is over. Raises what ``receive`` raises."""
        for hop in self._hops:
            if not hop.flushed:
                await self._wait(hop, hop.all_flushed(), "the kernel to take what was sent", patience_s)
        self._check_open()
        self._streams = None

    # -------------------------------------------------------------------------------------------------------- measuring

    async def _measure(self, timeout_s: float) -> None:
        echo = asyncio.ensure_future(self._echo(timeout_s))
        try:
            self.round_trip_s = await self._ping(timeout_s)
            await echo
            for hop in self._hops:
                await self._wait(hop, hop.all_flushed(), "the kernel to take the pings", timeout_s)
        finally:
            echo.cancel()
            await asyncio.gather(echo, return_exceptions=True)

    async def _ping(self, patience_s: float) -> float:
        shortest_s, hop = math.inf, self._after
        if hop is None:
            return 0.0
        payload = np.zeros(self.activation_bytes, np.uint8)
        hop.expect(range(PINGS), self.gradient_bytes, buffers=1)
        for ping in range(PINGS):
            began = self._now()
            hop.send(ping, payload)
            await self._receive(hop, ping, "the answer to its ping", patience_s)
            hop.release()
            shortest_s = min(shortest_s, self._now() - began)
        return max(shortest_s, 0.0)

    async def _echo(self, patience_s: float) -> None:
        hop = self._before
        if hop is None:
            return
        payload = np.zeros(self.gradient_bytes, np.uint8)
        hop.expect(range(PINGS), self.activation_bytes, buffers=1)
        for ping in range(PINGS):
            await self._receive(hop, ping, "the neighbour's ping", patience_s)
            hop.release()
            hop.send(ping, payload)

    # -------------------------------------------------------------------------------------------------------- internals

    @property
    def _hops(self) -> list[Hop]:
        return [hop for hop in (self._before, self._after) if hop is not None]

    def _stream(self, index: int) -> int:
        assert self._streams is not None, "no step is under way"
        return self._streams[index]

    def _check_open(self) -> None:
        if self.broken.done():
            raise self.links.failure()

    async def _receive(self, hop: Hop, stream: int, what: str, patience_s: float) -> Payload:
        self._check_open()
        arrival = hop.arrival(stream)
        if not arrival.done():
            await self._wait(hop, arrival, what, patience_s)
        return arrival.result()

    async def _wait(
        self, hop: Hop, future: asyncio.Future[Payload] | asyncio.Future[None], what: str, patience_s: float
    ) -> None:
        """Wait until ``future`` is done; break the chain if the neighbour makes no progress for too long."""
        beyond = self.stage - 1 if hop is self._before else self.stages - 2 - self.stage
        patience_s *= 1 + EXTRA_PATIENCE * beyond
        self._waits[hop] = what
        moved_at, unsent_bytes = self._now(), hop.unsent_bytes
        try:
            while not future.done():
                if hop.unsent_bytes != unsent_bytes:  # the neighbour reads
                    moved_at, unsent_bytes = self._now(), hop.unsent_bytes
                left_s = max(moved_at, hop.heard_at) + patience_s - self._now()
                if left_s <= 0:
                    silence = f"nothing came for {patience_s:g} s while this stage waited for {what}"
                    self.links.give_up_stuck(hop.neighbour, silence)
                    raise self.links.failure()
                await asyncio.wait({future}, timeout=min(left_s, patience_s * 0.05))
        finally:
            del self._waits[hop]
        future.result()

    # ---------------------------------------------------------------------------- what ``links`` calls (``LinksOwner``)

    def is_busy(self) -> bool:
        return self._streams is not None

    def expects(self, connection: Connection) -> bool:
        return any(hop.expects(connection) for hop in self._hops)

    def status(self) -> tuple[int, str]:
        wait = next(iter(self._waits.values()), "")
        return self.progress, f"waits for {wait}" if wait else AT_WORK

    def settle(self) -> None:
        for hop in self._hops:
            hop.stop()
