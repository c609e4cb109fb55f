"""Asynchronous training with bounded staleness: a parameter server and its workers (``ring.staleness`` has the rules).

Rank 0 is the server: it waits for contributions, combines them in the reduce buffer, and applies them. Each worker
makes one *exchange* after the other, by messages between itself and the server (``ring.direct``)::

    worker → server   PullRequest; then the contribution, if it was asked for one
    server → worker   PullReply, once that is part of a version, or refused; then rows of the ledger, and the state

A contribution is a gradient, in the codec of the view. What a codec leaves out stays in the worker's residual, also if
the contribution is refused. A pull brings the *whole* state of a version, with the optimizer's moments. So a worker
that pulled a version holds the same bits as the server then, and can go on as the server. It receives them into memory
of its own first: its own state is complete at any time.

The server sends from a copy of the state, so it makes further versions meanwhile. It keeps at most ``MOST_COPIES``; if
all are being sent, workers get the newest copy instead of the newest version.

With a robust rule the contributions of a version are its vectors (``compute.robust``). Without one, a contribution that
is not finite, or is an outlier (``ring.token.NormGuard``), ends the view, and its worker is excluded for a while
(``ring.quarantine``).
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from configs.schema import Profile
from p2ptrain.core.errors import NeighbourAway, NetworkError, P2PTrainError, PeerError, ProtocolError, ResourceError
from p2ptrain.core.training import Applied, Blob
from p2ptrain.core.world import LoopClock
from ring.codecs import Codec
from ring.direct import DirectMessages
from ring.neighbours import cause_of
from ring.session import RingSession
from ring.staleness import (
    REPLY_BYTES,
    REQUEST_BYTES,
    Accepted,
    ContributionStatus,
    Intake,
    PullReply,
    PullRequest,
    next_number,
    packed,
)
from ring.token import NormGuard
from roles.compute_thread import ComputeThread, translate_error
from roles.engine import Engine
from roles.gauges import free_memory_bytes
from roles.snapshots import Snapshot, Snapshots, digest_of, state_digest
from roles.strategies.robust import MEASURED_EVERY, combine, scores_of
from roles.strategies.sync import MicroBatches, codec_of

PULL, CONTRIBUTION, REPLY, ROWS, STATE = range(5)
"""Tags of the messages."""
EXCHANGE_S = 3600.0
"""Longest time for a contribution, and for a message. Heartbeats notice a lost member sooner, and nobody waits for a
slow one."""
MOST_COPIES = 4
Bytes = npt.NDArray[np.uint8]


class Outcome(NamedTuple):
    """What became of a contribution, its staleness, and the bound."""

    status: ContributionStatus
    staleness: int
    bound: int


NOTHING = Outcome(ContributionStatus.NONE, 0, 0)


class VersionRows(Protocol):
    """The ledger's rows of the versions that this member knows."""

    def since(self, step: int) -> bytes:
        """Those after version ``step``, or as many of the newest as fit into a message."""

    def made_of(self) -> list[bytes]:
        """``LedgerRow.made_of`` of all."""


class Version(NamedTuple):
    """The next version, in the reduce buffer: digest and squared norm of its bytes; the others as in ``LedgerRow``."""

    digest: bytes
    square_sum: float
    counts: bytes
    made_of: bytes


def contribution_bytes(engine: Engine, codec: Codec | None) -> int:
    buffer, codec_numel = engine.reduce_buffer, engine.codec_numel
    return buffer.nbytes if codec is None else codec.encoded_bytes(codec_numel) + buffer[codec_numel:].nbytes


def member_error(session: RingSession, rank: int, why: str, cause: str = "") -> NeighbourAway:
    """The error that ends the view because of a member. ``cause``: see ``Report``."""
    member = session.view.members[rank]
    return NeighbourAway(f"{member.name}: {why}", peer_id=member.peer_id, cause=cause)


class ContributionCombiner:
    """Combines the contributions of a version in the reduce buffer; on the compute thread.

    Attributes:
        slots: memory for the encoded contribution of each worker, from rank 1 on.
        guard: knows the usual norm of a version.
        scores: as ``Exchange.scores``.
    """

    def __init__(self, engine: Engine, session: RingSession, profile: Profile) -> None:
        self._engine, self._session, self._profile = engine, session, profile
        self._codec = codec_of(session, profile.plugins)
        workers, numel, buffer = session.size - 1, engine.reduce_buffer.size, profile.server.buffer
        vectors, slot_bytes = (
            buffer if profile.robust.rule or buffer > 1 else 0,
            contribution_bytes(engine, self._codec),
        )
        need_bytes = workers * slot_bytes + vectors * 4 * numel
        if need_bytes > (free_bytes := free_memory_bytes("cpu")):
            raise ResourceError(
                f"the gradients of {workers} workers take {need_bytes / 1e6:,.0f} MB of the server's memory, and "
                f"{free_bytes / 1e6:,.0f} MB are free",
                remedy="lower job.workers or server.buffer, or choose a smaller [model]",
            )
        self.slots = [np.empty(slot_bytes, np.uint8) for _ in range(workers)]
        self._vectors = np.empty((vectors, numel), np.float32)
        self._center: npt.NDArray[Any] | None = None
        self.guard = NormGuard(profile.guard.outlier_factor)
        self.scores: dict[str, float] = {}

    def combine(self, chosen: Sequence[Accepted], step: int) -> Version:
        """Combine the contributions of the version after ``step``. Raises ``NeighbourAway`` for one that is unfit."""
        rule, buffer, count = self._profile.robust.rule, self._engine.reduce_buffer, len(chosen)
        vectors = self._vectors if len(self._vectors) else buffer.reshape(1, -1)
        with np.errstate(all="ignore"):
            for contribution, vector in zip(chosen, vectors, strict=True):
                self._decode(contribution, vector, count)
                if rule in ("", "mean"):  # other rules withstand any vector
                    if vectors is self._vectors:
                        buffer[:] = vector
                    own = self._engine.partial_square_sum(0, buffer.size)
                    if self.guard.refuses(own, lenient=self._session.view.lenient):
                        why = "its gradient is not finite, or is an outlier"
                        raise member_error(self._session, contribution.rank, why, "contribution")
        if vectors is self._vectors and not rule:
            np.add.reduce(vectors, axis=0, out=buffer)
            buffer /= np.float32(count)
        elif rule:
            measured, scalars = step % MEASURED_EVERY == 0, self._engine.scalars
            found, self._center = combine(
                self._profile.robust, [vectors], buffer, scalars, self._center, measured=measured
            )
            self.scores = scores_of(found, [contribution.rank for contribution in chosen])
        counts = [0] * self._session.size
        for contribution in chosen:
            counts[contribution.rank] = self._profile.batch.micro_batches // self._profile.server.buffer
        digest, square_sum = digest_of(buffer.view(np.uint8).data), self._engine.partial_square_sum(0, buffer.size)
        return Version(digest, square_sum, struct.pack(f"!{len(counts)}I", *counts), packed(chosen))

    def _decode(self, contribution: Accepted, vector: npt.NDArray[Any], count: int) -> None:
        """Put a contribution, as if it were of all micro-batches, into ``vector``."""
        slot = self.slots[contribution.rank - 1]
        codec_numel, scalars = self._engine.codec_numel, self._engine.scalars
        if self._codec is None:
            vector[:] = slot.view(vector.dtype)
        else:
            encoded_bytes = self._codec.encoded_bytes(codec_numel)
            try:
                self._codec.decode(slot[:encoded_bytes], vector[:codec_numel])
            except ProtocolError as problem:
                raise member_error(self._session, contribution.rank, problem.message, cause_of(problem)) from problem
            vector[codec_numel:] = slot[encoded_bytes:].view(vector.dtype)
        vector[:-scalars] *= np.float32(count * contribution.weight)
        vector[-scalars:] *= np.float32(count)


@dataclass(slots=True)
class PublishedVersion:
    """A version that workers may pull.

    Attributes:
        digest: of the copy's bytes.
        over: the server stops here. last: the job has no further version.
    """

    copy: Snapshot
    digest: bytes
    over: bool = False
    last: bool = False


class VersionServer:
    """The server of one view.

    Args:
        messages: to the workers, until the view ends.
        copies: of at most ``MOST_COPIES`` versions.
    """

    def __init__(
        self,
        engine: Engine,
        compute: ComputeThread,
        session: RingSession,
        messages: DirectMessages,
        copies: Snapshots,
        rows: VersionRows,
        profile: Profile,
    ) -> None:
        self._engine, self._compute, self._session, self._messages = engine, compute, session, messages
        self._copies, self._rows = copies, rows
        self._combiner = ContributionCombiner(engine, session, profile)
        step, settings = session.view.step, profile.server
        number = next_number(rows.made_of(), step, settings.buffer)
        self._intake = Intake(version=step, number=number, buffer=settings.buffer, bound=settings.bound)
        self._published: PublishedVersion | None = None
        self._chosen: list[Accepted] = []
        self._answers: dict[int, asyncio.Future[Outcome]] = {}
        self._failure: P2PTrainError | None = None
        self._news, self._sending, self._ending = asyncio.Event(), 0, False

    @property
    def scores(self) -> dict[str, float]:
        return self._combiner.scores

    async def publish(self, step: int, lineage: str, square_sum: float, *, over: bool, last: bool) -> None:
        """Let workers pull the state of version ``step``. It does not change before this returns. ``over``,
        ``last``: as in ``PublishedVersion``."""
        before = published = self._published
        while published is None or (published.copy.step, published.copy.lineage) != (step, lineage):
            try:
                copy = await self._copies.take(self._engine, step=step, lineage=lineage, square_sum=square_sum)
            except ResourceError:
                if published is None or (over and not self._sending):
                    raise
                if not over:
                    break  # workers get the copy before it
                self._news.clear()
                await self._news.wait()
            else:
                with copy:
                    published = PublishedVersion(copy, await self._compute.run(state_digest, copy.blobs))
                    copy.holders += 1
                if before is not None:
                    before.copy.release()
        self._published, published.over, published.last = published, over, last
        if before is None:
            ranks = range(1, self._session.size)
            tasks = [asyncio.create_task(self._serve(rank), name=f"serve rank {rank}") for rank in ranks]
            self._session.broken.add_done_callback(lambda _: [task.cancel() for task in tasks])
        chosen, self._chosen = self._chosen, []
        for taken in chosen:
            self._answer(taken.rank, Outcome(ContributionStatus.ACCEPTED, step - 1 - taken.base, taken.bound))
        for rank in list(self._answers) if over else ():
            self._answer(rank, NOTHING)

    def end(self) -> None:
        """Let ``collect`` end without a version."""
        self._ending = True
        self._news.set()

    def close(self) -> None:
        """Let the memory of the published version go, after the view."""
        if self._published is not None:
            self._published.copy.release()
        self._published = None

    async def collect(self) -> Version | None:
        """Wait for the contributions of the next version, and combine them. None: ``end`` was called. Raises
        ``NeighbourAway``."""
        intake = self._intake
        while not self._ending:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            chosen, stale = intake.choose()
            for rank in stale:
                self._answer(rank, Outcome(ContributionStatus.REFUSED, intake.staleness(rank), intake.bound(rank)))
            if chosen:
                version = await self._compute.run(self._combiner.combine, chosen, intake.version)
                self._chosen = chosen
                return version
            await self._news.wait()
        return None

    async def apply(self, step: int, square_sum: float) -> Applied:
        """Make the combined contributions the next version."""
        applied = await self._compute.run(self._engine.apply, step, square_sum)
        self._combiner.guard.committed(square_sum)
        self._intake.made(self._chosen)
        return applied

    async def _serve(self, rank: int) -> None:
        asked = np.empty(REQUEST_BYTES, np.uint8)
        try:
            while True:
                await self._messages.receive(asked, rank, PULL, timeout_s=EXCHANGE_S)
                request = PullRequest.decode_untrusted(asked.tobytes())
                outcome = await self._outcome(rank, request) if request.contributes else NOTHING
                await self._reply(rank, request, outcome)
        except (NetworkError, PeerError) as problem:
            self._give_up(member_error(self._session, rank, problem.message, cause_of(problem)))
        except Exception as problem:  # noqa: BLE001 - ``collect`` raises it
            self._give_up(problem if isinstance(problem, P2PTrainError) else translate_error(problem))

    def _give_up(self, problem: P2PTrainError) -> None:
        self._failure = problem
        self._news.set()

    async def _outcome(self, rank: int, request: PullRequest) -> Outcome:
        slot = self._combiner.slots[rank - 1]
        await self._messages.receive(slot, rank, CONTRIBUTION, timeout_s=EXCHANGE_S)
        if await self._compute.run(xxhash.xxh3_128_digest, slot.data) != request.digest:
            raise ProtocolError("its contribution was corrupted in transit")
        if self._published is None or self._published.over:
            return NOTHING
        self._intake.arrived(rank, LoopClock().now())
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._answers[rank] = outcome
        self._news.set()
        return await outcome

    def _answer(self, rank: int, outcome: Outcome) -> None:
        answer = self._answers.pop(rank)
        if not answer.done():  # else the view has ended
            answer.set_result(outcome)

    async def _reply(self, rank: int, request: PullRequest, outcome: Outcome) -> None:
        assert self._published is not None
        published, copy = self._published, self._published.copy
        has_state = (request.applied, request.lineage) != (copy.step, copy.lineage)
        rows = self._rows.since(request.applied) if has_state else b""
        number = 0 if published.over else self._intake.assign(rank, copy.step, LoopClock().now())
        version = copy.step, copy.lineage, copy.square_sum
        reply = PullReply(
            *outcome, has_state, published.over, published.last, *version, number, len(rows), published.digest
        )
        arrays = [(REPLY, np.frombuffer(reply.encode(), np.uint8))]
        arrays += [(ROWS, np.frombuffer(rows, np.uint8))] * bool(rows)
        arrays += [(STATE, np.frombuffer(blob.view, np.uint8)) for blob in copy.blobs] * has_state
        copy.holders += 1
        self._sending += 1
        try:
            await asyncio.gather(
                *(self._messages.send(array, rank, tag, timeout_s=EXCHANGE_S) for tag, array in arrays)
            )
        finally:
            copy.release()
            self._sending -= 1
            self._news.set()


@dataclass(slots=True)
class WorkerRecord:
    """What became of a worker's contributions to a job.

    Attributes:
        accepted: by their staleness.
        memory: for the state that is pulled; empty before the first pull.
    """

    refused: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    memory: list[Blob] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """See ``PeerInfo``."""
        number, counts = self.accepted.total(), self.accepted
        mean = sum(staleness * count for staleness, count in counts.items()) / max(number, 1)
        most = max((staleness for staleness, count in counts.items() if count), default=0)
        return {"accepted": number, "refused": self.refused, "staleness": mean, "most_staleness": most}


class VersionWorker:
    """A worker of one view. Its ``record`` is of the whole job.

    Attributes:
        share: micro-batches of a contribution.
        rows: of the ledger, that came with the version that was pulled last, as ``VersionRows.since``.
    """

    def __init__(
        self,
        work: MicroBatches,
        engine: Engine,
        compute: ComputeThread,
        session: RingSession,
        messages: DirectMessages,
        record: WorkerRecord,
        profile: Profile,
    ) -> None:
        self._work, self._engine, self._compute = work, engine, compute
        self._session, self._messages, self._record = session, messages, record
        self._buffer = profile.server.buffer
        self._codec = codec_of(session, profile.plugins)
        feedback = self._codec is not None and self._codec.feedback
        self._residual = np.zeros(engine.codec_numel, np.float32) if feedback else None
        self._number: int | None = None  # of the contribution to compute
        self.share = profile.batch.micro_batches // self._buffer
        self.rows = b""

    async def exchange(self, applied: int, lineage: str) -> PullReply:
        """Push a contribution to the server, if it asked for one, and pull. Raises ``NetworkError``.

        ``applied``, ``lineage``: of the version that this worker holds.
        """
        messages, record = self._messages, self._record
        request, outgoing = PullRequest(False, applied, lineage), list[tuple[int, Bytes]]()
        if self._number is not None:
            contribution = await self._contribution(self._number)
            outgoing = [(CONTRIBUTION, contribution)]
            digest = await self._compute.run(xxhash.xxh3_128_digest, contribution.data)
            request = PullRequest(True, applied, lineage, digest)
        outgoing.insert(0, (PULL, np.frombuffer(request.encode(), np.uint8)))
        answer = np.empty(REPLY_BYTES, np.uint8)
        sends = [messages.send(array, 0, tag, timeout_s=EXCHANGE_S) for tag, array in outgoing]
        try:
            await asyncio.gather(messages.receive(answer, 0, REPLY, timeout_s=EXCHANGE_S), *sends)
            reply = PullReply.decode_untrusted(answer.tobytes())
            if not reply.has_state and (reply.version, reply.lineage) != (applied, lineage):
                raise ProtocolError("it named another version, and sent no state")
            if reply.has_state:
                await self._pull(reply)
        except PeerError as problem:
            raise member_error(self._session, 0, problem.message, cause_of(problem)) from problem
        self._number = None if reply.over else reply.number
        record.refused += reply.status is ContributionStatus.REFUSED
        record.accepted[reply.staleness] += reply.status is ContributionStatus.ACCEPTED
        return reply

    async def _contribution(self, number: int) -> Bytes:
        step, place = divmod(number, self._buffer)
        first = place * self.share
        await self._compute.run(self._engine.begin_step, step, first, self.share)
        await self._work.compute(step, first, self.share, lambda numel: None, patience_s=0.0)
        return await self._compute.run(self._encoded)

    def _encoded(self) -> Bytes:
        self._engine.finish_gradients()
        buffer, codec_numel, codec, residual = (
            self._engine.reduce_buffer, self._engine.codec_numel, self._codec, self._residual
        )  # fmt: skip
        if codec is None:
            return buffer.view(np.uint8)
        encoded_bytes, values = codec.encoded_bytes(codec_numel), buffer[:codec_numel]
        encoded = np.empty(contribution_bytes(self._engine, codec), np.uint8)
        encoded[encoded_bytes:] = buffer[codec_numel:].view(np.uint8)
        if residual is None:
            codec.encode(values, encoded[:encoded_bytes])
        else:
            codec.encode_with_feedback(values, residual, encoded[:encoded_bytes])
            np.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return encoded

    async def _pull(self, reply: PullReply) -> None:
        record = self._record
        if not record.memory:
            record.memory = await self._compute.run(
                lambda: [
                    Blob(blob.name, np.empty(blob.view.nbytes, np.uint8).data) for blob in self._engine.state.blobs()
                ]
            )
        rows = np.empty(reply.rows_bytes, np.uint8)
        arrays = [(ROWS, rows)] * bool(reply.rows_bytes) + [
            (STATE, np.frombuffer(blob.view, np.uint8)) for blob in record.memory
        ]
        await asyncio.gather(*(self._messages.receive(array, 0, tag, timeout_s=EXCHANGE_S) for tag, array in arrays))
        if await self._compute.run(state_digest, record.memory) != reply.digest:
            raise ProtocolError("the state that it sent was corrupted in transit")
        self.rows = rows.tobytes()

    async def adopt(self, step: int) -> None:
        """Replace the state by the one that was pulled, which is that of ``step``."""
        await self._compute.run(self._load, step)

    def _load(self, step: int) -> None:
        for blob, pulled in zip(self._engine.state.blobs(), self._record.memory, strict=True):
            np.copyto(np.frombuffer(blob.view, np.uint8), np.frombuffer(pulled.view, np.uint8))
        self._engine.state.refresh(step)
