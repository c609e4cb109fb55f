"""Bringing a member to the others' state: within a ring, where all wait for it, or beside one, where nobody does.

Within: the view's healthy members give their live state, or, where they have logged them, only the steps that the
member lacks. Beside: ``Follower`` fetches a snapshot, replays the steps since, and goes on step by step with the ring,
so that the ring waits for nothing but a new view when this worker is let in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError
from ring.transaction import Event, Followed, Heal, Torn, Transaction, Unloaded
from roles.engine import WHOLE, Applied, Engine, Stage
from roles.worker.context import Context
from roles.worker.fetch import Behind, Fetch, Step
from roles.worker.offered import Self
from wire.heal_messages import HealRequest
from wire.job_messages import CatchUp, MemberRecord, Report

TELL_EVERY_S = 10.0
"""How often people hear of a transfer that is under way."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch brought.

    Attributes:
        given: bytes of use, by donor's name. received_bytes: all that came.
        lost_donors: that went away before the state was complete.
    """

    given: Counter[str]
    steps: int
    seconds: float
    left_out: dict[str, str]
    received_bytes: int = 0
    lost_donors: int = 0

    @property
    def size_bytes(self) -> int:
        return self.given.total()

    def __str__(self) -> str:
        """For people."""
        donors = ", ".join(
            f"{name} ({100 * part / max(self.size_bytes, 1):.0f} %)" for name, part in self.given.most_common()
        )
        rate_bps = 8 * self.size_bytes / self.seconds if self.seconds > 0 else 0.0
        text = f"{self.size_bytes / 1e6:.1f} MB in {self.seconds:.1f} s ({rate_bps / 1e6:.0f} Mbit/s) from {donors}"
        problems = "; ".join(f"{name}: {problem}" for name, problem in self.left_out.items())
        return f"{text}; without {problems}" if problems else text

    def told_in(self, report: Report) -> Report:
        """``report`` with these figures."""
        return replace(
            report,
            fetched_bytes=self.size_bytes,
            donors=len(self.given),
            received_bytes=self.received_bytes,
            lost_donors=self.lost_donors,
        )


class Healer:
    """Fetches for one job's engine.

    Args:
        core: is looked at.
        progress: called after every piece.
        stage: the part of the model that the engine holds: only members that hold the same can give it.
    """

    def __init__(
        self, around: Context, core: Transaction, *, progress: Callable[[], None], stage: Stage = WHOLE
    ) -> None:
        self._around, self._core, self._progress, self.stage = around, core, progress, stage

    async def within(self, instruction: Heal, engine: Engine) -> Fetched:
        """Bring the state to that of the view's start.

        Raises:
            NetworkError: nobody could give it; the message names what each one said.
        """
        core, view = self._core, instruction.view
        rank = view.rank_of(self._around.peer_id) or 0
        alike, own = view.same_stage(rank), view.replica_of(rank)
        ahead = [*alike[own:], *alike[:own]]  # so that several do not ask the same ones
        donors = [member for member in ahead if member.healthy]
        have = (-1, "") if instruction.torn or core.applied >= view.step else (core.applied, core.lineage)
        silence_s = max(view.death_s, self._around.beats()[1])
        try:
            request = HealRequest(core.job, view.step, view.lineage, silence_s, *have, stage=self.stage.index)
            return await self._to_the_start(request, view.generation, donors, engine)
        except NetworkError:
            if have[0] < 0:
                raise
        # Whoever had the steps is gone: what was applied of them is overwritten.
        request = HealRequest(core.job, view.step, view.lineage, silence_s, stage=self.stage.index)
        return await self._to_the_start(request, view.generation, donors, engine)

    async def _to_the_start(
        self, request: HealRequest, generation: int, donors: Sequence[MemberRecord], engine: Engine
    ) -> Fetched:
        began = self._around.world.clock.now()
        fetch = await self.fetch(request, generation, donors, engine, on_torn=lambda: None)
        async with fetch.running():
            base = await fetch.state()
            if base.root:
                await self._around.compute.run(engine.state_loaded, base.step)
            step, lineage = base.step, base.lineage
            while step < request.step:
                following = await fetch.step()
                await self._around.compute.run(replay, engine, following)
                fetch.used(following)
                self._progress()
                step, lineage = following.step, following.lineage
        if lineage != request.lineage:
            raise NetworkError("the steps that were fetched lead to another state than the view's")
        return fetched(fetch, step - base.step, self._around.world.clock.now() - began)

    async def fetch(
        self,
        request: HealRequest,
        generation: int,
        donors: Sequence[MemberRecord],
        engine: Engine,
        *,
        on_torn: Callable[[], None],
    ) -> Fetch:
        """A fetch into the engine's own memory."""
        around = self._around
        # On the compute thread, so after an abandoned micro-batch, which may still be using the state.
        state = await around.compute.run(engine.state)
        told_at = around.world.clock.now()

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal told_at
            self._progress()
            now = around.world.clock.now()
            if now - told_at >= TELL_EVERY_S:
                told_at = now
                around.notify(
                    "info", "healing", f"fetched {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB of state"
                )

        return Fetch(
            around.world,
            Self(around.peer_id, around.name, around.seed_host, state, engine.reduce_buffer.nbytes, self.stage),
            request=request,
            generation=generation,
            donors=donors,
            on_torn=on_torn,
            on_progress=on_progress,
        )


class Follower:
    """Keeps one worker's state level with a ring that it is not in.

    Args:
        say: sends a report to the seed.
        handle: takes the core's events.
    """

    def __init__(
        self,
        around: Context,
        core: Transaction,
        healer: Healer,
        *,
        say: Callable[[Report], None],
        handle: Callable[[Event], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._around, self._core, self._healer = around, core, healer
        self._send, self._handle, self._tasks = say, handle, tasks
        self._task: asyncio.Task[None] | None = None
        self._then: list[Event] = []
        self._last: Callable[[], None] | None = None
        self._said = False
        self._fetched: Fetched | None = None

    @property
    def active(self) -> bool:
        return self._task is not None

    @property
    def level(self) -> bool:
        """Whether the seed was told that this worker follows, and it still does."""
        return self.active and self._said

    def begin(self, message: CatchUp, engine: Engine) -> None:
        """Fetch from ``message.donors``, then follow their ring. One that follows already says so again."""
        self._said = False
        if self._task is None:
            self._task = self._tasks.create_task(self._guarded(message, engine), name="follow")

    def end(self, event: Event | None = None, *, then: Callable[[], None] | None = None) -> None:
        """Stop following; ``event`` is handled when the state in memory changes no more, or else ``then`` is called."""
        if event is not None:
            self._then.append(event)
        self._last = then
        if self._task is not None:
            self._task.cancel()

    async def _guarded(self, message: CatchUp, engine: Engine) -> None:
        try:
            await self._follow(message, engine)
        except (NetworkError, PeerError) as problem:
            self._around.notify("warning", "not-following", f"does not follow the ring any more: {problem.message}")
            if self._core.torn:
                self._then.insert(0, Unloaded("what was fetched beside the ring is not whole"))
            else:
                self._say()  # as far as it came: it may be let in, and the rest is fetched there
        except P2PTrainError as problem:
            self._around.notify("error", "not-following", f"cannot follow the ring: {problem.message}")
            self._then.insert(0, Unloaded("the state may be half applied"))
        finally:
            self._task = None
            events, self._then = self._then, []
            last, self._last = self._last, None
            for event in events:
                self._handle(event)
            if last is not None and not events:
                last()

    async def _follow(self, message: CatchUp, engine: Engine) -> None:
        around, core = self._around, self._core
        have = (-1, "") if core.torn else (core.applied, core.lineage)
        request = HealRequest(core.job, -1, "", around.beats()[1], *have, stage=self._healer.stage.index)

        began = around.world.clock.now()

        def on_torn() -> None:
            nonlocal began
            began = around.world.clock.now()  # until now it waited for a copy to be made
            self._handle(Torn())
            names = ", ".join(member.name for member in message.donors)
            around.notify("info", "fetching", f"fetches {fetch.total_bytes / 1e6:.1f} MB of state from {names}")

        fetch = await self._healer.fetch(request, message.generation, message.donors, engine, on_torn=on_torn)
        async with fetch.running():
            base = await fetch.state()
            self._fetched = fetched(fetch, 0, around.world.clock.now() - began)  # what comes from now on are steps
            if base.root:
                await self._to_its_end(around.compute.run(engine.state_loaded, base.step))
                self._handle(Followed(base.step, base.lineage, base.square_sum))
                around.notify("info", "fetched", f"fetched the state of step {base.step}: {self._fetched}")
            while True:
                if fetch.newest - core.applied <= 1 and not self._said:
                    self._say()
                    behind = max(fetch.newest - core.applied, 0)
                    around.notify("info", "following", f"follows the ring, {behind} step{'s' * (behind != 1)} behind")
                step = await fetch.step()
                await self._to_its_end(self._replay(engine, fetch, step))

    async def _replay(self, engine: Engine, fetch: Fetch, step: Step) -> None:
        await self._around.compute.run(replay, engine, step)
        self._handle(Followed(step.step, step.lineage, step.square_sum))
        fetch.used(step)

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """An optimizer step cannot be taken back: whoever stops this waits for its end."""
        task = asyncio.create_task(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await task
            raise

    def _say(self) -> None:
        self._said = True
        report = self._core.report("following")
        self._send(report if self._fetched is None else self._fetched.told_in(report))


def replay(engine: Engine, step: Step) -> Applied:
    """Apply a step of which only the reduced bytes are known, as whoever reduced them did. On the compute thread."""
    buffer = engine.reduce_buffer.view(np.uint8).reshape(-1)
    np.copyto(buffer, np.frombuffer(step.data, np.uint8))
    return engine.apply(step.step - 1, step.square_sum)


def fetched(fetch: Fetch, steps: int, seconds: float) -> Fetched:
    return Fetched(fetch.given.copy(), steps, seconds, dict(fetch.problems), fetch.received_bytes, fetch.lost)


__all__ = ["Behind", "Fetched", "Follower", "Healer"]
