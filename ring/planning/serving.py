"""Chooses which worker holds which layers of a served model: the chain that produces tokens fastest. Pure.

A *chain* is the stages in order. A hop from stage to stage carries the activations of one position; a hop from or to
the client carries one token. It takes ``latency_s + bytes / bandwidth``, and *occupies* the link for ``bytes /
bandwidth`` of that. With a stage's ``compute_s``, as ``workloads.ServingWorkload`` says::

    token_s      = sum of compute_s + sum of hops, the client's two included       one session, one token after another
    bottleneck_s = max over compute_s and what each hop occupies                   1 / tokens per second, the chain full

A stage needs memory for its weights and for its layers' KV cache of the wanted ``positions``. ``cuts`` chooses the
chain: no stage exceeds its memory; then the least ``bottleneck_s`` wins, then the least ``token_s``, then the fewest
stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.texts import human_bytes, join_some
from ring.planning.cuts import MOST_WORKERS, Array, ChainCosts, cut_places, find_best_chain, tabulate
from ring.planning.measurements import CandidateWorker, LinkTimes
from ring.planning.workloads import ServingWorkload

WorkerPart = tuple[CandidateWorker, int, int]
"""A worker and its layers [start, stop)."""


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """One stage of a chain.

    Attributes:
        weights_bytes, cache_bytes: parts of ``peer.memory_bytes``.
        compute_s: predicted, for one token.
        hop_s: time to the next stage, after the last stage to the client.
        occupied_s: the part of ``hop_s`` that keeps the link from the next token.
    """

    peer: CandidateWorker
    start: int
    stop: int
    weights_bytes: int
    cache_bytes: int
    compute_s: float
    hop_s: float
    occupied_s: float

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
        """Seconds between two tokens of a full chain. A peer with two stages (``replace_lost``) computes for both."""
        busy_s: dict[str, float] = {}
        for stage in self.stages:
            busy_s[stage.peer.id] = busy_s.get(stage.peer.id, 0.0) + stage.compute_s
        return max(self.client_occupied_s, *busy_s.values(), *(stage.occupied_s for stage in self.stages))

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.bottleneck_s if self.bottleneck_s else float("inf")


class ChainPricer:
    """Predicts chains of ``peers`` for one workload. Links that were not measured count as the median of the measured
    ones between them and the client."""

    def __init__(self, workload: ServingWorkload, peers: Iterable[CandidateWorker]) -> None:
        self._workload = workload
        self._times = LinkTimes(workload.links, sorted({*(peer.id for peer in peers), workload.client}))

    def hop(self, sender: str, receiver: str) -> tuple[float, float]:
        """Seconds of a hop, and what it occupies; a worker with two stages needs no link to itself."""
        if sender == receiver:
            return 0.0, 0.0
        token = self._workload.client in (sender, receiver)  # ids travel as packed int32
        latency_s, occupied_s = self._times.between(sender, receiver, 4 if token else self._workload.activation_bytes)
        return latency_s + occupied_s, occupied_s

    def price(self, chain: Sequence[WorkerPart]) -> Placement:
        workload, client = self._workload, self._workload.client
        stages = []
        for (peer, start, stop), after in zip(chain, [*(peer.id for peer, *_ in chain[1:]), client], strict=True):
            weights_bytes, cache_bytes = workload.sizes.weights_bytes(start, stop), workload.cache_bytes(start, stop)
            compute_s = workload.compute_s(start, stop, peer.byte_s)
            stages.append(
                PlacedStage(peer, start, stop, weights_bytes, cache_bytes, compute_s, *self.hop(peer.id, after))
            )
        return Placement(tuple(stages), *self.hop(client, chain[0][0].id))

    def costs(self, peers: Sequence[CandidateWorker]) -> ChainCosts:
        workload, client = self._workload, self._workload.client
        places, ids = cut_places(workload.sizes.layers), [*(peer.id for peer in peers), client]
        plain_s = tabulate(lambda start, stop: workload.compute_s(start, stop, 1.0), places)
        need_bytes = tabulate(workload.need_bytes, places)

        def part_s(_: int, index: int) -> Array:
            return np.where(need_bytes <= peers[index].memory_bytes, peers[index].byte_s * plain_s, np.inf)

        def hop(here: int, there: int) -> tuple[float, float]:
            pair = ids[here], ids[there]
            return (np.inf, np.inf) if client not in pair and pair in workload.apart else self.hop(*pair)

        return ChainCosts(places, len(peers), part_s, hop)


def place_model(workload: ServingWorkload, peers: Iterable[CandidateWorker], *, stages: int | None = None) -> Placement:
    """The best chain. ``stages``: their number; None for the best number.

    Raises:
        UserError: there are fewer peers or layers than stages, or no peer.
        ResourceError: no chain has enough memory and connections. The error tells what is needed, what there is, and a
            remedy.
    """
    candidates = sorted(peers, key=lambda peer: peer.id)
    if not candidates:
        raise UserError("a model cannot be placed: there is no peer to hold it", remedy="start some: p2ptrain join")
    reached = [peer for peer in candidates if (workload.client, peer.id) not in workload.apart]
    limit = min(len(candidates), workload.sizes.layers)
    if stages is not None and not 1 <= stages <= limit:
        raise UserError(
            f"{len(candidates)} peers and {workload.sizes.layers} layers do not make a chain of {stages} stages",
            remedy=f"ask for 1 to {limit} stages, or leave the number out for the best one",
        )
    tried, pricer = _likely(reached), ChainPricer(workload, candidates)
    found = find_best_chain(pricer.costs(tried), range(1, limit + 1) if stages is None else [stages])
    if found is None:
        raise _refusal(workload, candidates, reached, stages)
    return pricer.price([(tried[peer], start, stop) for peer, start, stop in found[1]])


def price_chain(
    workload: ServingWorkload, peers: Iterable[CandidateWorker], chain: Sequence[WorkerPart]
) -> Placement | None:
    """The prediction for a given chain of all layers; None if memory or connections do not allow it. ``peers`` are all
    peers, for the median of the links."""
    if any(_obstacle(workload, chain, index, ()) for index in range(len(chain))):
        return None
    return ChainPricer(workload, peers).price(chain)


def replace_lost(
    workload: ServingWorkload, plan: Placement, lost: Collection[int], spares: Iterable[CandidateWorker]
) -> tuple[Placement | None, str]:
    """``plan`` with the layers of the ``lost`` stages (their numbers) at other peers, and what changed; None and the
    reason if that is impossible. Cuts and living stages stay as they are.

    A spare takes them, or the peer of a living stage that has enough memory: the one that makes the best chain, and a
    spare if both are equal. Several lost stages are replaced one after the other. A peer with two stages needs the time
    of both, and no link to itself.
    """
    alive = {stage.peer.id: stage.peer for index, stage in enumerate(plan.stages) if index not in lost}
    spare = {peer.id: peer for peer in spares if peer.id not in alive}
    pricer = ChainPricer(workload, [*(stage.peer for stage in plan.stages), *spare.values()])
    chain = [(stage.peer, stage.start, stage.stop) for stage in plan.stages]
    # Spares first, then by id: the order breaks ties.
    candidates = [*(spare[id] for id in sorted(spare)), *(alive[id] for id in sorted(alive))]
    left, changes = set(lost), []
    for index in sorted(lost):
        _, start, stop = chain[index]
        trials, obstacles = [], []
        for peer in candidates:
            trial = [*chain[:index], (peer, start, stop), *chain[index + 1 :]]
            if obstacle := _obstacle(workload, trial, index, left):
                obstacles.append(f"{peer.name} {obstacle}")
            else:
                trials.append((pricer.price(trial), peer))
        if not trials:
            reasons = join_some(obstacles, "; ") or "there is no other peer"
            return None, f"no peer can take layers {start} to {stop - 1}: {reasons}"
        plan, peer = min(trials, key=lambda trial: (trial[0].bottleneck_s, trial[0].token_s))
        chain[index] = (peer, start, stop)
        left.remove(index)
        changes.append(f"{peer.name} takes layers {start} to {stop - 1}")
    return plan, "; ".join(changes) or "no stage of the chain is lost"


def _obstacle(workload: ServingWorkload, chain: Sequence[WorkerPart], index: int, lost: Collection[int]) -> str:
    """Why the peer of a stage cannot hold it, whoever takes the ``lost`` ones; empty if it can."""
    peer, start, stop = chain[index]
    need_bytes = sum(workload.need_bytes(*part) for holder, *part in chain if holder.id == peer.id)
    if need_bytes > peer.memory_bytes:
        mine_bytes = workload.need_bytes(start, stop)
        left_bytes = max(0, peer.memory_bytes - need_bytes + mine_bytes)
        return f"has {human_bytes(left_bytes)} of memory left, the layers need {human_bytes(mine_bytes)}"
    if (workload.client, peer.id) in workload.apart:
        return "cannot be reached by the client"
    peers = {at: holder for at, (holder, *_) in enumerate(chain) if at not in lost}
    before, after = peers.get(index - 1), peers.get(index + 1)
    if before is not None and (before.id, peer.id) in workload.apart:
        return f"cannot be reached by {before.name}"
    if after is not None and (peer.id, after.id) in workload.apart:
        return f"cannot reach {after.name}"
    return ""


def _likely(peers: Sequence[CandidateWorker]) -> list[CandidateWorker]:
    """The peers to consider: all, or half chosen by speed and half by memory; the smallest first."""
    fastest = sorted(peers, key=lambda peer: (peer.byte_s, -peer.memory_bytes, peer.id))[: MOST_WORKERS // 2]
    rest = sorted(set(peers) - set(fastest), key=lambda peer: (-peer.memory_bytes, peer.byte_s, peer.id))
    chosen = [*fastest, *rest[: MOST_WORKERS - len(fastest)]]
    return sorted(chosen, key=lambda peer: (peer.memory_bytes, -peer.byte_s, peer.id))


def _refusal(
    workload: ServingWorkload,
    candidates: Sequence[CandidateWorker],
    reached: Sequence[CandidateWorker],
    stages: int | None,
) -> ResourceError:
    layers = workload.sizes.layers
    weights_bytes, need_bytes = workload.sizes.weights_bytes(0, layers), workload.need_bytes(0, layers)
    offered_bytes = sum(peer.memory_bytes for peer in reached)
    largest_bytes, largest = max((workload.need_bytes(index, index + 1), index) for index in range(layers))
    offers = join_some([f"{peer.name} {human_bytes(peer.memory_bytes)}" for peer in reached])
    reasons = [
        f"the model needs {human_bytes(need_bytes)} ({human_bytes(weights_bytes)} of weights, "
        f"{human_bytes(need_bytes - weights_bytes)} of cache for {workload.positions} positions; "
        f"layer {largest} alone {human_bytes(largest_bytes)}), "
        f"and {len(reached)} peer{'s offer' if len(reached) != 1 else ' offers'} {human_bytes(offered_bytes)}"
        + (f": {offers}" if offers else "")
    ]
    remedies = []
    if unreached := [peer.name for peer in candidates if peer not in reached]:
        reasons.append(f"the client cannot reach {join_some(unreached)}")
        remedies.append("make all peers reachable (p2ptrain check shows the cause)")
    if stages is not None:
        reasons.append(f"{stages} stage{'s were' if stages != 1 else ' was'} requested")
        remedies.append("ask for another number of stages, or leave it out")
    if workload.apart and need_bytes <= offered_bytes:
        reasons.append("the memory is sufficient, but some peers cannot reach each other")
        remedies.append("make the peers reach each other (p2ptrain check shows the cause)")
    if largest_bytes > max((peer.memory_bytes for peer in reached), default=0):
        remedies.append(f"start a peer with {human_bytes(largest_bytes)} at least")
    else:
        remedies.append("start more peers, or peers with more memory")
    return ResourceError("; ".join(reasons), remedy=", or ".join([*remedies, "use fewer positions or a smaller dtype"]))
