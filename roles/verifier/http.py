"""The HTTP endpoint of a verifier: a listening socket, and what strangers may cost there.

``serving_http`` is all that others need; who has something to load first takes the place (``place_at``) before that,
and answers there (``serving_at``) after it. Requests are answered by ``http_app`` in the running event loop; uvicorn
speaks HTTP. Its ``Server.serve`` is not used: that would take the signals, which belong to whoever runs the process,
and look every 0.1 s whether it shall end.

Bounds: connections in number; headers, bodies and answers in time (a client that does not read is cut off); headers and
bodies in bytes. Nothing is logged, so no key is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server, ServerState

from p2ptrain.core.errors import UserError
from p2ptrain.core.world import World
from roles.verifier.asking import TextService
from roles.verifier.http_app import HttpApp
from roles.verifier.http_problems import RETRY_AFTER_S, Problem, json_bytes
from wire.address import is_loopback
from wire.transport import TcpNetwork

MOST_CONNECTIONS = 256
MOST_HEADER_BYTES = 16 << 10
SLICE_BYTES = MOST_HEADER_BYTES + 1
"""Of what comes is looked at in one turn of the loop: bytes can be such that each costs microseconds, and a socket
hands over 256 KiB. It is more than headers may be, so it holds whole ones, or too large ones."""
HEADERS_S = 10.0
"""Within which a connection's first request is here, and the rest of a request's headers."""
KEEP_ALIVE_S = 15
"""How long a connection may be idle between two requests."""
SEND_S = 30.0
"""How long a client may leave unread what it is sent, once 64 KiB wait."""
STOP_S = 1
"""Within which clients hear that all ends."""
UNACKNOWLEDGED_S = 60.0
"""After which the kernel gives a machine up that answers no more."""

KEY_CHARS = range(16, 513)
_NOT_YET = Problem(
    503,
    "this verifier waits for workers that hold its model: ask again later; its terminal says what it lacks",
    code="model_unreachable",
    headers={"retry-after": str(RETRY_AFTER_S)},
)
_MAKE_KEY = "make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE; chmod 600 FILE"


@asynccontextmanager
async def serving_http(
    service: TextService, host: str, port: int, key: str | None = None, *, world: World
) -> AsyncIterator[tuple[str, int]]:
    """Answer HTTP on ``host:port`` (port 0: any free one) while the body runs. Yields the address that was bound.

    In the end texts under way are ended, and their clients told; that takes ``STOP_S`` at most.

    Args:
        key: what clients must show, as of ``read_key``. None is for the loopback only.

    Raises:
        UserError: it cannot listen there, or may not without a key.
    """
    place = await place_at(host, port, key)
    async with serving_at(service, place, world=world):
        yield place.address


@dataclass(frozen=True, slots=True)
class Place:
    """Where an endpoint is to be. It listens: who connects waits until it is served, or closed.

    Attributes:
        address: that was bound. key: that clients must show.
    """

    sock: socket.socket
    address: tuple[str, int]
    key: str | None

    def close(self) -> None:
        """May be called again."""
        self.sock.close()


async def place_at(host: str, port: int, key: str | None = None) -> Place:
    """Arguments and errors as of ``serving_http``."""
    sock = await TcpNetwork(user_timeout_s=UNACKNOWLEDGED_S).bound(host, port, option="--http")
    address: tuple[str, int] = sock.getsockname()[:2]
    if not is_loopback(address[0]) and key is None:
        sock.close()
        raise UserError(
            f"HTTP on {host} needs a key: whoever reaches that port could use the model",
            remedy="give --api-key-file FILE, or listen on 127.0.0.1",
        )
    return Place(sock, address, key)


async def check_place(host: str, port: int, key_file: Path | None) -> None:
    """Raise ``UserError`` where nothing could be answered at ``host:port`` with the key in this file; None: without."""
    (await place_at(host, port, None if key_file is None else read_key(key_file, lambda _: None))).close()


@asynccontextmanager
async def serving_at(service: TextService, place: Place, *, world: World) -> AsyncIterator[None]:
    """Answer at ``place`` while the body runs, and close it. As ``serving_http``."""
    local = is_loopback(place.address[0])
    app = HttpApp(service, key=place.key, local=local, clock=world.clock, random=world.random)
    try:
        async with _answering(app, place.sock, app.stop):
            yield
    finally:
        await app.settle(timeout_s=STOP_S)


@asynccontextmanager
async def not_yet_at(place: Place) -> AsyncIterator[None]:
    """Tell whoever asks at ``place`` that the model is waited for, while the body runs. The place stays."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await _NOT_YET.response()(scope, receive, send)

    async with _answering(app, place.sock.dup(), lambda: None):
        yield


@asynccontextmanager
async def _answering(app: ASGIApp, sock: socket.socket, stop: Callable[[], None]) -> AsyncIterator[None]:
    """``app`` answers at ``sock`` while the body runs; then ``stop`` is called, connections end, and it is closed."""
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
        yield
    finally:
        stop()
        await server.shutdown(sockets=[sock])
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # of clients that do not read how it ended


def read_key(path: Path, warn: Callable[[str], None]) -> str:
    """The API key in the file ``path``: its only line.

    Args:
        warn: told where other users of this machine may read it.

    Raises:
        UserError: there is none, or it is no key.
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
        text = f"{path} holds no API key: one line of {least} to {most} letters, digits and signs, no spaces"
        raise UserError(text, remedy=_MAKE_KEY)
    if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        warn(f"other users of this machine may read the API key in {path}: chmod 600 {path}")
    return key


class _Connection(H11Protocol):
    """uvicorn's, with the deadlines that it lacks. Relied on: what its constructor takes, and what asyncio calls.

    A request is under way from the end of its headers to the end of its answer.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state | {"connection": self}, _loop)
        self._all = server_state.connections
        self._under_way = 0
        self._whole = False  # the request under way is here with its body
        self._refused = False
        self._held = b""  # came, and is not looked at before somebody wants it
        self._patience: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport
        self._wait(HEADERS_S)
        if len(self._all) > MOST_CONNECTIONS:
            self._refused = True
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._whole:
            # Who asks on before it was answered would stop the reading, and so could leave without being noticed.
            self.abort()
            return
        if self._held:
            self._held += data
            return
        super().data_received(data[:SLICE_BYTES])
        if len(data) > SLICE_BYTES and not self._socket.is_closing():
            self._held = data[SLICE_BYTES:]
            self._socket.pause_reading()

    def goes_on(self) -> None:
        """More of the request is wanted."""
        if not self._held or self._socket.is_closing():
            return
        data, self._held = self._held[:SLICE_BYTES], self._held[SLICE_BYTES:]
        super().data_received(data)
        if not self._held and not self._socket.is_closing():
            self._socket.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)
        self._lost.set()

    async def check_open(self) -> None:
        """Raises ``CancelledError`` where nobody is there any more: it is no error, and there is nothing to answer.

        uvicorn answers by itself where the rest of a request is no HTTP, and could not bear a second answer.
        """
        if self._socket.is_closing():
            self.abort()
            await self._lost.wait()
            raise asyncio.CancelledError

    def begins(self) -> None:
        self._under_way += 1
        if self._patience is not None:
            self._patience.cancel()

    def is_whole(self) -> None:
        self._whole = True

    def is_answered(self) -> None:
        self._whole = False

    def ends(self) -> None:
        self._under_way -= 1
        if self._held:
            self._socket.close()  # nobody wanted it, so this request was answered without
        if not self._under_way and self in self._all:
            self._wait(KEEP_ALIVE_S + HEADERS_S)

    def abort(self) -> None:
        self._socket.abort()

    def _wait(self, time_s: float) -> None:
        self._patience = asyncio.get_running_loop().call_later(time_s, self.abort)


def _timed(app: ASGIApp) -> ASGIApp:
    """``app``, whose answers are read in time, or are not."""

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        connection: _Connection = scope["state"]["connection"]

        async def heard() -> Message:
            connection.goes_on()
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                connection.is_whole()
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.is_answered()  # before it is sent: the next request may be here at once
            await connection.check_open()
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError:
                connection.abort()
                await connection.check_open()

        connection.begins()
        try:
            await app(scope, heard, sent)
        finally:
            connection.ends()

    return timed


def _full() -> bytes:
    body = json_bytes(Problem(503, "too many connections: ask again later", code="overloaded").as_json())
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_FULL = _full()
