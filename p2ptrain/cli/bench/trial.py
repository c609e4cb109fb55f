"""A real cluster for a measurement: a seed and workers as a person starts them, a job, and what is told of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.bench.members import Interrupted
from p2ptrain.cli.local_cluster import Child, JobObserver, LocalCluster
from p2ptrain.cli.output import Console
from p2ptrain.cli.stopping import stop_on_signals
from p2ptrain.core.errors import DeadlineExceeded, JobFailed, StorageError

if TYPE_CHECKING:
    from configs.schema import Profile

STALL_S = 120.0
"""Without a step or another word of progress, nothing will come any more: so long may a start or a step take."""


@dataclass(slots=True)
class Scene:
    """What all trials of one command share.

    Attributes:
        root: a directory of the command's own.
        stop: set by Ctrl+C.
    """

    root: Path
    stop: asyncio.Event
    console: Console
    on_stop: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def open(cls, parent: Path | None) -> AsyncIterator[Scene]:
        """Its directory is made in ``parent`` (None: the system's for temporary files), and left where an error names a
        log in it. Raises ``StorageError``."""
        try:
            root = Path(tempfile.mkdtemp(prefix="p2ptrain-bench-", dir=parent))
        except OSError as error:
            raise StorageError(
                f"cannot write to {parent}: {error.strerror}", remedy="choose another --state"
            ) from error
        scene = cls(root, asyncio.Event(), Console())

        def leave(text: str) -> None:
            for act in scene.on_stop:  # at once: a second Ctrl+C may end this process
                act()
            scene.console.event("info", text)

        stop_on_signals(scene.stop, leave)
        well = False
        try:
            yield scene
            well = True
        except Interrupted:
            well = True
            raise
        finally:
            scene.console.finish()
            if well:
                shutil.rmtree(root, ignore_errors=True)


async def conduct(work: Callable[[Scene], Awaitable[None]], parent: Path | None = None) -> bool:
    """Do the ``work``. Whether it came to its end; Ctrl+C is the other way. Raises ``P2PTrainError``."""
    try:
        async with Scene.open(parent) as scene:
            await work(scene)
    except Interrupted:
        return False
    return True


class Trial:
    """One job on one cluster. Made by ``started``.

    Attributes:
        job: its id. workers: the processes, by number from 1.
    """

    def __init__(self, scene: Scene, observer: JobObserver, job: str, children: list[Child]) -> None:
        self.observer, self.job = observer, job
        self._scene, self._children = scene, children

    @property
    def step(self) -> int:
        return self.observer.step

    async def until(self, test: Callable[[], bool], what: str) -> None:
        """Wait until ``test`` is true, which is looked at whenever the seed tells something.

        Args:
            what: is waited for, for people.

        Raises:
            Interrupted: the person pressed Ctrl+C.
            JobFailed: a process ended, or the job did before.
            DeadlineExceeded: ``STALL_S`` passed without a step.
        """

        def over() -> bool:
            return self._scene.stop.is_set() or self.observer.finished or any(not child.alive for child in children)

        children = self._children
        while True:
            before = len(self.observer.rows), len(self.observer.saved)

            def news(before: tuple[int, int] = before) -> bool:
                return test() or over() or (len(self.observer.rows), len(self.observer.saved)) != before

            told = await self.observer.until(news, STALL_S)
            if self._scene.stop.is_set():
                raise Interrupted
            if test():
                return
            if dead := next((child for child in children if not child.alive), None):
                raise dead.failed(f"{dead.name} ended")
            if self.observer.finished:
                job = self.observer.job
                reason = f"{job.state}: {job.reason}" if job else "gone"
                raise JobFailed(f"the job ended before {what} ({reason})", remedy=f"the logs are in {self._logs}")
            if not told:
                raise DeadlineExceeded(f"no {what} within {STALL_S:.0f} s", remedy=f"the logs are in {self._logs}")

    async def until_step(self, step: int, title: str) -> None:
        """Wait for a step, and tell how far it is. Raises as ``until``."""
        for each in range(self.step + 1, step + 1):
            await self.until(partial(self._reached, each), f"step {each}")
            self._scene.console.progress(f"{title}: step {self.step} of {step}")

    def _reached(self, step: int) -> bool:
        return self.step >= step

    @property
    def _logs(self) -> Path:
        return self._children[0].log.parent


@asynccontextmanager
async def started(scene: Scene, name: str, profile: Profile) -> AsyncIterator[Trial]:
    """A cluster of ``profile.job.workers`` workers in its own directory, and the job; all ended with the block.

    Raises ``JobFailed``, ``StorageError``, ``UserError``, ``Interrupted``.
    """
    root = scene.root / name
    cluster = LocalCluster(root)
    observer = JobObserver(cluster.connect)
    tasks: set[asyncio.Task[None]] = set()
    well = False
    try:
        await cluster.start_seed()
        client = await cluster.connect()
        try:
            order = {"name": name, "profile": name, "spec": profile.to_spec()}
            job = str((await client.request("jobs.create", order))["job"])
        finally:
            await client.close()
        for number in range(1, profile.job.workers + 1):
            await cluster.start_peer(f"worker-{number}", number, "--threads", str(profile.device.threads or 1))
        children = [cluster.seed, *cluster.peers.values()]
        tasks.add(asyncio.create_task(observer.run(job), name="observe"))
        tasks.update(asyncio.create_task(_wake(child.process.wait(), observer)) for child in children)
        tasks.add(asyncio.create_task(_wake(scene.stop.wait(), observer), name="wake"))
        yield Trial(scene, observer, job, children)
        well = True
    except Interrupted:
        well = True
        raise
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await cluster.end()
        if well:  # checkpoints are large
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


async def _wake(ended: Coroutine[Any, Any, object], observer: JobObserver) -> None:
    await ended
    observer.wake()


def adapted(name: str, sets: list[str], wanted: Mapping[str, object], must: Mapping[str, object]) -> Profile:
    """The profile, with what a measurement wants where the person said nothing else, and what it must have.

    Raises ``ConfigError``, ``UserError``.
    """
    from configs.loader import is_shipped, load

    sources = load(name, os.environ, sets).sources
    mine = {key: value for key, value in wanted.items() if is_shipped(sources[key])} | dict(must)
    return load(name, os.environ, [*sets, *(f"{key}={value}" for key, value in mine.items())]).profile
