"""What a worker tells a seed that was away, by where its transaction stands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ring.activities import Broken, Finished, Form, Loaded, Unloaded, ViewArrived
from ring.testing import ORIGIN, view
from ring.transaction import Transaction
from roles.worker.runner import JobRunner
from wire.messages import Report


def told(core: Transaction) -> Report:
    """The report of a runner with that core, once its link is back."""
    said: list[Report] = []
    runner: Any = JobRunner.__new__(JobRunner)
    runner.core, runner._engine, runner._trouble = core, None, None
    runner.follower = SimpleNamespace(active=False, level=False)
    runner._around = SimpleNamespace(say=said.append)
    runner._ledger = SimpleNamespace(tell_beyond=lambda step: None)
    runner.seed_is_back()
    return said[0]


def formed() -> Transaction:
    """A member in a view."""
    core = Transaction(job="job", peer_id="a", steps_total=1000)
    core.handle(Loaded(0, ORIGIN))
    form = core.handle(ViewArrived(view(7, ["a", "b"])))[-1]
    assert isinstance(form, Form)
    core.handle(Finished(form.ticket))
    return core


def test_a_member_whose_ring_broke_says_so_again() -> None:
    core = formed()
    core.handle(Broken(7, "b", "gone"))
    assert (told(core).status, told(core).generation) == ("broken", 7)


def test_a_member_that_had_to_load_its_state_anew_carries_nothing_of_the_view_any_more() -> None:
    core = formed()
    core.handle(Unloaded("it was torn"))
    core.handle(Loaded(0, ORIGIN))
    assert (told(core).status, told(core).generation) == ("ready", 0)
