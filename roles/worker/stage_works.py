"""The sessions of a worker's stages, and the works that they are given: computed in turn, one at a time.

A work's way: its ``Work`` is checked, its payload lands, it waits in its session's queue, the session has its turn, the
engine runs on the compute thread, and what comes of it goes to the next stage, or the tokens to the client. A session
whose next stage takes nothing has no turns; a stage before it is held back by not being read. What is of an older
attempt, or of a session that was closed meanwhile, is dropped wherever it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from p2ptrain.core.activations import ID_BYTES, IDS, encode_ids
from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.serving import Ran
from p2ptrain.core.texts import shortened
from p2ptrain.core.world import World
from roles.background import Background
from roles.compute_thread import ComputeThread
from roles.worker.parts import MAX_SESSIONS, Part, Shelf
from roles.worker.stage_links import Line, NextStage
from roles.worker.stage_requests import OpenRequest, Place, ReplayRequest, ResumeRequest, SessionRequest
from roles.worker.stage_session import STALE, WORK_POSITIONS, StageSession, Terms
from roles.worker.turns import Turns
from wire.chain_messages import CHAIN_STREAM, ChainBroken, Picked, Took, Work
from wire.connection import GARBLED, Connection
from wire.messages import Message

REPLAY_S = 600.0
"""For one work of a replay, which waits until the next stage has computed earlier ones. How long all of it may take is
for the client to say, who knows how many positions there are."""
NEXT_STAGE, UNKNOWN_SESSION, DUPLICATE = "next-stage", "unknown-session", "duplicate"


@dataclass(eq=False)
class Caller:
    """A client's connection, and what is there for its sake."""

    line: Line
    peer_id: str

    def say(self, message: Message) -> None:
        with suppress(ConnectionLost):  # then its end is on its way, and with it the end of its sessions
            self.line.connection.send(message)


@dataclass(eq=False)
class LiveSession:
    """A session, and what it holds on to.

    Attributes:
        incoming: from the stage before.
        changed: set whenever something of it did.
    """

    core: StageSession
    part: Part
    caller: Caller
    silence_s: float
    link: NextStage | None = None
    incoming: Connection | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> tuple[str, int]:
        return self.core.terms.session, self.core.terms.index


class StageWorks:
    """See the module's docstring.

    Args:
        seed_host: dialled where a place names no host.
        on_change: called when a session begins or ends, and after each work.
    """

    def __init__(
        self,
        world: World,
        shelf: Shelf,
        compute: ComputeThread,
        *,
        peer_id: str,
        name: str,
        seed_host: Callable[[], str],
        on_change: Callable[[], None],
    ) -> None:
        self._world, self._shelf, self._compute = world, shelf, compute
        self._peer_id, self._name, self._seed_host = peer_id, name, seed_host
        self._on_change = on_change
        self.sessions: dict[tuple[str, int], LiveSession] = {}
        self._turns: Turns[LiveSession] = Turns()
        self._wake = asyncio.Event()
        self._background = Background()

    # ------------------------------------------------------------------------------------------------------- requests

    async def open(self, caller: Caller, request: OpenRequest) -> None:
        """Begin a session on a part.

        Raises:
            Refused: the part is not there, full, or has not the memory; or the next stage was not reached.
        """
        part = self._shelf.get(request.part)
        terms = Terms(
            request.session,
            request.index,
            request.stages,
            request.positions,
            part.engine.width,
            request.encoding,
            request.prefill_encoding,
        )
        if (terms.first, terms.last) != (part.spec.start == 0, part.spec.stop == part.spec.layers):
            text = f"layers [{part.spec.start}, {part.spec.stop}) are not stage {terms.index} of {terms.stages}"
            raise Refused("wrong-stage", text)
        if terms.session in {session.core.terms.session for session in self._of(part)} or (
            (terms.session, terms.index) in self.sessions
        ):
            raise Refused(DUPLICATE, f"session {terms.session} is open here already")
        if len(self._of(part)) >= MAX_SESSIONS:
            raise Refused("full", f"{MAX_SESSIONS} sessions are open on this part", remedy="try again later")
        need_bytes = terms.positions * (part.engine.cache_position_bytes + terms.kept_position_bytes)
        gone = self._shelf.make_room(need_bytes, f"{terms.positions} positions of a session", keep=part)
        session = LiveSession(StageSession(terms, request.attempt), part, caller, request.silence_s)
        part.users.add(session)
        part.promised[session] = need_bytes
        self.sessions[session.key] = session
        try:
            await self.unload(gone)
            if session.core.closed:
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            await self._compute.run(
                part.engine.open, terms.session, positions=terms.positions, sampling=request.sampling
            )
            await self._link(session, request.next)
        except BaseException:
            self.close(session)
            raise
        caller.line.silence_s = min(caller.line.silence_s, request.silence_s)
        part.next = request.next.peer if request.next else ""
        self._on_change()

    async def resume(self, caller: Caller, request: ResumeRequest) -> int:
        """Begin another attempt: how much history is here.

        Raises:
            Refused: there is no such session, the attempt is not newer, or the next stage was not reached.
        """
        session = self._find(caller, request.which)
        core = session.core
        if (request.next is None) != core.terms.last:
            raise ProtocolError("the last stage has no next one, and every other has")
        core.raise_attempt(request.attempt)
        self._turns.drop(session)
        session.changed.set()
        position = core.cut(request.keep)  # what is being computed now is dropped: it is of an older attempt
        await self._link(session, request.next)
        session.part.next = request.next.peer if request.next else ""
        return position

    async def replay(self, caller: Caller, request: ReplayRequest) -> None:
        """Give the next stage what it was given once, or should have been.

        Raises:
            Refused: there is no such session or history, or it goes no further.
            NetworkError: the next stage does not take it.
        """
        session = self._find(caller, request.which)
        try:
            for work, payload in session.core.replay(number=request.number, stop=request.stop, last=request.last):
                if session.core.attempt != request.attempt:
                    raise Refused(STALE, f"attempt {request.attempt} is not attempt {session.core.attempt}")
                if session.link is None or session.link.closed:
                    raise Refused(NEXT_STAGE, "the next stage is lost")
                session.link.give(work, payload)
                async with asyncio.timeout(REPLAY_S):
                    await session.link.room()
        except TimeoutError:
            text = f"the next stage did not take {WORK_POSITIONS} positions of the replay within {REPLAY_S:g} s"
            raise Refused(NEXT_STAGE, text) from None
        except NetworkError as problem:
            raise Refused(NEXT_STAGE, f"the next stage is lost: {problem.message}") from problem

    def close_of(self, caller: Caller, which: SessionRequest) -> None:
        """Close a session; one that is not there is fine."""
        with suppress(Refused):
            self.close(self._find(caller, which))

    def close(self, session: LiveSession) -> None:
        """Forget a session. What is computed for it now is dropped."""
        if self.sessions.get(session.key) is not session:
            return
        del self.sessions[session.key]
        session.core.close()
        self._turns.drop(session)
        if session.link is not None:
            session.link.close()
        if session.incoming is not None:
            session.incoming.abort()
        self._shelf.leave(session.part, session, self._world.clock.now())
        session.changed.set()
        # Queued now: a client that opens it again at once asks for that behind this.
        closing = self._compute.submit(session.part.engine.close, session.core.terms.session)
        self._background.start(_ended(closing), "close session")
        self._on_change()

    def close_all_of(self, caller: Caller) -> None:
        for session in [each for each in self.sessions.values() if each.caller is caller]:
            self.close(session)

    def _find(self, caller: Caller, which: SessionRequest) -> LiveSession:
        """Raises ``Refused``: not there, another client's, or which of several is not said."""
        mine = [
            session
            for (name, index), session in self.sessions.items()
            if name == which.session and session.caller is caller and which.index in (-1, index)
        ]
        if not mine:
            raise Refused(UNKNOWN_SESSION, f"session {which.session} is not open here")
        if len(mine) > 1:
            raise Refused("ambiguous", f"this worker has {len(mine)} stages of that session", remedy="name the index")
        return mine[0]

    def _of(self, part: Part) -> list[LiveSession]:
        return [session for session in self.sessions.values() if session.part is part]

    def count(self, part: Part) -> int:
        """Sessions that are open on it."""
        return len(self._of(part))

    async def _link(self, session: LiveSession, place: Place | None) -> None:
        """See to it that the session's link leads to ``place``. Raises ``Refused``."""
        async with session.linking:
            link = session.link
            if link is not None and link.place == place and not link.closed:
                return
            if link is not None:
                link.close()
                session.link = None
            if place is None:
                return
            terms = session.core.terms
            try:
                made = await NextStage.dial(
                    self._world,
                    place,
                    peer_id=self._peer_id,
                    name=self._name,
                    seed_host=self._seed_host(),
                    session=terms.session,
                    index=terms.index + 1,
                    silence_s=session.silence_s,
                    on_lost=lambda problem: self._next_lost(session, made, problem),
                    on_room=self._wake.set,
                )
            except P2PTrainError as problem:
                text = f"stage {terms.index} cannot reach the next one: {problem.message}"
                raise Refused(NEXT_STAGE, text, remedy=problem.remedy) from problem
            if session.core.closed:
                made.close()
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            session.link = made

    def _next_lost(self, session: LiveSession, link: NextStage, problem: P2PTrainError) -> None:
        if session.link is link:
            session.link = None
            self._broken(session, session.core.terms.index + 1, NEXT_STAGE, problem)

    # ---------------------------------------------------------------------------------------------------------- works

    async def take(self, line: Line, work: Work, session: LiveSession | None) -> None:
        """Take a work in, and its payload behind it.

        Args:
            session: that it is of; None where that was closed a moment ago, on its first stage.

        Raises:
            ProtocolError: no correct peer sends such a work.
            NetworkError: the payload did not come.
        """
        if session is None:
            if work.encoding != IDS or not 0 < work.count <= WORK_POSITIONS:
                raise ProtocolError(f"a work of session {work.session[:64]!r}, which is not open here")
            await line.bulk(ID_BYTES * work.count, stream=CHAIN_STREAM)
            return
        size_bytes = session.core.terms.payload_bytes_untrusted(work)
        payload = await line.bulk(size_bytes, stream=CHAIN_STREAM)
        if session.core.admit(work, payload):
            self._turns.add(session)
            self._wake.set()

    async def serve_stage(self, connection: Connection, session: LiveSession) -> None:
        """Take the works of the stage before, as fast as they are computed. Raises as ``take``."""
        if session.incoming is not None:
            session.incoming.abort()  # the stage before was replaced
        session.incoming = connection
        line = Line(connection, session.silence_s)
        async with line.alive():
            async for message in line.messages():
                if not isinstance(message, Work) or message.session != session.core.terms.session:
                    raise ProtocolError(f"a stage sent {type(message).__name__}, or a work of another session")
                while session.core.crowded and session.incoming is connection:
                    await self._changed(session)
                if session.core.closed:
                    return
                await self.take(line, message, session)

    async def run(self) -> None:
        """Compute what there is to compute, until cancelled."""
        while True:
            session = self._turns.take(lambda each: each.link is None or not each.link.crowded)
            if session is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            work, payload = session.core.queue.popleft()
            if session.core.queue:
                self._turns.add(session)
            session.changed.set()
            await self._compute_one(session, work, payload)
            self._on_change()

    async def _compute_one(self, session: LiveSession, work: Work, payload: bytearray) -> None:
        core, now = session.core, self._world.clock.now
        began = now()
        try:
            core.begin(work)
            ran: Ran = await self._compute.run(
                session.part.engine.run,
                core.terms.session,
                keep=work.keep,
                payload=memoryview(payload),
                count=work.count,
                encoding=work.encoding,
                out_encoding=core.terms.out_encoding(work),
                picks=work.picks if core.terms.last else 0,
                draw=work.draw,
            )
        except P2PTrainError as problem:
            if core.current(work):
                self._broken(session, core.terms.index, _code(problem), problem)
            return
        took_s = now() - began
        session.part.pace.add(now(), took_s, work.count)
        if not core.current(work):
            return
        core.done(work, ran.payload)
        spent_us = [*work.spent_us, round(1e6 * took_s)]
        if work.last == core.terms.index:
            self._ended(session, work, ran, spent_us)
        elif session.link is not None:
            session.part.out_position_bytes = ran.payload.nbytes / work.count
            onward = Work(
                work.session,
                work.attempt,
                work.number,
                work.keep,
                work.count,
                core.terms.out_encoding(work),
                work.last,
                work.picks,
                work.draw,
                spent_us,
                work.prefill,
            )
            with suppress(ConnectionLost):  # who listens on it tells
                session.link.give(onward, ran.payload)

    def _ended(self, session: LiveSession, work: Work, ran: Ran, spent_us: list[int]) -> None:
        if work.picks:
            tokens = encode_ids(ran.tokens)
            session.caller.say(Picked(work.session, work.attempt, work.number, tokens, spent_us))
        else:
            session.caller.say(Took(work.session, work.attempt, work.number, spent_us))

    def _broken(self, session: LiveSession, lost: int, code: str, problem: P2PTrainError) -> None:
        """It goes no further in this attempt: the client is told, and may mend it."""
        core = session.core
        core.fail()
        self._turns.drop(session)
        session.changed.set()
        session.caller.say(
            ChainBroken(
                core.terms.session,
                core.attempt,
                lost,
                code,
                shortened(problem.message),
                shortened(problem.remedy),
            )
        )

    # -------------------------------------------------------------------------------------------------------- helpers

    async def unload(self, parts: list[Part]) -> None:
        """Let the last reference to each end on the compute thread, where a device's memory is given back."""
        while parts:
            await self._compute.run(_let_go, parts)
            self._on_change()

    async def _changed(self, session: LiveSession) -> None:
        session.changed.clear()
        await session.changed.wait()


async def _ended(call: asyncio.Future[None]) -> None:
    await call


def _let_go(parts: list[Part]) -> None:
    parts.pop()


def _code(problem: P2PTrainError) -> str:
    if isinstance(problem, Refused):
        return problem.code
    return GARBLED if isinstance(problem, ProtocolError) else "failed"
