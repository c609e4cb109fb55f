"""A training run: the real seed and workers, in this process; models are stand-ins, and nobody serves them."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.loader import load_settings
from configs.schema import Checkpoint, Optimizer, Profile
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.jobs import JobObserver
from p2ptrain.cluster.local_cluster import LocalCluster, PeerProcess, free_port
from p2ptrain.cluster.training_run import ServedPair, TrainingPlan, TrainingRun, check_whole, train
from p2ptrain.core.errors import JobFailed, StorageError, UserError
from p2ptrain.core.training import FilePlan
from p2ptrain.lab.stand_in import StandInEngine, StandInState
from roles.engine import Engine
from tests.cluster.doubles import Process
from tests.roles.in_process import Cluster
from wire.records import EventInfo, ServingInfo
from wire.transport import TcpNetwork

DRAFTER_STEPS, STEPS = 20, 200
PROFILE = Profile.model_validate(
    {
        "job": {"steps": STEPS, "workers": 1},
        "batch": {"micro_batches": 2},
        "checkpoint": {"every": 50},
        "drafter": {"layers": 1, "steps": DRAFTER_STEPS},
    }
)
DEADLINE_S = 30.0


@dataclass
class Machine:
    """Where a pair is started.

    Attributes:
        servers: the arguments and the process of each child that is to serve.
        told: what was said to be served.
    """

    root: Path
    port: int = field(default_factory=free_port)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    servers: dict[str, tuple[list[str], Process]] = field(default_factory=dict)
    build: Callable[[Profile], Engine] = StandInEngine
    cluster: Cluster | None = None
    started: int = 0
    workers: list[Process] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)

    async def start_seed(self, local: LocalCluster) -> PeerProcess:
        self.cluster = Cluster(local.root, TcpNetwork())
        await self.cluster.start_seed(local.port)
        local._seed = self._child("seed", Process(self.cluster.close))
        return local._seed

    async def start_peer(self, local: LocalCluster, name: str, slot: int, *options: str) -> PeerProcess:
        if name.startswith("worker"):
            assert self.cluster is not None
            self.started += 1
            peers, peer = self.cluster.peers, self.cluster.join(self.build, slot=slot)

            async def leave() -> None:
                peers.remove(peer)  # what it ends with is for `up`
                await peer.leave()

            process = Process(leave)
            self.workers.append(process)
        else:
            process = Process()
            self.servers[name] = (list(options), process)
        local.peers[name] = self._child(name, process)
        return local.peers[name]

    def tell(self, pair: ServedPair) -> None:
        self.told.append({"http": pair.http, **pair.models})
        self.serving.set()

    def _child(self, name: str, process: Any) -> PeerProcess:
        return PeerProcess(name, process, self.root / f"{name}.log", 0)

    async def up(
        self,
        *,
        new: bool = False,
        http: tuple[str, int] | None = None,
        api_keys: Path | None = None,
        profile: Profile = PROFILE,
        as_json: bool = True,
        console: Console | None = None,
    ) -> Any:
        """One ``p2ptrain up``, to its end."""
        self.stop, self.serving, self.servers, self.started = asyncio.Event(), asyncio.Event(), {}, 0
        plan = TrainingPlan("pair", profile, 1, new, "", http, api_keys)
        async with asyncio.timeout(DEADLINE_S):
            console = console or Console(quiet=as_json)
            return await train(plan, PlayedCluster(self), console, self.stop, self.tell)


class PlayedCluster(LocalCluster):
    """Its processes are played by ``machine``."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.root, machine.port)
        self._machine = machine

    async def start_seed(self) -> PeerProcess:
        return await self._machine.start_seed(self)

    async def start_peer(self, name: str, slot: int, *options: str, target: str = "") -> PeerProcess:
        return await self._machine.start_peer(self, name, slot, *options)

    async def wait_until_serving(self, roles: Any) -> dict[str, Any]:
        assert all(child.alive for child in self.peers.values()), "the end of one of them would be a failure"
        made = {
            role: ServingInfo(id=role, peer=role, name=role, role=role, host="", port=1, model="m")
            for role in ("verifier", "drafter")
        }
        return made | {"verifier": dataclasses.replace(made["verifier"], http="http://somewhere/v1")}


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path)
    yield made
    if made.cluster is not None:
        await made.cluster.close()


async def test_end_of_a_worker_is_named_while_the_others_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dying(LocalCluster):
        async def while_alive(self, work: Any, *, on_end: Callable[[PeerProcess], None], **more: Any) -> None:  # type: ignore[override]
            work.close()
            on_end(PeerProcess("worker-2", cast(Any, SimpleNamespace(returncode=-9)), tmp_path / "log", 0))

    plan = TrainingPlan("tiny", load_settings("tiny", {}), 2, False, "")
    run = TrainingRun(plan, Dying(tmp_path), Console(), lambda pair: None)
    run._observers = {"": JobObserver("job")}
    run.cluster._seed = cast(Any, object())
    await run.work()
    assert "worker-2 ended: it was killed by SIGKILL; the other workers go on" in capsys.readouterr().err


async def test_progress_of_builds_and_compilers_is_shown_on_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = TrainingPlan("tiny", load_settings("tiny", {}), 2, False, "")
    run = TrainingRun(plan, LocalCluster(tmp_path), Console(), lambda pair: None)
    run._report_news(EventInfo(1, 9.0, "info", "building", "tokenizing books: 15%"), began=5.0)
    run._report_news(EventInfo(2, 9.0, "info", "peer-joined", "worker-1 joined"), began=5.0)
    run._report_news(EventInfo(3, 9.0, "info", "compiling", "compiled the model's blocks"), began=5.0)
    shown = capsys.readouterr().err
    assert "tokenizing books: 15%" in shown
    assert "compiled the model's blocks" in shown
    assert "worker-1 joined" not in shown


async def served(machine: Machine, **options: Any) -> dict[str, Any]:
    """Start it, wait until it serves, and press Ctrl+C; what it said."""
    running = asyncio.create_task(machine.up(**options))
    await asyncio.sleep(0)  # it has cleared what was of the last one
    await asyncio.wait({running, asyncio.create_task(machine.serving.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    machine.stop.set()
    assert await running is None
    return machine.told.pop()


async def test_job_that_was_created_meanwhile_is_named_at_the_end(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    start = machine.start_peer

    async def start_peer(local: LocalCluster, *where: Any, **more: Any) -> PeerProcess:
        async with local.operator() as client:
            await client.tell_job(await client.create_job("later", "tiny", PROFILE.to_spec()), "pause")
        return await start(local, *where, **more)

    machine.start_peer = start_peer  # type: ignore[method-assign]
    assert (await machine.up(profile=PROFILE.alone(), as_json=False))["state"] == "done"
    told = capsys.readouterr().err
    assert "job later (" in told
    assert f"p2ptrain seed --state {machine.root}" in told


async def test_both_are_trained_then_served_and_the_next_start_serves_at_once(machine: Machine) -> None:
    key = machine.root / "api key"
    key.write_text("k" * 32)
    first = await served(machine, http=("127.0.0.1", 0), api_keys=key)
    assert machine.started == 1
    assert first["http"] == "http://somewhere/v1"
    assert (first["drafter"]["step"], first["verifier"]["step"]) == (DRAFTER_STEPS, STEPS)
    for role, (arguments, process) in machine.servers.items():
        assert arguments[arguments.index("--role") + 1] == role
        assert Path(arguments[arguments.index("--model") + 1]) == Path(first[role]["checkpoint"])
        http = ["--http", "127.0.0.1:0", "--api-key-file", str(key)]
        assert arguments[-4:] == http if role == "verifier" else "--http" not in arguments
        assert process.returncode == 0, "it was ended"
    second = await served(machine)
    assert machine.started == 0, "there is nothing to train"
    for role in ("drafter", "verifier"):
        assert second[role] == first[role]
    shutil.rmtree(first["drafter"]["checkpoint"])
    third = await served(machine)
    assert third["drafter"]["job"] != first["drafter"]["job"], "a model that is gone is trained again"
    assert third["verifier"]["job"] == first["verifier"]["job"]
    fourth = await served(machine, new=True)
    assert fourth["verifier"]["job"] != first["verifier"]["job"]


async def test_an_interrupted_one_goes_on_where_it_was(machine: Machine) -> None:
    loop = asyncio.get_running_loop()

    class Stopping(StandInEngine):
        """Presses Ctrl+C in the middle of the longer job."""

        def __init__(self, profile: Profile) -> None:
            super().__init__(profile)
            self._steps = profile.job.steps

        def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
            if (self._steps, step) == (STEPS, 60):
                assert machine.cluster is not None
                machine.workers[-1]._leave = machine.cluster.peers[-1].die  # as if it had no time to save
                loop.call_soon_threadsafe(machine.stop.set)
            return super().begin_step(step, first, count)

    machine.build = Stopping
    outcome = await machine.up()
    assert outcome["state"] == outcome["verifier"]["state"] == "interrupted"
    assert outcome["drafter"]["state"] == "done"
    assert 60 <= outcome["verifier"]["step"] < STEPS, "else the rest shows nothing"
    saved_at = int(outcome["verifier"]["checkpoint"].rpartition("-")[2])
    assert saved_at == outcome["verifier"]["step"], "what was done is saved"
    assert not machine.servers
    machine.build = StandInEngine
    with pytest.raises(UserError, match=r"unfinished job pair .* of other settings"):
        await machine.up(profile=PROFILE.model_copy(update={"optimizer": Optimizer(lr=0.5)}))
    last = await served(machine)
    assert last["verifier"]["job"] == outcome["verifier"]["job"]
    assert last["drafter"]["checkpoint"] == outcome["drafter"]["checkpoint"]


async def test_who_serves_and_ends_is_named_with_its_last_words(machine: Machine) -> None:
    running = asyncio.create_task(machine.up())
    await asyncio.sleep(0)
    await machine.serving.wait()
    machine.servers["drafter"][1].die(5)
    await asyncio.sleep(0)
    assert not running.done(), "the verifier goes on alone"
    (machine.root / "verifier.log").write_text("error: no memory\n  → buy some\n")
    machine.servers["verifier"][1].die(6)
    with pytest.raises(JobFailed, match="verifier ended: no memory") as caught:
        await running
    assert caught.value.remedy.startswith("buy some; its log is ")


async def test_one_model_is_trained_and_summed_up(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    profile = PROFILE.alone().model_copy(update={"optimizer": Optimizer(warmup_steps=1000)})
    outcome = await machine.up(profile=profile, as_json=False)
    assert (outcome["state"], outcome["step"], outcome["whole"]) == ("done", STEPS, True)
    assert not machine.servers
    said = capsys.readouterr().err
    assert "created job pair" in said
    assert "step 100/200  loss" in said
    assert "the learning rate ends at 20 % of optimizer.lr" in said
    again = await machine.up(profile=profile, as_json=False)
    assert again["job"] != outcome["job"], "one that is done is not taken up"
    done = rf"job pair \({again['job']}\) of these settings is done at step 200"
    said = capsys.readouterr().err
    assert f"({outcome['job']}) of these settings is done at step 200; a new one begins at step 0" in said
    longer = profile.model_copy(update={"job": profile.job.model_copy(update={"steps": 240})})
    more = await machine.up(profile=longer, as_json=False)
    assert (more["job"], more["step"]) == (again["job"], 240), "it goes on"
    assert f"({again['job']}) of these settings is done at step 200; it goes on to step 240" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"{done.replace('200', '240')}, more than job.steps = 200"):
        await machine.up(profile=profile)


async def test_a_result_that_cannot_be_saved_is_told_and_not_called_done(machine: Machine) -> None:
    class UnsavedState(StandInState):
        def checkpoint_files(self, step: int) -> list[FilePlan]:
            raise StorageError("no space on /x", remedy="free some")

    class Unsaved(StandInEngine):
        state_type = UnsavedState

    told: list[str] = []

    class Listening(Console):
        def event(self, level: str, text: str, wall: float | None = None) -> None:
            if "cannot end" in text:
                told.append(f"{level}: {text}")
                machine.stop.set()

    machine.build = Unsaved
    profile = PROFILE.alone().model_copy(update={"checkpoint": Checkpoint(every=0)})
    outcome = await machine.up(profile=profile, console=Listening())
    assert (outcome["state"], outcome["checkpoint"]) == ("not saved", None)
    assert f"the steps up to {STEPS} are lost" in outcome["reason"]
    assert told[0].startswith("warning: job pair is trained, but cannot end: the result, step 200, is not saved yet")
    assert "no space on /x; free some" in told[0]


async def test_a_worker_that_ends_alone_ends_it_with_its_last_words(machine: Machine) -> None:
    class Dying(StandInEngine):
        def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
            if step == 5:
                loop.call_soon_threadsafe(machine.workers[-1].die, 7)
            return super().begin_step(step, first, count)

    loop = asyncio.get_running_loop()
    machine.build = Dying
    (machine.root / "worker-1.log").write_text("error: no disk\n")
    with pytest.raises(JobFailed, match="worker-1 ended: no disk"):
        await machine.up(profile=PROFILE.alone())


async def test_only_what_happened_since_this_start_is_printed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    class Noted(StandInEngine):
        def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
            if step == 5 and machine.cluster is not None:
                note = machine.cluster.seeds[-1].announcements.note
                loop.call_soon_threadsafe(lambda: note("warning", "storage", "the disk is full"))
            return super().begin_step(step, first, count)

    loop = asyncio.get_running_loop()
    machine.build = Noted
    await machine.up(profile=PROFILE.alone(), as_json=False)
    assert capsys.readouterr().err.count("the disk is full") == 1
    machine.build = StandInEngine
    await machine.up(profile=PROFILE.alone(), new=True, as_json=False)
    assert "the disk is full" not in capsys.readouterr().err


async def test_a_model_that_is_not_whole_is_not_served() -> None:
    with pytest.raises(JobFailed, match="left no checkpoint of the whole model"):
        check_whole("verifier", {"job": "x", "checkpoint": "/there", "whole": False})


async def test_where_http_cannot_be_nothing_is_trained(machine: Machine) -> None:
    damaged = machine.root / "key"
    damaged.write_text("short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for http, keys, problem in (
            (taken.getsockname()[:2], None, "is in use"),
            (("0.0.0.0", 0), None, "needs an API key"),
            (("127.0.0.1", 0), damaged, "has no valid API key"),
            (("127.0.0.1", 0), machine.root / "none", "cannot read the API key"),
        ):
            with pytest.raises(UserError, match=problem):
                await machine.up(http=http, api_keys=keys)
    assert machine.cluster is None
