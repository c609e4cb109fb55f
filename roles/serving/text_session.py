"""One text under way: has its passes computed one after another, and yields pieces of text as they come.

While the pieces are not read, the next pass waits. So a slow reader delays only its own text, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from p2ptrain.compute.text import TextWriter
from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError
from roles.background import Background
from roles.serving.decoding import Decoding, PassOutcome
from roles.serving.model import ModelSession
from roles.serving.text_stats import DrafterFacts, TextStats, TextSums, sums_of
from roles.serving.texts import TextPiece, Writing, report_defect

MOST_PIECES = 64
"""Unread pieces after which the next pass waits."""
PATIENCE_S = 2.0
"""Time for a pass under way to end after a cancel: then its session can be used again."""
READER_S = 120.0
"""A text whose reader takes nothing for so long is ended."""


class DraftSource(Protocol):
    """Drafts for one text, from drafters that come and go. Only ``next_drafts`` waits; nothing raises."""

    async def next_drafts(self) -> Sequence[int]:
        """The drafts for the next pass. Waits for them as long as that saves time, and until ``close`` at most."""

    def end_pass(self, outcome: PassOutcome) -> None:
        """The model has computed a pass, and the text has grown."""

    def facts(self) -> list[DrafterFacts]:
        """Facts of the drafters that were ready in this text."""

    def close(self) -> None:
        """No more drafts are wanted. May be called twice."""


class TextSession(Writing):
    """A text that a model writes here.

    Args:
        session: of the model. It has ``cached`` positions of the prompt already.
        chunk: returns the number of positions of a prompt that a pass may have now.
        on_end: called once, when no pass is under way any more, with whether the model's session can be used again.
    """

    def __init__(
        self,
        session: ModelSession,
        decoding: Decoding,
        writer: TextWriter,
        *,
        cached: int,
        left_out: int,
        chunk: Callable[[], int],
        now: Callable[[], float],
        on_end: Callable[[TextSession, bool], None],
    ) -> None:
        super().__init__(decoding.prompt_tokens, left_out)
        self.decoding = decoding
        self._session, self._writer = session, writer
        self._chunk, self._now, self._on_end = chunk, now, on_end
        self._stats = TextStats(decoding.stats, began_at=now(), prompt_tokens=self.prompt_tokens, cached_tokens=cached)
        self._drafts: DraftSource | None = None
        self._taken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_computing = False

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
        impatient = asyncio.get_running_loop().call_later(PATIENCE_S, task.cancel)
        task.add_done_callback(lambda _: impatient.cancel())
        await asyncio.wait({task})

    # ---------------------------------------------------------------------------------------------------------- passes

    def _is_over(self) -> bool:
        return bool(self.ended) or self._error is not None

    async def _write(self) -> None:
        try:
            while not self._is_over():
                await self._compute_pass()
        except P2PTrainError as error:
            self._fail(error)
        except Exception as mistake:  # a defect of this program: the reader gets the error  # noqa: BLE001
            self._fail(report_defect(mistake))
        finally:
            self._leave()

    async def _compute_pass(self) -> None:
        drafts = await self._drafts.next_drafts() if self._drafts is not None else ()
        request = self.decoding.next_pass(drafts, chunk=self._chunk())
        asked_at = self._now()
        await self._room_for_pieces()
        if self._is_over():
            return
        self._is_computing = True
        result = await self._session.append(request)
        self._is_computing = False
        if self._is_over():
            return
        now = self._now()
        outcome = self.decoding.take_samples(result.tokens, result.took_s, now)
        self._stats.add_pass(now - asked_at, result.took_s, prefill=outcome.prefill)
        self._add_piece(outcome.tokens)
        if self._drafts is not None:
            self._drafts.end_pass(outcome)
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

    def _add_piece(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        text, taken = "", 0
        for token in tokens:
            if self._writer.ended:
                break
            text += self._writer.take(token)
            taken += 1
        self._stats.add_tokens(taken, self._now())
        self._pieces.append(TextPiece(text, tuple(tokens[:taken])))
        self._news.set()

    def _finish(self, ended: str) -> None:
        if not self._is_over():
            if rest := self._writer.finish():
                self._pieces.append(TextPiece(rest, ()))
            self.ended = "stop" if self._writer.ended == "stop" else ended
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
        is_usable = self._error is None and not self._is_computing and bool(self.decoding.tokens)
        self.ended = self.ended or ("" if self._error is not None else "cancelled")
        self._stop_waiting()
        self._on_end(self, is_usable)

    def _facts(self) -> list[DrafterFacts]:
        return self._drafts.facts() if self._drafts is not None else []
