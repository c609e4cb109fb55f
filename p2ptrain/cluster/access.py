"""How a command reaches a seed: with a ticket, with the credentials of an earlier ticket, or locally without either.

The user gives an address, a ticket, or ``@FILE`` with one of them; or nothing, or ``@DIR``, for a seed that the user
runs here (``running``). The result is a network to dial with.

* A *ticket* is spent once. The credentials that it gave are stored, found by the run's pin, and used while valid.
* An *address of this machine* needs no ticket. A plain seed answers without encryption. An encrypted seed has left
  tickets in its state directory, for the same user.
* An *address of another machine* needs the credentials of an earlier ticket, which are found by the address; or, to
  join, the code that the seed shows, which gives a ticket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from p2ptrain.cluster.running import default_state_dir, running_seeds, the_running_seed
from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.errors import NetworkError, P2PTrainError, ProtocolError, Refused, StorageError, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.world import LoopClock, Network
from wire.address import (
    EVERYWHERE,
    Ticket,
    format_address,
    is_loopback,
    is_ticket,
    local_ticket_path,
    parse_address,
    without_secrets,
)
from wire.messages import RefusalCode
from wire.transport import TcpNetwork, every_interface, resolve, unreachable

if TYPE_CHECKING:
    from wire.client import SeedClient
    from wire.credentials import Credentials
    from wire.enrol import RunMembership

CONNECT_TIMEOUT_S = 5.0
ADDRESS_FILE = "seed"  # beside the credentials; has the address of their seed
MAX_TARGET_BYTES = 4096
_INTERNET = (socket.AF_INET, socket.AF_INET6)
MENDED_BY_A_TICKET = frozenset(
    {
        RefusalCode.TICKET_REVOKED,
        RefusalCode.TICKET_UNKNOWN,
        RefusalCode.CERTIFICATE_EXPIRED,
        RefusalCode.CERTIFICATE_UNTRUSTED,
    }
)
"""Reasons for which a seed refuses a certificate, but may accept a new ticket."""


@dataclass(frozen=True, slots=True)
class Access:
    """A way to a seed. ``member``: this caller's membership; None if the network is not encrypted."""

    host: str
    port: int
    network: Network
    member: RunMembership | None = None

    @property
    def peer_id(self) -> str:
        return self.member.peer_id if self.member else ""


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer that wants to reach a seed.

    Attributes:
        role: ``worker``, ``verifier``, ``drafter``, ``operator`` or ``seed``.
        store: directory of this caller's credentials.
        states: state directories in which a seed on this machine may have left tickets.
        peer_id: id of a peer that joins; empty for an operator, which is a new peer with each ticket.
        code: of one that joins: the seed's code; empty: not known yet (``CodeNeeded``). None: it needs a ticket.
    """

    role: str
    store: Path
    states: Sequence[Path]
    peer_id: str = ""
    code: str | None = None


class CodeNeeded(UserError):
    """A seed answers at ``place``, and lets this machine in with a ticket or a code."""

    place = ("", 0)


Target: TypeAlias = "Ticket | tuple[str, int]"


def read_targets(text: str) -> list[Target]:
    """Read a list of seeds with commas between; they are tried in this order. Raises as ``read_target``."""
    return [read_target(part) for part in text.split(",")]


async def reach_one(targets: Sequence[Target], caller: Caller, base: Network, *, afresh: bool = False) -> Access:
    """Reach the first seed of a cluster that answers. Raises what the first target raised.

    All seeds of a cluster accept the same tickets.
    """
    ticket = next((target for target in targets if not isinstance(target, tuple)), None)
    problems: list[P2PTrainError] = []
    for target in targets:
        attempt: Target = target
        if isinstance(target, tuple) and ticket is not None:
            attempt = dataclasses.replace(ticket, host=target[0], port=target[1])
        try:
            return await reach(attempt, caller, base, afresh=afresh)
        except NetworkError as problem:
            problems.append(problem)
    raise problems[0]


def read_target(text: str) -> Ticket | tuple[str, int]:
    """Read a ticket or an address, or the one in the file that is named with ``@``. Empty, or ``@`` and a directory:
    find the seed that runs here (with this ``--state``).

    Raises:
        UserError: it is neither, or there is no such seed.
    """
    if not text or (text.startswith("@") and _is_path(Path.is_dir, text[1:])):
        return the_running_seed(Path(text[1:]) if text else None)
    if text.startswith("@"):
        text = _read_file(Path(text[1:]))
    if not is_ticket(text):
        return parse_address(text)
    try:
        return Ticket.parse_untrusted(text)
    except ProtocolError as error:
        remedy = f"a file that holds one is named with @: @{text}" if _is_path(Path.is_file, text) else error.remedy
        raise UserError(error.message, remedy=remedy) from error


def place_of(target: Target) -> tuple[str, int]:
    return target if isinstance(target, tuple) else (target.host, target.port)


def shown_address(target: Target) -> str:
    return format_address(*place_of(target))


def _is_path(kind: Callable[[Path], bool], text: str) -> bool:
    """Whether ``text`` is a path of this kind, such as ``Path.is_dir``; it may be anything that a user typed."""
    try:
        return kind(Path(text))
    except (OSError, ValueError):  # too long, or an invalid name
        return False


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TARGET_BYTES + 1)
        if len(data) > MAX_TARGET_BYTES:
            raise UserError(f"{path} is longer than a ticket can be", remedy="name a file that holds a ticket")
        return data.decode().strip()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or an invalid path
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        shown = without_secrets(str(path))  # the user may have put @ before a ticket
        remedy = "name a file that holds a ticket"
        if shown != str(path):
            remedy += ", or leave the @ out: a ticket itself is given without it"
        raise UserError(f"cannot read {shown}: {reason}", remedy=remedy) from error


async def reach(target: Ticket | tuple[str, int], caller: Caller, base: Network, *, afresh: bool = False) -> Access:
    """Find the way to a seed, and spend a ticket if necessary.

    Args:
        afresh: spend the ticket or the code even if there are credentials, because the seed no longer honours them.

    Raises:
        UserError: a ticket is needed, or it is the wrong one; ``CodeNeeded`` if a code would do.
        NetworkError, Refused, ProtocolError: the seed is unreachable, or does not accept the ticket.
        StorageError: the credentials could not be stored.
    """
    if isinstance(target, Ticket):
        return await _reach_by_ticket(target, caller, base, afresh=afresh)
    host, port = target
    own = await is_own(host, port)
    if own and (plain := await _find_plain_host(host, port, base)):
        return Access(plain, port, base)
    if own and (local := _find_local_ticket(caller, port)):
        return await _reach_by_ticket(dataclasses.replace(local, host=host), caller, base, afresh=afresh)
    kept = _find_credentials(caller, lambda _, address: address == target)
    if kept is not None and not (afresh and caller.code):
        return _access_with(host, port, kept, base)
    text, remedy = f"no saved access to {format_address(host, port)}", _advice(caller, own=own)
    if caller.code is None:
        raise UserError(text, remedy=f"check the address, or paste a ticket; {remedy}")
    from wire.enrol import ticket_for_code, verified_seed

    who: dict[str, Any] = {"role": caller.role, "peer_id": caller.peer_id, "timeout_s": CONNECT_TIMEOUT_S}
    if not caller.code:
        async with verified_seed(base, target, **who):  # nobody looks for the code of a seed that is not there
            needed = CodeNeeded(text, remedy=f"{remedy}. Or `p2ptrain ticket code` shows digits: add --code DIGITS")
            needed.place = target
        raise needed
    ticket = await ticket_for_code(base, target, caller.code, **who)
    return await _reach_by_ticket(ticket, caller, base, afresh=True)


def _advice(caller: Caller, *, own: bool) -> str:
    option = "" if caller.role == "worker" else f" --role {caller.role}"
    text = f"on the seed's machine, `p2ptrain ticket new{option}` prints one: give it in place of the address"
    return f"{text}; or ask as the user who runs it" if own else text


async def _reach_by_ticket(ticket: Ticket, caller: Caller, base: Network, *, afresh: bool) -> Access:
    from wire.enrol import enrol

    if ticket.role != caller.role:
        held, wanted = (f"{'an' if role == 'operator' else 'a'} {role}" for role in (ticket.role, caller.role))
        does = "watches and controls" if caller.role == "operator" else f"joins as {wanted}"
        text = f"this ticket is for {held}; only a ticket for {wanted} {does}"
        may_join = caller.role == "worker" and ticket.role in ("verifier", "drafter")
        as_it_says = f"add --role {ticket.role}; or, " if may_join else ""
        raise UserError(text, remedy=as_it_says + _advice(caller, own=False))
    credentials = None if afresh else _find_credentials(caller, lambda kept, _: kept.pin == ticket.pin)
    if credentials is None:
        disk, peer_id = RealDisk(), caller.peer_id or new_id()
        directory = caller.store / f"{ticket.pin.hex()[:16]}-{peer_id}"
        try:
            credentials = await enrol(
                base, ticket, peer_id=peer_id, directory=directory, disk=disk, timeout_s=CONNECT_TIMEOUT_S
            )
        except Refused as refusal:
            if refusal.code.startswith("ticket-") or refusal.code == RefusalCode.BAD_PROOF:
                refusal.exit_code = UserError.exit_code  # the user's ticket is at fault
            raise
        write_atomic(disk, directory / ADDRESS_FILE, format_address(ticket.host, ticket.port).encode())
    return _access_with(ticket.host, ticket.port, credentials, base)


def _access_with(host: str, port: int, credentials: Credentials, base: Network) -> Access:
    from wire.enrol import RunMembership

    member = RunMembership(base, credentials, RealDisk(), LoopClock())
    return Access(host, port, member.network, member)


def _find_local_ticket(caller: Caller, port: int) -> Ticket | None:
    for state in [*caller.states, *(seed.state for seed in running_seeds())]:
        try:
            ticket = Ticket.parse_untrusted(_read_file(local_ticket_path(state, caller.role)))
        except (UserError, ProtocolError):
            continue  # no seed ran there, or it is another user's
        if ticket.port == port:
            return ticket
    return None


# -------------------------------------------------------------------------------------------------- stored credentials


def _find_credentials(caller: Caller, fits: Callable[[Credentials, tuple[str, int]], bool]) -> Credentials | None:
    """The credentials valid longest of those that ``fits(credentials, address of their seed)`` accepts."""
    from wire.credentials import SKEW_S, Credentials

    found, disk = list[Credentials](), RealDisk()
    for name in disk.list_dir(caller.store):
        directory = caller.store / name
        try:
            credentials = Credentials.load(disk, directory)
            address = parse_address(disk.read(directory / ADDRESS_FILE, max_bytes=MAX_TARGET_BYTES).decode())
        except (StorageError, UserError, UnicodeDecodeError):
            continue  # half written or damaged; a ticket gives new ones
        identity = credentials.identity
        if identity.not_after <= time.time():
            disk.remove_tree(directory)
        if caller.role not in identity.roles:
            continue  # a ticket gives credentials for this role
        if identity.not_after - SKEW_S <= time.time() or caller.peer_id not in ("", identity.peer_id):
            continue  # the seed's clock may be ahead
        if fits(credentials, address):
            found.append(credentials)
    return max(found, key=lambda credentials: credentials.identity.not_after, default=None)


# ------------------------------------------------------------------------------------------------------ this machine


def usual_host(seed: str) -> str:
    """The default address to listen on: loopback if the seed is dialled there, else all addresses."""
    if is_loopback(seed):
        return seed if ":" in seed else "127.0.0.1"
    return every_interface()


def shown_host(host: str) -> str:
    """Where other machines reach what listens here on ``host``; this machine's name if it has no address for others."""
    return host if host not in EVERYWHERE else next(iter(addresses_for_others()), socket.gethostname())


def addresses_for_others() -> list[str]:
    """The addresses at which other machines may reach this one: the default route's first, IPv4 before IPv6.

    A link-local IPv6 address is not among them: it needs the name of an interface of the other machine.
    """
    import psutil

    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    addresses = psutil.net_if_addrs()
    found = [item.address for name in up for item in addresses.get(name, ()) if item.family in _INTERNET]
    usable = [host for host in found if not is_loopback(host) and not host.startswith("fe80:")]
    usable.sort(key=lambda host: (host.startswith("169.254."), ":" in host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # TEST-NET-1 of RFC 5737: a UDP connect sends no packet
        usable.insert(0, str(probe.getsockname()[0]))
    return list(dict.fromkeys(usable))


async def is_own(host: str, port: int) -> bool:
    """Whether ``host`` is this machine. Raises ``Unreachable`` if the name cannot be resolved."""
    if is_loopback(host):
        return True
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            places = await resolve(host, port)
    except (OSError, UnicodeError) as error:
        raise unreachable(host, port, error, CONNECT_TIMEOUT_S) from error
    return any(_is_bindable(family, address) for family, address in places)


def _is_bindable(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:  # also if this system lacks the family
        return False
    return True


async def _find_plain_host(host: str, port: int, base: Network) -> str:
    """The loopback address at which a local seed speaks without encryption; empty if there is none.

    It is an address and not a name, because a name may lead elsewhere later, and only this machine is trusted without
    encryption. Raises what dialling raises.
    """
    from wire.handshake import dial, local_hello

    hello = local_hello(peer_id=new_id(), name="", roles=[], purpose="probe")
    try:
        connection, _ = await dial(base, host, port, hello, timeout_s=CONNECT_TIMEOUT_S)
    except Refused as refusal:
        if refusal.code != RefusalCode.TLS_REQUIRED:
            raise
        return ""
    await connection.close()
    found = connection.ends.remote[0]
    return found if is_loopback(found) else ""


# ------------------------------------------------------------------------------------------- an operator's connection


async def connect_operator(access: Access, others: Sequence[tuple[str, int]] = ()) -> SeedClient:
    """Dial the seed; if it is unreachable, dial the others. Raises the first error of ``SeedClient.connect``."""
    from wire.client import SeedClient

    problem: P2PTrainError | None = None
    for place in dict.fromkeys([(access.host, access.port), *others]):
        try:
            return await SeedClient.connect(
                access.network, *place, name=operator_name(), peer_id=access.peer_id, timeout_s=CONNECT_TIMEOUT_S
            )
        except NetworkError as error:
            problem = problem or error
    assert problem is not None
    raise problem


async def open_operator(
    seed: str | tuple[str, int], *, state: Path | None = None, afresh: bool = False
) -> tuple[Access, SeedClient]:
    """Reach and dial the seed, and renew a certificate that has lived half its life. The network of the access also
    reaches peers behind routers.

    If the seed no longer honours the stored credentials, a new ticket is spent.

    Args:
        seed: an address, or what the user gave.
        state: state directory of this operator, and of a seed on this machine; default: the usual place.
        afresh: as in ``reach``.

    Raises:
        UserError: it is no address and no ticket, or a ticket is needed; else as ``reach``, ``connect_operator`` and
            ``RunMembership.renew``.
    """
    from roles.circuits import SeedCircuits
    from wire.circuits import CircuitNetwork

    root = state or default_state_dir()
    targets = read_targets(seed) if isinstance(seed, str) else [seed]
    places, circuits = [place_of(target) for target in targets], CircuitNetwork(TcpNetwork())
    access = await reach_one(targets, Caller("operator", root / "operator", [root]), circuits, afresh=afresh)

    async def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
        once = await connect_operator(access, places)
        try:
            return await once.request(method, params, timeout_s=CONNECT_TIMEOUT_S)
        finally:
            await once.close()

    SeedCircuits(circuits, ask, lambda: (access.host, access.port))
    try:
        client = await connect_operator(access, places)
    except Refused as refusal:
        if afresh or access.member is None or refusal.code not in MENDED_BY_A_TICKET:
            raise
        return await open_operator(seed, state=state, afresh=True)
    if access.member is not None and access.member.due:
        try:
            await access.member.renew(client.request)
        except BaseException:
            await client.close()
            raise
    return access, client


@asynccontextmanager
async def operator(seed: str | tuple[str, int], *, state: Path | None = None) -> AsyncIterator[SeedClient]:
    """An operator's connection to the seed; the end of the block closes it. Within the block the operator's certificate
    is renewed in time."""
    access, client = await open_operator(seed, state=state)

    async def keep_fresh() -> None:
        try:
            if access.member is not None:
                await access.member.keep_fresh(client.request)
        except P2PTrainError as problem:  # the next connection tries again
            client.connection.abort(problem)

    renewing = asyncio.create_task(keep_fresh(), name="renew")
    try:
        yield client
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        await client.close()


def operator_name() -> str:
    """The name that this command line sends to peers."""
    return f"cli@{socket.gethostname()}"
