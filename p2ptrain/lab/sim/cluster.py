"""A cluster of simulated machines: the real seed, the real workers, a person, and what faults can do to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import Profile
from p2ptrain.core.errors import NetworkError, P2PTrainError, StorageError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.attacker import add_attack
from p2ptrain.lab.audit import audit
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.sim.machine import ATTACKER, PROCESS, Buffer, MachineDisk, Process, SimEngine, SimLoop, SimThreads
from p2ptrain.lab.sim.observer import ObservedMachine, Observer
from p2ptrain.lab.sim.probe import Act, MachineProbe
from p2ptrain.lab.stand_in import strategy_of_stand_ins
from ring.job_member import MemberPhase
from ring.planning.workloads import ModelShape
from roles.engine import Engine, Stage
from roles.gauges import Gauges
from roles.member import MemberOptions, claim
from roles.seed.run import COPY_NAME, restore, serving_seed, write_copy
from roles.worker.worker import Worker
from wire.circuits import CircuitNetwork
from wire.client import SeedClient
from wire.messages import GpuInfo, Scalar

SEED, PERSON, LISTEN = "seed", "person", "127.0.0.1"
SEED_PORT = 7700
STATE, BACKUP = Path("/state"), Path("/backup")
SHAPE = ModelShape.of(ModelSizes((1 << 20,) * 4, (0,) * 4, 1 << 20, 1 << 20), 64, 64, 64)
"""Shape of the split model, as the creator of the job reports it."""
AGAIN_S = 3.0  # delay before a person restarts a program that ended with an error


class SimClock(LoopClock):
    """The loop's virtual time. The wall clock starts at a fixed date."""

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now()


class SimGauges(Gauges):
    def machine(self) -> dict[str, float]:
        return {"memory_bytes": 1e8, "memory_total_bytes": 1e10}

    def gpus(self) -> list[GpuInfo]:
        return []


class LinkDelays:
    """The delays of a simulated network.

    Attributes:
        latency_s: of most links, one way. slow: both ends of a link → its additional seconds.
    """

    def __init__(self, conditions: random.Random) -> None:
        self._conditions = conditions
        self.latency_s = conditions.choice((0.0003, 0.003, 0.03))
        self.slow: dict[frozenset[str], float] = {}

    def delay_s(self, source: str, target: str) -> float:
        base = self.latency_s * (0.5 + self._conditions.random())
        return base + self.slow.get(frozenset((source, target)), 0.0) if self.slow else base


class SimMachine(ObservedMachine):
    """A computer with a disk. At most one program of the cluster runs on it at a time.

    Attributes:
        call_s: mean virtual time of one call on its threads.
    """

    def __init__(self, simulation: Simulation, host: str, call_s: float) -> None:
        self._simulation, self.call_s = simulation, call_s
        super().__init__(host, self._new_disk(), Process(host))
        self.process.alive = False
        self.task: asyncio.Task[None] | None = None
        self.stop = asyncio.Event()
        self.worker: Worker | None = None

    @property
    def up(self) -> bool:
        return self.process.alive

    @property
    def phase(self) -> MemberPhase | None:
        return self.core.phase if self.core is not None and self.up else None

    @property
    def trained(self) -> bool:
        """Whether it has committed a step of its view, which is not the job's last, and others hold the same part."""
        core = self.core
        if not self.up or core is None or core.view is None or core.view.replicas == 1:
            return False
        return core.view.step < core.applied < core.steps_total

    @property
    def linked(self) -> bool:
        return self.worker is not None and self.worker._link.up

    @property
    def following(self) -> bool:
        """Whether its worker follows a ring that it is not in, or heals for that."""
        runner = self.worker._runner if self.worker is not None else None
        return runner is not None and runner.follower.active

    @property
    def left(self) -> str:
        view = self.core.view if self.core is not None else None
        rank = next((rank for rank, member in enumerate(view.members) if member.name == self.host), 0) if view else 0
        return view.left_of(rank).name if view else ""

    def start(self) -> None:
        self.process, self.stop = Process(self.host), asyncio.Event()
        self.worker = self.core = self.engine = None
        main = self._seed() if self.host == SEED else self._worker()
        self.task = self._simulation.loop.start(self.process, main)
        self.task.add_done_callback(self._ended)

    def kill(self) -> None:
        """End the process as by SIGKILL: the kernel resets every connection."""
        process = self.process
        if process.alive:
            self._simulation.loop.kill(process)
            self._simulation.network.crash(self.host)
            self._simulation.observer.history.kept = (0, set())
            self.worker = self.core = self.engine = None

    def power_cut(self) -> None:
        self.kill()
        self.disk.power_cut()

    def lose_disk(self) -> None:
        self.kill()
        self.disk.close()
        self.disk = self._new_disk()
        self.announced, self.wholes = {}, {}
        self._simulation.observer.checkpoints.forget(self.host)

    def restore(self, copy: bytes) -> None:
        self.lose_disk()
        write_copy(self.disk.view_for(Process(self.host)), BACKUP, copy)
        sound = [machine for machine in self._simulation.live if machine.left and not machine.misconduct.kind]
        self._simulation.observer.restored([machine.host for machine in sound])
        self.start()

    def _new_disk(self) -> MachineDisk:
        disk = MachineDisk(random.Random(self._simulation.random.getrandbits(64)))  # noqa: S311
        disk.killed = self.kill
        return disk

    def _ended(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if self.process.alive and task is self.task:
            self.process.alive = False
            self._simulation.network.crash(self.host)
            if problem is not None:
                self._simulation.unexpected(self, problem)

    def _world(self, circuits: CircuitNetwork) -> World:
        simulation, process = self._simulation, self.process
        rng = random.Random(simulation.random.getrandbits(64))  # noqa: S311
        probe = MachineProbe(simulation.observer, self, process, simulation.acts)
        return World(
            SimClock(),
            circuits,
            self.disk.view_for(process, probe.renames),
            rng,
            SimThreads(process, rng, self.call_s),
            rng.randbytes,
            probe,
        )

    async def _worker(self) -> None:
        simulation, joined = self._simulation, False

        def notify(level: str, kind: str, text: str) -> None:
            nonlocal joined
            joined = joined or kind == "joined"
            simulation.report_event(self, level, kind, text)

        circuits = CircuitNetwork(simulation.network.at(self.host))
        world = self._world(circuits)
        identity = claim(world.disk, STATE, role="worker", slot=1, name=self.host, fresh_id=world.new_id)
        while not self.stop.is_set():
            self.worker = Worker(
                world,
                identity,
                MemberOptions(
                    "worker", (SEED, SEED_PORT), (LISTEN, 0), ("", 0), simulation.capabilities, circuits=circuits
                ),
                build_engine=self._build,
                strategies=strategy_of_stand_ins,
                notify=notify,
            )
            self.worker.gauges = SimGauges(world.clock.now)
            try:
                await self.worker.run(self.stop)
            except P2PTrainError as problem:
                if joined:
                    raise
                simulation.report_event(self, "error", "not-joined", problem.message)
                await asyncio.sleep(AGAIN_S)
        identity.release()

    def _build(self, profile: Profile, stage: Stage) -> Engine:
        if stage.split:
            self._simulation.observer.cut(self.host, tuple(profile.pipeline.cuts))
        self.engine = engine = SimEngine(profile, self.disk.view_for(self.process), self._spoil, stage)
        if profile.job.strategy == "federated":
            engine.data.windows = 1000 * int(self.host[1:])
        attack = "sign-flip" if self.host == ATTACKER and profile.robust.rule not in ("", "mean") else ""
        return add_attack(engine, attack, micro_batches=profile.batch.micro_batches, seed=0)

    def _spoil(self, buffer: Buffer) -> None:
        """Spoil the next ``lies`` contributions. A lone member stops before its third lie: the job would rightly fail,
        because it cannot tell that member from bad data."""
        wrong = self.misconduct
        if wrong.lies:
            wrong.lies -= 1
            if not wrong.lies and wrong.has_lied and self._simulation.observer.history.alone(self.host):
                return
            wrong.has_lied = wrong.lies > 0
            huge = 1 << 40 if buffer.dtype.kind == "i" else 1e12
            if wrong.lie == "huge":
                buffer[:] = huge
                # A huge value is accepted while the others have seen too few steps, or were told to accept it.
                self._simulation.observer.members.believed_a_liar = True
            elif buffer.dtype.kind == "f":
                buffer[7] = float("nan")

    async def _seed(self) -> None:
        while not self.stop.is_set():
            try:
                circuits = CircuitNetwork(self._simulation.network.at(self.host))
                world = self._world(circuits)
                if COPY_NAME in world.disk.list_dir(BACKUP) and STATE / "seed.sqlite3" not in self.disk.databases:
                    restore(world.disk, BACKUP, STATE)
                place: dict[str, Any] = {"host": LISTEN, "port": SEED_PORT, "name": SEED}
                seed = serving_seed(world, state_dir=STATE, backup_dir=BACKUP, circuits=circuits, **place)
                async with seed:
                    await self.stop.wait()
            except StorageError as problem:
                self._simulation.report_event(self, "error", "seed-ended", problem.message)
                await asyncio.sleep(AGAIN_S)


class Simulation:
    """The machines, the network between them, and the person who owns the job. ``acts``: see ``MachineProbe``."""

    def __init__(
        self,
        loop: SimLoop,
        profile: Profile,
        expected: list[Any],
        number: int,
        *,
        peers: int,
        verbose: bool,
        acts: Mapping[str, Act] | None = None,
    ) -> None:
        self.loop, self.profile, self.number, self.acts = loop, profile, number, acts or {}
        self.random = random.Random(number)  # noqa: S311 - a replay must be possible
        self.links = LinkDelays(random.Random(number + 1))  # noqa: S311
        self.network = MemoryNetwork(delay_s=self.links.delay_s)
        self.observer = Observer(loop.time, expected, profile)
        self.observer.checkpoints.here = lambda: [machine for machine in self.live if machine.linked]
        self.machines: dict[str, SimMachine] = {}
        self.machines[SEED] = SimMachine(self, SEED, 0.002)
        for index in range(1, peers + 1):
            host = f"w{index}"
            self.machines[host] = SimMachine(self, host, 0.01 * self.random.choice((1, 1, 1, 2, 5)))
        if number % 4 == 3:  # two workers that nobody can dial: the others relay for them, and the seed
            self.network.closed |= {"w1", "w2"}
        self._verbose = verbose
        # Every fourth split model has known sizes and memory limits: the seed has its links measured, and cuts it by
        # them.
        self._is_placed = profile.stages > 1 and number % 4 == 1
        self.capabilities: dict[str, Scalar] = {"parts_memory_bytes": (1 << 40)} if self._is_placed else {}
        self.job = ""
        self.complaints: list[str] = []

    @property
    def seed(self) -> SimMachine:
        return self.machines[SEED]

    @property
    def least(self) -> int:
        """Workers without which the job may not end. In a split model each may have the only checkpoints of a part."""
        needed = (
            max(self.profile.job.workers, self.profile.robust.least) if self.profile.stages == 1 else len(self.workers)
        )
        return min(needed, len(self.workers))

    @property
    def workers(self) -> list[SimMachine]:
        return [machine for machine in self.machines.values() if machine is not self.seed]

    @property
    def live(self) -> list[SimMachine]:
        return [m for m in self.workers if m.up and not m.stop.is_set() and not m.process.frozen]

    def report_event(self, machine: SimMachine, level: str, kind: str, text: str) -> None:
        if self._verbose or level != "info":
            self.observer.report.tell(f"{machine.host}: {kind}: {text}")

    def unexpected(self, machine: SimMachine, problem: BaseException) -> None:
        self.complaints.append(f"{machine.host} ended: {problem!r}")
        self.observer.report.tell(f"{machine.host} ended: {problem!r}")

    def complaint(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler. Errors of a killed process do not count."""
        process = PROCESS.get()
        if process is None or process.alive:
            self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a person's request. Returns {} if it is refused or the seed cannot be reached."""
        try:
            client = await SeedClient.connect(self.network.at(PERSON), SEED, SEED_PORT, name=PERSON)
        except P2PTrainError:
            return {}
        try:
            return await client.request(method, params)
        except (NetworkError, P2PTrainError) as problem:
            self.observer.report.tell(f"{method}: {problem.message}")
            return {}
        finally:
            await client.close()

    async def create_job(self) -> None:
        while not self.job:
            more = {"shape": SHAPE.to_map()} if self._is_placed else {}
            created = await self.ask("jobs.create", name="sim", profile="sim", spec=self.profile.to_spec(), **more)
            self.job = str(created.get("job", ""))
            await asyncio.sleep(0.1)

    async def audit(self) -> None:
        """Check the job's record as a person does. Raises as ``p2ptrain.lab.audit.audit``."""
        client = await SeedClient.connect(self.network.at(PERSON), SEED, SEED_PORT, name=PERSON)
        try:
            self.observer.audited(await audit(client, self.job, self.profile, lambda step, of: None))
        finally:
            await client.close()

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
            machine.disk.close()
