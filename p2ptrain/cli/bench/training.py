"""One member's training steps: those of this project, and the same ones by DistributedDataParallel.

What a worker does in a step is done here by the same parts: engine, strategy, ring, the vote of the tokens, the commit.
Only the seed is not there, which is not on the path of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.schema import Profile
from p2ptrain.cli.bench.step import DDP, RING, USUAL
from p2ptrain.core.errors import JobFailed
from ring.session import RingSession
from ring.token import Flag, Token, difference, first_lineage, next_lineage
from ring.view import shares
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies import Strategy, strategy_of
from roles.worker.build import engine_builder, trainer_arguments

if TYPE_CHECKING:
    from p2ptrain.compute.rivals import DdpTrainer, GlooGroup

PATIENCE_S = 120.0
Answer = dict[str, Any]


@dataclass(slots=True)
class Ours:
    """This project's trainer, in one mode."""

    engine: Engine
    strategy: Strategy
    lineage: str


class Training:
    """The trainers of one member. Made by ``build``.

    Args:
        ours: by contender.
    """

    def __init__(
        self,
        session: RingSession,
        compute: ComputeThread,
        ours: dict[str, Ours],
        rival: DdpTrainer | None,
        micro_batches: int,
    ) -> None:
        self._session, self._compute, self._ours = session, compute, ours
        self._rival = rival
        self._first, self._count = shares(micro_batches, [1.0] * session.size)[session.rank]
        engine = ours[RING].engine
        self.facts: Answer = {
            "tokens_per_step": micro_batches * engine.tokens_per_micro_batch,
            "reduce_bytes": engine.reduce_buffer.nbytes,
            "micro_batches": self._count,
        }

    @classmethod
    async def build(cls, spec: str, session: RingSession, *, threads: int, gloo: GlooGroup | None) -> Training:
        """Raises what ``Trainer`` and ``DdpTrainer`` raise."""
        profile = Profile.from_spec_untrusted(spec)
        compute = ComputeThread()
        modes = {RING: profile}
        if profile.job.exact:  # what that costs is seen beside the usual mode
            modes[USUAL] = profile.model_copy(update={"job": profile.job.model_copy(update={"exact": False})})
        factory, ours = strategy_of(profile), {}
        for name, mode in modes.items():
            engine = await compute.run(engine_builder(device="cpu", threads=threads), mode)
            strategy = factory(engine, compute, lambda: None, profile.ring.bucket_bytes)
            ours[name] = Ours(engine, strategy, first_lineage("bench"))
        rival: DdpTrainer | None = None
        if gloo is not None:
            from p2ptrain.compute.rivals import DdpTrainer

            rival = await compute.run(DdpTrainer, gloo, **trainer_arguments(profile))
        return cls(session, compute, ours, rival, profile.batch.micro_batches)

    async def train(self, contender: str, first: int, count: int) -> Answer:
        """``count`` steps. Seconds of each, and of each loss; of the ring also how long a step waited for it."""
        if contender == DDP:
            return await self._train_rival(first, count)
        answer: Answer = {"seconds": [], "losses": [], "exposed_s": [], "communicating_s": []}
        for step in range(first, first + count):
            began = time.perf_counter()
            answer["losses"].append(await self._step(self._ours[contender], step, answer))
            answer["seconds"].append(time.perf_counter() - began)
        return answer

    async def _train_rival(self, first: int, count: int) -> Answer:
        assert self._rival is not None
        seconds: list[float] = []
        for step in range(first, first + count):
            began = time.perf_counter()
            await self._compute.run(self._rival.step, step, self._first, self._count)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "losses": await self._compute.run(self._rival.losses)}

    async def _step(self, ours: Ours, step: int, answer: Answer) -> float:
        session, strategy = self._session, ours.strategy
        await strategy.compute(step, self._first, self._count, session, patience_s=PATIENCE_S)
        contribution = await strategy.reduce(session)
        answer["exposed_s"].append(strategy.exposed_s)
        answer["communicating_s"].append(strategy.communicating_s)
        lineage = bytes.fromhex(ours.lineage)
        mine = Token(session.view.generation, step, Flag(0), contribution.part, contribution.digest, lineage)
        gathered = await session.all_gather(mine.encode(), patience_s=PATIENCE_S)
        tokens = [Token.decode_untrusted(token) for token in gathered]
        if reason := next(filter(None, (difference(mine, token) for token in tokens)), ""):
            raise JobFailed(f"the members do not hold the same bytes: {reason} differs")
        ours.lineage = next_lineage(ours.lineage, contribution.digest)
        applied = await strategy.commit(step, sum((token.part for token in tokens), start=0.0))
        return applied.loss
