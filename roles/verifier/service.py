"""Texts from a model and its drafters, for whoever asks: over the wire, or over HTTP.

So many are written at a time; others wait, and are told when that would take too long. A conversation's next question
begins with what the model has computed for the one before: that is kept for a while, and is not computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from p2ptrain.compute.text import ASSISTANT, SYSTEM, USER, ChatFormat, Conversation, ModelText, TextWriter, Turn
from p2ptrain.core.errors import P2PTrainError, Refused, ResourceError, UserError
from p2ptrain.core.serving import Sampling
from p2ptrain.core.world import World
from roles.speculation.cost_model import MOST_DRAFTS, CostModel
from roles.speculation.verifying import Stats
from roles.verifier.asking import Wish
from roles.verifier.drafting_source import Connected, DrafterSource, NoDrafters
from roles.verifier.kept import Kept, KeptSession
from roles.verifier.places import BUSY, LONGEST_WAIT_S, Places, patience_s
from roles.verifier.session import TextSession
from roles.verifier.stats import Rate, Recent, added, figures_of, shares_of
from roles.verifier.target import Target
from wire.handshake import RefusalCode

CONVERSATION_POSITIONS = 4096
"""Of a conversation's session, at least, where the model knows as many: the next question fits, too."""
WARM_UP = (8, 9)
"""Positions of a prompt, and steps of which the median counts, before anybody asks."""
_ROLES = (SYSTEM, USER, ASSISTANT)
_FIRST_GUESS_S = 30.0
"""That a text takes, before any was written."""
_USUAL_OF = 4
"""Of so many texts what one takes is a mean; later ones count the more."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What a person chose.

    Attributes:
        sessions: texts written at a time. waiting: more of them that wait.
        positions: that one may have, prompt included; 0: as many as the model knows.
        kept: conversations whose computed part is kept for the next question. kept_s: for so long.
        most_drafts: that a pass takes; how many are of use it finds out by itself.
    """

    sessions: int = 4
    waiting: int = 32
    positions: int = 0
    kept: int = 2
    kept_s: float = 180.0
    most_drafts: int = MOST_DRAFTS


@dataclass(frozen=True, slots=True)
class Prepared:
    """A wish, as token ids and numbers. ``grows``: it is a conversation, and goes on."""

    ids: list[int]
    max_new_tokens: int
    left_out: int
    writer: TextWriter
    sampling: Sampling
    grows: bool


@dataclass(slots=True)
class _Running:
    """A text under way: since when, in what, and what it may become."""

    began_at: float
    opened: KeptSession
    max_new_tokens: int
    speculates: bool
    came_before: int = 0  # tokens that the rate has seen


class VerifierService:
    """A ``TextService``.

    Args:
        text: the model's text side; its context becomes what a session may have here. form: of conversations.
        model: its name, for people and programs. created: Unix seconds, of its files.

        on_change: called when a text begins or ends.

    Attributes:
        kept: what is computed and may be used again. cost_model: what its texts have learned of drafters.
    """

    def __init__(
        self,
        world: World,
        target: Target,
        text: ModelText,
        *,
        form: ChatFormat,
        model: str,
        created: int,
        drafters: DrafterSource | None = None,
        options: ServiceOptions | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.created = model, created
        self._options = options or ServiceOptions()
        known = [each for each in (text.context, target.context, self._options.positions) if each]
        self.context: int | None = min(known, default=None)
        text.context = self.context
        self._target, self._text, self._form = target, text, form
        self._drafters = drafters or NoDrafters()
        self._now = world.clock.now
        self._thread = world.threads.start("text")  # a long prompt takes a second to become ids
        self._places = Places(self._options.sessions, self._options.waiting, self._expected_s)
        self.kept = Kept(self._options.kept, self._options.kept_s)
        self._running: dict[TextSession, _Running] = {}
        self._ended = asyncio.Event()
        self._rate = Rate()
        self._total = Stats()
        self._recent, self._ended_sums = Recent(), dict[str, float]()
        self.cost_model = CostModel()
        self._usual_s, self._usual_of = _FIRST_GUESS_S, 0
        self._preparing = 0
        self._closed = False
        self._on_change = on_change

    async def warm_up(self) -> None:
        """Compute a little before anybody asks: what drafters are worth is held against what a step takes now, while
        none works. Raises ``P2PTrainError``: the model cannot."""
        prompt, steps = WARM_UP
        if self.context is not None and self.context < prompt + steps:
            return
        session = await self._target.open(positions=prompt + steps, sampling=Sampling(temperature=0.0))
        try:
            passed = await session.run(keep=0, ids=(0,) * prompt, picks=1, draw=0, prefill=True)
            took_s = list[float]()
            for step in range(steps):
                passed = await session.run(keep=prompt + step, ids=passed.tokens, picks=1, draw=step + 1, prefill=False)
                took_s.append(passed.took_s)
        finally:
            await session.close()
        self.cost_model = CostModel(median(took_s))

    async def write(self, wish: Wish) -> TextSession:
        """As ``TextService.write``."""
        if wish.speculate not in ("auto", "off"):
            raise UserError(f"speculate = {wish.speculate!r} is neither auto nor off")
        prepared = await self._as_ids(wish)
        await self._places.enter()
        try:
            if self._closed:
                raise Refused(RefusalCode.SHUTTING_DOWN, "the verifier is leaving", remedy="ask another one")
            opened, cached = await self._opened(prepared)
            try:
                return self._begun(prepared, opened, cached, wish.speculate == "auto")
            except BaseException:
                self.kept.let_go(opened.session)
                raise
        except BaseException:
            self._places.leave()
            raise

    def figures(self) -> dict[str, float]:
        """How it fares, by name: totals, the rate of the last seconds, and of late ``stats.figures_of``."""
        now = self._now()
        running = list(self._running)
        for session in running:
            self._note(session, now)
        self._note_recent()
        total = Stats()
        for stats in (self._total, *(session.core.stats for session in running)):
            total.add(stats)
        counts = {name: float(getattr(total, name)) for name in ("tokens", "drafted", "accepted", "wasted")}
        figures = {"tokens_per_s": self._rate.per_s(now), "waiting": float(self._places.waiting)}
        return figures | counts | figures_of(self._recent.grown, self.cost_model.step_s)

    def drafters(self) -> list[tuple[Connected, float | None]]:
        """Those that there are, and which share of the right drafts of late was theirs; None where none was right."""
        shares = shares_of(self._recent.grown)
        return [(each, shares.get(each.peer_id, 0.0) if shares else None) for each in self._drafters.connected()]

    @property
    def sessions(self) -> int:
        """Texts that are being written."""
        return len(self._running)

    def facts(self) -> dict[str, Any]:
        """Of the model behind it."""
        return self._target.facts()

    async def close(self) -> None:
        """End all texts. The target stays. Never raises."""
        self._closed = True
        if self._running:
            leaving = Refused(RefusalCode.SHUTTING_DOWN, "the verifier is leaving", remedy="ask another one")
            await asyncio.gather(*(session.end(leaving) for session in list(self._running)))
        await self.kept.close()
        self._thread.close()

    # ------------------------------------------------------------------------------------------------------- beginning

    async def _as_ids(self, wish: Wish) -> Prepared:
        """Raises ``UserError``; ``Refused`` where too many prompts wait for the one thread that does this."""
        if self._preparing > self._options.waiting:
            text = f"the verifier is busy: {self._preparing} prompts are being read"
            raise Refused(BUSY, text, remedy="try again in a few seconds")
        self._preparing += 1
        try:
            return await self._thread.submit(partial(self._prepared, wish))
        finally:
            self._preparing -= 1

    def _prepared(self, wish: Wish) -> Prepared:
        """On the text thread. Raises ``UserError``."""
        text, form = self._text, self._form
        sampling = text.sampling(wish.sampling)
        if wish.max_new_tokens is not None and wish.max_new_tokens < 1:
            raise UserError(f"{wish.max_new_tokens} new tokens are none", remedy="ask for at least one")
        if not wish.turns:
            ids = text.prompt_ids(wish.prompt)
            most = self._most(len(ids)) if wish.max_new_tokens is None else wish.max_new_tokens
            text.checked(ids, most)
            return Prepared(ids, most, 0, text.writer(ids, stop=wish.stop), sampling, grows=False)
        if wish.prompt:
            raise UserError("a prompt and a conversation", remedy="ask for one of them")
        ids, most, left_out = _conversation(wish).fit(form, self.context, wish.max_new_tokens or self._most(0))
        ends = text.end_tokens | form.end_tokens
        writer = text.writer(ids, stop=(*form.stop, *wish.stop), end_tokens=ends)
        return Prepared(ids, most, left_out, writer, sampling, grows=True)

    def _most(self, taken: int) -> int:
        """New tokens that there is room for; one at least, so that who asks hears what is too long."""
        return max(1, (self.context or CONVERSATION_POSITIONS + taken) - taken)

    async def _opened(self, prepared: Prepared) -> tuple[KeptSession, int]:
        """A session of the target, and how much of the prompt it has. Where others take the memory it waits for them.

        Raises:
            P2PTrainError: as ``Target.open``.
        """
        ids, needs = prepared.ids, len(prepared.ids) + prepared.max_new_tokens
        if (found := self.kept.take(ids, positions=needs, sampling=prepared.sampling)) is not None:
            return found
        room = needs
        if prepared.grows:
            room = max(needs, min(self.context or CONVERSATION_POSITIONS, CONVERSATION_POSITIONS))
        due = self._now() + patience_s(self._expected_s(1))
        while True:
            try:
                session = await self._target.open(positions=room, sampling=prepared.sampling)
            except (ResourceError, Refused) as problem:
                if isinstance(problem, Refused) and problem.code != BUSY:
                    raise
                if room > needs:
                    room = needs
                elif not await self.kept.drop_oldest():
                    await self._one_ended(due, problem)
            else:
                return KeptSession(session, room, prepared.sampling), 0

    async def _one_ended(self, due: float, problem: P2PTrainError) -> None:
        """Wait until a text ends, for its memory. Raises ``problem`` where none is being written, and ``Refused`` where
        it takes too long."""
        if not self._running:
            raise problem
        self._ended.clear()
        try:
            async with asyncio.timeout(max(0.0, due - self._now())):
                await self._ended.wait()
        except TimeoutError:
            text = f"the verifier is busy: {len(self._running)} texts take its memory"
            raise Refused(BUSY, text, remedy="try again later, or ask for fewer tokens") from problem

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
        drafters = self._drafters if speculate else NoDrafters()
        self._running[session] = _Running(self._now(), opened, prepared.max_new_tokens, speculate)
        try:
            session.begin(drafters, positions=opened.positions, sampling=opened.sampling)
        except BaseException:
            del self._running[session]
            raise
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
        self._usual_of = min(self._usual_of + 1, _USUAL_OF)
        self._usual_s += (now - running.began_at - self._usual_s) / self._usual_of
        self._places.leave()
        self._ended.set()
        self._on_change()
        if clean and not self._closed:
            self.kept.keep(replace(running.opened, ids=tuple(session.core.history[:-1])))
        else:
            self.kept.let_go(running.opened.session)

    def _note(self, session: TextSession, now: float) -> None:
        running = self._running[session]
        came = session.core.stats.tokens
        self._rate.add(came - running.came_before, now)
        running.came_before = came

    def _note_recent(self) -> None:
        under_way = [session.sums() for session, running in self._running.items() if running.speculates]
        self._recent.note(added([self._ended_sums, *under_way]), self.cost_model.step_s)

    def _expected_s(self, places: int) -> float:
        """Until so many places have become free, as far as is known."""
        now = self._now()
        left = list[float]()
        for session, running in self._running.items():
            made = session.core.stats.tokens
            spent_s = now - running.began_at
            left.append(spent_s * (running.max_new_tokens / made - 1) if made else self._usual_s)
        if not left:
            return self._usual_s
        rounds, place = divmod(places - 1, len(left))
        return min(sorted(left)[place] + rounds * self._usual_s, LONGEST_WAIT_S)


def _conversation(wish: Wish) -> Conversation:
    """Raises ``UserError``."""
    turns = [Turn(turn.role, turn.content) for turn in wish.turns]
    for turn in turns:
        if turn.role not in _ROLES:
            raise UserError(f"a turn of {turn.role[:40]!r}", remedy=f"roles are {', '.join(_ROLES)}")
    if turns[-1].role == ASSISTANT:
        raise UserError("the last turn is the assistant's own", remedy="end with what it is to answer")
    made = Conversation(turns[0].text if turns[0].role == SYSTEM else "")
    made.turns += turns[len(made.turns) :]
    return made
