"""How the simulator observes the product, makes it deterministic, and switches safeguards off.

It patches classes for the time of a run. The product has no hooks for this, and needs none.

A mutation is one safeguard switched off. A simulator that does not notice a mutation would prove nothing. Each mutation
names the faults that reveal it soonest.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import operator
import random
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.core.checkpoints import MANIFEST, CheckpointStore, manifest_untrusted
from p2ptrain.lab.sim.machine import ATTACKER, PROCESS, STATE_BYTES, ProcessDisk, bits_of
from p2ptrain.lab.stand_in import StandInEngine
from ring import member_events as ev
from ring import replicas, staleness, token, transaction
from ring.coordinator import Coordinator
from ring.job_member import JobMember, MemberPhase
from ring.lanes import Lane
from ring.links import Inbound
from ring.neighbours import AT_WORK
from ring.quarantine import Exclusions, Quarantine
from ring.session import RingSession
from ring.staleness import Intake
from ring.token import TOKEN_BYTES, Flag, Token
from ring.transaction import Transaction
from ring.versions import VersionMember
from ring.view import View
from roles import gauges
from roles.seed import jobs
from roles.seed import run as backup
from roles.seed.job_history import ViewCensus
from roles.seed.jobs import JobController
from roles.seed.ledger import JobLedger
from roles.seed.store import Records
from roles.seed_link import SeedLink
from roles.strategies import parts, server
from roles.strategies.secure import Masks
from roles.strategies.strategy import Strategy
from roles.worker.checkpoint_store import CheckpointFiles
from roles.worker.heal_source import HealSource
from roles.worker.privacy import Budget
from roles.worker.reports import Reports, WorkerLedger
from roles.worker.runner import JobRunner
from roles.worker.step_runner import StepRunner
from wire.frame import FrameDecoder
from wire.job_messages import CheckpointSaved, excluded_key

if TYPE_CHECKING:
    from p2ptrain.lab.sim.cluster import SimMachine, Simulation

EXCLUDING = ("krum", "multi_krum", "bulyan")
"""Robust rules that leave vectors out."""


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within the block ``owner.name`` is ``make(original)``."""
    before = owner.__dict__[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _around(call: Callable[..., Any]) -> Callable[[Any], Any]:
    """``call`` in the place of the original, which it gets as its first argument."""
    return lambda original: lambda *arguments, **named: call(original, *arguments, **named)


def _then(tell: Callable[..., object]) -> Callable[[Any], Any]:
    def call(original: Any, *arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        tell(*arguments, **named)
        return result

    return _around(call)


@contextmanager
def watched(simulation: Simulation, names: random.Random) -> Iterator[None]:
    """Report all events to the simulation's observer, and take random names from ``names``."""
    observer = simulation.observer

    def here() -> SimMachine | None:
        process = PROCESS.get()
        return simulation.machines.get(process.host) if process is not None and process.alive else None

    def stage_of(path: Path) -> int | None:
        """The stage whose checkpoints lie there; None: checkpoints of all stages of a split model."""
        found = re.search(r"/stage-(\d+)-of-", str(path))
        return int(found[1]) if found else None if observer.stages > 1 else 0

    def handle(original: Any, self: JobMember, event: Any) -> Any:
        before, view, healing = (self.applied, self.lineage), self.view, self.phase is MemberPhase.HEALING
        result = original(self, event)
        if (self.applied, self.lineage) != before:
            machine = here()
            if machine is not None:  # a member does not commit the steps it is given
                pulled = isinstance(self, VersionMember) and not self.is_server
                fetched = healing or pulled or isinstance(event, ev.StateFollowed)
                observer.moved(machine, self, None if fetched else view, before)
        return result

    minting: dict[int, bool] = {}  # generation → whether a person restores; without views that a restored seed adopts

    async def mint(original: Any, self: JobController, view: View, *rest: Any, restored: bool) -> None:
        minting[view.generation] = restored
        await original(self, view, *rest, restored=restored)

    def view_added(self: Records, view: View, *rest: Any) -> None:
        if view.generation in minting:
            observer.minted(view, minting.pop(view.generation))

    def job_saved(self: Records, job: Any) -> None:
        if job.state != observer.job_state:
            observer.job_state = job.state
            observer.report.tell(f"the job is {job.state} ({job.reason})")
            simulation.job_changed.set()

    def publish(original: Any, self: CheckpointStore, temporary: Path, target: Path) -> None:
        machine = here()
        if machine is not None:  # the checkpoint may exist from now on, wherever the process dies
            encoded = self._disk.read(temporary / MANIFEST, max_bytes=1 << 20)
            step, meta, files = manifest_untrusted(encoded)
            states = sorted(name for name in files if name.endswith(".bin"))  # a split model's: by stage
            bits = [bits_of(self._disk.read(temporary / name, max_bytes=STATE_BYTES)) for name in states]
            observer.checkpoints.saved(machine, step, hashlib.sha256(encoded).hexdigest(), meta, bits)
        original(self, temporary, target)

    def removed(self: CheckpointStore, path: Path) -> None:
        machine = here()
        if machine is not None:
            kept = machine.announced if stage_of(path) is not None else machine.wholes
            kept.pop(int(path.name.rpartition("-")[2]), None)

    async def verify(original: Any, self: CheckpointFiles, step: int) -> Any:
        found = await original(self, step)
        machine = here()
        stage = stage_of(self.root)
        if machine is not None and stage is not None:  # a stage may have no room for its share of a whole one
            observer.checkpoints.promised(machine, stage, step)
        return found

    async def load(original: Any, self: CheckpointFiles, *rest: Any, restore_step: int, **more: Any) -> Any:
        found = await original(self, *rest, restore_step=restore_step, **more)
        machine = here()
        if machine is not None:
            observer.checkpoints.loaded(machine, found[3], restore_step)
        return found

    def send(original: Any, self: SeedLink, message: Any) -> None:
        machine = here()
        if isinstance(message, CheckpointSaved) and machine is not None:
            observer.checkpoints.announced(machine, message.step, message.digest)
        original(self, message)

    def give_up(original: Any, self: JobLedger, *arguments: Any) -> Any:
        before, text = self.step, original(self, *arguments)
        if text:
            observer.gave_up(before + 1, self.step)
        return text

    def summarize(original: Any, self: Strategy, own: float) -> Any:
        machine = here()
        members = self._session.size if self._session is not None else 1
        if machine is not None and machine.misconduct.flips and members > 1:  # a lone member's flip cannot be noticed
            memory = self._engine.reduce_buffer.view("u1")
            memory[machine.misconduct.flips % memory.size] ^= 1  # a part's buffer is smaller
            machine.misconduct.flips = 0
        return original(self, own)

    def encode(original: Any, self: Token) -> bytes:
        machine = here()
        if machine is not None and machine.misconduct.false_tokens:
            machine.misconduct.false_tokens -= 1
            observer.culprits.liars.add(machine.host)
            self = replace(self, **machine.misconduct.falsely)
        return bytes(original(self))

    def step_done(self: Reports, step: int, scores: dict[str, float], *, redone: bool) -> None:
        view, rule = self._core.view, self._profile.robust.rule
        ranks = [rank for rank, member in enumerate(view.members) if member.name == ATTACKER] if view else []
        for rank in ranks if rule in EXCLUDING and not redone else ():
            out = scores.get(excluded_key(rank)) == 1
            observer.report.check("attacker excluded", out, f"{rule} has used the attacker's vector of step {step + 1}")

    def excluded(self: Exclusions, peer_id: str, why: str, *rest: Any) -> None:
        if observer.culprits.hosts is not None:
            guilty = [simulation.machines[host].worker for host in observer.culprits.hosts]
            known = any(worker is not None and worker.peer_id == peer_id for worker in guilty)
            observer.report.check("innocent", known, f"{peer_id} is excluded: {why}")

    async def all_gather(original: Any, self: RingSession, mine: bytes, **more: Any) -> Any:
        machine = here()
        garbled = machine is not None and machine.misconduct.kind == "garble" and len(mine) == TOKEN_BYTES
        return await original(self, bytes(len(mine)) if garbled else mine, **more)

    def send_ready(original: Any, self: Lane) -> None:
        machine = here()
        if machine is None or machine.misconduct.kind != "withhold":
            original(self)

    def masked(self: Masks, values: Any, step: int) -> None:
        for key in self._keys.values():
            observer.privacy.used(key, step, self._rank)

    async def spend(original: Any, self: StepRunner, budget: Budget, members: int) -> None:
        before, view, machine = budget.releases, self._core.view, here()
        await original(self, budget, members)
        if budget.releases > before and view is not None and machine is not None:
            observer.privacy.spent(machine.host, view, self._core.applied, budget.releases)

    with ExitStack() as stack:
        for owner, name, make in (
            (JobMember, "handle", _around(handle)),
            (Transaction, "_reject", _then(observer.rejected)),
            (Token, "encode", _around(encode)),
            (StandInEngine, "use_noise", _then(lambda self, std, key: observer.privacy.used(key) if key else None)),
            (Masks, "add", _then(masked)),
            (StepRunner, "_spend", _around(spend)),
            (JobController, "_mint", _around(mint)),
            (Records, "add_view", _then(view_added)),
            (Records, "save_job", _then(job_saved)),
            (
                Records,
                "add_checkpoint",
                _then(lambda self, item, *_: observer.checkpoints.recorded(item.step, item.digest)),
            ),
            (CheckpointStore, "_publish", _around(publish)),
            (CheckpointStore, "_remove", _then(removed)),
            (CheckpointFiles, "load", _around(load)),
            (CheckpointFiles, "verify", _around(verify)),
            (SeedLink, "send", _around(send)),
            (
                backup,
                "write_copy",
                _then(lambda disk, directory, data: simulation.copies.append((observer.line.generation, data))),
            ),
            (JobLedger, "_give_up_gap", _around(give_up)),
            (Strategy, "_summarize", _around(summarize)),
            (Reports, "step_done", _then(step_done)),
            (Exclusions, "add", _then(excluded)),
            (RingSession, "all_gather", _around(all_gather)),
            (Lane, "_send_ready", _around(send_ready)),
            (secrets, "token_hex", lambda original: lambda number=32: names.randbytes(number).hex()),
            (secrets, "token_bytes", lambda original: lambda number=32: names.randbytes(number)),
            (gauges.Gauges, "machine", lambda original: lambda self: {"memory_bytes": 1e8, "memory_total_bytes": 1e10}),
            (gauges, "_gpu_reader", lambda original: lambda: None),
        ):
            stack.enter_context(replaced(owner, name, make))
        yield


Patch = tuple[Any, str, Callable[[Any], Any]]


def _no_fence() -> list[Patch]:
    """The seed forgets a generation's number on restart, and no member rejects messages of an old generation."""

    def is_current(original: Any, self: Coordinator, peer_id: str, generation: int) -> bool:
        return self.view is not None and self.view.rank_of(peer_id) is not None

    def forget(self: Records, view: View, *rest: Any, **more: Any) -> None:
        self._db.execute("DELETE FROM views WHERE job = ? AND generation = ?", (view.job, view.generation))

    return [
        (Records, "add_view", _then(forget)),
        (Coordinator, "_is_current", _around(is_current)),
        (Inbound, "_judge", lambda original: lambda self, job, generation, peer_id, topology: None),
        (FrameDecoder, "_is_stale", lambda original: lambda self, generation: False),
    ]


def _any_digest(original: Any, *tokens: Any, **known: Any) -> Any:
    fault = original(*tokens, **known)
    return None if fault is not None and fault.cause in ("digest", "figure") else fault


def _believed(original: Any) -> Any:
    return lambda *figures, **known: None


def _anyones(original: Any) -> Any:
    return lambda tokens: Flag(functools.reduce(operator.or_, (token.flags for token in tokens)))


def _unchecked(original: Any, self: Lane) -> None:
    if self._posted:
        self._posted[0][0].check = None
    original(self)


def _disband(original: Any, self: JobRunner, reason: str) -> None:
    original(self, reason)
    if self.state.is_built:
        self.state.engine.reduce_buffer[:] = 0


MUTATIONS: dict[str, tuple[list[Patch], tuple[str, ...]]] = {
    # The seed forgets a generation's number on restart, and no member rejects an old generation.
    "fence": (_no_fence(), ("seed-kill", "seed-restart", "cut", "join")),
    # Members commit without comparing the digests and the norms of the reduced bytes.
    "digest": ([(transaction, "verdict", _around(_any_digest))], ("bit-flip",)),
    # Members believe the norm that one of them tells.
    "norm": (
        [(token, "_false_figure", _believed), (token, "_agreed", lambda original: lambda claimed, last: max(claimed))],
        ("false-token",),
    ),
    # One member's word ends the job, for the others and for the seed.
    "stop": (
        [
            (token, "_false_figure", _believed),
            (transaction, "granted", _anyones),
            (jobs, "least_steps", lambda original: lambda profile: 0),
        ],
        ("false-token",),
    ),
    # The redo buffer is not kept until the outcome is known.
    "redo": ([(JobRunner, "_disband", _around(_disband))], ("kill-in-vote", "join")),
    # Directories are not flushed after their entries changed.
    "dir-sync": ([(ProcessDisk, "sync_dir", lambda original: lambda self, path: None)], ("power-cut", "save")),
    # Reports lost while the seed was away are not repeated.
    "ledger": (
        [(WorkerLedger, "tell_beyond", lambda original: lambda self, step: None)],
        ("seed-kill", "seed-freeze", "silence", "cut", "one-way", "seed-away"),
    ),
    # Checkpoints lack the rows that the seed may not have.
    "rows": ([(WorkerLedger, "files", lambda original: lambda self: [])], ("kill-all", "join")),
    # A restored seed continues in the term of its copy.
    "term": ([(backup, "next_term", lambda original: lambda term: term)], ("seed-lost", "join", "kill")),
    # A restored seed continues from the newest view in its copy, whatever view the members are in.
    "adopt": ([(ViewCensus, "newest_view", lambda original: lambda self, known: None)], ("seed-lost", "join")),
    # A checkpoint is written as soon as this member has applied its step.
    "confirm": (
        [(Transaction, "_confirm", lambda original: lambda self: self._begin_boundary(save=True))],
        ("kill-in-phase", "kill-two", "join", "save", "cut", "freeze"),
    ),
    # A job is done although no disk has its result.
    "result": ([(replicas.RecoveryPolicy, "has_saved", lambda original: lambda *_, **more: True)], ("disk-full",)),
    # After a break the ring runs the same way, and heartbeats do not say how far a member is.
    "turned": (
        [
            (Quarantine, "turned", lambda original: property(lambda self: False)),
            (RingSession, "_status", lambda original: lambda self: (0, AT_WORK)),
        ],
        ("withhold",),
    ),
    # Bytes are not checked before they are passed on.
    "check": ([(Lane, "_arrived", _around(_unchecked))], ("garble", "join")),
    # A member whose computing hangs does not say so.
    "hang": ([(JobRunner, "_watch_compute", lambda original: lambda self: asyncio.sleep(0))], ("hang", "join")),
}
"""Name → (patches, kinds of faults that are likely to reveal the missing safeguard)."""

STAGED: dict[str, tuple[list[Patch], tuple[str, ...]]] = {
    # A member that heals accepts the state of any other member, whichever stage that one holds.
    "stage": (
        [
            (View, "same_stage", lambda original: lambda self, rank: self.members),
            (HealSource, "_has_part", lambda original: lambda self, request: True),
        ],
        ("kill", "join", "power-cut", "cut-in-follow"),
    ),
    # If a part of the newest state is lost, the run starts from the beginning.
    "back": (
        [(replicas, "newest_kept", lambda original: lambda by_stage, wholes=(): 0)],
        ("lose-disk", "save", "join"),
    ),
    # Workers are not told which worker has the whole model's checkpoint that the run goes back to.
    "files": (
        [(replicas.RecoveryPolicy, "holders", lambda original: lambda self, step, part, peer_ids: [])],
        ("lose-disk", "save", "join"),
    ),
    # The lineage covers only the first stage's sums, and members believe their norms.
    "joined": (
        [(parts, "joined_digest", lambda original: lambda digests: digests[:16]), (token, "_false_figure", _believed)],
        ("bit-flip",),
    ),
    # At a checkpoint each member's state is compared with all others, across stages.
    "alike": (
        [(transaction, "odd_ones_out", lambda original: lambda digests, stages=1: original(digests))],
        ("save", "join"),
    ),
}
"""The same for jobs whose model is split."""


def _refuse_nothing(original: Any, self: Intake) -> Any:
    first = self._waiting[: self._buffer] if len(self._waiting) >= self._buffer else []
    return [self._accepted(rank) for rank in first], []


ASYNCHRONOUS: dict[str, tuple[list[Patch], tuple[str, ...]]] = {
    # The server accepts contributions of any staleness.
    "bound": ([(Intake, "choose", _around(_refuse_nothing))], ("join", "slow")),
    # Stale contributions weigh as much as others.
    "weight": ([(staleness, "weight_of", lambda original: lambda staleness: 1.0)], ("join",)),
    # The server of a new view assigns numbers from 0 again.
    "numbers": ([(server, "next_number", lambda original: lambda *arguments: 0)], ("kill", "join")),
    # A view that lacks versions that nobody pulled counts as if none were lost.
    "lost": (
        [(replicas.RecoveryPolicy, "abandoned", lambda original: lambda self, *arguments: ("", ""))],
        ("kill-in-phase", "save", "join"),
    ),
}
"""The same for strategy 'server'."""


async def _as_counted_here(self: Budget, session: Any, *, patience_s: float) -> None:
    """In place of ``Budget.view_began``."""


PRIVATE: dict[str, tuple[list[Patch], tuple[str, ...]]] = {
    # Members do not agree on what the job has spent.
    "agree": ([(Budget, "view_began", lambda original: _as_counted_here)], ("join", "kill")),
    # What a member has spent is not written to its disk.
    "count": ([(Budget, "_write", lambda original: lambda self: None)], ("kill-all", "kill", "join")),
}
"""The same for private jobs."""


@contextmanager
def without(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, make in (MUTATIONS | STAGED | ASYNCHRONOUS | PRIVATE)[name][0] if name else []:
            stack.enter_context(replaced(owner, attribute, make))
        yield
