"""What the simulator sees of the product, and where its machines misbehave: the probes of their worlds.

The probe of a process reports to the observer until the process dies. What becomes of files the simulated disk reports.
A test may act at the same events and points, such as on a message that a worker sends.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from p2ptrain.core.checkpoints import MANIFEST, CheckpointEntry, manifest_untrusted
from p2ptrain.core.world import Probe
from p2ptrain.lab.sim.machine import ATTACKER, Process, ProcessDisk, bits_of
from p2ptrain.lab.sim.observer import ObservedMachine, Observer
from p2ptrain.lab.stand_in import STATE_BYTES
from ring import member_events as ev
from ring.coordination import Mint
from ring.coordinator import Coordinator
from ring.job_member import JobMember, MemberPhase
from ring.token import Token
from ring.versions import VersionMember
from ring.view import View
from roles.engine import Engine, Stage
from roles.seed.run import COPY_NAME
from roles.seed.store import CheckpointChange, Records
from wire.job_messages import CheckpointSaved, excluded_key
from wire.messages import Message

EXCLUDING = ("krum", "multi_krum", "bulyan")
"""Robust rules that leave vectors out."""

Act = Callable[[ObservedMachine, Any], Any]
"""What a test does on a machine: it takes the facts of an event, or the value at a point, for which it returns another
one."""

T = TypeVar("T")


class MachineProbe(Probe):
    """The probe of one process. The method ``_name`` takes the event or point ``name``, and after it ``acts[name]``."""

    def __init__(self, observer: Observer, machine: ObservedMachine, process: Process, acts: Mapping[str, Act]) -> None:
        self._observer, self._machine, self._process = observer, machine, process
        self._acts = acts
        # Of the core before the event: steps and lineage, view, and whether it was healing.
        self._before: tuple[tuple[int, str], View | None, bool] = ((0, ""), None, False)
        self._minting: dict[int, bool] = {}  # generation → whether a person restores; of views that are being stored
        self._excluded: dict[str, tuple[str, float]] = {}  # peer → why, and until when

    def event(self, name: str, **facts: Any) -> None:
        if self._process.alive:
            getattr(self, f"_{name.replace('-', '_')}")(**facts)
            if act := self._acts.get(name):
                act(self._machine, facts)

    def alter(self, point: str, value: T) -> T:
        if not self._process.alive:
            return value
        misbehave, act = getattr(self, f"_{point.replace('-', '_')}", None), self._acts.get(point)
        value = misbehave(value) if misbehave else value
        return cast(T, act(self._machine, value)) if act else value

    # ------------------------------------------------------------------------------------------------------ a worker

    def _member_handled(self, core: JobMember, event: object, instructions: list[object]) -> None:
        new = core is not self._machine.core
        before, view, healing = ((0, ""), None, False) if new else self._before
        self._machine.core = core
        self._before = (core.applied, core.lineage), core.view, core.phase is MemberPhase.HEALING
        if (core.applied, core.lineage) != before:  # a member does not commit the steps that it is given
            pulled = isinstance(core, VersionMember) and not core.is_server
            fetched = healing or pulled or isinstance(event, ev.StateFollowed)
            self._observer.moved(self._machine, core, None if fetched else view, before)
        for instruction in instructions if isinstance(event, ev.TokensGathered) else ():
            match instruction:
                case ev.SendReport(report) if report.cause == "figure" and view is not None:
                    self._observer.accused(view, report)

    def _vote(self, value: tuple[bytes, object]) -> tuple[bytes, object]:
        (token, check), misconduct = value, self._machine.misconduct
        if misconduct.false_tokens:
            misconduct.false_tokens -= 1
            self._observer.liars.add(self._machine.host)
            token = replace(Token.decode_untrusted(token), **misconduct.falsely).encode()
        return bytes(len(token)) if misconduct.kind == "garble" else token, check

    def _lane_sends(self, may_send: bool) -> bool:
        return may_send and self._machine.misconduct.kind != "withhold"

    def _step_reduced(self, engine: Engine) -> None:
        core, misconduct = self._machine.core, self._machine.misconduct
        members = core.view.replicas if core is not None and core.view is not None else 1
        if misconduct.flips and members > 1:  # a lone member's flip cannot be noticed
            memory = engine.reduce_buffer.view("u1")
            memory[misconduct.flips % memory.size] ^= 1  # a part's buffer is smaller
            misconduct.flips = 0

    def _step_applied(self, step: int, scores: Mapping[str, float]) -> None:
        core, rule = self._machine.core, self._observer.rule
        view = core.view if core is not None else None
        ranks = [rank for rank, member in enumerate(view.members) if member.name == ATTACKER] if view else []
        for rank in ranks if rule in EXCLUDING else ():
            text = f"{rule} has used the attacker's vector of step {step + 1}"
            self._observer.report.check("attacker excluded", scores.get(excluded_key(rank)) == 1, text)

    def _release_counted(self, view: View, step: int, count: int, key: bytes) -> None:
        self._observer.members.key_used(key)
        self._observer.members.release_counted(self._machine.host, view, step, count)

    def _masks_made(self, rank: int, keys: Mapping[int, bytes]) -> None:
        for key in keys.values():
            self._observer.members.key_used(key, rank)

    def _state_loaded(self, entry: CheckpointEntry | None, restore_step: int) -> None:
        self._observer.checkpoints.loaded(self._machine, entry, restore_step)

    def _checkpoint_verified(self, step: int, stage: Stage) -> None:
        if stage.split or self._observer.stages == 1:  # a stage may have no room for its share of a whole one
            self._observer.checkpoints.promised(self._machine, stage.index, step)

    def _message_to_seed(self, message: Message) -> Message:
        if isinstance(message, CheckpointSaved):
            self._observer.checkpoints.announced(self._machine, message.step, message.digest)
        return message

    # ------------------------------------------------------------------------------------------------------ the seed

    def _job_handled(self, core: Coordinator, instructions: list[object]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Mint):
                self._minting[instruction.view.generation] = instruction.restored
        before, self._excluded = (
            self._excluded,
            {peer: core.exclusions.reason(peer) for peer in core.exclusions.peer_ids},
        )
        culprits = self._observer.culprits
        for peer_id, exclusion in self._excluded.items():
            if before.get(peer_id) != exclusion and culprits is not None:
                self._observer.report.check("innocent", peer_id in culprits, f"{peer_id}: {exclusion[0]}")

    def _stored(self, method: object, arguments: tuple[Any, ...]) -> None:
        if method is Records.add_view:
            view: View = arguments[0]
            if view.generation in self._minting:
                self._observer.minted(view, self._minting.pop(view.generation))
        elif method is Records.save_job and arguments[0].state != self._observer.job_state:
            job = arguments[0]
            self._observer.job_state = job.state
            self._observer.report.tell(f"the job is {job.state} ({job.reason})")
            self._observer.job_changed.set()
        elif method is Records.add_rows:
            for added in (row.added for row in arguments[0] if isinstance(row, CheckpointChange)):
                self._observer.checkpoints.recorded(added.step, added.digest)

    def _gap_skipped(self, first: int, last: int) -> None:
        self._observer.gave_up(first, last)

    # ------------------------------------------------------------------------------------------------------ the disk

    def renames(self, disk: ProcessDisk, source: Path, target: Path) -> None:
        """A call renames ``source``; wherever the process dies in it, ``target`` may exist from now on."""
        if not self._process.alive:
            return
        if target.name == COPY_NAME:
            self._observer.copies.append((self._observer.history.generation, disk.read(source, max_bytes=STATE_BYTES)))
        elif source.name.startswith(".new-") and target.name.startswith("step-"):
            encoded = disk.read(source / MANIFEST, max_bytes=1 << 20)
            step, meta, files = manifest_untrusted(encoded)
            states = sorted(name for name in files if name.endswith(".bin"))  # a split model's: by stage
            bits = [bits_of(disk.read(source / name, max_bytes=STATE_BYTES)) for name in states]
            self._observer.checkpoints.saved(self._machine, step, hashlib.sha256(encoded).hexdigest(), meta, bits)
        elif removed := re.fullmatch(r"\.dead-step-(\d+)-\w+", target.name):
            part = self._observer.stages == 1 or "/stage-" in str(source)
            (self._machine.announced if part else self._machine.wholes).pop(int(removed[1]), None)
