"""What must have held, decided from what was seen. Pure: lists in, verdicts out.

*Recovery* is the time from a fault to the next step that was committed after it. What was committed before may still
arrive later, because the seed tells changes ten times a second at most: so a row counts when it is of a later view, or,
where the fault need not end the view, when it came more than that interval after the fault. Both ends are read from
this process' monotonic clock, the fault's just before the call that does it (a signal, a cut). The figure includes rank
0's message, the seed's interval (0.1 s at most) and the time that this process waits for its core.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from p2ptrain.cli.chaos.schedule import DONOR

SAID_BYTES = 16 << 10
"""With one donor, while a state is fetched: an offer, a table of 16 bytes a chunk, headers and beats take no more."""


@dataclass(frozen=True, slots=True)
class Row:
    """A committed step, as it arrived here. ``at_s`` is monotonic."""

    at_s: float
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The members of a running view, as they arrived here."""

    at_s: float
    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a newcomer told of fetching the state, while one of its donors was killed.

    Attributes:
        state_bytes: of the state. received_bytes: all that came over its links to donors.
        lost_donors: those that went away before the state was complete.
        donors: whom it may have asked.
        begun: how often it began: once, and each time anew after that death.
    """

    state_bytes: int
    received_bytes: int
    lost_donors: int
    donors: int
    begun: int = 1

    @property
    def hit(self) -> bool:
        """Whether the donor died in the middle of the transfer."""
        return self.lost_donors > 0

    @property
    def twice_bytes(self) -> int:
        """What came beyond the state: in vain, and what is said about it."""
        return self.received_bytes - self.state_bytes

    def allowed_bytes(self, chunk_bytes: int) -> int:
        """A chunk for each donor that was lost, and what is said with each."""
        return self.lost_donors * chunk_bytes + self.donors * SAID_BYTES


@dataclass(slots=True)
class Injury:
    """A fault that was done.

    Attributes:
        at_s, until_s: monotonic; until it was mended or the dead were started again, ``inf`` while it lasts.
        generation, step: what was known when it was done.
        new_view: it must end the view, and so only a later one's steps count.
        peers: who was hit, by name.
        excused: ids of the peers that may lose their place for it: those hit, and both ends of a link.
        whole_s: when all workers were members again.
        recovery_s: see above; None where no step followed.
        figures: further seconds by name.
        fetch: of the newcomer, where it is one of its donors that was hit.
    """

    number: int
    kind: str
    at_s: float
    generation: int
    step: int
    new_view: bool
    peers: tuple[str, ...] = ()
    excused: frozenset[str] = frozenset()
    detail: str = ""
    until_s: float = math.inf
    whole_s: float = math.inf
    recovery_s: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    fetch: Fetch | None = None

    @property
    def counts(self) -> bool:
        """Whether it is what was asked for: a donor that dies before or after the transfer is none."""
        return self.kind != DONOR or (self.fetch is not None and self.fetch.hit)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One invariant. ``held`` is None where it could not be looked at; ``text`` says why, or what broke it."""

    name: str
    held: bool | None
    text: str = ""


def recovered(injury: Injury, rows: Iterable[Row], interval_s: float) -> Row | None:
    """The first row by which the injury is over; see above.

    Args:
        interval_s: at most so long a row waits at the seed.
    """
    for row in rows:
        later = row.generation > injury.generation
        in_time = not injury.new_view and row.at_s > injury.at_s + interval_s and row.step > injury.step
        if row.at_s > injury.at_s and (later or in_time):
            return row
    return None


def pause_before(generation: int, rows: Sequence[Row]) -> float | None:
    """Seconds without a step between the last one of an earlier view and the first of this one."""
    first = next((row for row in rows if row.generation == generation), None)
    before = [row.at_s for row in rows if row.generation < generation]
    return first.at_s - max(before) if first is not None and before else None


def evictions(views: Sequence[Seen], injuries: Sequence[Injury], names: Mapping[str, str], grace_s: float) -> list[str]:
    """Who lost its place in a view though nothing was done to it; one line each.

    Args:
        grace_s: so long after its end an injury still explains a loss: silence is noticed late.
    """
    return [
        f"{names.get(peer, peer)} left view {before.generation} for no fault of its own"
        for before, after in itertools.pairwise(views)
        for peer in before.members
        if peer not in after.members and not excuse(peer, after.at_s, injuries, grace_s)
    ]


def excuse(peer: str, at_s: float, injuries: Iterable[Injury], grace_s: float) -> bool:
    """Whether something was done to the peer that explains its loss at this time."""
    return any(
        peer in injury.excused and injury.at_s <= at_s <= max(injury.until_s + grace_s, injury.whole_s)
        for injury in injuries
    )


def every_step_once(steps: Iterable[int], last: int) -> Verdict:
    """The rows of metrics hold each step from 1 to ``last`` exactly once."""
    name = "every step is on record once"
    found = sorted(steps)
    missing = sorted(set(range(1, last + 1)) - set(found))
    twice = sorted({step for step, after in itertools.pairwise(found) if step == after})
    if not missing and not twice:
        return Verdict(name, True, f"steps 1 to {last}")
    parts = [f"missing: {_some(missing)}"] if missing else []
    parts += [f"twice: {_some(twice)}"] if twice else []
    return Verdict(name, False, "; ".join(parts))


def a_chunk_each(injuries: Iterable[Injury], chunk_bytes: int) -> Verdict:
    """A donor that was killed in the middle cost its newcomer one chunk at most, and no new beginning."""
    name = "a killed donor costs a chunk at most"
    hits = [(injury.number, injury.fetch) for injury in injuries if injury.fetch is not None and injury.fetch.hit]
    if not hits:
        return Verdict(name, None, "none was killed in the middle of a transfer")
    odd = [f"fault {number}: the newcomer began {fetch.begun} times" for number, fetch in hits if fetch.begun != 1]
    odd += [
        f"fault {number}: {fetch.twice_bytes} bytes beyond the state of {fetch.state_bytes}"
        for number, fetch in hits
        if not 0 <= fetch.twice_bytes <= fetch.allowed_bytes(chunk_bytes)
    ]
    most = max(fetch.twice_bytes for _, fetch in hits)
    return Verdict(name, not odd, _some(odd) or f"{len(hits)} killed, at most {most} bytes came twice for one")


def same(name: str, hashes: Mapping[str, str]) -> Verdict:
    """All hold the same."""
    if not hashes:
        return Verdict(name, None, "there is nothing to compare")
    groups: dict[str, list[str]] = {}
    for holder, value in hashes.items():
        groups.setdefault(value, []).append(holder)
    if len(groups) == 1:
        return Verdict(name, True, f"{next(iter(groups))[:16]}… at {', '.join(hashes)}")
    return Verdict(name, False, "; ".join(f"{value[:16]}… at {', '.join(who)}" for value, who in groups.items()))


def none_of(name: str, found: Sequence[str]) -> Verdict:
    """Nothing of this was seen."""
    return Verdict(name, not found, _some(found))


def steps_per_s(rows: Sequence[Row], begin_s: float, end_s: float) -> float:
    """Progress of the newest known step from ``begin_s`` to ``end_s``, per second: a step done again counts once."""
    before = max((row.step for row in rows if row.at_s <= begin_s), default=0)
    after = max((row.step for row in rows if row.at_s <= end_s), default=0)
    return (after - before) / (end_s - begin_s) if end_s > begin_s else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of them do not exceed (nearest rank): one that was really seen."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _some(items: Sequence[object], most: int = 6) -> str:
    shown = ", ".join(str(item) for item in items[:most])
    return f"{shown}, and {len(items) - most} more" if len(items) > most else shown
