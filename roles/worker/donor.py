"""The giving side of healing: a state and the steps since, for members that heal and for workers that follow the ring.

A member of the donor's view gets the live state, which stands still: no step commits without the healing member's
token. It ends with the view. A worker beside the ring gets a *snapshot*, which the ring makes at its next step
boundary, and then the reduced bytes of every step committed since, from a *log*; that outlasts views, and ends when
the follower is in, gone, or silent. Whoever holds a state that the log reaches back to is given steps and no state.

The log is bounded by the size of the state and two steps (``log_limit_bytes``). That is just where catching up stops
to be possible: while the state is fetched at r bytes/s, a ring that makes G bytes of sums every t seconds logs
q = G/(t r) of the state's size. With q < 1 the log holds, and each round of fetching leaves q of the one before, so the
follower is level after 1/(1-q) of the first round's time. With q >= 1 it would never be, and it is told that what it
wants is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    P2PTrainError,
    PeerError,
    ProtocolError,
    Refused,
    ResourceError,
    first_error,
)
from ring.transaction import Transaction
from ring.view import View
from roles.engine import WHOLE, Engine, Stage
from roles.worker.checkpoint_store import Snapshots
from roles.worker.context import Context
from roles.worker.given import (
    ANSWER_S,
    BEATS,
    CHUNK_BYTES,
    DIGEST_BYTES,
    LONGEST_SILENCE_S,
    SHORTEST_SILENCE_S,
    Entry,
    Given,
    StepLog,
    chunk_untrusted,
    copied,
    log_limit_bytes,
)
from roles.worker.pace import Pace
from roles.worker.transfer import WINDOW
from wire.connection import Connection
from wire.handshake import RefusalCode
from wire.heal_messages import BlobRecord, ChunkRequest, HealOffer, HealRequest, StepGone, StepRequest, TableRequest
from wire.job_messages import LedgerRow
from wire.messages import Hello, Message, Refuse, StillHere

MAX_FOLLOWERS = 4
"""Whom one member serves at a time beside its ring; others ask other members, or heal within the ring."""
_NOT_HERE = "not-here"


@dataclass(slots=True, eq=False)
class Taker:
    """One who is being given to.

    Attributes:
        inside: it is a member of the view, and all others wait for it.
        waits: it wants the next copy of the state.
        told: the newest step that it was told of; -1: it has no offer yet.
    """

    connection: Connection
    name: str
    generation: int
    inside: bool
    silence_s: float
    asks: deque[ChunkRequest | TableRequest | StepRequest] = field(default_factory=deque)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    given: Given | None = None
    waits: bool = False
    told: int = -1
    given_bytes: int = 0
    ended: bool = False

    def say(self, message: Message) -> None:
        self.connection.send(message, generation=self.generation)

    def end(self, reason: str) -> None:
        """This side ends it: that is nobody's fault."""
        self.ended = True
        self.connection.abort(PeerError(reason))

    def tell(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.step > self.told:
                self.say(entry.news)
                self.told = entry.step


class Donations:
    """All that one worker gives in one job. ``core`` is only looked at.

    Args:
        want_snapshot: ask the ring for one at its next step boundary.
        stage: the part of the model that this worker holds, and gives.

    Attributes:
        state_bytes: the size of the engine's state; the log may become as large.
    """

    def __init__(
        self, around: Context, core: Transaction, *, want_snapshot: Callable[[], None], stage: Stage = WHOLE
    ) -> None:
        self._around, self._core, self._want_snapshot, self._stage = around, core, want_snapshot, stage
        self.state_bytes = 0
        self._takers: set[Taker] = set()
        self._live: Given | None = None
        self._copy: Given | None = None
        self._log = StepLog()
        self._logging = False
        self._kept: memoryview | None = None
        self._applying = False
        self._pace = Pace(CHUNK_BYTES)
        self._turn = asyncio.Event()  # replaced when it is set: everybody who waits has a turn
        self._stepped_at: float | None = None

    # ----------------------------------------------------------------------------------------- what the runner calls

    @property
    def followers(self) -> int:
        """Workers beside the ring that are being given to."""
        return sum(not taker.inside for taker in self._takers)

    @property
    def log_bytes(self) -> int:
        return self._log.held_bytes

    def view_began(self) -> None:
        """A ring runs, whose steps are not to be hindered."""
        self._pace.ring_began()
        self._stepped_at = None
        self._ask_for_snapshot()

    def view_ended(self, reason: str) -> None:
        """The live state may move on: whoever is given it is cut off. What is copied and logged goes on."""
        self._pace.ring_ended()
        self._live, self._applying = None, False
        self._next_turn()
        for taker in [taker for taker in self._takers if taker.inside]:
            taker.end(f"the donor's view ended: {reason}")

    def cut(self, reason: str) -> None:
        """The state is replaced by another: nothing that was given leads on from here."""
        self.view_ended(reason)
        self._logging, self._kept = False, None
        self._log.begin(-1, "")
        for taker in list(self._takers):
            taker.end(f"the donor's state was replaced: {reason}")

    async def keep(self, engine: Engine) -> None:
        """A step is being committed: copy its reduced bytes, if there is somebody who follows."""
        self._applying = True
        if not self.followers:
            self._logging = False  # not when they left: who did may be back, as a member that lacks a step or two
            self._log.begin(-1, "")
        if self._logging:
            self._kept = await self._around.compute.run(copied, engine, self._log.spare)
            self._log.spare = None

    def committed(self, row: LedgerRow, digests: bytes = b"") -> None:
        """The step whose reduced bytes were kept is applied; ``row`` and the core tell of it, and of a split model
        ``digests``, as in ``Contribution``."""
        self._applying = False
        now, before = self._around.world.clock.now(), self._stepped_at
        self._stepped_at = now
        if before is not None:
            self._pace.stepped(now - before)
        self._ask_for_snapshot()
        kept, self._kept = self._kept, None
        if self._logging and kept is not None:
            place = DIGEST_BYTES * self._stage.index
            digest = digests[place : place + DIGEST_BYTES] if digests else row.digest
            entry = Entry(row.step, self._core.lineage, digest, self._core.square_sum, kept, digests=digests)
            self._log.add(entry)
            for taker in self._takers:
                if taker.told >= 0 and not taker.inside:
                    with suppress(ConnectionLost):  # it has gone: who serves it will notice
                        taker.tell([entry])
        self._next_turn()

    async def snapshot(self, engine: Engine, snapshots: Snapshots) -> None:
        """The ring stands between two steps, and some donor asked for this: copy the state for those who wait."""
        waiting = [taker for taker in self._takers if taker.waits]
        if not waiting:
            return
        core = self._core
        try:
            copy = await snapshots.take(engine, step=core.applied, lineage=core.lineage, square_sum=core.square_sum)
        except ResourceError:
            return  # the other copies are being written to disk: after a later step, then
        self._copy = Given(copy.step, copy.lineage, copy.square_sum, copy.blobs, copy)
        copy_users = [taker for taker in waiting if taker in self._takers]
        for taker in copy_users:
            self._use(taker, self._copy)
        if not copy_users:
            self._copy = None
            copy.release()
        self._next_turn()

    async def give(self, connection: Connection, hello: Hello, engine: Engine) -> None:
        """Serve one who heals or follows, until it closes.

        Raises:
            NetworkError, PeerError: the connection ended otherwise, or what it asks for is not to be had.
        """
        request = await connection.expect(HealRequest, timeout_s=ANSWER_S)
        if not SHORTEST_SILENCE_S <= request.silence_s <= LONGEST_SILENCE_S:
            raise ProtocolError(f"{hello.name[:64]} would give up after {request.silence_s} s of silence")
        if not self._has_part(request):
            raise PeerError(f"{hello.name[:64]} asks for stage {request.stage}, this member holds {self._stage}")
        taker = Taker(connection, hello.name, hello.generation, request.step >= 0, request.silence_s)
        view = self._core.view
        its_view = view is not None and view.generation == hello.generation and view.rank_of(hello.peer_id) is not None
        if taker.inside and not its_view:
            raise PeerError(f"{taker.name} is not in this member's view")
        if not taker.inside and self.followers >= MAX_FOLLOWERS:
            taker.say(Refuse(RefusalCode.BUSY, f"this member already serves {self.followers} workers beside its ring"))
            await connection.flush(timeout_s=taker.silence_s)
            return
        self._takers.add(taker)
        try:
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(self._send(taker))
                offer = tasks.create_task(self._offer(taker, request, engine))
                await self._listen(taker)
                sender.cancel()
                offer.cancel()
        except* P2PTrainError as group:
            error = first_error(group)
            if not taker.ended and not isinstance(error, ConnectionLost):  # that is how it says that it has enough
                raise error from None
        finally:
            self._takers.discard(taker)
            connection.abort()  # before the memory that it may still be sending from is used for something else
            self._let_go(taker)
            if taker.given_bytes:
                size = f"{taker.given_bytes / 1e6:.1f} MB"
                self._around.tell("info", "gave", f"gave {size} of state and steps to {taker.name}")

    # ------------------------------------------------------------------------------------------------------ internals

    def _has_part(self, request: HealRequest) -> bool:
        """Whether what is asked for is the part of the model that this member holds: sizes and names may be alike."""
        return request.stage == self._stage.index

    async def _offer(self, taker: Taker, request: HealRequest, engine: Engine) -> None:
        try:
            if taker.inside:
                await self._offer_inside(taker, request, engine)
            else:
                await self._offer_beside(taker, request, engine)
        except Refused as refused:
            taker.say(Refuse(refused.code, refused.message))
            await taker.connection.flush(timeout_s=taker.silence_s)
            await taker.connection.close()

    async def _offer_inside(self, taker: Taker, request: HealRequest, engine: Engine) -> None:
        core, view = self._core, self._core.view
        if view is None or not core.may_give or (request.step, request.lineage) != (view.step, view.lineage):
            raise Refused(_NOT_HERE, f"this member stands at step {core.applied}, not at {request.step} as asked for")
        entries = self._log.since(request.have_step, request.have_lineage)
        if entries and (entries[-1].step, entries[-1].lineage) == (view.step, view.lineage):
            self._offer_steps(taker, request, entries)
            return
        if self._live is None or (self._live.step, self._live.lineage) != (view.step, view.lineage):
            self._live = await self._stands_still(engine, view)
        taker.given = self._live
        taker.given.users += 1
        await self._offer_state(taker, self._live)

    async def _offer_beside(self, taker: Taker, request: HealRequest, engine: Engine) -> None:
        while self._applying:
            await self._turn.wait()  # where the log begins must be known
        if not self._logging:
            self._begin_log(engine)
        entries = self._log.since(request.have_step, request.have_lineage)
        if entries is not None:
            self._offer_steps(taker, request, entries)
            return
        copy = self._copy
        if copy is not None and self._log.since(copy.step, copy.lineage) is not None:
            self._use(taker, copy)
        else:
            taker.waits = True
            self._ask_for_snapshot()
        while taker.given is None:
            await self._turn.wait()
        await self._offer_state(taker, taker.given)
        taker.told = taker.given.step
        taker.tell(self._log.all())

    async def _stands_still(self, engine: Engine, view: View) -> Given:
        blobs = await self._around.compute.run(engine.state)
        if self._core.view is not view or not self._core.may_give:
            raise Refused(_NOT_HERE, "the view ended before the state was at hand")
        return Given(view.step, view.lineage, view.square_sum, blobs)

    def _begin_log(self, engine: Engine) -> None:
        if self._core.torn or not self._core.lineage:
            raise Refused(_NOT_HERE, "this member has no state to give")
        self._logging = True
        self._log.limit_bytes = log_limit_bytes(self.state_bytes, engine.reduce_buffer.nbytes)
        self._log.begin(self._core.applied, self._core.lineage)

    def _offer_steps(self, taker: Taker, request: HealRequest, entries: list[Entry]) -> None:
        taker.say(HealOffer(request.have_step, request.have_lineage, [], CHUNK_BYTES))
        taker.told = request.have_step
        taker.tell(entries)

    async def _offer_state(self, taker: Taker, given: Given) -> None:
        root = await given.root()
        records = [BlobRecord(blob.name, blob.view.nbytes) for blob in given.blobs]
        taker.say(HealOffer(given.step, given.lineage, records, CHUNK_BYTES, root, given.square_sum))

    def _use(self, taker: Taker, copy: Given) -> None:
        taker.waits, taker.given = False, copy
        copy.users += 1

    def _let_go(self, taker: Taker) -> None:
        given, taker.given, taker.waits = taker.given, None, False
        if given is None:
            return
        given.users -= 1
        if given.snapshot is not None and not given.users:
            self._copy = None if self._copy is given else self._copy
            given.snapshot.release()

    async def _listen(self, taker: Taker) -> None:
        """Queue what is asked for, until the other side closes; tell it that this side lives."""
        async for message in conversation(taker.connection, taker.generation, taker.silence_s):
            if not isinstance(message, ChunkRequest | TableRequest | StepRequest):
                raise ProtocolError(f"{taker.name} sent {type(message).__name__} to one who gives it a state")
            if len(taker.asks) > WINDOW:
                raise ProtocolError(f"{taker.name} asks for more than {WINDOW} pieces at a time")
            taker.asks.append(message)
            taker.asked.set()

    async def _send(self, taker: Taker) -> None:
        while True:
            while not taker.asks:
                taker.asked.clear()
                await taker.asked.wait()
            ask = taker.asks.popleft()
            match ask:
                case TableRequest() if taker.given is not None:
                    await self._give_piece(taker, memoryview(taker.given.table), ask.stream)
                case ChunkRequest() if taker.given is not None:
                    await self._give_piece(taker, chunk_untrusted(taker.given.blobs, ask), ask.stream)
                case StepRequest():
                    await self._give_step(taker, ask)
                case _:
                    raise ProtocolError(f"{taker.name} asks for parts of a state that it was not offered")

    async def _give_step(self, taker: Taker, ask: StepRequest) -> None:
        if not taker.inside:
            self._let_go(taker)  # it has all of the state
        entry = self._log.find(ask.step)
        if entry is None:
            taker.say(StepGone(ask.step, ask.stream))
            return
        entry.users += 1
        try:
            await self._give_piece(taker, entry.data, ask.stream)
        finally:
            entry.users -= 1

    async def _give_piece(self, taker: Taker, piece: memoryview, stream: int) -> None:
        while not taker.inside and not self._pace.open:
            await self._turn.wait()
        now = self._around.world.clock.now
        began = now()
        self._pace.gives(piece.nbytes)
        taker.connection.send_bulk(piece, generation=taker.generation, stream=stream)
        await _taken(taker.connection, taker.silence_s)
        self._pace.gave(piece.nbytes, now() - began)
        taker.given_bytes += piece.nbytes

    def _ask_for_snapshot(self) -> None:
        """If somebody waits for one, and it would be given at once: it grows old from then on."""
        if self._pace.ready and any(taker.waits for taker in self._takers):
            self._want_snapshot()

    def _next_turn(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()


async def _taken(connection: Connection, silence_s: float) -> None:
    """Wait until the kernel has all that was sent, however long, while some of it goes. Raises as ``flush``."""
    while True:
        unsent_bytes = connection.unsent_bytes
        try:
            await connection.flush(timeout_s=silence_s)
            return
        except DeadlineExceeded:
            if connection.unsent_bytes >= unsent_bytes:
                raise


async def conversation(connection: Connection, generation: int, silence_s: float) -> AsyncIterator[Message]:
    """What the other side of a heal says, until it closes; it is told now and then that this side lives.

    Args:
        silence_s: after which the other side counts as dead.

    Raises:
        DeadlineExceeded: it was silent for too long; the connection is closed.
        ProtocolError, Refused: the connection ended for cause.
    """
    now = asyncio.get_running_loop().time
    beat_s, spoke_at = silence_s / BEATS, now()
    while True:
        try:
            message: Message | None = (await connection.receive(timeout_s=beat_s)).message
        except ConnectionLost:
            return
        except DeadlineExceeded:
            message = None
            if now() - connection.last_heard > silence_s:
                problem = DeadlineExceeded(f"it sent nothing for {silence_s:.1f} s")
                connection.abort(problem)
                raise problem from None
        if now() - spoke_at >= beat_s:
            spoke_at = now()
            connection.send(StillHere(), generation=generation)
        if message is not None and not isinstance(message, StillHere):
            yield message
