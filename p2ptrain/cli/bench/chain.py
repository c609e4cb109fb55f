"""``p2ptrain bench chain``: what a token costs on its way through a chain of stages, and what a lost stage costs.

Real worker processes hold the parts of one random model; the links between all of them and the client are emulated. A
token's time is divided into what the stages say that they computed, what the links' delays come to, and the rest: event
loops, threads, copies, this client. Beside it stands what nothing of that would cost: the whole model in one process,
and the same plus the links.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from p2ptrain.cli.bench.chain_kills import GOAL_S, Kill, Turns, kills
from p2ptrain.cli.bench.chained import Cluster, Text, clustered, written
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Interrupted, Members, started
from p2ptrain.cli.bench.plan import MEMBER_BYTES, check_fits
from p2ptrain.cli.bench.report import Report, Table, human_duration, human_size, times
from p2ptrain.cli.bench.trial import Scene
from p2ptrain.cli.stopping import unless_stopped
from p2ptrain.core.serving import Sampling
from roles.chain.client import Chain

REST_GOAL_S = 2e-3
"""Of a hop: what is neither computing nor the link."""
WARM_TOKENS = 8
KILL_TOKENS = 24
MORE_IDS = 16
SAMPLING = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=7)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        prompt: positions of a prompt. tokens: new ones of a text.
        sessions: texts at once, beside one alone.
        kill: whether stages are killed, at each round trip.
        threads: of each worker, and of the whole model.
    """

    stages: int
    round_trips_ms: list[float]
    layers: int
    width: int
    vocab: int
    prompt: int
    tokens: int
    sessions: int
    threads: int
    kill: bool

    @property
    def hops(self) -> int:
        """From the client through all stages and back."""
        return self.stages + 1

    @property
    def workers(self) -> int:
        return self.stages + self.kill

    @property
    def weights_bytes(self) -> int:
        """About: attention, feed-forward, embedding and head, in fp32."""
        return 4 * (self.layers * 12 * self.width**2 + 2 * self.vocab * self.width)

    def prompt_ids(self, number: int, count: int) -> list[int]:
        """Of the ``number``-th prompt."""
        generator = random.Random(number)  # noqa: S311 - a prompt is no secret
        return [generator.randrange(self.vocab) for _ in range(count)]

    @property
    def turns(self) -> Turns:
        """The text in whose midst stages are killed."""
        return Turns(self.prompt_ids(0, self.prompt), self.prompt_ids(99, MORE_IDS), KILL_TOKENS, SAMPLING)

    @property
    def text_positions(self) -> int:
        """The most that a session needs."""
        return max(self.prompt + self.tokens, self.turns.positions)


def check_memory(plan: Plan, available_bytes: int) -> None:
    """Raises ``ResourceError``."""
    need_bytes = (plan.workers + 2) * MEMBER_BYTES + 3 * plan.weights_bytes  # the whole one, the parts, the making
    check_fits(f"{plan.workers} workers and a model of {human_size(plan.weights_bytes)}", need_bytes, available_bytes)


@dataclass(slots=True)
class Distance:
    """One emulated round trip.

    Attributes:
        one: the text that was alone. many: those at once.
        alike: whether its tokens are those of the whole model.
    """

    round_trip_ms: float
    one: Text | None = None
    many: list[Text] = field(default_factory=list)
    alike: bool = False
    stages: list[dict[str, Any]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    @property
    def hop_s(self) -> float:
        """One way."""
        return self.round_trip_ms / 2e3


@dataclass(frozen=True, slots=True)
class Parts:
    """Of the median token of a text, in seconds."""

    token_s: float
    compute_s: float
    link_s: float
    rest_s: float


def parts(text: Text, link_s: float) -> Parts:
    """The first token of a text is its prompt's, and no part of it."""
    later = text.tokens[1:]
    return Parts(
        statistics.median(token.took_s for token in later),
        statistics.median(token.compute_s for token in later),
        link_s,
        statistics.median(token.took_s - token.compute_s - link_s for token in later),
    )


def stages_us(text: Text) -> list[float]:
    """Microseconds that each stage computes on the median token."""
    return [statistics.median(each) for each in zip(*(token.stages_us for token in text.tokens[1:]), strict=True)]


def rate(texts: list[Text]) -> float:
    """Tokens per second of all together, from the first token of the first text to the last one of all."""
    began_s = min(text.came_s[0] for text in texts)
    ended_s = max(text.came_s[-1] for text in texts)
    return sum(len(text.ids) - 1 for text in texts) / max(ended_s - began_s, 1e-9)


class ChainBench:
    """One run; ``distances`` grows while it measures."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.weights_bytes = 0
        self.whole_s: list[float] = []  # of each token but the first
        self.whole_prompt_s = 0.0
        self.whole_ids: list[int] = []
        self.distances: list[Distance] = []

    async def measure(self, scene: Scene) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        done = await unless_stopped(scene.stop, self._measure(scene))
        if done is None:
            raise Interrupted

    async def _measure(self, scene: Scene) -> bool:
        directory = scene.root / "model"
        scene.console.progress("making a model")
        async with started(1, scene.stop, threads=self.plan.threads) as members:
            await self._whole(members, directory, scene)
        for round_trip_ms in self.plan.round_trips_ms:
            await self._at(scene, directory, round_trip_ms)
        return True

    async def _whole(self, members: Members, directory: Path, scene: Scene) -> None:
        plan = self.plan
        sizes: dict[str, Any] = {
            "layers": plan.layers,
            "width": plan.width,
            "vocab": plan.vocab,
            "context": plan.text_positions,
        }
        (made,) = await members.all("make a model", directory=str(directory), seconds=60, **sizes)
        self.weights_bytes = made["weights_bytes"]
        scene.console.progress(f"generating with the whole model, {human_size(self.weights_bytes)}")
        order: dict[str, Any] = {"ids": plan.prompt_ids(0, plan.prompt), "tokens": plan.tokens}
        (text,) = await members.all(
            "generate", directory=str(directory), sampling=asdict(SAMPLING), seconds=60, **order
        )
        at_s = text["at_s"]
        self.whole_ids, self.whole_prompt_s = text["ids"], at_s[0]
        self.whole_s = [later - before for before, later in pairwise(at_s)]

    async def _at(self, scene: Scene, directory: Path, round_trip_ms: float) -> None:
        plan, progress = self.plan, scene.console.progress
        distance = Distance(round_trip_ms)
        self.distances.append(distance)
        there = f"{round_trip_ms:g} ms"
        root = scene.root / f"cluster-{round_trip_ms:g}"
        async with clustered(
            root, plan.workers, threads=plan.threads, round_trip_ms=round_trip_ms, progress=progress
        ) as cluster:

            @asynccontextmanager
            async def chained() -> AsyncIterator[Chain]:
                async with (
                    cluster.client(directory) as client,
                    client.chain(plan.stages, plan.sessions * plan.text_positions) as chain,
                ):
                    yield chain

            progress(f"{there}: loading the parts")
            async with chained() as chain:
                await self._texts(chain, distance, progress)
            if plan.kill:
                await self._kills(cluster, chained, distance, progress)

    async def _texts(self, chain: Chain, distance: Distance, progress: Any) -> None:
        plan, there = self.plan, f"{distance.round_trip_ms:g} ms"
        ids = plan.prompt_ids(0, plan.prompt)
        await written(chain, ids, WARM_TOKENS, SAMPLING)
        progress(f"{there}: one text of {plan.tokens} tokens")
        distance.one = await written(chain, ids, plan.tokens, SAMPLING)
        distance.alike = distance.one.ids == self.whole_ids
        distance.stages = [
            {"start": stage.start, "stop": stage.stop} | asdict(loaded)
            for stage, loaded in zip(chain.plan.stages, chain.loaded, strict=True)
        ]
        if plan.sessions > 1:
            progress(f"{there}: {plan.sessions} texts at once")
            prompts = [plan.prompt_ids(number, plan.prompt) for number in range(plan.sessions)]
            async with asyncio.TaskGroup() as tasks:
                writing = [tasks.create_task(written(chain, prompt, plan.tokens, SAMPLING)) for prompt in prompts]
            distance.many = [task.result() for task in writing]

    async def _kills(self, cluster: Cluster, chained: Any, distance: Distance, progress: Any) -> None:
        there = f"{distance.round_trip_ms:g} ms"
        await kills(
            cluster,
            chained,
            self.plan.stages,
            self.plan.turns,
            distance.hop_s,
            found=distance.kills,
            progress=lambda text: progress(f"{there}: {text}"),
        )

    # ------------------------------------------------------------------------------------------------------ the report

    def parts_at(self, distance: Distance) -> Parts | None:
        """None where nothing was measured."""
        if distance.one is None or len(distance.one.tokens) < 2:
            return None
        return parts(distance.one, self.plan.hops * distance.hop_s)

    @property
    def whole_token_s(self) -> float | None:
        return statistics.median(self.whole_s) if self.whole_s else None

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan = self.plan
        model = f"{plan.layers} layers of width {plan.width}, {human_size(self.weights_bytes or plan.weights_bytes)}"
        title = f"chain · {plan.stages} stages · {model} · a prompt of {plan.prompt}, {plan.tokens} tokens"
        report = Report("chain", title, origin, asdict(plan), complete=complete)
        shown = [distance for distance in self.distances if self.parts_at(distance) is not None]
        report.results = {
            "whole": {"token_s": self.whole_token_s, "prompt_s": self.whole_prompt_s},
            "rest_goal_s": REST_GOAL_S,
            "distances": [self._result(distance) for distance in shown],
        }
        report.tables = [self._tokens(shown)]
        if plan.sessions > 1:
            report.tables.append(self._sessions(shown))
        if plan.kill:
            report.tables.append(self._killed(shown))
        report.notes = self._notes(shown)
        report.samples = [
            {"round_trip_ms": distance.round_trip_ms, "token": token.number, "took_s": token.took_s}
            | {"compute_s": token.compute_s, "link_s": plan.hops * distance.hop_s}
            for distance in shown
            for token in (distance.one.tokens if distance.one else [])
        ]
        return report

    def _result(self, distance: Distance) -> dict[str, Any]:
        found, one = self.parts_at(distance), distance.one
        assert found is not None
        assert one is not None
        return {
            "round_trip_ms": distance.round_trip_ms,
            **asdict(found),
            "rest_per_hop_s": found.rest_s / self.plan.hops,
            "held": found.rest_s / self.plan.hops <= REST_GOAL_S,
            "prompt_s": one.tokens[0].took_s,
            "stages_us": stages_us(one),
            "stages": distance.stages,
            "as_the_whole": distance.alike,
            "tokens_per_s": rate([one]),
            "sessions_tokens_per_s": rate(distance.many) if distance.many else None,
            "kills": [kill.to_json() for kill in distance.kills],
        }

    def _tokens(self, shown: list[Distance]) -> Table:
        columns = ["ROUND TRIP", "TOKEN", "COMPUTE", "LINK", "REST", "A HOP", "WHOLE", "IDEAL", "AS WHOLE"]
        rows = []
        for distance in shown:
            found, whole_s = self.parts_at(distance), self.whole_token_s
            assert found is not None
            assert whole_s is not None
            times_s = (found.token_s, found.compute_s, found.link_s, found.rest_s, found.rest_s / self.plan.hops)
            row = [
                f"{distance.round_trip_ms:g} ms",
                *(_ms(each) for each in (*times_s, whole_s, whole_s + found.link_s)),
            ]
            rows.append([*row, "yes" if distance.alike else "NO"])
        return Table(columns, rows, columns)

    def _sessions(self, shown: list[Distance]) -> Table:
        count = self.plan.sessions
        columns = ["ROUND TRIP", "1 SESSION", f"{count} SESSIONS", "TIMES", "AT MOST"]
        rows = []
        for distance in shown:
            if distance.many and distance.one is not None:
                alone, together = rate([distance.one]), rate(distance.many)
                row = [f"{distance.round_trip_ms:g} ms", f"{alone:.1f}/s", f"{together:.1f}/s", times(together / alone)]
                rows.append([*row, times(self._at_most(distance.one))])
        return Table(columns, rows, columns)

    def _at_most(self, one: Text) -> float:
        """By how much several sessions can be faster than one: the slowest stage has a turn for each."""
        slowest_s = max(stages_us(one)) / 1e6
        token_s = statistics.median(token.took_s for token in one.tokens[1:])
        return min(float(self.plan.sessions), token_s / max(slowest_s, 1e-9))

    def _killed(self, shown: list[Distance]) -> Table:
        columns = ["ROUND TRIP", "STAGE", "IN", "TEXT", "PAUSE", "OF IT MENDING", "PREFILL", "HELD"]
        rows = []
        for distance in shown:
            for kill in distance.kills:
                row = [f"{distance.round_trip_ms:g} ms", str(kill.stage), kill.hit or kill.phase]
                row += ["the same" if kill.alike else "none" if kill.failed else "ANOTHER"]
                row += [f"{each:.2f} s" for each in (kill.pause_s, kill.mended_s, kill.prefill_s)]
                rows.append([*row, "yes" if kill.held else "no"])
        return Table(columns, rows, columns[:1] + columns[4:])

    def _notes(self, shown: list[Distance]) -> list[str]:
        hops = self.plan.hops
        notes = [
            f"of the median token; link: {hops} hops of half a round trip, the client's two among them; rest: what is "
            "neither computing nor the link; a hop: the rest of one; whole: transformers' generate in one process; "
            "ideal: that and the link",
        ]
        found = [parts.rest_s / hops for distance in shown if (parts := self.parts_at(distance)) is not None]
        if found:
            verdict = "reached" if max(found) <= REST_GOAL_S else "not reached"
            goal = f"to reach {human_duration(REST_GOAL_S)}: {verdict}"
            notes.append(f"the rest is {human_duration(max(found))} a hop at most; {goal}")
        if self.plan.sessions > 1:
            notes.append(
                "at most: where the slowest stage computes without a pause; stages on one machine share its "
                "processors, and reach less"
            )
        for distance in shown:
            notes += [f"stage {kill.stage}, {kill.phase}: {kill.failed}" for kill in distance.kills if kill.failed]
        all_kills = [kill for distance in shown for kill in distance.kills]
        if all_kills:
            held = sum(kill.held for kill in all_kills)
            notes.append(
                f"killed with -9, {len(all_kills)} times: {held} went on with the same text within {GOAL_S:g} s and "
                "one prefill, from the kill to the next token"
            )
        return notes


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
