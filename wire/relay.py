"""The relay of circuits (``wire.circuits``): passes bytes on between two ends, with bounded memory and bandwidth."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from wire.codec import encode
from wire.connection import Connection, last_word
from wire.frame import encode_control
from wire.messages import CircuitJoined, JoinCircuit, Message, RefusalCode, SocketAddress

IDLE_S = 3600.0
"""A relayed circuit that carried nothing for so long ends. The kernel's keepalive ends those of dead machines."""
PIECE_BYTES = 64 << 10
"""What a relay holds of each direction of a circuit."""
BURST_S = 0.05
"""What a relay may send at once after a pause, in seconds of its limit: more than a loop is late."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a process does for others as a relay.

    Attributes:
        bytes_per_s: of all circuits together, which share it fairly; 0: no limit.
        circuits, circuits_per_peer: most relayed circuits at a time; 0: this process is no relay.
    """

    bytes_per_s: float = 0.0
    circuits: int = 256
    circuits_per_peer: int = 64


def side_taken(join: JoinCircuit) -> Refused:
    return Refused(RefusalCode.DUPLICATE_PEER, f"the circuit has a {join.side} already")


def remote_of(connection: Connection) -> SocketAddress:
    """The other side's address. Raises ``ConnectionLost`` if the connection was reset already."""
    host, port = connection.ends.remote
    if not port:
        raise ConnectionLost("the connection was reset")
    return SocketAddress(host, port)


class RelayedCircuit:
    """A circuit at its relay, from the seed's order to its end.

    Args:
        on_change: called with this circuit when no end may join any more, and whether it is over.
    """

    def __init__(
        self,
        pace: RelayPace,
        peers: tuple[str, ...],
        lives_s: float,
        on_change: Callable[[RelayedCircuit, bool], None],
    ) -> None:
        self.peers, self.pace = peers, pace
        self.nbytes = 0  # passed on
        self.served_bytes = 0.0  # on the clock of the pace
        self._on_change = on_change
        self._ends: dict[str, _RelayEnd] = {}
        self._loop = asyncio.get_running_loop()
        late = DeadlineExceeded(f"the other end did not come to the relay within {lives_s:g} s")
        self._timer = self._loop.call_later(lives_s, self.end, late)

    @property
    def is_used(self) -> bool:
        return bool(self._ends)

    def enter(self, join: JoinCircuit, connection: Connection) -> None:
        """Take the connection of an end. Raises ``Refused``, ``ConnectionLost``."""
        if join.side in self._ends:
            raise side_taken(join)
        self._ends[join.side] = end = _RelayEnd(self, join, connection)
        others = [other for other in self._ends.values() if other is not end]
        for other in others:
            self._on_change(self, False)
            self._watch_idle(-1)
            end.begin(other)
            other.begin(end)

    def end(self, error: P2PTrainError | None = None) -> None:
        """Close both ends. One that waits for the other is told ``error``."""
        self.retire()
        for end in self._ends.values():
            end.close(error)

    def retire(self) -> None:
        """Count it no more: its ends close."""
        self._timer.cancel()
        self._on_change(self, True)

    def _watch_idle(self, before: int) -> None:
        self._timer.cancel()
        if self.nbytes == before:
            self.end()
        else:
            self._timer = self._loop.call_later(IDLE_S, self._watch_idle, self.nbytes)


class _RelayEnd(asyncio.BufferedProtocol):
    """Reads from one end of a circuit and writes to the other one, as fast as that takes it."""

    def __init__(self, circuit: RelayedCircuit, join: JoinCircuit, connection: Connection) -> None:
        self.circuit = circuit
        self._addresses = [remote_of(connection), *join.addresses]
        self._transport = connection.detach()
        self._transport.set_protocol(self)
        self._other: _RelayEnd | None = None
        self._buffer = bytearray()
        self._is_reading, self._eof = True, False
        self._waits = False  # for its turn

    def begin(self, other: _RelayEnd) -> None:
        self._other = other
        self._write(CircuitJoined(other._addresses))
        self._steer()

    def close(self, error: P2PTrainError | None) -> None:
        if self._other is None and error is not None and not self._transport.is_closing():
            self._write(last_word(Refused(RefusalCode.UNREACHABLE, error.message, remedy=error.remedy)))
            self._transport.close()
        else:
            self._transport.abort()

    def take_turn(self) -> None:
        self._waits = False
        self._steer()

    def _steer(self) -> None:
        """Read if it is this end's turn, and all that was read before is with the kernel."""
        wanted = self._other is not None and not self._waits and not self._other._transport.get_write_buffer_size()
        if wanted != self._is_reading:
            self._is_reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _write(self, message: Message) -> None:
        self._transport.write(encode_control(message.KIND, encode(message), generation=0, stream=0))

    # What the transport calls.

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._buffer:
            self._buffer = bytearray(self.circuit.pace.piece_bytes)
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        if self._other is None:
            self.circuit.end(ProtocolError("an end of the circuit sent bytes before the other one was there"))
            return
        self._other._transport.write(memoryview(self._buffer)[:nbytes])
        self.circuit.nbytes += nbytes
        self._waits = not self.circuit.pace.allow(self.circuit, self.take_turn, nbytes)
        self._steer()

    def eof_received(self) -> bool:
        self._eof = True
        if self._other is None:
            self.circuit.end()
        elif self._other._eof:  # both directions have ended
            self.circuit.retire()
            self._transport.close()
            self._other._transport.close()
        else:
            self._other._transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is None or not (self._eof and self._other._eof):
            self.circuit.end(ConnectionLost("the other end left"))

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other._steer()


class RelayPace:
    """Shares so many bytes per second among the circuits of a relay, in both directions; 0: no limit.

    While the limit is reached, the circuit that was served least is read next, one piece (start-time fair queueing,
    Goyal et al., 1996). A circuit that was idle does not get back what it did not use.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.piece_bytes = min(PIECE_BYTES, max(1 << 10, round(bytes_per_s / 100))) if bytes_per_s else PIECE_BYTES
        self._paid_at = 0.0  # when the limit allows what was read so far
        self._served_bytes = 0.0  # by the circuit that was served last
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def allow(self, circuit: RelayedCircuit, take_turn: Callable[[], None], nbytes: int) -> bool:
        """Account for what an end read. Return whether it may read on; if not, ``take_turn`` is called in its turn."""
        if not self._bytes_per_s:
            return True
        now = asyncio.get_running_loop().time()
        self._paid_at = max(self._paid_at, now - BURST_S) + nbytes / self._bytes_per_s
        circuit.served_bytes = max(circuit.served_bytes, self._served_bytes) + nbytes
        if self._paid_at <= now and not self._waiting:
            self._served_bytes = circuit.served_bytes
            return True
        heapq.heappush(self._waiting, (circuit.served_bytes, next(self._order), take_turn))
        self._serve_later(now)
        return False

    def _serve_later(self, now: float) -> None:
        if self._timer is None and self._waiting:
            # At least a turn of the loop, in which the end served before can read.
            self._timer = asyncio.get_running_loop().call_at(max(self._paid_at, now + 0.001), self._serve)

    def _serve(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        if self._paid_at <= now + 1e-6:
            self._served_bytes, _, take_turn = heapq.heappop(self._waiting)
            take_turn()
        self._serve_later(now)
