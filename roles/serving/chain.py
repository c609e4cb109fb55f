"""A loaded chain of stages. It opens sessions, finds a replacement for a lost stage once for all of its sessions, and
takes in workers that come later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

from p2ptrain.core.errors import (
    ConnectionLost,
    NetworkError,
    P2PTrainError,
    Refused,
    ResourceError,
    UserError,
    first_error,
)
from p2ptrain.core.serving import Sampling, check_positions
from ring.planning.measurements import CandidateWorker, known_link
from ring.planning.serving import replace_lost
from roles.background import Background
from roles.serving import chain_core as ev
from roles.serving.chain_session import CLOSE_S, ChainSession, ChainTimes
from roles.serving.local_model import CLOSE_REMEDY
from roles.serving.worker_peer import ClientContext, WorkerAt, WorkerPeer
from roles.serving.worker_pool import ChainPlan, LoadedPart, ModelReference, SeedRequest, WorkerPool, giving, workers_of
from wire.messages import RefusalCode

_NOBODY = "-"  # no peer id begins with it


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading a part. ``received_bytes``, over the wire, is known at its end only."""

    index: int
    name: str
    done_bytes: int
    total_bytes: int
    ready: bool = False
    received_bytes: int = 0


OnProgress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The holder of a stage. ``number`` is its seat, which grows with each new holder."""

    number: int
    peer: WorkerPeer
    loaded: LoadedPart


class StageChain:
    """A chain whose stages hold their parts. Made by ``load``.

    Attributes:
        plan: which worker holds which part now.
        lacking: stages for which no worker was found. Sessions fail meanwhile, new ones too.
        recruits: a ``PoolUpdater`` looks for workers that come or return.
    """

    def __init__(self, pool: WorkerPool, model: ModelReference, plan: ChainPlan, on_progress: OnProgress) -> None:
        self.pool, self.model, self.plan = pool, model, plan
        self._on_progress = on_progress
        self.seats: list[StageAssignment | None] = [None] * len(plan.stages)
        self._numbers = [0] * len(plan.stages)
        self._sessions: set[ChainSession] = set()
        self.times = ChainTimes()
        self.lacking: set[int] = set()
        self.recruits = False
        self._about: LoadedPart | None = None  # of any stage: the fields that are equal for all
        self._useless: set[str] = set()  # lost or unusable peers: they get no other stage
        self._filling: dict[int, asyncio.Task[None]] = {}
        self._tasks = Background(self._report_defect)
        self._closed = False
        for peer in pool.peers.values():
            peer.on_lost.append(self._peer_lost)

    @classmethod
    async def load(
        cls,
        pool: WorkerPool,
        model: ModelReference,
        plan: ChainPlan,
        *,
        on_progress: OnProgress = lambda progress: None,
    ) -> Self:
        """Have each worker of the plan load its part, concurrently. A spare replaces a worker that cannot.

        Raises:
            P2PTrainError: no worker can hold a stage; names the peers, their reasons and the remedy.
        """
        chain = cls(pool, model, plan, on_progress)
        try:
            await chain._fill_all()
        except BaseException:
            await chain.close()
            raise
        return chain

    async def _fill_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self.stages):
                    tasks.create_task(self._fill(index), name=f"load stage {index}")
        except* P2PTrainError as group:
            raise first_error(group) from None

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def context(self) -> ClientContext:
        return self.pool.context

    @property
    def stages(self) -> int:
        return len(self.seats)

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def loaded(self) -> list[LoadedPart]:
        """Each stage's answer to the load. Raises ``ConnectionLost``: a stage is lost at the moment."""
        return [self.seated(index).loaded for index in range(self.stages)]

    @property
    def encoding(self) -> str:
        """Default encoding of hidden states: the dtype in which the model computes."""
        return self._known.encoding

    @property
    def vocab_size(self) -> int:
        return self._known.vocab_size

    @property
    def width(self) -> int:
        return self._known.width

    async def open(
        self,
        *,
        positions: int,
        sampling: Sampling,
        sample_from: int,
        encoding: str = "",
        prefill_encoding: str = "",
    ) -> ChainSession:
        """Open a session over all stages.

        Args:
            positions: largest length of the session. sample_from: as of ``ModelSession``.
            encoding, prefill_encoding: of hidden states; the second one for prompts. Empty: the chain's default.

        Raises:
            UserError: the chain is closed.
            P2PTrainError: a stage refuses, or is lost and no spare replaces it.
        """
        if self._closed:
            raise UserError("this chain is closed", remedy="load another chain")
        encoding = encoding or self.encoding
        about = {"stages": self.stages, "positions": positions, "silence_s": self._silence_s()}
        encodings = {"encoding": encoding, "prefill_encoding": prefill_encoding or encoding}
        draws = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "seed")}
        seats = [seat.number if seat is not None else -1 for seat in self.seats]
        now = self.context.world.clock.now
        session = ChainSession(self, seats, about | encodings | draws, sample_from=sample_from, now=now)
        self._sessions.add(session)
        try:
            await session.opened()
        except BaseException:
            await session.close()
            raise
        return session

    def recruit(self, peers: Iterable[WorkerPeer]) -> None:
        """Add workers of the pool that came, came back, or have room now to the spares. Fill stages that have no
        holder."""
        if self._closed:
            return
        held = {stage.peer.id for stage in self.plan.stages}
        fresh = {peer.worker.peer_id: peer for peer in peers if peer.worker.peer_id not in held and not peer.lost}
        for peer in fresh.values():
            if self._peer_lost not in peer.on_lost:
                peer.on_lost.append(self._peer_lost)
        self._useless.difference_update(fresh)
        spares = [spare for spare in self.plan.spares if spare.id not in fresh]
        spares += [self.pool.placed(peer) for peer in fresh.values()]
        wanted = replace(self.plan.wanted, links=dict(self.pool.links))
        self.plan = replace(self.plan, wanted=wanted, spares=tuple(spares))
        for index, seat in enumerate(self.seats):
            if seat is None:
                self._fill_later(index)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        await self._tasks.stop()
        for peer in self.pool.peers.values():
            if self._peer_lost in peer.on_lost:
                peer.on_lost.remove(self._peer_lost)

    # ------------------------------------------------------------------------------------------------- for its sessions

    def peer_in(self, index: int, number: int) -> WorkerPeer | None:
        """The peer in that seat; None: another peer has taken it, or the peer is lost."""
        seat = self.seats[index]
        return seat.peer if seat is not None and seat.number == number and not seat.peer.lost else None

    def held_by(self, peer: WorkerPeer) -> list[int]:
        return [index for index, seat in enumerate(self.seats) if seat is not None and seat.peer is peer]

    def address_after(self, index: int, peer: WorkerPeer, number: int) -> dict[str, Any] | None:
        """Address at which ``peer`` reaches the stage after ``index``; None for the last stage.

        Raises:
            ConnectionLost: the peer of that seat no longer holds the stage.
        """
        if index + 1 == self.stages:
            return None
        seat = self.seated(index + 1)
        if seat.number != number:
            raise ConnectionLost(f"stage {index + 1} of the chain was replaced")
        return seat.peer.worker.address_for(peer.worker)

    def part_of(self, index: int) -> str:
        """Id of the part that the stage's peer holds. Raises ``ConnectionLost``: nobody holds it."""
        return self.seated(index).loaded.part

    def replace(self, session: ChainSession, index: int, number: int, reason: str) -> None:
        """Handle a session's report that the peer in seat ``number`` is unusable; -1: the session knows of no peer."""
        seat = self.seats[index]
        if seat is not None and seat.number == number:
            self._vacate(index, reason)
        elif seat is not None:
            session.event(ev.StageAssigned(index, seat.number))
        else:
            self._fill_later(index)

    def forget(self, session: ChainSession) -> None:
        self._sessions.discard(session)
        for peer in self.pool.peers.values():
            peer.listeners.pop(session.id, None)

    # ------------------------------------------------------------------------------------------------------- the seats

    @property
    def _known(self) -> LoadedPart:
        assert self._about is not None, "load() returns only after all stages are loaded"
        return self._about

    def seated(self, index: int) -> StageAssignment:
        seat = self.seats[index]
        if seat is None:
            raise ConnectionLost(f"stage {index} of the chain is lost", remedy="try again soon: it may be replaced")
        return seat

    def _silence_s(self) -> float:
        ids = [stage.peer.id for stage in self.plan.stages]
        ways = [known_link(self.plan.wanted.links, here, there) for here, there in pairwise(ids)]
        latencies_s = [way.latency_s for way in ways if way is not None]
        latencies_s += [seat.peer.latency_s for seat in self.seats if seat is not None]
        return max(self.context.silence_s, 16 * max(latencies_s, default=0.0))

    def _peer_lost(self, peer: WorkerPeer, problem: P2PTrainError) -> None:
        self._useless.add(peer.worker.peer_id)
        for index in self.held_by(peer):
            self._vacate(index, problem.message)

    def _vacate(self, index: int, reason: str) -> None:
        seat = self.seats[index]
        if seat is None or self._closed:
            return
        self.seats[index] = None
        self._useless.add(seat.peer.worker.peer_id)
        name = seat.peer.name
        self.context.notify("warning", "stage-lost", f"{self._named(index)} on {name} is lost: {reason}")
        self._empty(index)
        for session in list(self._sessions):
            if not seat.peer.lost:
                seat.peer.ask_later("session.close", {"session": session.id, "index": index}, timeout_s=CLOSE_S)
            session.event(ev.StageLost(index, seat.number, f"{name}: {reason}"))
        if not seat.peer.lost:
            seat.peer.ask_later("part.free", {"part": seat.loaded.part}, timeout_s=CLOSE_S)
        self._fill_later(index)

    def _report_defect(self, error: BaseException) -> None:
        for session in list(self._sessions):
            session.fail(error)

    def _named(self, index: int) -> str:
        stage = self.plan.stages[index]
        return f"stage {index} (layers {stage.start} to {stage.stop - 1})"

    def _fill_later(self, index: int) -> None:
        if index not in self._filling and not self._closed:
            self._filling[index] = self._tasks.start(self._refill(index), f"replace stage {index}")

    async def _refill(self, index: int) -> None:
        began = self.context.world.clock.now()
        self._on_progress = lambda progress: None  # the first load is over: progress is not shown any more
        try:
            await self._fill(index)
        except P2PTrainError as problem:
            if index not in self.lacking:
                self.lacking.add(index)
                self.context.notify("warning", "stage-lacking", f"{problem.message}: {problem.remedy}")
            for session in list(self._sessions):
                session.event(ev.StageUnassigned(index, problem))
            return
        finally:
            del self._filling[index]
        seat = self.seats[index]
        if seat is None:
            return  # lost again already: that loss starts another refill
        took_s = self.context.world.clock.now() - began
        text = f"{seat.peer.name} holds {self._named(index)} now, after {took_s:.1f} s"
        self.context.notify("info", "stage-replaced", text)
        for session in list(self._sessions):
            session.event(ev.StageAssigned(index, seat.number))

    async def _fill(self, index: int) -> None:
        """Have a worker load the part of a stage: the worker of the plan, else the best one left.

        Raises:
            P2PTrainError: no worker can; has the reason of each that was asked.
        """
        reasons: list[str] = []
        while True:
            peer = self.pool.peers.get(self.plan.stages[index].peer.id)
            if peer is None or peer.lost:
                peer = self._successor(index, reasons)
            try:
                loaded = await self._load_at(index, peer)
            except P2PTrainError as problem:
                reasons.append(problem.message if peer.name in problem.message else f"{peer.name}: {problem.message}")
                self._useless.add(peer.worker.peer_id)
                self._empty(index)
                continue
            if peer.lost:
                continue
            self._numbers[index] += 1
            self.seats[index] = StageAssignment(self._numbers[index], peer, loaded)
            self._about = loaded
            self.lacking.discard(index)
            return

    def _successor(self, index: int, reasons: Sequence[str]) -> WorkerPeer:
        self._empty(index)
        plan = self.plan
        lost = {id for id, peer in self.pool.peers.items() if peer.lost} | self._useless
        apart = plan.wanted.apart | {(plan.wanted.client, id) for id in lost}
        empty = {stage.peer.id for stage in plan.stages if stage.peer.id.startswith(_NOBODY)}
        spares = [spare for spare in plan.spares if spare.id not in lost]
        found, reason = replace_lost(replace(plan.wanted, apart=apart), plan.placement, empty, spares)
        if found is None:
            known = "; ".join([reason, *reasons])
            text = f"no worker can hold {self._named(index)}: {known}"
            remedy = "start another worker with enough memory: p2ptrain join"
            if self.recruits:
                remedy += "; the chain continues when that worker, or a lost one, connects: try again then"
            raise ResourceError(text, remedy=remedy)
        self.plan = replace(plan, placement=found)
        self.context.notify("info", "stage-loading", f"{reason}: loading")
        return self.pool.peers[found.stages[index].peer.id]

    def _empty(self, index: int) -> None:
        stages = list(self.plan.stages)
        nobody = CandidateWorker(f"{_NOBODY}{index}", stages[index].peer.name, 0)
        stages[index] = replace(stages[index], peer=nobody)
        self.plan = replace(self.plan, placement=replace(self.plan.placement, stages=tuple(stages)))

    async def _load_at(self, index: int, peer: WorkerPeer) -> LoadedPart:
        plan, stage = self.plan, self.plan.stages[index]
        last = LoadProgress(index, peer.name, 0, 0)
        self._on_progress(last)

        def on_bytes(done_bytes: int, total_bytes: int) -> None:
            nonlocal last
            last = LoadProgress(index, peer.name, done_bytes, total_bytes)
            self._on_progress(last)

        params = self.model.load_params(peer.worker) | {
            "start": stage.start,
            "stop": stage.stop,
            "layers": plan.layers,
            "dtype": plan.dtype,
            "positions": plan.positions,
        }
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(peer.turn)
            if self.model.source is not None:
                await stack.enter_async_context(giving(self.context, self.model.source, peer.worker))
            loaded = LoadedPart.from_map_untrusted(await peer.load(params, on_bytes))
        total_bytes = last.total_bytes or loaded.weights_bytes
        self._on_progress(LoadProgress(index, peer.name, total_bytes, total_bytes, True, loaded.received_bytes))
        return loaded


class SplitModel:
    """A ``ServedModel``. Several sessions are in the chain at once, at different stages. If a stage is lost during a
    pass, the pass takes longer and gives the same samples.

    Args:
        chain: a loaded chain. It is closed with this model; the workers keep their parts.
        encoding, prefill_encoding: of hidden states, as of ``StageChain.open``. Smaller ones than the default change
            the text.
    """

    def __init__(
        self,
        chain: StageChain,
        *,
        label: str,
        context: int | None = None,
        max_sessions: int = 16,
        encoding: str = "",
        prefill_encoding: str = "",
    ) -> None:
        self.vocab_size, self.context, self.label = chain.vocab_size, context, label
        self._chain, self._max_sessions = chain, max_sessions
        self._encodings = {"encoding": encoding, "prefill_encoding": prefill_encoding}

    @property
    def times(self) -> ChainTimes:
        return self._chain.times

    async def open(self, *, positions: int, sampling: Sampling, sample_from: int) -> ChainSession:
        check_positions(positions, self.context)
        if self._chain.session_count >= self._max_sessions:
            raise Refused(RefusalCode.BUSY, f"{self._max_sessions} sessions are open", remedy=CLOSE_REMEDY)
        try:
            return await self._chain.open(
                positions=positions, sampling=sampling, sample_from=sample_from, **self._encodings
            )
        except ResourceError as problem:
            if self._chain.lacking:  # a missing stage: ending other texts would free nothing
                raise NetworkError(problem.message, remedy=problem.remedy) from problem
            raise

    def facts(self) -> dict[str, Any]:
        plan = self._chain.plan
        return {
            "kind": "split",
            "dtype": self._chain.encoding,
            "layers": plan.layers,
            "sessions": self._chain.session_count,
            "stages": [{"name": stage.peer.name, "start": stage.start, "stop": stage.stop} for stage in plan.stages],
        }

    async def close(self) -> None:
        await self._chain.close()


LOOK_S = 1.0
"""Interval between two looks at the list of workers."""


class PoolUpdater:
    """Keeps the worker pool of a long-lived chain up to date. New workers become spares, and a chain that lacks a stage
    continues when a worker can hold it.

    Workers that are not connected are dialled concurrently, so an unreachable one delays no other, and again with
    back-off. While a stage is lacking, connected workers without a stage are asked for their offers again.

    Args:
        ask: sends a request to the seed. While it fails only lost workers are dialled again.
    """

    def __init__(self, chain: StageChain, ask: SeedRequest) -> None:
        self._chain, self._pool, self._ask = chain, chain.pool, ask
        self._now = chain.context.world.clock.now
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._found: list[WorkerPeer] = []
        self._attempts: dict[str, tuple[WorkerAt, float, float]] = {}  # back-off in seconds, and its end
        self._tasks = Background()
        chain.recruits = True

    async def run(self) -> None:
        try:
            while True:
                await self._look()
                if self._asking:
                    await asyncio.wait(self._asking.values(), timeout=LOOK_S)
                found, self._found = self._found, []
                if found:
                    self._chain.recruit(found)
                await asyncio.sleep(LOOK_S)
        finally:
            self._chain.recruits = False
            await self._tasks.stop()

    async def _look(self) -> None:
        try:
            workers = await workers_of(self._ask)
        except P2PTrainError:  # the seed is away: dial the lost workers again
            workers = [peer.worker for peer in self._pool.peers.values() if peer.lost]
        for worker in workers:
            peer = self._pool.peers.get(worker.peer_id)
            if peer is None or peer.lost:
                self._start(worker, self._dial(worker))
        for peer in list(self._pool.peers.values()) if self._chain.lacking else ():
            if not peer.lost and not self._chain.held_by(peer):
                self._start(peer.worker, self._pool.renew(peer))

    def _start(self, worker: WorkerAt, asking: Coroutine[None, None, WorkerPeer]) -> None:
        before = self._attempts.get(worker.peer_id)
        if worker.peer_id in self._asking or (before and before[0] == worker and self._now() < before[2]):
            asking.close()
            return
        self._asking[worker.peer_id] = self._tasks.start(self._attempt(worker, asking), f"ask {worker.name}")

    async def _attempt(self, worker: WorkerAt, asking: Coroutine[None, None, WorkerPeer]) -> None:
        before = self._attempts.get(worker.peer_id)
        wait_s = min(2 * before[1], 60.0) if before is not None and before[0] == worker else 1.0
        self._attempts[worker.peer_id] = worker, wait_s, self._now() + wait_s
        try:
            with suppress(P2PTrainError):  # _look asks it again later
                peer = await asking
                if self._chain.lacking:
                    self._found.append(peer)  # recruit both at once, so that they get two stages
                else:
                    self._chain.recruit([peer])  # a stage may be lost before the next look
        finally:
            del self._asking[worker.peer_id]

    async def _dial(self, worker: WorkerAt) -> WorkerPeer:
        peer = await self._pool.admit(worker)
        del self._attempts[worker.peer_id]  # forget the back-off: the next loss starts anew
        self._chain.context.notify("info", "spare", f"{worker.name} connected and can hold a stage")
        return peer
