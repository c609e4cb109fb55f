"""The model of a verifier on workers of its cluster, and the wait for workers that can hold it.

A service may be started before those that it stands on: where they are none, too few, or have too little memory, it
says so once and looks again, until there are enough of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from p2ptrain.cli.model_sizes import Anatomy, anatomy
from p2ptrain.cli.serve_verifier import LEAVE_S, TYPICAL_POSITIONS
from p2ptrain.cli.split import LoadingLine, within
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import NetworkError, P2PTrainError, ResourceError, UserError
from roles.background import Background
from roles.chain.client import Chain, Recruiting
from roles.chain.peer import Context, WorkerAt
from roles.chain.plan import Model, Plan, WorkerPool, local_model, tensor_table, workers_of
from roles.verifier.chain_target import ChainTarget

if TYPE_CHECKING:
    from p2ptrain.cli.joining import ServeWish
    from p2ptrain.cli.output import Console
    from p2ptrain.compute.text import ModelText
    from roles.member import ServingMember
    from roles.verifier.target import Target

LOOK_S = 1.0
"""Between two looks at which workers are there."""
OnWait = Callable[[], Awaitable[None]]
_MORE_MEMORY = "start more of them, or some with more memory: p2ptrain join; or take fewer --sessions"
AGAIN_LOOKS = 15
"""The same workers are asked again after so many: they may have memory now, or be reached."""


@asynccontextmanager
async def split_target(
    member: ServingMember,
    around: Context,
    wish: ServeWish,
    text: ModelText,
    sessions: int,
    console: Console,
    on_wait: OnWait,
) -> AsyncIterator[Target]:
    """The model on workers of the cluster, as soon as there are enough of them.

    Args:
        on_wait: called once, when they are waited for.

    Raises:
        UserError: it has fewer layers than ``wish.split``.
        P2PTrainError: its files cannot be read; workers that are there refuse to load it.
    """
    assert wish.model is not None
    assert wish.split is not None
    console.progress(f"reading the files of {wish.model}")  # hashed, the first time
    model = await local_model(around, wish.model)
    found = anatomy(model.config, await tensor_table(around, model), wish.dtype)
    console.clear()
    if wish.split > found.sizes.layers:
        text_ = f"a chain of {wish.split} stages was asked for, and the model has {found.sizes.layers} layers"
        raise UserError(text_, remedy=f"give --split {found.sizes.layers} at most, or no number to have the best one")
    positions = sessions * min(text.context or TYPICAL_POSITIONS, TYPICAL_POSITIONS)
    mustering = Mustering(member, around, console, on_wait, dtype=wish.dtype)
    chain = await mustering.chain(model, found, positions=positions, stages=wish.split or None)
    try:
        target = ChainTarget(chain, label=wish.model.name, context=text.context)
        recruiting = Background()
        recruiting.start(Recruiting(chain, member.ask).run(), "recruiting")
        try:
            yield target
        finally:
            await within(LEAVE_S, recruiting.stop())
            await within(LEAVE_S, target.close())
    finally:
        await within(LEAVE_S, chain.pool.close())


class Mustering:
    """Workers for a chain, waited for. ``dtype``: that it computes in, as of ``PartSpec``."""

    def __init__(
        self, member: ServingMember, around: Context, console: Console, on_wait: OnWait, *, dtype: str = ""
    ) -> None:
        self._member, self._around, self._console, self._on_wait = member, around, console, on_wait
        self._dtype, self._said = dtype, ""

    async def chain(self, model: Model, found: Anatomy, *, positions: int, stages: int | None) -> Chain:
        """A chain that is loaded. Its crew is the caller's to close.

        Raises:
            P2PTrainError: workers refuse to load it, of which none was lost meanwhile.
        """
        while True:
            workers = await self._workers()
            try:
                return await self._loaded(workers, model, found, positions=positions, stages=stages)
            except _TooFew as lack:
                if not self._said:
                    await self._on_wait()
                self._say(lack.problem)
            await self._others_than(workers)

    async def _workers(self) -> list[WorkerAt]:
        """Who is there, as soon as the seed says so. Raises ``Refused``, ``ProtocolError``."""
        while True:
            try:
                return await workers_of(self._member.ask)
            except NetworkError:  # its link says so, and looks for it
                await asyncio.sleep(LOOK_S)

    async def _others_than(self, workers: Sequence[WorkerAt]) -> None:
        """Until others are there, or it is worth to ask the same ones again."""
        for _ in range(AGAIN_LOOKS):
            await asyncio.sleep(LOOK_S)
            if await self._workers() != workers:
                return

    async def _loaded(
        self, workers: Sequence[WorkerAt], model: Model, found: Anatomy, *, positions: int, stages: int | None
    ) -> Chain:
        """Raises ``_TooFew``: with others it may do. Else as ``chain``."""
        if len(workers) < (stages or 1):
            there = f"{len(workers)} of {stages} workers are there" if workers else "no worker is there"
            raise _TooFew(UserError(f"{there} to hold a part of the model", remedy="start some: p2ptrain join"))
        try:
            crew = await WorkerPool.connect(self._around, workers)
        except NetworkError as problem:
            raise _TooFew(problem) from None
        try:
            plan = await self._plan(crew, model, found, positions, stages)
            chain = await self._load(crew, model, plan)
        except BaseException:
            await within(LEAVE_S, crew.close())
            raise
        if self._said:
            self._member.notify("info", "mustered", "there are enough workers")
        return chain

    async def _plan(self, crew: WorkerPool, model: Model, found: Anatomy, positions: int, stages: int | None) -> Plan:
        if (here := len(crew.peers)) < (stages or 1):
            said = "; ".join(f"{name}: {reason}" for name, reason in crew.refused.items())
            raise _TooFew(UserError(f"{here} of {stages} workers can be used: {said}", remedy="start another one"))
        bytes_each = activation_bytes(found.dtype, 1, found.width)
        try:
            return await crew.plan(
                model, found.sizes, positions=positions, dtype=self._dtype, activation_bytes=bytes_each, stages=stages
            )
        except ResourceError as problem:  # its own remedy names what only a client with options of its own can do
            raise _TooFew(ResourceError(problem.message, remedy=_MORE_MEMORY)) from None
        except UserError as problem:  # some were lost while links were measured
            if any(peer.lost for peer in crew.peers.values()):
                raise _TooFew(problem) from None
            raise

    async def _load(self, crew: WorkerPool, model: Model, plan: Plan) -> Chain:
        try:
            return await Chain.load(crew, model, plan, on_progress=LoadingLine(plan, self._console).show)
        except P2PTrainError as problem:
            if any(peer.lost for peer in crew.peers.values()):
                raise _TooFew(problem) from None
            raise
        finally:
            self._console.clear()

    def _say(self, problem: P2PTrainError) -> None:
        """What is waited for, once."""
        text = f"{problem.message}: {problem.remedy}" if problem.remedy else problem.message
        if text != self._said:
            self._said = text
            self._member.notify("warning", "waiting", f"waits for workers: {text}; Ctrl+C leaves")


class _TooFew(Exception):
    """The workers that are there do not do; others may."""

    def __init__(self, problem: P2PTrainError) -> None:
        super().__init__(problem.message)
        self.problem = problem
