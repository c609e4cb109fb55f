"""What must be true of every run, checked while it runs: the first thing that is not ends it with ``Violation``.

- *same bits*: states of equal step and lineage are bit-equal, on every machine, at any time, on disk too;
- *exactly once*: a state counts the steps that went into it, and that is the step it says it is; its parameters are
  those of a run that nothing disturbed, but for rounding, and not even that where sums are exact (so no micro-batch
  was left out or taken twice);
- *no fork*: members of one generation commit one lineage per step; a view begins on the line of commits that the
  generations before it left, and takes back no step whose checkpoint the seed has noted, unless the job went back;
- *old generations change nothing*: what a member of a generation commits after a newer one was minted never enters the
  line;
- *confirmed*: a checkpoint is of a step that every member of its generation has applied;
- *ledger*: the seed's rows are of the steps that were committed, and whoever may know of one that lacks has told of it;
- *verified*: who has verified a checkpoint for the job to go back to still has it when the job does;
- *durable*: what was noted as saved is there after a kill or a power cut; what is loaded was once committed;
- *one cut*: whoever builds a part of a split model, and whenever, is told to cut it in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from p2ptrain.core.checkpoints import CheckpointEntry, Meta
from ring.ledger import counts_of_untrusted
from ring.token import next_lineage
from ring.transaction import Transaction
from ring.view import View
from roles.sim.machine import Process, SimEngine
from wire.job_messages import LedgerRow
from wire.records import LedgerHead

if TYPE_CHECKING:
    from roles.sim.cluster import Machine

ROUNDING = 1e-4
"""Of the largest parameter: how far the order of sums may move a run of this length; shown by the undisturbed one."""

MOST_VIEWS = 150
"""Of a split model's short job: one that needs more begins again and again."""


class Violation(AssertionError):
    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


@dataclass
class Line:
    """The surviving line of commits of one job.

    Attributes:
        lineages: step → lineage, as of the newest generation.
        saved_step: the newest step of it whose checkpoint the seed has noted.
        saved_stages: step of the line → stages of which the seed has noted a checkpoint.
        left_at: where views began with another past than the line's: a side that was cut off was all that is left.
    """

    generation: int = 0
    lineages: dict[int, str] = field(default_factory=dict)
    saved_step: int = 0
    left_at: set[int] = field(default_factory=set)
    saved_stages: dict[int, set[int]] = field(default_factory=dict)


class Observer:
    """Told of what happens anywhere in the cluster.

    Args:
        now: virtual seconds.
        expected: parameters after 0, 1, 2, … steps, undisturbed. stages: parts that the model is split into.

    Attributes:
        wanted: steps that a person wanted to go back to.
        here: the machines whose worker is linked to the seed now.
        stages: as given.
    """

    def __init__(self, now: Callable[[], float], expected: list[np.ndarray[Any, Any]], stages: int = 1) -> None:
        self._now, self._expected, self.stages = now, expected, stages
        self.wanted: set[int] = set()
        self.here: Callable[[], list[Machine]] = list
        self.timeline: list[tuple[float, str]] = []
        self.checks: dict[str, int] = {}
        self.violation: Violation | None = None
        self.line = Line()
        self.job_state = ""
        self.kept: tuple[int, set[str]] = (
            0,
            set(),
        )  # step and members that the next view has, if only the seed was lost
        self.commits = 0
        self.believed_a_liar = False
        self._bits: dict[tuple[int, str, int], bytes] = {}  # step, lineage, stage
        self._holders: dict[tuple[int, str], set[str]] = {}  # step, lineage → who ever held that state
        self._members: dict[int, set[str]] = {}  # generation → hosts
        self._committed: dict[tuple[int, int], str] = {}  # generation, step → lineage
        self._manifests: dict[str, tuple[int, str, frozenset[int]]] = {}  # digest of a manifest → step, lineage, stages
        self._witnesses: dict[str, tuple[Process, int, int]] = {}  # host → its life, and the run of steps it committed
        self._announced: dict[tuple[str, int], int] = {}  # host, stage → newest step announced since it last went back
        self._promised: dict[tuple[str, int], int] = {}  # host, stage → step that it said the job could go back to
        self._replicas = 0  # in the newest view
        self._cuts: tuple[int, ...] | None = None  # of the model, once somebody was told; () is by weights

    def alone(self, who: str) -> bool:
        """Whether the newest view has no other member, or nobody else who holds the same part of the model."""
        return self._replicas == 1 and who in self._members.get(max(self._members, default=0), set())

    def tell(self, text: str) -> None:
        self.timeline.append((self._now(), text))

    def check(self, name: str, holds: bool, text: Callable[[], str]) -> None:
        self.checks[name] = self.checks.get(name, 0) + 1
        if not holds and self.violation is None:
            self.violation = Violation(name, text())
            self.tell(f"VIOLATION {self.violation}")

    def cut(self, who: str, cuts: tuple[int, ...]) -> None:
        known = self._cuts = cuts if self._cuts is None else self._cuts
        self.check("one cut", cuts == known, lambda: f"{who} was told to cut at {cuts}, and it was {known}")

    # ----------------------------------------------------------------------------------------------------- the members

    def moved(self, machine: Machine, core: Transaction, view: View | None, before: tuple[int, str]) -> None:
        """The state in a member's memory is of another step or lineage now. ``view``: the one it happened in."""
        engine = machine.engine
        if engine is None or not core.lineage:
            return
        step, lineage = core.applied, core.lineage
        self._same_bits(machine.host, step, lineage, engine.stage.index, engine.bits())
        self._holders.setdefault((step, lineage), set()).add(machine.host)
        self.check("exactly once", engine.count == step, lambda: f"{machine.host}: {engine.count} steps in step {step}")
        self._as_undisturbed(machine.host, engine, step)
        committed = view is not None and step == before[0] + 1
        if not committed:
            self._witnesses.pop(machine.host, None)
        if view is not None and committed:
            self.commits += 1
            process, first, last = self._witnesses.get(machine.host, (machine.process, step, step - 1))
            fits = process is machine.process and last == step - 1
            self._witnesses[machine.host] = (machine.process, first if fits else step, step)
            self._commit(machine.host, view.generation, step, lineage, before[1])

    def _same_bits(self, who: str, step: int, lineage: str, stage: int, bits: bytes) -> None:
        known = self._bits.setdefault((step, lineage, stage), bits)
        self.check("same bits", known == bits, lambda: f"{who} has another state of step {step}, lineage {lineage[:8]}")

    def _as_undisturbed(self, who: str, engine: SimEngine, step: int) -> None:
        if self.believed_a_liar:
            return
        expected = self._expected[step][engine.part]
        worst = float(np.max(np.abs(engine.parameters - expected)))
        limit = 0.0 if engine.exact else ROUNDING * float(np.max(np.abs(expected)))
        self.check(
            "undisturbed", worst <= limit, lambda: f"{who}: step {step} is off by {worst:.2g} ({limit:.2g} at most)"
        )

    def _commit(self, who: str, generation: int, step: int, lineage: str, before: str) -> None:
        known = self._committed.setdefault((generation, step), lineage)
        self.check(
            "no fork", known == lineage, lambda: f"{who}: generation {generation} has two lineages of step {step}"
        )
        line = self.line
        if generation != line.generation:
            self.tell(f"{who} commits step {step} in the old generation {generation}")
            return
        self.tell(f"{who} commits step {step} {lineage[:6]} in generation {generation}")
        on_line = line.lineages.setdefault(step, lineage)
        self.check("no fork", on_line == lineage, lambda: f"{who}: step {step} is committed with another lineage")
        parent = line.lineages.setdefault(step - 1, before)
        self.check("no fork", parent == before, lambda: f"{who}: step {step} follows a step that is not the line's")

    # -------------------------------------------------------------------------------------------------------- the seed

    def minted(self, view: View, restored: bool) -> None:
        line = self.line
        names = ",".join(member.name for member in view.members)
        self.tell(
            f"generation {view.generation} from step {view.step} {view.lineage[:6]}: {names}{' restored' * restored}"
        )
        self.check(
            "generations grow",
            view.generation > line.generation,
            lambda: f"generation {view.generation} follows {line.generation}",
        )
        if restored:
            self._no_further_than_must_be(view)
            line.saved_step = min(line.saved_step, view.step)
            line.saved_stages = {step: it for step, it in line.saved_stages.items() if step <= view.step}
        known = line.lineages.get(view.step, view.lineage)
        if known != view.lineage:
            line.left_at.add(view.step)
        self.check(
            "no fork",
            restored or known == view.lineage,
            lambda: f"generation {view.generation} begins at step {view.step} with another lineage",
        )
        self.check(
            "nothing saved is taken back",
            view.step >= line.saved_step,
            lambda: f"generation {view.generation} begins at step {view.step}, {line.saved_step} was noted as saved",
        )
        self.check(
            "progress",
            self.stages == 1 or len(self._members) < MOST_VIEWS,
            lambda: f"{MOST_VIEWS} views, and the job is at step {view.step}",
        )
        step, members = self.kept
        gone = members - {member.name for member in view.members}
        self.check(
            "restored keeps",
            view.step >= step and not gone,
            lambda: f"generation {view.generation} begins at step {view.step} of {step} known ones, without {gone}",
        )
        self.kept = (0, set())
        line.generation, self._replicas = view.generation, view.replicas
        self._members[view.generation] = {member.name for member in view.members}
        line.lineages = {step: lineage for step, lineage in line.lineages.items() if step < view.step}
        line.lineages[view.step] = view.lineage

    def restored(self, live: Sequence[str]) -> None:
        """The seed begins again from a copy: a ring whose members all live goes on with all of them."""
        members = self._members.get(self.line.generation, set())
        begun = any(generation == self.line.generation for generation, _ in self._committed)  # then all know the view
        if begun and members <= set(live):
            self.kept = max(self.line.lineages, default=0), members

    def _no_further_than_must_be(self, view: View) -> None:
        """A split model that went back by itself did so for want of a later step that is there in all its parts."""
        if self.stages == 1 or view.step in self.wanted:
            self.wanted.clear()
            return
        for step in sorted(step for step, lineage in self.line.lineages.items() if step > view.step):
            stages: set[int] = set()
            for machine in self.here():
                for kept in (machine.announced, machine.wholes):
                    known = self._manifests.get(kept.get(step, ""))
                    useful = known is not None and (kept is machine.wholes or known[2] == {machine.stage})
                    if known is not None and useful and known[1] == self.line.lineages[step]:
                        stages |= known[2]
            self.check(
                "no further back",
                len(stages) < self.stages,
                partial("goes back to step {}, and all parts of step {} are here".format, view.step, step),
            )

    def ledger(self, head: LedgerHead | None, rows: Sequence[LedgerRow], micro_batches: int) -> None:
        """What the seed has in its ledger at the end, when all can reach it."""
        if head is None:
            return
        lineage, step = head.base_lineage, head.base_step
        anew = step == 0 or step in self.line.left_at
        self.check("ledger", anew, lambda: f"the ledger begins with step {head.base_step}, and the line was not left")
        for row in rows:
            step, lineage = step + 1, next_lineage(lineage, row.digest)
            on_line = self.line.lineages.get(row.step, lineage)
            fits = row.step == step and on_line == lineage and sum(counts_of_untrusted(row.counts)) == micro_batches
            self.check(
                "ledger", fits, partial("the ledger's row of step {} is not what was committed".format, row.step)
            )
        missing = step + 1
        known = [
            host
            for host, (process, first, last) in self._witnesses.items()
            if process.alive and first <= missing <= last and missing in self.line.lineages
        ]
        self.check("ledger", not known, lambda: f"the ledger lacks step {missing}, which {known} know of")

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def forget(self, host: str) -> None:
        self._announced = {key: step for key, step in self._announced.items() if key[0] != host}
        self._promised = {key: step for key, step in self._promised.items() if key[0] != host}
        self._witnesses.pop(host, None)

    def saved(self, machine: Machine, step: int, digest: str, meta: Meta, bits: Sequence[bytes]) -> None:
        """A manifest is written: from now on there may be such a checkpoint. ``bits``: of its parts."""
        lineage, told = str(meta.get("lineage")), meta.get("stage")
        stages = frozenset({told}) if isinstance(told, int) else frozenset(range(self.stages))
        self._manifests[digest] = (step, lineage, stages)
        generation = meta.get("generation")
        members = self._members.get(generation if isinstance(generation, int) else 0, set())
        behind = members - self._holders.get((step, lineage), set())
        self.check(
            "confirmed",
            not behind,
            lambda: f"{machine.host} saved step {step}, which {sorted(behind)} never applied",
        )
        for stage, those in zip(sorted(stages), bits, strict=True):
            self._same_bits(f"{machine.host}'s checkpoint", step, lineage, stage, those)

    def announced(self, machine: Machine, step: int, digest: str) -> None:
        """A member told the seed of a checkpoint, for the first time or again."""
        known = self._manifests.get(digest)
        self.check("loaded was saved", known is not None, lambda: f"{machine.host} announces an unknown checkpoint")
        if known is None:
            return
        whole = len(known[2]) == self.stages
        kept = machine.wholes if whole and self.stages > 1 else machine.announced
        if kept.get(step) == digest:
            return
        kept[step] = digest
        what = "of the whole model " if kept is machine.wholes else ""
        self.tell(f"{machine.host} announces a checkpoint {what}of step {step} {known[1][:6]}")
        if kept is machine.announced:
            key = machine.host, min(known[2])
            self._announced[key] = max(self._announced.get(key, 0), step)

    def recorded(self, step: int, digest: str) -> None:
        """The seed has written down that there is a checkpoint: from now on the job counts on it."""
        known = self._manifests.get(digest)
        if known is not None and self.line.lineages.get(step) == known[1]:
            stages = self.line.saved_stages.setdefault(step, set())
            stages |= known[2]
            if len(stages) == self.stages:
                self.line.saved_step = max(self.line.saved_step, step)

    def promised(self, machine: Machine, stage: int, step: int) -> None:
        """A worker has verified a checkpoint because the job is to go back to it."""
        self._promised[machine.host, stage] = step

    def loaded(self, machine: Machine, entry: CheckpointEntry | None, restore_step: int) -> None:
        step = entry.step if entry is not None else 0
        self.tell(f"{machine.host} loads step {step}")
        if entry is not None:
            known = entry.digest in self._manifests
            self.check("loaded was saved", known, lambda: f"{machine.host} loads a checkpoint that nobody committed")
        key = machine.host, machine.stage
        if restore_step >= 0:
            promised = self._promised.pop(key, -1) == restore_step
            self.check(
                "verified",
                not promised or step == restore_step,
                lambda: f"{machine.host} had verified a checkpoint of step {restore_step}, and finds {step}",
            )
            self._announced[key] = step
            machine.announced = {at: digest for at, digest in machine.announced.items() if at <= restore_step}
            machine.wholes = {at: digest for at, digest in machine.wholes.items() if at <= restore_step}
            back = step if self.stages == 1 else restore_step  # a part of a model may have no checkpoint of that step
            self.line.saved_step = min(self.line.saved_step, back)  # a person wants it so, even if the seed forgets it
            self.line.lineages = {at: lineage for at, lineage in self.line.lineages.items() if at <= back}
            return
        least = self._announced.get(key, 0)
        self.check(
            "durable", step >= least, lambda: f"{machine.host} announced a checkpoint of step {least}, and finds {step}"
        )
