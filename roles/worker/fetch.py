"""The taking side of healing: one conversation with each donor, and what comes of them together.

``Fetch`` talks to several donors at a time. Once each of them has offered something or failed, most of them decide what
is right, and the pieces are asked for: chunks of a state, straight into their place, then the reduced bytes of the
steps that lead on from it. What a donor may say at all is checked in ``roles.worker.offered``; which piece comes from
whom is the core's affair (``roles.worker.transfer``).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import xxhash

from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError
from p2ptrain.core.world import World
from ring.token import joined_digest, next_lineage
from roles.worker.donor import conversation
from roles.worker.given import ANSWER_S, CHUNK_BYTES, DIGEST_BYTES, chunks_of, log_limit_bytes
from roles.worker.offered import Base, News, Self, base_untrusted, news_untrusted
from roles.worker.transfer import Agreement, Ask, GiveUp, Transfer
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.heal_messages import ChunkRequest, HealOffer, HealRequest, StepGone, StepLogged, StepRequest, TableRequest
from wire.job_messages import MemberRecord
from wire.messages import Message

DONORS = 4
"""Donors that are asked at a time; each hashes its whole state for it. More are asked as these fail."""
STEPS_AHEAD = 2
"""Reduced steps in memory: one that is applied, and one that arrives meanwhile."""


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step, fetched and verified. ``lineage``: after it. ``data`` may be overwritten once it was used."""

    step: int
    lineage: str
    square_sum: float
    data: memoryview


class Behind(NetworkError):
    """The steps that lead on from what this member holds are kept by nobody any more."""


@dataclass(slots=True, eq=False)
class _Donor:
    """What is known of a donor. It goes by its peer id; its name is for people."""

    peer_id: str
    name: str
    connection: Connection
    offer: Base | None = None
    first: int = 0  # of the steps that it keeps
    last: int = -1
    stream: int = 0

    def next_stream(self) -> int:
        self.stream += 1
        return self.stream


class Fetch:
    """See the module's docstring.

    Args:
        request: what is asked of every donor; what it says that this member holds is given up with the first chunk.
        donors: who may have it, the best first.
        on_torn: called once, before the state is overwritten.
        on_progress: called with (bytes done, bytes in all) after every chunk.

    Attributes:
        problems: donor's name → why it gives no more.
        given: bytes of use, by donor's name.
        lost: donors of the state that went away before it was complete.
    """

    def __init__(
        self,
        world: World,
        me: Self,
        *,
        request: HealRequest,
        generation: int,
        donors: Sequence[MemberRecord],
        on_torn: Callable[[], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._world, self._me, self._request, self._generation = world, me, request, generation
        self._candidates = deque(donor for donor in donors if donor.peer_id != me.peer_id)
        self._on_torn, self._on_progress = on_torn, on_progress
        self._chunks = chunks_of(list(me.state), CHUNK_BYTES)
        self.total_bytes = sum(blob.view.nbytes for blob in me.state)
        self._log_steps = log_limit_bytes(self.total_bytes, me.reduce_bytes) // max(me.reduce_bytes, 1)
        self._donors: dict[str, _Donor] = {}
        self._unanswered = 0  # lanes that have no offer yet, and whom to ask
        self._lanes = 0
        self._bases: Agreement[Base] = Agreement()
        self._tables: dict[bytes, bytes] = {}
        self._table_from = ""
        self._wanted_root = b""
        self._base: Base | None = None
        self._state = Transfer()
        self._steps = Transfer(STEPS_AHEAD)
        self._buffers = [memoryview(bytearray(me.reduce_bytes)) for _ in range(STEPS_AHEAD)]
        self._news: dict[int, Agreement[News]] = {}
        self._done: dict[int, News] = {}  # what was applied, as far back as a log can reach
        self._agreed: dict[int, News] = {}  # what is known of the steps that are wanted
        self._next = -1  # the step to apply next; -1: the state is not complete
        self._lineage = ""
        self._torn = False
        self._changed = asyncio.Event()
        self.problems: dict[str, str] = {}
        self.given: Counter[str] = Counter()
        self.lost = 0
        self._ended_bytes = 0  # that came over connections which have ended

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def received_bytes(self) -> int:
        """All that came from donors: what is said, tables, and what came in vain, too."""
        return self._ended_bytes + sum(donor.connection.bytes_in for donor in self._donors.values())

    @property
    def newest(self) -> int:
        """The newest step that a donor told of; -1 where none was."""
        return max((donor.last for donor in self._donors.values()), default=-1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fetch]:
        """Talk to donors inside."""
        self._lanes = self._unanswered = min(DONORS, len(self._candidates))
        lanes = [asyncio.create_task(self._lane(), name="heal") for _ in range(self._lanes)]
        try:
            yield self
        finally:
            for donor in self._donors.values():
                donor.connection.abort()  # first: nothing may be written into the state from now on
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def state(self) -> Base:
        """Wait for the state. What is given has no root where it is what this member holds already.

        Raises:
            NetworkError: no donor could give it; the message names what each one said.
            Behind: donors went on so far meanwhile that the steps since are not to be had.
        """
        await self._until(self._has_state)
        assert self._base is not None
        self._next, self._lineage = self._base.step + 1, self._base.lineage
        self._done.clear()
        self._news = {step: news for step, news in self._news.items() if step >= self._next}
        self._steps_changed()
        return self._base

    async def step(self) -> Step:
        """Wait for the next step, verified by its digest, which makes the lineage. ``used`` follows.

        Raises:
            Behind: no donor has it any more.
            NetworkError: no donor is left.
        """
        await self._until(lambda: self._steps.has(self._next))
        digest, square_sum, digests = self._agreed[self._next]
        lineage = next_lineage(self._lineage, joined_digest(digests) if digests else digest)
        return Step(self._next, lineage, square_sum, self._buffer(self._next))

    def used(self, step: Step) -> None:
        """``step`` was applied: its memory may be overwritten."""
        self._done[step.step] = self._agreed.pop(step.step)  # what its donors said: they may be gone by now
        self._done.pop(step.step - self._log_steps - 1, None)
        self._news.pop(step.step, None)
        self._steps.forget(step.step)
        self._next, self._lineage = step.step + 1, step.lineage
        self._steps_changed()

    # ---------------------------------------------------------------------------------------------------------- lanes

    async def _lane(self) -> None:
        """Talk to one donor after the other, until this is cancelled or nobody is left to ask."""
        answered = False
        while self._candidates:
            member = self._candidates.popleft()
            if answered:
                self._unanswered += 1
            try:
                await self._converse(member)
                self.problems[member.name] = "it closed the connection"
            except P2PTrainError as problem:
                self.problems[member.name] = problem.message
            donor = self._donors.pop(member.peer_id, None)
            answered = donor is not None and donor.offer is not None
            if donor is not None:
                self._ended_bytes += donor.connection.bytes_in
            self.lost += answered and self._torn and self._next < 0 and self.given.total() < self.total_bytes
            self._bases.withdraw(member.peer_id)
            for news in self._news.values():
                news.withdraw(member.peer_id)
            now = self._world.clock.now()
            self._carry_out([*self._state.lost(member.peer_id, now), *self._steps.lost(member.peer_id, now)])
            if self._table_from == member.peer_id:
                self._table_from = ""
            self._donors_changed()
        self._lanes -= 1
        self._unanswered -= not answered
        self._donors_changed()

    async def _converse(self, member: MemberRecord) -> None:
        me = self._me
        hello = local_hello(
            peer_id=me.peer_id,
            name=me.name,
            roles=["worker"],
            purpose="heal",
            job=self._request.job,
            generation=self._generation,
        )
        host = member.host or me.seed_host
        connection, _ = await dial(
            self._world.network, host, member.port, hello, timeout_s=ANSWER_S, expect_peer=member.peer_id
        )
        donor = self._donors[member.peer_id] = _Donor(member.peer_id, member.name, connection)
        try:
            connection.send(self._request, generation=self._generation)
            async for message in conversation(connection, self._generation, self._request.silence_s):
                self._heard_untrusted(donor, message)
        finally:
            connection.abort()
        if connection.close_cause is not None and not isinstance(connection.close_cause, ConnectionLost):
            raise connection.close_cause

    def _heard_untrusted(self, donor: _Donor, message: Message) -> None:
        """Raises ``ProtocolError`` where no correct donor says this."""
        match message:
            case HealOffer():
                self._offered_untrusted(donor, message)
            case StepLogged():
                self._logged_untrusted(donor, message)
            case StepGone(step):
                now = self._world.clock.now()
                donor.first = max(donor.first, step + 1)
                self._carry_out(self._steps.offers(donor.peer_id, self._keeps(donor), now))
                self._carry_out(self._steps.gone(donor.peer_id, step, now))
            case _:
                raise ProtocolError(f"{type(message).__name__} from a donor")
        self._changed.set()

    # ---------------------------------------------------------------------------------------------------------- state

    def _offered_untrusted(self, donor: _Donor, offer: HealOffer) -> None:
        if donor.offer is not None:
            raise ProtocolError("a second offer")
        donor.offer = base = base_untrusted(offer, self._request, self._me)
        self._unanswered -= 1
        self._bases.says(donor.peer_id, base)
        self._donors_changed()

    def _donors_changed(self) -> None:
        """Somebody offered something, or is gone: most donors decide what is fetched."""
        self._changed.set()
        if self._next >= 0 or (self._base is None and not self._may_begin()):
            self._steps_changed()
            return
        held = self._held
        lead = held if not self._torn and self._bases.said_by(held) else self._bases_of_states()
        if lead is None or not lead.root:
            self._base = lead
            return
        if not self._torn:
            self._torn = True
            self._on_torn()
        for peer_id in self._state.donors:
            if lead != self._base:
                self._state.offers(peer_id, (), self._world.clock.now())  # of a base that is not wanted any more
        self._base = lead
        for donor in list(self._donors.values()):
            its = donor.offer
            if its is not None and its != lead and (its.step, its.lineage) == (lead.step, lead.lineage):
                self._give_up(donor.peer_id, "its state of the same step differs from that of most donors")
        self._ask_for_chunks(lead)

    @property
    def _held(self) -> Base:
        return Base(self._request.have_step, self._request.have_lineage)

    def _may_begin(self) -> bool:
        """Whether what is still unanswered cannot change what is fetched: one who is frozen is not waited for."""
        request = self._request
        if not self._unanswered or self._bases.said_by(self._held):
            return True
        if request.have_step >= 0 and 0 <= request.step - request.have_step <= self._log_steps:
            return False  # somebody may have the steps: far less than the state
        return 2 * len(self._bases.said_by(self._bases_of_states())) > self._lanes

    def _bases_of_states(self) -> Base | None:
        """What most donors of a state offer; who offers steps alone has no say."""
        states: Agreement[Base] = Agreement()
        for donor in self._donors.values():
            if donor.offer is not None and donor.offer.root:
                states.says(donor.peer_id, donor.offer)
        return states.lead

    def _ask_for_chunks(self, lead: Base) -> None:
        table, givers = self._tables.get(lead.root), set(self._bases.said_by(lead))
        if table is None:
            if self._table_from not in givers:
                self._table_from = min(givers)
                self._ask_for_table(self._donors[self._table_from], lead.root)
            return
        for index in range(len(self._chunks)):
            self._state.want(index, table[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)])
        self._wanted_root = lead.root
        everything, now = range(len(self._chunks)), self._world.clock.now()
        for peer_id in givers:
            self._carry_out(self._state.offers(peer_id, everything, now))

    def _ask_for_table(self, donor: _Donor, root: bytes) -> None:
        table, stream = bytearray(DIGEST_BYTES * len(self._chunks)), donor.next_stream()

        def arrived() -> None:
            if xxhash.xxh3_128_digest(table) != root:
                self._give_up(donor.peer_id, "its table is not what it offered")
                return
            self._tables[root] = bytes(table)
            self._donors_changed()

        with suppress(ConnectionLost):  # its lane will notice, and others are asked
            donor.connection.post(memoryview(table), generation=self._generation, stream=stream, done=arrived)
            donor.connection.send(TableRequest(stream), generation=self._generation)

    def _has_state(self) -> bool:
        base = self._base
        if base is None:
            return False
        if base.root and self.newest - base.step > self._log_steps:
            raise Behind(
                f"{self.newest - base.step} steps were made since the one being fetched: it is too slow for that"
            )
        return not base.root or (base.root == self._wanted_root and self._state.complete)

    def _chunk_arrived(self, donor: _Donor, index: int) -> None:
        chunk, now = self._chunks[index], self._world.clock.now()
        instructions = self._state.arrived(donor.peer_id, index, xxhash.xxh3_128_digest(chunk.view), now)
        if self._state.has(index):
            self.given[donor.name] += chunk.size_bytes
            self._on_progress(self.given.total(), self.total_bytes)
        self._carry_out(instructions)
        self._changed.set()

    # ---------------------------------------------------------------------------------------------------------- steps

    def _logged_untrusted(self, donor: _Donor, news: StepLogged) -> None:
        if donor.offer is None or (donor.last >= 0 and news.step != donor.last + 1) or news.step < 1:
            raise ProtocolError(f"it tells of step {news.step} out of turn")
        value = news_untrusted(news, self._me)
        donor.first = donor.first if donor.last >= 0 else news.step
        donor.last = news.step
        if self._done.get(news.step, value) != value:
            raise ProtocolError(f"its step {news.step} is not the one that others gave: it is on another course")
        most = 2 * self._log_steps + STEPS_AHEAD
        if news.step >= self._next and (self._next < 0 or news.step < self._next + most):  # else next is kept by nobody
            self._news.setdefault(news.step, Agreement()).says(donor.peer_id, value)
            if self._next < 0 and len(self._news) > most:
                self._news.pop(min(self._news))  # older than any state that can still be used
        self._steps_changed()

    def _steps_changed(self) -> None:
        self._changed.set()
        if self._next < 0:
            return
        for step in range(self._next, self._next + STEPS_AHEAD):
            news = self._news.get(step)
            if news is not None and news.lead is not None:
                self._agreed[step] = news.lead
                self._steps.want(step, news.lead[0])
        now = self._world.clock.now()
        for donor in list(self._donors.values()):
            if donor.last >= 0:
                self._carry_out(self._steps.offers(donor.peer_id, self._keeps(donor), now))

    def _keeps(self, donor: _Donor) -> set[int]:
        """Of the steps that are wanted, those that ``donor`` keeps as most donors have them."""
        return {
            step
            for step in range(max(self._next, donor.first), min(self._next + STEPS_AHEAD, donor.last + 1))
            if step in self._news and donor.peer_id in self._news[step].said_by(self._news[step].lead)
        }

    def _step_arrived(self, donor: _Donor, step: int) -> None:
        digest, now = xxhash.xxh3_128_digest(self._buffer(step)), self._world.clock.now()
        self._carry_out(self._steps.arrived(donor.peer_id, step, digest, now))
        if self._steps.has(step):
            self.given[donor.name] += self._me.reduce_bytes
        self._changed.set()

    def _buffer(self, step: int) -> memoryview:
        return self._buffers[step % STEPS_AHEAD]

    # -------------------------------------------------------------------------------------------------------- helpers

    def _carry_out(self, instructions: Sequence[Ask | GiveUp]) -> None:
        for instruction in instructions:
            if isinstance(instruction, GiveUp):
                self._give_up(instruction.donor, instruction.reason)
            elif instruction.donor in self._donors:
                self._ask(self._donors[instruction.donor], instruction.key)

    def _ask(self, donor: _Donor, key: int) -> None:
        stream, steps = donor.next_stream(), self._next >= 0
        request = StepRequest(key, stream) if steps else ChunkRequest(key, stream)
        into = self._buffer(key) if steps else self._chunks[key].view
        done = partial(self._step_arrived if steps else self._chunk_arrived, donor, key)
        with suppress(ConnectionLost):  # its lane will notice, and the piece goes back to the queue
            donor.connection.post(into, generation=self._generation, stream=stream, done=done)
            donor.connection.send(request, generation=self._generation)

    def _give_up(self, peer_id: str, reason: str) -> None:
        donor = self._donors.get(peer_id)
        if donor is not None:
            donor.connection.abort(ProtocolError(reason))

    async def _until(self, satisfied: Callable[[], bool]) -> None:
        while not satisfied():
            if not self._lanes:
                said = "; ".join(f"{name}: {problem}" for name, problem in self.problems.items())
                raise NetworkError(f"no member could give the state: {said or 'the view names no donor'}")
            if self._next >= 0 and self._nobody_has_next():
                raise Behind(f"step {self._next} is kept by nobody any more: this member is too slow to follow")
            self._changed.clear()
            await self._changed.wait()

    def _nobody_has_next(self) -> bool:
        known = [donor for donor in self._donors.values() if donor.offer is not None]
        return bool(known) and not self._unanswered and all(donor.first > self._next for donor in known)
