"""A verifier on virtual time: a target and drafters that compute whole numbers, and a text side of bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from p2ptrain.compute.text import ChatFormat, ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError, ResourceError
from p2ptrain.core.serving import Pass, Sampling
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, Network, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.background import Background
from roles.drafter import events as ev
from roles.drafter.drafting import Drafting as DraftingCore
from roles.serving.local_model import Passed
from roles.serving.text_service import ServiceOptions, VerifierService
from roles.verifier.cost_model import DrafterModel
from roles.verifier.drafter_link import Connected, DrafterFacts, Opening
from tests.roles.stage_stand_in import StandInStage, stand_in_config, stand_in_part, tokens_of

CONFIG = stand_in_config(layers=2, vocab_size=256, context=600, rows=1)
GREEDY = Sampling(0.0)


@cache
def reference(prompt: str, tokens: int, sampling: Sampling = GREEDY) -> tuple[int, ...]:
    """What the model writes behind a prompt, in one go."""
    return tuple(tokens_of(CONFIG, list(prompt.encode()), tokens, sampling))


def text_of(ids: Sequence[int]) -> str:
    """The text of new tokens: bytes; what is no UTF-8 is shown as �."""
    return Tokenizer.of_bytes().backend.decode(list(ids))


def model_text(directory: Path) -> ModelText:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(CONFIG)
    Tokenizer.of_bytes().backend.save(str(directory / "tokenizer.json"))
    return ModelText(directory)


def world(network: Network | None = None) -> World:
    return World(LoopClock(), network or MemoryNetwork(), RealDisk(), random.Random(1), LoopThreads())


def _ran(stage: StandInStage, name: str, run: ev.Run) -> tuple[int, ...]:
    ids = memoryview(np.array(run.ids, "<i4").tobytes())
    return stage.run(name, Pass(run.keep, ids, len(run.ids), "ids", "fp32", run.samples, run.sample_index)).tokens


@dataclass
class ScriptedTarget:
    """One part with all layers. A pass takes ``pass_s``; ``room`` positions are there for all sessions.

    Attributes:
        before: called before each pass, with the number of passes so far; to hold it, or to fail.
        runs: what was asked for. open_now: sessions that are not closed. lost: those that are of no more use.
    """

    pass_s: float = 0.05
    room: int = 1 << 20
    before: Callable[[int], Any] = lambda count: None
    vocab_size: int = 256
    context: int | None = 600
    label: str = "stand-in"
    runs: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)
    open_now: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    opened: int = 0
    stage: StandInStage = field(default_factory=lambda: stand_in_part(CONFIG, 0, 2))

    async def open(self, *, positions: int, sampling: Sampling) -> _TargetSession:
        if sum(self.open_now.values()) + positions > self.room:
            raise ResourceError("no memory for the cache", remedy="ask for fewer tokens")
        self.opened += 1
        name = f"session {self.opened}"
        self.stage.open(name, positions=positions, sampling=sampling)
        self.open_now[name] = positions
        return _TargetSession(self, name)

    def facts(self) -> dict[str, Any]:
        return {"kind": "scripted"}

    async def close(self) -> None:
        """Nothing is kept."""


class _TargetSession:
    def __init__(self, target: ScriptedTarget, name: str) -> None:
        self._target, self._name = target, name

    @property
    def lost(self) -> bool:
        return self._name in self._target.lost

    async def run(self, *, keep: int, ids: Sequence[int], samples: int, sample_index: int, prefill: bool) -> Passed:
        target = self._target
        held = target.before(len(target.runs))
        target.runs.append((keep, tuple(ids), samples))
        if held is not None:
            await held
        await asyncio.sleep(target.pass_s)
        return Passed(_ran(target.stage, self._name, ev.Run(keep, tuple(ids), samples, sample_index)), target.pass_s)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._target.stage.close(self._name)
        self._target.open_now.pop(self._name, None)


@dataclass
class ScriptedDrafters:
    """Drafters with the target's own model, each wrong by one in so many drafts (``wrong_every``; 0: never).

    Attributes:
        told: verdicts. closed: sessions that were.
    """

    count: int = 1
    latency_s: float = 0.01
    step_s: float = 0.005
    wrong_every: int = 0
    lost_after: int = 0
    told: list[ev.SendVerdict] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    nonsense: tuple[int, ...] = ()

    def open(self, opening: Opening, on_event: Callable[[ev.VerifierEvent], None]) -> _Drafting:
        self.opened += 1
        return _Drafting(self, opening, on_event)

    def connected(self) -> list[Connected]:
        return [Connected(f"drafter-{number}", None, self.latency_s) for number in range(1, self.count + 1)]


class _Drafting:
    def __init__(
        self,
        source: ScriptedDrafters,
        opening: Opening,
        on_event: Callable[[ev.VerifierEvent], None],
    ) -> None:
        self._source, self._on_event = source, on_event
        self._tasks, self._closed = Background(), False
        self._inbox: asyncio.Queue[ev.VerdictReceived] = asyncio.Queue(1000)
        core = DraftingCore(opening.ids, prompt=opening.prompt, positions=opening.positions, depth=opening.depth)
        self._tasks.start(self._draft(core, opening), "drafter")

    def tell(self, tell: ev.SendVerdict) -> None:
        assert not self._closed
        self._source.told.append(tell)
        told = ev.VerdictReceived(tell.number, tell.start, tell.tokens, tell.depth)
        asyncio.get_running_loop().call_later(self._source.latency_s, self._inbox.put_nowait, told)

    def drop(self, reason: str) -> None:
        self._source.dropped.append(reason)

    def facts(self, right: Sequence[int]) -> list[DrafterFacts]:
        return [DrafterFacts("drafter-1", "d1", "tiny", 1e3 * self._source.latency_s, 10, 20, each) for each in right]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._source.closed += 1
            asyncio.get_running_loop().create_task(self._tasks.stop())

    def _say(self, event: ev.VerifierEvent) -> None:
        def say() -> None:
            if not self._closed:
                self._on_event(event)

        asyncio.get_running_loop().call_later(self._source.latency_s, say)

    async def _draft(self, core: DraftingCore, opening: Opening) -> None:
        source, stage, made = self._source, stand_in_part(CONFIG, 0, 2), 0
        known = len(opening.ids)
        stage.open("draft", positions=opening.positions, sampling=opening.sampling)
        self._say(ev.DrafterReady(known, DrafterModel(source.latency_s, source.step_s)))
        if source.nonsense:
            self._say(ev.Drafted(0, known, source.nonsense))
            return
        out = core.handle(ev.Signal.BEGAN, 0.0)
        while True:
            run = None
            for instruction in out:
                if isinstance(instruction, ev.Run):
                    run = instruction
                else:
                    self._say(ev.Drafted(instruction.epoch, instruction.position, instruction.tokens))
            if run is None:
                out = core.handle(await self._inbox.get(), 0.0)
                continue
            await asyncio.sleep(source.step_s)
            samples = _ran(stage, "draft", run)
            made += len(samples)
            if source.lost_after and made > source.lost_after:
                self._say(ev.Signal.LOST)
                return
            if source.wrong_every and samples and made % source.wrong_every == 0:
                samples = ((samples[0] + 1) % 256, *samples[1:])
            out = core.handle(ev.RunDone(samples), 0.0)
            while not self._inbox.empty():
                out = [*out, *core.handle(self._inbox.get_nowait(), 0.0)]


def service(
    directory: Path,
    target: ScriptedTarget,
    drafters: ScriptedDrafters | None = None,
    *,
    network: Network | None = None,
    template: str = "",
    **options: Any,
) -> VerifierService:
    text = model_text(directory)
    if template:
        (directory / "chat_template.jinja").write_text(template)
        text = ModelText(directory)
    return VerifierService(
        world(network),
        target,
        text,
        form=ChatFormat(text.tokenizer),
        model="stand-in",
        created=0,
        drafters=drafters,
        options=ServiceOptions(**options),
    )


def failing_at(number: int, problem: P2PTrainError) -> Callable[[int], None]:
    """A ``ScriptedTarget.before`` that raises at that pass."""

    def before(count: int) -> None:
        if count == number:
            raise problem

    return before
