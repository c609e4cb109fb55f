"""The coordinator's vocabulary: events, instructions, options of a job. Also what it knows of its workers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TypeAlias

from ring.planning.measurements import Links
from ring.planning.ring_plan import RingOptions
from ring.planning.workloads import TrainingWorkload
from ring.token import ShareRule
from ring.view import REDUCED_TO_STATE, View
from wire.job_messages import MemberRecord, Report, SettingChange
from wire.schema import Declared

STANDSTILL = frozenset({"held", "broken", "done"})
"""Values of ``Report.status`` of a member that has stopped training in the view that it names."""
OUTSIDE = frozenset({"ready", "following"})
"""Values of a worker that may be put into a view. ``following``: it keeps up with a ring that it is not in."""
STATUSES = STANDSTILL | OUTSIDE | {"training", "healed", "hung", "failed"}
"""All values of ``Report.status``."""
GRACE_S = 30.0
"""Time for members that are away while the ring runs, and for the holder of the newest state."""
BUILD_S = 600.0
"""Time to build a state that may be the newest one, or to load a checkpoint that is to be restored."""
HOLD_S = 600.0
"""After a hold, until members that have not stopped are struck off. Long, because a step may be long."""
SETTLE_S = 30.0
"""The same after a break. A dead member is noticed at once, because its connections close."""
TORN_S = 3.0
"""How long the others wait for a member that was healing. It may have to load its state again."""
RETURN_S = 10.0
"""How long stopped members wait for an absent one. Longer than a worker pauses between attempts to reach the seed."""
SAVE_AGAIN_S, SAVE_AGAIN_MOST_S = 5.0, 60.0
"""Pause between two attempts to save a job's result; it doubles when every member has tried."""
MOST_ASYNCHRONOUS = 1024
"""Members of an asynchronous view; the server's memory allows fewer."""
MOST_AWAY = 1024
"""Workers that are away and whose part is remembered; any other comes back as a spare."""
CATCHING_UP_PER_MEMBER = 2
"""Newcomers that catch up at a time, per member. Each member sends to two, so any crowd is in after a few rounds."""


class JobPhase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = frozenset({JobPhase.DONE, JobPhase.CANCELLED, JobPhase.FAILED})
_W, _R, _S, _P = JobPhase.WAITING, JobPhase.RUNNING, JobPhase.STOPPING, JobPhase.PAUSED
TRANSITIONS: dict[JobPhase, frozenset[JobPhase]] = {
    _W: frozenset({_R, _P}) | ENDED,
    _R: frozenset({_W, _S, JobPhase.CANCELLED}),
    _S: frozenset({_W, _P, JobPhase.CANCELLED, JobPhase.FAILED}),
    _P: frozenset({_S, JobPhase.CANCELLED, JobPhase.FAILED}),
    **{ended: frozenset({_W}) for ended in ENDED},
}


class InvalidTransition(AssertionError):
    """An impossible transition: a defect of this program. The text has the last events."""


class JobWorker(Declared):
    """A worker as views name it. ``host`` and ``port`` are the address of its data port.

    Attributes:
        memory_bytes: memory for parts of models; 0: not reported.
        flops: measured speed of its computing; 0: not known; None: it will be reported.
        on_host: it computes on a CPU.
    """

    peer_id: str
    name: str
    host: str
    port: int
    memory_bytes: int = 0
    flops: float | None = 0.0
    on_host: bool = True


class JobOptions(Declared):
    """A job's requirements.

    Attributes:
        replicas: number of replicas that the first view waits for. A replica of a model with one part is a worker.
        micro_batches: number in a global batch, and so the most replicas. At most the workers of two more stay as
            spares, and take a place that becomes free.
        minted_below: an earlier seed may have minted generations up to this one.
        share_rule: how the replicas of a view share its micro-batches.
        least: fewest replicas of a view. With fewer the job waits.
        asynchronous: the first member of a view is the server (``ring.staleness``). It holds the state, and any number
            of others take part.
        parts: of the model.
        training: the sizes that placement needs, and the cuts if they are chosen; None: not known.
        masked: nobody sees the contribution of one member.
        least_steps: a job is not done before; 0: it may end early.
    """

    replicas: int
    micro_batches: int
    ring_options: RingOptions = field(default_factory=RingOptions)
    minted_below: int = 0
    share_rule: ShareRule = field(default_factory=ShareRule)
    least: int = 1
    asynchronous: bool = False
    parts: int = 1
    training: TrainingWorkload | None = None
    masked: bool = False
    least_steps: int = 0

    @property
    def places(self) -> int:
        """The most replicas of a view."""
        return MOST_ASYNCHRONOUS if self.asynchronous else self.micro_batches

    @property
    def most(self) -> int:
        return max(self.replicas, self.places) + 2


class WorkerNeeds(Declared):
    """How many workers a job needs: ``floor`` keep its state and go on, it wants ``least``, and can use ``most``, in
    groups of ``unit``."""

    floor: int
    least: int
    most: int
    unit: int


class StoredJob(Declared):
    """What a restarted seed read from its store.

    Attributes:
        paused: a person asked for a pause; ``state`` may not show it yet.
        held: peer id → the part that it holds, or held last, if the model has several.
        branch: the peers whose states and checkpoints belong to the run as it continued after it last went back to an
            older step. Those of other peers may belong to an *abandoned branch*: the later steps that it gave up.
            None: it never went back, so all peers' count.
        step_s: duration of a step; 0: not known.
        changes: as of ``View``.
    """

    state: str = "waiting"
    reason: str = ""
    paused: bool = False
    view: View | None = None
    corpus: str = ""
    known_step: int = 0
    saved: CheckpointsSaved = field(default_factory=lambda: CheckpointsSaved({}))
    held: Mapping[str, int] = field(default_factory=dict)
    branch: frozenset[str] | None = None
    step_s: float = 0.0
    changes: tuple[SettingChange, ...] = ()


# -------------------------------------------------------------------------------------------------------------- events


class PeerOffered(Declared):
    """A free worker is offered to this job."""

    peer: JobWorker


class PeerReturned(Declared):
    """A worker of this job is back. It was in the view ``generation`` (0: in none). Its report follows."""

    peer: JobWorker
    generation: int


class PeerReported(Declared):
    peer_id: str
    report: Report


class PeerLost(Declared):
    """The control link ended or was silent for too long. ``left``: the peer left on purpose."""

    peer_id: str
    reason: str
    left: bool = False


class StepCommitted(Declared):
    """Rank 0 reported a committed step and its duration; 0: not reported."""

    step: int
    step_s: float = 0.0


class LinksMeasured(Declared):
    """The measured links between peers, and a step's compute time (0: not known). They apply from the next view on: no
    ring is stopped for a better order."""

    links: Links = field(repr=False)
    compute_s: float = 0.0


class PeerTold(Declared):
    """A worker's heartbeat changed what is known of it."""

    peer: JobWorker


class PeerWithdrawn(Declared):
    """The pool has another task for a worker of this job. The job releases it as soon as no state depends on it."""

    peer_id: str


class CheckpointsSaved(Declared):
    """``wholes``: peer id → steps of its known checkpoints of the whole model. Any worker can load its part from such a
    checkpoint. ``parts``: (peer id, part) → the same for those of one part of a model that has several."""

    wholes: Mapping[str, frozenset[int]] = field(repr=False)
    parts: Mapping[tuple[str, int], frozenset[int]] = field(default_factory=dict, repr=False)


class Restore(Declared):
    """Go back to the checkpoint of ``step`` and ``lineage``, which ``peer_id`` holds and has verified. The coordinator
    itself names only a step: then it is the state of that step that all parts load."""

    step: int
    peer_id: str
    lineage: str


class ChangeSettings(Declared):
    """A person changes settings. They apply from the step with which the next view begins.

    Attributes:
        changes: without their step. least_steps: as of ``JobOptions``, from now on.
    """

    changes: tuple[SettingChange, ...]
    least_steps: int


class Signal(Enum):
    TICK = "time went by"
    SURVEYED = "what ``SendSurvey`` asked for is done, as far as it could be"
    PAUSE = "a person wants the job to pause"
    RESUME = "a person wants it to go on"
    CANCEL = "a person ends the job"
    SAVE = "a person wants a checkpoint"
    REFORM = "links between its members are better now: a ring formed again may use them"
    YIELD = "another job waits for workers: a paused one whose state is on a disk lets its own go"


Event: TypeAlias = (
    "PeerOffered | PeerReturned | PeerReported | PeerLost | PeerWithdrawn | StepCommitted | LinksMeasured | PeerTold"
    " | CheckpointsSaved | Restore | ChangeSettings | Signal"
)
"""What ``handle`` takes."""


@dataclass(slots=True)
class ChangedSettings:
    """Changes of a job's settings: ``made`` ones have their step; those ``asked`` for get that of the next view."""

    made: tuple[SettingChange, ...]
    least_steps: int
    asked: tuple[SettingChange, ...] = ()

    def ask(self, event: ChangeSettings) -> None:
        self.asked, self.least_steps = self.asked + event.changes, event.least_steps

    def begin_view(self, step: int) -> tuple[SettingChange, ...]:
        for change in self.asked:
            value, before = change.value, change.before
            if change.key == "job.steps":  # the ring may have done more until it stopped
                value, before = (str(max(int(steps), step)) for steps in (value, before))
            self.made += (SettingChange(step, change.key, value, before),)
        self.asked = ()
        return self.made


# -------------------------------------------------------------------------------------------------------- instructions


class SendAssign(Declared):
    """``stage``, ``stages``: the part of the model to hold, and the number of parts. ``holders``: peers that have the
    files of all parts of ``restore_step``. ``lineage``: of ``restore_step``; empty if it is not known."""

    peer_id: str
    corpus: str
    restore_step: int
    stage: int = 0
    stages: int = 1
    holders: tuple[JobWorker, ...] = ()
    lineage: str = ""


class SendSurvey(Declared):
    """Measure the unknown links between these workers; ``Signal.SURVEYED`` follows."""

    peer_ids: tuple[str, ...]


class CutsChosen(Declared):
    """The layers with which the second and each later stage begin, for the life of the job. They must be durable before
    any later instruction is sent."""

    cuts: tuple[int, ...]


class SendHold(Declared):
    peer_ids: tuple[str, ...]
    generation: int
    reason: str


class SendCatchUp(Declared):
    """Ask a peer beside a running ring to fetch the state from ``sources``, members of that view."""

    peer_id: str
    generation: int
    sources: tuple[MemberRecord, ...]


class SendSave(Declared):
    peer_ids: tuple[str, ...]


class SendRelease(Declared):
    """The peer no longer belongs to this job. The shell may offer it again unless ``refusal`` says why not."""

    peer_id: str
    reason: str


class Mint(Declared):
    """Make the view durable, then announce it to all its members.

    Attributes:
        restored: the run went back to ``view.step``, because a person asked, or because no newer state is here. Peers'
            states of later steps no longer belong to this run.
        branch: as ``StoredJob.branch``, from now on.
    """

    view: View
    restored: bool
    branch: frozenset[str] | None


class SetState(Declared):
    state: str
    reason: str


class SetCorpus(Declared):
    digest: str


class Emit(Declared):
    level: str
    kind: str
    text: str
    peer_id: str = ""


Instruction: TypeAlias = (
    "SendAssign | SendSurvey | CutsChosen | SendHold | SendCatchUp | SendSave | SendRelease | Mint"
    " | SetState | SetCorpus | Emit"
)
"""What the shell must do, in order."""


# -------------------------------------------------------------------------------------------------------- what is known


@dataclass(slots=True)
class KnownPeer:
    """One peer of the job.

    Attributes:
        standing: its report, if it is stopped and so may be put into a view.
        returned: it reconnected with its state, and may follow a ring that an earlier connection asked it to follow.
        asked: ``restore_step`` of an assignment that it has not answered yet. It is asked nothing else before.
        entered: step and lineage that it had when it became a member of the view.
    """

    peer: JobWorker
    standing: Report | None = None
    entered: tuple[int, str] | None = None
    returned: bool = False
    asked: int | None = None


@dataclass(slots=True)
class Roster:
    """The peers of a job, the parts that they hold, and the condition of its last view's members.

    Attributes:
        parts: of the model.
        held: as ``StoredJob.held``. A change must be durable before the worker is told of it.
        running: members that are not known to be stopped.
        unheard: members of ``running`` that have sent no report since the seed or their link came back.
        away: members of a running view whose link to the seed ended.
        healing: members that fetch the state.
        committed: the view has committed a step; assumed for a view that an earlier seed minted.
        withdrawn: workers for which the pool has another task.
        banned: workers that failed or have other data. They are refused until they connect again.
        failures: peer id → why it cannot continue, for members of the last view.
    """

    parts: int = 1
    held: dict[str, int] = field(default_factory=dict)
    peers: dict[str, KnownPeer] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    unheard: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    healing: set[str] = field(default_factory=set)
    committed: bool = True
    withdrawn: set[str] = field(default_factory=set)
    banned: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)

    def name(self, peer_id: str, view: View | None = None) -> str:
        known = self.peers.get(peer_id)
        return known.peer.name if known else view.name_of(peer_id) if view else peer_id

    def part_of(self, peer_id: str) -> int | None:
        """The part that the worker holds or builds; None: a spare, which was assigned nothing yet."""
        return self.held.get(peer_id) if self.parts > 1 else 0

    def give(self, peer_id: str, part: int) -> None:
        """Note that the worker is assigned a part."""
        self.held.pop(peer_id, None)  # the newest are at the end
        self.held[peer_id] = part
        away = [key for key in self.held if key not in self.peers]
        for key in away[: max(0, len(away) - MOST_AWAY)]:
            del self.held[key]
        self.peers[peer_id].standing = None

    def by_part(self, reports: Reports) -> list[Reports]:
        found: list[Reports] = [{} for _ in range(self.parts)]
        for peer_id, report in reports.items():
            if (part := self.part_of(peer_id)) is not None:
                found[part][peer_id] = report
        return found

    def candidates(self, excluded: Collection[str], holders: Collection[str] = ()) -> Reports:
        """Stopped workers, without those ``excluded`` if others have the same part, and one of them is a holder of the
        state, if ``holders`` are given. A bad link is better than a lost step."""
        found: Reports = {}
        for reports in self.by_part(self.standing()):
            fit = {peer_id: report for peer_id, report in reports.items() if peer_id not in excluded}
            found |= fit if fit and not (holders and fit.keys().isdisjoint(holders)) else reports
        return found

    def whole(self, reports: Reports) -> bool:
        """Whether these workers can form a replica: every part has one."""
        return all(self.by_part(reports))

    def forget(self, peer_id: str) -> None:
        self.peers.pop(peer_id, None)
        self.withdrawn.discard(peer_id)
        self.note_stopped(peer_id)

    def note_stopped(self, peer_id: str) -> None:
        for group in (self.running, self.unheard, self.away, self.healing):
            group.discard(peer_id)

    def clear(self) -> None:
        for group in (self.running, self.unheard, self.away, self.healing, self.withdrawn, self.banned):
            group.clear()
        self.peers.clear()
        self.failures.clear()

    def standing(self) -> Reports:
        return {peer_id: known.standing for peer_id, known in self.peers.items() if known.standing}

    def survivors(self, view: View | None) -> Reports:
        """Members that hold the run's state in memory. They are stopped in ``view``, or, if they never received it,
        before it with the state that it begins with."""
        if view is None:
            return {}
        members = {member.peer_id for member in view.members}
        return {
            peer_id: report
            for peer_id, report in self.standing().items()
            if report.status in STANDSTILL
            and peer_id in members
            and (report.generation == view.generation or holds(report, view.step, view.lineage))
            and not self._is_of_another_branch(peer_id, report, view)
        }

    def _is_of_another_branch(self, peer_id: str, report: Report, view: View) -> bool:
        """Whether a member still has the later state with which it entered the view, as it has not healed yet."""
        entered = (report.applied, report.lineage) == self.peers[peer_id].entered
        return entered and report.applied >= view.step and not holds(report, view.step, view.lineage)

    def building(self) -> bool:
        return any(self.part_of(key) is not None and not known.standing for key, known in self.peers.items())


class Deadlines:
    """The deadlines of one phase, by name. ``passed``: those that expired in this phase."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self._at: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def at(self, name: str) -> float:
        return self._at.get(name, float("inf"))

    def next(self) -> list[float]:
        return list(self._at.values())

    def arm(self, name: str, at: float) -> None:
        self._at[name] = at

    def start(self, name: str, at: float) -> None:
        if name not in self.passed:
            self._at.setdefault(name, at)

    def hasten(self, name: str, at: float) -> None:
        self._at[name] = min(self._at[name], at)

    def drop(self, *names: str) -> None:
        for name in names:
            self._at.pop(name, None)
            self.passed.discard(name)

    def clear(self, *, keep: str = "") -> None:
        self._at = {name: at for name, at in self._at.items() if name == keep}
        self.passed.clear()

    def expire(self, now: float) -> set[str]:
        due = {name for name, at in self._at.items() if at <= now}
        self._at = {name: at for name, at in self._at.items() if name not in due}
        self.passed |= due
        return due


class CatchUps:
    """Newcomers that fetch the state beside the running ring, by peer id.

    A newcomer is asked to *catch up*. It reports that it *follows* when it is at most a step behind, or cannot get that
    close. Then it may enter, and the ring stops only for a new view. It may also enter when its time is over: then it
    heals within the ring.

    Attributes:
        moving: newcomers whose state changes beside the ring, so that an earlier report of it does not count.
    """

    def __init__(self) -> None:
        self.moving: set[str] = set()
        self._enters_at: dict[str, float] = {}  # when a newcomer may enter anyway; -inf: it may

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._enters_at

    def next(self) -> list[float]:
        return [at for at in self._enters_at.values() if at > -math.inf]

    def expire(self, now: float) -> None:
        for peer_id, at in self._enters_at.items():
            if at <= now:
                self._enters_at[peer_id] = -math.inf

    def choose(self, late: Collection[str], members: int, room: int) -> list[str]:
        """Which of the ``late`` newcomers a ring of ``members`` should ask now, if the view has ``room`` for more."""
        moving = self.moving.intersection(late)
        fetching = [peer_id for peer_id in moving if not self.may_enter(peer_id)]
        waiting = [peer_id for peer_id in sorted(late) if peer_id not in moving and not self.may_enter(peer_id)]
        return waiting[: max(min(CATCHING_UP_PER_MEMBER * members - len(fetching), room - len(moving)), 0)]

    def begin(self, peer_id: str, now: float, reduce_bytes: int) -> None:
        """Record that the peer was asked to catch up. Its time begins with the first request."""
        # The time allows for one megabyte per second, as for members that heal within a ring.
        self._enters_at.setdefault(peer_id, now + GRACE_S + REDUCED_TO_STATE * reduce_bytes / 1e6)
        self.moving.add(peer_id)

    def let_in(self, peer_id: str) -> None:
        self._enters_at[peer_id] = -math.inf

    def take_status(self, peer_id: str, status: str) -> None:
        """Take in a report: ``following``, or ``ready`` if the peer began anew."""
        if status == "ready":
            self.moving.discard(peer_id)
        else:
            self.moving.add(peer_id)
            self.let_in(peer_id)

    def may_enter(self, peer_id: str) -> bool:
        return self._enters_at.get(peer_id) == -math.inf

    def forget(self, peer_id: str) -> None:
        self._enters_at.pop(peer_id, None)
        self.moving.discard(peer_id)

    def clear(self) -> None:
        self._enters_at.clear()
        self.moving.clear()


Reports = dict[str, Report]
"""Peer id → the report of a stopped peer."""


def holds(report: Report, step: int, lineage: str) -> bool:
    """Whether the peer has that state, or can redo the one step that it lacks from its redo buffer."""
    if (report.applied, report.lineage) == (step, lineage):
        return True
    return report.status in STANDSTILL and (report.prepared, report.prepared_lineage) == (step, lineage)
