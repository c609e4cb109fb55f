"""Members of strategy 'server': a server that makes versions alone, and workers that pull them."""

from __future__ import annotations

import math

import pytest

from ring import member_events as ev
from ring.job_member import MemberPhase
from ring.token import Flag, next_lineage
from ring.versions import VersionMember
from tests.ring.members import JOB, ORIGIN, digest_of, handled, view
from wire.job_messages import Report

FIRST = next_lineage(ORIGIN, digest_of(1, 0))


class Played:
    """One core, and the instructions that it gave last."""

    def __init__(self, peer: str) -> None:
        """The server "a" or the worker "b", with its ring formed."""
        self.core = VersionMember(job=JOB, peer_id=peer, steps_total=3)
        self.given: list[object] = []
        self.handle(ev.StateLoaded(0, ORIGIN))
        self.handle(ev.ViewArrived(view(1, ["a", "b"], healthy={"a"})))
        self.finish(ev.FormRing)

    def handle(self, event: object) -> None:
        self.given = handled(self.core, event)

    def ticket(self, kind: type) -> int:
        """That of the newest activity, which is of this kind."""
        activity = self.given[-1]
        assert isinstance(activity, kind)
        return int(activity.ticket)  # type: ignore[attr-defined]

    def finish(self, kind: type) -> None:
        self.handle(ev.ActivityFinished(self.ticket(kind)))

    def combine(self, square_sum: float = 1.5) -> None:
        self.handle(ev.VersionCombined(self.ticket(ev.Collect), digest_of(1, 0), square_sum, b"", b""))

    @property
    def report(self) -> Report:
        reports = [it.report for it in self.given if isinstance(it, ev.SendReport)]
        return reports[-1]


@pytest.mark.parametrize("flag", [Flag.HOLD, Flag.LEAVE])
def test_server_makes_versions_alone_and_stops_at_once_while_it_waits_for_the_next_one(flag: Flag) -> None:
    server = Played("a")
    server.combine()
    server.finish(ev.Apply)
    server.finish(ev.Boundary)
    collect = server.ticket(ev.Collect)
    server.handle(ev.FlagRequested(flag))
    assert server.given == [ev.EndCollect()]
    server.handle(ev.ActivityFinished(collect))
    assert server.given[-1] == ev.Boundary(server.ticket(ev.Boundary), 1, save=False, last=False)
    server.finish(ev.Boundary)
    assert (server.core.phase, server.report.status, server.report.applied) == (MemberPhase.HELD, "held", 1)


def test_server_that_is_asked_to_save_and_stop_while_it_applies_makes_no_further_version() -> None:
    server = Played("a")
    server.combine()
    applying = server.given
    for flag in (Flag.SAVE, Flag.HOLD):
        server.handle(ev.FlagRequested(flag))
        assert server.given == []
    server.given = applying
    server.finish(ev.Apply)
    assert server.given[-1] == ev.Boundary(server.ticket(ev.Boundary), 1, save=True, last=False)
    server.finish(ev.Boundary)
    assert (server.report.status, server.report.applied) == ("held", 1)


def test_version_that_is_not_finite_is_not_applied() -> None:
    server = Played("a")
    server.combine(math.nan)
    assert (server.report.status, server.report.suspect, server.report.cause) == ("broken", "a", "contribution")


def test_server_without_the_state_of_its_view_ends_it() -> None:
    server = Played("a")
    server.handle(ev.ViewArrived(view(2, ["a", "b"], step=1, lineage=FIRST)))
    server.finish(ev.FormRing)
    assert (server.report.status, server.report.generation) == ("broken", 2)


def test_worker_has_applied_what_it_adopted_and_a_break_waits_for_that() -> None:
    worker = Played("b")
    worker.handle(ev.VersionPulled(worker.ticket(ev.ExchangeWithServer), 0, ORIGIN, 0.0))
    worker.handle(ev.VersionPulled(worker.ticket(ev.ExchangeWithServer), 2, FIRST, 1.5))
    adopt = worker.ticket(ev.Adopt)
    worker.handle(ev.ViewBroken(1, "a", "died"))
    assert worker.given == []
    worker.handle(ev.ActivityFinished(adopt))
    told = worker.report
    assert (told.status, told.applied, told.lineage, told.square_sum, told.prepared) == ("broken", 2, FIRST, 1.5, 2)


def test_worker_pulls_the_last_version_though_it_is_asked_to_stop() -> None:
    worker = Played("b")
    worker.handle(ev.ViewArrived(view(2, ["a", "b"], step=3, lineage=FIRST, healthy={"a"})))
    forming = worker.given
    worker.handle(ev.FlagRequested(Flag.HOLD))
    assert worker.given == []
    worker.given = forming
    worker.finish(ev.FormRing)
    worker.handle(ev.VersionPulled(worker.ticket(ev.ExchangeWithServer), 3, FIRST, 1.5, last=True, over=True))
    worker.finish(ev.Adopt)
    assert (worker.report.status, worker.report.applied) == ("done", 3)


@pytest.mark.parametrize(
    ("reply", "flag", "status"),
    [({"over": True}, Flag(0), "held"), ({"last": True, "over": True}, Flag(0), "done"), ({}, Flag.HOLD, "held")],
)
def test_worker_stops_with_its_server_or_after_the_exchange_under_way(
    reply: dict[str, bool], flag: Flag, status: str
) -> None:
    worker = Played("b")
    exchange = worker.ticket(ev.ExchangeWithServer)
    if flag:
        worker.handle(ev.FlagRequested(flag, 1))
    worker.handle(ev.VersionPulled(exchange, 1, FIRST, 1.5, **reply))
    worker.finish(ev.Adopt)
    assert (worker.report.status, worker.report.applied) == (status, 1)
