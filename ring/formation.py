"""How a view is made up: where it starts, who holds that state, who sits beside whom. Pure functions of reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from ring.balance import balanced
from ring.coordination import STANDSTILL, Peer
from ring.view import View, shares
from wire.frame import CONTROL_FRAME_BYTES
from wire.job_messages import MemberRecord, Report

Reports = dict[str, Report]
"""Peer id → the report of a peer that stands still."""
MEMBERS_BYTES = CONTROL_FRAME_BYTES - 4096
"""Of the members in a ``ViewAnnounced``, with room for what else it says."""
Edge = frozenset[str]
"""Two peer ids that would be neighbours."""


def newest(sources: Reports) -> tuple[int, str]:
    """The highest applied step and its lineage; of several lineages there the one that most hold, then the lesser."""
    step = max(report.applied for report in sources.values())
    votes = Counter(report.lineage for report in sources.values() if report.applied == step)
    return step, min(votes, key=lambda lineage: (-votes[lineage], lineage))


def holds(report: Report, step: int, lineage: str) -> bool:
    """Whether the reporter has that state, or can redo the one step that it lacks from its redo buffer."""
    if (report.applied, report.lineage) == (step, lineage):
        return True
    return report.status in STANDSTILL and (report.prepared, report.prepared_lineage) == (step, lineage)


def square_sum(sources: Reports, step: int, lineage: str) -> float:
    """The squared gradient norm that ``step`` was committed with, for those that redo it; 0 where nobody knows."""
    known = (report.square_sum for report in sources.values() if (report.applied, report.lineage) == (step, lineage))
    return max(known, default=0.0)


def records(
    members: Sequence[Peer], micro_batches: int, healthy: Collection[str], unit_us: Sequence[int] = ()
) -> tuple[MemberRecord, ...]:
    """The members in rank order. Shares follow what a micro-batch takes at each, in microseconds; 0: not known."""
    counts = balanced(micro_batches, unit_us or [0] * len(members), shared_equally(micro_batches, len(members)))
    return tuple(
        MemberRecord(peer.peer_id, peer.name, peer.host, peer.port, last - count, count, peer.peer_id in healthy)
        for peer, count, last in zip(members, counts, accumulate(counts), strict=True)
    )


def shared_equally(micro_batches: int, members: int) -> list[int]:
    """Counts of micro-batches where nothing is known of anybody's speed."""
    return [count for _, count in shares(micro_batches, [1.0] * members)]


def ordered(
    peers: Mapping[str, Peer],
    ready: Reports,
    healthy: Collection[str],
    heirs: Collection[str],
    most: int,
    apart: Iterable[Edge],
) -> list[str]:
    """Whom to take, in rank order: who holds the state first, then who was in before, at most ``most``, and no more
    than a view can name in one frame."""
    chosen = sorted(ready, key=lambda peer_id: (peer_id not in healthy, peer_id not in heirs, peer_id))[:most]
    sizes_bytes = accumulate(_record_bytes(peers[peer_id]) for peer_id in chosen)
    chosen = [peer_id for peer_id, size_bytes in zip(chosen, sizes_bytes, strict=True) if size_bytes <= MEMBERS_BYTES]
    return arranged(chosen, apart) or chosen


def _record_bytes(peer: Peer) -> int:
    """No less than what a ``MemberRecord`` takes: its texts, each with its length, and its numbers."""
    return sum(len(text.encode()) for text in (peer.peer_id, peer.name, peer.host)) + 64 * peer.workers


def described(view: View, before: View | None) -> str:
    """The view in a line: who is in, in rank order, and who no longer is."""
    gone = [member.name for member in before.members if view.rank_of(member.peer_id) is None] if before else []
    text = f"generation {view.generation} from step {view.step}: {' → '.join(member.name for member in view.members)}"
    return text + (f"; without {', '.join(gone)}" if gone else "")


def arranged(order: Sequence[str], apart: Iterable[Edge]) -> list[str]:
    """The same peers on a circle where no two of ``apart`` are neighbours; empty where no swapping leads there."""
    circle, forbidden = list(order), set(apart)
    wrong = _wrong(circle, forbidden)
    while wrong:
        swap = _better_swap(circle, forbidden, wrong)
        if swap is None:
            return []
        one, other = swap
        circle[one], circle[other] = circle[other], circle[one]
        wrong = _wrong(circle, forbidden)
    return circle


def _better_swap(circle: list[str], forbidden: set[Edge], wrong: list[int]) -> tuple[int, int] | None:
    for one in wrong:
        for other in range(len(circle)):
            trial = list(circle)
            trial[one], trial[other] = trial[other], trial[one]
            if len(_wrong(trial, forbidden)) < len(wrong):
                return one, other
    return None


def _wrong(circle: list[str], forbidden: set[Edge]) -> list[int]:
    """Ranks whose right neighbour should not be theirs."""
    size = len(circle)
    return [rank for rank in range(size) if frozenset({circle[rank], circle[(rank + 1) % size]}) in forbidden]
