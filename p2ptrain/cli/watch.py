"""The progress of one job, for `jobs watch` and `up`, and its metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.output import step_line
from p2ptrain.cli.runtime import newest_of
from p2ptrain.cluster.operator import operator
from p2ptrain.core.errors import ConnectionLost, NetworkError, UserError
from wire.records import FINISHED_STATES, CheckpointInfo, JobInfo, MetricRow

if TYPE_CHECKING:
    from p2ptrain.cluster.console import Console
    from wire.client import SeedClient
    from wire.schema import Record

AGAIN_S = 1.0
"""Pause between attempts to reach a seed that is away."""


UNSAVED = "not saved"
"""State in a summary of a job whose steps are all done, while its result is on no disk."""
Summary = dict[str, Any]


class JobProgress:
    """Prints the steps of one job that follow ``info``.

    Args:
        label: begins each line.

    Attributes:
        info: the job's newest record. began: a step has followed. lost: it ended before its result was saved.
    """

    began = lost = False

    def __init__(self, info: JobInfo, console: Console, label: str = "") -> None:
        self.info = info
        self._console, self._label, self._shown_step = console, label, info.step

    def take(self, item: Record, *, quiet: bool = False) -> None:
        match item:
            case JobInfo() if item.id == self.info.id:
                self.lost = self.info.state == "saving" and item.state in FINISHED_STATES - {"done"}
                self.info = item
            case MetricRow() if item.job == self.info.id and item.step > self._shown_step:
                self._shown_step, self.began = item.step, True
                if not quiet:
                    known = {key: value for key, value in item.to_map().items() if isinstance(value, int | float)}
                    line = step_line(item.step, self.info.steps_total, known)
                    self._console.progress(self._label + line, last="val_loss" in known)


async def watched(seed: str, job: str, console: Console) -> dict[str, Any]:
    """Show the progress of a job until it ends; return its summary. A seed that goes away is dialled again.

    Raises ``P2PTrainError`` if there is no such job (any more), or no seed when this begins.
    """
    followed: JobProgress | None = None
    while True:
        try:
            async with operator(seed) as client:
                info, _ = await client.job(followed.info.id if followed else job)
                followed = followed or JobProgress(info, console)
                await _follow(client, followed, console)
                summary = summed_up(followed.info.id, followed.info, await newest_saved(client, followed.info.id))
                return summary | ({"state": UNSAVED} if followed.lost else {})
        except (NetworkError, UserError) as problem:  # a UserError: of @DIR, whose seed is away
            if followed is None:
                raise
            console.progress(f"waiting for the seed: {problem.message}")
            await asyncio.sleep(AGAIN_S)


async def _follow(client: SeedClient, followed: JobProgress, console: Console) -> None:
    state = ""
    async for records in client.news():
        for item in records:
            followed.take(item)
        info = followed.info
        if info.state in FINISHED_STATES:
            console.finish()
            return
        if info.state != state:
            state, reason = info.state, f": {info.reason}" if info.reason else ""
            if not console.quiet:
                level = "warning" if state == "saving" else "info"
                console.event(level, f"job {info.name} ({info.id}) is {state}{reason}")
    raise ConnectionLost("the seed ended", remedy="start it again; its workers go on meanwhile")


async def newest_saved(client: SeedClient, job: str) -> CheckpointInfo | None:
    return newest_of(await client.checkpoints(job))


def summed_up(job: str, shown: JobInfo | None, newest: CheckpointInfo | None) -> Summary:
    return {
        "job": job,
        "state": shown.state if shown else None,
        "reason": shown.reason if shown else "",
        "step": shown.step if shown else None,
        "steps": shown.steps_total if shown else None,
        "loss": shown.loss if shown else None,
        "val_loss": shown.val_loss if shown else None,
        "tokens": shown.tokens_total if shown else None,
        "seconds": shown.trained_s if shown else 0.0,
        "checkpoint": newest.path if newest else None,
        "whole": newest is not None and newest.stage is None,
    }
