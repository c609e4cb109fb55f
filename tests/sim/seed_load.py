"""What members cost their seed, by their number: ``python -m tests.sim.seed_load 16 64 256 1000``.

The real seed with its database, on virtual time. The members are stubs: they have the link of real members, and say
what members say, but compute nothing. The seed's share is measured: the CPU time of the callbacks of its process, and
the bytes that members send and receive.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.schema import Profile
from p2ptrain.core.world import World
from p2ptrain.lab.sim.cluster import LISTEN, SEED, SEED_PORT, SimClock, Simulation
from p2ptrain.lab.sim.machine import PROCESS, Process, SimLoop, SimThreads
from roles.seed.links import CAPABILITY
from roles.seed_link import KnownSeeds, SeedLink
from wire.client import SeedClient
from wire.connection import Connection
from wire.handshake import local_hello, local_welcome, serve
from wire.job_messages import Assign, Hold, LedgerRow, LedgerRows, Report, StepMetrics, ViewAnnounced
from wire.messages import Heartbeat, Hello, Message, Request, Response, Welcome

STEP_S = 10.0
LINEAGE = "0" * 32


class MeasuredLoop(SimLoop):
    """Adds up the CPU time of the callbacks of the seed's process."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s = self.longest_s = 0.0

    def run_handle(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None or process.host != SEED:
            super().run_handle(handle)
            return
        began = time.process_time()
        super().run_handle(handle)
        took_s = time.process_time() - began
        self.cpu_s += took_s
        self.longest_s = max(self.longest_s, took_s)


class StubMember:
    """A worker that says what workers say."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.host, self.process = f"w{number}", Process(f"w{number}")
        self._id = random.Random(number).randbytes(8).hex()
        rng = random.Random(number)
        network = simulation.network.at(self.host)
        threads = SimThreads(self.process, rng, 0.01)
        self._world = World(SimClock(), network, simulation.seed.disk.view_for(self.process), rng, threads)
        self._port = 0
        self.view: ViewAnnounced | None = None
        self.job, self.applied = "", 0
        self._connections: list[Connection] = []
        self.link = SeedLink(
            world=self._world,
            seeds=KnownSeeds([(SEED, SEED_PORT)], {}, lambda: None),
            retry_time_s=lambda problem: 600.0,
            hello=self._hello,
            pulse=lambda: Heartbeat(0, self.applied, 0, "training" if self.view else "idle", {"memory_bytes": 7e9}),
            on_message=self._take,
            on_up=self._up,
            on_down=lambda problem: None,
        )

    @property
    def moved_bytes(self) -> int:
        return sum(connection.bytes_in + connection.bytes_out for connection in self._connections)

    async def run(self) -> None:
        async def decide(hello: Hello, connection: Connection) -> Welcome:
            return local_welcome(peer_id=self._id, name=self.host, wall=0.0)

        async def hang_up(connection: Connection, hello: Hello) -> None: ...

        network = self._world.network
        server = await serve(network, LISTEN, 0, decide=decide, serve=hang_up, on_problem=lambda problem, address: None)
        self._port = server.address[1]
        await self.link.run()

    def _hello(self) -> Hello:
        generation = self.view.generation if self.view else 0
        return local_hello(
            peer_id=self._id,
            name=self.host,
            roles=("worker",),
            purpose="peer",
            job=self.job,
            generation=generation,
            port=self._port,
            capabilities={"device": "cpu", CAPABILITY: True},
        )

    def _up(self, welcome: Welcome) -> None:
        assert self.link._connection is not None
        self._connections.append(self.link._connection)
        if self.view is not None:
            self._report("training")

    def _report(self, status: str, generation: int | None = None, **more: Any) -> None:
        if generation is None:
            generation = self.view.generation if self.view else 0
        applied = self.applied
        more = {"corpus": "c0ffee", "reduce_bytes": 500 << 20, **more}
        self.link.send(Report(self.job, generation, status, applied, applied, LINEAGE, **more))

    def _take(self, message: Message) -> None:
        match message:
            case Assign():
                self.job = message.job
                self._report("ready", 0)
            case ViewAnnounced():
                self.view = message
            case Hold():
                self._report("held")
            case Request("links.measure"):
                links = [
                    {"peer": peer["peer"], "latency_s": 0.02, "bandwidth_bps": 1e8} for peer in message.params["peers"]
                ]
                self.link.send(Response(message.id, {"links": links}))

    def break_off(self) -> None:
        self._report("broken", suspect="", reason="a neighbour was lost")

    def commit(self) -> None:
        """Report a step, as the first member of a view does."""
        view = self.view
        assert view is not None
        self.applied += 1
        counts = b"".join(member.count.to_bytes(4) for member in view.members)
        row = LedgerRow(self.applied, view.generation, bytes(16), counts)
        self.link.send(LedgerRows(self.job, LINEAGE, [row]))
        self.link.send(StepMetrics(self.job, view.generation, self.applied, {"loss": 2.0, "step_ms": STEP_S * 1e3}))

    @property
    def leads(self) -> bool:
        return self.view is not None and self.view.members[0].peer_id == self._id


@dataclass(frozen=True, slots=True)
class SeedCost:
    """Of a stretch of time: virtual seconds, and the seed's CPU seconds, longest callback and bytes moved."""

    title: str
    took_s: float
    cpu_s: float
    longest_s: float
    moved_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.title:<28} {self.took_s:7.1f} s   CPU {self.cpu_s:7.2f} s, at most {self.longest_s * 1e3:6.0f} ms "
            f"at a time   {self.moved_bytes / 1e6:8.1f} MB moved"
        )


class Crowd:
    def __init__(self, count: int) -> None:
        self.loop = MeasuredLoop()
        tables = {"job": {"steps": 1000, "workers": count}, "batch": {"micro_batches": count}}
        self.simulation = Simulation(self.loop, Profile.model_validate(tables), [], 1, peers=0, verbose=False)
        self.simulation.network.delay_s = None
        self.members = [StubMember(self.simulation, number) for number in range(1, count + 1)]
        self.all = list(self.members)  # also the lost one
        self.viewers: list[Connection] = []

    async def run(self, tell: Callable[[SeedCost], None], *, minutes: bool = True) -> None:
        simulation = self.simulation
        simulation.seed.start()
        await simulation.create_job()
        tell(await self._measured("join storm", self._join))
        if minutes:
            tell(await self._measured("steady minute", self._minute))
            watching = asyncio.create_task(self._watch())
            tell(await self._measured("minute with a viewer", self._minute))
            watching.cancel()
        tell(await self._measured("a member is lost", self._lose_one))
        tell(await self._measured("the seed restarts", self._restart))
        simulation.close()
        for member in self.members:
            self.loop.kill(member.process)
        await asyncio.sleep(1)

    async def _measured(self, title: str, work: Callable[[], Any]) -> SeedCost:
        loop = self.loop
        began, cpu_s, moved = loop.time(), loop.cpu_s, self._moved()
        loop.longest_s = 0.0
        await work()
        took_s = loop.time() - began
        return SeedCost(title, took_s, loop.cpu_s - cpu_s, loop.longest_s, self._moved() - moved)

    def _moved(self) -> int:
        viewed = sum(connection.bytes_in + connection.bytes_out for connection in self.viewers)
        return viewed + sum(member.moved_bytes for member in self.all)

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(1800):
            while not reached():  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)

    async def _join(self) -> None:
        for member in self.members:
            self.loop.start(member.process, member.run())
        await self._until(lambda: all(member.view is not None for member in self.members))

    async def _minute(self) -> None:
        for _ in range(round(60 / STEP_S)):
            await asyncio.sleep(STEP_S)
            next(member for member in self.members if member.leads).commit()

    async def _watch(self) -> None:
        client = await SeedClient.connect(self.simulation.network.at("viewer"), SEED, SEED_PORT, name="viewer")
        self.viewers.append(client.connection)
        async for _ in client.news():
            pass

    async def _lose_one(self) -> None:
        lost = self.members[len(self.members) // 2]
        generation = lost.view.generation if lost.view else 0
        self.loop.kill(lost.process)
        self.simulation.network.crash(lost.host)
        others = [member for member in self.members if member is not lost]
        for member in others:
            member.applied = max(member.applied for member in others)
            member.break_off()
        await self._until(lambda: all(member.view and member.view.generation > generation for member in others))
        self.members.remove(lost)

    async def _restart(self) -> None:
        self.simulation.seed.kill()
        await asyncio.sleep(2)
        self.simulation.seed.start()
        await self._until(lambda: all(member.link.up for member in self.members))
        while (await self.simulation.ask("jobs.list"))["jobs"][0]["state"] != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def main(count: int) -> None:
    crowd = Crowd(count)
    with asyncio.Runner(loop_factory=lambda: crowd.loop) as runner:
        runner.run(crowd.run(lambda cost: print(f"{count:5} {cost}", flush=True)))


if __name__ == "__main__":
    for size in map(int, sys.argv[1:]):
        main(size)
