"""A writer that is killed in every call of a save, on a real disk; and disks that are really full."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.core.checkpoints import CheckpointStore
from p2ptrain.core.disk import RealDisk

ROOT = str(Path(__file__).parents[2])
KEEP = 2

# A process for each line: it saves a state, on a disk on which call number AT is cut short: by SIGKILL half-way, or by
# a full disk. It is forked, for starting Python takes ten times as long as the save. The answer is its exit code.
_WRITER = """
import json, os, signal, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from p2ptrain.core.checkpoints import CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ResourceError, StorageError
from p2ptrain.core.training import BlobRange, FilePlan

class Cut(RealDisk):
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

    def make_dir(self, path):
        self.cut()
        super().make_dir(path)

    def rename(self, source, target):
        self.cut()
        super().rename(source, target)

    def remove_tree(self, path):
        if path.is_dir():
            self.cut(lambda: [file.unlink() for file in sorted(path.iterdir())[:2]])
        super().remove_tree(path)

def save():
    state = memoryview(STEP.to_bytes(8, "little") * 400)
    files = [
        FilePlan("state.bin", (BlobRange("state", 0, len(state)),)),
        FilePlan("config.json", (b"{}", BlobRange("state", 0, 8))),
    ]
    try:
        CheckpointStore(Cut(), Path(PLACE), KEEP).write(STEP, files, {"state": state}, {"lineage": "0" * 32})
    except (ResourceError, StorageError):
        return 3
    return 0

for line in sys.stdin:
    AT, HOW, PLACE, STEP, KEEP = json.loads(line)
    if (child := os.fork()) == 0:
        os._exit(save())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Desk:
    """Saves each state in a process of its own, and logs the digest of whatever was begun. Used by ``with``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logged: dict[str, str] = {}  # the name of the checkpoint → SHA-256 of the state
        self._writers = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WRITER, ROOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self._writers.communicate(timeout=10)

    def save(self, step: int, at: int, how: str) -> bool:
        """Whether the save ended well, before call number ``at``."""
        state = step.to_bytes(8, "little") * 400
        # Named before, as a log is written before: what is durable when the writer dies may never be announced.
        self.logged[f"step-{step:08d}"] = hashlib.sha256(state).hexdigest()
        assert self._writers.stdin is not None
        assert self._writers.stdout is not None
        self._writers.stdin.write(json.dumps([at, how, str(self.root), step, KEEP]) + "\n")
        self._writers.stdin.flush()
        code = int(self._writers.stdout.readline())
        assert code in (0, 3, -9)
        return code == 0

    def restarted(self) -> None:
        """A restart finds a whole checkpoint, of a state that was logged."""
        entry = CheckpointStore(RealDisk(), self.root, KEEP).newest_good(_damaged)
        assert entry is not None
        assert entry.files["state.bin"][1] == self.logged[entry.path.name]
        assert all(path.name.startswith("step-") for path in self.root.iterdir())


def _damaged(path: Path, why: str) -> None:
    raise AssertionError(f"{path} is damaged: {why}")


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Desk]:
    with Desk(tmp_path / "checkpoints") as made:
        yield made


@pytest.mark.parametrize("how", ["before", "in part", "full"])
@pytest.mark.parametrize("again", [False, True])
def test_a_restart_after_any_cut_loads_what_was_logged(controller: Desk, how: str, again: bool) -> None:
    """``again``: the step's checkpoint is there already, and is replaced."""
    for step in (1, 2):
        assert controller.save(step, 0, how)
    cuts, at, step = 0, 1, 3
    while not controller.save(step, at, how):
        controller.restarted()
        cuts, at = cuts + 1, at + 1
        assert controller.save(step, 0, how), "the next save works"
        step += 0 if again else 1
    controller.restarted()
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
def test_a_disk_that_is_really_full_keeps_the_older_ones(small_disk: Path) -> None:
    failures = 0
    with Desk(small_disk / "checkpoints") as controller:
        assert controller.save(1, 0, "")
        for step in range(2, 6):
            failures += not controller.save(step, 0, "")
            controller.restarted()
    assert failures, "it was never full"
