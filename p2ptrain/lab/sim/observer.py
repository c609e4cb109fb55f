"""Invariants of every run, checked while it runs. The first violation ends the run.

- *same bits*: states of equal step and lineage are bit-equal, on every machine, at any time, on disk too;
- *exactly once*: a state counts the steps applied to it, and the count equals its step number. Its parameters equal
  those of an undisturbed run but for rounding; with exact sums they are equal to the bit. So no micro-batch was left
  out or taken twice;
- *no fork*: members of one generation commit one lineage per step. A view begins on the line of commits that earlier
  generations left. It takes back no step whose checkpoint the seed has recorded, unless the job was restored;
- *old generations change nothing*: once a newer generation was minted, commits of an older one never enter the line;
- *confirmed*: a checkpoint is of a step that every member of its generation has applied, or with which the generation
  began: a member that leaves may save that before a newcomer was healed; with strategy 'server', that its writer has;
- *ledger*: an audit finds no fault, and the seed's rows are committed steps. At the end the steps up to the newest that
  a live member knows are recorded, unless the seed gave up a gap; then no member of its view knew these steps, also not
  from the checkpoint that it loaded;
- *verified*: a worker that verified a checkpoint for a restore still has it when the job is restored;
- *durable*: a checkpoint recorded as saved survives a kill and a power cut; a loaded state was once committed;
- *used once*: no key of noise makes two contributions, and no mask covers two of one member;
- *privacy counted*: no member's count of releases is below the steps, repeated ones too, of which a sum may be known;
- *attacker excluded*: robust rules that leave vectors out leave out the attacker's in each step;
- *goes on*: while one member hangs or misbehaves, and nothing else is wrong, the others make steps again soon;
- *innocent*: while members hang or misbehave, and nothing else is wrong, no other one is excluded;
- *versions* (strategy 'server'): an audit finds no fault in what versions are made of. A view begins with a version
  that a member has held;
- *true norm*: a step is committed with the norm of its sum, whatever one member tells;
- *liar named*: of three members or more, none is accused of a false figure but one that told it;
- *every step*: a job that ends has taken all its steps; *result saved*: and the seed has recorded a checkpoint of it;
- *one cut*: every worker that builds a part of a split model, at any time, gets the same cuts.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.schema import Profile
from p2ptrain.core.checkpoints import CheckpointEntry, Meta
from p2ptrain.lab.audit import AuditResult
from p2ptrain.lab.sim.machine import MachineDisk, Misconduct, Process, SimEngine
from ring.job_member import JobMember
from ring.view import View
from wire.job_messages import Report

ROUNDING = 1e-4
"""Relative to the largest parameter: how far the order of sums may move a run of this length (measured)."""

MOST_VIEWS = 150
"""Views of a short job of a split model. A job that needs more restarts over and over."""


@dataclass(eq=False)
class ObservedMachine:
    """What the observer knows of a machine, whose worker is of its newest job.

    Attributes:
        announced: step → digest of the newest checkpoint that its worker reported, since its last restore.
        wholes: the same for checkpoints with all parts of a split model.
        misconduct: what its worker does wrong.
    """

    host: str
    disk: MachineDisk
    process: Process
    core: JobMember | None = None
    engine: SimEngine | None = None
    misconduct: Misconduct = field(default_factory=Misconduct)
    announced: dict[int, str] = field(default_factory=dict)
    wholes: dict[int, str] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        return self.engine.stage.index if self.engine is not None else 0


class Checklist:
    """What happened, what was checked, and the first violation. ``now``: virtual seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.timeline: list[tuple[float, str]] = []
        self.checks: dict[str, int] = {}
        self.violation: tuple[str, str] | None = None  # the name of the invariant, and what happened

    def tell(self, text: str) -> None:
        self.timeline.append((self._now(), text))

    def check(self, name: str, holds: bool, text: str) -> None:
        self.checks[name] = self.checks.get(name, 0) + 1
        if not holds and self.violation is None:
            self.violation = name, f"{name}: {text}"
            self.tell(f"VIOLATION {name}: {text}")


class MemberChecks:
    """The states that machines ever held, the steps that they committed, and what private contributions used.

    Args:
        expected: parameters after 0, 1, 2, … steps, undisturbed; empty: they depend on who takes part.
        stages: parts that the model is split into.

    Attributes:
        holders: step, lineage → hosts that ever held that state.
        believed_a_liar: a false contribution was accepted, so parameters are not those of an undisturbed run.
        spans: host → process, first and last step that it has committed in a row.
        resumed: the same, of the checkpoint that it loaded.
    """

    def __init__(self, report: Checklist, expected: list[np.ndarray[Any, Any]], stages: int) -> None:
        self._report, self._expected, self._stages = report, expected, stages
        self.holders: dict[tuple[int, str], set[str]] = {}
        self.believed_a_liar = False
        self.spans: dict[str, tuple[Process, int, int]] = {}
        self.resumed: dict[str, tuple[Process, int, int]] = {}
        self._bits: dict[tuple[int, str, int], bytes] = {}  # step, lineage, stage
        self._used_keys: set[tuple[bytes, int]] = set()  # and the ranks that used them
        self._attempts: dict[tuple[int, int], set[str]] = {}  # generation, step → hosts that contributed
        self._released = 0  # attempts that all members of their view made

    def moved(self, machine: ObservedMachine, engine: SimEngine, step: int, lineage: str, *, committed: bool) -> None:
        """``machine`` has a new state in memory: one that it committed, or another."""
        host = machine.host
        self.check_bits(host, step, lineage, engine.stage.index, engine.bits())
        self.holders.setdefault((step, lineage), set()).add(host)
        self._report.check("exactly once", engine.count == step, f"{host}: {engine.count} steps in step {step}")
        self._check_undisturbed(host, engine, step)
        if committed:
            process, first, last = self.spans.get(host, (machine.process, step, step - 1))
            fits = process is machine.process and last == step - 1
            self.spans[host] = (machine.process, first if fits else step, step)
            return
        self.spans.pop(host, None)
        resumed = self.resumed.pop(host, None)
        if resumed is not None and resumed[2] == step:
            self.spans[host] = resumed

    def check_bits(self, who: str, step: int, lineage: str, stage: int, bits: bytes) -> None:
        known = self._bits.setdefault((step, lineage, stage), bits)
        self._report.check("same bits", known == bits, f"{who} has another state of step {step}, lineage {lineage[:8]}")

    def _check_undisturbed(self, who: str, engine: SimEngine, step: int) -> None:
        if self.believed_a_liar or not self._expected:
            return
        expected = self._expected[step][engine.state.part]
        worst = float(np.max(np.abs(engine.state.parameters - expected)))
        limit = 0.0 if engine.exact else ROUNDING * float(np.max(np.abs(expected)))
        self._report.check(
            "undisturbed", worst <= limit, f"{who}: step {step} is off by {worst:.2g} ({limit:.2g} at most)"
        )

    def check_norm(self, who: str, claimed: float, engine: SimEngine) -> None:
        true = engine.partial_square_sum(0, engine.reduce_buffer.size)
        fits = self._stages > 1 or math.isclose(claimed, true, rel_tol=1e-5)  # one stage does not know the whole
        self._report.check("true norm", fits, f"{who} commits a step with a squared norm of {claimed}, it is {true}")

    def witnesses(self, first: int, last: int) -> list[str]:
        """Hosts whose living process has committed one of these steps, in the row of its newest one."""
        spans = self.spans.items()
        return [host for host, (process, begin, end) in spans if process.alive and begin <= last and first <= end]

    def key_used(self, key: bytes, rank: int = 0) -> None:
        once = (key, rank) not in self._used_keys
        self._used_keys.add((key, rank))
        self._report.check("used once", once, f"rank {rank} uses a key of noise or masks twice")

    def release_counted(self, who: str, view: View, step: int, releases: int) -> None:
        """A member is about to make a private contribution. ``releases``: its count, with this one."""
        hosts = self._attempts.setdefault((view.generation, step), set())
        hosts.add(who)
        self._released += len(hosts) == view.size
        known = self._released
        self._report.check("privacy counted", releases >= known, f"{who} counts {releases} of {known} releases")


@dataclass
class ViewHistory:
    """The views that the seed minted, what was committed in them, and the line of commits that survives.

    Attributes:
        generation: the newest one.
        lineages: step → lineage of the line, as of the newest generation.
        saved_step: newest step of the line whose checkpoint the seed has recorded.
        saved_stages: step of the line → stages of which the seed has recorded a checkpoint.
        left_at: steps at which a view began with another lineage: only a side that was cut off survived.
        began: generation → step and lineage. members: generation → hosts.
        committed: generation, step → lineage.
        replicas: in the newest view.
        kept: step and members of the next view if only the seed was lost.
    """

    generation: int = 0
    lineages: dict[int, str] = field(default_factory=dict)
    saved_step: int = 0
    saved_stages: dict[int, set[int]] = field(default_factory=dict)
    left_at: set[int] = field(default_factory=set)
    began: dict[int, tuple[int, str]] = field(default_factory=dict)
    members: dict[int, set[str]] = field(default_factory=dict)
    committed: dict[tuple[int, int], str] = field(default_factory=dict)
    replicas: int = 0
    kept: tuple[int, set[str]] = field(default_factory=lambda: (0, set()))

    @property
    def newest_step(self) -> int:
        return max(self.lineages, default=0)

    @property
    def newest_members(self) -> set[str]:
        return self.members.get(self.generation, set())

    def alone(self, who: str) -> bool:
        """Whether the newest view has no other member that holds the same part of the model."""
        return self.replicas == 1 and who in self.newest_members

    def go_back(self, step: int) -> None:
        """A person, or a lost part, takes the line back to ``step``, even if later ones were saved."""
        self.saved_step = min(self.saved_step, step)
        self.saved_stages = {at: stages for at, stages in self.saved_stages.items() if at <= step}
        self.lineages = {at: lineage for at, lineage in self.lineages.items() if at <= step}


class CheckpointChecks:
    """The checkpoints that were written, announced, recorded and loaded.

    Attributes:
        wanted: steps that a person asked to restore. here: machines whose worker is connected to the seed now.
    """

    def __init__(self, report: Checklist, members: MemberChecks, history: ViewHistory, profile: Profile) -> None:
        self._report, self._members, self._history = report, members, history
        self._stages, self._is_server = profile.stages, profile.job.strategy == "server"
        self.wanted: set[int] = set()
        self.here: Callable[[], list[ObservedMachine]] = list
        self._manifests: dict[str, tuple[int, str, frozenset[int]]] = {}  # digest of a manifest → step, lineage, stages
        self._rows: dict[str, int] = {}  # digest of a manifest → first step that its writer had committed in a row
        self._announced: dict[tuple[str, int], int] = {}  # host, stage → newest step announced since its last restore
        self._promised: dict[tuple[str, int], int] = {}  # host, stage → step that it verified for a restore

    def check_no_further_back(self, view: View) -> None:
        """Check that no later step was available in all parts when a split model went back without a person's
        request."""
        if self._stages == 1 or view.step in self.wanted:
            self.wanted.clear()
            return
        for step in sorted(step for step, lineage in self._history.lineages.items() if step > view.step):
            stages: set[int] = set()
            for machine in self.here():
                for kept in (machine.announced, machine.wholes):
                    known = self._manifests.get(kept.get(step, ""))
                    useful = known is not None and (kept is machine.wholes or known[2] == {machine.stage})
                    if known is not None and useful and known[1] == self._history.lineages[step]:
                        stages |= known[2]
            self._report.check(
                "no further back",
                len(stages) < self._stages,
                f"goes back to step {view.step}, and all parts of step {step} are here",
            )

    def forget(self, host: str) -> None:
        self._announced = {key: step for key, step in self._announced.items() if key[0] != host}
        self._promised = {key: step for key, step in self._promised.items() if key[0] != host}
        self._members.spans.pop(host, None)

    def saved(self, machine: ObservedMachine, step: int, digest: str, meta: Meta, bits: Sequence[bytes]) -> None:
        """A manifest is written: the checkpoint may exist from now on. ``bits``: hashes of its parts."""
        lineage, stage_meta = str(meta.get("lineage")), meta.get("stage")
        stages = frozenset({stage_meta}) if isinstance(stage_meta, int) else frozenset(range(self._stages))
        self._manifests[digest] = (step, lineage, stages)
        process, first, _ = self._members.spans.get(machine.host, (None, step + 1, 0))
        if process is machine.process and len(stages) == 1:
            self._rows[digest] = first
        generation = meta.get("generation")
        generation = generation if isinstance(generation, int) else 0
        is_start = self._history.began.get(generation) == (step, lineage)
        is_own = self._is_server or is_start  # only this member need have it
        members = {machine.host} if is_own else self._history.members.get(generation, set())
        behind = members - self._members.holders.get((step, lineage), set())
        self._report.check(
            "confirmed", not behind, f"{machine.host} saved step {step}, which {sorted(behind)} never applied"
        )
        for stage, those in zip(sorted(stages), bits, strict=True):
            self._members.check_bits(f"{machine.host}'s checkpoint", step, lineage, stage, those)

    def announced(self, machine: ObservedMachine, step: int, digest: str) -> None:
        """A member reported a checkpoint to the seed, for the first time or again."""
        known = self._manifests.get(digest)
        self._report.check("loaded was saved", known is not None, f"{machine.host} announces an unknown checkpoint")
        if known is None:
            return
        whole = len(known[2]) == self._stages
        kept = machine.wholes if whole and self._stages > 1 else machine.announced
        if kept.get(step) == digest:
            return
        kept[step] = digest
        what = "of the whole model " if kept is machine.wholes else ""
        self._report.tell(f"{machine.host} announces a checkpoint {what}of step {step} {known[1][:6]}")
        if kept is machine.announced:
            key = machine.host, min(known[2])
            self._announced[key] = max(self._announced.get(key, 0), step)

    def recorded(self, step: int, digest: str) -> None:
        """The seed has recorded a checkpoint: from now on the job relies on it."""
        known = self._manifests.get(digest)
        if known is not None and self._history.lineages.get(step) == known[1]:
            stages = self._history.saved_stages.setdefault(step, set())
            stages |= known[2]
            if len(stages) == self._stages:
                self._history.saved_step = max(self._history.saved_step, step)

    def promised(self, machine: ObservedMachine, stage: int, step: int) -> None:
        self._promised[machine.host, stage] = step

    def loaded(self, machine: ObservedMachine, entry: CheckpointEntry | None, restore_step: int) -> None:
        check = self._report.check
        step = entry.step if entry is not None else 0
        self._report.tell(f"{machine.host} loads step {step}")
        if entry is not None:
            known = entry.digest in self._manifests
            check("loaded was saved", known, f"{machine.host} loads a checkpoint that nobody committed")
            if (first := self._rows.get(entry.digest, step + 1)) <= step:
                self._members.resumed[machine.host] = machine.process, first, step
        key = machine.host, machine.stage
        if restore_step >= 0:
            promised = self._promised.pop(key, -1) == restore_step
            check(
                "verified",
                not promised or step == restore_step,
                f"{machine.host} verified a checkpoint of step {restore_step}, but loads {step}",
            )
            self._announced[key] = step
            machine.announced = {at: digest for at, digest in machine.announced.items() if at <= restore_step}
            machine.wholes = {at: digest for at, digest in machine.wholes.items() if at <= restore_step}
            back = step if self._stages == 1 else restore_step  # a stage may have no checkpoint of that step
            self._history.go_back(back)  # restored by a person, even if the seed forgets it
            return
        least = self._announced.get(key, 0)
        check("durable", step >= least, f"{machine.host} announced a checkpoint of step {least}, but loads {step}")


class Observer:
    """Receives every relevant event of the cluster and checks the invariants.

    Args:
        now: virtual seconds. expected: see ``MemberChecks``. profile: the job's.

    Attributes:
        commits: number of steps that members have committed.
        liars: hosts that told false figures.
        culprits: peer ids of workers that misbehaved; None: there were other faults, too.
        job_changed: set when the job's state has changed.
        copies: backup copies of the seed, each with the newest generation then.
    """

    def __init__(self, now: Callable[[], float], expected: list[np.ndarray[Any, Any]], profile: Profile) -> None:
        self.stages, self.rule = profile.stages, profile.robust.rule
        self._is_server = profile.job.strategy == "server"
        self.report = report = Checklist(now)
        self.members, self.history = MemberChecks(report, expected, self.stages), ViewHistory()
        self.liars: set[str] = set()
        self.culprits: set[str] | None = set()
        self.checkpoints = CheckpointChecks(report, self.members, self.history, profile)
        self.job_state, self.job_changed = "", asyncio.Event()
        self.copies: list[tuple[int, bytes]] = []
        self.commits = 0
        self._cuts: tuple[int, ...] | None = None  # cuts of the model, once known; () is by weights

    def cut(self, who: str, cuts: tuple[int, ...]) -> None:
        known = self._cuts = cuts if self._cuts is None else self._cuts
        self.report.check("one cut", cuts == known, f"{who} received cuts {cuts}, expected {known}")

    # ----------------------------------------------------------------------------------------------------- the members

    def moved(self, machine: ObservedMachine, core: JobMember, view: View | None, before: tuple[int, str]) -> None:
        """A member's state in memory has a new step or lineage. ``view``: the view in which it committed; None: it was
        given."""
        engine = machine.engine
        if engine is None or not core.lineage:
            return
        step, lineage = core.applied, core.lineage
        committed = view is not None and step == before[0] + 1
        self.members.moved(machine, engine, step, lineage, committed=committed)
        if view is not None and committed:
            self.commits += 1
            self.members.check_norm(machine.host, core.square_sum, engine)
            self._commit(machine.host, view.generation, step, lineage, before[1])

    def accused(self, view: View, report: Report) -> None:
        """A member reports that another one told a false figure."""
        suspect = view.rank_of(report.suspect)
        if suspect is not None and view.size > 2:
            is_liar = view.members[suspect].name in self.liars
            self.report.check("liar named", is_liar, f"{report.reason}, and that is true")

    def _commit(self, who: str, generation: int, step: int, lineage: str, before: str) -> None:
        check = self.report.check
        known = self.history.committed.setdefault((generation, step), lineage)
        check("no fork", known == lineage, f"{who}: generation {generation} has two lineages of step {step}")
        line = self.history
        if generation != line.generation:
            self.report.tell(f"{who} commits step {step} in the old generation {generation}")
            return
        self.report.tell(f"{who} commits step {step} {lineage[:6]} in generation {generation}")
        on_line = line.lineages.setdefault(step, lineage)
        check("no fork", on_line == lineage, f"{who}: step {step} is committed with another lineage")
        parent = line.lineages.setdefault(step - 1, before)
        check("no fork", parent == before, f"{who}: step {step} follows a step that is not the line's")

    # -------------------------------------------------------------------------------------------------------- the seed

    def minted(self, view: View, restored: bool) -> None:
        check = self.report.check
        line = self.history
        names = ",".join(member.name for member in view.members)
        self.report.tell(
            f"generation {view.generation} from step {view.step} {view.lineage[:6]}: {names}{' restored' * restored}"
        )
        check(
            "generations grow",
            view.generation > line.generation,
            f"generation {view.generation} follows {line.generation}",
        )
        if restored:
            self.checkpoints.check_no_further_back(view)
            line.go_back(view.step)
        known = line.lineages.get(view.step, view.lineage)
        if known != view.lineage:
            line.left_at.add(view.step)
        check(
            "no fork",
            restored or known == view.lineage,
            f"generation {view.generation} begins at step {view.step} with another lineage",
        )
        line.began[view.generation] = view.step, view.lineage
        if self._is_server:
            held = self.members.holders.get((view.step, view.lineage))
            check("versions", bool(held), f"nobody ever held the step {view.step} of the next view")
        check(
            "nothing saved is taken back",
            view.step >= line.saved_step,
            f"generation {view.generation} begins at step {view.step}, but step {line.saved_step} was saved",
        )
        check(
            "progress",
            self.stages == 1 or len(line.members) < MOST_VIEWS,
            f"after {MOST_VIEWS} views the job is only at step {view.step}",
        )
        step, members = line.kept
        missing = members - {member.name for member in view.members}
        check(
            "restored keeps",
            view.step >= step and not missing,
            f"generation {view.generation} begins at step {view.step} of {step} known ones, without {missing}",
        )
        line.kept = (0, set())
        line.generation, line.replicas = view.generation, view.replicas
        line.members[view.generation] = {member.name for member in view.members}
        line.lineages = {step: lineage for step, lineage in line.lineages.items() if step < view.step}
        line.lineages[view.step] = view.lineage

    def restored(self, live: Sequence[str]) -> None:
        """The seed starts from a backup copy. ``live``: workers that live and do as they should. If all members of a
        ring do, the next view keeps all of them."""
        line = self.history
        begun = any(generation == line.generation for generation, _ in line.committed)  # then all know the view
        if begun and line.newest_members <= set(live):
            line.kept = line.newest_step, line.newest_members

    def audited(self, found: AuditResult) -> None:
        """The job's record was audited at the end, when all members can reach the seed."""
        check, first, step = self.report.check, found.first_step - 1, found.steps
        anew = first == 0 or first in self.history.left_at
        check("ledger", anew, f"the ledger begins at step {first}, where no view left the line")
        check("versions" if self._is_server else "ledger", found.fault is None, str(found.fault))
        on_line = self.history.lineages.get(step, found.lineage)  # a hash over all rows
        check("ledger", found.lineage == on_line, f"the ledger's steps to {step} are not those that were committed")
        later = self.members.witnesses(step + 1, sys.maxsize) if step + 1 in self.history.lineages else []
        check("ledger", not later, f"the ledger lacks step {step + 1}, and {later} know of that or later ones")

    def gave_up(self, first: int, last: int) -> None:
        """The seed's ledger continues after the steps ``first`` to ``last``, which are not recorded."""
        known = [host for host in self.members.witnesses(first, last) if host in self.history.newest_members]
        self.history.left_at.add(last)
        self.report.tell(f"the ledger lacks the steps {first} to {last}")
        self.report.check("ledger", not known, f"the ledger gave up steps {first} to {last}, which {known} know of")
