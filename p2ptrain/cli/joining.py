"""What every ``p2ptrain join`` does, whatever the process is then: it finds its place and its seed, and stays.

``join`` reads the options into a ``Joining`` and runs ``served`` or, of a worker, its own ``work``. What a verifier and
a drafter do is in ``serving``, a coroutine::

    async def serve(member: ServingMember, wish: ServeWish, console: Console) -> None

It is the member's program (``roles.member``): run when the seed has let the process in for the first time, and
cancelled when it leaves; it ends within a second then. It loads what ``wish`` names, says what it answers
(``member.answer``) and what it serves (``member.serves``), and raises ``P2PTrainError`` where it cannot, which ends the
process with that error. ``console`` is for what people see while it loads; ``member.notify`` tells the seed, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from wire.address import is_loopback

if TYPE_CHECKING:
    import asyncio

    from p2ptrain.cli.access import Access
    from p2ptrain.cli.output import Console
    from p2ptrain.core.world import Network
    from roles.identity import Identity
    from wire.address import Ticket
    from wire.messages import Scalar

EVERYWHERE = "0.0.0.0"  # noqa: S104 - members on other machines must reach this one


@dataclass(frozen=True, slots=True)
class Joining:
    """The options that all roles have: see ``join``.

    Attributes:
        targets: seeds, in the order in which they are tried.
        root: the state directory, absolute. name: empty: the machine's. slot: None: the first free one.
        host: empty: where the seed can reach it. advertise: ("", 0) where it is not given.
        device: empty, threads, memory_bytes: 0 where they are not given.
        link: the preset of an emulated link; empty for none.
    """

    role: str
    targets: list[Ticket | tuple[str, int]]
    name: str
    root: Path
    slot: int | None
    host: str
    port: int
    advertise: tuple[str, int]
    device: str
    threads: int
    memory_bytes: int
    link: str
    with_parent: bool


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a verifier or a drafter is to serve, and with what.

    Attributes:
        role: ``verifier`` or ``drafter``.
        model: directory of a checkpoint.
        device: ``auto``, ``cpu``, ``cuda:1``, ...; empty: the best there is. threads: of a CPU; 0: as many as are good.
        memory_bytes: that it may take; 0: most of what is free.
        sessions: at a time, at most; 0: what is usual.
        split: of a verifier: stages to split the model into, over workers of the cluster; 0: as many as are fastest,
            None: it is whole, in this process.
        http: of a verifier: where to listen for HTTP; None: nowhere. api_keys: file with the keys that it takes.
        dtype: of weights, caches and arithmetic: ``fp32``, ``bf16`` or ``fp16``; empty: what the model says.
    """

    role: str
    model: Path | None
    device: str = ""
    threads: int = 0
    memory_bytes: int = 0
    sessions: int = 0
    split: int | None = None
    http: tuple[str, int] | None = None
    api_keys: Path | None = None
    dtype: str = ""


class Running(Protocol):
    async def run(self, stop: asyncio.Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A way to the seed, and where to listen.

    Attributes:
        others: seeds to try when this one stays away.
    """

    access: Access
    listen: tuple[str, int]
    others: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """This process: who it is, and how it talks to people."""

    identity: Identity
    console: Console
    stop: asyncio.Event

    def notify(self, level: str, kind: str, text: str) -> None:
        self.console.event(level, text)


Make: TypeAlias = "Callable[[ProcessContext, Found], Running]"


async def stay(joining: Joining, make: Make) -> None:
    """Claim a slot, find the seed, and run what ``make`` gives until Ctrl+C. It is made again where the seed wants this
    process to listen elsewhere, or to join afresh.

    Raises:
        P2PTrainError: there is no seed, no slot, no ticket; or what it ran raised.
    """
    from p2ptrain.cli.access import MENDED_BY_A_TICKET, Caller, reach_one, shown_address
    from p2ptrain.cli.runtime import default_state_dir
    from p2ptrain.cli.stopping import stoppable, unless_stopped
    from p2ptrain.core.disk import RealDisk
    from p2ptrain.core.errors import Refused
    from roles.identity import claim
    from wire.handshake import RefusalCode

    console, stop = stoppable(with_parent=joining.with_parent)
    base, role, targets = _network(joining.link), joining.role, joining.targets
    identity = claim(RealDisk(), joining.root, role=role, name=joining.name, slot=joining.slot)
    here = ProcessContext(identity, console, stop)
    places = [target if isinstance(target, tuple) else (target.host, target.port) for target in targets]
    console.event("info", f"{role} {identity.name} ({identity.peer_id}) joins {', '.join(map(shown_address, targets))}")
    caller = Caller(role, identity.directory / "credentials", [joining.root, default_state_dir()], identity.peer_id)
    listen_host, afresh = joining.host, False
    try:
        while True:
            access = await unless_stopped(stop, reach_one(targets, caller, base, afresh=afresh))
            if access is None:
                break
            others = tuple(place for place in places if place != (access.host, access.port))
            listen = (listen_host or usual_host(access.host), joining.port)
            try:
                await make(here, Found(access, listen, others)).run(stop)
                break
            except Refused as refusal:
                if refusal.code == RefusalCode.LOOPBACK_ONLY and not listen_host:
                    console.event("info", "members of other machines join this seed: listening on all addresses")
                    listen_host = EVERYWHERE
                elif refusal.code in MENDED_BY_A_TICKET and access.member is not None and not afresh:
                    console.event("info", f"{refusal.message}; joining afresh")
                    afresh = True
                else:
                    raise
    finally:
        console.finish()
        identity.release()
    console.event("info", "left")


async def served(joining: Joining, wish: ServeOptions) -> None:
    """Be a verifier or a drafter until Ctrl+C. Raises ``P2PTrainError``; where HTTP cannot be answered as ``wish`` has
    it, or its model has no room, before it joins."""
    from p2ptrain.cli.serving import check, serve

    await check(wish)

    from p2ptrain.core.world import real_world
    from roles.member import MemberOptions, ServingMember
    from roles.worker.build import capabilities

    said: dict[str, Scalar] = capabilities(joining.device)

    def member(here: ProcessContext, found: Found) -> ServingMember:
        async def program(member: ServingMember) -> None:
            await serve(member, wish, here.console)

        return ServingMember(
            real_world(found.access.network),
            here.identity,
            MemberOptions(
                role=wish.role,
                seed=(found.access.host, found.access.port),
                listen=found.listen,
                advertise=joining.advertise,
                capabilities=said,
                others=found.others,
            ),
            program=program,
            notify=here.notify,
            membership=found.access.member,
        )

    await stay(joining, member)


def _network(link: str) -> Network:
    from wire.emulate import EmulatedNetwork, preset_named
    from wire.transport import TcpNetwork

    tcp = TcpNetwork()
    return EmulatedNetwork(tcp, preset_named(link), os.getpid()) if link else tcp


def usual_host(seed: str) -> str:
    """Where to listen when nobody said: other members must reach us, and are elsewhere where the seed is."""
    return "127.0.0.1" if is_loopback(seed) else EVERYWHERE
