"""Jobs whose model is split, with torch: the real seed, real workers and parts that train, against one process."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import Profile
from p2ptrain.compute.trainer import Trainer
from p2ptrain.lab.memory import MemoryNetwork
from ring import coordination as co
from roles.strategies import strategy_of
from roles.worker.build import engine_builder
from tests.compute.tiny_trainer import validate_all
from tests.roles.in_process import Cluster, Gate, Peer
from tests.roles.test_cluster import at, done

STEPS = 12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = np.random.default_rng(5).choice(["def", "ring", "peer", "seed", "x =", "1"], (1000, 9))
    path = tmp_path / "words.txt"
    path.write_text("\n".join(" ".join(row) for row in words.tolist()))
    return path


def profile_of(text: Path, stages: int, replicas: int, **tables: dict[str, Any]) -> Profile:
    base: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "workers": stages * replicas, "strategy": "pipeline"},
        "batch": {"micro_batches": 4, "micro_batch_sequences": 2},
        "data": {"path": str(text), "sequence_tokens": 16},
        "model": {"hidden_size": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 48, "context": 64},
        "optimizer": {"warmup_steps": 5, "clip_norm": 0.5},
        "validation": {"every": 6, "batches": 3},
        "checkpoint": {"every": 10, "copies": 1},
        "pipeline": {"stages": stages},
        "device": {"kind": "cpu"},
    }
    for name, values in tables.items():
        base[name] = base.get(name, {}) | values
    return Profile.model_validate(base)


def one_process(profile: Profile) -> tuple[list[float], dict[int, float], dict[str, Any]]:
    """The losses of ``Trainer``, which has the whole model, its validation losses by step, and its weights."""
    whole = profile.model_dump() | {"pipeline": {}, "job": profile.job.model_dump() | {"strategy": "sync"}}
    trainer = engine_builder(threads=1)(Profile.model_validate(whole))
    assert isinstance(trainer, Trainer)
    trainer.state.load_initial()
    losses, held_out = [], {}
    for step in range(profile.job.steps):
        trainer.begin_step(step)
        for index in range(profile.batch.micro_batches):
            trainer.micro_batch(step, index)
        trainer.finish_gradients()
        losses.append(trainer.apply(step, trainer.partial_square_sum(0, trainer.reduce_buffer.size)).loss)
        if (step + 1) % profile.validation.every == 0 or step + 1 == profile.job.steps:
            total, targets = validate_all(trainer)
            held_out[step + 1] = total / targets
    return losses, held_out, dict(trainer.built.flat.model.state_dict())


def join(cluster: Cluster, slot: int | None = None, **options: Any) -> Peer:
    return cluster.join(build_part=engine_builder(threads=1), strategies=strategy_of, slot=slot, **options)


def gated(gate: Gate) -> Any:
    """Builds stages and shards that wait at the gate before they read a micro-batch."""

    def build(profile: Profile, stage: Any) -> Any:
        engine: Any = engine_builder(threads=1)(profile, stage)
        read = engine.batches.training_batch

        def held(step: int, index: int) -> Any:
            gate.wait(step, index)
            return read(step, index)

        engine.batches.training_batch = held
        return engine

    return build


def state_of(peer: Peer) -> bytes:
    engine = peer.engines[-1]
    assert isinstance(engine, Trainer)
    return b"".join(bytes(blob.view) for blob in engine.state.blobs())


async def rows_of(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=200))["rows"]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return list(rows)


@pytest.mark.parametrize(
    ("stages", "replicas", "tables"),
    [
        (2, 2, {"pipeline": {"recompute": True}}),
        (3, 1, {"model": {"tie_embeddings": False}, "pipeline": {"cuts": [1, 2]}}),
    ],
)
async def test_a_split_model_learns_what_one_process_does(
    cluster: Cluster, text: Path, stages: int, replicas: int, tables: dict[str, Any]
) -> None:
    await learned_as_one_process(cluster, profile_of(text, stages, replicas, **tables))


async def learned_as_one_process(cluster: Cluster, profile: Profile) -> None:
    job = await cluster.create(profile)
    peers = [join(cluster) for _ in range(profile.job.workers)]
    await cluster.job_until(job, done)
    losses, held_out, weights = one_process(profile)
    rows = await rows_of(cluster, job)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
    assert {row["step"]: row["val_loss"] for row in rows if row["val_loss"] is not None} == pytest.approx(
        held_out, abs=1e-5
    )
    assert losses[-1] < losses[0] - 0.5
    assert len({state_of(peer) for peer in peers}) == profile.stages, "members of one part have the same bits"
    saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    whole = next(item for item in saved if item["stage"] is None and item["step"] == profile.job.steps)
    found = AutoModelForCausalLM.from_pretrained(whole["path"], use_safetensors=True).state_dict()
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=1e-4)


async def members_of(cluster: Cluster, job: str, item: dict[str, Any]) -> list[Peer]:
    """In order of ranks."""
    known = {peer.identity.peer_id: peer for peer in cluster.peers}
    return [known[peer_id] for peer_id in item["members"]]


async def ended_as_one_process(cluster: Cluster, job: str, profile: Profile) -> None:
    await cluster.job_until(job, done)
    losses, _, _ = one_process(profile)
    assert [row["loss"] for row in await rows_of(cluster, job)] == pytest.approx(losses, abs=1e-5)


async def test_a_spare_takes_a_lost_stage_out_of_the_whole_checkpoint_of_another(
    cluster: Cluster, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the lost one is gone with it."""
    monkeypatch.setattr(co, "GRACE_S", 1.0)  # nobody comes back
    profile, gate = profile_of(text, 2, 1, job={"steps": 22}), Gate(15)
    job = await cluster.create(profile)
    for _ in range(3):
        cluster.join(build_part=gated(gate), strategies=strategy_of)
    await cluster.whole(job, 10)
    item = await cluster.job_until(job, at(12))
    members = await members_of(cluster, job, item)
    gate.away()
    await members[1].die()
    shutil.rmtree(members[1].identity.directory)
    await ended_as_one_process(cluster, job, profile)
    spare = next(peer for peer in cluster.peers if peer not in members)
    assert [text for _, kind, text in spare.told if kind == "taken"] == [
        f"took the files of step 10 of part 1 of 2 from {members[0].identity.name}"
    ]


async def test_a_spoiled_gradient_of_the_tied_matrix_ends_the_job_with_the_reason(tmp_path: Path, text: Path) -> None:
    """It is the last stage's contribution, though the matrix counts in the first stage's part of the norm."""

    def spoiled(profile: Profile, stage: Any) -> Any:
        engine: Any = engine_builder(threads=1)(profile, stage)
        backward = engine.pipeline.backward

        def spoil(*arguments: Any) -> Any:
            engine.pipeline.tied_gradient()[:] = math.nan
            return backward(*arguments)

        if stage.index == stage.count - 1:
            engine.pipeline.backward = spoil
        return engine

    cluster = Cluster(tmp_path, MemoryNetwork())
    await cluster.start_seed()
    try:
        job = await cluster.create(profile_of(text, 2, 1))
        for _ in range(2):
            cluster.join(build_part=spoiled, strategies=strategy_of)
        failed = await cluster.job_until(job, lambda item: item["state"] == "failed")
        assert "not finite" in failed["reason"]
    finally:
        await cluster.close()
