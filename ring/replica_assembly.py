"""The workers of a split model, how they form replicas, and which worker suits which stage. Pure.

A *state* is (step, lineage) of the whole model; each worker holds its stage's part of one. A group of workers, one for
each stage, *shares* a state if each of them has applied it, or can redo the one step that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.texts import human_bytes
from ring.coordination import STANDSTILL, Emit, Instruction, Peer, Planned, SendSurvey, holds
from ring.order import LinkQuality, Links, known_link
from ring.training_costs import CandidateWorker, Training
from ring.view import View
from wire.job_messages import MemberRecord, Report
from wire.records import StagePlanInfo, TrainingPlanInfo

State = tuple[int, str]
NOTHING: State = (0, "0" * 32)
"""What a replica reports if its workers share no state. No state has this lineage."""


def told_stage(held: Mapping[str, int], peer_id: str, stage: int, here: Collection[str]) -> dict[str, int]:
    """Add a worker that was assigned ``stage`` to ``held`` (worker → the stage that it holds, or held last). Of the
    workers that are not ``here``, only the newest 1024 are kept; any other comes back as a spare."""
    told = {key: value for key, value in held.items() if key != peer_id} | {peer_id: stage}
    away = [key for key in told if key not in here and key != peer_id]
    for key in away[: max(0, len(away) - 1024)]:
        del told[key]
    return told


@dataclass(slots=True)
class Worker:
    """One linked worker of the job.

    Attributes:
        stage: the part that it holds or builds; None: a spare, which was assigned nothing yet.
        report: its last report, if it is stopped; None: it trains, builds or fetches.
        trains: it is a member of the current view, and is not known to be stopped.
        moving: it was asked to catch up with a ring, so its state changes.
        healing: it fetches the state within the view.
        replica: the id of its replica, as the coordinator knows it; empty: none.
        restored: the step that it must go back to, until it is in a view; -1: none.
        asked: it was asked to build, or to report what it has, and has not answered yet.
        fresh: it was asked to build anew and has no ring; its reports about a ring are old.
        returned: its link came back, and no view was announced over it yet.
    """

    peer: Peer
    stage: int | None = None
    report: Report | None = None
    trains: bool = False
    moving: bool = False
    healing: bool = False
    replica: str = ""
    restored: int = -1
    asked: bool = False
    fresh: bool = False
    returned: bool = False

    @property
    def peer_id(self) -> str:
        return self.peer.peer_id

    @property
    def settled(self) -> bool:
        return self.report is not None and not self.moving and not self.trains


@dataclass(slots=True)
class Replica:
    """One worker for each stage, which together are one peer of the coordinator.

    Attributes:
        members: worker ids, by stage; empty: a place of the view without workers.
        in_view: it is a place of the current view.
        known: it is one of the coordinator's peers.
        said: the state that it last reported; None: it trains, or has reported nothing since it was asked.
        due: it must report its state again.
    """

    replica_id: str
    members: tuple[str, ...]
    in_view: bool = False
    known: bool = False
    said: State | None = None
    due: bool = False


def holding(reports: Mapping[str, Report], state: State) -> set[str]:
    return {peer_id for peer_id, report in reports.items() if holds(report, *state)}


def shared_states(by_stage: Sequence[Mapping[str, Report]]) -> list[State]:
    """States that some worker has applied and that every stage holds. The highest step is first, then the state with
    the most holders, then the lesser lineage."""
    applied = {(report.applied, report.lineage) for reports in by_stage for report in reports.values()}
    found = []
    for state in applied:
        holders = [len(holding(reports, state)) for reports in by_stage]
        if all(holders):
            found.append((-state[0], -sum(holders), state[1]))
    return [(-step, lineage) for step, _, lineage in sorted(found)]


def in_groups(by_stage: Sequence[Collection[str]]) -> Iterator[tuple[str, ...]]:
    return zip(*(sorted(stage) for stage in by_stage), strict=False)


def newest_kept(by_stage: Sequence[Collection[frozenset[int]]], wholes: Iterable[frozenset[int]] = ()) -> int:
    """The newest step of which every stage has a checkpoint at some worker. Any worker can make the state of step 0.

    Args:
        by_stage: the steps of each worker's checkpoints.
        wholes: the same for checkpoints of the whole model, which contain every stage's part.
    """
    anywhere = frozenset({0}).union(*wholes)
    kept = [anywhere.union(*stage) for stage in by_stage]
    return max(frozenset.intersection(*kept))


def dealt(
    counts: Sequence[int],
    pool: Sequence[str],
    homes: Mapping[str, int | None],
    most: int,
    fits: Callable[[str, int], bool],
) -> dict[str, int]:
    """Worker → stage, for as many replicas as possible. A worker gets a stage only if that completes a replica.

    Args:
        counts: number of workers at each stage, without ``pool``.
        pool: workers that may get a stage, the preferred first. homes: their present stages, kept where needed.
        most: number of replicas that are wanted.
        fits: whether a worker has the memory for a stage.
    """
    given: dict[str, int] = {}
    for replicas in range(min(counts) + 1, most + 1):
        wanted = [stage for stage, count in enumerate(counts) for _ in range(max(replicas - count, 0))]
        taken: dict[str, int] = {}
        for stage in wanted:

            def rank(key: str, stage: int = stage, wanted: Sequence[int] = wanted) -> int:
                home = homes.get(key)
                return 0 if home == stage else 2 if home is not None and home in wanted else 1

            able = {each: [key for key in pool if fits(key, each)] for each in set(wanted)}
            if not _matched(stage, {**able, stage: sorted(able[stage], key=rank)}, taken, set()):
                return given
        given = taken
    return given


def _matched(stage: int, able: Mapping[int, Sequence[str]], taken: dict[str, int], seen: set[str]) -> bool:
    """Give ``stage`` one more worker, if necessary by moving others to stages that fit them too (Kuhn 1955)."""
    for key in (key for key in able[stage] if key not in taken):
        taken[key] = stage
        return True
    for key in (key for key in able[stage] if key in taken and taken[key] != stage and key not in seen):
        seen.add(key)
        if _matched(taken[key], able, taken, seen):
            taken[key] = stage
            return True
    return False


class StagePlanner:
    """Chooses the cuts of a job's model and the stages of its workers: rules 7 and 8 of ``ring.replicas``.

    Args:
        training: None if the model's sizes are not known: then any stage fits any worker.
        planned: stages were assigned before.

    Attributes:
        planned: the first stages are assigned; from now on they are assigned one by one.
        unfit: why there is no plan.
        too_small: workers that an event already reported as too small for a stage.
    """

    def __init__(self, training: Training | None, *, planned: bool) -> None:
        self.training, self.planned, self.unfit = training, planned or training is None, ""
        self.too_small: set[str] = set()
        self._due: float | None = None
        self._tell_due: float | None = None
        self._survey_due: float | None = None
        self._surveyed: frozenset[str] = frozenset()  # the links between these were measured, or a survey was asked for
        self._asked_for: frozenset[CandidateWorker] = frozenset()  # the workers of the last plan that was tried

    def next_deadline(self, now: float) -> float | None:
        return self._due if self._due is not None and self._due > now else None

    def surveyed(self) -> None:
        self._survey_due = None

    def end(self) -> None:
        self._due, self.unfit = None, ""

    def plan(self, peers: Mapping[str, Peer], links: Links, now: float) -> tuple[dict[str, int], list[Instruction]]:
        training = self.training
        if training is None or len(peers) < training.workers:
            self._due = None
            return {}, []
        said: list[Instruction] = []
        if self._waits_for_figures(peers, now, said):
            return {}, said
        from ring.training_placement import plan  # numpy with it: a seed without split jobs stays small

        self._due = None
        there = [_trainee(peer) for peer in peers.values()]
        if frozenset(there) == self._asked_for:
            return {}, said
        self._asked_for = frozenset(there)
        try:
            info, stages = plan(training, there, links)
        except (ResourceError, UserError) as refusal:
            self.unfit = f"{refusal.message}; {refusal.remedy}"
            return {}, [*said, Emit("warning", "does-not-fit", self.unfit)]
        self.planned, self.unfit = True, ""
        if not training.cuts:
            cuts = tuple(stage.start for stage in stages[1:])
            self.training = replace(training, cuts=cuts)
            said.append(Planned(cuts))
        said.append(Emit("info", "planned", _summary(info, stages)))
        return {peer_id: stage.stage for stage in stages for peer_id in stage.peers}, said

    def _waits_for_figures(self, peers: Mapping[str, Peer], now: float, said: list[Instruction]) -> bool:
        if all(peer.flops is not None for peer in peers.values()):
            self._tell_due = None
        elif self._tell_due is None:
            self._tell_due = now + 30.0  # they load their libraries first, which they need in any case
        if self._tell_due is not None and now < self._tell_due:
            self._due = self._tell_due
            return True
        known = any(peer.flops or peer.memory_bytes for peer in peers.values())
        if known and peers.keys() - self._surveyed:
            self._surveyed, self._survey_due = frozenset(peers), now + 4.0  # the shell gives up earlier
            said.append(SendSurvey(tuple(sorted(peers))))
        self._due = self._survey_due
        return self._survey_due is not None and now < self._survey_due

    def deal(
        self,
        counts: Sequence[int],
        peers: Mapping[str, Peer],
        spares: Sequence[str],
        homes: Mapping[str, int | None],
        most: int,
    ) -> tuple[dict[str, int], list[Instruction]]:
        """Returns worker → its new stage, and what to report.

        Args:
            counts: number of workers at each stage, without those in ``homes``, which may leave their stage.
            most: number of replicas that are wanted.
        """
        given = dealt(counts, [*spares, *homes], homes, most, lambda key, stage: self._fits(peers[key], stage))
        left = {key: peers[key] for key in spares if key not in given}
        return {key: stage for key, stage in given.items() if homes.get(key) != stage}, self._why_not(counts, left)

    @property
    def _bounds(self) -> tuple[int, ...]:
        training = self.training
        return (0, *training.cuts, training.layers) if training is not None and training.cuts else ()

    def _fits(self, peer: Peer, stage: int) -> bool:
        bounds, training = self._bounds, self.training
        return training is None or not bounds or training.fits(_trainee(peer), stage, bounds)

    def _why_not(self, counts: Sequence[int], left: Mapping[str, Peer]) -> list[Instruction]:
        training, bounds = self.training, self._bounds
        said: list[Instruction] = []
        if training is None or not bounds:
            return said
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
            said.append(Emit("warning", "too-small", f"{peer.name} stays a spare: {text}", key))
        return said


def _trainee(peer: Peer) -> CandidateWorker:
    return CandidateWorker(peer.peer_id, peer.name, peer.memory_bytes, peer.flops or 0.0, peer.on_host)


def _summary(info: TrainingPlanInfo, stages: Sequence[StagePlanInfo]) -> str:
    parts = (f"{stage.start}-{stage.stop - 1} {'+'.join(stage.names)}" for stage in stages)
    rate = f", {info.tokens_per_s:,.0f} tokens/s predicted" if info.tokens_per_s else ""
    return f"layers of the stages: {', '.join(parts)}{rate}"


def report_of(
    job: str,
    reports: Sequence[Report],
    state: State | None,
    status: str,
    generation: int,
    replica_of: Callable[[str], str],
) -> Report:
    """Combine the reports of one replica's workers into a report of the replica.

    Args:
        state: the state that they share; None: none.
        replica_of: gives the replica of a suspect.
    """
    step, lineage = state or NOTHING
    cause = _cause(reports)
    applied = [report for report in reports if (report.applied, report.lineage) == (step, lineage)]
    return Report(
        job=job,
        generation=generation,
        status=status,
        applied=step,
        prepared=step,
        lineage=lineage,
        square_sum=max((report.square_sum for report in applied), default=0.0),
        corpus=next((report.corpus for report in reports if report.corpus), ""),
        suspect=replica_of(cause.suspect) if cause and cause.suspect else "",
        reason=cause.reason if cause else next((report.reason for report in reports if report.status == "done"), ""),
        reduce_bytes=max((report.reduce_bytes for report in reports), default=0),
        unit_us=max((report.unit_us for report in reports), default=0),  # a chain is as fast as its slowest stage
        windows=max((report.windows for report in reports), default=0),
        cause=cause.cause if cause else "",
        beside=replica_of(cause.beside) if cause and cause.beside else "",
    )


def _cause(reports: Iterable[Report]) -> Report | None:
    broken = [report for report in reports if report.status == "broken"]
    return min(broken, key=lambda report: (not report.cause, not report.suspect), default=None)


def standing_status(reports: Iterable[Report]) -> str:
    statuses = {report.status for report in reports}
    return next(iter(statuses)) if len(statuses) == 1 and statuses <= STANDSTILL else "broken"


def as_peer(replica_id: str, workers: Sequence[Worker]) -> Peer:
    peers = [worker.peer for worker in workers]
    name, host = "+".join(peer.name for peer in peers), " ".join(f"{peer.peer_id} {peer.host}" for peer in peers)
    return Peer(replica_id, name, host, peers[0].port, all(peer.follows for peer in peers), len(peers))


def contracted(view: View, replica_ids: Sequence[str]) -> View:
    names = ("+".join(member.name for member in view.replica(rank)) for rank in range(0, view.size, view.stages))
    members = tuple(
        MemberRecord(replica_id, name, "", head.port, head.first, head.count, head.healthy)
        for replica_id, name, head in zip(replica_ids, names, view.members[:: view.stages], strict=True)
    )
    return View(view.job, view.generation, view.step, view.lineage, members, view.square_sum)


def between_replicas(links: Links, replicas: Mapping[str, tuple[str, ...]]) -> Links:
    """(replica, replica) → the slowest link from one replica to its right neighbour: of each stage's ring, and from the
    last stage to the first stage. Pairs with an unknown link are left out."""
    found: dict[tuple[str, str], LinkQuality] = {}
    for here, mine in replicas.items():
        for there, its in replicas.items() if mine else ():
            if here == there or not its:
                continue
            ways = [known_link(links, *pair) for pair in (*zip(mine, its, strict=True), (mine[-1], its[0]))]
            known = [way for way in ways if way is not None]
            if len(known) == len(ways):
                slowest = min(known, key=lambda way: way.bandwidth_bps or 0.0)
                latency_s = max(way.latency_s for way in known)
                found[here, there] = LinkQuality(latency_s, slowest.bandwidth_bps)
    return found
