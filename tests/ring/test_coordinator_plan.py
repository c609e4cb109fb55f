"""The coordinator plans each view with the links as they are known then, and ends no ring for a better plan."""

from __future__ import annotations

import itertools

from p2ptrain.core.ids import new_id
from ring import coordination as co
from ring.coordinator import Coordinator
from ring.order import LinkQuality, Wishes
from ring.view import View
from wire.job_messages import Report

FAST, SLOW = LinkQuality(1e-3, 1e9), LinkQuality(0.02, 20e6)
NAMES = ("a", "b", "c", "d")


def links(*slow: str) -> dict[tuple[str, str], LinkQuality]:
    """Between all of ``NAMES``, of which those of the named pairs are slow both ways."""
    unwanted = {frozenset(pair) for pair in slow}
    return {pair: SLOW if frozenset(pair) in unwanted else FAST for pair in itertools.permutations(NAMES, 2)}


class Job:
    def __init__(self, wishes: Wishes = Wishes()) -> None:  # noqa: B008 - immutable
        self.core = Coordinator(new_id(), co.Terms(workers=len(NAMES), micro_batches=8, wishes=wishes))
        self.said: list[co.Instruction] = []

    def tell(self, event: co.Event) -> None:
        self.said += self.core.handle(event, 0.0)
        self.core.validate()

    def report(self, peer_id: str, status: str, generation: int = 0, applied: int = 0) -> None:
        report = Report(
            self.core.job, generation, status, applied, applied, f"L{applied}", corpus="C", reduce_bytes=1 << 24
        )
        self.tell(co.PeerReported(peer_id, report))

    def start(self) -> View:
        for name in NAMES:
            self.tell(co.PeerOffered(co.Peer(name, f"name-{name}", "10.0.0.1", 7000)))
        for name in NAMES:
            self.report(name, "ready")
        return self.view

    @property
    def view(self) -> View:
        assert self.core.view is not None
        return self.core.view

    def order(self) -> list[str]:
        return [member.peer_id for member in self.view.members]

    def texts(self, kind: str) -> list[str]:
        return [item.text for item in self.said if isinstance(item, co.Emit) and item.kind == kind]


def test_without_measurements_nothing_is_planned_and_nothing_said() -> None:
    job = Job()
    view = job.start()
    assert job.order() == list(NAMES)
    assert (view.streams, view.sub_chunk_bytes, view.codec) == (1, 0, "fp32")
    assert job.texts("ring-order") == job.texts("ring-carriage") == []


def test_a_view_has_the_order_of_the_measured_links_and_says_why() -> None:
    job = Job(Wishes(streams=2, sub_chunk_bytes=65536, codec="bf16"))
    job.tell(co.Measured(links("ab", "cd")))
    view = job.start()
    neighbours = {frozenset(pair) for pair in itertools.pairwise([*job.order(), job.order()[0]])}
    assert not neighbours & {frozenset("ab"), frozenset("cd")}
    assert [member.first for member in view.members] == [0, 2, 4, 6]  # shares follow the ranks
    assert (view.streams, view.sub_chunk_bytes, view.codec) == (2, 65536, "bf16")
    (why,) = job.texts("ring-order")
    assert why.startswith("order from measured links, ")
    assert "; slowest edge name-" in why
    assert job.texts("ring-carriage") == ["2 streams, as the profile says; codec bf16, as the profile says"]
    assert job.texts("view") == ["generation 1 from step 0: " + " → ".join(f"name-{name}" for name in job.order())]


def test_a_better_order_ends_no_ring_but_is_taken_by_the_next_view() -> None:
    job = Job()
    job.tell(co.Measured(links("ac", "bd")))
    job.start()
    assert job.order() == list(NAMES)
    for name in NAMES:
        job.report(name, "training", 1)
    job.said.clear()
    job.tell(co.Measured(links("ab", "cd")))
    assert job.said == []
    for name in NAMES:
        job.report(name, "broken", 1)
    assert job.view.generation == 2
    assert job.order() != list(NAMES)
    assert frozenset("ab") not in {frozenset(pair) for pair in itertools.pairwise(job.order())}


def test_who_decides_how_gradients_travel_says_so_once() -> None:
    job = Job()
    job.tell(co.Measured(links()))
    job.start()
    for name in NAMES:
        job.report(name, "broken", 1)
    assert job.view.generation == 2
    assert len(job.texts("ring-order")) == 2
    assert len(job.texts("ring-carriage")) == 1


def test_the_codec_follows_from_what_a_step_sends_and_computes() -> None:
    for compute_s, codec in ((0.0, "int8"), (100.0, "fp32")):
        job = Job(Wishes(codec="auto"))
        job.tell(co.Measured(links("ab", "bc", "cd", "da", "ac", "bd"), compute_s))
        assert job.start().codec == codec
