"""One text under way, with a model of this process or of its workers.

A ``TextSession`` has its passes computed in order, and yields pieces of text as they come. While the pieces are not
read, the next pass waits. So a slow reader delays only its own text, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from p2ptrain.compute.text import TextWriter
from p2ptrain.core.background import Background
from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError
from p2ptrain.core.serving import Sampling, TokenLogprob, token_logprobs
from roles.pass_queue import SHARED_CHUNK
from roles.serving.constraints import Constraint, Submit
from roles.serving.model import Decoding, ModelSession, PassOutcome, PassRequest, PassResult
from roles.serving.text_stats import DrafterFacts, TextStats, TextSums
from roles.serving.texts import TextPiece, Writing, report_defect
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
        return self._stats.sums(self._facts())

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
