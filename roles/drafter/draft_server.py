"""The drafter: a whole small model that guesses the next tokens of texts that verifiers write.

A verifier dials once (purpose ``draft``) for all of its texts. Each has a session here, numbered by the verifier: the
``stream`` of a frame. A session begins with all token ids so far. Then its core (``roles.drafter.drafting``) decides
what the model computes and what is sent. Verdicts go to the core as soon as they arrive.

One model (``LocalModel``) computes for all sessions, in batches, and limits their number and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from p2ptrain.core.activations import ID_BYTES, encode_ids
from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.serving import Sampling
from p2ptrain.core.texts import printable
from p2ptrain.core.world import World
from roles.drafter.drafting import (
    OTHER_TOKENIZER,
    TOO_LONG,
    DraftedText,
    DraftInstruction,
    DraftSending,
    ids_untrusted,
    verdict_untrusted,
)
from roles.gauges import Rate
from roles.line import QUIET_S, Line
from roles.serving.local_model import LocalModel, LocalSession
from roles.serving.model import PassRequest
from roles.serving.texts import report_defect
from wire.connection import Connection, Received
from wire.messages import Hello, Message, RefusalCode, Refuse, Request, Response
from wire.text_messages import DraftOpen, DraftReady, Drafts, Serving, StreamClose, Verdict, encode_refusal

PURPOSES = frozenset({"draft"})
MAX_CALLERS = 64
MAX_SESSIONS = 32
BEAT_S = 0.5
"""Interval of heartbeats to a verifier that has not told its silence limit yet."""


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
        positions: its largest length: the verifier's, or the model's context.
        passes: what the core wants computed; one pass at most.
        is_ready: ``DraftReady`` was sent.
    """

    stream: int
    caller: _Caller
    core: DraftedText
    opening: DraftOpen
    sampling: Sampling
    positions: int
    passes: asyncio.Queue[PassRequest] = field(default_factory=asyncio.Queue)
    is_ready: bool = False
    task: asyncio.Task[None] | None = None


class DraftServer:
    """See the module's docstring.

    Args:
        name: of the model, for people. tokenizer: its digest.
        on_news: gets lines for people about verifiers that come and go.

    Attributes:
        right: accepted drafts. wrong: contradicted ones, without the drafts after them.
    """

    def __init__(
        self,
        world: World,
        model: LocalModel,
        name: str,
        tokenizer: str,
        *,
        on_news: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._model, self._name, self._tokenizer = model, name, tokenizer
        self._on_news = on_news
        self._draft_rate = Rate()
        self.right = self.wrong = 0
        self._now = world.clock.now
        self._callers: set[_Caller] = set()
        self._tasks = Background()

    @property
    def sessions(self) -> int:
        return sum(len(caller.sessions) for caller in self._callers)

    def describe(self) -> list[Serving]:
        """What the seed lists of this drafter."""
        model, stats = self._model, {"tokens_per_s": self._draft_rate.per_s(self._now())}
        if judged := self.right + self.wrong:
            stats["alpha"] = self.right / judged
        return [Serving(self._name, model.vocab_size, model.context or 0, self._tokenizer, "", self.sessions, stats)]

    async def close(self) -> None:
        """End all sessions and connections."""
        for caller in self._callers:
            caller.line.connection.abort()
        await self._tasks.stop()

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
            async with caller.line.keep_alive():
                while True:
                    await self._receive(caller, await caller.line.receive())
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
                if (session := self._find_untrusted(caller, stream)) is not None:
                    self._take_verdict_untrusted(session, verdict, received.generation)
            case StreamClose():
                if (session := self._find_untrusted(caller, stream)) is not None:
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
        sampling = replace(opening.sampling, vocab_size=opening.vocab_size)
        if stream <= caller.last:
            raise ProtocolError(f"session {stream} was opened after session {caller.last}")
        caller.last = stream
        caller.line.silence_s = min(caller.line.silence_s, opening.silence_s)
        data = await caller.line.receive_bulk(ID_BYTES * opening.count, stream=stream)
        ids = ids_untrusted(data, vocab_size=opening.vocab_size)
        core = DraftedText(ids, prompt=opening.prompt, positions=opening.positions, depth=opening.depth)
        positions = min(opening.positions, self._model.context or opening.positions)
        session = _Session(stream, caller, core, opening, sampling, positions)
        caller.sessions[stream] = session
        self._carry_out(session, core.next_instructions())
        session.task = self._tasks.start(self._draft(session), f"draft {stream} of {caller.name}")

    def _give_up(self, session: _Session, problem: P2PTrainError) -> None:
        if session.stream in session.caller.sessions:
            session.caller.send(encode_refusal(problem), stream=session.stream)
            self._close(session)

    def _close(self, session: _Session) -> None:
        session.caller.sessions.pop(session.stream, None)
        if session.task is not None:
            session.task.cancel()

    def _take_verdict_untrusted(self, session: _Session, message: Verdict, number: int) -> None:
        core = session.core
        verdict, epoch = verdict_untrusted(message, number, vocab_size=session.opening.vocab_size), core.epoch
        self._carry_out(session, core.take_verdict(verdict))
        session.caller.right += verdict.right
        self.right += verdict.right
        self.wrong += core.epoch != epoch

    def _carry_out(self, session: _Session, instructions: Sequence[DraftInstruction]) -> None:
        if session.core.ready and not session.is_ready:
            session.is_ready = True
            session.caller.send(DraftReady(), stream=session.stream)
        for instruction in instructions:
            match instruction:
                case PassRequest():
                    session.passes.put_nowait(instruction)
                case DraftSending(epoch, position, tokens):
                    self._draft_rate.add(len(tokens), self._now())
                    drafts = Drafts(position, encode_ids(tokens))
                    session.caller.send(drafts, generation=epoch, stream=session.stream)

    async def _draft(self, session: _Session) -> None:
        """Compute what the core wants, until the session is closed or fails."""
        opening = session.opening
        try:
            if opening.tokenizer != self._tokenizer:  # vocabularies may be padded differently
                text = f"{self._name} has another tokenizer than the verifier's model"
                raise Refused(OTHER_TOKENIZER, text, remedy="draft with a model of the same family")
            if session.positions <= opening.count:
                raise self._too_long(opening.count)
            model = await self._model.open(
                positions=session.positions, sampling=session.sampling, sample_from=opening.prompt
            )
            try:
                while True:
                    samples = await self._compute(session, model, await session.passes.get())
                    known = tuple(token for token in samples if token < opening.vocab_size)
                    self._carry_out(session, session.core.take_samples(known))
            finally:
                await model.close()
        except P2PTrainError as problem:
            self._give_up(session, problem)
        except Exception as mistake:  # a defect of this program must not end other sessions  # noqa: BLE001
            self._give_up(session, report_defect(mistake))

    async def _compute(self, session: _Session, model: LocalSession, request: PassRequest) -> tuple[int, ...]:
        """Compute a pass. Returns its samples.

        Raises:
            P2PTrainError: the engine fails, or the session is too long for it.
        """
        # The verifier's vocabulary may be padded to more: a token that only it has is replaced by another one.
        ids = tuple(min(token, self._model.vocab_size - 1) for token in request.ids)
        if request.stop > session.positions:
            raise self._too_long(request.stop)
        return (await model.append(PassRequest(request.keep, ids, request.samples))).tokens

    def _too_long(self, size: int) -> Refused:
        text = f"{size} tokens are too many: {self._name} has a context of {self._model.context}"
        return Refused(TOO_LONG, text, remedy="draft with a model of a longer context")
