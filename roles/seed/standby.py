"""A standby: a second seed that follows the one that leads, has a copy of all it knows, and takes over when it is lost.

::

    LOOKING ──▶ a seed that leads lets it in ──▶ COPYING ──▶ whole ──▶ IN STEP ──▶ the connection ends ──▶ LOOKING
    LOOKING ──▶ the rules of ``roles.seed.succession`` say so ──▶ it ends as a standby; its caller runs it as a seed

It listens from the start, and refuses whoever comes, naming the leader: a worker that knocks there has lost the
leader, which is one of the reasons to take over. What must survive it beside the copy (its peer id, its seat, whom it
follows) is in ``standby.json``: so a state directory tells whether it was a standby, and a seed that is started on it
by a person begins a term of its own (``roles.seed.leading``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import (
    ConnectionLost,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
    StorageError,
    UserError,
    first_error,
)
from p2ptrain.core.ids import is_id, new_id
from p2ptrain.core.world import World
from ring.coordination import ENDED
from ring.view import View
from roles.seed import feed
from roles.seed.authority import CA_FILE, Authority, keep_files
from roles.seed.feed import Change, changes_untrusted
from roles.seed.followers import SEATS_FACT, seats_of
from roles.seed.peers import NAME_CHARS, check_hello, clipped
from roles.seed.store import SCHEMA_VERSION, Records, Store
from roles.seed.succession import Knock, Succession
from wire.address import format_address, parse_address
from wire.connection import Connection
from wire.credentials import Credentials
from wire.enrol import until_half_life
from wire.handshake import RefusalCode, Server, dial, local_hello, serve
from wire.messages import Heartbeat, HeartbeatAck, Hello, Refuse, Rows, RowsTaken, Seeds, Welcome
from wire.tls import TlsNetwork

TAKEOVER_S = 30.0
"""As long as a member may be away from its seed before it counts (rule 4 of ``ring.coordinator``)."""
DIAL_TIMEOUT_S = 10.0
AGAIN_S = 1.0
FILE_NAME = "standby.json"
CLUSTER_FACT, TERM_FACT = "cluster-id", "term"
MAX_ELSEWHERE = 8
_MAX_FILE_BYTES = 4096
_NOT_THERE = frozenset({RefusalCode.SHUTTING_DOWN, RefusalCode.STANDBY, RefusalCode.STALE_TERM})
"""Refusals of who does not lead."""
_WRONG = frozenset({RefusalCode.WRONG_JOB, RefusalCode.VERSION})
"""Those which only a person can mend."""
_PASSING = _NOT_THERE | {RefusalCode.BUSY, RefusalCode.FULL, RefusalCode.UNREACHABLE, RefusalCode.TOO_SLOW}

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Marker:
    """``standby.json``. ``following``: the state directory is a standby's; else it was, and leads since.

    Attributes:
        leader: who led last, as it was dialled; empty where nobody did yet.
    """

    peer_id: str
    seat: int = 0
    leader: str = ""
    following: bool = True

    @classmethod
    def load(cls, disk: Disk, state_dir: Path) -> Marker | None:
        """None where the directory is no standby's. Raises ``StorageError``."""
        disk.make_dir(state_dir, mode=0o700)
        if FILE_NAME not in disk.list_dir(state_dir):
            return None
        path = state_dir / FILE_NAME
        try:
            found = cls(**json.loads(disk.read(path, max_bytes=_MAX_FILE_BYTES)))
            types = [type(value) for value in (found.peer_id, found.seat, found.leader, found.following)]
            if types != [str, int, str, bool] or not is_id(found.peer_id) or not 0 <= found.seat < 64:
                raise ValueError("not what was saved")
        except (ValueError, TypeError, RecursionError) as error:
            raise StorageError(f"{path} is damaged", remedy=f"move {state_dir} away, and copy anew") from error
        return found

    def save(self, disk: Disk, state_dir: Path) -> None:
        """Raises ``StorageError``."""
        fields = {"peer_id": self.peer_id, "seat": self.seat, "leader": self.leader, "following": self.following}
        write_atomic(disk, state_dir / FILE_NAME, json.dumps(fields).encode())


def claim_marker(disk: Disk, state_dir: Path, peer_id: str) -> Marker:
    """The standby's own, made where it is new; its directory must be locked. Raises ``StorageError``."""
    found = Marker.load(disk, state_dir)
    if found is None or not found.following:
        found = replace(found, following=True) if found else Marker(peer_id)
        found.save(disk, state_dir)
    return found


@dataclass(frozen=True, slots=True)
class Copy:
    """What a store holds, as far as the succession must know it. ``cluster``: empty before the first whole copy."""

    cluster: str = ""
    term: int = 0
    views: dict[str, View | None] = field(default_factory=dict)
    live: frozenset[str] = frozenset()
    seats: tuple[Address, ...] = ()


def copy_of(records: Records) -> Copy:
    """On the store's thread. Raises ``StorageError``."""
    try:
        jobs = [job for job, _ in records.jobs()]
        return Copy(
            records.known_fact(CLUSTER_FACT),
            int(records.known_fact(TERM_FACT) or 0),
            {job.id: records.last_view(job.id) for job in jobs},
            frozenset(job.id for job in jobs if job.state not in {str(phase) for phase in ENDED}),
            tuple((seat.host, seat.port) for seat in seats_of(records.known_fact(SEATS_FACT))),
        )
    except (ValueError, TypeError, KeyError, IndexError) as error:
        text = f"the copy holds rows that say nothing: {type(error).__name__}"
        raise StorageError(text, remedy="move the state directory away, and copy anew") from error


async def run_standby(
    world: World,
    *,
    state_dir: Path,
    host: str,
    port: int,
    name: str,
    leaders: Collection[Address],
    peer_id: str = "",
    advertise: str = "",
    credentials: Credentials | None = None,
    encrypted: bool = False,
    takeover_s: float = TAKEOVER_S,
    tell: Callable[[str, str], None],
    on_ready: Callable[[Address], None],
    stop: asyncio.Event,
) -> Address | None:
    """Follow until ``stop`` is set, or until it is to lead: then its address is returned, to run a seed there.

    Args:
        leaders: where the leader may be; the first is told to workers until one answers.
        peer_id: of a standby whose state directory is new; empty: any.
        advertise: the host under which others reach this seed; empty: as the leader sees it.
        credentials: of a ticket; None where the state directory has the authority's key already, or on plain TCP.
        takeover_s: see ``roles.seed.succession``.
        tell: (level, text) for the person at this terminal.

    Raises:
        UserError: the directory or the address is in use, or its store is of another cluster.
        NetworkError, Refused: before the first copy: nobody who leads could be reached, or lets it in.
        StorageError: the copy cannot be kept.
    """
    store = await Store.open(world.disk, state_dir, world.threads)
    try:
        made = claim_marker(world.disk, state_dir, peer_id or new_id())
        standby = _Standby(world, store, state_dir, made, name, list(leaders), advertise, takeover_s, tell)
        await standby.open(encrypted, credentials)
        server = await serve(
            standby.network, host, port, decide=standby.decide, serve=_nobody, on_problem=standby.problem
        )
        try:
            on_ready(server.address)
            return server.address if await standby.run(server, stop) else None
        finally:
            await server.close()
    finally:
        await store.close()


async def _nobody(connection: Connection, hello: Hello) -> None:
    raise AssertionError("nobody is let in")


class _Standby:
    """See the head of this file."""

    def __init__(
        self,
        world: World,
        store: Store,
        state_dir: Path,
        marker: Marker,
        name: str,
        leaders: list[Address],
        advertise: str,
        takeover_s: float,
        tell: Callable[[str, str], None],
    ) -> None:
        self.network = world.network
        self._world, self._store, self._state_dir, self._marker = world, store, state_dir, marker
        self._name, self._given, self._advertise, self._tell = name[:NAME_CHARS], leaders, advertise, tell
        self._succession = Succession(takeover_s, world.clock.now())
        self._leader: Address = leaders[0]
        self._elsewhere: list[Address] = []
        self._copy = Copy()
        self._own: TlsNetwork | None = None
        self._signed_at = 0.0
        self._told = ""
        self._port = 0

    async def open(self, encrypted: bool, credentials: Credentials | None) -> None:
        """Raises ``StorageError``, ``UserError``."""
        self._copy = await self._store.look(copy_of)
        if not encrypted:
            return
        if credentials is None:
            credentials = await asyncio.to_thread(self._sign)
        self._own = TlsNetwork(self._world.network, credentials, require_client_certificate=False)
        self.network = self._own

    def _sign(self) -> Credentials:
        """With the run's key, which comes with the copy. Blocking. Raises ``StorageError``."""
        now, directory = self._world.clock.wall(), self._state_dir / "authority"
        made = Authority.open(self._world.disk, directory, name=self._name, now=now)
        self._signed_at = now
        return made.own_credentials(self._marker.peer_id, now)

    # ------------------------------------------------------------------------------------------------------- its door

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        """Nobody is let in; who wanted to is remembered."""
        leader = format_address(*self._leader)
        if hello.purpose == "peer":
            check_hello(hello)
            knock = Knock(hello.job, hello.generation, self._term_of(hello), self._world.clock.now())
            self._succession.knocked(hello.peer_id, knock)
        text = f"this seed is a standby of the one at {leader}, and takes over when that one is lost"
        return Refuse(RefusalCode.STANDBY, text, f"use {leader}", [leader])

    def _term_of(self, hello: Hello) -> int:
        return hello.term if hello.cluster == self._copy.cluster else 0

    def problem(self, problem: P2PTrainError, address: Address) -> None:
        """Whoever comes is refused: no news."""

    # ------------------------------------------------------------------------------------------------------ following

    async def run(self, server: Server, stop: asyncio.Event) -> bool:
        """True when it is to lead. Raises as ``run_standby``."""
        self._port = server.address[1]
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(self._until_it_leads(), name="standby")
                fresh = tasks.create_task(self._keep_fresh(), name="own certificate")
                stopped = tasks.create_task(stop.wait(), name="stop")
                await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
                leads = work.done() and not work.cancelled() and work.exception() is None
                for task in (work, fresh, stopped):
                    task.cancel()
        except* P2PTrainError as group:
            raise first_error(group) from None
        return leads and not stop.is_set()

    async def _keep_fresh(self) -> None:
        while self._own is not None:
            await until_half_life(self._signed_at or self._world.clock.wall(), self._world.clock)
            if CA_FILE in self._world.disk.list_dir(self._state_dir / "authority"):
                self._own.use(await asyncio.to_thread(self._sign))

    async def _until_it_leads(self) -> None:
        clock = self._world.clock
        while True:
            problem = await self._look()
            if problem is not None and not self._copy.cluster:
                raise problem
            verdict = self._succession.verdict(self._copy.views, self._copy.live, self._copy.term, clock.now())
            if verdict.take_over:
                self._say("warning", f"takes over: {verdict.reason}, and the leader stays away")
                return
            if verdict.wait_s:
                reason = problem.message if problem else "the connection ended"
                patience = f"{self._succession.patience_s:g} s"
                self._say("warning", f"the leader is lost ({reason}): takes over in {patience}, unless it comes back")
            else:
                self._say("warning", f"does not take over: {verdict.reason}")
            await asyncio.sleep(AGAIN_S)

    def _say(self, level: str, text: str) -> None:
        if text != self._told:
            self._told = text
            self._tell(level, text)

    def _places(self) -> list[Address]:
        """Where one that leads may be: the last one first."""
        found = dict.fromkeys([self._leader, *self._given, *self._elsewhere, *self._copy.seats])
        return [place for place in found if place[1] != self._port or place[0] != self._advertise]

    async def _look(self) -> P2PTrainError | None:
        """Follow whoever leads, until that ends. Why nobody does, of the first that was asked.

        Raises:
            UserError, Refused: it will not do.
        """
        problems: list[P2PTrainError] = []
        for place in self._places():
            try:
                connection, welcome = await dial(
                    self.network, *place, self._hello(), timeout_s=DIAL_TIMEOUT_S, expect_role="seed"
                )
            except Refused as refused:
                problems.append(refused)
                self._hear_elsewhere(refused.elsewhere)
                wrong = refused.code in _WRONG and place in self._given
                if wrong or (refused.code not in _PASSING and not self._copy.cluster):
                    raise
                if refused.code not in _NOT_THERE and place == self._leader:
                    self._succession.heard(self._world.clock.now())
                continue
            except (NetworkError, ProtocolError) as problem:
                problems.append(problem)
                continue
            try:
                if welcome.cluster_id == self._copy.cluster and welcome.term < self._copy.term:
                    problems.append(Refused(RefusalCode.STALE_TERM, f"{format_address(*place)} leads no more"))
                    continue
                return await self._followed(connection, welcome, place)
            finally:
                connection.abort()
                await self._store.look(Records.give_up_copy)
        return problems[0]

    def _hear_elsewhere(self, addresses: Collection[str]) -> None:
        for text in list(addresses)[:MAX_ELSEWHERE]:
            with suppress(UserError):
                self._elsewhere = [*dict.fromkeys([parse_address(text), *self._elsewhere])][:MAX_ELSEWHERE]

    def _hello(self) -> Hello:
        return local_hello(
            peer_id=self._marker.peer_id,
            name=self._name,
            roles=["seed"],
            purpose="standby",
            capabilities={"schema": SCHEMA_VERSION},
            host=self._advertise,
            port=self._port,
            cluster=self._copy.cluster,
            term=self._copy.term,
        )

    async def _followed(self, connection: Connection, welcome: Welcome, place: Address) -> P2PTrainError:
        """Follow a seed; returns why that ended. Raises ``UserError``, ``StorageError``."""
        if self._copy.cluster not in ("", welcome.cluster_id):
            text = (
                f"{self._state_dir} is of the cluster {self._copy.cluster}, and {format_address(*place)} leads another"
            )
            raise UserError(f"{text}, {clipped(welcome.cluster_id, 64)}", remedy="give this standby another --state")
        self._leader = place
        self._keep_marker(replace(self._marker, leader=format_address(*place)))
        self._succession.heard(self._world.clock.now())
        self._say("info", f"follows {clipped(welcome.name, NAME_CHARS)} at {format_address(*place)}: copying")
        beats = asyncio.create_task(self._beat(connection, welcome.heartbeat_s), name="beats")
        try:
            return await self._listen(connection, welcome)
        except (UserError, StorageError):
            raise
        except P2PTrainError as problem:
            return problem
        finally:
            beats.cancel()

    def _keep_marker(self, marker: Marker) -> None:
        if marker != self._marker:
            self._marker = marker
            marker.save(self._world.disk, self._state_dir)

    async def _beat(self, connection: Connection, interval_s: float) -> None:
        seq = 0
        with suppress(ConnectionLost):  # the reader tells
            while True:
                seq += 1
                connection.send(Heartbeat(seq, 0, 0, "standby", 0.0))
                await asyncio.sleep(interval_s)

    async def _listen(self, connection: Connection, welcome: Welcome) -> P2PTrainError:
        parts, files = bytearray(), dict[str, bytes]()
        clock, whole_once = self._world.clock, False
        while True:
            message = (await connection.receive(timeout_s=welcome.death_s)).message
            self._succession.heard(clock.now())
            match message:
                case HeartbeatAck():
                    pass
                case Seeds():
                    self._succession.rank = min(max(message.rank, 0), 64)
                    self._keep_marker(replace(self._marker, seat=min(max(message.seat, 0), 63)))
                case Rows():
                    parts += message.data
                    if len(parts) > feed.MAX_BATCH_BYTES:
                        raise ProtocolError(f"a batch of more than {feed.MAX_BATCH_BYTES} bytes")
                    if message.more:
                        continue
                    changes, parts = changes_untrusted(bytes(parts)), bytearray()
                    files |= _files_untrusted(changes)
                    await self._take(message, [item for item in changes if item.table != feed.FILES], files)
                    connection.send(RowsTaken(message.number))
                    self._succession.heard(clock.now())
                    if message.whole and not whole_once:
                        whole_once = True
                        self._say("info", f"in step with {format_address(*self._leader)}: takes over when that one"
                                  f" stays away for {self._succession.patience_s:g} s")  # fmt: skip
                case Refuse():
                    return Refused(message.code, clipped(message.message), elsewhere=message.elsewhere)
                case _:
                    raise ProtocolError(f"a seed does not say {type(message).__name__} to a standby")

    async def _take(self, message: Rows, changes: list[Change], files: dict[str, bytes]) -> None:
        """Take a batch in; where it is whole, all of it is durable when this returns."""
        first, whole = message.number == 1, message.whole

        def take(records: Records) -> Copy | None:
            records.take_untrusted(changes, first=first, whole=whole)
            return copy_of(records) if whole else None

        if whole and files and self._own is not None:
            await asyncio.to_thread(keep_files, self._world.disk, self._state_dir / "authority", files)
            files.clear()
            if not self._signed_at:
                self._own.use(await asyncio.to_thread(self._sign))
        copy = await self._store.look(take)
        if copy is not None:
            self._copy = copy


def _files_untrusted(changes: list[Change]) -> dict[str, bytes]:
    """The authority's files in a batch. Raises ``ProtocolError``."""
    found = {}
    for change in changes:
        if change.table == feed.FILES:
            if len(change.values) != 2 or change.gone:
                raise ProtocolError("a file that is none")
            name, data = change.values
            if not isinstance(name, str) or not isinstance(data, bytes):
                raise ProtocolError("a file that is none")
            found[name] = data
    return found
