"""Forward requests (``ForwardRequest``) of split models: what a session on a stage takes, computes and sends on.

``ForwardRequests`` is the shell of the sessions, whose core is ``stage_session``. Sessions with queued requests take
turns. The engine runs one request at a time on the compute thread. The outputs go to the next stage, or the tokens to
the client. A session gets no turn while its next stage accepts nothing. When its queue is full, it stops reading, which
holds back the stage before it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace

from p2ptrain.core.activations import ID_BYTES, IDS, decode_ids, encode_ids
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.serving import Pass, result_of
from p2ptrain.core.texts import shortened
from roles.compute_thread import Turns
from roles.line import Line
from roles.worker.context import PeerContext
from roles.worker.part_cache import MAX_SESSIONS, Part, PartCache
from roles.worker.stage_requests import CloseRequest, OpenRequest, PeerAddress, ResumeRequest
from roles.worker.stage_session import StageSession
from wire.chain_messages import (
    CHAIN_STREAM,
    MAX_REQUEST_POSITIONS,
    NEXT_LOST,
    UNKNOWN_SESSION,
    ChainBroken,
    ForwardRequest,
    Sampled,
)
from wire.connection import Connection, Received
from wire.messages import Hello, Message, RefusalCode

LINK_UNSENT_BYTES = 4 << 20
"""Bytes to the next stage that may wait unsent; beyond, the session computes no further request."""
DUPLICATE = "duplicate"


@dataclass(eq=False)
class StageClient:
    """A client's connection, on which it opens sessions."""

    line: Line
    peer_id: str

    def send(self, message: Message) -> None:
        with suppress(ConnectionLost):  # the reader of this connection notices too, and closes its sessions
            self.line.connection.send(message)


@dataclass(eq=False, slots=True)
class OpenStage:
    """A session on one stage, with what its requests need: the part, and the connections to its neighbours.

    Attributes:
        link: leads to the next stage; linking: one change of it at a time.
        incoming: the connection from the stage before. changed: the queue was.
    """

    core: StageSession
    part: Part
    client: StageClient
    link: NextStage | None = None
    incoming: Connection | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> tuple[str, int]:
        return self.core.id, self.core.index


class NextStage:
    """The link of a stage to the next stage of its session. ``requests`` hear of room for more, and of its end."""

    def __init__(self, requests: ForwardRequests, stage: OpenStage, place: PeerAddress, line: Line) -> None:
        self.place, self._line, self._stage, self._requests = place, line, stage, requests
        self.closed = False
        line.connection.on_drained = requests.wake.set
        self._task = asyncio.create_task(line.run(_refuse_message, self._end), name="next stage")

    @property
    def crowded(self) -> bool:
        return self._line.connection.unsent_bytes > LINK_UNSENT_BYTES

    def send_forward(self, work: ForwardRequest, payload: memoryview) -> None:
        """Send ``work`` and ``payload``, which must not change. Raises ``ConnectionLost``."""
        self._line.connection.send(work)
        self._line.connection.send_bulk(payload, generation=0, stream=CHAIN_STREAM)

    def close(self) -> None:
        self.closed = True
        self._line.connection.abort()
        self._task.cancel()

    def _end(self, problem: P2PTrainError) -> None:
        if not self.closed:
            self.closed = True
            self._requests.lose_next(self._stage, self, problem)


def _refuse_message(received: Received) -> None:
    raise ProtocolError(f"unexpected message {type(received.message).__name__} from the next stage")


def of_session(hello: Hello) -> tuple[str, int]:
    return hello.job, hello.generation


class ForwardRequests:
    """The sessions of a worker's stages. They take turns; one request is computed at a time."""

    def __init__(self, context: PeerContext, cache: PartCache) -> None:
        self._context, self._cache = context, cache
        self._compute, self._now = context.compute, context.world.clock.now
        self.sessions: dict[tuple[str, int], OpenStage] = {}
        self._turns: Turns[OpenStage] = Turns()
        self.wake = asyncio.Event()

    # ------------------------------------------------------------------------------------------------------- sessions

    async def open(self, client: StageClient, request: OpenRequest) -> None:
        """Open a session on a part.

        Raises:
            Refused: the part is absent or full, memory is short, or the next stage cannot be reached.
        """
        part = self._cache.get(request.part)
        core = StageSession(request, part.engine.width)
        if (core.first, core.last) != (part.spec.start == 0, part.spec.stop == part.spec.layers):
            text = f"layers [{part.spec.start}, {part.spec.stop}) are not stage {request.index} of {request.stages}"
            raise Refused("wrong-stage", text)
        if core.id in {stage.core.id for stage in self._of(part)} or (core.id, core.index) in self.sessions:
            raise Refused(DUPLICATE, f"session {core.id} is open here already")
        if len(self._of(part)) >= MAX_SESSIONS:
            raise Refused("full", f"{MAX_SESSIONS} sessions are open on this part", remedy="try again later")
        need_bytes = request.positions * part.engine.cache_position_bytes
        unloaded = self._cache.make_room(need_bytes, f"{request.positions} positions of a session", keep=part)
        stage = OpenStage(core, part, client)
        part.users.add(stage)
        part.promised[stage] = need_bytes
        self.sessions[stage.key] = stage
        try:
            await self.unload(unloaded)
            if core.closed:
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            await self._compute.run(part.engine.open, core.id, positions=request.positions, sampling=request.sampling)
            await self._link(stage, request.next)
        except BaseException:
            self.close(stage)
            raise
        client.line.silence_s = min(client.line.silence_s, request.silence_s)
        part.next = request.next.peer if request.next else ""

    async def resume(self, client: StageClient, request: ResumeRequest) -> int:
        """Begin a new epoch. Returns the number of positions that are kept here, at most ``request.keep``.

        Raises:
            Refused: the session is unknown, the epoch is not newer, or the next stage cannot be reached.
        """
        stage = self._find(client, request)
        if (request.next is None) != stage.core.last:
            raise ProtocolError("every stage but the last must have a next stage")
        stage.core.raise_epoch(request.epoch)
        self._turns.drop(stage)
        stage.changed.set()
        # A pass that runs now is of an older epoch: its result is dropped.
        position = stage.core.position = min(stage.core.position, request.keep)
        await self._link(stage, request.next)
        stage.part.next = request.next.peer if request.next else ""
        return position

    def close_of(self, client: StageClient, which: CloseRequest) -> None:
        with suppress(Refused):
            self.close(self._find(client, which))

    def close(self, stage: OpenStage) -> None:
        """Forget a session. The result of a pass that runs now is dropped."""
        if self.sessions.get(stage.key) is not stage:
            return
        del self.sessions[stage.key]
        stage.core.close()
        self._turns.drop(stage)
        if stage.link is not None:
            stage.link.close()
        if stage.incoming is not None:
            stage.incoming.abort()
        self._cache.leave(stage.part, stage, self._now())
        stage.changed.set()
        # Queued at once, so that it runs before a new ``open`` of the same session.
        self._compute.submit(stage.part.engine.close, stage.core.id)

    def close_all_of(self, client: StageClient) -> None:
        for stage in [stage for stage in self.sessions.values() if stage.client is client]:
            self.close(stage)

    def _find(self, client: StageClient, which: ResumeRequest | CloseRequest) -> OpenStage:
        stage = self.sessions.get((which.session, which.index))
        if stage is None or stage.client is not client:
            raise Refused(UNKNOWN_SESSION, f"session {which.session} is not open here")
        return stage

    def _of(self, part: Part) -> list[OpenStage]:
        return [stage for stage in self.sessions.values() if stage.part is part]

    def count(self, part: Part) -> int:
        return len(self._of(part))

    async def _link(self, stage: OpenStage, place: PeerAddress | None) -> None:
        """Make the session's link lead to ``place``. Raises ``Refused``."""
        async with stage.linking:
            core, link = stage.core, stage.link
            if link is not None and link.place == place and not link.closed:
                return
            if link is not None:
                link.close()
                stage.link = None
            if place is None:
                return
            try:
                # The hello's generation is the index of the dialled stage: one worker may hold several stages.
                hello = self._context.hello("stage", core.id, core.index + 1)
                connection, _ = await self._context.dial(place.peer, place.host, place.port, hello)
            except P2PTrainError as problem:
                text = f"stage {core.index} cannot reach the next stage: {problem.message}"
                raise Refused(NEXT_LOST, text, remedy=problem.remedy) from problem
            if core.closed:
                connection.abort()
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            line = Line(connection, core.asked.silence_s)
            stage.link = NextStage(self, stage, place, line)

    def lose_next(self, stage: OpenStage, link: NextStage, problem: P2PTrainError) -> None:
        if stage.link is link:
            stage.link = None
            self._break(stage, stage.core.index + 1, NEXT_LOST, problem)

    # ------------------------------------------------------------------------------------------------------- requests

    async def take(self, line: Line, work: ForwardRequest, stage: OpenStage | None) -> None:
        """Read a request's payload and queue the request.

        Args:
            stage: None if the first stage's session was closed just before; then the payload is read and dropped.

        Raises:
            ProtocolError: no correct peer sends such a request.
            NetworkError: the payload did not arrive.
        """
        if stage is None:
            if work.encoding != IDS or not 0 < work.count <= MAX_REQUEST_POSITIONS:
                raise ProtocolError(f"a request of session {work.session[:64]!r}, which is not open here")
            await line.receive_bulk(ID_BYTES * work.count, stream=CHAIN_STREAM)
            return
        size_bytes = stage.core.payload_bytes_untrusted(work)
        payload = await line.receive_bulk(size_bytes, stream=CHAIN_STREAM)
        if stage.core.admit(work, payload):
            self._turns.add(stage)
            self.wake.set()

    async def serve_stage(self, connection: Connection, stage: OpenStage) -> None:
        """Serve the stage before: read its requests as fast as they are computed. Raises as ``take``."""
        if stage.incoming is not None:
            stage.incoming.abort()  # the stage before was replaced
        stage.incoming = connection
        core = stage.core
        line = Line(connection, core.asked.silence_s)
        async with line.keep_alive():
            async for message in line.messages():
                if not isinstance(message, ForwardRequest) or message.session != core.id:
                    raise ProtocolError(f"unexpected message {type(message).__name__}, or a request of another session")
                while core.crowded and stage.incoming is connection:
                    stage.changed.clear()
                    await stage.changed.wait()
                if core.closed:
                    return
                await self.take(line, message, stage)

    async def run(self) -> None:
        while True:
            stage = self._turns.take(lambda stage: stage.link is None or not stage.link.crowded)
            if stage is None:
                self.wake.clear()
                await self.wake.wait()
                continue
            work, payload = stage.core.queue.popleft()
            if stage.core.queue:
                self._turns.add(stage)
            stage.changed.set()
            await self._compute_one(stage, work, payload)

    async def _compute_one(self, stage: OpenStage, work: ForwardRequest, payload: bytearray) -> None:
        began, core = self._now(), stage.core
        try:
            core.begin(work)
            samples, encoding = work.samples if core.last else 0, core.out_encoding(work)
            what = (samples, work.sample_index, decode_ids(work.targets) if core.last else ())
            asked = Pass(work.keep, memoryview(payload), work.count, work.encoding, encoding, *what)
            ran = result_of((await self._compute.run(stage.part.engine.run, {core.id: asked}))[core.id])
        except P2PTrainError as problem:
            if core.current(work):
                self._break(stage, core.index, _code(problem), problem)
            return
        took_s = self._now() - began
        stage.part.add_pass(self._now(), took_s, work.count)
        if not core.current(work):
            return
        core.position = work.keep + work.count
        spent_us = [*work.spent_us, round(1e6 * took_s)]
        if work.last == core.index:
            found = encode_ids(ran.tokens) if work.samples else b"", spent_us, ran.scores
            stage.client.send(Sampled(work.session, work.epoch, work.number, *found))
        elif stage.link is not None:
            stage.part.out_position_bytes = ran.payload.nbytes / work.count
            onward = replace(work, encoding=encoding, spent_us=spent_us)
            with suppress(ConnectionLost):  # ``NextStage`` reports the loss
                stage.link.send_forward(onward, ran.payload)

    def _break(self, stage: OpenStage, lost: int, code: str, problem: P2PTrainError) -> None:
        core = stage.core
        core.fail()
        self._turns.drop(stage)
        stage.changed.set()
        reason, remedy = shortened(problem.message), shortened(problem.remedy)
        stage.client.send(ChainBroken(core.id, core.epoch, lost, code, reason, remedy))

    async def unload(self, parts: list[Part]) -> None:
        """Drop the last references on the compute thread, where a device frees its memory."""
        if parts:
            await self._compute.run(parts.clear)


def _code(problem: P2PTrainError) -> str:
    if isinstance(problem, Refused):
        return problem.code
    return RefusalCode.PROTOCOL if isinstance(problem, ProtocolError) else "failed"
