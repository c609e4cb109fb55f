"""The drafter: a whole small model that guesses tokens ahead for the sessions of verifiers.

A verifier dials once (purpose ``draft``) for all of its sessions. It numbers them: the ``stream`` of a frame. A session
begins with all ids so far. Then its core (``roles.drafter.drafting``) decides what the engine runs and what is
sent. Verdicts go to the core as soon as they arrive.

One engine computes for all sessions in turn, one step at a time. A long prompt is processed in pieces, so that other
sessions' drafts wait for a few short steps at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from p2ptrain.core.activations import ID_BYTES, IDS, encode_ids
from p2ptrain.core.errors import (
    ConnectionLost,
    JobFailed,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
)
from p2ptrain.core.serving import Pass, Sampling
from p2ptrain.core.texts import human_bytes, shortened
from p2ptrain.core.world import World
from roles.background import Background
from roles.compute_thread import ComputeThread, Turns
from roles.drafter.draft_messages import (
    ENGINE,
    FULL,
    OTHER_TOKENIZER,
    TOO_LONG,
    ids_untrusted,
    packed,
    sampling_untrusted,
    told_untrusted,
)
from roles.drafter.drafting import Drafting
from roles.drafter.events import Run, RunDone, Send, Signal, VerdictReceived
from roles.engine import StageEngine
from roles.gauges import Rate
from roles.line import QUIET_S, Line
from roles.verifier.cost_model import Average
from roles.worker.stage_requests import printable
from wire.connection import Connection, Received
from wire.messages import Hello, Message, RefusalCode, Refuse, Request, Response
from wire.text_messages import (
    DraftOpen,
    DraftReady,
    Drafts,
    Serving,
    StreamClose,
    StreamRefused,
    Verdict,
)

PURPOSES = frozenset({"draft"})
MAX_CALLERS = 64
MAX_SESSIONS = 32
BEAT_S = 0.5
"""Interval of heartbeats to a verifier that has not told its silence limit yet."""
SHARED_PIECE = 256
"""Positions of a prompt that are processed at a time while there are other sessions."""
LONGER = "draft with a model of a longer context"


@dataclass(frozen=True, slots=True)
class Serves:
    """What a drafter drafts with.

    Attributes:
        model: name for people. context: positions that it knows; 0: unlimited or unknown. tokenizer: a digest.
        limit_bytes: limit of the caches of all sessions together; 0: none.
    """

    engine: StageEngine
    model: str
    context: int = 0
    tokenizer: str = ""
    limit_bytes: int = 0


@dataclass(eq=False)
class _Caller:
    """A verifier's connection. ``last``: highest session number it opened. ``right``: accepted drafts of this
    drafter."""

    line: Line
    name: str
    sessions: dict[int, _Session] = field(default_factory=dict)
    last: int = 0
    right: int = 0

    def say(self, message: Message, *, generation: int = 0, stream: int = 0) -> None:
        with suppress(ConnectionLost):  # the end of the connection ends its sessions
            self.line.connection.send(message, generation=generation, stream=stream)


@dataclass(eq=False)
class _Session:
    """One session.

    Attributes:
        name: name at the engine. positions: largest length; its cache takes ``cache_bytes``.
        drafted: position after the drafts that were sent last; 0 before the first.
        wanted: the run that the core requested; None: none.
        taken: positions of ``wanted`` that were run already, in pieces.
        opened: the engine has the session. ready: ``DraftReady`` was sent.
    """

    name: str
    stream: int
    caller: _Caller
    core: Drafting
    opening: DraftOpen
    sampling: Sampling
    positions: int
    cache_bytes: int
    drafted: int = 0
    wanted: Run | None = None
    taken: int = 0
    opened: bool = False
    ready: bool = False
    closed: bool = False


class Gauge:
    """A drafter's figures: of the last seconds, and totals.

    Attributes:
        draft: time of a draft.
        tokens: drafted tokens per second. busy: share of the time that the engine computes.
        drafts: all drafts sent. right: accepted ones. wrong: contradicted ones, without the drafts after them.
    """

    def __init__(self) -> None:
        self.draft, self.tokens, self.busy = Average(), Rate(), Rate()
        self.drafts = self.right = self.wrong = 0

    def figures(self, now: float) -> dict[str, float]:
        judged = self.right + self.wrong
        alpha = {"alpha": self.right / judged} if judged else {}
        return alpha | {
            "tokens_per_s": self.tokens.per_s(now),
            "busy": min(1.0, self.busy.per_s(now)),
            "step_ms": 1e3 * self.draft.seconds,
            "drafts": float(self.drafts),
        }


class Drafter:
    """See the module's docstring.

    Args:
        tell: gets lines for people about verifiers that come and go.

    Attributes:
        gauge: figures of its work.
    """

    def __init__(
        self,
        world: World,
        compute: ComputeThread,
        serves: Serves,
        *,
        most_sessions: int = MAX_SESSIONS,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.serves = serves
        self._tell = tell
        self.gauge = Gauge()
        self._engine = serves.engine
        self._now = world.clock.now
        self._compute = compute
        self._most_sessions = most_sessions
        self._callers: set[_Caller] = set()
        self._sessions: set[_Session] = set()
        self._turns: Turns[_Session] = Turns()
        self._wake = asyncio.Event()
        self._names = count(1)
        self._background = Background()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def serving(self) -> Serving:
        serves = self.serves
        stats = self.gauge.figures(self._now())
        return Serving(
            serves.model, self._engine.vocab_size, serves.context, serves.tokenizer, "", self.sessions, stats
        )

    # ----------------------------------------------------------------------------------------------------- connections

    def decide(self, hello: Hello) -> Refuse | None:
        """Decide whether a caller of purpose ``draft`` is served; None: yes."""
        if len(self._callers) >= MAX_CALLERS:
            return Refuse(RefusalCode.FULL, f"{MAX_CALLERS} verifiers are served already", "start another drafter")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Draft for one verifier until its connection ends. Raises ``ProtocolError``, ``Refused``: the verifier is at
        fault."""
        caller = _Caller(Line(connection, QUIET_S, beat_s=BEAT_S), printable(hello.name) or "a verifier")
        self._callers.add(caller)
        self._tell(f"{caller.name} connected: this drafter drafts for its texts")
        try:
            async with caller.line.alive():
                while True:
                    await self._heard(caller, await caller.line.frame())
        except NetworkError:
            return  # the connection ended
        finally:
            self._callers.discard(caller)
            self._tell(f"the connection to {caller.name} has ended; {caller.right} of its tokens were drafted here")
            for session in list(caller.sessions.values()):
                self._close(session)

    async def _heard(self, caller: _Caller, received: Received) -> None:
        stream = received.stream
        match received.message:
            case DraftOpen() as opening:
                await self._open_untrusted(caller, stream, opening)
            case Verdict() as verdict:
                session = self._find_untrusted(caller, stream)
                if session is not None:
                    vocab_size, verified = session.opening.vocab_size, session.core.known
                    number = received.generation
                    told = told_untrusted(verdict, number, verified=verified, vocab_size=vocab_size)
                    self._told_untrusted(session, told)
            case StreamClose():
                session = self._find_untrusted(caller, stream)
                if session is not None:
                    self._close(session)
            case Request(id=number, method="probe.clock"):
                caller.say(Response(number, {}))
            case message:
                raise ProtocolError(f"a verifier sent an unexpected {type(message).__name__}")

    def _find_untrusted(self, caller: _Caller, stream: int) -> _Session | None:
        """The session; None: it is over. Raises ``ProtocolError``: it was never opened."""
        if not 0 < stream <= caller.last:
            raise ProtocolError(f"session {stream} was not opened")
        return caller.sessions.get(stream)

    async def _open_untrusted(self, caller: _Caller, stream: int, opening: DraftOpen) -> None:
        """Open a session. Raises ``ProtocolError``: the opening is invalid. ``NetworkError``: its ids did not
        arrive."""
        sampling = sampling_untrusted(opening)
        if stream <= caller.last:
            raise ProtocolError(f"session {stream} was opened after session {caller.last}")
        caller.last = stream
        caller.line.silence_s = min(caller.line.silence_s, opening.silence_s)
        data = await caller.line.bulk(ID_BYTES * opening.count, stream=stream)
        ids = ids_untrusted(data, vocab_size=opening.vocab_size)
        try:
            positions, cache_bytes = self._admitted(opening)
        except Refused as refused:
            self._refuse(caller, stream, refused)
            return
        core = Drafting(ids, prompt=opening.prompt, positions=opening.positions, depth=opening.depth)
        name = f"draft-{next(self._names)}"
        session = _Session(name, stream, caller, core, opening, sampling, positions, cache_bytes)
        caller.sessions[stream] = session
        self._sessions.add(session)
        self._feed(session, Signal.BEGAN)

    def _admitted(self, opening: DraftOpen) -> tuple[int, int]:
        """Largest length of the session here, and the bytes of its cache. Raises ``Refused``."""
        serves = self.serves
        if opening.tokenizer != serves.tokenizer:  # vocabularies may be padded differently
            text = f"{serves.model} has another tokenizer than the verifier's model"
            raise Refused(OTHER_TOKENIZER, text, remedy="draft with a model of the same family")
        positions = min(opening.positions, serves.context or opening.positions)
        if positions <= opening.count:
            text = f"{opening.count} tokens are too many: {serves.model} has a context of {serves.context}"
            raise Refused(TOO_LONG, text, remedy=LONGER)
        if len(self._sessions) >= self._most_sessions:
            raise Refused(
                FULL, f"the drafter already has {self._most_sessions} sessions", remedy="start another drafter"
            )
        cache_bytes = positions * self._engine.cache_position_bytes
        left_bytes = serves.limit_bytes - sum(session.cache_bytes for session in self._sessions)
        if serves.limit_bytes and cache_bytes > left_bytes:
            text = (
                f"{positions} positions take {human_bytes(cache_bytes)} of memory, and {human_bytes(left_bytes)} are"
                f" left of {human_bytes(serves.limit_bytes)}"
            )
            raise Refused(FULL, text, remedy="start another drafter, or give this one more memory: --memory")
        return positions, cache_bytes

    def _refuse(self, caller: _Caller, stream: int, problem: P2PTrainError) -> None:
        code = problem.code if isinstance(problem, Refused) else ENGINE
        caller.say(StreamRefused(code, shortened(problem.message), shortened(problem.remedy)), stream=stream)

    def _close(self, session: _Session) -> None:
        if session.closed:
            return
        session.closed = True
        self._sessions.discard(session)
        session.caller.sessions.pop(session.stream, None)
        self._turns.drop(session)
        if session.opened:  # else the engine does not have it; verifiers may open and close fast
            self._background.start(_ended(self._compute.submit(self._engine.close, session.name)), "close session")

    # -------------------------------------------------------------------------------------------------------- the core

    def _told_untrusted(self, session: _Session, told: VerdictReceived) -> None:
        epoch, right = session.core.epoch, told.start - session.core.known
        self._feed(session, told)
        session.caller.right += right
        self.gauge.right += right
        self.gauge.wrong += session.core.epoch != epoch

    def _feed(self, session: _Session, event: Signal | VerdictReceived | RunDone) -> None:
        instructions = session.core.handle(event, self._now())
        if session.core.ready and not session.ready:
            session.ready = True
            session.caller.say(DraftReady(1e3 * self.gauge.draft.seconds), stream=session.stream)
        for instruction in instructions:
            match instruction:
                case Run():
                    session.wanted, session.taken = instruction, 0
                    self._turns.add(session)
                    self._wake.set()
                case Send(epoch, position, tokens):
                    self.gauge.drafts += len(tokens)
                    self.gauge.tokens.add(len(tokens), self._now())
                    follows = position == session.drafted
                    session.drafted = position + len(tokens)
                    drafts = Drafts(0 if follows else position, packed(tokens, session.opening.vocab_size))
                    session.caller.say(drafts, generation=epoch, stream=session.stream)

    async def run(self) -> None:
        while True:
            session = self._turns.take(lambda each: True)
            if session is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await self._step(session)
            except Exception as mistake:  # a defect of this program must not end other sessions  # noqa: BLE001
                context = {"message": "a session failed", "exception": mistake}
                asyncio.get_running_loop().call_exception_handler(context)
                if not session.closed:
                    self._refuse(session.caller, session.stream, JobFailed(f"{type(mistake).__name__}: {mistake}"))
                    self._close(session)

    async def _step(self, session: _Session) -> None:
        run = session.wanted
        assert run is not None
        left = len(run.ids) - session.taken
        piece = left if len(self._sessions) == 1 else min(left, SHARED_PIECE)
        try:
            samples = await self._compute_piece(session, run, piece, last=piece == left)
        except P2PTrainError as problem:
            if not session.closed:
                self._refuse(session.caller, session.stream, problem)
                self._close(session)
            return
        if session.closed:
            return
        session.taken += piece
        if piece < left:
            self._turns.add(session)
            return
        session.wanted = None
        self._feed(session, RunDone(tuple(token for token in samples if token < session.opening.vocab_size)))

    async def _compute_piece(self, session: _Session, run: Run, piece: int, *, last: bool) -> tuple[int, ...]:
        """Run one piece. Return the sample after the last piece, else nothing.

        Raises:
            P2PTrainError: the engine fails, or the session is too long for it.
        """
        keep = run.keep + session.taken
        if keep + piece > session.positions:
            text = f"{keep + piece} tokens are too many: {self.serves.model} has a context of {self.serves.context}"
            raise Refused(TOO_LONG, text, remedy=LONGER)
        began = self._now()
        if not session.opened:
            session.opened = True
            opening = partial(self._engine.open, positions=session.positions, sampling=session.sampling)
            await self._compute.run(opening, session.name)
        # The verifier's vocabulary may be padded to more: a token that only it has is replaced by another one.
        ids = [min(token, self._engine.vocab_size - 1) for token in run.ids[session.taken : session.taken + piece]]
        ran = await self._compute.run(
            self._engine.run,
            session.name,
            Pass(keep, memoryview(encode_ids(ids)), piece, IDS, IDS, run.samples if last else 0, run.sample_index),
        )
        now = self._now()
        if piece == 1:
            self.gauge.draft.add(now - began)
        self.gauge.busy.add(now - began, now)
        return ran.tokens


async def _ended(call: asyncio.Future[None]) -> None:
    await call
