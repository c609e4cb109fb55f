"""``p2ptrain bench save``: what a checkpoint adds to the steps that it overlaps, beside the steps before and after it.

One cluster trains a model whose state has the size asked for. Saves are asked for one after the other, with
undisturbed steps between them, so each has its own measure beside it and a machine that gets slower is seen as such.
A save's window begins where its copy is made, which is after the step that it is of, and ends when the last of its
writers says that it is durable. Every step that begins within it counts as overlapped, the last one, too.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from configs.schema import Profile
from p2ptrain.cli.bench.machine import Origin, circumstances
from p2ptrain.cli.bench.plan import MEMBER_BYTES, Samples, check_fits
from p2ptrain.cli.bench.report import Report, Table, human_duration, human_size, human_spread
from p2ptrain.cli.bench.trial import Scene, Trial, started
from p2ptrain.core.errors import UserError
from wire.records import CheckpointInfo, MetricRow

MUST_BEAT = 0.05
"""Of the overlapped steps' time: what a checkpoint may add."""

WARM_STEPS = 4  # not counted: the first ones allocate
STATE_BYTES = 12
"""Of a parameter: itself and AdamW's two means, fp32."""
LAYERS, HEADS = 8, 8
WIDTH_MULTIPLE = 2 * HEADS  # rotary embeddings halve a head
KEPT = 2  # checkpoints of each writer, beside the one that it writes
WORKER_BYTES = 48
"""Of a parameter in a worker: state, gradients, what the ring needs to redo a step, and two copies of the state."""


def settings_for(size_bytes: int) -> dict[str, object]:
    """Settings of a model whose state has about this size: 12 width² parameters a layer, and few beside them."""
    numel = size_bytes / STATE_BYTES
    width = max(1, round(math.sqrt(numel / (12 * LAYERS)) / WIDTH_MULTIPLE)) * WIDTH_MULTIPLE
    return {
        "model.architecture": "llama",
        "model.hidden_size": width,
        "model.layers": LAYERS,
        "model.heads": HEADS,
        "model.kv_heads": HEADS,
        "model.intermediate_size": 8 * width // 3,
    }


def check_room(size_bytes: int, workers: int, state: Path | None, available_bytes: int) -> None:
    """Refuse checkpoints for which there is no memory or no disk. Raises ``ResourceError``, ``UserError``."""
    parent = state or Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise UserError(f"--state {parent} is no directory", remedy="name one on the disk that is to be measured")
    what = f"{workers} workers with checkpoints of {human_size(size_bytes)}"
    check_fits(what, workers * (MEMBER_BYTES + WORKER_BYTES * size_bytes // STATE_BYTES), available_bytes)
    check_fits(f"{what} on {parent}", workers * (KEPT + 1) * size_bytes, shutil.disk_usage(parent).free)


# ------------------------------------------------------------------------------------------------------ the arithmetic


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step. ``rest_s``: of ``seconds``, what was neither computing nor the exchange of gradients.

    Attributes:
        wall: when the seed heard of it, Unix seconds.
    """

    number: int
    wall: float
    seconds: float
    rest_s: float

    @classmethod
    def of(cls, row: MetricRow) -> Step:
        """What was not told counts as nothing."""
        total_s, *spent_s = (
            (part or 0.0) / 1e3 for part in (row.step_ms, row.compute_ms, row.communicate_ms, row.wait_ms)
        )
        return cls(row.step, row.wall, total_s, total_s - math.fsum(spent_s))


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint as it was told: of ``step``, durable on all its writers' disks at ``end_wall``."""

    step: int
    end_wall: float
    size_bytes: int
    writers: int

    @classmethod
    def of(cls, infos: Iterable[CheckpointInfo]) -> Save:
        """From what all writers of one step said."""
        known = list(infos)
        first = known[0]
        return cls(first.step, max(info.created_at for info in known), first.size_bytes, len(known))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A save, the steps that it overlapped, and the undisturbed ones beside it: before, back to the save before it,
    and after, up to the next one.

    Attributes:
        pause_s: for how long the first of the overlapped ones stood still for the state's digest and its copy, beyond
            what steps spend beside computing and exchanging anyway.
    """

    save: Save
    writing_s: float
    overlapped: list[Step]
    quiet: list[Step]

    @property
    def quiet_s(self) -> float:
        return _mean(step.seconds for step in self.quiet)

    @property
    def pause_s(self) -> float:
        return max(0.0, self.overlapped[0].rest_s - statistics.median(step.rest_s for step in self.quiet))

    @property
    def added(self) -> float:
        """Share of the undisturbed time that the overlapped steps took longer, the pause included."""
        return _mean(step.seconds for step in self.overlapped) / self.quiet_s - 1

    @property
    def added_by_writing(self) -> float:
        """The same without the pause."""
        return self.added - self.pause_s / (self.quiet_s * len(self.overlapped))

    @property
    def added_to_median(self) -> float:
        """The same of the median steps, which sees neither the pause nor what else hit a single one."""
        usual_s = statistics.median(step.seconds for step in self.quiet)
        return statistics.median(step.seconds for step in self.overlapped) / usual_s - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.save.step,
            "size_bytes": self.save.size_bytes,
            "writers": self.save.writers,
            "writing_s": self.writing_s,
            "pause_s": self.pause_s,
            "added": self.added,
            "added_by_writing": self.added_by_writing,
            "added_to_median": self.added_to_median,
            "overlapped_s": [step.seconds for step in self.overlapped],
            "quiet_s": [step.seconds for step in self.quiet],
        }


def overlaps(steps: Mapping[int, Step], saves: Iterable[Save]) -> list[Overlap]:
    """Each save with its steps, where there are any of both kinds.

    Args:
        steps: by number, without a gap. Of the first ones, ``WARM_STEPS`` are left out.
        saves: by step.
    """
    ordered = sorted(saves, key=lambda save: save.step)
    hit: dict[int, list[Step]] = {}  # a step that falls into two saves disturbs both: it is in neither's quiet ones
    for save in ordered:
        later = (steps[number] for number in sorted(steps) if number > save.step and number - 1 in steps)
        # The first one stands still for the copy, however soon the rest is over.
        hit[save.step] = [
            step for step in later if step.number == save.step + 1 or steps[step.number - 1].wall < save.end_wall
        ]
    disturbed = {step.number for found in hit.values() for step in found}
    places = [0, *(save.step for save in ordered), max(steps, default=0)]
    made = []
    for number, save in enumerate(ordered, 1):
        beside = range(max(places[number - 1], WARM_STEPS) + 1, places[number + 1] + 1)
        quiet = [steps[place] for place in beside if place in steps and place not in disturbed]
        if hit[save.step] and quiet and save.step in steps:
            made.append(Overlap(save, save.end_wall - steps[save.step].wall, hit[save.step], quiet))
    return made


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


# --------------------------------------------------------------------------------------------------------- the running


@dataclass(frozen=True, slots=True)
class Plan:
    """``saves`` that count, and a first one, with ``quiet`` undisturbed steps before and after each."""

    profile: Profile
    saves: int
    quiet: int
    cores: int


@dataclass(slots=True)
class Saves:
    """One run; ``steps`` and ``saves`` grow while it measures."""

    plan: Plan
    steps: dict[int, Step] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    around: list[str] = field(default_factory=list)

    async def measure(self, scene: Scene) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        self.around = circumstances()
        scene.console.event("info", "starting a seed and the workers")
        async with started(scene, "save", self.plan.profile) as trial:
            try:
                await trial.until_step(WARM_STEPS + self.plan.quiet, "undisturbed")
                for number in range(self.plan.saves + 1):
                    await self._save(trial, f"save {number} of {self.plan.saves}" if number else "a first save")
            finally:
                self.steps = {
                    number: Step.of(row) for number, row in trial.observer.metrics.items() if row.step_ms is not None
                }

    async def _save(self, trial: Trial, title: str) -> None:
        after, writers = self.saves[-1].step if self.saves else 0, self._writers
        await trial.observer.ask("jobs.save", job=trial.job)

        def written() -> list[CheckpointInfo]:
            saved = trial.observer.saved.values()
            newest = max((info.step for info in saved), default=0)
            found = [info for info in saved if info.step == newest > after]
            return found if len(found) == writers else []

        await trial.until(lambda: bool(written()), f"the end of {title}")
        save = Save.of(written())
        self.saves.append(save)

        def undisturbed() -> bool:
            row = trial.observer.metrics.get(trial.step)
            return row is not None and row.wall > save.end_wall

        # What is under way as the writing ends counts as overlapped; the news of it may come before that of its steps.
        await trial.until(undisturbed, f"a step after {title}")
        await trial.until_step(trial.step + self.plan.quiet, f"{title} is durable, undisturbed steps after it")

    @property
    def _writers(self) -> int:
        return min(self.plan.profile.checkpoint.copies, self.plan.profile.job.workers)

    # ------------------------------------------------------------------------------------------------------ the report

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan, profile = self.plan, self.plan.profile
        found = overlaps(self.steps, self.saves)
        first, counted = found[:1], found[1:]
        threads = profile.device.threads
        crew = f"{profile.job.workers} workers × {threads} thread{'s' * (threads != 1)} on {plan.cores} cores"
        size = human_size(self.saves[0].size_bytes) if self.saves else "nothing saved yet"
        settings = {"saves": plan.saves, "quiet_steps": plan.quiet, "profile": profile.model_dump(mode="json")}
        made = replace(origin, torch=version("torch"))
        report = Report("save", f"checkpoints of {size} · {crew}", made, settings, complete=complete)
        report.results = results(first, counted) | {"writers": self._writers, "cores": plan.cores}
        report.tables = [_table(first, counted)]
        report.notes = [*_findings(first, counted), self._crew_note(), *self.around]
        kinds = {step.number: item.save.step for item in found for step in item.overlapped}
        report.samples = [
            {"step": step.number, "seconds": step.seconds, "rest_s": step.rest_s, "save": kinds.get(step.number, "")}
            for step in self.steps.values()
            if step.number > WARM_STEPS
        ]
        return report

    def _crew_note(self) -> str:
        profile, cores = self.plan.profile, self.plan.cores
        used = profile.job.workers * profile.device.threads
        left = "none is left over" if used >= cores else f"{cores - used} left over"
        return (
            f"{used} threads compute on {cores} cores ({left}); {self._writers} processes write, each with the least "
            "urgency that there is"
        )


def results(first: list[Overlap], counted: list[Overlap]) -> dict[str, Any]:
    """For programs. ``first``: what allocates the copy's memory and starts the writers; it is told apart."""
    added = [item.added for item in counted]
    return {
        "size_bytes": counted[0].save.size_bytes if counted else None,
        "must_beat": MUST_BEAT,
        "added": statistics.median(added) if added else None,
        "beaten": statistics.median(added) <= MUST_BEAT if added else None,
        "first": [item.to_json() for item in first],
        "saves": [item.to_json() for item in counted],
    }


def _table(first: list[Overlap], counted: list[Overlap]) -> Table:
    rows = []
    for name, item in [*(("first", item) for item in first), *((str(n), item) for n, item in enumerate(counted, 1))]:
        overlapped = Samples("", seconds=[step.seconds for step in item.overlapped])
        quiet = Samples("", seconds=[step.seconds for step in item.quiet])
        row = [name, human_duration(item.writing_s), f"{len(item.overlapped)}/{len(item.quiet)}"]
        row += [f"{human_duration(samples.median_s)} {_spread(samples)}" for samples in (overlapped, quiet)]
        rows.append([*row, human_duration(item.pause_s), _signed(item.added), _signed(item.added_by_writing)])
    columns = ["SAVE", "WRITING", "STEPS", "WITH, P10-P90", "WITHOUT", "PAUSE", "ADDED", "BY WRITING"]
    return Table(columns, rows, columns[1:])


def _findings(first: list[Overlap], counted: list[Overlap]) -> list[str]:
    notes = []
    if counted:
        added = [item.added for item in counted]
        middle = statistics.median(added)
        verdict = "held" if middle <= MUST_BEAT else "not held"
        writing = statistics.median(item.added_by_writing for item in counted)
        pause_s = statistics.median(item.pause_s for item in counted)
        usual = statistics.median(item.added_to_median for item in counted)
        notes.append(
            f"a checkpoint adds {_signed(middle)} to the steps that it overlaps (saves {_signed(min(added))} to "
            f"{_signed(max(added))}); at most {_signed(MUST_BEAT)}: {verdict}"
        )
        notes.append(
            f"of it {_signed(writing)} by the writing, the rest by a pause of {human_duration(pause_s)} in which the "
            f"state's digest is compared and the state copied; to the median step {_signed(usual)}"
        )
        notes.append("STEPS are those overlapped / those undisturbed beside them; ADDED compares their means")
    if first:
        notes.append("the first save also takes the memory of the copy and starts the writers: it is told apart")
    return notes


def _spread(samples: Samples) -> str:
    return human_spread(samples.quantile_s(0.1), samples.quantile_s(0.9))


def _signed(part: float) -> str:
    return f"{100 * part:+.1f} %"
