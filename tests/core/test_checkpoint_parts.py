"""Parts of a split model's checkpoints, put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.core.checkpoint_parts import choose, gather, parts_below
from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import UserError
from p2ptrain.core.training import FilePlan

DISK = RealDisk()


def save(root: Path, stage: int, step: int, *, stages: int = 2, lineage: str = "", job: str = "j") -> CheckpointEntry:
    """A part as a worker saves it; the first stage's has what is not of one stage."""
    files = [FilePlan(f"model-{stage}.safetensors", (f"{stage} at {step}".encode() * 1000,))]
    files += [FilePlan("config.json", (b"{}",)), FilePlan("empty.txt", (b"",))] if stage == 0 else []
    store = CheckpointStore(DISK, root / f"worker-{stage}" / job / f"stage-{stage}" / "checkpoints", keep=9)
    meta = {"lineage": lineage or f"l{step}", "job": job, "stage": stage, "stages": stages, "val_loss": 1.5}
    return store.write(step, files, {}, meta)


def test_all_stages_files_make_one_checkpoint(tmp_path: Path) -> None:
    parts = [save(tmp_path / "run", stage, 7) for stage in (1, 0)]
    entry = gather(DISK, choose(parts_below(DISK, [tmp_path / "run"])), tmp_path / "model")
    assert entry.path == tmp_path / "model" / "step-00000007"
    assert {path.name: path.read_bytes() for path in entry.path.iterdir() if path.name != "manifest.json"} == {
        name: (part.path / name).read_bytes() for part in parts for name in part.files
    }
    assert entry.meta == {"lineage": "l7", "job": "j", "val_loss": 1.5}
    store = CheckpointStore(DISK, tmp_path / "model", keep=2)
    assert store.find(7) == entry
    assert parts_below(DISK, [tmp_path / "model"]) == [], "it is no part itself"


def test_the_newest_whole_step_of_the_job_that_is_meant(tmp_path: Path) -> None:
    for stage in (0, 1):
        save(tmp_path, stage, 10)
        save(tmp_path, stage, 20)
        save(tmp_path, stage, 90, job="other")
    save(tmp_path, 0, 30)
    save(tmp_path, 0, 40, lineage="one")
    save(tmp_path, 1, 40, lineage="another")
    parts = parts_below(DISK, [tmp_path])
    assert [(part.step, part.meta["stage"]) for part in choose(parts, job="j")] == [(20, 0), (20, 1)]
    assert [part.step for part in choose(parts, step=10)] == [10, 10]
    assert [part.step for part in choose(parts)] == [90, 90]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, stages=3)
    save(tmp_path, 2, 5, stages=3)
    with pytest.raises(UserError, match="of step 5 there are those of stage 0, 2 alone") as caught:
        choose(parts_below(DISK, [tmp_path]))
    assert "checkpoints list" in caught.value.remedy
    with pytest.raises(UserError, match="no stage's checkpoint of step 6 lies there"):
        choose(parts_below(DISK, [tmp_path]), step=6)
    assert parts_below(DISK, [tmp_path / "nowhere"]) == []


def test_a_part_that_is_not_good_is_taken_from_another_worker_or_of_an_older_step(tmp_path: Path) -> None:
    parts = [
        save(tmp_path / f"{copy}{stage}{step}", stage, step) for copy in "ab" for stage in (0, 1) for step in (4, 8)
    ]
    bad = {parts[1].path}

    def is_good(part: CheckpointEntry) -> bool:
        return part.path not in bad

    assert (parts[1].step, parts[1].meta["stage"]) == (8, 0)
    chosen = choose(parts, is_good=is_good)
    assert [(part.step, part.meta["stage"]) for part in chosen] == [(8, 0), (8, 1)]
    bad |= {part.path for part in parts if part.step == 8 and part.meta["stage"] == 0}
    assert {part.step for part in choose(parts, is_good=is_good)} == {4}
    with pytest.raises(UserError, match="of step 8 there are those of stage 1 alone"):
        choose(parts, step=8, is_good=is_good)
