"""A worker whose computing hangs while its heart beats leaves the ring, and is the only one that does."""

from __future__ import annotations

import threading

import pytest

from configs.schema import Profile
from p2ptrain.lab.stand_in import StandInEngine
from roles.compute_thread import FIRST_CALL_S, HANG_FACTOR, HANG_S, ComputeCall, HangDetector
from tests.roles.in_process import Cluster
from tests.roles.test_cluster import LONG, done, small_profile, state_of

KNOWN = {"micro_batch"}


def hangs_after(detector: HangDetector, call: ComputeCall, known: set[str], *, for_others: bool = False) -> float:
    """Seconds after which the call counts as hung; it does not end."""
    waited_s = -1.0
    while not detector.waited(1.0, call, known, for_others=for_others):
        waited_s += 1.0
        if waited_s > 2 * FIRST_CALL_S:
            return waited_s
    return waited_s + 1.0


def test_known_call_hangs_soon_and_a_first_one_may_compile() -> None:
    assert hangs_after(HangDetector(), ComputeCall("micro_batch"), KNOWN) == HANG_S
    assert hangs_after(HangDetector(), ComputeCall("validate"), KNOWN) == FIRST_CALL_S


def test_long_calls_raise_the_limit_of_their_name_only() -> None:
    detector, long = HangDetector(), ComputeCall("micro_batch")
    for _ in range(int(HANG_S)):
        assert not detector.waited(1.0, long, KNOWN, for_others=False)
    assert hangs_after(detector, ComputeCall("apply"), {*KNOWN, "apply"}) == HANG_S
    assert hangs_after(detector, ComputeCall("micro_batch"), KNOWN) == HANG_FACTOR * (HANG_S - 1)


def test_waiting_for_other_members_is_no_hang() -> None:
    assert hangs_after(HangDetector(), ComputeCall("micro_batch"), KNOWN, for_others=True) > FIRST_CALL_S


async def test_worker_that_hangs_is_named_and_leaves_and_comes_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roles.compute_thread.HANG_S", 2.0)
    go, hung = threading.Event(), threading.Event()

    def hang(step: int, index: int) -> None:
        if step == 6 and not go.is_set():
            hung.set()
            go.wait(120)

    def build(profile: Profile) -> StandInEngine:
        return StandInEngine(profile, on_micro_batch=hang)

    job = await cluster.create(small_profile(job={"workers": 3, "steps": LONG}))
    honest = [cluster.join() for _ in range(2)]
    culprit = cluster.join(build)
    try:
        await cluster.job_until(job, lambda item: item["step"] >= 40)
        events = (await cluster.ask("events.list", limit=200))["events"]
        assert hung.is_set()
    finally:
        go.set()
    name = culprit.identity.name
    removed = [item["text"] for item in events if item["kind"] in ("struck-off", "link", "flapping")]
    assert len(removed) == 1, removed
    assert removed[0].startswith(f"{name} was removed from the ring: its computing has not moved for 2 s")
    await cluster.job_until(job, done)
    assert state_of(honest[0]) == state_of(honest[1])
