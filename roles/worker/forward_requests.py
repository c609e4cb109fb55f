"""Forward requests (``ForwardRequest``) of split models: what a session on a stage takes, computes and sends on.

``StageSession`` holds the state of one session; its methods do no I/O. It *checks* a ``ForwardRequest`` before a byte
of its payload is allocated, *admits* it when the payload is there, and marks it *done* when it is computed. A session
has an epoch. Requests of an older epoch are read off the wire and dropped. After the chain breaks, a session admits
nothing until the client raises the epoch.

``ForwardRequests`` is the shell. Sessions with queued requests take turns. The engine runs one request at a time on the
compute thread. The outputs go to the next stage, or the tokens to the client. A session gets no turn while its next
stage accepts nothing. When its queue is full, it stops reading, which holds back the stage before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from p2ptrain.core.activations import ID_BYTES, IDS, activation_bytes, encode_ids
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.serving import Pass, Ran
from p2ptrain.core.texts import shortened
from roles.background import Background
from roles.compute_thread import Turns
from roles.line import Line
from roles.worker.context import PeerContext
from roles.worker.part_cache import MAX_SESSIONS, Part, PartCache
from roles.worker.stage_requests import CloseRequest, OpenRequest, PeerAddress, ResumeRequest
from wire.chain_messages import CHAIN_STREAM, CHUNK, NEXT_LOST, UNKNOWN_SESSION, ChainBroken, ForwardRequest, Sampled
from wire.connection import Connection
from wire.messages import Hello, Message, RefusalCode

MOST_QUEUED = 256
"""Requests that a first stage may queue. It never stops reading: the client's other requests use this connection."""
QUEUED_FROM_STAGE, QUEUED_BYTES = 4, 32 << 20
"""Requests and bytes that a session queues from the stage before; beyond, the stage stops reading."""
STALE = "stale-epoch"
LINK_UNSENT_BYTES = 4 << 20
"""Bytes to the next stage that may wait unsent; beyond, the session computes no further request."""
DUPLICATE = "duplicate"


@dataclass(eq=False)
class StageClient:
    """A client's connection, on which it opens sessions."""

    line: Line
    peer_id: str

    def say(self, message: Message) -> None:
        with suppress(ConnectionLost):  # the reader of this connection notices too, and closes its sessions
            self.line.connection.send(message)


@dataclass(slots=True, eq=False)
class StageSession:
    """One session on one stage.

    Attributes:
        epoch: set by the client; requests of an older epoch are dropped.
        position: length of the history; the next request may keep at most this much.
        broken: the session admits nothing until the client raises the epoch.
        queue: admitted requests and their payloads, in order.
    """

    asked: OpenRequest
    part: Part
    caller: StageClient
    epoch: int = field(init=False)
    position: int = 0
    broken: bool = False
    closed: bool = False
    queue: deque[tuple[ForwardRequest, bytearray]] = field(default_factory=deque)
    link: NextStage | None = None
    incoming: Connection | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.epoch = self.asked.epoch

    @property
    def id(self) -> str:
        return self.asked.session

    @property
    def index(self) -> int:
        return self.asked.index

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.asked.stages - 1

    def payload_bytes_untrusted(self, work: ForwardRequest) -> int:
        """Check ``work`` and return its payload's size. Allocates nothing. Raises ``ProtocolError``."""
        if not 0 < work.count <= CHUNK:
            raise ProtocolError(f"a request of {work.count} positions; 1 to {CHUNK} are allowed")
        if not 0 <= work.keep <= self.asked.positions - work.count:
            text = (
                f"a request of {work.count} positions after {work.keep}, but the session is for {self.asked.positions}"
            )
            raise ProtocolError(text)
        if not self.index <= work.last < self.asked.stages:
            raise ProtocolError(
                f"stage {self.index} of {self.asked.stages} received a request that ends at stage {work.last}"
            )
        if not 0 <= work.samples <= (work.count if work.last == self.asked.stages - 1 else 0):
            raise ProtocolError(f"cannot sample {work.samples} tokens of {work.count} positions at stage {work.last}")
        if not (0 <= work.sample_index < 1 << 31 and 0 <= work.number < 1 << 53):
            raise ProtocolError(f"invalid sample index {work.sample_index} or request number {work.number}")
        if len(work.spent_us) != self.index or any(not 0 <= each < 1 << 53 for each in work.spent_us):
            raise ProtocolError(f"stage {self.index} needs {self.index} valid stage times, got {len(work.spent_us)}")
        if self.first and work.encoding != IDS:
            raise ProtocolError(f"the first stage takes token ids, not {work.encoding[:40]!r}")
        if not self.first and work.encoding != self.out_encoding(work):
            raise ProtocolError(f"hidden states in {work.encoding[:40]!r}, expected {self.out_encoding(work)!r}")
        return activation_bytes(work.encoding, work.count, self.part.engine.width)

    def out_encoding(self, work: ForwardRequest) -> str:
        return self.asked.prefill_encoding if work.prefill else self.asked.encoding

    @property
    def crowded(self) -> bool:
        queued_bytes = sum(len(payload) for _, payload in self.queue)
        return len(self.queue) >= QUEUED_FROM_STAGE or queued_bytes >= QUEUED_BYTES

    def admit(self, work: ForwardRequest, payload: bytearray) -> bool:
        """Queue a checked request; False if it is dropped. Raises ``ProtocolError``: unknown epoch, or full queue."""
        if work.epoch > self.epoch:
            raise ProtocolError(f"a request of epoch {work.epoch}, but the session is at epoch {self.epoch}")
        if work.epoch < self.epoch or self.broken or self.closed:
            return False
        if len(self.queue) >= MOST_QUEUED:
            raise ProtocolError(f"more than {MOST_QUEUED} requests wait: the client exceeds its limit")
        self.queue.append((work, payload))
        return True

    def current(self, work: ForwardRequest) -> bool:
        return work.epoch == self.epoch and not self.broken and not self.closed

    def begin(self, work: ForwardRequest) -> None:
        if work.keep > self.position:
            raise ProtocolError(f"the request keeps {work.keep} positions, but the session has {self.position}")

    def fail(self) -> None:
        self.broken = True
        self.queue.clear()

    def close(self) -> None:
        self.closed = True
        self.queue.clear()

    def raise_epoch(self, epoch: int) -> None:
        if epoch <= self.epoch:
            raise Refused(STALE, f"epoch {epoch} is not newer than epoch {self.epoch}")
        self.epoch, self.broken = epoch, False
        self.queue.clear()


class NextStage:
    """This stage's link to the next stage of a session.

    Args:
        on_lost: called once when the link ends, unless ``close`` ended it.
        on_room: called when all unsent bytes are sent.
    """

    def __init__(
        self,
        place: PeerAddress,
        line: Line,
        *,
        on_lost: Callable[[NextStage, P2PTrainError], None],
        on_room: Callable[[], None],
    ) -> None:
        self.place = place
        self._line = line
        self._on_lost = on_lost
        self.closed = False
        line.connection.on_drained = on_room
        self._task = asyncio.create_task(self._listen(), name="next stage")

    @property
    def crowded(self) -> bool:
        return self._line.connection.unsent_bytes > LINK_UNSENT_BYTES

    def give(self, work: ForwardRequest, payload: memoryview) -> None:
        """Send ``work`` and ``payload``, which must not change. Raises ``ConnectionLost``."""
        self._line.connection.send_with_bulk(work, payload, generation=0, stream=CHAIN_STREAM)

    def close(self) -> None:
        self.closed = True
        self._line.connection.abort()
        self._task.cancel()

    async def _listen(self) -> None:
        problem: P2PTrainError = ConnectionLost("the next stage closed the connection")
        try:
            async with self._line.alive():
                while True:
                    message = await self._line.receive()
                    raise ProtocolError(f"unexpected message {type(message).__name__} from the next stage")
        except P2PTrainError as error:
            problem = error
        if not self.closed:
            self.closed = True
            self._on_lost(self, problem)


def of_session(hello: Hello) -> tuple[str, int]:
    return hello.job, hello.generation


class ForwardRequests:
    """The sessions of a worker's stages. They take turns; one request is computed at a time."""

    def __init__(self, context: PeerContext, cache: PartCache) -> None:
        self._context, self._cache = context, cache
        self._compute, self._now = context.compute, context.world.clock.now
        self.sessions: dict[tuple[str, int], StageSession] = {}
        self._turns: Turns[StageSession] = Turns()
        self._wake = asyncio.Event()
        self._background = Background()

    # ------------------------------------------------------------------------------------------------------- sessions

    async def open(self, caller: StageClient, request: OpenRequest) -> None:
        """Open a session on a part.

        Raises:
            Refused: the part is absent or full, memory is short, or the next stage cannot be reached.
        """
        part = self._cache.get(request.part)
        session = StageSession(request, part, caller)
        if (session.first, session.last) != (part.spec.start == 0, part.spec.stop == part.spec.layers):
            text = f"layers [{part.spec.start}, {part.spec.stop}) are not stage {request.index} of {request.stages}"
            raise Refused("wrong-stage", text)
        if session.id in {each.id for each in self._of(part)} or (session.id, session.index) in self.sessions:
            raise Refused(DUPLICATE, f"session {session.id} is open here already")
        if len(self._of(part)) >= MAX_SESSIONS:
            raise Refused("full", f"{MAX_SESSIONS} sessions are open on this part", remedy="try again later")
        need_bytes = request.positions * part.engine.cache_position_bytes
        gone = self._cache.make_room(need_bytes, f"{request.positions} positions of a session", keep=part)
        part.users.add(session)
        part.promised[session] = need_bytes
        self.sessions[session.id, session.index] = session
        try:
            await self.unload(gone)
            if session.closed:
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            await self._compute.run(
                part.engine.open, session.id, positions=request.positions, sampling=request.sampling
            )
            await self._link(session, request.next)
        except BaseException:
            self.close(session)
            raise
        caller.line.silence_s = min(caller.line.silence_s, request.silence_s)
        part.next = request.next.peer if request.next else ""

    async def resume(self, caller: StageClient, request: ResumeRequest) -> int:
        """Begin a new epoch. Returns the number of positions that are kept here, at most ``request.keep``.

        Raises:
            Refused: the session is unknown, the epoch is not newer, or the next stage cannot be reached.
        """
        session = self._find(caller, request)
        if (request.next is None) != session.last:
            raise ProtocolError("every stage but the last must have a next stage")
        session.raise_epoch(request.epoch)
        self._turns.drop(session)
        session.changed.set()
        # A pass that runs now is of an older epoch: its result is dropped.
        position = session.position = min(session.position, request.keep)
        await self._link(session, request.next)
        session.part.next = request.next.peer if request.next else ""
        return position

    def close_of(self, caller: StageClient, which: CloseRequest) -> None:
        with suppress(Refused):
            self.close(self._find(caller, which))

    def close(self, session: StageSession) -> None:
        """Forget a session. The result of a pass that runs now is dropped."""
        if self.sessions.get((session.id, session.index)) is not session:
            return
        del self.sessions[session.id, session.index]
        session.close()
        self._turns.drop(session)
        if session.link is not None:
            session.link.close()
        if session.incoming is not None:
            session.incoming.abort()
        self._cache.leave(session.part, session, self._now())
        session.changed.set()
        # Queued at once, so that it runs before a new ``open`` of the same session.
        closing = self._compute.submit(session.part.engine.close, session.id)
        self._background.start(_ended(closing), "close session")

    def close_all_of(self, caller: StageClient) -> None:
        for session in [each for each in self.sessions.values() if each.caller is caller]:
            self.close(session)

    def _find(self, caller: StageClient, which: ResumeRequest | CloseRequest) -> StageSession:
        session = self.sessions.get((which.session, which.index))
        if session is None or session.caller is not caller:
            raise Refused(UNKNOWN_SESSION, f"session {which.session} is not open here")
        return session

    def _of(self, part: Part) -> list[StageSession]:
        return [session for session in self.sessions.values() if session.part is part]

    def count(self, part: Part) -> int:
        return len(self._of(part))

    async def _link(self, session: StageSession, place: PeerAddress | None) -> None:
        """Make the session's link lead to ``place``. Raises ``Refused``."""
        async with session.linking:
            link = session.link
            if link is not None and link.place == place and not link.closed:
                return
            if link is not None:
                link.close()
                session.link = None
            if place is None:
                return
            try:
                # The hello's generation is the index of the dialled stage: one worker may hold several stages.
                hello = self._context.hello("stage", session.id, session.index + 1)
                connection, _ = await self._context.dial(place.peer, place.host, place.port, hello)
            except P2PTrainError as problem:
                text = f"stage {session.index} cannot reach the next stage: {problem.message}"
                raise Refused(NEXT_LOST, text, remedy=problem.remedy) from problem
            if session.closed:
                connection.abort()
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            line = Line(connection, session.asked.silence_s)
            session.link = NextStage(place, line, on_lost=partial(self._next_lost, session), on_room=self._wake.set)

    def _next_lost(self, session: StageSession, link: NextStage, problem: P2PTrainError) -> None:
        if session.link is link:
            session.link = None
            self._broken(session, session.index + 1, NEXT_LOST, problem)

    # ------------------------------------------------------------------------------------------------------- requests

    async def take(self, line: Line, work: ForwardRequest, session: StageSession | None) -> None:
        """Read a request's payload and queue the request.

        Args:
            session: None if the first stage's session was closed just before; then the payload is read and dropped.

        Raises:
            ProtocolError: no correct peer sends such a request.
            NetworkError: the payload did not arrive.
        """
        if session is None:
            if work.encoding != IDS or not 0 < work.count <= CHUNK:
                raise ProtocolError(f"a request of session {work.session[:64]!r}, which is not open here")
            await line.bulk(ID_BYTES * work.count, stream=CHAIN_STREAM)
            return
        size_bytes = session.payload_bytes_untrusted(work)
        payload = await line.bulk(size_bytes, stream=CHAIN_STREAM)
        if session.admit(work, payload):
            self._turns.add(session)
            self._wake.set()

    async def serve_stage(self, connection: Connection, session: StageSession) -> None:
        """Serve the stage before: read its requests as fast as they are computed. Raises as ``take``."""
        if session.incoming is not None:
            session.incoming.abort()  # the stage before was replaced
        session.incoming = connection
        line = Line(connection, session.asked.silence_s)
        async with line.alive():
            async for message in line.messages():
                if not isinstance(message, ForwardRequest) or message.session != session.id:
                    raise ProtocolError(f"unexpected message {type(message).__name__}, or a request of another session")
                while session.crowded and session.incoming is connection:
                    await self._changed(session)
                if session.closed:
                    return
                await self.take(line, message, session)

    async def run(self) -> None:
        while True:
            session = self._turns.take(lambda each: each.link is None or not each.link.crowded)
            if session is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            work, payload = session.queue.popleft()
            if session.queue:
                self._turns.add(session)
            session.changed.set()
            await self._compute_one(session, work, payload)

    async def _compute_one(self, session: StageSession, work: ForwardRequest, payload: bytearray) -> None:
        began = self._now()
        try:
            session.begin(work)
            samples, encoding = work.samples if session.last else 0, session.out_encoding(work)
            asked = Pass(
                work.keep, memoryview(payload), work.count, work.encoding, encoding, samples, work.sample_index
            )
            ran: Ran = await self._compute.run(session.part.engine.run, session.id, asked)
        except P2PTrainError as problem:
            if session.current(work):
                self._broken(session, session.index, _code(problem), problem)
            return
        took_s = self._now() - began
        session.part.computed(self._now(), took_s, work.count)
        if not session.current(work):
            return
        session.position = work.keep + work.count
        spent_us = [*work.spent_us, round(1e6 * took_s)]
        if work.last == session.index:
            tokens = encode_ids(ran.tokens) if work.samples else b""
            session.caller.say(Sampled(work.session, work.epoch, work.number, tokens, spent_us))
        elif session.link is not None:
            session.part.out_position_bytes = ran.payload.nbytes / work.count
            onward = replace(work, encoding=encoding, spent_us=spent_us)
            with suppress(ConnectionLost):  # ``NextStage`` reports the loss
                session.link.give(onward, ran.payload)

    def _broken(self, session: StageSession, lost: int, code: str, problem: P2PTrainError) -> None:
        session.fail()
        self._turns.drop(session)
        session.changed.set()
        session.caller.say(
            ChainBroken(
                session.id,
                session.epoch,
                lost,
                code,
                shortened(problem.message),
                shortened(problem.remedy),
            )
        )

    # -------------------------------------------------------------------------------------------------------- helpers

    async def unload(self, parts: list[Part]) -> None:
        """Drop the last references on the compute thread, where a device frees its memory."""
        while parts:
            await self._compute.run(_let_go, parts)

    async def _changed(self, session: StageSession) -> None:
        session.changed.clear()
        await session.changed.wait()


async def _ended(call: asyncio.Future[None]) -> None:
    await call


def _let_go(parts: list[Part]) -> None:
    parts.pop()


def _code(problem: P2PTrainError) -> str:
    if isinstance(problem, Refused):
        return problem.code
    return RefusalCode.PROTOCOL if isinstance(problem, ProtocolError) else "failed"
