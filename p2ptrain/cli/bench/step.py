"""``p2ptrain bench step``: training steps of this project and of DistributedDataParallel, block by block in turn."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from p2ptrain.cli.bench.conduct import Progress, Ring, Stage
from p2ptrain.cli.bench.drawing import FILLS, Bar, Line, Point, bars, chart_svg
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Answer, Members
from p2ptrain.cli.bench.plan import Samples, ratio
from p2ptrain.cli.bench.report import (
    Report,
    Table,
    human_duration,
    human_size,
    human_spread,
    per_cent,
    screen_columns,
    times,
)

RING, USUAL, DDP = "ring", "usual", "ddp"
"""The contenders: this project, and in its usual mode where the profile's is the exact one, and torch."""

BLOCK_STEPS = 5
"""Steps of one contender in a row: long enough that the caches are its own, short enough that both meet the same
weather."""

WARM_STEPS = 3  # not counted: the first ones allocate, and DDP finds its order of buckets
STEP_S = 30.0  # a slow step, for deadlines


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: ``steps`` of each contender, with ``threads`` for each of the ``workers``.

    ``exact``: the profile's mode; its usual one is measured beside it.
    """

    spec: str
    profile: str
    workers: int
    threads: int
    steps: int
    ring: Ring
    exact: bool = False


@dataclass(slots=True)
class Trained:
    """One contender's steps.

    Attributes:
        samples: seconds of each step, of the member for whom it took longest.
        losses: mean loss of each step, warm-up included.
        exposed_s, communicating_s: of each step, the mean over the members; None where it is not known.
    """

    samples: Samples
    losses: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    communicating_s: list[float] = field(default_factory=list)

    def add(self, answers: list[Answer], *, counted: bool) -> None:
        self.losses += answers[0]["losses"]
        if not counted:
            return
        self.samples.seconds += [max(parts) for parts in zip(*(answer["seconds"] for answer in answers), strict=True)]
        for name in ("exposed_s", "communicating_s"):
            if name in answers[0]:
                parts = zip(*(answer[name] for answer in answers), strict=True)
                getattr(self, name).extend(math.fsum(part) / len(part) for part in parts)


class Steps:
    """One run; ``trained`` grows while it measures."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.notes: list[str] = []
        self.torch = ""
        self.tokens = 0
        self.reduce_bytes = 0
        codec = f", {plan.ring.codec}" if plan.ring.lossy else ""
        mode = ", exact" if plan.exact else ""
        self.trained = {RING: Trained(Samples(f"this ring{mode}{codec}"))}
        if plan.exact:
            self.trained[USUAL] = Trained(Samples(f"this ring{codec}"))

    async def measure(self, members: Members, progress: Progress) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        stage = Stage(members)
        try:
            await stage.form(self.plan.ring)
            progress("loading torch, the model and the data")
            await self._rival(stage)
            rival = DDP in self.trained
            built = await members.all(
                "build", seconds=STEP_S, spec=self.plan.spec, threads=self.plan.threads, rival=rival
            )
            facts = built[0]
            self.tokens, self.reduce_bytes = facts["tokens_per_step"], facts["reduce_bytes"]
            await self._block(members, 0, WARM_STEPS, counted=False)
            for done in range(0, self.plan.steps, BLOCK_STEPS):
                count = min(BLOCK_STEPS, self.plan.steps - done)
                await self._block(members, WARM_STEPS + done, count, counted=True)
                rates = (
                    f"{item.samples.title} {self.tokens / item.samples.median_s:,.0f}" for item in self.trained.values()
                )
                progress(f"step {done + count} of {self.plan.steps}, tokens/s: {', '.join(rates)}")
        finally:
            stage.close()

    async def _rival(self, stage: Stage) -> None:
        ring = self.plan.ring
        self.torch, missing = await stage.gloo(STEP_S * 20)
        if ring.link:
            missing = f"the link {ring.link} is emulated inside this program's connections"
        if missing:
            self.notes.append(f"DDP is left out: {missing}")
            return
        self.trained[DDP] = Trained(Samples("DDP on Gloo"))
        if ring.tls:
            self.notes.append("Gloo knows no encryption: DDP is measured as it is, in plain TCP")

    async def _block(self, members: Members, first: int, count: int, *, counted: bool) -> None:
        for name, trained in self.trained.items():
            answers = await members.all("train", contender=name, first=first, count=count, seconds=count * STEP_S)
            trained.add(answers, counted=counted)

    # ------------------------------------------------------------------------------------------------------ the report

    @property
    def faster(self) -> float | None:
        """How many times as many tokens a second as DDP."""
        rival = self.trained.get(DDP)
        return ratio(rival.samples, self.trained[RING].samples) if rival is not None else None

    @property
    def exact_cost(self) -> float | None:
        """How many times as long as in the usual mode a step takes in the exact one."""
        usual = self.trained.get(USUAL)
        return ratio(self.trained[RING].samples, usual.samples) if usual is not None else None

    @property
    def hidden(self) -> float | None:
        """Part of the communication that was behind the backward pass."""
        ours = self.trained[RING]
        total_s = math.fsum(ours.communicating_s)
        return max(0.0, 1 - math.fsum(ours.exposed_s) / total_s) if total_s else None

    @property
    def loss_difference(self) -> float | None:
        """The largest relative difference between both losses of a step."""
        rival = self.trained.get(DDP)
        pairs = zip(self.trained[RING].losses, rival.losses, strict=False) if rival is not None else ()
        return max((abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), default=None)

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan, many = self.plan, "s" * (self.plan.threads > 1)
        crew = f"{plan.workers} workers × {plan.threads} thread{many}"
        title = f"training step · {plan.profile} · {crew} over {plan.ring.described}"
        settings = {key: value for key, value in asdict(plan).items() if key != "spec"}
        report = Report("step", title, replace(origin, torch=self.torch), settings, complete=complete)
        report.results = self._results()
        shown = {name: item for name, item in self.trained.items() if item.samples.seconds}
        report.tables = [self._table(shown)]
        report.pictures = [
            bars(
                [
                    (
                        "tokens/s",
                        [
                            Bar(item.samples.title, self.tokens / item.samples.median_s, self._rate(item), fill)
                            for item, fill in zip(shown.values(), FILLS, strict=False)
                        ],
                    )
                ],
                width=screen_columns(),
            )
        ]
        report.notes = [*self._findings(), *self.notes]
        report.samples = [
            {"contender": name, "sample": number, "seconds": seconds, "tokens_per_s": self.tokens / seconds}
            for name, item in shown.items()
            for number, seconds in enumerate(item.samples.seconds)
        ]
        report.chart = lambda: self._chart(report, shown)
        return report

    def _rate(self, item: Trained) -> str:
        return f"{self.tokens / item.samples.median_s:,.0f}"

    def _results(self) -> dict[str, Any]:
        ours = self.trained[RING]
        return {
            "tokens_per_step": self.tokens,
            "reduce_bytes": self.reduce_bytes,
            "ring_to_ddp": self.faster,
            "exact_to_usual_step": self.exact_cost,
            "hidden": self.hidden,
            "exposed_s": ours.exposed_s,
            "communicating_s": ours.communicating_s,
            "largest_relative_loss_difference": self.loss_difference,
            "contenders": {
                name: item.samples.to_json(self.tokens, "tokens_per_s") | {"losses": item.losses}
                for name, item in self.trained.items()
            },
        }

    def _table(self, shown: dict[str, Trained]) -> Table:
        rows = []
        for name, item in shown.items():
            low_s, high_s = item.samples.quantile_s(0.1), item.samples.quantile_s(0.9)
            rates = f"{self.tokens / high_s:,.0f}–{self.tokens / low_s:,.0f}"
            row = [item.samples.title, self._rate(item), rates, human_duration(item.samples.median_s)]
            row += [human_spread(low_s, high_s), times(self.faster) if name == RING else "", f"{item.losses[-1]:.4f}"]
            rows.append(row)
        columns = ["", "TOKENS/S", "P10-P90", "STEP", "P10-P90", "×DDP", "LOSS"]
        return Table(columns, rows, columns[1:])

    def _findings(self) -> list[str]:
        ours = self.trained[RING]
        notes = []
        if ours.exposed_s:
            text = (
                f"communication: a step waits {human_duration(_mean(ours.exposed_s))} for the ring after its backward"
            )
            if self.hidden is not None:
                text += (
                    f", of {human_duration(_mean(ours.communicating_s))} that it is under way: "
                    f"{per_cent(self.hidden)} is hidden"
                )
            notes.append(f"{text} ({human_size(self.reduce_bytes)} a step)")
        if self.exact_cost is not None:
            notes.append(f"exact sums: a step takes {self.exact_cost:.2f} times as long as in the usual mode")
        if self.loss_difference is not None:
            notes.append(
                f"losses of the same {len(ours.losses)} steps differ by {self.loss_difference:.1e} at most, relative"
            )
        return notes

    def _chart(self, report: Report, shown: dict[str, Trained]) -> str:
        """Tokens a second over the run: the median of each block, with its spread."""
        lines, count = [], max((len(item.samples.seconds) for item in shown.values()), default=0)
        starts = range(0, count, BLOCK_STEPS)
        for item in shown.values():
            points: list[Point | None] = []
            for start in starts:
                block = Samples("", seconds=item.samples.seconds[start : start + BLOCK_STEPS])
                low_s, high_s = (block.quantile_s(0.1), block.quantile_s(0.9)) if block.seconds else (0.0, 0.0)
                points.append(
                    Point(self.tokens / block.median_s, self.tokens / high_s, self.tokens / low_s)
                    if block.seconds
                    else None
                )
            lines.append(Line(item.samples.title, points))
        labels = [str(start + WARM_STEPS) for start in starts]
        subtitle = report.title.partition(" · ")[2] + " · by first step of the block"
        return chart_svg("Training", subtitle, report.footer, labels, lines, unit="tokens/s")


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
