"""``p2ptrain bench speculate``: what a far drafter is worth, beside none and beside one that is waited for.

A verifier and a drafter run in processes of their own (``speculated``), as they do in a cluster, over an emulated link.
Their models only take time, and the text is known beforehand (``foreseen``); ``--verifier`` and ``--drafter`` measure a
real pair instead (``speculate_pair``). A text that is not the verifier's own counts for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from p2ptrain.cli.bench.drawing import FILLS, Bar, bars
from p2ptrain.cli.bench.foreseen import prompts_for, text_after
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Interrupted, Members, started
from p2ptrain.cli.bench.report import Report, Table, times
from p2ptrain.cli.bench.trial import Scene
from p2ptrain.cli.stopping import unless_stopped
from p2ptrain.core.errors import JobFailed
from roles.speculation.policy import MOST_DRAFTS
from roles.speculation.simulation import (
    DrafterSetting,
    Setting,
    drafting_ahead_s,
    growing,
    mean_token_s,
    simulate,
    synchronous_s,
)

GREEDY = {"temperature": 0.0}
GOALS_MS = {0.0: 20.0, 20.0: 22.5, 80.0: 31.5, 200.0: 42.5}
"""Of a token, by round trip, with these:"""
GOAL_ALPHA, GOAL_PASS_S, GOAL_DRAFT_S = 0.8, 0.05, 0.005
NEVER_SLOWER = 1.05
CHAIN_TIMES = 3.0
CHAIN_RING_S, CHAIN_STAGES = 0.08, 2
"""Of a split verifier: what its token travels, to the stages, between them, and back."""
SIMULATED_RUNS = 12
ALONE_TOKENS = 64
"""Of the text that is written without a drafter: all of its tokens take as long."""
SETTLED = 64
"""Tokens after which a text's drafter is known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        alphas: how often a draft is right where all before it are.
        jitter_ms: by which a message may be later than half of the round trip, at most.
        pass_s: that a pass of the verifier takes. growth: of it, that each draft adds. draft_s: that a draft takes.
        tokens: new ones of a text. texts: of each setting.
        chain: the verifier is split over ``CHAIN_STAGES``: each pass travels for ``CHAIN_RING_S`` as well.
        kill: whether drafters are killed in the midst of a text.
    """

    alphas: list[float]
    round_trips_ms: list[float]
    jitter_ms: float = 0.0
    pass_s: float = GOAL_PASS_S
    growth: float = 0.0
    draft_s: float = GOAL_DRAFT_S
    tokens: int = 512
    texts: int = 2
    chain: bool = False
    kill: bool = False
    threads: int = 1

    @property
    def alone_s(self) -> float:
        """A pass without drafts, travelling included."""
        return self.pass_s + (CHAIN_RING_S if self.chain else 0.0)

    @property
    def row_s(self) -> float:
        """That each draft adds to a pass."""
        return self.pass_s * self.growth

    def passes_s(self, drafts: int) -> float:
        """A pass with so many drafts."""
        return self.alone_s + self.row_s * drafts

    def best_drafts(self, alpha: float, round_trip_s: float) -> int:
        """Of a protocol whose sides wait for each other, by its formula."""
        return min(
            range(1, MOST_DRAFTS + 1),
            key=lambda drafts: synchronous_s(drafts, alpha, self.draft_s, self.passes_s, round_trip_s),
        )

    def goal_s(self, alpha: float, round_trip_ms: float, alone_s: float) -> float | None:
        """Of a token; None where none was set. ``alone_s``: that one takes without a drafter."""
        if self.chain:
            return alone_s / CHAIN_TIMES if alpha == GOAL_ALPHA else None
        mine = (alpha, self.pass_s, self.growth, self.draft_s, self.jitter_ms)
        if mine != (GOAL_ALPHA, GOAL_PASS_S, 0.0, GOAL_DRAFT_S, 0.0) or round_trip_ms not in GOALS_MS:
            return None
        return GOALS_MS[round_trip_ms] / 1e3


@dataclass(slots=True)
class Texts:
    """Some texts of one way to write them. ``stats``: of each, empty for the rival's."""

    at_s: list[list[float]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, texts: Sequence[dict[str, Any]], expected: Sequence[Sequence[int]], what: str) -> Texts:
        """Raises ``JobFailed``: one is not what it is to be."""
        for number, (text, wanted) in enumerate(zip(texts, expected, strict=True), 1):
            if text["ids"] != list(wanted):
                raise JobFailed(f"text {number}, {what}: not the verifier's own text; its times count for nothing")
        return cls([text["at_s"] for text in texts], [text.get("stats", {}) for text in texts])

    def add(self, other: Texts) -> None:
        """Others of the same way."""
        self.at_s += other.at_s
        self.stats += other.stats

    @property
    def token_s(self) -> float:
        """From the first token of each text to its last."""
        return sum(at_s[-1] for at_s in self.at_s) / max(1, sum(len(at_s) - 1 for at_s in self.at_s))

    @property
    def settled_s(self) -> float:
        """Of a token behind the first ``SETTLED`` ones; 0 where there is none."""
        long = [at_s for at_s in self.at_s if len(at_s) > SETTLED + 1]
        return sum(at_s[-1] - at_s[SETTLED] for at_s in long) / max(1, sum(len(at_s) - 1 - SETTLED for at_s in long))

    def total(self, name: str) -> float:
        """A sum over the texts."""
        return float(sum(stats.get(name) or 0 for stats in self.stats))

    def each(self, name: str, per: str) -> float:
        """One sum for each of another."""
        return self.total(name) / max(1.0, self.total(per))


@dataclass(slots=True)
class Row:
    """One drafter at one distance. ``drafts``: that the rival asks for at a time."""

    alpha: float
    round_trip_ms: float
    drafts: int
    alone: Texts
    ahead: Texts
    in_turns: Texts
    simulated_s: float


@dataclass(slots=True)
class Kill:
    """A drafter killed in the midst of a text. ``pause_s``: the longest from then on between two pieces."""

    round_trip_ms: float
    killed_at: int
    pause_s: float
    before_s: float
    limit_s: float

    @property
    def held(self) -> bool:
        return self.pause_s <= self.limit_s


def pauses(at_s: Sequence[float], first: int) -> float:
    """The longest time between a token from number ``first`` on and the one before it."""
    return max((later - before for before, later in pairwise(at_s[max(0, first - 1) :])), default=0.0)


@asynccontextmanager
async def opened(
    verifier: Members,
    drafter: Members,
    for_drafter: dict[str, Any],
    for_verifier: dict[str, Any],
    prompt: str,
    tokens: int,
) -> AsyncIterator[dict[str, Any]]:
    """Both sides, that have met. ``prompt``: of short texts that are not counted. ``tokens``: of one that is, which
    they are not longer than. Raises as ``Members.all``."""
    (listening,) = await drafter.all("speculate", part="be drafter", seconds=3, **for_drafter)
    at = {"port": listening["port"], "tokenizer": listening["tokenizer"]}
    await verifier.all("speculate", part="be verifier", seconds=3, **for_verifier, **at)
    await verifier.all("speculate", part="meet", prompt=prompt, tokens=tokens, seconds=4)
    yield listening
    await verifier.all("speculate", part="close")


class SpeculateBench:
    """One run; ``rows`` and ``kills`` grow while it measures."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rows: list[Row] = []
        self.kills: list[Kill] = []
        self._stages: list[dict[str, Any]] = []

    async def measure(self, scene: Scene) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        if await unless_stopped(scene.stop, self._measure(scene)) is None:
            raise Interrupted

    async def _measure(self, scene: Scene) -> bool:
        plan, texts = self.plan, scene.root / "texts"
        scene.console.progress("starting a verifier and a drafter")
        async with AsyncExitStack() as stack:
            verifier = await stack.enter_async_context(started(1, scene.stop))
            if plan.chain:
                await self._chained(await stack.enter_async_context(started(CHAIN_STAGES, scene.stop)), scene.root)
            async with started(1, scene.stop) as drafter:
                for round_trip_ms in plan.round_trips_ms:
                    for alpha in plan.alphas:
                        scene.console.progress(f"{round_trip_ms:g} ms, alpha {alpha:g}")
                        self.rows.append(await self._row(verifier, drafter, alpha, round_trip_ms, texts))
            if plan.kill:
                for round_trip_ms in plan.round_trips_ms:
                    scene.console.progress(f"{round_trip_ms:g} ms: a drafter is killed")
                    async with started(1, scene.stop) as drafter:
                        self.kills.append(await self._kill(verifier, drafter, round_trip_ms, texts))
        return True

    async def _chained(self, stages: Members, root: Path) -> None:
        """Have these listen as stages of one chain."""
        plan = self.plan
        times = {"ring_s": CHAIN_RING_S, "pass_s": plan.pass_s, "row_s": plan.row_s}
        order: dict[str, Any] = {"stages": len(stages), "root": str(root), **times}
        self._stages = await stages.all("speculate", part="be stage", **order)

    def _sides(self, alpha: float, round_trip_ms: float, texts: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        plan = self.plan
        link = {"rtt_ms": round_trip_ms, "jitter_ms": plan.jitter_ms, "model": "", "threads": plan.threads}
        drafter = {"draft_s": plan.draft_s, "alpha": alpha}
        verifier = {"pass_s": plan.pass_s, "row_s": plan.row_s, "texts": str(texts)}
        if plan.chain:
            verifier |= {"stages": self._stages, "ring_s": CHAIN_RING_S}
        return drafter | link, verifier | link

    async def _row(self, verifier: Members, drafter: Members, alpha: float, round_trip_ms: float, texts: Path) -> Row:
        plan, round_trip_s = self.plan, round_trip_ms / 1e3
        prompts = prompts_for(alpha, plan.tokens, plan.texts)
        expected = [text_after(prompt.encode(), plan.tokens) for prompt in prompts]
        drafts = plan.best_drafts(alpha, round_trip_s)
        text_s = plan.tokens * plan.passes_s(8)
        sizes: dict[str, Any] = {"tokens": plan.tokens, "sampling": GREEDY}

        shorter = min(ALONE_TOKENS, plan.tokens)

        async def written(what: str, count: int, part: str = "write", **how: Any) -> Texts:
            order = {"prompts": prompts[:count], "seconds": count * text_s / 4, **how}
            (answer,) = await verifier.all("speculate", part=part, **order)
            return Texts.of(answer["texts"], expected[:count], what)

        async with opened(
            verifier, drafter, *self._sides(alpha, round_trip_ms, texts), "hello", plan.tokens
        ) as listening:
            order: dict[str, Any] = {"prompts": prompts[:1], "tokens": shorter, "speculate": False}
            (answer,) = await verifier.all("speculate", part="write", seconds=text_s, sampling=GREEDY, **order)
            alone = Texts.of(answer["texts"], [expected[0][:shorter]], "alone")
            ahead = await written("drafted ahead", plan.texts, speculate=True, **sizes)
            rival: dict[str, Any] = {"port": listening["rival_port"], "drafts": drafts, "tokens": plan.tokens}
            in_turns = await written("in turns", 1, "write_in_turns", **rival)
        await drafter.all("speculate", part="close")
        return Row(alpha, round_trip_ms, drafts, alone, ahead, in_turns, self._simulated_s(alpha, round_trip_s))

    async def _kill(self, verifier: Members, drafter: Members, round_trip_ms: float, texts: Path) -> Kill:
        plan, alpha = self.plan, max(self.plan.alphas)
        (prompt,) = prompts_for(alpha, plan.tokens, 1)
        expected = [text_after(prompt.encode(), plan.tokens)]
        async with opened(
            verifier, drafter, *self._sides(alpha, round_trip_ms, texts), "hello", plan.tokens
        ) as listening:
            kill = {"kill_pid": listening["pid"], "kill_after": plan.tokens // 2}
            order = {"prompts": [prompt], "tokens": plan.tokens, "speculate": True, "sampling": GREEDY, **kill}
            (answer,) = await verifier.all("speculate", part="write", seconds=plan.tokens * plan.alone_s, **order)
        Texts.of(answer["texts"], expected, "with a drafter that was killed")
        at_s, killed_at = answer["texts"][0]["at_s"], answer["texts"][0]["killed_at"]
        after_s = pauses(at_s, killed_at)
        return Kill(round_trip_ms, killed_at, after_s, pauses(at_s[:killed_at], 1), 2 * plan.alone_s)

    def _simulated_s(self, alpha: float, round_trip_s: float) -> float:
        """A token, by the same rules, where nothing but passes, drafts and links takes time."""
        plan = self.plan
        drafter = DrafterSetting(alpha, plan.draft_s, round_trip_s, plan.jitter_ms / 1e3)
        pass_s = growing(plan.alone_s, plan.row_s / plan.alone_s)
        turn_s = plan.pass_s / CHAIN_STAGES if plan.chain else 0.0
        runs = range(SIMULATED_RUNS)
        settings = [Setting((drafter,), pass_s, plan.tokens, 12, seed, turn_s=turn_s) for seed in runs]
        return mean_token_s([simulate(setting) for setting in settings])

    # ------------------------------------------------------------------------------------------------------ the report

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan = self.plan
        split = f", split: a ring of {1e3 * CHAIN_RING_S:g} ms" if plan.chain else ""
        title = f"speculate · a pass takes {1e3 * plan.pass_s:g} ms{split} · a draft {1e3 * plan.draft_s:g} ms"
        report = Report("speculate", title, origin, asdict(plan), complete=complete)
        results = [self._result(row) for row in self.rows]
        report.results = {
            "rows": results,
            "kills": [asdict(kill) | {"held": kill.held} for kill in self.kills],
            "held": all(row["held"] for row in results) if results else None,
        }
        report.tables = [self._measured(results), self._expected(results), self._killed()]
        report.pictures = [self._picture()]
        report.notes = self._notes(results)
        report.samples = [
            {
                "alpha": row.alpha,
                "round_trip_ms": row.round_trip_ms,
                "text": number,
                "token_s": at_s[-1] / (len(at_s) - 1),
            }
            for row in self.rows
            for number, at_s in enumerate(row.ahead.at_s)
        ]
        return report

    def _result(self, row: Row) -> dict[str, Any]:
        plan, ahead = self.plan, row.ahead
        round_trip_s = row.round_trip_ms / 1e3
        token_s, alone_s = ahead.token_s, row.alone.token_s
        goal_s = plan.goal_s(row.alpha, row.round_trip_ms, alone_s)
        slower = token_s / alone_s
        return {
            "alpha": row.alpha,
            "round_trip_ms": row.round_trip_ms,
            "token_s": token_s,
            "settled_s": ahead.settled_s,
            "alone_s": alone_s,
            "faster": alone_s / token_s,
            "in_turns_s": row.in_turns.token_s,
            "in_turns_drafts": row.drafts,
            "simulated_s": row.simulated_s,
            "formula_ahead_s": drafting_ahead_s(row.alpha, plan.draft_s, plan.alone_s, round_trip_s),
            "formula_in_turns_s": synchronous_s(row.drafts, row.alpha, plan.draft_s, plan.passes_s, round_trip_s),
            "goal_s": goal_s,
            "goal_reached": None if goal_s is None else token_s <= goal_s,
            "never_slower": slower <= NEVER_SLOWER,
            "held": slower <= NEVER_SLOWER and (goal_s is None or token_s <= goal_s),
            "pause_s": max(pauses(at_s, 1) for at_s in ahead.at_s),
            "accepted_length": ahead.total("tokens") / max(1.0, ahead.total("passes")),
            "measured_alpha": statistics.fmean(stats["alpha"] or 0.0 for stats in ahead.stats),
            "wasted": ahead.each("wasted", "drafted"),
            "drafted_per_token": ahead.each("drafted", "tokens"),
            "self_steps": ahead.each("self_steps", "passes"),
            "bytes_per_token": (ahead.total("bytes_in") + ahead.total("bytes_out")) / max(1.0, ahead.total("tokens")),
            "frame_bytes_per_token": statistics.fmean(
                stats.get("frame_bytes_per_token") or 0.0 for stats in ahead.stats
            ),
        }

    def _measured(self, results: list[dict[str, Any]]) -> Table:
        columns = [
            "ROUND TRIP",
            "ALPHA",
            "ALONE",
            "IN TURNS",
            "AHEAD",
            "FASTER",
            "GOAL",
            "A PASS",
            "WASTED",
            "BYTES",
            "FRAMES",
        ]
        rows = []
        for row in results:
            goal = "-" if row["goal_s"] is None else f"{1e3 * row['goal_s']:.1f} {_yes(row['goal_reached'])}"
            goal = goal if row["never_slower"] else "slower NO"
            times_ms = [f"{1e3 * row[name]:.1f}" for name in ("alone_s", "in_turns_s", "token_s")]
            found = [f"{row['accepted_length']:.1f}", f"{100 * row['wasted']:.0f} %", f"{row['bytes_per_token']:.1f}"]
            found.append(f"{row['frame_bytes_per_token']:.0f}")
            where = [f"{row['round_trip_ms']:g} ms", f"{row['alpha']:g}"]
            rows.append([*where, *times_ms, times(row["faster"]), goal, *found])
        return Table(columns, rows, columns)

    def _expected(self, results: list[dict[str, Any]]) -> Table:
        columns = [
            "ROUND TRIP",
            "ALPHA",
            "AHEAD",
            "SETTLED",
            "SIMULATED",
            "FORMULA",
            "IN TURNS",
            "ITS FORMULA",
            "ITS DRAFTS",
        ]
        names = ("token_s", "settled_s", "simulated_s", "formula_ahead_s", "in_turns_s", "formula_in_turns_s")
        rows = [
            [
                f"{row['round_trip_ms']:g} ms",
                f"{row['alpha']:g}",
                *(f"{1e3 * row[name]:.1f}" for name in names),
                str(row["in_turns_drafts"]),
            ]
            for row in results
        ]
        return Table(columns, rows, columns)

    def _killed(self) -> Table:
        columns = ["ROUND TRIP", "KILLED AT TOKEN", "LONGEST PAUSE", "BEFORE", "GOAL", "TEXT"]
        rows = []
        for kill in self.kills:
            times_ms = [f"{1e3 * each:.0f} ms" for each in (kill.pause_s, kill.before_s, kill.limit_s)]
            times_ms[-1] += f" {_yes(kill.held)}"
            rows.append([f"{kill.round_trip_ms:g} ms", str(kill.killed_at), *times_ms, "the same"])
        return Table(columns, rows, columns[:-1])

    def _picture(self) -> list[str]:
        groups = []
        for row in self.rows:
            ways = [("alone", row.alone), ("in turns", row.in_turns), ("ahead", row.ahead)]
            drawn = [
                Bar(name, texts.token_s, f"{1e3 * texts.token_s:.1f} ms", fill)
                for (name, texts), fill in zip(ways, FILLS[2::-1], strict=True)
            ]
            groups.append((f"{row.round_trip_ms:g} ms, {row.alpha:g}", drawn))
        return bars(groups, common=True)

    def _notes(self, results: list[dict[str, Any]]) -> list[str]:
        plan = self.plan
        notes = [
            "milliseconds of a token, from a text's first token to its last, what must be learned first included; "
            "what a verifier learns is kept for its next texts, and one short text before them is not counted; "
            f"settled: behind the first {SETTLED} tokens",
            "alone: the same service without a drafter; in turns: draft, send, verify, answer, with the best fixed "
            "number of drafts; ahead: this program; a pass: tokens that one gives; wasted: of the drafts, those "
            "that no pass used; bytes: bodies of drafts and verdicts, a token; frames: with the headers around them",
            f"{plan.texts} texts of {plan.tokens} tokens each, one in turns, and "
            f"the first {ALONE_TOKENS} tokens alone; all were the verifier's "
            "own, token for token. As many drafts are right as alpha says; models that only take time, nothing else",
        ]
        if plan.chain:
            notes.append(
                f"the split verifier: {CHAIN_STAGES} stages in processes of their own, each of which takes its part of "
                f"a pass, and {CHAIN_STAGES + 1} hops of {1e3 * CHAIN_RING_S / (CHAIN_STAGES + 1):.1f} ms; alone: the "
                "same chain without a drafter"
            )
        if goals := [row for row in results if row["goal_s"] is not None]:
            reached = sum(row["goal_reached"] for row in goals)
            notes.append(f"goals of a token's time: {reached} of {len(goals)} reached")
        if results:
            slowest = max(row["token_s"] / row["alone_s"] for row in results)
            verdict = "kept" if slowest <= NEVER_SLOWER else "not kept"
            notes.append(
                f"at worst {times(slowest)} of the time alone, to stay within {times(NEVER_SLOWER)}: {verdict}"
            )
        if self.kills:
            held = sum(kill.held for kill in self.kills)
            notes.append(f"killed with -9: {held} of {len(self.kills)} texts went on within two passes")
        return notes


def _yes(held: bool) -> str:
    return "yes" if held else "NO"
