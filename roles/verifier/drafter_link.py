"""A verifier's link to one drafter: dialled again when it ends, and one connection for all sessions that it drafts for.

A session has a *seat* at a drafter. How far away the drafter is, is measured by a request that it answers at once.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

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
from roles.chain.around import Around
from roles.speculation.events import Drafted, Tell
from roles.speculation.received import (
    ENGINE,
    OTHER_TOKENIZER,
    REFUSALS,
    TOO_LONG,
    drafts_untrusted,
    packed,
    refused_untrusted,
    step_untrusted,
)
from roles.verifier.drafter_record import DraftRecord
from roles.verifier.seat import Beginning, Seat
from roles.verifier.standing import Standing
from roles.worker.stage_links import DIAL_S, QUIET_S, Line
from roles.worker.stage_requests import printable
from wire.address import is_loopback
from wire.client import Calls
from wire.connection import Received
from wire.handshake import dial, local_hello
from wire.messages import Message, Refuse, Response
from wire.speculation_messages import (
    DraftClose,
    DrafterAt,
    DraftOpen,
    DraftReady,
    DraftRefused,
    Drafts,
    Verdict,
)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Between two attempts to reach a drafter; it doubles while they fail."""
STEADY_S = 10.0
"""A connection that lived so long counts as a success."""
READY_S = 120.0
"""For the ids of an opening, from when they were sent: a long prompt, and a drafter with much to do."""
LATE = "late"
"""Code of a seat whose drafter did not answer within ``READY_S``."""
REFUSED_WAIT_S = 5.0
"""Until one that refused a session is asked for another; it may be full, or its engine may have failed."""
PINGS = 9
PING_S = 5.0
FARTHEST_S = 1.0
"""One way. What takes longer is no distance, and who answers late on purpose shall not be waited for the longer."""
LATE_FRAMES, MOST_LATE_FRAMES = 1024, 1 << 16
"""About a session that is over: what was on its way; and about all those of before together."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the ids of a verifier's sessions mean. ``tokenizer``: a digest."""

    vocab_size: int
    tokenizer: str


class DrafterLink:
    """See the module's docstring. ``run`` is its life.

    Args:
        standing: of the peer, which outlives this link.
        on_change: told when it can be asked now, and when no more.

    Attributes:
        at: where it is. record: how good it is.
        there: it can be asked for a seat.
        seats: by stream.
    """

    def __init__(
        self,
        around: Around,
        at: DrafterAt,
        tokens: Tokens,
        standing: Standing,
        *,
        on_change: Callable[[DrafterLink], None],
    ) -> None:
        self.at = at
        self.record = DraftRecord()
        self.standing = standing
        self.there = False
        self.seats: dict[int, Seat] = {}
        self._around = around
        self._now = around.world.clock.now
        self._tokens = tokens
        self._on_change = on_change
        self._line: Line | None = None
        self._calls = Calls()
        self._round_trips_s: deque[float] = deque(maxlen=PINGS)
        self._last_stream = 0
        self._late = 0  # frames that may still come about sessions that are over
        self._struck: ProtocolError | None = None
        self._refused_until = 0.0  # it refused a session: it is asked for no other until then

    @property
    def name(self) -> str:
        return self.at.name

    @property
    def free(self) -> bool:
        """Whether another session may have a seat."""
        return self.there and self._now() >= self._refused_until

    @property
    def never(self) -> bool:
        """It said that it drafts for no session of this verifier."""
        return math.isinf(self._refused_until)

    # -------------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Dial, listen, and dial again, until cancelled."""
        wait_s = FIRST_WAIT_S
        await asyncio.sleep(self.standing.not_before - self._now())
        while True:
            began = self._now()
            self.standing.dialled(began)
            try:
                await self._connected()
            except P2PTrainError as problem:
                self._tell_why(problem)
                if isinstance(problem, ProtocolError):
                    wait_s = self.standing.struck(self._now())
                    self._on_change(self)  # another may be dialled in its place
                elif self._now() - began >= STEADY_S:
                    wait_s = FIRST_WAIT_S
            await asyncio.sleep(wait_s * self._around.world.random.uniform(0.8, 1.2))
            wait_s = max(wait_s, min(2 * wait_s, LONGEST_WAIT_S))

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
        line = self._line = Line(connection, QUIET_S, beat_s=around.silence_s / 4)
        self._struck = None
        self._last_stream = self._late = 0
        self._refused_until = 0.0
        self._round_trips_s.clear()
        problem: P2PTrainError = ConnectionLost("it closed the connection")
        try:
            async with line.alive():
                pinging = asyncio.create_task(self._measure(line), name=f"measure {self.name}")
                try:
                    while True:
                        received = await line.frame()
                        self._take_untrusted(received)
                finally:
                    pinging.cancel()
                    await asyncio.gather(pinging, return_exceptions=True)
        except P2PTrainError as ended:
            problem = self._struck or ended
        finally:
            self._line = None
            self._calls.lost(self.name)
            self._gone()
        raise problem

    def _gone(self) -> None:
        was_there, self.there = self.there, False
        for seat in list(self.seats.values()):
            self._lose(seat)
        if was_there:
            self._on_change(self)

    def _tell_why(self, problem: P2PTrainError) -> None:
        """People hear of each reason once, and after long again."""
        if self.standing.fault_is_news(problem, self._now()):
            remedy = f"; {problem.remedy}" if problem.remedy else ""
            self._around.notify("warning", "drafter-lost", f"drafter {self.name}: {problem.message}{remedy}")

    # ----------------------------------------------------------------------------------------------------------- seats

    def seat(
        self,
        drafter: int,
        beginning: Beginning,
        *,
        on_ready: Callable[[Seat], None],
        on_drafted: Callable[[Seat, Drafted], None],
        on_latency: Callable[[Seat], None],
        on_lost: Callable[[Seat], None],
    ) -> Seat:
        """Have the drafter take in a session, for which it must be ``there``. Nothing is told from within this call."""
        line = self._line
        assert line is not None
        seat = Seat(self, drafter, beginning, on_ready, on_drafted, on_latency, on_lost)
        self._last_stream += 1
        seat.stream, seat.opened_at = self._last_stream, self._now()
        self.seats[seat.stream] = seat
        line.silence_s = min(line.silence_s, self._silence_s)
        sampling = beginning.sampling
        message = DraftOpen(
            len(beginning.ids),
            beginning.prompt,
            beginning.positions,
            self._tokens.vocab_size,
            self._tokens.tokenizer,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.seed,
            beginning.depth,
            self._silence_s,
        )
        self._say(seat, message)
        with suppress(ConnectionLost):  # its end is on its way
            line.connection.send_bulk(memoryview(encode_ids(beginning.ids)), generation=0, stream=seat.stream)
        return seat

    def tell(self, seat: Seat, tell: Tell) -> None:
        """Give it a verdict. Never raises."""
        right, wrong = seat.record.judged(tell)
        self.record.count(right, wrong=wrong)
        try:
            tokens = packed(tell.tokens, self._tokens.vocab_size)
            self._say(seat, Verdict(tell.right, tell.depth, tokens), generation=tell.number)
        except (UserError, ValueError):  # more tokens than a frame holds: it came late to a long text
            asyncio.get_running_loop().call_soon(self._give_up, seat, TOO_LONG)

    def leave(self, seat: Seat) -> None:
        """Its session needs it no more. Never raises."""
        self.record.unready += not any(each.ready for each in self.seats.values())
        self._forget(seat)
        self._say(seat, DraftClose())

    def strike(self, problem: ProtocolError) -> None:
        """It said what no correct drafter says: it loses its place in all sessions, and is not dialled for long."""
        if self._line is not None:
            self._struck = problem
            self._line.connection.abort(problem)

    @property
    def _silence_s(self) -> float:
        return max(self._around.silence_s, 16 * self.record.latency_s)

    def _say(self, seat: Seat, message: Message, *, generation: int = 0) -> None:
        """Raises ``UserError``: it is longer than a frame may be."""
        if self._line is None:
            return
        with suppress(ConnectionLost):
            seat.bytes_out += self._line.connection.send(message, generation=generation, stream=seat.stream)
            seat.frames += 1

    def _forget(self, seat: Seat) -> None:
        seat.over = True
        self._late = min(self._late + LATE_FRAMES, MOST_LATE_FRAMES)
        self.seats.pop(seat.stream, None)

    def _lose(self, seat: Seat) -> None:
        if not seat.over:
            self._forget(seat)
            seat.on_lost(seat)

    def _give_up(self, seat: Seat, code: str) -> None:
        """Its session goes on without this drafter, which is told, and is not asked again for this session."""
        if not seat.over:
            seat.refused = code
            self._say(seat, DraftClose())
            self._lose(seat)

    # ------------------------------------------------------------------------------------------------------- listening

    def _take_untrusted(self, received: Received) -> None:
        """Raises ``ProtocolError`` where no correct drafter says this."""
        stream, message = received.stream, received.message
        match message:
            case Response():
                if not self._calls.answered(message):
                    raise ProtocolError("it answers what it was not asked")
                return
            case Refuse(code, text, remedy):
                raise Refused(code, f"it refuses: {printable(text)}", remedy=printable(remedy))
            case Drafts() | DraftReady() | DraftRefused():
                pass
            case _:
                raise ProtocolError(f"it sent {type(message).__name__} to a verifier")
        if not 0 < stream <= self._last_stream:
            raise ProtocolError(f"it speaks of session {stream}, which was never opened")
        match message:
            case Drafts():
                tokens = self._drafts_untrusted(message, stream, received.generation)
            case DraftReady():
                self.record.step_s = step_untrusted(message) or self.record.step_s
        seat = self.seats.get(stream)
        if seat is None:  # the session was over when this was on its way
            self._late -= 1
            if self._late < 0:
                raise ProtocolError("it goes on about sessions that are over")
            return
        seat.bytes_in += received.body_bytes
        seat.frames += 1
        match message:
            case DraftReady() if seat.ready:
                raise ProtocolError("a session of it is ready twice")
            case DraftReady():
                seat.ready, self.record.unready = True, 0
                seat.on_ready(seat)
            case Drafts() if not seat.ready:
                raise ProtocolError("it drafts for a session before it is ready")
            case Drafts(position):
                position = position or seat.drafted
                seat.drafted = position + len(tokens)
                self.record.count(0, wrong=seat.record.drafted(received.generation, position, tokens))
                seat.on_drafted(seat, Drafted(seat.drafter, received.generation, position, tokens))
            case DraftRefused():
                refused = refused_untrusted(message)
                seat.refused = refused.code if refused.code in REFUSALS else ENGINE
                self._refused_by(refused)
                self._lose(seat)

    def _drafts_untrusted(self, message: Drafts, stream: int, epoch: int) -> tuple[int, ...]:
        """Raises ``ProtocolError``. Of a session that is over it does not matter what they were."""
        vocab_size, seat = self._tokens.vocab_size, self.seats.get(stream)
        if seat is None:
            return ()
        return drafts_untrusted(message, epoch, vocab_size=vocab_size)

    def _refused_by(self, refused: Refused) -> None:
        self._tell_why(refused)
        if refused.code == OTHER_TOKENIZER:  # it will not change while it runs
            self._refused_until = math.inf
        elif refused.code != TOO_LONG:  # that is about this session
            self._refused_until = self._now() + REFUSED_WAIT_S
            asyncio.get_running_loop().call_later(REFUSED_WAIT_S, self._on_change, self)

    async def _measure(self, line: Line) -> None:
        """Ask for the time now and then, and see to it that openings are answered."""
        try:
            while True:
                began = self._now()
                with suppress(Refused):
                    await self._calls.ask(line.connection.send, "probe.clock", {}, whom=self.name, timeout_s=QUIET_S)
                self._round_trips_s.append(self._now() - began)
                self.record.latency_s = min(median(self._round_trips_s) / 2, FARTHEST_S)
                if not self.there:
                    self.there = True
                    if self.standing.there_is_news(self._now()):
                        self._around.notify("info", "drafter", self._described())
                    self._on_change(self)
                for seat in [each for each in self.seats.values() if each.ready]:
                    seat.on_latency(seat)
                self._leave_late()
                if any(seat.slow(self._now()) for seat in self.seats.values()):
                    self._on_change(self)
                await asyncio.sleep(FIRST_WAIT_S if len(self._round_trips_s) < PINGS else PING_S)
        except NetworkError as problem:
            line.connection.abort(problem)

    def _leave_late(self) -> None:
        """Sessions whose tokens are still not taken in: others, of shorter texts, may be well served."""
        long_ago = self._now() - READY_S
        late = [each for each in self.seats.values() if each.opened_at < long_ago and not each.ready]
        for seat in late:
            self._tell_why(DeadlineExceeded(f"it did not take in a session's tokens within {READY_S:g} s"))
            self._give_up(seat, LATE)

    def _described(self) -> str:
        return f"drafter {self.name} drafts with {self.at.model}, {1e3 * self.record.latency_s:.1f} ms away"
