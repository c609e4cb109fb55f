"""Private jobs in the real cluster: epsilon, the budget, and what is counted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from configs.loader import load
from configs.schema import Conflict, Profile
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.checkpoints import Meta
from p2ptrain.core.errors import ConfigError
from p2ptrain.lab.memory import MemoryNetwork
from roles.engine import NoiseInput
from roles.strategies import strategy_of
from roles.worker.early_stop import EarlyStop
from roles.worker.privacy import COUNT_FILE, Budget, epsilon_of
from tests.compute.tiny_trainer import state_bytes
from tests.ring.local import local_ring
from tests.roles.in_process import Cluster, Gate, Peer
from tests.roles.test_cluster import done
from tests.roles.test_local import PRIVATE, own_text

SETS = [*PRIVATE, "job.strategy=federated", "job.workers=3", "job.steps=1000", "privacy.epsilon=2.6",
        "privacy.noise=6", "privacy.clip_norm=0.1"]  # fmt: skip
AFFORDED = 14
OF_SEQUENCES = ["privacy.unit=sample", "job.strategy=sync", "batch.micro_batch_sequences=1"]


@pytest.mark.parametrize(("releases", "noise", "delta"), [(1, 1.0, 1e-5), (40, 4.0, 1e-5), (1000, 30.0, 1e-7)])
def test_epsilon_is_the_accountants(releases: int, noise: float, delta: float) -> None:
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise), releases))
    assert epsilon_of(releases, noise, delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)


def test_an_epsilon_that_the_library_cannot_compute_is_infinite() -> None:
    assert epsilon_of(1, 1e-200, 1e-5) == epsilon_of(2**64 - 1, 1.0, 1e-5) == math.inf


async def test_who_alone_says_that_the_budget_is_spent_is_named() -> None:
    files: Any = SimpleNamespace(root=Path("job/checkpoints"))
    async with local_ring(3, MemoryNetwork()) as ring:
        budgets = [Budget(private_profile().privacy, files) for _ in ring]
        budgets[1].releases = 10**9
        pairs = zip(budgets, ring, strict=True)
        await asyncio.gather(*(one.agree(member.session, patience_s=9.0) for one, member in pairs))
    name = ring[1].session.view.members[1].name
    for one in budgets:
        assert one.is_due
        assert f"{name} alone counts 1,000,000,000 steps, the others at most 0" in one.reason


async def test_counts_that_were_lost_are_at_least_the_steps_of_the_view() -> None:
    files: Any = SimpleNamespace(root=Path("job/checkpoints"))
    session: Any = SimpleNamespace(view=SimpleNamespace(step=10**9, members=()))

    async def all_gather(mine: bytes, **more: Any) -> list[bytes]:
        return [mine] * 2

    session.all_gather = all_gather
    budget = Budget(private_profile().privacy, files)
    await budget.agree(session, patience_s=9.0)
    assert budget.releases == 10**9
    assert budget.is_due
    assert "alone counts" not in budget.reason


def test_a_checkpoint_has_the_count_and_never_lowers_it() -> None:
    files: Any = SimpleNamespace(root=Path("job/checkpoints"))
    early = EarlyStop(0, Budget(private_profile().privacy, files))
    for meta in ({"releases": 9}, {}, {"releases": 3}, {"releases": -1}, {"releases": 2**70}, {"releases": "many"}):
        early.resume_from(cast(Meta, meta))
        assert early.spent_privacy()["epsilon"] == epsilon_of(9, 6.0, 1e-5)
    assert early.meta() == {"releases": 9}


def private_profile(*sets: str) -> Profile:
    return load("tiny", {}, [*SETS, *sets]).profile


class Stopped(Trainer):
    """A trainer that waits at a gate before each micro-batch, and remembers its noise."""

    gate: Gate
    noises: list[tuple[float, bytes]]

    def micro_batch(self, step: int, index: int, *args: Any, **kwargs: Any) -> None:
        self.gate.wait(step, index)
        super().micro_batch(step, index, *args, **kwargs)


class NoiseRecorder:
    def __init__(self, update: NoiseInput, noises: list[tuple[float, bytes]]) -> None:
        self._update, self._noises = update, noises

    def use_noise(self, std: float, key: bytes) -> None:
        self._noises.append((std, key))
        self._update.use_noise(std, key)


@pytest.fixture
def join(cluster: Cluster, tmp_path: Path) -> Callable[..., Peer]:
    def one(number: int, gate: Gate | None = None) -> Peer:
        path = tmp_path / f"{number}.txt"
        path.write_text("".join(f"line {number * line % 97} of a text\n" for line in range(300)))

        def build(profile: Profile) -> Any:
            engine: Any = own_text(path)(profile)
            engine.__class__, engine.gate, engine.noises = Stopped, gate or Gate(), []
            engine.noise = NoiseRecorder(engine.noise, engine.noises)
            return engine

        return cluster.join(build, strategies=strategy_of)

    return one


def noises_of(engine: Any) -> list[tuple[float, bytes]]:
    assert isinstance(engine, Stopped)
    return engine.noises


def count_of(peer: Peer) -> int:
    (path,) = Path(peer.identity.directory).rglob(COUNT_FILE)
    return int.from_bytes(path.read_bytes(), "big")


@pytest.mark.parametrize("sets", [[], OF_SEQUENCES], ids=["member", "sample"])
async def test_a_job_ends_at_its_budget_and_shows_no_loss(
    cluster: Cluster, join: Callable[..., Peer], sets: list[str]
) -> None:
    assert epsilon_of(AFFORDED, 6.0, 1e-5) <= 2.6 < epsilon_of(AFFORDED + 1, 6.0, 1e-5)
    job = await cluster.create(private_profile(*sets))
    peers = [join(number) for number in range(3)]
    ended = await cluster.job_until(job, done)
    assert ended["step"] == AFFORDED
    assert "privacy.epsilon = 2.6" in ended["reason"]
    assert ended["epsilon"] == pytest.approx(epsilon_of(AFFORDED, 6.0, 1e-5))
    assert ended["delta"] == 1e-5
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert [row["epsilon"] for row in rows] == [pytest.approx(epsilon_of(step, 6.0, 1e-5)) for step in range(1, 15)]
    assert {row.get("loss") for row in rows} == {row.get("val_loss") for row in rows} == {None}
    noises = [noise for peer in peers for engine in peer.engines for noise in noises_of(engine)]
    assert len({key for _, key in noises}) == len(noises) == 3 * AFFORDED
    assert sum(std**2 for std, _ in noises) == pytest.approx(AFFORDED * (6 * 0.1) ** 2)


async def test_going_back_gives_no_budget_back(cluster: Cluster, join: Callable[..., Peer]) -> None:
    job = await cluster.create(private_profile("checkpoint.every=4", "job.workers=1"))
    peer = join(0)
    await cluster.job_until(job, done)
    saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    await cluster.ask("checkpoints.restore", id=next(item["id"] for item in saved if item["step"] == 8))
    await cluster.job_until(job, lambda item: not done(item))
    ended = await cluster.job_until(job, done)
    assert (ended["step"], ended["epsilon"]) == (9, pytest.approx(epsilon_of(AFFORDED, 6.0, 1e-5)))
    assert noises_of(peer.engines[-1])[-1][1] == b""


async def test_an_aborted_step_and_a_newcomer_count(cluster: Cluster, join: Callable[..., Peer]) -> None:
    job = await cluster.create(private_profile())
    gate = Gate(4)
    peers = [join(number, gate) for number in range(3)]
    await gate.reached(4, 3)
    await peers[2].die()
    newcomer = join(3)
    gate.away()
    ended = await cluster.job_until(job, done)
    assert ended["step"] < AFFORDED  # the step that was repeated is counted twice
    assert [count_of(peer) for peer in (*peers[:2], newcomer)] == 3 * [AFFORDED]


async def test_a_last_step_that_is_repeated_changes_nothing(cluster: Cluster, join: Callable[..., Peer]) -> None:
    job = await cluster.create(private_profile())
    gate = Gate(AFFORDED - 1)
    peers = [join(number, gate) for number in range(3)]
    await gate.reached(AFFORDED - 1, 3)
    before = state_bytes(peers[0].engines[-1])
    await peers[2].die()
    gate.away()
    ended = await cluster.job_until(job, done)
    assert ended["step"] == AFFORDED
    assert ended["epsilon"] == pytest.approx(epsilon_of(AFFORDED, 6.0, 1e-5))
    assert [state_bytes(peer.engines[-1]) for peer in peers[:2]] == [before, before]


async def test_a_budget_without_a_step_is_refused(cluster: Cluster, join: Callable[..., Peer]) -> None:
    job = await cluster.create(private_profile("privacy.noise=0.5", "job.workers=1"))
    peer = join(0)
    await peer.hears("allows no step")
    await cluster.job_until(job, lambda item: item["state"] == "failed")


@pytest.mark.parametrize(
    "setting",
    ["job.strategy=sync", "data.private=false", "ring.codec=bf16", "validation.every=5", "local.overlap=true"],
)
def test_what_breaks_the_promise_is_refused(setting: str) -> None:
    with pytest.raises((Conflict, ConfigError), match=r"privacy.epsilon = 2\.6"):
        private_profile(setting)


@pytest.mark.parametrize(
    "setting", ["job.strategy=local", "data.private=false", "batch.micro_batch_sequences=2", "drafter.layers=1"]
)
def test_what_breaks_the_promise_to_single_sequences_is_refused(setting: str) -> None:
    with pytest.raises((Conflict, ConfigError), match=r"privacy.epsilon = 2\.6"):
        private_profile(*OF_SEQUENCES, setting)
