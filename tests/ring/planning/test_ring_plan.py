"""The plan of a view's ring: its order against brute force, what follows from the slowest edge, and the reasons."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.planning.measurements import LinkQuality, LinkTimes, known_link
from ring.planning.ring_plan import (
    CANDIDATES,
    STATED_ERROR,
    RingCosts,
    RingOptions,
    choose_codec,
    find_best_order,
    plan_ring,
)


def names(size: int) -> list[str]:
    return [f"p{index}" for index in range(size)]


def sites(size: int, seed: int) -> dict[tuple[str, str], LinkQuality]:
    """Members at three sites: near and fast within one, far and slower between them; measured in one direction."""
    rng = random.Random(seed)
    members, site = names(size), [rng.randrange(3) for _ in range(size)]
    far = {pair: rng.uniform(1, 2) for pair in itertools.combinations(range(3), 2)}
    links = {}
    for one, other in itertools.combinations(range(size), 2):
        here, there = sorted((site[one], site[other]))
        distance = far[here, there] * rng.uniform(0.95, 1.05) if here != there else 0
        link = LinkQuality(0.02 * distance, 100e6 / distance) if distance else LinkQuality(1e-4, 1e9)
        links[members[one], members[other]] = link
    return links


qualities = st.builds(LinkQuality, st.floats(1e-5, 0.3), st.none() | st.floats(1e6, 1e10))


@st.composite
def rings(draw: st.DrawFn, least: int = 2, most: int = 7) -> tuple[list[str], dict[tuple[str, str], LinkQuality]]:
    """Members and directed links, some unknown, one known at least."""
    members = names(draw(st.integers(least, most)))
    pairs = list(itertools.permutations(members, 2))
    known = draw(st.sets(st.sampled_from(pairs), min_size=1))
    return members, {pair: draw(qualities) for pair in sorted(known)}


def costs_of(members: list[str], links: dict[tuple[str, str], LinkQuality], total_bytes: int) -> RingCosts:
    return RingCosts(members, LinkTimes(links, members), total_bytes=total_bytes)


@given(rings(), st.sampled_from([1, 1 << 16, 1 << 22, 1 << 28]))
def test_order_has_all_members_and_costs_no_more_than_that_of_joining(ring, total_bytes):
    members, links = ring
    found = find_best_order(members, links, total_bytes=total_bytes)
    assert found is not None
    assert sorted(found[0]) == members
    assert found[0][0] == members[0]
    assert find_best_order(members, links, total_bytes=total_bytes) == found
    costs = costs_of(members, links, total_bytes)
    assert found[1] == costs.seconds([members.index(member) for member in found[0]])
    assert found[1] <= found[2] == costs.seconds(range(len(members)))


@pytest.mark.parametrize("size", [4, 6, 7])
@pytest.mark.parametrize("total_bytes", [1 << 16, 1 << 26])
def test_order_is_nearly_the_best_where_links_follow_from_places(size, total_bytes):
    for seed in range(10):
        members, links = names(size), sites(size, seed)
        found = find_best_order(members, links, total_bytes=total_bytes)
        assert found is not None
        costs = costs_of(members, links, total_bytes)
        least_s = min(costs.seconds((0, *rest)) for rest in itertools.permutations(range(1, size)))
        assert found[1] <= 1.1 * least_s


@pytest.mark.parametrize("size", [20, 64])
def test_large_rings_cross_between_sites_no_more_than_needed(size):
    links = sites(size, seed=size)
    found = find_best_order(names(size), links, total_bytes=1 << 26)
    assert found is not None
    assert find_best_order(names(size), links, total_bytes=1 << 26) == found
    between = [pair for pair in edges(found[0]) if (known_link(links, *pair) or LinkQuality(0)).latency_s > 0.001]
    assert len(between) <= 4  # three sites can be visited over three links
    assert found[1] < 0.8 * found[2]


def edges(circle: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(circle, circle[1:] + circle[:1], strict=True))


def test_ring_avoids_a_slow_edge_measured_in_either_direction():
    members = names(4)
    links = {pair: LinkQuality(1e-3, 1e9) for pair in itertools.permutations(members, 2)}
    links["p0", "p1"] = links["p1", "p0"] = LinkQuality(1e-3, 1e7)
    found = find_best_order(members, links, total_bytes=1 << 24)
    assert found is not None
    assert found[0] == ("p0", "p2", "p1", "p3")
    del links["p0", "p1"]  # it is still known the other way round
    assert find_best_order(members, links, total_bytes=1 << 24) == found


def test_order_of_joining_remains_unless_the_gain_is_large():
    members = names(4)
    for gain, taken in ((0.03, False), (0.3, True)):
        links = {pair: LinkQuality(0.0, 1e9) for pair in itertools.permutations(members, 2)}
        links["p0", "p1"] = links["p1", "p0"] = LinkQuality(0.0, 1e9 / (1 + gain))
        found = find_best_order(members, links, total_bytes=1 << 26)
        assert found is not None
        assert (found[0] != tuple(members)) == taken


@pytest.mark.parametrize("size", [3, 4, 5, 6])
@pytest.mark.parametrize("measured", [True, False])
def test_members_that_cannot_reach_each_other_are_no_neighbours_if_an_order_allows_it(size, measured):
    members = names(size)
    pairs = list(itertools.permutations(members, 2))
    links = sites(size, size) if measured else {}
    for apart in map(frozenset, [*itertools.combinations(pairs, 1), *itertools.combinations(pairs, 2)]):
        orders = [(members[0], *rest) for rest in itertools.permutations(members[1:])]
        possible = any(apart.isdisjoint(edges(order)) for order in orders)
        for how in ("auto", "joined"):
            plan = plan_ring(members, links, RingOptions(order=how), apart=apart)
            assert apart.isdisjoint(edges(plan.order)) == possible, (apart, plan)
        if size > 3 and len(apart) == 1:
            assert apart.isdisjoint(pair[::-1] for pair in edges(plan.order)), "the other direction is likely to fail"
        if not possible:
            assert plan.order == tuple(members)
            assert "each order tried has a member that could not reach the next one" in plan.reason


# -------------------------------------------------------------------------------------------- the rest of the plan

NEAR = LinkQuality(1e-4, 1e9)
FAR = LinkQuality(0.05, 50e6)
AUTO = RingOptions(codec="auto")


def mesh(members: str, link: LinkQuality) -> dict[tuple[str, str], LinkQuality]:
    return dict.fromkeys(itertools.permutations(members, 2), link)


def test_ring_without_measurements_keeps_the_order_of_joining():
    plan = plan_ring("abc", {}, RingOptions())
    assert (plan.order, plan.streams, plan.sub_chunk_bytes, plan.codec) == (("a", "b", "c"), 1, 0, "fp32")
    assert not plan.measured
    assert plan.reason == "order as they joined: no link between them is measured"
    assert plan.transport_reason == "1 connection per link (none is measured); codec fp32, as the profile says"
    assert plan_ring("a", {}, AUTO, 1 << 20).codec == "fp32"


def test_settings_of_the_profile_override_the_measurements():
    links = mesh("abcd", NEAR) | {("a", "b"): FAR, ("b", "a"): FAR}
    ring_options = RingOptions("joined", 3, 8192, "int8")
    plan = plan_ring("abcd", links, ring_options, 1 << 22)
    assert (plan.order, plan.streams, plan.sub_chunk_bytes, plan.codec) == (tuple("abcd"), 3, 8192, "int8")
    assert plan.reason == "order as they joined, as the profile says; slowest edge a → b: 50 Mbit/s, 50 ms"
    assert plan.transport_reason == "3 connections per link, as ring.streams says; codec int8, as the profile says"


@pytest.mark.parametrize(
    ("link", "streams", "why"),
    [
        (NEAR, 1, "1 connection per link (round trip 0.2 ms)"),
        (FAR, 4, "4 connections per link (round trip 100 ms)"),
    ],
)
def test_streams_follow_from_the_slowest_edge(link, streams, why):
    plan = plan_ring("ab", {("a", "b"): link}, RingOptions())
    assert plan.streams == streams
    assert plan.transport_reason.startswith(why)


def test_codec_follows_from_the_edge_the_load_and_the_budget():
    load = (100 << 20, 0.5)
    assert plan_ring("ab", mesh("ab", NEAR), AUTO, 1 << 20, 0.5).codec == "fp32"
    plan = plan_ring("ab", mesh("ab", FAR), AUTO, *load)
    assert plan.codec == "int8"
    assert plan.transport_reason.startswith("4 connections per link (round trip 100 ms); codec int8: int8 takes ")
    assert plan_ring("ab", mesh("ab", FAR), RingOptions(codec="auto", error_budget=0.0), *load).codec == "fp32"
    unknown = plan_ring("ab", mesh("ab", FAR), AUTO)
    assert unknown.codec == "fp32"
    assert unknown.transport_reason.endswith("codec fp32: the links' bandwidth or the bytes of a step are not known")


MIB = 1 << 20


def chosen_codec(
    edge_bps: float, latency_s: float = 0.01, compute_s: float = 1.0, budget: float = 1.0, total_bytes: int = 40 * MIB
) -> tuple[str, str]:
    return choose_codec(
        LinkQuality(latency_s, edge_bps), RingOptions(codec="auto", error_budget=budget), total_bytes, compute_s, 2
    )


@pytest.mark.parametrize(
    ("edge_bps", "budget", "chosen"),
    [
        (1e9, 1.0, "fp32"),
        (3e8, 1.0, "bf16"),
        (1e8, 1.0, "int8"),
        (5e7, 1.0, "int4"),
        (1e7, 1.0, "topk"),
        (1e7, 0.3, "int4"),
        (1e7, 0.03, "int8"),
        (1e7, 0.005, "bf16"),
        (1e7, 0.0, "fp32"),
    ],
)
def test_codec_is_the_least_lossy_that_computing_hides(edge_bps, budget, chosen):
    assert chosen_codec(edge_bps, budget=budget)[0] == chosen


def test_codec_has_a_reason():
    assert chosen_codec(1e8)[1] == "codec int8: int8 takes 885 ms at 100 Mbit/s, computing takes 1.00 s"
    assert chosen_codec(5e6, budget=0.0)[1].endswith("fp32 takes 67.1 s at 5.00 Mbit/s, computing takes 1.00 s")


times = st.floats(0, 100)


@given(st.floats(1e3, 1e12), times, times, st.floats(0, 2), st.integers(1, 1 << 34), st.floats(0, 2))
def test_codec_is_within_the_budget_and_more_of_it_is_never_slower(edge_bps, latency_s, compute_s, budget, size, more):
    chosen, _ = chosen_codec(edge_bps, latency_s, compute_s, budget, size)
    assert chosen == CANDIDATES[0] or STATED_ERROR[chosen] <= budget
    freer, _ = chosen_codec(edge_bps, latency_s, compute_s, budget + more, size)
    assert CANDIDATES.index(freer) >= CANDIDATES.index(chosen)
    faster, _ = chosen_codec(2 * edge_bps, latency_s, compute_s, budget, size)
    assert CANDIDATES.index(faster) <= CANDIDATES.index(chosen)
