"""A whole model in this process, on one compute thread.

The passes of all sessions wait in a ``PassQueue``. Whenever the thread is free, one call of the engine computes what
waits then: a pass of each session that writes, and beside them ``SHARED_CHUNK`` positions of prompts at most, so that
the time between two tokens of a text stays bounded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from p2ptrain.compute import first_import
from p2ptrain.core.activations import IDS, encode_ids
from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, Refused, ResourceError
from p2ptrain.core.serving import (
    BLOCK_POSITIONS,
    HashedIds,
    Pass,
    Preempted,
    Ran,
    Sampling,
    check_positions,
    hash_blocks,
    round_to_blocks,
)
from p2ptrain.core.world import Clock
from roles.compute_thread import ComputeThread
from roles.engine import StageEngine
from roles.pass_queue import SHARED_CHUNK, PassQueue
from roles.serving.model import PassRequest, PassResult
from roles.timed_model import load_timed_model
from wire.chain_messages import MAX_REQUEST_POSITIONS
from wire.messages import RefusalCode

CLOSE_REMEDY = "try again when other texts are finished"
ASKING_TURNS = 8
"""Turns of the event loop after a batch, in which the texts that were answered ask for their next pass. So they stay in
one batch."""


class LocalModel:
    """A ``ServedModel`` on one compute thread, which computes a pass of each of its sessions at a time.

    Args:
        engine: engine of all layers. compute: the thread on which it was made; other models may use it, too.
        max_sessions: most sessions at a time; 0: any number.
        cache_bytes: memory for all sessions' caches together. Sessions may be opened for more: if memory runs out,
            those that were opened last lose theirs, wait, and are computed again. 0: as much as open sessions need,
            and at least for ``usual_positions``, if there is so much.

    Attributes:
        sessions: open ones, in the order of their opening.
        preemptions: how often a session lost its memory to older ones.
    """

    def __init__(
        self,
        engine: StageEngine,
        compute: ComputeThread,
        clock: Clock,
        *,
        context: int | None = None,
        max_sessions: int = 64,
        cache_bytes: int = 0,
        usual_positions: int = 0,
    ) -> None:
        self.vocab_size, self.context, self.dtype = engine.vocab_size, context, engine.encoding
        self.engine, self._compute, self._clock = engine, compute, clock
        self.sessions: list[LocalSession] = []
        self.preemptions = 0
        self._max_sessions, self._usual_positions = max_sessions, usual_positions
        position_bytes = engine.cache_position_bytes  # 0: unknown
        self._most_positions = max(1, cache_bytes // position_bytes) if cache_bytes and position_bytes else 0
        self._opened = 0  # sessions, closed ones too
        self._queue: PassQueue[LocalSession] = PassQueue()
        self._wake = asyncio.Event()
        self._tasks = Background(self._fail_all)
        self._closed = False

    async def open(
        self,
        *,
        positions: int,
        sampling: Sampling,
        sample_from: int,
        ids: Sequence[int] = (),
        priority: int = 0,
        adapter: str = "",
    ) -> LocalSession:
        """As ``ServedModel.open``. ``adapter``: as of ``StageEngine.open``."""
        self._check(positions)
        if not self._tasks:  # the first session, or the first one after a defect
            self._tasks.start(self._compute_batches(), "batches")
        self._opened += 1
        session = LocalSession(self, f"session {self._opened}", positions, sample_from, priority)
        self.sessions.append(session)
        opened_positions = sum(round_to_blocks(each.positions) for each in self.sessions)

        def open_in_engine() -> int:
            self._reserve(positions, opened_positions)
            hashes = hash_blocks(ids[:-1])  # the last position is always computed
            return self.engine.open(
                session.name, positions=positions, sampling=sampling, block_hashes=hashes, adapter=adapter
            )

        try:
            session.take_over(ids, await asyncio.shield(self._compute.submit(open_in_engine)))
        except BaseException:
            await session.close()  # after a cancel the engine may have it
            raise
        return session

    def _reserve(self, positions: int, opened_positions: int) -> None:
        if self._most_positions:
            self.engine.reserve(self._most_positions)
            return
        try:
            self.engine.reserve(max(self._usual_positions, opened_positions))
        except ResourceError:  # then sessions share what there is
            self.engine.reserve(positions)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.gather(*(session.close() for session in list(self.sessions)))
            await self._tasks.stop()

    # ------------------------------------------------------------------------------------------------- for its sessions

    def wait_with(self, session: LocalSession) -> None:
        """Let the session's pass, if it has one, wait for a batch."""
        if session.waiting is not None:
            positions, prefill = session.next_turn()
            self._queue.add(session, positions, prefill=prefill, priority=session.priority)
            self._wake.set()

    def drop_turn(self, session: LocalSession) -> None:
        self._queue.drop(session)

    async def forget(self, session: LocalSession) -> None:
        """Close a session after the batch under way. Never raises."""
        self._queue.drop(session)
        await asyncio.wait([self._compute.submit(self.engine.close, session.name)])
        if session in self.sessions:
            self.sessions.remove(session)
            self._wake.set()  # others may have room now

    # --------------------------------------------------------------------------------------------------------- batches

    async def _compute_batches(self) -> None:
        while True:
            most = SHARED_CHUNK if any(session.is_writing for session in self.sessions) else MAX_REQUEST_POSITIONS
            self._admit()
            turns = 0 if self.engine.is_batched else 1
            batch = self._queue.take(lambda session: session.admitted, most_sessions=turns, most_prompt_positions=most)
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            passes = {session.name: session.begin_pass(most) for session in batch}
            began = self._clock.now()
            ran: dict[str, Ran | P2PTrainError]
            try:
                ran = await self._compute.run(self.engine.run, passes)
            except P2PTrainError as error:
                ran = dict.fromkeys(passes, error)
            took_s = self._clock.now() - began
            for session in batch:
                work, result = passes[session.name], ran[session.name]
                if isinstance(result, Preempted):
                    session.restart()
                    self.preemptions += 1
                else:
                    session.end_pass(work, result, took_s)
                self.wait_with(session)
            for _ in range(ASKING_TURNS):
                if all(session in self._queue or session.closed for session in batch):
                    break
                await asyncio.sleep(0)

    def _admit(self) -> None:
        """Let sessions without memory begin, the oldest first, while there is room for their first pass, and for what
        the others will need soon."""
        begun = [session for session in self.sessions if session.admitted]
        room = self.engine.free_positions - sum(session.needs_positions for session in begun)
        for session in self.sessions:
            if session.admitted or session not in self._queue:
                continue
            if begun and session.needs_positions > room:
                return
            session.admitted = True
            begun.append(session)
            room -= session.needs_positions

    def _fail_all(self, error: BaseException) -> None:
        failure = ResourceError(f"the model's queue failed: {type(error).__name__}: {error}")
        for session in self.sessions:
            session.fail(failure)

    def _check(self, positions: int) -> None:
        if self._closed:
            raise Refused(RefusalCode.SHUTTING_DOWN, "the model is being released", remedy="try again later")
        check_positions(positions, self.context)
        if self._max_sessions and len(self.sessions) >= self._max_sessions:
            raise Refused(RefusalCode.BUSY, f"{self._max_sessions} sessions are open", remedy=CLOSE_REMEDY)


@dataclass(eq=False, slots=True)
class WaitingPass:
    """A pass that is not answered yet. ``took_s``: time of the batches that computed it so far."""

    request: PassRequest
    answer: asyncio.Future[PassResult]
    took_s: float = 0.0


class LocalSession:
    """A ``ModelSession``.

    Attributes:
        name: in the engine. positions, priority: as of ``ServedModel.open``.
        waiting: its pass, until that is answered.
        ids: the history with the positions of this pass. computed: so many of its first positions are in the engine.
        cached: as of ``ModelSession``.
        admitted: there is memory for its next pass. Until then its passes wait.
    """

    most_passes = 1  # one thread computes them

    def __init__(self, model: LocalModel, name: str, positions: int, sample_from: int, priority: int) -> None:
        self.sample_from = sample_from
        self.name, self.positions, self.priority = name, positions, priority
        self.waiting: WaitingPass | None = None
        self.ids: list[int] = []
        self.computed = self.cached = 0
        self.admitted = self.closed = False
        self._model = model
        self._sent, self._is_shared = HashedIds(), False
        self._error: P2PTrainError | None = None

    async def append(self, request: PassRequest) -> PassResult:
        if self._error is not None or self.closed:
            raise RuntimeError("the session is closed, or a pass has failed")
        self.waiting = waiting = WaitingPass(request, asyncio.get_running_loop().create_future())
        self.ids[request.keep :] = request.ids
        self.computed = min(self.computed, request.keep)
        self._model.wait_with(self)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self.fail(P2PTrainError("a pass was cancelled"))
            raise

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.fail(ConnectionLost("this session was closed meanwhile", remedy="open another session"))
            await self._model.forget(self)

    # --------------------------------------------------------------------------------------------------- for its model

    @property
    def is_writing(self) -> bool:
        """Its prompt is computed, so the person who reads its text waits for each pass."""
        return self._error is None and self.computed >= self.sample_from

    @property
    def needs_positions(self) -> int:
        """Memory that it will need soon: for its next pass, and for a block after it."""
        stop = self.computed if self.waiting is None else len(self.ids)
        soon = min(round_to_blocks(stop) + BLOCK_POSITIONS, round_to_blocks(self.positions))
        return soon - round_to_blocks(self.computed)

    def take_over(self, ids: Sequence[int], cached: int) -> None:
        """Begin with the first ``cached`` positions of ``ids``, which the engine has."""
        self.ids = list(ids[:cached])
        self._sent, self._is_shared = HashedIds(self.ids), bool(ids)  # no others will begin like unknown ids
        self.computed = self.cached = cached

    def next_turn(self) -> tuple[int, bool]:
        """Positions that are to be computed for the waiting pass, and whether they are of the prompt, or were computed
        before."""
        assert self.waiting is not None
        first = max(self.sample_from, self.waiting.request.keep)
        return len(self.ids) - self.computed, self.computed < first

    def begin_pass(self, most_positions: int) -> Pass:
        """The next positions of the waiting pass: all that are left, or ``most_positions`` of them if they give no
        samples or scores."""
        assert self.waiting is not None
        request = self.waiting.request
        start, stop = self.computed, request.stop
        rows = max(request.samples, len(request.targets))
        if stop - start > most_positions and stop - rows > start:
            stop = min(start + most_positions, stop - rows)
        new = self.ids[start:stop]
        hashes = self._sent.append(start, new)
        if not self._is_shared:
            hashes = ()
        work = Pass(start, memoryview(encode_ids(new)), len(new), IDS, self._model.engine.encoding, block_hashes=hashes)
        if stop < request.stop:
            return work
        return replace(
            work,
            samples=request.samples,
            sample_index=request.sample_index(self.sample_from),
            targets=request.targets,
            tops=request.tops,
            history=encode_ids(self._sent.next_history()) if request.samples else b"",
            masks=request.masks,
        )

    def end_pass(self, work: Pass, ran: Ran | P2PTrainError, took_s: float) -> None:
        """Take the result of ``work``, whose batch took ``took_s``."""
        if self._error is not None:
            return  # closed meanwhile
        if isinstance(ran, P2PTrainError):
            self.fail(ran)
            return
        waiting = self.waiting
        assert waiting is not None
        waiting.took_s += took_s
        self.computed = work.keep + work.count
        if self.computed == waiting.request.stop:
            self.waiting = None
            if not waiting.answer.done():  # else its caller was cancelled just now
                waiting.answer.set_result(PassResult(ran.tokens, waiting.took_s, scores=ran.scores, tops=ran.tops))

    def restart(self) -> None:
        """The engine has dropped all positions: compute them again when there is room."""
        self.computed, self.admitted = 0, False

    def fail(self, error: P2PTrainError) -> None:
        self._error = self._error or error
        if self.waiting is not None and not self.waiting.answer.done():
            self.waiting.answer.set_exception(error)
        self.waiting = None
        self._model.drop_turn(self)


class AdaptedModel:
    """A ``ServedModel``: a ``LocalModel`` with an adapter, whose passes are computed together with those of the others.
    ``adapter``: as of ``StageEngine.open``."""

    preemptions = 0  # the model counts them

    def __init__(self, model: LocalModel, adapter: str) -> None:
        self.vocab_size, self.context, self.dtype = model.vocab_size, model.context, model.dtype
        self._model, self._adapter = model, adapter

    async def open(self, **asked: Any) -> LocalSession:
        return await self._model.open(**asked, adapter=self._adapter)

    async def close(self) -> None:
        """The model closes with its own ``close``."""


async def load_local_engine(
    directory: Path,
    compute: ComputeThread,
    *,
    threads: int = 0,
    device: str = "auto",
    dtype: str = "",
    weights: str = "",
    adapters: Mapping[str, Path] | None = None,
    on_bytes: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> tuple[StageEngine, int | None]:
    """``compute.served_part.load_whole`` on the thread ``compute``; returns the engine and its context. A cancel stops
    it at the next piece. ``threads``: of CPU kernels; 0: every core. ``on_bytes`` is called in the event loop."""
    loop, unwanted = asyncio.get_running_loop(), threading.Event()

    def report(done_bytes: int, total_bytes: int) -> None:
        if unwanted.is_set():
            raise P2PTrainError(f"the loading of {directory} was cancelled")
        loop.call_soon_threadsafe(on_bytes, done_bytes, total_bytes)

    def load() -> tuple[StageEngine, int | None]:
        if (timed := load_timed_model(directory)) is not None:
            return timed, timed.context
        with first_import():  # here: torch takes seconds to load
            from p2ptrain.compute.device import pick_device
            from p2ptrain.compute.served_part import load_whole
        pick_device("cpu", threads)
        part = load_whole(directory, device=device, dtype=dtype, weights=weights, adapters=adapters, on_bytes=report)
        return part, part.context

    try:
        return await compute.run(load)
    except asyncio.CancelledError:
        unwanted.set()
        raise
