"""What a job reads from its workers' disks: the model to begin with, its tokenizer, and the tokens of the text.

A worker that lacks one of them fetches it from other workers of the job (purpose ``input``), by the transfer that
brings a model's tensors (``model_loading``): files are cut into ranges, which come from several senders and are
verified one by one. It is kept in the user's cache directory under a hash of its ranges, so other jobs find it there,
and a fetch that was interrupted goes on. Of the text only its tokens travel. Until a worker can send it, this one
waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path

from configs.schema import Profile
from p2ptrain.core.checkpoints import NOTES
from p2ptrain.core.disk import write_atomic
from p2ptrain.core.errors import DiskFull, NetworkError, P2PTrainError, ProtocolError, StorageError, UserError
from p2ptrain.core.tensor_files import INDEX_FILE
from p2ptrain.core.text_files import STORE_FILES, find_files, is_stdlib
from p2ptrain.core.texts import human_bytes, shortened
from p2ptrain.core.tokenizer_files import TEXT_FILES, TOKENIZER_FILES, vocabulary_size
from roles.line import QUIET_S
from roles.model_directory import (
    ModelDirectory,
    compute_model_id,
    file_of,
    files_untrusted,
    hash_ranges,
    open_files,
)
from roles.worker.context import Context
from roles.worker.model_loading import ModelReceiver, give
from roles.worker.stage_requests import printable
from wire.chain_messages import TensorRecord, TensorsPage, TensorsRequest
from wire.connection import Connection
from wire.job_messages import RANGE_BYTES
from wire.messages import Hello, RefusalCode, Refuse

TEXT = "data.path"
INPUTS = ("model.path", "model.tokenizer", TEXT)
"""Settings that name what a worker may lack."""
MODEL_FILES = frozenset({*TEXT_FILES, INDEX_FILE, NOTES})
_WEIGHTS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.safetensors")  # other formats are not safe to read
PLACES_FILE, MAX_PLACES_BYTES = "inputs.json", 1 << 16
MAX_RECIPIENTS = 8
FileRanges = Mapping[str, list[TensorRecord]]
"""By file name, the records of its ranges, in order."""
RETRY_S = 2.0
"""Between two attempts to find a worker that has what is missing."""
FIRST_PAUSE_S, MOST_PAUSE_S = 15.0, 300.0
"""Between two notices that it is missing; each pause is twice as long as the one before."""


class JobInputs:
    """A job's inputs at one worker.

    Args:
        directory: the worker's own of this job.

    Attributes:
        progress: of a fetch, for people; empty: there is none.
    """

    def __init__(self, context: Context, job: str, directory: Path) -> None:
        self._context, self._job = context, job
        self._disk, self._places_file = context.world.disk, directory / PLACES_FILE
        # Reads, writes and hashes; apart from the one of checkpoints, because it takes long.
        self._thread = context.world.threads.start("inputs of the job")
        self._sources: Mapping[str, Path] = {}  # what this worker can send
        self._opened: dict[str, asyncio.Future[ModelDirectory]] = {}
        self._recipients = 0
        self._most_bps = 0.0
        self.progress = ""

    def close(self) -> None:
        self._sources = {}
        self._thread.close()

    # ------------------------------------------------------------------------------------------------------- fetching

    async def bring(self, profile: Profile) -> Profile:
        """The profile with the places of its inputs on this machine. Fetches what is missing; waits for a worker that
        has it. Raises ``StorageError`` if it cannot be written here."""
        self._most_bps = 1e6 * profile.data.share_mbps
        for key in INPUTS:
            value = profile.value(key)
            if not value or not _is_shared(profile, key):
                continue
            missing = await self._thread.submit(partial(_find_missing, profile, key))
            if missing:
                table, _, name = key.partition(".")
                place = str(await self._find_or_fetch(key, value, missing))
                changed = getattr(profile, table).model_copy(update={name: place})
                profile = profile.model_copy(update={table: changed})
        return profile

    def serve_from(self, profile: Profile, store: Path | None) -> None:
        """Send from now on what ``profile``, after ``bring``, names. ``store``: the tokens of its text."""
        places = {key: Path(profile.value(key)) for key in INPUTS[:2] if profile.value(key)}
        if store is not None:
            places[TEXT] = store
        self._sources = {key: place for key, place in places.items() if _is_shared(profile, key)}

    async def _find_or_fetch(self, key: str, value: str, missing: str) -> Path:
        places = await self._thread.submit(self._read_places)
        if (known := places.get(key)) is not None and known[0] == value and self._disk.is_dir(Path(known[1])):
            return _named(Path(known[1]), value)
        notice_at, pause_s = 0.0, FIRST_PAUSE_S
        while True:
            try:
                found = await self._fetch(key, value)
                break
            except StorageError as problem:
                problem.remedy = (
                    "free some space, remove what is there with `p2ptrain data clean`, or set XDG_CACHE_HOME"
                )
                raise
            except P2PTrainError as problem:
                if (now := self._context.world.clock.now()) >= notice_at:
                    notice_at, pause_s = now + pause_s, min(2 * pause_s, MOST_PAUSE_S)
                    text = (
                        f"{missing}; waiting for another worker of the job that has it ({shortened(problem.message)})"
                    )
                    self._context.notify("warning", "waiting", text)
            finally:
                self.progress = ""
            await asyncio.sleep(RETRY_S)
        places[key] = [value, str(found)]
        await self._thread.submit(partial(self._disk.make_dir, self._places_file.parent))
        await self._thread.submit(partial(write_atomic, self._disk, self._places_file, json.dumps(places).encode()))
        return _named(found, value)

    def _read_places(self) -> dict[str, list[str]]:
        """By setting: its value, and the directory of what was fetched."""
        with suppress(StorageError, ValueError):
            return dict(json.loads(self._disk.read(self._places_file, max_bytes=MAX_PLACES_BYTES)))
        return {}

    async def _fetch(self, key: str, value: str) -> Path:
        context, problems = self._context, list[str]()
        receiver = ModelReceiver(key, self._thread)
        async with AsyncExitStack() as stack:
            for member in await context.ask_members():
                hello = context.hello("input", self._job, capabilities={"input": key})
                try:
                    connection, welcome = await context.dial(member.peer_id, member.host, member.port, hello)
                except P2PTrainError as problem:
                    problems.append(f"{member.name}: {problem.message}")
                else:
                    await stack.enter_async_context(receiver.taking(connection, printable(welcome.name)))
            if not receiver.sources:
                raise NetworkError("; ".join(problems) or "no other worker is on it")
            return await self._receive(key, value, receiver)

    async def _receive(self, key: str, value: str, receiver: ModelReceiver) -> Path:
        records = await receiver.common_table()
        files = files_untrusted(records.values())
        own = Path(value).name if key == "model.tokenizer" else ""  # a file may have any name
        if unknown := [name for name in files if not _is_needed(key, name) and name != own]:
            raise ProtocolError(f"a worker offers {unknown[0]!r} as a file of {key}")
        kept = await self._thread.submit(self._context.inputs_dir)
        place = kept / compute_model_id("", records.values())
        draft, began, sources = place.with_suffix(".part"), self._context.world.clock.now(), receiver.sources
        await self._thread.submit(partial(self._disk.make_dir, kept))
        lock = await self._thread.submit(partial(self._disk.try_lock, place.with_suffix(".lock")))
        if lock is None:
            raise NetworkError(f"another process of this machine fetches it to {place}")
        with ExitStack() as held:
            held.callback(self._thread.submit, lock.close)  # after a write that is not waited for any more
            if self._disk.is_dir(place):
                return place
            wanted = await self._thread.submit(partial(self._begin, draft, files))
            received_bytes, missing_bytes = 0, sum(record.size_bytes for record in wanted)
            more = {"ahead_bytes": 0} if self._most_bps else {}
            async for record, data in receiver.tensors(wanted, **more):
                file = draft / file_of(record)
                await self._thread.submit(partial(self._disk.append_file, file, memoryview(data)))
                received_bytes += len(data)
                if self._most_bps:
                    await asyncio.sleep(began + 8 * received_bytes / self._most_bps - self._context.world.clock.now())
                share = received_bytes / max(missing_bytes, 1)  # 0: of an empty file with a false digest
                self.progress = f"fetching {key}: {share:.0%} of {human_bytes(missing_bytes)}"
            await self._thread.submit(partial(self._publish, draft, place, files))
        took_s = self._context.world.clock.now() - began
        text = f"fetched {key}: {human_bytes(received_bytes)} from {', '.join(sources)} in {took_s:.1f} s"
        self._context.notify("info", "fetched", text)
        return place

    def _begin(self, draft: Path, files: FileRanges) -> list[TensorRecord]:
        """Keep what an earlier fetch brought. Returns what is missing. Raises ``DiskFull`` before anything is asked."""
        self._disk.make_dir(draft)
        wanted = list[TensorRecord]()
        for name, records in files.items():
            self._disk.append_file(draft / name, b"")
            self._disk.set_mode(draft / name, 0o600)
            size_bytes, held = self._disk.size(draft / name), 0
            for number, record in enumerate(records):
                start = number * RANGE_BYTES
                if start + record.size_bytes > size_bytes:
                    break
                if hash_ranges(self._disk.read_range(draft / name, start, start + record.size_bytes)) != record.digest:
                    break
                held += 1
            self._disk.truncate(draft / name, sum(record.size_bytes for record in records[:held]))
            wanted += records[held:]
        need_bytes, free_bytes = sum(record.size_bytes for record in wanted), self._disk.free_bytes(draft)
        if need_bytes > free_bytes:
            need, free = human_bytes(need_bytes), human_bytes(free_bytes)
            raise DiskFull(f"what the job reads needs {need} more, and {draft.parent} has {free} free")
        return wanted

    def _publish(self, draft: Path, place: Path, files: FileRanges) -> None:
        for name in files:
            self._disk.sync_file(draft / name)
        self._disk.sync_dir(draft)
        self._disk.rename(draft, place)

    # -------------------------------------------------------------------------------------------------------- sending

    def decide(self, hello: Hello) -> Refuse | None:
        """Decide on a worker that asks for an input."""
        key = str(hello.capabilities.get("input", ""))
        if key not in INPUTS:
            return Refuse(RefusalCode.PROTOCOL, f"a job has no input {key[:40]!r}")
        if self._recipients >= MAX_RECIPIENTS:
            return Refuse(RefusalCode.BUSY, f"{MAX_RECIPIENTS} workers already fetch from this one")
        return None

    def _open(self, key: str) -> ModelDirectory | str:
        """What is sent; or why not now. Its files are hashed at the first call."""
        if key not in self._sources:
            return f"it does not have {key} yet, or does not send it"
        if key not in self._opened:
            self._opened[key] = self._thread.submit(partial(_open_input, self._sources[key], key))
        opened = self._opened[key]
        if not opened.done():
            return f"it is reading its files of {key}"
        if (problem := opened.exception()) is not None:
            del self._opened[key]
            return f"it cannot send {key}: {problem}"
        return opened.result()

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Send an input until the recipient closes. Raises as ``give``."""
        opened = self._open(str(hello.capabilities["input"]))
        if isinstance(opened, str):
            await connection.expect(TensorsRequest, timeout_s=QUIET_S)
            connection.send(TensorsPage(0, [], shortened(opened)))
            await connection.receive(timeout_s=QUIET_S)  # it closes, and has read the reason
            return
        self._recipients += 1
        try:
            sent_bytes = await give(connection, opened, self._thread, is_open=lambda: bool(self._sources))
        finally:
            self._recipients -= 1
        if sent_bytes:
            text = f"sent {human_bytes(sent_bytes)} of {opened.model} to {printable(hello.name)}"
            self._context.notify_here("info", "gave", text)


def _is_shared(profile: Profile, key: str) -> bool:
    is_everywhere = key == TEXT and is_stdlib(profile.data.path)
    return profile.data.share and not is_everywhere and not (key == TEXT and profile.data.private)


def _find_missing(profile: Profile, key: str) -> str:
    """Why an input cannot be read on this machine; empty: it is here. Reads no file."""
    value = profile.value(key)
    if key != TEXT:
        return "" if os.path.exists(value) else f"{key} = {value!r} is not on this machine"
    try:
        find_files(value, profile.data.format)
    except UserError as problem:
        return problem.with_remedy
    return ""


def _open_input(place: Path, key: str) -> ModelDirectory:
    if place.is_file():
        vocabulary_size(place)  # a job may name any file: only one that is a tokenizer leaves this machine
    return open_files(place, key, partial(_is_needed, key))


def _named(place: Path, value: str) -> Path:
    """The directory that was fetched; or its file, if the setting names a file of that name."""
    return place / Path(value).name if os.path.isfile(place / Path(value).name) else place


def _is_needed(key: str, name: str) -> bool:
    """Whether a file of this name belongs to what the setting names. Other files of its directory are not sent."""
    if key == "model.path":
        return name in MODEL_FILES or _WEIGHTS.fullmatch(name) is not None
    return name in (STORE_FILES if key == TEXT else TOKENIZER_FILES)
