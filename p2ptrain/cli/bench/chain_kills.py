"""Killing stages of a chain, each at each moment of a text that matters: what the text is then, and how long it stops.

A text has two turns, as a chat's: the second prompt goes on where the first answer ended. A stage dies *in prefill*,
while it computes the first prompt; *in decode*, while it computes the work of one token in the middle; *between*, when
the first answer has ended and nothing is under way: the second turn begins at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import chain as joined
from typing import Any

from p2ptrain.cli.bench.chained import Cluster, Text
from p2ptrain.cli.bench.conduct import Progress
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import Sampling
from roles.chain.client import Chain

PREFILL, DECODE, BETWEEN = "prefill", "decode", "between"
PHASES = (PREFILL, DECODE, BETWEEN)
GOAL_S = 2.0
"""Beside one prefill: the longest that a text may stop."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A text of two turns: ``tokens`` new ones follow ``ids``, and again after ``more`` ids."""

    ids: list[int]
    more: list[int]
    tokens: int
    sampling: Sampling

    @property
    def positions(self) -> int:
        return len(self.ids) + len(self.more) + 2 * self.tokens


@dataclass(slots=True)
class Kill:
    """What one kill came to.

    Attributes:
        phase: that was wanted. hit: in which it was.
        pause_s: from the kill to the next token. mended_s: of it, until the chain was whole again.
        prefill_s: of the same prompt, undisturbed.
        alike: the text is that of the chain which nobody disturbed.
        failed: why there is no text.
    """

    stage: int
    phase: str
    hit: str = ""
    pause_s: float = 0.0
    mended_s: float = 0.0
    prefill_s: float = 0.0
    alike: bool = False
    failed: str = ""

    @property
    def limit_s(self) -> float:
        return GOAL_S + self.prefill_s

    @property
    def held(self) -> bool:
        return self.alike and not self.failed and self.pause_s <= self.limit_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"limit_s": self.limit_s, "held": self.held}


def moment_s(stage: int, hop_s: float, stages_us: tuple[int, ...]) -> float:
    """When a stage is in the middle of a work, after that was sent, or after the token before came."""
    return (stage + 1) * hop_s + (sum(stages_us[:stage]) + stages_us[stage] / 2) / 1e6


def hit_of(killed_at: float, first: Text) -> str:
    """In which phase something happened; ``first`` is the first turn."""
    if killed_at < first.came_s[0]:
        return PREFILL
    return DECODE if killed_at < first.came_s[-1] else BETWEEN


def pause_of(killed_at: float, turns: list[Text]) -> float:
    """From the kill to the next token."""
    came = joined.from_iterable(text.came_s for text in turns)
    return next((at for at in came if at > killed_at), killed_at) - killed_at


@dataclass(slots=True)
class Strike:
    """A kill to come. ``phase`` empty: none does."""

    phase: str = ""
    after_s: float = 0.0
    kill: Callable[[], None] = lambda: None
    killed_at: float = 0.0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def at(self, phase: str) -> None:
        """``phase`` begins now."""
        if phase == self.phase:
            self._tasks.append(asyncio.create_task(self._strike(), name="kill"))

    async def done(self) -> None:
        """Wait until it was carried out, where its phase began."""
        await asyncio.gather(*self._tasks)

    async def _strike(self) -> None:
        if self.after_s:
            await asyncio.sleep(self.after_s)  # the fault's own moment; nothing is waited for
        self.killed_at = time.perf_counter()
        self.kill()


async def conversation(chain: Chain, turns: Turns, strike: Strike) -> tuple[list[Text], float]:
    """Both turns, and the seconds that mending took. Raises ``NetworkError``."""
    session = await chain.generate(
        turns.ids, max_new_tokens=turns.tokens, sampling=turns.sampling, positions=turns.positions
    )
    async with session:
        first, second = Text(time.perf_counter()), Text(0.0)
        strike.at(PREFILL)
        async for token in session:
            first.take(token)
            if len(first.ids) == turns.tokens // 2:
                strike.at(DECODE)
        strike.at(BETWEEN)
        await strike.done()
        second.began_s = time.perf_counter()
        session.go_on([*session.history, first.ids[-1], *turns.more], max_new_tokens=turns.tokens)
        async for token in session:
            second.take(token)
    return [first, second], sum(took_s for _, took_s in session.mendings)


async def kill(chain: Chain, cluster: Cluster, turns: Turns, stage: int, phase: str, hop_s: float) -> tuple[Kill, str]:
    """Kill one stage of a chain that has a spare: what came of it, and who was killed. Raises ``P2PTrainError``: the
    text that nobody disturbs failed."""
    undisturbed, _ = await conversation(chain, turns, Strike())
    first = undisturbed[0]
    of_work = first.tokens[0 if phase == PREFILL else turns.tokens // 2]
    found = Kill(stage, phase, prefill_s=of_work.took_s if phase == PREFILL else first.tokens[0].took_s)
    victim = chain.plan.stages[stage].worker.name
    after_s = 0.0 if phase == BETWEEN else moment_s(stage, hop_s, of_work.stages_us)
    strike = Strike(phase, after_s, lambda: cluster.kill(victim))
    try:
        disturbed, found.mended_s = await conversation(chain, turns, strike)
    except P2PTrainError as problem:
        found.failed = problem.message
        await strike.done()
        return found, victim
    found.hit = hit_of(strike.killed_at, disturbed[0])
    found.pause_s = pause_of(strike.killed_at, disturbed)
    found.alike = [text.ids for text in disturbed] == [text.ids for text in undisturbed]
    return found, victim


def positions_of(stages: int) -> list[tuple[int, str]]:
    """First, middle and last, each once, with their names."""
    named = {0: "first", stages // 2: "middle", stages - 1: "last"}
    named[0] = "first"
    return sorted(named.items())


async def kills(
    cluster: Cluster,
    clients: Callable[[], Any],
    stages: int,
    turns: Turns,
    hop_s: float,
    *,
    found: list[Kill],
    progress: Progress,
) -> None:
    """Each of ``positions_of`` in each of ``PHASES``. Raises ``P2PTrainError``.

    Args:
        clients: opens a chain with a client of its own.
        found: grows.
    """
    for stage, name in positions_of(stages):
        for phase in PHASES:
            progress(f"killing the {name} of {stages} stages: {phase}")
            async with clients() as chain:
                one, victim = await kill(chain, cluster, turns, stage, phase, hop_s)
            found.append(one)
            await cluster.bury(victim)
            await cluster.add(1)
            await cluster.there()
