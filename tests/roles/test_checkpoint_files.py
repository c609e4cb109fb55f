"""A worker's checkpoints of one job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from configs.schema import Profile
from p2ptrain.core.checkpoints import CheckpointEntry
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.threads import RealThreads
from p2ptrain.lab.stand_in import StandInEngine
from ring.token import first_lineage
from roles.compute_thread import ComputeThread
from roles.snapshots import Snapshots, state_digest
from roles.worker.checkpoint_store import CheckpointFiles

LINEAGE = "0123456789abcdef" * 2


class HoldingDisk(RealDisk):
    """Hangs in a write while it is told to."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.go.set()

    def hold(self) -> None:
        self.go.clear()

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 20), "nobody wrote"

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        if not self.go.is_set():
            self.reached.set()
            assert self.go.wait(20), "the test never let go"
        super().append_file(path, data)


class Desk:
    """A keeper with the threads that it needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.told: list[tuple[str, str, str]] = []
        self.disk, self.compute = RealThreads().start("disk"), ComputeThread()
        self.real = HoldingDisk()
        self.snapshots = Snapshots(self.compute)

    def keeper(self) -> CheckpointFiles:
        """As after a restart."""
        return CheckpointFiles(self.disk, self.real, self.root, 2, lambda *n: self.told.append(n))

    async def save(
        self, engine: StandInEngine, step: int, lineage: object = LINEAGE, by: CheckpointFiles | None = None
    ) -> CheckpointEntry:
        snapshot = await self.snapshots.take(engine, step=step, lineage=LINEAGE, square_sum=2.5)
        meta = {"lineage": lineage, "square_sum": 2.5}
        try:
            return await (by or self.keeper()).save(snapshot, engine.state.checkpoint_files(step), meta)  # type: ignore[arg-type]
        finally:
            snapshot.release()

    def load(
        self, engine: StandInEngine, restore_step: int = -1
    ) -> Awaitable[tuple[int, str, float, CheckpointEntry | None]]:
        return self.keeper().load(engine, self.compute, spec="spec", restore_step=restore_step)


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.disk.close()
    made.compute.close()


async def test_without_a_checkpoint_the_initial_state_and_its_own_bits_make_the_lineage(controller: Desk) -> None:
    engine = StandInEngine(Profile())
    applied, lineage, square_sum, entry = await controller.load(engine)
    assert (applied, square_sum, entry) == (0, 0.0, None)
    assert lineage == first_lineage("spec", state_digest(engine.state.blobs()))
    assert lineage != first_lineage("spec", b"other bits")


async def test_what_was_saved_is_loaded_with_its_lineage_and_norm(controller: Desk) -> None:
    engine, other = StandInEngine(Profile()), StandInEngine(Profile())
    engine.state.load_initial()
    await controller.save(engine, 7)
    applied, lineage, square_sum, entry = await controller.load(other)
    assert (applied, lineage, square_sum) == (7, LINEAGE, 2.5)
    assert entry is not None
    assert other.state.digest() == engine.state.digest()


@pytest.mark.parametrize("lineage", [None, "", "xyz", 5, "AB" * 16])
async def test_a_manifest_that_names_no_lineage_is_refused(controller: Desk, lineage: object) -> None:
    engine = StandInEngine(Profile())
    await controller.save(engine, 7, lineage)
    with pytest.raises(StorageError, match="has no valid lineage"):
        await controller.load(engine)


async def test_going_back_sets_the_newer_ones_aside(controller: Desk) -> None:
    engine = StandInEngine(Profile())
    for step in (5, 9):
        await controller.save(engine, step)
    applied, *_ = await controller.load(engine, restore_step=5)
    assert applied == 5
    assert [kind for _, kind, _ in controller.told] == ["checkpoint-superseded"]
    assert len(list(controller.root.glob("superseded-step-00000009-*"))) == 1


async def test_a_damaged_one_is_named_and_passed_over(controller: Desk) -> None:
    engine = StandInEngine(Profile())
    for step in (5, 9):
        entry = await controller.save(engine, step)
    _flip_bit(entry.path / "state.bin")
    applied, *_ = await controller.load(engine)
    assert applied == 5
    assert [(level, kind) for level, kind, _ in controller.told] == [("warning", "checkpoint-damaged")]


async def test_verify_finds_what_is_missing_and_what_is_damaged(controller: Desk) -> None:
    entry = await controller.save(StandInEngine(Profile()), 7)
    mine = controller.keeper()
    assert (await mine.verify(7)).digest == entry.digest
    with pytest.raises(UserError, match="no checkpoint of step 8"):
        await mine.verify(8)
    _flip_bit(entry.path / "state.bin")
    with pytest.raises(StorageError, match="differs"):
        await mine.verify(7)


async def test_what_was_verified_is_there_when_the_job_goes_back_to_it(controller: Desk) -> None:
    """Until its ring stands still it saves on, and each save prunes."""
    engine, mine = StandInEngine(Profile()), controller.keeper()
    for step in (5, 6):
        await controller.save(engine, step, by=mine)
    await mine.verify(5)
    with pytest.raises(UserError):
        await mine.verify(4)
    for step in (7, 8, 9):
        await controller.save(engine, step, by=mine)
    assert [entry.step for entry in await mine.entries()] == [9, 8, 5]
    applied, *_ = await mine.load(engine, controller.compute, spec="spec", restore_step=5)
    assert applied == 5
    for step in (6, 7):
        await controller.save(engine, step, by=mine)
    assert [entry.step for entry in await mine.entries()] == [7, 6], "it is like any other then"


async def test_going_back_waits_for_a_save_and_sets_it_aside(controller: Desk) -> None:
    """Else a run that goes back would find a checkpoint of the future that it left."""
    engine = StandInEngine(Profile())
    await controller.save(engine, 5)
    controller.real.hold()
    saving = asyncio.create_task(controller.save(engine, 9))
    await controller.real.wait()
    loading = asyncio.ensure_future(controller.load(engine, restore_step=5))
    await asyncio.sleep(0)  # it has begun
    controller.real.go.set()
    applied, *_ = await loading
    assert ((await saving).step, applied) == (9, 5)
    assert sorted(path.name[:16] for path in controller.root.iterdir()) == ["step-00000005", "superseded-step-"]


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
