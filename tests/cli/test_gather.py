"""``p2ptrain checkpoints gather``, and what ``generate`` says to a part of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2ptrain.core.checkpoints import CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.training import FilePlan

Command = Callable[..., Any]


def save(root: Path, stage: int, job: str = "j", step: int = 3) -> Path:
    """A part as a worker saves it."""
    store = CheckpointStore(RealDisk(), root / job / f"stage-{stage}-of-2" / "checkpoints", keep=2)
    files = [FilePlan("config.json", (b"{}",))] if stage == 0 else []
    files.append(FilePlan(f"model-{stage}.safetensors", (b"w",)))
    return store.write(step, files, {}, {"job": job, "lineage": "l", "stage": stage, "stages": 2}).path


def test_parts_become_one_model(command: Command, tmp_path: Path) -> None:
    for stage in (0, 1):
        save(tmp_path / f"worker-{stage}", stage)
        save(tmp_path / f"worker-{stage}", stage, "other", 9)
    gathered = command("checkpoints", "gather", str(tmp_path), "--job", "j", "--to", str(tmp_path / "one"), "--json")
    assert gathered.code == 0
    path = tmp_path / "one" / "step-00000003"
    assert json.loads(gathered.out) == {"path": str(path), "step": 3, "size_bytes": 4}
    assert sorted(item.name for item in path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model-0.safetensors",
        "model-1.safetensors",
    ]
    told = command("checkpoints", "gather", str(tmp_path), "--step", "9", "--to", str(tmp_path / "two"))
    assert "step 9 is whole in" in told.out


def test_a_part_alone_is_named(command: Command, tmp_path: Path) -> None:
    part = save(tmp_path, 0)
    alone = command("checkpoints", "gather", str(tmp_path), "--to", str(tmp_path / "one"))
    assert (alone.code, "of step 3 there are those of stage 0 alone" in alone.err) == (2, True)
    for place in (part, tmp_path):
        refused = command("generate", "x", "--checkpoint", str(place))
        assert refused.code == 2
        assert "holds only a part of a model (stage 0 of 2)" in refused.err
        assert "checkpoints gather" in refused.err
