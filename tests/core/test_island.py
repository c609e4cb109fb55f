"""The place of a process in an island, from the variables of torchrun and SLURM."""

from __future__ import annotations

import pytest

from p2ptrain.core.errors import UserError
from p2ptrain.core.island import IslandPlace, place_in

TORCHRUN = {
    "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "5",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1", "SLURM_JOB_ID": "110023",
}  # fmt: skip


def test_places() -> None:
    assert place_in(TORCHRUN) == IslandPlace(9, 16, 1, 8, "a", 5)
    assert place_in(SLURM) == IslandPlace(9, 16, 1, 8, "gpu07", 15_023)
    assert place_in(SLURM | {"SLURM_STEP_NODELIST": "n1,n2", "MASTER_PORT": "7"}) == IslandPlace(9, 16, 1, 8, "n1", 7)
    assert place_in(SLURM | TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}) == IslandPlace(0, 16, 0, 8, "a", 5)
    assert place_in({}) is None
    assert place_in({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None, "a worker in a batch script"


def test_what_a_leader_tells_its_processes_is_read_by_them() -> None:
    place = IslandPlace(0, 4, 0, 4, "127.0.0.1", 99)
    assert place_in(place.environment(3)) == IslandPlace(3, 4, 3, 4, "127.0.0.1", 99)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"RANK": "16"}, "RANK=16"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many', not a number"),
        ({"LOCAL_RANK": "8"}, "LOCAL_RANK=8"),
        ({"MASTER_ADDR": ""}, "not known"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999, not a port"),
    ],
)
def test_contradictions_are_told(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        place_in(TORCHRUN | changes)
