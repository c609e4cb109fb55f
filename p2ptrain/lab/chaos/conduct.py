"""One run of ``p2ptrain chaos``: start a cluster, measure undisturbed steps, inject faults, and judge the final state.

The links of every worker run through two proxies. Other peers reach the worker's data port through its ``data`` proxy.
The worker reaches the seed through its ``control`` proxy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from configs.schema import Profile
from p2ptrain.cluster.console import Console, stop_on_signals, unless_stopped
from p2ptrain.cluster.jobs import JobObserver
from p2ptrain.cluster.local_cluster import LOOPBACK, LocalCluster, PeerProcess, free_port, threads_each
from p2ptrain.core.checkpoints import CheckpointStore, verify_checkpoint
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import JobFailed, P2PTrainError, StorageError
from p2ptrain.lab.audit import audit
from p2ptrain.lab.chaos import judge
from p2ptrain.lab.chaos.judge import Action, ChaosHistory, ChaosReport, InjectedFault, InvariantResult, ObservedStep
from p2ptrain.lab.chaos.proxy import Proxy
from ring.detector import beat_defaults
from roles.seed.events import INTERVAL_S

PATIENCE_S = 180.0
"""Time limit for a step, or for all workers to be members again. The seed waits 30 s for a silent peer, and as long for
an excluded one. On a busy machine a worker takes as long again to load its libraries."""
BASELINE_STEPS, BASELINE_S = 20, 5.0  # minimum steps and seconds without faults
COMMAND_S = 120.0  # a command may load a model on a busy machine

now = time.monotonic


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The settings of one run.

    Attributes:
        count: number of faults, one at a time; 0: as many as start within ``duration_s``.
        attack: what the last ``attackers`` workers do (``p2ptrain.lab.attacker``); empty: nothing.
    """

    profile_name: str
    profile: Profile
    workers: int
    root: Path
    kinds: Sequence[str]
    count: int
    duration_s: float
    seed: int
    tls: bool
    attack: str = ""
    attackers: int = 0

    def attack_of(self, number: int) -> str:
        return self.attack if number > self.workers - self.attackers else ""


def kinds_here() -> tuple[str, ...]:
    """The kinds of faults that this operating system supports."""
    without = {"disk"} if sys.platform != "linux" else set()
    without |= {"freeze"} if not hasattr(signal, "SIGSTOP") else set()
    return tuple(kind for kind in judge.KINDS if kind not in without)


# --------------------------------------------------------------------------------------------------------- the cluster


@dataclass(slots=True)
class WorkerSlot:
    """One worker's place in the cluster: its proxies and its current process.

    Attributes:
        child: the newest process; None before the first start.
        busy: a fault is using this worker.
    """

    number: int
    data: Proxy
    control: Proxy
    child: PeerProcess | None = None
    busy: bool = False
    frozen: bool = False

    @property
    def name(self) -> str:
        return f"worker-{self.number}"

    def thaw(self) -> None:
        if self.frozen and self.child is not None and self.child.alive:
            self.child.process.send_signal(signal.SIGCONT)
        self.frozen = False

    def mend(self) -> None:
        """End all faults of this worker: thaw it, and restore its links and its disk."""
        self.thaw()
        self.data.mend()
        self.control.mend()
        self.limit_files(None)

    def limit_files(self, limit_bytes: int | None) -> None:
        """Limit the size of each file of the worker and its helper processes; None removes the limit.

        The limit is ``RLIMIT_FSIZE``, which needs no privileges and does not affect other processes. A write past it
        fails with EFBIG in the middle of a file, just as a write on a full disk fails with ENOSPC.
        """
        if sys.platform != "linux" or self.child is None or not self.child.alive:
            return
        import resource

        try:
            process = psutil.Process(self.child.process.pid)
            for pid in [process.pid, *(child.pid for child in process.children(recursive=True))]:
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if limit_bytes is None else limit_bytes, hard))
        except (psutil.NoSuchProcess, ProcessLookupError):
            return  # the process ended; its watch task reports that


@dataclass(slots=True)
class ProxiedCluster:
    """The processes of the cluster, and the operations on them.

    Args:
        on_change: called when a process ended.
        attack_of: see ``ChaosPlan``.

    Attributes:
        exits: error messages of processes that ended unexpectedly.
    """

    local: LocalCluster
    workers: int
    threads: int
    on_change: Callable[[], None]
    attack_of: Callable[[int], str] = lambda number: ""
    places: dict[int, WorkerSlot] = field(default_factory=dict)
    exits: list[str] = field(default_factory=list)
    closing: bool = False
    _expected: set[int] = field(default_factory=set)  # pids whose end is expected
    _sessions: set[int] = field(default_factory=set)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)

    async def start_seed(self) -> None:
        self._watch(await self.local.start_seed())

    async def start_worker(self, number: int) -> None:
        """Start a worker; returns before it has joined. Raises ``StorageError``, ``UserError``."""
        if number not in self.places:
            self.places[number] = WorkerSlot(number, Proxy((LOOPBACK, 0)), Proxy((LOOPBACK, self.local.port)))
            await self.places[number].data.start()
            await self.places[number].control.start()
        place = self.places[number]
        port = free_port()
        place.data.target = (LOOPBACK, port)
        options = ["--threads", str(self.threads), "--host", LOOPBACK, "--port", str(port)]
        options += ["--advertise", f"{LOOPBACK}:{place.data.address[1]}"]
        target, attack = self._target(place), self.attack_of(number)
        place.child = await self.local.start_peer(place.name, number, *options, target=target, attack=attack)
        self._watch(place.child)

    def _target(self, place: WorkerSlot) -> str:
        if not self.local.tls:
            return f"{LOOPBACK}:{place.control.address[1]}"
        from wire.address import Ticket, local_ticket_path

        path = local_ticket_path(self.local.root, "worker")
        try:
            ticket = Ticket.parse_untrusted(path.read_text().strip())
            mine = path.with_name(f"{place.name}.ticket")
            mine.touch(mode=0o600)
            mine.write_text(str(dataclasses.replace(ticket, port=place.control.address[1])))
        except OSError as error:
            raise StorageError(f"cannot copy {path}: {error.strerror}", remedy="choose another --state") from error
        return f"@{mine}"

    async def kill(self, child: PeerProcess) -> None:
        self._expected.add(child.process.pid)
        await child.kill()

    def let_go(self) -> None:
        """End all faults. From now on the end of any process is expected."""
        self.closing = True
        for place in self.places.values():
            place.mend()

    async def end(self) -> None:
        """End all processes and proxies. May be called twice."""
        self.let_go()
        await self.local.end()
        for place in self.places.values():
            await place.data.close()
            await place.control.close()
        if self._watches:
            await asyncio.wait(self._watches)

    def orphans(self) -> list[str]:
        """Kill the processes that outlived the cluster, including children of peers. Returns one line for each."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in self._sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} ({process.name()}, {process.status()})")
                    process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                continue
        return found

    def _watch(self, child: PeerProcess) -> None:
        self._sessions.add(child.process.pid)

        async def watch() -> None:
            await child.process.wait()
            if not self.closing and child.process.pid not in self._expected:
                self.exits.append(child.failure().message)
            self.on_change()

        task = asyncio.create_task(watch(), name=f"watch {child.name}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)


# ---------------------------------------------------------------------------------------------------------- the faults


@dataclass(slots=True)
class FaultInjector:
    """Carries out a schedule: chooses a worker, injects the fault, ends it, and records the outcome.

    A fault of the seed runs alone, because a worker that starts needs a seed.

    Attributes:
        done: the injected faults, in order.
        stuck: messages about everything that did not recover in time.
    """

    cluster: ProxiedCluster
    observer: JobObserver
    history: ChaosHistory
    console: Console
    done: list[InjectedFault] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, actions: Iterable[Action], *, count: int, duration_s: float) -> None:
        """Inject ``count`` faults one at a time; if ``count`` is 0, all faults that start within ``duration_s``.

        Returns when the last fault is over. Raises ``P2PTrainError`` if a process cannot be started.
        """
        began = now()
        try:
            for action in actions:
                if action.number > count if count else began + duration_s <= now() + action.gap_s:
                    break
                await self._pause(action.gap_s)
                if count or action.kind == "seed":
                    await self._settled()
                place = await self._taken(action)
                if self._over:
                    break
                task = asyncio.create_task(self._injure(action, place), name=f"fault {action.number}")
                self._tasks.add(task)
                if count or action.kind == "seed":
                    await self._settled()
            if not count:
                await self._pause(began + duration_s - now())
            await self._settled()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _settled(self) -> None:
        """Wait until no fault is active. Raises what the faults raised."""
        while self._tasks:
            finished, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()

    @property
    def _over(self) -> bool:
        return self.observer.is_finished or bool(self.stuck)

    async def _pause(self, seconds: float) -> None:
        await self.observer.until(lambda: self._over, max(seconds, 0.0))

    async def _taken(self, action: Action) -> WorkerSlot | None:
        if action.kind == "seed":
            return None
        if not await self.observer.until(lambda: self._over or self._fits(action), PATIENCE_S):
            self.stuck.append(f"fault {action.number} ({action.kind}): no worker available within {PATIENCE_S:.0f} s")
        if self._over:
            return None
        place = self._whole(action)[0]
        place.busy = True
        return place

    def _whole(self, action: Action) -> list[WorkerSlot]:
        places = (self.cluster.places[number] for number in action.order)
        alive = (place for place in places if not place.busy and place.child is not None and place.child.alive)
        return [place for place in alive if self.observer.id_of(place.name) in self.observer.members]

    def _fits(self, action: Action) -> bool:
        """Return whether a member of the view that committed the newest step would stay unharmed.

        Without such a worker the others would rightly wait for one to come back.
        """
        steps, views = self.history.steps, self.history.views
        newest = steps[-1].generation if steps else 0
        members = next((view.members for view in reversed(views) if view.generation == newest), ())
        return bool({self.observer.id_of(place.name) for place in self._whole(action)[1:]} & set(members))

    async def _injure(self, action: Action, place: WorkerSlot | None) -> None:
        observer, kind = self.observer, action.kind
        excused: frozenset[str] = frozenset()
        if place is not None and kind in ("cut", "corrupt"):
            members, peer = observer.members, observer.id_of(place.name)
            rank = members.index(peer)  # either end may be blamed for a broken link
            excused = frozenset({peer, members[rank - 1], members[(rank + 1) % len(members)]})
        elif place is not None and kind in ("kill", "freeze"):
            excused = frozenset({observer.id_of(place.name)})
        name = place.name if place is not None else "seed"
        generation = observer.info.generation if observer.info else 0
        injected = InjectedFault(action.number, kind, now(), generation, observer.step, (name,), excused)
        self.done.append(injected)
        first_step = len(self.history.steps)
        try:
            await (self._hurt_seed(action, injected) if place is None else self._hurt(action, place, injected))
            injected.until_s = now()
            await self._recovery(injected, first_step)
            whole = place is None or await observer.until(
                lambda: self._over or observer.id_of(name) in observer.members, PATIENCE_S
            )
            injected.whole_s = now()
            if not whole:
                self.stuck.append(f"{name}: not a member {PATIENCE_S:.0f} s after fault {injected.number}")
        finally:
            if place is not None:
                place.busy = False
            observer.wake()

    def _tell(self, injected: InjectedFault) -> None:
        parts = (injected.kind, *injected.peers, injected.detail)
        self.console.event("info", f"fault {injected.number}: {' '.join(filter(None, parts))}")

    async def _hurt_seed(self, action: Action, injected: InjectedFault) -> None:
        cluster, observer, before = self.cluster, self.observer, self.observer.step
        await cluster.kill(cluster.local.seed)
        self._tell(injected)
        await self._pause(action.lasts_s)
        await cluster.start_seed()
        await observer.until(lambda: self._over or (bool(observer.members) and observer.step > before), PATIENCE_S)

    async def _hurt(self, action: Action, place: WorkerSlot, injected: InjectedFault) -> None:
        assert place.child is not None
        damaged, lasts = place.data.damaged, f"for {action.lasts_s:.1f} s"
        match action.kind:
            case "kill":
                await self.cluster.kill(place.child)
            case "freeze":
                injected.detail, place.frozen = lasts, True
                place.child.process.send_signal(signal.SIGSTOP)
            case "cut":
                where, how = action.cut.split()
                injected.kind, injected.detail = f"cut {action.cut}", lasts
                links = {"ring": (place.data,), "seed": (place.control,), "all": (place.data, place.control)}
                for link in links[where]:
                    link.cut(silent=how == "silent")
            case "slow":
                rate = f"to {action.rate_bps / 1e6:.2f} MB/s, {1e3 * action.delay_s:.0f} ms"
                injected.detail = f"{rate}, {lasts}"
                place.data.slow(action.rate_bps, action.delay_s)
            case "corrupt":
                injected.detail = f"one damaged byte in the next {action.skip_bytes + 1} on the ring"
                place.data.damage(action.skip_bytes)
            case "disk":
                files = (self.cluster.local.root / place.name).glob("jobs/*/checkpoints/step-*/*")
                largest = max((path.stat().st_size for path in files), default=0)
                # Half of a checkpoint's largest file, but enough for the worker's log, which must stay complete.
                limit_bytes = max(largest // 2, place.child.log.stat().st_size + (1 << 20))
                injected.detail = f"files of at most {limit_bytes} bytes, {lasts}"
                place.limit_files(limit_bytes)
                await self._save()
        self._tell(injected)
        await self._pause(action.lasts_s)
        if action.kind == "kill":
            await self.cluster.start_worker(place.number)
        if action.kind == "corrupt" and place.data.damaged == damaged:
            injected.detail += "; no byte was sent"
        place.mend()

    async def _save(self) -> None:
        with suppress(P2PTrainError):
            async with self.cluster.local.operator() as client:
                await client.tell_job(self.observer.job, "save")

    async def _recovery(self, injected: InjectedFault, first_step: int) -> None:
        def back() -> ObservedStep | None:
            return judge.recovered(injected, self.history.steps[first_step:], INTERVAL_S)

        await self.observer.until(lambda: self._over or back() is not None, PATIENCE_S)
        if (row := back()) is not None:
            injected.recovery_s = row.at_s - injected.at_s
            after = f"after {injected.recovery_s:.2f} s"
            self.console.event("info", f"fault {injected.number}: step {row.step} in view {row.generation}, {after}")
        elif not self._over:
            self.stuck.append(f"fault {injected.number} ({injected.kind}): no step within {PATIENCE_S:.0f} s")


# ------------------------------------------------------------------------------------------------- checkpoints on disk


@dataclass(slots=True)
class SavedStates:
    """The checkpoints on disk after a cluster has ended.

    Attributes:
        states: worker's name → hash of its parameters and optimizer state at the given step.
        damaged: messages about checkpoints that are unreadable or differ from their manifest.
        newest: path of a checkpoint of the given step.
    """

    states: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    count: int = 0
    newest: Path | None = None


def saved(root: Path, job: str, step: int, names: Iterable[str]) -> SavedStates:
    """Read and verify all checkpoints of these workers. Blocks."""
    made = SavedStates()
    for name in names:
        directory = root / name / "jobs" / job / "checkpoints"
        if not directory.is_dir():
            continue
        store = CheckpointStore(RealDisk(), directory, 1000)  # a limit this high prunes nothing
        found = {path.name for path in directory.glob("step-*")}
        for entry in store.entries():
            made.count += 1
            found.discard(entry.path.name)
            try:
                verify_checkpoint(RealDisk(), entry)
            except StorageError as problem:
                made.damaged.append(problem.message)
                continue
            if entry.step == step:
                tensors = ((file, it) for file, it in sorted(entry.files.items()) if file.endswith(".safetensors"))
                lines = (f"{file} {size_bytes} {digest}\n" for file, (size_bytes, digest) in tensors)
                made.states[name] = hashlib.sha256("".join(lines).encode()).hexdigest()
                made.newest = entry.path
        made.damaged += [f"{directory / each} has no manifest that can be read" for each in sorted(found)]
    return made


async def command(name: str, *arguments: str) -> InvariantResult:
    """Run a ``p2ptrain`` command in a process of its own; the verdict says whether it succeeded."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2ptrain", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            _, error = await process.communicate()
    except TimeoutError:
        return InvariantResult(name, False, f"no answer within {COMMAND_S:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = error.decode(errors="replace").strip().splitlines()
    text = "" if process.returncode == 0 else f"{next(reversed(lines), '')} (exit code {process.returncode})"
    return InvariantResult(name, process.returncode == 0, text)


# ------------------------------------------------------------------------------------------------------------- the run


async def conduct(plan: ChaosPlan, report: ChaosReport) -> None:
    """Carry out the plan and fill the report. Raises ``P2PTrainError`` if the cluster cannot be started."""
    console, stop = Console(), asyncio.Event()
    run = ChaosRun(plan, report, console)

    def leave(text: str) -> None:
        for cluster in run.clusters:  # at once, because a second Ctrl+C may end this process
            cluster.let_go()
        console.event("info", text)

    stop_on_signals(stop, leave)
    try:
        await unless_stopped(stop, run.all())
        if not report.complete:
            report.notes.append("interrupted: the checks at the end of the run were skipped")
    finally:
        for cluster in run.clusters:
            await cluster.end()
        console.finish()


class ChaosRun:
    def __init__(self, plan: ChaosPlan, report: ChaosReport, console: Console) -> None:
        self.plan, self.report, self._console = plan, report, console
        self.clusters: list[ProxiedCluster] = []

    async def all(self) -> None:
        plan, report = self.plan, self.report
        async with self._cluster(plan.root) as (cluster, observer, history):
            if not plan.attack:  # else each step is attacked, and the job may be short
                await self._undisturbed(observer, history)
            faults = FaultInjector(cluster, observer, history, self._console)
            begin_s = now()
            actions = judge.schedule(plan.seed, workers=plan.workers, kinds=plan.kinds)
            try:
                await faults.run(actions, count=plan.count, duration_s=plan.duration_s)
            finally:
                report.injected_faults, report.seconds, report.steps = faults.done, now() - begin_s, observer.step
                report.steps_per_s = judge.steps_per_s(history.steps, begin_s, now())
            step = await self._common_checkpoint(cluster, faults)
            recorded = await self._recorded(cluster, observer)
        if plan.attack and observer.info is not None:
            wrong = [observer.id_of(place.name) for place in cluster.places.values() if plan.attack_of(place.number)]
            report.attack = judge.Attack.of(plan.attack, observer.info, observer.names, wrong)
        await self._judged(cluster, faults, recorded, step)
        report.complete = True

    @asynccontextmanager
    async def _cluster(self, root: Path) -> AsyncIterator[tuple[ProxiedCluster, JobObserver, ChaosHistory]]:
        plan = self.plan
        local, threads = LocalCluster(root, tls=plan.tls), plan.profile.device.threads or threads_each(plan.workers)
        cluster = ProxiedCluster(local, plan.workers, threads, lambda: None, plan.attack_of)
        self.clusters.append(cluster)
        await cluster.start_seed()
        name = Path(plan.profile_name).stem
        async with local.operator() as client:
            job = await client.create_job(name, name, plan.profile.to_spec())
        history = ChaosHistory(job)
        observer = JobObserver(job, on_record=lambda record: history.take(record, now()))
        cluster.on_change = observer.wake

        async def observe() -> None:
            with suppress(P2PTrainError):  # ``until`` raises it
                async for _ in observer.run(local.operator):
                    pass

        observing = asyncio.create_task(observe())
        try:
            for number in range(1, plan.workers + 1):
                await cluster.start_worker(number)
            self._console.event("info", local.start_notice(plan.workers))
            remedy = f"the logs are in {local.logs}"
            if not await observer.until(lambda: bool(cluster.exits) or _whole(cluster, observer), PATIENCE_S):
                raise JobFailed("the workers did not form a ring", remedy=remedy)
            if cluster.exits:
                raise JobFailed(cluster.exits[0], remedy=remedy)
            yield cluster, observer, history
        finally:
            observing.cancel()
            await asyncio.wait({observing})
            await cluster.end()

    async def _undisturbed(self, observer: JobObserver, history: ChaosHistory) -> None:
        """Measure the speed without faults. Raises ``JobFailed``."""
        first = observer.step + 3  # the first steps load kernels and pages
        await observer.until(lambda: observer.step >= first, PATIENCE_S)
        begin_s, step = now(), observer.step
        self._console.event("info", "all workers are in the ring; measuring steps without faults first")
        await observer.until(lambda: observer.is_finished or observer.step >= step + BASELINE_STEPS, PATIENCE_S)
        await asyncio.sleep(max(0.0, BASELINE_S - (now() - begin_s)))
        if observer.step <= step:
            raise JobFailed(f"no step was committed within {PATIENCE_S:.0f} s before the first fault")
        rate = self.report.baseline_steps_per_s = judge.steps_per_s(history.steps, begin_s, history.steps[-1].at_s)
        self._console.event("info", f"undisturbed: {rate:.2f} steps/s; injecting faults now")

    async def _common_checkpoint(self, cluster: ProxiedCluster, faults: FaultInjector) -> int:
        observer, history = faults.observer, faults.history
        self._console.event("info", "no more faults; waiting for all workers and for a checkpoint from each of them")
        if not await observer.until(lambda: observer.is_finished or _whole(cluster, observer), PATIENCE_S):
            faults.stuck.append(f"some workers were not members {PATIENCE_S:.0f} s after the last fault")
            return 0
        after, names = observer.step, {place.name for place in cluster.places.values()}

        def common() -> int:
            steps = {info.step for info in history.saved.values() if info.step > after}
            done = observer.info.steps_total if observer.is_finished and observer.info else 0
            return max((step for step in steps if names <= history.holders(step)), default=done)

        if not await observer.until(lambda: common() > 0, PATIENCE_S):
            faults.stuck.append(f"no checkpoint from all workers within {PATIENCE_S:.0f} s after step {after}")
        return common()

    async def _recorded(self, cluster: ProxiedCluster, observer: JobObserver) -> list[InvariantResult]:
        """Judge what the seed has on record of the job."""
        try:
            async with cluster.local.operator() as client:
                found = await audit(client, observer.job, self.plan.profile, lambda step, of: None)
                last = observer.step  # the job continues while its record is read
                steps = [row.step async for row in client.all_metrics(observer.job)]
        except P2PTrainError as problem:
            return [InvariantResult("the seed's record can be read", False, problem.message)]
        faults = [f"step {found.fault.step}: {found.fault.text}"] if found.fault else []
        faults += ["steps are missing"] if observer.is_finished and found.steps < last else []
        return [judge.every_step_once(steps, last), judge.none_of("the ledger covers every sample once", faults)]

    async def _judged(
        self,
        cluster: ProxiedCluster,
        faults: FaultInjector,
        recorded: list[InvariantResult],
        step: int,
    ) -> None:
        plan, report, observer, history = self.plan, self.report, faults.observer, faults.history
        rtt_ms = max(history.joined_rtt_ms.values(), default=0.0)
        grace_s = 2 * (plan.profile.membership.death_s or beat_defaults(rtt_ms)[1])
        lost = [
            event.text
            for at_s, event in history.events
            if event.kind == "lost" and not judge.excuse(event.peer, at_s, faults.done, grace_s)
        ]
        dropped = judge.evictions(history.views, faults.done, observer.names, grace_s)
        drift = [event.text for _, event in history.events if event.kind == "drift"]
        damaging = any(injected.kind == "corrupt" for injected in faults.done) and not plan.tls
        names = [place.name for place in cluster.places.values()]
        found = await asyncio.to_thread(saved, plan.root, observer.job, step, names)
        failed = [observer.info.reason] if observer.info and observer.state in ("failed", "cancelled") else []
        equal = judge.same("the state is equal on all members", found.states)
        if not step or len(found.states) < plan.workers:
            text = f"{len(found.states)} of {plan.workers} hold a whole checkpoint of step {step}"
            equal = InvariantResult(equal.name, False, text)
        unchecked = InvariantResult("no replica drifted", None, "not checked on plain TCP with damaged bytes")
        report.verdicts += [
            judge.none_of("training continues after every fault", [*faults.stuck, *failed]),
            judge.none_of("no process ended by itself", cluster.exits),
            judge.none_of("no worker is evicted without a fault", dropped + lost),
            *recorded,
            equal,
            unchecked if damaging else judge.none_of("no replica drifted", drift),
            judge.none_of(f"checkpoints are whole ({found.count} of them)", found.damaged),
            judge.none_of("no process is left behind", cluster.orphans()),
        ]
        if found.newest is not None:
            checkpoint = ("--checkpoint", str(found.newest), "--tokens", "1")
            report.verdicts.append(await command("a checkpoint loads", "generate", "def ", *checkpoint))
        if damaging:
            report.notes.append(
                "plain TCP does not detect damaged bytes: all workers may sum and apply the same damaged byte, so the "
                "run only checks that their states stay equal; with --tls it checks everything"
            )


def _whole(cluster: ProxiedCluster, observer: JobObserver) -> bool:
    ids = {observer.id_of(place.name) for place in cluster.places.values()}
    return observer.step > 0 and len(ids) == cluster.workers and ids <= set(observer.members)
