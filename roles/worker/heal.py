"""Bringing a member to the others' state: chunks of named blobs, fetched straight into their place, each one verified.

The donor's state stands still while it gives: a healing member is in the ring, and no step commits without its token.
When the view ends, both sides close at once, because then the donor's state may move on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, NetworkError, P2PTrainError, PeerError, ProtocolError
from p2ptrain.core.world import World
from ring.view import View
from roles.engine import Blob
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.messages import BlobRecord, ChunkDigest, ChunkRequest, HealOffer, HealRequest, Refuse

CHUNK_BYTES = 1 << 20
WINDOW = 4  # chunks asked for ahead: the link stays busy for a round trip
ATTEMPTS = 3  # a chunk whose digest is wrong so often condemns the donor
SILENCE_S = 15.0  # the far-peer death interval: a donor that sends nothing for so long is given up


@dataclass(frozen=True, slots=True)
class Chunk:
    blob: Blob
    offset: int
    size_bytes: int

    @property
    def view(self) -> memoryview:
        return self.blob.view[self.offset : self.offset + self.size_bytes]


def chunks_of(blobs: list[Blob], chunk_bytes: int) -> list[Chunk]:
    """All bytes of all blobs, in order, in chunks of at most ``chunk_bytes``."""
    return [
        Chunk(blob, offset, min(chunk_bytes, blob.view.nbytes - offset))
        for blob in blobs
        for offset in range(0, blob.view.nbytes, chunk_bytes)
    ]


# -------------------------------------------------------------------------------------------------------------- donor


async def give(connection: Connection, state: list[Blob], view: View) -> None:
    """Answer one healing member of ``view`` until it closes. ``state``, that of the view's start, must not change."""
    step, lineage, generation = view.step, view.lineage, view.generation
    blobs = {blob.name: blob for blob in state}
    request = await connection.expect(HealRequest, timeout_s=SILENCE_S)
    if (request.step, request.lineage) != (step, lineage):
        connection.send(
            Refuse("not-here", f"this member stands at step {step}, not at {request.step} with the lineage asked for")
        )
        await connection.flush(timeout_s=SILENCE_S)
        return
    records = [BlobRecord(blob.name, blob.view.nbytes) for blob in state]
    connection.send(HealOffer(step, lineage, records, CHUNK_BYTES), generation=generation)
    while True:
        try:
            wanted = await connection.expect(ChunkRequest, timeout_s=SILENCE_S)
        except ConnectionLost:
            return  # it has all it needs, or is gone
        chunk = _checked(wanted, blobs)
        connection.send(ChunkDigest(wanted.stream, xxhash.xxh3_128_digest(chunk)), generation=generation)
        connection.send_bulk(chunk, generation=generation, stream=wanted.stream)
        await connection.flush(timeout_s=SILENCE_S)


def _checked(wanted: ChunkRequest, blobs: dict[str, Blob]) -> memoryview:
    blob = blobs.get(wanted.blob)
    if blob is None:
        raise ProtocolError(f"asked for a blob {wanted.blob[:80]!r} that there is not")
    end = wanted.offset + wanted.size_bytes
    if not (0 <= wanted.offset < end <= blob.view.nbytes and wanted.size_bytes <= CHUNK_BYTES):
        raise ProtocolError(f"asked for bytes {wanted.offset} to {end} of {wanted.blob}, which has {blob.view.nbytes}")
    return blob.view[wanted.offset : end]


# ------------------------------------------------------------------------------------------------------------- healer


async def fetch(
    world: World,
    view: View,
    state: list[Blob],
    *,
    peer_id: str,
    name: str,
    seed_host: str,
    on_progress: Callable[[int, int], None],
) -> str:
    """Overwrite ``state`` with that of ``view.step`` from the first donor that can give it; gives the donor's name.

    Args:
        on_progress: called with (bytes done, bytes in all) after every chunk.

    Raises:
        NetworkError: no donor could give it; the message names what each one said.
    """
    problems = []
    for donor in view.donors():
        if donor.peer_id == peer_id:
            continue
        try:
            hello = local_hello(
                peer_id=peer_id, name=name, roles=["worker"], purpose="heal", job=view.job, generation=view.generation
            )
            host = donor.host or seed_host
            connection, _ = await dial(
                world.network, host, donor.port, hello, timeout_s=SILENCE_S, expect_peer=donor.peer_id
            )
            try:
                await _fetch_from(connection, view, state, on_progress)
                return donor.name
            finally:
                await connection.close()
        except (PeerError, NetworkError) as problem:
            problems.append(f"{donor.name}: {problem.message}")
    raise NetworkError("no member could give the state: " + ("; ".join(problems) or "the view names no donor"))


async def _fetch_from(
    connection: Connection, view: View, state: list[Blob], on_progress: Callable[[int, int], None]
) -> None:
    connection.send(HealRequest(view.job, view.step, view.lineage), generation=view.generation)
    offer = await connection.expect(HealOffer, timeout_s=SILENCE_S)
    mine = [(blob.name, blob.view.nbytes) for blob in state]
    if [(record.name, record.size_bytes) for record in offer.blobs] != mine:
        raise ProtocolError("its state has other parts or sizes than this model's")
    if offer.chunk_bytes != CHUNK_BYTES:
        raise ProtocolError(f"it gives chunks of {offer.chunk_bytes} bytes, this version takes {CHUNK_BYTES}")
    total = sum(size for _, size in mine)
    waiting = deque((chunk, 1) for chunk in chunks_of(state, CHUNK_BYTES))
    under_way: dict[int, tuple[Chunk, int, asyncio.Event]] = {}
    stream, done_bytes = 0, 0
    while waiting or under_way:
        while waiting and len(under_way) < WINDOW:
            chunk, attempt = waiting.popleft()
            stream += 1
            arrived = asyncio.Event()
            under_way[stream] = (chunk, attempt, arrived)
            connection.post(chunk.view, generation=view.generation, stream=stream, done=arrived.set)
            wanted = ChunkRequest(chunk.blob.name, chunk.offset, chunk.size_bytes, stream)
            connection.send(wanted, generation=view.generation)
        answer = await connection.expect(ChunkDigest, timeout_s=SILENCE_S)
        if answer.stream not in under_way:
            raise ProtocolError(f"it announced a chunk {answer.stream} that was not asked for")
        chunk, attempt, arrived = under_way.pop(answer.stream)
        await _arrival(connection, arrived)
        if xxhash.xxh3_128_digest(chunk.view) == answer.digest:
            done_bytes += chunk.size_bytes
            on_progress(done_bytes, total)
        elif attempt < ATTEMPTS:
            waiting.append((chunk, attempt + 1))
        else:
            raise ProtocolError(f"a chunk of {chunk.blob.name} arrived damaged {ATTEMPTS} times")


async def _arrival(connection: Connection, arrived: asyncio.Event) -> None:
    """Wait for a posted chunk; a donor that closes, or sends nothing, ends the wait."""
    waiters = [asyncio.ensure_future(arrived.wait()), asyncio.ensure_future(connection.closed.wait())]
    try:
        await asyncio.wait(waiters, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
    if arrived.is_set():
        return
    if connection.closed.is_set():
        raise connection.close_cause or ConnectionLost("the donor closed the connection in the middle of a chunk")
    problem: P2PTrainError = DeadlineExceeded(f"the donor sent nothing for {SILENCE_S:.0f} s")
    connection.abort(problem)
    raise problem
