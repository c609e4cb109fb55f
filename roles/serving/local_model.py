"""The model that a verifier owns: whole in this process (``WholeTarget``), or split over workers (``ChainTarget``)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from p2ptrain.compute import first_import
from p2ptrain.core.activations import IDS, encode_ids
from p2ptrain.core.errors import NetworkError, P2PTrainError, Refused, ResourceError, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.serving import Pass, Sampling, check_positions
from p2ptrain.core.texts import human_bytes
from p2ptrain.core.world import Clock
from roles.compute_thread import ComputeThread
from roles.engine import StageEngine
from roles.serving.chain import Chain
from roles.serving.chain_core import Submit
from roles.serving.chain_session import GenerationSession
from roles.timed_model import timed_model_in
from wire.chain_messages import CHUNK
from wire.messages import RefusalCode

T = TypeVar("T")

_CLOSE_REMEDY = "try again when other texts are finished"


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a pass: its samples, and the duration of computing it, for a chain since it was sent."""

    tokens: tuple[int, ...]
    took_s: float


class TargetSession(Protocol):
    """One history of tokens, with its cache."""

    @property
    def lost(self) -> bool:
        """The session has failed, in use or not, and can only be closed."""

    async def run(self, *, keep: int, ids: Sequence[int], samples: int, sample_index: int, prefill: bool) -> Passed:
        """Cut the history to ``keep`` positions, append up to 2048 ``ids``, and sample at the last ``samples``
        positions.

        One pass at a time. After a cancelled pass the session can only be closed.

        Raises:
            P2PTrainError: the pass failed; the session is to be closed.
        """

    async def close(self) -> None:
        """Release the session. Never raises."""


class Target(Protocol):
    """A model to write with.

    Attributes:
        vocab_size: token ids are below it.
        context: most positions; None: unknown.
        label: name for people.
    """

    vocab_size: int
    context: int | None
    label: str

    async def open(self, *, positions: int, sampling: Sampling) -> TargetSession:
        """Open a session of at most ``positions`` positions.

        Raises:
            UserError: more positions than the model's context, or than fit the memory for caches.
            Refused: too many sessions are open, or their caches leave too little memory.
            ResourceError: there is too little memory.
            NetworkError: a stage is lost without a spare; it may come back.
        """

    def facts(self) -> dict[str, Any]:
        """Where and how the model computes, for programs."""

    async def close(self) -> None:
        """Release the model. Never raises."""


# --------------------------------------------------------------------------------------------- whole, in this process


class WholeTarget:
    """A ``Target`` on one compute thread. Its sessions take turns in the order of their requests, one pass each.

    Args:
        engine: engine of all layers. compute: the thread on which it was made; it ends with this target.
        cache_bytes: limit of all sessions' caches together; 0: what the engine finds free.
    """

    def __init__(
        self,
        engine: StageEngine,
        compute: ComputeThread,
        clock: Clock,
        *,
        label: str,
        context: int | None = None,
        max_sessions: int = 64,
        cache_bytes: int = 0,
    ) -> None:
        self.vocab_size, self.context, self.label = engine.vocab_size, context, label
        self.engine, self._compute, self._clock = engine, compute, clock
        self._max_sessions, self._cache_bytes = max_sessions, cache_bytes
        self._promised: dict[str, int] = {}  # cache bytes by session, until the engine has closed it
        self.sessions: set[WholeSession] = set()
        self._turn = asyncio.Lock()  # the lock serves its waiters in order
        self._closed = False

    async def open(self, *, positions: int, sampling: Sampling) -> WholeSession:
        """As ``Target.open``. Allocates the session's cache."""
        name, need_bytes = new_id(), positions * self.engine.cache_position_bytes
        self._check(positions, need_bytes)
        self._promised[name] = need_bytes
        try:
            await self.in_turn(partial(self.engine.open, name, positions=positions, sampling=sampling))
        except BaseException:
            await self.forget(name)  # after a cancel it may be open
            raise
        session = WholeSession(self, name)
        self.sessions.add(session)
        return session

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "whole",
            "device": self.engine.device,
            "dtype": self.engine.encoding,
            "layers": self.engine.spec.layers,
            "weights_bytes": self.engine.weights_bytes,
            "cache_position_bytes": self.engine.cache_position_bytes,
            "cache_bytes": sum(self._promised.values()),
            "sessions": len(self._promised),
        }

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
            raise Refused(RefusalCode.SHUTTING_DOWN, f"{self.label} is being released", remedy="try again later")
        check_positions(positions, self.context)
        if self._cache_bytes and need_bytes > self._cache_bytes:
            most = self._cache_bytes // max(1, self.engine.cache_position_bytes)
            raise UserError(
                f"a session of {positions} positions takes {human_bytes(need_bytes)}, but sessions may take only "
                f"{human_bytes(self._cache_bytes)}",
                remedy=(f"ask for at most {most} positions, or " if most > 0 else "") + "give the verifier more memory",
            )
        if len(self._promised) >= self._max_sessions:
            raise Refused(RefusalCode.BUSY, f"{self._max_sessions} sessions are open", remedy=_CLOSE_REMEDY)
        if self._cache_bytes and sum(self._promised.values()) + need_bytes > self._cache_bytes:
            text = f"other sessions leave too little of {human_bytes(self._cache_bytes)} for {positions} positions"
            raise Refused(RefusalCode.BUSY, text, remedy=_CLOSE_REMEDY)

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


class WholeSession:
    lost = False  # only a pass can fail, and its caller gets the error

    def __init__(self, target: WholeTarget, name: str) -> None:
        self._target, self._name = target, name
        self._running = self._closed = False

    async def run(self, *, keep: int, ids: Sequence[int], samples: int, sample_index: int, prefill: bool) -> Passed:
        """See ``TargetSession``. ``prefill`` has no effect here."""
        if self._running or self._closed:
            raise RuntimeError("the session is closed, or still runs another pass")
        self._running = True
        if not 0 < len(ids) <= CHUNK:
            raise ValueError(f"a pass has 1 to {CHUNK} positions, not {len(ids)}")
        engine = self._target.engine
        wanted = Pass(keep, memoryview(encode_ids(ids)), len(ids), IDS, engine.encoding, samples, sample_index)
        ran, took_s = await self._target.in_turn(partial(engine.run, self._name, wanted))
        self._running = False  # stays True after an error or a cancel: then it can only be closed
        return Passed(ran.tokens, took_s)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._target.sessions.discard(self)
            await self._target.forget(self._name)


async def load_whole_engine(
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

    def told(done_bytes: int, total_bytes: int) -> None:
        if unwanted.is_set():
            raise P2PTrainError(f"the loading of {directory} was cancelled")
        loop.call_soon_threadsafe(on_bytes, done_bytes, total_bytes)

    def load() -> tuple[StageEngine, int | None]:
        if (timed := timed_model_in(directory)) is not None:
            return timed, timed.context
        with first_import():  # here: torch takes seconds to load
            from p2ptrain.compute.served_part import load_whole
        part = load_whole(directory, device=device, dtype=dtype, on_bytes=told)
        return part, part.context

    try:
        return await compute.run(load)
    except asyncio.CancelledError:
        unwanted.set()
        raise


# ------------------------------------------------------------------------------------------------ split over workers


@dataclass(slots=True)
class PassTimes:
    """Sums over the passes of a chain. Prompts are counted separately, and passes with a mending are not counted."""

    tokens: int = 0
    took_s: float = 0.0
    stages_us: list[int] = field(default_factory=list)
    prompts: int = 0
    prompt_s: float = 0.0
    mendings: list[tuple[str, float]] = field(default_factory=list)

    def add(self, tokens: int, took_s: float, stages_us: Sequence[int], *, prefill: bool) -> None:
        if prefill:
            self.prompts += tokens
            self.prompt_s += took_s
            return
        self.tokens += tokens
        self.took_s += took_s
        before = self.stages_us if len(self.stages_us) == len(stages_us) else [0] * len(stages_us)
        self.stages_us = [one + other for one, other in zip(before, stages_us, strict=True)]


class ChainTarget:
    """A ``Target`` whose model is split over workers: the verifier is the client of a chain of stages.

    Several sessions are in the chain at once, at different stages. If a stage is lost during a pass, the pass takes
    longer and gives the same samples.

    Args:
        chain: a loaded chain. It is closed with this target; the workers keep their parts.
        encoding, prefill_encoding: of hidden states, as of ``Chain.open``. Smaller ones than the default change the
            text.

    Attributes:
        times: sums over all passes of its sessions.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        label: str,
        context: int | None = None,
        max_sessions: int = 16,
        encoding: str = "",
        prefill_encoding: str = "",
    ) -> None:
        self.vocab_size, self.context, self.label = chain.vocab_size, context, label
        self.times = PassTimes()
        self._chain, self._max_sessions = chain, max_sessions
        self._encodings = {"encoding": encoding, "prefill_encoding": prefill_encoding}
        self._opening = 0
        self.sessions: set[ChainSession] = set()

    async def open(self, *, positions: int, sampling: Sampling) -> ChainSession:
        check_positions(positions, self.context)
        if len(self.sessions) + self._opening >= self._max_sessions:
            raise Refused(RefusalCode.BUSY, f"{self._max_sessions} sessions are open", remedy=_CLOSE_REMEDY)
        self._opening += 1
        try:
            opened = await self._chain.open(positions=positions, sampling=sampling, **self._encodings)
        except ResourceError as problem:
            if self._chain.lacking:  # a missing stage: ending other texts would free nothing
                raise NetworkError(problem.message, remedy=problem.remedy) from problem
            raise
        finally:
            self._opening -= 1
        session = ChainSession(self, opened)
        self.sessions.add(session)
        return session

    def facts(self) -> dict[str, Any]:
        plan = self._chain.plan
        return {
            "kind": "split",
            "dtype": self._chain.encoding,
            "layers": plan.layers,
            "sessions": len(self.sessions),
            "stages": [{"name": stage.peer.name, "start": stage.start, "stop": stage.stop} for stage in plan.stages],
        }

    async def close(self) -> None:
        self.sessions.clear()
        await self._chain.close()  # closes its sessions, too


class ChainSession:
    def __init__(self, target: ChainTarget, session: GenerationSession) -> None:
        self._target, self._session = target, session
        self._over, self._mended = False, 0

    @property
    def lost(self) -> bool:
        return self._session.failed

    async def run(self, *, keep: int, ids: Sequence[int], samples: int, sample_index: int, prefill: bool) -> Passed:
        """See ``TargetSession``. The duration includes the transfer and other sessions' requests at a stage."""
        if self._over:
            raise RuntimeError("the session has failed and runs no more passes")
        try:
            done = await self._session.run(Submit(tuple(ids), keep, samples, sample_index, prefill))
        except BaseException:
            self._over = True  # after a cancel, too
            raise
        times = self._target.times
        times.mendings += self._session.mendings[self._mended :]
        self._mended = len(self._session.mendings)
        if not done.mended:
            times.add(len(done.tokens), done.took_s, done.spent_us, prefill=prefill)
        return Passed(done.tokens, done.took_s)

    async def close(self) -> None:
        self._target.sessions.discard(self)
        await self._session.close()
