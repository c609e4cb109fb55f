"""One text under way: carries out the instructions of the session's core, and yields pieces of text as they come.

The core decides what the target computes, one pass at a time. Events of drafters reach the core at once. While the
pieces are not read, the next pass waits. So a slow reader delays only its own text, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from p2ptrain.compute.text import TextWriter
from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError
from p2ptrain.core.serving import Sampling
from roles.background import Background
from roles.drafter import events as ev
from roles.serving.local_model import TargetSession
from roles.serving.text_stats import Sums, WritingStats, sums_of
from roles.serving.texts import Piece, Pieces, failed
from roles.verifier.cost_model import MOST_DRAFTS, CostModel
from roles.verifier.drafter_link import DrafterFacts, Opening
from roles.verifier.drafters import Drafters, SessionDrafters
from roles.verifier.speculation import Verifying

MOST_PIECES = 64
"""Unread pieces after which the next pass waits."""
PATIENCE_S = 2.0
"""Time for a pass under way to end after a cancel: then its session can be used again."""
READER_S = 120.0
"""A text whose reader takes nothing for so long is ended."""


class TextSession(Pieces):
    """A ``Writing``.

    Args:
        prompt: ids of the prompt. cached: the first so many of them are in the target's session already.
        model, most_drafts: as of ``Verifying``.
        on_end: called once, when no pass is under way any more, with whether the target's session can be used again.
    """

    def __init__(
        self,
        target: TargetSession,
        writer: TextWriter,
        prompt: Sequence[int],
        *,
        cached: int,
        max_new_tokens: int,
        vocab_size: int,
        left_out: int,
        now: Callable[[], float],
        on_end: Callable[[TextSession, bool], None],
        model: CostModel | None = None,
        most_drafts: int = MOST_DRAFTS,
    ) -> None:
        super().__init__()
        self.prompt_tokens, self.left_out = len(prompt), left_out
        self.core = Verifying(
            prompt,
            max_new_tokens=max_new_tokens,
            stop_ids=writer.end_tokens,
            vocab_size=vocab_size,
            cached=cached,
            model=model,
            most_drafts=most_drafts,
        )
        self._target, self._writer, self._now, self._on_end = target, writer, now, on_end
        self._stats = WritingStats(self.core.stats, began_at=now(), prompt_tokens=len(prompt), cached_tokens=cached)
        self._drafting: SessionDrafters | None = None
        self._pending: deque[ev.VerifierEvent] = deque()
        self._handling = False
        self._run: ev.Run | None = None  # requested by the core
        self._taken, self._asked = asyncio.Event(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Background()
        self._under_way = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, drafters: Drafters | None, *, positions: int, sampling: Sampling) -> None:
        """Start computing. ``drafters``: None: the model writes alone. ``positions``: largest length of the session."""
        assert self._task is None
        if drafters is not None:
            opening = Opening(self.core.history, self.prompt_tokens, positions, sampling, self.core.opening_depth)
            self._drafting = drafters.open(opening, self.event)
        self._task = self._tasks.start(self._compute(), "text")
        self.event(ev.Signal.BEGAN)

    # ----------------------------------------------------------------------------------------------------- for readers

    async def __anext__(self) -> Piece:
        piece = await super().__anext__()
        self._taken.set()
        return piece

    def stats(self) -> dict[str, Any]:
        return self._stats.as_map(self._now(), self._facts())

    def sums(self) -> Sums:
        return sums_of(self.core.stats, self._stats.spent_s, self._facts())

    async def end(self, error: P2PTrainError) -> None:
        """Close with an error for the reader. Never raises."""
        if not self._over:
            self._error = error
        await self.close()

    async def close(self) -> None:
        task = self._task
        if task is None or task.done():
            return
        self._pieces.clear()
        self.event(ev.Signal.CANCEL)
        self._taken.set()
        impatient = asyncio.get_running_loop().call_later(PATIENCE_S, task.cancel)
        task.add_done_callback(lambda _: impatient.cancel())
        await asyncio.wait({task})

    # -------------------------------------------------------------------------------------------------------- the core

    def event(self, event: ev.VerifierEvent) -> None:
        self._pending.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._pending:
                for instruction in self.core.handle(self._pending.popleft(), self._now()):
                    self._carry_out(instruction)
        except Exception as mistake:  # a defect of this program: the reader must not wait  # noqa: BLE001
            self._fail(failed(mistake))
        finally:
            self._handling = False
        self._set_timer()

    def _carry_out(self, instruction: ev.VerifierInstruction) -> None:
        match instruction:
            case ev.Run():
                self._stats.asked(self._now())
                self._run = instruction
                self._asked.set()
            case ev.SendVerdict() if self._drafting is not None:
                self._drafting.tell(instruction)
            case ev.Drop(reason) if self._drafting is not None:
                self._drafting.drop(reason)
            case ev.Give(tokens):
                self._give(tokens)
            case ev.Finished(reason):
                self._finish(reason)

    def _give(self, tokens: Sequence[int]) -> None:
        text, taken = "", 0
        for token in tokens:
            if self._writer.ended:
                break
            text += self._writer.take(token)
            taken += 1
        self._stats.given(taken, self._now())
        self._pieces.append(Piece(text, tuple(tokens[:taken])))
        self._news.set()
        if self._writer.ended == "stop":
            self._pending.append(ev.Signal.CANCEL)  # a stop string, which the core does not know

    def _finish(self, reason: str) -> None:
        if rest := self._writer.finish():
            self._pieces.append(Piece(rest, ()))
        ended = {"stop": "end"}.get(reason, reason)
        self.ended = "stop" if self._writer.ended == "stop" else ended
        self._stats.ended(self._now())
        self._news.set()
        self._asked.set()

    def _facts(self) -> list[DrafterFacts]:
        return self._drafting.facts(self.core.right) if self._drafting is not None else []

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.core.next_deadline()
        if due is not None and not self._over:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self.event, ev.Signal.TICK)

    # ------------------------------------------------------------------------------------------------------ the target

    @property
    def _over(self) -> bool:
        return bool(self.ended) or self._error is not None

    async def _compute(self) -> None:
        try:
            while (run := await self._next_run()) is not None:
                self._under_way = True
                passed = await self._target.run(
                    keep=run.keep, ids=run.ids, samples=run.samples, sample_index=run.sample_index, prefill=run.prefill
                )
                self._under_way = False
                self._stats.passed(self._now(), passed.took_s, prefill=run.prefill)
                self.event(ev.PassDone(passed.tokens, passed.took_s))
        except P2PTrainError as error:
            self._fail(error)
        except Exception as mistake:  # a defect of this program: the reader gets the error  # noqa: BLE001
            self._fail(failed(mistake))
        finally:
            self._leave()

    def _leave(self) -> None:
        clean = self._error is None and not self._under_way
        self.ended = self.ended or ("" if self._error is not None else "cancelled")
        if self._timer is not None:
            self._timer.cancel()
        if self._drafting is not None:
            self._drafting.close()
        self._news.set()
        self.core.leave(self._now())
        self._on_end(self, clean and bool(self.core.tokens))

    async def _next_run(self) -> ev.Run | None:
        """The next run, once there is room for its tokens; None: the text has ended.

        Raises:
            DeadlineExceeded: the pieces are not read.
        """
        while not self._over:
            if self._run is None:
                self._asked.clear()
                await self._asked.wait()  # the core ends this wait: it has a pass or a deadline
            elif len(self._pieces) >= MOST_PIECES:
                self._taken.clear()
                try:
                    async with asyncio.timeout(READER_S):
                        await self._taken.wait()
                except TimeoutError:
                    raise DeadlineExceeded(f"the client read none of the text for {READER_S:g} s") from None
            else:
                run, self._run = self._run, None
                return run
        return None

    def _fail(self, error: P2PTrainError) -> None:
        self._error = self._error or error
        self._stats.ended(self._now())
        self._news.set()
        self._asked.set()
