"""Seeds on the same network, by multicast DNS (RFC 6762 and 6763).

A seed that other machines can reach announces its name and where it listens; `p2ptrain join` without an address looks
for one. Any machine of the network can answer, and claim any name. So an answer is an address to try and nothing more:
a ticket, a code or saved credentials decide whether the true seed is there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from p2ptrain.cluster.access import CONNECT_TIMEOUT_S, addresses_for_others
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.running import running_seeds
from p2ptrain.core.errors import ProtocolError, UserError
from wire.address import DEFAULT_PORT, EVERYWHERE, format_address, is_ticket
from wire.messages import PROTOCOL_VERSION
from wire.transport import resolve

SERVICE = "_p2ptrain._tcp.local."
SEARCH_S, MORE_S = 3.0, 1.0
"""Longest wait for the first answer, and for others after it. Answers take up to 0.12 s, unless a packet is lost."""
ADDRESS_TIMEOUT_S = 1.0
LOOK_S = 10.0  # how often a seed looks whether its machine's addresses have changed
MAX_SEEDS, MAX_ADDRESSES, MAX_NAME_CHARS = 16, 8, 64

logging.getLogger("zeroconf").addHandler(logging.NullHandler())  # it reports malformed packets of others


@dataclass(frozen=True, slots=True)
class FoundSeed:
    """What an answer claims. ``pin``: SHA-256 of the run's CA, hex. ``version``: of the protocol."""

    name: str
    port: int
    addresses: tuple[str, ...]
    pin: str
    version: int

    def __str__(self) -> str:
        other = f", protocol {self.version}" if self.version != PROTOCOL_VERSION else ""
        return f"{self.name} at {format_address(self.addresses[0], self.port)} (authority {self.pin[:8]}{other})"


def found_seed_untrusted(
    properties: Mapping[bytes, bytes | None], addresses: Sequence[str], port: int | None
) -> FoundSeed:
    """Read an answer: its TXT record, its addresses and its port. Raises ``ProtocolError``."""
    try:
        name, pin, version = ((properties.get(key) or b"").decode() for key in (b"name", b"pin", b"version"))
        parsed = dict.fromkeys(map(ipaddress.ip_address, addresses[:MAX_ADDRESSES]))
    except ValueError as error:  # no UTF-8, or no address
        raise ProtocolError("the announcement of a seed is malformed") from error
    usable = tuple(
        str(item)
        for item in parsed
        if not (item.is_loopback or item.is_multicast or item.is_unspecified)
        and not (item.is_link_local and getattr(item, "scope_id", "") is None)  # the interface to dial from is unknown
    )
    is_name = 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable() and name == name.strip()
    if not is_name or not re.fullmatch("[0-9a-f]{64}", pin) or not re.fullmatch("[0-9]{1,6}", version):
        raise ProtocolError("the announcement of a seed has no printable name, or no valid pin or version")
    if port is None or not 1 <= port <= 65535 or not usable:
        raise ProtocolError("the announcement of a seed has no address")
    return FoundSeed(name, port, usable, pin, int(version))


async def discover(named: str, console: Console) -> str | None:
    """The addresses that answer, with commas between, of the seed for which a person gave ``named``: its name, or
    nothing. All of its addresses, if none answers. None: no seed of the network is meant.

    Raises ``UserError``: there is none, or there are several.
    """
    if not re.fullmatch(r"[^@,:.]*", named) or is_ticket(named) or (not named and running_seeds()):
        return None
    if named:
        with suppress(OSError, UnicodeError):  # a timeout is an OSError
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await resolve(named, DEFAULT_PORT)
                return None
    elif await _accepts("127.0.0.1", DEFAULT_PORT):  # a seed of another user
        return None
    console.event("info", "looking for a seed on this network")
    seed = choose_seed(await find_seeds(), named)
    # Others may belong to networks that this machine is not in. Whoever dials one waits for seconds, also each time
    # that the seed is lost.
    accepts = await asyncio.gather(*(_accepts(address, seed.port) for address in seed.addresses))
    seed = replace(seed, addresses=tuple(compress(seed.addresses, accepts)) or seed.addresses)
    console.event("info", f"found {seed}")
    return ",".join(format_address(address, seed.port) for address in seed.addresses)


async def _accepts(address: str, port: int) -> bool:
    """Whether an address accepts a connection soon."""
    with suppress(OSError):
        async with asyncio.timeout(ADDRESS_TIMEOUT_S):
            (await asyncio.open_connection(address, port))[1].close()
            return True
    return False


async def find_seeds() -> list[FoundSeed]:
    """The seeds of the network. Malformed answers are left out."""
    from zeroconf import Error, IPVersion
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    names, first = set[str](), asyncio.Event()

    def take(name: str, **_: object) -> None:
        if len(names) < MAX_SEEDS:
            names.add(name)
        first.set()

    async def ask(name: str) -> FoundSeed | None:
        with suppress(Error, ProtocolError, ValueError):
            info = AsyncServiceInfo(SERVICE, name)
            if await info.async_request(network.zeroconf, 1000 * MORE_S):
                return found_seed_untrusted(info.properties, info.parsed_scoped_addresses(IPVersion.All), info.port)
        return None

    try:
        network = AsyncZeroconf(ip_version=IPVersion.All)
    except OSError:
        return []  # there is no network, or multicast is not permitted
    async with network:
        browser = AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[take])
        with suppress(TimeoutError):
            async with asyncio.timeout(SEARCH_S):
                await first.wait()
                await asyncio.sleep(MORE_S)
        found = await asyncio.gather(*map(ask, names))
        await browser.async_cancel()
    return sorted({seed for seed in found if seed is not None}, key=str)


def choose_seed(found: Sequence[FoundSeed], name: str) -> FoundSeed:
    """The only seed; with a ``name``: the only one of this name. Raises ``UserError``."""
    fitting = [seed for seed in found if name in ("", seed.name)]
    if len(fitting) == 1:
        return fitting[0]
    if not found:
        remedy = "start one: `p2ptrain seed --host 0.0.0.0`; or join one elsewhere: `p2ptrain join ADDRESS`"
        text = f"no machine is called {name}, and" if name else "no seed of yours runs here, and"
        raise UserError(f"{text} no seed was found on this network", remedy=remedy)
    text = f"{len(fitting) or 'no'} seeds{' called ' * bool(name)}{name} are on this network"
    listed = "; ".join(map(str, fitting or found))
    raise UserError(f"{text}: {listed}", remedy="choose one: `p2ptrain join NAME`, or its address in place of NAME")


async def announce(name: str, pin: bytes, host: str, port: int, report: Callable[[str, str], None]) -> None:
    """Announce a seed that listens on ``host:port`` until cancelled, anew when this machine's addresses change.

    ``report``: takes a level and a text, once it is announced, or if it cannot be.
    """
    from zeroconf import Error, InterfaceChoice, IPVersion, ServiceInfo
    from zeroconf.asyncio import AsyncZeroconf

    about = {"name": name[:MAX_NAME_CHARS], "pin": pin.hex(), "version": str(PROTOCOL_VERSION)}
    label, anywhere = pin.hex()[:16], host in EVERYWHERE
    while True:
        addresses = addresses_for_others()[:MAX_ADDRESSES] if anywhere else [host]
        place: dict[str, Any] = {"port": port, "parsed_addresses": addresses, "server": f"{label}.local."}
        info = ServiceInfo(SERVICE, f"{label}.{SERVICE}", properties=about, **place)
        try:
            async with AsyncZeroconf(InterfaceChoice.All if anywhere else [host], ip_version=IPVersion.All) as network:
                await (await network.async_register_service(info, allow_name_change=True))
                report("info", "on this network `p2ptrain join` finds it without an address")
                while not anywhere or addresses == addresses_for_others()[:MAX_ADDRESSES]:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except (OSError, Error) as error:
            text = f"`p2ptrain join` needs this seed's address, because it cannot be announced here: {error}"
            return report("warning", text)
