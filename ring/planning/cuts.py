"""Cuts a model's layers into a chain of stages, for serving and for training: the fastest chain that is possible. Pure.

1. The workers are put in one order: a round trip from the client, always to the nearest remaining worker. Then
   stretches are reversed as long as that shortens the hops (``ring_plan``). Of equally near workers the first comes
   first. Both directions of the order are tried.
2. An exact dynamic program (``find_best_cuts``) cuts the layers for that order, in which a worker may get none. The
   least bottleneck wins, then the least time through the chain, then the fewest stages.

Costs are in seconds, and infinite if something is impossible, such as a part that exceeds a worker's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from ring.planning.measurements import circle_edges
from ring.planning.ring_plan import APART_S, reverse_stretches, visit_nearest_first

MOST_CUTS = 256
"""Most places to cut. More layers than this are cut in groups of equal number (no model has as many)."""
MOST_WORKERS = 64
"""Of more workers (or groups of them) the best are considered."""

Array = npt.NDArray[np.float64]
Part = tuple[int, int, int]
"""(worker, start, stop): the index of a worker, and its layers [start, stop)."""
Score = tuple[float, float, int]
"""(bottleneck, time through the chain, stages)."""


def cut_places(layers: int) -> list[int]:
    """The layers before which a cut may be, including the first and the one after the last."""
    return [*range(0, layers, -(-layers // MOST_CUTS)), layers]


def tabulate(cost: Callable[[int, int], float], places: Sequence[int]) -> Array:
    """(places, places): ``cost(start, stop)`` of the layers between two places, in order; else 0."""
    rows = [[cost(start, stop) if start < stop else 0.0 for stop in places] for start in places]
    return np.array(rows, dtype=np.float64)


class ChainCosts:
    """What chains of some workers cost.

    Args:
        places: as from ``cut_places``.
        part_s: (number of following stages, worker) → (places, places): of a part as in ``tabulate``.
        hop: (from, to) → seconds of a hop, and those that it takes of the link's time. The client is the last.

    Attributes:
        hop_s, occupied_s: (workers + 1, workers + 1), from and to: as ``hop`` tells.
    """

    def __init__(
        self,
        places: Sequence[int],
        workers: int,
        part_s: Callable[[int, int], Array],
        hop: Callable[[int, int], tuple[float, float]],
    ) -> None:
        self.places, self.part_s = places, part_s
        self.hop_s, self.occupied_s = np.full((2, workers + 1, workers + 1), np.inf)
        for pair in permutations(range(workers + 1), 2):
            self.hop_s[pair], self.occupied_s[pair] = hop(*pair)


def find_best_chain(costs: ChainCosts, counts: Iterable[int]) -> tuple[Score, list[Part]] | None:
    """The best chain, with its score; None if nothing fits. ``counts``: allowed numbers of stages."""
    size = len(costs.hop_s) - 1
    from_client = [size, *range(size)]
    near = np.minimum(costs.hop_s, APART_S)[np.ix_(from_client, from_client)].tolist()
    circle = reverse_stretches(
        visit_nearest_first(near), lambda way: sum(near[here][there] for here, there in circle_edges(way))
    )
    order = [index - 1 for index in circle[1:]]
    wanted = [count for count in counts if 1 <= count <= size]
    found = [find_best_cuts(costs, way, wanted) for way in (order, order[::-1])]
    return min((chain for chain in found if chain is not None), default=None)


def find_best_cuts(costs: ChainCosts, order: Sequence[int], counts: Sequence[int]) -> tuple[Score, list[Part]] | None:
    """The best chain of workers in that order, of which each may get no layer.

    Worker p holds the layers from i to j, and q is the next worker. The best k stages that begin with p at layer i are
    ``best(k, p, i) = min over j, q of part(p, i, j) + hop(p, q) + best(k - 1, q, j)``. With max for + this is the least
    bottleneck; with +, over only the costs within that bottleneck, it is the least time.
    """
    bottleneck_s, *_ = _Program(costs, order, counts, np.maximum, costs.occupied_s, np.inf).first()
    if not bottleneck_s < np.inf:
        return None
    within_s = bottleneck_s * (1 + 1e-12)  # equal costs may be rounded differently
    hop_s = np.where(costs.occupied_s <= within_s, costs.hop_s, np.inf)
    program = _Program(costs, order, counts, np.add, hop_s, within_s)
    through_s, count, at = program.first()
    chain, start = [], 0
    for behind in reversed(range(1, count)):
        then = program.then(behind, at)
        stop = int((program.part_s(behind, at)[start] + then.min(axis=0)).argmin())
        chain.append((order[at], costs.places[start], costs.places[stop]))
        at, start = at + 1 + int(then[:, stop].argmin()), stop
    chain.append((order[at], costs.places[start], costs.places[-1]))
    return (bottleneck_s, through_s, count), chain


class _Program:
    """The recursion of ``find_best_cuts`` with ``join`` for +, over parts of at most ``most_s``.

    Attributes:
        tails: for each number of following stages: (workers in their order, places), the best chain from there.
    """

    def __init__(
        self, costs: ChainCosts, order: Sequence[int], counts: Sequence[int], join: Any, hop_s: Array, most_s: float
    ) -> None:
        self._costs, self._order, self._counts = costs, order, counts
        self._join, self._hop_s, self._most_s = join, hop_s, most_s
        self.tails: list[Array] = []
        for behind in range(max(counts, default=0)):
            tail = np.full((len(order), len(costs.places)), np.inf)
            for at in range(len(order) - behind):
                part_s = self.part_s(behind, at)
                if behind:
                    tail[at] = join(part_s, self.then(behind, at).min(axis=0)).min(axis=1)
                else:
                    tail[at] = join(part_s[:, -1], hop_s[order[at], -1])
            self.tails.append(tail)

    def part_s(self, behind: int, at: int) -> Array:
        part_s = self._costs.part_s(behind, self._order[at])
        return np.where(np.triu(part_s <= self._most_s, 1), part_s, np.inf)

    def then(self, behind: int, at: int) -> Array:
        """(later workers, places): the best chain from there, with the hop to it from the worker at ``at``."""
        later = self._order[at + 1 :]
        return self._join(self.tails[behind - 1][at + 1 :], self._hop_s[self._order[at], later][:, None])  # type: ignore[no-any-return]

    def first(self) -> tuple[float, int, int]:
        """(seconds, stages, place in the order of the first worker) of the best whole chain."""
        whole = [
            (float(self._join(self._hop_s[-1, worker], self.tails[count - 1][at, 0])), count, at)
            for count in self._counts
            for at, worker in enumerate(self._order)
        ]
        return min(whole, default=(np.inf, 0, 0))
