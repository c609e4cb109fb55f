"""Copies of the state: two at most, shared by their readers, in memory that is used again."""

from __future__ import annotations

import pytest

from configs.schema import Profile
from p2ptrain.core.errors import ResourceError
from p2ptrain.lab.stand_in import StandInEngine
from roles.compute_thread import ComputeThread
from roles.snapshots import Snapshot, Snapshots


@pytest.fixture
def engine() -> StandInEngine:
    made = StandInEngine(Profile())
    made.state.load_initial()
    return made


async def test_there_are_two_at_most_and_the_same_one_is_shared(engine: StandInEngine) -> None:
    compute = ComputeThread()
    snapshots = Snapshots(compute)

    async def take(step: int) -> Snapshot:
        return await snapshots.take(engine, step=step, lineage="x", square_sum=0.5)

    first = await take(1)
    assert await take(1) is first
    second = await take(2)
    before = bytes(first.blobs[0].view)
    engine.state.blobs()[0].view[:4] = b"\1\2\3\4"  # training goes on
    with pytest.raises(ResourceError, match="still being written or sent"):
        await take(3)
    first.release()
    with pytest.raises(ResourceError):
        await take(3)
    assert bytes(first.blobs[0].view) == before
    memory = [blob.view.obj for blob in first.blobs]
    first.release()
    third = await take(3)
    assert [blob.view.obj for blob in third.blobs] == memory, "touched memory is used again"
    assert [bytes(blob.view) for blob in third.blobs] == [bytes(blob.view) for blob in engine.state.blobs()]
    assert [blob.name for blob in third.blobs] == ["parameters", "momentum"]
    assert all(blob.view.readonly for blob in third.blobs)
    for snapshot in (second, third):
        snapshot.release()
    compute.close()
