"""``bench speculate --exact``: are a pair's texts the verifier's own, token for token, while its drafter dies?

Every text is written by transformers' ``generate``, by the verifier alone, and with the drafter at each distance, which
is killed and comes back at times that a number decides (``speculated_exact``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Interrupted, Members, started
from p2ptrain.cli.bench.report import Report, Table
from p2ptrain.cli.bench.speculate_pair import PROMPTS
from p2ptrain.cli.bench.speculate_parted import Parted, check, look_at, parted, told_of
from p2ptrain.cli.bench.trial import Scene
from p2ptrain.cli.stopping import unless_stopped

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "drawn of the likeliest": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}
AT_ONCE = 10
"""Texts of one order: between two of them it is told how far it is."""
TEXT_S = 3.0
LOAD_S = 6.0
JITTER = 0.1
"""Of the round trip, by which each message may be later, where nobody says."""


def exact_prompts(count: int, given: Sequence[str] | None = None) -> list[str]:
    """So many: those of a file, or Python; again from the first where there are fewer. Each text has its own seed."""
    if given is not None:
        return [given[number % len(given)] for number in range(count)]
    made = []
    for number in range(count):
        again, which = divmod(number, len(PROMPTS))
        before = PROMPTS[(which + again) % len(PROMPTS)] + "\n" if again else ""
        made.append(before + PROMPTS[which])
    return made


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """What to try.

    Attributes:
        jitter_ms: by which a message may be later; None: ``JITTER`` of the round trip.
        pass_s, draft_s: virtual seconds of a pass of the verifier and of a draft.
        seed: of draws, jitter and deaths.
    """

    verifier: str
    drafter: str
    prompts: list[str]
    tokens: int
    round_trips_ms: list[float]
    jitter_ms: float | None = None
    pass_s: float = 0.05
    draft_s: float = 0.005
    seed: int = 0
    threads: int = 1

    def jitter_at_ms(self, round_trip_ms: float) -> float:
        """At that distance."""
        return JITTER * round_trip_ms if self.jitter_ms is None else self.jitter_ms


@dataclass(slots=True)
class Row:
    """Texts that were drawn in one way at one distance, in sums. ``killed``: in how many of them the drafter died;
    ``rounded``: that rounding made others; ``different``: that something else did."""

    sampling: str
    round_trip_ms: float
    texts: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    wasted: int = 0
    kills: int = 0
    killed: int = 0
    rounded: int = 0
    different: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """What a part of them came to."""
        self.kills += answer["kills"]
        for text in answer["texts"]:
            self.texts += 1
            self.tokens += len(text["ids"])
            self.killed += text["kills"] > 0
            for name in ("passes", "drafted", "accepted", "wasted"):
                setattr(self, name, getattr(self, name) + text[name])


@dataclass(slots=True)
class ExactBench:
    """One run; ``rows`` and ``parted`` grow while it goes."""

    plan: ExactPlan
    rows: list[Row] = field(default_factory=list)
    parted: list[Parted] = field(default_factory=list)
    generated: int = 0

    async def measure(self, scene: Scene) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        if await unless_stopped(scene.stop, self._measure(scene)) is None:
            raise Interrupted

    def check(self) -> None:
        """Raises ``JobFailed``: a text differs, and not by rounding."""
        check(self.parted)

    async def _measure(self, scene: Scene) -> bool:
        plan, say = self.plan, scene.console.progress
        say("loading the two models")
        async with started(1, scene.stop, threads=plan.threads) as members:
            models: dict[str, Any] = {"verifier": plan.verifier, "drafter": plan.drafter, "threads": plan.threads}
            await members.all("speculate", part="be exact", seconds=LOAD_S, **models)
            for name in SAMPLINGS:
                rows = [Row(name, round_trip_ms) for round_trip_ms in plan.round_trips_ms]
                self.rows += rows
                starts = [*range(0, len(plan.prompts), AT_ONCE), len(plan.prompts)]
                for start, stop in pairwise(starts):
                    await self._texts(members, name, rows, start, stop, say)
        return True

    async def _texts(self, members: Members, name: str, rows: Sequence[Row], start: int, stop: int, say: Any) -> None:
        """Texts [start, stop), in every way."""
        plan = self.plan
        order: dict[str, Any] = {"prompts": plan.prompts[start:stop], "tokens": plan.tokens, "seed": plan.seed + start}
        order |= {"sampling": SAMPLINGS[name], "seconds": TEXT_S * (stop - start)}
        where = f"{name}, texts {start + 1} to {stop} of {len(plan.prompts)}"
        say(f"{where}: the verifier alone")
        (plain,) = await members.all("speculate", part="plain", **order)
        wanted = plain["alone"]
        await self._compare(members, name, "by transformers", start, wanted, plain["generated"])
        self.generated += stop - start
        for row in rows:
            say(f"{where}: {row.round_trip_ms:g} ms")
            link: dict[str, Any] = {"rtt_ms": row.round_trip_ms, "jitter_ms": plan.jitter_at_ms(row.round_trip_ms)}
            times_s: dict[str, Any] = {"pass_s": plan.pass_s, "draft_s": plan.draft_s}
            (answer,) = await members.all("speculate", part="write", **order, **link, **times_s)
            row.add(answer)
            found = [text["ids"] for text in answer["texts"]]
            others = await self._compare(members, name, f"at {row.round_trip_ms:g} ms", start, wanted, found)
            rounded = sum(each.by_rounding is True for each in others)
            row.rounded, row.different = row.rounded + rounded, row.different + len(others) - rounded

    async def _compare(
        self,
        members: Members,
        sampling: str,
        writer: str,
        start: int,
        wanted: Sequence[list[int]],
        found: Sequence[list[int]],
    ) -> list[Parted]:
        pairs = enumerate(zip(wanted, found, strict=True), start)
        every = (parted(sampling, writer, text, right, ids) for text, (right, ids) in pairs)
        others = [each for each in every if each is not None]
        self.parted += others
        await look_at(members, others, self.plan.prompts, SAMPLINGS, self.plan.seed)
        return others

    # ------------------------------------------------------------------------------------------------------ the report

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan, rows = self.plan, self.rows
        names = f"{Path(plan.verifier).name} and {Path(plan.drafter).name}"
        title = f"speculate --exact · {names} · {len(plan.prompts)} prompts, texts of {plan.tokens} tokens"
        report = Report("speculate-exact", title, origin, asdict(plan), complete=complete)
        sums = {
            name: sum(getattr(row, name) for row in rows) for name in ("texts", "tokens", "kills", "killed", "accepted")
        }
        different, rounded = (sum(each.by_rounding is which for each in self.parted) for which in (False, True))
        report.results = {
            "rows": [asdict(row) for row in rows],
            **sums,
            "generated": self.generated,
            "different": different,
            "rounded": rounded,
            "differences": [asdict(each) for each in self.parted],
        }
        columns = ["DRAWN", "ROUND TRIP", "TEXTS", "TOKENS", "A PASS", "RIGHT DRAFTS", "KILLS", "IN TEXTS"]
        columns += ["ROUNDED", "DIFFERENT"]
        cells = [
            [
                row.sampling,
                f"{row.round_trip_ms:g} ms",
                str(row.texts),
                f"{row.tokens:,}",
                f"{row.tokens / max(1, row.passes):.2f}",
                f"{row.accepted:,} of {row.drafted:,}",
                str(row.kills),
                str(row.killed),
                str(row.rounded),
                str(row.different),
            ]
            for row in rows
        ]
        report.tables = [Table(columns, cells, columns[1:])]
        jitter = f"{JITTER:.0%} of a round trip" if plan.jitter_ms is None else f"{plan.jitter_ms:g} ms"
        report.notes = [
            f"{sums['texts']:,} texts with a drafter that was killed {sums['kills']:,} times and came back, and "
            f"{self.generated:,} by transformers' generate, beside those of the verifier alone with the same seeds: "
            f"{len(self.parted)} differ, {rounded} of them by rounding",
            f"virtual time: a pass takes {1e3 * plan.pass_s:g} ms, a draft {1e3 * plan.draft_s:g} ms, and messages are "
            f"late by up to {jitter}; a pass: tokens that one gives; right drafts: of those that came, those that were "
            "right and in a pass; in texts: in how many of them the drafter died",
        ]
        report.notes += told_of(self.parted)
        report.samples = [asdict(row) for row in rows]
        return report
