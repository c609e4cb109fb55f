"""The pool: which worker does what. Jobs, split models that are served, and drafts for served models share the workers.

``ring.planning.matching`` decides; this module says who can do what, and carries out the moves. Free workers get a
task at once. Every ``REVIEW_S`` the pool looks whether a move repays. A worker leaves a job for another task when the
job's ring has stopped at a step boundary and those that stay hold its state (``ring.coordinator``, rule 12). If a job
still lacks workers, a paused job yields its own as soon as its state is in a checkpoint.

A verifier asks once a second for the workers of its split model. That request states what the model needs, and its
answer lists the workers for it: those that have this task and the free ones; if they are too few, all that may serve.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from p2ptrain.core.errors import Refused
from ring import coordination as co
from ring.planning.matching import POLICIES, PoolMove, PoolTask, plan_pool
from ring.planning.measurements import known_link
from roles.gauges import MovingAverage
from roles.seed.job_history import step_s
from roles.seed.job_table import JobTable
from roles.seed.jobs import JobController, JobPorts
from roles.seed.peers import ConnectedPeer, Services, clip
from wire.job_messages import MAX_STAGES
from wire.messages import EventNotice
from wire.records import ServingInfo
from wire.schema import Bound, Count, Declared, Id
from wire.text_messages import MODEL_CHARS, MOST_MODELS, DraftOrder

REVIEW_S = 2.0
USUAL_START_S = 20.0
"""Time until a worker has begun a task, before one was measured, without fetching."""
USUAL_BPS = 100e6
"""Bandwidth of a link that was not measured."""
DEMAND_S = 10.0
"""A verifier that has not asked for workers for this long needs none."""
COMPARED = 8
"""Members of a task whose links to a worker count."""


class WorkersWanted(Declared):
    """Parameters of ``workers.list``: what a verifier's split model needs.

    Attributes:
        stages: number of stages; 0: as many workers as its weights need.
        holders: workers that hold a stage now.
    """

    model: Annotated[str, Bound(1, MODEL_CHARS)]
    weights_bytes: Count
    stages: Annotated[int, Bound(0, MAX_STAGES)] = 0
    holders: Annotated[list[Id], Bound(0, MAX_STAGES)] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ServingDemand:
    """A verifier's newest request for workers, and when it came."""

    verifier: ConnectedPeer
    wanted: WorkersWanted
    at: float


@dataclass(frozen=True, slots=True)
class PoolState:
    """What a plan is made of: workers by the task that they have or are about to get, and those to choose from.

    Attributes:
        saved: job → workers that have a checkpoint of it.
        usual_flops: median speed of the candidates; 0: not known.
    """

    members: Mapping[str, Sequence[ConnectedPeer]]
    candidates: Sequence[ConnectedPeer]
    saved: Mapping[str, Collection[str]]
    usual_flops: float


class Pool:
    """The workers and their tasks. ``moved``: moves so far. ``policy``: one of ``ring.planning.matching.POLICIES``."""

    def __init__(self, ports: JobPorts, jobs: JobTable, services: Services, policy: str = POLICIES[0]) -> None:
        self.moved = 0
        self.policy = policy
        self._ports, self._jobs, self._services = ports, jobs, services
        self._demands: dict[str, ServingDemand] = {}  # by task
        self._coming: dict[str, tuple[str, asyncio.Future[bool]]] = {}  # worker → its task once its job releases it
        self._begun: dict[str, tuple[str, bool, float]] = {}  # worker → its new task, whether it has the files, since
        self._start: dict[tuple[str, bool], MovingAverage] = {}  # by task and whether the worker had the files
        self._planned: object = None  # what the last plan for free workers was made of

    async def run(self) -> None:
        """Move workers where that repays, until cancelled."""
        while True:
            await asyncio.sleep(REVIEW_S)
            self._review()
            self._plan(moves=True)

    def assign(self) -> None:
        """Give free workers tasks."""
        for controller in filter(self._is_open, self._jobs.controllers.values()):
            restore = controller.core.restore
            holder = self._ports.peers.connected.get(restore.peer_id) if restore is not None else None
            if holder is not None and holder.task and self._may_train(holder, controller):
                self._end(holder)
                self._give(holder, controller.id)
        for peer in self._free():
            if peer.id in self._coming:
                self._give(peer, self._coming.pop(peer.id)[0])
        self._plan(moves=False)
        waiting = [item for item in self._jobs.controllers.values() if item.core.phase is co.JobPhase.WAITING]
        if any(controller.core.short for controller in waiting):
            for controller in filter(self._jobs.may_yield, self._jobs.controllers.values()):
                controller.post(co.Signal.YIELD)
        self._ports.announcements.touch("jobs", *(controller.id for controller in waiting))

    def take_demand(self, verifier: ConnectedPeer, wanted: WorkersWanted) -> list[ConnectedPeer]:
        """Note what a split model needs. Returns the workers that it may use. Raises ``Refused``: too many models."""
        task = f"serve/{verifier.id}/{wanted.model}"
        if (
            task not in self._demands
            and sum(item.verifier is verifier for item in self._demands.values()) >= MOST_MODELS
        ):
            raise Refused("full", f"{verifier.name} asks for workers for more than {MOST_MODELS} models")
        self._demands[task] = ServingDemand(verifier, wanted, self._ports.clock.now())
        serving = [peer for peer in self._workers() if "serve" in peer.allowed]
        is_whole = len(wanted.holders) >= self._least_for(wanted, serving)
        for peer in serving:
            if peer.id in wanted.holders and not peer.job and not peer.task:
                self._give(peer, task)
            elif peer.task == task and is_whole and peer.id not in wanted.holders:
                self._end(peer)  # it chose another one
        self.assign()
        near = [peer for peer in serving if peer.task == task or not (peer.task or peer.job)]
        return near if len(near) >= self._least_for(wanted, near) else serving

    # ------------------------------------------------------------------------------------------------------- planning

    def _workers(self) -> list[ConnectedPeer]:
        return [peer for peer in self._ports.peers.connected.values() if peer.trains]

    def _free(self) -> list[ConnectedPeer]:
        return [peer for peer in self._workers() if not peer.job and not peer.task and not peer.is_leaving]

    def _plan(self, *, moves: bool) -> None:
        free = self._free()
        open_jobs = [(item.id, item.core.needs) for item in self._jobs.controllers.values() if self._is_open(item)]
        planned = [peer.id for peer in free], open_jobs, list(self._demands), [info.id for info in self._undrafted()]
        if not moves and (not free or planned == self._planned):
            return
        tasks = self._tasks(self._read_state(self._workers() if moves else free))
        for move in plan_pool(self.policy, tasks, [peer.id for peer in free], moves=moves):
            self._carry_out(move, {task.id: task.name for task in tasks})
        for peer in free:
            if not peer.job and not peer.task:
                self._notify_idle(peer)
        self._planned = planned

    def _read_state(self, candidates: Sequence[ConnectedPeer]) -> PoolState:
        members, saved = defaultdict[str, list[ConnectedPeer]](list), defaultdict[str, set[str]](set)
        for peer in self._workers():
            members[self._coming[peer.id][0] if peer.id in self._coming else peer.job or peer.task].append(peer)
        for item in self._ports.checkpoints.known.values():
            saved[item.job].add(item.peer_id)
        speeds = [peer.flops for peer in candidates if peer.flops]
        return PoolState(members, candidates, saved, statistics.median(speeds) if speeds else 0.0)

    def _tasks(self, state: PoolState) -> list[PoolTask]:
        jobs = [self._job_task(state, item) for item in self._jobs.controllers.values() if self._is_open(item)]
        serving = [self._serving_task(state, id, demand) for id, demand in self._demands.items()]
        return [*jobs, *serving, *filter(None, (self._draft_task(state, info) for info in self._undrafted()))]

    @staticmethod
    def _is_open(controller: JobController) -> bool:
        return controller.census.settled.is_set() and not controller.core.objection("")

    @staticmethod
    def _may_train(peer: ConnectedPeer, controller: JobController) -> bool:
        return "train" in peer.allowed and not (controller.core.objection(peer.id) or controller.lacking(peer))

    def _job_task(self, state: PoolState, controller: JobController) -> PoolTask:
        core, needs, job, time_s = controller.core, controller.core.needs, controller.id, step_s(controller.rows.newest)
        members, expected = state.members.get(job, ()), [core.expects(peer.id) for peer in state.members.get("", ())]
        here = {peer.id for peer in members}
        able = [peer for peer in state.candidates
                if peer.id in here or self._may_train(peer, controller)]  # fmt: skip
        return self._make_task(
            state, job, "train", f"job {controller.record.name}",
            controller.profile.job.weight if controller.profile else 1.0,
            needs.least, max(needs.most, len(members) + sum(expected)),
            able, members, time_s=time_s, has_files={*state.saved.get(job, ()), *core.held},
            fetch_bytes=3 * core.view.reduce_bytes if core.view else 0,
            fixed={peer.id for peer in members if not core.may_withdraw(peer.id)},
            unit=needs.unit, floor=needs.floor, pause_s=controller.rows.pause_s or max(time_s, 1.0),
            settled=frozenset(peer.id for peer in members if controller.holds(peer.id)),
            left_s=(controller.record.steps_total - core.known_step) * time_s if time_s else math.inf,
        )  # fmt: skip

    def _serving_task(self, state: PoolState, id: str, demand: ServingDemand) -> PoolTask:
        wanted, able = demand.wanted, [peer for peer in state.candidates if "serve" in peer.allowed]
        least = self._least_for(wanted, [peer for peer in self._workers() if "serve" in peer.allowed])
        loaded = {peer.id for peer in able for part in peer.parts.values() if part.name == wanted.model}
        return self._make_task(
            state, id, "serve", f"the model {wanted.model}", demand.verifier.weight, least, least, able,
            [demand.verifier], has_files=loaded, fetch_bytes=wanted.weights_bytes // least,
            settled=frozenset(wanted.holders),
        )  # fmt: skip

    @staticmethod
    def _least_for(wanted: WorkersWanted, workers: Sequence[ConnectedPeer]) -> int:
        """The fewest of the workers that together have room for the model; one more than there are if they have not."""
        left_bytes = wanted.weights_bytes
        for count, memory_bytes in enumerate(sorted((peer.offer.memory_bytes for peer in workers), reverse=True), 1):
            left_bytes -= memory_bytes or left_bytes  # 0: it has not reported it
            if left_bytes <= 0:
                return max(count, wanted.stages)
        return max(len(workers) + 1, wanted.stages)

    def _draft_task(self, state: PoolState, info: ServingInfo) -> PoolTask | None:
        able = [peer for peer in state.candidates
                if "draft" in peer.allowed and peer.draft_tokenizer == info.tokenizer]  # fmt: skip
        verifier, has_files = self._ports.peers.connected[info.peer], {peer.id for peer in able}
        id, name = f"draft/{info.id}", f"drafts for {info.model}"
        made = self._make_task(state, id, "draft", name, verifier.weight, 1, 1, able, [verifier], has_files=has_files)
        return made if able else None

    def _undrafted(self) -> list[ServingInfo]:
        """The served models without a drafter of their own."""
        models, connected = self._services.models(), self._ports.peers.connected
        drafted = {info.tokenizer for info in models if connected[info.peer].role == "drafter"}
        return [info for info in models if info.role == "verifier" and info.tokenizer not in ("", *drafted)]

    def _make_task(
        self, state: PoolState, id: str, kind: str, name: str, weight: float, least: int, most: int,
        able: Sequence[ConnectedPeer], others: Sequence[ConnectedPeer], *, has_files: Collection[str],
        fetch_bytes: int = 0, time_s: float = 0.0, fixed: Collection[str] = (), **more: Any,
    ) -> PoolTask:  # fmt: skip
        """A task of the ``able`` candidates. A worker's strength is its speed, over the usual one, with the share of a
        step of ``time_s`` that no round trip to ``others`` takes. It begins after the time measured for this task, else
        the usual one and that for ``fetch_bytes``."""
        fetch_s, strengths, start_s = 8 * fetch_bytes / USUAL_BPS, dict[str, float](), dict[str, float]()
        for peer in able:
            links = [known_link(self._ports.survey.table.known, peer.id, other.id) for other in others[:COMPARED]]
            away_s = [2 * link.latency_s for link in links if link is not None] or [peer.rtt_ms / 1e3]
            speed = peer.flops / state.usual_flops if peer.flops and state.usual_flops else 1.0
            strengths[peer.id] = min(max(speed / (1 + statistics.median(away_s) / max(time_s, 1.0)), 0.01), 100.0)
            has = peer.id in has_files
            measured = self._start.get((id, has))
            start_s[peer.id] = measured.seconds if measured else USUAL_START_S + (0.0 if has else fetch_s)
        ids = frozenset(peer.id for peer in state.members.get(id, ()))
        fixed_ids = ids & (self._coming.keys() | set(fixed))
        return PoolTask(
            id, kind, name, weight, least, max(most, len(ids)), ids, strengths, start_s, fixed=fixed_ids, **more
        )

    # ------------------------------------------------------------------------------------------------- carrying it out

    def _carry_out(self, move: PoolMove, names: Mapping[str, str]) -> None:
        peer = self._ports.peers.connected[move.member]
        if not move.source:
            self._give(peer, move.task)
            return
        self.moved += 1
        text = f"{peer.name} goes from {names[move.source]} to {names[move.task]}"
        why = f"the pool gains {move.gain:.0%}, which repays {move.cost_s:.0f} s of moving"
        self._ports.announcements.note("info", "moved", f"{text}: {why}", peer.id, peer.job)
        self._ports.announcements.touch("cluster", "")
        if (controller := self._jobs.controllers.get(peer.job)) is not None:
            self._coming[peer.id] = move.task, controller.post(co.PeerWithdrawn(peer.id))
        else:
            self._end(peer)
            self._give(peer, move.task)

    def _give(self, peer: ConnectedPeer, task: str) -> None:
        """Begin a task with a free worker. If it is over meanwhile, the next review ends it."""
        had = any(item.peer_id == peer.id for item in self._ports.checkpoints.of_job(task))
        self._begun[peer.id] = task, had, self._ports.clock.now()
        peer.idle_reason = ""
        if (controller := self._jobs.controllers.get(task)) is not None:
            peer.job = task
            controller.post(co.PeerOffered(controller.offer_of(peer)))
        else:
            peer.task = task
            if task.startswith("draft/"):
                peer.send(DraftOrder(task.split("/", 2)[2]))
        self._ports.announcements.touch("peers", peer.id)

    def _end(self, peer: ConnectedPeer) -> None:
        """End a task other than a job."""
        if peer.task.startswith("draft/"):
            peer.send(DraftOrder(""))
            self._services.lost(peer)
        peer.task = ""
        self._ports.announcements.touch("peers", peer.id)

    def _review(self) -> None:
        """Forget what is over, and note how long workers took to begin."""
        now, connected = self._ports.clock.now(), self._ports.peers.connected
        current = {id for id, demand in self._demands.items()
                   if now - demand.at < DEMAND_S and self._ports.peers.is_current(demand.verifier)}  # fmt: skip
        self._demands = {id: demand for id, demand in self._demands.items() if id in current}
        current |= {f"draft/{info.id}" for info in self._undrafted()}
        for peer in self._workers():
            if peer.task and peer.task not in current:
                self._end(peer)
        for peer_id, (_, handled) in list(self._coming.items()):
            controller = self._jobs.controllers.get(connected[peer_id].job) if peer_id in connected else None
            if controller is None or (handled.done() and not controller.core.is_withdrawn(peer_id)):
                del self._coming[peer_id]  # it is lost, or its job keeps it
        for peer_id, (task, had, since) in list(self._begun.items()):
            started = connected.get(peer_id)
            if started is None or task not in (started.job, started.task):
                del self._begun[peer_id]
            elif self._has_begun(started, task):
                del self._begun[peer_id]
                self._start.setdefault((task, had), MovingAverage()).add(now - since)
        current |= self._jobs.controllers.keys()
        self._start = {key: average for key, average in self._start.items() if key[0] in current}

    def _has_begun(self, peer: ConnectedPeer, task: str) -> bool:
        if (controller := self._jobs.controllers.get(task)) is not None:
            return controller.holds(peer.id)
        return bool(peer.serving) or any(part.sessions for part in peer.parts.values())

    def _notify_idle(self, peer: ConnectedPeer) -> None:
        live = [(item, item.core.refusal(peer.id) or item.lacking(peer))
                for item in self._jobs.controllers.values() if item.live]  # fmt: skip
        reasons = (f"job {item.record.name} {refusal or 'is being restored'}" for item, refusal in live)
        text = clip("idle: " + ("; ".join(reasons) or "`p2ptrain jobs create` starts a job"))
        if "train" not in peer.allowed:
            text = "idle: its owner lets it train no job, and no served model needs it"
        if text != peer.idle_reason:
            peer.idle_reason = text
            peer.send(EventNotice("info", "kept-out", text, ""))
