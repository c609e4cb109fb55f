"""``bench serve``: what many texts at a time gain, on real peers, with a whole model and with a split one.

A seed, a verifier and workers run as ``join`` starts them. Texts are requested over HTTP. The rivals have the model in
one process: transformers' ``generate`` of a padded batch, and its continuous batching. All of them, with every number
of texts, take turns. The texts of the first round are compared with those that the model writes alone.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from p2ptrain.core.texts import human_duration
from p2ptrain.lab.bench.generate import GeneratedText, Peers, start_peers
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, times
from p2ptrain.lab.bench.runner import Answer, Bench, Members

RANDOM_MODELS: dict[str, Answer] = {
    "22M": {"hidden_size": 384, "layers": 8, "heads": 6, "kv_heads": 6, "intermediate_size": 1024},
    "80M": {"hidden_size": 768, "layers": 12, "heads": 12, "kv_heads": 12, "intermediate_size": 1280},
}
"""Sizes of random models with ``WORDS`` tokens, by their number of parameters."""
WORDS = 10_240
WRITING = 8
"""Texts that are written while a long prompt arrives."""
PADDED, CONTINUOUS = "padded", "continuous"


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to measure.

    Attributes:
        model: a directory; empty: random models of ``sizes``.
        texts: numbers of texts at a time. rounds: measured ones.
        stages: numbers of workers that hold the model; 0: it is whole.
        round_trip_ms: between the peers of a split model.
        threads: for computing, of all processes of a case together.
        arrival: tokens of a prompt that arrives while others write; 0: none.
        question: tokens of a chat's first question; 0: no chat.
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
    arrival: int
    question: int

    def report(self) -> BenchReport:
        name = Path(self.model).name or "random models"
        title = f"serve · {name} · {self.prompt_tokens} + {self.tokens} tokens a text"
        report = BenchReport("serve", title, "tokens", "{:.1f}".format, asdict(self))
        report.columns = {
            "times_one": ("× ONE", times),
            "times_padded": ("× PADDED", times),
            "first_s": ("FIRST TOKEN", human_duration),
            "between_s": ("BETWEEN", human_duration),
            "longest_s": ("LONGEST GAP", human_duration),
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


@dataclass(slots=True)
class ServeTimes:
    """Times of one contender's texts in all measured rounds, seconds. ``longest_s``: of each round."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    longest_s: list[float] = field(default_factory=list)

    def add(self, texts: list[GeneratedText]) -> None:
        gaps = [later - before for text in texts for before, later in pairwise(text.came_s)]
        self.between_s += gaps
        self.longest_s.append(max(gaps, default=0.0))

    def facts(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in asdict(self).items() if values}


async def measure_serve(bench: Bench, plan: ServePlan, report: BenchReport) -> None:
    most, positions = max(plan.texts), plan.prompt_tokens + plan.tokens
    for name in [Path(plan.model).name] if plan.model else plan.sizes:
        async with bench.members(1, threads=plan.threads) as members:
            directory = Path(plan.model) if plan.model else bench.root / name
            if not plan.model:
                how: Answer = {"sizes": RANDOM_MODELS[name], "words": WORDS}
                await members.all("make_model", directory=str(directory), seconds=5, **how)
            how = {"threads": plan.threads, "texts": most, "positions": positions}
            (answer,) = await members.all("open_batches", model=str(directory), seconds=5, **how)
            report.torch = answer["torch"]
            alone: list[str] = []
            for stages in plan.stages:
                label = f"{name}, {f'{stages} stages, {plan.round_trip_ms:g} ms' if stages else 'whole'}"
                bench.progress(f"{label}: peers start")
                where: dict[str, Any] = {"stages": stages, "threads": max(1, plan.threads // max(1, stages))}
                where |= {"round_trip_ms": plan.round_trip_ms if stages else 0.0, "texts": most + 1}
                async with start_peers(bench, {"verifier": directory}, **where) as peers:
                    case = ServeCase(bench, plan, peers, members)
                    alone = alone or await case.write_alone(most)
                    await case.measure(report, label, alone, rivals=not stages)


class ServeCase:
    """One model, whole or split over a number of workers, with every number of texts.

    Its texts have numbers. The first ones are compared; all others are new, so that nothing of them is known yet.
    """

    def __init__(self, bench: Bench, plan: ServePlan, peers: Peers, members: Members) -> None:
        self._bench, self._plan, self._peers, self._members = bench, plan, peers, members
        self._numbers = count(1000)
        self._times: dict[str, ServeTimes] = {}
        self._alone: list[str] = []
        self._contenders: dict[str, Contender] = {}

    async def write_alone(self, number: int) -> list[str]:
        """Write the texts of the first round, one at a time."""
        return [(await self._write(await self._body(text))).text for text in range(number)]

    async def measure(self, report: BenchReport, label: str, alone: list[str], *, rivals: bool) -> None:
        self._alone = alone
        plan, found = self._plan, self._contenders
        work: dict[str, Callable[[bool], Any]] = {}

        def add(name: str, title: str, sample: Callable[[bool], Any]) -> None:
            found[name], work[name] = Contender(title), sample
            self._times[name] = ServeTimes()

        for texts in plan.texts:
            title = f"{texts} text{'s' * (texts > 1)}"
            add(f"{texts}", title, partial(self._sample_texts, f"{texts}", texts))
            for how in (PADDED, CONTINUOUS) if rivals else ():
                title = f"{texts} {'padded' if how == PADDED else 'continuous'}"
                add(f"{texts} {how}", title, partial(self._sample_rival, texts, how))
        if plan.arrival:
            title = f"{min(WRITING, max(plan.texts))} and a prompt of {plan.arrival}"
            add("arrival", title, self._sample_arrival)
        if plan.question:
            add("turn 1", "a chat's first turn", partial(self._sample_chat, "turn 1", first=True))
            add("turn 2", "its second turn", partial(self._sample_chat, "turn 2", first=False))
        case = Case(label, plan.tokens, found)
        warmed: set[str] = set()

        async def sample(name: str) -> list[float]:
            counts = name in warmed
            warmed.add(name)
            seconds: float = await work[name](counts)
            return [seconds]

        await self._bench.interleave(report, case, sample, rounds=plan.rounds)
        for name, contender in found.items():
            contender.facts |= self._times[name].facts()
            number, _, how = name.partition(" ")
            one, padded = found.get(f"1 {how}".strip()), found.get(f"{number} {PADDED}")
            if number.isdecimal() and one is not None:
                contender.facts["times_one"] = paired_ratio(one, contender)
            if padded is not None and padded is not contender:
                contender.facts["times_padded"] = paired_ratio(padded, contender)

    # ---------------------------------------------------------------------------------------------------------- samples

    async def _sample_texts(self, name: str, texts: int, counts: bool) -> float:
        numbers = [next(self._numbers) for _ in range(texts)] if counts else list(range(texts))
        made = await self._write_all([await self._body(number) for number in numbers])
        if counts:
            self._note(name, made)
        else:
            wrong = sum(text.text != self._alone[number] for number, text in zip(numbers, made, strict=True))
            self._contenders[name].facts["differ"] = wrong
        return self._seconds(made)

    async def _sample_rival(self, texts: int, how: str, counts: bool) -> float:
        prompts = [await self._prompt(next(self._numbers), self._plan.prompt_tokens) for _ in range(texts)]
        order: Answer = {"prompts": prompts, "tokens": self._plan.tokens, "continuous": how == CONTINUOUS}
        (answer,) = await self._members.all("write_batch", seconds=5.0 * texts, **order)
        return float(answer["seconds"]) / texts

    async def _sample_arrival(self, counts: bool) -> float:
        """Have a long prompt arrive when a quarter of the tokens of others is written."""
        plan, loop, has_begun, pieces = self._plan, asyncio.get_running_loop(), asyncio.Event(), count(1)
        texts = min(WRITING, max(plan.texts))
        bodies = [await self._body(next(self._numbers)) for _ in range(texts)]
        late = await self._body(next(self._numbers), plan.arrival)

        def on_piece() -> None:
            if next(pieces) == max(texts, texts * plan.tokens // 4):
                loop.call_soon_threadsafe(has_begun.set)

        async def arrive() -> GeneratedText:
            await has_begun.wait()
            return await self._write(late | {"max_tokens": 8})

        arriving = asyncio.ensure_future(arrive())
        try:
            made = await self._write_all(bodies, on_piece)
            has_begun.set()  # the texts were shorter than asked
            late_text = await arriving
        finally:
            arriving.cancel()
        if counts:
            self._note("arrival", made, asked=[late_text])
        return self._seconds(made)

    async def _sample_chat(self, name: str, counts: bool, *, first: bool) -> float:
        """Write the answer to a chat's second question; ``first``: to a first question of the same length."""
        question = await self._prompt(next(self._numbers), self._plan.question)
        later = await self._prompt(next(self._numbers), 16)
        body = (await self._body(0)) | {"messages": [{"role": "user", "content": question}]}
        body.pop("prompt")
        if first:
            answer = await self._prompt(next(self._numbers), self._plan.tokens)
        else:
            answer = (await self._write(body)).text
        turns = [("user", question), ("assistant", answer), ("user", later)]
        made = await self._write(body | {"messages": [{"role": role, "content": text} for role, text in turns]})
        if counts:
            self._note(name, [made])
        return self._seconds([made])

    def _note(self, name: str, texts: list[GeneratedText], asked: list[GeneratedText] | None = None) -> None:
        """Note the times of texts. ``asked``: those whose first token counts, if not of all."""
        self._times[name].add(texts)
        self._times[name].first_s += [text.came_s[0] - text.asked_s for text in (asked or texts)]

    def _seconds(self, texts: list[GeneratedText]) -> float:
        """Time for the tokens of one text, if all texts are written at a time. A text that ended early has fewer."""
        spent_s = max(text.came_s[-1] for text in texts) - min(text.asked_s for text in texts)
        return spent_s * self._plan.tokens / sum(text.tokens for text in texts)

    # ------------------------------------------------------------------------------------------------------------ texts

    async def _body(self, number: int, prompt_tokens: int = 0) -> Answer:
        drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        prompt = await self._prompt(number, prompt_tokens or self._plan.prompt_tokens)
        return {"prompt": prompt, "max_tokens": self._plan.tokens, **drawn}

    async def _prompt(self, number: int, tokens: int) -> str:
        (answer,) = await self._members.all("make_prompt", seed=number, tokens=tokens)
        return str(answer["prompt"])

    async def _write(self, body: Answer, on_piece: Callable[[], None] = lambda: None) -> GeneratedText:
        return await self._peers.write(body, on_piece)

    async def _write_all(
        self, bodies: list[Answer], on_piece: Callable[[], None] = lambda: None
    ) -> list[GeneratedText]:
        return list(await asyncio.gather(*(self._write(body, on_piece) for body in bodies)))


def paired_ratio(upper: Contender, lower: Contender) -> float:
    """Median of the quotients of two contenders' samples of the same rounds."""
    return statistics.median(one / other for one, other in zip(upper.seconds, lower.seconds, strict=True))
