"""A model that is split over workers: a loaded chain of stages, which opens sessions.

If a stage is lost, the chain finds a replacement once for all of its sessions: a worker of the pool that loads the
stage's layers. ``PoolUpdater`` brings workers that come later into the pool of a long-lived chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from p2ptrain.core.background import Background
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
from ring.planning.serving import replace_lost
from roles.serving import chain_core as ev
from roles.serving.chain_session import ChainSession, ChainTimes
from roles.serving.local_model import CLOSE_REMEDY
from roles.serving.worker_peer import ClientContext, WorkerAddress, WorkerPeer
from roles.serving.worker_pool import (
    ChainPlan,
    LoadedPart,
    ModelReference,
    SeedRequest,
    WorkerPool,
    sending_model,
    workers_of,
)
from wire.messages import RefusalCode

MOST_SESSIONS = 64
LOOK_S, AGAIN_S = 1.0, 10.0
"""Interval between two looks at the list of workers, and before one that was not reached is dialled again."""


OnProgress = Callable[[int, int, int], None]
"""Called with the number of a stage, and of its part the bytes that are loaded, and all."""


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The holder of a stage. ``number`` is its seat, which grows with each new holder."""

    number: int
    peer: WorkerPeer
    loaded: LoadedPart


class StageChain:
    """A ``ServedModel``: a chain whose stages hold their parts. Made by ``load``.

    Several sessions are in the chain at once, some of them in one pass of a stage. If a stage is lost during a pass,
    the pass takes longer and gives the same samples.

    Attributes:
        plan: which worker holds which part now.
        encodings: of hidden states, and of those of prompts. Smaller ones than ``dtype`` change the text.
        lacking: stages for which no worker was found. Sessions fail meanwhile, new ones too.
    """

    def __init__(
        self,
        pool: WorkerPool,
        model: ModelReference,
        plan: ChainPlan,
        *,
        context: int | None,
        encodings: tuple[str, str],
    ) -> None:
        self.pool, self.model, self.plan = pool, model, plan
        self.context, self.encodings = context, encodings
        self.seats: list[StageAssignment | None] = [None] * len(plan.stages)
        self.times = ChainTimes()
        self.lacking: set[int] = set()
        self._last_number = 0  # of a seat
        self._sessions: set[ChainSession] = set()
        self._about: LoadedPart  # of any stage, after ``load``: the fields that are equal for all
        self._vacant: set[int] = set()  # stages whose peer of the plan is lost, or cannot hold them
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
        context: int | None = None,
        encodings: tuple[str, str] = ("", ""),
        on_progress: OnProgress = lambda index, done_bytes, total_bytes: None,
    ) -> Self:
        """Have each worker of the plan load its part, concurrently. A spare replaces a worker that cannot.

        Args:
            context: the model's; None: unknown.
            encodings: as of the class. Empty: ``dtype``; an empty second one: the first.

        Raises:
            P2PTrainError: no worker can hold a stage; names the peers, their reasons and the remedy.
        """
        chain = cls(pool, model, plan, context=context, encodings=encodings)
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(chain.stages):
                    tasks.create_task(chain._fill(index, on_progress), name=f"load stage {index}")
        except BaseException as problem:
            await chain.close()
            if isinstance(problem, BaseExceptionGroup) and problem.split(P2PTrainError)[1] is None:
                raise first_error(problem) from None
            raise
        return chain

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def client(self) -> ClientContext:
        return self.pool.context

    @property
    def stages(self) -> int:
        return len(self.seats)

    @property
    def loaded(self) -> list[LoadedPart]:
        """Each stage's answer to the load. Raises ``ConnectionLost``: a stage is lost at the moment."""
        return [self.seat_at(index).loaded for index in range(self.stages)]

    @property
    def dtype(self) -> str:
        """In which the model computes; also the default encoding of hidden states."""
        return self._about.encoding

    @property
    def vocab_size(self) -> int:
        return self._about.vocab_size

    @property
    def preemptions(self) -> int:
        return self.times.preemptions

    async def open(
        self, *, positions: int, sampling: Sampling, sample_from: int, ids: Sequence[int] = (), priority: int = 0
    ) -> ChainSession:
        """As ``ServedModel.open``, over all stages. Raises ``UserError`` if the chain is closed, too."""
        check_positions(positions, self.context)
        if self._closed:
            raise UserError("this chain is closed", remedy="load another chain")
        if len(self._sessions) >= MOST_SESSIONS:
            raise Refused(RefusalCode.BUSY, f"{MOST_SESSIONS} sessions are open", remedy=CLOSE_REMEDY)
        encoding = self.encodings[0] or self.dtype
        about = {"stages": self.stages, "positions": positions, "priority": priority, "silence_s": self._silence_s()}
        about["order"] = self.client.world.clock.wall()
        encodings = {"encoding": encoding, "prefill_encoding": self.encodings[1] or encoding}
        seats = [seat.number if seat is not None else -1 for seat in self.seats]
        opening, world = about | encodings, self.client.world
        session = ChainSession(self, seats, opening, sampling, sample_from=sample_from, ids=ids, world=world)
        self._sessions.add(session)
        try:
            await session.wait_until_open()
        except BaseException as problem:
            await session.close()
            if isinstance(problem, ResourceError) and self.lacking:  # ending other texts would free nothing
                raise NetworkError(problem.message, remedy=problem.remedy) from problem
            raise
        return session

    def recruit(self, peer: WorkerPeer) -> None:
        """Make a worker of the pool that came, came back, or has room now a spare. Fill stages that have no holder."""
        peer_id = peer.worker.peer_id
        holders = {stage.peer.id for index, stage in enumerate(self.plan.stages) if index not in self._vacant}
        if self._closed or peer.lost or peer_id in holders:
            return
        if self._peer_lost not in peer.on_lost:
            peer.on_lost.append(self._peer_lost)
        self._useless.discard(peer_id)
        spares = (*(spare for spare in self.plan.spares if spare.id != peer_id), self.pool.candidate_of(peer))
        self.plan = replace(self.plan, wanted=replace(self.plan.wanted, links=dict(self.pool.links)), spares=spares)
        for index, seat in enumerate(self.seats):
            if seat is None:
                self._fill_later(index)

    def hand_over(self, workers: Collection[str]) -> None:
        """Have one stage that is not held by one of these workers move to one of them, if one has none."""
        holders = {seat.peer.worker.peer_id: index for index, seat in enumerate(self.seats) if seat is not None}
        spares = {spare.id for spare in self.plan.spares if spare.id in workers} - self._useless - holders.keys()
        leaving = [index for peer_id, index in holders.items() if peer_id not in workers]
        if leaving and spares and not self._filling:
            self._vacate(leaving[0], "its worker got another task")

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

    def address_after(self, index: int, number: int) -> dict[str, Any] | None:
        """Address of the stage after ``index``; None for the last stage.

        Raises:
            ConnectionLost: the peer of that seat no longer holds the stage.
        """
        if index + 1 == self.stages:
            return None
        seat = self.seat_at(index + 1)
        if seat.number != number:
            raise ConnectionLost(f"stage {index + 1} of the chain was replaced")
        return seat.peer.worker.to_map()

    def part_of(self, index: int) -> str:
        """Id of the part that the stage's peer holds. Raises ``ConnectionLost``: nobody holds it."""
        return self.seat_at(index).loaded.part

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

    def seat_at(self, index: int) -> StageAssignment:
        seat = self.seats[index]
        if seat is None:
            raise ConnectionLost(f"stage {index} of the chain is lost", remedy="try again soon: it may be replaced")
        return seat

    def _silence_s(self) -> float:
        # Two stages may be as far from each other as both from here together.
        latencies_s = [seat.peer.latency_s for seat in self.seats if seat is not None]
        return max(self.client.silence_s, 32 * max(latencies_s, default=0.0))

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
        self.client.notify("warning", "stage-lost", f"{self._describe(index)} on {name} is lost: {reason}")
        self._vacant.add(index)
        for session in list(self._sessions):
            seat.peer.ask_later("session.close", {"session": session.id, "index": index})
            session.event(ev.StageLost(index, seat.number, f"{name}: {reason}"))
        seat.peer.ask_later("part.free", {"part": seat.loaded.part})
        self._fill_later(index)

    def _report_defect(self, error: BaseException) -> None:
        for session in list(self._sessions):
            session.fail(error)

    def _describe(self, index: int) -> str:
        stage = self.plan.stages[index]
        return f"stage {index} (layers {stage.start} to {stage.stop - 1})"

    def _fill_later(self, index: int) -> None:
        if index not in self._filling and not self._closed:
            self._filling[index] = self._tasks.start(self._refill(index), f"replace stage {index}")

    async def _refill(self, index: int) -> None:
        began = self.client.world.clock.now()
        try:
            await self._fill(index, lambda index, done_bytes, total_bytes: None)
        except P2PTrainError as problem:
            if index not in self.lacking:
                self.lacking.add(index)
                self.client.notify("warning", "stage-lacking", f"{problem.message}: {problem.remedy}")
            for session in list(self._sessions):
                session.event(ev.StageUnassigned(index, problem))
            return
        finally:
            del self._filling[index]
        seat = self.seats[index]
        if seat is None:
            return  # lost again already: that loss starts another refill
        took_s = self.client.world.clock.now() - began
        text = f"{seat.peer.name} holds {self._describe(index)} now, after {took_s:.1f} s"
        self.client.notify("info", "stage-replaced", text)
        for session in list(self._sessions):
            session.event(ev.StageAssigned(index, seat.number))

    async def _fill(self, index: int, on_progress: OnProgress) -> None:
        """Have a worker load the part of a stage: the worker of the plan, else the best one left.

        Raises:
            P2PTrainError: no worker can; has the reason of each that was asked.
        """
        reasons: list[str] = []
        while True:
            peer = self.pool.peers.get(self.plan.stages[index].peer.id)
            if index in self._vacant or peer is None or peer.lost:
                peer = self._successor(index, reasons)
            try:
                loaded = await self._load_at(index, peer, on_progress)
            except P2PTrainError as problem:
                reasons.append(problem.message if peer.name in problem.message else f"{peer.name}: {problem.message}")
                self._useless.add(peer.worker.peer_id)
                self._vacant.add(index)
                continue
            if peer.lost:
                continue
            self._last_number += 1
            self.seats[index] = StageAssignment(self._last_number, peer, loaded)
            self._about = loaded
            self.lacking.discard(index)
            return

    def _successor(self, index: int, reasons: Sequence[str]) -> WorkerPeer:
        self._vacant.add(index)
        plan = self.plan
        lost = {id for id, peer in self.pool.peers.items() if peer.lost} | self._useless
        apart = plan.wanted.apart | {(plan.wanted.client, id) for id in lost}
        spares = [spare for spare in plan.spares if spare.id not in lost]
        found, reason = replace_lost(replace(plan.wanted, apart=apart), plan.placement, self._vacant, spares)
        if found is None:
            known = "; ".join([reason, *reasons])
            text = f"no worker can hold {self._describe(index)}: {known}"
            raise ResourceError(text, remedy="start another worker with enough memory: p2ptrain join; then try again")
        self.plan = replace(plan, placement=found)
        self._vacant.clear()
        self.client.notify("info", "stage-loading", f"{reason}: loading")
        return self.pool.peers[found.stages[index].peer.id]

    async def _load_at(self, index: int, peer: WorkerPeer, on_progress: OnProgress) -> LoadedPart:
        plan, stage = self.plan, self.plan.stages[index]
        params = self.model.load_params() | {
            "start": stage.start,
            "stop": stage.stop,
            "layers": plan.wanted.sizes.layers,
            "dtype": plan.dtype,
            "weights": plan.weights,
            "positions": plan.positions,
        }
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(peer.load_lock)
            if self.model.source is not None:
                await stack.enter_async_context(sending_model(self.client, self.model.source, peer.worker))
            loaded = LoadedPart.from_map_untrusted(await peer.load(params, partial(on_progress, index)))
        on_progress(index, loaded.weights_bytes, loaded.weights_bytes)
        return loaded


class PoolUpdater:
    """Keeps the worker pool of a long-lived chain up to date. New workers become spares, and a chain that lacks a stage
    continues when a worker can hold it.

    Workers that are not connected are dialled concurrently, so an unreachable one delays no other. While a stage is
    lacking, connected workers without a stage are asked for their offers again.

    Args:
        ask: sends a request to the seed. While it fails only lost workers are dialled again.
        wanted: as of ``workers_of``.
    """

    def __init__(self, chain: StageChain, ask: SeedRequest, wanted: dict[str, Any]) -> None:
        self._chain, self._pool, self._ask_seed, self._wanted = chain, chain.pool, ask, wanted
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._tasks = Background()

    async def run(self) -> None:
        try:
            while True:
                for worker in await self._candidates():
                    if worker.peer_id not in self._asking:
                        self._asking[worker.peer_id] = self._tasks.start(self._ask(worker), f"ask {worker.name}")
                await asyncio.sleep(LOOK_S)
        finally:
            await self._tasks.stop()

    async def _candidates(self) -> list[WorkerAddress]:
        peers = self._pool.peers
        holders = {seat.peer.worker.peer_id for seat in self._chain.seats if seat is not None}
        try:
            listed = await workers_of(self._ask_seed, self._wanted | {"holders": sorted(holders)})
            self._chain.hand_over({worker.peer_id for worker in listed})
        except P2PTrainError:  # the seed is away: dial the lost workers again
            listed = [peer.worker for peer in peers.values()]
        found = [at for at in listed if (peer := peers.get(at.peer_id)) is None or peer.lost]
        if self._chain.lacking:
            found += [peer.worker for peer in peers.values() if not peer.lost and not self._chain.held_by(peer)]
        return found

    async def _ask(self, worker: WorkerAddress) -> None:
        """Connect to a worker, or get the current offer of a connected one, and add it to the spares."""
        try:
            peer = self._pool.peers.get(worker.peer_id)
            if peer is None or peer.lost:
                peer = await self._pool.admit(worker)
                self._chain.client.notify("info", "spare", f"{worker.name} connected and can hold a stage")
            else:
                await self._pool.renew(peer)
            self._chain.recruit(peer)
        except P2PTrainError:
            await asyncio.sleep(AGAIN_S)
        finally:
            del self._asking[worker.peer_id]
