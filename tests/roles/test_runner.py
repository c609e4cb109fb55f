"""What a worker tells a seed that was away, by where its transaction stands; and how long it waits for others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Profile
from ring import member_events as ev
from ring.transaction import Transaction
from roles.engine import WHOLE
from roles.worker.early_stop import EarlyStop
from roles.worker.reports import Reports
from roles.worker.view_connections import FORM_TIMEOUT_S, forming_s, patience_s
from tests.ring.members import ORIGIN, view
from wire.job_messages import Report


def told(core: Transaction) -> Report:
    """The report of a member with that core, once its link is back."""
    said: list[Report] = []
    context: Any = SimpleNamespace(
        peer_id="a", send=said.append, on_step=None, world=SimpleNamespace(clock=SimpleNamespace(now=lambda: 0.0))
    )
    reports = Reports(context, core, job="job", stage=WHOLE, profile=Profile(), early=EarlyStop(0))
    reports.seed_is_back(follows=False, level=False)
    return said[0]


def formed() -> Transaction:
    """A member in a view."""
    core = Transaction(job="job", peer_id="a", steps_total=1000)
    core.handle(ev.StateLoaded(0, ORIGIN))
    form = core.handle(ev.ViewArrived(view(7, ["a", "b"])))[-1]
    assert isinstance(form, ev.FormRing)
    core.handle(ev.ActivityFinished(form.ticket))
    return core


def test_a_member_whose_ring_broke_says_so_again() -> None:
    core = formed()
    core.handle(ev.ViewBroken(7, "b", "gone"))
    assert (told(core).status, told(core).generation) == ("broken", 7)


def test_small_stage_waits_as_long_as_a_large_one_may_take_to_heal() -> None:
    patience, form_s, settled_s = [], [], []
    for own_bytes, most_bytes in ((12e9, 4e9), (12e6, 4e9), (12e6, 0)):
        here = replace(view(7, ["a", "b"]), reduce_bytes=int(most_bytes))
        patience.append(patience_s(here, 0, longest_s=1.0, state_bytes=int(own_bytes), trained={"a"}))
        form_s.append(forming_s(here, int(own_bytes)) - FORM_TIMEOUT_S)
        settled_s.append(patience_s(here, 0, longest_s=1.0, state_bytes=int(own_bytes), trained={"a", "b"}))
    assert patience == [60 + 5 + 12_000, 60 + 5 + 12_000, 60 + 5 + 12]
    assert settled_s == pytest.approx([12 + 5 + 120, 12 + 5 + 120, 12 + 5 + 0.12]), "no member is new"
    assert form_s == pytest.approx([120, 120, 0.12])
