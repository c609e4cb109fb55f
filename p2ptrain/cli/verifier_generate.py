"""``p2ptrain generate`` with a verifier of the cluster."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

import typer

from p2ptrain.cli.generate import Shown
from p2ptrain.cli.in_order import InOrder
from p2ptrain.cli.output import Console, failure, print_json
from p2ptrain.cli.sources import Answer
from p2ptrain.cli.stopping import stop_on_signals, unless_stopped
from p2ptrain.cli.verifier_stats import print_verifier_stats
from p2ptrain.cli.verifiers import connected
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import SamplingWish
from roles.verifier.asking import Wish
from roles.verifier.client import VerifierClient

SURE_TOKENS = 16
"""Of fewer tokens it is not told how fast they came: one that was late would decide it."""
ROUNDING = (
    "as they may where two tokens are as good as equally likely: a pass of several positions rounds otherwise than a "
    "step, in bf16 far more than in fp32 (bench speculate --exact tells that from mistakes)"
)
MOST_AT_ONCE = 8
"""Texts under way: half of what a verifier's door lets one caller ask, for it learns late that one has ended."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written.

    Attributes:
        verifier: its name; empty: whichever is there.
        is_one: a prompt was given as such, not as a list of one.
        speculate: whether drafters may have a part. compare: each prompt also without them.
        sessions: how many prompts are under way at once.
    """

    seed: str
    verifier: str
    prompts: list[str]
    is_one: bool
    max_new_tokens: int
    sampling: SamplingWish
    stop: tuple[str, ...]
    sessions: int
    speculate: bool
    compare: bool
    stats: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class Written:
    """A text, how it came about, and the same text by the verifier alone; None where nobody asked for that."""

    answer: Answer
    stats: dict[str, Any]
    alone: tuple[Answer, dict[str, Any]] | None = None

    def as_map(self) -> dict[str, Any]:
        alone = {} if self.alone is None else {"alone": asdict(self.alone[0]) | {"stats": self.alone[1]}}
        return asdict(self.answer) | {"stats": self.stats} | alone


async def generate_by_verifier(order: Order) -> None:
    """Write what is asked for. Raises as ``verifiers.connected`` and ``VerifierClient.ask``, and
    ``KeyboardInterrupt`` for Ctrl+C."""
    console, stop, shown = Console(quiet=order.as_json), asyncio.Event(), Shown(quiet=order.as_json)
    stop_on_signals(stop, shown.leaving(console))
    if await unless_stopped(stop, _written(order, shown)) is None:
        raise KeyboardInterrupt


async def _written(order: Order, shown: Shown) -> bool:
    async with connected(order.seed, order.verifier) as client:
        writing = _Writing(client, order, shown)
        began = time.perf_counter()
        try:
            texts = await writing.texts.run()
        except BaseException as problem:
            writing.shown.broken()
            if order.as_json and isinstance(problem, P2PTrainError):
                _show_broken(client, order, writing, problem)
            raise
        _show(client, order, texts, time.perf_counter() - began)
    return True


class _Writing:
    """Texts under way. ``broken``: by prompt, what had come of those that were not whole when one failed."""

    def __init__(self, client: VerifierClient, order: Order, shown: Shown) -> None:
        self.shown = shown
        self.broken: dict[int, Answer] = {}
        self._client, self._order = client, order
        # What is compared runs one by one: two at a time would share the verifier.
        self.texts = InOrder(
            order.prompts, self.shown, self._one, at_once=1 if order.compare else min(order.sessions, MOST_AT_ONCE)
        )

    async def _one(self, index: int, prompt: str) -> Written:
        order = self._order
        if not order.compare:
            return Written(*await self._text(index, prompt, speculate=order.speculate, shown=True))
        first = index % 2 == 0  # whichever comes second finds a warm machine: they take turns
        runs = {
            which: await self._text(index, prompt, speculate=which, shown=which == first)
            for which in (first, not first)
        }
        return Written(*runs[True], runs[False])

    async def _text(self, index: int, prompt: str, *, speculate: bool, shown: bool) -> tuple[Answer, dict[str, Any]]:
        order = self._order
        began, first_s, said = time.perf_counter(), 0.0, list[str]()
        wish = Wish(
            prompt=prompt,
            max_new_tokens=order.max_new_tokens,
            sampling=order.sampling,
            stop=order.stop,
            speculate="auto" if speculate else "off",
        )
        text = await self._client.ask(wish)
        try:
            async for piece in text:
                first_s = first_s or time.perf_counter() - began
                said.append(piece.text)
                if shown:
                    self.texts.piece(index, piece.text)
        except BaseException:
            seconds = time.perf_counter() - began
            self.broken[index] = Answer(prompt, "".join(said), text.count, seconds, first_s, "failed")
            raise
        seconds = time.perf_counter() - began
        return Answer(prompt, "".join(said), text.count, seconds, first_s, text.ended), text.stats()


def _show(client: VerifierClient, order: Order, texts: list[Written], seconds: float) -> None:
    at = client.verifier
    speedup = _speedup(texts) if order.compare else None
    if order.as_json:
        maps = [text.as_map() for text in texts]
        document = {"verifier": at.name, "model": at.model} | (maps[0] if order.is_one else {"texts": maps})
        print_json(document | ({} if speedup is None else {"compared": speedup}))
        return
    for number, text in enumerate(texts, 1):
        if order.stats:
            typer.echo()
            if len(texts) > 1:
                typer.echo(f"text {number}")
            print_verifier_stats(text.stats)
    if speedup is not None:
        typer.echo()
        typer.echo(compared_text(speedup))
        seconds = sum(text.answer.seconds for text in texts)
    tokens = sum(text.answer.tokens for text in texts)
    speed = f"{tokens / max(seconds, 1e-9):.1f} tokens/s"
    typer.echo(f"({tokens} token{'s' if tokens != 1 else ''}, {speed}, {at.model} of the verifier {at.name})", err=True)


def _show_broken(client: VerifierClient, order: Order, writing: _Writing, problem: P2PTrainError) -> None:
    """What had come when one failed, for programs: a person has seen it. Nothing where nothing had."""
    maps: dict[int, dict[str, Any]] = {index: asdict(answer) for index, answer in writing.broken.items()}
    maps |= {index: text.as_map() for index, text in writing.texts.whole.items()}
    if maps:
        texts = [maps.get(index) for index in range(len(order.prompts))]
        document: dict[str, Any] = {"verifier": client.verifier.name, "model": client.verifier.model}
        document |= (maps[0] if order.is_one else {"texts": texts}) | {"error": failure(problem)}
        print_json(document)


def _speedup(texts: list[Written]) -> dict[str, Any]:
    """Of tokens behind the first, which is the prompt's and the same both ways. ``accepted``: drafts taken."""

    def token_ms(runs: list[Answer]) -> float | None:
        tokens = sum(run.tokens - 1 for run in runs if run.tokens > 1)
        spent_s = sum(run.seconds - run.first_s for run in runs if run.tokens > 1)
        return 1e3 * spent_s / tokens if tokens >= SURE_TOKENS else None

    drafted = token_ms([text.answer for text in texts])
    alone = token_ms([text.alone[0] for text in texts if text.alone is not None])
    known = drafted is not None and alone is not None and drafted > 0
    return {
        "times": alone / drafted if known and alone is not None and drafted is not None else None,
        "token_ms": drafted,
        "alone_token_ms": alone,
        "accepted": sum(taken for text in texts if isinstance(taken := text.stats.get("accepted"), int)),
        "same_text": all(text.alone is None or text.alone[0].text == text.answer.text for text in texts),
    }


def compared_text(compared: dict[str, Any]) -> str:
    """What ``_speedup`` found, for a person."""
    same = "the same text" if compared["same_text"] else f"the texts part, {ROUNDING}"
    if compared["times"] is None:
        return f"{same}; they are too short to say how fast"
    pace = f"{compared['token_ms']:.1f} ms a token, alone {compared['alone_token_ms']:.1f} ms; {same}"
    if not compared["accepted"]:
        return f"no draft was taken, so both are the verifier alone: {pace}"
    return f"{compared['times']:.2f} times as fast as the verifier alone: {pace}"
