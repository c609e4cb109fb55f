"""The placement of a split model: against brute force over all chains, its refusals, and large clusters."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.footprint import ModelSizes
from ring.planning.cuts import find_best_cuts
from ring.planning.measurements import CandidateWorker, LinkQuality
from ring.planning.serving import ChainPricer, Placement, place_model, price_chain, replace_lost
from ring.planning.workloads import ServingWorkload

Chain = list[tuple[CandidateWorker, int, int]]
CLIENT = "client"
INSTANCES = 300


def worker(id: str, memory_bytes: int, byte_s: float) -> CandidateWorker:
    return CandidateWorker(id, id, memory_bytes, byte_s=byte_s)


def best_of_all(
    wanted: ServingWorkload, peers: list[CandidateWorker], order: list[CandidateWorker], stages: int | None
) -> tuple[float, float] | None:
    """The least (bottleneck, time of a token) of all cuts for peers in that order, of whom any may take no layer."""
    costs = []
    for count in range(1, len(order) + 1) if stages is None else [stages]:
        for inner in itertools.combinations(range(1, wanted.sizes.layers), count - 1):
            parts = list(itertools.pairwise((0, *inner, wanted.sizes.layers)))
            for chosen in itertools.combinations(order, count):
                chain = [(peer, *part) for peer, part in zip(chosen, parts, strict=True)]
                if all(wanted.need_bytes(start, stop) <= peer.memory_bytes for peer, start, stop in chain):
                    costs += [placed] if (placed := price_chain(wanted, peers, chain)) else []
    if not costs:
        return None
    least_s = min(placed.bottleneck_s for placed in costs)
    return least_s, min(placed.token_s for placed in costs if placed.bottleneck_s <= least_s * (1 + 1e-12))


def problem(rng: random.Random) -> tuple[ServingWorkload, list[CandidateWorker]]:
    """2 to 5 peers, 4 to 10 layers; equal or not, in plenty or tight, measured or not, some who cannot reach others."""
    size, layers = rng.randint(2, 5), rng.randint(4, 10)
    if size == 5:
        layers = min(layers, 8)
    equal, tied = rng.random() < 0.5, rng.random() < 0.5
    # Few values: many chains are equally good, and none is set apart by rounding.
    layer_bytes = [rng.choice([64, 128])] * layers if equal else [rng.choice([8, 64, 128, 512]) for _ in range(layers)]
    end_bytes = rng.choice([0, 64, 256])
    sizes = ModelSizes(
        tuple(layer_bytes),
        tuple([4] * layers if equal else [rng.choice([0, 4, 16]) for _ in range(layers)]),
        end_bytes,
        end_bytes + 8,
        end_bytes if tied else 0,
    )
    positions, activation_bytes = rng.choice([0, 1, 16]), rng.choice([16, 256])
    whole = sizes.weights_bytes(0, layers) + positions * sum(sizes.cache_bytes)
    plenty = rng.choice([0.5, 1.1, 1.3, 2, 4])
    peers = [
        worker(
            f"p{index}",
            int(whole * plenty / size * rng.choice([0.5, 1, 1, 2])),
            rng.choice([1, 2, 4]),
        )
        for index in range(size)
    ]
    ids = [*(peer.id for peer in peers), CLIENT]
    known, forbidden = rng.choice([0, 0.3, 1]), rng.choice([0, 0, 0.2, 0.5])
    links = {
        pair: LinkQuality(rng.choice([1, 64, 1024]), rng.choice([None, *(2.0**power for power in (1, 3, 6))]))
        for pair in itertools.permutations(ids, 2)
        if rng.random() < known
    }
    apart = frozenset(
        pair
        for pair in itertools.permutations(ids, 2)
        if rng.random() < (forbidden / 4 if CLIENT in pair else forbidden)
    )
    return ServingWorkload(sizes, positions, activation_bytes, CLIENT, links, apart), peers


def as_chain(found: Placement) -> Chain:
    return [(stage.peer, stage.start, stage.stop) for stage in found.stages]


def check_whole(wanted: ServingWorkload, found: Placement) -> None:
    """A chain of every layer once, within memory and reach."""
    chain = as_chain(found)
    assert [start for _, start, _ in chain] == [0, *(stop for _, _, stop in chain)][:-1]
    assert chain[-1][2] == wanted.sizes.layers
    assert all(start < stop for _, start, stop in chain)
    assert len({peer.id for peer, _, _ in chain}) == len(chain)
    assert not any((CLIENT, peer.id) in wanted.apart for peer, _, _ in chain)
    assert not any((sender[0].id, receiver[0].id) in wanted.apart for sender, receiver in itertools.pairwise(chain))
    for stage in found.stages:
        need_bytes = stage.weights_bytes + stage.cache_bytes
        assert need_bytes == wanted.need_bytes(stage.start, stage.stop) <= stage.peer.memory_bytes


def test_price_is_the_sum_of_computing_and_hops() -> None:
    """The measured links have 1 s and 8 bit/s, 4 s and 16 bit/s; the unknown one counts as their median."""
    links = {(CLIENT, "a"): LinkQuality(1.0, 8.0), ("b", "a"): LinkQuality(4.0, 16.0)}
    wanted = ServingWorkload(ModelSizes((10, 20, 30), (1, 2, 3), 100, 200), 2, 5, CLIENT, links)
    placed = ChainPricer(wanted, peers := [worker("a", 999, 0.5), worker("b", 999, 2.0)]).price(
        [(peers[0], 0, 2), (peers[1], 2, 3)]
    )
    assert (placed.client_hop_s, placed.client_occupied_s) == (1.0 + 4.0, 4.0), "4 bytes of a token's id"
    a, b = placed.stages
    assert (a.weights_bytes, a.cache_bytes, a.compute_s, a.hop_s, a.occupied_s) == (130, 6, 15.0, 4.0 + 2.5, 2.5)
    assert (b.weights_bytes, b.cache_bytes, b.compute_s, b.hop_s) == (230, 6, 2.0 * 230, 2.5 + 32 / 12)
    assert (placed.bottleneck_s, placed.token_s) == (460.0, 5.0 + 15.0 + 6.5 + 460.0 + 2.5 + 32 / 12)
    assert placed.tokens_per_s * placed.bottleneck_s == pytest.approx(1)


@pytest.mark.parametrize("batch", range(3))
def test_cuts_are_the_best_for_an_order(batch):
    counted: Counter[str] = Counter()
    for number in range(batch, INSTANCES, 3):
        rng = random.Random(number)
        wanted, peers = problem(rng)
        stages = rng.choice([None, *range(1, min(len(peers), wanted.sizes.layers) + 1)])
        order = [peer for peer in rng.sample(peers, len(peers)) if (CLIENT, peer.id) not in wanted.apart]
        counts = range(1, len(order) + 1) if stages is None else [stages] * (stages <= len(order))
        pricer = ChainPricer(wanted, peers)
        found = find_best_cuts(pricer.costs(order), range(len(order)), list(counts))
        best = best_of_all(wanted, peers, order, stages) if counts else None
        counted["none" if best is None else "some"] += 1
        assert (found is None) == (best is None), number
        if found is not None:
            (bottleneck_s, token_s, count), chain = found
            assert (bottleneck_s, token_s) == pytest.approx(best, rel=1e-12), number
            assert count == len(chain)
            assert stages in (None, count)
            placed = pricer.price([(order[peer], *part) for peer, *part in chain])
            check_whole(wanted, placed)
            assert (placed.bottleneck_s, placed.token_s) == pytest.approx(best, rel=1e-12), number
    assert min(counted.values()) >= 20, counted


def test_placement_is_whole_and_does_not_depend_on_the_order_of_workers():
    placed = 0
    for number in range(200):
        rng = random.Random(number)
        wanted, peers = problem(rng)
        try:
            found = place_model(wanted, peers)
        except ResourceError:
            continue
        placed += 1
        check_whole(wanted, found)
        assert place_model(wanted, rng.sample(peers, len(peers))) == found
    assert placed > 80


# ------------------------------------------------------------------------------------------------------ by example

GIB = 1 << 30
MODEL = ModelSizes((GIB // 2,) * 24, (1 << 16,) * 24, GIB, GIB + 4096, GIB)
FOUR = [
    worker("desk", 12 * GIB, 2e-11),
    worker("gamer", 6 * GIB, 2e-12),
    worker("laptop", 8 * GIB, 3e-11),
    worker("nuc", 4 * GIB, 5e-11),
]
LINKS = {
    ("client", "desk"): LinkQuality(0.0002, 1e9),
    ("client", "gamer"): LinkQuality(0.0004, 1e9),
    ("client", "laptop"): LinkQuality(0.003, 2e8),
    ("client", "nuc"): LinkQuality(0.0002, 1e9),
    ("desk", "gamer"): LinkQuality(0.0003, 1e9),
    ("desk", "laptop"): LinkQuality(0.003, 2e8),
    ("desk", "nuc"): LinkQuality(0.0003, 1e8),
    ("gamer", "laptop"): LinkQuality(0.004, 2e8),
}
WANTED = ServingWorkload(MODEL, 4096, 8192, "client", LINKS)


@pytest.mark.parametrize("stages", [None, 2, 3, 4])
def test_four_workers_hold_a_model_that_is_too_large_for_each(stages):
    peers = [replace(peer, memory_bytes=3 * peer.memory_bytes // 2) for peer in FOUR] if stages == 2 else FOUR
    found = place_model(WANTED, peers, stages=stages)
    check_whole(WANTED, found)
    with pytest.raises(ResourceError):
        place_model(WANTED, FOUR, stages=1)


def wanted_of(layers: tuple[int, ...], apart: frozenset[tuple[str, str]] = frozenset()) -> ServingWorkload:
    return ServingWorkload(ModelSizes(layers, (0,) * len(layers)), 0, 1, CLIENT, {}, apart)


def test_tied_matrix_is_held_once_by_one_worker_and_twice_by_several():
    sizes = ModelSizes((10, 10), (1, 1), 100, 105, 100)
    wanted = ServingWorkload(sizes, 2, 1, CLIENT, {})
    found = place_model(wanted, [worker("a", 129, 1.0), worker("b", 100, 1.0)])
    assert [(stage.peer.id, stage.weights_bytes, stage.cache_bytes) for stage in found.stages] == [("a", 125, 4)]
    found = place_model(wanted, [worker("a", 112, 1.0), worker("b", 117, 1.0)])
    assert [(stage.peer.id, stage.weights_bytes) for stage in found.stages] == [("a", 110), ("b", 115)]
    for short in ((111, 117), (112, 116), (128, 111)):
        with pytest.raises(ResourceError):
            place_model(wanted, [worker(name, size, 1.0) for name, size in zip("ab", short, strict=True)])
    assert [stage.compute_s for stage in found.stages] == [10, 115]  # of the embedding one row is read


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(wanted: ServingWorkload, peers: list[CandidateWorker], stages: int | None = None) -> ResourceError:
    with pytest.raises(ResourceError) as caught:
        place_model(wanted, peers, stages=stages)
    assert "\n" not in caught.value.message + caught.value.remedy
    return caught.value


def test_refusal_names_what_is_needed_what_there_is_and_a_remedy():
    error = refused(WANTED, [replace(peer, memory_bytes=peer.memory_bytes * 3 // 5) for peer in FOUR])
    assert error.message == (
        "the model needs 19.0 GiB (13.0 GiB of weights, 6.0 GiB of cache for 4096 positions; layer 23 alone 1.8 GiB), "
        "and 4 peers offer 18.0 GiB: desk 7.2 GiB, gamer 3.6 GiB, laptop 4.8 GiB, nuc 2.4 GiB"
    )
    assert error.remedy == "start more peers, or peers with more memory, or use fewer positions or a smaller dtype"
    error = refused(WANTED, FOUR, stages=1)
    assert error.message.endswith("1 stage was requested")
    assert "another number of stages" in error.remedy
    error = refused(wanted_of((5, 50, 5)), [worker("a", 49, 1.0), worker("b", 49, 1.0)])
    assert "layer 1 alone 50 B" in error.message
    assert "start a peer with 50 B at least" in error.remedy
    many = [worker(f"p{index:02}", 1, 1.0) for index in range(20)]
    assert "p07 1 B, 12 more" in refused(wanted_of((5, 5)), many).message


def test_impossible_number_of_stages_is_refused():
    for stages in (0, -1, 5, 25):
        with pytest.raises(UserError, match=f"a chain of {stages} stages"):
            place_model(WANTED, FOUR, stages=stages)
    with pytest.raises(UserError, match="there is no peer"):
        place_model(WANTED, [])


# ------------------------------------------------------------------------------------------------------ large clusters


def cluster(size: int, layers: int, seed: int, plenty: float = 1.6) -> tuple[ServingWorkload, list[CandidateWorker]]:
    """Peers at three sites, a decade apart in speed, a factor of four in memory."""
    rng = random.Random(seed)
    sizes = ModelSizes((400 << 20,) * layers, (1 << 14,) * layers, 500 << 20, 500 << 20)
    each = sizes.weights_bytes(0, layers) * plenty / size
    peers = [
        worker(f"p{index:03}", int(each * rng.uniform(0.5, 2)), 10 ** rng.uniform(-11, -10)) for index in range(size)
    ]
    site = {peer.id: rng.randrange(3) for peer in peers} | {CLIENT: 0}
    links = {}
    for one, other in itertools.permutations([*site], 2):
        near = site[one] == site[other]
        links[one, other] = LinkQuality(*((2e-4, 1e9) if near else (0.02 * rng.uniform(0.9, 1.1), 5e7)))
    return ServingWorkload(sizes, 4096, 8192, CLIENT, links), peers


@pytest.mark.parametrize(("size", "layers"), [(8, 128), (100, 200)])
def test_many_workers_and_layers_are_placed_whole(size, layers):
    wanted, peers = cluster(size, layers, 3, plenty=3)
    check_whole(wanted, place_model(wanted, peers))


# --------------------------------------------------------------------------------------------------------- replace_lost


@pytest.mark.parametrize("batch", range(3))
def test_best_possible_worker_takes_the_layers_of_a_lost_stage(batch):
    counted: Counter[str] = Counter()
    for number in range(batch, 300, 3):
        rng = random.Random(number)
        wanted, peers = problem(rng)
        spares = [peer for peer in peers if rng.random() < 0.5]
        first = [peer for peer in peers if peer not in spares]
        try:
            plan = place_model(wanted, first)
        except (UserError, ResourceError):
            continue
        dead = rng.choice(plan.stages).peer.id
        held = [stage.peer for stage in plan.stages]
        pricer = ChainPricer(wanted, [*held, *spares])
        options = []
        for peer in {peer.id: peer for peer in (*held, *spares) if peer.id != dead}.values():
            chain = [(peer, *part) if holder.id == dead else (holder, *part) for holder, *part in as_chain(plan)]
            if is_possible(wanted, chain, dead_at=[holder.id for holder in held].index(dead)):
                placed = pricer.price(chain)
                options.append((placed.bottleneck_s, placed.token_s))
        made, reason = replace_lost(wanted, plan, [[holder.id for holder in held].index(dead)], spares)
        if not options:
            counted["nobody"] += 1
            assert made is None
            assert reason.startswith("no peer can take layers")
            continue
        assert made is not None
        least_s = min(bottleneck for bottleneck, _ in options)
        best_s = min(token for bottleneck, token in options if bottleneck <= least_s * (1 + 1e-12))
        assert (made.bottleneck_s, made.token_s) == pytest.approx((least_s, best_s), rel=1e-12)
        counted["double" if len({s.peer.id for s in made.stages}) < len(held) else "spare"] += 1
        assert dead not in {stage.peer.id for stage in made.stages}
    assert min(counted[kind] for kind in ("nobody", "double", "spare")) >= 3, counted


def is_possible(wanted: ServingWorkload, chain: Chain, *, dead_at: int) -> bool:
    """Whether the peers have the memory and the links, also for two parts of one of them."""
    apart, ids = wanted.apart, [peer.id for peer, _, _ in chain]
    held: Counter[str] = Counter()
    for peer, start, stop in chain:
        held[peer.id] += wanted.need_bytes(start, stop)
    reached = not any(one != other and (one, other) in apart for one, other in itertools.pairwise(ids))
    fits = all(held[peer.id] <= peer.memory_bytes for peer, _, _ in chain)
    return reached and fits and (CLIENT, ids[dead_at]) not in apart
