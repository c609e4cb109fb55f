"""The coordinator's vocabulary: what it is told (events), what it says (instructions), and the terms of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ring.order import Links, Wishes
from ring.view import View
from wire.job_messages import MemberRecord, Report

STANDSTILL = frozenset({"held", "broken", "done"})
"""Values of ``Report.status`` by which a member says that it trains no more in the view that it names."""
BESIDE = frozenset({"ready", "following"})
"""Values by which a worker says that it may be put into a view; ``following``: it keeps up with the ring beside it."""
STATUSES = STANDSTILL | BESIDE | {"training", "healed", "failed"}
"""All values of ``Report.status``."""
TORN_S = 3.0
"""A member that was healing may first have to load its state anew: the others wait no longer than this for it."""
SPARES = 2
"""Workers that a job keeps beside those that it has work for: they take a place that becomes free."""
RETURN_S = 10.0
"""Longer than the longest pause of a worker that looks for its seed: who is not back by then, beside members that stand
still and so wait, is no longer waited for."""
LEAVE_S = 1.0
"""A ring that stops unasked has a member that leaves, and says so next: a view with it would break at once."""


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = frozenset({Phase.DONE, Phase.CANCELLED, Phase.FAILED})
_W, _R, _S, _P = Phase.WAITING, Phase.RUNNING, Phase.STOPPING, Phase.PAUSED
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    _W: frozenset({_R, _P, Phase.CANCELLED, Phase.FAILED}),
    _R: frozenset({_W, _S, Phase.CANCELLED}),
    _S: frozenset({_W, _P}) | ENDED,
    _P: frozenset({_S, Phase.CANCELLED, Phase.FAILED}),
    **{ended: frozenset({_W}) for ended in ENDED},
}


class InvalidTransition(AssertionError):
    """A phase followed that may not: a defect of this program. Its text carries the last events."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker, as views name it. ``host`` and ``port`` are where its data port is reached.

    Attributes:
        follows: it can fetch the state beside a running ring (``CatchUp``).
        workers: a crew stands for so many (``ring.crews``).
        memory_bytes: that it gives to parts of models; 0 where it does not say.
        flops: how fast it computes, as it has measured; 0 where that is not known, None where it is going to tell.
        on_host: it computes on a CPU.
    """

    peer_id: str
    name: str
    host: str
    port: int
    follows: bool = False
    workers: int = 1
    memory_bytes: int = 0
    flops: float | None = 0.0
    on_host: bool = True


@dataclass(frozen=True, slots=True)
class Terms:
    """What the job asks for, and how patient to be.

    Attributes:
        workers: the first view waits for this many.
        micro_batches: of a global batch; more members than that stay spare, and of those at most ``SPARES``.
        settle_s: after a break, until members that are alive but say nothing are struck off. The dead are not waited
            for: their connections tell.
        hold_s: after a hold, the same. Long: a step may be.
        grace_s: for members that are away while the ring runs, and for the holder of the newest state.
        build_s: for workers to build what may turn out to be the newest state, or a checkpoint that is to be restored.
        cooldown_s: first time out for a peer whose link keeps breaking; doubles each time.
        wishes: what the profile says of the ring.
        minted_below: generations up to this one may have been minted by a seed that led before this one.
    """

    workers: int
    micro_batches: int
    settle_s: float = 30.0
    hold_s: float = 600.0
    grace_s: float = 30.0
    build_s: float = 600.0
    cooldown_s: float = 30.0
    wishes: Wishes = field(default_factory=Wishes)
    minted_below: int = 0

    @property
    def most(self) -> int:
        """So many peers, and no more, are of use to the job."""
        return max(self.workers, self.micro_batches) + SPARES


@dataclass(frozen=True, slots=True)
class Past:
    """What a restarted seed read from its store.

    Attributes:
        paused: a person asked for it; the state may not have got there.
        saved: peer id → step of the newest checkpoint that it is known to hold.
        branch: peers whose newest checkpoint is of this run, if it ever went back; see ``Mint``.
        step_s: what a step took; 0 where it is not known.
        reread: a seed that was here before read this: workers of the job may be on their way back.
    """

    state: str = "waiting"
    reason: str = ""
    paused: bool = False
    view: View | None = None
    corpus: str = ""
    known_step: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)
    branch: frozenset[str] | None = None
    step_s: float = 0.0
    reread: bool = False


# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """What happened. ``handle`` takes nothing else."""


@dataclass(frozen=True, slots=True)
class PeerOffered(Event):
    """A free worker, given to this job. ``own``: whether what is on its disk is of this run, where that is known better
    than here (``Past.branch``)."""

    peer: Peer
    own: bool | None = None


@dataclass(frozen=True, slots=True)
class PeerReturned(Event):
    """A worker is back that was on this job, in the view ``generation`` (0: in none). Its report follows."""

    peer: Peer
    generation: int


@dataclass(frozen=True, slots=True)
class PeerReported(Event):
    peer_id: str
    report: Report


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """The control link ended, or was silent for too long."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLeft(Event):
    """It went on purpose."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """Rank 0 told of a committed step, and how long it took; 0 where it did not say."""

    step: int
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured(Event):
    """What is known now of the links between peers, and of a step's computing (0: nothing). Counts from the next view
    on: no ring is ended for the sake of a better order."""

    links: Links = field(repr=False)
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerTold(Event):
    """More is known of a worker than when it was offered."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Surveyed(Event):
    """What ``SendSurvey`` asked for is done, as far as it could be."""


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """``newest``: peer id → step of the newest checkpoint that it is known to hold, of all that hold one; ``steps``: of
    all that it holds, where that matters (``ring.crews``); ``wholes``: of those that have all parts of a model."""

    newest: Mapping[str, int] = field(repr=False)
    steps: Mapping[str, frozenset[int]] = field(default_factory=dict, repr=False)
    wholes: Mapping[str, frozenset[int]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Pause(Event):
    pass


@dataclass(frozen=True, slots=True)
class Resume(Event):
    pass


@dataclass(frozen=True, slots=True)
class Cancel(Event):
    pass


@dataclass(frozen=True, slots=True)
class Save(Event):
    pass


@dataclass(frozen=True, slots=True)
class Restore(Event):
    """Go back to the checkpoint of ``step`` and ``lineage``, which ``peer_id`` holds and has verified."""

    step: int
    peer_id: str
    lineage: str


@dataclass(frozen=True, slots=True)
class Yield(Event):
    """Another job waits for workers: a paused one whose state is on a disk lets its own go."""


@dataclass(frozen=True, slots=True)
class Together(Event):
    """Several things became known at once: nothing is decided before all are taken in."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time went by."""


# -------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the shell is to do, in order."""


@dataclass(frozen=True, slots=True)
class SendAssign(Instruction):
    """``stage``, ``stages``: the part of the model that it is to hold, of how many (``ring.crews``); ``holders``: who
    else has the files of all parts of ``restore_step``."""

    peer_id: str
    corpus: str
    restore_step: int
    stage: int = 0
    stages: int = 1
    holders: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class SendSurvey(Instruction):
    """Have the ways between these workers measured, where they are not known; then say ``Surveyed``."""

    peer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Planned(Instruction):
    """The layers with which the second and each later stage begin, for as long as the job lives: to be made durable
    before anything that follows is told to anybody."""

    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendHold(Instruction):
    peer_ids: tuple[str, ...]
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendCatchUp(Instruction):
    """The peer stands ready beside a running ring and is to fetch the state from ``donors``, members of that view."""

    peer_id: str
    generation: int
    donors: tuple[MemberRecord, ...]


@dataclass(frozen=True, slots=True)
class Doubt(Instruction):
    """Neighbours call the peer lost, and its link to the seed is open: be less patient with its silence from now on.

    Attributes:
        witnesses: how many say so; each stands for one beat that need not be missed any more.
    """

    peer_id: str
    witnesses: int


@dataclass(frozen=True, slots=True)
class SendSave(Instruction):
    peer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendRelease(Instruction):
    """The peer is no longer this job's; the shell may offer it again where ``wants`` says so."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Mint(Instruction):
    """Make the view durable, then announce it to all its members.

    Attributes:
        restored: the run went back to ``view.step``, because a person said so or because nothing newer was to be had:
            what peers hold of later steps is not of this run any more.
        branch: the peers whose newest checkpoint may be taken for this run's from now on; None: whoever comes.
    """

    view: View
    restored: bool
    branch: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class SetState(Instruction):
    """The job's state for people (``wire.records.JobInfo.state``) and why."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetCorpus(Instruction):
    digest: str


@dataclass(frozen=True, slots=True)
class Emit(Instruction):
    level: str
    kind: str
    text: str
    peer_id: str = ""
