"""The plan of a view's ring: what follows from the slowest edge, what the profile says, and the reasons."""

from __future__ import annotations

import itertools

import pytest

from ring import codecs
from ring.order import LinkQuality, Load, Wishes, described, plan_ring, slowest_edge
from ring.view import CODEC_NAMES

NEAR = LinkQuality(1e-4, 1e9, 1e9)
FAR = LinkQuality(0.05, 50e6, 52e6)
HELD_BACK = LinkQuality(0.05, 50e6, 195e6)
AUTO = Wishes(codec="auto")


def mesh(members: str, link: LinkQuality) -> dict[tuple[str, str], LinkQuality]:
    return dict.fromkeys(itertools.permutations(members, 2), link)


def test_views_know_the_codecs_that_there_are():
    assert set(codecs.CODECS) == CODEC_NAMES


def test_without_measurements_all_is_as_it_was():
    plan = plan_ring("abc", {}, Wishes(), Load())
    assert (plan.order, plan.streams, plan.sub_chunk_bytes, plan.codec) == (("a", "b", "c"), 1, 0, "fp32")
    assert plan.slowest is None
    assert plan.reason == "order as they joined: no link between them is measured"
    assert plan.carriage_reason == "1 stream: nothing is known of the links; codec fp32, as the profile says"
    assert plan_ring("a", {}, AUTO, Load(1 << 20)).codec == "fp32"


def test_what_the_profile_says_is_taken():
    links = mesh("abcd", NEAR) | {("a", "b"): FAR, ("b", "a"): FAR}
    wishes = Wishes("joined", 3, 8192, "int8")
    plan = plan_ring("abcd", links, wishes, Load(1 << 22))
    assert (plan.order, plan.streams, plan.sub_chunk_bytes, plan.codec) == (tuple("abcd"), 3, 8192, "int8")
    assert plan.reason == "order as they joined, as the profile says; slowest edge a → b: 50 Mbit/s, 50 ms"
    assert plan.carriage_reason == "3 streams, as the profile says; codec int8, as the profile says"


def test_the_order_says_what_it_gains_and_where_it_is_slowest():
    links = mesh("abcd", NEAR) | {("a", "b"): FAR, ("b", "a"): FAR, ("b", "c"): LinkQuality(1e-3, 5e8)}
    plan = plan_ring("abcd", links, Wishes(), Load(1 << 22), name=str.upper)
    assert plan.order == ("a", "d", "b", "c") or plan.order == ("a", "c", "b", "d")
    assert plan.reason.startswith("order from measured links, ")
    assert "times as fast as the order of joining; slowest edge " in plan.reason
    assert plan.reason.count("A") + plan.reason.count("B") + plan.reason.count("C") + plan.reason.count("D") == 2


def test_those_that_cannot_be_neighbours_are_not():
    plan = plan_ring("abcd", mesh("abcd", NEAR), Wishes(), Load(), apart=[frozenset("ab")])
    assert frozenset("ab") not in {frozenset(pair) for pair in itertools.pairwise(plan.order + plan.order[:1])}
    everybody = [frozenset(pair) for pair in itertools.combinations("abc", 2)]
    plan = plan_ring("abc", mesh("abc", NEAR), Wishes(), Load(), apart=everybody)
    assert plan.order == ("a", "b", "c")
    assert "no other was found that keeps apart" in plan.reason


@pytest.mark.parametrize(
    ("link", "streams", "why"),
    [
        (NEAR, 1, "1 stream: the members are near each other"),
        (LinkQuality(1e-4, 1e9, 4e9), 1, "1 stream: the members are near each other"),
        (LinkQuality(0.05), 1, "1 stream: what several carry was not measured"),
        (FAR, 1, "1 stream: it fills the link"),
        (LinkQuality(0.05, 50e6, 90e6), 2, "2 streams: 4 carried 1.8 times what one does"),
        (LinkQuality(0.05, 50e6, 150e6), 3, "3 streams: 4 carried 3 times what one does"),
        (HELD_BACK, 8, "8 streams: 4 carried 3.9 times what one does"),
        (LinkQuality(0.05, 50e6, 1e12), 8, "8 streams: 4 carried 2e+04 times what one does"),
    ],
)
def test_streams_are_as_many_as_the_slowest_edge_has_use_for(link, streams, why):
    plan = plan_ring("ab", {("a", "b"): link}, Wishes(), Load())
    assert plan.streams == streams
    assert plan.carriage_reason.startswith(why)


def test_the_codec_follows_from_the_edge_the_load_and_the_budget():
    load = Load(100 << 20, compute_s=0.5)
    assert plan_ring("ab", mesh("ab", NEAR), AUTO, Load(1 << 20, compute_s=0.5)).codec == "fp32"
    plan = plan_ring("ab", mesh("ab", FAR), AUTO, load)
    assert plan.codec == "int8"
    assert plan.carriage_reason.startswith("1 stream: it fills the link; codec int8: int8 takes ")
    assert plan_ring("ab", mesh("ab", FAR), Wishes(codec="auto", error_budget=0.0), load).codec == "fp32"
    unknown = plan_ring("ab", mesh("ab", FAR), AUTO, Load())
    assert unknown.codec == "fp32"
    assert unknown.carriage_reason.endswith("codec fp32: nothing is known of the links, or of what a step sends")


def test_with_several_streams_the_codec_is_chosen_for_what_they_carry_together():
    load = Load(10 << 20, compute_s=0.6)
    assert plan_ring("ab", mesh("ab", HELD_BACK), AUTO, load).codec == "fp32"
    assert plan_ring("ab", mesh("ab", HELD_BACK), Wishes(codec="auto", streams=1), load).codec != "fp32"


def test_the_slowest_edge_is_one_of_the_circle():
    links = {("a", "b"): NEAR, ("c", "a"): FAR, ("b", "d"): LinkQuality(1.0, 1.0)}
    edge = slowest_edge("abc", links)
    assert edge is not None
    assert (edge.left, edge.right, edge.link) == ("c", "a", FAR)
    assert slowest_edge("abc", {}) is None
    assert slowest_edge("a", links) is None


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (LinkQuality(0.0201, 98.3e6), "98.3 Mbit/s, 20.1 ms"),
        (LinkQuality(3e-5, 6.04e9), "6.04 Gbit/s, 0.03 ms"),
        (LinkQuality(0.3, 64e3), "64 kbit/s, 300 ms"),
        (LinkQuality(0.3), "300 ms"),
    ],
)
def test_links_in_words(link, words):
    assert described(link) == words
