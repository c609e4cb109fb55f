"""Forward requests (``ForwardRequest``) of split models: what a session on a stage takes, computes and sends on.

``ForwardRequests`` is the shell of the sessions, whose core is ``stage_session``. The requests of a session wait in
order, its first one in the ``PassQueue`` of its part. Whenever the compute thread is free, one call of the engine
computes what waits then, at most one request of each session. The outputs go to the next stages, or the tokens to the
clients. A session gets no turn while its next stage accepts nothing. When the queues of a client's sessions at a stage
are full, the connection from the stage before is not read, which holds that stage back.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused, ResourceError
from p2ptrain.core.serving import BLOCK_POSITIONS, Pass, Preempted
from p2ptrain.core.texts import shortened
from roles.line import Line
from roles.pass_queue import SHARED_CHUNK, PassQueue
from roles.worker.context import PeerContext
from roles.worker.part_cache import MAX_SESSIONS, Part, PartCache
from roles.worker.stage_links import NextStage, StageClient, StageLinks
from roles.worker.stage_requests import CloseRequest, OpenRequest, PeerAddress, ResumeRequest
from roles.worker.stage_session import QUEUED_BYTES, QUEUED_FROM_STAGE, StageSession, batch_sizes_untrusted
from wire.chain_messages import (
    CHAIN_STREAM,
    MAX_REQUEST_POSITIONS,
    NEXT_LOST,
    PREEMPTED,
    UNKNOWN_SESSION,
    ChainBroken,
    ForwardBatch,
    ForwardRequest,
    Sampled,
    SampledBatch,
    split_batch,
)
from wire.connection import Connection
from wire.messages import Hello, RefusalCode

DUPLICATE = "duplicate"
SMALL_BATCH = 8
"""So many texts take about as long as one: the time to read the weights. Smaller batches would only cost more."""
ROOM_POSITIONS, ROOM_S = 4 * BLOCK_POSITIONS, 60.0
"""A session whose positions were dropped waits for memory for them and for so many more, and how long at most."""


@dataclass(eq=False, slots=True)
class OpenStage:
    """A session on one stage, with what its requests need: the part, and the link to its next stage.

    Attributes:
        linking: one change of ``link`` at a time.
    """

    core: StageSession
    part: Part
    client: StageClient
    link: NextStage | None = None
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> tuple[str, int]:
        return self.core.id, self.core.index

    def use(self, link: NextStage | None) -> None:
        old, self.link = self.link, link
        if link is not None:
            link.users.add(self)
        if old is not None and old is not link:
            old.leave(self)


def of_session(hello: Hello) -> tuple[str, int]:
    return hello.job, hello.generation


class ForwardRequests:
    """The sessions of a worker's stages. One batch of requests is computed at a time."""

    def __init__(self, context: PeerContext, cache: PartCache) -> None:
        self._context, self._cache = context, cache
        self._compute, self._now = context.compute, context.world.clock.now
        self.sessions: dict[tuple[str, int], OpenStage] = {}
        self._queues: dict[Part, PassQueue[OpenStage]] = {}
        self._wake = asyncio.Event()
        self._waiting: list[OpenStage] = []  # for memory
        self._room = asyncio.Event()
        self._links = StageLinks(context, self._wake.set, self._lose_next)

    # ------------------------------------------------------------------------------------------------------- sessions

    async def open(self, client: StageClient, request: OpenRequest) -> int:
        """Open a session on a part. Returns the number of positions that it has at once, because the client's other
        sessions computed them.

        Raises:
            Refused: the part is absent or full, memory is short, or the next stage cannot be reached.
        """
        part = self._cache.get(request.part)
        request = replace(request, order=max(request.order, client.since))  # no client goes before what was there
        core = StageSession(request, part.engine.width, client.peer_id)
        if (core.first, core.last) != (part.spec.start == 0, part.spec.stop == part.spec.layers):
            text = f"layers [{part.spec.start}, {part.spec.stop}) are not stage {request.index} of {request.stages}"
            raise Refused("wrong-stage", text)
        if core.id in {stage.core.id for stage in self._of(part)} or (core.id, core.index) in self.sessions:
            raise Refused(DUPLICATE, f"session {core.id} is open here already")
        if len(self._of(part)) >= MAX_SESSIONS:
            raise Refused("full", f"{MAX_SESSIONS} sessions are open on this part", remedy="try again later")
        stage = OpenStage(core, part, client)
        part.users.add(stage)
        self.sessions[stage.key] = stage
        try:
            await self.reserve(part, self._cache.grow(part, request.positions))
            if core.closed:
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            core.position = await self._compute.run(
                part.engine.open,
                core.id,
                positions=request.positions,
                sampling=replace(request.sampling, vocab_size=0),
                order=request.order,
                block_hashes=core.own_hashes(bytes.fromhex(request.block_hashes)),
            )
            await self._link(stage, request.next)
        except BaseException:
            self.close(stage)
            raise
        client.line.silence_s = min(client.line.silence_s, request.silence_s)
        return core.position

    async def resume(self, client: StageClient, request: ResumeRequest) -> int:
        """Begin a new epoch. Returns the number of positions that are kept here, at most ``request.keep``. A session
        whose positions were dropped waits until there is memory for them, for ``ROOM_S`` at most.

        Raises:
            Refused: the session is unknown, the epoch is not newer, or the next stage cannot be reached.
        """
        stage = self.find(client, request)
        if (request.next is None) != stage.core.last:
            raise ProtocolError("every stage but the last must have a next stage")
        stage.core.raise_epoch(request.epoch)
        self._drop_turn(stage)
        # A pass that runs now is of an older epoch: its result is dropped.
        position = stage.core.position = min(stage.core.position, request.keep)
        await self._link(stage, request.next)
        if stage.core.preempted:
            await self._wait_for_room(stage, request.keep)
        return position

    async def _wait_for_room(self, stage: OpenStage, keep: int) -> None:
        part, epoch = stage.part, stage.core.epoch
        positions = min(keep + ROOM_POSITIONS, stage.core.asked.positions)
        self._waiting.append(stage)
        try:
            async with asyncio.timeout(ROOM_S):
                while (stage.core.epoch, stage.core.closed) == (epoch, False) and self.count(part) > 1:
                    others = [other for other in self._waiting if other.part is part]
                    first = min(others, key=lambda other: other.core.asked.order)
                    if first is stage and part.engine.free_positions >= positions:
                        return
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.remove(stage)

    def close(self, stage: OpenStage) -> None:
        """Forget a session. The result of a pass that runs now is dropped."""
        if self.sessions.get(stage.key) is not stage:
            return
        del self.sessions[stage.key]
        stage.core.close()
        self._drop_turn(stage)
        stage.use(None)
        self._cache.leave(stage.part, stage, self._now())
        # Queued at once, so that it runs before a new ``open`` of the same session.
        self._compute.submit(stage.part.engine.close, stage.core.id).add_done_callback(lambda _: self._room.set())

    def close_all_of(self, client: StageClient) -> None:
        for stage in [stage for stage in self.sessions.values() if stage.client is client]:
            self.close(stage)
        client.close_links()

    def find(self, client: StageClient, which: ResumeRequest | CloseRequest) -> OpenStage:
        """The client's session. Raises ``Refused``: it is unknown."""
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
        core, stage.part.next = stage.core, place.peer if place else ""
        async with stage.linking:
            if place is None:
                stage.use(None)
                return
            key, silence_s = (stage.part.id, core.index), core.asked.silence_s
            link = await self._links.link(stage.client, key, place, session=core.id, silence_s=silence_s)
            if core.closed:
                raise Refused(UNKNOWN_SESSION, "the session was closed meanwhile")
            stage.use(link)

    def _lose_next(self, users: Sequence[Hashable], problem: P2PTrainError) -> None:
        for stage in users:
            if isinstance(stage, OpenStage):
                stage.use(None)
                self._break(stage, stage.core.index + 1, NEXT_LOST, problem)

    # ------------------------------------------------------------------------------------------------------- requests

    async def take(self, line: Line, batch: ForwardBatch, client: StageClient, index: int = 0, width: int = 0) -> None:
        """Read the payload of requests of ``client``'s sessions at stage ``index``, and queue the requests. Those of a
        session that is not open, because it was closed just before, are dropped.

        Args:
            width: elements of a hidden state; for the stages after the first.

        Raises:
            ProtocolError: no correct peer sends such requests.
            NetworkError: the payload did not arrive.
        """
        stages = [self.sessions.get((work.session, index)) for work in batch.requests]
        if any(stage is not None and stage.client is not client for stage in stages):
            raise ProtocolError("a request of a session that belongs to another client")
        cores = [stage.core if stage is not None else None for stage in stages]
        sizes = batch_sizes_untrusted(batch.requests, cores, width)
        payload, start = memoryview(await line.receive_bulk(sum(sizes), stream=CHAIN_STREAM)), 0
        for work, stage, size_bytes in zip(batch.requests, stages, sizes, strict=True):
            if stage is not None and stage.core.admit(work, payload[start : start + size_bytes]):
                self._wait_with(stage)
            start += size_bytes

    async def serve_stage(self, connection: Connection, stage: OpenStage) -> None:
        """Serve the stage before: read its requests as fast as they are computed. Raises as ``take``.

        Args:
            stage: one of the sessions whose requests come over this connection.
        """
        client, index, width = stage.client, stage.core.index, stage.core.width
        line = Line(connection, stage.core.asked.silence_s)
        client.add_incoming(connection)
        del stage  # it may be closed long before the connection
        try:
            async with line.keep_alive():
                async for message in line.messages():
                    if not isinstance(message, ForwardBatch):
                        raise ProtocolError(f"unexpected message {type(message).__name__} from the stage before")
                    while self._crowded(client, index):
                        client.changed.clear()
                        await client.changed.wait()
                    await self.take(line, message, client, index, width)
        finally:
            if connection in client.incoming:
                client.incoming.remove(connection)

    def _crowded(self, client: StageClient, index: int) -> bool:
        cores = [stage.core for (_, at), stage in self.sessions.items() if stage.client is client and at == index]
        queued_bytes = sum(core.queued_bytes for core in cores)
        return sum(len(core.queue) for core in cores) >= QUEUED_FROM_STAGE or queued_bytes >= QUEUED_BYTES

    async def run(self) -> None:
        while True:
            part, batch = self._take_batch()
            if part is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._compute_batch(part, batch)

    def _wait_with(self, stage: OpenStage) -> None:
        """Let the session's next request, if there is one, wait for a batch."""
        if stage.core.queue:
            work, _ = stage.core.queue[0]
            is_long = work.prefill or not work.samples or work.count > SHARED_CHUNK
            queue = self._queues.setdefault(stage.part, PassQueue())
            queue.add(stage, work.count, prefill=is_long, priority=stage.core.asked.priority)
            self._wake.set()

    def _drop_turn(self, stage: OpenStage) -> None:
        if (queue := self._queues.get(stage.part)) is not None:
            queue.drop(stage)
        stage.client.changed.set()

    def _take_batch(self) -> tuple[Part | None, list[OpenStage]]:
        """The sessions whose next requests are computed together, and their part. Parts take turns.

        A large batch has only some of the sessions that write: the others are at the other stages meanwhile, so that
        all stages are busy.
        """
        for part, queue in list(self._queues.items()):
            opened = self._of(part)
            stages = max([stage.core.asked.stages for stage in opened], default=1)
            most = SHARED_CHUNK if any(stage.core.is_writing for stage in opened) else MAX_REQUEST_POSITIONS
            writing = max(SMALL_BATCH, -(-len(opened) // stages)) if part.engine.is_batched else 1
            batch = queue.take(
                lambda stage: stage.link is None or not stage.link.crowded,
                most_sessions=writing,
                most_prompt_positions=most,
            )
            if batch:
                del self._queues[part]
                self._queues[part] = queue
                return part, batch
            if not opened:
                del self._queues[part]
        return None, []

    async def _compute_batch(self, part: Part, batch: Sequence[OpenStage]) -> None:
        began = self._now()
        begun = list[tuple[OpenStage, ForwardRequest, memoryview]]()
        passes = dict[str, Pass]()
        for stage in batch:
            work, payload = stage.core.queue.popleft()
            try:
                passes[stage.core.id] = stage.core.begin(work, payload)
            except P2PTrainError as problem:
                self._break(stage, stage.core.index, _code(problem), problem)
                continue
            begun.append((stage, work, payload[len(payload) - work.extra_bytes :]))
            self._wait_with(stage)
            stage.client.changed.set()
        if not passes:
            return
        try:
            ran = await self._compute.run(part.engine.run, passes)
        except P2PTrainError as problem:
            ran = dict.fromkeys(passes, problem)
        took_s = self._now() - began
        self._room.set()
        part.add_pass(self._now(), took_s, sum(work.count for _, work, _ in begun))
        ended: defaultdict[StageClient, list[Sampled]] = defaultdict(list)
        onward: defaultdict[NextStage, list[tuple[ForwardRequest, memoryview]]] = defaultdict(list)
        for stage, work, extras in begun:
            core, result = stage.core, ran[stage.core.id]
            if isinstance(result, Preempted):
                core.drop_positions()  # also if the epoch has changed meanwhile
            if not core.current(work):
                continue
            if isinstance(result, P2PTrainError):
                self._break(stage, core.index, _code(result), result)
                continue
            core.end(work)
            spent_us = [*work.spent_us, round(1e6 * took_s)]
            if work.last == core.index:
                tokens = encode_ids(result.tokens) if work.samples else b""
                what = tokens, spent_us, result.scores, result.tops
                ended[stage.client].append(Sampled(work.session, work.epoch, work.number, *what))
            elif stage.link is not None:
                part.out_position_bytes = result.payload.nbytes / work.count
                request = replace(work, encoding=core.out_encoding(work), spent_us=spent_us)
                payload = memoryview(bytes(result.payload) + bytes(extras)) if extras else result.payload
                onward[stage.link].append((request, payload))
        for link, requests in onward.items():
            link.send(requests)
        for client, results in ended.items():
            for answers in split_batch(results):
                client.send(SampledBatch(answers))

    def _break(self, stage: OpenStage, lost: int, code: str, problem: P2PTrainError) -> None:
        core = stage.core
        core.fail()
        self._drop_turn(stage)
        reason, remedy = shortened(problem.message), shortened(problem.remedy)
        stage.client.send(ChainBroken(core.id, core.epoch, lost, code, reason, remedy))

    async def reserve(self, part: Part, unloaded: list[Part]) -> None:
        """Unload these parts, and have the part's engine reserve the memory that was accounted for. Raises
        ``ResourceError``."""
        await self.unload(unloaded)
        positions = part.pool_positions
        if positions > part.reserved_positions:
            try:
                await self._compute.run(part.engine.reserve, positions)
            except ResourceError:
                if part.pool_positions == positions:  # nobody asks for more meanwhile
                    part.pool_positions = part.reserved_positions
                raise
            part.reserved_positions = max(part.reserved_positions, positions)

    async def unload(self, parts: list[Part]) -> None:
        """Drop the last references on the compute thread, where a device frees its memory."""
        if parts:
            await self._compute.run(parts.clear)


def _code(problem: P2PTrainError) -> str:
    if isinstance(problem, Preempted):
        return PREEMPTED
    return RefusalCode.PROTOCOL if isinstance(problem, ProtocolError) else problem.code
