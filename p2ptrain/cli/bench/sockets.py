"""The limit that this machine's sockets set, reached by a program that does nothing else.

A ring is compared with plain sockets that move the same bytes between the same processes at the same moment: each
member sends to its right and receives from its left. Nothing of the wire's own code is used: it is what is measured.
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
from wire.credentials import Credentials
from wire.transport import tune_for_bulk

HOST = "127.0.0.1"
SILENCE_S = 30.0
"""Without one byte for so long the other process counts as gone; a loopback delivers in microseconds."""


@dataclass(slots=True)
class Traffic:
    """What one member moves in one exchange.

    Attributes:
        outgoing, incoming: memory to send from and to receive into, used again from its start where it is shorter.
        send_bytes, receive_bytes: how much; 0 for a direction that is not used.
        piece_bytes: of one send or receive, at most.
    """

    outgoing: memoryview
    incoming: memoryview
    send_bytes: int
    receive_bytes: int
    piece_bytes: int

    def next_out(self, sent: int) -> memoryview:
        """What to send after ``sent`` bytes."""
        return _piece(self.outgoing, sent, min(self.piece_bytes, self.send_bytes - sent))

    def next_in(self, received: int) -> memoryview:
        """Where the bytes after ``received`` go."""
        return _piece(self.incoming, received, min(self.piece_bytes, self.receive_bytes - received))


def _piece(memory: memoryview, position: int, most: int) -> memoryview:
    start = position % len(memory)
    return memory[start : start + most]


class SocketRing:
    """One member's two plain sockets: one to its right neighbour, one from its left.

    Args:
        server, client: contexts for TLS on both; None for plain TCP.
    """

    def __init__(self, server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None) -> None:
        self._contexts = server, client
        self._listener = socket.create_server((HOST, 0))
        self._right: socket.socket | None = None
        self._left: socket.socket | None = None
        self._secure: tuple[_Secure, _Secure] | None = None

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def connect(self, right_port: int) -> None:
        """Dial the right neighbour and accept the left one; every member does. Raises ``P2PTrainError``."""
        try:
            self._pair(right_port)
            server, client = self._contexts
            if server is not None and client is not None:
                assert self._right is not None
                assert self._left is not None
                right, left = _Secure(self._right, client), _Secure(self._left, server, server_side=True)
                _shake_hands(right, left)
                self._secure = right, left
        except (OSError, ssl.SSLError) as error:
            raise _translated(error) from error

    def exchange(self, traffic: Traffic) -> None:
        """Send and receive at the same time, all of it. Raises ``P2PTrainError`` where the other side is gone."""
        assert self._right is not None
        assert self._left is not None
        try:
            if self._secure is not None:
                _memory_tls(*self._secure, traffic)
            else:
                _poll_loop(self._right, self._left, traffic)
        except (OSError, ssl.SSLError) as error:
            raise _translated(error) from error

    def ping(self, first: bool, count: int) -> list[float]:
        """Round trips in seconds of one byte to the right and back from the left: of a ring of two, a ping-pong.

        Args:
            first: this member begins and measures; every other one only passes on what comes.
        """
        assert self._right is not None
        assert self._left is not None
        times, byte = list[float](), memoryview(bytearray(1))
        try:
            for _ in range(count):
                began = time.perf_counter()
                if first:
                    self._send_byte(byte)
                self._receive_byte(byte)
                if not first:
                    self._send_byte(byte)
                times.append(time.perf_counter() - began)
        except (OSError, ssl.SSLError) as error:
            raise _translated(error) from error
        return times if first else []

    def close(self) -> None:
        for end in (self._listener, self._right, self._left):
            if end is not None:
                end.close()

    def _pair(self, right_port: int) -> None:
        self._listener.settimeout(SILENCE_S)
        self._right = socket.create_connection((HOST, right_port), SILENCE_S)
        self._left, _ = self._listener.accept()
        for end in (self._right, self._left):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tune_for_bulk(end)  # as the ring's own are: the limit is that of the sockets, not of their settings
            end.setblocking(False)

    def _send_byte(self, byte: memoryview) -> None:
        if self._secure is not None:
            self._secure[0].push(byte)
            while self._secure[0].send():
                pass
        else:
            assert self._right is not None
            self._right.send(byte)  # one byte always fits: it was answered before the next one goes

    def _receive_byte(self, byte: memoryview) -> None:
        assert self._left is not None
        while not self._received_byte(byte):
            _wait(self._left, None)

    def _received_byte(self, byte: memoryview) -> int:
        assert self._left is not None
        if self._secure is None:
            return _receive(self._left, byte)
        self._secure[1].receive()  # it may have come with the end of the handshake already
        return self._secure[1].pull(byte)


# ------------------------------------------------------------------------------------------------------------ plain TCP


def _poll_loop(right: socket.socket, left: socket.socket, traffic: Traffic) -> None:
    """One thread: send what the kernel takes, take what it has, and sleep when it has nothing to do."""
    sent = received = 0
    while sent < traffic.send_bytes or received < traffic.receive_bytes:
        moved = 0
        if sent < traffic.send_bytes:
            moved += (more := _send(right, traffic.next_out(sent)))
            sent += more
        if received < traffic.receive_bytes:
            moved += (more := _receive(left, traffic.next_in(received)))
            received += more
        if not moved:
            _wait(left if received < traffic.receive_bytes else None, right if sent < traffic.send_bytes else None)


def _send(right: socket.socket, piece: memoryview) -> int:
    try:
        return right.send(piece)
    except (BlockingIOError, ssl.SSLWantWriteError):
        return 0


def _receive(left: socket.socket, into: memoryview) -> int:
    try:
        return _received(left.recv_into(into))
    except (BlockingIOError, ssl.SSLWantReadError):
        return 0


def _received(count: int) -> int:
    if not count:
        raise ConnectionResetError("the other process ended")
    return count


def _wait(readable: socket.socket | None, writable: socket.socket | None) -> None:
    """Sleep until either can go on. Raises ``TimeoutError`` after ``SILENCE_S``."""
    ready = select.select([readable] if readable else [], [writable] if writable else [], [], SILENCE_S)
    if not any(ready):
        raise TimeoutError


# ------------------------------------------------------------------------------------------------------------------ TLS


class _Secure:
    """TLS over a socket by way of memory: few, large system calls, whatever the size of a record."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.plain = plain
        self._from_net, self._to_net = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_net, self._to_net, server_side=server_side)
        self._raw = memoryview(bytearray(256 << 10))
        self._unsent = memoryview(b"")

    def handshake(self) -> bool:
        """One step of it; whether it has ended."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    @property
    def idle(self) -> bool:
        """Whether all that was written has gone to the kernel."""
        return not self._unsent and not self._to_net.pending

    def push(self, piece: memoryview) -> int:
        """Encrypt; it is sent by ``send``."""
        return self._tls.write(piece)

    def send(self) -> int:
        """Bytes that the kernel took."""
        if not self._unsent:
            self._unsent = memoryview(self._to_net.read())
        if not self._unsent:
            return 0
        count = _send(self.plain, self._unsent)
        self._unsent = self._unsent[count:]
        return count

    def receive(self) -> int:
        """Bytes that the kernel had."""
        count = _receive(self.plain, self._raw)
        self._from_net.write(self._raw[:count])
        return count

    def pull(self, into: memoryview) -> int:
        """Decrypted bytes into ``into``; fewer where no more are here."""
        count = 0
        try:
            while count < len(into):
                more = self._tls.read(len(into) - count, into[count:])
                count += _received(int(more))
        except ssl.SSLWantReadError:
            pass
        return count


def _shake_hands(right: _Secure, left: _Secure) -> None:
    waiting = [right, left]
    while waiting or not (right.idle and left.idle):
        waiting = [end for end in waiting if not end.handshake()]
        if right.send() + left.send() + sum(end.receive() for end in waiting):
            continue
        reading = [end.plain for end in waiting]
        writing = [end.plain for end in (right, left) if not end.idle]
        if (reading or writing) and not any(select.select(reading, writing, [], SILENCE_S)):
            raise TimeoutError


def _memory_tls(right: _Secure, left: _Secure, traffic: Traffic) -> None:
    """One thread, ciphertext in memory: at most one piece is encrypted ahead of the kernel."""
    sent = received = 0
    while sent < traffic.send_bytes or received < traffic.receive_bytes or not right.idle:
        moved = 0
        if sent < traffic.send_bytes and right.idle:
            moved += (more := right.push(traffic.next_out(sent)))
            sent += more
        moved += right.send()
        if received < traffic.receive_bytes:
            # What is here goes first: a heap of ciphertext would be moved in memory with every piece that joins it.
            more = left.pull(traffic.next_in(received))
            if not more:
                moved += left.receive()
                more = left.pull(traffic.next_in(received))
            moved += more
            received += more
        if not moved:
            _wait(left.plain if received < traffic.receive_bytes else None, None if right.idle else right.plain)


def _translated(error: OSError) -> P2PTrainError:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(f"the sockets moved nothing for {SILENCE_S:.0f} s")
    return ConnectionLost(f"a plain socket of the benchmark ended: {error}")


def peer_id(rank: int) -> str:
    """What the member of this rank is called, in the ring and in its certificate."""
    return f"member-{rank}"


def make_credentials(root: Path, peers: Sequence[str]) -> list[str]:
    """A directory with credentials for each peer, under one new CA whose key is not kept. Raises ``StorageError``."""
    from wire import credentials

    disk, now = RealDisk(), time.time()
    ca_key, ca_pem = credentials.new_authority("p2ptrain bench", now=now)
    for peer in peers:
        key_pem, csr_der = credentials.new_key_and_request(peer)
        _, key = credentials.request_of_untrusted(csr_der)
        der = credentials.sign_certificate(ca_key, ca_pem, key, peer_id=peer, roles=["worker"], now=now)
        Credentials(root / peer, ca_pem, credentials.pem_of(der), key_pem).save(disk)
    return [str(root / peer) for peer in peers]
