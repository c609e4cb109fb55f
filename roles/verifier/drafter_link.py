"""A verifier's link to one drafter: one connection for all sessions that it drafts for, dialled again when it ends.

Whatever goes wrong with a drafter ends the connection, and with it its part in all sessions. It is dialled again with
back-off; after it said what no correct drafter says, only after a minute. How far away it is, is measured by a request
that it answers at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
    UserError,
)
from p2ptrain.core.serving import Sampling
from roles.chain.peer import Context
from roles.line import DIAL_S, QUIET_S, Line
from roles.speculation.cost_model import Average, DrafterModel
from roles.speculation.events import Drafted, DrafterLost, DrafterReady, DrafterState, SendVerdict
from roles.speculation.received import TOO_LONG, drafts_untrusted, packed, refused_untrusted, step_untrusted
from roles.worker.stage_requests import printable
from wire.address import is_loopback
from wire.client import PendingCalls
from wire.connection import Received
from wire.handshake import dial, local_hello
from wire.messages import Message, Refuse, Response
from wire.text_messages import DrafterAt, DraftOpen, DraftReady, Drafts, StreamClose, StreamRefused, Verdict

FIRST_WAIT_S = 0.5
"""Until a drafter is dialled again; it doubles up to ``MISBEHAVED_S`` while it is not reached."""
MISBEHAVED_S, LONGEST_S = 60.0, 3600.0
"""The wait after it said what no correct drafter says; people hear of the same fault again after the longest."""
READY_S = 120.0
"""For a drafter to take in the ids of an opening: a long prompt, and a drafter with much to do."""
PING_S = 5.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the ids of a verifier's sessions mean. ``tokenizer``: a digest."""

    vocab_size: int
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session begins with.

    Attributes:
        ids: all that is known. A drafter that comes later begins with the same ids, and is told by its first verdict
            what was verified since.
        prompt: the pick at this position has sample index 0. positions: that the session may grow to.
        depth: drafts beyond what is verified, until a verdict says otherwise.
    """

    ids: tuple[int, ...]
    prompt: int
    positions: int
    sampling: Sampling
    depth: int


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter of one session, for people and programs.

    Attributes:
        drafter: its number in the session's events. model: what it drafts with. latency_ms: one way.
        bytes_in, bytes_out: of message bodies of this session, from and to it.
    """

    drafter: int
    peer_id: str
    name: str
    model: str
    latency_ms: float
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Connected:
    """A drafter to which there is a connection. ``alpha``: acceptance; None before any draft was compared."""

    peer_id: str
    alpha: float | None
    latency_s: float


class DraftSession:
    """One text's session at one drafter.

    Attributes:
        drafter: its number in the text. stream: the session's number on the connection.
        ready: the drafter has taken in the opening. over: nothing more is told of it.
        drafted: position behind the drafts that came last; 0 before the first.
        bytes_in, bytes_out: of bodies.
    """

    def __init__(
        self, link: DrafterLink, drafter: int, opening: Opening, stream: int, on_event: Callable[[DrafterState], None]
    ) -> None:
        self.link, self.drafter, self.opening, self.stream, self.on_event = link, drafter, opening, stream, on_event
        self.ready = self.over = False
        self.drafted = self.bytes_in = self.bytes_out = 0
        self.timer: asyncio.TimerHandle | None = None

    def facts(self) -> DrafterFacts:
        at, latency_ms = self.link.at, 1e3 * self.link.model.latency_s
        return DrafterFacts(self.drafter, at.peer_id, at.name, at.model, latency_ms, self.bytes_in, self.bytes_out)

    def tell(self, tell: SendVerdict) -> None:
        """Give it a verdict. Never raises."""
        try:
            tokens = packed(tell.tokens, self.link.tokens.vocab_size)
            self.say(Verdict(tell.right, tell.depth, tokens), generation=tell.number)
        except (UserError, ValueError):  # more tokens than a frame holds: it came late to a long text
            asyncio.get_running_loop().call_soon(self.link.lose, self)

    def say(self, message: Message, *, generation: int = 0) -> None:
        """Raises ``UserError``: it is longer than a frame may be."""
        if self.over or self.link.line is None:
            return
        with suppress(ConnectionLost):  # its end is on its way
            self.bytes_out += self.link.line.connection.send(message, generation=generation, stream=self.stream)


class DrafterLink:
    """See the module's docstring. ``run`` is its life.

    Args:
        on_change: told when a session may be opened there, and when that ends.

    Attributes:
        at: where it is. model: how good it is. line: while there is a connection.
        there: it answers. not_before: it is not dialled until then.
    """

    def __init__(
        self,
        around: Context,
        at: DrafterAt,
        tokens: Tokens,
        *,
        on_change: Callable[[DrafterLink], None],
    ) -> None:
        self.at, self.tokens = at, tokens
        self.model = DrafterModel()
        self.line: Line | None = None
        self.there = False
        self.not_before = 0.0
        self._around, self._on_change = around, on_change
        self._now = around.world.clock.now
        self._calls = PendingCalls()
        self._sessions: dict[int, DraftSession] = {}  # by stream
        self._last_stream = 0
        self._refused_until = 0.0  # it refused a session: it is asked for no other one until then
        self._dropped: P2PTrainError | None = None  # why this side ended the connection
        self._said: dict[str, float] = {}  # by class of fault, when people heard of it

    @property
    def free(self) -> bool:
        return self.there and self._now() >= self._refused_until

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    # -------------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            await asyncio.sleep(max(0.0, self.not_before - self._now()))
            began = self._now()
            try:
                await self._connected()
            except P2PTrainError as problem:
                self._tell_why(problem)
                if isinstance(problem, ProtocolError | Refused):
                    wait_s = MISBEHAVED_S
                else:
                    lived = self._now() - began >= PING_S
                    wait_s = FIRST_WAIT_S if lived else min(2 * wait_s, MISBEHAVED_S)
            self.not_before = self._now() + wait_s * self._around.world.random.uniform(1.0, 1.2)

    async def _connected(self) -> None:
        """One connection, until it ends. Raises ``P2PTrainError``: why it did."""
        around, at = self._around, self.at
        hello = local_hello(peer_id=around.peer_id, name=around.name, roles=["verifier"], purpose="draft")
        host = around.seed_host if is_loopback(at.host) else at.host
        connection, _ = await dial(
            around.world.network,
            host,
            at.port,
            hello,
            timeout_s=DIAL_S,
            expect_peer=at.peer_id,
            expect_role="drafter",
        )
        line = self.line = Line(connection, QUIET_S, beat_s=around.silence_s / 4)
        self._dropped, self._last_stream = None, 0
        problem: P2PTrainError = ConnectionLost("it closed the connection")
        try:
            async with line.alive():
                pinging = asyncio.create_task(self._measure(line), name=f"measure {at.name}")
                try:
                    while True:
                        self._take_untrusted(await line.frame())
                finally:
                    pinging.cancel()
                    await asyncio.gather(pinging, return_exceptions=True)
        except P2PTrainError as ended:
            problem = self._dropped or ended
        finally:
            self.line, self.there = None, False
            self._calls.lost(at.name)
            for session in list(self._sessions.values()):
                self.lose(session)
            self._on_change(self)
        raise problem

    async def _measure(self, line: Line) -> None:
        round_trip = Average(weight=0.3)
        try:
            while True:
                began = self._now()
                with suppress(Refused):
                    await self._calls.ask(line.connection.send, "probe.clock", {}, whom=self.at.name, timeout_s=QUIET_S)
                round_trip.add(self._now() - began)
                self.model.latency_s = round_trip.seconds / 2
                if not self.there:
                    self.there = True
                    away = f"{1e3 * self.model.latency_s:.1f} ms away"
                    text = f"drafter {self.at.name} drafts with {self.at.model}, {away}"
                    self._notify("info", "drafter", text, about="there")
                    self._on_change(self)
                await asyncio.sleep(FIRST_WAIT_S if round_trip.count < 9 else PING_S)
        except NetworkError as problem:
            line.connection.abort(problem)

    def _tell_why(self, problem: P2PTrainError) -> None:
        remedy = f"; {problem.remedy}" if problem.remedy else ""
        text = f"drafter {self.at.name}: {problem.message}{remedy}"
        self._notify("warning", "drafter-lost", text, about=type(problem).__name__)

    def _notify(self, level: str, kind: str, text: str, *, about: str) -> None:
        now = self._now()
        if now - self._said.get(about, -LONGEST_S) >= LONGEST_S:
            self._said[about] = now
            self._around.notify(level, kind, text)

    # -------------------------------------------------------------------------------------------------------- sessions

    def open(self, drafter: int, opening: Opening, on_event: Callable[[DrafterState], None]) -> DraftSession:
        """Have the drafter take in a session, for which it must be ``there``. No event comes from within this call."""
        line = self.line
        assert line is not None
        self._last_stream += 1
        session = DraftSession(self, drafter, opening, self._last_stream, on_event)
        self._sessions[session.stream] = session
        session.timer = asyncio.get_running_loop().call_later(READY_S, self._late, session)
        silence_s = max(self._around.silence_s, 16 * self.model.latency_s)
        line.silence_s = min(line.silence_s, silence_s)
        sampling = opening.sampling
        session.say(
            DraftOpen(
                len(opening.ids),
                opening.prompt,
                opening.positions,
                self.tokens.vocab_size,
                self.tokens.tokenizer,
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.seed,
                opening.depth,
                silence_s,
            )
        )
        with suppress(ConnectionLost):
            line.connection.send_bulk(memoryview(encode_ids(opening.ids)), generation=0, stream=session.stream)
        return session

    def close(self, session: DraftSession) -> None:
        """Its text needs it no more. Never raises."""
        if not session.over:
            session.say(StreamClose())
            self._forget(session)

    def lose(self, session: DraftSession) -> None:
        if not session.over:
            self.close(session)
            session.on_event(DrafterLost(session.drafter))

    def drop(self, problem: P2PTrainError) -> None:
        if self.line is not None:
            self._dropped = problem
            self.line.connection.abort(problem)

    def _late(self, session: DraftSession) -> None:
        if not session.ready:
            self.drop(DeadlineExceeded(f"it did not take in a session's tokens within {READY_S:g} s"))

    def _forget(self, session: DraftSession) -> None:
        session.over = True
        self._sessions.pop(session.stream, None)
        if session.timer is not None:
            session.timer.cancel()

    # ------------------------------------------------------------------------------------------------------- listening

    def _take_untrusted(self, received: Received) -> None:
        """Raises ``ProtocolError`` for what no correct drafter says, ``Refused`` if it refuses this verifier."""
        stream, message = received.stream, received.message
        match message:
            case Response():
                if not self._calls.answered(message):
                    raise ProtocolError("it answers what it was not asked")
                return
            case Refuse(code, text, remedy):
                raise Refused(code, f"it refuses: {printable(text)}", remedy=printable(remedy))
            case Drafts() | DraftReady() | StreamRefused():
                if not 0 < stream <= self._last_stream:
                    raise ProtocolError(f"it speaks of session {stream}, which was never opened")
            case _:
                raise ProtocolError(f"it sent {type(message).__name__} to a verifier")
        session = self._sessions.get(stream)
        if session is None:  # the session was over when this was on its way
            return
        session.bytes_in += received.body_bytes
        match message:
            case DraftReady():
                if session.ready:
                    raise ProtocolError("a session of it is ready twice")
                if (draft_s := step_untrusted(message)) and not self.model.draft.count:
                    self.model.draft = Average(draft_s)
                session.ready = True
                session.on_event(DrafterReady(session.drafter, len(session.opening.ids), self.model))
            case Drafts(position):
                if not session.ready:
                    raise ProtocolError("it drafts for a session before it is ready")
                tokens = drafts_untrusted(message, received.generation, vocab_size=self.tokens.vocab_size)
                position = position or session.drafted
                session.drafted = position + len(tokens)
                session.on_event(Drafted(session.drafter, received.generation, position, tokens))
            case StreamRefused():
                refused = refused_untrusted(message)
                self._tell_why(refused)
                if refused.code != TOO_LONG:  # that is about this session
                    self._refused_until = self._now() + PING_S
                self.lose(session)
