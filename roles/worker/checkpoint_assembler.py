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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from p2ptrain.core.checkpoints import (
    LINEAGE,
    MANIFEST,
    STAGE,
    STAGES,
    CheckpointEntry,
    Meta,
    add_whole_adapter,
    is_of_stage,
    join_rows,
    manifest_of,
    manifest_untrusted,
    of_the_whole,
    part_of,
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
from roles.worker.transfer import PieceSource, Receiver, TransferPiece, send_range
from wire.connection import Connection
from wire.job_messages import MAX_STAGES, FilesOffer, FilesRequest, MemberRecord, RangeRequest
from wire.messages import Hello, Message, RefusalCode, Refuse

PIECE_BYTES = 512 << 10
"""Bytes of a file requested at a time, also beside a training ring."""
MAX_RECIPIENTS = 8


@dataclass(frozen=True, slots=True)
class _Target:
    """A state to assemble, and the members that save its parts, by stage."""

    step: int
    lineage: str
    replica: tuple[MemberRecord, ...]


@dataclass(frozen=True, slots=True)
class _StageFiles:
    """One stage's files: name → size and digest. ``pieces`` reads one, by name and size. ``owner``: for people."""

    meta: Meta
    files: dict[str, tuple[int, str]]
    pieces: Callable[[str, int], AsyncIterator[bytes | bytearray]]
    owner: str


def assembles(view: View, rank: int, copies: int) -> bool:
    return view.stage_of(rank) * view.replicas + view.replica_of(rank) < copies


def checkpoints_dir(jobs: Path, job: str, stage: Stage) -> Path:
    """Return a worker's checkpoint directory. Each stage has its own; the whole model's is that of an unsplit job."""
    apart = f"stage-{stage.index}-of-{stage.count}" if stage.split else ""
    return jobs / job / apart / "checkpoints"


def _ranges(size_bytes: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PIECE_BYTES, size_bytes)) for start in range(0, size_bytes, PIECE_BYTES))


class CheckpointAssembler:
    """Assembles one job's whole checkpoints on one worker, and extracts the worker's stage from them.

    Args:
        parts: checkpoints of that stage. whole: those of the whole model.
        on_progress: called after every piece of a file.

    Attributes:
        problem: of the newest attempt; empty: it did not fail.
    """

    def __init__(
        self,
        context: Context,
        *,
        job: str,
        stage: Stage,
        parts: CheckpointFiles,
        whole: CheckpointFiles,
        checkpoints: Checkpointing,
        on_progress: Callable[[], None],
    ) -> None:
        self._context, self._job, self._stage = context, job, stage
        self.whole, self._parts, self._checkpoints = whole, parts, checkpoints
        self._on_progress = on_progress
        self.problem = ""
        self._next: _Target | None = None
        self._task: asyncio.Task[None] | None = None

    def want(self, view: View, rank: int, step: int, lineage: str, start: Callable[..., asyncio.Task[None]]) -> None:
        """Assemble that state when its parts are durable. It replaces an older state that still waits."""
        self._next = _Target(step, lineage, view.replica(rank))
        if self._task is None or self._task.done():
            self._task = start(self._work(), name="whole checkpoint")

    async def wait_settled(self, timeout_s: float | None = None) -> bool:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        return self._task is None or self._task.done()

    async def stop(self) -> None:
        task, self._task, self._next = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _work(self) -> None:
        while (target := self._next) is not None:
            self._next = None
            try:
                entry = await self._assemble(target)
            except P2PTrainError as problem:
                self.problem = problem.with_remedy
                text = f"cannot assemble the checkpoint of step {target.step}: {self.problem}"
                self._context.notify("warning", "not-gathered", f"{text}; its parts remain where they were saved")
            else:
                self.problem = ""
                announce(self._context, self._job, entry, self.whole.held)
                self._context.notify("info", "gathered", f"assembled a checkpoint of step {entry.step}: {entry.path}")

    async def _assemble(self, target: _Target) -> CheckpointEntry:
        entry = await _find(self.whole, target.step, target.lineage)
        if entry is not None:
            return entry
        async with AsyncExitStack() as stack:
            parts: list[_StageFiles] = []
            for index, member in enumerate(target.replica):
                if index == self._stage.index:
                    await self._checkpoints.wait_for_save(target.step, target.lineage)
                    own = await _find(self._parts, target.step, target.lineage)
                    if own is None:
                        raise StorageError("this worker did not save its own part")
                    parts.append(self._files_here(own))
                else:
                    request = FilesRequest(self._job, target.step, target.lineage, index, self._stage.count)
                    parts.append(await self._request_files(stack, member, request))
            return await self._write(self.whole, target.step, of_the_whole(parts[0].meta), parts)

    def _files_here(self, entry: CheckpointEntry) -> _StageFiles:
        """This stage's files of a checkpoint on the own disk."""
        meta, files = part_of(entry, self._stage.index, self._stage.count)

        async def pieces(name: str, size_bytes: int) -> AsyncIterator[bytes]:
            for start, stop in _ranges(size_bytes):
                yield await self._parts.at_disk(partial(self._parts.disk.read_range, entry.path / name, start, stop))

        return _StageFiles(meta, files, pieces, str(entry.path))

    async def _request_files(self, stack: AsyncExitStack, member: MemberRecord, request: FilesRequest) -> _StageFiles:
        """Ask a member for its files. They can be read while ``stack`` is open. Raises ``P2PTrainError``."""
        context = self._context
        hello = context.hello("files", self._job)
        connection, _ = await context.dial(member.peer_id, member.host, member.port, hello)
        source = PieceSource(member.peer_id, member.name, Line(connection))
        receiver: Receiver[PieceSource] = Receiver(_unverified)
        offer = source.line.new_waiter()

        def heard(message: Message) -> None:
            if not isinstance(message, FilesOffer) or offer.done():
                raise ProtocolError(f"unexpected message {type(message).__name__} from a sender of files")
            offer.set_result(message)

        await stack.enter_async_context(receiver.attached(source, heard))
        connection.send(request)
        reply: FilesOffer = await source.line.wait_for(offer)
        if reply.reason:
            text = f"{member.name} cannot send the files of part {request.stage}: {shortened(reply.reason)}"
            raise ProtocolError(text)
        meta, files = parse_offer_untrusted(reply.manifest, request)

        async def pieces(name: str, size_bytes: int) -> AsyncIterator[bytearray]:
            for start, stop in _ranges(size_bytes):
                data = bytearray(stop - start)
                receiver.want((name, start), TransferPiece(name, start, stop, memoryview(data)))
                await receiver.fetch([(name, start)])
                yield data

        return _StageFiles(meta, files, pieces, member.name)

    async def _write(
        self, into: CheckpointFiles, step: int, meta: Meta, parts: Sequence[_StageFiles]
    ) -> CheckpointEntry:
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
                        self._on_progress()
                    if await into.at_disk(draft.end) != (size_bytes, digest):
                        raise StorageError(f"{name} of {part.owner} does not match its manifest")
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
            await self.whole.go_back(restore_step)
        mine, wholes = await self._parts.entries(), await self.whole.entries()
        for entry in wholes:
            announce(self._context, self._job, entry, self.whole.held)
        if restore_step == 0 or (restore_step > 0 and await self._has_part(restore_step, lineage)):
            return
        newest = mine[0].step if mine else 0
        for entry in wholes:
            is_wanted = entry.step > newest
            if restore_step > 0:
                is_wanted = entry.step == restore_step and lineage in ("", entry.meta.get(LINEAGE))
            if is_wanted and await self._extract(str(entry.path), self._extract_here(entry)):
                return
        for holder in holders if restore_step > 0 else ():
            if holder.peer_id == self._context.peer_id:
                continue
            if await self._extract(holder.name, self._extract_there(holder, restore_step, lineage)):
                return

    async def _has_part(self, step: int, lineage: str) -> bool:
        try:
            entry = await self._parts.find(step)
            return entry is not None and lineage in ("", entry.meta.get(LINEAGE))
        except StorageError:
            return False  # it is damaged: an extracted one replaces it

    async def _extract(self, origin: str, extraction: Coroutine[Any, Any, CheckpointEntry]) -> bool:
        try:
            entry = await extraction
        except P2PTrainError as problem:
            text = f"cannot take the files of {self._stage} from {origin}: {problem.message}"
            self._context.notify("warning", "not-taken", text)
            return False
        self._context.notify("info", "taken", f"took the files of step {entry.step} of {self._stage} from {origin}")
        return True

    async def _extract_here(self, entry: CheckpointEntry) -> CheckpointEntry:
        part = self._files_here(entry)
        return await self._write(self._parts, entry.step, part.meta, [part])

    async def _extract_there(self, holder: MemberRecord, step: int, lineage: str) -> CheckpointEntry:
        request = FilesRequest(self._job, step, lineage, self._stage.index, self._stage.count)
        async with AsyncExitStack() as stack:
            part = await self._request_files(stack, holder, request)
            return await self._write(self._parts, step, part.meta, [part])


async def _find(files: CheckpointFiles, step: int, lineage: str) -> CheckpointEntry | None:
    entries = await files.entries()
    return next((entry for entry in entries if (entry.step, entry.meta.get(LINEAGE)) == (step, lineage)), None)


async def _unverified(data: memoryview) -> bytes:
    return b""


def parse_offer_untrusted(manifest: bytes, request: FilesRequest) -> tuple[Meta, dict[str, tuple[int, str]]]:
    """Parse the offered meta and files. Raises ``ProtocolError`` if they do not fit the request."""
    step, meta, files = manifest_untrusted(manifest)
    facts = (step, meta.get("job"), meta.get(STAGE), meta.get(STAGES))
    if facts != (request.step, request.job, request.stage, request.stages):
        raise ProtocolError(f"the manifest is not that of step {request.step} of part {request.stage}")
    lineage = meta.get(LINEAGE)
    if not isinstance(lineage, str) or not is_lineage(lineage):
        raise ProtocolError("the manifest has no valid lineage")
    if request.lineage not in ("", lineage):
        raise ProtocolError(f"the manifest has another lineage of step {request.step}")
    if len(files) > 256 or sum(size for size, _ in files.values()) > 1 << 48:
        raise ProtocolError("the manifest lists more files than a part can have")
    is_whole = WEIGHTS_FILE in files  # a shard's rows come from the files of the whole model
    for name in files:
        if name == MANIFEST or not (is_whole or is_of_stage(name, request.stage, request.stages)):
            raise ProtocolError(f"{name[:80]!r} is not a file of part {request.stage}")
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
            text = f"{MAX_RECIPIENTS} workers already fetch checkpoints from this one"
            return Refuse(RefusalCode.BUSY, text, "try again later")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Answer one recipient until it closes. Raises as ``send_range``."""
        line = Line(connection)
        offered: dict[str, tuple[Path, int]] = {}  # name → path and size

        async def read(request: RangeRequest) -> bytes:
            path, size_bytes = offered.get(request.name, (Path(), 0))
            if not 0 <= request.start <= request.stop <= size_bytes:
                text = f"bytes {request.start} to {request.stop} of {request.name[:80]!r} were not offered"
                raise StorageError(text)
            return await self._thread.submit(partial(self._disk.read_range, path, request.start, request.stop))

        self._recipients += 1
        try:
            async with line.keep_alive():
                async for message in line.messages():
                    match message:
                        case FilesRequest() if message.job == hello.job:
                            connection.send(await self._offer(connection, offered, message))
                        case RangeRequest():
                            await send_range(line, message, read)
                        case _:
                            text = f"unexpected message {type(message).__name__}, or one of another job"
                            raise ProtocolError(text)
        finally:
            self._recipients -= 1

    async def _offer(
        self, connection: Connection, offered: dict[str, tuple[Path, int]], request: FilesRequest
    ) -> FilesOffer:
        if not 0 <= request.stage < request.stages <= MAX_STAGES or request.step < 0:
            raise ProtocolError(f"invalid request: step {request.step} of stage {request.stage} of {request.stages}")
        stage = Stage(request.stage, request.stages)
        find = partial(self._find, offered, request, stage)
        try:
            manifest = await self._thread.submit(find)
            if manifest is None:
                await wait_unless_closed(connection, self._saving(request.job, stage, request.step, request.lineage))
                manifest = await self._thread.submit(find)
        except StorageError as problem:
            return FilesOffer(b"", shortened(problem.message))
        if manifest is None:
            return FilesOffer(b"", f"there is no checkpoint of step {request.step} of {stage} here")
        return FilesOffer(manifest)

    def _find(self, offered: dict[str, tuple[Path, int]], request: FilesRequest, stage: Stage) -> bytes | None:
        """Return the manifest of the requested files, which are put into ``offered``. On the disk's thread."""
        for kind in (stage, WHOLE):
            path = checkpoints_dir(self._jobs, request.job, kind) / step_name(request.step)
            if MANIFEST not in self._disk.list_dir(path):
                continue
            entry = read_checkpoint(self._disk, path)
            if request.lineage in ("", entry.meta.get(LINEAGE)):
                meta, files = part_of(entry, stage.index, stage.count)
                manifest = manifest_of(entry.step, meta, files)
                if len(manifest) > 48 << 10:  # it travels in one control frame
                    raise StorageError(f"{entry.path} has too many files for one manifest: {len(files)}")
                offered.clear()
                offered.update({name: (entry.path / name, size) for name, (size, _) in files.items()})
                return manifest
        return None
