"""What a job reads, sent from workers that have it to one that lacks it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import DiskFull, StorageError
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.compute_thread import ComputeThread
from roles.worker.context import PeerContext
from roles.worker.job_inputs import MOST_PAUSE_S, JobInputs
from wire.connection import Connection
from wire.handshake import local_welcome, serve
from wire.job_messages import RANGE_BYTES, MemberRecord
from wire.messages import Hello, Refuse, Welcome

JOB, PORT = "job1", 4000
pytestmark = pytest.mark.virtual_time


class SmallDisk(RealDisk):
    """Fails when it was written to ``left`` times more. Counts the bytes that were appended."""

    def __init__(self) -> None:
        self.left, self.appended_bytes, self.free = 1 << 30, 0, 1 << 40

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        if data:
            self.left -= 1
            if self.left < 0:
                raise StorageError(f"cannot write {path}")
            self.appended_bytes += len(data)
        super().append_file(path, data)

    def free_bytes(self, path: Path) -> int:
        return self.free


@dataclass
class Host:
    """One worker of the job, as far as its inputs go."""

    name: str
    network: MemoryNetwork
    directory: Path
    members: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    disk: SmallDisk = field(default_factory=SmallDisk)

    def __post_init__(self) -> None:
        world = World(LoopClock(), self.network.at(self.name), self.disk, random.Random(1), LoopThreads())
        peer = PeerContext(
            world, self.name, self.name, lambda: "seed", ComputeThread(LoopThreads()), lambda message: None
        )

        def note(level: str, kind: str, text: str) -> None:
            self.notices.append(f"{kind}: {text}")

        context: Any = SimpleNamespace(
            world=world,
            hello=peer.hello,
            dial=peer.dial,
            ask_members=self._ask,
            inputs_dir=lambda: self.directory / "kept",
            notify=note,
            notify_here=note,
        )
        self.inputs = JobInputs(context, JOB, self.directory)

    async def _ask(self) -> list[MemberRecord]:
        return [MemberRecord(name, name, name, PORT, 0, 0, True) for name in self.members]

    @asynccontextmanager
    async def serving(self, profile: Profile, store: Path | None = None) -> AsyncIterator[None]:
        self.inputs.serve_from(profile, store)
        network = self.network.at(self.name)
        server = await serve(
            network,
            "0.0.0.0",
            PORT,
            decide=self._decide,
            serve=self.inputs.serve,
            on_problem=lambda problem, _: self.notices.append(f"problem: {problem.message}"),
        )
        try:
            yield
        finally:
            await server.close()

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self.inputs.decide(hello) or local_welcome(peer_id=self.name, name=self.name, wall=0.0)


@pytest.fixture
def host(network: MemoryNetwork, tmp_path: Path) -> Callable[..., Host]:
    def make(name: str, *members: str) -> Host:
        (tmp_path / name).mkdir()
        return Host(name, network, tmp_path / name, list(members))

    return make


def model_of(directory: Path, size_bytes: int = 3 * RANGE_BYTES + 5) -> Profile:
    """A profile whose model is in ``directory``, as a sender has it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(random.Random(4).randbytes(size_bytes))
    (directory / "merges.txt").write_bytes(b"")
    (directory / "training.json").write_text("{}")  # model.keep_optimizer reads it
    (directory / "diary.txt").write_bytes(b"never sent")
    return profile_of(str(directory))


def profile_of(place: str, **data: Any) -> Profile:
    return Profile.model_validate({"model": {"path": place}, "data": data})


def files_in(place: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(place).iterdir()}


async def test_a_model_comes_from_two_workers_and_is_found_again(host: Callable[..., Host], tmp_path: Path) -> None:
    one, two, lacking = host("one"), host("two"), host("lacking", "one", "two", "away")
    theirs = model_of(tmp_path / "one" / "model")
    async with one.serving(theirs), two.serving(model_of(tmp_path / "two" / "model")):
        found = (await lacking.inputs.bring(profile_of("/nowhere/model"))).model.path
    wanted = files_in(theirs.model.path)
    del wanted["diary.txt"]
    assert files_in(found) == wanted
    assert [any(note.startswith("gave") for note in each.notices) for each in (one, two)] == [True, True]
    lacking.members.clear()  # nobody is asked again, also after a restart
    again = Host("lacking", lacking.network, lacking.directory)
    assert (await again.inputs.bring(profile_of("/nowhere/model"))).model.path == found


async def test_an_interrupted_fetch_goes_on(host: Callable[..., Host], tmp_path: Path) -> None:
    one, lacking = host("one"), host("lacking", "one")
    async with one.serving(model_of(tmp_path / "one" / "model")):
        lacking.disk.left = 3  # config.json and two ranges of the weights
        with pytest.raises(StorageError, match="cannot write") as caught:
            await lacking.inputs.bring(profile_of("/nowhere"))
        assert "XDG_CACHE_HOME" in caught.value.with_remedy
        (draft,) = (tmp_path / "lacking" / "kept").glob("*.part")
        with (draft / "model.safetensors").open("ab") as file:
            file.write(b"a torn range")
        lacking.disk.left, lacking.disk.appended_bytes = 1 << 30, 0
        found = (await lacking.inputs.bring(profile_of("/nowhere"))).model.path
    assert lacking.disk.appended_bytes == RANGE_BYTES + 5 + len("{}")
    assert files_in(found)["model.safetensors"] == (tmp_path / "one" / "model" / "model.safetensors").read_bytes()


async def test_a_fetch_keeps_to_its_rate(host: Callable[..., Host], tmp_path: Path) -> None:
    one, lacking = host("one"), host("lacking", "one")
    loop = asyncio.get_running_loop()
    async with one.serving(model_of(tmp_path / "one" / "model", 20 * RANGE_BYTES)):
        began = loop.time()
        asking = asyncio.create_task(lacking.inputs.bring(profile_of("/nowhere", share_mbps=8)))
        await asyncio.sleep(20)
        asking.cancel()
        await asyncio.sleep(1)
        assert one.notices[-1] == "gave: sent 20.0 MiB of model.path to lacking"
        began = loop.time()
        await lacking.inputs.bring(profile_of("/nowhere", share_mbps=8))
    assert 14 * RANGE_BYTES / 1e6 < loop.time() - began < 16 * RANGE_BYTES / 1e6


async def test_wrong_bytes_and_other_files_are_not_taken(host: Callable[..., Host], tmp_path: Path) -> None:
    """One worker's disk changes unnoticed, another one has a model of its own. The third one sends all."""
    names = ("damaged", "other", "right")
    damaged, other, right = map(host, names)
    lacking = host("lacking", *names)
    own = model_of(tmp_path / "other" / "model", 2 * RANGE_BYTES)
    theirs = [model_of(tmp_path / name / "model") for name in ("damaged", "right")]
    async with damaged.serving(theirs[0]), other.serving(own), right.serving(theirs[1]):
        await host("first", "damaged").inputs.bring(profile_of("/nowhere"))  # the sender has hashed its files
        weights = tmp_path / "damaged" / "model" / "model.safetensors"
        before = weights.stat()
        weights.write_bytes(bytes(before.st_size))
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = (await lacking.inputs.bring(profile_of("/nowhere"))).model.path
    assert files_in(found)["model.safetensors"] == (tmp_path / "right" / "model" / "model.safetensors").read_bytes()
    assert not any(note.startswith("gave") for note in other.notices)


async def test_a_worker_waits_until_another_one_has_it(host: Callable[..., Host], tmp_path: Path) -> None:
    late, lacking = host("late"), host("lacking", "late")
    bringing = asyncio.create_task(lacking.inputs.bring(profile_of("/nowhere")))
    await asyncio.sleep(3600)
    assert len(lacking.notices) == 16  # after 15, 30, 60, ... seconds, then every 300
    assert [note for note in lacking.notices if "'/nowhere' is not on this machine; waiting for another" in note]
    async with late.serving(model_of(tmp_path / "late" / "model")):
        await asyncio.sleep(10)
        assert (await bringing).model.path.startswith(str(tmp_path / "lacking" / "kept"))


async def test_a_file_is_named_by_a_setting(host: Callable[..., Host], tmp_path: Path) -> None:
    one, lacking = host("one"), host("lacking", "one")
    (tmp_path / "one" / "my.tok 1").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "one" / "other.json").write_text("not asked for")
    theirs = Profile.model_validate({"model": {"tokenizer": str(tmp_path / "one" / "my.tok 1")}})
    async with one.serving(theirs):
        brought = await lacking.inputs.bring(Profile.model_validate({"model": {"tokenizer": "far/my.tok 1"}}))
    place = Path(brought.model.tokenizer)
    assert (place.name, files_in(str(place.parent))) == ("my.tok 1", {"my.tok 1": b'{"model": {"vocab": {"a": 0}}}'})


async def test_a_file_that_is_no_tokenizer_is_not_sent(host: Callable[..., Host], tmp_path: Path) -> None:
    """A job may name any file of a worker's disk."""
    one = host("one")
    (tmp_path / "one" / "accounts.json").write_text('{"password": "1234"}')
    theirs = Profile.model_validate({"model": {"tokenizer": str(tmp_path / "one" / "accounts.json")}})
    async with one.serving(theirs):
        one.inputs._open("model.tokenizer")
        await asyncio.sleep(1)
        assert "cannot send model.tokenizer: cannot read the tokenizer" in str(one.inputs._open("model.tokenizer"))


async def test_a_sender_that_leaves_the_job_says_so(host: Callable[..., Host], tmp_path: Path) -> None:
    one, lacking = host("one"), host("lacking", "one")
    async with one.serving(model_of(tmp_path / "one" / "model", 20 * RANGE_BYTES)):
        asking = asyncio.create_task(lacking.inputs.bring(profile_of("/nowhere", share_mbps=8)))
        await asyncio.sleep(20)
        assert lacking.inputs.progress
        one.inputs.close()
        await asyncio.sleep(MOST_PAUSE_S)
        asking.cancel()
    assert not one.inputs._recipients
    assert "does not have model.path" in lacking.notices[-1]


async def test_two_processes_fetch_the_same_to_one_cache(host: Callable[..., Host], tmp_path: Path) -> None:
    """One of them publishes it between the other one's two looks at the cache."""
    one, first, second = host("one"), host("first", "one"), host("second", "one")
    second.directory = first.directory

    class LateDisk(SmallDisk):
        def try_lock(self, path: Path) -> Any:
            if not path.with_suffix("").exists():
                shutil.copytree(path.with_suffix(".part"), path.with_suffix(""))
            return super().try_lock(path)

    async with one.serving(model_of(tmp_path / "one" / "model")):
        first.disk.left = 3
        with pytest.raises(StorageError):
            await first.inputs.bring(profile_of("/nowhere"))
        second.inputs._disk = LateDisk()
        found = (await second.inputs.bring(profile_of("/nowhere"))).model.path
    assert Path(found).parent == tmp_path / "first" / "kept"


async def test_a_false_digest_of_an_empty_file_does_no_harm(
    host: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, lacking = host("one"), host("lacking", "one")
    (tmp_path / "one" / "merges.txt").touch()
    async with one.serving(profile_of(str(tmp_path / "one"))):
        monkeypatch.setattr("roles.model_directory.hash_ranges", lambda data: bytes(32))
        found = (await lacking.inputs.bring(profile_of("/nowhere"))).model.path
    assert files_in(found) == {"merges.txt": b""}


async def test_only_tokens_of_a_text_are_taken(host: Callable[..., Host], tmp_path: Path) -> None:
    one, lacking = host("one"), host("lacking", "one")
    store = tmp_path / "one" / "store"
    store.mkdir()
    for name in ("tokens.bin", "marks.bin", "store.json", "secret.txt"):
        (store / name).write_bytes(name.encode())
    text = Profile.model_validate({"data": {"path": "/nowhere"}})
    async with one.serving(text, store):
        found = (await lacking.inputs.bring(text)).data.path
    assert sorted(files_in(found)) == ["marks.bin", "store.json", "tokens.bin"]


async def test_a_full_disk_is_refused_before_anything_is_sent(host: Callable[..., Host], tmp_path: Path) -> None:
    one, lacking = host("one"), host("lacking", "one")
    lacking.disk.free = RANGE_BYTES
    async with one.serving(model_of(tmp_path / "one" / "model")):
        with pytest.raises(DiskFull, match="needs 12"):
            await lacking.inputs.bring(profile_of("/nowhere"))
    assert lacking.disk.appended_bytes == 0


@pytest.mark.parametrize("data", [{"share": False}, {"private": True}], ids=str)
async def test_what_is_not_shared_is_not_sent_nor_asked_for(host: Callable[..., Host], data: dict[str, Any]) -> None:
    one, lacking = host("one"), host("lacking", "one")
    profile = Profile.model_validate({"data": {"path": "/nowhere", **data}})
    async with one.serving(profile, Path("/store")):
        assert await lacking.inputs.bring(profile) == profile
        asking = asyncio.create_task(lacking.inputs.bring(Profile.model_validate({"data": {"path": "/nowhere"}})))
        await asyncio.sleep(10)
        asking.cancel()
    assert "does not send it" in lacking.notices[-1]
