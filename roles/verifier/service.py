"""The ``TextService`` over a model of this process or of its workers, with or without drafters.

A limited number of texts is written at a time. Others wait, and are refused if that takes too long: then they are told
when to try again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from p2ptrain.compute.text import ASSISTANT, SYSTEM, TOOL, USER, ChatFormat, Conversation, ModelText, TextWriter, Turn
from p2ptrain.core.background import Background
from p2ptrain.core.errors import Refused, UserError
from p2ptrain.core.world import World
from roles.gauges import MovingAverage, Rate
from roles.serving.constraints import Constraint, TokenTable
from roles.serving.model import Decoding, ServedModel
from roles.serving.text_session import DraftSource, PreparedText, TextSession
from roles.serving.text_stats import RecentPace, RecentSums, TextStats, TextSums, add_sums, figures_of
from roles.serving.texts import TextRequest
from roles.verifier.cost_model import CostModel
from roles.verifier.drafters import Drafters, TextDrafts
from roles.verifier.speculation import Speculation
from wire.messages import RefusalCode
from wire.text_messages import Serving

CONVERSATION_POSITIONS = 4096
"""Length of a conversation if neither the model's context nor the request limits it."""
WAIT_S = 60.0
"""Time for which a text waits for its turn."""
USUAL_SESSIONS = 16
"""Texts written at a time, in one pass."""
LONGEST_RETRY_S = 3600

_ROLES = (SYSTEM, USER, ASSISTANT, TOOL)


class Places:
    """Places for texts. Who waits gets one in the order of priority, lower ones first, then first come, first served.

    Args:
        count: of places. most_waiting: most texts that wait, each for ``WAIT_S`` at most.

    Attributes:
        free: places that nobody has. waiting: how many texts wait. duration: of a text.
    """

    def __init__(self, count: int, most_waiting: int) -> None:
        self.count = self.free = count
        self.duration = MovingAverage()
        self._most_waiting = most_waiting
        self._asked: list[tuple[int, int, asyncio.Future[None]]] = []
        self._last = 0

    @property
    def waiting(self) -> int:
        return sum(not place.done() for *_, place in self._asked)

    async def take(self, priority: int) -> None:
        if self.free:
            self.free -= 1
            return
        self._last += 1
        place = asyncio.get_running_loop().create_future()
        entry = priority, self._last, place
        self._asked.append(entry)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it got a place just now
                self.give_back()
            raise
        finally:
            self._asked.remove(entry)

    def give_back(self) -> None:
        if first := min((entry for entry in self._asked if not entry[2].done()), default=None):
            first[2].set_result(None)
        else:
            self.free += 1

    async def enter(self, priority: int) -> None:
        """Wait for a place. Raises ``Refused``: too busy."""
        if not self.free and self.waiting >= self._most_waiting:
            raise self._busy(f"{self.count} texts are being written, and {self.waiting} wait")
        try:
            async with asyncio.timeout(WAIT_S):
                await self.take(priority)
        except TimeoutError:
            raise self._busy(f"no place became free within {WAIT_S:.0f} s") from None

    def _busy(self, why: str) -> Refused:
        """Expect that those who wait now go first, and that texts take as long as the last ones."""
        wait_s = self.duration.seconds * (self.waiting + 1) / self.count
        after_s = min(math.ceil(wait_s), LONGEST_RETRY_S)
        when = f"{after_s} s" if after_s else "a few seconds"
        remedy = f"try again in {when}, or start another verifier"
        return Refused(RefusalCode.BUSY, f"the verifier is busy: {why}", remedy=remedy, retry_after_s=after_s)


class VerifierFigures:
    """Sums and recent figures of all texts.

    Attributes:
        running: texts under way, and when each began. pace: of all texts.
    """

    def __init__(self) -> None:
        self.running: dict[TextSession, float] = {}
        self.pace = RecentPace()
        self._rate, self._recent = Rate(), RecentSums()
        self._ended: TextSums = {}

    def end(self, session: TextSession, now: float) -> float:
        """Count a text that has ended. Returns its duration."""
        began = self.running.pop(session)
        self._ended = add_sums([self._ended, session.sums()])
        self._add_up(now)
        return now - began

    def as_map(self, now: float, step_s: float) -> dict[str, float]:
        """Totals, the rate of the last seconds, and recent values of ``figures_of`` and ``RecentPace``."""
        total = self._add_up(now)
        counts = {name: total.get(name, 0.0) for name in ("tokens", "drafted", "accepted", "wasted")}
        recent = figures_of(self._recent.grown, step_s) | self.pace.as_map(now)
        return {"tokens_per_s": self._rate.per_s(now)} | counts | recent

    def _add_up(self, now: float) -> TextSums:
        total = add_sums([self._ended, *(session.sums() for session in self.running)])
        self._rate.add(self._recent.add(total), now)
        return total


class ModelTextService:
    """A ``TokenizingService``: writes with a model, which stays open when the service is closed.

    The model finds what it computed for texts that begin alike, such as the turns before in a conversation.

    Args:
        text: the model's tokenizer and settings; its context is set to the largest length of a session here.
        form: format of conversations; None: read with the first conversation.
        name: of the model, for people and programs. created: Unix time of its files.
        positions: largest length of a text, prompt included; 0: the model's context.
        drafters: None: the model writes alone.
        sessions: texts written at a time. waiting: most others, as of ``Places``.

    Attributes:
        cost_model: what its texts have learned of drafters.
    """

    def __init__(
        self,
        world: World,
        model: ServedModel,
        text: ModelText,
        *,
        form: ChatFormat | None = None,
        name: str,
        created: int = 0,
        positions: int = 0,
        drafters: Drafters | None = None,
        sessions: int = USUAL_SESSIONS,
        waiting: int = 32,
    ) -> None:
        self.model, self.created = name, created
        limits = [limit for limit in (text.context, model.context, positions) if limit]
        self.context: int | None = min(limits, default=None)
        text.context = self.context
        self.cost_model = CostModel()
        self._served, self._text, self._form, self._drafters = model, text, form, drafters
        self._now = world.clock.now
        self._thread = world.threads.start("text")  # tokenizing a long prompt takes a second
        self._table = TokenTable(text.tokenizer, model.vocab_size)
        self._places = Places(sessions, waiting)
        self._figures = VerifierFigures()
        self._closing = Background()  # sessions of the model
        self._is_closed = False

    @property
    def sessions(self) -> int:
        return len(self._figures.running)

    async def write(self, request: TextRequest) -> TextSession:
        asked_at = self._now()
        await self._places.enter(request.priority)
        try:
            session, prepared = await self._open(request, asked_at)
        except BaseException:
            self._places.give_back()
            raise
        self._figures.running[session] = self._now()
        session.begin(self.draft_source(request, session.decoding, prepared))
        if self._is_closed:
            await session.end(_leaving())
            raise _leaving()
        return session

    def draft_source(self, request: TextRequest, decoding: Decoding, prepared: PreparedText) -> DraftSource | None:
        """Drafts for the text of ``request``; None: there are no drafters."""
        if self._drafters is None:
            return None
        drafters, core = self._drafters if request.speculate else None, Speculation(decoding, self.cost_model)
        return TextDrafts(drafters, core, positions=prepared.positions, sampling=prepared.sampling, now=self._now)

    async def _open(self, request: TextRequest, asked_at: float) -> tuple[TextSession, PreparedText]:
        """Make a text and the model's session for it. Raises as ``write``."""
        if self._is_closed:
            raise _leaving()
        prepared = await self._thread.submit(partial(self._prepare_ids, request))
        await self._closing.settle(timeout_s=WAIT_S)  # the sessions of texts that have just ended have memory
        opened = await self._served.open(
            positions=prepared.positions,
            sampling=prepared.sampling,
            sample_from=len(prepared.ids),
            ids=() if request.prompt_logprobs else prepared.ids,  # scores need all positions to be computed
            priority=request.priority,
        )
        decoding = Decoding(
            prepared.ids,
            max_new_tokens=prepared.max_new_tokens,
            stop_ids=prepared.writer.end_tokens,
            cached=opened.cached,
            most_passes=opened.most_passes,
            tops=None if request.logprobs is None else min(request.logprobs, self._served.vocab_size),
            scores_prompt=request.prompt_logprobs,
        )

        def end(session: TextSession) -> None:
            self._closing.start(opened.close(), "close a session")
            self._places.duration.add(self._figures.end(session, self._now()))
            self._places.give_back()

        stats = TextStats(
            decoding.stats,
            began_at=asked_at,
            prompt_tokens=len(prepared.ids),
            cached_tokens=opened.cached,
            pace=self._figures.pace,
        )
        session = TextSession(opened, decoding, prepared, stats, submit=self._thread.submit, now=self._now, on_end=end)
        session.prompt_logprobs = [None] if request.prompt_logprobs else []
        return session, prepared

    def figures(self) -> dict[str, float]:
        """Figures by name, as of ``VerifierFigures.as_map``."""
        counts = {"waiting": float(self._places.waiting), "preemptions": float(self._served.preemptions)}
        counts["places"] = float(self._places.count)
        return counts | self._figures.as_map(self._now(), self.cost_model.step_s)

    def describe(self, weights: str, http: str) -> Serving:
        """What the seed lists of this model. ``weights``: their digest."""
        links = self._drafters.connected_links() if self._drafters is not None else []
        return Serving(
            model=self.model,
            vocab_size=self._served.vocab_size,
            context=self.context or 0,
            tokenizer=self._text.tokenizer.digest,
            http=http,
            sessions=self.sessions,
            stats=self.figures(),
            drafters=[link.figures for link in links],
            weights=weights,
        )

    async def close(self) -> None:
        """End all texts, and tell their readers. Never raises."""
        self._is_closed = True
        await asyncio.gather(*(session.end(_leaving()) for session in list(self._figures.running)))
        await self._closing.settle(timeout_s=WAIT_S)
        self._thread.close()

    # ------------------------------------------------------------------------------------------------------- beginning

    def _prepare_ids(self, request: TextRequest) -> PreparedText:
        text, ends, stop, left_out = self._text, self._text.end_tokens, request.stop, 0
        if request.grammar and request.ignore_end:
            raise UserError("a grammar says where the text ends, so its end cannot be ignored", remedy="leave one out")
        if request.turns:
            form = self.form
            wanted = request.max_new_tokens or (CONVERSATION_POSITIONS if self.context is None else None)
            ids, most, left_out = _read_conversation(request).fit(form, self.context, wanted, request.tools)
            ends, stop = ends | form.end_tokens, (*form.stop, *stop)
        else:
            ids = list(request.ids) or text.prompt_ids(request.prompt)
            most = CONVERSATION_POSITIONS if self.context is None else max(1, self.context - len(ids))
            most = most if request.max_new_tokens is None else request.max_new_tokens
            text.check_length(len(ids), most)  # also a prompt that leaves no room
        self._check_ids(ids)
        self._check_ids([token for token, _ in request.sampling.logit_bias])
        if request.logprobs is not None:
            self.token_bytes(0)  # the first call takes long
        constraint = Constraint(self._table, request.grammar, ends) if request.grammar else None
        known_ends = frozenset[int]() if request.ignore_end else ends
        backend = text.tokenizer.backend
        writer = TextWriter(backend, ids, stop=stop, end_tokens=known_ends, stop_ids=request.stop_ids)
        return PreparedText(ids, most, left_out, writer, text.sampling(request.sampling), constraint)

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise ``UserError``: the model lacks one of these."""
        if ids and not 0 <= min(ids) <= (top := max(ids)) < (size := self._served.vocab_size):
            name = self._text.tokenizer.backend.id_to_token(top) if top < 1 << 32 else None
            text = f"the request has the token {name!r}, id {top}, but the model has only the ids 0 to {size - 1}"
            raise UserError(text, remedy="leave it out: the tokenizer has more tokens than the model's embedding")

    # ------------------------------------------------------------------------------------------- tokens and templates

    @property
    def form(self) -> ChatFormat:
        self._form = self._form or ChatFormat(self._text.tokenizer)
        return self._form

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        tokenizer = self._text.tokenizer
        [encoding] = await self._thread.submit(partial(tokenizer.encodings, [text], add_special_tokens=add_special))
        return list(encoding.ids)

    async def tokenize_turns(self, turns: Sequence[Turn], tools: str = "") -> list[int]:
        return await self._thread.submit(lambda: self.form.ids(turns, tools))

    async def detokenize(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return await self._thread.submit(lambda: self._text.tokenizer.backend.decode(ids, skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        return self._table.bytes_of(token)


def _read_conversation(request: TextRequest) -> Conversation:
    turns = request.turns
    for turn in turns:
        if turn.role not in _ROLES:
            raise UserError(f"unknown role {turn.role[:40]!r} of a turn", remedy=f"use {', '.join(_ROLES)}")
    if turns[-1].role == ASSISTANT:
        raise UserError("the last turn is the assistant's", remedy="end with a turn that it can answer")
    made = Conversation(turns[0].text if turns[0].role == SYSTEM else "")
    made.turns += turns[len(made.turns) :]
    return made


def _leaving() -> Refused:
    return Refused(RefusalCode.SHUTTING_DOWN, "the verifier is shutting down", remedy="use another verifier")
