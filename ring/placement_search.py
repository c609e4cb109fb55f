"""The search of ``ring.placement``: chains of peers and cuts, on arrays of costs. Pure.

Theory of operation
-------------------
A chain is built from its end: the best of what begins with peer p at layer i and uses exactly the peers S is, over the
layer j where p's part ends and the peer q that follows,

    best(S, p, i) = min over j, q of  cost(p, i, j) + hop(p, q) + best(S - p, q, j)

which is Held and Karp (1962) with the cut as one more part of the state. Read with max for + it is the least
bottleneck; read with + over those costs alone that are within that bottleneck, the least time. These are the two
passes. Where the sets and cuts are few enough (``EXACT_WORK``) both are done in full, and the result is exact,
whatever the sizes of layers, memories and links.

Why not the furthest layer? With the bottleneck B given, it is tempting to keep of each (S, p) only the furthest layer
that a chain reaches within B. That is exact where all layers weigh the same, since whoever can take one layer can then
take any. It is not where layers differ: a peer that is needed to make up the number of stages, or as a bridge between
two that cannot reach each other, may fit the small layer before a large one, and nothing where the furthest cut falls.
Least time needs the cuts in any case, and the whole table takes less than a tenth of a second for 8 peers.

Beyond that, chains are improved by moves (another peer, swap, elsewhere, out, in), those at the stage that costs most
first, until none helps or the budget is used up. Each trial's cuts are the exact ones for its order of peers (the same
recursion along one chain). The starts are the fastest, the largest and, for a bottleneck found by bisection, the fewest
peers that hold the layers within it, each in an order of near neighbours. In the end the peers of the best chain and
the fastest others are searched exactly, as many as ``EXACT_WORK`` allows. So a chain of few stages out of many peers is
exact within that choice of peers. Of long ones nothing is promised: where links follow from places the bottleneck was
that of the exact search in 64 of 64 cases and a token took a sixth longer at worst; where layers, memories and links
follow from nothing it was in 226 of 231, else up to twice as long, and a chain was found wherever there was one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Part = tuple[int, int, int]
"""Index of the peer, of the cut where its part starts, and of the one where it stops."""

Levels = Sequence[Sequence[Array]]
"""What parts cost, of each peer, by the number of stages behind them; the last entry is for more, too."""

EXACT_WORK = 40e6
"""Sums of a pass, about: 8 peers with 256 layers, 10 with 120, 12 with 56, 64 with 128 where they form two stages."""
SEARCH_WORK = 5e8
"""The same, of the moves from each start: about a second."""

_APART_S = 1e9  # in the search by moves: more than any chain costs, and finite, so that chains can be compared
_STARTS, _COUNTS = 3, 16
_CALL_WORK, _LOOK_WORK = 8000, 200  # sums that are done in the time of a few numpy calls, and of a look at a hop
_LOOKS = 20_000  # orders whose hops are added up before a start; some 100 ms


@dataclass(frozen=True)
class Board:
    """What everything costs, in seconds; infinite what cannot be.

    Attributes:
        compute_s: of each peer, (cuts, cuts): a part from cut to cut.
        hop_s, occupied_s: (peers + 1, peers + 1), from and to; the client is the last.
        deeper_s: as ``compute_s``, of stages that have one stage behind them, two, and so on, as far as that makes a
            difference: none costs less than one with fewer behind it.
    """

    compute_s: Sequence[Array]
    hop_s: Array
    occupied_s: Array
    deeper_s: Sequence[Sequence[Array]] = ()

    @property
    def peers(self) -> int:
        return len(self.compute_s)

    @property
    def cuts(self) -> int:
        return len(self.compute_s[0]) if self.compute_s else 0

    @property
    def levels(self) -> Levels:
        """What parts cost, by the number of stages behind them."""
        return [self.compute_s, *self.deeper_s]

    def within(self, bottleneck_s: float) -> tuple[Levels, Array]:
        """What parts and hops take, of those that keep nobody for longer than ``bottleneck_s``."""
        levels = [[np.where(part_s <= bottleneck_s, part_s, np.inf) for part_s in level] for level in self.levels]
        return levels, np.where(self.occupied_s <= bottleneck_s, self.hop_s, np.inf)

    def of(self, peers: Sequence[int]) -> Board:
        """The same for some of the peers."""
        rows = np.ix_([*peers, self.peers], [*peers, self.peers])
        levels = [[level[peer] for peer in peers] for level in self.levels]
        return Board(levels[0], self.hop_s[rows], self.occupied_s[rows], levels[1:])


@dataclass(frozen=True, slots=True)
class Chain:
    """What was found; ``exact`` where nothing is better."""

    chain: tuple[Part, ...]
    exact: bool


def search(board: Board, counts: Sequence[int], *, work: float = SEARCH_WORK) -> Chain | None:
    """The chain of least bottleneck, then of least time, with one of the ``counts`` of stages; None: none was found.

    Args:
        work: of moves from each start, where there is no exact search.
    """
    counts = [count for count in counts if count <= min(board.peers, board.cuts - 1)]
    if not counts:
        return None
    if _work(board.peers, max(counts), board.cuts) <= EXACT_WORK:
        parts = _exact(board, counts)
        return Chain(tuple(parts), exact=True) if parts else None
    return _by_moves(board, counts, work)


def is_exact(board: Board, counts: Sequence[int]) -> bool:
    """Whether ``search`` is exact here."""
    if not board.peers:
        return True
    return _work(board.peers, min(max(counts), board.peers, board.cuts - 1), board.cuts) <= EXACT_WORK


def _work(peers: int, most: int, cuts: int) -> float:
    return cuts**2 / 2 * sum(math.comb(peers, size) * size for size in range(1, most + 1))


# -------------------------------------------------------------------------------------------------------- exact search

Table = dict[int, tuple[tuple[int, ...], Array]]
"""Set of peers as bits → its members, and (members, cuts): the best that begins with the member at the cut."""


def _exact(board: Board, counts: Sequence[int]) -> list[Part]:
    bottlenecks = _table(board.levels, board.occupied_s, max(counts), np.maximum)
    bottleneck_s, _, _ = _best(bottlenecks, board.occupied_s, counts, np.maximum)
    if bottleneck_s == np.inf:
        return []
    del bottlenecks
    levels, hops_s = board.within(bottleneck_s)
    table = _table(levels, hops_s, max(counts), np.add)
    _, taken, peer = _best(table, hops_s, counts, np.add)
    return _walked(table, levels, hops_s, taken, peer)


def _at(levels: Levels, behind: int) -> Sequence[Array]:
    """What parts cost that have so many stages behind them."""
    return levels[min(behind, len(levels) - 1)]


def _table(levels: Levels, hops_s: Array, most: int, join: Any) -> Table:
    """All sets of up to ``most`` peers. ``join``: how a cost and what follows it make one (a ufunc: add or maximum)."""
    table: Table = {}
    for size in range(1, most + 1):
        parts_s = _at(levels, size - 1)
        for members in combinations(range(len(parts_s)), size):
            taken = sum(1 << peer for peer in members)
            table[taken] = members, np.stack([_begun(table, parts_s, hops_s, taken, peer, join) for peer in members])
    return table


def _begun(table: Table, parts_s: Sequence[Array], hops_s: Array, taken: int, peer: int, join: Any) -> Array:
    """(cuts,): the best that begins with ``peer`` and uses all of ``taken``."""
    begun: Array
    if taken == 1 << peer:
        begun = join(parts_s[peer][:, -1], hops_s[peer, -1])
        return begun
    members, rest = table[taken ^ 1 << peer]
    then = join(rest, hops_s[peer, list(members)][:, None]).min(axis=0)
    begun = join(parts_s[peer], then).min(axis=1)
    return begun


def _best(table: Table, hops_s: Array, counts: Sequence[int], join: Any) -> tuple[float, int, int]:
    """The best whole chain: its cost, its peers as bits, its first peer. Fewest stages first where costs are equal."""
    wanted = set(counts)
    whole = (
        (float(join(hops_s[-1, peer], rows[index, 0])), len(members), taken, peer)
        for taken, (members, rows) in table.items()
        if len(members) in wanted
        for index, peer in enumerate(members)
    )
    cost_s, _, taken, peer = min(whole)
    return cost_s, taken, peer


def _walked(table: Table, levels: Levels, hops_s: Array, taken: int, peer: int) -> list[Part]:
    parts, start = [], 0
    while taken != 1 << peer:
        members, rest = table[taken ^ 1 << peer]
        then = np.add(rest, hops_s[peer, list(members)][:, None])
        part_s = _at(levels, len(members))[peer][start]
        stop = int(np.add(part_s, then.min(axis=0)).argmin())
        parts.append((peer, start, stop))
        taken, peer, start = taken ^ 1 << peer, members[int(then[:, stop].argmin())], stop
    parts.append((peer, start, len(levels[0][peer]) - 1))
    return parts


# ----------------------------------------------------------------------------------------------------- search by moves


@dataclass(frozen=True, slots=True)
class _Trial:
    """An order of peers with the best cuts for it.

    Attributes:
        score: layers (in cuts) that find no room, bottleneck, time; less is better.
    """

    order: tuple[int, ...]
    score: tuple[float, float, float]
    parts: tuple[Part, ...]


def _rank(trial: _Trial) -> tuple[tuple[float, float, float], tuple[int, ...]]:
    return trial.score, trial.order


def _edges(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip((-1, *order), (*order, -1), strict=True)


class _Moves:
    """The search by moves on a board. Chains have one of ``counts`` stages."""

    def __init__(self, board: Board, counts: Sequence[int]) -> None:
        self._levels, self._counts = board.levels, frozenset(counts)
        self._parts_s = board.compute_s  # what is found hopeless with these is so however many are behind
        self._hop_s = np.where(np.isinf(board.hop_s), _APART_S, board.hop_s)
        self._occupied_s = np.where(np.isinf(board.occupied_s), _APART_S, board.occupied_s)
        self._hops_s: list[list[float]] = self._hop_s.tolist()
        self._blocks_s: list[list[float]] = self._occupied_s.tolist()
        self._peers, self._cuts = board.peers, board.cuts
        self._seen: dict[tuple[int, ...], _Trial] = {}
        self.work = 0.0

    def tried(self, order: tuple[int, ...]) -> _Trial:
        if (known := self._seen.get(order)) is not None:
            return known
        self.work += len(order) * (self._cuts**2 + _CALL_WORK)
        rows = self._rows(order, self._occupied_s, np.inf, np.maximum)
        bottleneck_s = max(float(rows[0][0]), float(self._occupied_s[-1, order[0]]))
        if bottleneck_s == np.inf:
            missing = next((index for index, row in enumerate(rows) if np.isfinite(row).any()), len(rows))
            reached = int(np.isfinite(rows[missing]).argmax()) if missing < len(rows) else self._cuts
            trial = _Trial(order, (float(missing * self._cuts + reached), np.inf, np.inf), ())
        else:
            self.work += len(order) * (self._cuts**2 + _CALL_WORK)
            rows = self._rows(order, self._hop_s, bottleneck_s, np.add)
            parts = self._walk(order, rows, bottleneck_s)
            token_s = float(rows[0][0]) + float(self._hop_s[-1, order[0]])
            trial = _Trial(order, (0.0, bottleneck_s, token_s), parts)
        self._seen[order] = trial
        return trial

    def _rows(self, order: tuple[int, ...], hops_s: Array, bottleneck_s: float, join: Any) -> list[Array]:
        """Of each stage, (cuts,): the best of it and those behind, where it starts at the cut."""
        rows: list[Array] = []
        following = -1
        for behind, peer in enumerate(reversed(order)):
            part_s = _at(self._levels, behind)[peer]
            if bottleneck_s < np.inf:
                part_s = np.where(part_s <= bottleneck_s, part_s, np.inf)
            then = join(part_s, join(rows[-1], hops_s[peer, following])).min(axis=1) if rows else part_s[:, -1]
            rows.append(then if rows else join(then, hops_s[peer, -1]))
            following = peer
        return rows[::-1]

    def _walk(self, order: tuple[int, ...], rows: list[Array], bottleneck_s: float) -> tuple[Part, ...]:
        parts, start = [], 0
        for rank, (peer, row) in enumerate(zip(order, rows[1:], strict=False)):
            part_s = _at(self._levels, len(order) - 1 - rank)[peer][start]
            stop = int(np.where(part_s <= bottleneck_s, part_s + row, np.inf).argmin())
            parts.append((peer, start, stop))
            start = stop
        return (*parts, (order[-1], start, self._cuts - 1))

    def starts(self) -> list[_Trial]:
        """The best first chains, of each way to choose peers."""
        first, last = (1, 2) if self._cuts > 2 else (0, 1)
        one_s = [float(part_s[first, last]) for part_s in self._parts_s]
        room = [int(np.isfinite(part_s[first]).sum()) for part_s in self._parts_s]
        everybody = range(self._peers)
        fastest = sorted(everybody, key=lambda peer: (one_s[peer], -room[peer], peer))
        largest = sorted(everybody, key=lambda peer: (-room[peer], one_s[peer], peer))
        tried = []
        for count in self._some_counts():
            choices = {tuple(fastest[:count]), tuple(largest[:count]), tuple(self._enough(count))}
            for choice in sorted(choices):
                tried += [self.tried(choice), self.tried(self._near(choice))]
        best: dict[frozenset[int], _Trial] = {}
        for trial in sorted(tried, key=_rank):
            best.setdefault(frozenset(trial.order), trial)
        return [
            min(trial, self.tried(self._untangled(trial.order)), key=_rank) for trial in list(best.values())[:_STARTS]
        ]

    def _some_counts(self) -> list[int]:
        """Of the numbers of stages allowed, some ``_COUNTS`` to begin with, the least and the most with them."""
        counts = sorted(self._counts)
        step = -(-len(counts) // _COUNTS)
        return sorted({*counts[::step], counts[-1]})

    def _enough(self, count: int) -> list[int]:
        """The ``count`` peers that hold all layers within the least time in which any can (hops and ends aside)."""
        middle = 1 if self._cuts > 2 else 0
        times_s = np.unique(np.concatenate([part_s[middle][np.isfinite(part_s[middle])] for part_s in self._parts_s]))
        low, high, chosen = 0, len(times_s) - 1, list(range(count))
        while low <= high:
            half = (low + high) // 2
            held = [int((part_s[middle] <= times_s[half]).sum()) for part_s in self._parts_s]
            most = sorted(range(self._peers), key=lambda peer: (-held[peer], peer))[:count]
            if sum(held[peer] for peer in most) >= self._cuts - 1:
                high, chosen = half - 1, most
            else:
                low = half + 1
        return chosen

    def _near(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """From the client on to the nearest that is left."""
        order: list[int] = []
        left, here = set(choice), -1
        while left:
            here = min(left, key=lambda peer: (self._hops_s[here][peer], peer))
            order.append(here)
            left.remove(here)
        return tuple(order)

    def _untangled(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """The order after turning round, or putting elsewhere, of any stretch that makes the hops less."""
        best_s, better, looks_left = self._path_s(order), True, _LOOKS
        while better:
            better = False
            for start, stop in combinations(range(len(order) + 1), 2):
                rest, stretch = order[:start] + order[stop:], order[start:stop]
                looks_left -= 1 + (len(stretch) <= 3) * len(rest)
                turned = [order[:start] + stretch[::-1] + order[stop:]]
                moved = [rest[:to] + stretch + rest[to:] for to in range(len(rest) + 1) if len(stretch) <= 3]
                trial = min((*turned, *moved), key=self._path_s)
                if (trial_s := self._path_s(trial)) < best_s * (1 - 1e-9):
                    order, best_s, better = trial, trial_s, True
                    break
                if looks_left < 0:
                    return order
        return order

    def _path_s(self, order: Sequence[int]) -> float:
        return sum([self._hops_s[one][other] for one, other in _edges(order)])

    def improved(self, trial: _Trial, work: float) -> _Trial:
        """The best that moves lead to, after ``work`` at most."""
        stop_at, better = self.work + work, True
        while better:
            better = False
            reach = self._reach(trial.score[1])
            for order in self._around(trial):
                if self.work > stop_at:
                    return trial
                if self._hopeless(order, trial, reach):
                    continue
                if (other := self.tried(order)).score < trial.score:
                    trial, better = other, True
                    break
        return trial

    def _reach(self, bottleneck_s: float) -> list[list[int]]:
        """Of each peer and cut, how far its part may go from there."""
        self.work += self._peers * (self._cuts**2 + _CALL_WORK)
        here = np.arange(self._cuts)
        return [
            (here + ((part_s <= bottleneck_s) & np.isfinite(part_s)).sum(axis=1)).tolist() for part_s in self._parts_s
        ]

    def _hopeless(self, order: tuple[int, ...], than: _Trial, reach: list[list[int]]) -> bool:
        """Whether a chain is seen, a hundred times faster than it is tried, to be no better than one that has its cuts.

        It is where parts as long as the bottleneck allows do not reach the end (where layers differ: most likely is).
        """
        self.work += len(order) * _LOOK_WORK
        if not than.parts:
            return False
        if any(self._blocks_s[one][other] > than.score[1] for one, other in _edges(order)):
            return True
        at, left = 0, len(order)
        for peer in order:
            left -= 1
            further = min(reach[peer][at], self._cuts - 1 - left)
            if further <= at:
                return True
            at = further
        return at < self._cuts - 1

    def _around(self, trial: _Trial) -> Iterator[tuple[int, ...]]:
        """The chains that are one move away, those at the costliest stages first."""
        order = trial.order
        count, others = len(order), [peer for peer in range(self._peers) if peer not in trial.order]
        others.sort(key=lambda peer: (float(self._parts_s[peer][-2, -1]), peer))
        for rank in self._costliest(trial):
            before, peer, after = order[:rank], order[rank], order[rank + 1 :]
            if count - 1 in self._counts:
                yield before + after
            for other in others:
                yield (*before, other, *after)
            for there in range(count):
                if there != rank:
                    swapped = list(order)
                    swapped[rank], swapped[there] = order[there], peer
                    yield tuple(swapped)
                    rest = before + after
                    yield (*rest[:there], peer, *rest[there:])
            if count + 1 in self._counts:
                for other in others:
                    yield (*before, other, peer, *after)
                    yield (*before, peer, other, *after)

    def _costliest(self, trial: _Trial) -> list[int]:
        """Ranks by the larger of what a stage and the hops beside it keep a token for, then by its hops."""
        if not trial.parts:
            return list(range(len(trial.order)))
        path = [-1, *trial.order, -1]

        def cost_s(rank: int) -> tuple[float, float]:
            around = ((path[rank], path[rank + 1]), (path[rank + 1], path[rank + 2]))
            peer, start, stop = trial.parts[rank]
            slowest_s = max(float(self._parts_s[peer][start, stop]), *(float(self._occupied_s[hop]) for hop in around))
            return slowest_s, sum(float(self._hop_s[hop]) for hop in around)

        return sorted(range(len(trial.order)), key=lambda rank: ([-cost for cost in cost_s(rank)], rank))


def _by_moves(board: Board, counts: Sequence[int], work: float) -> Chain | None:
    moves = _Moves(board, counts)
    ends = [moves.improved(trial, work) for trial in moves.starts()]
    best = min(ends, key=_rank)
    chosen = _pool(board, best.order, counts)
    if chosen and (parts := _exact(board.of(chosen), counts)):
        exact = tuple((chosen[peer], start, stop) for peer, start, stop in parts)
        order = tuple(peer for peer, _, _ in exact)
        if not best.parts or best.score[1] >= _APART_S or moves.tried(order).score <= best.score:
            return Chain(exact, exact=False)
    if not best.parts or best.score[1] >= _APART_S:
        return None
    return Chain(best.parts, exact=False)


def _pool(board: Board, order: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Peers to search exactly: of the best chain, and as many of the fastest others as can be; none where too many."""
    others = sorted(set(range(board.peers)) - set(order), key=lambda peer: (float(board.compute_s[peer][-2, -1]), peer))
    chosen: list[int] = []
    for peer in (*order, *others):
        most = min(max(counts), len(chosen) + 1)
        if _work(len(chosen) + 1, most, board.cuts) > EXACT_WORK:
            break
        chosen.append(peer)
    return sorted(chosen) if len(chosen) >= max(len(order), min(counts)) else []
