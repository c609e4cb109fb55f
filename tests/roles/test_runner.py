"""What a worker tells of a job that cannot be done and of a broken ring, and how long it waits for others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.loader import load
from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError
from ring import member_events as ev
from ring.transaction import Transaction
from roles.engine import WHOLE
from roles.strategies import strategy_of
from roles.worker.build import engine_builder
from roles.worker.early_stop import EarlyStop
from roles.worker.job_state import JobSettings
from roles.worker.reports import Reports
from roles.worker.view_connections import FORM_TIMEOUT_S, forming_s, patience_s
from tests.ring.members import ORIGIN, view
from tests.roles.in_process import Cluster
from wire.job_messages import Report, SettingChange


def told(core: Transaction) -> Report:
    """The report of a member with that core, once its link is back."""
    said: list[Report] = []
    context: Any = SimpleNamespace(
        peer_id="a", send=said.append, on_step=None, world=SimpleNamespace(clock=SimpleNamespace(now=lambda: 0.0))
    )
    reports = Reports(context, core, job="job", stage=WHOLE, profile=Profile(), early=EarlyStop(0))
    reports.report_state(follows=False, level=False)
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


SMALL = [
    "job.steps=2", "job.workers=1", "device.kind=cpu", "device.threads=1", "data.limit_bytes=100_000",
    "data.sequence_tokens=16", "model.layers=1", "model.hidden_size=16", "model.intermediate_size=24",
    "validation.every=0", "validation.batches=1", "checkpoint.every=0",
]  # fmt: skip
HUGE = ["model.hidden_size=8192", "model.layers=64", "model.intermediate_size=32768"]


async def test_a_job_that_cannot_be_done_fails_with_its_reason_and_the_worker_does_the_next_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("short\n")
    peer = cluster.join(engine_builder(threads=1), strategies=strategy_of)
    for sets, reason in (
        ([f"data.path={short}"], "has too few tokens: they fill 0 windows of 16; give at least "),
        (HUGE, "of memory, and cpu (1 thread) has "),
        (["device.kind=mps" if sys.platform != "darwin" else "device.kind=cuda"], "this machine has no "),
    ):
        job = await cluster.create(load("tiny", {}, [*SMALL, *sets]).profile)
        failed = await cluster.job_until(job, lambda item: item["state"] == "failed")
        assert reason in failed["reason"]
        assert "; " in failed["reason"], "and a remedy"
        await peer.hears(failed["reason"].rstrip("…"))
    job = await cluster.create(load("tiny", {}, SMALL).profile)
    await cluster.job_until(job, lambda item: item["state"] == "done")


def test_changes_of_settings_are_checked_and_taken_though_as_many_are_known() -> None:
    settings = JobSettings(Profile())
    settings.take_untrusted([SettingChange(5, "optimizer.lr", "0.001", "0.003")])
    settings.take_untrusted([SettingChange(5, "optimizer.lr", "0.002", "0.003")])  # of a seed that was restored
    assert settings.now.optimizer.lr == 0.002
    with pytest.raises(ProtocolError):
        settings.take_untrusted([SettingChange(5, "job.steps", '"many"', "1")])
