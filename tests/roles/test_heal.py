"""Healing: a state fetched chunk by chunk into its place, verified, from donors that may lie, stall or die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import NetworkError, P2PTrainError
from p2ptrain.core.training import Blob
from p2ptrain.core.world import LoopClock, World
from ring.view import View
from roles.worker import heal
from wire.connection import Connection
from wire.handshake import local_welcome, serve
from wire.memory import MemoryNetwork
from wire.messages import BlobRecord, ChunkDigest, ChunkRequest, HealOffer, HealRequest, Hello, MemberRecord, Welcome

LINEAGE = "ab" * 16
Donor = Callable[[Connection], Awaitable[None]]


def world() -> World:
    return World(LoopClock(), MemoryNetwork(), RealDisk(), random.Random(1))


def state(seed: int | None, numel: int = 700_001) -> list[Blob]:
    """Two blobs of several chunks; zeros where there is no seed."""
    values = [np.zeros(numel, np.float32), np.zeros(3, np.float32)]
    if seed is not None:
        values = [np.random.default_rng(seed).standard_normal(value.size).astype(np.float32) for value in values]
    return [Blob(name, value.view(np.uint8).data) for name, value in zip("ab", values, strict=True)]


def view_of(*ports: int) -> View:
    members = [MemberRecord(f"donor{port}", f"donor-{port}", "d", port, 0, 0, True) for port in ports]
    members.append(MemberRecord("me", "me", "", 9, 0, 0, False))
    return View("job", 3, 7, LINEAGE, tuple(members))


@asynccontextmanager
async def donors(world: World, **behaviours: Donor) -> AsyncIterator[list[P2PTrainError]]:
    """Donors that listen on ports 1, 2, ...; yields what their servers complained of."""
    problems: list[P2PTrainError] = []

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id="donor", name="donor", wall=0.0)

    servers = []
    for port, behaviour in enumerate(behaviours.values(), start=1):

        async def give(connection: Connection, hello: Hello, behaviour: Donor = behaviour) -> None:
            await behaviour(connection)

        servers.append(
            await serve(world.network, "d", port, decide=decide, serve=give, on_problem=lambda e, _: problems.append(e))
        )
    yield problems
    for server in servers:
        await server.close()


def honest(source: list[Blob]) -> Donor:
    return lambda connection: heal.give(connection, source, view_of(1))


async def fetch(world: World, view: View, target: list[Blob]) -> str:
    return await heal.fetch(
        world, view, target, peer_id="me", name="me", seed_host="seed", on_progress=lambda done, total: None
    )


def same(left: list[Blob], right: list[Blob]) -> bool:
    return all(bytes(a.view) == bytes(b.view) for a, b in zip(left, right, strict=True))


async def test_the_state_arrives_bit_by_bit_and_progress_ends_at_the_whole() -> None:
    here, source, target = world(), state(1), state(None)
    seen: list[tuple[int, int]] = []
    async with donors(here, a=honest(source)) as problems:
        name = await heal.fetch(
            here,
            view_of(1),
            target,
            peer_id="me",
            name="me",
            seed_host="seed",
            on_progress=lambda *far: seen.append(far),
        )
    assert name == "donor-1"
    assert same(source, target)
    total = sum(blob.view.nbytes for blob in source)
    assert seen[-1] == (total, total)
    assert problems == []


@pytest.mark.parametrize(
    "what", ["dies", "is_elsewhere", "has_another_model", "corrupts", "speaks_nonsense", "gives_no_chunks"]
)
async def test_a_donor_that_fails_is_followed_by_the_next(what: str) -> None:
    here, source, target = world(), state(1), state(None)

    async def dies(connection: Connection) -> None:
        await connection.expect(HealRequest, timeout_s=5)
        connection.send(HealOffer(7, LINEAGE, [BlobRecord(b.name, b.view.nbytes) for b in source], heal.CHUNK_BYTES))
        await connection.expect(ChunkRequest, timeout_s=5)
        connection.abort()

    async def is_elsewhere(connection: Connection) -> None:
        await heal.give(connection, source, replace(view_of(1), step=8))

    async def has_another_model(connection: Connection) -> None:
        await heal.give(connection, state(1, numel=10), view_of(1))

    async def corrupts(connection: Connection) -> None:
        await connection.expect(HealRequest, timeout_s=5)
        connection.send(HealOffer(7, LINEAGE, [BlobRecord(b.name, b.view.nbytes) for b in source], heal.CHUNK_BYTES))
        while True:
            wanted = await connection.expect(ChunkRequest, timeout_s=5)
            bad = memoryview(bytearray(wanted.size_bytes))
            connection.send(ChunkDigest(wanted.stream, xxhash.xxh3_128_digest(b"something else")))
            connection.send_bulk(bad, generation=3, stream=wanted.stream)
            await connection.flush(timeout_s=5)

    async def speaks_nonsense(connection: Connection) -> None:
        await connection.expect(HealRequest, timeout_s=5)
        connection.send(ChunkDigest(99, b"?"))
        await connection.flush(timeout_s=5)

    async def gives_no_chunks(connection: Connection) -> None:
        await connection.expect(HealRequest, timeout_s=5)
        connection.send(HealOffer(7, LINEAGE, [BlobRecord(b.name, b.view.nbytes) for b in source], -1))
        await connection.flush(timeout_s=5)

    async with donors(here, bad=locals()[what], good=honest(source)):
        assert await fetch(here, view_of(1, 2), target) == "donor-2"
    assert same(source, target)


async def test_without_a_donor_the_error_names_what_each_one_said() -> None:
    here = world()
    with pytest.raises(NetworkError, match=r"donor-5: .*donor-6: "):
        await fetch(here, view_of(5, 6), state(None))


@pytest.mark.parametrize(
    "wanted",
    [
        ChunkRequest("c", 0, 1, 1),
        ChunkRequest("a", -1, 4, 1),
        ChunkRequest("a", 0, heal.CHUNK_BYTES + 1, 1),
        ChunkRequest("b", 8, 8, 1),
        ChunkRequest("b", 12, 0, 1),
    ],
)
async def test_a_request_beyond_the_state_closes_the_connection(wanted: ChunkRequest) -> None:
    here, source = world(), state(1)
    from wire.handshake import dial, local_hello

    async with donors(here, a=honest(source)) as problems:
        hello = local_hello(peer_id="me", name="me", roles=["worker"], purpose="heal")
        connection, _ = await dial(here.network, "d", 1, hello, timeout_s=5)
        connection.send(HealRequest("job", 7, LINEAGE))
        await connection.expect(HealOffer, timeout_s=5)
        connection.send(wanted)
        async with asyncio.timeout(5):
            await connection.closed.wait()
    assert [problem.message for problem in problems if "asked for" in problem.message]
