"""A job as commands see it: it is created, observed until its end, and summed up.

``JobObserver`` is the one place that keeps what a seed reports of a job. ``jobs watch`` and ``chaos`` let it ``run``,
which dials a seed that went away again; ``experiment`` lets it ``follow`` one connection, and ``up`` gives it records.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

from p2ptrain.core.errors import NetworkError, P2PTrainError, UserError
from wire.records import FINISHED_STATES, CheckpointInfo, JobInfo, MetricRow, PeerInfo

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cluster.console import Console
    from wire.client import SeedClient, SeedRequests
    from wire.schema import Record

AGAIN_S = 0.1
"""Pause between attempts to reach a seed that is away. It limits the precision of times after the seed's return."""
UNSAVED = "not saved"
"""State in a summary of a job whose steps are all done, while its result is on no disk."""
JobSummary: TypeAlias = "dict[str, Any]"


class JobObserver:
    """What the seed reports of a job.

    Args:
        on_step: called with the metrics of each new step.

    Attributes:
        job: the job's id, its beginning or its name; once the seed was reached, its id.
        info: the job's newest record. step: the newest one.
        peers: the newest record of each peer, by id.
        is_lost: the job ended before its result was saved.
    """

    def __init__(self, job: str, *, on_step: Callable[[MetricRow], object] = lambda row: None) -> None:
        self.job = job
        self.info: JobInfo | None = None
        self.step = 0
        self.peers: dict[str, PeerInfo] = {}
        self.is_lost = False
        self._on_step = on_step
        self._failure: P2PTrainError | None = None
        self._news = asyncio.Event()

    @property
    def state(self) -> str:
        return self.info.state if self.info else ""

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED_STATES

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self.info.members) if self.info and self.state == "running" else ()

    @property
    def names(self) -> dict[str, str]:
        """Of the peers, by id."""
        return {peer.id: peer.name for peer in self.peers.values()}

    def id_of(self, name: str) -> str:
        """The id of the peer with this name; empty: it is not known."""
        return next((peer.id for peer in self.peers.values() if peer.name == name), "")

    def take(self, record: Record) -> None:
        match record:
            case JobInfo() if record.id == self.job:
                self.is_lost = self.state == "saving" and record.state in FINISHED_STATES - {"done"}
                self.step = max(self.step, record.step) if self.info is None else self.step
                self.info = record
            case MetricRow() if record.job == self.job and record.step > self.step:
                self.step = record.step
                self._on_step(record)
            case PeerInfo():
                self.peers[record.id] = record

    async def begin(self, client: SeedClient) -> None:
        """Find the job. Raises ``Refused`` if there is none."""
        info, _ = await client.job(self.job)
        self.job = info.id
        self.take(info)

    async def follow(self, client: SeedClient) -> AsyncGenerator[None, None]:
        """Take what the seed reports; yields after each update. Raises ``NetworkError`` if the seed is lost."""
        async for records in client.news():
            for record in records:
                self.take(record)
            self.wake()
            yield

    async def run(
        self,
        operator: Callable[[], AbstractAsyncContextManager[SeedClient]],
        on_away: Callable[[P2PTrainError], object] = lambda problem: None,
    ) -> AsyncGenerator[SeedClient, None]:
        """Follow the job without end; yields the connection after each update. A seed that goes away is dialled again.

        Raises ``P2PTrainError`` if there is no such job (any more), or no seed when this begins.
        """
        while True:
            try:
                async with operator() as client:
                    await self.begin(client)
                    yield client
                    async for _ in self.follow(client):
                        yield client
            except (NetworkError, UserError) as problem:  # a UserError: of @DIR, whose seed is away
                if self.info is None:
                    raise
                on_away(problem)
                await asyncio.sleep(AGAIN_S)
            except P2PTrainError as problem:
                self._failure = problem
                self.wake()
                raise

    async def until(self, test: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``test`` is true, while another task observes; return False after ``timeout_s``. The test runs
        after each update and ``wake``. Raises the error that ended ``run``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not test():
                    if self._failure is not None:
                        raise self._failure
                    await self._news.wait()
        except TimeoutError:
            return test()
        return True

    def wake(self) -> None:
        """Make every ``until`` run its test again."""
        news, self._news = self._news, asyncio.Event()
        news.set()


# ------------------------------------------------------------------------------------------------- jobs and their ends


async def create_job(client: SeedRequests, name: str, label: str, profile: Profile, console: Console) -> str:
    """As ``send_job``, and warn of a warm-up that does not end."""
    if text := warm_up_problem(profile):
        console.event("warning", text)
    return await send_job(client, name, label, profile, console)


async def send_job(client: SeedRequests, name: str, label: str, profile: Profile, console: Console) -> str:
    """Create a job, with what its placement needs to know of a split model. Return its id."""
    from p2ptrain.cluster.models import shape_if_known

    shape = await asyncio.to_thread(shape_if_known, profile, console) if profile.pipeline.stages > 1 else None
    more = {} if shape is None else {"shape": shape.to_map()}
    return await client.create_job(name, label, profile.to_spec(), **more)


def warm_up_problem(profile: Profile) -> str:
    """Says that a job is over before its warm-up; empty if it is not."""
    steps, warm_up = profile.job.steps, profile.optimizer.warmup_steps
    if warm_up <= steps:
        return ""
    return (
        f"optimizer.warmup_steps = {warm_up:,} is more than job.steps = {steps:,}: the learning rate ends at "
        f"{100 * steps / warm_up:.3g} % of optimizer.lr; --set optimizer.warmup_steps={steps // 10} reaches all of it"
    )


def newest_of(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The newest one, preferably of a whole model."""
    return max(checkpoints, key=lambda item: (item.stage is None, item.step), default=None)


def summarize_job(info: JobInfo, newest: CheckpointInfo | None) -> JobSummary:
    return {
        "job": info.id,
        "state": info.state,
        "reason": info.reason,
        "step": info.step,
        "steps": info.steps_total,
        "loss": info.loss,
        "val_loss": info.val_loss,
        "tokens": info.tokens_total,
        "seconds": info.trained_s,
        "checkpoint": newest.path if newest else None,
        "whole": newest is not None and newest.stage is None,
    }


def show_step(console: Console, row: MetricRow, total: int, label: str = "") -> None:
    """Show a step's line, which begins with ``label``, as progress."""
    values = {key: value for key, value in row.to_map().items() if isinstance(value, int | float)}
    console.progress(label + step_line(row.step, total, values), last="val_loss" in values)


_STEP_FIGURES = {"loss": "loss {:.4f}", "val_loss": "validation {:.4f}", "epsilon": "epsilon {:.2f}",
                 "tokens_per_s": "{:,.0f} tokens/s"}  # fmt: skip


def step_line(applied: int, total: int, values: dict[str, float]) -> str:
    """One line about a step: number, losses, speed, and where the time goes."""
    parts = [f"step {applied:>{len(str(total))}}/{total}"]
    parts += [text.format(values[name]) for name, text in _STEP_FIGURES.items() if values.get(name) is not None]
    if step_ms := values.get("step_ms"):
        shares = (
            f"{name} {100 * values.get(key, 0.0) / step_ms:.0f} %"
            for name, key in (("compute", "compute_ms"), ("send", "communicate_ms"), ("wait", "wait_ms"))
        )
        parts.append(f"{step_ms:.0f} ms ({', '.join(shares)})")
    if members := values.get("members"):
        parts.append(f"{members:.0f} member{'s' if members != 1 else ''}")
    return "  ".join(parts)
