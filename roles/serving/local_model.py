"""A whole model in this process, on one compute thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.compute import first_import
from p2ptrain.core.activations import IDS, encode_ids
from p2ptrain.core.errors import P2PTrainError, Refused, UserError
from p2ptrain.core.serving import Pass, Sampling, check_positions, result_of
from p2ptrain.core.texts import human_bytes
from p2ptrain.core.world import Clock
from roles.compute_thread import ComputeThread
from roles.engine import StageEngine
from roles.serving.model import PassRequest, PassResult
from roles.timed_model import load_timed_model
from wire.chain_messages import MAX_REQUEST_POSITIONS
from wire.messages import RefusalCode

T = TypeVar("T")

CLOSE_REMEDY = "try again when other texts are finished"


class LocalModel:
    """A ``ServedModel`` on one compute thread. Its sessions take turns.

    Args:
        engine: engine of all layers. compute: the thread on which it was made; it ends with this model.
        max_sessions: most sessions at a time; 0: any number.
        cache_bytes: limit of all sessions' caches together; 0: what the engine finds free.
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
    ) -> None:
        self.vocab_size, self.context, self.dtype = engine.vocab_size, context, engine.encoding
        self.engine, self._compute, self._clock = engine, compute, clock
        self._max_sessions, self._cache_bytes = max_sessions, cache_bytes
        self._opened = 0  # sessions, closed ones too
        self._promised: dict[str, int] = {}  # cache bytes by session, until the engine has closed it
        self.sessions: set[LocalSession] = set()
        self._turn = asyncio.Lock()  # the lock serves its waiters in order
        self._closed = False

    async def open(self, *, positions: int, sampling: Sampling, sample_from: int) -> LocalSession:
        """As ``ServedModel.open``. Allocates the session's cache."""
        need_bytes = positions * self.engine.cache_position_bytes
        self._check(positions, need_bytes)
        self._opened += 1
        name = f"session {self._opened}"
        self._promised[name] = need_bytes
        try:
            await self.in_turn(partial(self.engine.open, name, positions=positions, sampling=sampling))
        except BaseException:
            await self.forget(name)  # after a cancel it may be open
            raise
        session = LocalSession(self, name, sample_from)
        self.sessions.add(session)
        return session

    @property
    def promised_bytes(self) -> int:
        return sum(self._promised.values())

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.gather(*(session.close() for session in list(self.sessions)))
            self._compute.close()

    async def forget(self, name: str) -> None:
        """Close a session after the call under way. Never raises."""
        closing = asyncio.ensure_future(self.in_turn(partial(self.engine.close, name)))
        closing.add_done_callback(lambda done: self._forgotten(name, done))
        await asyncio.wait([closing])

    def _check(self, positions: int, need_bytes: int) -> None:
        if self._closed:
            raise Refused(RefusalCode.SHUTTING_DOWN, "the model is being released", remedy="try again later")
        check_positions(positions, self.context)
        if self._cache_bytes and need_bytes > self._cache_bytes:
            most = self._cache_bytes // max(1, self.engine.cache_position_bytes)
            raise UserError(
                f"a session of {positions} positions takes {human_bytes(need_bytes)}, but sessions may take only "
                f"{human_bytes(self._cache_bytes)}",
                remedy=(f"ask for at most {most} positions, or " if most > 0 else "") + "give it more memory: --memory",
            )
        if self._max_sessions and len(self._promised) >= self._max_sessions:
            raise Refused(RefusalCode.BUSY, f"{self._max_sessions} sessions are open", remedy=CLOSE_REMEDY)
        if self._cache_bytes and self.promised_bytes + need_bytes > self._cache_bytes:
            text = f"other sessions leave too little of {human_bytes(self._cache_bytes)} for {positions} positions"
            raise Refused(RefusalCode.BUSY, text, remedy=CLOSE_REMEDY)

    async def in_turn(self, call: Callable[[], T]) -> tuple[T, float]:
        """Run ``call`` on the compute thread; return its result and its duration in seconds. The turn lasts until the
        call ends, even if the caller was cancelled: else the next call's duration would include its rest."""
        await self._turn.acquire()
        began, ended = self._clock.now(), 0.0

        def over(done: asyncio.Future[T]) -> None:
            nonlocal ended
            ended = self._clock.now()
            self._turn.release()
            if not done.cancelled():
                done.exception()  # retrieved, so that asyncio does not warn after a cancel

        future = self._compute.submit(call)
        future.add_done_callback(over)
        result = await asyncio.shield(future)
        return result, ended - began

    def _forgotten(self, name: str, done: asyncio.Future[Any]) -> None:
        self._promised.pop(name, None)
        if not done.cancelled():
            done.exception()


class LocalSession:
    """A ``ModelSession``."""

    lost = False  # only a pass can fail, and its caller gets the error

    def __init__(self, model: LocalModel, name: str, sample_from: int) -> None:
        self.sample_from = sample_from
        self._model, self._name = model, name
        self._failed = self._closed = False

    async def append(self, request: PassRequest) -> PassResult:
        if self._failed or self._closed:
            raise RuntimeError("the session is closed, or a pass has failed")
        ids, engine = request.ids, self._model.engine
        if not 0 < len(ids) <= MAX_REQUEST_POSITIONS:
            raise ValueError(f"a pass has 1 to {MAX_REQUEST_POSITIONS} positions, not {len(ids)}")
        index = request.sample_index(self.sample_from)
        what = (request.samples, index, request.targets)
        work = Pass(request.keep, memoryview(encode_ids(ids)), len(ids), IDS, engine.encoding, *what)
        try:
            answers, took_s = await self._model.in_turn(partial(engine.run, {self._name: work}))
            ran = result_of(answers[self._name])
        except BaseException:
            self._failed = True  # after a cancel, too
            raise
        return PassResult(ran.tokens, took_s, scores=ran.scores)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._model.sessions.discard(self)
            await self._model.forget(self._name)


async def load_local_engine(
    directory: Path,
    compute: ComputeThread,
    *,
    device: str = "auto",
    dtype: str = "",
    on_bytes: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> tuple[StageEngine, int | None]:
    """``compute.served_part.load_whole`` on the thread ``compute``; returns the engine and its context. A cancel stops
    it at the next piece. ``on_bytes`` is called in the event loop."""
    loop, unwanted = asyncio.get_running_loop(), threading.Event()

    def report(done_bytes: int, total_bytes: int) -> None:
        if unwanted.is_set():
            raise P2PTrainError(f"the loading of {directory} was cancelled")
        loop.call_soon_threadsafe(on_bytes, done_bytes, total_bytes)

    def load() -> tuple[StageEngine, int | None]:
        if (timed := load_timed_model(directory)) is not None:
            return timed, timed.context
        with first_import():  # here: torch takes seconds to load
            from p2ptrain.compute.served_part import load_whole
        part = load_whole(directory, device=device, dtype=dtype, on_bytes=report)
        return part, part.context

    try:
        return await compute.run(load)
    except asyncio.CancelledError:
        unwanted.set()
        raise
