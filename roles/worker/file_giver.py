"""Giving the files of one stage's checkpoint to another worker: to one that puts a whole model's together, and to one
that takes the stage over.

Purpose ``files``; ``Hello.job`` is the job. They are read from the stage's own checkpoint, or from one of the whole
model, whichever lies here, while this worker is on the job or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from p2ptrain.core.checkpoint_parts import LINEAGE, part_of
from p2ptrain.core.checkpoints import MANIFEST, CheckpointEntry, manifest_of, read_checkpoint, step_name
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import ProtocolError, StorageError
from p2ptrain.core.ids import is_id
from p2ptrain.core.texts import shortened
from p2ptrain.core.threads import Thread
from ring.view import MAX_STAGES
from roles.engine import WHOLE, Stage
from roles.worker.giver import give_range
from roles.worker.stage_links import QUIET_S, Line
from wire.chain_messages import TensorRequest
from wire.connection import Connection
from wire.handshake import RefusalCode
from wire.heal_messages import FilesOffer, FilesRequest
from wire.messages import Hello, Refuse

MAX_TAKERS = 8
MAX_MANIFEST_BYTES = 48 << 10
"""It travels in one control frame."""

Saving = Callable[[str, Stage, int, str], Awaitable[None]]
"""(job, stage, step, lineage): returns when the checkpoint of that state is durable here, or will not be."""


def checkpoints_dir(jobs: Path, job: str, stage: Stage) -> Path:
    """Where a worker's checkpoints of a job are: those of a stage apart, for one that holds another stage of the job
    one day must not take this one's for it; those of the whole model as where it is not split."""
    apart = f"stage-{stage.index}-of-{stage.count}" if stage.split else ""
    return jobs / job / apart / "checkpoints"


class FileGiver:
    """One worker's side.

    Args:
        thread: of everything that touches the checkpoints.
        jobs: the directory that has those of all jobs.
    """

    def __init__(self, disk: Disk, thread: Thread, jobs: Path, saving: Saving) -> None:
        self._disk, self._thread, self._jobs, self._saving = disk, thread, jobs, saving
        self._takers = 0

    def decide(self, hello: Hello) -> Refuse | None:
        """Why a caller is not let in, if it is not."""
        if "worker" not in hello.roles or not is_id(hello.job):
            return Refuse(RefusalCode.ROLE, "only workers are given a job's checkpoints")
        if self._takers >= MAX_TAKERS:
            return Refuse(RefusalCode.BUSY, f"{MAX_TAKERS} workers take checkpoints from this one", "try again later")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Answer one caller until it closes. Raises as ``roles.worker.giver.give``."""
        self._takers += 1
        try:
            connection.tune_for_bulk()
            await self._give(connection, hello.job)
        finally:
            self._takers -= 1

    async def _give(self, connection: Connection, job: str) -> None:
        line, offered = Line(connection, QUIET_S), CheckpointFiles(self._disk)
        async with line.alive():
            async for message in line.messages():
                match message:
                    case FilesRequest() if message.job == job:
                        connection.send(await self._offer(connection, offered, message))
                    case TensorRequest(model, name) if model == job:
                        read = partial(offered.read, name, message.start, message.stop)
                        await give_range(connection, read, self._thread, message, QUIET_S)
                    case _:
                        raise ProtocolError(f"who takes checkpoints sent {type(message).__name__}, or of another job")

    async def _offer(self, connection: Connection, offered: CheckpointFiles, asked: FilesRequest) -> FilesOffer:
        if not 0 <= asked.stage < asked.stages <= MAX_STAGES or asked.step < 0:
            raise ProtocolError(f"step {asked.step} of stage {asked.stage} of {asked.stages} is asked for")
        stage = Stage(asked.stage, asked.stages)
        try:
            manifest = await self._thread.submit(lambda: self._found(offered, asked, stage))
            if manifest is None:
                saving = asyncio.ensure_future(self._saving(asked.job, stage, asked.step, asked.lineage))
                closed = asyncio.ensure_future(connection.closed.wait())
                try:
                    await asyncio.wait({saving, closed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    saving.cancel()
                    closed.cancel()
                manifest = await self._thread.submit(lambda: self._found(offered, asked, stage))
        except StorageError as problem:
            return FilesOffer(b"", shortened(problem.message))
        if manifest is None:
            return FilesOffer(b"", f"there is no checkpoint of step {asked.step} of {stage} here")
        return FilesOffer(manifest)

    def _found(self, offered: CheckpointFiles, asked: FilesRequest, stage: Stage) -> bytes | None:
        """The manifest of the stage's part of what lies here, which is offered now; None where nothing does."""
        for kind in (stage, WHOLE):
            path = checkpoints_dir(self._jobs, asked.job, kind) / step_name(asked.step)
            if MANIFEST not in self._disk.list_dir(path):
                continue
            entry = read_checkpoint(self._disk, path)
            if asked.lineage in ("", entry.meta.get(LINEAGE)):
                return offered.offer(entry, stage)
        return None


class CheckpointFiles:
    """The files of one stage in one checkpoint, as they are offered to somebody. Blocking."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._path = Path()
        self._sizes: dict[str, int] = {}

    def offer(self, entry: CheckpointEntry, stage: Stage) -> bytes:
        """From now on these; their manifest. Raises ``StorageError``."""
        meta, files = part_of(entry, stage.index, stage.count)
        manifest = manifest_of(entry.step, meta, files)
        if len(manifest) > MAX_MANIFEST_BYTES:
            raise StorageError(f"{entry.path} has too many files to tell of: {len(files)}")
        self._path, self._sizes = entry.path, {name: size for name, (size, _) in files.items()}
        return manifest

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Raises ``StorageError``: there are no such bytes, or no more."""
        if not 0 <= start <= stop <= self._sizes.get(name, 0):
            raise StorageError(f"no bytes {start} to {stop} of {name[:80]!r} were offered")
        return self._disk.read_range(self._path / name, start, stop)
