"""The ``TextService`` over a model of this process or of its workers.

A ``TextSession`` is one text under way: it has its passes computed in order, and yields pieces of text as they come.
While the pieces are not read, the next pass waits. So a slow reader delays only its own text, and memory stays bounded.
The model finds what it computed for texts that begin alike, such as the turns before in a conversation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from p2ptrain.compute.text import ASSISTANT, SYSTEM, TOOL, USER, ChatFormat, Conversation, ModelText, TextWriter, Turn
from p2ptrain.core.background import Background
from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, UserError
from p2ptrain.core.serving import Sampling, TokenLogprob, token_logprobs
from p2ptrain.core.world import World
from roles.pass_queue import SHARED_CHUNK
from roles.serving.constraints import Constraint, Submit, TokenTable
from roles.serving.model import Decoding, ModelSession, PassOutcome, PassRequest, PassResult, ServedModel
from roles.serving.text_stats import DrafterFacts, RecentPace, TextStats, TextSums, sums_of
from roles.serving.texts import TextPiece, TextRequest, Writing, report_defect
from wire.chain_messages import MAX_REQUEST_POSITIONS

MOST_PIECES = 64
"""Unread pieces after which the next pass waits."""
READER_S = 120.0
"""A text whose reader takes nothing for so long is ended."""


class DraftSource(Protocol):
    """Drafts for one text, from drafters that come and go. Only ``next_drafts`` waits; nothing raises."""

    async def next_drafts(self, answer: asyncio.Future[PassResult] | None) -> Sequence[int] | None:
        """The drafts for the next pass; None: ``answer``, of the oldest pass under way, is there. Waits for drafts as
        long as that saves time, and until ``close`` at most."""

    def end_pass(self, outcome: PassOutcome) -> None:
        """The model has computed a pass, and the text has grown."""

    def facts(self) -> list[DrafterFacts]:
        """Facts of the drafters that were ready in this text."""

    def close(self) -> None:
        """No more drafts are wanted. May be called twice."""


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A request as token ids and numbers."""

    ids: list[int]
    max_new_tokens: int
    left_out: int
    writer: TextWriter
    sampling: Sampling
    constraint: Constraint | None

    @property
    def positions(self) -> int:
        return len(self.ids) + self.max_new_tokens


class TextSession(Writing):
    """A text that a model writes here.

    Args:
        session: of the model.
        submit: runs a function on a thread.
        on_end: called once, when no pass is under way any more.
    """

    def __init__(
        self,
        session: ModelSession,
        decoding: Decoding,
        prepared: PreparedText,
        stats: TextStats,
        *,
        submit: Submit,
        now: Callable[[], float],
        on_end: Callable[[TextSession], None],
    ) -> None:
        super().__init__(decoding.prompt_tokens, prepared.left_out, decoding.ids)
        self.decoding = decoding
        self._session, self._writer, self._constraint = session, prepared.writer, prepared.constraint
        self._now, self._on_end, self._submit = now, on_end, submit
        self._stats = stats
        self._drafts: DraftSource | None = None
        self._taken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._answers: deque[tuple[float, asyncio.Task[PassResult]]] = deque()  # when each pass was due

    def begin(self, drafts: DraftSource | None) -> None:
        """Start computing. ``drafts``: None: the model writes alone."""
        self._drafts = drafts
        self._task = Background().start(self._write(), "text")

    # ----------------------------------------------------------------------------------------------------- for readers

    async def __anext__(self) -> TextPiece:
        piece = await super().__anext__()
        self._taken.set()
        return piece

    def stats(self) -> dict[str, Any]:
        return self._stats.as_map(self._now(), self._facts())

    def sums(self) -> TextSums:
        return sums_of(self.decoding.stats, self._stats.spent_s, self._facts())

    async def end(self, error: P2PTrainError) -> None:
        """Close with an error for the reader. Never raises."""
        if not self._is_over():
            self._error = error
        await self.close()

    async def close(self) -> None:
        task = self._task
        if task is None or task.done():
            return
        self._pieces.clear()
        self._finish("cancelled")
        task.cancel()
        await asyncio.wait({task})

    # ---------------------------------------------------------------------------------------------------------- passes

    def _is_over(self) -> bool:
        return bool(self.ended) or self._error is not None

    async def _write(self) -> None:
        try:
            while not self._is_over():
                if self.decoding.ended:
                    self._finish(self.decoding.ended)
                elif (request := await self._next_pass()) is not None:
                    due = self._now()
                    await self._room_for_pieces()
                    if not self._is_over():
                        self._answers.append((due, asyncio.create_task(self._session.append(request), name="pass")))
                else:
                    await self._take_answer()
        except P2PTrainError as error:
            self._fail(error)
        except Exception as mistake:  # a defect of this program: the reader gets the error  # noqa: BLE001
            self._fail(report_defect(mistake))
        finally:
            self._leave()

    async def _next_pass(self) -> PassRequest | None:
        """The pass that begins now; None: the oldest one under way ends first."""
        decoding, drafts = self.decoding, self._drafts
        found: Sequence[int] | None = ()
        if drafts is not None and decoding.may_begin:
            found = await drafts.next_drafts(self._answers[0][1] if self._answers else None)
        elif not decoding.may_begin or decoding.needs_drafts:
            found = None
        if found is None:
            return None
        # A model of this process cuts the prompt into chunks itself. A chain computes several chunks at a time.
        chunk = MAX_REQUEST_POSITIONS if self._session.most_passes == 1 else SHARED_CHUNK
        request = decoding.next_pass(found, chunk=chunk)
        if self._constraint is None or not request.samples:
            return request
        masks = self._constraint.next_masks(decoding.assumed, request.samples, self._submit, self._now)
        return replace(request, masks=await masks)

    async def _take_answer(self) -> None:
        due, answer = self._answers[0]
        result = await answer
        self._answers.popleft()
        if self._is_over():
            return
        now = self._now()
        outcome = self.decoding.take_samples(result.tokens, result.took_s, now, result.busy_s)
        self._stats.add_pass(now - due, result.took_s, prefill=outcome.prefill)
        scored = token_logprobs(outcome.scored or result.tokens, result.scores, result.tops) if result.scores else []
        if outcome.scored:
            self.prompt_logprobs += scored
        count = len(outcome.tokens) if self._constraint is None else self._constraint.accept(outcome.tokens)
        self._add_piece(outcome.tokens[:count], scored)
        if self._drafts is not None:
            self._drafts.end_pass(outcome)
        if self._constraint is not None and self._constraint.is_over:
            self._finish("end")
        if self._writer.ended == "stop" or self.decoding.ended:  # the core does not know stop strings
            self._finish({"stop": "end"}.get(self.decoding.ended, self.decoding.ended))

    async def _room_for_pieces(self) -> None:
        """Wait for the reader while there are many pieces. Raises ``DeadlineExceeded``: it takes none."""
        while len(self._pieces) >= MOST_PIECES and not self._is_over():
            self._taken.clear()
            try:
                async with asyncio.timeout(READER_S):
                    await self._taken.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"the client read none of the text for {READER_S:g} s") from None

    def _add_piece(self, tokens: Sequence[int], scored: Sequence[TokenLogprob]) -> None:
        if not tokens:
            return
        text, taken = "", 0
        for token in tokens:
            if self._writer.ended:
                break
            text += self._writer.take(token)
            taken += 1
        self._stats.add_tokens(taken, self._now())
        self._pieces.append(TextPiece(text, tuple(tokens[:taken]), tuple(scored[:taken])))
        self._news.set()

    def _finish(self, ended: str) -> None:
        if not self._is_over():
            if rest := self._writer.finish():
                self._pieces.append(TextPiece(rest, ()))
            self.ended = "stop" if self._writer.ended == "stop" else ended
            self.stop_reason = self._writer.stop_reason
        self._stop_waiting()

    def _fail(self, error: P2PTrainError) -> None:
        self._error = self._error or error
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._stats.end(self._now())
        self._news.set()
        self._taken.set()
        if self._drafts is not None:
            self._drafts.close()

    def _leave(self) -> None:
        for _, answer in self._answers:
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # so that asyncio does not warn
            answer.cancel()
        self.ended = self.ended or ("" if self._error is not None else "cancelled")
        self._stop_waiting()
        self._on_end(self)

    def _facts(self) -> list[DrafterFacts]:
        return self._drafts.facts() if self._drafts is not None else []


CONVERSATION_POSITIONS = 4096
"""Length of a conversation if neither the model's context nor the request limits it."""
WAIT_S = 60.0
"""Time for which a text waits for its turn."""

_ROLES = (SYSTEM, USER, ASSISTANT, TOOL)


class ModelTextService:
    """A ``TextService``. It begins each text at once: whoever asks limits the number of texts.

    Args:
        model: the model to write with. It stays open when the service is closed.
        text: the model's tokenizer and settings; its context is set to the largest length of a session here.
        form: format of conversations; None: read with the first conversation.
        name: of the model, for people and programs. created: Unix time of its files.
        positions: largest length of a text, prompt included; 0: the model's context.
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
    ) -> None:
        self.model, self.created = name, created
        limits = [limit for limit in (text.context, model.context, positions) if limit]
        self.context: int | None = min(limits, default=None)
        text.context = self.context
        self._closing = Background()
        self._served, self._text, self._form = model, text, form
        self._now = world.clock.now
        self._thread = world.threads.start("text")  # tokenizing a long prompt takes a second
        self._texts: set[TextSession] = set()
        self._pace = RecentPace()
        self._table = TokenTable(text.tokenizer, model.vocab_size)

    async def write(self, request: TextRequest) -> TextSession:
        session, _ = await self.prepare(request, self._now())
        session.begin(None)
        return session

    async def prepare(
        self, request: TextRequest, asked_at: float, on_end: Callable[[TextSession], None] = lambda session: None
    ) -> tuple[TextSession, PreparedText]:
        """Make a text and the model's session for it. The caller begins the text at once. Raises as ``write``."""
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
            self._texts.discard(session)
            self._closing.start(opened.close(), "close a session")
            on_end(session)

        stats = TextStats(
            decoding.stats,
            began_at=asked_at,
            prompt_tokens=len(prepared.ids),
            cached_tokens=opened.cached,
            pace=self._pace,
        )
        session = TextSession(opened, decoding, prepared, stats, submit=self._thread.submit, now=self._now, on_end=end)
        session.prompt_logprobs = [None] if request.prompt_logprobs else []
        self._texts.add(session)
        return session, prepared

    async def close(self, reason: P2PTrainError | None = None) -> None:
        """End all texts, with ``reason`` for their readers. Never raises."""
        ending = [session.end(reason) if reason is not None else session.close() for session in list(self._texts)]
        await asyncio.gather(*ending)
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
