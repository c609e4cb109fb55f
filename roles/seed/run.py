"""Running a seed: opens its record and its authority, listens, and ends cleanly."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.errors import P2PTrainError, first_error
from p2ptrain.core.world import Clock, World
from roles.seed.authority import Authority
from roles.seed.backup import Backup
from roles.seed.server import Beats, Guard, Seed, cluster_id
from roles.seed.store import Store
from wire.address import Ticket, format_address
from wire.enrol import until_half_life
from wire.handshake import Server, serve
from wire.tls import TlsNetwork


@dataclass(frozen=True, slots=True)
class Encryption:
    """What an encrypted seed takes besides.

    Attributes:
        ticket_host: the address of this machine that tickets carry.
        on_ticket: called with the ticket to show, before the seed is ready.
    """

    ticket_host: str
    on_ticket: Callable[[Ticket], None]


class OwnCertificate:
    """The seed's own: like everybody's it is good for a day, but the seed signs it itself.

    Attributes:
        network: what presents it.
    """

    def __init__(self, authority: Authority, peer_id: str, clock: Clock, network: TlsNetwork) -> None:
        self.network = network
        self._authority, self._peer_id, self._clock = authority, peer_id, clock

    @classmethod
    async def make(cls, world: World, authority: Authority, peer_id: str) -> OwnCertificate:
        """Raises ``StorageError``."""
        made = await asyncio.to_thread(authority.own_credentials, peer_id, world.clock.wall())
        network = TlsNetwork(world.network, made, require_client_certificate=False)
        return cls(authority, peer_id, world.clock, network)

    async def keep_fresh(self) -> None:
        """A new one at half its life, until cancelled. Raises ``StorageError``."""
        while True:
            await until_half_life(self._clock.wall(), self._clock)
            made = await asyncio.to_thread(self._authority.own_credentials, self._peer_id, self._clock.wall())
            self.network.use(made)


async def run_seed(
    world: World,
    *,
    state_dir: Path,
    host: str,
    port: int,
    name: str,
    heartbeat_s: float = 0,
    death_s: float = 0,
    encryption: Encryption | None = None,
    backup_dir: Path | None = None,
    on_ready: Callable[[tuple[str, int]], None],
    stop: asyncio.Event,
) -> None:
    """Run a seed until ``stop`` is set; then it says goodbye, writes what is left, and ends within about a second.

    Args:
        state_dir: where it keeps its record; made where it does not exist. One seed at a time.
        heartbeat_s, death_s: of the links to workers; 0 and 0: from each worker's measured round trip.
        encryption: None: a plain seed, which is for the loopback.
        backup_dir: where a copy of all that it knows is kept up to date (``roles.seed.backup``).
        on_ready: called with the address that it listens on.

    Raises:
        UserError: the address or the directory is in use.
        StorageError: the record cannot be read or written.
    """
    store = await Store.open(world.disk, state_dir, world.threads)
    try:
        guard, own = Guard(), None
        if encryption is not None:
            directory, now = state_dir / "authority", world.clock.wall()
            authority = await asyncio.to_thread(Authority.open, world.disk, directory, name=name, now=now)
            own = await OwnCertificate.make(world, authority, await cluster_id(store))
            world = dataclasses.replace(world, network=own.network)
            guard = Guard(authority, encryption.ticket_host)
        seed = await Seed.open(world, store, name=name, beats=Beats(heartbeat_s, death_s), guard=guard)
        if backup_dir is not None:
            seed.backup = Backup(
                world, store, guard.authority, backup_dir, lambda text: seed.note("error", "backup", text)
            )
            await seed.backup.write()  # it is known at once where that cannot be done
        door = seed.door.decide
        server = await serve(world.network, host, port, decide=door, serve=seed.serve, on_problem=seed.diary.refused)
        try:
            ticket = await seed.gate.opened(server.address)
            if encryption is not None and ticket is not None:
                encryption.on_ticket(ticket)
            await _until(stop, seed, own, server, on_ready)
            if seed.backup is not None:
                await seed.backup.write()
        finally:
            await server.close()
    finally:
        await store.close()


async def _until(
    stop: asyncio.Event,
    seed: Seed,
    own: OwnCertificate | None,
    server: Server,
    on_ready: Callable[[tuple[str, int]], None],
) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(_work(seed, own, server.address))
            how = ", encrypted" if seed.gate.encrypted else ""
            seed.diary.note(
                "info", "seed-started", f"the seed listens on {format_address(*server.address)}{how}", "", ""
            )
            on_ready(server.address)
            await stop.wait()
            seed.stop()
            work.cancel()
    except* P2PTrainError as group:
        raise first_error(group) from None


async def _work(seed: Seed, own: OwnCertificate | None, address: tuple[str, int]) -> None:
    async with asyncio.TaskGroup() as tasks:
        seed.start(tasks, address)
        if own is not None:
            tasks.create_task(own.keep_fresh(), name="own certificate")
        await asyncio.Event().wait()  # until cancelled: jobs come and go
