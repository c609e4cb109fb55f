"""Healing: bring a member to the others' state, within a ring that waits for it or beside a ring that does not wait.

Within: the view's healthy members send their live state. If they have logged the steps that the member lacks, they send
only those. Beside: ``Follower`` fetches a snapshot, replays the steps since, and then follows the ring step by step.
So the ring waits only for a new view when this worker is admitted.

A state is fetched in chunks. The *table* has each chunk's digest, and the *root* is the table's digest. ``StateFetch``
asks several sources at a time. They offer a root and report each step's digest; the most frequent answer is taken. Then
chunks land in the state's own memory, and the reduced bytes of later steps land in buffers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError, ProtocolError
from p2ptrain.core.training import Applied, Blob
from ring import member_events as ev
from ring.job_member import JobMember
from ring.token import joined_digest, next_lineage
from roles.engine import WHOLE, Engine, Stage
from roles.line import QUIET_S, Line
from roles.snapshots import CHUNK_BYTES, digest_of, state_bytes
from roles.worker.context import Context
from roles.worker.heal_source import ANSWER_S, DIGEST_BYTES, STEP, TABLE, chunks_of, log_limit_bytes
from roles.worker.transfer import PieceSource, Receiver, TransferPiece, most_frequent
from wire.job_messages import CatchUp, HealOffer, HealRequest, MemberRecord, Report, StepLogged
from wire.messages import Message

SOURCES = 4
"""Members asked at a time. Each of them hashes its whole state. When one fails, another is asked."""
STEPS_AHEAD = 2
"""Reduced steps in memory: one is applied while the next arrives."""


@dataclass(frozen=True, slots=True)
class OfferedState:
    """A state that sources offer. ``root`` is the digest of its table; empty if it is the state held here already."""

    step: int
    lineage: str
    square_sum: float = 0.0
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The state that a member fetches. ``stage``: the part of the model that it holds."""

    blobs: Sequence[Blob]
    reduce_bytes: int
    stage: Stage = WHOLE


def offered_state_untrusted(offer: HealOffer, request: HealRequest, layout: StateLayout) -> OfferedState:
    """Return the state that a source offers in answer to ``request``. Raises ``ProtocolError`` if no correct
    source of this member's model offers this."""
    if offer.chunk_bytes != CHUNK_BYTES:
        raise ProtocolError(f"it sends chunks of {offer.chunk_bytes} bytes, this version requires {CHUNK_BYTES}")
    if not offer.blobs:
        if (offer.step, offer.lineage) != (request.have_step, request.have_lineage):
            raise ProtocolError("it offers steps that do not follow this member's state")
        return OfferedState(offer.step, offer.lineage)
    if request.step >= 0 and (offer.step, offer.lineage) != (request.step, request.lineage):
        raise ProtocolError(f"it offers step {offer.step}, but this member asked for step {request.step}")
    if [(record.name, record.size_bytes) for record in offer.blobs] != [
        (blob.name, blob.view.nbytes) for blob in layout.blobs
    ]:
        raise ProtocolError("its state's arrays differ in name or size from this model's")
    if len(offer.root) != DIGEST_BYTES:
        raise ProtocolError("its table's digest is invalid")
    return OfferedState(offer.step, offer.lineage, offer.square_sum, offer.root)


def check_report_untrusted(report: StepLogged, layout: StateLayout) -> None:
    """Raise ``ProtocolError`` if no correct source reports this about a committed step."""
    if report.size_bytes != layout.reduce_bytes:
        raise ProtocolError(f"its report of step {report.step} has an invalid size")
    stage = layout.stage
    size_bytes = DIGEST_BYTES * stage.count if stage.split else 0
    own = report.digests[DIGEST_BYTES * stage.index : DIGEST_BYTES * (stage.index + 1)]
    if len(report.digests) != size_bytes or (stage.split and own != report.digest):
        raise ProtocolError(f"its report of step {report.step} has invalid digests for {stage}")


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """A committed step, verified. ``lineage``: after it. ``data`` is valid until ``StateFetch.mark_applied``.
    ``changes``: see ``StepLogged``."""

    step: int
    lineage: str
    square_sum: float
    data: memoryview
    changes: int


class StateSource(PieceSource):
    """A member that sends a state, steps, or both.

    Attributes:
        offer: None until the source has answered.
        first, last: range of the steps that the source keeps.
        reports: of steps that are still to be applied.
    """

    def __init__(self, id: str, name: str, line: Line) -> None:
        super().__init__(id, name, line)
        self.offer: OfferedState | None = None
        self.first, self.last = 0, -1
        self.reports: dict[int, StepLogged] = {}


async def _digest(data: memoryview) -> bytes:
    return digest_of(data)


class StateTable:
    """The chunks of the state being fetched, and the table of their digests."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.chunks = chunks_of(blobs)
        self.root = b""  # digest of the table; empty until the state to fetch was chosen
        self._digests = bytearray()

    def begin(self, root: bytes) -> TransferPiece:
        """Choose a state by the digest of its table. Returns the table, as the piece to fetch first."""
        self.root, self._digests = root, bytearray(DIGEST_BYTES * len(self.chunks))
        return TransferPiece(TABLE, 0, len(self._digests), memoryview(self._digests), root)

    def pieces(self) -> dict[Hashable, TransferPiece]:
        """The state's chunks as pieces to fetch. The table must have arrived."""
        digests = (bytes(self._digests[at : at + DIGEST_BYTES]) for at in range(0, len(self._digests), DIGEST_BYTES))
        chunks = zip(self.chunks, digests, strict=True)
        return {("chunk", index): replace(chunk, digest=digest) for index, (chunk, digest) in enumerate(chunks)}


class StepReplay:
    """The steps after the fetched state, applied one after another."""

    def __init__(self, layout: StateLayout) -> None:
        self.next = -1  # the step to apply next; -1: the state is not complete
        # How many steps the log of a source can have.
        self.log_steps = log_limit_bytes(state_bytes(layout.blobs), layout.reduce_bytes) // max(layout.reduce_bytes, 1)
        self._lineage = ""
        self._buffers = [memoryview(bytearray(layout.reduce_bytes)) for _ in range(STEPS_AHEAD)]
        self._agreed: dict[int, StepLogged] = {}  # what most sources report about the wanted steps

    def begin(self, state: OfferedState) -> None:
        self.next, self._lineage = state.step + 1, state.lineage

    def take_report_untrusted(self, source: StateSource, report: StepLogged) -> None:
        step = report.step
        if source.offer is None or (source.last >= 0 and step != source.last + 1):
            raise ProtocolError(f"it reported step {step} out of order")
        source.first = source.first if source.last >= 0 else step
        source.last = step
        limit = 2 * self.log_steps + STEPS_AHEAD
        # A source that is further ahead no longer keeps the step ``next``.
        if step >= self.next and (self.next < 0 or step < self.next + limit):
            source.reports[step] = report
            if self.next < 0 and len(source.reports) > limit:
                del source.reports[next(iter(source.reports))]  # older than any state that can still be used

    def choose(self, sources: Collection[StateSource]) -> dict[int, TransferPiece]:
        """Agree on the next steps by what most ``sources`` report. Returns the pieces to fetch, by step."""
        for source in sources:
            source.reports = {step: report for step, report in source.reports.items() if step >= self.next}
        for step in range(self.next, self.next + STEPS_AHEAD):
            report = most_frequent(source.reports[step] for source in sources if step in source.reports)
            if report is not None:
                self._agreed[step] = report
        return {
            step: TransferPiece(f"{STEP}{step}", 0, len(self._buffer(step)), self._buffer(step), report.digest)
            for step, report in self._agreed.items()
        }

    def steps_of(self, source: StateSource) -> set[int]:
        """The next steps that ``source`` can send, and reports as most sources do."""
        return {step for step, report in self._agreed.items() if source.reports.get(step) == report}

    def current(self) -> ReplayStep:
        """The step ``next``, which has arrived."""
        report = self._agreed[self.next]
        digest = joined_digest(report.digests) if report.digests else report.digest
        lineage = next_lineage(self._lineage, digest)
        return ReplayStep(self.next, lineage, report.square_sum, self._buffer(self.next), report.changes)

    def mark_applied(self, step: ReplayStep) -> None:
        del self._agreed[step.step]
        self.next, self._lineage = step.step + 1, step.lineage

    def _buffer(self, step: int) -> memoryview:
        return self._buffers[step % STEPS_AHEAD]


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What a fetch brought. ``bytes_by_source``: useful bytes, by source's name. ``problems``: of other sources."""

    bytes_by_source: Counter[str]
    steps: int
    seconds: float
    problems: dict[str, str]

    @property
    def size_bytes(self) -> int:
        return self.bytes_by_source.total()

    def __str__(self) -> str:
        sources = ", ".join(
            f"{name} ({100 * size / max(self.size_bytes, 1):.0f} %)"
            for name, size in self.bytes_by_source.most_common()
        )
        rate_bps = 8 * self.size_bytes / self.seconds if self.seconds > 0 else 0.0
        text = f"{self.size_bytes / 1e6:.1f} MB in {self.seconds:.1f} s ({rate_bps / 1e6:.0f} Mbit/s) from {sources}"
        problems = "; ".join(f"{name}: {problem}" for name, problem in self.problems.items())
        return f"{text}; without {problems}" if problems else text

    def add_to(self, report: Report) -> Report:
        return replace(report, fetched_bytes=self.size_bytes, sources=len(self.bytes_by_source))


class StateFetch:
    """One fetch of a state and the steps after it. The module's docstring describes it.

    Args:
        request: sent to every source. The state that it reports as held here is overwritten from the first chunk on.
        members: possible sources, the best first.
        on_torn: called once, before the state is overwritten.
        on_progress: called after every chunk.
    """

    def __init__(
        self,
        context: Context,
        layout: StateLayout,
        *,
        request: HealRequest,
        generation: int,
        members: Sequence[MemberRecord],
        on_torn: Callable[[], None],
        on_progress: Callable[[], None],
    ) -> None:
        self._context, self.layout, self._request, self._generation = context, layout, request, generation
        self._candidates = deque(member for member in members if member.peer_id != context.peer_id)
        self._on_torn, self._on_progress = on_torn, on_progress
        self.receiver: Receiver[StateSource] = Receiver(_digest, on_landed=self._landed)
        self._conversations = 0  # tasks that each converse with one candidate after another, until none is left
        self._chosen: OfferedState | None = None
        self._table = StateTable(layout.blobs)
        self.steps = StepReplay(layout)
        self._bytes_by_source: Counter[str] = Counter()
        self._began_at = context.world.clock.now()  # later: when the state began to be overwritten

    @property
    def newest(self) -> int:
        return max((source.last for source in self.receiver.sources.values()), default=-1)

    @property
    def _unanswered(self) -> int:
        """Conversations in which the source has not answered with an offer yet."""
        return self._conversations - sum(source.offer is not None for source in self.receiver.sources.values())

    def result(self, steps: int = 0) -> FetchResult:
        seconds = self._context.world.clock.now() - self._began_at
        return FetchResult(self._bytes_by_source.copy(), steps, seconds, dict(self.receiver.problems))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StateFetch]:
        self._conversations = min(SOURCES, len(self._candidates))
        tasks = [asyncio.create_task(self._ask_candidates(), name="heal") for _ in range(self._conversations)]
        try:
            yield self
        finally:
            for source in self.receiver.sources.values():
                source.line.connection.abort()  # first: nothing may be written into the state from here on
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def state(self) -> OfferedState:
        """Wait for the state. The result has no root if it is the state that this member holds already.

        Raises:
            NetworkError: no source could send it, with each source's problem, or the ring is so far ahead that the logs
                no longer lead on from this state.
        """
        await self._until(self._has_state)
        assert self._chosen is not None
        self.steps.begin(self._chosen)
        self._want_steps()
        return self._chosen

    async def step(self) -> ReplayStep:
        """Wait for the next step, verified by its digest. The caller applies it and then calls ``mark_applied``.

        Raises:
            NetworkError: no source is left, or none has the step any more.
        """
        await self._until(lambda: self.receiver.has(self.steps.next))
        return self.steps.current()

    def mark_applied(self, step: ReplayStep) -> None:
        self.steps.mark_applied(step)
        self.receiver.forget(step.step)
        self._want_steps()

    # --------------------------------------------------------------------------------------------------------- sources

    async def _ask_candidates(self) -> None:
        while self._candidates:
            member = self._candidates.popleft()
            try:
                await self._converse(member)
            except P2PTrainError as problem:
                self.receiver.problems[member.name] = problem.message
            self._decide()
        self._conversations -= 1
        self._decide()

    async def _converse(self, member: MemberRecord) -> None:
        hello, at = self._context.hello("heal", self._request.job, self._generation), (member.host, member.port)
        connection, _ = await self._context.dial(member.peer_id, *at, hello, timeout_s=ANSWER_S)
        source = StateSource(member.peer_id, member.name, Line(connection, self._request.silence_s))
        connection.send(self._request)
        await self.receiver.serve(source, lambda message: self.heard_untrusted(source, message))

    def heard_untrusted(self, source: StateSource, message: Message) -> None:
        match message:
            case HealOffer() if source.offer is None:
                source.offer = offered_state_untrusted(message, self._request, self.layout)
                self._decide()
            case StepLogged():
                check_report_untrusted(message, self.layout)
                self.steps.take_report_untrusted(source, message)
                self._want_steps()
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from a source of a state")

    # ----------------------------------------------------------------------------------------------------------- state

    def _decide(self) -> None:
        self.receiver.changed.set()
        if self.steps.next >= 0:
            self._want_steps()
            return
        table = self._table
        offers = [source.offer for source in self.receiver.sources.values() if source.offer is not None]
        request, chosen = self._request, most_frequent(offer for offer in offers if offer.root)  # not of steps only
        held = OfferedState(request.have_step, request.have_lineage)
        if self._chosen is None and self._unanswered and held not in offers:
            lacks_few = request.have_step >= 0 and 0 <= request.step - request.have_step <= self.steps.log_steps
            if lacks_few or chosen is None or 2 * offers.count(chosen) <= self._conversations:
                return  # else no answer changes what is fetched, and a source that lives may never answer
        if held in offers and not table.root:
            self._chosen = held
            return
        self._chosen = chosen
        if chosen is None:
            return
        if not table.root:
            self._began_at = self._context.world.clock.now()  # the time before was spent waiting for a snapshot
            self._on_torn()
        for source in list(self.receiver.sources.values()):
            offer = source.offer
            if offer is not None and offer != chosen and (offer.step, offer.lineage) == (chosen.step, chosen.lineage):
                source.end("its state of the same step differs from that of most sources")
        if chosen.root != table.root:
            self.receiver.forget(table.root)
            self.receiver.want(chosen.root, table.begin(chosen.root))
        keys: Collection[Hashable] = {chosen.root}
        if self.receiver.has(chosen.root):
            pieces = table.pieces()
            for key, piece in pieces.items():
                self.receiver.want(key, piece)
            keys = pieces.keys()
        for source in list(self.receiver.sources.values()):
            self.receiver.offers(source, keys if source.offer == chosen else ())

    def _has_state(self) -> bool:
        chosen = self._chosen
        if chosen is None or not chosen.root:
            return chosen is not None
        ahead = self.newest - chosen.step
        if ahead > self.steps.log_steps:
            raise NetworkError(f"the ring is {ahead} steps ahead of the state being fetched: this member is too slow")
        return self.receiver.has(chosen.root) and self.receiver.complete

    def _landed(self, source: StateSource, key: Hashable) -> None:
        match key:
            case bytes():
                self._decide()
            case ("chunk", int(index)):
                self._bytes_by_source[source.name] += self._table.chunks[index].into.nbytes
                self._on_progress()
            case _:
                self._bytes_by_source[source.name] += self.layout.reduce_bytes

    # ----------------------------------------------------------------------------------------------------------- steps

    def _want_steps(self) -> None:
        self.receiver.changed.set()
        if self.steps.next < 0:
            return
        sources = list(self.receiver.sources.values())
        for step, piece in self.steps.choose(sources).items():
            self.receiver.want(step, piece)
        for source in sources:
            self.receiver.offers(source, self.steps.steps_of(source))

    async def _until(self, satisfied: Callable[[], bool]) -> None:
        def is_over() -> bool:
            if satisfied():
                return True
            known = [source for source in self.receiver.sources.values() if source.offer is not None]
            is_known = bool(known) and not self._unanswered and self.steps.next >= 0
            if is_known and all(source.first > self.steps.next for source in known):
                text = f"no source keeps step {self.steps.next} any more: this member is too slow to follow"
                raise NetworkError(text)
            return False

        try:
            await self.receiver.until(is_over, waits=lambda: self._conversations > 0)
        except NetworkError as problem:
            raise NetworkError(f"no member could send the state: {problem.message}") from None


# --------------------------------------------------------------------------------------------------- within and beside


class Healer:
    """Fetches states for one job's engine. ``progress`` is called after every chunk and step."""

    def __init__(
        self, context: Context, core: JobMember, *, progress: Callable[[], None], stage: Stage = WHOLE
    ) -> None:
        self._context, self._core, self._progress, self.stage = context, core, progress, stage

    async def within(self, instruction: ev.Heal, engine: Engine) -> FetchResult:
        """Bring the state to the start of the view. Raises ``NetworkError`` with each source's problem."""
        core, view = self._core, instruction.view
        rank = view.rank_of(self._context.peer_id)
        assert rank is not None, "only a member of the view heals within it"
        same_part, own = view.same_stage(rank), view.replica_of(rank)
        ahead = [*same_part[own:], *same_part[:own]]  # each healing member begins with other sources
        sources = [member for member in ahead if member.healthy]
        have = (-1, "") if instruction.torn or core.applied >= view.step else (core.applied, core.lineage)
        silence_s = max(view.death_s, QUIET_S)
        request = HealRequest(core.job, view.step, view.lineage, silence_s, *have, stage=self.stage.index)
        try:
            return await self._to_the_start(request, view.generation, sources, engine)
        except NetworkError:
            if request.have_step < 0:
                raise
        # The steps since the own state could not be fetched, or led to another state: fetch the whole state.
        request = replace(request, have_step=-1, have_lineage="")
        return await self._to_the_start(request, view.generation, sources, engine)

    async def _to_the_start(
        self, request: HealRequest, generation: int, sources: Sequence[MemberRecord], engine: Engine
    ) -> FetchResult:
        fetch = await self.fetch(request, generation, sources, engine)
        async with fetch.running():
            state = await fetch.state()
            if state.root:
                await self._context.compute.run(engine.state.refresh, state.step)
            step, lineage = state.step, state.lineage
            while step < request.step:
                following = await fetch.step()
                await self._context.compute.run(replay, engine, following)
                fetch.mark_applied(following)
                self._progress()
                step, lineage = following.step, following.lineage
        if lineage != request.lineage:
            raise NetworkError("the steps that were fetched lead to another state than the view's")
        return fetch.result(step - state.step)

    async def fetch(
        self,
        request: HealRequest,
        generation: int,
        sources: Sequence[MemberRecord],
        engine: Engine,
        *,
        on_torn: Callable[[], None] = lambda: None,
    ) -> StateFetch:
        # On the compute thread, so after an abandoned micro-batch that may still use the state.
        blobs = await self._context.compute.run(engine.state.blobs)
        return StateFetch(
            self._context,
            StateLayout(blobs, engine.reduce_buffer.nbytes, self.stage),
            request=request,
            generation=generation,
            members=sources,
            on_torn=on_torn,
            on_progress=self._progress,
        )


class Follower:
    """Keeps one worker's state level with a ring that it is not in.

    Attributes:
        is_level: it reported that it is at most one step behind the ring.
    """

    def __init__(
        self,
        context: Context,
        core: JobMember,
        healer: Healer,
        *,
        report: Callable[[Report], None],
        handle: Callable[[object], None],
        use_settings: Callable[[], Awaitable[None]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._context, self._core, self._healer = context, core, healer
        self._use_settings = use_settings
        self._send, self._handle, self._tasks = report, handle, tasks
        self._task: asyncio.Task[None] | None = None
        self._afterwards: list[Callable[[], object]] = []
        self._is_reported = False
        self._result: FetchResult | None = None

    @property
    def active(self) -> bool:
        return self._task is not None

    @property
    def is_level(self) -> bool:
        return self.active and self._is_reported

    def begin(self, message: CatchUp, engine: Engine) -> None:
        """Fetch from ``message.sources``, then follow their ring. A worker that follows already reports that again."""
        self._is_reported = False
        if self._task is None:
            self._task = self._tasks.create_task(self._guarded(message, engine), name="follow")

    def end(self, then: Callable[[], object] = lambda: None) -> None:
        """Stop following. When the state in memory no longer changes, ``then`` is called, which is at once if no ring
        is followed."""
        if self._task is None:
            then()
            return
        self._afterwards.append(then)
        if not self._task.cancelling():  # once: a second one would not let a step be applied to its end
            self._task.cancel()

    async def _guarded(self, message: CatchUp, engine: Engine) -> None:
        discarded = ""
        try:
            await self._follow(message, engine)
        except (NetworkError, PeerError) as problem:
            self._context.notify("warning", "not-following", f"stopped catching up: {problem.message}")
            if self._core.torn:
                discarded = "the state fetched beside the ring is incomplete"
            else:
                self._report()  # report how far it came: the ring may admit it, and the rest is healed within
        except P2PTrainError as problem:
            self._context.notify("error", "not-following", f"cannot catch up: {problem.message}")
            discarded = "the state may be half applied"
        finally:
            self._task = None
            afterwards, self._afterwards = self._afterwards, []
            if discarded:
                self._handle(ev.StateDiscarded(discarded))
            for then in afterwards:
                then()

    async def _follow(self, message: CatchUp, engine: Engine) -> None:
        context, core = self._context, self._core
        have = (-1, "") if core.torn else (core.applied, core.lineage)
        request = HealRequest(core.job, -1, "", QUIET_S, *have, stage=self._healer.stage.index)

        def on_torn() -> None:
            self._handle(ev.StateTorn())
            names = ", ".join(member.name for member in message.sources)
            size_bytes = state_bytes(fetch.layout.blobs)
            context.notify("info", "fetching", f"fetches {size_bytes / 1e6:.1f} MB of state from {names}")

        await self._use_settings()
        fetch = await self._healer.fetch(request, message.generation, message.sources, engine, on_torn=on_torn)
        async with fetch.running():
            state = await fetch.state()
            self._result = fetch.result()  # only steps follow
            if state.root:
                await _to_its_end(context.compute.run(engine.state.refresh, state.step))
                self._handle(ev.StateFollowed(state.step, state.lineage, state.square_sum))
                context.notify("info", "fetched", f"fetched the state of step {state.step}: {self._result}")
            while True:
                if fetch.newest - core.applied <= 1 and not self._is_reported:
                    self._report()
                    behind = max(fetch.newest - core.applied, 0)
                    context.notify("info", "following", f"caught up: {behind} step{'s' * (behind != 1)} behind")
                step = await fetch.step()
                if step.changes > len(message.changes):
                    raise PeerError("a setting of the job was changed: the rest is fetched in the ring")
                await _to_its_end(self._replay(engine, fetch, step))

    async def _replay(self, engine: Engine, fetch: StateFetch, step: ReplayStep) -> None:
        await self._context.compute.run(replay, engine, step)
        self._handle(ev.StateFollowed(step.step, step.lineage, step.square_sum))
        fetch.mark_applied(step)

    def _report(self) -> None:
        self._is_reported = True
        report = self._core.report("following")
        self._send(report if self._result is None else self._result.add_to(report))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, also if the caller is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def replay(engine: Engine, step: ReplayStep) -> Applied:
    """Apply a step from its reduced bytes; the result equals that of its ring. On the compute thread."""
    buffer = engine.reduce_buffer.view(np.uint8).reshape(-1)
    np.copyto(buffer, np.frombuffer(step.data, np.uint8))
    return engine.apply(step.step - 1, step.square_sum)
