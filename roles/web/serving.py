"""The HTTP server of a seed: its address, its keys and its certificate, and the tasks behind it.

On the loopback it answers without encryption and without keys. Elsewhere it needs both: TLS with a certificate of the
run's own authority or a given one, and two keys, which are made once unless they are given.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import string
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from p2ptrain.core.background import Background
from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.world import World
from roles.http.access import MAKE_KEY, Keys, read_key
from roles.http.server import serving
from roles.seed.authority import Authority
from roles.seed.server import Seed
from roles.web.app import LocalRequests, WebApp
from roles.web.endpoints import OPERATE, READ, CreateJob, Endpoint
from roles.web.text_gateway import TextGateway
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
class Web:
    """What people are told of the server. ``key_files``: of the two keys; empty if none is needed. ``own_certificate``:
    the run's authority signs its certificate."""

    url: str
    key_files: list[Path]
    own_certificate: bool


@asynccontextmanager
async def serving_web(
    options: WebOptions,
    names: Sequence[str],
    directory: Path,
    seed: Seed,
    create_job: CreateJob,
    more: Sequence[Endpoint] = (),
    *,
    warn: Callable[[str], None],
) -> AsyncIterator[Web]:
    """Answer HTTP while the body runs.

    Args:
        names: of this machine; the first one is for its URL.
        directory: the seed's; keys are made in it if they are needed and not given.
        create_job, more: as for ``WebApp``.
        warn: called if other users of this machine may read a key.

    Raises:
        UserError: the address is in use, or a given file cannot be used.
        StorageError: a key or a certificate cannot be written.
    """
    # The kernel gives up a machine that no longer answers after a minute.
    sock = await TcpNetwork(user_timeout_s=60.0).bound(options.host, options.port, option="--http")
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        host, port = sock.getsockname()[:2]
        files = {READ: options.read_key, OPERATE: options.operator_key}
        needed = files if not is_loopback(host) or any(files.values()) else {}
        keys = _keys(needed, directory, seed.world.disk, warn)
        tls, shown, allowed = None, names[0], list[str]()
        own_certificate = not is_loopback(host) and options.certificate is None
        if own_certificate or options.certificate is not None:
            tls, allowed = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), [name.lower() for name in names]
            tls.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls is not None and options.certificate is not None:
            allowed = _load_certificate(tls, options.certificate, options.certificate_key)
            shown = next((name for name in [shown, *allowed] if name in allowed and "*" not in name), shown)
        elif tls is not None:
            background = Background()
            stack.push_async_callback(background.stop)
            certify = partial(_certify, tls, directory, names, seed.world)
            await asyncio.to_thread(certify)
            background.start(_certify_again(certify), "web certificate")
        access = None
        if keys:
            read, operate = (path.name for path in keys.values())
            where = f"paste the key from {operate} on the seed's machine ({read} to look only)"
            access = Keys(dict(zip(keys, needed, strict=True)), where)
        acceptor = seed.acceptor
        texts = TextGateway(
            seed.overview.serving_infos, lambda info: acceptor.dial(info.host, info.port, info.peer, "http")
        )
        app = WebApp(seed.overview, LocalRequests(seed), create_job, more, access, allowed, texts)
        await stack.enter_async_context(serving(app, sock, tls=tls, websockets=True))
        url = f"{'http' if tls is None else 'https'}://{format_address(shown, port)}"
        seed.overview.http = url
        if tls is not None and keys:
            seed.overview.watch_link = f"{url}/#key={next(iter(keys))}"  # the part that a browser does not send
        yield Web(url, list(keys.values()), own_certificate)


def _keys(files: dict[str, Path | None], directory: Path, disk: Disk, warn: Callable[[str], None]) -> dict[str, Path]:
    """Map each key to its file, in the order of ``files``. One that is not given is made once, in ``directory``."""
    found: dict[str, Path] = {}
    for permit, chosen in files.items():
        path = chosen or directory / f"http-{permit}.key"
        if chosen is None and path.name not in disk.list_dir(directory):
            write_atomic(disk, path, f"{secrets.token_urlsafe(32)}\n".encode(), private=True)
        key = read_key(path, warn)
        if not set(key) <= _KEY_LETTERS:
            text = "a key has signs that a browser cannot send for the stream: use letters, digits and -._~ only"
            raise UserError(text, remedy=MAKE_KEY)
        if key in found:
            raise UserError("the read key and the operator key are the same", remedy="give two different ones")
        found[key] = path
    return found


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> list[str]:
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
    now = world.clock.wall()
    authority = Authority.open(world.disk, directory / "authority", name="seed", now=now)
    tls.load_cert_chain(authority.http_credentials(names, now))


async def _certify_again(certify: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(SERVER_LIFETIME_S / 4)
        with suppress(StorageError):  # there is time for further attempts
            await asyncio.to_thread(certify)
