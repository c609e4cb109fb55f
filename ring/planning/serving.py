"""Chooses which peer holds which layers of a split model: the chain that produces tokens fastest. Pure.

What a chain costs
------------------
A *stage* is a peer that holds layers [start, stop); a *chain* is the stages in order. To decode a token a stage streams
the weights of its layers once. The last stage also streams the norm and the head (of an embedding only a row is read)::

    compute_s = byte_s * bytes of those weights

A hop from stage to stage carries the activations of one position; a hop from or to the client carries one token. It
takes ``latency_s + bytes / bandwidth``, and *occupies* the link for ``bytes / bandwidth`` of that. So::

    token_s      = sum of compute_s + sum of hops, the client's two included       one session, one token after another
    bottleneck_s = max over compute_s and what each hop occupies                   1 / tokens per second, the chain full

A stage needs memory for its weights and for its layers' KV cache of the wanted ``positions``.

How it is chosen
----------------
1. The peers are put in one order: a round trip from the client, always to the nearest remaining peer. Then stretches
   are reversed as long as that shortens the hops (``ring_plan``). Of equally near peers the smallest comes first.
2. An exact dynamic program cuts the layers for that order, in which a peer may get none (``best_cuts``). No stage
   exceeds its memory; then the least ``bottleneck_s`` wins, then the least ``token_s``, then the fewest stages. The
   order is tried in both directions.

``pipeline`` places training by the same two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.texts import human_bytes
from ring.planning.ring_plan import APART_S, LinkCosts, Links, nearest_first, steps, turned_around

MOST_CUTS = 256
"""Most places to cut. More layers than this are cut in groups of equal number (no model has as many)."""
MOST_PEERS = 64
"""Of more peers the fastest half and then the largest are considered."""

Array = npt.NDArray[np.float64]


# -------------------------------------------------------------------------------------------------- the dynamic program


@dataclass(frozen=True, slots=True)
class CostTable:
    """All costs in seconds; infinite if impossible.

    Attributes:
        levels: by number of following stages (the last also for more), then by peer: (cuts, cuts), cost of a part from
            cut to cut.
        hop_s, occupied_s: (peers + 1, peers + 1), from and to; the client is the last.
    """

    levels: Sequence[Sequence[Array]]
    hop_s: Array
    occupied_s: Array

    def part_s(self, behind: int, peer: int) -> Array:
        return self.levels[min(behind, len(self.levels) - 1)][peer]


def best_chain(cost_table: CostTable, counts: Iterable[int]) -> list[tuple[int, int, int]]:
    """(peer, start, stop) of the stages, by index of peer and of cut, with the order of the module's first step; empty
    if nothing fits. ``counts``: allowed numbers of stages."""
    size = len(cost_table.levels[0]) if cost_table.levels else 0
    near = [
        [min(cost, APART_S) for cost in (row[-1], *row[:-1])] for row in (cost_table.hop_s[-1], *cost_table.hop_s[:-1])
    ]
    circle = turned_around(nearest_first(near), lambda way: sum(near[here][there] for here, there in steps(way)))
    order = [index - 1 for index in circle[1:]]
    wanted = [count for count in counts if 1 <= count <= size]
    found = [best_cuts(cost_table, way, wanted) for way in (order, order[::-1])]
    return min((chain for chain in found if chain[1]), default=(None, []))[1]


def best_cuts(
    cost_table: CostTable, order: Sequence[int], counts: Sequence[int]
) -> tuple[tuple[float, float, int], list[tuple[int, int, int]]]:
    """The best cuts for peers in that order, of which each may get no layer: (bottleneck, time, stages), and the chain
    as in ``best_chain``; empty if nothing fits.

    Peer p holds the layers from i to j, and q is the next peer. The best k stages that begin with p at layer i are
    ``best(k, p, i) = min over j, q of cost(p, i, j) + hop(p, q) + best(k - 1, q, j)``. With max for + this is the least
    bottleneck; with +, over only the costs within that bottleneck, it is the least time.
    """
    bottleneck_s, *_ = _first(
        cost_table, cost_table.occupied_s, _rows(cost_table, cost_table.occupied_s, order, counts), order, counts
    )
    if not bottleneck_s < np.inf:
        return (np.inf, np.inf, 0), []
    hop_s = np.where(cost_table.occupied_s <= bottleneck_s, cost_table.hop_s, np.inf)
    rows = _rows(cost_table, hop_s, order, counts, within_s=bottleneck_s)
    token_s, count, at = _first(cost_table, hop_s, rows, order, counts, np.add)
    score, chain, start = (bottleneck_s, token_s, count), [], 0
    for behind in reversed(range(1, count)):
        peer = order[at]
        then = rows[behind - 1][at + 1 :] + hop_s[peer, order[at + 1 :]][:, None]
        part_s = _within(cost_table.part_s(behind, peer)[start], bottleneck_s)
        stop = int((part_s + then.min(axis=0)).argmin())
        chain.append((peer, start, stop))
        at, start = at + 1 + int(then[:, stop].argmin()), stop
    chain.append((order[at], start, cost_table.part_s(0, 0).shape[0] - 1))
    return score, chain


def _within(part_s: Array, most_s: float) -> Array:
    return np.where(part_s <= most_s, part_s, np.inf)


def _rows(
    cost_table: CostTable, hop_s: Array, order: Sequence[int], counts: Sequence[int], *, within_s: float = np.inf
) -> list[Array]:
    """For each number of following stages: (peers, cuts), the best chain from the peer at that place of ``order`` and
    that cut. Sums with ``within_s``, else bottlenecks."""
    join: Any = np.maximum if within_s == np.inf else np.add
    cuts = cost_table.part_s(0, 0).shape[0] if order else 0
    rows: list[Array] = []
    for behind in range(max(counts, default=0)):
        row = np.full((len(order), cuts), np.inf)
        for at, peer in enumerate(order[: len(order) - behind]):
            part_s = _within(cost_table.part_s(behind, peer), within_s)
            if not behind:
                row[at] = join(part_s[:, -1], hop_s[peer, -1])
            else:
                then = join(rows[-1][at + 1 :], hop_s[peer, order[at + 1 :]][:, None]).min(axis=0)
                row[at] = join(part_s, then).min(axis=1)
        rows.append(row)
    return rows


def _first(
    cost_table: CostTable,
    hop_s: Array,
    rows: Sequence[Array],
    order: Sequence[int],
    counts: Sequence[int],
    join: Any = max,
) -> tuple[float, int, int]:
    whole = [
        (float(join(float(hop_s[-1, peer]), float(rows[count - 1][at, 0]))), count, at)
        for count in counts
        for at, peer in enumerate(order)
    ]
    return min(whole, default=(np.inf, 0, 0))


def cut_places(layers: int) -> list[int]:
    """The layers before which a cut may be, including the first and the one after the last."""
    return [*range(0, layers, -(-layers // MOST_CUTS)), layers]


def spans(sizes: Sequence[float], cuts: Sequence[int]) -> Array:
    total = np.cumsum([0, *sizes], dtype=np.float64)[list(cuts)]
    between: Array = total[None, :] - total[:, None]
    return between


# -------------------------------------------------------------------------------------------------------------- serving


@dataclass(frozen=True, slots=True)
class PlacementPeer:
    """A peer that may hold a stage.

    Attributes:
        memory_bytes: for weights and cache.
        byte_s: seconds to stream one byte of weights while a token is decoded.
    """

    id: str
    name: str
    memory_bytes: int
    byte_s: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model to place, and the links to use.

    Attributes:
        positions: cache positions, of all sessions together.
        activation_bytes: of one position, as sent from stage to stage.
        client: peer id of the client, which sends and gets the tokens and holds no stage.
        links: (from, to), ids of peers and client → measurement.
        apart: (from, to) if ``from`` cannot dial ``to``. A peer that the client cannot dial holds no stage.
    """

    sizes: ModelSizes
    positions: int
    activation_bytes: int
    client: str
    links: Links
    apart: frozenset[tuple[str, str]] = frozenset()

    def cache_bytes(self, start: int, stop: int) -> int:
        return self.positions * sum(self.sizes.cache_bytes[start:stop])

    def need_bytes(self, start: int, stop: int) -> int:
        return self.sizes.weights_bytes(start, stop) + self.cache_bytes(start, stop)


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """One stage of a chain.

    Attributes:
        weights_bytes, cache_bytes: parts of ``peer.memory_bytes``.
        compute_s: predicted, for one token.
        hop_s: time to the next stage, after the last stage to the client.
        occupied_s: the part of ``hop_s`` that keeps the link from the next token.
    """

    peer: PlacementPeer
    start: int
    stop: int
    weights_bytes: int
    cache_bytes: int
    compute_s: float
    hop_s: float
    occupied_s: float

    @property
    def need_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.compute_s if self.compute_s else float("inf")


@dataclass(frozen=True, slots=True)
class Placement:
    """A chain and its prediction. ``client_...``: of the hop from the client to the first stage."""

    stages: tuple[PlacedStage, ...]
    client_hop_s: float
    client_occupied_s: float

    @property
    def token_s(self) -> float:
        return self.client_hop_s + sum(stage.compute_s + stage.hop_s for stage in self.stages)

    @property
    def bottleneck_s(self) -> float:
        """Seconds between two tokens of a full chain. A peer with two stages (``replacement``) computes for both."""
        busy_s: dict[str, float] = {}
        for stage in self.stages:
            busy_s[stage.peer.id] = busy_s.get(stage.peer.id, 0.0) + stage.compute_s
        return max(self.client_occupied_s, *busy_s.values(), *(stage.occupied_s for stage in self.stages))

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.bottleneck_s if self.bottleneck_s else float("inf")


Part = tuple[PlacementPeer, int, int]
"""A peer that holds layers [start, stop)."""


def place(wanted: Wanted, peers: Iterable[PlacementPeer], *, stages: int | None = None) -> Placement:
    """The best chain by the module's two steps. ``stages``: their number; None for the best number.

    Raises:
        UserError: there are fewer peers or layers than stages, or no peer.
        ResourceError: no chain has enough memory and connections. The error tells what is needed, what there is, and a
            remedy.
    """
    candidates = sorted(peers, key=lambda peer: peer.id)
    if not candidates:
        raise UserError("a model cannot be placed: there is no peer to hold it", remedy="start some: p2ptrain join")
    reached = [peer for peer in candidates if (wanted.client, peer.id) not in wanted.apart]
    most = min(len(candidates), wanted.sizes.layers)
    if stages is not None and not 1 <= stages <= most:
        raise UserError(
            f"{len(candidates)} peers and {wanted.sizes.layers} layers do not make a chain of {stages} stages",
            remedy=f"ask for 1 to {most} stages, or leave the number out for the best one",
        )
    looked_at = _looked_at(reached)
    cuts, hops = cut_places(wanted.sizes.layers), _Hops(wanted, candidates)
    found = best_chain(_cost_table(wanted, looked_at, hops, cuts), range(1, most + 1) if stages is None else [stages])
    if not found:
        raise _refusal(wanted, candidates, reached, stages)
    return _placement(wanted, hops, [(looked_at[peer], cuts[start], cuts[stop]) for peer, start, stop in found])


def priced(wanted: Wanted, peers: Iterable[PlacementPeer], chain: Sequence[Part]) -> Placement | None:
    """The prediction for a given chain of all layers; None if memory or connections do not allow it. ``peers`` are all
    peers: links that were not measured count as the median of the measured ones."""
    hops = _Hops(wanted, peers)
    if any(_why_not(wanted, chain, index, ()) for index in range(len(chain))):
        return None
    return _placement(wanted, hops, chain)


def replacement(
    wanted: Wanted, plan: Placement, dead: Collection[str], spares: Iterable[PlacementPeer]
) -> tuple[Placement | None, str]:
    """``plan`` with the layers of the ``dead`` (peer ids) at other peers, and what changed; None and the reason if that
    is impossible. Cuts and living stages stay as they are.

    A spare takes them, or the peer of a living stage that has enough memory: the one that makes the best chain, and a
    spare if both are equal. Several lost stages are replaced one after the other. A peer with two stages needs the time
    of both, and no link to itself.
    """
    alive = {stage.peer.id: stage.peer for stage in plan.stages if stage.peer.id not in dead}
    spare = {peer.id: peer for peer in spares if peer.id not in dead and peer.id not in alive}
    held = [stage.peer for stage in plan.stages]
    hops = _Hops(wanted, (*held, *spare.values()))
    chain = [(stage.peer, stage.start, stage.stop) for stage in plan.stages]
    taken = []
    for index in [index for index, stage in enumerate(plan.stages) if stage.peer.id in dead]:
        _, start, stop = chain[index]
        tries: list[tuple[float, float, int, Placement, PlacementPeer]] = []
        refusals = []
        # Spares first, then by id: the order breaks ties.
        for peer in (*(spare[id] for id in sorted(spare)), *(alive[id] for id in sorted(alive))):
            trial = [*chain[:index], (peer, start, stop), *chain[index + 1 :]]
            if why := _why_not(wanted, trial, index, dead):
                refusals.append(f"{peer.name} {why}")
            else:
                made = _placement(wanted, hops, trial)
                tries.append((made.bottleneck_s, made.token_s, len(tries), made, peer))
        if not tries:
            reasons = _named(refusals, "; ") or "there is no other peer"
            return None, f"no peer can take layers {start} to {stop - 1}: {reasons}"
        *_, plan, peer = min(tries, key=lambda made: made[:3])
        chain[index] = (peer, start, stop)
        taken.append(f"{peer.name} takes layers {start} to {stop - 1}")
    return plan, "; ".join(taken) or "no stage of the chain is lost"


def _why_not(wanted: Wanted, chain: Sequence[Part], index: int, dead: Collection[str]) -> str:
    peer, start, stop = chain[index]
    need_bytes = sum(wanted.need_bytes(*part) for holder, *part in chain if holder.id == peer.id)
    if need_bytes > peer.memory_bytes:
        mine_bytes = wanted.need_bytes(start, stop)
        left_bytes = max(0, peer.memory_bytes - need_bytes + mine_bytes)
        return f"has {human_bytes(left_bytes)} of memory left, the layers need {human_bytes(mine_bytes)}"
    if (wanted.client, peer.id) in wanted.apart:
        return "cannot be reached by the client"
    if index and (before := chain[index - 1][0]).id not in dead and (before.id, peer.id) in wanted.apart:
        return f"cannot be reached by {before.name}"
    if index + 1 < len(chain) and (after := chain[index + 1][0]).id not in dead and (peer.id, after.id) in wanted.apart:
        return f"cannot reach {after.name}"
    return ""


class _Hops:
    def __init__(self, wanted: Wanted, peers: Iterable[PlacementPeer]) -> None:
        self._wanted = wanted
        self._ways = LinkCosts(wanted.links, sorted({*(peer.id for peer in peers), wanted.client}))

    def between(self, one: str, other: str) -> tuple[float, float]:
        if one == other:
            return 0.0, 0.0
        token = self._wanted.client in (one, other)  # ids travel as packed int32
        latency_s, occupied_s = self._ways.between(one, other, 4 if token else self._wanted.activation_bytes)
        return latency_s + occupied_s, occupied_s


def _placement(wanted: Wanted, hops: _Hops, chain: Sequence[Part]) -> Placement:
    stages = []
    behind = [*(peer.id for peer, _, _ in chain[1:]), wanted.client]
    for (peer, start, stop), after in zip(chain, behind, strict=True):
        weights_bytes = wanted.sizes.weights_bytes(start, stop)
        cache_bytes = wanted.cache_bytes(start, stop)
        compute_s = peer.byte_s * wanted.sizes.streamed_bytes(start, stop)
        hop = hops.between(peer.id, after)
        stages.append(PlacedStage(peer, start, stop, weights_bytes, cache_bytes, compute_s, *hop))
    return Placement(tuple(stages), *hops.between(wanted.client, chain[0][0].id))


def _cost_table(wanted: Wanted, peers: Sequence[PlacementPeer], hops: _Hops, cuts: Sequence[int]) -> CostTable:
    sizes = wanted.sizes
    streamed_bytes = spans(sizes.layers_bytes, cuts)
    need_bytes = streamed_bytes + wanted.positions * spans(sizes.cache_bytes, cuts)
    need_bytes[np.tril_indices(len(cuts))] = np.inf
    streamed_bytes[:-1, -1] += sizes.last_bytes
    need_bytes[:-1, -1] += sizes.last_bytes
    need_bytes[0, 1:] += sizes.first_bytes
    need_bytes[0, -1] -= sizes.tied_bytes
    parts_s = [np.where(need_bytes <= peer.memory_bytes, peer.byte_s * streamed_bytes, np.inf) for peer in peers]
    hop_s, occupied_s = np.full((2, len(peers) + 1, len(peers) + 1), np.inf)
    ids = [*(peer.id for peer in peers), wanted.client]
    for here, one in enumerate(ids):
        for there, other in enumerate(ids):
            if here != there and (wanted.client in (one, other) or (one, other) not in wanted.apart):
                hop_s[here, there], occupied_s[here, there] = hops.between(one, other)
    return CostTable([parts_s], hop_s, occupied_s)


def _looked_at(peers: Sequence[PlacementPeer]) -> list[PlacementPeer]:
    """The peers to consider: all, or half chosen by speed and half by memory; the smallest first."""
    fastest = sorted(peers, key=lambda peer: (peer.byte_s, -peer.memory_bytes, peer.id))[: MOST_PEERS // 2]
    rest = sorted(set(peers) - set(fastest), key=lambda peer: (-peer.memory_bytes, peer.byte_s, peer.id))
    chosen = [*fastest, *rest[: MOST_PEERS - len(fastest)]]
    return sorted(chosen, key=lambda peer: (peer.memory_bytes, -peer.byte_s, peer.id))


def _refusal(
    wanted: Wanted, candidates: Sequence[PlacementPeer], reached: Sequence[PlacementPeer], stages: int | None
) -> ResourceError:
    sizes = wanted.sizes
    weights_bytes, need_bytes = sizes.weights_bytes(0, sizes.layers), wanted.need_bytes(0, sizes.layers)
    offered_bytes = sum(peer.memory_bytes for peer in reached)
    largest_bytes, largest = max((wanted.need_bytes(index, index + 1), index) for index in range(sizes.layers))
    offers = [f"{peer.name} {human_bytes(peer.memory_bytes)}" for peer in reached]
    away = [peer.name for peer in candidates if peer not in reached]
    lines = [
        f"the model needs {human_bytes(need_bytes)} ({human_bytes(weights_bytes)} of weights, "
        f"{human_bytes(need_bytes - weights_bytes)} of cache for {wanted.positions} positions; "
        f"layer {largest} alone {human_bytes(largest_bytes)}), "
        f"and {len(reached)} peer{'s offer' if len(reached) != 1 else ' offers'} {human_bytes(offered_bytes)}"
        + (f": {_named(offers, ', ')}" if offers else "")
    ]
    do = []
    if away:
        lines.append(f"the client cannot reach {_named(away, ', ')}")
        do.append("make all peers reachable (p2ptrain check shows the cause)")
    if stages is not None:
        lines.append(f"{stages} stage{'s were' if stages != 1 else ' was'} requested")
        do.append("ask for another number of stages, or leave it out")
    if wanted.apart and need_bytes <= offered_bytes:
        lines.append("the memory is sufficient, but some peers cannot reach each other")
        do.append("make the peers reach each other (p2ptrain check shows the cause)")
    if largest_bytes > max((peer.memory_bytes for peer in reached), default=0):
        do.append(f"start a peer with {human_bytes(largest_bytes)} at least")
    else:
        do.append("start more peers, or peers with more memory")
    return ResourceError("; ".join(lines), remedy=", or ".join([*do, "use fewer positions or a smaller dtype"]))


def _named(names: Sequence[str], between: str) -> str:
    most = 8  # names in a message
    return between.join([*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])])
