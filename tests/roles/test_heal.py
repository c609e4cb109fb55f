"""Healing within a view: several sources at once, whatever they do; and what a source refuses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.core.errors import NetworkError
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine
from ring import member_events as ev
from roles.snapshots import CHUNK_BYTES, state_bytes
from roles.worker.heal import FetchResult, Healer
from roles.worker.transfer import WINDOW
from tests.roles.heal_doubles import (
    FIRST,
    JOB,
    Ring,
    Serve,
    another_state,
    around_of,
    changes,
    dies_after,
    engine_of,
    flip_bit,
    gives_once_all_have_offered,
    goes_silent,
    has_another_model,
    is_silent,
    offers_nothing,
    ring_of,
    speaks_nonsense,
    stands_elsewhere,
)
from wire.handshake import dial, local_hello
from wire.job_messages import HealOffer, HealRequest, RangeRequest
from wire.transport import TcpNetwork

SILENCE_S = 2.0  # on a LAN
NUMEL = 700_001  # two blobs of three chunks each
FRAMES_BYTES = 64 << 10  # of requests, answers and headers, at most


def healer_of(ring: Ring, have: tuple[int, str] | None = None) -> Healer:
    applied, lineage = have or (0, "")
    core: Any = SimpleNamespace(job=JOB, applied=applied, lineage=lineage, torn=have is None)
    return Healer(around_of(ring.world, ring.told), core, progress=lambda: None)


async def heal(ring: Ring, engine: StandInEngine, *, have: tuple[int, str] | None = None) -> FetchResult:
    """Bring ``engine`` to where the ring's view begins, as a member of it."""
    return await healer_of(ring, have).within(ev.Heal(1, ring.view, torn=have is None), engine)


def blank(numel: int = NUMEL) -> StandInEngine:
    return StandInEngine(engine_of(1)._profile, numel=numel)


def sent_bytes(ring: Ring) -> int:
    return sum(member.served[0].bytes_out for member in ring.members if member.served)


def networks() -> dict[str, Callable[[], Network]]:
    return {"memory": MemoryNetwork, "tcp": TcpNetwork}


@pytest.mark.parametrize("network", networks())
async def test_the_state_arrives_bit_by_bit_from_all_sources(network: str) -> None:
    behaviour = dict.fromkeys(range(3), gives_once_all_have_offered(3))
    async with ring_of(networks()[network](), 3, numel=5_000_001, behaviour=behaviour, host="127.0.0.1") as ring:
        target = blank(5_000_001)
        done = await heal(ring, target)
    assert {target.state.digest()} == ring.digests()
    assert len(done.bytes_by_source) == 3
    assert done.size_bytes == ring.members[0].heal_source.state_bytes
    assert ring.problems == []


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "bad",
    [
        dies_after(0),
        dies_after(1),
        changes(flip_bit),
        another_state,
        is_silent,
        offers_nothing,
        goes_silent,
        speaks_nonsense,
        has_another_model,
        stands_elsewhere,
    ],
)
async def test_a_source_that_fails_is_done_without(bad: Serve) -> None:
    async with ring_of(MemoryNetwork(), 3, behaviour={1: bad}) as ring, asyncio.timeout(60.0):
        target = blank()
        done = await heal(ring, target)
        assert target.state.digest() == ring.members[0].engine.state.digest() == ring.members[2].engine.state.digest()
        assert ("source-1" in done.problems) == (bad not in (is_silent, offers_nothing))  # which are not waited for


@pytest.mark.virtual_time
async def test_a_source_whose_chunks_are_wrong_is_named_and_its_chunks_come_from_others() -> None:
    async with ring_of(MemoryNetwork(), 2, behaviour={0: changes(flip_bit)}) as ring:
        target = blank()
        done = await heal(ring, target)
        assert target.state.digest() == ring.members[1].engine.state.digest()
        assert "another digest" in done.problems["source-0"] or "table" in done.problems["source-0"]
        assert "source-0" in str(done)


@pytest.mark.virtual_time
@pytest.mark.parametrize("odd", range(3))
async def test_most_sources_are_believed_where_their_tables_differ(odd: int) -> None:
    async with ring_of(MemoryNetwork(), 3, behaviour={odd: another_state}) as ring:
        target = blank()
        done = await heal(ring, target)
        assert target.state.digest() == ring.members[(odd + 1) % 3].engine.state.digest()
        assert "differs" in done.problems[f"source-{odd}"]


@pytest.mark.parametrize("run", range(16))
def test_a_source_is_killed_at_any_byte_and_little_comes_twice(run: int) -> None:
    chance = random.Random(run)

    async def play() -> None:
        async with ring_of(MemoryNetwork(pipe_bytes=chance.choice([4 << 10, 256 << 10])), 3) as ring:
            target = blank()
            healer = healer_of(ring)
            fetch = await healer.fetch(
                HealRequest(JOB, 0, FIRST, SILENCE_S), 3, ring.records, target, on_torn=lambda: None
            )
            size_bytes = state_bytes(fetch.layout.blobs)
            kill_at = chance.randrange(1, size_bytes)
            victim = chance.choice(ring.members)

            async with fetch.running():
                whole = asyncio.create_task(fetch.state())
                while not whole.done() and sent_bytes(ring) < kill_at:  # noqa: ASYNC110 - a turn moves some bytes
                    await asyncio.sleep(0)
                victim.die()
                await whole
            assert target.state.digest() == ring.members[0].engine.state.digest()
            assert size_bytes <= sent_bytes(ring) <= size_bytes + WINDOW * CHUNK_BYTES + FRAMES_BYTES

    asyncio.run(play())


@pytest.mark.virtual_time
async def test_without_a_source_the_error_names_what_each_one_said() -> None:
    async with ring_of(MemoryNetwork(), 2, behaviour={0: has_another_model, 1: speaks_nonsense}) as ring:
        with pytest.raises(NetworkError, match=r"source-0: .*source-1: |source-1: .*source-0: "):
            await heal(ring, blank())


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (RangeRequest("parameters", -1, 1, 1), "invalid range"),
        (RangeRequest("parameters", 4 * NUMEL - 1, 4 * NUMEL + 1, 1), "were requested, but it has"),
        (RangeRequest("parameters", 0, CHUNK_BYTES + 1, 1), "the limit is"),
        (RangeRequest("something", 0, 1, 1), "the state has no 'something'"),
        (HealRequest(JOB, 0, FIRST, SILENCE_S), "HealRequest"),
    ],
)
async def test_a_request_beyond_the_state_closes_the_connection(wanted: RangeRequest | HealRequest, said: str) -> None:
    async with ring_of(MemoryNetwork(), 1) as ring:
        hello = local_hello(peer_id="me", name="me", roles=["worker"], purpose="heal", job=JOB, generation=3)
        connection, _ = await dial(ring.world.network, "d", ring.records[0].port, hello, timeout_s=5)
        connection.send(HealRequest(JOB, 0, FIRST, SILENCE_S))
        await connection.expect(HealOffer, timeout_s=5)
        connection.send(wanted)
        async with asyncio.timeout(5):
            while not ring.problems:  # noqa: ASYNC110 - the connection is closed a turn before
                await asyncio.sleep(0.001)
        assert connection.closed.is_set()
    assert any(said in problem.message for problem in ring.problems)


async def test_a_state_that_was_not_offered_is_not_given() -> None:
    async with ring_of(MemoryNetwork(), 1) as ring:
        hello = local_hello(peer_id="stranger", name="s", roles=["worker"], purpose="heal", job=JOB, generation=3)
        connection, _ = await dial(ring.world.network, "d", ring.records[0].port, hello, timeout_s=5)
        connection.send(HealRequest(JOB, 0, FIRST, SILENCE_S))  # the live state is for members alone
        async with asyncio.timeout(5):
            await connection.closed.wait()
        connection, _ = await dial(ring.world.network, "d", ring.records[0].port, hello, timeout_s=5)
        connection.send(HealRequest(JOB, -1, "", SILENCE_S, 0, FIRST))
        await connection.expect(HealOffer, timeout_s=5)
        connection.send(RangeRequest("parameters", 0, 1, 1))
        async with asyncio.timeout(5):
            while len(ring.problems) < 2:  # noqa: ASYNC110 - the connection is closed a turn before
                await asyncio.sleep(0.001)
        assert connection.closed.is_set()
    assert [problem.message for problem in ring.problems if "not offered" in problem.message]
