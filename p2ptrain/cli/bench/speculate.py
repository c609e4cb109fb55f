"""``p2ptrain bench speculate``: what a far drafter is worth, beside none and beside one that is waited for.

A verifier and a drafter run in processes of their own (``speculated``), as they do in a cluster, over an emulated link;
with ``--virtual`` both are here, and time is virtual. Their models only take time, and the text is known beforehand
(``foreseen``); ``--verifier`` and ``--drafter`` measure a real pair instead (``speculate_pair``). A text that is not
the verifier's own counts for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.bench.foreseen import prompts_for, text_after
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Interrupted, started
from p2ptrain.cli.bench.progress import Remaining
from p2ptrain.cli.bench.report import Report
from p2ptrain.cli.bench.speculate_rows import (
    ALONE_TOKENS,
    CHAIN_RING_S,
    CHAIN_STAGES,
    SIMULATED_RUNS,
    Kill,
    Plan,
    Row,
    Texts,
    Where,
    pauses,
)
from p2ptrain.cli.bench.speculate_told import told
from p2ptrain.cli.bench.trial import Scene
from p2ptrain.cli.stopping import unless_stopped
from roles.speculation.simulation import DrafterSetting, Setting, growing, mean_token_s, simulate
from wire.virtual import run_virtual

if TYPE_CHECKING:
    from p2ptrain.cli.bench.sides import Sides, Start

GREEDY = {"temperature": 0.0}


@asynccontextmanager
async def opened(
    verifier: Sides,
    drafter: Sides,
    for_drafter: dict[str, Any],
    for_verifier: dict[str, Any],
    prompt: str,
    tokens: int,
) -> AsyncIterator[None]:
    """Both sides, that have met. ``prompt``: of short texts that are not counted. ``tokens``: of one that is, which
    they are not longer than. Raises as ``Members.all``."""
    (listening,) = await drafter.all("speculate", part="be drafter", seconds=3, **for_drafter)
    await verifier.all("speculate", part="be verifier", seconds=3, drafter=listening, **for_verifier)
    await verifier.all("speculate", part="meet", prompt=prompt, tokens=tokens, seconds=4)
    yield
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
        if self.plan.virtual:
            from p2ptrain.cli.bench.sides import here

            await asyncio.to_thread(run_virtual, self._measure(scene, here(scene.stop)))
        elif await unless_stopped(scene.stop, self._measure(scene, lambda count: started(count, scene.stop))) is None:
            raise Interrupted

    async def _measure(self, scene: Scene, start: Start) -> bool:
        plan, texts = self.plan, scene.root / "texts"
        settings = list(plan.settings())
        expected_s = [0.0 if plan.virtual else plan.expected_s(where) for where in settings]
        remaining = Remaining(scene.console, expected_s)
        scene.console.progress(f"starting a verifier and a drafter{remaining.told}")
        async with AsyncExitStack() as stack:
            verifier = await stack.enter_async_context(start(1))
            if plan.chain:
                await self._chained(await stack.enter_async_context(start(CHAIN_STAGES)), scene.root)
            async with start(1) as drafter:
                for where in settings:
                    with remaining.next(str(where)):
                        self.rows.append(await self._row(verifier, drafter, where, texts))
            if plan.kill:
                for round_trip_ms in plan.round_trips_ms:
                    scene.console.progress(f"{round_trip_ms:g} ms: a drafter is killed")
                    async with start(1) as drafter:
                        where = Where(round_trip_ms, max(plan.alphas))
                        self.kills.append(await self._kill(verifier, drafter, where, texts))
        return True

    async def _chained(self, stages: Sides, root: Path) -> None:
        """Have these listen as stages of one chain."""
        plan = self.plan
        times = {"ring_s": CHAIN_RING_S, "pass_s": plan.pass_s, "row_s": plan.row_s}
        order: dict[str, Any] = {"stages": len(stages), "root": str(root), **times}
        self._stages = await stages.all("speculate", part="be stage", **order)

    def _sides(self, where: Where, texts: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        plan = self.plan
        link = {"rtt_ms": where.round_trip_ms, "jitter_ms": plan.jitter_ms, "model": "", "threads": plan.threads}
        drafter = {"draft_s": plan.draft_s, "alpha": where.alpha}
        verifier = {"pass_s": plan.pass_s, "row_s": plan.row_s, "texts": str(texts), "most_drafts": where.most_drafts}
        if plan.chain:
            verifier |= {"stages": self._stages, "ring_s": CHAIN_RING_S}
        return drafter | link, verifier | link

    async def _row(self, verifier: Sides, drafter: Sides, where: Where, texts: Path) -> Row:
        plan = self.plan
        prompts = prompts_for(where.alpha, plan.tokens, plan.texts)
        expected = [text_after(prompt.encode(), plan.tokens) for prompt in prompts]
        drafts = plan.drafts_in_turns(where)
        text_s = plan.tokens * plan.passes_s(8)
        shorter = min(ALONE_TOKENS, plan.tokens)

        async def written(what: str, count: int, tokens: int, part: str = "write", **how: Any) -> Texts:
            order = {"prompts": prompts[:count], "tokens": tokens, "seconds": count * text_s / 4, **how}
            (answer,) = await verifier.all("speculate", part=part, **order)
            return Texts.of(answer["texts"], [text[:tokens] for text in expected[:count]], what)

        async with opened(verifier, drafter, *self._sides(where, texts), "hello", plan.tokens):
            alone = await written("alone", 1, shorter, speculate=False, sampling=GREEDY)
            ahead = await written("drafted ahead", plan.texts, plan.tokens, speculate=True, sampling=GREEDY)
            in_turns = await written("in turns", 1, plan.tokens, "write_in_turns", drafts=drafts)
        await drafter.all("speculate", part="close")
        return Row(where, drafts, alone, ahead, in_turns, self._simulated_s(where))

    async def _kill(self, verifier: Sides, drafter: Sides, where: Where, texts: Path) -> Kill:
        plan = self.plan
        (prompt,) = prompts_for(where.alpha, plan.tokens, 1)
        expected = [text_after(prompt.encode(), plan.tokens)]
        async with opened(verifier, drafter, *self._sides(where, texts), "hello", plan.tokens):
            how: dict[str, Any] = {"speculate": True, "sampling": GREEDY, "kill_after": plan.tokens // 2}
            order = {"prompts": [prompt], "tokens": plan.tokens, "seconds": plan.tokens * plan.alone_s, **how}
            (answer,) = await verifier.all("speculate", part="write", **order)
        Texts.of(answer["texts"], expected, "with a drafter that was killed")
        at_s, killed_at = answer["texts"][0]["at_s"], answer["texts"][0]["killed_at"]
        after_s = pauses(at_s, killed_at)
        return Kill(where.round_trip_ms, killed_at, after_s, pauses(at_s[:killed_at], 1), 2 * plan.alone_s)

    def _simulated_s(self, where: Where) -> float:
        """A token, by the same rules, where nothing but passes, drafts and links takes time."""
        plan = self.plan
        drafter = DrafterSetting(where.alpha, plan.draft_s, where.round_trip_s, plan.jitter_ms / 1e3)
        pass_s = growing(plan.alone_s, plan.row_s / plan.alone_s)
        sizes: dict[str, Any] = {"turn_s": plan.pass_s / CHAIN_STAGES if plan.chain else 0.0}
        sizes["most_drafts"] = where.most_drafts
        settings = [Setting((drafter,), pass_s, plan.tokens, 12, seed, **sizes) for seed in range(SIMULATED_RUNS)]
        return mean_token_s([simulate(setting) for setting in settings])

    def report(self, origin: Origin, *, complete: bool) -> Report:
        return told(self.plan, self.rows, self.kills, origin, complete=complete)
