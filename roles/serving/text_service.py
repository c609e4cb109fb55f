"""The ``TextService`` over a model of this process or of its workers.

What the model computed for a conversation stays for a while, so that the next question does not compute it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from p2ptrain.compute.text import ASSISTANT, SYSTEM, USER, ChatFormat, Conversation, ModelText, TextWriter
from p2ptrain.core.errors import P2PTrainError, Refused, ResourceError, UserError
from p2ptrain.core.serving import Sampling
from p2ptrain.core.world import World
from roles.background import Background
from roles.serving.decoding import Decoding
from roles.serving.model import ModelSession, ServedModel
from roles.serving.text_session import TextSession
from roles.serving.texts import TextRequest
from wire.chain_messages import CHUNK
from wire.messages import RefusalCode

CONVERSATION_POSITIONS = 4096
"""Least length of a conversation's session, if the context allows it, so that the next question fits, too."""
SHARED_CHUNK = 256
"""Positions of a prompt in one pass while other texts wait for their next token."""
LEAST_CACHED = 16
"""Least number of computed positions worth another use."""
_ROLES = (SYSTEM, USER, ASSISTANT)


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A request as token ids and numbers. ``grows``: it is a conversation, which may continue."""

    ids: list[int]
    max_new_tokens: int
    left_out: int
    writer: TextWriter
    sampling: Sampling
    grows: bool


@dataclass(frozen=True, slots=True, eq=False)
class OpenedSession:
    """A model's session, the ids that it has computed, and the arguments of its opening."""

    session: ModelSession
    positions: int
    sampling: Sampling
    ids: tuple[int, ...] = ()

    def usable(self, ids: Sequence[int], positions: int, sampling: Sampling) -> int:
        """Length of the prefix of ``ids`` that it has; 0: it does not fit, or another conversation may still need
        it."""
        same = common_prefix(self.ids, ids)
        fits = self.positions >= positions and self.sampling == sampling and not self.session.lost
        return same if fits and same >= LEAST_CACHED and 2 * same >= len(self.ids) else 0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


class IdleSessions:
    """Sessions of ended texts, for the next question of their conversation.

    Args:
        most: at a time. idle_s: for how long.

    Attributes:
        sessions: oldest first.
    """

    def __init__(self, most: int, idle_s: float) -> None:
        self.sessions: list[OpenedSession] = []
        self._most, self._idle_s = most, idle_s
        self._closing = Background()

    def take(self, ids: Sequence[int], positions: int, sampling: Sampling) -> tuple[OpenedSession, int] | None:
        """The session with the longest prefix of ``ids``, and its length; None: there is none."""
        for lost in [each for each in self.sessions if each.session.lost]:
            self.drop(lost)
        best = max(self.sessions, key=lambda each: each.usable(ids, positions, sampling), default=None)
        if best is None or not (cached := best.usable(ids, positions, sampling)):
            return None
        self.sessions.remove(best)
        return best, cached

    def add(self, opened: OpenedSession) -> None:
        self.sessions.append(opened)
        asyncio.get_running_loop().call_later(self._idle_s, self._expire, opened)
        if len(self.sessions) > self._most:
            self.drop(self.sessions[0])

    def drop(self, opened: OpenedSession) -> None:
        """Begin to close a session, idle or not."""
        if opened in self.sessions:
            self.sessions.remove(opened)
        self._closing.start(opened.session.close(), "close a session")

    def _expire(self, opened: OpenedSession) -> None:
        if opened in self.sessions:
            self.drop(opened)

    async def free_memory(self, *, timeout_s: float) -> bool:
        """Close the oldest session, and wait until all that are closing are closed. False: there is none."""
        if self.sessions:
            self.drop(self.sessions[0])
        is_closing = len(self._closing) > 0
        await self._closing.settle(timeout_s=timeout_s)
        return is_closing

    async def close(self, *, timeout_s: float) -> None:
        for opened in list(self.sessions):
            self.drop(opened)
        await self._closing.settle(timeout_s=timeout_s)


class ModelTextService:
    """A ``TextService``. It begins each text at once: whoever asks limits the number of texts.

    Args:
        model: the model to write with. It stays open when the service is closed.
        text: the model's tokenizer and settings; its context is set to the largest length of a session here.
        form: format of conversations; None: read with the first conversation.
        name: of the model, for people and programs. created: Unix time of its files.
        positions: largest length of a text, prompt included; 0: the model's context.
        idle: most conversations whose computed part stays for the next question. idle_s: for how long.
        wait_s: how long a text waits for memory that other texts use.
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
        idle: int = 2,
        idle_s: float = 180.0,
        wait_s: float = 60.0,
    ) -> None:
        self.model, self.created = name, created
        known = [each for each in (text.context, model.context, positions) if each]
        self.context: int | None = min(known, default=None)
        text.context = self.context
        self.idle = IdleSessions(idle, idle_s)
        self._served, self._text, self._form = model, text, form
        self._wait_s = wait_s
        self._now = world.clock.now
        self._thread = world.threads.start("text")  # tokenizing a long prompt takes a second
        self._texts: set[TextSession] = set()
        self._ended = asyncio.Event()

    async def write(self, request: TextRequest) -> TextSession:
        session, _ = await self.prepare(request)
        session.begin(None)
        return session

    async def prepare(
        self, request: TextRequest, on_end: Callable[[TextSession], None] = lambda session: None
    ) -> tuple[TextSession, OpenedSession]:
        """Make a text and the model's session for it. The caller begins the text at once. Raises as ``write``."""
        prepared = await self._thread.submit(partial(self._prepared, request))
        opened, cached = await self._opened(prepared)
        opened.session.sample_from = len(prepared.ids)
        decoding = Decoding(
            prepared.ids,
            max_new_tokens=prepared.max_new_tokens,
            stop_ids=prepared.writer.end_tokens,
            cached=cached,
        )

        def end(session: TextSession, is_usable: bool) -> None:
            self._texts.discard(session)
            self._ended.set()
            ended = replace(opened, ids=tuple(decoding.ids[:-1]))
            (self.idle.add if is_usable and len(ended.ids) >= LEAST_CACHED else self.idle.drop)(ended)
            on_end(session)

        session = TextSession(
            opened.session,
            decoding,
            prepared.writer,
            cached=cached,
            left_out=prepared.left_out,
            chunk=lambda: CHUNK if len(self._texts) <= 1 else SHARED_CHUNK,
            now=self._now,
            on_end=end,
        )
        self._texts.add(session)
        return session, opened

    async def close(self, reason: P2PTrainError | None = None) -> None:
        """End all texts, with ``reason`` for their readers. Never raises."""
        ending = [session.end(reason) if reason is not None else session.close() for session in list(self._texts)]
        await asyncio.gather(*ending)
        await self.idle.close(timeout_s=self._wait_s)
        self._thread.close()

    # ------------------------------------------------------------------------------------------------------- beginning

    def _prepared(self, request: TextRequest) -> PreparedText:
        text = self._text
        sampling = text.sampling(request.sampling)
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise UserError(f"{request.max_new_tokens} new tokens are too few", remedy="ask for at least one")
        if not request.turns:
            ids = self._checked_ids(text.prompt_ids(request.prompt))
            most = self._most(len(ids)) if request.max_new_tokens is None else request.max_new_tokens
            text.check_length(len(ids), most)
            return PreparedText(ids, most, 0, text.writer(ids, stop=request.stop), sampling, grows=False)
        if request.prompt:
            raise UserError("the request has both a prompt and a conversation", remedy="send one of them")
        form = self._form = self._form or ChatFormat(text.tokenizer)
        wanted = request.max_new_tokens or (CONVERSATION_POSITIONS if self.context is None else None)
        ids, most, left_out = _conversation(request).fit(form, self.context, wanted)
        self._checked_ids(ids)
        ends = text.end_tokens | form.end_tokens
        writer = text.writer(ids, stop=(*form.stop, *request.stop), end_tokens=ends)
        return PreparedText(ids, most, left_out, writer, sampling, grows=True)

    def _checked_ids(self, ids: list[int]) -> list[int]:
        """Return ``ids``. Raises ``UserError``: the model lacks one of them."""
        if (top := max(ids, default=0)) >= (size := self._served.vocab_size):
            name = self._text.tokenizer.backend.id_to_token(top)
            text = f"the prompt has the token {name!r}, id {top}, but the model has only the ids 0 to {size - 1}"
            raise UserError(text, remedy="leave it out: the tokenizer has more tokens than the model's embedding")
        return ids

    def _most(self, taken: int) -> int:
        """New tokens that fit. At least one, so that the check of the length reports a prompt that is too long."""
        return max(1, (self.context or CONVERSATION_POSITIONS + taken) - taken)

    async def _opened(self, prepared: PreparedText) -> tuple[OpenedSession, int]:
        """A session of the model, and the number of prompt positions that it has. If memory is short, close idle
        sessions, then wait for texts. Raises as ``ServedModel.open``."""
        ids, needs, sampling = prepared.ids, len(prepared.ids) + prepared.max_new_tokens, prepared.sampling
        if (found := self.idle.take(ids, needs, sampling)) is not None:
            return found
        room = needs
        if prepared.grows:
            room = max(needs, min(self.context or CONVERSATION_POSITIONS, CONVERSATION_POSITIONS))
        while True:
            try:
                session = await self._served.open(positions=room, sampling=sampling, sample_from=len(ids))
            except (ResourceError, Refused) as problem:
                if isinstance(problem, Refused) and problem.code != RefusalCode.BUSY:
                    raise
                if room > needs:
                    room = needs
                elif not await self.idle.free_memory(timeout_s=self._wait_s):
                    await self._end_of_a_text(problem)
            else:
                return OpenedSession(session, room, sampling), 0

    async def _end_of_a_text(self, problem: P2PTrainError) -> None:
        """Wait until a text ends, for its memory. Raises ``problem``: there is none. ``Refused``: it takes too long."""
        if not self._texts:
            raise problem
        self._ended.clear()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._ended.wait()
        except TimeoutError:
            text = f"the model is busy: {len(self._texts)} texts use its memory"
            raise Refused(RefusalCode.BUSY, text, remedy="try again later, or ask for fewer tokens") from problem


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
