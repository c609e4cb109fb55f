"""An HTTP server with limits on what unknown clients may cost; uvicorn speaks HTTP in the running event loop.

``Server.serve`` of uvicorn is not used, because it would take over the signals of the process.

Limits: number of connections; time for headers, bodies and answers (a client that does not read is cut off); size of
headers, number of chunks, messages of WebSockets. Nothing is logged, so no key is.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server

from roles.http.answers import CLOSE, JsonApp, Problem

MOST_CONNECTIONS = 256
MOST_HEADER_BYTES = 16 << 10
MOST_MESSAGE_BYTES = 4 << 10
"""Largest message of a WebSocket's client, which has nothing to say."""
MOST_CHUNKS = 4096
"""Most chunks of a body. Each takes some 10 microseconds, however small it is."""
HEADERS_S = 10.0
"""Time limit for a connection's first request, and for the rest of a request's headers."""
KEEP_ALIVE_S = 15
"""Longest idle time of a connection between two requests."""
SEND_S = 30.0
"""Longest time in which a client reads nothing while 64 KiB wait for it."""
STOP_S = 1
"""Time limit for telling clients that the endpoint stops."""


@asynccontextmanager
async def serving(
    app: JsonApp, sock: socket.socket, *, tls: ssl.SSLContext | None = None, websockets: bool = False
) -> AsyncIterator[None]:
    """Answer HTTP on the listening ``sock`` while the body runs. At the end ``app`` stops and has ``STOP_S`` for its
    last words, and ``sock`` is closed."""
    config = Config(
        _limit_times(app),
        http=_Connection,
        # Its keepalive detects readers that are gone; it compresses nothing, which would cost memory for each reader.
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=MOST_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    config.load()
    server = Server(config)
    server.lifespan = config.lifespan_class(config)
    # As ``startup`` of uvicorn does, but with a deadline for the handshake of TLS.
    listener = await asyncio.get_running_loop().create_server(
        lambda: _Connection(config=config, server_state=server.server_state, app_state={}),
        sock=sock,
        ssl=tls,
        ssl_handshake_timeout=HEADERS_S if tls is not None else None,
    )
    server.servers = [listener]
    try:
        yield
    finally:
        app.stop()
        await server.shutdown(sockets=[sock])
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # clients that do not read the last answer


class _Parser(h11.Connection):
    """Refuses requests that only an attacker sends."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            # A proxy in front may obey the other one, and see another request in the body.
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("it has both Content-Length and Transfer-Encoding")
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._chunks += 1
            if self._chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError(f"its body has more than {MOST_CHUNKS} chunks: send a Content-Length")
        return event


class _Connection(H11Protocol):
    """uvicorn's connection with the deadlines that it lacks, and with JSON as its answer to what is no HTTP."""

    def __init__(self, *, app_state: dict[str, Any], **options: Any) -> None:
        super().__init__(app_state=app_state | {"connection": self}, **options)
        self.conn = _Parser(h11.SERVER, MOST_HEADER_BYTES)
        self._patience: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.limit(HEADERS_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit(None)
        super().connection_lost(exc)
        self._lost.set()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        self._lost.set()  # another protocol has the connection from here on

    async def cut_off(self) -> None:
        """Abort, and raise ``CancelledError`` once the connection is lost: uvicorn must not send a second answer."""
        self.transport.abort()
        await self._lost.wait()
        raise asyncio.CancelledError

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request. uvicorn calls this while it handles the error of h11."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else the request's answer has begun
            status, why = error.error_status_hint, str(error).partition(": bytearray")[0]
            code = "request_too_large" if status == 431 else "invalid_http"
            problem = Problem(status, f"this is not a valid HTTP request: {why}", code=code).response()
            headers, reason = [*problem.raw_headers, (b"connection", b"close")], HTTPStatus(status).phrase.encode()
            body = h11.Data(data=bytes(problem.body))
            for event in (h11.Response(status_code=status, headers=headers, reason=reason), body, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def limit(self, time_s: float | None) -> None:
        """Abort the connection after this time, unless another one is given before."""
        if self._patience is not None:
            self._patience.cancel()
        wait = asyncio.get_running_loop().call_later
        self._patience = None if time_s is None else wait(time_s, self.transport.abort)


def _limit_times(app: ASGIApp) -> ASGIApp:
    text = f"{MOST_CONNECTIONS} clients are connected, the limit: try again later"
    busy = Problem(503, text, code="overloaded", headers=CLOSE)

    async def answer_in_time(scope: Scope, receive: Receive, send: Send) -> None:
        connection: _Connection = scope["state"]["connection"]

        async def send_in_time(message: Message) -> None:
            if connection.transport.is_closing():  # the client has left
                await connection.cut_off()
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError:
                await connection.cut_off()

        connection.limit(None)
        cycle = connection.cycle
        try:
            await (busy.response() if len(connection.connections) >= MOST_CONNECTIONS else app)(
                scope, receive, send_in_time
            )
        finally:
            if connection.cycle is cycle and not connection.transport.is_closing():  # no next request is under way
                connection.limit(KEEP_ALIVE_S + HEADERS_S)

    return answer_in_time
