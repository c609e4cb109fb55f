"""Split models as chains: which parts, in the order of their layers, carry a position from the first layer to the last.

Parts come from peers one by one; which of them make a chain is found here. A chain is a way over the layers of a model
that leaves the fewest of them to nobody, then uses the fewest idle parts, then has the fewest stages (a shortest path
over the places where parts begin and end). Of equal parts that work the one is taken that the stage before sends to,
else the busier one. What is left over makes further chains where it is whole, else it is *beside*: held, and in no
chain. The panel shows each chain as a table of its stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wire.records import PartInfo

MAX_CHAINS = 16
"""Of one model; what is left is beside them. Each costs a search."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Layers [start, stop) that a chain lacks. ``held``: parts that do not fit in here have all of them."""

    start: int
    stop: int
    held: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """One way through a model.

    Attributes:
        number: of the chains of this model, from 0.
        stages: parts and gaps in the order of their layers; each begins where the one before stops.
        beside: parts of the model that are in no chain; those of the model's last chain.
        held: layers of the model that somebody holds, in this chain or out of it.
        trains: it is the pipeline of a job, whose id ``model`` is.
    """

    model: str
    name: str
    layers: int
    number: int
    stages: tuple[PartInfo | Gap, ...]
    beside: tuple[PartInfo, ...]
    held: int
    trains: bool = False

    @property
    def parts(self) -> list[PartInfo]:
        return [stage for stage in self.stages if isinstance(stage, PartInfo)]

    @property
    def missing(self) -> int:
        return sum(stage.stop - stage.start for stage in self.stages if isinstance(stage, Gap))

    @property
    def slowest(self) -> PartInfo | None:
        """The stage that one work takes longest, which bounds the chain's pace; None where fewer than two are known."""
        known = [part for part in self.parts if part.compute_ms > 0]
        return max(known, key=lambda part: part.compute_ms) if len(known) > 1 else None

    @property
    def bubble(self) -> float | None:
        """Mean share of the stages' time in which they wait; None where there is none, or none of them works."""
        shares = [1 - part.busy for part in self.parts]
        return sum(shares) / len(shares) if any(share < 1 for share in shares) else None

    @property
    def tokens_per_s(self) -> float:
        """What comes out at its end: the rate of its last stage that somebody holds."""
        return self.parts[-1].tokens_per_s if self.parts else 0.0

    @property
    def sessions(self) -> int:
        return max((part.sessions for part in self.parts), default=0)


def how_to_split(seed: str) -> str:
    return f"p2ptrain chat --split -c DIRECTORY --seed {seed}"


def chains_of(parts: Iterable[PartInfo], jobs: Mapping[str, str] | None = None) -> list[Chain]:
    """All chains, by the names of their models; the busiest of a model first.

    Args:
        jobs: names of jobs by id: what one of them trains bears its name.
    """
    models: dict[tuple[str, str, int], list[PartInfo]] = defaultdict(list)
    for part in parts:
        models[(jobs or {}).get(part.model, part.name), part.model, part.layers].append(part)
    return [chain for key in sorted(models) for chain in _chains(*key, models[key], key[1] in (jobs or {}))]


def _chains(name: str, model: str, layers: int, parts: list[PartInfo], trains: bool) -> list[Chain]:
    left = {part.id: part for part in parts}
    held = _union(parts)
    ways: list[tuple[PartInfo | Gap, ...]] = []
    while left and len(ways) < MAX_CHAINS:
        stages = _best_way(list(left.values()), layers)
        if ways and any(isinstance(stage, Gap) for stage in stages):
            break
        ways.append(stages)
        for stage in stages:
            if isinstance(stage, PartInfo):
                del left[stage.id]
    beside = tuple(sorted(left.values(), key=lambda part: (part.start, part.stop, part.peer_name, part.id)))
    return [
        Chain(model, name, layers, number, stages, beside if number == len(ways) - 1 else (), held, trains)
        for number, stages in enumerate(ways)
    ]


def _union(parts: Sequence[PartInfo]) -> int:
    total, reached = 0, 0
    for part in sorted(parts, key=lambda part: part.start):
        total += max(0, part.stop - max(part.start, reached))
        reached = max(reached, part.stop)
    return total


def _idle(part: PartInfo) -> bool:
    return not part.sessions and not part.tokens_per_s and not part.busy


def _best_way(parts: Sequence[PartInfo], layers: int) -> tuple[PartInfo | Gap, ...]:
    """Least (layers that nobody holds, idle parts, stages) from layer 0 to ``layers``."""
    choices: dict[tuple[int, int], list[PartInfo]] = defaultdict(list)
    for part in parts:
        choices[part.start, part.stop].append(part)
    places = sorted({0, layers, *(place for ends in choices for place in ends)})
    edges: dict[int, list[tuple[tuple[int, int, int], int, bool]]] = defaultdict(list)  # from → (cost, to, a gap)
    for start, stop in pairwise(places):
        edges[start].append(((stop - start, 0, 0), stop, True))
    for (start, stop), same in choices.items():
        edges[start].append(((0, int(all(map(_idle, same))), 1), stop, False))
    reached: dict[int, tuple[tuple[int, int, int], int, bool]] = {0: ((0, 0, 0), 0, False)}  # to → (cost, from, a gap)
    for place in places:  # in order: every edge leads on
        missing, idle, stages = reached[place][0]
        for (more_missing, more_idle, more_stages), stop, gap in edges[place]:
            cost = (missing + more_missing, idle + more_idle, stages + more_stages)
            if stop not in reached or cost < reached[stop][0]:
                reached[stop] = (cost, place, gap)
    cuts: list[tuple[int, int, bool]] = []
    place = layers
    while place > 0:
        _, start, gap = reached[place]
        cuts.append((start, place, gap))
        place = start
    way: list[PartInfo | Gap] = []
    for start, stop, gap in cuts[::-1]:
        before = way[-1] if way else None
        if not gap:
            way.append(_preferred(choices[start, stop], before.next if isinstance(before, PartInfo) else ""))
            continue
        # From one place to the next, a part has all of the layers or none.
        held = any(part.start <= start and stop <= part.stop for part in parts)
        if isinstance(before, Gap) and before.held == held:
            way[-1] = Gap(before.start, stop, held)
        else:
            way.append(Gap(start, stop, held))
    return tuple(way)


def _preferred(same: Sequence[PartInfo], peer: str) -> PartInfo:
    def rank(part: PartInfo) -> tuple[bool, bool, int, float, str, str]:
        return (_idle(part), part.peer != peer, -part.sessions, -part.tokens_per_s, part.peer_name, part.id)

    return min(same, key=rank)
