"""Faults of a simulated cluster: the kinds, when each one strikes, and how it ends."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from p2ptrain.lab.sim.cluster import SEED, SimMachine, Simulation
from p2ptrain.lab.sim.machine import NUMEL, PROCESS
from ring.job_member import RUNNING, MemberPhase
from ring.token import Flag
from roles.strategies import least_members
from wire.connection import Connection

# Kind → weight.
KINDS = {
    "kill": 6,
    "kill-in-phase": 8,
    "kill-in-vote": 3,
    "kill-two": 2,
    "kill-most": 1,
    "kill-all": 1,
    "kill-in-disk-call": 2,
    "power-cut": 3,
    "leave": 3,
    "join": 7,
    "freeze": 4,
    "hang": 3,
    "garble": 2,
    "withhold": 2,
    "cut": 3,
    "cut-in-follow": 2,
    "silence": 2,
    "one-way": 2,
    "partition": 2,
    "slow": 2,
    "garbage": 2,
    "seed-kill": 3,
    "seed-restart": 1,
    "seed-away": 1,
    "seed-freeze": 1,
    "seed-lost": 3,
    "disk-full": 2,
    "bit-flip": 1,
    "liar": 2,
    "pause": 2,
    "save": 1,
    "restore": 1,
    "false-token": 2,
}
KINDS_OF_PARTS = {"lose-disk": 3}
"""Further kinds for a job whose model is split: a lost disk may hold the only copy of a part."""
PHASES = tuple(phase for phase in MemberPhase if phase in RUNNING or phase is MemberPhase.HELD)
FALSE: tuple[dict[str, Any], ...] = (
    {"part": 1e30},
    {"part": -1000.0},
    {"part": math.nan},
    {"own": -1000.0},
    {"own": 1e308},
    {"usual": 1e-30},
    {"flags": Flag.STOP},
)
"""What a false token tells (``ring.token.Token``)."""
PATIENCE_S = 5.0
"""Longest wait for a phase; then the fault strikes anyway."""
LASTS_S = (0.3, 0.3, 1.0, 1.0, 3.0, 3.0, 8.0, 35.0)
"""Durations of lasting faults: below and above the deadlines of heartbeats (2 s) and of the grace (30 s)."""
MISBEHAVIOURS = ("hang", "garble", "withhold")
MISBEHAVES_S = (1.0, 8.0, 150.0, 150.0)
GOES_ON_S = 30.0
"""The others make steps again so long after one member began to misbehave."""


class FaultSchedule:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = simulation.random
        self._tell = simulation.observer.report.tell
        self._lasting: list[asyncio.Task[None]] = []
        self._strikes = 0  # of faults but "join" and ``MISBEHAVIOURS``

    async def strike(self, kind: str) -> None:
        """Inject one of ``KINDS``. Without a possible victim nothing happens."""
        if kind != "join":
            self._simulation.observer.history.kept = (0, set())
            if kind not in MISBEHAVIOURS:
                self._strikes += 1
                self._simulation.observer.culprits = None
        simulation, rng = self._simulation, self._random
        live = simulation.live
        victims = rng.sample(live, len(live))
        hosts = [SEED, *(machine.host for machine in victims)]
        match kind:
            case "kill" if len(victims) > 1:
                await self._at_moment(victims[0], rng.choice((1, 3, 10, 50, 300)), self._kill)
            case "kill-in-phase" if len(victims) > 1:
                await self._in_phase(victims[0], rng.choice(PHASES), self._kill)
            case "kill-in-vote" if len(victims) > 2:
                ahead = next((worker for worker in live if worker.host == victims[0].left), victims[1])
                await self._in_vote(victims[0], ahead)
            case "kill-two" if len(victims) > 2:
                await self._in_phase(victims[0], rng.choice(PHASES), self._kill)
                self._kill(victims[1])
            case "kill-most" if len(victims) > 1:
                for victim in victims[1:]:
                    self._kill(victim)
            case "kill-all" if victims:
                await self._kill_all()
            case "kill-in-disk-call" if victims:
                victims[0].disk.die_in = victims[0].disk.calls + rng.randint(1, 25)
                self._tell(f"{victims[0].host} will die in a call of its disk")
            case "power-cut" if victims:
                several = victims[: rng.choice((1, 1, 2, len(victims)))]
                self._tell(f"power cut at {[machine.host for machine in several]}")
                for victim in several:
                    victim.power_cut()
                self._later(rng.uniform(0, 5), lambda: self._start(*several))
            case "lose-disk" if len(victims) > 1:
                self._tell(f"{victims[0].host} is gone with its disk")
                victims[0].lose_disk()
                self._later(rng.choice(LASTS_S), lambda: self._start(victims[0]))
            case "leave" if len(victims) > 1:
                self._tell(f"{victims[0].host} leaves")
                victims[0].stop.set()
            case "join":
                self.join()
            case "freeze" if victims:
                await self._in_phase(victims[0], rng.choice(PHASES), self._freeze)
            case "hang" | "garble" | "withhold" if len(victims) > 2 and not any(peer.misconduct.kind for peer in live):
                await self._until(lambda: victims[0].trained)
                await self._in_phase(victims[0], MemberPhase.COMPUTING, lambda victim: self._misbehave(victim, kind))
            case "cut-in-follow" if victims:
                await self._in_follow(next((machine for machine in simulation.workers if not machine.up), victims[0]))
            case "cut" | "silence" | "one-way" if len(hosts) > 1:
                one, other = rng.sample(hosts, 2)
                self._sever(kind, [(one, other)])
            case "partition" if len(hosts) > 2:
                size = rng.randrange(1, len(hosts) - 1)
                far = set(hosts[-size:])
                how = rng.choice(("cut", "silence"))
                self._sever(how, [(a, b) for a in hosts if a not in far for b in hosts if b in far])
            case "slow" if len(hosts) > 1:
                one, other = rng.sample(hosts, 2)
                self._slow(one, other)
            case "garbage" if victims:
                self._garbage(rng.choice([simulation.seed, victims[0]]))
            case "seed-kill" | "seed-restart" | "seed-away" | "seed-freeze" if simulation.seed.up:
                await self._seed(kind)
            case "seed-lost":
                await self._lose_seed()
            case "bit-flip" if victims:
                victims[0].misconduct.flips = rng.randrange(
                    1, 4 * NUMEL
                )  # random: equal flips at two members would not differ
                self._tell(f"a bit flips in the memory of {victims[0].host}, after the next reduction")
            # Two liars in one step are believed: a job whose gradient is not finite fails by design.
            case "liar" if victims and not any(machine.misconduct.lies for machine in victims):
                self._lie(victims[0])
            case "false-token" if victims and not any(machine.misconduct.false_tokens for machine in victims):
                wrong = victims[0].misconduct
                wrong.falsely, wrong.false_tokens = rng.choice(FALSE), rng.choice((1, 3))
                self._tell(f"{victims[0].host} tells {wrong.falsely}, {wrong.false_tokens} times")
            # A job that no worker can begin before its first view fails by design.
            case "disk-full" if simulation.observer.history.generation:
                self._disk_full(rng.choice([simulation.seed, *victims]))
            case "pause" | "save" | "restore":
                await self._person(kind)

    # ----------------------------------------------------------------------------------------------------------- when

    async def _at_moment(self, victim: SimMachine, moments: int, act: Callable[[SimMachine], None]) -> None:
        due = victim.process.moments + moments
        await self._when(victim, lambda: victim.process.moments >= due, act)

    async def _in_phase(self, victim: SimMachine, phase: MemberPhase, act: Callable[[SimMachine], None]) -> None:
        """Act some callbacks after the victim entered ``phase``, if it is still in it; else at its next time there.
        Most phases last a few callbacks, some last dozens."""
        # callbacks in the phase before the fault, on average 5
        moments, moments_in_phase = int(self._random.expovariate(1 / 5.0)), 0

        def there() -> bool:
            nonlocal moments_in_phase
            moments_in_phase = moments_in_phase + 1 if victim.phase is phase else 0
            return moments_in_phase > moments

        self._tell(f"wait for {victim.host} to be {phase}, {moments} callbacks long")
        await self._when(victim, there, act)

    async def _in_vote(self, victim: SimMachine, ahead: SimMachine) -> None:
        """Kill ``victim`` after ``ahead`` has all tokens and applies the step. The slow link keeps the token of
        ``ahead`` from the victim, so it is not passed on, and the others must redo the step."""
        self._slow(victim.host, ahead.host, lasts_s=2 * PATIENCE_S)
        self._tell(f"wait for {victim.host} to vote while {ahead.host} applies")
        await self._when(
            victim, lambda: victim.phase is MemberPhase.VOTING and ahead.phase is MemberPhase.APPLYING, self._kill
        )

    async def _in_follow(self, newcomer: SimMachine) -> None:
        self._start(newcomer)
        self._tell(f"wait for {newcomer.host} to follow")
        how = self._random.choice(("cut", "silence"))
        await self._when(newcomer, lambda: newcomer.following, lambda victim: self._sever(how, [(victim.host, SEED)]))

    async def _when(self, victim: SimMachine, holds: Callable[[], bool], act: Callable[[SimMachine], None]) -> None:
        process = victim.process
        done = asyncio.Event()

        def look() -> None:
            if holds():
                process.on_moment = None
                act(victim)
                done.set()

        process.on_moment = look
        try:
            async with asyncio.timeout(self._random.uniform(0, PATIENCE_S)):
                await done.wait()
        except TimeoutError:
            if process.alive and process.on_moment is look:
                process.on_moment = None
                act(victim)

    # ----------------------------------------------------------------------------------------------------------- what

    def _kill(self, victim: SimMachine) -> None:
        self._tell(f"kill {victim.host} ({victim.phase})")
        victim.kill()

    def _start(self, *machines: SimMachine) -> None:
        for machine in machines:
            if not machine.up:
                self._tell(f"{machine.host} starts")
                machine.start()

    def join(self) -> None:
        if any(machine.misconduct.kind == "withhold" for machine in self._simulation.live):
            self._simulation.observer.culprits = None
        free = [machine for machine in self._simulation.workers if not machine.up]
        if free:
            self._start(self._random.choice(free))

    def _freeze(self, victim: SimMachine) -> None:
        process, seconds = victim.process, self._random.choice(LASTS_S)
        self._tell(f"{victim.host} freezes for {seconds} s ({victim.phase})")
        process.frozen = True

        def thaw() -> None:
            if process.alive:
                self._simulation.loop.thaw(process)

        self._later(seconds, thaw, f"the freeze of {victim.host} is over")

    def _misbehave(self, victim: SimMachine, how: str) -> None:
        """``hang``: its computing. ``garble``: it sends invalid tokens. ``withhold``: it sends no payload."""
        process, seconds, observer = victim.process, self._random.choice(MISBEHAVES_S), self._simulation.observer
        now, strikes = self._simulation.loop.time(), self._strikes
        self._tell(f"{victim.host}: {how} for {seconds} s ({victim.phase})")
        process.hung_until = now + seconds if how == "hang" else 0.0
        victim.misconduct.kind = how
        self._later(seconds, lambda: setattr(victim.misconduct, "kind", ""))
        if observer.culprits is not None and victim.worker is not None:
            observer.culprits.add(victim.worker.peer_id)
        if how == "withhold" and not all(machine.trained for machine in self._simulation.live):
            observer.culprits = None  # a newcomer waits longer than others, before it knows how long a step is
        before = observer.history.newest_step if victim.trained else 0

        def went_on() -> None:
            enough = len(self._simulation.live) > max(least_members(self._simulation.profile), 1)
            alone = enough and strikes == self._strikes and process.alive
            if before and alone and observer.job_state in ("running", "done"):
                step = observer.history.newest_step
                observer.report.check("goes on", step > before, f"still step {step}: {victim.host}, {how}")

        self._later(2 * GOES_ON_S if how == "withhold" else GOES_ON_S, went_on)  # it is noticed twice

    def _sever(self, how: str, pairs: list[tuple[str, str]]) -> None:
        network = self._simulation.network
        act = {"cut": network.cut, "silence": network.silence, "one-way": network.deafen}[how]
        ways = " ".join(f"{one}-{other}" for one, other in pairs)
        self._tell(f"{how} {ways}")
        for pair in pairs:
            act(*pair)

        def mend() -> None:
            for pair in pairs:
                network.mend(*pair)

        self._later(self._random.choice(LASTS_S), mend, f"mend {ways}")

    def _slow(self, one: str, other: str, lasts_s: float | None = None) -> None:
        way, delay_s = frozenset((one, other)), self._random.choice((0.1, 0.5, 3.0))
        self._tell(f"{one}-{other} takes {delay_s} s more")
        self._simulation.links.slow[way] = delay_s
        lasts_s = self._random.choice(LASTS_S) if lasts_s is None else lasts_s
        self._later(lasts_s, lambda: self._simulation.links.slow.pop(way, None))

    def _garbage(self, victim: SimMachine) -> None:
        found = [
            connection
            for connection in self._simulation.network.connections(victim.host)
            if isinstance(connection, Connection)
            and connection._attached
            and not connection._ended
            and connection._incoming.decoder.between_frames
        ]
        if not found:
            return
        connection = self._random.choice(found)
        self._tell(f"garbage on a connection of {victim.host}")
        noise = self._random.randbytes(64)

        def inject() -> None:
            PROCESS.set(victim.process)
            if connection._ended or not connection._incoming.decoder.between_frames:
                return  # a frame arrived meanwhile
            rest = memoryview(noise)
            while rest and not connection._ended:
                room = connection.get_buffer(-1)
                taken = min(len(room), len(rest))
                room[:taken] = rest[:taken]
                connection.buffer_updated(taken)
                rest = rest[taken:]
            self._simulation.observer.report.check("garbage ends it", connection._ended, f"{noise.hex()} was accepted")

        self._simulation.loop.call_soon(inject, context=contextvars.copy_context())

    async def _seed(self, kind: str) -> None:
        seed, rng = self._simulation.seed, self._random
        if kind == "seed-freeze":
            self._freeze(seed)
        elif kind == "seed-restart":
            self._tell("the seed is restarted")
            seed.stop.set()
            await self._until_stopped(seed)
            self._start(seed)
        else:
            cut = rng.random() < 0.3
            self._tell(f"{'power cut at' if cut else 'kill'} the seed")
            await self._at_moment(seed, rng.choice((1, 5, 40)), SimMachine.power_cut if cut else SimMachine.kill)
            away_s = rng.choice((40.0, 100.0)) if kind == "seed-away" else rng.choice((0.0, 1.0, 10.0))
            self._later(away_s, lambda: self._start(seed))

    async def _lose_seed(self) -> None:
        simulation, line = self._simulation, self._simulation.observer.history
        self.join()  # causes a view that the copy lacks

        def behind() -> list[bytes]:
            return [copy for generation, copy in simulation.observer.copies if 0 < generation < line.generation]

        await self._until(lambda: bool(behind()) and len(line.lineages) >= 3)
        if copies := behind() or [copy for generation, copy in simulation.observer.copies if generation]:
            self._tell("the seed is lost with its disk, and restored from a copy")
            simulation.seed.kill()
            await asyncio.sleep(self._random.choice((0.0, 1.0, 10.0)))
            simulation.seed.restore(copies[-1])

    async def _kill_all(self) -> None:
        """Kill the seed while a ring trains, and all workers after one of them has saved a step without the seed."""
        simulation, line = self._simulation, self._simulation.observer.history

        def saved() -> int:
            return max((step for machine in simulation.live for step in machine.announced), default=0)

        await self._until(lambda: len(line.lineages) > 1)
        self._tell("kill the seed")
        simulation.seed.kill()
        before = saved()
        await self._until(lambda: saved() > before)
        killed = [simulation.seed, *simulation.live]
        for victim in killed[1:]:
            self._kill(victim)
        self._later(self._random.uniform(0, 5), lambda: self._start(*killed))

    async def _until(self, holds: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while not holds():  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.01)

    def _lie(self, victim: SimMachine) -> None:
        how, times = self._random.choice(("nan", "huge")), self._random.choice((1, 1, 3))
        self._tell(f"{victim.host} contributes {how}, {times} times")
        victim.misconduct.lies, victim.misconduct.lie = times, how

    def _disk_full(self, victim: SimMachine) -> None:
        self._tell(f"the disk of {victim.host} is full")
        victim.disk.full = True
        room = f"the disk of {victim.host} has room again"
        self._later(self._random.uniform(1, 20), lambda: setattr(victim.disk, "full", False), room)

    async def _person(self, kind: str) -> None:
        simulation = self._simulation
        if kind == "pause":
            self._tell("the operator pauses the job")
            await simulation.ask("jobs.pause", job=simulation.job)
            self._lasting.append(asyncio.create_task(self._resume(self._random.uniform(0, 10))))
        elif kind == "save":
            self._tell("the operator saves a checkpoint")
            await simulation.ask("jobs.save", job=simulation.job)
        else:
            known = (await simulation.ask("checkpoints.list", job=simulation.job)).get("checkpoints", [])
            if known:
                chosen = self._random.choice(known)
                self._tell(f"the operator restores step {chosen['step']}")
                self._simulation.observer.checkpoints.wanted.add(chosen["step"])
                await simulation.ask("checkpoints.restore", id=chosen["id"])

    async def _resume(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._tell("the operator resumes the job")
        await self._simulation.ask("jobs.resume", job=self._simulation.job)

    async def _until_stopped(self, machine: SimMachine) -> None:
        if machine.task is not None:
            await asyncio.wait([machine.task], timeout=max(LASTS_S))
        if machine.up:
            machine.kill()

    # ------------------------------------------------------------------------------------------------------ and after

    def _later(self, seconds: float, act: Callable[[], object], text: str = "") -> None:
        """Act after so long; ``text``: what is told then."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            if text:
                self._tell(text)
            act()

        self._lasting.append(asyncio.create_task(wait()))

    async def calm(self, least: int) -> None:
        """Wait until lasting faults have ended. Then start the seed, and ``least`` workers in all."""
        for task in self._lasting:
            await task
        self._lasting.clear()
        simulation = self._simulation
        for machine in simulation.workers:
            machine.disk.die_in = None
            if machine.up and machine.stop.is_set():
                await self._until_stopped(machine)
        self._start(simulation.seed)
        while len(simulation.live) < least:
            self.join()
        self._tell("calm")

    def cancel(self) -> None:
        for task in self._lasting:
            task.cancel()
