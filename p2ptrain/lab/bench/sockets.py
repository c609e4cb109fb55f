"""The limit that this machine's sockets set, reached by a program that does nothing else.

Plain sockets move the same bytes as the ring, between the same processes, at the same moment: each member sends to its
right and receives from its left. They do not use the connections of ``wire``, which are what is measured.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError
from p2ptrain.lab.ring_member import HOST
from wire.credentials import Credentials
from wire.transport import tune_for_bulk

SILENCE_S = 30.0
"""After so long without a byte the other process counts as gone. A loopback delivers in microseconds."""


@dataclass(slots=True)
class Traffic:
    """What one member moves in one exchange.

    Attributes:
        outgoing, incoming: memory to send from and to receive into; reused from its start if it is too short.
        send_bytes, receive_bytes: total amounts; 0: this direction is not used.
        piece_bytes: the most for one send or receive.
    """

    outgoing: memoryview
    incoming: memoryview
    send_bytes: int
    receive_bytes: int
    piece_bytes: int

    def next_out(self, sent: int) -> memoryview:
        return _piece(self.outgoing, sent, min(self.piece_bytes, self.send_bytes - sent))

    def next_in(self, received: int) -> memoryview:
        return _piece(self.incoming, received, min(self.piece_bytes, self.receive_bytes - received))


def _piece(memory: memoryview, position: int, most: int) -> memoryview:
    start = position % len(memory)
    return memory[start : start + most]


class SocketRing:
    """One member's two plain sockets: one to its right neighbour, one from its left.

    Args:
        server, client: TLS contexts; None: plain TCP.
    """

    def __init__(self, server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None) -> None:
        self._contexts = server, client
        self._listener = socket.create_server((HOST, 0))
        self._ends: list[_Plain] = []  # to the right, from the left

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def connect(self, right_port: int) -> None:
        """Dial the right neighbour and accept the left one; every member does so. Raises ``P2PTrainError``."""
        try:
            self._listener.settimeout(SILENCE_S)
            right = socket.create_connection((HOST, right_port), SILENCE_S)
            left, _ = self._listener.accept()
            server, client = self._contexts
            if server is None or client is None:
                self._ends = [_Plain(right), _Plain(left)]
            else:
                ends = [_Secure(right, client), _Secure(left, server, server_side=True)]
                self._ends = [*ends]
                _shake_hands(ends)
        except (OSError, ssl.SSLError) as error:
            raise _translated(error) from error

    def exchange(self, traffic: Traffic) -> None:
        """Send and receive all of it at the same time. Raises ``P2PTrainError`` if the other side is gone."""
        try:
            _exchange(self._ends[0], self._ends[1], traffic)
        except (OSError, ssl.SSLError) as error:
            raise _translated(error) from error

    def ping(self, first: bool, count: int) -> list[float]:
        """Round trips in seconds of one byte to the right and back from the left. In a ring of two it is a ping-pong.

        Args:
            first: this member begins and measures; the others only pass the byte on.
        """
        byte = memoryview(bytearray(1))
        send, receive = Traffic(byte, byte, 1, 0, 1), Traffic(byte, byte, 0, 1, 1)
        times = list[float]()
        for _ in range(count):
            began = time.perf_counter()
            for traffic in (send, receive) if first else (receive, send):
                self.exchange(traffic)
            times.append(time.perf_counter() - began)
        return times if first else []

    def close(self) -> None:
        for closing in (self._listener, *(end.plain for end in self._ends)):
            closing.close()


class _Plain:
    def __init__(self, plain: socket.socket) -> None:
        self.plain = plain
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tune_for_bulk(plain)  # the same settings as the ring's sockets
        plain.setblocking(False)

    def flush(self) -> bool:
        return True

    def send(self, piece: memoryview) -> int:
        try:
            return self.plain.send(piece)
        except BlockingIOError:
            return 0

    def receive(self, into: memoryview) -> int:
        try:
            count = self.plain.recv_into(into)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionResetError("the other process ended")
        return count


class _Secure(_Plain):
    """TLS over memory buffers: few, large system calls. It is a fifth faster than ssl's own sockets."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        super().__init__(plain)
        self._from_net, self._to_net = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_net, self._to_net, server_side=server_side)
        self._raw = memoryview(bytearray(256 << 10))
        self._unsent = memoryview(b"")

    def handshake(self) -> bool:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                if not self._fill():
                    return False
            else:
                self.flush()
                return True

    def flush(self) -> bool:
        while self._unsent or self._to_net.pending:
            self._unsent = self._unsent or memoryview(self._to_net.read())
            if not (count := super().send(self._unsent)):
                return False
            self._unsent = self._unsent[count:]
        return True

    def send(self, piece: memoryview) -> int:
        return self._tls.write(piece) if self.flush() else 0  # at most one piece is encrypted ahead of the kernel

    def receive(self, into: memoryview) -> int:
        # Decrypt waiting data first: ssl moves all waiting ciphertext in memory with each piece that is added.
        if count := self._pull(into):
            return count
        self._fill()
        return self._pull(into)

    def _fill(self) -> int:
        return self._from_net.write(self._raw[: super().receive(self._raw)])

    def _pull(self, into: memoryview) -> int:
        count = 0
        try:
            while count < len(into):
                count += int(self._tls.read(len(into) - count, into[count:]))
        except ssl.SSLWantReadError:
            pass
        return count


def _shake_hands(ends: Sequence[_Secure]) -> None:
    waiting = list(ends)
    while waiting := [end for end in waiting if not end.handshake()]:
        _wait([end.plain for end in waiting], [])


def _exchange(right: _Plain, left: _Plain, traffic: Traffic) -> None:
    sent = received = 0
    while not right.flush() or sent < traffic.send_bytes or received < traffic.receive_bytes:
        moved = 0
        if sent < traffic.send_bytes:
            moved += (more := right.send(traffic.next_out(sent)))
            sent += more
        if received < traffic.receive_bytes:
            moved += (more := left.receive(traffic.next_in(received)))
            received += more
        if not moved:
            writing = sent < traffic.send_bytes or not right.flush()
            _wait([left.plain] * (received < traffic.receive_bytes), [right.plain] * writing)


def _wait(readable: Sequence[socket.socket], writable: Sequence[socket.socket]) -> None:
    """Wait until a socket is ready. Raises ``TimeoutError`` after ``SILENCE_S``."""
    if (readable or writable) and not any(select.select(readable, writable, [], SILENCE_S)):
        raise TimeoutError


def _translated(error: OSError) -> P2PTrainError:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(f"the sockets moved no data for {SILENCE_S:.0f} s")
    return ConnectionLost(f"a plain socket of the benchmark ended: {error}")


def peer_id(rank: int) -> str:
    return f"member-{rank}"


def make_credentials(root: Path, peers: Sequence[str]) -> list[str]:
    """Make a directory with credentials for each peer, under a new CA. The CA's key is not kept. Raises
    ``StorageError``."""
    from wire import credentials

    disk, now = RealDisk(), time.time()
    ca_key, ca_pem = credentials.new_authority("p2ptrain bench", now=now)
    for peer in peers:
        key_pem, csr_der = credentials.new_key_and_request(peer)
        _, key = credentials.request_of_untrusted(csr_der)
        der = credentials.sign_certificate(ca_key, ca_pem, key, peer_id=peer, roles=["worker"], now=now)
        Credentials(root / peer, ca_pem, credentials.pem_of(der), key_pem).save(disk)
    return [str(root / peer) for peer in peers]
