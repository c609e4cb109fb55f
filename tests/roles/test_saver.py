"""Who writes checkpoints: the helper process and its ends, and this process' thread."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from configs.schema import Profile
from p2ptrain.core.checkpoint_writer import SHARE
from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ResourceError, StorageError
from p2ptrain.core.threads import RealThreads
from p2ptrain.core.training import FilePlan
from roles.compute_thread import ComputeThread
from roles.stand_in import StandInEngine
from roles.worker.saver import DirectSaver, Saver, Shelf
from roles.worker.saver_process import HELPER, LOOK_S, ProcessSaver, is_starved
from roles.worker.snapshot import Snapshot, Snapshots

META = {"lineage": "0123456789abcdef" * 2, "square_sum": 0.5}
DEADLINE_S = 20.0


class Bench:
    """A saver, an engine, and what was told."""

    def __init__(self, root: Path, make: Callable[[Bench], Saver]) -> None:
        self.shelf = Shelf(root, 2)
        self.told: list[tuple[str, str, str]] = []
        self.disk = RealThreads().start("disk")
        self.compute = ComputeThread()
        self.saver = make(self)
        self.snapshots = Snapshots(self.compute, self.saver.allocate)
        self.engine = StandInEngine(Profile())
        self.engine.load_initial()

    def tell(self, *notice: str) -> None:
        self.told.append(notice)  # type: ignore[arg-type]

    async def take(self, step: int = 7) -> Snapshot:
        return await self.snapshots.take(self.engine, step=step, lineage=str(META["lineage"]), square_sum=0.5)

    async def save(self, step: int = 7, *, urgent: bool = False) -> CheckpointEntry:
        snapshot = await self.take(step)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self.saver.save(
                    snapshot, self.engine.checkpoint_files(step), self.shelf, META, urgent=urgent
                )
        finally:
            snapshot.release()

    async def close(self) -> None:
        await self.saver.close()
        self.disk.close()
        self.compute.close()


def process(bench: Bench) -> ProcessSaver:
    return ProcessSaver(bench.disk, RealDisk(), bench.tell)


def direct(bench: Bench) -> DirectSaver:
    return DirectSaver(bench.disk, RealDisk())


@pytest.fixture(params=[process, direct])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, request.param)
    yield made
    await made.close()


@pytest.fixture
async def with_helper(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, process)
    yield made
    await made.close()


def helper_of(bench: Bench) -> subprocess.Popen[bytes]:
    assert isinstance(bench.saver, ProcessSaver)
    assert bench.saver._helper is not None
    return bench.saver._helper.process


def no_damage(path: Path, why: str) -> None:
    raise AssertionError(f"{path}: {why}")


async def test_what_is_saved_is_the_state_and_can_be_loaded(bench: Bench) -> None:
    snapshot = await bench.take()
    plan, before = bench.engine.checkpoint_files(7), bench.engine.digest()
    bench.engine.state()[0].view[:4] = b"\1\2\3\4"  # training goes on
    entry = await bench.saver.save(snapshot, plan, bench.shelf, META, urgent=False)
    snapshot.release()
    assert CheckpointStore(RealDisk(), bench.shelf.root, 2).newest_good(no_damage) == entry
    assert entry.meta == META
    other = StandInEngine(Profile())
    other.load(entry.path)
    assert other.digest() == before != bench.engine.digest()


async def test_older_ones_are_pruned_and_the_same_step_is_replaced(bench: Bench) -> None:
    for step in (1, 2, 3, 3):
        await bench.save(step)
    assert sorted(path.name for path in bench.shelf.root.iterdir()) == ["step-00000002", "step-00000003"]


async def test_what_cannot_be_written_is_told_as_what_it_is(bench: Bench) -> None:
    bench.shelf.root.rmdir()
    bench.shelf.root.write_text("in the way")
    with pytest.raises(StorageError, match="cannot") as caught:
        await bench.save()
    assert caught.value.remedy
    assert bench.told == [], "the disk's fault, not the helper's"


async def test_a_helper_that_is_killed_costs_nothing_but_a_word(with_helper: Bench) -> None:
    bench = with_helper
    await bench.save(1)
    first = helper_of(bench)
    first.kill()
    entry = await bench.save(2)
    assert [(level, kind) for level, kind, _ in bench.told] == [("warning", "checkpoint-helper")]
    assert "SIGKILL" in bench.told[0][2]
    assert CheckpointStore(RealDisk(), bench.shelf.root, 2).newest_good(no_damage) == entry
    await bench.save(3)
    assert helper_of(bench).pid != first.pid
    assert len(bench.told) == 1


async def test_a_helper_that_cannot_start_is_told_of_and_done_without(tmp_path: Path) -> None:
    command = [str(tmp_path / "nothing")]
    bench = Bench(tmp_path / "root", lambda it: ProcessSaver(it.disk, RealDisk(), it.tell, command=command))
    assert (await bench.save()).step == 7
    assert "cannot be started (No such file" in bench.told[0][2]
    await bench.close()


async def test_a_helper_that_hangs_is_given_up(with_helper: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = with_helper
    good = await bench.save(1)
    helper_of(bench).send_signal(signal.SIGSTOP)
    monkeypatch.setattr("roles.worker.saver_process.SILENCE_S", 0.05)
    with pytest.raises(StorageError, match="were not written") as caught:
        await bench.save(2)
    assert "disk works" in caught.value.remedy
    assert CheckpointStore(RealDisk(), bench.shelf.root, 2).newest_good(no_damage) == good
    monkeypatch.undo()
    assert (await bench.save(3)).step == 3


async def test_closing_ends_a_save_that_hangs(with_helper: Bench) -> None:
    bench = with_helper
    await bench.save(1)
    process = helper_of(bench)
    process.send_signal(signal.SIGSTOP)
    saving = asyncio.create_task(bench.save(2))
    await asyncio.sleep(0)
    await bench.saver.close()
    with pytest.raises(StorageError):
        await saving
    assert process.returncode == -signal.SIGKILL


async def test_the_helper_is_light_urgent_to_nobody_and_deaf_to_ctrl_c(with_helper: Bench) -> None:
    bench = with_helper
    await bench.save(1)
    helper = helper_of(bench)
    assert os.getpgid(helper.pid) == helper.pid
    assert os.getsid(helper.pid) == os.getsid(0), "a session is scheduled as one, whatever the urgency of its processes"
    assert os.getpriority(os.PRIO_PROCESS, helper.pid) == 19
    if hasattr(os, "SCHED_IDLE"):
        assert os.sched_getscheduler(helper.pid) == os.SCHED_IDLE
    helper.send_signal(signal.SIGINT)
    await bench.save(2)
    assert helper_of(bench) is helper
    assert bench.told == []


async def test_who_waits_gets_a_helper_in_a_hurry(with_helper: Bench) -> None:
    bench = with_helper
    await bench.save(1)
    await bench.save(2, urgent=True)
    helper = helper_of(bench)
    assert os.getpriority(os.PRIO_PROCESS, helper.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    await bench.save(3)
    assert os.getpriority(os.PRIO_PROCESS, helper_of(bench).pid) == 19
    assert bench.told == [], "that is no failure"


async def test_a_helper_that_gets_no_time_is_done_without(with_helper: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = with_helper
    await bench.save(1)
    helper_of(bench).send_signal(signal.SIGSTOP)
    monkeypatch.setattr("roles.worker.saver_process.LOOK_S", 0.05)  # long before it would be given up as hanging
    monkeypatch.setattr("roles.worker.saver_process._Helper.starves", lambda self: True)
    entry = await bench.save(2)
    assert CheckpointStore(RealDisk(), bench.shelf.root, 2).newest_good(no_damage) == entry
    assert "got no time" in bench.told[0][2]


async def test_a_helper_that_gets_no_time_to_read_a_long_order_is_done_without(
    with_helper: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = with_helper
    await bench.save(1)
    helper_of(bench).send_signal(signal.SIGSTOP)
    monkeypatch.setattr("roles.worker.saver_process.SILENCE_S", 0.2)
    monkeypatch.setattr("roles.worker.saver_process._Helper.starves", lambda self: True)
    files = [*bench.engine.checkpoint_files(2), FilePlan("tokenizer.json", (bytes(2 << 20),))]
    monkeypatch.setattr(bench.engine, "checkpoint_files", lambda step: files)
    entry = await bench.save(2)
    assert CheckpointStore(RealDisk(), bench.shelf.root, 2).newest_good(no_damage) == entry
    assert "got no time" in bench.told[0][2]


def test_who_is_slow_by_its_own_choice_does_not_starve() -> None:
    assert not is_starved(SHARE * LOOK_S, LOOK_S)
    assert not is_starved(0.6 * SHARE * LOOK_S, LOOK_S)
    assert is_starved(0.007 * LOOK_S, LOOK_S), "what an idle process gets beside one that never rests"


_PARENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.roles.test_saver import Bench, process
async def main():
    bench = Bench(Path(sys.argv[1]), process)
    await bench.save(1)
    print(bench.saver._helper.process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_worker_takes_its_helper_and_the_memory_along(tmp_path: Path, stopped: bool) -> None:
    code = _PARENT.format(here=str(Path(__file__).parents[2]))
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        watch = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        worker.kill()
        worker.wait()
    if stopped:
        os.kill(pid, signal.SIGCONT)
    if watch >= 0:
        import select

        assert select.select([watch], [], [], DEADLINE_S)[0], "the helper is still there"
        os.close(watch)


def test_the_helper_loads_the_standard_library_only() -> None:
    code = HELPER[4].replace("main()", "print(*{name.partition('.')[0] for name in sys.modules})")
    loaded = subprocess.run([*HELPER[:4], code, HELPER[5]], capture_output=True, text=True, check=True).stdout.split()
    assert "p2ptrain" in loaded
    ours = {"p2ptrain", "__main__"}
    assert set(loaded) - set(sys.stdlib_module_names) - ours == set()
    assert not {"asyncio", "sqlite3", "ctypes", "multiprocessing"} & set(loaded)


async def test_there_are_two_snapshots_at_most_and_the_same_one_is_shared(bench: Bench) -> None:
    first = await bench.take(1)
    again = await bench.take(1)
    assert again is first
    second = await bench.take(2)
    with pytest.raises(ResourceError, match="still being read"):
        await bench.take(3)
    first.release()
    with pytest.raises(ResourceError):
        await bench.take(3)
    memory = first.memory
    again.release()
    third = await bench.take(3)
    assert third.memory is memory, "touched memory is used again"
    assert [blob.name for blob in third.blobs] == ["parameters", "momentum"]
    assert all(blob.view.readonly for blob in third.blobs)
    for snapshot in (second, third):
        snapshot.release()


async def test_a_snapshot_without_memory_is_refused(bench: Bench) -> None:
    def none(size_bytes: int) -> None:
        raise ResourceError("no memory")

    snapshots = Snapshots(bench.compute, none)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(ResourceError, match="no memory"):
            await snapshots.take(bench.engine, step=1, lineage="x", square_sum=0.0)
