"""Strategies whose members have a copy of their own: 'local' and 'federated', in the real cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.loader import load
from configs.schema import Profile
from p2ptrain.core.errors import ConfigError
from p2ptrain.lab import memory
from p2ptrain.lab.stand_in import StandInEngine
from ring.ledger import counts_of_untrusted
from roles.engine import Engine
from roles.strategies import strategy_of
from roles.worker.build import engine_builder, with_data
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_cluster import at, done, small_profile, state_of
from wire.records import LedgerPage

PRIVATE = [
    "job.steps=12", "device.threads=1", "data.private=true", "data.path=none-such", "data.sequence_tokens=16",
    "model.layers=1", "model.hidden_size=16", "model.intermediate_size=24", "validation.every=0",
    "validation.batches=1", "checkpoint.every=0", "batch.micro_batches=12", "batch.micro_batch_sequences=2",
]  # fmt: skip


def own_text(path: Path) -> Callable[[Profile], Engine]:
    """Builds the engine of a worker with its own text."""
    return lambda profile: engine_builder(threads=1)(with_data(profile, str(path)))


def counts_of(page: dict[str, Any]) -> list[tuple[int, ...]]:
    rows = [row for run in LedgerPage.from_map_untrusted(page).runs for row in run.rows()]
    assert len(rows) == 12
    return [counts_of_untrusted(row.counts) for row in rows]


@pytest.mark.parametrize(
    "local", [{}, {"fragments": 2}, {"overlap": True}, {"fragments": 3, "overlap": True}], ids=lambda it: "-".join(it)
)
async def test_members_end_with_the_same_bits(cluster: Cluster, local: dict[str, Any]) -> None:
    profile = small_profile(job={"strategy": "local", "workers": 3}, local=local, ring={"codec": "int4"})
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(3)]
    await cluster.job_until(job, done)
    assert len({state_of(peer) for peer in peers}) == 1
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] < rows[0]["loss"] / 3


async def test_the_others_complete_the_round_of_a_member_that_is_lost(cluster: Cluster) -> None:
    profile = small_profile(job={"strategy": "local", "workers": 3})
    job = await cluster.create(profile)
    gate = Gate(5)
    peers = [cluster.join(gate.build) for _ in range(3)]
    await cluster.job_until(job, at(5))
    await peers[2].die()
    gate.away()
    ended = await cluster.job_until(job, done)
    assert ended["step"] == 12
    assert state_of(peers[0]) == state_of(peers[1])
    page = await cluster.ask("jobs.ledger", job=job, after_step=0)
    assert {len(counts) for counts in counts_of(page)} == {2, 3}


class Slow(StandInEngine):
    def micro_batch(self, step: int, index: int, *args: Any) -> None:
        for _ in range(500):
            self._target(step, index)
        super().micro_batch(step, index, *args)


async def test_a_slow_member_of_a_private_step_has_a_share(cluster: Cluster) -> None:
    """The members' sum is divided by the number of shares: with fewer the noise would be larger than promised."""
    privacy = {"epsilon": 1e5, "noise": 1e-2}
    more = {"data": {"private": True}, "validation": {"every": 0}, "privacy": privacy, "ring": {"codec": "fp32"}}
    job = await cluster.create(small_profile(job={"strategy": "local", "workers": 3}, **more))
    for kind in (StandInEngine, StandInEngine, Slow):
        cluster.join(kind)
    await cluster.job_until(job, done)
    page = await cluster.ask("jobs.ledger", job=job, after_step=0)
    assert {min(counts) > 0 for counts in counts_of(page)} == {True}


async def test_shares_of_a_round_follow_the_sizes_of_the_texts(cluster: Cluster) -> None:
    def built(windows: int) -> Any:
        def build(profile: Profile) -> StandInEngine:
            engine = StandInEngine(profile)
            engine.data.windows = windows
            return engine

        return build

    profile = small_profile(
        job={"strategy": "federated", "workers": 3}, batch={"micro_batches": 20}, federated={"most_share": 0.5}
    )
    job = await cluster.create(profile)
    for windows in (100, 400, 1500):
        cluster.join(built(windows))
    await cluster.job_until(job, done)
    page = await cluster.ask("jobs.ledger", job=job, after_step=0)
    assert {tuple(sorted(counts)) for counts in counts_of(page)} == {(2, 8, 10)}


async def test_no_text_leaves_a_member(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bytes] = []
    write = memory._MemoryTransport.write

    def recording(self: Any, data: Any) -> None:
        recorded.append(bytes(data))
        write(self, data)

    monkeypatch.setattr(memory._MemoryTransport, "write", recording)
    profile = load("tiny", {}, [*PRIVATE, "job.strategy=federated", "job.workers=3"]).profile
    job = await cluster.create(profile)
    random = np.random.default_rng(3)
    words = [["".join(map(chr, random.integers(97, 123, 10))) for _ in range(200)] for _ in range(3)]
    for number, own in enumerate(words):
        path = tmp_path / f"{number}.txt"
        path.write_text(" ".join(own * (number + 1)))
        cluster.join(own_text(path), strategies=strategy_of)
    await cluster.job_until(job, done)
    page = await cluster.ask("jobs.ledger", job=job, after_step=0)
    assert {tuple(sorted(counts)) for counts in counts_of(page)} == {(2, 4, 6)}
    sent = b"".join(recorded)
    assert len(sent) > 100_000
    private = {word.encode() for own in words for word in own}
    for width in (1, 4, 8):  # as text, and as numbers of its bytes
        for run in re.findall(rb"(?:[a-z]\0{%d}){10,}" % (width - 1), sent):
            letters = run[::width]
            assert private.isdisjoint(letters[at : at + 10] for at in range(len(letters) - 9))


async def test_why_private_text_is_refused_stays_at_its_worker(cluster: Cluster, tmp_path: Path) -> None:
    sets = [*PRIVATE, "job.strategy=federated", "data.format=csv", "job.workers=1"]
    job = await cluster.create(load("tiny", {}, sets).profile)
    path = tmp_path / "letters.csv"
    path.write_text("my PIN is 4711\n")
    peer = cluster.join(own_text(path), strategies=strategy_of)
    ended = await cluster.job_until(job, lambda item: item["state"] == "failed")
    assert "its data is private" in ended["reason"]
    assert any("4711" in text for _, _, text in peer.told)
    assert "4711" not in str(await cluster.ask("events.list", limit=100))


def test_a_worker_without_a_text_of_its_own_is_refused() -> None:
    profile = load("federated", {}, []).profile
    with pytest.raises(ConfigError, match="each worker has its own text"):
        with_data(profile, "")
    assert with_data(profile, "stdlib/email").data.path == "stdlib/email"
