"""The plan of a view's ring: its order against brute force, what follows from the slowest edge, and the reasons."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.planning.measurements import LinkQuality, LinkTimes, known_link
from ring.planning.ring_plan import RingCosts, RingOptions, best_order, plan_ring, slowest_edge


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
def test_an_order_is_of_all_members_costs_what_it_says_and_is_no_worse_than_the_given_one(ring, total_bytes):
    members, links = ring
    found = best_order(members, links, total_bytes=total_bytes)
    assert found is not None
    assert sorted(found[0]) == members
    assert found[0][0] == members[0]
    assert best_order(members, links, total_bytes=total_bytes) == found
    costs = costs_of(members, links, total_bytes)
    assert found[1] == costs.seconds([members.index(member) for member in found[0]])
    assert found[1] <= found[2] == costs.seconds(range(len(members)))


@pytest.mark.parametrize("size", [4, 6, 7])
@pytest.mark.parametrize("total_bytes", [1 << 16, 1 << 26])
def test_where_links_follow_from_places_the_order_is_nearly_the_best(size, total_bytes):
    for seed in range(10):
        members, links = names(size), sites(size, seed)
        found = best_order(members, links, total_bytes=total_bytes)
        assert found is not None
        costs = costs_of(members, links, total_bytes)
        least_s = min(costs.seconds((0, *rest)) for rest in itertools.permutations(range(1, size)))
        assert found[1] <= 1.1 * least_s


@pytest.mark.parametrize("size", [20, 64])
def test_large_rings_cross_between_sites_no_more_than_needed(size):
    links = sites(size, seed=size)
    found = best_order(names(size), links, total_bytes=1 << 26)
    assert found is not None
    assert best_order(names(size), links, total_bytes=1 << 26) == found
    between = [pair for pair in edges(found[0]) if (known_link(links, *pair) or LinkQuality(0)).latency_s > 0.001]
    assert len(between) <= 4  # three sites can be visited over three links
    assert found[1] < 0.8 * found[2]


def edges(circle: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(circle, circle[1:] + circle[:1], strict=True))


def test_a_slow_edge_is_left_out_whichever_way_it_was_measured():
    members = names(4)
    links = {pair: LinkQuality(1e-3, 1e9) for pair in itertools.permutations(members, 2)}
    links["p0", "p1"] = links["p1", "p0"] = LinkQuality(1e-3, 1e7)
    found = best_order(members, links, total_bytes=1 << 24)
    assert found is not None
    assert found[0] == ("p0", "p2", "p1", "p3")
    del links["p0", "p1"]  # it is still known the other way round
    assert best_order(members, links, total_bytes=1 << 24) == found


def test_where_one_direction_is_slow_the_ring_goes_the_other_way():
    members = names(3)
    links = {pair: LinkQuality(1e-3, 1e9) for pair in itertools.permutations(members, 2)}
    links["p0", "p1"] = LinkQuality(1e-3, 1e7)
    found = best_order(members, links, total_bytes=1 << 24)
    assert found is not None
    assert found[0] == ("p0", "p2", "p1")


def test_an_order_that_is_hardly_better_is_not_taken():
    members = names(4)
    for gain, taken in ((0.03, False), (0.3, True)):
        links = {pair: LinkQuality(0.0, 1e9) for pair in itertools.permutations(members, 2)}
        links["p0", "p1"] = links["p1", "p0"] = LinkQuality(0.0, 1e9 / (1 + gain))
        found = best_order(members, links, total_bytes=1 << 26)
        assert found is not None
        assert (found[0] != tuple(members)) == taken


@pytest.mark.parametrize("size", [3, 4, 5, 6])
@pytest.mark.parametrize("measured", [True, False])
def test_members_that_cannot_reach_each_other_are_not_beside_each_other_if_another_order_exists(size, measured):
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


def test_without_measurements_all_is_as_it_was():
    plan = plan_ring("abc", {}, RingOptions())
    assert (plan.order, plan.streams, plan.sub_chunk_bytes, plan.codec) == (("a", "b", "c"), 1, 0, "fp32")
    assert not plan.measured
    assert plan.reason == "order as they joined: no link between them is measured"
    assert plan.transport_reason == "1 connection per link (none is measured); codec fp32, as the profile says"
    assert plan_ring("a", {}, AUTO, 1 << 20).codec == "fp32"


def test_what_the_profile_says_is_taken():
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
def test_streams_are_as_many_as_the_slowest_edge_has_use_for(link, streams, why):
    plan = plan_ring("ab", {("a", "b"): link}, RingOptions())
    assert plan.streams == streams
    assert plan.transport_reason.startswith(why)


def test_the_codec_follows_from_the_edge_the_load_and_the_budget():
    load = (100 << 20, 0.5)
    assert plan_ring("ab", mesh("ab", NEAR), AUTO, 1 << 20, 0.5).codec == "fp32"
    plan = plan_ring("ab", mesh("ab", FAR), AUTO, *load)
    assert plan.codec == "int8"
    assert plan.transport_reason.startswith("4 connections per link (round trip 100 ms); codec int8: int8 takes ")
    assert plan_ring("ab", mesh("ab", FAR), RingOptions(codec="auto", error_budget=0.0), *load).codec == "fp32"
    unknown = plan_ring("ab", mesh("ab", FAR), AUTO)
    assert unknown.codec == "fp32"
    assert unknown.transport_reason.endswith("codec fp32: the links' bandwidth or the bytes of a step are not known")


def test_the_slowest_edge_is_one_of_the_circle():
    links = {("a", "b"): NEAR, ("c", "a"): FAR, ("b", "d"): LinkQuality(1.0, 1.0)}
    assert slowest_edge("abc", links) == ("c", "a", FAR)
    assert slowest_edge("abc", {}) == slowest_edge("a", links) == ("", "", None)
