"""One hop of a chain, seen from one of its ends: payloads out, in order, and payloads in, into buffers posted ahead.

Receiving: a bounded number of buffers is posted and used again when its user is done with it; where all are in use, TCP
holds the sender back. Sending never blocks: a payload waits in a queue, and is handed over when the transport holds
nothing of the last one. Until the kernel has it, it must not change. There is no task or timer per payload.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import P2PTrainError
from ring.liveness import Neighbour
from wire.connection import Connection

Payload = npt.NDArray[np.uint8]
"""Shape (bytes,), contiguous: activations or gradients of one micro-batch as they travel."""


class Hop:
    """The payloads of one neighbour: those that it sends, in order, and those for it.

    Args:
        on_moved: called when a payload arrived, and when the kernel took one.
        on_error: called with the connection that failed, and why.
    """

    def __init__(
        self,
        neighbour: Neighbour,
        generation: int,
        *,
        on_moved: Callable[[], None],
        on_error: Callable[[Connection, P2PTrainError], None],
    ) -> None:
        self.neighbour = neighbour
        self._generation = generation
        self._on_moved, self._on_error = on_moved, on_error
        self._expected: deque[int] = deque()  # streams that no buffer is posted for yet
        self._nbytes = 0  # of each of them
        self._ahead = 0  # buffers that may be posted, full or in use
        self._taken = 0  # buffers that are
        self._free: list[Payload] = []
        self._posted: set[int] = set()
        self._arrived: dict[int, Payload] = {}
        self._waiting: dict[int, asyncio.Future[Payload]] = {}
        self._queues: dict[Connection, deque[tuple[int, Payload]]] = {bulk: deque() for bulk in neighbour.bulks}
        self._sending: dict[Connection, Payload] = {}  # with the transport, perhaps not all in the kernel
        self._flushing: asyncio.Future[None] | None = None
        self._stopped = False
        for bulk in neighbour.bulks:
            bulk.on_drained = partial(self._drained, bulk)

    @property
    def heard_at(self) -> float:
        """When the last byte of a payload came."""
        return max(bulk.last_heard for bulk in self.neighbour.bulks)

    @property
    def flushed(self) -> bool:
        """Whether the kernel has all that was sent."""
        return not self._sending and not any(self._queues.values())

    @property
    def unsent_bytes(self) -> int:
        """What the kernel has not taken yet."""
        queued = sum(payload.nbytes for queue in self._queues.values() for _, payload in queue)
        return queued + sum(bulk.unsent_bytes for bulk in self.neighbour.bulks)

    def expects(self, connection: Connection) -> bool:
        """Whether something is still to come on ``connection``."""
        return any(self._bulk(stream) is connection for stream in (*self._posted, *self._expected))

    # -------------------------------------------------------------------------------------------------------- receiving

    def expect(self, streams: Sequence[int], nbytes: int, *, ahead: int) -> None:
        """These payloads of ``nbytes`` each come next, in this order, and nothing else is to come any more.

        Args:
            ahead: buffers, at most, that are posted, full or in use.
        """
        self._expected.extend(streams)
        self._ahead = ahead
        if nbytes != self._nbytes:
            self._free, self._nbytes = [], nbytes
        self._post()

    def arrival(self, stream: int) -> asyncio.Future[Payload]:
        """The payload, the caller's until ``release``. Nobody else may ask for it."""
        future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        if stream in self._arrived:
            future.set_result(self._arrived.pop(stream))
        else:
            self._waiting[stream] = future
        return future

    def release(self, payload: Payload) -> None:
        """What was received in it is not needed any more."""
        self._taken -= 1
        if payload.nbytes == self._nbytes:
            self._free.append(payload)
        self._post()

    def _post(self) -> None:
        while self._expected and self._taken < self._ahead and not self._stopped:
            stream = self._expected.popleft()
            buffer = self._free.pop() if self._free else np.empty(self._nbytes, np.uint8)
            self._taken += 1
            self._posted.add(stream)
            bulk = self._bulk(stream)
            try:
                done = partial(self._came, stream, buffer)
                bulk.post(buffer.data, generation=self._generation, stream=stream, done=done)
            except P2PTrainError as error:
                self._on_error(bulk, error)
                return

    def _came(self, stream: int, buffer: Payload) -> None:
        """It is here: called by the connection."""
        if self._stopped:
            return
        self._posted.discard(stream)
        self._on_moved()
        waiting = self._waiting.pop(stream, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(buffer)
        else:
            self._arrived[stream] = buffer

    # ---------------------------------------------------------------------------------------------------------- sending

    def send(self, stream: int, payload: Payload) -> None:
        """Never blocks: the kernel gets it from the next turn of the loop on, for the caller has a thread to keep busy.

        ``payload`` is left unchanged until all is flushed.
        """
        bulk = self._bulk(stream)
        self._queues[bulk].append((stream, payload))
        asyncio.get_running_loop().call_soon(self._pump, bulk)

    def all_flushed(self) -> asyncio.Future[None]:
        """Done when the kernel has all that was sent."""
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_future()
        self._tell_flushed()
        return self._flushing

    def _bulk(self, stream: int) -> Connection:
        bulks = self.neighbour.bulks
        return bulks[stream % len(bulks)]

    def _drained(self, bulk: Connection) -> None:
        self._on_moved()
        self._pump(bulk)

    def _pump(self, bulk: Connection) -> None:
        """Hand over what may be sent, as long as the transport takes it at once (and says so within the call)."""
        while not self._stopped and not bulk.unsent_bytes:
            self._sending.pop(bulk, None)
            if not self._queues[bulk]:
                break
            stream, payload = self._queues[bulk].popleft()
            self._sending[bulk] = payload
            try:
                bulk.send_bulk(payload.data, generation=self._generation, stream=stream)
            except P2PTrainError as error:
                self._on_error(bulk, error)
                return
        self._tell_flushed()

    def _tell_flushed(self) -> None:
        if self._flushing is not None and not self._flushing.done() and self.flushed:
            self._flushing.set_result(None)

    def stop(self, failure: Callable[[], P2PTrainError]) -> None:
        """Touch no memory any more, whatever still arrives; who waits is told ``failure``."""
        self._stopped = True
        for bulk in self.neighbour.bulks:
            bulk.on_drained = None
            self._queues[bulk].clear()
        for future in (*self._waiting.values(), self._flushing):
            if future is not None and not future.done():
                future.set_exception(failure())
                future.exception()  # it may be that nobody waits any more
        self._waiting.clear()
