"""Split models as chains: which parts, in the order of their layers, lead from the first layer to the last.

Peers report single parts; this module finds which of them form a chain. A chain is a path over the layers of a model
with the fewest layers that no part holds, then the fewest idle parts, then the fewest stages (a shortest path over the
places where parts begin and end). Of equal parts the one to which the previous stage sends is taken, else the busier.
The remaining parts form further chains if these are complete; else they are *beside*: in no chain.
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
        trains: it is the pipeline of a job; ``model`` is the job's id.
    """

    model: str
    name: str
    layers: int
    number: int
    stages: tuple[PartInfo | Gap, ...]
    unchained: tuple[PartInfo, ...]
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
    for part in sorted(parts, key=lambda part: (part.start, part.stop, part.peer_name, part.id)):
        models[(jobs or {}).get(part.model, part.name), part.model, part.layers].append(part)
    return [chain for key in sorted(models) for chain in _chains(*key, models[key], key[1] in (jobs or {}))]


def _chains(name: str, model: str, layers: int, parts: list[PartInfo], trains: bool) -> list[ShownChain]:
    ways: list[list[PartInfo | Gap]] = []
    while parts and len(ways) < MAX_CHAINS:
        stages = _best_way(parts, layers)
        if ways and any(isinstance(stage, Gap) for stage in stages):
            break
        ways.append(stages)
        parts = [part for part in parts if part not in stages]
    return [
        ShownChain(model, name, layers, number, tuple(way), tuple(parts) if number == len(ways) - 1 else (), trains)
        for number, way in enumerate(ways)
    ]


def _best_way(parts: Sequence[PartInfo], layers: int) -> list[PartInfo | Gap]:
    """The path from layer 0 to ``layers`` with the least costs: see ``_costs``."""
    places = sorted({0, layers, *(place for part in parts for place in (part.start, part.stop))})
    best: dict[int, tuple[list[float], list[PartInfo | Gap]]] = {0: ([0.0] * 6, [])}  # place → costs up to it, path
    for place, following in pairwise(places):  # in order: every step leads to a later place
        costs, way = best[place]
        before = way[-1] if way else None
        # Between neighbouring places a part has all layers or none.
        gap = Gap(place, following, any(part.start <= place and following <= part.stop for part in parts))
        steps: list[PartInfo | Gap] = [part for part in parts if part.start == place]
        for step in [gap, *steps]:
            total = [known + more for known, more in zip(costs, _costs(before, step), strict=True)]
            if step.stop not in best or total < best[step.stop][0]:
                best[step.stop] = total, [*way, step]
    joined: list[PartInfo | Gap] = []
    for stage in best[layers][1]:
        before = joined[-1] if joined else None
        if isinstance(stage, Gap) and isinstance(before, Gap) and before.held == stage.held:
            joined[-1] = Gap(before.start, stage.stop, stage.held)
        else:
            joined.append(stage)
    return joined


def _costs(before: PartInfo | Gap | None, step: PartInfo | Gap) -> tuple[float, ...]:
    """What a step adds, the weightiest first: missing layers, idle parts, stages, and what tells equal parts apart."""
    if isinstance(step, Gap):
        return (step.stop - step.start, 0, 0, 0, 0, 0)
    is_idle = not step.sessions and not step.tokens_per_s and not step.busy
    is_linked = isinstance(before, PartInfo) and before.next == step.peer
    return (0, is_idle, 1, not is_linked, -step.sessions, -step.tokens_per_s)
