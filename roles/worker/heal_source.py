"""The sending side of healing: a state and the steps since, for members that heal and workers that follow the ring.

A member of the source's view receives the live state. That state does not change: no step commits without the healing
member's token. The transfer ends with the view. A worker beside the ring receives a *snapshot*, which the ring makes at
its next step boundary, and then the reduced bytes of every step committed since, from a *log*. This outlasts views, and
ends when the follower is admitted, gone, or silent. If the log reaches back to a recipient's state, it gets steps only.

The log is bounded by the size of the state and two steps (``log_limit_bytes``). A ring whose steps make more bytes than
that while the state is fetched makes them faster than they can be fetched, so the follower could never catch up. It is
told that its steps are gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from p2ptrain.core.errors import (
    ConnectionLost,
    P2PTrainError,
    PeerError,
    ProtocolError,
    Refused,
    ResourceError,
    StorageError,
)
from p2ptrain.core.training import Blob
from ring.job_member import JobMember
from roles.engine import WHOLE, Engine, Stage
from roles.line import Line, wait_unless_closed
from roles.snapshots import CHUNK_BYTES, Snapshot, Snapshots, digest_of
from roles.worker.context import Context
from roles.worker.transfer import TransferPiece, send_range
from wire.connection import Connection
from wire.job_messages import BlobRecord, HealOffer, HealRequest, LedgerRow, RangeRequest, StepLogged
from wire.messages import Hello, Message, RefusalCode, Refuse

DIGEST_BYTES = 16
TABLE, STEP = "#table", "#step "
ANSWER_S = 15.0
"""Deadline for a dial and for the first message: the far-peer death interval. Then the agreed silence limit applies."""
MAX_FOLLOWERS = 4
"""Workers beside the ring that one member serves at a time. Others ask other members, or heal within the ring."""
_NOT_HERE = "not-here"


# ------------------------------------------------------------------------------------------------------- what is given


def log_limit_bytes(state_bytes: int, reduce_bytes: int) -> int:
    """Bytes of steps that a source keeps since a snapshot; the module's docstring gives the reason. The minimum serves
    small states, for which round trips take longer than bytes."""
    return max(state_bytes + 2 * reduce_bytes, 16 << 20)


def chunks_of(blobs: Sequence[Blob]) -> list[TransferPiece]:
    """Cut all blobs, in order, into chunks of at most ``CHUNK_BYTES``."""
    places = [(blob, start) for blob in blobs for start in range(0, blob.view.nbytes, CHUNK_BYTES)]
    stops = [min(start + CHUNK_BYTES, blob.view.nbytes) for blob, start in places]
    return [
        TransferPiece(blob.name, start, stop, blob.view[start:stop])
        for (blob, start), stop in zip(places, stops, strict=True)
    ]


async def root_of(state: Snapshot) -> bytes:
    """Return the digest of the state's table. Hashes the chunks once for all callers; the event loop runs between two
    chunks."""
    async with state.making:
        if not state.table:
            digests = []
            for chunk in chunks_of(state.blobs):
                digests.append(digest_of(chunk.into))
                await asyncio.sleep(0)
            state.table = b"".join(digests)
    return digest_of(memoryview(state.table))


@dataclass(slots=True, eq=False)
class LoggedStep:
    """A committed step, as followers are told of it. ``lineage``: after it. ``data``: its reduced bytes."""

    report: StepLogged
    lineage: str
    data: memoryview


class StepLog:
    """The newest committed steps, without a gap. Bounded in bytes: the oldest are dropped, but one is always kept."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.held_bytes = 0
        self._start = (-1, "")
        self.entries: deque[LoggedStep] = deque()

    def begin(self, step: int, lineage: str) -> None:
        self.entries.clear()
        self.held_bytes, self._start = 0, (step, lineage)

    def add(self, entry: LoggedStep) -> None:
        assert entry.report.step == self.newest + 1, "a gap in the log"
        self.entries.append(entry)
        self.held_bytes += entry.data.nbytes
        while self.held_bytes > self.limit_bytes and len(self.entries) > 1:
            oldest = self.entries.popleft()
            self.held_bytes -= oldest.data.nbytes
            self._start = (oldest.report.step, oldest.lineage)

    @property
    def newest(self) -> int:
        return self._start[0] + len(self.entries)

    def since(self, step: int, lineage: str) -> list[LoggedStep] | None:
        """Return the steps after a state. None if the log does not reach back to it, or has another lineage there."""
        known = self.find(step)
        if (step, lineage) != (self._start if known is None else (known.report.step, known.lineage)):
            return None
        return [entry for entry in self.entries if entry.report.step > step]

    def find(self, step: int) -> LoggedStep | None:
        index = step - self._start[0] - 1
        return self.entries[index] if 0 <= index < len(self.entries) else None

    def named(self, name: str) -> LoggedStep | None:
        number = name.removeprefix(STEP)
        return self.find(int(number)) if number.isascii() and number.isdecimal() and len(number) < 16 else None


@dataclass(slots=True, eq=False)
class Recipient:
    """A peer that receives a state, steps, or both.

    Attributes:
        inside: it is a member of the view, and all other members wait for it.
        waits: it waits for the next snapshot.
        newest_step: the newest step reported to it; -1: it has no offer yet.
    """

    line: Line
    name: str
    inside: bool
    snapshot: Snapshot | None = None
    waits: bool = False
    newest_step: int = -1
    sent_bytes: int = 0
    ended: bool = False

    def send(self, message: Message) -> None:
        self.line.connection.send(message)

    def end(self, reason: str) -> None:
        self.ended = True
        self.line.connection.abort(PeerError(reason))

    def tell(self, entries: Iterable[LoggedStep]) -> None:
        for entry in entries:
            if entry.report.step > self.newest_step:
                self.send(entry.report)
                self.newest_step = entry.report.step


# -------------------------------------------------------------------------------------------------------------- sending


class HealSource:
    """Sends one worker's state and steps in one job. Only reads ``core``.

    ``want_snapshot`` asks the ring for a snapshot at its next step boundary.
    """

    def __init__(
        self, context: Context, core: JobMember, *, want_snapshot: Callable[[], None], stage: Stage = WHOLE
    ) -> None:
        self._context, self._core, self._want_snapshot, self._stage = context, core, want_snapshot, stage
        self.state_bytes = 0
        self._recipients: list[Recipient] = []  # in order, so that equal simulations are equal
        self._live: Snapshot | None = None
        self._copy: Snapshot | None = None
        self._log = StepLog()
        self._logging = False
        self._kept: memoryview | None = None
        self._applying = False
        self._turn = asyncio.Event()  # replaced when it is set, so that it wakes each waiter once

    # ----------------------------------------------------------------------------------------- what the runner calls

    @property
    def followers(self) -> int:
        return sum(not recipient.inside for recipient in self._recipients)

    def ask_for_snapshot(self) -> None:
        if any(recipient.waits for recipient in self._recipients):
            self._want_snapshot()

    def end_view(self, reason: str) -> None:
        """End transfers of the live state, which may change now. Snapshots and the log are still sent."""
        self._live, self._applying = None, False
        self._next_turn()
        for recipient in [recipient for recipient in self._recipients if recipient.inside]:
            recipient.end(f"the source's view ended: {reason}")

    def cut(self, reason: str) -> None:
        """End all transfers: the state is replaced by another, so no logged step leads on from here."""
        self.end_view(reason)
        self._logging, self._kept, self._copy = False, None, None
        self._log.begin(-1, "")
        for recipient in list(self._recipients):
            recipient.end(f"the source's state was replaced: {reason}")

    async def keep(self, engine: Engine) -> None:
        """Copy the reduced bytes of the step that is being committed, if a worker follows the ring."""
        self._applying = True
        if not self.followers:
            self._logging = False  # only now: a follower that left may be back as a member that lacks a step or two
            self._log.begin(-1, "")
        if self._logging:
            # On the compute thread. numpy releases the GIL, so the event loop runs meanwhile.
            copied = self._context.compute.run(lambda: engine.reduce_buffer.view(np.uint8).reshape(-1).copy())
            self._kept = (await copied).data

    def log_step(self, row: LedgerRow, digests: bytes = b"") -> None:
        """Log the step that was just applied, from the bytes that ``keep`` copied, and report it to the followers.
        ``digests``: of a split model, as in ``Contribution``."""
        self._applying = False
        self.ask_for_snapshot()
        kept, self._kept = self._kept, None
        if self._logging and kept is not None:
            place = DIGEST_BYTES * self._stage.index
            digest = digests[place : place + DIGEST_BYTES] if digests else row.digest
            core = self._core
            changes = len(core.view.changes) if core.view else 0
            report = StepLogged(row.step, digest, core.square_sum, kept.nbytes, digests, changes)
            entry = LoggedStep(report, core.lineage, kept)
            self._log.add(entry)
            for recipient in self._recipients:
                if recipient.newest_step >= 0 and not recipient.inside:
                    with suppress(ConnectionLost):  # ``give``, which serves it, notices too
                        recipient.tell([entry])
        self._next_turn()

    async def snapshot(self, engine: Engine, snapshots: Snapshots) -> None:
        """Copy the state between two steps, if recipients still wait for a snapshot."""
        waiting = [recipient for recipient in self._recipients if recipient.waits]
        if not waiting:
            return
        core = self._core
        try:
            taking = snapshots.take(engine, step=core.applied, lineage=core.lineage, square_sum=core.square_sum)
            with await taking as self._copy:
                for recipient in (recipient for recipient in waiting if recipient in self._recipients):
                    self._use(recipient, self._copy)
        except ResourceError:
            return  # both copies are in use, for example by a checkpoint: a later boundary retries
        self._next_turn()

    async def give(self, connection: Connection, hello: Hello, engine: Engine) -> None:
        """Serve one recipient that heals or follows, until it closes the connection. Raises ``NetworkError`` or
        ``PeerError`` if the connection fails or the request cannot be met."""
        request = await connection.expect(HealRequest, timeout_s=ANSWER_S)
        request = self._context.world.probe.alter("heal-request", request)
        name = hello.name[:64]
        if request.stage != self._stage.index:  # sizes and names alone may be equal for two parts
            raise PeerError(f"{name} asks for part {request.stage}, this member holds {self._stage}")
        line = Line(connection, request.silence_s)
        recipient = Recipient(line, hello.name, request.step >= 0)
        view = self._core.view
        is_member = view is not None and view.generation == hello.generation and view.rank_of(hello.peer_id) is not None
        if recipient.inside and not is_member:
            raise PeerError(f"{name} is not in this member's view")
        if not recipient.inside and self.followers >= MAX_FOLLOWERS:
            recipient.send(
                Refuse(RefusalCode.BUSY, f"this member already serves {self.followers} workers beside its ring")
            )
            await line.wait_sent()
            return
        self._recipients.append(recipient)
        try:
            async with line.keep_alive():
                await self._serve(recipient, request, engine)
        except ConnectionLost:
            pass  # the recipient closes the connection when it has enough
        except P2PTrainError:
            if not recipient.ended:
                raise
        finally:
            self._recipients.remove(recipient)
            self._release(recipient)
            if recipient.sent_bytes:
                size = f"{recipient.sent_bytes / 1e6:.1f} MB"
                self._context.notify_here("info", "gave", f"sent {size} of state and steps to {recipient.name}")

    # ------------------------------------------------------------------------------------------------------ internals

    async def _serve(self, recipient: Recipient, request: HealRequest, engine: Engine) -> None:
        try:
            if recipient.inside:
                await self._offer_inside(recipient, request, engine)
            else:
                await self._offer_outside(recipient, request, engine)
        except Refused as refused:
            recipient.send(Refuse(refused.code, refused.message))
            await recipient.line.wait_sent()
            return
        async for message in recipient.line.messages():
            if not isinstance(message, RangeRequest):
                raise ProtocolError(f"unexpected message {type(message).__name__} from {recipient.name}")
            await self._give_range(recipient, message)

    async def _give_range(self, recipient: Recipient, asked: RangeRequest) -> None:
        entry: LoggedStep | None = None
        if asked.name.startswith(STEP):
            if not recipient.inside:
                self._release(recipient)  # a request for a step means that it has all of the state
            entry = self._log.named(asked.name)
            most_bytes = entry.data.nbytes if entry is not None else asked.stop
        else:
            most_bytes = max(CHUNK_BYTES, len(recipient.snapshot.table) if recipient.snapshot is not None else 0)

        async def read(asked: RangeRequest) -> memoryview:
            return piece_untrusted(recipient.snapshot, entry, asked)

        recipient.sent_bytes += await send_range(recipient.line, asked, read, most_bytes=most_bytes)

    async def _turn_of(self, recipient: Recipient) -> None:
        await wait_unless_closed(recipient.line.connection, self._turn.wait())
        if recipient.line.connection.closed.is_set():
            raise ConnectionLost("the receiver closed the connection")

    async def _offer_inside(self, recipient: Recipient, request: HealRequest, engine: Engine) -> None:
        core, view = self._core, self._core.view
        if view is None or not core.may_give or (request.step, request.lineage) != (view.step, view.lineage):
            raise Refused(_NOT_HERE, f"this member is at step {core.applied}, but step {request.step} was requested")
        entries = self._log.since(request.have_step, request.have_lineage)
        if entries and (entries[-1].report.step, entries[-1].lineage) == (view.step, view.lineage):
            self._offer_steps(recipient, request, entries)
            return
        if self._live is None or (self._live.step, self._live.lineage) != (view.step, view.lineage):
            blobs = await self._context.compute.run(engine.state.blobs)
            if core.view is not view or not core.may_give:
                raise Refused(_NOT_HERE, "the view ended before the state was ready")
            self._live = Snapshot(view.step, view.lineage, view.square_sum, blobs)
        self._use(recipient, self._live)
        await self._offer_state(recipient, self._live)

    async def _offer_outside(self, recipient: Recipient, request: HealRequest, engine: Engine) -> None:
        while self._applying:
            await self._turn_of(recipient)  # the log must begin at a known step
        if not self._logging:
            if self._core.torn or not self._core.lineage:
                raise Refused(_NOT_HERE, "this member has no state to send")
            self._logging = True
            self._log.limit_bytes = log_limit_bytes(self.state_bytes, engine.reduce_buffer.nbytes)
            self._log.begin(self._core.applied, self._core.lineage)
        entries = self._log.since(request.have_step, request.have_lineage)
        if entries is not None:
            self._offer_steps(recipient, request, entries)
            return
        copy = self._copy
        if copy is not None and copy.holders and self._log.since(copy.step, copy.lineage) is not None:
            self._use(recipient, copy)
        else:
            recipient.waits = True
            self.ask_for_snapshot()
        while recipient.snapshot is None:
            await self._turn_of(recipient)
        await self._offer_state(recipient, recipient.snapshot)
        recipient.newest_step = recipient.snapshot.step
        recipient.tell(self._log.entries)

    def _offer_steps(self, recipient: Recipient, request: HealRequest, entries: list[LoggedStep]) -> None:
        recipient.send(HealOffer(request.have_step, request.have_lineage, [], CHUNK_BYTES))
        recipient.newest_step = request.have_step
        recipient.tell(entries)

    async def _offer_state(self, recipient: Recipient, snapshot: Snapshot) -> None:
        root = await root_of(snapshot)
        records = [BlobRecord(blob.name, blob.view.nbytes) for blob in snapshot.blobs]
        recipient.send(HealOffer(snapshot.step, snapshot.lineage, records, CHUNK_BYTES, root, snapshot.square_sum))

    def _use(self, recipient: Recipient, copy: Snapshot) -> None:
        recipient.waits, recipient.snapshot = False, copy
        copy.holders += 1

    def _release(self, recipient: Recipient) -> None:
        snapshot, recipient.snapshot, recipient.waits = recipient.snapshot, None, False
        if snapshot is not None:
            snapshot.release()

    def _next_turn(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()


def piece_untrusted(snapshot: Snapshot | None, entry: LoggedStep | None, asked: RangeRequest) -> memoryview:
    """Return the requested bytes of the offered state or of a logged step. Raises ``ProtocolError`` if there are no
    such bytes, ``StorageError`` if the log has dropped the step."""
    if asked.name.startswith(STEP):
        if entry is None:
            raise StorageError(f"{asked.name[:80]!r} is no longer in the log")
        data = entry.data
    elif snapshot is None:
        raise ProtocolError(f"{asked.name[:80]!r} was requested of a state that was not offered")
    elif asked.name == TABLE:
        data = memoryview(snapshot.table)
    else:
        found = next((blob.view for blob in snapshot.blobs if blob.name == asked.name), None)
        if found is None:
            raise ProtocolError(f"the state has no {asked.name[:80]!r}")
        data = found
    if not 0 <= asked.start < asked.stop <= data.nbytes:
        raise ProtocolError(
            f"bytes {asked.start} to {asked.stop} of {asked.name[:80]!r} were requested, but it has {data.nbytes}"
        )
    return data[asked.start : asked.stop]
