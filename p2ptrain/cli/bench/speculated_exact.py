"""A real pair whose drafter dies all the time, for ``bench speculate --exact``: one process, real models, virtual time.

What runs are the shells of a cluster: a verifier's service, a drafter, and emulated links between them. Computing takes
the virtual time that it is told to take, so that drafts come before and after the passes that want them, whatever the
machine; a number decides the jitter, and when the drafter is killed and comes back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.serving import SamplingWish
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, Network, World
from roles.background import Background
from roles.chain.around import Around
from roles.compute_thread import ComputeThread
from roles.drafter.drafter import Drafter, Serves
from roles.stage_engine import StageEngine
from roles.verifier.asking import Wish
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from roles.verifier.service import ServiceOptions, VerifierService
from roles.verifier.whole_target import WholeTarget
from wire.connection import Connection
from wire.emulate import EmulatedNetwork
from wire.handshake import Server, local_welcome, serve
from wire.memory import MemoryNetwork
from wire.messages import Hello, Refuse, Welcome
from wire.shaper import LinkPreset
from wire.speculation_messages import DrafterAt
from wire.virtual import run_virtual

if TYPE_CHECKING:
    from p2ptrain.compute.assisted import AssistedPair
    from p2ptrain.compute.conversation import ChatFormat

DRAFTER, VERIFIER = "drafter", "verifier"
PORT = 4000
UP_S, UP_ROUND_TRIPS = (0.3, 2.0), 6
"""Between which a drafter lives, beside so many round trips: to be dialled and to take a text in takes some."""
AWAY_S = (0.05, 0.6)
SEED_HEARS_S = (0.0, 0.3)
"""From a drafter's death until the seed tells the verifier."""

Answer = dict[str, Any]


class Exactly:
    """Two models, loaded three times: by transformers, as the verifier's and as the drafter's."""

    async def open(self, *, verifier: str, drafter: str, threads: int) -> Answer:
        """Load them. Raises as ``load_whole`` and ``AssistedPair``."""
        await asyncio.to_thread(self._load, Path(verifier), Path(drafter), threads)
        return {}

    def _load(self, verifier: Path, drafter: Path, threads: int) -> None:
        from p2ptrain.compute.assisted import AssistedPair
        from p2ptrain.compute.conversation import ChatFormat
        from p2ptrain.compute.device import pick_device
        from p2ptrain.compute.whole_part import load_whole

        pick_device("cpu", threads)
        self._pair: AssistedPair = AssistedPair(verifier, drafter, device="cpu", threads=threads)
        self._form: ChatFormat = ChatFormat(self._pair.text)
        self._target, self._context = _engine(load_whole(verifier, device="cpu"))
        self._engine, self._drafter_context = _engine(load_whole(drafter, device="cpu"))

    async def plain(self, *, prompts: Sequence[str], tokens: int, sampling: Answer, seed: int) -> Answer:
        """The texts that there are to be: by transformers' ``generate`` (``generated``), and by the verifier alone
        (``alone``). Text n is drawn with ``seed + n``."""
        return await asyncio.to_thread(self._plain, prompts, tokens, sampling, seed)

    def _plain(self, prompts: Sequence[str], tokens: int, sampling: Answer, seed: int) -> Answer:
        text = self._pair.text
        generated: list[list[int]] = []
        for number, prompt in enumerate(prompts):
            drawn = text.sampling(SamplingWish(**sampling, seed=seed + number))
            generated.append(text.until_end(self._pair.plain(text.prompt_ids(prompt), tokens, drawn).tokens))
        cluster = _Cluster(self, LinkPreset("none", 0.0), pass_s=0.0, draft_s=0.0, seed=seed)
        alone = run_virtual(cluster.write(prompts, tokens, sampling, seed, speculate=False))
        return {"generated": generated, "alone": [each["ids"] for each in alone["texts"]]}

    async def write(
        self,
        *,
        prompts: Sequence[str],
        tokens: int,
        sampling: Answer,
        seed: int,
        rtt_ms: float,
        jitter_ms: float,
        pass_s: float,
        draft_s: float,
    ) -> Answer:
        """The same texts with the drafter: ``texts``, each its ``ids`` and what was drafted, and ``kills``."""
        preset = LinkPreset("emulated", rtt_ms / 2, jitter_ms)
        cluster = _Cluster(self, preset, pass_s=pass_s, draft_s=draft_s, seed=seed)
        return await asyncio.to_thread(
            lambda: run_virtual(cluster.write(prompts, tokens, sampling, seed, speculate=True))
        )

    async def rounding(self, *, places: Sequence[Answer]) -> Answer:
        """Whether rounding decides which of ``tokens`` is picked behind a ``prompt`` and the tokens ``before``:
        ``places``, each a ``compute.assisted.Rounding``."""
        return {"places": await asyncio.to_thread(lambda: [self._rounding(**place) for place in places])}

    def _rounding(self, *, prompt: str, sampling: Answer, before: Sequence[int], tokens: Sequence[int]) -> Answer:
        text = self._pair.text
        ids = [*text.prompt_ids(prompt), *before]
        return asdict(self._pair.rounding(ids, tokens, text.sampling(SamplingWish(**sampling)), len(before)))

    async def close(self) -> Answer:
        return {}

    # ---------------------------------------------------------------------------------------------------- for a cluster

    def service(self, world: World, drafters: Drafters) -> VerifierService:
        """A verifier with nothing kept of texts before."""
        compute = ComputeThread(world.threads)
        target = WholeTarget(self._target, compute, world.clock, label="measured", context=self._context)
        text, options = self._pair.text, ServiceOptions(kept=0)
        return VerifierService(
            world, target, text, form=self._form, model="measured", created=0, drafters=drafters, options=options
        )

    @property
    def tokens(self) -> Tokens:
        """What both sides' ids mean."""
        return Tokens(self._target.vocab_size, self._pair.text.tokenizer.digest)

    @property
    def serves(self) -> Serves:
        """What the drafter drafts with."""
        return Serves(self._engine, DRAFTER, self._drafter_context or 0, self.tokens.tokenizer)


class _Cluster:
    """A verifier and a drafter on one network. Times are virtual."""

    def __init__(self, models: Exactly, preset: LinkPreset, *, pass_s: float, draft_s: float, seed: int) -> None:
        self._models, self._preset = models, preset
        self._call_s = {VERIFIER: pass_s, DRAFTER: draft_s}
        self._random = random.Random(seed)  # noqa: S311 - when a drafter dies
        self._memory = MemoryNetwork()
        self._at = DrafterAt(DRAFTER, DRAFTER, DRAFTER, PORT, DRAFTER, 0, models.tokens.tokenizer)
        self._kills = 0

    async def write(
        self, prompts: Sequence[str], tokens: int, sampling: Answer, seed: int, *, speculate: bool
    ) -> Answer:
        """One text after the other, while the drafter comes and goes."""
        world = self._world(VERIFIER)
        drafters = Drafters(Around(world, VERIFIER, VERIFIER, "seed"), self._models.tokens, look_up=False)
        service = self._models.service(world, drafters)
        tasks = Background()
        if speculate:
            tasks.start(self._come_and_go(drafters), "fate")
        try:
            texts = []
            for number, prompt in enumerate(prompts):
                before = self._kills
                drawn = SamplingWish(**sampling, seed=seed + number)
                wish = Wish(prompt, max_new_tokens=tokens, sampling=drawn, speculate="auto" if speculate else "off")
                writing = await service.write(wish)
                ids = [token async for piece in writing for token in piece.tokens]
                await writing.close()
                stats = writing.stats()
                told = {name: stats[name] for name in ("passes", "drafted", "accepted", "wasted")}
                texts.append({"ids": ids, "kills": self._kills - before} | told)
        finally:
            await tasks.stop()
            await service.close()
            await drafters.close()
        return {"texts": texts, "kills": self._kills}

    def _world(self, name: str) -> World:
        network: Network = EmulatedNetwork(self._memory.at(name), self._preset, self._random.getrandbits(32))
        threads = LoopThreads()
        threads.call_s["compute"] = self._call_s[name]
        return World(LoopClock(), network, RealDisk(), random.Random(1), threads)  # noqa: S311 - jitter

    async def _come_and_go(self, drafters: Drafters) -> None:
        """A drafter's lives, one after the other, until cancelled."""
        chance = self._random.uniform
        while True:
            life = await _Life.begin(self._world(DRAFTER), self._models.serves)
            try:
                drafters.here([self._at])
                await asyncio.sleep(chance(*UP_S) + UP_ROUND_TRIPS * self._preset.rtt_s)
            finally:
                await life.end()
            self._kills += 1
            await asyncio.sleep(chance(*SEED_HEARS_S))
            drafters.here([])
            await asyncio.sleep(chance(*AWAY_S))


class _Life:
    """A drafter, from its start to its death."""

    def __init__(self, world: World, serves: Serves) -> None:
        self._drafter = Drafter(world, ComputeThread(world.threads), serves)
        self._tasks = Background()
        self._connections: list[Connection] = []
        self._server: Server | None = None

    @classmethod
    async def begin(cls, world: World, serves: Serves) -> _Life:
        """It listens."""
        life = cls(world, serves)
        life._tasks.start(life._drafter.run(), DRAFTER)
        life._server = await serve(
            world.network, DRAFTER, PORT, decide=life._decide, serve=life._drafter.serve, on_problem=lambda *_: None
        )
        return life

    async def end(self) -> None:
        """At once, in the midst of whatever it does: what it sent is all that there will ever be of it."""
        for connection in self._connections:
            connection.abort()
        await self._tasks.stop()
        if self._server is not None:
            await self._server.close()

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        self._connections.append(connection)
        return self._drafter.decide(hello) or local_welcome(peer_id=DRAFTER, name=DRAFTER, wall=0.0)


def _engine(part: Any) -> tuple[StageEngine, int | None]:
    """With the positions that its model knows."""
    return part, part.context
