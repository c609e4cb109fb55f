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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from configs.schema import Profile
from p2ptrain.cluster.access import MAX_TARGET_BYTES
from p2ptrain.cluster.console import Console, run_stoppable
from p2ptrain.cluster.local_cluster import LOOPBACK, LocalCluster, PeerProcess, free_port, threads_each
from p2ptrain.core.checkpoints import CheckpointStore, verify_checkpoint
from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.errors import JobFailed, P2PTrainError, StorageError, first_error
from p2ptrain.lab.audit import audit
from p2ptrain.lab.chaos import judge
from p2ptrain.lab.chaos.judge import Action, ChaosObserver, ChaosReport, InjectedFault, InvariantResult, ObservedStep
from p2ptrain.lab.chaos.proxy import Proxy
from ring.detector import beat_defaults
from wire.address import Ticket, format_address, local_ticket_path

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

    @property
    def writers(self) -> int:
        """Workers that save the same step."""
        return 1 if self.profile.job.strategy == "server" else self.workers

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
    """One worker's place in the cluster: its proxies and its newest process. ``busy``: a fault is using this worker."""

    number: int
    data: Proxy
    control: Proxy
    process: PeerProcess
    busy: bool = False

    @property
    def name(self) -> str:
        return self.process.name

    def mend(self) -> None:
        """End all faults of this worker: thaw it, and restore its links and its disk."""
        if self.process.alive and hasattr(signal, "SIGCONT"):
            self.process.process.send_signal(signal.SIGCONT)
        self.data.mend()
        self.control.mend()
        self.limit_files(None)

    def limit_files(self, limit_bytes: int | None) -> None:
        """Limit the size of each file of the worker and its helper processes; None removes the limit.

        The limit is ``RLIMIT_FSIZE``, which needs no privileges and does not affect other processes. A write past it
        fails with EFBIG in the middle of a file, just as a write on a full disk fails with ENOSPC.
        """
        if sys.platform != "linux" or not self.process.alive:
            return
        with suppress(psutil.NoSuchProcess):  # the process ended, which is judged at the end
            process = psutil.Process(self.process.process.pid)
            for limited in [process, *process.children(recursive=True)]:
                _, hard = limited.rlimit(psutil.RLIMIT_FSIZE)
                limited.rlimit(psutil.RLIMIT_FSIZE, (hard if limit_bytes is None else limit_bytes, hard))


class ProxiedCluster(LocalCluster):
    """A seed and workers whose links run through proxies. ``slots``: of the workers, by number."""

    def __init__(self, plan: ChaosPlan) -> None:
        super().__init__(plan.root, tls=plan.tls)
        self.slots: dict[int, WorkerSlot] = {}
        self._plan = plan

    async def start_worker(self, number: int) -> None:
        """Start a worker; returns before it has joined. Raises ``StorageError``, ``UserError``."""
        slot, name, port = self.slots.get(number), f"worker-{number}", free_port()
        if slot is None:
            data, control = Proxy((LOOPBACK, port)), Proxy((LOOPBACK, self.port))
            await data.start()
            await control.start()
        else:
            data, control = slot.data, slot.control
            data.target = (LOOPBACK, port)
        threads = self._plan.profile.device.threads or threads_each(self._plan.workers)
        options = ["--threads", str(threads), "--host", LOOPBACK, "--port", str(port)]
        options += ["--advertise", format_address(*data.address)]
        options += ["--attack", self._plan.attack] * bool(self._plan.attack_of(number))
        process = await self.start_peer(name, number, *options, target=self._way_to_seed(name, control))
        if slot is None:
            self.slots[number] = WorkerSlot(number, data, control, process)
        else:
            slot.process = process

    def _way_to_seed(self, name: str, proxy: Proxy) -> str:
        """What the worker joins: the proxy's address, or the seed's ticket with it."""
        host, port = proxy.address
        if not self.tls:
            return format_address(host, port)
        path, disk = local_ticket_path(self.root, "worker"), RealDisk()
        ticket = Ticket.parse_untrusted(disk.read(path, max_bytes=MAX_TARGET_BYTES).decode().strip())
        own = path.with_name(f"{name}.ticket")
        write_atomic(disk, own, str(dataclasses.replace(ticket, port=port)).encode(), private=True)
        return f"@{own}"

    async def end(self) -> None:
        for slot in self.slots.values():
            slot.mend()
        await super().end()
        for slot in self.slots.values():
            await slot.data.close()
            await slot.control.close()

    def kill_orphans(self) -> list[str]:
        """Kill the processes that outlived the cluster, including children of peers. Returns one line for each."""
        found, sessions = [], {started.process.pid for started in self.started}
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} ({process.name()}, {process.status()})")
                    process.kill()
        return found


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
    observer: ChaosObserver
    console: Console
    done: list[InjectedFault] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    async def run(self, actions: Iterable[Action], *, count: int, duration_s: float) -> None:
        """Inject ``count`` faults one at a time; if ``count`` is 0, all faults that start within ``duration_s``.

        Returns when the last fault is over. Raises ``P2PTrainError`` if a process cannot be started.
        """
        began, active = now(), set[asyncio.Task[None]]()

        async def settle() -> None:
            if active:
                await asyncio.wait(active)
                active.clear()

        try:
            async with asyncio.TaskGroup() as tasks:
                for action in actions:
                    if action.number > count if count else began + duration_s <= now() + action.gap_s:
                        break
                    await self._pause(action.gap_s)
                    is_alone = bool(count) or action.kind == "seed"
                    if is_alone:
                        await settle()
                    slot = await self._take_slot(action)
                    if self._over:
                        break
                    active.add(tasks.create_task(self._inject(action, slot), name=f"fault {action.number}"))
                    if is_alone:
                        await settle()
                if not count:
                    await self._pause(began + duration_s - now())
        except* P2PTrainError as problems:
            raise first_error(problems) from None

    @property
    def _over(self) -> bool:
        return self.observer.is_finished or bool(self.stuck)

    async def _pause(self, seconds: float) -> None:
        await self.observer.until(lambda: self._over, max(seconds, 0.0))

    async def _take_slot(self, action: Action) -> WorkerSlot | None:
        """Reserve a worker for the fault; None: it is the seed's, or the run is over."""
        if action.kind == "seed":
            return None
        if not await self.observer.until(lambda: self._over or self._is_possible(action), PATIENCE_S):
            self.stuck.append(f"fault {action.number} ({action.kind}): no worker available within {PATIENCE_S:.0f} s")
        if self._over:
            return None
        slot = self._unharmed(action)[0]
        slot.busy = True
        return slot

    def _unharmed(self, action: Action) -> list[WorkerSlot]:
        slots = (self.cluster.slots[number] for number in action.order)
        alive = (slot for slot in slots if not slot.busy and slot.process.alive)
        return [slot for slot in alive if self.observer.id_of(slot.name) in self.observer.members]

    def _is_possible(self, action: Action) -> bool:
        """Return whether a member of the view that committed the newest step would stay unharmed.

        Without such a worker the others would rightly wait for one to come back.
        """
        steps, views = self.observer.steps, self.observer.views
        newest = steps[-1].generation if steps else 0
        members = next((view.members for view in reversed(views) if view.generation == newest), ())
        return bool({self.observer.id_of(slot.name) for slot in self._unharmed(action)[1:]} & set(members))

    async def _inject(self, action: Action, slot: WorkerSlot | None) -> None:
        observer, kind = self.observer, action.kind
        excused: frozenset[str] = frozenset()
        if slot is not None and kind in ("cut", "corrupt"):
            members, peer = observer.members, observer.id_of(slot.name)
            rank = members.index(peer)  # either end may be blamed for a broken link
            excused = frozenset({peer, members[rank - 1], members[(rank + 1) % len(members)]})
        elif slot is not None and kind in ("kill", "freeze"):
            excused = frozenset({observer.id_of(slot.name)})
        name = slot.name if slot is not None else "seed"
        generation = observer.info.generation if observer.info else 0
        injected = InjectedFault(action.number, kind, now(), generation, observer.step, (name,), excused)
        self.done.append(injected)
        first_step = len(self.observer.steps)
        try:
            await (self._hurt_seed(action, injected) if slot is None else self._hurt(action, slot, injected))
            injected.until_s = now()
            await self._recovery(injected, first_step)
            whole = slot is None or await observer.until(
                lambda: self._over or observer.id_of(name) in observer.members, PATIENCE_S
            )
            injected.whole_s = now()
            if not whole:
                self.stuck.append(f"{name}: not a member {PATIENCE_S:.0f} s after fault {injected.number}")
        finally:
            if slot is not None:
                slot.busy = False
            observer.wake()

    def _report(self, injected: InjectedFault) -> None:
        parts = (injected.kind, *injected.peers, injected.detail)
        self.console.event("info", f"fault {injected.number}: {' '.join(filter(None, parts))}")

    async def _hurt_seed(self, action: Action, injected: InjectedFault) -> None:
        cluster, observer, before = self.cluster, self.observer, self.observer.step
        await cluster.seed.kill()
        self._report(injected)
        await self._pause(action.lasts_s)
        await cluster.start_seed()
        await observer.until(lambda: self._over or (bool(observer.members) and observer.step > before), PATIENCE_S)

    async def _hurt(self, action: Action, slot: WorkerSlot, injected: InjectedFault) -> None:
        damaged, lasts = slot.data.damaged, f"for {action.lasts_s:.1f} s"
        match action.kind:
            case "kill":
                await slot.process.kill()
            case "freeze":
                injected.detail = lasts
                slot.process.process.send_signal(signal.SIGSTOP)
            case "cut":
                where, how = action.cut.split()
                injected.kind, injected.detail = f"cut {action.cut}", lasts
                links = {"ring": (slot.data,), "seed": (slot.control,), "all": (slot.data, slot.control)}
                for link in links[where]:
                    link.cut(silent=how == "silent")
            case "slow":
                rate = f"to {action.rate_bps / 1e6:.2f} MB/s, {1e3 * action.delay_s:.0f} ms"
                injected.detail = f"{rate}, {lasts}"
                slot.data.slow(action.rate_bps, action.delay_s)
            case "corrupt":
                injected.detail = f"one damaged byte in the next {action.skip_bytes + 1} on the ring"
                slot.data.damage(action.skip_bytes)
            case "disk":
                files = (self.cluster.root / slot.name).glob("jobs/*/checkpoints/step-*/*")
                largest = max((path.stat().st_size for path in files), default=0)
                # Half of a checkpoint's largest file, but enough for the worker's log, which must stay complete.
                limit_bytes = max(largest // 2, slot.process.log.stat().st_size + (1 << 20))
                injected.detail = f"files of at most {limit_bytes} bytes, {lasts}"
                slot.limit_files(limit_bytes)
                await self._save()
        self._report(injected)
        await self._pause(action.lasts_s)
        slot.mend()
        if action.kind == "kill":
            await self.cluster.start_worker(slot.number)
        if action.kind == "corrupt" and slot.data.damaged == damaged:
            injected.detail += "; no byte was sent"

    async def _save(self) -> None:
        with suppress(P2PTrainError):
            async with self.cluster.operator() as client:
                await client.tell_job(self.observer.job, "save")

    async def _recovery(self, injected: InjectedFault, first_step: int) -> None:
        def back() -> ObservedStep | None:
            return judge.find_recovery(injected, self.observer.steps[first_step:])

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


def read_saved_states(root: Path, job: str, step: int, names: Iterable[str]) -> SavedStates:
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
                files = sorted(entry.files.items())
                tensors = (item for item in files if item[0].endswith(".safetensors"))
                lines = (f"{file} {size_bytes} {digest}\n" for file, (size_bytes, digest) in tensors)
                made.states[name] = hashlib.sha256("".join(lines).encode()).hexdigest()
                made.newest = entry.path
        made.damaged += [f"{directory / name} has no manifest that can be read" for name in sorted(found)]
    return made


async def run_command(name: str, log: Path, *arguments: str) -> InvariantResult:
    """Run a ``p2ptrain`` command in a process of its own; the verdict says whether it succeeded."""
    child = await PeerProcess.start(arguments[0], arguments, log)
    try:
        await child.wait_or_kill(COMMAND_S)
    finally:
        if child.alive:
            await child.kill()
    if child.was_killed:
        return InvariantResult(name, False, f"no answer within {COMMAND_S:.0f} s")
    code = child.process.returncode
    return InvariantResult(name, not code, f"{child.failure().message} (exit code {code})" if code else "")


# ------------------------------------------------------------------------------------------------------------- the run


async def conduct(plan: ChaosPlan, report: ChaosReport) -> None:
    """Carry out the plan and fill the report. Raises ``P2PTrainError`` if the cluster cannot be started."""
    await run_stoppable(lambda console: ChaosRun(plan, report, console).run())
    if not report.complete:
        report.notes.append("interrupted: the checks at the end of the run were skipped")


class ChaosRun:
    def __init__(self, plan: ChaosPlan, report: ChaosReport, console: Console) -> None:
        self._plan, self._report, self._console = plan, report, console
        self._cluster = ProxiedCluster(plan)
        self._job_name = Path(plan.profile_name).stem
        self._observer = ChaosObserver(self._job_name, now)
        self._faults = FaultInjector(self._cluster, self._observer, console)

    async def run(self) -> None:
        plan, report, cluster, observer = self._plan, self._report, self._cluster, self._observer
        observing: asyncio.Task[None] | None = None
        try:
            await cluster.start_seed()
            async with cluster.operator() as client:
                await client.create_job(self._job_name, self._job_name, plan.profile.to_spec())
            observing = asyncio.create_task(self._observe())
            await self._form_ring()
            if not plan.attack:  # else each step is attacked, and the job may be short
                await self._measure_undisturbed()
            begin_s = now()
            actions = judge.schedule(plan.seed, workers=plan.workers, kinds=plan.kinds)
            try:
                await self._faults.run(actions, count=plan.count, duration_s=plan.duration_s)
            finally:
                report.injected_faults, report.seconds, report.steps = self._faults.done, now() - begin_s, observer.step
                report.steps_per_s = judge.steps_per_s(observer.steps, begin_s, now())
            step = await self._common_checkpoint()
            recorded = [*await self._judge_record(), judge.check_none("no process ended by itself", cluster.failures())]
        finally:
            if observing is not None:
                observing.cancel()
                await asyncio.wait({observing})
            await cluster.end()
        if plan.attack and observer.info is not None:
            wrong = [observer.id_of(slot.name) for slot in cluster.slots.values() if plan.attack_of(slot.number)]
            report.attack = judge.Attack.of(plan.attack, observer.info, observer.names, wrong)
        await self._judge(recorded, step)
        report.complete = True

    async def _observe(self) -> None:
        with suppress(P2PTrainError):  # ``JobObserver.until`` raises it
            async for _ in self._observer.run(self._cluster.operator, lambda problem: self._observer.wake()):
                pass

    async def _form_ring(self) -> None:
        cluster, count = self._cluster, self._plan.workers
        for number in range(1, count + 1):
            await cluster.start_worker(number)
        self._console.event("info", cluster.start_notice(count))
        forming = self._observer.until(self._is_whole, PATIENCE_S)
        if not await cluster.while_alive(forming, needed=cluster.started):
            raise JobFailed("the workers did not form a ring", remedy=f"the logs are in {cluster.logs}")

    async def _measure_undisturbed(self) -> None:
        """Measure the speed without faults. Raises ``JobFailed``."""
        observer = self._observer
        first = observer.step + 3  # the first steps load kernels and pages
        await observer.until(lambda: observer.step >= first, PATIENCE_S)
        begin_s, step = now(), observer.step
        self._console.event("info", "all workers are in the ring; measuring steps without faults first")
        await observer.until(lambda: observer.is_finished or observer.step >= step + BASELINE_STEPS, PATIENCE_S)
        await asyncio.sleep(max(0.0, BASELINE_S - (now() - begin_s)))
        if observer.step <= step:
            raise JobFailed(f"no step was committed within {PATIENCE_S:.0f} s before the first fault")
        rate = self._report.baseline_steps_per_s = judge.steps_per_s(observer.steps, begin_s, observer.steps[-1].at_s)
        self._console.event("info", f"undisturbed: {rate:.2f} steps/s; injecting faults now")

    async def _common_checkpoint(self) -> int:
        """Wait until all that save have saved the same step, and return it; 0: they did not in time."""
        observer, stuck = self._observer, self._faults.stuck
        self._console.event("info", "no more faults; waiting for all workers and for a checkpoint from each of them")
        if not await observer.until(lambda: observer.is_finished or self._is_whole(), PATIENCE_S):
            stuck.append(f"some workers were not members {PATIENCE_S:.0f} s after the last fault")
            return 0
        after, names = observer.step, {slot.name for slot in self._cluster.slots.values()}

        def common() -> int:
            steps = {info.step for info in observer.saved.values() if info.step > after}
            done = observer.info.steps_total if observer.is_finished and observer.info else 0
            writers = {step: len(names & observer.holders(step)) for step in steps}
            return max((step for step in steps if writers[step] >= self._plan.writers), default=done)

        if not await observer.until(lambda: common() > 0, PATIENCE_S):
            stuck.append(f"no checkpoint from all workers within {PATIENCE_S:.0f} s after step {after}")
        return common()

    def _is_whole(self) -> bool:
        """Whether all workers are members of a ring that trains."""
        ids = {self._observer.id_of(slot.name) for slot in self._cluster.slots.values()}
        return self._observer.step > 0 and len(ids) == self._plan.workers and ids <= set(self._observer.members)

    async def _judge_record(self) -> list[InvariantResult]:
        """Judge what the seed has on record of the job."""
        observer = self._observer
        try:
            async with self._cluster.operator() as client:
                found = await audit(client, observer.job, self._plan.profile, lambda step, of: None)
                last = observer.step  # the job continues while its record is read
                steps = [row.step async for row in client.all_metrics(observer.job)]
        except P2PTrainError as problem:
            return [InvariantResult("the seed's record can be read", False, problem.message)]
        faults = [f"step {found.fault.step}: {found.fault.text}"] if found.fault else []
        faults += ["steps are missing"] if observer.is_finished and found.steps < last else []
        return [judge.check_every_step(steps, last), judge.check_none("the ledger covers every sample once", faults)]

    async def _judge(self, recorded: list[InvariantResult], step: int) -> None:
        """Judge the rest, when all processes have ended. ``step``: of the checkpoint that all have."""
        plan, report, observer = self._plan, self._report, self._observer
        grace_s = 2 * (plan.profile.membership.death_s or beat_defaults(observer.rtt_ms)[1])
        injected_faults = self._faults.done
        lost = [
            event.text
            for at_s, event in observer.events
            if event.kind == "lost" and not judge.is_excused(event.peer, at_s, injected_faults, grace_s)
        ]
        dropped = judge.list_evictions(observer.views, injected_faults, observer.names, grace_s)
        drift = [event.text for _, event in observer.events if event.kind == "drift"]
        damaging = any(injected.kind == "corrupt" for injected in injected_faults) and not plan.tls
        names = [slot.name for slot in self._cluster.slots.values()]
        found = await asyncio.to_thread(read_saved_states, plan.root, observer.job, step, names)
        failed = [observer.info.reason] if observer.info and observer.state in ("failed", "cancelled") else []
        equal = judge.check_equal("the state is equal on all members", found.states)
        if not step or len(found.states) < plan.writers:
            text = f"{len(found.states)} of {plan.writers} hold a whole checkpoint of step {step}"
            equal = InvariantResult(equal.name, False, text)
        unchecked = InvariantResult("no replica drifted", None, "not checked on plain TCP with damaged bytes")
        report.verdicts += [
            judge.check_none("training continues after every fault", [*self._faults.stuck, *failed]),
            judge.check_none("no worker is evicted without a fault", dropped + lost),
            *recorded,
            equal,
            unchecked if damaging else judge.check_none("no replica drifted", drift),
            judge.check_none(f"checkpoints are whole ({found.count} of them)", found.damaged),
            judge.check_none("no process is left behind", self._cluster.kill_orphans()),
        ]
        if found.newest is not None:
            log, words = self._cluster.logs / "generate.log", ("--checkpoint", str(found.newest), "--tokens", "1")
            report.verdicts.append(await run_command("a checkpoint loads", log, "generate", "def ", *words))
        if damaging:
            report.notes.append(
                "plain TCP does not detect damaged bytes: all workers may sum and apply the same damaged byte, so the "
                "run only checks that their states stay equal; with --tls it checks everything"
            )
