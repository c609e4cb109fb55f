"""The HTTP endpoint of a verifier: a listening socket, and limits on what unknown clients may cost.

``http_app`` answers requests in the running event loop; uvicorn speaks HTTP. ``Server.serve`` of uvicorn is not used,
because it would take over the signals of the process.

Limits: number of connections; time for headers, bodies and answers (a client that does not read is cut off); size of
headers and bodies. Nothing is logged, so no key is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server

from p2ptrain.core.errors import UserError
from p2ptrain.core.world import World
from roles.verifier.asking import TextService
from roles.verifier.http_app import HttpApp
from roles.verifier.http_requests import RETRY_AFTER_S, Problem
from wire.address import is_loopback
from wire.transport import TcpNetwork

MOST_CONNECTIONS = 256
MOST_HEADER_BYTES = 16 << 10
HEADERS_S = 10.0
"""Time limit for a connection's first request, and for the rest of a request's headers."""
KEEP_ALIVE_S = 15
"""Longest idle time of a connection between two requests."""
SEND_S = 30.0
"""Longest time in which a client reads nothing while 64 KiB wait for it."""
STOP_S = 1
"""Time limit for telling clients that the endpoint stops."""

KEY_CHARS = range(16, 513)
_MAKE_KEY = "make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE; chmod 600 FILE"


@asynccontextmanager
async def serving_http(
    service: TextService, host: str, port: int, key: str | None = None, *, world: World
) -> AsyncIterator[tuple[str, int]]:
    """Answer HTTP on ``host:port`` while the body runs. Yields the bound address. Port 0: any free port.

    At the end texts under way are ended and their clients told, within ``STOP_S``.

    Args:
        key: API key of clients, as from ``read_key``. None is allowed on the loopback only.

    Raises:
        UserError: the address cannot be used, or needs a key.
    """
    sock = await listening(host, port, key)
    address: tuple[str, int] = sock.getsockname()[:2]
    app = HttpApp(service, key=key, local=is_loopback(address[0]), clock=world.clock, random=world.random)
    config = Config(
        _timed(app),
        http=_Connection,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        forwarded_allow_ips="",
        server_header=False,
        date_header=False,
        workers=1,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
    )
    config.load()
    server = Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[sock])
    try:
        yield address
    finally:
        app.stop()
        await server.shutdown(sockets=[sock])
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # clients that do not read the last answer
        await app.settle(timeout_s=STOP_S)


async def listening(host: str, port: int, key: str | None) -> socket.socket:
    """A listening socket. Arguments and errors as of ``serving_http``."""
    # The kernel gives up a machine that no longer answers after a minute.
    sock = await TcpNetwork(user_timeout_s=60.0).bound(host, port, option="--http")
    if not is_loopback(sock.getsockname()[0]) and key is None:
        sock.close()
        raise UserError(
            f"HTTP on {host} needs an API key: without it, everyone who reaches the port can use the model",
            remedy="give --api-key-file FILE, or listen on 127.0.0.1",
        )
    return sock


async def check_place(host: str, port: int, key_file: Path | None) -> None:
    """Raise ``UserError`` if ``host:port`` cannot be served with the key in this file. None: without a key."""
    (await listening(host, port, None if key_file is None else read_key(key_file, lambda _: None))).close()


def read_key(path: Path, warn: Callable[[str], None]) -> str:
    """Read the API key, the only line of the file ``path``.

    Args:
        warn: called if other users of this machine may read the file.

    Raises:
        UserError: the file cannot be read or holds no key.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(4096)
    except OSError as error:
        raise UserError(f"cannot read the API key in {path}: {error.strerror}", remedy=_MAKE_KEY) from error
    key = content.decode("ascii", "replace").strip()
    if len(key) not in KEY_CHARS or not all("!" <= letter <= "~" for letter in key):
        least, most = KEY_CHARS[0], KEY_CHARS[-1]
        text = f"{path} has no valid API key: one line of {least} to {most} letters, digits and signs, no spaces"
        raise UserError(text, remedy=_MAKE_KEY)
    if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        warn(f"other users of this machine may read the API key in {path}: chmod 600 {path}")
    return key


class _Connection(H11Protocol):
    """uvicorn's connection with the deadlines that it lacks, and with JSON as its answer to what is no HTTP."""

    def __init__(self, *, app_state: dict[str, Any], **given: Any) -> None:
        super().__init__(app_state=app_state | {"connection": self}, **given)
        self._patience: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEADERS_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)
        self._lost.set()

    async def cut_off(self) -> None:
        """Abort, and raise ``CancelledError`` once the connection is lost: uvicorn must not send a second answer."""
        self.transport.abort()
        await self._lost.wait()
        raise asyncio.CancelledError

    @property
    def one_too_many(self) -> bool:
        return len(self.connections) >= MOST_CONNECTIONS

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

    def begins(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def ends(self) -> None:
        if not self.transport.is_closing():
            self._wait(KEEP_ALIVE_S + HEADERS_S)

    def _wait(self, time_s: float) -> None:
        self._patience = asyncio.get_running_loop().call_later(time_s, self.transport.abort)


_BUSY = Problem(
    503,
    f"{MOST_CONNECTIONS} clients are connected, the limit: try again later",
    code="overloaded",
    headers={"retry-after": str(RETRY_AFTER_S), "connection": "close"},
)


def _timed(app: ASGIApp) -> ASGIApp:
    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        connection: _Connection = scope["state"]["connection"]

        async def sent(message: Message) -> None:
            if connection.transport.is_closing():  # the client has left
                await connection.cut_off()
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError:
                await connection.cut_off()

        connection.begins()
        try:
            await (_BUSY.response() if connection.one_too_many else app)(scope, receive, sent)
        finally:
            connection.ends()

    return timed
