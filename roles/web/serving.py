"""The HTTP server of a seed: its address, its keys and its certificate, and the tasks behind it.

On the loopback it answers without encryption and without keys. Elsewhere it needs both: TLS with a certificate of the
run's own authority or a given one, and two keys, which are made once unless they are given.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import string
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from p2ptrain.core.disk import write_atomic
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.world import World
from roles.background import Background
from roles.http.access import MAKE_KEY, Keys, read_key
from roles.http.server import serving
from roles.seed.authority import Authority
from roles.seed.server import Seed
from roles.web.app import WebApp
from roles.web.endpoints import OPERATE, READ, CreateJob
from roles.web.experiments import Experiments
from roles.web.feed import Connect, LocalRequests
from wire.address import format_address, is_loopback
from wire.credentials import SERVER_LIFETIME_S, server_names
from wire.transport import TcpNetwork

_KEY_LETTERS = frozenset(f"{string.ascii_letters}{string.digits}-._~")


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
        url: where a browser reaches it. directory: the seed's.
        keys, names: see ``WebApp``. key_files: of the two keys, for people to look at; empty if none is needed.
        tls: None: it is not encrypted.
        certify: loads a new certificate of the run's authority into ``tls``; None if a person gave one. Blocking.
    """

    sock: socket.socket
    url: str
    directory: Path
    keys: Keys | None
    names: set[str]
    key_files: list[Path]
    tls: ssl.SSLContext | None
    certify: Callable[[], None] | None


async def web_place(
    options: WebOptions, directory: Path, names: Sequence[str], *, world: World, warn: Callable[[str], None]
) -> WebPlace:
    """Listen, before anything else is started. Nothing is answered yet.

    Args:
        directory: the seed's; keys are made in it if they are needed and not given.
        names: of this machine; the first one is for its URL.
        warn: called if other users of this machine may read a key.

    Raises:
        UserError: the address is in use, or a given file cannot be used.
        StorageError: a key cannot be written.
    """
    # The kernel gives up a machine that no longer answers after a minute.
    sock = await TcpNetwork(user_timeout_s=60.0).bound(options.host, options.port, option="--http")
    try:
        near = is_loopback(sock.getsockname()[0])
        files = {READ: options.read_key, OPERATE: options.operator_key}
        if near and not any(files.values()):
            files.clear()
        places = [given or _made(directory / f"http-{permit}.key", world) for permit, given in files.items()]
        keys = {read_key(path, warn): permit for permit, path in zip(files, places, strict=True)}
        if len(keys) < len(files):
            raise UserError("the read key and the operator key are the same", remedy="give two different ones")
        if not set("".join(keys)) <= _KEY_LETTERS:
            text = "a key has signs that a browser cannot send for the stream: use letters, digits and -._~ only"
            raise UserError(text, remedy=MAKE_KEY)
        tls: ssl.SSLContext | None = None
        certify: Callable[[], None] | None = None
        allowed, shown = set[str](), names[0]
        if not near or options.certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.minimum_version = ssl.TLSVersion.TLSv1_2
            allowed, certify = {name.lower() for name in names}, partial(_certify, tls, directory, names, world)
        if tls is not None and options.certificate is not None:
            given, certify = _loaded(tls, options.certificate, options.certificate_key), None
            shown = next((name for name in [shown, *given] if name in given and "*" not in name), shown)
            allowed = set(given)
        url = f"{'http' if tls is None else 'https'}://{format_address(shown, sock.getsockname()[1])}"
        return WebPlace(sock, url, directory, Keys(keys) if keys else None, allowed, places, tls, certify)
    except BaseException:
        sock.close()
        raise


def _made(path: Path, world: World) -> Path:
    """The file of a key; it is made if there is none."""
    if path.name not in world.disk.list_dir(path.parent):
        world.disk.make_dir(path.parent)
        write_atomic(world.disk, path, f"{secrets.token_urlsafe(32)}\n".encode(), private=True)
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


def _certify(tls: ssl.SSLContext, directory: Path, names: Sequence[str], world: World) -> None:
    """Raises ``StorageError``."""
    now = world.clock.wall()
    authority = Authority.open(world.disk, directory / "authority", name="seed", now=now)
    tls.load_cert_chain(authority.http_credentials(names, now))


@asynccontextmanager
async def serving_web(place: WebPlace, seed: Seed, connect: Connect, create_job: CreateJob) -> AsyncIterator[None]:
    """Answer HTTP while the body runs. ``connect``: connects to the seed as an operator. Raises ``StorageError``."""
    experiments, beside = Experiments(place.directory / "experiments", connect), Background()
    app = WebApp(seed, LocalRequests(seed), create_job, experiments, place.keys, place.names)
    try:
        if place.certify is not None:
            await asyncio.to_thread(place.certify)
            beside.start(_recertify(place.certify), "web certificate")
        async with experiments.serving(), serving(app, place.sock, tls=place.tls, websockets=True):
            try:
                yield
            finally:
                app.stop()
    finally:
        await beside.stop()


async def _recertify(certify: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(SERVER_LIFETIME_S / 4)
        with suppress(StorageError):  # there is time for further attempts
            await asyncio.to_thread(certify)
