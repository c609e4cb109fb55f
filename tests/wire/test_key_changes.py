"""A TLS peer that changes its keys without end and does not read the answers; OpenSSL itself, for Python's has no word
for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import socket

import pytest
import uvloop

from p2ptrain.core.errors import ConnectionLost
from tests.wire.doubles import credentials, play
from wire.connection import Connection
from wire.tls import ANSWERS_BYTES, TlsNetwork
from wire.transport import TcpNetwork

HOST = "127.0.0.1"
MANY = 200_000
UPDATE_REQUESTED = 1  # SSL_KEY_UPDATE_REQUESTED
KEY_UPDATE_BYTES = 27  # a record's header, type and tag around five bytes


def libssl() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("ssl")
    library = ctypes.CDLL(name) if name else None
    return library if library is not None and hasattr(library, "SSL_key_update") else None


OPENSSL = libssl()


def change_keys(port: int, times: int) -> int:
    """Shake hands without a certificate, then change keys; how often, until the other side has had enough."""
    library = OPENSSL
    assert library is not None
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
    session = ctypes.c_void_p(library.SSL_new(context))
    try:
        with socket.create_connection((HOST, port)) as sock:
            library.SSL_set_fd(session, sock.fileno())
            assert library.SSL_connect(session) == 1
            for done in range(times):
                if library.SSL_key_update(session, UPDATE_REQUESTED) != 1 or library.SSL_do_handshake(session) != 1:
                    return done
            return times
    finally:
        library.SSL_free(session)
        library.SSL_CTX_free(context)


@pytest.mark.skipif(OPENSSL is None, reason="no libssl to load")
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("times", [ANSWERS_BYTES // KEY_UPDATE_BYTES - 1, MANY])
def test_a_peer_that_changes_its_keys_again_and_again_is_cut_off(times, loop_factory):
    async def scenario() -> None:
        network = TlsNetwork(TcpNetwork(), credentials("seed1", "seed"), require_client_certificate=False)
        accepted: list[Connection] = []
        listener = await network.listen(HOST, 0, lambda: Connection(accepted.append))
        async with asyncio.timeout(30):
            done = await asyncio.to_thread(change_keys, listener.address[1], times)
            await accepted[0].closed.wait()
        assert isinstance(accepted[0].close_cause, ConnectionLost)
        if times == MANY:
            assert done < MANY
            assert "sent too many TLS key updates" in accepted[0].close_cause.message
        else:
            assert done == times
            assert "TLS key updates" not in accepted[0].close_cause.message
        await listener.close()

    play(scenario(), loop_factory=loop_factory)
