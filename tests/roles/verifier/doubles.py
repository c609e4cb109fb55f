"""A verifier on virtual time: a model that computes whole numbers, drafters of it, and a text side of bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from p2ptrain.compute.text import ChatFormat, ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError, ResourceError
from p2ptrain.core.serving import BLOCK_POSITIONS, Pass, Sampling, hash_blocks
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, Network, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.serving.model import PassRequest, PassResult
from roles.verifier.drafters import Drafters
from roles.verifier.service import ModelTextService
from tests.roles.drafter_hosts import TOKENIZER, DrafterHost, Wobbly, around_of, drafter_hosts, model_serves
from tests.roles.stage_stand_in import StandInStage, stand_in_config, stand_in_part, tokens_of
from tests.run_one import run_one

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


def _ran(
    stage: StandInStage, name: str, request: PassRequest, sample_from: int, hashes: tuple[bytes, ...]
) -> tuple[int, ...]:
    ids, index = memoryview(np.array(request.ids, "<i4").tobytes()), request.sample_index(sample_from)
    what = (request.keep, ids, len(request.ids), "ids", "fp32", request.samples, index)
    return run_one(stage, name, Pass(*what, block_hashes=hashes)).tokens


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
    dtype: str = "fp32"
    preemptions: int = 0
    runs: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)
    open_now: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    opened: int = 0
    stage: StandInStage = field(default_factory=lambda: stand_in_part(CONFIG, 0, 2))

    async def open(
        self, *, positions: int, sampling: Sampling, sample_from: int, ids: Sequence[int] = (), priority: int = 0
    ) -> _TargetSession:
        if sum(self.open_now.values()) + positions > self.room:
            raise ResourceError("no memory for the cache", remedy="ask for fewer tokens")
        self.opened += 1
        name = f"session {self.opened}"
        hashes = hash_blocks(ids[:-1])
        cached = self.stage.open(name, positions=positions, sampling=sampling, block_hashes=hashes)
        self.open_now[name] = positions
        return _TargetSession(self, name, sample_from, list(ids[:cached]))

    async def close(self) -> None:
        """Nothing is kept."""


class _TargetSession:
    most_passes = 1

    def __init__(self, target: ScriptedTarget, name: str, sample_from: int, ids: list[int]) -> None:
        self._target, self._name, self.sample_from = target, name, sample_from
        self._ids, self.cached = ids, len(ids)

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
        self._ids[request.keep :] = request.ids
        hashes = hash_blocks(self._ids)[request.keep // BLOCK_POSITIONS :]
        return PassResult(_ran(target.stage, self._name, request, self.sample_from, hashes), target.pass_s)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._target.stage.close(self._name)
        self._target.open_now.pop(self._name, None)


@asynccontextmanager
async def connected_drafters(
    *, count: int = 1, alpha: float = 1.0, latency_s: float = 0.01
) -> AsyncIterator[tuple[Drafters, list[DrafterHost]]]:
    """Real drafters, whose drafts are right with chance ``alpha``, and their hosts."""
    network = MemoryNetwork(delay_s=lambda source, target: latency_s)
    hosts = [
        DrafterHost(f"d{number}", network.at(f"d{number}"), model_serves(Wobbly(alpha, config=CONFIG, layers=2)))
        for number in range(1, count + 1)
    ]
    drafters = Drafters(around_of(network.at("verifier")), 256, TOKENIZER)
    async with drafter_hosts(hosts):
        drafters.update_list([host.at for host in hosts])
        await asyncio.sleep(1)  # virtual: they are connected
        yield drafters, hosts
        await drafters.close()


def service(
    directory: Path,
    target: ScriptedTarget,
    drafters: Drafters | None = None,
    *,
    network: Network | None = None,
    template: str = "",
    **options: Any,
) -> ModelTextService:
    text = model_text(directory)
    if template:
        (directory / "chat_template.jinja").write_text(template)
        text = ModelText(directory)
    return ModelTextService(
        world(network),
        target,
        text,
        form=ChatFormat(text.tokenizer),
        name="stand-in",
        created=0,
        drafters=drafters,
        **options,
    )


def failing_at(number: int, problem: P2PTrainError) -> Callable[[int], None]:
    """A ``ScriptedTarget.before`` that raises at that pass."""

    def before(count: int) -> None:
        if count == number:
            raise problem

    return before
