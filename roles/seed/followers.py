"""The standbys of a seed that leads: what each has of its store, and who is told of them.

::

    standby                                              leader
      Hello(standby, cluster, term) ──────────────────▶    dial-back to its door: workers must reach it, too
      ◀────────────────────────── Welcome(term, seeds)
      ◀──────────────────────── Seeds(seat, rank, ...)     to all workers as well, whenever the standbys change
      ◀── Rows(1) ... Rows(n, whole)    RowsTaken ────▶    first copy, one batch after the other
      ◀── Rows(n + 1, whole)            RowsTaken ────▶    what changed, as it is committed
      Heartbeat ──────────────────────────────────────▶

What is in the store, and the files of the authority, are a standby's; nothing else is needed to lead. Whatever must be
durable before the leader goes on (a view above all) is with every standby that is in step, too, before it is told to
anybody: one that does not take it within ``SHARING_S`` is waited for no more until it is in step again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, ProtocolError, Refused, first_error
from p2ptrain.core.world import Clock
from ring.detector import beat_defaults
from roles.seed import feed
from roles.seed.authority import Authority
from roles.seed.feed import BATCH_BYTES, BATCH_ROWS, MAX_LOGGED, Change, Feed
from roles.seed.peers import NAME_CHARS, say_last
from roles.seed.store import Records, Store
from roles.seed.succession import SEATS
from wire.address import format_address, is_loopback
from wire.connection import Connection
from wire.messages import Heartbeat, HeartbeatAck, Hello, Leave, Message, Rows, RowsTaken, Seeds
from wire.records import PeerInfo

PART_BYTES = 48 << 10
"""A frame has 64 KiB."""
TAKEN_S = 60.0
"""Within this time a standby takes in a batch (``feed.BATCH_BYTES``): at 70 kbit/s, or behind a slow disk."""
SHARING_S = beat_defaults(0.0)[1] / 2
"""So long is a standby waited for, once: workers hear nothing meanwhile, and near ones give the seed up after twice as
long. It is two round trips of 0.4 s (a batch may be on its way) and some flushes."""
TIDY_S = 1.0
SEATS_FACT = "seats"


@dataclass(frozen=True, slots=True)
class Seat:
    """A seed of this cluster that is, or was. ``peer_id``: empty where it led when it was heard of."""

    number: int
    peer_id: str
    host: str
    port: int


def seats_of(text: str) -> list[Seat]:
    """As the store keeps them."""
    return [Seat(**item) for item in json.loads(text or "[]")]


def seats_text(seats: list[Seat]) -> str:
    return json.dumps([asdict(seat) for seat in seats])


def with_seat(seats: list[Seat], new: Seat) -> list[Seat]:
    """The list with ``new`` in its place."""
    others = [seat for seat in seats if seat.number != new.number and (seat.peer_id or None) != new.peer_id]
    return sorted([*others, new], key=lambda seat: seat.number)


@dataclass(slots=True, eq=False)
class Follower:
    """One standby.

    Attributes:
        taken: it has, or its first copy will have, all changes up to this mark; -1: its copy has not begun.
        copied: it has its first copy. in_step: it had all that there was.
    """

    connection: Connection
    name: str
    seat: Seat
    heartbeat_s: float
    death_s: float
    joined_at: float
    taken: int = -1
    sent: int = 0
    acknowledged: int = 0
    rows: int = 0
    copied: bool = False
    in_step: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def moved(self) -> None:
        """Wake whoever waits for it."""
        event, self._moved = self._moved, asyncio.Event()
        event.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Raises ``ConnectionLost`` where it goes before."""
        while not true():
            if self.connection.closed.is_set() or self.connection.close_cause is not None:
                raise DeadlineExceeded("the standby is gone")
            await self._moved.wait()

    async def send(self, changes: list[Change], *, whole: bool) -> None:
        """One batch, until it is taken. Raises ``ConnectionLost``, ``DeadlineExceeded``."""
        data, self.sent = feed.packed(changes), self.sent + 1
        self.rows += len(changes)
        try:
            async with asyncio.timeout(TAKEN_S):
                for at in range(0, len(data), PART_BYTES):
                    more = at + PART_BYTES < len(data)
                    self.connection.send(Rows(self.sent, data[at : at + PART_BYTES], more, whole))
                    await self.connection.flush(timeout_s=TAKEN_S)
                await self.until(lambda: self.acknowledged >= self.sent)
        except TimeoutError:
            raise DeadlineExceeded(f"the standby {self.name} did not take {len(data)} bytes in {TAKEN_S:g} s") from None


class Followers:
    """All standbys. ``changed``: called when some came or went; ``touch``: when one is to be shown anew."""

    def __init__(
        self,
        *,
        clock: Clock,
        store: Store,
        authority: Authority | None,
        term: int,
        changed: Callable[[], None],
        touch: Callable[[str], None],
        note: Callable[[str, str, str], None],
    ) -> None:
        self._clock, self._store, self._authority = clock, store, authority
        self._changed, self._touch, self._note = changed, touch, note
        self._followers: dict[str, Follower] = {}
        self._idle = asyncio.Event()
        self._mark = 0
        self.seats: list[Seat] = []
        self.term = term

    @property
    def own_seat(self) -> int:
        return self.term % SEATS

    @property
    def full(self) -> bool:
        return len(self._followers) >= SEATS - 1

    def addresses(self, host: str) -> list[str]:
        """Of the standbys in their order, as who sits at ``host`` is told them."""
        near = is_loopback(host)
        places = [follower.seat for follower in self._ordered()]
        return [
            f":{seat.port}" if is_loopback(seat.host) and not near else format_address(seat.host, seat.port)
            for seat in places
        ]

    def absent(self) -> list[tuple[str, int]]:
        """Where other seeds of this cluster were, which do not follow now."""
        here = {follower.seat.number for follower in self._followers.values()} | {self.own_seat}
        return [(seat.host, seat.port) for seat in self.seats if seat.number not in here]

    def infos(self) -> list[PeerInfo]:
        """For people."""
        return [info for peer_id in self._followers if (info := self.info(peer_id))]

    def info(self, peer_id: str) -> PeerInfo | None:
        follower = self._followers.get(peer_id)
        if follower is None:
            return None
        behind = self._mark - follower.taken
        state = (
            "standby" if follower.in_step else f"standby, {behind} behind" if follower.copied else "standby, copying"
        )
        address = format_address(follower.seat.host, follower.seat.port)
        return PeerInfo(peer_id, follower.name, ["seed"], "", state, address, follower.joined_at)

    def drop(self, unwelcome: Callable[[Connection], object]) -> None:
        """Have the connections of all looked at."""
        for follower in list(self._followers.values()):
            unwelcome(follower.connection)

    def say(self, message: Message) -> None:
        """To all of them."""
        for follower in list(self._followers.values()):
            if not follower.connection.closed.is_set() and follower.connection.close_cause is None:
                follower.connection.send(message)

    # ------------------------------------------------------------------------------------------------------- following

    async def serve(self, connection: Connection, hello: Hello, host: str, beats: tuple[float, float]) -> None:
        """One standby, until it goes. Raises ``P2PTrainError``."""
        peer_id = hello.peer_id
        seat = await self._seat(peer_id, host, hello.port)
        follower = Follower(connection, hello.name[:NAME_CHARS] or peer_id, seat, *beats, self._clock.wall())
        if (old := self._followers.pop(peer_id, None)) is not None:
            old.connection.abort()
            old.moved()
        self._followers[peer_id] = follower
        self._store.shared = self._shared
        where = format_address(host, hello.port)
        self._note("info", "standby", f"{follower.name} at {where} follows, and takes over when this seed is lost")
        self._tell()
        try:
            async with asyncio.TaskGroup() as tasks:
                feeding = tasks.create_task(self._feed(follower), name=f"feed {peer_id}")
                await self._listen(follower)
                feeding.cancel()
        except* P2PTrainError as group:
            error = first_error(group)
            self._note("warning", "standby", f"{follower.name} does not follow any more: {error.message}")
            say_last(connection, error)
            raise error from None
        finally:
            follower.moved()
            if self._followers.get(peer_id) is follower:
                del self._followers[peer_id]
                if not self._followers:
                    self._store.shared = None
                    self._idle.set()
                self._tell()

    def _tell(self) -> None:
        for rank, follower in enumerate(self._ordered()):
            connection = follower.connection
            if not connection.closed.is_set() and connection.close_cause is None:
                near = self.addresses(follower.seat.host)
                connection.send(Seeds(self.term, near, follower.seat.number, rank))
            self._touch(follower.seat.peer_id)
        self._changed()

    def _ordered(self) -> list[Follower]:
        return sorted(self._followers.values(), key=lambda follower: follower.seat.number)

    async def _seat(self, peer_id: str, host: str, port: int) -> Seat:
        """Its own again, or a free one, or that of who has been away: kept before it is told."""
        taken = {seat.number: seat for seat in self.seats if seat.peer_id != peer_id}
        mine = next((seat.number for seat in self.seats if seat.peer_id == peer_id), None)
        if mine is None or mine == self.own_seat:
            free = [number for number in range(1, SEATS) if number not in taken and number != self.own_seat]
            here = {follower.seat.number for follower in self._followers.values()} | {self.own_seat}
            left = [number for number in taken if number not in here]
            if not free + left:
                raise Refused("full", f"{SEATS - 1} standbys are here", remedy="stop one of them")
            mine = (free or left)[0]
        seat = Seat(mine, peer_id, host, port)
        self.seats = with_seat(self.seats, seat)
        await self._store.call(Records.set_fact, SEATS_FACT, seats_text(self.seats))
        return seat

    async def _listen(self, follower: Follower) -> None:
        while True:
            message = (await follower.connection.receive(timeout_s=follower.death_s)).message
            match message:
                case Heartbeat():
                    follower.connection.send(HeartbeatAck(message.seq))
                case RowsTaken():
                    follower.acknowledged = message.number
                    follower.moved()
                case Leave():
                    return
                case _:
                    raise ProtocolError(f"a standby does not say {type(message).__name__} to the seed that leads")

    async def _feed(self, follower: Follower) -> None:
        """First copy, then what changes, until cancelled. Raises as ``send``, ``StorageError``."""
        store = self._store
        mark = follower.taken = await store.look(lambda records: records.fed(Feed.start))
        names = await store.look(lambda records: records.fed(lambda log: log.names))
        pending: list[Change] = []  # of tables with few rows several make a batch
        size_bytes = 0
        for name in names:
            after: tuple[feed.Value, ...] | None = None
            while True:
                page = await store.look(partial(_page, name=name, after=after))
                size_bytes += page.size_bytes
                if pending and (len(pending) + len(page.changes) > BATCH_ROWS or size_bytes > BATCH_BYTES):
                    await follower.send(pending, whole=False)
                    pending, size_bytes = [], page.size_bytes
                pending += page.changes
                after = page.after
                if after is None:
                    break
        await follower.send(pending, whole=False)
        del pending
        follower.copied = True
        book: object = None
        while True:
            follower.news.clear()
            batch = await store.look(partial(_changes, after=mark))
            changes = batch.changes
            if self._authority is not None and self._authority.book is not book:
                book = self._authority.book
                changes = changes + [Change(feed.FILES, pair) for pair in self._authority.files().items()]
            if changes or not follower.in_step:
                await follower.send(changes, whole=batch.whole)
            mark = follower.taken = batch.mark
            if batch.whole and not follower.in_step:
                follower.in_step = True
                self._touch(follower.seat.peer_id)
            follower.moved()
            if batch.whole:
                try:
                    async with asyncio.timeout(follower.heartbeat_s):  # the book is not logged, but looked at
                        await follower.news.wait()
                except TimeoutError:
                    pass

    async def _shared(self, mark: int) -> None:
        """Until every standby that is in step has what is logged up to ``mark``."""
        self._mark = mark
        for follower in list(self._followers.values()):
            if follower.taken < mark:
                follower.news.set()
        began = self._clock.now()
        for follower in [follower for follower in self._followers.values() if follower.in_step]:
            try:
                async with asyncio.timeout_at(began + SHARING_S):
                    await follower.until(partial(_has, follower, mark))
            except TimeoutError:
                follower.in_step = False
                follower.moved()  # others wait for it as well
                self._note("warning", "standby", f"{follower.name} is slow: it is waited for no more until it has all")
                self._touch(follower.seat.peer_id)
            except DeadlineExceeded:
                pass  # its own task tells

    # --------------------------------------------------------------------------------------------------- housekeeping

    async def run(self) -> None:
        """Keep the log short, until cancelled. Raises ``StorageError``."""
        while True:
            await asyncio.sleep(TIDY_S)
            if not self._followers:
                if self._idle.is_set():
                    self._idle.clear()
                    await self._store.look(lambda records: records.fed(Feed.stop))
                continue
            begun = [follower for follower in self._followers.values() if follower.taken >= 0]
            if not begun:
                continue
            slowest = min(begun, key=lambda follower: follower.taken)
            left = await self._store.look(partial(_forget, slowest.taken))
            if left > MAX_LOGGED:
                text = f"the standby {slowest.name} is {left} changes behind, and must copy anew"
                slowest.connection.abort(DeadlineExceeded(text))
                slowest.moved()


def _has(follower: Follower, mark: int) -> bool:
    """Whether it need not be waited for."""
    return follower.taken >= mark or not follower.in_step


def _page(records: Records, *, name: str, after: tuple[feed.Value, ...] | None) -> feed.Page:
    return records.fed(lambda log: log.page(name, after))


def _changes(records: Records, *, after: int) -> feed.Batch:
    return records.fed(lambda log: log.changes(after))


def _forget(taken: int, records: Records) -> int:
    return records.fed(lambda log: log.forget(taken))
