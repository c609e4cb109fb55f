"""A target whose whole model is in this process: one part with all layers, on one compute thread.

Its sessions take turns, one pass each, in the order in which they ask. A drafter's model is one of these, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.core.activations import IDS, encode_ids
from p2ptrain.core.errors import P2PTrainError, Refused, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.serving import Sampling
from p2ptrain.core.texts import human_bytes
from p2ptrain.core.world import Clock
from roles.chain.session import CHUNK
from roles.compute_thread import ComputeThread
from roles.engine import StageEngine
from roles.verifier.target import Passed
from wire.handshake import RefusalCode

T = TypeVar("T")

MAX_SESSIONS = 64
_CLOSE_REMEDY = "try again when other texts are finished"

OnBytes = Callable[[int, int], None]
"""Told of (bytes placed, bytes in all)."""


class WholeTarget:
    """See the module's docstring, and ``roles.verifier.target.Target``.

    Args:
        engine: of all layers. compute: the thread on which it was made; it ends with this target.
        context: positions that the model knows; None: nobody says.
        max_sessions: at a time.
        cache_bytes: of all sessions together; 0: what the engine finds free.
    """

    def __init__(
        self,
        engine: StageEngine,
        compute: ComputeThread,
        clock: Clock,
        *,
        label: str,
        context: int | None = None,
        max_sessions: int = MAX_SESSIONS,
        cache_bytes: int = 0,
    ) -> None:
        self.vocab_size, self.context, self.label = engine.vocab_size, context, label
        self._engine, self._compute, self._clock = engine, compute, clock
        self._max_sessions, self._cache_bytes = max_sessions, cache_bytes
        self._promised: dict[str, int] = {}  # by session, of its cache; until the engine has let it go
        self._sessions: set[WholeSession] = set()
        self._turn = asyncio.Lock()  # who waits for it is served in order
        self._closed = False

    async def open(self, *, positions: int, sampling: Sampling) -> WholeSession:
        """Begin a session of at most so many positions; its cache is allocated now.

        Raises:
            UserError: the model knows fewer positions, or the memory for caches is smaller than this one.
            Refused: too many sessions are open, or their caches leave too little.
            ResourceError: there is too little memory.
        """
        name, need_bytes = new_id(), positions * self._engine.cache_position_bytes
        self._check(positions, need_bytes)
        self._promised[name] = need_bytes
        try:
            await self._in_turn(partial(self._engine.open, name, positions=positions, sampling=sampling))
        except BaseException:
            await self.forget(name)  # it may be open by now, where the caller was cancelled
            raise
        session = WholeSession(self, name)
        self._sessions.add(session)
        return session

    def facts(self) -> dict[str, Any]:
        spec = self._engine.spec
        return {
            "kind": "whole",
            "device": self._engine.device,
            "dtype": self._engine.encoding,
            "layers": spec.layers,
            "weights_bytes": self._engine.weights_bytes,
            "cache_position_bytes": self._engine.cache_position_bytes,
            "cache_bytes": sum(self._promised.values()),
            "sessions": len(self._promised),
        }

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        self._compute.close()

    # ------------------------------------------------------------------------------------------------ for its sessions

    async def run(self, name: str, *, keep: int, ids: Sequence[int], picks: int, draw: int) -> Passed:
        """As of ``TargetSession``."""
        if not 0 < len(ids) <= CHUNK:
            raise ValueError(f"a pass has 1 to {CHUNK} positions, not {len(ids)}")
        work = partial(
            self._engine.run,
            name,
            keep=keep,
            payload=memoryview(encode_ids(ids)),
            count=len(ids),
            encoding=IDS,
            out_encoding=self._engine.encoding,
            picks=picks,
            draw=draw,
        )
        ran, took_s = await self._in_turn(work)
        return Passed(ran.tokens, took_s)

    async def forget(self, name: str) -> None:
        """Close a session behind what is under way. Never raises."""
        closing = asyncio.ensure_future(self._in_turn(partial(self._engine.close, name)))
        closing.add_done_callback(lambda done: self._forgotten(name, done))
        await asyncio.wait([closing])

    def drop(self, session: WholeSession) -> None:
        """It is closed."""
        self._sessions.discard(session)

    # ------------------------------------------------------------------------------------------------------- internals

    def _check(self, positions: int, need_bytes: int) -> None:
        """``beside_bytes``: of those needed, for what is no position."""
        if self._closed:
            raise Refused(RefusalCode.SHUTTING_DOWN, f"{self.label} is being let go", remedy="try again later")
        if positions < 1:
            raise UserError(f"a session of {positions} positions", remedy="ask for at least one")
        if self.context is not None and positions > self.context:
            raise UserError(
                f"{positions} positions are more than the model's context of {self.context}",
                remedy=f"ask for at most {self.context}, prompt and new tokens together",
            )
        if self._cache_bytes and need_bytes > self._cache_bytes:
            most = self._cache_bytes // max(1, self._engine.cache_position_bytes)
            raise UserError(
                f"a session of {positions} positions takes {human_bytes(need_bytes)}, and sessions may take "
                f"{human_bytes(self._cache_bytes)}",
                remedy=(f"ask for at most {most} positions, or " if most > 0 else "") + "give the verifier more memory",
            )
        if len(self._promised) >= self._max_sessions:
            raise Refused(RefusalCode.BUSY, f"{self._max_sessions} sessions are open", remedy=_CLOSE_REMEDY)
        if self._cache_bytes and sum(self._promised.values()) + need_bytes > self._cache_bytes:
            text = f"other sessions leave too little of {human_bytes(self._cache_bytes)} for {positions} positions"
            raise Refused(RefusalCode.BUSY, text, remedy=_CLOSE_REMEDY)

    async def _in_turn(self, call: Callable[[], T]) -> tuple[T, float]:
        """What ``call`` gives on the compute thread, and the seconds that it had it. The turn lasts until the call is
        over, whether anybody still waits for it or not: else the next one's seconds would count what is left of it."""
        await self._turn.acquire()
        began, ended = self._clock.now(), 0.0

        def over(done: asyncio.Future[T]) -> None:
            nonlocal ended
            ended = self._clock.now()
            self._turn.release()
            if not done.cancelled():
                done.exception()  # asked for, so that nobody misses it where the caller was cancelled

        future = self._compute.submit(call)
        future.add_done_callback(over)
        result = await asyncio.shield(future)
        return result, ended - began

    def _forgotten(self, name: str, done: asyncio.Future[Any]) -> None:
        self._promised.pop(name, None)
        if not done.cancelled():
            done.exception()


class WholeSession:
    """A session of a ``WholeTarget``, which makes it; see ``roles.verifier.target.TargetSession``."""

    def __init__(self, target: WholeTarget, name: str) -> None:
        self._target, self._name = target, name
        self._running = self._closed = False

    @property
    def lost(self) -> bool:
        return False  # nothing fails but a pass, and who asked for it is told

    async def run(self, *, keep: int, ids: Sequence[int], picks: int, draw: int, prefill: bool) -> Passed:
        """See ``TargetSession``; ``prefill`` makes no difference here."""
        return await self._alone(self._target.run(self._name, keep=keep, ids=ids, picks=picks, draw=draw))

    async def _alone(self, work: Coroutine[Any, Any, T]) -> T:
        if self._running or self._closed:
            work.close()
            raise RuntimeError("a session that is closed, or runs already, was given a pass")
        self._running = True
        done = await work
        self._running = False  # not where it failed or was cancelled: then it is only to be closed
        return done

    async def close(self) -> None:
        """Forget it, behind a pass that is under way. Never raises."""
        if self._closed:
            return
        self._closed = True
        self._target.drop(self)
        await self._target.forget(self._name)


async def load_whole_target(
    directory: Path,
    compute: ComputeThread,
    clock: Clock,
    *,
    device: str = "auto",
    dtype: str = "",
    on_bytes: OnBytes = lambda done_bytes, total_bytes: None,
    max_sessions: int = MAX_SESSIONS,
    cache_bytes: int = 0,
) -> WholeTarget:
    """The model in ``directory`` as a target. Cancelling it ends the loading at the next piece.

    Args:
        compute: the thread on which it computes from now on; the caller's where this fails, else the target's.
        device, dtype: as of ``compute.whole_part.load_whole``.
        on_bytes: called in the event loop.
        max_sessions, cache_bytes: as of ``WholeTarget``.

    Raises:
        ConfigError, StorageError, UserError, ResourceError: as ``compute.whole_part.load_whole``.
    """
    engine, context = await load_whole_engine(directory, compute, device=device, dtype=dtype, on_bytes=on_bytes)
    return WholeTarget(
        engine,
        compute,
        clock,
        label=directory.name,
        context=context,
        max_sessions=max_sessions,
        cache_bytes=cache_bytes,
    )


async def load_whole_engine(
    directory: Path,
    compute: ComputeThread,
    *,
    device: str = "auto",
    dtype: str = "",
    on_bytes: OnBytes = lambda done_bytes, total_bytes: None,
) -> tuple[StageEngine, int | None]:
    """The model's engine, and its context. As ``load_whole_target``, whose ``compute`` stays the caller's."""
    loop, unwanted = asyncio.get_running_loop(), threading.Event()

    def told(done_bytes: int, total_bytes: int) -> None:
        if unwanted.is_set():
            raise P2PTrainError(f"the loading of {directory} was cancelled")
        loop.call_soon_threadsafe(on_bytes, done_bytes, total_bytes)

    def load() -> tuple[StageEngine, int | None]:
        from p2ptrain.compute.served_part import load_whole  # here: torch takes seconds

        part = load_whole(directory, device=device, dtype=dtype, on_bytes=told)
        return part, part.context

    try:
        return await compute.run(load)
    except asyncio.CancelledError:
        unwanted.set()
        raise
