"""The drafter: a whole small model that guesses tokens ahead for the sessions of verifiers.

A verifier dials once (purpose ``draft``) for all of its sessions. It numbers them: the ``stream`` of a frame. A session
begins with all ids so far. Then its core (``roles.drafter.drafting``) decides what the model computes and what is
sent. Verdicts go to the core as soon as they arrive.

One model computes for all sessions in turn, one pass at a time. A long prompt is processed in pieces, so that other
sessions' drafts wait for a few short passes at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from p2ptrain.core.activations import ID_BYTES
from p2ptrain.core.errors import (
    ConnectionLost,
    JobFailed,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
)
from p2ptrain.core.serving import Sampling
from p2ptrain.core.texts import human_bytes, printable, shortened
from p2ptrain.core.world import World
from roles.background import Background
from roles.compute_thread import ComputeThread
from roles.drafter.draft_messages import (
    ENGINE,
    FULL,
    OTHER_TOKENIZER,
    TOO_LONG,
    ids_untrusted,
    packed,
    sampling_untrusted,
    verdict_untrusted,
)
from roles.drafter.drafting import DraftedText, DraftInstruction, DraftSending, DraftVerdict
from roles.engine import StageEngine
from roles.gauges import MovingAverage, Rate
from roles.line import QUIET_S, Line
from roles.serving.local_model import LocalModel, LocalSession
from roles.serving.model import PassRequest
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

    def send(self, message: Message, *, generation: int = 0, stream: int = 0) -> None:
        with suppress(ConnectionLost):  # the end of the connection ends its sessions
            self.line.connection.send(message, generation=generation, stream=stream)


@dataclass(eq=False)
class _Session:
    """One session.

    Attributes:
        positions: largest length; its cache takes ``cache_bytes``.
        drafted: position after the drafts that were sent last; 0 before the first.
        wanted: the pass that the core requested last. has_work: it is not computed yet.
        ready: ``DraftReady`` was sent. task: computes.
    """

    stream: int
    caller: _Caller
    core: DraftedText
    opening: DraftOpen
    sampling: Sampling
    positions: int
    cache_bytes: int
    drafted: int = 0
    wanted: PassRequest | None = None
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = False
    task: asyncio.Task[None] | None = None


class Gauge:
    """A drafter's figures: of the last seconds, and totals.

    Attributes:
        draft: time of a draft.
        tokens: drafted tokens per second. busy: share of the time that the engine computes.
        drafts: all drafts sent. right: accepted ones. wrong: contradicted ones, without the drafts after them.
    """

    def __init__(self) -> None:
        self.draft, self.tokens, self.busy = MovingAverage(), Rate(), Rate()
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


class DraftServer:
    """See the module's docstring.

    Args:
        on_news: gets lines for people about verifiers that come and go.

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
        on_news: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.serves = serves
        self._on_news = on_news
        self.gauge = Gauge()
        self._model = LocalModel(serves.engine, compute, world.clock, label=serves.model, max_sessions=0)
        self._now = world.clock.now
        self._most_sessions = most_sessions
        self._callers: set[_Caller] = set()
        self._sessions: set[_Session] = set()
        self._tasks = Background()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def serving(self) -> Serving:
        serves = self.serves
        stats = self.gauge.figures(self._now())
        return Serving(serves.model, self._model.vocab_size, serves.context, serves.tokenizer, "", self.sessions, stats)

    async def close(self) -> None:
        """End all sessions. The connections are closed by whoever accepted them."""
        await self._tasks.stop()

    # ----------------------------------------------------------------------------------------------------- connections

    def decide(self, hello: Hello) -> Refuse | None:
        """Decide whether a caller of purpose ``draft`` is served; None: yes."""
        if len(self._callers) >= MAX_CALLERS:
            return Refuse(RefusalCode.FULL, f"{MAX_CALLERS} verifiers are served already", "start another drafter")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Draft for one verifier until its connection ends. Raises ``ProtocolError``, ``Refused``: the verifier is at
        fault."""
        caller = _Caller(Line(connection, QUIET_S, beat_s=BEAT_S), printable(hello.name, 200) or "a verifier")
        self._callers.add(caller)
        self._on_news(f"{caller.name} connected: this drafter drafts for its texts")
        try:
            async with caller.line.alive():
                while True:
                    await self._receive(caller, await caller.line.frame())
        except NetworkError:
            return  # the connection ended
        finally:
            self._callers.discard(caller)
            self._on_news(f"the connection to {caller.name} has ended; {caller.right} of its tokens were drafted here")
            for session in list(caller.sessions.values()):
                self._close(session)

    async def _receive(self, caller: _Caller, received: Received) -> None:
        stream = received.stream
        match received.message:
            case DraftOpen() as opening:
                await self._open_untrusted(caller, stream, opening)
            case Verdict() as verdict:
                session = self._find_untrusted(caller, stream)
                if session is not None:
                    vocab_size, verified = session.opening.vocab_size, session.core.known
                    number = received.generation
                    checked = verdict_untrusted(verdict, number, verified=verified, vocab_size=vocab_size)
                    self._take_verdict_untrusted(session, checked)
            case StreamClose():
                session = self._find_untrusted(caller, stream)
                if session is not None:
                    self._close(session)
            case Request(id=number, method="probe.clock"):
                caller.send(Response(number, {}))
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
        core = DraftedText(ids, prompt=opening.prompt, positions=opening.positions, depth=opening.depth)
        session = _Session(stream, caller, core, opening, sampling, positions, cache_bytes)
        caller.sessions[stream] = session
        self._sessions.add(session)
        self._carry_out(session, core.begin())
        session.task = self._tasks.start(self._draft(session), f"draft {stream} of {caller.name}")

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
        cache_bytes = positions * serves.engine.cache_position_bytes
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
        caller.send(StreamRefused(code, shortened(problem.message), shortened(problem.remedy)), stream=stream)

    def _give_up(self, session: _Session, problem: P2PTrainError) -> None:
        if session in self._sessions:
            self._refuse(session.caller, session.stream, problem)
            self._close(session)

    def _close(self, session: _Session) -> None:
        self._sessions.discard(session)
        session.caller.sessions.pop(session.stream, None)
        if session.task is not None:
            session.task.cancel()

    # -------------------------------------------------------------------------------------------------------- the core

    def _take_verdict_untrusted(self, session: _Session, verdict: DraftVerdict) -> None:
        epoch, right = session.core.epoch, verdict.start - session.core.known
        self._carry_out(session, session.core.take_verdict(verdict))
        session.caller.right += right
        self.gauge.right += right
        self.gauge.wrong += session.core.epoch != epoch

    def _carry_out(self, session: _Session, instructions: Sequence[DraftInstruction]) -> None:
        if session.core.ready and not session.ready:
            session.ready = True
            session.caller.send(DraftReady(1e3 * self.gauge.draft.seconds), stream=session.stream)
        for instruction in instructions:
            match instruction:
                case PassRequest():
                    session.wanted = instruction
                    session.has_work.set()
                case DraftSending(epoch, position, tokens):
                    self.gauge.drafts += len(tokens)
                    self.gauge.tokens.add(len(tokens), self._now())
                    follows = position == session.drafted
                    session.drafted = position + len(tokens)
                    drafts = Drafts(0 if follows else position, packed(tokens, session.opening.vocab_size))
                    session.caller.send(drafts, generation=epoch, stream=session.stream)

    async def _draft(self, session: _Session) -> None:
        """Compute what the core wants, until the session is closed or fails."""
        try:
            model = await self._model.open(
                positions=session.positions, sampling=session.sampling, sample_from=session.opening.prompt
            )
            try:
                while True:
                    await session.has_work.wait()
                    session.has_work.clear()
                    assert session.wanted is not None
                    samples = await self._compute(session, model, session.wanted)
                    known = tuple(token for token in samples if token < session.opening.vocab_size)
                    self._carry_out(session, session.core.take_samples(known))
            finally:
                await model.close()
        except P2PTrainError as problem:
            self._give_up(session, problem)
        except Exception as mistake:  # a defect of this program must not end other sessions  # noqa: BLE001
            context = {"message": "a session failed", "exception": mistake}
            asyncio.get_running_loop().call_exception_handler(context)
            self._give_up(session, JobFailed(f"{type(mistake).__name__}: {mistake}"))

    async def _compute(self, session: _Session, model: LocalSession, request: PassRequest) -> tuple[int, ...]:
        """Compute a pass, in pieces while there are other sessions. Returns its samples.

        Raises:
            P2PTrainError: the engine fails, or the session is too long for it.
        """
        # The verifier's vocabulary may be padded to more: a token that only it has is replaced by another one.
        ids = tuple(min(token, self._model.vocab_size - 1) for token in request.ids)
        taken = 0
        while True:
            left = len(ids) - taken
            size = left if len(self._sessions) == 1 else min(left, SHARED_PIECE)
            keep = request.keep + taken
            if keep + size > session.positions:
                text = f"{keep + size} tokens are too many: {self.serves.model} has a context of {self.serves.context}"
                raise Refused(TOO_LONG, text, remedy=LONGER)
            piece = PassRequest(keep, ids[taken : taken + size], request.samples if size == left else 0)
            result = await model.append(piece)
            if size == 1:
                self.gauge.draft.add(result.took_s)
            self.gauge.busy.add(result.took_s, self._now())
            taken += size
            if taken == len(ids):
                return result.tokens
