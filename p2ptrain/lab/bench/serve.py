"""``bench serve``: what many texts at a time gain, on real peers, with a whole model and with a split one.

A seed, a verifier and workers run as ``join`` starts them. Texts are requested over HTTP. The rivals have the model in
one process: transformers' ``generate`` of a padded batch, and its continuous batching. All of them, with every number
of texts, take turns. The texts of the first round are compared with those that the model writes alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from p2ptrain.core.texts import human_duration
from p2ptrain.lab.bench.generate import Peers, start_peers
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, Shown, times
from p2ptrain.lab.bench.runner import Answer, Bench, Members

RANDOM_MODELS: dict[str, Answer] = {
    "22M": {"hidden_size": 384, "layers": 8, "heads": 6, "kv_heads": 6, "intermediate_size": 1024},
    "80M": {"hidden_size": 768, "layers": 12, "heads": 12, "kv_heads": 12, "intermediate_size": 1280},
}
"""Sizes of random models with ``WORDS`` tokens, by their number of parameters."""
WORDS = 10_240
RIVALS = ("padded", "continuous")


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to measure.

    Attributes:
        model: a directory; empty: random models of ``sizes``.
        texts: numbers of texts at a time. rounds: measured ones.
        stages: numbers of workers that hold the model; 0: it is whole.
        round_trip_ms: between the peers of a split model.
        threads: for computing, of all processes of a case together.
    """

    model: str
    sizes: list[str]
    texts: list[int]
    prompt_tokens: int
    tokens: int
    stages: list[int]
    round_trip_ms: float
    threads: int
    rounds: int

    def report(self) -> BenchReport:
        name = Path(self.model).name or "random models"
        title = f"serve · {name} · {self.prompt_tokens} + {self.tokens} tokens a text"
        report = BenchReport("serve", title, "tokens", "{:.1f}".format, asdict(self))
        report.columns = {
            "times_one": ("× ONE", _median(times)),
            "times_padded": ("× PADDED", _median(times)),
            "first_s": ("FIRST TOKEN", _median(human_duration)),
            "between_s": ("BETWEEN", _median(human_duration)),
            "longest_s": ("LONGEST GAP", _median(human_duration)),
            "differ": ("DIFFER", str),
        }
        report.notes = [
            "median: time of all texts, from the first request to the last token, divided by their number; × one and "
            "× padded: tokens per second over those of one text, and of the padded batch, in the same round",
            "first token, and times between tokens: medians of all texts; longest gap: in a round, the median round",
            "differ: texts of the first round that are not those of the model alone",
            "the rivals' texts are greedy, every other one of this project is sampled",
        ]
        return report


def _median(shown: Shown) -> Shown:
    return lambda values: shown(median(values))


async def measure_serve(bench: Bench, plan: ServePlan, report: BenchReport) -> None:
    most, positions = max(plan.texts), plan.prompt_tokens + plan.tokens
    for name in [Path(plan.model).name] if plan.model else plan.sizes:
        async with bench.members(1, threads=plan.threads) as members:
            directory = Path(plan.model) if plan.model else bench.root / name
            if not plan.model:
                how: Answer = {"sizes": RANDOM_MODELS[name], "words": WORDS}
                await members.all("make_model", directory=str(directory), seconds=5, **how)
            how = {"threads": plan.threads, "texts": most, "positions": positions}
            (answer,) = await members.all("open_writer", model=str(directory), seconds=5, **how)
            report.torch = answer["torch"]
            alone: list[str] = []
            for stages in plan.stages:
                label = f"{name}, {f'{stages} stages, {plan.round_trip_ms:g} ms' if stages else 'whole'}"
                bench.console.progress(f"{label}: peers start")
                where: dict[str, Any] = {"stages": stages, "threads": max(1, plan.threads // max(1, stages))}
                where |= {"round_trip_ms": plan.round_trip_ms if stages else 0.0, "texts": most + 1}
                async with start_peers(bench, {"verifier": directory}, **where) as peers:
                    case = ServeCase(bench, plan, peers, members)
                    alone = alone or await case.write_alone(most)
                    await case.measure(report, label, alone, rivals=not stages)


class ServeCase:
    """One model, whole or split over a number of workers, with every number of texts.

    Its texts have numbers. Those below the number of texts are compared, in the first round, which is not measured. All
    others are new, so nothing of them is computed before.

    Attributes:
        contenders: their facts are lists of values of the measured rounds.
    """

    def __init__(self, bench: Bench, plan: ServePlan, peers: Peers, members: Members) -> None:
        self.contenders: dict[str, Contender] = {}
        self._bench, self._plan, self._peers, self._members = bench, plan, peers, members
        self._numbers = count(1000)
        self._alone: list[str] = []

    async def write_alone(self, number: int) -> list[str]:
        """Write the texts of the first round, one at a time."""
        return [(await self._peers.write(await self._body(text))).text for text in range(number)]

    async def measure(self, report: BenchReport, label: str, alone: list[str], *, rivals: bool) -> None:
        self._alone = alone
        plan, warmed = self._plan, set[str]()
        work: dict[str, Callable[[bool], Awaitable[float]]] = {}
        for texts in plan.texts:
            self.contenders[f"{texts}"] = Contender(f"{texts} text{'s' * (texts > 1)}")
            work[f"{texts}"] = partial(self._sample_texts, texts)
            for rival in RIVALS if rivals else ():
                self.contenders[f"{texts} {rival}"] = Contender(f"{texts} {rival}")
                work[f"{texts} {rival}"] = partial(self._sample_rival, texts, rival)

        async def sample(name: str) -> list[float]:
            counts = name in warmed
            warmed.add(name)
            return [await work[name](counts)]

        await self._bench.interleave(report, Case(label, plan.tokens, self.contenders), sample, rounds=plan.rounds)
        for name, contender in self.contenders.items():
            number, _, kind = name.partition(" ")
            others = {"times_one": f"1 {kind}".strip(), "times_padded": f"{number} {RIVALS[0]}"}
            for fact, other in others.items() if number.isdecimal() else ():
                if other in self.contenders and not (fact == "times_padded" and other == name):
                    pairs = zip(self.contenders[other].seconds, contender.seconds, strict=True)
                    contender.facts[fact] = [upper / lower for upper, lower in pairs]

    async def _sample_texts(self, texts: int, counts: bool) -> float:
        """Returns the seconds for the tokens of one text, of so many at a time. A text that ended early has fewer."""
        numbers = [next(self._numbers) for _ in range(texts)] if counts else list(range(texts))
        bodies, facts = [await self._body(number) for number in numbers], self.contenders[f"{texts}"].facts
        made = await asyncio.gather(*(self._peers.write(body) for body in bodies))
        if counts:
            gaps = [later - before for text in made for before, later in pairwise(text.came_s)]
            news = {"first_s": [text.came_s[0] - text.asked_s for text in made], "between_s": gaps}
            for fact, values in (news | {"longest_s": [max(gaps)] if gaps else []}).items():
                facts.setdefault(fact, []).extend(values)
        else:
            facts["differ"] = sum(text.text != self._alone[number] for number, text in zip(numbers, made, strict=True))
        spent_s = max(text.came_s[-1] for text in made) - min(text.asked_s for text in made)
        return spent_s * self._plan.tokens / sum(text.tokens for text in made)

    async def _sample_rival(self, texts: int, rival: str, counts: bool) -> float:
        prompts = [await self._prompt(next(self._numbers)) for _ in range(texts)]
        order: Answer = {"prompts": prompts, "tokens": self._plan.tokens, "continuous": rival == RIVALS[1]}
        (answer,) = await self._members.all("write_texts", seconds=5.0 * texts, **order)
        return float(answer["seconds"]) / texts

    async def _body(self, number: int) -> Answer:
        drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        return {"prompt": await self._prompt(number), "max_tokens": self._plan.tokens, **drawn}

    async def _prompt(self, number: int) -> str:
        (answer,) = await self._members.all("make_prompt", seed=number, tokens=self._plan.prompt_tokens)
        return str(answer["prompt"])
