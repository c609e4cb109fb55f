"""``p2ptrain bench uneven``: a fast worker and one that is several times slower, beside the fast one alone.

Shares follow speed, so both together should be 1 + 1/factor times as fast as the fast one alone. Each contender is a
cluster of its own, started anew in each round, in turn: a seed, one worker or two, the same job from its first step.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from configs.schema import Profile
from p2ptrain.cli.audit import page_untrusted
from p2ptrain.cli.bench.drawing import FILLS, Bar, bars
from p2ptrain.cli.bench.machine import Origin, circumstances
from p2ptrain.cli.bench.plan import Samples
from p2ptrain.cli.bench.report import Report, Table, human_duration, human_spread, screen_columns, times
from p2ptrain.cli.bench.slowing import slowing
from p2ptrain.cli.bench.trial import Scene, Trial, started
from p2ptrain.core.errors import JobFailed
from ring.ledger import counts_of_untrusted

ALONE, BOTH = "alone", "both"
TITLES = {ALONE: "the fast one alone", BOTH: "with the slow one"}
MUST_BEAT = 1.15
"""Times the fast one alone."""

WARM_STEPS = 10
"""Not counted: shares follow an average of measured times, which starts where both were equally fast."""

SLOWED = 2  # the number of the worker that is slowed


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: in each of the ``rounds``, ``steps`` of each contender; one is ``factor`` times slower."""

    name: str
    profile: Profile
    factor: float
    steps: int
    rounds: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        batch, data = self.profile.batch, self.profile.data
        return batch.micro_batches * batch.micro_batch_sequences * data.sequence_tokens


@dataclass(frozen=True, slots=True)
class Trained:
    """One contender's steps in one round.

    Attributes:
        seconds: of each counted step.
        losses: of every step from the first, warm-up included.
        shares: of each counted step: micro-batches of the fast worker, and of the slow one where there is one.
        slowed: how many times slower the slow one was made, as it was measured; 1 where there is none.
    """

    seconds: list[float]
    losses: list[float]
    shares: list[tuple[int, ...]]
    slowed: float = 1.0

    @property
    def steps_per_s(self) -> float:
        return len(self.seconds) / math.fsum(self.seconds)


@dataclass(frozen=True, slots=True)
class Compared:
    """The losses of the steps that both contenders made. ``largest``: difference, relative to the loss."""

    steps: int
    equal: int
    largest: float

    @classmethod
    def of(cls, pairs: list[tuple[list[float], list[float]]]) -> Compared:
        """Those of each round, step by step."""
        both = [pair for ours, theirs in pairs for pair in zip(ours, theirs, strict=False)]
        return cls(
            len(both),
            sum(ours == theirs for ours, theirs in both),
            max((abs(ours - theirs) / abs(theirs) for ours, theirs in both), default=0.0),
        )


@dataclass(slots=True)
class Uneven:
    """One run; ``trained`` grows while it measures, contenders in turn."""

    plan: Plan
    trained: dict[str, list[Trained]] = field(default_factory=lambda: {ALONE: [], BOTH: []})
    around: list[str] = field(default_factory=list)

    async def measure(self, scene: Scene) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        self.around = circumstances()
        for number in range(1, self.plan.rounds + 1):
            for contender, done in self.trained.items():
                title = f"round {number} of {self.plan.rounds}, {TITLES[contender]}"
                done.append(await self._train(scene, contender, f"{contender}-{number}", title))

    async def _train(self, scene: Scene, contender: str, name: str, title: str) -> Trained:
        plan = self.plan
        last = WARM_STEPS + plan.steps
        profile = plan.profile
        workers = 2 if contender == BOTH else 1
        job = profile.job.model_copy(update={"workers": workers, "steps": last + 1})  # the last one also saves
        profile = profile.model_copy(update={"job": job})
        scene.console.event("info", f"{title}: starting")
        factor = 1.0
        async with started(scene, name, profile) as trial:
            if contender == BOTH:
                async with slowing(trial.workers[SLOWED], plan.factor, scene) as slower:
                    await trial.until(lambda: trial.step > 0, "the first step")  # a start is no part of it
                    await slower.begin()
                    scene.console.event("info", f"{title}: it runs one part in {plan.factor:g} of the time now")
                    await trial.until_step(last, title)
                    await slower.end()
                factor = slower.duty.made
            else:
                await trial.until_step(last, title)
            shares, rows = await _shares(trial, last), trial.observer.metrics
        if missing := [step for step in range(1, last + 1) if step not in rows or rows[step].step_ms is None]:
            raise JobFailed(f"the seed told nothing of step {missing[0]}")
        return Trained(
            [(rows[step].step_ms or 0.0) / 1e3 for step in range(WARM_STEPS + 1, last + 1)],
            [float(rows[step].loss or 0.0) for step in range(1, last + 1)],
            [shares[step] for step in range(WARM_STEPS + 1, last + 1)],
            factor,
        )

    # ------------------------------------------------------------------------------------------------------ the report

    @property
    def ratios(self) -> list[float]:
        """Of each round: steps a second of both, by those of the fast one alone."""
        pairs = zip(self.trained[BOTH], self.trained[ALONE], strict=False)
        return [both.steps_per_s / alone.steps_per_s for both, alone in pairs]

    @property
    def losses(self) -> Compared:
        pairs = zip(self.trained[BOTH], self.trained[ALONE], strict=False)
        return Compared.of([(both.losses, alone.losses) for both, alone in pairs])

    @property
    def wrong(self) -> str:
        """What must not be; empty where all is well. Speed is no matter of right and wrong."""
        found = self.losses
        if self.plan.profile.job.exact and found.equal < found.steps:
            return f"exact sums, and {found.steps - found.equal} of {found.steps} losses differ"
        return ""

    def shares(self) -> Counter[tuple[int, ...]]:
        """How many counted steps had which shares (fast, slow)."""
        return Counter(shares for trained in self.trained[BOTH] for shares in trained.shares)

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan, threads = self.plan, self.plan.profile.device.threads
        mode = " · exact" if plan.profile.job.exact else ""
        title = (
            f"a worker {plan.factor:g} times slower · {plan.name} · {threads} thread{'s' * (threads != 1)} each{mode}"
        )
        settings: dict[str, Any] = {
            "factor": plan.factor,
            "steps": plan.steps,
            "rounds": plan.rounds,
            "warm_steps": WARM_STEPS,
        }
        settings |= {"profile": plan.profile.model_dump(mode="json")}
        report = Report("uneven", title, replace(origin, torch=version("torch")), settings, complete=complete)
        report.results = self._results()
        shown = {name: samples for name, samples in self._samples().items() if samples.seconds}
        report.tables = [self._table(shown), self._shares_table()]
        drawn = [
            Bar(samples.title, rate, f"{rate:,.0f}", fill)
            for (name, samples), fill in zip(shown.items(), FILLS, strict=False)
            for rate in [self.tokens_per_s(name)]
        ]
        report.pictures = [bars([("tokens/s", drawn)], width=screen_columns())]
        report.notes = [*self._findings(), *self.around]
        report.samples = [
            {
                "contender": name,
                "round": number,
                "step": WARM_STEPS + place,
                "seconds": seconds,
                "shares": "+".join(map(str, shares)),
            }
            for name, rounds in self.trained.items()
            for number, trained in enumerate(rounds, 1)
            for place, (seconds, shares) in enumerate(zip(trained.seconds, trained.shares, strict=True), 1)
        ]
        return report

    def tokens_per_s(self, contender: str) -> float:
        """The median of the rounds."""
        return self.plan.tokens * statistics.median(item.steps_per_s for item in self.trained[contender])

    def _samples(self) -> dict[str, Samples]:
        return {
            name: Samples(TITLES[name], seconds=[value for trained in rounds for value in trained.seconds])
            for name, rounds in self.trained.items()
        }

    def _results(self) -> dict[str, Any]:
        ratios, losses = self.ratios, self.losses
        ideal = 1 + 1 / self.plan.factor
        ratio = statistics.median(ratios) if ratios else None
        return {
            "tokens_per_step": self.plan.tokens,
            "both_to_alone": ratio,
            "both_to_alone_of_rounds": ratios,
            "ideal": ideal,
            "must_beat": MUST_BEAT,
            "beaten": None if ratio is None else ratio >= MUST_BEAT,
            "slowed_by": [trained.slowed for trained in self.trained[BOTH]],
            "shares": [{"shares": list(shares), "steps": steps} for shares, steps in self.shares().most_common()],
            "losses": {
                "steps": losses.steps,
                "bit_equal": losses.equal,
                "largest_relative_difference": losses.largest,
            },
            "contenders": {
                name: self._samples()[name].to_json(self.plan.tokens, "tokens_per_s")
                | {"rounds": [_round(trained, self.plan.tokens) for trained in rounds]}
                for name, rounds in self.trained.items()
            },
        }

    def _table(self, shown: Mapping[str, Samples]) -> Table:
        rows = []
        for name, samples in shown.items():
            rates = [trained.steps_per_s for trained in self.trained[name]]
            rate = statistics.median(rates)
            ratio = times(statistics.median(self.ratios)) if name == BOTH and self.ratios else ""
            spread = f"{min(rates):.3f}–{max(rates):.3f}"
            row = [samples.title, f"{self.tokens_per_s(name):,.0f}", f"{rate:.3f}", spread]
            rows.append([*row, human_duration(samples.median_s), _spread(samples), ratio])
        columns = ["", "TOKENS/S", "STEPS/S", "ROUNDS", "STEP", "P10-P90", "×ALONE"]
        return Table(columns, rows, columns[1:])

    def _shares_table(self) -> Table:
        rows = [["+".join(map(str, shares)), str(steps)] for shares, steps in self.shares().most_common()]
        return Table(["FAST+SLOW MICRO-BATCHES", "STEPS"], rows, ["STEPS"])

    def _findings(self) -> list[str]:
        notes, factor = [], self.plan.factor
        if ratios := self.ratios:
            ratio, ideal = statistics.median(ratios), 1 + 1 / factor
            verdict = "beaten" if ratio >= MUST_BEAT else "not beaten"
            notes.append(
                f"together {ratio:.2f} times the fast one alone (rounds {min(ratios):.2f}–{max(ratios):.2f}); ideal "
                f"{ideal:.2f}, to beat {MUST_BEAT:.2f}: {verdict}"
            )
        if made := [trained.slowed for trained in self.trained[BOTH]]:
            notes.append(f"the slow one was let run one part in {statistics.median(made):.2f} of the time")
        if (losses := self.losses).steps:
            notes.append(
                f"losses of {losses.steps} equal steps: {losses.equal} are equal bit for bit, the others differ by "
                f"{losses.largest:.1e} at most, relative"
            )
        return [*notes, *filter(None, [self.wrong])]


def _round(trained: Trained, tokens: int) -> dict[str, Any]:
    return {
        "steps_per_s": trained.steps_per_s,
        "tokens_per_s": tokens * trained.steps_per_s,
        "seconds": trained.seconds,
        "shares": [list(shares) for shares in trained.shares],
        "losses": trained.losses,
    }


def _spread(samples: Samples) -> str:
    return human_spread(samples.quantile_s(0.1), samples.quantile_s(0.9))


async def _shares(trial: Trial, last: int) -> dict[int, tuple[int, ...]]:
    """Step → micro-batches by worker number, as the ledger has it. Raises ``JobFailed``, ``ProtocolError``."""
    found: dict[int, tuple[int, ...]] = {}
    order = _ranks(trial)
    while (step := max(found, default=0)) < last:
        page = page_untrusted(await trial.observer.ask("jobs.ledger", job=trial.job, after_step=step))
        if not page.rows:
            raise JobFailed(f"the ledger ends at step {step}, and step {last} was told of")
        for row in page.rows:
            counts = counts_of_untrusted(row.counts)
            if len(counts) != len(order):
                raise JobFailed(f"step {row.step} was computed by {len(counts)} workers, not {len(order)}")
            found[row.step] = tuple(counts[rank] for rank in order)
    return found


def _ranks(trial: Trial) -> list[int]:
    """Of the workers, by number. Raises ``JobFailed`` where the ring changed: it should not, nothing was done to it."""
    if len(trial.observer.views) != 1:
        raise JobFailed(f"the ring was formed {len(trial.observer.views)} times", remedy="see the logs")
    names = [trial.observer.names[member] for member in trial.observer.views[0].members]
    return [names.index(child.name) for child in trial.workers.values()]
