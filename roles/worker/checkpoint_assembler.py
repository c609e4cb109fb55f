"""Checkpoints of a split job's whole model: workers assemble them, send files of them, and extract stages from them.

Each stage saves its own files. *Assemblers* collect the files of all stages of their replica. The result is what one
process would have written: an ordinary Hugging Face directory. Assembler k of ``checkpoint.copies`` is the member of
replica k mod r at stage k // r, so whole checkpoints are on different machines. An assembler asks each member of its
replica (purpose ``files``), which answers when its own save is durable. It assembles one state at a time; a newer
waiting state replaces an older one. Little is in flight beside a training ring, whose activations may share the link.

A worker that is to hold a stage extracts the stage's files from a whole checkpoint: its own, or another worker's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from p2ptrain.core.checkpoint_parts import (
    LINEAGE,
    STAGE,
    STAGES,
    add_whole_adapter,
    is_of_stage,
    join_rows,
    of_the_whole,
    part_of,
)
from p2ptrain.core.checkpoints import (
    MANIFEST,
    CheckpointEntry,
    Meta,
    manifest_of,
    manifest_untrusted,
    read_checkpoint,
    step_name,
)
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import P2PTrainError, ProtocolError, StorageError
from p2ptrain.core.ids import is_id
from p2ptrain.core.tensor_files import WEIGHTS_FILE
from p2ptrain.core.texts import shortened
from p2ptrain.core.threads import Thread
from ring.token import is_lineage
from ring.view import View
from roles.engine import WHOLE, Stage
from roles.line import Line, wait_unless_closed
from roles.worker.checkpoint_store import CheckpointFiles, Checkpointing, announce
from roles.worker.context import Context
from roles.worker.transfer import AllPieces, Receiver, Source, TransferPiece, send_range
from wire.connection import Connection
from wire.job_messages import MAX_STAGES, FilesOffer, FilesRequest, MemberRecord, RangeRequest
from wire.messages import Hello, Message, RefusalCode, Refuse

PIECE_BYTES = 512 << 10
"""Bytes of a file requested at a time, also beside a training ring."""
MAX_RECIPIENTS = 8


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A state to assemble, and the members that save its parts, by stage."""

    step: int
    lineage: str
    replica: tuple[MemberRecord, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One stage's files: name → size and digest. ``pieces`` reads a file by its name and size."""

    meta: Meta
    files: dict[str, tuple[int, str]]
    pieces: Callable[[str, int], AsyncIterator[bytes | bytearray]]
    whose: str


def assembles(view: View, rank: int, copies: int) -> bool:
    return view.stage_of(rank) * view.replicas + view.replica_of(rank) < copies


def checkpoints_dir(jobs: Path, job: str, stage: Stage) -> Path:
    """Return a worker's checkpoint directory. Each stage has its own; the whole model's is that of an unsplit job."""
    apart = f"stage-{stage.index}-of-{stage.count}" if stage.split else ""
    return jobs / job / apart / "checkpoints"


class CheckpointAssembler:
    """Assembles one job's whole checkpoints on one worker, and extracts the worker's stage from them. ``parts``:
    checkpoints of that stage. ``files``: those of the whole model."""

    def __init__(
        self,
        context: Context,
        *,
        job: str,
        stage: Stage,
        parts: CheckpointFiles,
        files: CheckpointFiles,
        checkpoints: Checkpointing,
        did_something: Callable[[], None],
    ) -> None:
        self._context, self._job, self._stage = context, job, stage
        self.files, self._parts, self._checkpoints = files, parts, checkpoints
        self._did_something = did_something
        self.problem = ""  # of the newest attempt; empty: it did not fail
        self._next: _Wanted | None = None
        self._task: asyncio.Task[None] | None = None

    def want(self, view: View, rank: int, step: int, lineage: str, start: Callable[..., asyncio.Task[None]]) -> None:
        """Assemble that state when its parts are durable. It replaces an older state that still waits."""
        self._next = _Wanted(step, lineage, view.replica(rank))
        if self._task is None or self._task.done():
            self._task = start(self._work(), name="whole checkpoint")

    async def settled(self, timeout_s: float) -> bool:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        return self._task is None or self._task.done()

    async def stop(self) -> None:
        task, self._task, self._next = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _work(self) -> None:
        while (wanted := self._next) is not None:
            self._next = None
            try:
                entry = await self._assembled(wanted)
            except P2PTrainError as problem:
                self.problem = f"{problem.message}. {problem.remedy}".rstrip(". ")
                text = f"cannot assemble the checkpoint of step {wanted.step}: {self.problem}"
                self._context.notify("warning", "not-gathered", f"{text}; its parts remain where they were saved")
            else:
                self.problem = ""
                announce(self._context, self._job, entry)
                self._context.notify("info", "gathered", f"assembled a checkpoint of step {entry.step}: {entry.path}")

    async def _assembled(self, wanted: _Wanted) -> CheckpointEntry:
        for entry in await self.files.entries():
            if (entry.step, entry.meta.get(LINEAGE)) == (wanted.step, wanted.lineage):
                return entry
        async with AsyncExitStack() as stack:
            parts: list[_Part] = []
            for index, member in enumerate(wanted.replica):
                if index == self._stage.index:
                    parts.append(await self._own_part(wanted))
                else:
                    asked = FilesRequest(self._job, wanted.step, wanted.lineage, index, self._stage.count)
                    parts.append(await self._offered(stack, member, asked))
            return await self._written(self.files, wanted.step, of_the_whole(parts[0].meta), parts)

    async def _own_part(self, wanted: _Wanted) -> _Part:
        await self._checkpoints.outcome(wanted.step, wanted.lineage)
        for entry in await self._parts.entries():
            if (entry.step, entry.meta.get(LINEAGE)) == (wanted.step, wanted.lineage):
                return self._lying(entry)
        raise StorageError("this worker did not save its own part")

    def _lying(self, entry: CheckpointEntry) -> _Part:
        meta, files = part_of(entry, self._stage.index, self._stage.count)
        return _Part(meta, files, partial(self._read, entry), str(entry.path))

    async def _read(self, entry: CheckpointEntry, name: str, size_bytes: int) -> AsyncIterator[bytes]:
        for start in range(0, size_bytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, size_bytes)
            yield await self._parts.at_disk(partial(self._parts.disk.read_range, entry.path / name, start, stop))

    async def _offered(self, stack: AsyncExitStack, member: MemberRecord, asked: FilesRequest) -> _Part:
        """Ask a member for its files. They can be read while ``stack`` is open. Raises ``P2PTrainError``."""
        context = self._context
        hello = context.hello("files", self._job)
        connection, _ = await context.dial(member.peer_id, member.host, member.port, hello)
        source = Source(member.peer_id, member.name, Line(connection))
        receiver, offer = Receiver(context.world.clock.now, _unverified), source.line.new_waiter()

        def heard(message: Message) -> None:
            if not isinstance(message, FilesOffer) or offer.done():
                raise ProtocolError(f"unexpected message {type(message).__name__} from a sender of files")
            offer.set_result(message)

        await stack.enter_async_context(receiver.attached(source, heard))
        connection.send(asked)
        reply: FilesOffer = await source.line.wait_for(offer)
        if reply.reason:
            raise ProtocolError(f"{member.name} cannot send the files of part {asked.stage}: {shortened(reply.reason)}")
        meta, files = offered_untrusted(reply.manifest, asked)

        async def pieces(name: str, size_bytes: int) -> AsyncIterator[bytearray]:
            for start in range(0, size_bytes, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, size_bytes)
                data = bytearray(stop - start)
                receiver.want((name, start), TransferPiece(name, start, stop, memoryview(data)))
                receiver.offers(source, AllPieces())
                await receiver.until(lambda start=start: receiver.has((name, start)))  # type: ignore[misc]
                receiver.forget((name, start))
                yield data

        return _Part(meta, files, pieces, member.name)

    async def _written(self, into: CheckpointFiles, step: int, meta: Meta, parts: Sequence[_Part]) -> CheckpointEntry:
        """Write a checkpoint from the parts and verify every byte. On ``P2PTrainError`` nothing is left."""
        names = [name for part in parts for name in part.files]
        if len(set(names)) != len(names):
            raise StorageError("two parts have files of the same name")
        draft = await into.draft(step, sum(size for part in parts for size, _ in part.files.values()))
        try:
            for part in parts:
                for name, (size_bytes, digest) in part.files.items():
                    await into.at_disk(partial(draft.begin, name))
                    async for piece in part.pieces(name, size_bytes):
                        await into.at_disk(partial(draft.add, memoryview(piece)))
                        self._did_something()
                    if await into.at_disk(draft.end) != (size_bytes, digest):
                        raise StorageError(f"{name} of {part.whose} does not match its manifest")
            if len(parts) > 1:
                await into.at_disk(partial(add_whole_adapter, into.disk, draft))
                await into.at_disk(partial(join_rows, into.disk, draft))
            return await into.publish(draft, meta)
        except BaseException:
            into.at_disk(draft.discard)  # not awaited
            raise

    # -------------------------------------------------------------------------------------------- extracting a stage

    async def bring(self, restore_step: int, holders: Sequence[MemberRecord], lineage: str = "") -> None:
        """Make this stage's own checkpoint available: that of ``restore_step``, or the newest here if it is negative.
        Failures are only reported.

        Args:
            holders: members that have the whole model's checkpoint of ``restore_step``.
            lineage: of ``restore_step``. A checkpoint of another one is of an abandoned branch. Empty: any will do.

        Raises:
            StorageError: this worker's directories cannot be read.
        """
        if restore_step >= 0:
            await self._parts.go_back(restore_step)
            await self.files.go_back(restore_step)
        mine, wholes = await self._parts.entries(), await self.files.entries()
        for entry in wholes:
            announce(self._context, self._job, entry)
        if restore_step == 0 or (restore_step > 0 and await self._is_good(restore_step, lineage)):
            return
        newest = mine[0].step if mine else 0
        for entry in wholes:
            has_lineage = lineage in ("", entry.meta.get(LINEAGE))
            wanted = entry.step > newest if restore_step < 0 else entry.step == restore_step and has_lineage
            if wanted and await self._taken(str(entry.path), self._from_here(entry)):
                return
        for holder in holders if restore_step > 0 else ():
            if holder.peer_id != self._context.peer_id and await self._taken(
                holder.name, self._from_there(holder, restore_step, lineage)
            ):
                return

    async def _is_good(self, step: int, lineage: str) -> bool:
        try:
            entry = await self._parts.find(step)
            return entry is not None and lineage in ("", entry.meta.get(LINEAGE))
        except StorageError:
            return False  # it is damaged: an extracted one replaces it

    async def _taken(self, whence: str, take: Coroutine[Any, Any, CheckpointEntry]) -> bool:
        try:
            entry = await take
        except P2PTrainError as problem:
            text = f"cannot take the files of {self._stage} from {whence}: {problem.message}"
            self._context.notify("warning", "not-taken", text)
            return False
        self._context.notify("info", "taken", f"took the files of step {entry.step} of {self._stage} from {whence}")
        return True

    async def _from_here(self, entry: CheckpointEntry) -> CheckpointEntry:
        part = self._lying(entry)
        return await self._written(self._parts, entry.step, part.meta, [part])

    async def _from_there(self, holder: MemberRecord, step: int, lineage: str) -> CheckpointEntry:
        asked = FilesRequest(self._job, step, lineage, self._stage.index, self._stage.count)
        async with AsyncExitStack() as stack:
            part = await self._offered(stack, holder, asked)
            return await self._written(self._parts, step, part.meta, [part])


async def _unverified(data: memoryview) -> bytes:
    return b""


def offered_untrusted(manifest: bytes, asked: FilesRequest) -> tuple[Meta, dict[str, tuple[int, str]]]:
    """Parse the offered meta and files. Raises ``ProtocolError`` if they do not fit the request."""
    step, meta, files = manifest_untrusted(manifest)
    facts = (step, meta.get("job"), meta.get(STAGE), meta.get(STAGES))
    if facts != (asked.step, asked.job, asked.stage, asked.stages):
        raise ProtocolError(f"the manifest is not that of step {asked.step} of part {asked.stage}")
    lineage = meta.get(LINEAGE)
    if not isinstance(lineage, str) or not is_lineage(lineage):
        raise ProtocolError("the manifest has no valid lineage")
    if asked.lineage not in ("", lineage):
        raise ProtocolError(f"the manifest has another lineage of step {asked.step}")
    if len(files) > 256 or sum(size for size, _ in files.values()) > 1 << 48:
        raise ProtocolError("the manifest lists more files than a part can have")
    all_of_it = WEIGHTS_FILE in files  # a shard's rows come from the files of the whole model
    strange = [
        name for name in files if name == MANIFEST or not (all_of_it or is_of_stage(name, asked.stage, asked.stages))
    ]
    if strange:
        raise ProtocolError(f"{strange[0][:80]!r} is not a file of part {asked.stage}")
    return meta, files


# -------------------------------------------------------------------------------------------------------------- sending


class FileSender:
    """Sends the files of one stage's checkpoint to other workers, also of jobs that this worker is not on. The files
    come from the stage's own checkpoint or from one of the whole model.

    Args:
        saving: (job, stage, step, lineage): returns when that state's checkpoint is durable here, or will not come.
    """

    def __init__(
        self, disk: Disk, thread: Thread, jobs: Path, saving: Callable[[str, Stage, int, str], Awaitable[None]]
    ) -> None:
        self._disk, self._thread, self._jobs, self._saving = disk, thread, jobs, saving
        self._recipients = 0

    def decide(self, hello: Hello) -> Refuse | None:
        if "worker" not in hello.roles or not is_id(hello.job):
            return Refuse(RefusalCode.ROLE, "only workers can fetch a job's checkpoints")
        if self._recipients >= MAX_RECIPIENTS:
            return Refuse(
                RefusalCode.BUSY, f"{MAX_RECIPIENTS} workers already fetch checkpoints from this one", "try again later"
            )
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Answer one recipient until it closes. Raises as ``send_range``."""
        self._recipients += 1
        try:
            await self._give(connection, hello.job)
        finally:
            self._recipients -= 1

    async def _give(self, connection: Connection, job: str) -> None:
        line = Line(connection)
        offered: dict[str, tuple[Path, int]] = {}  # name → path and size

        async def read(asked: RangeRequest) -> bytes:
            path, size_bytes = offered.get(asked.name, (Path(), 0))
            if not 0 <= asked.start <= asked.stop <= size_bytes:
                raise StorageError(f"bytes {asked.start} to {asked.stop} of {asked.name[:80]!r} were not offered")
            return await self._thread.submit(partial(self._disk.read_range, path, asked.start, asked.stop))

        async with line.keep_alive():
            async for message in line.messages():
                match message:
                    case FilesRequest() if message.job == job:
                        connection.send(await self._offer(connection, offered, message))
                    case RangeRequest():
                        await send_range(line, message, read)
                    case _:
                        raise ProtocolError(f"unexpected message {type(message).__name__}, or one of another job")

    async def _offer(
        self, connection: Connection, offered: dict[str, tuple[Path, int]], asked: FilesRequest
    ) -> FilesOffer:
        if not 0 <= asked.stage < asked.stages <= MAX_STAGES or asked.step < 0:
            raise ProtocolError(f"invalid request: step {asked.step} of stage {asked.stage} of {asked.stages}")
        stage = Stage(asked.stage, asked.stages)
        try:
            manifest = await self._thread.submit(lambda: self._found(offered, asked, stage))
            if manifest is None:
                await wait_unless_closed(connection, self._saving(asked.job, stage, asked.step, asked.lineage))
                manifest = await self._thread.submit(lambda: self._found(offered, asked, stage))
        except StorageError as problem:
            return FilesOffer(b"", shortened(problem.message))
        if manifest is None:
            return FilesOffer(b"", f"there is no checkpoint of step {asked.step} of {stage} here")
        return FilesOffer(manifest)

    def _found(self, offered: dict[str, tuple[Path, int]], asked: FilesRequest, stage: Stage) -> bytes | None:
        for kind in (stage, WHOLE):
            path = checkpoints_dir(self._jobs, asked.job, kind) / step_name(asked.step)
            if MANIFEST not in self._disk.list_dir(path):
                continue
            entry = read_checkpoint(self._disk, path)
            if asked.lineage in ("", entry.meta.get(LINEAGE)):
                meta, files = part_of(entry, stage.index, stage.count)
                manifest = manifest_of(entry.step, meta, files)
                if len(manifest) > 48 << 10:  # it travels in one control frame
                    raise StorageError(f"{entry.path} has too many files for one manifest: {len(files)}")
                offered.clear()
                offered.update({name: (entry.path / name, size) for name, (size, _) in files.items()})
                return manifest
        return None
