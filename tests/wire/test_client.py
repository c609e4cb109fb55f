"""The operator's client against a seed that answers as each test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, Refused, UserError
from p2ptrain.core.world import Network
from tests.wire.doubles import in_memory, on_every_stage
from wire.address import parse_address
from wire.client import MAX_UPDATES, SILENCE_S, SeedClient
from wire.connection import Connection
from wire.handshake import local_welcome, serve
from wire.messages import Hello, Request, Response, Update, Welcome

Answer = Callable[[Connection, Request], Awaitable[None]]


async def echo(connection: Connection, request: Request) -> None:
    connection.send(Response(request.id, {"method": request.method, "params": request.params}))


@asynccontextmanager
async def operator(
    network: Network, answer: Answer = echo
) -> AsyncIterator[tuple[SeedClient, Connection, list[Hello]]]:
    """A connected client, the seed's end of its connection, and the hellos that the seed saw."""
    ends: asyncio.Queue[Connection] = asyncio.Queue()
    hellos: list[Hello] = []

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        hellos.append(hello)
        return local_welcome(peer_id="b2", name="seed", wall=1.0, cluster_id="c1")

    async def answer_all(connection: Connection, hello: Hello) -> None:
        ends.put_nowait(connection)
        while True:
            await answer(connection, await connection.expect(Request, timeout_s=3600))

    server = await serve(
        network, "127.0.0.1", 0, decide=decide, serve=answer_all, on_problem=lambda error, remote: None
    )
    client = await SeedClient.connect(network, *server.address, name="op", peer_id="a1")
    try:
        yield client, await ends.get(), hellos
    finally:
        await client.close()
        await server.close()


async def failure(of: Awaitable[object]) -> P2PTrainError:
    with pytest.raises(P2PTrainError) as caught:
        await of
    return caught.value


async def drain(client: SeedClient) -> tuple[list[Update], P2PTrainError]:
    seen: list[Update] = []
    try:
        async for update in client.updates():
            seen.append(update)  # noqa: PERF401 - a comprehension would lose them at the end, which is an exception
    except ConnectionLost as end:
        return seen, end
    pytest.fail("updates end by raising")


# ------------------------------------------------------------------------------------------------------------- requests


@on_every_stage
async def test_ask_and_be_answered(network: Network) -> None:
    async with operator(network) as (client, _, hellos):
        assert client.welcome.cluster_id == "c1"
        assert (hellos[0].purpose, hellos[0].name, hellos[0].roles) == ("operator", "op", [])
        assert await client.request("peers.list") == {"method": "peers.list", "params": {}}
        assert await client.request("jobs.show", {"job": "j"}) == {"method": "jobs.show", "params": {"job": "j"}}


@on_every_stage
async def test_requests_overlap_and_are_answered_in_any_order(network: Network) -> None:
    held: list[Request] = []

    async def backwards(connection: Connection, request: Request) -> None:
        held.append(request)
        if len(held) == 3:
            for each in reversed(held):
                connection.send(Response(each.id, {"was": each.method}))

    async with operator(network, backwards) as (client, _, _):
        answers = await asyncio.gather(*[client.request(method) for method in "abc"])
        assert answers == [{"was": method} for method in "abc"]


@on_every_stage
async def test_an_error_is_a_refusal(network: Network) -> None:
    async def refuse(connection: Connection, request: Request) -> None:
        connection.send(Response(request.id, {}, "no-such-job", "there is no job 'x'", "see p2ptrain jobs"))

    async with operator(network, refuse) as (client, _, _):
        error = await failure(client.request("jobs.show", {"job": "x"}))
        assert isinstance(error, Refused)
        assert (error.code, error.message, error.remedy) == (
            "no-such-job",
            "there is no job 'x'",
            "see p2ptrain jobs",
        )


@in_memory
async def test_an_answer_that_comes_too_late_harms_nobody(network: Network) -> None:
    async def slowly(connection: Connection, request: Request) -> None:
        await asyncio.sleep(request.params["s"])  # virtual
        await echo(connection, request)

    async with operator(network, slowly) as (client, _, _):
        error = await failure(client.request("a", {"s": 3}, timeout_s=2))
        assert isinstance(error, DeadlineExceeded)
        assert "did not answer a within 2 s" in error.message
        assert (await client.request("b", {"s": 0}))["method"] == "b"


@on_every_stage
async def test_who_waits_for_an_answer_learns_of_the_end_at_once(network: Network) -> None:
    asked = asyncio.Event()

    async def never(connection: Connection, request: Request) -> None:
        asked.set()

    async with operator(network, never) as (client, seed, _):
        waiters = [asyncio.ensure_future(client.request("a", timeout_s=3600)) for _ in range(2)]
        await asked.wait()
        seed.abort()
        for waiter in waiters:
            assert isinstance(await failure(waiter), ConnectionLost)
        assert isinstance(await failure(client.request("b")), ConnectionLost)
        assert (await drain(client))[0] == []


# -------------------------------------------------------------------------------------------------------------- updates


@on_every_stage
async def test_updates_come_in_order_among_answers_until_the_end(network: Network) -> None:
    updates = [Update("jobs", [{"id": "j", "step": step}]) for step in range(200)]

    async def subscribe(connection: Connection, request: Request) -> None:
        for update in updates:
            connection.send(update)
        await echo(connection, request)

    async with operator(network, subscribe) as (client, seed, _):
        watching = asyncio.ensure_future(drain(client))
        await client.request("subscribe")
        seed.send(Update("peers", []))
        await seed.close()
        assert (await watching)[0] == [*updates, Update("peers", [])]


@in_memory
async def test_a_viewer_that_falls_behind_is_cut_off_rather_than_misled(network: Network) -> None:
    async def flood(connection: Connection, request: Request) -> None:
        for seq in range(MAX_UPDATES + 1):
            connection.send(Update("jobs", [{"id": str(seq)}]))

    async with operator(network, flood) as (client, _, _):
        assert isinstance(await failure(client.request("subscribe")), ConnectionLost)
        seen, end = await drain(client)
        assert len(seen) == MAX_UPDATES
        assert "fell 1024 updates behind" in end.message


# ---------------------------------------------------------------------------------------------------- silence, nonsense


@in_memory
async def test_a_silent_seed_is_asked_and_then_given_up(network: Network) -> None:
    asked: list[str] = []

    async def never(connection: Connection, request: Request) -> None:
        asked.append(request.method)

    async with operator(network, never) as (client, _, _):
        began = asyncio.get_running_loop().time()
        _, end = await drain(client)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2 * SILENCE_S)
        assert asked == ["probe.clock"]
        assert "sent nothing" in end.message


# ------------------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7337",
        "seed:",
        "seed:port",
        "seed:0",
        "seed:65536",
        "seed:-1",
        "seed:٣",
        "::1",
        "::1:7337",
        "[::1",
        "[seed]:80",
        "[]:80",
        "http:/seed:80",
        "http://seed:80/page",
        "anna@seed",
        "se ed",
        "se\0ed",
        "se\x1b[31med",
        "\x9b2Jseed:80",
        "s" * 256,
    ],
)
def test_what_is_no_address_is_told_what_would_be(text: str):
    with pytest.raises(UserError) as caught:
        parse_address(text)
    assert repr(text[:80]) in caught.value.message
    assert len(caught.value.message) < 250
    assert "host:port" in caught.value.remedy
