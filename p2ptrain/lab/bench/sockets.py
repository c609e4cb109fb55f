"""The limit that this machine's sockets set, reached by a program that does nothing else.

Plain sockets move the same bytes as the ring, between the same processes, at the same moment: each member sends to its
right and receives from its left. They do not use the connections of ``wire``, which are what is measured.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from p2ptrain.core.disk import RealDisk
from p2ptrain.lab.ring_member import HOST
from wire.credentials import Credentials
from wire.transport import tune_for_bulk

PIECE_BYTES = 512 << 10
"""Of sends and receives beside an all-reduce. No other size was faster."""
SILENCE_S = 30.0
"""After so long without a byte the other process counts as gone. A loopback delivers in microseconds."""


class SocketRing:
    """One member's two plain sockets: one to its right neighbour, one from its left. ``credentials``: for TLS; None:
    plain TCP."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._listener = socket.create_server((HOST, 0))
        self._listener.settimeout(SILENCE_S)
        self._right = self._left = self._listener  # once connected: others

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def connect(self, right_port: int) -> None:
        """Dial the right neighbour and accept the left one; every member does so. Raises ``OSError``."""
        right = socket.create_connection((HOST, right_port), SILENCE_S)
        left, _ = self._listener.accept()
        if self._credentials is not None:
            server, client = self._credentials.server_context(), self._credentials.client_context()
            with ThreadPoolExecutor(1) as thread:  # each side of a handshake waits for the other one
                accepted = thread.submit(server.wrap_socket, left, server_side=True)
                right, left = client.wrap_socket(right), accepted.result()
        self._right, self._left = _tuned(right), _tuned(left)

    def exchange(
        self, outgoing: memoryview, incoming: memoryview, *, send_bytes: int, receive_bytes: int, piece_bytes: int
    ) -> None:
        """Send and receive so many bytes at the same time, ``piece_bytes`` at once. Memory that is too short is used
        again from its start. Raises ``OSError`` if the other side is gone."""
        sent = received = 0
        while sent < send_bytes or received < receive_bytes:
            more_out = _move(self._right.send, outgoing, sent, min(piece_bytes, send_bytes - sent))
            more_in = _move(self._left.recv_into, incoming, received, min(piece_bytes, receive_bytes - received))
            sent, received = sent + more_out, received + more_in
            if not more_out and not more_in:
                _wait([self._left] * (received < receive_bytes), [self._right] * (sent < send_bytes))

    def ping(self, first: bool, count: int) -> list[float]:
        """Round trips in seconds of one byte to the right and back from the left. In a ring of two it is a ping-pong.

        Args:
            first: this member begins and measures; the others only pass the byte on.
        """
        byte, times = memoryview(bytearray(1)), list[float]()
        for _ in range(count):
            began = time.perf_counter()
            for send_bytes in (1, 0) if first else (0, 1):
                self.exchange(byte, byte, send_bytes=send_bytes, receive_bytes=1 - send_bytes, piece_bytes=1)
            times.append(time.perf_counter() - began)
        return times if first else []


def _tuned(plain: socket.socket) -> socket.socket:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tune_for_bulk(plain)  # the same settings as the ring's sockets
    plain.setblocking(False)
    return plain


def _move(call: Callable[[memoryview], int], memory: memoryview, moved: int, nbytes: int) -> int:
    """Send or receive a piece, as much of it as is possible now. Returns the number of its bytes."""
    if not nbytes:
        return 0
    start = moved % len(memory)
    try:
        count = call(memory[start : start + nbytes])
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return 0
    if not count:
        raise ConnectionResetError("the other process ended")
    return count


def _wait(readable: Sequence[socket.socket], writable: Sequence[socket.socket]) -> None:
    """Wait until a socket is ready. Raises ``TimeoutError`` after ``SILENCE_S``."""
    if not any(select.select(readable, writable, [], SILENCE_S)):
        raise TimeoutError(f"no data for {SILENCE_S:.0f} s")


def peer_id(rank: int) -> str:
    return f"member-{rank}"


def make_credentials(root: Path, peers: Iterable[str]) -> None:
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
