"""A helper that is killed in every call of a save, on a real disk; and disks that are really full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from configs.schema import Profile
from p2ptrain.core.checkpoints import CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ResourceError, StorageError
from p2ptrain.core.threads import RealThreads
from roles.compute_thread import ComputeThread
from roles.stand_in import StandInEngine
from roles.worker.saver import Shelf
from roles.worker.saver_process import HelperLost, ProcessSaver
from roles.worker.snapshot import Snapshots

LINEAGE = "0123456789abcdef" * 2
ROOT = str(Path(__file__).parents[2])
KEEP = 2

# The helper with a disk on which call number ``at`` is cut short: by SIGKILL half-way, or by a full disk.
_HELPER = """
import os, shutil, signal, sys
sys.path.append(sys.argv[1])
from pathlib import Path
from p2ptrain.core import checkpoint_writer
from p2ptrain.core.errors import StorageError

AT, HOW = int(sys.argv[2]), sys.argv[3]

class Cut(checkpoint_writer.LeashedDisk):
    calls = 0

    def cut(self, half=lambda: None):
        Cut.calls += 1
        if Cut.calls != AT:
            return
        if HOW == "full":
            raise StorageError("No space left on device")
        if HOW == "in part":
            half()
        os.kill(os.getpid(), signal.SIGKILL)

    def write_file(self, path, data):
        self.cut(lambda: path.write_bytes(data[: len(data) // 2]))
        super().write_file(path, data)

    def append_file(self, path, data):
        self.cut(lambda: super(Cut, self).append_file(path, data[: len(data) // 2]))
        super().append_file(path, data)

    def sync_file(self, path):
        self.cut()
        super().sync_file(path)

    def sync_dir(self, path):
        self.cut()
        super().sync_dir(path)

    def make_dir(self, path, *, mode=0o755):
        self.cut()
        super().make_dir(path, mode=mode)

    def rename(self, source, target):
        self.cut()
        super().rename(source, target)

    def remove_tree(self, path):
        if path.is_dir():
            self.cut(lambda: [file.unlink() for file in sorted(path.iterdir())[:2]])
        super().remove_tree(path)

checkpoint_writer.LeashedDisk = Cut
checkpoint_writer.main()
"""


class Desk:
    """Saves a stand-in's state with a helper of its own each time, and logs the digest of whatever was announced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logged: dict[str, str] = {}  # the digest of the checkpoint → of the state
        self.disk, self.compute = RealThreads().start("disk"), ComputeThread()
        self.engine = StandInEngine(Profile())
        self.engine.load_initial()

    async def save(self, step: int, at: int, how: str) -> bool:
        """Whether the save ended before call number ``at``."""
        command = [sys.executable, "-I", "-S", "-c", _HELPER, ROOT, str(at), how]
        saver = ProcessSaver(self.disk, RealDisk(), lambda *notice: None, command=command)
        saver._direct.write = self._not_from_here  # type: ignore[method-assign]
        snapshots = Snapshots(self.compute, saver.allocate)
        self.engine.state()[0].view[:8] = step.to_bytes(8, "little")
        snapshot = await snapshots.take(self.engine, step=step, lineage=LINEAGE, square_sum=1.0)
        plan, meta = self.engine.checkpoint_files(step), {"lineage": LINEAGE, "square_sum": 1.0}
        # Named before, as a log is written before: what is durable when the helper dies may never be announced.
        self.logged[f"step-{step:08d}"] = self.engine.digest()
        try:
            await saver.save(snapshot, plan, Shelf(self.root, KEEP), meta, urgent=False)
        except StorageError:
            return False
        finally:
            snapshot.release()
            await saver.close()
        return True

    def _not_from_here(self, *_: object) -> None:
        raise HelperLost("it died, and this test wants to see what it left")

    def restarted(self) -> None:
        """A restart loads a whole checkpoint, of a state that was logged."""
        entry = CheckpointStore(RealDisk(), self.root, KEEP).newest_good(_damaged)
        assert entry is not None
        engine = StandInEngine(Profile())
        engine.load(entry.path)
        assert engine.digest() == self.logged[entry.path.name]
        assert all(path.name.startswith("step-") for path in self.root.iterdir())


def _damaged(path: Path, why: str) -> None:
    raise AssertionError(f"{path} is damaged: {why}")


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path / "checkpoints")
    yield made
    made.disk.close()
    made.compute.close()


@pytest.mark.parametrize("how", ["before", "in part", "full"])
@pytest.mark.parametrize("again", [False, True])
async def test_a_restart_after_any_cut_loads_what_was_logged(desk: Desk, how: str, again: bool) -> None:
    """``again``: the step's checkpoint is there already, and is replaced."""
    for step in (1, 2):
        assert await desk.save(step, 0, how)
    cuts, at, step = 0, 1, 3
    while not await desk.save(step, at, how):
        desk.restarted()
        cuts, at = cuts + 1, at + 1
        assert await desk.save(step, 0, how), "the next save works"
        step += 0 if again else 1
    desk.restarted()
    assert cuts >= 13, "it was cut in every call, up to the rename's flush"


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system in memory with the options given."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount")
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("small_disk", ["size=20k", "nr_inodes=9"], indirect=True)
async def test_a_disk_that_is_really_full_keeps_the_older_ones(small_disk: Path) -> None:
    desk = Desk(small_disk / "checkpoints")
    assert await desk.save(1, 0, "")
    failures = 0
    for step in range(2, 6):
        try:
            saved = await desk.save(step, 0, "")
        except ResourceError:
            saved = False
        failures += not saved
        desk.restarted()
    assert failures, "it was never full"
    desk.disk.close()
    desk.compute.close()
