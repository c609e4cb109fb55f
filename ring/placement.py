"""Which peer holds which layers of a split model: the chain that gives tokens fastest. Pure.

What a chain costs
------------------
A *stage* is a peer that holds layers [start, stop), a *chain* the stages in order. To decode a token a stage streams
the weights of its layers once, the last one the norm and the head as well (of an embedding only a row is read)::

    compute_s = byte_s * bytes of those weights

A hop from stage to stage carries the activations of one position, a hop from or to the client one token. It takes
``latency_s + bytes / bandwidth``, and *occupies* the link for ``bytes / bandwidth`` of that: latency is waited for by
who waits for this token, but not by the token behind it. So::

    token_s      = sum of compute_s + sum of hops, the client's two included       one session, one token after another
    bottleneck_s = max over compute_s and what each hop occupies                   1 / tokens per second, the chain full

That is the memory's bandwidth alone, a lower bound: what starting kernels and the interpreter take, of a small model
most of the time, is not known before a peer has computed.

A stage must have room for its weights, for its layers' KV cache of the ``positions`` wanted, and, where another stage
follows, for the activations of as many positions: it keeps what it gave on, to replay it to who takes a lost stage's
place. (What attention reads of a long cache is not counted: it goes with the layers, as the weights do.)

The objective
-------------
No stage over its memory; then the least ``bottleneck_s``; then, of the chains that reach that, the least ``token_s``;
then the fewest stages; then peers whose ids come first. A peer holds one stage. The order in which peers, links and
refusals of links are given changes nothing.

How sure that is: ``ring.placement_search``. ``Placement.exact`` tells.

What is not known
-----------------
As in ``ring.order``: a link measured one way only is alike in the other, and one that never was is as the median of
those that were. Where none was, links cost nothing and only the peers count.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.units import human_bytes
from ring.model_sizes import ModelSizes as ModelSizes
from ring.order import Links, known_link
from ring.placement_search import Board, is_exact, search

TOKEN_BYTES = 4
"""Token ids travel as packed int32."""
MOST_CUTS = 256
"""More layers are taken in groups of equal number, so that this many places to cut are left (no model has as many)."""
MOST_PEERS = 128
"""Of more peers the fastest are looked at, and the largest where those have too little room."""
_NAMED = 8  # peers that a refusal tells of, one by one


@dataclass(frozen=True, slots=True)
class Peer:
    """Who may hold a stage.

    Attributes:
        memory_bytes: what weights and cache may take there.
        byte_s: seconds to stream one byte of weights while a token is decoded.
    """

    id: str
    name: str
    memory_bytes: int
    byte_s: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be placed, and over which links.

    Attributes:
        positions: to have cache for, of all sessions together.
        activation_bytes: of one position, as they travel from stage to stage, and are kept by who gave them on.
        client: peer id of who sends the tokens and gets them; it holds no stage.
        links: (from, to), ids of peers and client → what was measured.
        apart: (from, to) where ``from`` cannot dial ``to``. Whom the client cannot dial holds no stage.
    """

    sizes: ModelSizes
    positions: int
    activation_bytes: int
    client: str
    links: Links
    apart: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain.

    Attributes:
        weights_bytes, cache_bytes, kept_bytes: what it takes of ``peer.memory_bytes``; the last is what it gave on.
        compute_s: predicted, of one token.
        hop_s: until what it made is at the next stage, after the last one at the client.
        occupied_s: of that, what keeps the link from the token behind.
    """

    peer: Peer
    start: int
    stop: int
    weights_bytes: int
    cache_bytes: int
    kept_bytes: int
    compute_s: float
    hop_s: float
    occupied_s: float

    @property
    def need_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.kept_bytes

    @property
    def tokens_per_s(self) -> float:
        """What this stage could do by itself."""
        return 1 / self.compute_s if self.compute_s else float("inf")


@dataclass(frozen=True, slots=True)
class Placement:
    """A chain, and what it is predicted to do.

    Attributes:
        client_hop_s, client_occupied_s: of the hop from the client to the first stage.
        exact: no chain is better by the objective above; else it is the best that was found.
    """

    stages: tuple[Stage, ...]
    client_hop_s: float
    client_occupied_s: float
    exact: bool

    @property
    def token_s(self) -> float:
        """What a token takes, from the client and back to it."""
        return self.client_hop_s + sum(stage.compute_s + stage.hop_s for stage in self.stages)

    @property
    def bottleneck_s(self) -> float:
        """Between two tokens of a full chain. A peer with two stages (``replacement``) works for both."""
        busy_s: dict[str, float] = {}
        for stage in self.stages:
            busy_s[stage.peer.id] = busy_s.get(stage.peer.id, 0.0) + stage.compute_s
        return max(self.client_occupied_s, *busy_s.values(), *(stage.occupied_s for stage in self.stages))

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together, the chain full."""
        return 1 / self.bottleneck_s if self.bottleneck_s else float("inf")


def place(wanted: Wanted, peers: Iterable[Peer], *, stages: int | None = None) -> Placement:
    """The best chain by the objective above.

    Args:
        stages: how many; None for the best number.
    Raises:
        UserError: there are fewer peers or layers than stages, or no peer.
        ResourceError: no chain has the memory, or none that has it can be connected. It tells what is needed, what
            there is, and what would do.
    """
    given = _checked(wanted, peers)
    if not given:
        raise UserError("a model cannot be placed: there is no peer to hold it", remedy="start some: p2ptrain join")
    reached = [peer for peer in given if (wanted.client, peer.id) not in wanted.apart]
    layers = wanted.sizes.layers
    if stages is not None and not 1 <= stages <= min(len(given), layers):
        raise UserError(
            f"a chain of {stages} stages was asked for, of {len(given)} peers and {layers} layers",
            remedy=f"ask for 1 to {min(len(given), layers)}, or for none to have the best number",
        )
    looked_at = _looked_at(reached)
    hops = _Hops(wanted, given)
    board, cuts = _board(wanted, looked_at, hops)
    found = search(board, _counts(looked_at, stages))
    if found is None:
        raise _refusal(wanted, given, reached, stages)
    chain = [(looked_at[peer], cuts[start], cuts[stop]) for peer, start, stop in found.chain]
    everything = len(looked_at) == len(reached) and len(cuts) == layers + 1
    return _placement(wanted, hops, chain, exact=found.exact and everything)


def priced(wanted: Wanted, peers: Iterable[Peer], chain: Sequence[tuple[Peer, int, int]]) -> Placement | None:
    """What a given chain of (peer, start, stop) would do; None where memory or connections do not allow it.

    Args:
        peers: all that there are: links between them that were not measured are as the median of those that were.

    Raises:
        ValueError: its parts do not make the model, or a peer is in it twice.
    """
    _checked(wanted, [peer for peer, _, _ in chain])
    ends = [0, *(stop for _, _, stop in chain)]
    if [start for _, start, _ in chain] != ends[:-1] or ends[-1] != wanted.sizes.layers:
        raise ValueError("the parts of a chain make the model, in their order")
    hops = _Hops(wanted, _checked(wanted, peers))
    if any(_why_not(wanted, hops, chain, index, ()) for index in range(len(chain))):
        return None
    return _placement(wanted, hops, chain, exact=False)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Who takes the places of the dead. ``placement`` is None where nobody can; ``reason`` says why it is so."""

    placement: Placement | None
    reason: str


def replacement(wanted: Wanted, plan: Placement, dead: Collection[str], spares: Iterable[Peer]) -> Replacement:
    """``plan`` with the layers of the ``dead`` (peer ids) at others; cuts and the living stay as they are.

    A spare takes them, or a living stage's peer that has the memory left takes them as well: whatever makes the chain
    that is best by the objective above, a spare where both are alike. That is exact for one lost stage; several are
    given away one after the other, in the order of the chain. A peer with two stages takes the time of both, and needs
    no link to itself.
    """
    alive = {stage.peer.id: stage.peer for stage in plan.stages if stage.peer.id not in dead}
    spare = {peer.id: peer for peer in spares if peer.id not in dead and peer.id not in alive}
    held = [stage.peer for stage in plan.stages]
    peers = _checked(wanted, {peer.id: peer for peer in (*held, *spare.values())}.values())
    lost = [index for index, stage in enumerate(plan.stages) if stage.peer.id in dead]
    if not lost:
        return Replacement(plan, "no stage of the chain is lost")
    hops, chain = _Hops(wanted, peers), [(stage.peer, stage.start, stage.stop) for stage in plan.stages]
    taken = []
    for index in lost:
        _, start, stop = chain[index]
        tries: list[tuple[float, float, int, Placement, Peer]] = []
        refusals = []
        # An id that is not yet in the chain first, then by id: the order decides between what is equally good.
        for peer in (*(spare[id] for id in sorted(spare)), *(alive[id] for id in sorted(alive))):
            trial = [*chain[:index], (peer, start, stop), *chain[index + 1 :]]
            if why := _why_not(wanted, hops, trial, index, dead):
                refusals.append(f"{peer.name} {why}")
            else:
                made = _placement(wanted, hops, trial, exact=False)
                tries.append((made.bottleneck_s, made.token_s, len(tries), made, peer))
        if not tries:
            told = "; ".join([*refusals[:_NAMED], *_more(refusals)]) or "there is no other peer"
            return Replacement(None, f"nobody can take layers {start} to {stop - 1}: {told}")
        *_, plan, peer = min(tries, key=lambda made: made[:3])
        chain[index] = (peer, start, stop)
        taken.append(f"{peer.name} takes layers {start} to {stop - 1}")
    return Replacement(plan, "; ".join(taken))


def _why_not(
    wanted: Wanted, hops: _Hops, chain: Sequence[tuple[Peer, int, int]], index: int, dead: Collection[str]
) -> str:
    """What keeps ``chain[index]`` from being so; empty where nothing does."""
    peer, start, stop = chain[index]
    need_bytes = sum(_need_bytes(wanted, *part) for holder, *part in chain if holder.id == peer.id)
    if need_bytes > peer.memory_bytes:
        mine_bytes = _need_bytes(wanted, start, stop)
        left_bytes = max(0, peer.memory_bytes - need_bytes + mine_bytes)
        return f"has {human_bytes(left_bytes)} left of the {human_bytes(mine_bytes)} they need"
    if (wanted.client, peer.id) in wanted.apart:
        return "cannot be reached by the client"
    if index and chain[index - 1][0].id not in dead and hops.apart(before := chain[index - 1][0], peer):
        return f"cannot be reached by {before.name}"
    if index + 1 < len(chain) and chain[index + 1][0].id not in dead and hops.apart(peer, after := chain[index + 1][0]):
        return f"cannot reach {after.name}"
    return ""


# --------------------------------------------------------------------------------------------------------------- costs


class _Hops:
    """What hops cost between ``peers`` and the client."""

    def __init__(self, wanted: Wanted, peers: Sequence[Peer]) -> None:
        ids = sorted({*(peer.id for peer in peers), wanted.client})
        pairs = [(one, other) for one in ids for other in ids if one != other]
        known = {pair: link for pair in pairs if (link := known_link(wanted.links, *pair)) is not None}
        rates = [link.bandwidth_bps for link in known.values() if link.bandwidth_bps]
        self._known, self._wanted = known, wanted
        self._latency_s = statistics.median(link.latency_s for link in known.values()) if known else 0.0
        self._rate_bps = statistics.median(rates) if rates else None

    def apart(self, one: Peer, other: Peer) -> bool:
        return one.id != other.id and (one.id, other.id) in self._wanted.apart

    def between(self, one: Peer, other: Peer) -> tuple[float, float]:
        """Seconds until one position's activations are there, and for how long they occupy the link."""
        return (0.0, 0.0) if one.id == other.id else self._hop(one.id, other.id, self._wanted.activation_bytes)

    def from_client(self, peer: Peer) -> tuple[float, float]:
        return self._hop(self._wanted.client, peer.id, TOKEN_BYTES)

    def to_client(self, peer: Peer) -> tuple[float, float]:
        return self._hop(peer.id, self._wanted.client, TOKEN_BYTES)

    def _hop(self, one: str, other: str, size_bytes: int) -> tuple[float, float]:
        link = self._known.get((one, other))
        rate_bps = (link.bandwidth_bps if link else None) or self._rate_bps
        occupied_s = size_bytes * 8 / rate_bps if rate_bps else 0.0
        return (link.latency_s if link else self._latency_s) + occupied_s, occupied_s


def _need_bytes(wanted: Wanted, start: int, stop: int) -> int:
    return wanted.sizes.weights_bytes(start, stop) + _cache_bytes(wanted, start, stop) + _kept_bytes(wanted, stop)


def _cache_bytes(wanted: Wanted, start: int, stop: int) -> int:
    return wanted.positions * sum(wanted.sizes.cache_bytes[start:stop])


def _kept_bytes(wanted: Wanted, stop: int) -> int:
    return wanted.positions * wanted.activation_bytes if stop < wanted.sizes.layers else 0


def _compute_s(wanted: Wanted, peer: Peer, start: int, stop: int) -> float:
    return peer.byte_s * wanted.sizes.streamed_bytes(start, stop)


def _placement(wanted: Wanted, hops: _Hops, chain: Sequence[tuple[Peer, int, int]], *, exact: bool) -> Placement:
    stages = []
    for index, (peer, start, stop) in enumerate(chain):
        hop = hops.between(peer, chain[index + 1][0]) if index + 1 < len(chain) else hops.to_client(peer)
        weights_bytes = wanted.sizes.weights_bytes(start, stop)
        cache_bytes, kept_bytes = _cache_bytes(wanted, start, stop), _kept_bytes(wanted, stop)
        compute_s = _compute_s(wanted, peer, start, stop)
        stages.append(Stage(peer, start, stop, weights_bytes, cache_bytes, kept_bytes, compute_s, *hop))
    return Placement(tuple(stages), *hops.from_client(chain[0][0]), exact)


def _board(wanted: Wanted, peers: Sequence[Peer], hops: _Hops) -> tuple[Board, list[int]]:
    """The costs as arrays, by index of peer and of cut; and at which layer each cut is."""
    sizes, layers = wanted.sizes, wanted.sizes.layers
    cuts = [*range(0, layers, -(-layers // MOST_CUTS)), layers]
    streamed_bytes = np.zeros((len(cuts), len(cuts)))
    need_bytes = np.full_like(streamed_bytes, np.inf)
    held, cached = (
        np.cumsum([0, *each_bytes], dtype=np.float64)[cuts] for each_bytes in (sizes.layers_bytes, sizes.cache_bytes)
    )
    upper = np.triu_indices(len(cuts), 1)
    streamed_bytes[upper] = (held[None, :] - held[:, None])[upper]
    need_bytes[upper] = streamed_bytes[upper] + wanted.positions * (cached[None, :] - cached[:, None])[upper]
    need_bytes[:, :-1] += wanted.positions * wanted.activation_bytes  # kept where another stage follows
    streamed_bytes[:-1, -1] += sizes.last_bytes
    need_bytes[:-1, -1] += sizes.last_bytes
    need_bytes[0, 1:] += sizes.first_bytes
    need_bytes[0, -1] -= sizes.tied_bytes
    compute_s = [np.where(need_bytes <= peer.memory_bytes, peer.byte_s * streamed_bytes, np.inf) for peer in peers]
    hop_s, occupied_s = np.full((2, len(peers) + 1, len(peers) + 1), np.inf)
    for here, one in enumerate(peers):
        hop_s[-1, here], occupied_s[-1, here] = hops.from_client(one)
        hop_s[here, -1], occupied_s[here, -1] = hops.to_client(one)
        for there, other in enumerate(peers):
            if here != there and not hops.apart(one, other):
                hop_s[here, there], occupied_s[here, there] = hops.between(one, other)
    return Board(compute_s, hop_s, occupied_s), cuts


def _checked(wanted: Wanted, peers: Iterable[Peer]) -> list[Peer]:
    """The peers by id. Raises ``ValueError`` for what no caller may give."""
    ordered = sorted(peers, key=lambda peer: peer.id)
    ids = {peer.id for peer in ordered}
    if len(ids) != len(ordered) or wanted.client in ids:
        raise ValueError("peer ids are unique, and the client is none of them")
    if wanted.positions < 0 or wanted.activation_bytes < 0:
        raise ValueError("numbers of positions and bytes are not negative")
    return ordered


def _looked_at(peers: Sequence[Peer]) -> list[Peer]:
    """Those among whom a chain is looked for, by id: all, or half by speed and half by memory."""
    if len(peers) <= MOST_PEERS:
        return list(peers)
    fastest = sorted(peers, key=lambda peer: (peer.byte_s, -peer.memory_bytes, peer.id))[: MOST_PEERS // 2]
    rest = sorted(set(peers) - set(fastest), key=lambda peer: (-peer.memory_bytes, peer.byte_s, peer.id))
    return sorted([*fastest, *rest[: MOST_PEERS - len(fastest)]], key=lambda peer: peer.id)


def _counts(peers: Sequence[Peer], stages: int | None) -> Sequence[int]:
    return range(1, len(peers) + 1) if stages is None else [stages]


# ------------------------------------------------------------------------------------------------------------- refusal


def _refusal(wanted: Wanted, given: Sequence[Peer], reached: Sequence[Peer], stages: int | None) -> ResourceError:
    """Why no chain was found, in numbers, and what would do."""
    sizes = wanted.sizes
    weights_bytes, need_bytes = sizes.weights_bytes(0, sizes.layers), _need_bytes(wanted, 0, sizes.layers)
    offered_bytes = sum(peer.memory_bytes for peer in reached)
    kept_bytes = _kept_bytes(wanted, 0)  # of each stage but the last
    largest_bytes, largest = max((_need_bytes(wanted, index, index + 1), index) for index in range(sizes.layers))
    ends = [" with the embedding"] * (largest == 0 and sizes.first_bytes > 0)
    ends += [" with norm and head"] * (largest == sizes.layers - 1 and sizes.last_bytes > 0)
    offers = [f"{peer.name} {human_bytes(peer.memory_bytes)}" for peer in reached]
    away = [peer.name for peer in given if peer not in reached]
    told = [
        f"the model needs {human_bytes(need_bytes)} ({human_bytes(weights_bytes)} of weights, "
        f"{human_bytes(need_bytes - weights_bytes)} of cache for {wanted.positions} positions; "
        f"layer {largest}{''.join(ends)} alone {human_bytes(largest_bytes)}"
        + (f"; {human_bytes(sizes.tied_bytes)} more where it is split" if sizes.tied_bytes else "")
        + (f"; {human_bytes(kept_bytes)} more on each stage but the last, to replay from" if kept_bytes else "")
        + f"), and {len(reached)} peer{'s offer' if len(reached) != 1 else ' offers'} {human_bytes(offered_bytes)}"
        + (f": {', '.join([*offers[:_NAMED], *_more(offers)])}" if offers else "")
    ]
    if away:
        told.append(f"the client cannot reach {', '.join([*away[:_NAMED], *_more(away)])}")
    do = []
    if away and _fits(
        replace(wanted, apart=wanted.apart - {(wanted.client, peer.id) for peer in given}), given, stages
    ):
        do.append(f"let {' and '.join(away[:_NAMED])} be reached (p2ptrain check tells why not)")
    if reached and _fits(replace(wanted, apart=frozenset()), reached, stages):
        told.append("the memory would do, but of the peers that fit too few can reach each other")
        do.append("let the peers reach each other (p2ptrain check tells why not)")
    if reached and stages is not None and _fits(wanted, reached, None):
        told.append(f"it does not fit as {stages} stage{'s' if stages != 1 else ''}")
        do.append("ask for another number of stages, or for none")
    if positions := _positions_that_fit(wanted, reached, stages):
        do.append(f"take {positions} positions at most")
    if _fits(replace(wanted, sizes=_halved(sizes)), reached, stages):
        do.append("take a dtype of half the size")
    most_bytes = max((peer.memory_bytes for peer in reached), default=0)
    if largest_bytes > most_bytes:
        do.append(f"start a peer with {human_bytes(largest_bytes)} at least")
    elif (
        short_bytes := need_bytes + (sizes.tied_bytes + kept_bytes if need_bytes > most_bytes else 0) - offered_bytes
    ) > 0:
        do.append(f"start more peers, with {human_bytes(short_bytes)} at least")
    else:
        do.append("start another peer, or one with more memory")
    return ResourceError("; ".join(told), remedy=", or ".join(do))


def _fits(wanted: Wanted, peers: Sequence[Peer], stages: int | None) -> bool:
    """Whether a chain is found, however slow. What is found by chance only is not looked for: it would take long."""
    free = [replace(peer, byte_s=0.0) for peer in peers if (wanted.client, peer.id) not in wanted.apart]
    board, _ = _board(wanted, free := _looked_at(free), _Hops(wanted, peers))
    counts = _counts(free, stages)
    return is_exact(board, counts) and search(board, counts) is not None


def _positions_that_fit(wanted: Wanted, peers: Sequence[Peer], stages: int | None) -> int:
    """The most positions that do not ask for too much, to three digits; 0 where not even one would do."""
    low, high = 0, wanted.positions
    while high - low > max(1, high // 1000):
        half = (low + high) // 2
        low, high = (half, high) if _fits(replace(wanted, positions=half), peers, stages) else (low, half)
    return low


def _halved(sizes: ModelSizes) -> ModelSizes:
    return ModelSizes(
        tuple(size // 2 for size in sizes.layers_bytes),
        tuple(size // 2 for size in sizes.cache_bytes),
        sizes.first_bytes // 2,
        sizes.last_bytes // 2,
        sizes.tied_bytes // 2,
    )


def _more(names: Sequence[str]) -> list[str]:
    return [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
