"""A lane: one stream of sub-chunks from the left neighbour and one to the right. It carries out operations' schedules.

A session has one lane, or several if one TCP flow cannot fill the link. An operation's array is striped over them. Each
stripe is an all-reduce of its own (a *flow*), so lanes never wait for each other. Flows are served in the order of
their submission, which is the same on every member:

* *receiving*: at most ``SCRATCH_SLOTS`` receives are posted ahead, for the oldest flow that has any left. The callback
  of an arrival adds or stores the sub-chunk.
* *sending*: only the oldest flow that has not sent everything may send. A sub-chunk is handed over when the transport
  holds nothing of the previous one; the kernel's buffer keeps the link busy meanwhile.

A flow is done when everything was received and the kernel has all that was sent: the caller gets its memory back.

With a codec, sub-chunks travel encoded, and every receive lands in a scratch slot. Each rank encodes every element of
the array exactly once: its own contribution or partial sum on the way to the owner, or, as the owner, the final sum. So
one residual per element is enough for error feedback (Seide et al., 2014; Karimireddy et al., arXiv 1901.09847). It
keeps what the encoding lost of ``value + residual``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import World
from ring.codecs import Codec
from ring.codecs.kinds import Scratch
from ring.collectives import SCRATCH_SLOTS, WINDOW_BYTES, Receive, Schedule, Send
from ring.dtypes import Array, reduce_into
from ring.neighbours import NeighbourLinks
from ring.view import View
from wire.connection import Connection

Residual = npt.NDArray[np.float32]
TURN_BYTES = WINDOW_BYTES
"""Bytes of an array handed over per turn of the event loop. If coding is slower than the link, the kernel takes every
sub-chunk at once, and without this limit arrivals and heartbeats starve. Near members have as much in transit
anyway."""


@dataclass(eq=False, slots=True)
class Flow:
    """One schedule over one stripe of an operation's array, on one lane.

    Args:
        array: shape (numel,), the stripe. dtype: the elements' type, for reductions.
        done: called once, when everything was received and flushed.
        residual: shape (numel,), float32; only with a codec that needs feedback.
        source: shape (numel,), this member's contribution, which stays unchanged; None: it is in ``array``. Not with a
            codec.
        check: called with the bytes of each sub-chunk before it is passed on. Raises ``ProtocolError``: then the left
            neighbour is at fault, as it made them, or passed them on without this check.
    """

    schedule: Schedule
    array: Array
    dtype: str
    stream: int
    sub_chunk_numel: int
    done: Callable[[], None]
    codec: Codec | None = None
    residual: Residual | None = None
    reduction: np.ufunc = np.add
    source: Array | None = None
    check: Callable[[bytes], object] | None = None
    flushed: bool = False
    finished: bool = False
    raw: memoryview = field(init=False)
    own: Array = field(init=False)
    relays: dict[int, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.raw = self.array.view(np.uint8).data
        self.own = self.array if self.source is None else self.source

    def elements(self, start: int, stop: int) -> memoryview:
        itemsize = self.array.itemsize
        return self.raw[start * itemsize : stop * itemsize]

    def outgoing(self, send: Send) -> memoryview:
        if self.source is None or send.after:
            return self.elements(send.start, send.stop)
        return self.source[send.start : send.stop].view(np.uint8).data

    def wire_bytes(self, numel: int) -> int:
        return self.codec.encoded_bytes(numel) if self.codec else numel * self.array.itemsize


class LaneOwner(Protocol):
    """The session whose operations lanes carry out. ``world``: its probe may stop the sending."""

    world: World
    view: View
    links: NeighbourLinks

    def moved(self, flow: Flow | None) -> None:
        """A sub-chunk of the flow arrived; None: the kernel took what was sent."""


class Lane:
    """See the module's docstring."""

    def __init__(self, owner: LaneOwner, left: Connection, right: Connection) -> None:
        self.left, self._right, self._owner, self._generation = left, right, owner, owner.view.generation
        self._receiving: deque[Flow] = deque()
        self._sending: deque[Flow] = deque()
        self._posted: deque[tuple[Flow, Receive, npt.NDArray[np.uint8] | None]] = deque()  # with its scratch slot
        self._scratch, self._slot = Scratch(), 0
        self._pumping = self._stopped = False
        self._next_turn: asyncio.Handle | None = None  # set while the event loop's other callbacks run first
        right.on_drained = self._drained

    @property
    def expects(self) -> bool:
        return bool(self._posted or self._receiving)

    def submit(self, flow: Flow) -> None:
        self._receiving.append(flow)
        self._sending.append(flow)
        self._post()
        self.pump()

    def stop(self) -> None:
        """Touch no memory from now on, whatever still arrives."""
        self._stopped = True
        self._right.on_drained = None
        if self._next_turn is not None:
            self._next_turn.cancel()
        for queue in (self._receiving, self._sending, self._posted):
            queue.clear()

    # -------------------------------------------------------------------------------------------------------- receiving

    def _post(self) -> None:
        while len(self._posted) < SCRATCH_SLOTS and self._receiving:
            flow = self._receiving[0]
            receive = flow.schedule.next_receive()
            if receive is None:
                self._receiving.popleft()
                continue
            scratch = None
            if receive.reduce or flow.codec:
                self._slot = (self._slot + 1) % SCRATCH_SLOTS  # used again after so many others
                slot = self._scratch.array(f"slot {self._slot}", flow.wire_bytes(flow.sub_chunk_numel), np.uint8)
                scratch = slot[: flow.wire_bytes(receive.stop - receive.start)]
            into = flow.elements(receive.start, receive.stop) if scratch is None else scratch.data
            self._posted.append((flow, receive, scratch))
            try:
                self.left.post(into, generation=self._generation, stream=flow.stream, done=self._arrived)
            except P2PTrainError as error:
                self._owner.links.take_failure(self.left, error)
                return

    def _arrived(self) -> None:
        if self._stopped:
            return
        flow, receive, scratch = self._posted.popleft()
        target = flow.array[receive.start : receive.stop]
        try:
            if scratch is not None and flow.codec is not None:
                (flow.codec.decode_add if receive.reduce else flow.codec.decode)(scratch, target)
            elif scratch is not None:
                own = flow.own[receive.start : receive.stop]
                reduce_into(target, own, scratch.view(target.dtype), flow.dtype, flow.reduction)
            if flow.check is not None:
                flow.check(target.tobytes())
        except P2PTrainError as error:
            self._owner.links.take_failure(self.left, error)
            return
        index = flow.schedule.received()
        if receive.relayed and flow.codec is not None and scratch is not None:
            flow.relays[index] = scratch.tobytes()
        self._owner.moved(flow)
        self._post()
        self.pump()
        self._check_done(flow)

    # ---------------------------------------------------------------------------------------------------------- sending

    def _drained(self) -> None:
        self._owner.moved(None)
        self.pump()

    def pump(self) -> None:
        """Hand over what may be sent; the owner calls it when a schedule is no longer held. Not re-entrant: the
        transport may report that it is drained within the call."""
        if self._pumping or self._next_turn is not None:
            return
        self._pumping = True
        try:
            self._send_ready()
        finally:
            self._pumping = False

    def _go_on(self) -> None:
        self._next_turn = None
        self.pump()

    def _send_ready(self) -> None:
        turn_bytes = 0
        if not self._owner.world.probe.alter("lane-sends", True):
            return
        while not self._right.unsent_bytes:
            if not self._sending or self._stopped:
                return
            flow = self._sending[0]
            if flow.schedule.all_sent:
                self._sending.popleft()
                flow.flushed = True
                self._check_done(flow)
                continue
            if turn_bytes >= TURN_BYTES:
                self._next_turn = asyncio.get_running_loop().call_soon(self._go_on)
                return
            send = flow.schedule.next_send()
            if send is None:
                return
            turn_bytes += (send.stop - send.start) * flow.array.itemsize
            codec = flow.codec
            payload = flow.outgoing(send) if codec is None else self._encode(flow, codec, send)
            try:
                self._right.send_bulk(payload, generation=self._generation, stream=flow.stream)
            except P2PTrainError as error:
                self._owner.links.take_failure(self._right, error)
                return

    def _encode(self, flow: Flow, codec: Codec, send: Send) -> memoryview:
        if send.relay is not None:
            return memoryview(flow.relays.pop(send.relay))
        values = flow.array[send.start : send.stop]
        # The next sub-chunk uses the memory again: the kernel must have this one by then.
        encoded = self._scratch.array("encoded", codec.encoded_bytes(flow.sub_chunk_numel), np.uint8)
        out = encoded[: codec.encoded_bytes(len(values))]
        if flow.residual is None:
            codec.encode(values, out)
        else:  # a partial sum that was sent is not needed any more
            codec.encode_with_feedback(values, flow.residual[send.start : send.stop], out)
        if send.final:
            codec.decode(out, values)
        return out.data

    def _check_done(self, flow: Flow) -> None:
        if flow.flushed and flow.schedule.all_received and not (flow.finished or self._stopped):
            flow.finished = True
            flow.done()
