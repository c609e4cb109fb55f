"""Healing: bring a member to the others' state, within a ring that waits for it or beside a ring that does not wait.

Within: the view's healthy members send their live state. If they have logged the steps that the member lacks, they send
only those. Beside: ``Follower`` fetches a snapshot, replays the steps since, and then follows the ring step by step.
So the ring waits only for a new view when this worker is admitted.

A state is fetched in chunks. The *table* has each chunk's digest, and the *root* is the table's digest. ``Fetch`` asks
several sources at a time. They offer a root and report each step's digest; the most frequent answer is taken. Then
chunks land in the state's own memory, and the reduced bytes of later steps land in buffers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError, ProtocolError
from p2ptrain.core.training import Applied, Blob
from ring import member_events as ev
from ring.job_member import JobMember
from ring.token import joined_digest, next_lineage
from roles.engine import WHOLE, Engine, Stage
from roles.line import Line
from roles.worker.context import Context
from roles.worker.heal_source import ANSWER_S, CHUNK_BYTES, DIGEST_BYTES, STEP, TABLE, chunks_of, log_limit_bytes
from roles.worker.transfer import Receiver, Source, TransferPiece, most_frequent
from wire.job_messages import CatchUp, HealOffer, HealRequest, MemberRecord, Report, StepLogged
from wire.messages import Message

STEPS_AHEAD = 2
"""Reduced steps in memory: one is applied while the next arrives."""

News = tuple[bytes, float, bytes]
"""A step's digest, its squared norm, and the digests of all stages of a split model."""


@dataclass(frozen=True, slots=True)
class Base:
    """A state that sources offer. ``root`` is the digest of its table; empty if it is the state held here already."""

    step: int
    lineage: str
    square_sum: float = 0.0
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class Layout:
    """The state that a member fetches. ``stage``: the part of the model that it holds."""

    state: Sequence[Blob]
    reduce_bytes: int
    stage: Stage = WHOLE

    @property
    def state_bytes(self) -> int:
        return sum(blob.view.nbytes for blob in self.state)


def base_untrusted(offer: HealOffer, request: HealRequest, layout: Layout) -> Base:
    """Return the state that a source offers in answer to ``request``. Raises ``ProtocolError`` if no correct
    source of this member's model offers this."""
    if offer.chunk_bytes != CHUNK_BYTES:
        raise ProtocolError(f"it sends chunks of {offer.chunk_bytes} bytes, this version requires {CHUNK_BYTES}")
    if not offer.blobs:
        if (offer.step, offer.lineage) != (request.have_step, request.have_lineage):
            raise ProtocolError("it offers steps that do not follow this member's state")
        return Base(offer.step, offer.lineage)
    if request.step >= 0 and (offer.step, offer.lineage) != (request.step, request.lineage):
        raise ProtocolError(f"it offers step {offer.step}, but this member asked for step {request.step}")
    mine = [(blob.name, blob.view.nbytes) for blob in layout.state]
    if [(record.name, record.size_bytes) for record in offer.blobs] != mine:
        raise ProtocolError("its state's arrays differ in name or size from this model's")
    if len(offer.root) != DIGEST_BYTES:
        raise ProtocolError("its table's digest is invalid")
    return Base(offer.step, offer.lineage, offer.square_sum, offer.root)


def news_untrusted(news: StepLogged, layout: Layout) -> News:
    """Return what a source reports about a committed step. Raises ``ProtocolError`` if no correct source reports it."""
    if news.size_bytes != layout.reduce_bytes:
        raise ProtocolError(f"its report of step {news.step} has an invalid size")
    stage = layout.stage
    size_bytes = DIGEST_BYTES * stage.count if stage.split else 0
    own = news.digests[DIGEST_BYTES * stage.index : DIGEST_BYTES * (stage.index + 1)]
    if len(news.digests) != size_bytes or (stage.split and own != news.digest):
        raise ProtocolError(f"its report of step {news.step} has invalid digests for {stage}")
    return news.digest, news.square_sum, news.digests


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step, fetched and verified. ``lineage``: after it. ``data`` is valid until ``Fetch.mark_applied``."""

    step: int
    lineage: str
    square_sum: float
    data: memoryview


class StepsGone(NetworkError):
    """No source keeps the steps that follow this member's state any more."""


class Sender(Source):
    """A member that sends a state, steps, or both.

    Attributes:
        offer: None until the sender has answered.
        first, last: range of the steps that the sender keeps.
        news: reported steps that are still to be applied.
    """

    def __init__(self, id: str, name: str, line: Line) -> None:
        super().__init__(id, name, line)
        self.offer: Base | None = None
        self.first, self.last = 0, -1
        self.news: dict[int, News] = {}


async def _digest(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


class StateTable:
    """The chunks of the state being fetched, and the table of their digests."""

    def __init__(self, state: Sequence[Blob]) -> None:
        self.chunks = chunks_of(state)
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

    def __init__(self, layout: Layout) -> None:
        self.next = -1  # the step to apply next; -1: the state is not complete
        # How many steps the log of a source can have.
        self.log_steps = log_limit_bytes(layout.state_bytes, layout.reduce_bytes) // max(layout.reduce_bytes, 1)
        self._lineage = ""
        self._buffers = [memoryview(bytearray(layout.reduce_bytes)) for _ in range(STEPS_AHEAD)]
        self._applied: dict[int, News] = {}  # as far back as a log can reach
        self._agreed: dict[int, News] = {}  # what most senders report about the wanted steps

    def begin(self, base: Base) -> None:
        self.next, self._lineage = base.step + 1, base.lineage

    def take_report_untrusted(self, sender: Sender, step: int, news: News) -> None:
        if sender.offer is None or (sender.last >= 0 and step != sender.last + 1):
            raise ProtocolError(f"it reported step {step} out of order")
        sender.first = sender.first if sender.last >= 0 else step
        sender.last = step
        if self._applied.get(step, news) != news:
            raise ProtocolError(f"its step {step} differs from the step {step} of other sources")
        most = 2 * self.log_steps + STEPS_AHEAD
        # A source that is further ahead no longer keeps the step ``next``.
        if step >= self.next and (self.next < 0 or step < self.next + most):
            sender.news[step] = news
            if self.next < 0 and len(sender.news) > most:
                del sender.news[next(iter(sender.news))]  # older than any state that can still be used

    def choose(self, senders: Collection[Sender]) -> dict[int, TransferPiece]:
        """Agree on the next steps by what most ``senders`` report. Returns the pieces to fetch, by step."""
        for sender in senders:
            for old in [step for step in sender.news if step < self.next]:
                del sender.news[old]
        for step in range(self.next, self.next + STEPS_AHEAD):
            news = most_frequent(sender.news[step] for sender in senders if step in sender.news)
            if news is not None:
                self._agreed[step] = news
        return {
            step: TransferPiece(f"{STEP}{step}", 0, len(self._buffer(step)), self._buffer(step), digest)
            for step, (digest, _, _) in self._agreed.items()
        }

    def steps_of(self, sender: Sender) -> set[int]:
        """The next steps that ``sender`` can send, and reports as most senders do."""
        agreed = (step for step, news in self._agreed.items() if sender.news.get(step) == news)
        return {step for step in agreed if step >= sender.first}

    def current(self) -> Step:
        """The step ``next``, which has arrived."""
        digest, square_sum, digests = self._agreed[self.next]
        lineage = next_lineage(self._lineage, joined_digest(digests) if digests else digest)
        return Step(self.next, lineage, square_sum, self._buffer(self.next))

    def mark_applied(self, step: Step) -> None:
        self._applied[step.step] = self._agreed.pop(step.step)  # its senders may be lost when another reports the step
        self._applied.pop(step.step - self.log_steps - 1, None)
        self.next, self._lineage = step.step + 1, step.lineage

    def _buffer(self, step: int) -> memoryview:
        return self._buffers[step % STEPS_AHEAD]


class Fetch:
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
        layout: Layout,
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
        self.receiver = Receiver(context.world.clock.now, _digest, on_landed=self._landed, on_dropped=self._on_dropped)
        self.senders: dict[str, Sender] = {}
        self._conversations = 0  # tasks that each converse with one candidate after another, until none is left
        self._unanswered = 0  # those of them whose source has not answered with an offer yet
        self._base: Base | None = None
        self._table = StateTable(layout.state)
        self.steps = StepReplay(layout)
        self.bytes_by_source: Counter[str] = Counter()

    @property
    def newest(self) -> int:
        return max((sender.last for sender in self.senders.values()), default=-1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fetch]:
        # Members asked at a time. Each hashes its whole state for this one. When one fails, another is asked.
        self._conversations = self._unanswered = min(4, len(self._candidates))
        lanes = [asyncio.create_task(self._lane(), name="heal") for _ in range(self._conversations)]
        try:
            yield self
        finally:
            for sender in self.senders.values():
                sender.line.connection.abort()  # first: nothing may be written into the state from here on
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def state(self) -> Base:
        """Wait for the state. The result has no root if it is the state that this member holds already.

        Raises:
            NetworkError: no source could send it; the message has each source's problem.
            StepsGone: the ring is so far ahead that the logs no longer lead on from this state.
        """
        await self._until(self._has_state)
        assert self._base is not None
        self.steps.begin(self._base)
        self._want_steps()
        return self._base

    async def step(self) -> Step:
        """Wait for the next step, verified by its digest. The caller applies it and then calls ``mark_applied``.

        Raises:
            StepsGone: no source has the step any more.
            NetworkError: no source is left.
        """
        await self._until(lambda: self.receiver.has(self.steps.next))
        return self.steps.current()

    def mark_applied(self, step: Step) -> None:
        self.steps.mark_applied(step)
        self.receiver.forget(step.step)
        self._want_steps()

    # --------------------------------------------------------------------------------------------------------- sources

    async def _lane(self) -> None:
        waited_for = True
        while self._candidates:
            member = self._candidates.popleft()
            if not waited_for:
                self._unanswered += 1
            try:
                await self._converse(member)
            except P2PTrainError as problem:
                self.receiver.problems[member.name] = problem.message
            sender = self.senders.pop(member.peer_id, None)
            waited_for = sender is None or sender.offer is None
            self._decide()
        self._conversations -= 1
        self._unanswered -= waited_for
        self._decide()

    async def _converse(self, member: MemberRecord) -> None:
        hello, at = self._context.hello("heal", self._request.job, self._generation), (member.host, member.port)
        connection, _ = await self._context.dial(member.peer_id, *at, hello, timeout_s=ANSWER_S)
        sender = Sender(member.peer_id, member.name, Line(connection, self._request.silence_s))
        self.senders[member.peer_id] = sender
        connection.send(self._request)
        await self.receiver.serve(sender, lambda message: self.heard_untrusted(sender, message))

    def heard_untrusted(self, sender: Sender, message: Message) -> None:
        match message:
            case HealOffer() if sender.offer is None:
                sender.offer = base_untrusted(message, self._request, self.layout)
                self._unanswered -= 1
                self._decide()
            case StepLogged():
                self.steps.take_report_untrusted(sender, message.step, news_untrusted(message, self.layout))
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
        offers = [sender.offer for sender in self.senders.values() if sender.offer is not None]
        if self._base is None and not self._may_begin(offers):
            return
        held = Base(self._request.have_step, self._request.have_lineage)
        if held in offers and not table.root:
            self._base = held
            return
        self._base = base = most_frequent(offer for offer in offers if offer.root)  # offers of steps only do not count
        if base is None:
            return
        if not table.root:
            self._on_torn()
        for sender in list(self.senders.values()):
            its = sender.offer
            if its is not None and its != base and (its.step, its.lineage) == (base.step, base.lineage):
                sender.end("its state of the same step differs from that of most sources")
        if base.root != table.root:
            self.receiver.forget(table.root)
            self.receiver.want(base.root, table.begin(base.root))
        keys: Collection[Hashable] = {base.root}
        if self.receiver.has(base.root):
            pieces = table.pieces()
            for key, piece in pieces.items():
                self.receiver.want(key, piece)
            keys = pieces.keys()
        for sender in list(self.senders.values()):
            self.receiver.offers(sender, keys if sender.offer == base else ())

    def _may_begin(self, offers: Sequence[Base]) -> bool:
        """Whether the missing answers cannot change what is fetched. So a frozen source is not waited for."""
        request = self._request
        if not self._unanswered or Base(request.have_step, request.have_lineage) in offers:
            return True
        if request.have_step >= 0 and 0 <= request.step - request.have_step <= self.steps.log_steps:
            return False  # a source that has not answered may have the steps: far fewer bytes than the state
        states = [offer for offer in offers if offer.root]
        return 2 * max((states.count(offer) for offer in states), default=0) > self._conversations

    def _has_state(self) -> bool:
        base = self._base
        if base is None or not base.root:
            return base is not None
        if self.newest - base.step > self.steps.log_steps:
            raise StepsGone(
                f"the ring is {self.newest - base.step} steps ahead of the state being fetched: this member is too slow"
            )
        return self.receiver.has(base.root) and self.receiver.complete

    def _landed(self, source: Source, key: Hashable) -> None:
        match key:
            case bytes():
                self._decide()
            case ("chunk", int(index)):
                self.bytes_by_source[source.name] += self._table.chunks[index].into.nbytes
                self._on_progress()
            case _:
                self.bytes_by_source[source.name] += self.layout.reduce_bytes

    # ----------------------------------------------------------------------------------------------------------- steps

    def _on_dropped(self, source: Source, key: Hashable) -> None:
        sender = self.senders.get(source.id)
        if sender is None or not isinstance(key, int):
            source.end("it no longer has the state that it offered")
            return
        sender.first = max(sender.first, key + 1)
        self._want_steps()

    def _want_steps(self) -> None:
        self.receiver.changed.set()
        if self.steps.next < 0:
            return
        senders = list(self.senders.values())
        for step, piece in self.steps.choose(senders).items():
            self.receiver.want(step, piece)
        for sender in senders:
            self.receiver.offers(sender, self.steps.steps_of(sender))

    async def _until(self, satisfied: Callable[[], bool]) -> None:
        def reached() -> bool:
            found = satisfied()
            if not found and self.steps.next >= 0 and self._nobody_has_next():
                raise StepsGone(f"no source keeps step {self.steps.next} any more: this member is too slow to follow")
            return found

        try:
            await self.receiver.until(reached, waits=lambda: self._conversations > 0)
        except StepsGone:
            raise
        except NetworkError as problem:
            raise NetworkError(f"no member could send the state: {problem.message}") from None

    def _nobody_has_next(self) -> bool:
        known = [sender for sender in self.senders.values() if sender.offer is not None]
        return bool(known) and not self._unanswered and all(sender.first > self.steps.next for sender in known)


# --------------------------------------------------------------------------------------------------- within and beside


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch. ``bytes_by_source``: useful bytes, by source's name."""

    bytes_by_source: Counter[str]
    steps: int
    seconds: float
    left_out: dict[str, str]

    @property
    def size_bytes(self) -> int:
        return self.bytes_by_source.total()

    def __str__(self) -> str:
        sources = ", ".join(
            f"{name} ({100 * part / max(self.size_bytes, 1):.0f} %)"
            for name, part in self.bytes_by_source.most_common()
        )
        rate_bps = 8 * self.size_bytes / self.seconds if self.seconds > 0 else 0.0
        text = f"{self.size_bytes / 1e6:.1f} MB in {self.seconds:.1f} s ({rate_bps / 1e6:.0f} Mbit/s) from {sources}"
        problems = "; ".join(f"{name}: {problem}" for name, problem in self.left_out.items())
        return f"{text}; without {problems}" if problems else text

    def added_to(self, report: Report) -> Report:
        return replace(report, fetched_bytes=self.size_bytes, sources=len(self.bytes_by_source))


class Healer:
    """Fetches states for one job's engine. ``progress`` is called after every chunk and step."""

    def __init__(
        self, context: Context, core: JobMember, *, progress: Callable[[], None], stage: Stage = WHOLE
    ) -> None:
        self._context, self._core, self._progress, self.stage = context, core, progress, stage

    async def within(self, instruction: ev.Heal, engine: Engine) -> Fetched:
        """Bring the state to the start of the view. Raises ``NetworkError`` with each source's problem."""
        core, view = self._core, instruction.view
        rank = view.rank_of(self._context.peer_id) or 0
        same_part, own = view.same_stage(rank), view.replica_of(rank)
        ahead = [*same_part[own:], *same_part[:own]]  # healing members start with different sources
        sources = [member for member in ahead if member.healthy]
        have = (-1, "") if instruction.torn or core.applied >= view.step else (core.applied, core.lineage)
        silence_s = max(view.death_s, self._context.beats()[1])
        request = HealRequest(core.job, view.step, view.lineage, silence_s, *have, stage=self.stage.index)
        try:
            return await self._to_the_start(request, view.generation, sources, engine)
        except NetworkError:
            if request.have_step < 0:
                raise
        # No source has the steps any more: fetch the whole state.
        request = replace(request, have_step=-1, have_lineage="")
        return await self._to_the_start(request, view.generation, sources, engine)

    async def _to_the_start(
        self, request: HealRequest, generation: int, sources: Sequence[MemberRecord], engine: Engine
    ) -> Fetched:
        began = self._context.world.clock.now()
        fetch = await self.fetch(request, generation, sources, engine, on_torn=lambda: None)
        async with fetch.running():
            base = await fetch.state()
            if base.root:
                await self._context.compute.run(engine.state.refresh, base.step)
            step, lineage = base.step, base.lineage
            while step < request.step:
                following = await fetch.step()
                await self._context.compute.run(replay, engine, following)
                fetch.mark_applied(following)
                self._progress()
                step, lineage = following.step, following.lineage
        if lineage != request.lineage:
            raise NetworkError("the steps that were fetched lead to another state than the view's")
        return fetched(fetch, step - base.step, self._context.world.clock.now() - began)

    async def fetch(
        self,
        request: HealRequest,
        generation: int,
        sources: Sequence[MemberRecord],
        engine: Engine,
        *,
        on_torn: Callable[[], None],
    ) -> Fetch:
        context = self._context
        # On the compute thread, so after an abandoned micro-batch that may still use the state.
        state = await context.compute.run(engine.state.blobs)
        return Fetch(
            context,
            Layout(state, engine.reduce_buffer.nbytes, self.stage),
            request=request,
            generation=generation,
            members=sources,
            on_torn=on_torn,
            on_progress=self._progress,
        )


class Follower:
    """Keeps one worker's state level with a ring that it is not in."""

    def __init__(
        self,
        context: Context,
        core: JobMember,
        healer: Healer,
        *,
        report: Callable[[Report], None],
        handle: Callable[[object], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._context, self._core, self._healer = context, core, healer
        self._send, self._handle, self._tasks = report, handle, tasks
        self._task: asyncio.Task[None] | None = None
        self._then: list[object] = []
        self._last: Callable[[], None] | None = None
        self._reported = False
        self._fetched: Fetched | None = None

    @property
    def active(self) -> bool:
        return self._task is not None

    @property
    def reported(self) -> bool:
        return self.active and self._reported

    def begin(self, message: CatchUp, engine: Engine) -> None:
        """Fetch from ``message.sources``, then follow their ring. A worker that follows already reports that again."""
        self._reported = False
        if self._task is None:
            self._task = self._tasks.create_task(self._guarded(message, engine), name="follow")

    def end(self, event: object | None = None, *, then: Callable[[], None] | None = None) -> None:
        """Cancel the task that follows. When it has ended, the state in memory no longer changes. Then the core handles
        the events of all calls, in order. If there are none, the last call's ``then`` is called."""
        if event is not None:
            self._then.append(event)
        self._last = then
        if self._task is not None:
            self._task.cancel()

    async def _guarded(self, message: CatchUp, engine: Engine) -> None:
        try:
            await self._follow(message, engine)
        except (NetworkError, PeerError) as problem:
            self._context.notify("warning", "not-following", f"stopped catching up: {problem.message}")
            if self._core.torn:
                self._then.insert(0, ev.StateDiscarded("the state fetched beside the ring is incomplete"))
            else:
                self._report()  # report how far it came: the ring may admit it, and the rest is healed within
        except P2PTrainError as problem:
            self._context.notify("error", "not-following", f"cannot catch up: {problem.message}")
            self._then.insert(0, ev.StateDiscarded("the state may be half applied"))
        finally:
            self._task = None
            events, self._then = self._then, []
            last, self._last = self._last, None
            for event in events:
                self._handle(event)
            if last is not None and not events:
                last()

    async def _follow(self, message: CatchUp, engine: Engine) -> None:
        context, core = self._context, self._core
        have = (-1, "") if core.torn else (core.applied, core.lineage)
        request = HealRequest(core.job, -1, "", context.beats()[1], *have, stage=self._healer.stage.index)

        began = context.world.clock.now()

        def on_torn() -> None:
            nonlocal began
            began = context.world.clock.now()  # the time before was spent waiting for a source's snapshot
            self._handle(ev.StateTorn())
            names = ", ".join(member.name for member in message.sources)
            context.notify("info", "fetching", f"fetches {fetch.layout.state_bytes / 1e6:.1f} MB of state from {names}")

        fetch = await self._healer.fetch(request, message.generation, message.sources, engine, on_torn=on_torn)
        async with fetch.running():
            base = await fetch.state()
            self._fetched = fetched(fetch, 0, context.world.clock.now() - began)  # only steps follow
            if base.root:
                await self._to_its_end(context.compute.run(engine.state.refresh, base.step))
                self._handle(ev.StateFollowed(base.step, base.lineage, base.square_sum))
                context.notify("info", "fetched", f"fetched the state of step {base.step}: {self._fetched}")
            while True:
                if fetch.newest - core.applied <= 1 and not self._reported:
                    self._report()
                    behind = max(fetch.newest - core.applied, 0)
                    context.notify("info", "following", f"caught up: {behind} step{'s' * (behind != 1)} behind")
                step = await fetch.step()
                await self._to_its_end(self._replay(engine, fetch, step))

    async def _replay(self, engine: Engine, fetch: Fetch, step: Step) -> None:
        await self._context.compute.run(replay, engine, step)
        self._handle(ev.StateFollowed(step.step, step.lineage, step.square_sum))
        fetch.mark_applied(step)

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await task
            raise

    def _report(self) -> None:
        self._reported = True
        report = self._core.report("following")
        self._send(report if self._fetched is None else self._fetched.added_to(report))


def replay(engine: Engine, step: Step) -> Applied:
    """Apply a step from its reduced bytes; the result equals that of its ring. On the compute thread."""
    buffer = engine.reduce_buffer.view(np.uint8).reshape(-1)
    np.copyto(buffer, np.frombuffer(step.data, np.uint8))
    return engine.apply(step.step - 1, step.square_sum)


def fetched(fetch: Fetch, steps: int, seconds: float) -> Fetched:
    return Fetched(fetch.bytes_by_source.copy(), steps, seconds, dict(fetch.receiver.problems))
