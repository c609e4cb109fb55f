"""The jobs of ``p2ptrain up``: found again or created, followed until they are finished, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.console import Console, step_line
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, UserError
from wire.records import FINISHED_STATES

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.children import Child
    from wire.client import SeedClient

DEATH_KNOWN_S = 2.0  # from the end of a child's connections to the end of its process


async def unfinished(client: SeedClient, specs: Collection[str], root: Path, *, cancel: bool) -> dict[str, str]:
    """The unfinished jobs of these settings, by these, as ids; a paused one goes on.

    Args:
        cancel: those of other settings.

    Raises:
        UserError: there is one of other settings, and it is not to be cancelled.
    """
    found: dict[str, str] = {}
    for item in (await client.request("jobs.list"))["jobs"]:
        if item["state"] in FINISHED_STATES:
            continue
        spec = (await client.request("jobs.show", {"job": item["id"]}))["spec"]
        if spec in specs and spec not in found:
            found[spec] = str(item["id"])
            if item["state"] == "paused":
                await client.request("jobs.resume", {"job": item["id"]})
        elif cancel:
            await client.request("jobs.cancel", {"job": item["id"]})
        else:
            raise UserError(
                f"{root} holds an unfinished job {item['name']} ({item['id']}) of other settings",
                remedy="give the same settings to go on with it, --new to cancel it, or another --state",
            )
    return found


async def create(client: SeedClient, name: str, profile_name: str, profile: Profile) -> str:
    """A new job; its id."""
    from p2ptrain.cli.training_shape import shape_param

    order = {"name": name, "profile": profile_name, "spec": profile.to_spec(), **shape_param(profile)}
    return str((await client.request("jobs.create", order))["job"])


async def job_for(
    client: SeedClient, name: str, profile_name: str, profile: Profile, found: Mapping[str, str], console: Console
) -> str:
    """The unfinished job of these settings, else a new one; its id. People are told which."""
    if (job := found.get(profile.to_spec())) is not None:
        console.event("info", f"going on with job {name} ({job}) from its last checkpoint")
        return job
    job = await create(client, name, profile_name, profile)
    console.event("info", f"created job {name} ({job}) from profile {profile_name}")
    return job


async def newest_saved(client: SeedClient, job: str) -> dict[str, Any] | None:
    """The job's newest checkpoint, one of the whole model where there is any. Raises ``P2PTrainError``."""
    saved = (await client.request("checkpoints.list", {"job": job}))["checkpoints"]
    return max(saved, key=lambda item: (item.get("stage") is None, item["step"]), default=None)


def summed_up(job: str, shown: dict[str, Any], newest: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    """What came of a job: of its record, and of its newest checkpoint."""
    return {
        "job": job,
        "state": shown.get("state"),
        "reason": shown.get("reason", ""),
        "step": shown.get("step"),
        "steps": shown.get("steps_total"),
        "loss": shown.get("loss"),
        "val_loss": shown.get("val_loss"),
        "tokens": shown.get("tokens_total"),
        "seconds": round(seconds, 1),
        "checkpoint": newest["path"] if newest else None,
        "whole": newest is not None and newest.get("stage") is None,
    }


class Watcher:
    """Follows jobs through the seed's updates until all are finished, or one failed, and says how far they are.

    Args:
        jobs: what to call each, by its id; empty where there is but one.
        children: the seed, and the workers.
    """

    def __init__(
        self, client: SeedClient, jobs: Mapping[str, str], children: list[Child], console: Console, *, quiet: bool
    ) -> None:
        self.quiet = quiet
        self._client, self._jobs, self._children, self._console = client, jobs, children, console
        self._began = time.monotonic()
        self._last: dict[str, dict[str, Any]] = {job: {} for job in jobs}
        self._told = dict.fromkeys(jobs, -1)  # the newest step that was told; before, where this start found the job
        self._wide = max(map(len, jobs.values()))

    async def run(self) -> None:
        """Until then. Raises ``JobFailed`` when the processes that do the work are gone."""
        for job in self._jobs:
            self._told[job] = int((await self._client.request("jobs.show", {"job": job}))["job"]["step"])
        await self._client.request("subscribe")
        reaper = asyncio.create_task(self._all_gone(), name="reaper")
        following = asyncio.create_task(self._follow(), name="follow")
        try:
            await asyncio.wait({reaper, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done() and following.exception() is None:
                return
            # A seed that dies closes its connections first. That it died, and why, says more.
            await asyncio.wait({reaper}, timeout=DEATH_KNOWN_S)
            (reaper if reaper.done() else following).result()
        finally:
            reaper.cancel()
            following.cancel()

    async def _follow(self) -> None:
        async for update in self._client.updates():
            for item in update.items:
                if update.topic == "jobs" and item.get("id") in self._last:
                    self._last[item["id"]] = item
                    if self._over():
                        return
                elif update.topic == "metrics" and int(item["step"]) > self._told.get(item.get("job", ""), 2**63):
                    self._tell(item)
                elif update.topic == "events" and item.get("level") != "info" and not self.quiet:
                    self._console.event(str(item.get("level")), str(item.get("text")))
        raise ConnectionLost("the seed ended")

    def _over(self) -> bool:
        states = {item.get("state") for item in self._last.values()}
        return states <= FINISHED_STATES or bool(states & (FINISHED_STATES - {"done"}))

    def _tell(self, row: dict[str, Any]) -> None:
        job, step = row["job"], int(row["step"])
        self._told[job] = step
        known = {key: value for key, value in row.items() if isinstance(value, int | float)}
        if not self.quiet:
            line = step_line(step, int(self._last[job].get("steps_total", 0)), known)
            name = f"{self._jobs[job]:<{self._wide}}  " if self._wide else ""
            self._console.progress(name + line, last="val_loss" in known)

    async def _all_gone(self) -> None:
        """Ends, with the reason, when the seed or the last worker is gone."""
        seed, *workers = self._children
        await asyncio.wait(
            {
                asyncio.create_task(seed.process.wait()),
                asyncio.create_task(_all_of(workers)),
            },
            return_when=asyncio.FIRST_COMPLETED,
        )
        gone = seed if not seed.alive else workers[-1]
        raise gone.failed(f"{gone.name} ended")

    async def summary(self, job: str, *, interrupted: bool) -> dict[str, Any]:
        """What came of a job, for people and programs."""
        try:
            shown = (await self._client.request("jobs.show", {"job": job}))["job"]
            newest = await newest_saved(self._client, job)
        except P2PTrainError:
            shown, newest = self._last[job], None
        found = summed_up(job, shown, newest, time.monotonic() - self._began)
        return found | ({"state": "interrupted"} if interrupted and found["state"] not in FINISHED_STATES else {})


async def _all_of(children: list[Child]) -> None:
    await asyncio.gather(*(child.process.wait() for child in children))
