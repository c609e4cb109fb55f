"""Which worker holds which part of a model that has several. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.texts import human_bytes
from ring.coordination import CutsChosen, Emit, Instruction, JobWorker, SendSurvey
from ring.planning.measurements import CandidateWorker, Links
from ring.planning.workloads import TrainingWorkload
from wire.records import StagePlanInfo, TrainingPlanInfo


def assign_stages(
    counts: Sequence[int],
    pool: Sequence[str],
    homes: Mapping[str, int],
    limit: int,
    fits: Callable[[str, int], bool],
) -> dict[str, int]:
    """Worker → stage, for up to ``limit`` replicas. A worker gets a stage only if that completes a replica.

    The stage that the fewest workers fit comes first. As a worker that fits a large stage fits a small one, too, that
    makes as many replicas as possible.

    Args:
        counts: number of workers at each stage, without ``pool``.
        pool: workers that may get a stage, the preferred first. homes: their present stages, kept where needed.
        fits: whether a worker has the memory for a stage.
    """
    able = [[key for key in pool if fits(key, stage)] for stage in range(len(counts))]
    assigned: dict[str, int] = {}
    for replicas in range(min(counts) + 1, limit + 1):
        wanted = [stage for stage, count in enumerate(counts) for _ in range(max(replicas - count, 0))]
        taken: dict[str, int] = {}
        for stage in sorted(wanted, key=lambda stage: len(able[stage])):
            left = [key for key in able[stage] if key not in taken]
            if not left:
                return assigned
            at_home = [key for key in left if homes.get(key) == stage]
            elsewhere = [key for key in left if homes.get(key) not in wanted]
            taken[(at_home or elsewhere or left)[0]] = stage
        assigned = taken
    return assigned


class StagePlanner:
    """Chooses the cuts of a job's model and the parts of its workers.

    If the model's sizes are known, all workers of the first view get their parts at once, together with the cuts
    (``ring.planning.pipeline``), which never change. Later a spare gets a part if that completes a replica, and if it
    has the memory. Any part fits a worker that reports no memory.

    Args:
        training: None if the model's sizes are not known.
        planned: parts were assigned before.

    Attributes:
        due: when a plan waits no longer for speeds and links.
        unfit: why there is no plan.
        too_small: workers that an event already reported as too small for a stage.
    """

    def __init__(self, parts: int, training: TrainingWorkload | None, *, planned: bool) -> None:
        self.training, self.unfit, self._parts = training, "", parts
        self.due: float | None = None
        self.too_small: set[str] = set()
        self._planned = planned or training is None  # from now on parts are assigned one by one
        self._tell_due: float | None = None
        self._survey_due: float | None = None
        self._surveyed: frozenset[str] = frozenset()  # the links between these were measured, or a survey was asked for
        self._asked_for: frozenset[CandidateWorker] = frozenset()  # the workers of the last plan that was tried

    def surveyed(self) -> None:
        self._survey_due = None

    def end(self) -> None:
        self.due, self.unfit = None, ""

    def assign(
        self,
        peers: Mapping[str, JobWorker],
        held: Mapping[str, int],
        idle: Sequence[str],
        links: Links,
        limit: int,
        now: float,
    ) -> tuple[dict[str, int], list[Instruction]]:
        """Returns worker → its new part, and what to report. ``idle``: workers that may change their part if that
        completes a replica. ``limit``: of replicas."""
        if not self._planned:
            return self._plan(peers, links, now)
        homes = {key: held[key] for key in idle}
        here = [held[key] for key in peers if key in held]
        totals = [here.count(part) for part in range(self._parts)]
        counts = [total - list(homes.values()).count(part) for part, total in enumerate(totals)]
        spares = sorted(key for key in peers if key not in held)
        assigned = assign_stages(
            counts, [*spares, *homes], homes, limit, lambda key, stage: self._fits(peers[key], stage)
        )
        left = {key: peers[key] for key in spares if key not in assigned}
        return {key: part for key, part in assigned.items() if homes.get(key) != part}, self._why_not(totals, left)

    def _plan(
        self, peers: Mapping[str, JobWorker], links: Links, now: float
    ) -> tuple[dict[str, int], list[Instruction]]:
        training = self.training
        if training is None or len(peers) < training.workers:
            self.due = None
            return {}, []
        notices: list[Instruction] = []
        if self._waits_for_figures(peers, now, notices):
            return {}, notices
        from ring.planning.pipeline import plan_pipeline  # numpy with it: a seed without split jobs stays small

        self.due = None
        there = [candidate_of(peer) for peer in peers.values()]
        if frozenset(there) == self._asked_for:
            return {}, notices
        self._asked_for = frozenset(there)
        try:
            info, stages = plan_pipeline(training, there, links)
        except (ResourceError, UserError) as refusal:
            self.unfit = refusal.with_remedy
            return {}, [*notices, Emit("warning", "does-not-fit", self.unfit)]
        self._planned, self.unfit = True, ""
        if not training.cuts:
            cuts = tuple(stage.start for stage in stages[1:])
            self.training = replace(training, cuts=cuts)
            notices.append(CutsChosen(cuts))
        notices.append(Emit("info", "planned", _summary(info, stages)))
        return {peer_id: stage.stage for stage in stages for peer_id in stage.peers}, notices

    def _waits_for_figures(self, peers: Mapping[str, JobWorker], now: float, notices: list[Instruction]) -> bool:
        if all(peer.flops is not None for peer in peers.values()):
            self._tell_due = None
        elif self._tell_due is None:
            self._tell_due = now + 30.0  # they load their libraries first, which they need in any case
        if self._tell_due is not None and now < self._tell_due:
            self.due = self._tell_due
            return True
        known = any(peer.flops or peer.memory_bytes for peer in peers.values())
        if known and peers.keys() - self._surveyed:
            self._surveyed, self._survey_due = frozenset(peers), now + 4.0  # the shell gives up earlier
            notices.append(SendSurvey(tuple(sorted(peers))))
        self.due = self._survey_due
        return self._survey_due is not None and now < self._survey_due

    @property
    def _bounds(self) -> tuple[int, ...]:
        training = self.training
        return (0, *training.cuts, training.layers) if training is not None and training.cuts else ()

    def _fits(self, peer: JobWorker, stage: int) -> bool:
        bounds, training = self._bounds, self.training
        return training is None or not bounds or training.fits(candidate_of(peer), stage, bounds)

    def _why_not(self, counts: Sequence[int], left: Mapping[str, JobWorker]) -> list[Instruction]:
        training, bounds = self.training, self._bounds
        notices: list[Instruction] = []
        if training is None or not bounds:
            return notices
        lacking = [stage for stage, count in enumerate(counts) if count == min(counts)]
        for key, peer in left.items():
            useful = len(left) < len(lacking) and any(self._fits(peer, stage) for stage in range(len(counts)))
            stages = [stage for stage in lacking if not self._fits(peer, stage)]
            if key in self.too_small or useful or not stages:
                continue
            self.too_small.add(key)
            need = training.need_bytes
            needs = ((need(at, bounds[at], bounds[at + 1], on_host=peer.on_host), at) for at in stages)
            need_bytes, at = min(needs)
            text = f"it offers {human_bytes(peer.memory_bytes)}, and stage {at} (layers {bounds[at]} to "
            text += f"{bounds[at + 1] - 1}) needs {human_bytes(need_bytes)} to train"
            notices.append(Emit("warning", "too-small", f"{peer.name} stays a spare: {text}", key))
        return notices


def candidate_of(peer: JobWorker) -> CandidateWorker:
    return CandidateWorker(peer.peer_id, peer.name, peer.memory_bytes or math.inf, peer.flops or 0.0, peer.on_host)


def _summary(info: TrainingPlanInfo, stages: Sequence[StagePlanInfo]) -> str:
    parts = (f"{stage.start}-{stage.stop - 1} {'+'.join(stage.names)}" for stage in stages)
    rate = f", {info.tokens_per_s:,.0f} tokens/s predicted" if info.tokens_per_s else ""
    return f"layers of the stages: {', '.join(parts)}{rate}"
