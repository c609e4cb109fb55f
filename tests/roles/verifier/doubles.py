"""A verifier on virtual time: a target and drafters that compute whole numbers, and a text side of bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from p2ptrain.compute.text import ChatFormat, ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError, ProtocolError, ResourceError
from p2ptrain.core.serving import Pass, Sampling
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, Network, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.background import Background
from roles.drafter.drafting import DraftedText, DraftVerdict
from roles.serving.model import PassRequest, PassResult
from roles.serving.text_stats import DrafterFacts
from roles.serving.worker_peer import ClientContext
from roles.verifier.cost_model import DrafterModel
from roles.verifier.drafters import DrafterLink, TextDrafts, TextOpening, Vocabulary
from roles.verifier.service import ServiceOptions, VerifierService
from tests.roles.stage_stand_in import StandInStage, stand_in_config, stand_in_part, tokens_of
from wire.text_messages import DrafterAt

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


def _ran(stage: StandInStage, name: str, request: PassRequest, sample_from: int) -> tuple[int, ...]:
    ids, index = memoryview(np.array(request.ids, "<i4").tobytes()), request.sample_index(sample_from)
    return stage.run(name, Pass(request.keep, ids, len(request.ids), "ids", "fp32", request.samples, index)).tokens


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

    async def open(self, *, positions: int, sampling: Sampling, sample_from: int) -> _TargetSession:
        if sum(self.open_now.values()) + positions > self.room:
            raise ResourceError("no memory for the cache", remedy="ask for fewer tokens")
        self.opened += 1
        name = f"session {self.opened}"
        self.stage.open(name, positions=positions, sampling=sampling)
        self.open_now[name] = positions
        return _TargetSession(self, name, sample_from)

    def facts(self) -> dict[str, Any]:
        return {"kind": "scripted"}

    async def close(self) -> None:
        """Nothing is kept."""


class _TargetSession:
    def __init__(self, target: ScriptedTarget, name: str, sample_from: int) -> None:
        self._target, self._name, self.sample_from = target, name, sample_from

    @property
    def lost(self) -> bool:
        return self._name in self._target.lost

    async def append(self, request: PassRequest) -> PassResult:
        target = self._target
        held = target.before(len(target.runs))
        target.runs.append((request.keep, request.ids, request.samples))
        if held is not None:
            await held
        await asyncio.sleep(target.pass_s)
        return PassResult(_ran(target.stage, self._name, request, self.sample_from), target.pass_s)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._target.stage.close(self._name)
        self._target.open_now.pop(self._name, None)


@dataclass
class ScriptedDrafters:
    """Drafters with the target's own model, each wrong by one in so many drafts (``wrong_every``; 0: never).

    Attributes:
        closed: sessions that were.
    """

    count: int = 1
    latency_s: float = 0.01
    step_s: float = 0.005
    wrong_every: int = 0
    lost_after: int = 0
    verdicts: list[DraftVerdict] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    nonsense: tuple[int, ...] = ()
    texts: set[Any] = field(default_factory=set)

    def best(self) -> list[_ScriptedLink]:
        return [_ScriptedLink(self)]

    def connected(self) -> list[DrafterLink]:
        at = [DrafterAt(f"drafter-{number}", f"d{number}", "", 0, "tiny", 0, "") for number in range(1, self.count + 1)]
        context = ClientContext(world(), "verifier", "verifier", "seed")
        return [DrafterLink(context, each, Vocabulary(256, ""), on_change=lambda link: None) for each in at]


class _ScriptedLink:
    there = True

    def __init__(self, source: ScriptedDrafters) -> None:
        self.source, self.model = source, DrafterModel(source.latency_s, source.step_s)

    def open(self, opening: TextOpening, text: TextDrafts) -> _ScriptedSession:
        self.source.opened += 1
        return _ScriptedSession(self, opening, text)

    def close(self, session: _ScriptedSession) -> None:
        session.closed = True
        self.source.closed += 1
        asyncio.get_running_loop().create_task(session.tasks.stop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ScriptedLink)  # a text asks each drafter once

    __hash__ = object.__hash__


class _ScriptedSession:
    def __init__(self, link: _ScriptedLink, opening: TextOpening, text: TextDrafts) -> None:
        self.link, self.text = link, text
        self.tasks, self.closed = Background(), False
        self._inbox: asyncio.Queue[DraftVerdict] = asyncio.Queue(1000)
        core = DraftedText(opening.ids, prompt=opening.prompt, positions=opening.positions, depth=opening.depth)
        self.tasks.start(self._draft(core, opening), "drafter")

    def send_verdict(self, verdict: DraftVerdict) -> None:
        assert not self.closed
        self.link.source.verdicts.append(verdict)
        asyncio.get_running_loop().call_later(self.link.source.latency_s, self._inbox.put_nowait, verdict)

    def facts(self, accepted: int) -> DrafterFacts:
        return DrafterFacts("drafter-1", "d1", "tiny", 1e3 * self.link.source.latency_s, 10, 20, accepted)

    def _later(self, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self.link.source.latency_s, lambda: self.closed or act())

    def _receive(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        try:
            self.text.take_drafts(epoch, position, tokens)
        except ProtocolError:
            self.link.close(self)
            self.text.lose_session()

    async def _draft(self, core: DraftedText, opening: TextOpening) -> None:
        source, stage, made = self.link.source, stand_in_part(CONFIG, 0, 2), 0
        known = len(opening.ids)
        stage.open("draft", positions=opening.positions, sampling=opening.sampling)
        self._later(lambda: self.text.begin_line(self))  # type: ignore[arg-type]
        if source.nonsense:
            self._later(lambda: self._receive(0, known, source.nonsense))
            return
        out = core.begin()
        while True:
            wanted = None
            for instruction in out:
                if isinstance(instruction, PassRequest):
                    wanted = instruction
                else:
                    self._later(partial(self._receive, instruction.epoch, instruction.position, instruction.tokens))
            if wanted is None:
                out = core.take_verdict(await self._inbox.get())
                continue
            await asyncio.sleep(source.step_s)
            samples = _ran(stage, "draft", wanted, opening.prompt)
            made += len(samples)
            if source.lost_after and made > source.lost_after:
                self.link.close(self)
                self.text.lose_session()
                return
            if source.wrong_every and samples and made % source.wrong_every == 0:
                samples = ((samples[0] + 1) % 256, *samples[1:])
            out = core.take_samples(samples)
            while not self._inbox.empty():
                out = [*out, *core.take_verdict(self._inbox.get_nowait())]


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
        name="stand-in",
        created=0,
        drafters=drafters,  # type: ignore[arg-type]
        options=ServiceOptions(**options),
    )


def failing_at(number: int, problem: P2PTrainError) -> Callable[[int], None]:
    """A ``ScriptedTarget.before`` that raises at that pass."""

    def before(count: int) -> None:
        if count == number:
            raise problem

    return before
