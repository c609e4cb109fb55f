"""The HTTP endpoint of a verifier, on the server of ``roles.http``. ``http_app`` answers its requests."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from p2ptrain.core.errors import UserError
from p2ptrain.core.world import World
from roles.http.access import read_key
from roles.http.server import STOP_S, serving
from roles.serving.texts import TextService
from roles.verifier.http_app import HttpApp
from wire.address import is_loopback
from wire.transport import TcpNetwork


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
    try:
        async with serving(app, sock):
            try:
                yield address
            finally:
                app.stop()
    finally:
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
