"""The HTTP server of a seed: its address, its keys and its certificate, and the tasks behind it.

On the loopback it answers without encryption and without keys. Elsewhere it needs both: TLS with a certificate of the
run's own authority or a given one, and two keys, which are made once unless they are given.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.disk import write_atomic
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.world import World
from roles.background import Background
from roles.http.access import Keys, read_key
from roles.http.server import serving
from roles.seed.authority import Authority
from roles.web.app import Access, WebApp
from roles.web.endpoints import OPERATE, READ, CreateJob
from roles.web.experiments import Experiments
from roles.web.feed import Connect, Feed
from wire.address import format_address, is_loopback
from wire.credentials import SERVER_LIFETIME_S, server_names
from wire.transport import TcpNetwork

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class WebOptions:
    """What a person chose: the address; a certificate and its key (PEM); the files of both API keys."""

    host: str
    port: int
    certificate: Path | None = None
    certificate_key: Path | None = None
    read_key: Path | None = None
    operator_key: Path | None = None


@dataclass(frozen=True, slots=True)
class WebPlace:
    """A socket that listens, and who may use it.

    Attributes:
        key_files: of the two keys, for people to look at; empty if none is needed.
        context: of TLS; None: it is not encrypted. own: the run's authority has to make its certificate.
    """

    sock: socket.socket
    access: Access
    key_files: tuple[Path, ...]
    names: Collection[str]
    context: ssl.SSLContext | None
    own: bool

    def url(self, host: str) -> str:
        """``host``: where this machine is reached."""
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://{format_address(host, self.sock.getsockname()[1])}"


async def web_place(
    options: WebOptions, directory: Path, names: Collection[str], *, world: World, warn: Callable[[str], None]
) -> WebPlace:
    """Listen, before anything else is started. Nothing is answered yet.

    Args:
        directory: the seed's; keys are made in it if they are needed and not given.
        names: of this machine.
        warn: called if other users of this machine may read a key.

    Raises:
        UserError: the address is in use, or a given file cannot be used.
        StorageError: a key cannot be written.
    """
    # The kernel gives up a machine that no longer answers after a minute.
    sock = await TcpNetwork(user_timeout_s=60.0).bound(options.host, options.port, option="--http")
    try:
        near = is_loopback(sock.getsockname()[0])
        given = [options.read_key, options.operator_key]
        files: tuple[Path, ...] = ()
        if not near or any(given):
            files = tuple(
                path or _made(directory / f"http-{word}.key", world)
                for path, word in zip(given, (READ, OPERATE), strict=True)
            )
        keys = [read_key(path, warn) for path in files]
        if len(set(keys)) < len(keys):
            raise UserError("the read key and the operator key are the same", remedy="give two different ones")
        context: ssl.SSLContext | None = None
        if not near or options.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
        if options.certificate is not None and context is not None:
            names = _loaded(context, options.certificate, options.certificate_key)
        found = Keys(dict(zip(keys, (READ, OPERATE), strict=True))) if keys else None
        allowed = {name.lower() for name in names} if not near or context is not None else ()
        own = context is not None and options.certificate is None
        return WebPlace(sock, Access(found, allowed), files, names, context, own)
    except BaseException:
        sock.close()
        raise


def _made(path: Path, world: World) -> Path:
    """The file of a key; it is made if there is none."""
    if path.name not in world.disk.list_dir(path.parent):
        world.disk.make_dir(path.parent)
        write_atomic(world.disk, path, f"{secrets.token_urlsafe(KEY_BYTES)}\n".encode(), private=True)
    return path


def _loaded(context: ssl.SSLContext, certificate: Path, key: Path | None) -> list[str]:
    """Load a given certificate, and return the names in it. Raises ``UserError``."""
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # never ask at the terminal
        return server_names(certificate.read_bytes())
    except (OSError, ValueError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None) or str(error)
        text = f"cannot use the certificate {certificate}: {why or 'its key does not fit'}"
        remedy = "give --http-cert FILE and --http-cert-key FILE in PEM; the key must not have a password"
        raise UserError(text, remedy=remedy) from error


@asynccontextmanager
async def serving_web(
    place: WebPlace, connect: Connect, create_job: CreateJob, directory: Path, *, name: str, world: World
) -> AsyncIterator[None]:
    """Answer HTTP while the body runs.

    Args:
        connect: connects to the seed as an operator.
        directory: the seed's. name: the seed's, if its authority does not exist yet.
    """
    feed = Feed(connect)
    experiments = Experiments(directory / "experiments", connect)
    app = WebApp(feed, place.access, create_job, world.clock, experiments)
    beside = Background()
    beside.start(feed.run(), "web feed")
    try:
        if place.own and place.context is not None:
            certifier = _Certifier(place.context, directory / "authority", name, place.names, world)
            await certifier.once()
            beside.start(certifier.run(), "web certificate")
        async with experiments.serving(), serving(app, place.sock, tls=place.context, websockets=True):
            try:
                yield
            finally:
                await app.stop()
    finally:
        await beside.stop()


@dataclass(frozen=True, slots=True)
class _Certifier:
    """Loads certificates of the run's authority into ``context``, the next one long before the last one expires."""

    context: ssl.SSLContext
    directory: Path
    name: str
    names: Collection[str]
    world: World

    async def once(self) -> None:
        """Raises ``StorageError``."""
        await asyncio.to_thread(self._load)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SERVER_LIFETIME_S / 4)
            with suppress(StorageError):  # there is time for further attempts
                await self.once()

    def _load(self) -> None:
        now = self.world.clock.wall()
        authority = Authority.open(self.world.disk, self.directory, name=self.name, now=now)
        self.context.load_cert_chain(authority.http_credentials(self.names, now))
