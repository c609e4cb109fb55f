"""Run a seed, back up its state, and restore a seed from a backup on any machine.

A backup is one file: SQLite's backup of the database, with the authority's files in an extra table. The file is written
under a temporary name and renamed over the previous one, so it is always complete.

A restored seed leads in a higher *term*. The term is durable in the backup and in the new database before the seed
listens. So generations of two terms never meet. A worker that has seen the higher term refuses the old seed if that one
comes back.

The backup may lack the newest views. Each job asks its living members for its newest view before it decides anything
(``roles.seed.jobs``). Evictions, tickets, revocations and jobs without members are lost if they are newer than the
backup.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import P2PTrainError, StorageError, UserError, first_error
from p2ptrain.core.world import Clock, World
from ring.coordination import ENDED
from ring.planning.matching import POLICIES
from roles.seed.authority import Authority, keep_files
from roles.seed.overview import SeedIdentity
from roles.seed.peers import NAME_CHARS
from roles.seed.server import Seed
from roles.seed.store import FILE_NAME, SCHEMA_VERSION, TERM_FACT, Records, SeedStore, file_of
from roles.seed.tracking import Trackers, check_trackers
from wire.address import Ticket
from wire.circuits import CircuitNetwork
from wire.credentials import Credentials
from wire.enrol import until_half_life
from wire.handshake import Refusals, serve
from wire.messages import MAX_TERM
from wire.records import EventInfo
from wire.tls import TlsNetwork

COPY_NAME = "seed-backup.sqlite3"
COPIED_FACT = "copied-at"
EVERY_S = 60.0
LOOK_S = 1.0
"""How often a seed looks whether its database is still there."""


class Backup:
    """Backs a seed up to a directory every ``EVERY_S``, and at once when ``requested`` is set. A failure is noted, but
    not again until a backup succeeds."""

    def __init__(self, seed: Seed, authority: Authority | None, directory: Path, requested: asyncio.Event) -> None:
        self._seed, self._authority, self._directory, self._requested = seed, authority, directory, requested
        self._thread = seed.world.threads.start("backup")

    async def write(self) -> None:
        """Write a backup now. Raises ``StorageError``."""
        files = self._authority.files() if self._authority is not None else {}
        wall = self._seed.world.clock.wall()

        def add_authority(copy: sqlite3.Connection) -> None:
            copy.execute("CREATE TABLE authority (name TEXT PRIMARY KEY, data BLOB NOT NULL)")
            copy.executemany("INSERT INTO authority VALUES (?, ?)", files.items())
            copy.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (COPIED_FACT, str(wall)))

        data = await self._seed.store.call(Records.image, add_authority)
        try:
            await self._thread.submit(partial(write_copy, self._seed.world.disk, self._directory, data))
        except StorageError as problem:
            problem.remedy = problem.remedy.replace("--state", "--backup")
            raise

    async def run(self) -> None:
        """Write backups until cancelled. Failures are reported and do not end this."""
        working = True
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._requested.wait()
            self._requested.clear()
            try:
                await self.write()
                working = True
            except StorageError as problem:
                if working:
                    text = f"no backup is made: {problem.message}: {problem.remedy}"
                    self._seed.announcements.note("error", "backup", text)
                working = False

    def close(self) -> None:
        self._thread.close()


def write_copy(disk: Disk, directory: Path, data: bytes) -> None:
    """Blocking. Raises ``StorageError``."""
    disk.make_dir(directory)
    disk.set_mode(directory, 0o700)
    write_atomic(disk, directory / COPY_NAME, data, private=True)


@dataclass(frozen=True, slots=True)
class RestoredBackup:
    """A restored backup: when it was made, whether the cluster is encrypted, and the new term."""

    wall: float
    encrypted: bool
    term: int


def restore(disk: Disk, directory: Path, state_dir: Path) -> RestoredBackup:
    """Fill ``state_dir`` from the backup in ``directory``, and begin a higher term. Blocking.

    Raises:
        UserError: there is no backup, or the state directory has a seed's database already.
        StorageError: the backup is damaged, or something cannot be written.
    """
    if COPY_NAME not in disk.list_dir(directory):
        raise UserError(f"there is no backup of a seed in {directory}", remedy="give the DIR of seed --backup DIR")
    disk.make_dir(state_dir)
    if FILE_NAME in disk.list_dir(state_dir):
        text = f"{state_dir} already has a seed's database"
        raise UserError(text, remedy="start that seed without --restore, or choose another --state")
    data = disk.read(directory / COPY_NAME, max_bytes=16 << 30)
    with _open_copy(directory / COPY_NAME, data) as copy:
        wall, term = _begin_term(copy)
        write_copy(disk, directory, file_of(copy))  # first, so that another restore begins a higher term still
        files = dict(copy.execute("SELECT name, data FROM authority"))
        copy.execute("DROP TABLE authority")
        if files:
            keep_files(disk, state_dir / "authority", files)
        write_atomic(disk, state_dir / FILE_NAME, file_of(copy), private=True)
    return RestoredBackup(wall, bool(files), term)


def _begin_term(copy: sqlite3.Connection) -> tuple[float, int]:
    """Raise the term, and mark every job that has not ended to ask its members for a newer view. Returns when the copy
    was made, and the term."""
    facts = dict(copy.execute("SELECT name, value FROM facts"))
    term = next_term(int(facts.get(TERM_FACT, 0)))
    copy.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (TERM_FACT, str(term)))
    for job, text in copy.execute("SELECT id, record FROM jobs").fetchall():
        record = json.loads(text)
        if record["state"] not in {str(phase) for phase in ENDED}:
            copy.execute("UPDATE jobs SET record = ? WHERE id = ?", (json.dumps(record | {"unsettled": True}), job))
    return float(facts[COPIED_FACT]), term


def next_term(term: int) -> int:
    if term + 1 >= MAX_TERM:
        raise StorageError(f"this cluster was restored {term} times, the limit", remedy="begin a new cluster")
    return term + 1


@contextmanager
def _open_copy(path: Path, data: bytes) -> Iterator[sqlite3.Connection]:
    damaged = StorageError(f"the backup {path} is damaged", remedy="use another copy, or begin a new cluster")
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        try:
            if not data.startswith(b"SQLite format 3\0"):
                raise damaged
            copy.deserialize(data)
            version = copy.execute("PRAGMA user_version").fetchone()[0]
            if copy.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise damaged
            if version != SCHEMA_VERSION:
                text = f"the backup {path} was written by another release (schema {version}, not {SCHEMA_VERSION})"
                raise StorageError(text, remedy="use the release that wrote it")
            yield copy
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            raise damaged from error


async def _watch_directory(disk: Disk, directory: Path) -> None:
    """Raise ``StorageError`` when the seed's database is gone, until cancelled. SQLite alone would not notice it, and
    all records would be lost when the seed stops."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            found = disk.list_dir(directory)
        except StorageError:
            continue  # it cannot be seen now, perhaps for want of a file descriptor: nothing tells that it is gone
        if FILE_NAME not in found:
            remedy = "restore a backup (seed --restore DIR), or begin anew: stop the workers, and join them again"
            raise StorageError(f"{directory / FILE_NAME} was removed while the seed ran", remedy=remedy)


async def _renew_credentials(network: TlsNetwork, sign: Callable[[], Awaitable[Credentials]], clock: Clock) -> None:
    while True:
        await until_half_life(clock.wall(), clock)
        network.present(await sign())


@dataclass(frozen=True, slots=True)
class ListeningSeed:
    """A seed that listens on ``address``. ``ticket``: the one to show; None: a plain seed needs none."""

    seed: Seed
    address: tuple[str, int]
    ticket: Ticket | None


@asynccontextmanager
async def serving_seed(
    world: World,
    *,
    state_dir: Path,
    host: str,
    port: int,
    name: str,
    ticket_host: str = "",
    backup_dir: Path | None = None,
    tracker_environ: Mapping[str, str] | None = None,
    on_event: Callable[[EventInfo], None] = lambda event: None,
    policy: str = POLICIES[0],
    circuits: CircuitNetwork | None = None,
) -> AsyncIterator[ListeningSeed]:
    """Run a seed for the block. At the end it tells its peers, writes what is left, and ends within about a second.

    Args:
        state_dir: the seed's directory, created if it does not exist. One seed at a time can use it.
        ticket_host: the address of this machine that tickets carry; empty: a plain seed on the loopback.
        backup_dir: where a backup is kept up to date; None for no backup.
        tracker_environ: the environment for ``[track]``, with its keys; None: no job is tracked.
        on_event: called with each new event.
        policy: by which the pool gives workers their tasks.
        circuits: the lowest part of the world's network, as of ``Seed``.

    Raises:
        UserError: the address or the directory is in use.
        StorageError: the database cannot be read or written, or was removed; this ends the block.
    """
    async with AsyncExitStack() as stack:
        store = await SeedStore.open(world.disk, state_dir, world.threads, world.probe)
        stack.push_async_callback(store.close)
        cluster_id = await store.call(Records.fact, "cluster-id", world.new_id())
        term = int(await store.call(Records.fact, TERM_FACT, "0"))
        identity = SeedIdentity(cluster_id, name[:NAME_CHARS], term)
        authority: Authority | None = None
        tasks: list[Callable[[], Coroutine[None, None, None]]] = [partial(_watch_directory, world.disk, state_dir)]
        if ticket_host:
            directory, clock = state_dir / "authority", world.clock
            open_authority = partial(Authority.open, name=name, now=clock.wall(), entropy=world.entropy)
            authority = own_authority = await asyncio.to_thread(open_authority, world.disk, directory)

            async def sign() -> Credentials:
                return await asyncio.to_thread(own_authority.own_credentials, identity.cluster_id, clock.wall())

            network = TlsNetwork(world.network, await sign(), require_client_certificate=False)
            tasks.append(partial(_renew_credentials, network, sign, clock))
            world = dataclasses.replace(world, network=network)
        backup_requested = asyncio.Event()
        # A key from a file ends with a newline.
        environ = {key: value.strip() for key, value in (tracker_environ or {}).items()}
        seed = Seed(
            world,
            store,
            identity,
            authority=authority,
            ticket_host=ticket_host or "127.0.0.1",
            circuits=circuits,
            request_backup=backup_requested.set,
            on_event=on_event,
            check_profile=partial(check_trackers, environ) if tracker_environ is not None else lambda profile: None,
            policy=policy,
        )
        await seed.load()
        note, last_writes = seed.announcements.note, list[Callable[[], Awaitable[None]]]()
        if tracker_environ is not None:
            trackers = Trackers(seed, state_dir / "track", environ)
            tasks.append(trackers.run)
            last_writes.append(trackers.close)
        if backup_dir is not None:
            backup = Backup(seed, authority, backup_dir, backup_requested)
            stack.callback(backup.close)
            await backup.write()  # fails at once if no backup can be written
            tasks.append(backup.run)
            last_writes.append(backup.write)
        # before the port is open, where a `join` may wait for it
        ticket = await seed.gate.open_at((host, port)) if port else None
        refusals = Refusals(partial(note, "warning", "refused"), alarm=partial(note, "error", "resources"))
        decide = seed.acceptor.decide
        server = await serve(world.network, host, port, decide=decide, serve=seed.serve, on_problem=refusals)
        stack.push_async_callback(server.close)
        if not port:
            ticket = await seed.gate.open_at(server.address)

        async def work() -> None:
            async with asyncio.TaskGroup() as working:
                seed.start(working, server.address)
                for task in tasks:
                    working.create_task(task())
                await asyncio.Event().wait()  # keeps the group open for new jobs until cancelled

        problem: P2PTrainError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                working = group.create_task(work())
                how = ", encrypted" if seed.gate.encrypted else ""
                note("info", "seed-started", f"the seed listens on {seed.address_to_dial(server.address)}{how}")
                try:
                    yield ListeningSeed(seed, server.address, ticket)
                except P2PTrainError as error:  # of the block; the seed's own ends the group
                    problem = error
                seed.stop()
                working.cancel()
        except* P2PTrainError as problems:
            raise first_error(problems) from None
        for write_rest in last_writes:
            await write_rest()
        if problem is not None:
            raise problem
