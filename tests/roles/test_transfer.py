"""The core of verified transfer: whatever sources do, every piece arrives once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.worker.transfer import GiveUp, RangeQuery, Transfer, most_frequent
from tests.invariants import check_invariants


def right(key: int) -> bytes:
    return b"right%d" % key


class Play:
    """Sources that a number decides, and what they sent."""

    def __init__(self, pieces: int, sources: dict[str, float], seed: int) -> None:
        self.core, self.random, self.now = Transfer(), random.Random(seed), 0.0
        self.speed = sources
        self.under_way: dict[str, list[int]] = {}
        self.sent: dict[str, int] = dict.fromkeys(sources, 0)
        self.given_up: list[str] = []
        self.doubles = 0
        self.asked: set[int] = set()
        for key in range(pieces):
            self.core.want(key, right(key))
        for name in sources:
            self.under_way[name] = []
            self.take(self.core.offers(name, range(pieces)))

    def take(self, instructions: list[RangeQuery | GiveUp] | list[RangeQuery]) -> None:
        for instruction in instructions:
            if isinstance(instruction, GiveUp):
                self.given_up.append(instruction.source)
                self.under_way.pop(instruction.source, None)
            else:
                self.doubles += instruction.key in self.asked
                self.asked.add(instruction.key)
                self.under_way[instruction.source].append(instruction.key)
        check_invariants(self.core)

    def deliver(self, name: str, *, wrong: bool = False) -> None:
        key = self.under_way[name].pop(0)
        self.sent[name] += 1
        self.take(self.core.arrived(name, key, b"?" if wrong else right(key)))

    def kill(self, name: str) -> int:
        lost = len(self.under_way.pop(name, []))
        self.take(self.core.lost(name))
        return lost

    def run(self) -> None:
        """Deliver by speed until nothing is under way."""
        due = {name: self.speed[name] for name in self.under_way}
        while any(self.under_way.values()):
            name = min((name for name, keys in self.under_way.items() if keys), key=lambda name: due[name])
            self.now = max(self.now, due[name])
            due[name] = self.now + self.speed[name]
            self.deliver(name)


@given(
    pieces=st.integers(0, 40),
    deeds=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["give", "give", "lie", "die"])), max_size=120),
)
def test_whatever_sources_do_all_pieces_arrive_while_one_is_left(pieces: int, deeds: list[tuple[str, str]]) -> None:
    play = Play(pieces, dict.fromkeys("abcd", 1.0), 1)
    lost = lies = 0
    for name, deed in deeds:
        if deed == "die" and name in play.under_way:
            lost += play.kill(name)
        elif deed != "die" and play.under_way.get(name):
            lies += deed == "lie"
            before = len(play.under_way[name]) - 1
            play.now += 1
            play.deliver(name, wrong=deed == "lie")
            lost += before if name in play.given_up and name not in play.under_way else 0
            play.under_way.get(name)
    play.run()
    assert play.core.complete == (bool(play.under_way) or all(play.core.has(key) for key in range(pieces)))
    assert play.doubles <= lost + lies, "something was asked for twice without need"


@pytest.mark.parametrize(("said", "most"), [("x", "x"), ("xy", "x"), ("xyy", "y"), ("", None)])
def test_most_decide_and_ties_go_to_the_first(said: str, most: str | None) -> None:
    assert most_frequent(said) == most


def test_a_piece_that_is_forgotten_comes_from_nobody() -> None:
    core = Transfer()
    core.want("p", right(1))
    assert core.offers("b", {"p"}) == [RangeQuery("b", "p")]
    core.forget("p")
    assert core.arrived("b", "p", b"?") == [], "nobody minds what it is any more"
    assert core.complete
