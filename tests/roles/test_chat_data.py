"""Jobs on conversations and on private text: losses and validation do not depend on who computes what."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from configs.loader import load
from configs.schema import Profile
from roles.engine import Engine
from roles.seed.jobs import assigned_spec
from roles.strategies import strategy_of
from roles.worker.build import engine_builder
from tests.compute.tiny_trainer import validate_all
from tests.roles.in_process import Cluster

STEPS = 6
SETS = [
    f"job.steps={STEPS}", "device.threads=1", "data.format=chat", "data.bad_rows=0.1", "data.sequence_tokens=128",
    "data.validation_fraction=0.3", "model.layers=2", "model.hidden_size=32", "model.intermediate_size=48",
    "validation.every=3", "validation.batches=3", "checkpoint.every=0", "batch.micro_batches=4",
    "batch.micro_batch_sequences=2",
]  # fmt: skip


def conversations(path: Path, count: int, letter: str = "a") -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": letter * (1 + number % 9)},
            ]
        }
        for number in range(count)
    ]
    path.write_text("\n".join([*map(json.dumps, rows), "not a row"]))
    return path


async def rows_of(cluster: Cluster, job: str) -> list[dict[str, float]]:
    await cluster.job_until(job, lambda item: item["state"] == "done")
    return list((await cluster.ask("metrics.history", job=job, after_step=0, limit=200))["rows"])


def test_a_job_on_conversations_keeps_the_date_of_its_creation() -> None:
    """In UTC, so that neither zones nor days change what a chat template prints."""
    created_at = datetime(2026, 3, 9, 23, 59, tzinfo=UTC).timestamp()

    def date_of(*sets: str) -> str:
        profile = load("tiny", {}, list(sets)).profile
        return Profile.from_spec_untrusted(assigned_spec(profile.to_spec(), [], created_at)).data.date

    assert date_of("data.format=chat") == "2026-03-09"
    assert date_of("data.format=chat", "data.date=2025-01-02") == "2025-01-02"
    assert date_of() == ""
    assert assigned_spec("of another release", [], created_at) == "of another release"


@pytest.mark.parametrize(("workers", "stages"), [(2, 0), (2, 2)])
async def test_conversations_give_the_losses_of_one_worker(
    cluster: Cluster, tmp_path: Path, workers: int, stages: int
) -> None:
    sets = [*SETS, f"data.path={conversations(tmp_path / 'x.jsonl', 120)}"]
    split = ["job.strategy=pipeline", f"pipeline.stages={stages}"] if stages else []
    found, dates = [], set[str]()

    def dated(profile: Profile) -> Engine:
        dates.add(profile.data.date)
        return engine_builder(threads=1)(profile)

    for more in (["job.workers=1"], [f"job.workers={workers}", *split]):
        profile = load("tiny", {}, [*sets, *more]).profile
        job = await cluster.create(profile)
        peers = [
            cluster.join(dated, strategies=strategy_of, build_part=engine_builder(threads=1))
            for _ in range(profile.job.workers)
        ]
        found.append(await rows_of(cluster, job))
        for peer in peers:
            await peer.hears("1 of 121 rows of the data are left out")
            await peer.leave()
    assert "" not in dates, "workers are given the date"
    assert len(dates) == 1
    alone, shared = found
    assert [row["members"] for row in shared] == [workers] * STEPS
    for one, many in zip(alone, shared, strict=True):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert many.get("val_loss") == pytest.approx(one.get("val_loss"), rel=1e-5)
    assert alone[-1]["val_loss"]


async def test_members_with_private_text_validate_on_their_own(cluster: Cluster, tmp_path: Path) -> None:
    profile = load("tiny", {}, [*SETS, "data.private=true", "data.path=own.jsonl", "job.workers=2"]).profile
    texts = [conversations(tmp_path / "a.jsonl", 40), conversations(tmp_path / "b.jsonl", 60, "é")]

    def builder(path: Path) -> Callable[[Profile], Engine]:
        build = engine_builder(threads=1)
        return lambda told: build(told.model_copy(update={"data": told.data.model_copy(update={"path": str(path)})}))

    job = await cluster.create(profile)
    peers = [cluster.join(builder(path), strategies=strategy_of) for path in texts]
    rows = await rows_of(cluster, job)
    assert [row["members"] for row in rows] == [2] * STEPS
    engines = [peer.engines[-1] for peer in peers]
    assert engines[0].batches.corpus.digest != engines[1].batches.corpus.digest
    parts = [validate_all(engine) for engine in engines]
    assert parts[0][1] != parts[1][1]
    mean = sum(losses for losses, _ in parts) / sum(targets for _, targets in parts)
    assert rows[-1]["val_loss"] == pytest.approx(mean, rel=1e-6)
