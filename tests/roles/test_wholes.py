"""Checkpoints of a split job: workers put the parts of all stages together, and stages take theirs out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.schema import Profile
from p2ptrain.core.checkpoint_parts import gather, parts_below
from p2ptrain.core.checkpoints import CheckpointStore, read_checkpoint
from p2ptrain.core.disk import RealDisk
from roles.in_process import Cluster, Peer


def profile_of(steps: int = 30, **tables: dict[str, Any]) -> Profile:
    base: dict[str, Any] = {
        "job": {"steps": steps, "workers": 2, "strategy": "pipeline"},
        "batch": {"micro_batches": 4},
        "validation": {"every": 0},
        "checkpoint": {"every": 10, "copies": 2},
        "pipeline": {"stages": 2},
    }
    for name, values in tables.items():
        base[name] = base.get(name, {}) | values
    return Profile.model_validate(base)


def done(item: dict[str, Any]) -> bool:
    return item["state"] == "done"


async def wholes_of(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    found = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    return [item for item in found if item["stage"] is None]


def said(peer: Peer, kind: str) -> list[str]:
    return [text for _, told, text in peer.told if told == kind]


async def test_when_a_job_is_done_every_keeper_has_the_whole_model(cluster: Cluster, tmp_path: Path) -> None:
    job = await cluster.create(profile_of())
    peers = [cluster.join() for _ in range(2)]
    await cluster.job_until(job, done)
    found = await wholes_of(cluster, job)
    assert {item["peer_id"] for item in found if item["step"] == 30} == {peer.identity.peer_id for peer in peers}
    assert all(item["id"].endswith("@whole") for item in found)
    parts = [part for part in parts_below(RealDisk(), [tmp_path]) if part.step == 30]
    assert len(parts) == 2
    expected = gather(RealDisk(), sorted(parts, key=lambda part: int(part.meta["stage"] or 0)), tmp_path / "gathered")
    for item in [item for item in found if item["step"] == 30]:
        entry = read_checkpoint(RealDisk(), Path(item["path"]))
        CheckpointStore(RealDisk(), entry.path.parent, 3).verify(entry)
        assert (entry.files, entry.meta, entry.digest) == (expected.files, expected.meta, expected.digest)
