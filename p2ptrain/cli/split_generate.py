"""``p2ptrain generate --split``: prompts through a chain of stages, several at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass

import typer

from p2ptrain.cli.generate import Shown, check_prompts
from p2ptrain.cli.in_order import InOrder
from p2ptrain.cli.output import Console, print_json
from p2ptrain.cli.placement import placement_map
from p2ptrain.cli.sources import Answer
from p2ptrain.cli.split import LEAVE_S, Planned, Wanted, planned, show_plan, within
from p2ptrain.cli.split_stats import Meter, print_split_facts, split_facts
from p2ptrain.cli.stopping import stop_on_signals, unless_stopped
from p2ptrain.cli.text_options import say_unused
from p2ptrain.compute.text import ModelText
from p2ptrain.core.serving import SamplingWish
from roles.chain.client import Chain


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written.

    Attributes:
        is_one: a prompt was given as such, not as a list of one.
        sessions: how many prompts are under way at once.
    """

    prompts: list[str]
    is_one: bool
    max_new_tokens: int
    sampling: SamplingWish
    stop: tuple[str, ...]
    sessions: int
    dry_run: bool
    stats: bool
    as_json: bool


async def generate_split(wanted: Wanted, order: Order) -> None:
    """Write what is asked for. Raises as ``planned`` and ``Chain``, and ``KeyboardInterrupt`` for Ctrl+C."""
    console, stop, shown = Console(quiet=order.as_json), asyncio.Event(), Shown(quiet=order.as_json)
    stop_on_signals(stop, shown.leaving(console))
    written = await unless_stopped(stop, _written(wanted, order, console, shown))
    if written is None:
        raise KeyboardInterrupt


async def _written(wanted: Wanted, order: Order, console: Console, shown: Shown) -> bool:
    def needs(text: ModelText) -> int:
        lengths = list[int]()

        def check(prompt: str) -> None:
            lengths.append(len(text.checked(text.prompt_ids(prompt), order.max_new_tokens)))

        check_prompts(order.prompts, check)
        text.sampling(order.sampling)  # refused before anything is loaded
        return order.sessions * (max(lengths) + order.max_new_tokens)

    async with planned(wanted, needs, console) as plan:
        if order.dry_run:
            show_plan(plan, as_json=order.as_json)
            return True
        say_unused(plan.text)
        chain = await plan.load()
        try:
            await _write(plan, chain, order, shown)
        finally:
            await within(LEAVE_S, chain.close())
    return True


async def _write(plan: Planned, chain: Chain, order: Order, shown: Shown) -> None:
    writing = Writing(plan, chain, order, shown)
    began = time.perf_counter()
    try:
        texts = await writing.run()
    except BaseException:
        writing.shown.broken()
        raise
    seconds = time.perf_counter() - began
    facts = split_facts(chain, writing.meter, plan.encoding, writing.mendings)
    if order.as_json:
        maps = [asdict(text) for text in texts]
        document = {"checkpoint": plan.label} | (maps[0] if order.is_one else {"texts": maps})
        print_json(document | {"split": facts, "plan": placement_map(chain.plan.placement)})
        return
    if order.stats:
        typer.echo()
        print_split_facts(facts)
    tokens = sum(text.tokens for text in texts)
    stages = len(chain.plan.stages)
    typer.echo(
        f"({tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tokens/s,"
        f" {stages} stage{'s' if stages != 1 else ''}, {plan.label})",
        err=True,
    )


class Writing:
    """Texts under way."""

    def __init__(self, plan: Planned, chain: Chain, order: Order, shown: Shown) -> None:
        self.meter = Meter()
        self.mendings: list[tuple[str, float]] = []
        self.shown = shown
        self._plan, self._chain, self._order = plan, chain, order
        self._sampling = plan.text.sampling(order.sampling)
        self._texts = InOrder(order.prompts, self.shown, self._one, at_once=order.sessions)

    async def run(self) -> list[Answer]:
        """All texts, in order. Raises what the first one that failed raised."""
        return await self._texts.run()

    async def _one(self, index: int, prompt: str) -> Answer:
        order, text = self._order, self._plan.text
        ids = text.prompt_ids(prompt)
        writer = text.writer(ids, stop=order.stop)
        began, first_s = time.perf_counter(), 0.0
        encoding, prefill_encoding = self._plan.wish.encodings
        session = await self._chain.generate(
            ids,
            max_new_tokens=order.max_new_tokens,
            sampling=self._sampling,
            stop_ids=writer.end_tokens,
            encoding=encoding,
            prefill_encoding=prefill_encoding,
        )
        async with session:
            async for token in session:
                first_s = first_s or time.perf_counter() - began
                self.meter.add(token)
                self._texts.piece(index, writer.take(token.id))
                if writer.ended:
                    session.cancel()
                    break
            self._texts.piece(index, writer.finish())
            self.mendings += session.mendings
        return Answer(prompt, writer.text, writer.tokens, time.perf_counter() - began, first_s, writer.ended)
