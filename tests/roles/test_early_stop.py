"""A job ends early where its validation loss no longer falls, for all members alike; the best checkpoint is kept."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.lab.stand_in import StandInEngine
from roles.engine import WHOLE, Stage
from roles.worker.boundary import mean_loss_untrusted
from roles.worker.early_stop import EarlyStop
from tests.roles.in_process import Cluster, Gate, Peer
from tests.roles.test_cluster import done, state_of

TELLS = "stopped early: no better validation loss than"


class Scripted(StandInEngine):
    """Its validation loss is ``loss`` of the number of steps."""

    def __init__(
        self, profile: Profile, loss: Callable[[int], float], gate: Gate | None = None, stage: Stage = WHOLE
    ) -> None:
        super().__init__(profile, on_micro_batch=gate.wait if gate else lambda step, index: None, stage=stage)
        self._loss = loss

    def validate(self, index: int) -> tuple[float, int]:
        targets = self.data.tokens_per_micro_batch * (self.stage.index == 0)
        return self._loss(self.state.step) * targets, targets


def profile(**tables: dict[str, Any]) -> Profile:
    base: dict[str, dict[str, Any]] = {
        "job": {"steps": 100_000, "workers": 3},
        "batch": {"micro_batches": 6},
        "validation": {"every": 3, "batches": 4, "patience": 2},
        "checkpoint": {"every": 3, "keep": 2, "copies": 3, "best": True},
    }
    return Profile.model_validate({name: base.get(name, {}) | tables.get(name, {}) for name in {*base, *tables}})


def saved_by(peer: Peer) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(peer.identity.directory).rglob("step-*"))


async def test_members_that_die_and_come_change_nothing_about_the_end(cluster: Cluster) -> None:
    gate, falls = Gate(4), [True]

    def loss(step: int) -> float:
        return 9 - step / 1e5 if falls[0] else 10.0

    def build(settings: Profile) -> Scripted:
        return Scripted(settings, loss, gate)

    job = await cluster.create(profile())
    peers = [cluster.join(build) for _ in range(3)]
    await cluster.job_until(job, lambda item: item["step"] >= 4)
    await peers[1].die()  # between two validations
    gate.on()
    newcomer = cluster.join(build)
    here = [peers[0], peers[2], newcomer]
    await cluster.job_until(job, lambda item: {peer.identity.peer_id for peer in here} == set(item["members"]))
    falls[0] = False
    ended = await cluster.job_until(job, done)
    assert ended["reason"].startswith(TELLS)
    assert ended["step"] < ended["steps_total"]
    assert ended["reason"].endswith("in 2 validations")
    assert ended["step"] % 3 == 1, "the step after a validation is the last"
    assert len({state_of(peer) for peer in here}) == 1
    for peer in here:
        (text,) = [text for _, kind, text in peer.told if kind == "done"]
        assert text == f"the job is done: {ended['reason']}; waits for a new job"
        assert saved_by(peer)[-1] == ended["step"]


async def test_a_run_that_was_killed_counts_on_and_its_best_checkpoint_stays(cluster: Cluster) -> None:
    losses = {3: 5.0, 6: 4.25, 9: 4.5, 12: 4.5, 13: 4.75}
    gate = Gate(7, 10)  # at each there is time to write
    job = await cluster.create(profile(job={"workers": 1}))
    peer = cluster.join(lambda settings: Scripted(settings, losses.__getitem__, gate))
    await cluster.saved(job, 6, 1)
    gate.on()
    await cluster.saved(job, 9, 1)
    await peer.die()
    gate.away()
    await cluster.restart_seed()
    again = cluster.join(lambda settings: Scripted(settings, losses.__getitem__), slot=1)
    ended = await cluster.job_until(job, done)
    assert (ended["step"], ended["reason"]) == (13, f"{TELLS} 4.25 (step 6) in 2 validations")
    assert min(again.steps) == 10
    assert saved_by(again) == [6, 12, 13]
    listed = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    assert sorted(item["step"] for item in listed) == [6, 12, 13]
    await cluster.restart_seed()
    after = await cluster.job_until(job, done)
    assert (after["step"], after["reason"]) == (13, ended["reason"])


async def test_the_stages_of_a_split_model_end_together(cluster: Cluster) -> None:
    split = profile(job={"workers": 4, "strategy": "pipeline"}, pipeline={"stages": 2})
    job = await cluster.create(split)
    peers = [cluster.join(build_part=lambda settings, stage: Scripted(settings, float, stage=stage)) for _ in range(4)]
    ended = await cluster.job_until(job, done)
    assert (ended["step"], ended["reason"]) == (10, f"{TELLS} 3 (step 3) in 2 validations")
    assert len({state_of(peer) for peer in peers}) == 2


async def test_without_patience_every_step_is_done(cluster: Cluster) -> None:
    settings = profile(job={"workers": 1, "steps": 9}, validation={"patience": 0}, checkpoint={"best": False})
    job = await cluster.create(settings)
    peer = cluster.join(lambda settings: Scripted(settings, float))
    ended = await cluster.job_until(job, done)
    assert (ended["step"], ended["reason"], saved_by(peer)) == (9, "every step is done", [6, 9])


# ---------------------------------------------------------------------------------------------------------- the counts


def after(patience: int, *losses: float) -> EarlyStop:
    known = EarlyStop(patience)
    for number, loss in enumerate(losses, start=1):
        known.add_validation(10 * number, loss)
    return known


def test_a_newcomer_learns_the_count_from_the_others() -> None:
    old, new = after(3, 5.0, 4.0, 4.5, 4.0), after(3)
    messages = [new.message(), old.message()]
    for member in (new, old):
        member.agree_untrusted(messages, 40)
        member.add_validation(50, 4.25)
    assert new.reason == old.reason == f"{TELLS} 4 (step 20) in 3 validations"
    assert new.is_due


def test_one_member_ends_no_job_by_what_it_says_of_the_validations() -> None:
    known, lie = after(3, 5.0, 4.0), after(3, 1.0, 5.0, 5.0, 5.0)
    assert lie.is_due
    for counts in ([lie, known, known], [known, lie]):
        member = after(3, 5.0, 4.0)
        member.agree_untrusted([count.message() for count in counts], 40)
        assert member.message() == known.message()
    known.agree_untrusted([lie.message(), b"x", EarlyStop(3).message()], 30)
    assert not known.is_due, "of a step that is to come, or nothing"


@pytest.mark.parametrize(
    ("told", "loss", "odd"),
    [
        ([(8.0, 4), (6.0, 3), (4.0, 2)], 2.0, []),
        ([(8.0, 4), (math.nan, 3), (4.0, 2)], 2.0, [1]),
        ([(8.0, 4), (6.0, 3), (math.inf, 2)], 2.0, [2]),
        ([(-1e9, 4), (6.0, 3), (4.0, 2)], 2.0, [0]),
        ([(8.0, 4), (6.0, 3), (1e30, 2)], 2.0, [2]),
        ([(8.0, 4), (1e308, 3)], 2.0, [1]),
        ([(8.0, 4), (6.0, 3), (4.0, 2**60)], 2.0, [2]),
        ([(8.0, 4), (0.0, 0)], 2.0, []),  # of a stage, or without a share
    ],
)
def test_what_no_validation_comes_to_is_left_out(told: list[tuple[float, int]], loss: float, odd: list[int]) -> None:
    packed = [struct.pack("!dQ", total, targets) for total, targets in told]
    assert mean_loss_untrusted(packed, 8) == (loss, odd)
    assert mean_loss_untrusted([*packed, b"x"], 8)[1] == [*odd, len(packed)]


@pytest.mark.parametrize(
    ("patience", "losses", "due"),
    [
        (1, (5.0, 5.0), True),
        (2, (5.0, 5.0), False),
        (2, (5.0, 6.0, 4.0, 5.0), False),
        (1, (math.nan,), True),
        (1, (5.0, 5.0, 4.0), True),  # the last loss is that of the step after
        (0, (5.0, 6.0, 7.0), False),
    ],
)
def test_when_it_is_due(patience: int, losses: tuple[float, ...], due: bool) -> None:
    assert (after(patience, *losses).is_due, bool(after(patience, *losses).reason)) == (due, due)


def test_the_count_travels_in_a_checkpoint() -> None:
    before, resumed = after(2, 5.0, 6.0), EarlyStop(2)
    resumed.resume_from(before.meta())
    assert resumed.message() == before.message()
    resumed.add_validation(30, 7.0)
    assert resumed.reason == f"{TELLS} 5 (step 10) in 2 validations"
    for meta in ({}, {"validated_step": "x"}, before.meta() | {"best_val_step": -1}):
        resumed.resume_from(meta)
        assert resumed.message() == EarlyStop(2).message()
    assert after(0, 5.0).meta() == {}
