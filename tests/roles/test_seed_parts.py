"""What the seed keeps of the parts that workers hold: checked, shown as it is now, and gone with the worker."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgpack
import pytest

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError
from roles.seed.serving import Holdings, infos_of
from tests.roles.in_process import HOST, Cluster
from wire.chain_messages import HeldPart, PartsHeld
from wire.connection import Connection
from wire.frame import encode_control
from wire.handshake import dial, local_hello, local_welcome, serve
from wire.messages import Heartbeat, HeartbeatAck, Hello, Leave, Message, Welcome
from wire.records import PartInfo
from wire.schema import instance_untrusted

DEADLINE_S = 10.0
PART = HeldPart("p1", "ab" * 16, "llama", 0, 12, 32, "bfloat16", 900, 100, 4000, 2, 4.5, 0.75, 31.0, 4096.0, "b2")


def part(**changes: Any) -> HeldPart:
    return dataclasses.replace(PART, **changes)


def held(*parts: HeldPart) -> dict[str, PartInfo]:
    message = PartsHeld(list(parts))
    return infos_of("a1", "laptop", instance_untrusted(PartsHeld, dataclasses.asdict(message)))


# ------------------------------------------------------------------------------------------------------------- checks


def test_a_part_is_kept_as_it_was_told() -> None:
    (info,) = held(PART).values()
    assert info == PartInfo(
        "a1/p1", "a1", "laptop", "p1", "ab" * 16, "llama", 0, 12, 32, "bfloat16", 900, 100, 4000, 2, 4.5, 0.75, 31.0,
        4096.0, "b2",
    )  # fmt: skip
    assert info.used_bytes == 1000
    told, fields = dataclasses.asdict(PART), info.to_map()
    assert {name: fields[name] for name in told} == told  # no field of what a worker says is left out


@pytest.mark.parametrize(
    "changes",
    [
        {"start": -1},
        {"start": 12},
        {"stop": 33},
        {"stop": 0},
        {"layers": 4097, "stop": 4097},
        {"weights_bytes": -1},
        {"cache_bytes": 2**53 + 1},
        {"limit_bytes": -5},
        {"sessions": -1},
        {"compute_ms": math.nan},
        {"compute_ms": -0.1},
        {"busy": math.inf},
        {"busy": math.nan},
        {"busy": -0.5},
        {"tokens_per_s": math.inf},
        {"out_position_bytes": -math.inf},
        {"part": ""},
        {"part": "a/b"},
        {"part": "a b"},
        {"part": "x" * 129},
        {"model": ""},
        {"model": "\x1b[2J"},
        {"next": "no id"},
        {"next": "x" * 64},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        held(part(**changes))


def test_no_worker_holds_a_part_twice_or_more_than_its_number() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        held(PART, part(start=1))
    most = [part(part=f"p{index}") for index in range(17)]
    assert len(held(*most[:-1])) == 16
    with pytest.raises(ProtocolError, match="17 long"):
        held(*most)


def test_texts_are_clipped_and_a_model_without_a_name_goes_by_its_id() -> None:
    (info,) = held(part(name="\x1b[31m" + "n" * 500, dtype="d" * 100, busy=1.2)).values()
    assert info.name.startswith("[31mnnn")
    assert len(info.name.encode()) <= 64
    assert len(info.dtype.encode()) <= 16
    assert info.busy == 1.0
    (unnamed,) = held(part(name=" \n")).values()
    assert unnamed.name == "ab" * 6


# ------------------------------------------------------------------------------------------------------- what is kept


def test_only_what_changed_is_told_and_what_is_not_named_again_is_gone() -> None:
    touched: list[set[str]] = []
    kept = Holdings(lambda *ids: touched.append(set(ids)))
    kept.told("a1", "laptop", PartsHeld([PART, part(part="p2", start=12, stop=20)]))
    kept.told("a1", "laptop", PartsHeld([PART, part(part="p2", start=12, stop=20)]))
    kept.told("b2", "attic", PartsHeld([part(part="p1", start=20, stop=32)]))
    assert touched == [{"a1/p1", "a1/p2"}, {"b2/p1"}]
    kept.told("a1", "laptop", PartsHeld([part(sessions=3), part(part="p3", name="gemma")]))
    assert touched[2:] == [{"a1/p1", "a1/p2", "a1/p3"}]
    assert [info.id for info in kept.infos()] == ["a1/p3", "a1/p1", "b2/p1"]  # by model, then by layers
    assert kept.info("a1/p2") is None
    assert kept.info("a1/p1") is not None
    kept.drop("a1")
    kept.drop("a1")
    assert touched[3:] == [{"a1/p1", "a1/p3"}]
    kept.told("b2", "attic", PartsHeld([]))
    assert touched[4:] == [{"b2/p1"}]
    assert kept.infos() == []
    assert kept._held == {}


# ------------------------------------------------------------------------------------------------------------ the seed


@asynccontextmanager
async def worker(cluster: Cluster, peer_id: str) -> AsyncIterator[Connection]:
    """A worker as far as the seed can tell."""

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id=peer_id, name=peer_id, wall=0.0)

    async def hang_up(connection: Connection, hello: Hello) -> None: ...

    def ignore(problem: P2PTrainError, address: tuple[str, int]) -> None: ...

    server = await serve(cluster.network, HOST, 0, decide=decide, serve=hang_up, on_problem=ignore)
    hello = local_hello(
        peer_id=peer_id, name=f"name-{peer_id}", roles=["worker"], purpose="peer", port=server.address[1]
    )
    connection, _ = await dial(cluster.network, *cluster.address, hello, timeout_s=DEADLINE_S)
    try:
        yield connection
    finally:
        await connection.close()
        await server.close()


async def say(connection: Connection, message: Message) -> None:
    """Say it, and wait until it was heard."""
    connection.send(message)
    connection.send(Heartbeat(1, 0, 0, "idle", 0.0, {}))
    while not isinstance((await connection.receive(timeout_s=DEADLINE_S)).message, HeartbeatAck):
        pass


async def test_operators_list_what_workers_hold_until_they_are_gone(cluster: Cluster) -> None:
    async with worker(cluster, "a1") as one, worker(cluster, "b2") as two:
        assert await cluster.ask("parts.list") == {"parts": [], "total": 0}
        await say(one, PartsHeld([PART]))
        await say(two, PartsHeld([part(start=12, stop=32, next="")]))
        answer = await cluster.ask("parts.list")
        parts = [PartInfo.from_map_untrusted(item) for item in answer["parts"]]
        assert [(item.peer, item.peer_name, item.start, item.stop) for item in parts] == [
            ("a1", "name-a1", 0, 12),
            ("b2", "name-b2", 12, 32),
        ]
        assert answer["total"] == 2
        async with cluster.operator() as client, asyncio.timeout(DEADLINE_S):
            await client.request("subscribe", {})
            updates = client.updates()
            seen: list[tuple[str, str]] = []

            async def until(topic: str, item_id: str) -> dict[str, Any]:
                async for update in updates:
                    for item in update.items:
                        if update.topic.startswith("parts"):
                            seen.append((update.topic, item["id"]))
                        if (update.topic, item.get("id")) == (topic, item_id):
                            return dict(item)
                raise AssertionError("the seed ended the updates")

            await until("parts", "b2/p1")
            assert seen == [("parts", "a1/p1"), ("parts", "b2/p1")]  # all that is held, at the beginning
            await say(one, PartsHeld([part(tokens_per_s=77.0), part(part="p2", model="other")]))
            assert (await until("parts", "a1/p1"))["tokens_per_s"] == 77.0
            await say(one, PartsHeld([part(part="p2", model="other")]))
            await until("parts-gone", "a1/p1")
            one.send(Leave("enough"))
            await until("parts-gone", "a1/p2")
            two.abort()  # it dies
            await until("parts-gone", "b2/p1")
        assert await cluster.ask("parts.list") == {"parts": [], "total": 0}


async def test_a_worker_that_comes_back_begins_with_nothing(cluster: Cluster) -> None:
    async with worker(cluster, "a1") as one:
        await say(one, PartsHeld([PART]))
        assert (await cluster.ask("parts.list"))["total"] == 1
        one.abort()
        async with worker(cluster, "a1"):
            assert (await cluster.ask("parts.list"))["total"] == 0


async def test_nonsense_ends_the_link(cluster: Cluster) -> None:
    async with worker(cluster, "a1") as one:
        body = msgpack.packb(dataclasses.asdict(PartsHeld([part(stop=99)])))
        one._transport.write(encode_control(PartsHeld.KIND, body, generation=0, stream=0))
        with pytest.raises(ConnectionLost):
            await one.receive(timeout_s=DEADLINE_S)
    assert (await cluster.ask("parts.list"))["total"] == 0


async def test_an_answer_holds_as_many_as_fit_and_their_number(cluster: Cluster) -> None:
    crowd = 10
    parts = [part(part=f"p{index:02}", name="n" * 60) for index in range(16)]
    async with AsyncExitStack() as stack:
        for index in range(crowd):
            await say(await stack.enter_async_context(worker(cluster, f"a{index}")), PartsHeld(parts))
        answer = await cluster.ask("parts.list")
    assert 0 < len(answer["parts"]) < answer["total"] == crowd * 16
