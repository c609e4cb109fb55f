"""A whole cluster in one process: the real seed and real workers, over memory or TCP, with any engine.

For tests and simulations. Nothing here is simpler than the real thing but the engine, where the caller wants that.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.schema import Profile
from p2ptrain.core.disk import Disk, RealDisk
from p2ptrain.core.ids import new_id
from p2ptrain.core.threads import RealThreads, Thread
from p2ptrain.core.world import LoopClock, Network, Probe, World
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine, strategy_of_stand_ins
from roles.engine import Engine, Stage
from roles.member import Identity, MemberOptions, ServingMember, claim
from roles.seed.run import serving_seed
from roles.seed.server import Seed
from roles.strategies.strategy import Factory
from roles.worker.stages import Holding
from roles.worker.worker import Worker
from wire.address import Ticket, local_ticket_path
from wire.circuits import CircuitNetwork
from wire.client import SeedClient
from wire.enrol import RunMembership, enrol
from wire.messages import Scalar

DEADLINE_S = 30.0
HOST = "127.0.0.1"


def train_alone(engine: Engine, steps: int, micro_batches: int) -> list[float]:
    """Train in one process; the loss of every step."""
    engine.state.load_initial()
    losses: list[float] = []
    for step in range(steps):
        engine.begin_step(step)
        for index in range(micro_batches):
            engine.micro_batch(step, index)
        engine.finish_gradients()
        losses.append(engine.apply(step, engine.partial_square_sum(0, engine.reduce_buffer.size)).loss)
    return losses


@dataclass
class Peer:
    """A worker of the cluster, or a member of another role, and what it did."""

    identity: Identity
    stop: asyncio.Event
    task: asyncio.Task[None]
    engines: list[Engine]
    threads: ProcessThreads = field(default_factory=lambda: ProcessThreads())
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    told: list[tuple[str, str, str]] = field(default_factory=list)
    worker: Worker | None = None
    member: ServingMember | None = None
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def heard(self, level: str, kind: str, text: str) -> None:
        """What the worker tells the person."""
        self.told.append((level, kind, text))
        self.news.set()
        if kind == "joined":
            self.joined.set()

    async def hears(self, part: str) -> None:
        """Wait until the person is told a text with this part."""
        async with asyncio.timeout(DEADLINE_S):
            while not any(part in text for _, _, text in self.told):
                self.news.clear()
                await self.news.wait()

    @property
    def address(self) -> tuple[str, int]:
        """Where others dial it, once it has joined."""
        running = self.worker or self.member
        return HOST, running.port if running is not None else 0

    async def leave(self) -> None:
        self.stop.set()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self.task
        finally:
            self.identity.release()

    async def die(self) -> None:
        """End without a word, as a process that is killed: its sockets close, nothing else happens."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        for thread in self.threads.disk:
            await asyncio.to_thread(thread.join, DEADLINE_S)
        self.identity.release()


class ProcessThreads(RealThreads):
    """The threads of one worker. Those that write end with it, as they would with its process."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: list[threading.Thread] = []

    def start(self, name: str) -> Thread:
        before = set(threading.enumerate())
        thread = super().start(name)
        if name == "disk":
            self.disk += set(threading.enumerate()) - before
        return thread


class ScriptedProbe(Probe):
    """``acts``: name of an event → what takes its facts; name of a point → what takes its value and returns another."""

    def __init__(self, acts: Mapping[str, Callable[[Any], Any]] | None = None) -> None:
        self.acts = dict(acts or {})

    def event(self, name: str, **facts: Any) -> None:
        if name in self.acts:
            self.acts[name](facts)

    def alter(self, point: str, value: Any) -> Any:
        return self.acts[point](value) if point in self.acts else value


class Gate:
    """Stops the workers' computing at each of ``steps`` in turn, until the test lets them on."""

    def __init__(self, *steps: int) -> None:
        self._stops = [(step, threading.Event()) for step in steps]
        self._arrivals = {step: threading.Semaphore(0) for step in steps}

    def build(self, profile: Profile) -> StandInEngine:
        return StandInEngine(profile, on_micro_batch=self.wait)

    async def reached(self, step: int, engines: int = 1) -> None:
        """Wait until so many engines are stopped at ``step``."""
        for _ in range(engines):
            assert await asyncio.to_thread(self._arrivals[step].acquire, timeout=DEADLINE_S), "the step never came"

    def on(self) -> None:
        """Let them on, past the first step at which they are still stopped."""
        next(opened for _, opened in self._stops if not opened.is_set()).set()

    def away(self) -> None:
        for _, opened in self._stops:
            opened.set()

    def wait(self, step: int, _index: int) -> None:
        """Called by the engine, on its thread, before it computes a micro-batch."""
        for stop, opened in self._stops:
            if step >= stop and not opened.is_set():
                self._arrivals[stop].release()
                assert opened.wait(60), "the test never let them on"


class Cluster:
    """One seed and its workers. ``worlds`` differ only in their network.

    Args:
        encrypted: TLS over ``network``; workers and operators enrol with the tickets that the seed leaves beside it.
        host: where the seed is. Other than ``HOST``: over memory, with members at hosts of their own, and circuits.
        tracker_environ: as ``serving_seed``.
    """

    def __init__(
        self,
        root: Path,
        network: Network,
        *,
        encrypted: bool = False,
        tracker_environ: Mapping[str, str] | None = None,
        host: str = HOST,
    ) -> None:
        self.root, self.host = root, host
        self.tracker_environ = tracker_environ
        self.network = network
        self.disk: Disk = RealDisk()
        self.encrypted = encrypted
        self.tickets: list[Ticket] = []
        self.seeds: list[Seed] = []  # the last one runs
        self.peers: list[Peer] = []
        self.address = (host, 0)
        self._seed: asyncio.Task[None] | None = None
        self._operator: RunMembership | None = None
        self._seed_stop = asyncio.Event()

    def world(self, network: Network | None = None, probe: Probe | None = None) -> World:
        return World(LoopClock(), network or self.network, self.disk, random.Random(7), probe=probe or Probe())

    def ticket(self, role: str) -> Ticket:
        """What an encrypted seed has left for programs of its machine."""
        return Ticket.parse_untrusted(local_ticket_path(self.root, role).read_text())

    def circuits_at(self, host: str) -> CircuitNetwork | None:
        """The network of a machine; None where all are on one."""
        return (
            CircuitNetwork(self.network.at(host)) if isinstance(self.network, MemoryNetwork) and host != HOST else None
        )

    async def member(self, ticket: Ticket, peer_id: str = "", network: Network | None = None) -> RunMembership:
        """A peer that has just enrolled. Raises as ``wire.enrol.enrol``."""
        peer_id, network = peer_id or new_id(), network or self.network
        directory = self.root / "members" / peer_id
        made = await enrol(network, ticket, peer_id=peer_id, directory=directory, disk=RealDisk(), timeout_s=DEADLINE_S)
        return RunMembership(network, made, RealDisk(), LoopClock())

    async def start_seed(self, port: int = 0) -> None:
        ready: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._seed_stop = asyncio.Event()

        async def serve(stop: asyncio.Event) -> None:
            circuits = self.circuits_at(self.host)
            seed = serving_seed(
                self.world(circuits),
                state_dir=self.root / "seed",
                host=self.host,
                circuits=circuits,
                port=port,
                name="test",
                ticket_host=self.host if self.encrypted else "",
                tracker_environ=self.tracker_environ,
            )
            async with seed as listening:
                self.seeds.append(listening.seed)
                self.tickets += [listening.ticket] if listening.ticket else []
                ready.set_result(listening.address)
                await stop.wait()

        self._seed = asyncio.create_task(serve(self._seed_stop))
        futures: set[asyncio.Future[Any]] = {self._seed, ready}
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._seed
        self.address = ready.result()

    async def stop_seed(self) -> None:
        assert self._seed is not None
        self._seed_stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await self._seed

    async def restart_seed(self) -> None:
        await self.stop_seed()
        await self.start_seed(self.address[1])

    def join(
        self,
        build: Callable[[Profile], Engine] = StandInEngine,
        *,
        slot: int | None = None,
        probe: Probe | None = None,
        host: str = HOST,
        holding: Holding | None = None,
        build_part: Callable[[Profile, Stage], Engine] = lambda profile, stage: StandInEngine(profile, stage=stage),
        strategies: Callable[[Profile], Factory] = strategy_of_stand_ins,
    ) -> Peer:
        """Start a worker. ``holding``: for parts of split models, as ``tests.roles.stage_stand_in.StandIns`` has it."""
        said: dict[str, Scalar] = {"device": "test"}
        if holding is not None:
            said["parts_memory_bytes"] = holding.limit_bytes
        identity = claim(RealDisk(), self.root, role="worker", slot=slot, name="")
        engines: list[Engine] = []

        def build_and_keep(profile: Profile, stage: Stage) -> Engine:
            engines.append(build_part(profile, stage) if stage.split else build(profile))
            return engines[-1]

        circuits = self.circuits_at(host)

        async def work() -> None:
            member = await self.member(self.ticket("worker"), identity.peer_id, circuits) if self.encrypted else None
            world = self.world(member.network if member else circuits, probe)
            if isinstance(world.threads, RealThreads):  # else they take virtual time
                world = replace(world, threads=peer.threads)
            peer.worker = worker = Worker(
                world,
                identity,
                MemberOptions("worker", self.address, (host, 0), ("", 0), said, circuits=circuits),
                build_engine=build_and_keep,
                notify=lambda *notice: peer.heard(*notice),
                on_step=lambda applied, total, values: peer.steps.__setitem__(applied, values),
                membership=member,
                holding=holding,
                strategies=strategies,
            )
            await worker.run(stop)

        stop = asyncio.Event()
        peer = Peer(identity, stop, asyncio.create_task(work()), engines)
        self.peers.append(peer)
        return peer

    def serve(
        self,
        role: str,
        program: Callable[[ServingMember], Awaitable[None]],
        *,
        slot: int | None = None,
        network: Network | None = None,
        host: str = HOST,
    ) -> Peer:
        """Start a verifier or a drafter that runs ``program``. ``network``: to begin with, of one that is elsewhere."""
        circuits = self.circuits_at(host)
        identity = claim(RealDisk(), self.root, role=role, slot=slot, name="")

        async def attend() -> None:
            base = network or circuits or self.network
            membership = await self.member(self.ticket(role), identity.peer_id, base) if self.encrypted else None
            peer.member = member = ServingMember(
                self.world(membership.network if membership else base),
                identity,
                MemberOptions(role, self.address, (host, 0), ("", 0), {"device": "test"}, circuits=circuits),
                program=program,
                notify=lambda *notice: peer.heard(*notice),
                membership=membership,
            )
            await member.run(stop)

        stop = asyncio.Event()
        peer = Peer(identity, stop, asyncio.create_task(attend()), [])
        self.peers.append(peer)
        return peer

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[SeedClient]:
        network, peer_id = self.network, ""
        if self.encrypted:
            self._operator = self._operator or await self.member(self.ticket("operator"))
            network, peer_id = self._operator.network, self._operator.peer_id
        client = await SeedClient.connect(network, *self.address, name="test", peer_id=peer_id)
        try:
            yield client
        finally:
            await client.close()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        async with self.operator() as client:
            return await client.request(method, params)

    async def create(self, profile: Profile, name: str = "test", **more: Any) -> str:
        created = await self.ask("jobs.create", name=name, profile=name, spec=profile.to_spec(), **more)
        return str(created["job"])

    async def job_until(self, job: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The job's record as soon as it fits. Fails as ``_until``."""
        last: dict[str, Any] = {}

        def heard(topic: str, items: list[dict[str, Any]]) -> bool:
            nonlocal last
            for item in items:
                if topic == "jobs" and item["id"] == job:
                    last = item
                    if fits(item):
                        return True
            return False

        try:
            await self._until(job, heard)
        except TimeoutError:
            told = {peer.identity.name: peer.told[-12:] for peer in self.peers}
            raise AssertionError(f"the job never got there: {last}; {told}") from None
        return last

    async def saved(self, job: str, step: int, writers: int) -> None:
        """Wait until so many peers have told of a checkpoint of ``step`` or later: they keep the newest only."""
        await self._until(job, self._told_by(job, writers, lambda item: item["step"] >= step))

    async def whole(self, job: str, step: int, keepers: int = 1) -> None:
        """The same of checkpoints of the whole model, of a split job."""
        await self._until(job, self._told_by(job, keepers, lambda item: item["stage"] is None and item["step"] >= step))

    async def knows(self, checkpoints: set[str]) -> None:
        """Wait until the seed knows the checkpoints with these ids."""
        missing = set(checkpoints)

        def heard(topic: str, items: list[dict[str, Any]]) -> bool:
            missing.difference_update(item["id"] for item in items if topic == "checkpoints")
            return not missing

        await self._until("", heard)

    @staticmethod
    def _told_by(
        job: str, peers: int, fits: Callable[[dict[str, Any]], bool]
    ) -> Callable[[str, list[dict[str, Any]]], bool]:
        there: set[str] = set()

        def heard(topic: str, items: list[dict[str, Any]]) -> bool:
            if topic == "checkpoints":
                there.update(item["peer_id"] for item in items if item["job"] == job and fits(item))
            return len(there) >= peers

        return heard

    async def _until(self, job: str, heard: Callable[[str, list[dict[str, Any]]], bool]) -> None:
        """Until ``heard`` says so of an update of the seed's, a topic and its items.

        Raises:
            TimeoutError: meanwhile the job came to no new step for ``DEADLINE_S``. A busy machine may take longer than
                that for all of a job, so it is no measure of one.
        """
        clock, step = asyncio.get_running_loop().time, -1
        async with asyncio.timeout(DEADLINE_S) as patience, self.operator() as client:
            await client.request("subscribe")
            async for update in client.updates():
                items = list(update.items)
                if heard(update.topic, items):
                    return
                newest = max(
                    (item["step"] for item in items if update.topic == "jobs" and item["id"] == job), default=-1
                )
                if newest > step:
                    step = newest
                    patience.reschedule(clock() + DEADLINE_S)
        raise AssertionError("the updates ended")

    async def close(self) -> None:
        for peer in self.peers:
            if not peer.task.done():
                peer.stop.set()
        results = await asyncio.gather(*(peer.task for peer in self.peers), return_exceptions=True)
        for peer in self.peers:
            peer.identity.release()
        if self._seed is not None and not self._seed.done():
            await self.stop_seed()
        unexpected = [item for item in results if item is not None and not isinstance(item, asyncio.CancelledError)]
        assert not unexpected, unexpected
