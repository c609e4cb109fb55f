"""The drafters of a verifier's texts, as the seed lists them.

A verifier has one connection to each drafter, for all texts, and dials again when it ends. Any failure of a drafter
ends the connection, and with it the drafter's sessions in all texts. The link dials again with back-off, and after a
protocol violation only after a minute. Requests that are answered at once measure the latency.

A text's session is opened at the best drafter, as the cost model ranks them. When that drafter is lost or refuses,
another one gets the session. A new drafter is used by texts that have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.serving import Sampling
from p2ptrain.core.texts import printable
from roles.drafter.drafting import DraftVerdict, ids_untrusted
from roles.gauges import MovingAverage
from roles.line import QUIET_S, Line
from roles.serving.model import PassOutcome, PassResult
from roles.serving.text_stats import DrafterFacts
from roles.serving.worker_peer import ClientContext
from roles.verifier.cost_model import DrafterModel
from roles.verifier.speculation import Speculation
from wire.client import PendingCalls
from wire.connection import Received
from wire.messages import Message, Refuse, Response
from wire.text_messages import (
    MAX_DRAFTERS,
    DrafterAddress,
    DrafterFigures,
    DraftOpen,
    DraftReady,
    Drafts,
    StreamClose,
    StreamRefused,
    Verdict,
    error_untrusted,
)

FIRST_WAIT_S = 0.5
"""First wait before a drafter is dialled again. It doubles up to ``MISBEHAVED_S`` while the drafter is not reached."""
MISBEHAVED_S, LONGEST_S = 60.0, 3600.0
"""Wait after a drafter violated the protocol, and interval in which people are told of the same fault once."""
PING_S = 5.0
USUAL_PASS_S = 0.05
"""Assumed time of a verifier's pass, for the comparison of drafters."""


class DraftSession:
    """One text's session at one drafter.

    Attributes:
        stream: the session's number on the connection. known: number of token ids that it began with.
        is_ready: the drafter has processed them. is_over: the session has ended.
        bytes_in, bytes_out: sizes of message bodies.
    """

    def __init__(self, link: DrafterLink, stream: int, known: int, text: TextDrafts) -> None:
        self.link, self.stream, self.known, self.text = link, stream, known, text
        self.is_ready = self.is_over = False
        self.bytes_in = self.bytes_out = 0

    def facts(self, accepted: int) -> DrafterFacts:
        at, latency_ms = self.link.at, 1e3 * self.link.model.latency_s
        return DrafterFacts(at.peer_id, at.name, at.model, latency_ms, self.bytes_in, self.bytes_out, accepted)

    def send_verdict(self, verdict: DraftVerdict) -> None:
        """Send a verdict. Never raises."""
        try:
            self.send(Verdict(verdict.right, verdict.depth, encode_ids(verdict.tokens)), generation=verdict.number)
        except (UserError, ValueError):  # more tokens than a frame holds: the drafter joined a long text late
            asyncio.get_running_loop().call_soon(self.link.lose, self)

    def send(self, message: Message, *, generation: int = 0) -> None:
        """Send a message. Raises ``UserError``: it is longer than a frame."""
        if self.is_over or self.link.line is None:
            return
        with suppress(ConnectionLost):  # the end of the connection ends the session
            self.bytes_out += self.link.line.connection.send(message, generation=generation, stream=self.stream)


class DrafterLink:
    """See the module's docstring. ``run`` keeps it connected.

    Attributes:
        at: address of the drafter. model: its averages. line: the connection; None: there is none.
        is_connected: the drafter answers. sessions: by stream.
    """

    def __init__(self, drafters: Drafters, at: DrafterAddress) -> None:
        self.at = at
        self.model = DrafterModel()
        self.line: Line | None = None
        self.is_connected = False
        self._drafters, self._context = drafters, drafters.context
        self._now = self._context.world.clock.now
        self._calls = PendingCalls()
        self.sessions: dict[int, DraftSession] = {}
        self._last_stream = 0
        self._notified_at: dict[str, float] = {}  # by class of fault: when people were told

    @property
    def figures(self) -> DrafterFigures:
        alpha = self.model.alpha if self.model.known else None
        return DrafterFigures(self.at.peer_id, alpha, round(1e3 * self.model.latency_s, 1))

    # -------------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Dial the drafter as long as it is listed."""
        wait_s = FIRST_WAIT_S
        while self.at.peer_id in self._drafters.listed:
            began = self._now()
            try:
                await self._receive()
            except P2PTrainError as problem:
                self._report_problem(problem)
                if isinstance(problem, ProtocolError | Refused):
                    wait_s = MISBEHAVED_S
                else:
                    lived = self._now() - began >= PING_S
                    wait_s = FIRST_WAIT_S if lived else min(2 * wait_s, MISBEHAVED_S)
            await asyncio.sleep(wait_s * self._context.world.random.uniform(1.0, 1.2))
        self._drafters.forget(self)

    async def _receive(self) -> None:
        """Connect, and receive until the connection ends. Raises ``P2PTrainError``: the reason."""
        context, at = self._context, self.at
        connection = await context.dial(at, "draft", role=at.role)
        line = self.line = Line(connection, QUIET_S, beat_s=context.silence_s / 4)
        self._last_stream = 0
        pinging = asyncio.create_task(self._measure(line), name=f"measure {at.name}")
        try:
            problem = await line.run(self._take_untrusted)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
            self.line, self.is_connected = None, False
            self._calls.fail_all(at.name)
            for session in list(self.sessions.values()):
                self.lose(session)
        raise line.connection.close_cause or problem

    async def _measure(self, line: Line) -> None:
        round_trip = MovingAverage(weight=0.3)
        try:
            while True:
                began = self._now()
                with suppress(Refused):
                    await self._calls.ask(line.connection.send, "probe.clock", {}, whom=self.at.name, timeout_s=QUIET_S)
                round_trip.add(self._now() - began)
                self.model.latency_s = round_trip.seconds / 2
                if not self.is_connected:
                    self.is_connected = True
                    away = f"{1e3 * self.model.latency_s:.1f} ms away"
                    text = f"drafter {self.at.name} drafts with {self.at.model}, {away}"
                    self._notify("info", "drafter", text, about="there")
                    for waiting in list(self._drafters.texts):
                        waiting.open_session()
                await asyncio.sleep(FIRST_WAIT_S if round_trip.count < 9 else PING_S)
        except NetworkError as problem:
            line.connection.abort(problem)

    def _report_problem(self, problem: P2PTrainError) -> None:
        remedy = f"; {problem.remedy}" if problem.remedy else ""
        text = f"drafter {self.at.name}: {problem.message}{remedy}"
        self._notify("warning", "drafter-lost", text, about=type(problem).__name__)

    def _notify(self, level: str, kind: str, text: str, *, about: str) -> None:
        now = self._now()
        if now - self._notified_at.get(about, -LONGEST_S) >= LONGEST_S:
            self._notified_at[about] = now
            self._context.notify(level, kind, text)

    # -------------------------------------------------------------------------------------------------------- sessions

    def open(self, opening: DraftOpen, ids: Sequence[int], text: TextDrafts) -> DraftSession:
        """Open a session at the connected drafter. ``text`` hears of it later, not within this call."""
        line = self.line
        assert line is not None
        self._last_stream += 1
        session = DraftSession(self, self._last_stream, len(ids), text)
        self.sessions[session.stream] = session
        silence_s = max(self._context.silence_s, 16 * self.model.latency_s)
        line.silence_s = min(line.silence_s, silence_s)
        session.send(replace(opening, silence_s=silence_s))
        with suppress(ConnectionLost):
            line.connection.send_bulk(memoryview(encode_ids(ids)), generation=0, stream=session.stream)
        return session

    def close(self, session: DraftSession) -> None:
        """End a session. Never raises."""
        if not session.is_over:
            session.send(StreamClose())
            session.is_over = True
            self.sessions.pop(session.stream, None)

    def lose(self, session: DraftSession) -> None:
        if not session.is_over:
            self.close(session)
            session.text.lose_session()

    # ------------------------------------------------------------------------------------------------------- listening

    def _take_untrusted(self, received: Received) -> None:
        """Raises ``ProtocolError``: no correct drafter sends this. ``Refused``: the drafter refuses this verifier."""
        stream, message = received.stream, received.message
        match message:
            case Response():
                if not self._calls.resolve(message):
                    raise ProtocolError("it answered a request that was not sent")
                return
            case Refuse(code, text, remedy):
                raise Refused(code, f"it refuses: {printable(text, 200)}", remedy=printable(remedy, 200))
            case Drafts() | DraftReady() | StreamRefused():
                if not 0 < stream <= self._last_stream:
                    raise ProtocolError(f"it named session {stream}, which was never opened")
            case _:
                raise ProtocolError(f"it sent an unexpected {type(message).__name__}")
        session = self.sessions.get(stream)
        if session is None:  # the session ended while the message was on its way
            return
        session.bytes_in += received.body_bytes
        match message:
            case DraftReady():
                if session.is_ready:
                    raise ProtocolError("it reported a session as ready twice")
                session.is_ready = True
                session.text.begin_line(session)
            case Drafts(position):
                if not session.is_ready:
                    raise ProtocolError("it drafted for a session that is not ready")
                tokens = ids_untrusted(message.tokens, vocab_size=self._drafters.vocab_size)
                session.text.take_drafts(received.generation, position, tokens)
            case StreamRefused():
                self._report_problem(error_untrusted(message))
                self.lose(session)


class Drafters:
    """The drafters of a verifier. Needs a running loop.

    Args:
        vocab_size, tokenizer: of the verifier's model; the latter is a digest.

    Attributes:
        listed: peer ids of the drafters that the seed lists.
    """

    def __init__(self, context: ClientContext, vocab_size: int, tokenizer: str) -> None:
        self.context, self.vocab_size, self.tokenizer = context, vocab_size, tokenizer
        self._links: dict[str, DrafterLink] = {}  # by peer id
        self.listed: set[str] = set()
        self._unfit = ""  # the peer with another tokenizer that was reported last
        self.texts: set[TextDrafts] = set()
        self._tasks = Background()
        self._closed = False

    def update_list(self, drafters: Iterable[DrafterAddress]) -> None:
        """Update the list of drafters from the seed. A connected drafter that is no longer listed is kept while it
        lives."""
        listed = {at.peer_id: at for at in list(drafters)[:MAX_DRAFTERS] if self._fits(at)}
        self.listed = set(listed)
        for peer_id, at in listed.items() if not self._closed else ():
            if (link := self._links.get(peer_id)) is None:
                link = self._links[peer_id] = DrafterLink(self, at)
                self._tasks.start(link.run(), f"drafter {at.name}")
            link.at = at  # address of the next dial

    def connected_links(self) -> list[DrafterLink]:
        return [link for link in self._links.values() if link.is_connected]

    async def close(self) -> None:
        """Disconnect all drafters. Never raises."""
        self._closed = True
        for text in list(self.texts):
            text.close()
        await self._tasks.stop()

    def best(self) -> list[DrafterLink]:
        """Drafters at which a session may be opened, best first. Sessions that a drafter has already count as delay."""
        return sorted(self.connected_links(), key=lambda link: link.model.token_s(USUAL_PASS_S, len(link.sessions)))

    def _fits(self, at: DrafterAddress) -> bool:
        if at.tokenizer == self.tokenizer:
            return True
        if at.peer_id != self._unfit:
            self._unfit = at.peer_id
            text = f"drafter {at.name} cannot be used here: {at.model} has another tokenizer"
            self.context.notify("warning", "other-tokenizer", f"{text}; draft with a model of the same family")
        return False

    def forget(self, link: DrafterLink) -> None:
        """A drafter is neither connected nor listed. One that misbehaved was kept until its wait ended, so that it
        could not come back at once."""
        del self._links[link.at.peer_id]


class TextDrafts:
    """A ``DraftSource``: the drafters of one text, one at a time. Its methods neither raise nor, but for one, wait.

    Args:
        drafters: None: drafters may not help with this text, but its passes are measured like those of others.
        core: each drafter's session begins with the ids that its text has now; the first verdict adds later ones.
        positions, sampling: as of ``ServedModel.open``.
    """

    def __init__(
        self,
        drafters: Drafters | None,
        core: Speculation,
        *,
        positions: int,
        sampling: Sampling,
        now: Callable[[], float],
    ) -> None:
        self._drafters, self._core, self._now = drafters, core, now
        self._positions, self._sampling = positions, sampling
        self._ids = tuple(core.decoding.ids)
        self._session: DraftSession | None = None
        self._tried: set[DrafterLink] = set()  # each link is asked once per text
        self._ready: list[DraftSession] = []  # every session that became ready
        self._news = asyncio.Event()
        self._closed = False
        if drafters is not None:
            drafters.texts.add(self)
            self.open_session()

    # ----------------------------------------------------------------------------------------------------- for the text

    async def next_drafts(self, answer: asyncio.Future[PassResult] | None) -> Sequence[int] | None:
        if answer is not None:
            answer.add_done_callback(lambda _: self._news.set())
        while not self._closed and not (answer is not None and answer.done()):
            drafts, wait_s = self._core.next_drafts(self._now())
            if wait_s <= 0:
                return drafts
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s if wait_s < inf else None):
                    await self._news.wait()
        return None if answer is not None else ()

    def end_pass(self, outcome: PassOutcome) -> None:
        self._core.end_pass(outcome)
        self._send_verdict()

    def facts(self) -> list[DrafterFacts]:
        return [session.facts(accepted) for session, accepted in zip(self._ready, self._core.right, strict=False)]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._core.end()
        self._news.set()
        if self._drafters is not None:
            self._drafters.texts.discard(self)
        if self._session is not None:
            self._session.link.close(self._session)

    # ------------------------------------------------------------------------------------------------- for the drafters

    def open_session(self) -> None:
        """Open a session at the best drafter that was not tried, if the text has none."""
        if self._drafters is None or self._session is not None or self._closed:
            return
        link = next((link for link in self._drafters.best() if link not in self._tried), None)
        if link is not None:
            self._tried.add(link)
            self._session = link.open(self._opening(self._drafters), self._ids, self)

    def _opening(self, drafters: Drafters) -> DraftOpen:
        return DraftOpen(
            count=len(self._ids),
            prompt=self._core.decoding.prompt_tokens,
            positions=self._positions,
            vocab_size=drafters.vocab_size,
            tokenizer=drafters.tokenizer,
            depth=self._core.opening_depth,
            silence_s=2.0,  # each link has its own
            sampling=self._sampling,
        )

    def begin_line(self, session: DraftSession) -> None:
        if not self._closed:
            self._ready.append(session)
            self._core.begin_line(session.known, session.link.model, self._now())
            self._send_verdict()
            self._news.set()

    def take_drafts(self, epoch: int, position: int, tokens: Sequence[int]) -> None:
        """Take drafts. Raises ``ProtocolError``: no correct drafter sends them."""
        if not self._closed:
            try:
                self._core.receive_untrusted(epoch, position, tokens, self._now())
            except ProtocolError as problem:
                raise ProtocolError(f"it sent invalid drafts: {problem.message}") from problem
            finally:
                self._news.set()

    def lose_session(self) -> None:
        if self._closed or self._session is None:
            return
        link, self._session = self._session.link, None
        if not link.is_connected:  # otherwise the drafter refused this text
            self._tried.discard(link)
        self._core.drop_line()
        self._news.set()
        asyncio.get_running_loop().call_soon(self.open_session)

    def _send_verdict(self) -> None:
        if self._session is not None and (verdict := self._core.next_verdict(self._now())) is not None:
            self._session.send_verdict(verdict)
