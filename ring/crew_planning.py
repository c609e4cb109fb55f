"""Which worker takes which stage of a split model, by its memory and speed; and how the model is cut.

A layer of ``ring.crews``: rules 7 and 8. What workers are and links do is told (``coordination.Peer``, ``Measured``);
the arithmetic is ``ring.training_placement``'s. Where the model's sizes are not known, nothing here makes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.units import human_bytes
from ring import coordination as co
from ring.crew_places import Places
from ring.crewing import Worker, dealt
from ring.training_costs import Trainee

if TYPE_CHECKING:
    from ring.training_placement import TrainingPlan

TELL_S = 30.0
"""For workers to tell how fast they are: they load their libraries first, which has to be done in any case."""
SURVEY_S = 4.0
"""For the ways between them to be measured; the shell gives up before."""
NEAR = 1e-6  # times that differ by such a part are equal


class Planning(Places):
    """What is planned before the first stage is given, and dealt by afterwards."""

    # ------------------------------------------------------------------------------------------------- the first muster

    def _plan(self) -> bool:
        """Rule 7: cut the model and give out its stages, once everything that may be known is."""
        training = self.training
        if training is None or len(self._workers) < training.workers:
            self._plan_due = None
            return False
        if self._waits_for_figures():
            return False
        from ring.training_placement import plan  # numpy with it: a seed without split jobs stays small

        self._plan_due = None
        there = [self._trainee(worker) for worker in self._workers.values()]
        question = frozenset(there)
        if question == self._asked_for:
            return False
        self._asked_for = question
        try:
            found = plan(training, there, self._measured.links)
        except (ResourceError, UserError) as refusal:
            self._unfit = f"{refusal.message}; {refusal.remedy}"
            self._say("warning", "does-not-fit", self._unfit)
            return False
        self._planned, self._unfit = True, ""
        if not training.cuts:
            self.training = replace(training, cuts=found.cuts)
            self._out.append(co.Planned(found.cuts))
        self._say("info", "planned", _summary(found))
        for stage, part in enumerate(found.stages):
            for trainee in part.trainees:
                self._give(self._workers[trainee.id], stage)
        return True

    def _waits_for_figures(self) -> bool:
        """For the speeds of those here, then for the ways between them; neither for long."""
        silent = any(worker.peer.flops is None for worker in self._workers.values())
        if not silent:
            self._tell_due = None
        elif self._tell_due is None:
            self._tell_due = self._now + TELL_S
        if self._tell_due is not None and self._now < self._tell_due:
            self._plan_due = self._tell_due
            return True
        known = any(worker.peer.flops or worker.peer.memory_bytes for worker in self._workers.values())
        if known and self._workers.keys() - self._surveyed:
            self._surveyed, self._survey_due = frozenset(self._workers), self._now + SURVEY_S
            self._out.append(co.SendSurvey(tuple(sorted(self._workers))))
        self._plan_due = self._survey_due
        return self._survey_due is not None and self._now < self._survey_due

    def _give(self, worker: Worker, stage: int) -> None:
        """Have it build that stage, as it holds nothing that anybody needs."""
        worker.stage, worker.report, worker.restored, worker.asked = stage, None, -1, False
        worker.fresh = True
        if self._back is not None and not self._keeps_later(worker.peer_id, self._back):
            self._go_to(worker, self._back)  # as all others were told
        else:
            self._assign(worker)

    # ---------------------------------------------------------------------------------------------------- spares, later

    def _dealt(self, counts: Sequence[int], spares: Sequence[str], idle: Sequence[str]) -> dict[str, int]:
        """Rule 8: worker → the stage that it is to take from now on.

        Args:
            counts: workers of each stage, without ``idle``, which have one that they may leave.
        """
        pool, homes = [*spares, *idle], {key: self._workers[key].stage for key in idle}
        pace_s = self._pace_s()
        given = dealt(
            counts, pool, homes, self.terms.most, self._fits, lambda key, stage: self._cost(key, stage, pace_s)
        )
        self._tell_why_not(counts, [key for key in spares if key not in given])
        return {key: stage for key, stage in given.items() if homes.get(key) != stage}

    def _trainee(self, worker: Worker) -> Trainee:
        peer = worker.peer
        return Trainee(peer.peer_id, peer.name, peer.memory_bytes, peer.flops or 0.0, peer.on_host)

    @property
    def _bounds(self) -> tuple[int, ...]:
        """Of the stages' layers; empty where they, or the model's sizes, are not known."""
        training = self.training
        return (0, *training.cuts, training.layers) if training is not None and training.cuts else ()

    def _fits(self, peer_id: str, stage: int) -> bool:
        bounds, training = self._bounds, self.training
        return training is None or not bounds or training.fits(self._trainee(self._workers[peer_id]), stage, bounds)

    def _pace_s(self) -> float:
        """Of a micro-batch, at the slowest worker that is in a crew; 0 where that is not known."""
        crewed = [worker for worker in self._workers.values() if worker.stage is not None and worker.crew]
        known = [self._compute_s(worker, worker.stage or 0) for worker in crewed]
        return max((each_s for each_s in known if each_s is not None), default=0.0)

    def _cost(self, peer_id: str, stage: int, pace_s: float) -> tuple[int, float]:
        """Of two that fit, the lesser is the better one: the slowest that does not slow down the crews that are there,
        else the fastest."""
        mine_s = self._compute_s(self._workers[peer_id], stage)
        if mine_s is None:
            return 0, 0.0
        return (0, -mine_s) if mine_s <= pace_s * (1 + NEAR) else (1, mine_s)

    def _compute_s(self, worker: Worker, stage: int) -> float | None:
        """Of a micro-batch; None where that is not known."""
        bounds, training = self._bounds, self.training
        if training is None or not bounds or not worker.peer.flops:
            return None
        return training.compute_s(bounds[stage], bounds[stage + 1], worker.peer.flops)

    def _tell_why_not(self, counts: Sequence[int], left: Sequence[str]) -> None:
        """People see why somebody stays a spare."""
        self._too_small = {told for told in self._too_small if told[0] in self._workers}
        if not self._bounds:
            return
        lacking = [stage for stage, count in enumerate(counts) if count == min(counts)]
        vain = [stage for stage in lacking if not any(self._fits(key, stage) for key in left)]
        for key in left:
            hopeless = not any(self._fits(key, stage) for stage in range(self.stages))
            stages = range(self.stages) if hopeless else vain if len(left) >= len(lacking) else ()
            needs = [(self._need_bytes(key, stage), stage) for stage in stages]
            if needs and (key, min(needs)[1]) not in self._too_small:
                self._too_small.add((key, min(needs)[1]))
                self._say("warning", "too-small", self._why_not(key, *min(needs)), key)

    def _need_bytes(self, peer_id: str, stage: int) -> int:
        """What it would take to train that stage there."""
        training, bounds, peer = self.training, self._bounds, self._workers[peer_id].peer
        assert training is not None
        return training.need_bytes(stage, bounds[stage], bounds[stage + 1], on_host=peer.on_host)

    def _why_not(self, peer_id: str, need_bytes: int, stage: int) -> str:
        peer, bounds = self._workers[peer_id].peer, self._bounds
        return (
            f"{peer.name} stays a spare: it gives {human_bytes(peer.memory_bytes)}, and stage {stage} (layers "
            f"{bounds[stage]} to {bounds[stage + 1] - 1}) takes {human_bytes(need_bytes)} to train"
        )


def _summary(found: TrainingPlan) -> str:
    stages = (f"{part.start}-{part.stop - 1} {'+'.join(each.name for each in part.trainees)}" for part in found.stages)
    rate = f", {found.tokens_per_s:,.0f} tokens/s predicted" if found.tokens_per_s else ""
    return f"layers of the stages: {', '.join(stages)}{rate}"
