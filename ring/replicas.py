"""Replicas: which state they can continue from, and how a view is made of them. Pure.

A *state* is (step, lineage) of the whole model; each worker holds its part of one. A replica is one worker for each
part. With one part it is one worker, and every state that a worker holds is a state of a replica.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations

from ring import coordination
from ring.coordination import (
    CheckpointsSaved,
    Emit,
    JobOptions,
    JobWorker,
    LinksMeasured,
    Reports,
    Roster,
    holds,
)
from ring.planning.measurements import LinkQuality, Links, both_ways, known_link
from ring.planning.ring_plan import RingOptions, RingPlan, plan_ring
from ring.token import balance_counts, by_size
from ring.view import View
from wire.codec import MAX_BODY_BYTES
from wire.frame import CONTROL_FRAME_BYTES
from wire.job_messages import MemberRecord

SOURCES = 3
"""Sources for each newcomer. More sources would slow down more members' steps."""
State = tuple[int, str]
"""A step and its lineage."""


def newest(by_part: Sequence[Reports]) -> State | None:
    """The newest state that some worker applied, and that a worker of every part applied or can redo. Of several
    lineages, the one that most applied wins, then the lesser one."""
    votes = Counter((report.applied, report.lineage) for reports in by_part for report in reports.values())
    for state in sorted(votes, key=lambda state: (-state[0], -votes[state], state[1])):
        if all(any(holds(report, *state) for report in reports.values()) for reports in by_part):
            return state
    return None


def square_sum(sources: Reports, step: int, lineage: str) -> float:
    """The squared gradient norm with which ``step`` was committed, for members that redo it; 0: not known."""
    known = (report.square_sum for report in sources.values() if (report.applied, report.lineage) == (step, lineage))
    return max(known, default=0.0)


@dataclass(slots=True)
class RecoveryPolicy:
    """How far the run is known to have come, which state it may continue from, and what that gives up.

    Attributes:
        known_step: the newest step that some peer is known to have applied.
        saved: the known checkpoints.
        branch: as ``StoredJob.branch``.
        step_s: moving average of a step's duration; 0: not known.
        failed: the run tried to go back to this step with the workers that are here, and could not; infinite: it did
            not try. ``tries``: the step that it tries.
        short_since: when it began to wait for a state that no peer here holds.
        saves_asked: attempts to save the result since the run last went back.
    """

    known_step: int
    saved: CheckpointsSaved
    branch: frozenset[str] | None
    step_s: float = 0.0
    failed: float = math.inf
    tries: float = math.inf
    short_since: float | None = None
    saves_asked: int = 0

    def progressed(self, step: int, step_s: float) -> None:
        """Take in a committed step and its duration. Reports of several steps may come at once, and late."""
        self.known_step = max(self.known_step, step)
        if step_s > 0:
            self.step_s = self.step_s + 0.2 * (step_s - self.step_s) if self.step_s else step_s  # about ten steps

    def patience_s(self, best: int) -> float:
        """How long to wait for a peer that holds more than step ``best``: as long as the lost steps took to compute. So
        waiting in vain costs no more than giving up too early."""
        return max(coordination.GRACE_S, min((self.known_step - best) * self.step_s, coordination.BUILD_S))

    def arrived(self) -> None:
        """A worker came: it may bring what was lacking."""
        self.failed = self.tries = math.inf

    def _is_own(self, peer_id: str) -> bool:
        return self.branch is None or peer_id in self.branch

    def _kept(self, roster: Roster, counts: Callable[[str], bool], ready: Reports, below: float = math.inf) -> int:
        """The newest step of which all parts have a checkpoint at the peers for which ``counts``; 0 if there is none. A
        peer that is ready has loaded what it can, so its later checkpoints do not count."""

        def usable(peer_id: str, kept: frozenset[int]) -> frozenset[int]:
            newest_step = ready[peer_id].applied if peer_id in ready else math.inf
            return frozenset(step for step in kept if step <= newest_step and step < below and counts(peer_id))

        # A whole model has every part, and any worker can make the state of step 0.
        by_part = [frozenset({0}).union(*(usable(*item) for item in self.saved.wholes.items()))] * roster.parts
        for (peer_id, part), kept in self.saved.parts.items():
            if roster.part_of(peer_id) == part:  # else of a part that it held before
                by_part[part] |= usable(peer_id, kept)
        return max(frozenset.intersection(*by_part))

    def has_saved(self, step: int, members: Collection[str], roster: Roster, *, in_parts: bool) -> bool:
        """Whether a peer of this run, or one of ``members``, has a checkpoint of ``step``. ``in_parts``: or peers have
        one of every part."""

        def counts(peer_id: str) -> bool:
            return peer_id in members or self._is_own(peer_id)

        if any(step in kept and counts(peer_id) for peer_id, kept in self.saved.wholes.items()):
            return True
        return in_parts and self._kept(roster, counts, {}) >= step

    def _reached(self, roster: Roster) -> int:
        return max(self.known_step, self._kept(roster, self._is_own, {}))

    def best(self, ready: Reports, roster: Roster, *, own: bool = False) -> State | None:
        """The newest state that a replica of these workers has loaded, or can go back to: then the lineage is empty.
        With one part the newest loaded state is always one of a replica.

        Args:
            own: only loaded states of this run's branch. An abandoned branch has later steps than are known.
        """
        mine = {peer_id: report for peer_id, report in ready.items() if not own or self._is_own(peer_id)}
        loaded = newest(roster.by_part(mine))
        if roster.parts == 1 or not roster.whole(ready):
            return loaded
        spares = {peer_id for peer_id in roster.peers if roster.part_of(peer_id) is None}
        having = spares.union(ready if loaded is None else mine)
        known = self.known_step + 1 if own and self.branch is not None else math.inf
        kept = self._kept(roster, having.__contains__, ready, min(self.failed, known))
        return loaded if loaded is not None and loaded[0] >= kept else (kept, "")

    def source(self, ready: Reports, roster: Roster, view: View | None, *, patient: bool) -> tuple[State | None, str]:
        """The state that the next view may start from now, as ``best`` gives it; if there is none, the reason.

        Args:
            ready: all peers that are stopped; no survivors among them carry the run's state on.
            patient: wait rather than give up a step that a peer may still bring.
        """
        best = self.best(ready, roster, own=True)
        if not patient or view is None:
            return best or self.best(ready, roster), ""
        elsewhere = self._kept(roster, lambda key: key not in ready or self._is_own(key), ready, self.failed)
        wanted = self._reached(roster)
        if roster.standing().keys() >= {member.peer_id for member in view.members}:  # none has more than it reported
            wanted = min(wanted, elsewhere)
        if best is not None and best[0] >= wanted:
            return best, ""
        away = " or ".join(member.name for member in view.members if member.peer_id not in ready)
        whom = f"{away}, which may hold" if away else "a worker that holds"
        here = f"step {best[0]}" if best is not None else "none of this run"
        return None, f"waiting for {whom} step {wanted} (newest here: {here})"

    def holders(self, step: int, part: int, peer_ids: Iterable[str]) -> list[str]:
        """The peers that have the files of all parts of ``step``, at most 8. Parts begin with different ones."""
        found = [peer_id for peer_id in sorted(peer_ids) if step in self.saved.wholes.get(peer_id, ())]
        turn = part % len(found) if found else 0
        return [*found[turn:], *found[:turn]][:8]

    def abandoned(self, step: int, holders: Collection[str], roster: Roster) -> tuple[str, str]:
        """What is lost if the next view starts at ``step`` with the state of ``holders``, unless survivors carry it on.
        As an event's kind and text; usually empty."""
        reached = self._reached(roster)
        if step < reached:
            lost = f"{reached - step} steps are lost: no connected worker holds step {reached}"
            return "steps-lost", f"continues from step {step}; {lost}"
        if self.branch is not None and self.branch.isdisjoint(holders):
            return "branch", f"continues from step {step} of an abandoned branch: no connected worker holds another"
        return "", ""

    def begin(self, step: int, members: Reports, *, went_back: bool, carried: Collection[str] = ()) -> None:
        """Record the start of a view. ``members``: the members' reports. A member that is ready with a later step has
        an abandoned state on its disk, so its newest checkpoint must not count as this run's after a restart.
        ``carried``: the members that carry the state on, if they do."""
        self.known_step, self.failed, self.short_since = step, math.inf, None
        if went_back or self.branch is not None:
            own = frozenset(filter(self._is_own, carried))
            kept = own if went_back or self.branch is None else self.branch
            fits = (key for key, report in members.items() if report.status == "ready" and report.applied <= step)
            self.branch = kept.union(fits)


# ------------------------------------------------------------------------------------------------ how a view is made up


def members_of(
    replicas: Sequence[tuple[str, ...]], ready: Reports, roster: Roster, healthy: Collection[str], options: JobOptions
) -> tuple[MemberRecord, ...]:
    """The members of a view, in rank order, with their shares. A replica is as fast as its slowest member."""
    peers = [roster.peers[peer_id].peer for replica in replicas for peer_id in replica]
    reports = [[ready[peer_id] for peer_id in replica] for replica in replicas]
    rule, total = options.share_rule, options.micro_batches
    if rule.by_size:
        windows = [max(1, *(report.windows for report in replica)) for replica in reports]
        return with_shares(peers, by_size(total, windows, rule.most), healthy, options.parts)
    unit_us = [0 if rule.equal else max(report.unit_us for report in replica) for replica in reports]
    return with_shares(peers, balance_counts(total, unit_us), healthy, options.parts)


def with_shares(
    members: Sequence[JobWorker], counts: Sequence[int], healthy: Collection[str], parts: int = 1
) -> tuple[MemberRecord, ...]:
    """The whole share of a replica stands at its first member: the first stage of a pipeline feeds it in, and shards
    compute it in turn (``roles.strategies.sharded``)."""
    runs: list[tuple[int, int]] = []
    for count, last in zip(counts, accumulate(counts), strict=True):
        runs += [(last - count, count), *[(last, 0)] * (parts - 1)]
    return tuple(
        MemberRecord(peer.peer_id, peer.name, peer.host, peer.port, first, count, peer.peer_id in healthy)
        for peer, (first, count) in zip(members, runs, strict=True)
    )


def replicas_of(
    ready: Reports, roster: Roster, healthy: Collection[str], survivors: Collection[str], limit: int
) -> dict[str, tuple[str, ...]]:
    """Form replicas, one worker for each part: of holders of the state first, then of earlier members. At most
    ``limit``, and no more than fit into one frame. Returns first member → members."""

    def preference(peer_id: str) -> tuple[bool, bool, str]:
        return peer_id not in healthy, peer_id not in survivors, peer_id

    formed = list(zip(*(sorted(reports, key=preference) for reports in roster.by_part(ready)), strict=False))[:limit]
    peers = [roster.peers[peer_id].peer for replica in formed for peer_id in replica]
    texts = "".join(text for peer in peers for text in (peer.peer_id, peer.name, peer.host)).encode()
    # About 20 bytes of a member are not text, and 64 before the view is compressed. 4096: for its other fields.
    packed_bytes, plain_bytes = len(zlib.compress(texts, 1)) + 24 * len(peers), len(texts) + 64 * len(peers)
    share = min((CONTROL_FRAME_BYTES - 4096) / max(packed_bytes, 1), (MAX_BODY_BYTES - 4096) / max(plain_bytes, 1), 1)
    return {replica[0]: replica for replica in formed[: int(share * len(formed))]}


def between_replicas(links: Links, replicas: Sequence[tuple[str, ...]]) -> Links:
    """The links between replicas by the ids of their first workers: the slowest one from a replica to its right
    neighbour, of each part's ring, and from the last part to the first. Pairs with an unknown link are left out."""
    found: dict[tuple[str, str], LinkQuality] = {}
    replica_of = {peer_id: replica for replica in replicas for peer_id in replica}
    among = (pair for pair in both_ways(links) if replica_of.keys() >= set(pair))
    pairs = dict.fromkeys((replica_of[sender], replica_of[receiver]) for sender, receiver in among)
    for left, right in ((left, right) for left, right in pairs if left is not right):
        ways = [known_link(links, *pair) for pair in (*zip(left, right, strict=True), (left[-1], right[0]))]
        known = [way for way in ways if way is not None]
        if len(known) == len(ways):
            slowest = min(known, key=lambda way: way.bandwidth_bps or 0.0)
            found[left[0], right[0]] = LinkQuality(max(way.latency_s for way in known), slowest.bandwidth_bps)
    return found


class RingPlanner:
    """Plans the rings of a job from what is known of the links between its workers."""

    def __init__(self, options: RingOptions) -> None:
        self.measured = LinksMeasured({})
        self.undialled: set[tuple[str, str]] = set()  # a member, and the neighbour that it did not reach
        self._options = options
        self._transport_reason = ""  # of the last plan that was reported

    def forget(self, peer_id: str) -> None:
        """Forget who did not reach a worker: its address may change."""
        self.undialled = {edge for edge in self.undialled if peer_id not in edge}

    def plan(self, formed: Mapping[str, tuple[str, ...]], roster: Roster, reduce_bytes: int) -> RingPlan:
        """Plan the ring of the replicas ``formed``, by their first workers."""
        apart = frozenset(
            (left[0], right[0])
            for left, right in (permutations(formed.values(), 2) if self.undialled else ())
            if not self.undialled.isdisjoint(zip(left, right, strict=True))
        )
        links = between_replicas(self.measured.links, list(formed.values()))
        return plan_ring(
            list(formed), links, self._options, reduce_bytes, self.measured.compute_s,
            apart=apart, name=lambda first: "+".join(map(roster.name, formed[first])),
        )  # fmt: skip

    def notices(self, plan: RingPlan) -> Iterator[Emit]:
        """Report a plan. Its choice of streams and codec is reported when it changes."""
        if plan.measured:
            yield Emit("info", "ring-order", plan.reason)
            if plan.transport_reason != self._transport_reason:
                yield Emit("info", "ring-transport", plan.transport_reason)
            self._transport_reason = plan.transport_reason


def sources_for(peer_id: str, part: int, view: View, links: Links) -> tuple[MemberRecord, ...]:
    """Choose the members that send the state of its part to a newcomer: fast links first, then high ranks, because low
    ranks write checkpoints."""

    def cost(rank: int) -> tuple[float, int]:
        link = known_link(links, view.members[rank].peer_id, peer_id)
        return -((link and link.bandwidth_bps) or 0.0), -rank

    return tuple(view.members[rank] for rank in sorted(range(part, view.size, view.stages), key=cost)[:SOURCES])


def describe_sizes(view: View, reports: Reports) -> str:
    """What the members say of their texts, and what they get for it."""
    total = sum(member.count for member in view.members)
    sizes = ((member.name, reports[member.peer_id].windows, member.count) for member in view.members)
    return "; ".join(f"{name} says {size:,} sequences: {count} of {total} micro-batches" for name, size, count in sizes)


def describe_view(view: View, before: View | None) -> str:
    absent = [member.name for member in before.members if view.rank_of(member.peer_id) is None] if before else []
    replicas = ("+".join(member.name for member in view.replica(rank)) for rank in range(0, view.size, view.stages))
    text = f"{' → '.join(replicas)}: training from step {view.step} (generation {view.generation})"
    return text + (f", without {', '.join(absent)}" if absent else "")
