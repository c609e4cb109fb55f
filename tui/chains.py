"""Split models as chains: which parts, in the order of their layers, lead from the first layer to the last.

Peers report single parts; this module finds which of them form a chain. A chain is a path over the layers of a model
with the fewest layers that no part holds, then the fewest idle parts, then the fewest stages (a shortest path over the
places where parts begin and end). Of equal parts that are not idle, the one to which the previous stage sends is taken,
else the busier one. The remaining parts form further chains if these are complete; else they are *beside*: in no chain.
The panel shows each chain as a table of its stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wire.records import PartInfo

MAX_CHAINS = 16
"""Chains of one model; other parts are beside them. Each chain needs a search."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Layers [start, stop) that a chain lacks. ``held``: some part has all of them but does not fit in here."""

    start: int
    stop: int
    held: bool = False


@dataclass(frozen=True, slots=True)
class ShownChain:
    """One path through a model.

    Attributes:
        number: index among the chains of this model.
        stages: parts and gaps in the order of their layers; each begins where the previous one stops.
        unchained: on the model's last chain, the parts that are in no chain.
        held: number of layers of the model that any peer holds.
        trains: it is the pipeline of a job; ``model`` is the job's id.
    """

    model: str
    name: str
    layers: int
    number: int
    stages: tuple[PartInfo | Gap, ...]
    unchained: tuple[PartInfo, ...]
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
        """The stage with the longest time per forward request, which limits the pace; None if fewer than two are
        known."""
        known = [part for part in self.parts if part.compute_ms > 0]
        return max(known, key=lambda part: part.compute_ms) if len(known) > 1 else None

    @property
    def bubble(self) -> float | None:
        """Mean fraction of the stages' time in which they wait; None if there is no stage or all are idle."""
        shares = [1 - part.busy for part in self.parts]
        return sum(shares) / len(shares) if any(share < 1 for share in shares) else None

    @property
    def tokens_per_s(self) -> float:
        """The rate of its last part."""
        return self.parts[-1].tokens_per_s if self.parts else 0.0

    @property
    def sessions(self) -> int:
        return max((part.sessions for part in self.parts), default=0)


def how_to_split(seed: str) -> str:
    return "p2ptrain chat --split -c DIRECTORY" + f" --seed {seed}" * bool(seed)


def chains_of(parts: Iterable[PartInfo], jobs: Mapping[str, str] | None = None) -> list[ShownChain]:
    """All chains, by the names of their models; the busiest of a model first. ``jobs``: job id → name for its
    chains."""
    models: dict[tuple[str, str, int], list[PartInfo]] = defaultdict(list)
    for part in parts:
        models[(jobs or {}).get(part.model, part.name), part.model, part.layers].append(part)
    return [chain for key in sorted(models) for chain in _chains(*key, models[key], key[1] in (jobs or {}))]


def _chains(name: str, model: str, layers: int, parts: list[PartInfo], trains: bool) -> list[ShownChain]:
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
    unchained = tuple(sorted(left.values(), key=lambda part: (part.start, part.stop, part.peer_name, part.id)))
    return [
        ShownChain(model, name, layers, number, stages, unchained if number == len(ways) - 1 else (), held, trains)
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
    """The path from layer 0 to ``layers`` with the least (missing layers, idle parts, stages)."""
    choices: dict[tuple[int, int], list[PartInfo]] = defaultdict(list)
    for part in parts:
        choices[part.start, part.stop].append(part)
    places = sorted({0, layers, *(place for ends in choices for place in ends)})
    edges: dict[int, list[tuple[tuple[int, int, int], int, bool]]] = defaultdict(list)  # from → (cost, to, a gap)
    for start, stop in pairwise(places):
        edges[start].append(((stop - start, 0, 0), stop, True))
    for (start, stop), same in choices.items():
        edges[start].append(((0, int(all(map(_idle, same))), 1), stop, False))
    # to → (cost, steps of the path: from, to, a gap)
    reached: dict[int, tuple[tuple[int, int, int], list[tuple[int, int, bool]]]] = {0: ((0, 0, 0), [])}
    for place in places:  # in order: every edge leads to a later place
        (missing, idle, stages), steps = reached[place]
        for (more_missing, more_idle, more_stages), stop, gap in edges[place]:
            cost = (missing + more_missing, idle + more_idle, stages + more_stages)
            if stop not in reached or cost < reached[stop][0]:
                reached[stop] = cost, [*steps, (place, stop, gap)]
    way: list[PartInfo | Gap] = []
    for start, stop, gap in reached[layers][1]:
        before = way[-1] if way else None
        if not gap:
            way.append(_preferred(choices[start, stop], before.next if isinstance(before, PartInfo) else ""))
            continue
        # Between neighbouring places a part has all layers or none.
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
