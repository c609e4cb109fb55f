"""From the first process to the last verdict: an undisturbed stretch, the faults, a quiet end, what is found then."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Profile
from p2ptrain.cli.chaos import judge
from p2ptrain.cli.chaos.cluster import Cluster
from p2ptrain.cli.chaos.faults import PATIENCE_S, Faults
from p2ptrain.cli.chaos.judge import Verdict
from p2ptrain.cli.chaos.observer import Observer
from p2ptrain.cli.chaos.proof import Saved, audited, loads, saved
from p2ptrain.cli.chaos.report import Report
from p2ptrain.cli.chaos.schedule import DONOR, schedule
from p2ptrain.cli.console import Console
from p2ptrain.cli.runtime import open_operator
from p2ptrain.cli.stopping import stop_on_signals
from p2ptrain.core.errors import JobFailed, P2PTrainError
from ring.detector import beat_defaults
from roles.worker.given import CHUNK_BYTES
from wire.client import SeedClient

WARM_STEPS = 3  # the first ones load kernels and pages
BASELINE_STEPS, BASELINE_S = 20, 5.0  # undisturbed: so many steps at least, and so long
PAGE_ROWS = 200  # the most that one answer of the seed holds
COMMAND_S = 120.0  # for a process that loads a model on a machine full of workers

now = time.monotonic


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        count: of faults; 0: as many as begin within ``duration_s``.
        exact: the job sums exactly, and an undisturbed run is compared.
    """

    profile_name: str
    profile: Profile
    workers: int
    root: Path
    kinds: Sequence[str]
    every_s: tuple[float, float]
    count: int
    duration_s: float
    seed: int
    tls: bool
    exact: bool
    replay: str


class Stopped(Exception):
    """The person pressed Ctrl+C."""


async def conduct(plan: Plan) -> Report:
    """Raises ``P2PTrainError`` where the cluster cannot even be started."""
    console, stop = Console(), asyncio.Event()
    clusters: list[Cluster] = []

    def leave(text: str) -> None:
        for cluster in clusters:  # at once: a second Ctrl+C may end this process
            cluster.closing()
        console.event("info", text)

    stop_on_signals(stop, leave)
    run = Run(plan, console, stop, clusters)
    try:
        await run.all()
    except Stopped:
        run.report.notes.append("interrupted: what only shows at the end was not looked at")
    finally:
        for cluster in clusters:
            await cluster.end()
        console.finish()
    return run.report


class Run:
    """The parts of one run, in order, and what they find."""

    def __init__(self, plan: Plan, console: Console, stop: asyncio.Event, clusters: list[Cluster]) -> None:
        self.plan, self._console, self._stop, self._clusters = plan, console, stop, clusters
        tokens = plan.profile.batch.micro_batches * plan.profile.batch.micro_batch_sequences
        self.report = Report(
            plan.replay, plan.workers, plan.tls, tokens_per_step=tokens * plan.profile.data.sequence_tokens
        )

    async def all(self) -> None:
        """Raises ``Stopped``, ``P2PTrainError``."""
        plan, report = self.plan, self.report
        async with self._cluster(plan.root) as (cluster, observer, job):
            await self._undisturbed(observer)
            report.begin = cluster.usage()
            faults = Faults(cluster, observer, self._console, self._stop, alone=bool(plan.count))
            begin_s = now()
            actions = schedule(plan.seed, workers=plan.workers, kinds=plan.kinds, every_s=plan.every_s)
            try:
                await faults.run(actions, count=plan.count, duration_s=plan.duration_s)
            finally:
                end_s = now()
                report.injuries, report.seconds, report.steps = faults.done, end_s - begin_s, observer.step
                report.steps_per_s = judge.steps_per_s(observer.rows, begin_s, end_s)
            self._go_on()
            cluster.release()
            step = await self._common_checkpoint(cluster, observer, faults)
            report.end = cluster.usage()
            address = f"127.0.0.1:{cluster.port}"
            audit = (
                Verdict("the ledger covers every sample once", None, "asked of plain clusters only")
                if plan.tls
                else await audited(address, job, COMMAND_S)
            )
            last = observer.step  # the job goes on while its record is read
            once = judge.every_step_once(await self._recorded(observer, job), last)
            self._go_on()
        await self._judged(cluster, observer, faults, [once, audit], job, step)
        report.complete = not self._stop.is_set()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopped

    @asynccontextmanager
    async def _cluster(self, root: Path) -> AsyncIterator[tuple[Cluster, Observer, str]]:
        """A cluster with a job that all its workers train, ended with the block."""
        plan = self.plan
        threads = plan.profile.device.threads or max(1, (os.cpu_count() or 1) // plan.workers)

        async def connect() -> SeedClient:
            return (await open_operator(("127.0.0.1", cluster.port), state=root))[1]

        observer = Observer(connect)
        cluster = Cluster(root, plan.workers, threads, plan.tls, observer.wake)
        self._clusters.append(cluster)
        await cluster.start()
        client = await connect()
        name = Path(plan.profile_name).stem
        spec = plan.profile.to_spec()
        job = str((await client.request("jobs.create", {"name": name, "profile": name, "spec": spec}))["job"])
        await client.close()
        following = asyncio.create_task(observer.run(job), name="observe")
        waking = asyncio.create_task(_wake_on(self._stop, observer), name="wake")
        try:
            for number in range(1, plan.workers + 1):
                await cluster.start_worker(number)
            self._console.event("info", f"{plan.workers} workers start; logs are in {root / 'logs'}")
            if not await observer.until(lambda: self._over(cluster) or self._whole(cluster, observer), PATIENCE_S):
                raise JobFailed("the workers form no ring", remedy=f"their logs are in {root / 'logs'}")
            self._go_on()
            if cluster.exits:
                raise JobFailed(cluster.exits[0], remedy=f"the logs are in {root / 'logs'}")
            yield cluster, observer, job
        finally:
            for task in (following, waking):
                task.cancel()
            await asyncio.wait({following, waking})
            await cluster.end()

    def _over(self, cluster: Cluster) -> bool:
        return self._stop.is_set() or bool(cluster.exits)

    @staticmethod
    def _whole(cluster: Cluster, observer: Observer) -> bool:
        numbers = range(1, cluster.workers + 1)
        ids = {observer.id_of(cluster.places[number].name) for number in numbers if number in cluster.places}
        return observer.step > 0 and len(ids) == cluster.workers and ids <= set(observer.members)

    async def _undisturbed(self, observer: Observer) -> None:
        """Measure what faults will be compared with. Raises ``Stopped``, ``JobFailed``."""
        first = observer.step + WARM_STEPS
        await observer.until(lambda: self._stop.is_set() or observer.step >= first, PATIENCE_S)
        begin_s, step = now(), observer.step
        self._console.event("info", "all are in the ring; first some undisturbed steps")
        await observer.until(
            lambda: self._stop.is_set() or observer.finished or observer.step >= step + BASELINE_STEPS, PATIENCE_S
        )
        await observer.until(self._stop.is_set, BASELINE_S - (now() - begin_s))
        self._go_on()
        if observer.step <= step:
            raise JobFailed(f"no step was committed within {PATIENCE_S:.0f} s, undisturbed")
        end_s = observer.rows[-1].at_s
        self.report.baseline_steps_per_s = judge.steps_per_s(observer.rows, begin_s, end_s)
        self._console.event("info", f"undisturbed: {self.report.baseline_steps_per_s:.2f} steps/s; now the faults")

    async def _common_checkpoint(self, cluster: Cluster, observer: Observer, faults: Faults) -> int:
        """The step of a checkpoint that all workers wrote after the last fault; 0 where it did not come to that."""
        self._console.event("info", "no more faults; waiting for all, and for a checkpoint that all of them write")
        names = {cluster.places[number].name for number in range(1, cluster.workers + 1)}
        for place in cluster.places.values():  # what a broken-off fault left
            if place.child is None and place.number <= cluster.workers and not observer.finished:
                await cluster.start_worker(place.number)

        def whole() -> bool:
            return self._stop.is_set() or observer.finished or self._whole(cluster, observer)

        if not await observer.until(whole, PATIENCE_S):
            faults.stuck.append(f"after the faults not all were members within {PATIENCE_S:.0f} s")
            return 0
        after = observer.step

        def common() -> int:
            steps = (step for step, holders in observer.checkpoints.items() if step > after and names <= holders)
            return max(steps, default=observer.job.steps_total if observer.finished and observer.job else 0)

        if not await observer.until(lambda: self._stop.is_set() or common() > 0, PATIENCE_S):
            faults.stuck.append(f"no checkpoint by all within {PATIENCE_S:.0f} s after step {after}")
        self._go_on()
        return common()

    async def _recorded(self, observer: Observer, job: str) -> list[int]:
        """Steps of the rows that the seed keeps."""
        steps, after = list[int](), 0
        with suppress(P2PTrainError):  # what is missing then is found missing
            while rows := (await observer.ask("metrics.history", job=job, after_step=after, limit=PAGE_ROWS))["rows"]:
                steps += [int(row["step"]) for row in rows]
                after = steps[-1]
        return steps

    # ------------------------------------------------------------------------------------------------------- verdicts

    async def _judged(
        self, cluster: Cluster, observer: Observer, faults: Faults, seen: list[Verdict], job: str, step: int
    ) -> None:
        plan, report = self.plan, self.report
        rtt_ms = max(observer.first_rtt_ms.values(), default=0.0)
        _, death_s = beat_defaults(rtt_ms)
        grace_s = 2 * (plan.profile.membership.death_s or death_s)  # the longest that a rhythm makes of it
        report.notes.append(
            f"round trips of up to {rtt_ms:.1f} ms as workers joined: silence counts as death after {grace_s / 2:.1f} s"
        )
        lost = [
            told.event.text
            for told in observer.told
            if told.event.kind == "lost" and not judge.excuse(told.event.peer, told.at_s, faults.done, grace_s)
        ]
        dropped = judge.evictions(observer.views, faults.done, observer.names, grace_s)
        drift = [told.event.text for told in observer.told if told.event.kind == "drift"]
        damaging = any(injury.kind == "corrupt" for injury in faults.done) and not plan.tls
        names = [cluster.places[number].name for number in range(1, plan.workers + 1)]
        found = await asyncio.to_thread(saved, plan.root, job, step, names)
        failed = observer.job.reason if observer.job and observer.job.state in ("failed", "cancelled") else ""
        report.verdicts += [
            judge.none_of("it goes on after every fault", [*faults.stuck, *([failed] if failed else [])]),
            judge.none_of("no process ended by itself", [*cluster.exits, *cluster.late]),
            judge.none_of("nobody is evicted to whom nothing was done", dropped + lost),
            *seen,
            self._all_equal(found, step, len(names)),
            _unless(damaging, judge.none_of("no replica drifted", drift)),
            judge.none_of(f"checkpoints are whole ({found.count} of them)", found.damaged),
            judge.none_of("no process is left behind", cluster.orphans()),
        ]
        if DONOR in plan.kinds:
            report.verdicts.append(judge.a_chunk_each(faults.done, CHUNK_BYTES))
        if found.newest is not None:
            report.verdicts.append(await loads(found.newest, COMMAND_S))
        if plan.exact:
            report.verdicts.append(_unless(damaging, await self._as_undisturbed(found, step)))
        if damaging:
            report.notes.append(
                "plain TCP has no integrity of its own: a byte that is damaged on the way may be summed and applied "
                "by all alike, so only that all stay equal is asked; with --tls everything is"
            )

    @staticmethod
    def _all_equal(found: Saved, step: int, workers: int) -> Verdict:
        name = "the state is equal on all members"
        if not step or len(found.states) < workers:
            return Verdict(name, False, f"{len(found.states)} of {workers} hold a whole checkpoint of step {step}")
        verdict = judge.same(name, found.states)
        return Verdict(name, verdict.held, f"step {step}: {verdict.text}")

    async def _as_undisturbed(self, found: Saved, step: int) -> Verdict:
        """Train the same job anew without a fault, to the same step, and compare."""
        name = "the state is that of an undisturbed run"
        if not found.states:
            return Verdict(name, False, "there is none to compare")
        self._console.event("info", f"an undisturbed run of the same job to step {step}, to compare")
        root = self.plan.root / "undisturbed"
        rate = self.report.baseline_steps_per_s or 1.0
        async with self._cluster(root) as (cluster, observer, job):
            await observer.until(
                lambda: self._over(cluster) or step in observer.checkpoints, PATIENCE_S + 4 * step / rate
            )
            self._go_on()
            holders = observer.checkpoints.get(step, set())
        alone = await asyncio.to_thread(saved, root, job, step, sorted(holders))
        if not alone.states:
            return Verdict(name, False, f"the undisturbed run did not get to step {step}: {'; '.join(cluster.exits)}")
        return judge.same(name, {"with faults": next(iter(found.states.values()))} | {
            f"undisturbed {holder}": value for holder, value in alone.states.items()
        })  # fmt: skip


def _unless(damaging: bool, verdict: Verdict) -> Verdict:
    """Not asked where bytes were damaged that nothing protects."""
    return Verdict(verdict.name, None, "not asked on plain TCP with damaged bytes") if damaging else verdict


async def _wake_on(stop: asyncio.Event, observer: Observer) -> None:
    await stop.wait()
    observer.wake()
