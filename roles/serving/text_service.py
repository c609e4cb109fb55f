"""The ``TextService`` over a target: writes texts with a model and its drafters.

A limited number of texts is written at a time. Others wait, and are refused if that takes too long. What the model
computed for a conversation is kept for a while, so that the next question does not compute it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from p2ptrain.compute.text import ASSISTANT, SYSTEM, USER, ChatFormat, Conversation, ModelText, TextWriter
from p2ptrain.core.errors import P2PTrainError, Refused, ResourceError, UserError
from p2ptrain.core.serving import Sampling
from p2ptrain.core.world import World
from roles.background import Background
from roles.gauges import Rate
from roles.serving.chain_session import common_prefix
from roles.serving.local_model import Target, TargetSession
from roles.serving.text_session import TextSession
from roles.serving.text_stats import Recent, added, figures_of, shares_of
from roles.serving.texts import TextRequest
from roles.verifier.cost_model import MOST_DRAFTS, CostModel
from roles.verifier.drafter_link import Connected
from roles.verifier.drafters import Drafters
from roles.verifier.speculation import Stats
from wire.messages import RefusalCode

CONVERSATION_POSITIONS = 4096
"""Least length of a conversation's session, if the context allows it, so that the next question fits, too."""
WARM_UP = (8, 9)
"""Before the first request: positions of a prompt, and steps whose median is measured."""
LEAST_KEPT = 16
"""Least number of computed positions that is worth keeping."""
_ROLES = (SYSTEM, USER, ASSISTANT)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Settings that a person chooses.

    Attributes:
        sessions: texts written at a time. waiting: most requests that wait, each for ``wait_s`` at most.
        positions: largest length of a text, prompt included; 0: the model's context.
        kept: most conversations whose computed part is kept. kept_s: for how long.
        most_drafts: most drafts in a pass; the cost model may use fewer.
    """

    sessions: int = 4
    waiting: int = 32
    wait_s: float = 60.0
    positions: int = 0
    kept: int = 2
    kept_s: float = 180.0
    most_drafts: int = MOST_DRAFTS


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as token ids and numbers. ``grows``: it is a conversation, which may continue."""

    ids: list[int]
    max_new_tokens: int
    left_out: int
    writer: TextWriter
    sampling: Sampling
    grows: bool


@dataclass(frozen=True, slots=True, eq=False)
class KeptSession:
    """A target's session with the ids that it has computed, and the arguments of its opening."""

    session: TargetSession
    positions: int
    sampling: Sampling
    ids: tuple[int, ...] = ()

    def usable(self, ids: Sequence[int], positions: int, sampling: Sampling) -> int:
        """Length of the prefix of ``ids`` that it has; 0: it does not fit, or another conversation may still need
        it."""
        same = common_prefix(self.ids, ids)
        fits = self.positions >= positions and self.sampling == sampling and not self.session.lost
        return same if fits and same >= LEAST_KEPT and 2 * same >= len(self.ids) else 0


@dataclass(slots=True)
class _Running:
    """A text under way, and its target session. ``came_before``: tokens already counted in the rate."""

    opened: KeptSession
    speculates: bool
    came_before: int = 0


class VerifierService:
    """A ``TextService``.

    Args:
        text: the model's tokenizer and settings; its context is set to the largest length of a session here.
        form: format of conversations; None: read with the first conversation.
        model: name for people and programs. created: Unix time of its files.
        on_change: called when a text begins or ends.

    Attributes:
        kept: unused sessions, oldest first. cost_model: what its texts have learned of drafters.
    """

    def __init__(
        self,
        world: World,
        target: Target,
        text: ModelText,
        *,
        form: ChatFormat | None = None,
        model: str,
        created: int,
        drafters: Drafters | None = None,
        options: ServiceOptions | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.created = model, created
        self._options = options or ServiceOptions()
        known = [each for each in (text.context, target.context, self._options.positions) if each]
        self.context: int | None = min(known, default=None)
        text.context = self.context
        self._target, self._text, self._form = target, text, form
        self._drafters = drafters
        self._now = world.clock.now
        self._thread = world.threads.start("text")  # tokenizing a long prompt takes a second
        self._places, self._waiting = asyncio.Semaphore(self._options.sessions), 0
        self.kept: list[KeptSession] = []
        self._closing = Background()
        self._running: dict[TextSession, _Running] = {}
        self._ended = asyncio.Event()
        self._rate = Rate()
        self._total = Stats()
        self._recent, self._ended_sums = Recent(), dict[str, float]()
        self.cost_model = CostModel()
        self._closed = False
        self._on_change = on_change

    async def warm_up(self) -> None:
        """Measure a step before the first request, while no drafter works, to judge drafters by. Raises
        ``P2PTrainError``."""
        prompt, steps = WARM_UP
        if self.context is not None and self.context < prompt + steps:
            return
        session = await self._target.open(positions=prompt + steps, sampling=Sampling(temperature=0.0))
        try:
            passed = await session.run(keep=0, ids=(0,) * prompt, samples=1, sample_index=0, prefill=True)
            took_s = list[float]()
            for step in range(steps):
                passed = await session.run(
                    keep=prompt + step, ids=passed.tokens, samples=1, sample_index=step + 1, prefill=False
                )
                took_s.append(passed.took_s)
        finally:
            await session.close()
        self.cost_model = CostModel(median(took_s))

    async def write(self, request: TextRequest) -> TextSession:
        await self._enter()
        try:
            if self._closed:
                raise _leaving()
            prepared = await self._thread.submit(partial(self._prepared, request))
            opened, cached = await self._opened(prepared)
            try:
                if self._closed:
                    raise _leaving()
                return self._begun(prepared, opened, cached, request.speculate)
            except BaseException:
                self._let_go(opened)
                raise
        except BaseException:
            self._places.release()
            raise

    def figures(self) -> dict[str, float]:
        """Figures by name: totals, the rate of the last seconds, and recent values as of ``stats.figures_of``."""
        now = self._now()
        running = list(self._running)
        for session in running:
            self._note(session, now)
        self._note_recent()
        total = Stats()
        for stats in (self._total, *(session.core.stats for session in running)):
            total.add(stats)
        counts = {name: float(getattr(total, name)) for name in ("tokens", "drafted", "accepted", "wasted")}
        figures = {"tokens_per_s": self._rate.per_s(now), "waiting": float(self._waiting)}
        return figures | counts | figures_of(self._recent.grown, self.cost_model.step_s)

    def drafters(self) -> list[tuple[Connected, float | None]]:
        """Connected drafters, each with its share of the recent right drafts; None: there were none."""
        shares = shares_of(self._recent.grown)
        there = self._drafters.connected() if self._drafters is not None else []
        return [(each, shares.get(each.peer_id, 0.0) if shares else None) for each in there]

    @property
    def sessions(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        """End all texts. The target stays open. Never raises."""
        self._closed = True
        if self._running:
            await asyncio.gather(*(session.end(_leaving()) for session in list(self._running)))
        for kept in list(self.kept):
            self._let_go(kept)
        await self._closing.settle(timeout_s=self._options.wait_s)
        self._thread.close()

    # ------------------------------------------------------------------------------------------------------- beginning

    async def _enter(self) -> None:
        """Wait for a place, in the order of requests. Raises ``Refused``: too busy."""
        options = self._options
        busy = f"{options.sessions} texts are being written, and {self._waiting} wait"
        remedy = "try again in a few seconds, or start another verifier"
        if self._places.locked() and self._waiting >= options.waiting:
            raise Refused(RefusalCode.BUSY, f"the verifier is busy: {busy}", remedy=remedy)
        self._waiting += 1
        try:
            async with asyncio.timeout(options.wait_s):
                await self._places.acquire()
        except TimeoutError:
            text = f"the verifier is busy: no place became free within {options.wait_s:.0f} s"
            raise Refused(RefusalCode.BUSY, text, remedy=remedy) from None
        finally:
            self._waiting -= 1

    def _prepared(self, request: TextRequest) -> Prepared:
        text = self._text
        sampling = text.sampling(request.sampling)
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise UserError(f"{request.max_new_tokens} new tokens are too few", remedy="ask for at least one")
        if not request.turns:
            ids = self._checked_ids(text.prompt_ids(request.prompt))
            most = self._most(len(ids)) if request.max_new_tokens is None else request.max_new_tokens
            text.checked(ids, most)
            return Prepared(ids, most, 0, text.writer(ids, stop=request.stop), sampling, grows=False)
        if request.prompt:
            raise UserError("the request has both a prompt and a conversation", remedy="send one of them")
        form = self._form = self._form or ChatFormat(text.tokenizer)
        wanted = request.max_new_tokens or (CONVERSATION_POSITIONS if self.context is None else None)
        ids, most, left_out = _conversation(request).fit(form, self.context, wanted)
        self._checked_ids(ids)
        ends = text.end_tokens | form.end_tokens
        writer = text.writer(ids, stop=(*form.stop, *request.stop), end_tokens=ends)
        return Prepared(ids, most, left_out, writer, sampling, grows=True)

    def _checked_ids(self, ids: list[int]) -> list[int]:
        """Return ``ids``. Raises ``UserError``: the model lacks one of them."""
        if (top := max(ids, default=0)) >= (size := self._target.vocab_size):
            name = self._text.tokenizer.backend.id_to_token(top)
            text = f"the prompt has the token {name!r}, id {top}, but the model has only the ids 0 to {size - 1}"
            raise UserError(text, remedy="leave it out: the tokenizer has more tokens than the model's embedding")
        return ids

    def _most(self, taken: int) -> int:
        """New tokens that fit. At least one, so that the check of the length reports a prompt that is too long."""
        return max(1, (self.context or CONVERSATION_POSITIONS + taken) - taken)

    async def _opened(self, prepared: Prepared) -> tuple[KeptSession, int]:
        """A session of the target, and the number of prompt positions that it has. If memory is short, close kept
        sessions, then wait for texts. Raises as ``Target.open``."""
        ids, needs, sampling = prepared.ids, len(prepared.ids) + prepared.max_new_tokens, prepared.sampling
        for lost in [kept for kept in self.kept if kept.session.lost]:
            self._let_go(lost)
        best = max(self.kept, key=lambda kept: kept.usable(ids, needs, sampling), default=None)
        if best is not None and (cached := best.usable(ids, needs, sampling)):
            self.kept.remove(best)
            return best, cached
        room = needs
        if prepared.grows:
            room = max(needs, min(self.context or CONVERSATION_POSITIONS, CONVERSATION_POSITIONS))
        while True:
            try:
                session = await self._target.open(positions=room, sampling=sampling)
            except (ResourceError, Refused) as problem:
                if isinstance(problem, Refused) and problem.code != RefusalCode.BUSY:
                    raise
                if room > needs:
                    room = needs
                else:
                    await self._free_memory(problem)
            else:
                return KeptSession(session, room, sampling), 0

    async def _free_memory(self, problem: P2PTrainError) -> None:
        """Close the oldest kept session, else wait until a text ends. Raises ``problem``: neither is possible.
        ``Refused``: the wait is too long."""
        if self.kept:
            self._let_go(self.kept[0])
        if len(self._closing):
            await self._closing.settle(timeout_s=self._options.wait_s)
            return
        if not self._running:
            raise problem
        self._ended.clear()
        try:
            async with asyncio.timeout(self._options.wait_s):
                await self._ended.wait()
        except TimeoutError:
            text = f"the verifier is busy: {len(self._running)} texts use its memory"
            raise Refused(RefusalCode.BUSY, text, remedy="try again later, or ask for fewer tokens") from problem

    def _let_go(self, kept: KeptSession) -> None:
        if kept in self.kept:
            self.kept.remove(kept)
        self._closing.start(kept.session.close(), "close a session")

    def _expire(self, kept: KeptSession) -> None:
        if kept in self.kept:
            self._let_go(kept)

    def _begun(self, prepared: Prepared, opened: KeptSession, cached: int, speculate: bool) -> TextSession:
        session = TextSession(
            opened.session,
            prepared.writer,
            prepared.ids,
            cached=cached,
            max_new_tokens=prepared.max_new_tokens,
            vocab_size=self._target.vocab_size,
            left_out=prepared.left_out,
            now=self._now,
            on_end=self._on_end,
            model=self.cost_model,
            most_drafts=self._options.most_drafts,
        )
        self._running[session] = _Running(opened, speculate)
        session.begin(self._drafters if speculate else None, positions=opened.positions, sampling=opened.sampling)
        self._on_change()
        return session

    def _on_end(self, session: TextSession, clean: bool) -> None:
        now = self._now()
        self._note(session, now)
        running = self._running.pop(session)
        self._total.add(session.core.stats)
        if running.speculates:
            self._ended_sums = added([self._ended_sums, session.sums()])
            self._note_recent()
        self._places.release()
        self._ended.set()
        self._on_change()
        kept = replace(running.opened, ids=tuple(session.core.history[:-1]))
        if clean and not self._closed and len(kept.ids) >= LEAST_KEPT:
            self.kept.append(kept)
            asyncio.get_running_loop().call_later(self._options.kept_s, self._expire, kept)
            if len(self.kept) > self._options.kept:
                self._let_go(self.kept[0])
        else:
            self._let_go(kept)

    def _note(self, session: TextSession, now: float) -> None:
        running = self._running[session]
        came = session.core.stats.tokens
        self._rate.add(came - running.came_before, now)
        running.came_before = came

    def _note_recent(self) -> None:
        under_way = [session.sums() for session, running in self._running.items() if running.speculates]
        self._recent.note(added([self._ended_sums, *under_way]), self.cost_model.step_s)


def _leaving() -> Refused:
    return Refused(RefusalCode.SHUTTING_DOWN, "the verifier is shutting down", remedy="use another verifier")


def _conversation(request: TextRequest) -> Conversation:
    turns = request.turns
    for turn in turns:
        if turn.role not in _ROLES:
            raise UserError(f"unknown role {turn.role[:40]!r} of a turn", remedy=f"use {', '.join(_ROLES)}")
    if turns[-1].role == ASSISTANT:
        raise UserError("the last turn is the assistant's", remedy="end with a turn that it can answer")
    made = Conversation(turns[0].text if turns[0].role == SYSTEM else "")
    made.turns += turns[len(made.turns) :]
    return made
