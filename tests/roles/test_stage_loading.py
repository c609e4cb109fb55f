"""Loading parts: from the client, from another worker, from an own copy; and from those that lie or die."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConfigError, Refused, StorageError
from p2ptrain.core.ids import is_id
from p2ptrain.core.serving import Sampling
from p2ptrain.lab.memory import MemoryNetwork
from roles.line import QUIET_S, Line
from roles.model_directory import FILE, DigestCache, ModelDirectory, open_model
from roles.worker.model_loading import MAX_PEERS
from roles.worker.part_cache import MAX_PARTS, MAX_SESSIONS
from tests.roles.stage_doubles import (
    PORT,
    Generation,
    Stage,
    TestClient,
    client_of,
    giving,
    load_params,
    model_at,
    open_params,
)
from tests.roles.stage_stand_in import StandIns, stand_in_config, tokens_of, write_model
from wire.chain_messages import TensorsPage, TensorsRequest
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.job_messages import RANGE_BYTES, RangeGone, RangeRequest

pytestmark = pytest.mark.virtual_time

CONFIG = stand_in_config(layers=4)


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    return model_at(write_model(tmp_path / "model", CONFIG), tmp_path)


@pytest.fixture
async def stage(tmp_path: Path, network: MemoryNetwork, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """A worker without a part."""
    made = Stage("w0", network.at("w0"), tmp_path / "w0", StandIns(**getattr(request, "param", {})))
    await made.start()
    yield made
    await asyncio.sleep(1)
    await made.stop()


@pytest.fixture
async def client(network: MemoryNetwork, stage: Stage) -> AsyncIterator[TestClient]:
    async with client_of(network.at("client"), "w0") as made:
        yield made


@pytest.fixture
async def receiver(
    tmp_path: Path, network: MemoryNetwork, client: TestClient, model: ModelDirectory
) -> AsyncIterator[Connection]:
    """A connection of another worker that takes the model, which the worker was told to give."""
    await client.ask("model.open", {"path": str(tmp_path / "model")})
    connection = await dial_for(network, model.model)
    yield connection
    await connection.close()


async def dial_for(network: MemoryNetwork, model: str) -> Connection:
    hello = local_hello(peer_id="w9", name="w9", roles=["worker"], purpose="model", job=model)
    return (await dial(network.at("w9"), "w0", PORT, hello, timeout_s=5))[0]


async def answers(client: TestClient, part: str, *, config: str = CONFIG) -> None:
    """The part, which is the whole model, gives the right tokens."""
    await client.ask("session.open", open_params("check", part, 0, 1))
    generation = Generation("check", [1, 2, 3], 0)
    while len(generation.made) < 4:
        client.give(*generation.work())
        generation.take(await client.next())
    assert generation.made == tokens_of(config, [1, 2, 3], 4, Sampling(temperature=0))
    await client.ask("session.close", {"session": "check", "index": 0})


def bytes_of(model: ModelDirectory, *prefixes: str) -> int:
    return sum(each.size_bytes for each in model.records if each.name.startswith(prefixes) and each.dtype != FILE)


# ------------------------------------------------------------------------------------------------- where it comes from


async def test_a_client_gives_what_the_part_owns_and_no_more(
    stage: Stage, client: TestClient, network: MemoryNetwork, model: ModelDirectory
) -> None:
    async with giving(network.at("client"), "w0", model) as connection:
        loaded = await client.ask("part.load", load_params(model, 1, 3, 4))
        owned = bytes_of(model, "layers.1.", "layers.2.")
        assert (loaded["received_bytes"], loaded["read_bytes"]) == (owned, 0)
        assert (loaded["width"], loaded["vocab_size"], loaded["encoding"]) == (8, 97, "fp32")
        assert loaded["weights_bytes"] == owned
        assert connection.bytes_out < owned + 4096
        assert client.progress[-1].done_bytes == client.progress[-1].total_bytes == owned
        again = await client.ask("part.load", load_params(model, 1, 3, 4))
        assert (again["part"], again["received_bytes"]) == (loaded["part"], 0)
        other = await client.ask("part.load", load_params(model, 0, 4, 4))  # over the same connection
        assert other["part"] != loaded["part"]
        await answers(client, other["part"])


async def test_two_programs_of_one_client_load_at_a_time_over_one_connection(
    client: TestClient, network: MemoryNetwork, model: ModelDirectory
) -> None:
    async with client_of(network.at("client"), "w0") as other, giving(network.at("client"), "w0", model):
        first = client.ask("part.load", load_params(model, 1, 3, 4))
        loaded, whole = await asyncio.gather(first, other.ask("part.load", load_params(model, 0, 4, 4)))
        assert loaded["received_bytes"] == bytes_of(model, "layers.1.", "layers.2.")
        await answers(other, whole["part"])


@asynccontextmanager
async def source(
    network: MemoryNetwork, directory: Path, path: Path
) -> AsyncIterator[tuple[Stage, TestClient, dict[str, Any]]]:
    """Another worker, which was told to give the model at ``path``."""
    stage = Stage("source", network.at("source"), directory / "source")
    await stage.start()
    async with client_of(network.at("client"), "source") as client:
        opened = await client.ask("model.open", {"path": str(path)})
        yield stage, client, opened
    await stage.stop()


FROM_DONOR = {"sender": {"peer": "source", "host": "source", "port": PORT}}


async def test_another_worker_gives_while_its_operator_is_there(
    client: TestClient, network: MemoryNetwork, tmp_path: Path, model: ModelDirectory
) -> None:
    async with source(network, tmp_path, tmp_path / "model") as (_, operator, opened):
        assert (opened["model"], opened["config"]) == (model.model, CONFIG)
        loaded = await client.ask("part.load", load_params(model, 0, 4, 4, **FROM_DONOR))
        assert loaded["received_bytes"] == bytes_of(model, "")
        await answers(client, loaded["part"])
        operator.connection.abort()
        await asyncio.sleep(0.1)
        with pytest.raises(Refused, match=r"model .* is not open here"):
            await client.ask("part.load", load_params(model, 0, 2, 4, **FROM_DONOR))


async def test_an_own_copy_is_read_and_only_what_differs_comes_from_the_sender(
    client: TestClient, network: MemoryNetwork, tmp_path: Path, model: ModelDirectory
) -> None:
    other = write_model(tmp_path / "copy", CONFIG)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1] ^= 1  # in head.weight, the last one
    (other / "model.safetensors").write_bytes(raw)
    async with giving(network.at("client"), "w0", model):
        loaded = await client.ask("part.load", load_params(model, 0, 4, 4, path=str(other)))
    head = bytes_of(model, "head.")
    assert (loaded["read_bytes"], loaded["received_bytes"]) == (bytes_of(model, "") - head, head)
    await answers(client, loaded["part"])


@pytest.mark.parametrize("path", ["/nowhere", "other-model", "damaged"])
async def test_a_copy_that_is_none_is_no_obstacle(
    client: TestClient, network: MemoryNetwork, tmp_path: Path, model: ModelDirectory, path: str
) -> None:
    write_model(tmp_path / "other-model", stand_in_config(layers=2, vocab_size=50, rows=5))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\xff" * 100)

    async with giving(network.at("client"), "w0", model):
        loaded = await client.ask("part.load", load_params(model, 0, 4, 4, path=str(tmp_path / path)))
    assert (loaded["read_bytes"], loaded["received_bytes"]) == (0, bytes_of(model, ""))
    await answers(client, loaded["part"])


async def test_large_tensors_come_by_ranges_and_little_is_under_way(
    client: TestClient, network: MemoryNetwork, tmp_path: Path
) -> None:
    rows = (2 * RANGE_BYTES + 1000) // 32
    config = stand_in_config(layers=4, rows=rows)
    model = model_at(write_model(tmp_path / "model", config), tmp_path)
    assert RANGE_BYTES * 2 < bytes_of(model, "layers.0.") < RANGE_BYTES * 3

    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, sum(each.get_write_buffer_size() for each in network.transports))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async with giving(network.at("client"), "w0", model):
        loaded = await client.ask("part.load", load_params(model, 0, 4, 4))
    watching.cancel()
    assert most < RANGE_BYTES + (64 << 10), "more than a range at a time was handed to the transport"
    await answers(client, loaded["part"], config=config)
    assert len(client.progress) > 1


# ------------------------------------------------------------------------------------------------------ who fails


SendReport = Callable[[Connection, ModelDirectory, Any], None]


def honest(connection: Connection, model: ModelDirectory, asked: Any) -> None:
    if isinstance(asked, TensorsRequest):
        connection.send(TensorsPage(len(model.records), list(model.records)))
    else:
        data = model.read(asked.name, asked.start, asked.stop)
        connection.send_bulk(memoryview(data), generation=0, stream=asked.stream)


@asynccontextmanager
async def sender_that(network: MemoryNetwork, model: ModelDirectory, says: SendReport) -> AsyncIterator[Connection]:
    hello = local_hello(peer_id="client", name="Mallory", roles=[], purpose="give", job=model.model)
    connection, _ = await dial(network.at("client"), "w0", PORT, hello, timeout_s=5)

    async def answer() -> None:
        while True:
            message = (await connection.receive(timeout_s=1000)).message
            if isinstance(message, TensorsRequest | RangeRequest):
                says(connection, model, message)

    task = asyncio.create_task(answer())
    try:
        yield connection
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.close()


def table_with(model: ModelDirectory, **changes: Any) -> TensorsPage:
    first = dataclasses.replace(model.records[0], **changes)
    return TensorsPage(len(model.records), [first, *model.records[1:]])


def on_table(page: Callable[[ModelDirectory], TensorsPage]) -> SendReport:
    def says(connection: Connection, model: ModelDirectory, asked: Any) -> None:
        if isinstance(asked, TensorsRequest):
            connection.send(page(model))
        else:
            honest(connection, model, asked)

    return says


def on_bytes(what: Callable[[Connection, bytearray, int], None]) -> SendReport:
    def says(connection: Connection, model: ModelDirectory, asked: Any) -> None:
        if isinstance(asked, TensorsRequest) or asked.name != "layers.1.weight":
            honest(connection, model, asked)
        else:
            what(connection, model.read(asked.name, asked.start, asked.stop), asked.stream)

    return says


def flipped(connection: Connection, data: bytearray, stream: int) -> None:
    data[5] ^= 1
    connection.send_bulk(memoryview(data), generation=0, stream=stream)


def shorter(connection: Connection, data: bytearray, stream: int) -> None:
    connection.send_bulk(memoryview(data)[:-1], generation=0, stream=stream)


LIARS: dict[str, tuple[SendReport, str]] = {
    "digest": (on_table(lambda model: table_with(model, digest=bytes(32))), "is that of model"),
    "dtype": (on_table(lambda model: table_with(model, dtype="F16")), "bytes, not those of its shape"),
    "huge": (on_table(lambda model: table_with(model, shape=[1 << 40], size_bytes=4 << 40)), "invalid name or digest"),
    "path": (on_table(lambda model: table_with(model, name="../x.json", dtype=FILE)), "is not a valid file"),
    "endless": (on_table(lambda model: TensorsPage(1 << 40, list(model.records))), "invalid table size"),
    "flipped": (on_bytes(flipped), "another digest"),
    "shorter": (on_bytes(shorter), "bulk"),
    "gone": (
        on_bytes(lambda connection, data, stream: connection.send(RangeGone("the file changed"))),
        "the file changed",
    ),
    "dies": (on_bytes(lambda connection, data, stream: connection.abort()), "closed|broke|reset"),
    "silent": (on_bytes(lambda connection, data, stream: None), "was silent"),
    "nonsense": (on_bytes(lambda connection, data, stream: connection.send(TensorsRequest("x", 0))), "TensorsRequest"),
}


@pytest.mark.parametrize("kind", LIARS)
async def test_a_sender_that_lies_or_dies_is_named_and_costs_nothing(
    stage: Stage, client: TestClient, network: MemoryNetwork, model: ModelDirectory, kind: str
) -> None:
    says, reason = LIARS[kind]

    free_bytes = stage.stages.cache.free_bytes
    async with sender_that(network, model, says):
        with pytest.raises(Refused, match=reason) as refused:
            await client.ask("part.load", load_params(model, 0, 4, 4))
    assert refused.value.code == "sender"
    assert "Mallory" in refused.value.message
    assert refused.value.remedy
    assert stage.stages.cache.free_bytes == free_bytes
    assert not stage.stages.cache.parts
    assert not stage.stand_ins.engines
    await asyncio.sleep(0.1)
    async with giving(network.at("client"), "w0", model):
        await answers(client, (await client.ask("part.load", load_params(model, 0, 4, 4)))["part"])


@pytest.mark.parametrize("kind", ["flipped", "dies"])
async def test_a_sender_beside_another_costs_only_what_it_owed(
    client: TestClient, network: MemoryNetwork, model: ModelDirectory, kind: str
) -> None:
    async with sender_that(network, model, LIARS[kind][0]), giving(network.at("client"), "w0", model):
        loaded = await client.ask("part.load", load_params(model, 0, 4, 4), timeout_s=100)
        assert loaded["received_bytes"] == bytes_of(model, "")
        await answers(client, loaded["part"])


@asynccontextmanager
async def slow_sender(
    network: MemoryNetwork, model: ModelDirectory, peer_id: str, tensor_s: float
) -> AsyncIterator[None]:
    """Says that it lives, and takes its time over each tensor."""
    hello = local_hello(peer_id=peer_id, name="Snail", roles=[], purpose="give", job=model.model)
    connection, _ = await dial(network.at(peer_id), "w0", PORT, hello, timeout_s=5)

    async def answer() -> None:
        async with Line(connection).keep_alive():
            while True:
                asked = (await connection.receive(timeout_s=1000)).message
                if isinstance(asked, RangeRequest):
                    await asyncio.sleep(tensor_s)
                if isinstance(asked, TensorsRequest | RangeRequest):
                    honest(connection, model, asked)

    task = asyncio.create_task(answer())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.close()


async def test_a_slow_sender_keeps_nobody_else_waiting_for_long(
    client: TestClient, network: MemoryNetwork, model: ModelDirectory
) -> None:
    now = asyncio.get_running_loop().time
    part = load_params(model, 0, 4, 4)
    async with (
        client_of(network.at("slow"), "w0", peer_id="slow") as slow,
        slow_sender(network, model, "slow", 6.0),
        client_of(network.at("third"), "w0", peer_id="third") as third,
        giving(network.at("third"), "w0", model, peer_id="third"),
    ):
        began = now()
        hanging = asyncio.create_task(slow.ask("part.load", part, timeout_s=1000))
        await asyncio.sleep(0.1)
        async with giving(network.at("client"), "w0", model):
            same = asyncio.create_task(client.ask("part.load", part, timeout_s=1000))
            await third.ask("part.load", load_params(model, 0, 2, 4))
            assert now() - began < 1, "another part waits for one whose sender is slow"
            with pytest.raises(Refused, match="sends less than 64 KiB a second") as refused:
                await hanging
            assert refused.value.code == "sender"
            assert now() - began == pytest.approx(QUIET_S, abs=1)
            loaded = await same
        assert now() - began < QUIET_S + 1
        assert loaded["received_bytes"] == bytes_of(model, "")
        await answers(client, loaded["part"])


async def test_a_model_whose_tensors_are_not_those_of_its_config_is_refused(
    client: TestClient, network: MemoryNetwork, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model", CONFIG)
    (directory / "config.json").write_text(stand_in_config(layers=4, vocab_size=1 << 20))
    model = model_at(directory, tmp_path)

    async with giving(network.at("client"), "w0", model):
        with pytest.raises(Refused, match="but the model's config requires shape"):
            await client.ask("part.load", load_params(model, 0, 4, 4))
        with pytest.raises(Refused, match="no part of that model"):
            await client.ask("part.load", load_params(model, 0, 5, 5))


async def test_a_client_that_goes_while_its_part_is_loaded_leaves_nothing(
    stage: Stage, client: TestClient, network: MemoryNetwork, model: ModelDirectory
) -> None:
    free_bytes = stage.stages.cache.free_bytes
    async with sender_that(network, model, LIARS["silent"][0]):
        loading = asyncio.create_task(client.ask("part.load", load_params(model, 0, 4, 4)))
        await asyncio.sleep(1)
        assert stage.stages.cache.free_bytes < free_bytes
        client.connection.abort()
        await asyncio.gather(loading, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert stage.stages.cache.free_bytes == free_bytes


# -------------------------------------------------------------------------------------------------- hostile receivers


@pytest.mark.parametrize(
    ("start", "stop", "stream"),
    [(0, RANGE_BYTES + 1, 1), (-1, 5, 1), (9, 3, 1), (0, 4, 1 << 40)],
)
async def test_a_receiver_that_asks_for_what_cannot_be_is_cut_off(
    stage: Stage, start: int, stop: int, stream: int, receiver: Connection
) -> None:
    receiver.send(RangeRequest("head.weight", start, stop, stream))
    await asyncio.sleep(0.1)
    assert receiver.closed.is_set()
    assert "invalid range" in stage.problems[0].message


async def test_what_is_not_there_is_said_so(tmp_path: Path, model: ModelDirectory, receiver: Connection) -> None:
    for name in ("nothing", "../config.json", "model.safetensors"):
        receiver.send(RangeRequest(name, 0, 4, 3))
        await receiver.expect(RangeGone, timeout_s=5)
    status = (tmp_path / "model" / "model.safetensors").stat()
    os.utime(tmp_path / "model" / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    receiver.send(RangeRequest("head.weight", 0, 4, 3))
    assert "changed since" in (await receiver.expect(RangeGone, timeout_s=5)).reason
    receiver.send(TensorsRequest("0" * 32, 0))
    assert "this connection does not send model" in (await receiver.expect(TensorsPage, timeout_s=5)).error


async def test_who_takes_a_model_gets_no_more_of_it_than_its_client_lives(
    client: TestClient, model: ModelDirectory, receiver: Connection
) -> None:
    receiver.send(TensorsRequest(model.model, 0))
    assert (await receiver.expect(TensorsPage, timeout_s=5)).total == len(model.records)
    client.connection.abort()
    await asyncio.sleep(0.1)
    receiver.send(RangeRequest("head.weight", 0, 4, 3))
    assert "the model is no longer available here" in (await receiver.expect(RangeGone, timeout_s=5)).reason
    receiver.send(TensorsRequest(model.model, 0))
    assert "the model is no longer available here" in (await receiver.expect(TensorsPage, timeout_s=5)).error


async def test_no_more_take_a_model_at_a_time_than_there_is_memory_for(
    network: MemoryNetwork, model: ModelDirectory, receiver: Connection
) -> None:
    taking = [await dial_for(network, model.model) for _ in range(MAX_PEERS - 1)]
    with pytest.raises(Refused) as refused:
        await dial_for(network, model.model)
    assert refused.value.code == "busy"
    await receiver.close()
    await asyncio.sleep(0.1)
    for connection in [*taking, await dial_for(network, model.model)]:
        await connection.close()


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("stage", [{"limit_bytes": 6600}], indirect=True, ids=[pytest.HIDDEN_PARAM])
async def test_a_part_that_does_not_fit_is_refused_with_the_numbers(
    stage: Stage, client: TestClient, network: MemoryNetwork, model: ModelDirectory
) -> None:
    async with giving(network.at("client"), "w0", model):
        with pytest.raises(Refused, match=r"need 6\.5 KiB.*6\.4 KiB of 6\.4 KiB") as refused:
            await client.ask("part.load", load_params(model, 0, 4, 4, positions=0))
        assert refused.value.code == "memory"
        assert "--memory" in refused.value.remedy
        fits = load_params(model, 0, 1, 4, positions=8)
        with pytest.raises(Refused, match="200 positions of sessions need"):
            await client.ask("part.load", {**fits, "positions": 200})
        assert len(stage.stand_ins.engines) == 0, "it was loaded in vain"
        part = (await client.ask("part.load", fits))["part"]
    offer = await client.ask("part.offer")
    engine = stage.stand_ins.engines[-1]
    assert engine.pool_blocks == 1
    assert offer["memory_bytes"] == 6600 - engine.weights_bytes - 64 * engine.cache_position_bytes
    with pytest.raises(Refused, match="65 positions of sessions need") as refused:
        await client.ask("session.open", open_params("s1", part, 0, 4, "w0", positions=65))
    assert refused.value.code == "memory"
    assert not engine.sessions
    with pytest.raises(Refused):
        await client.ask("part.load", {**fits, "positions": 65})
    assert (await client.ask("part.load", {**fits, "positions": 64}))["part"] == part


async def test_a_job_takes_the_memory_of_idle_parts(
    stage: Stage, client: TestClient, network: MemoryNetwork, model: ModelDirectory
) -> None:
    async with giving(network.at("client"), "w0", model):
        await client.ask("part.load", load_params(model, 0, 4, 4))
    await stage.stages.make_room_for_job()
    assert stage.stages.cache.parts, "it is in use"
    client.connection.abort()
    await asyncio.sleep(0.1)
    await stage.stages.make_room_for_job()
    assert not stage.stages.cache.parts


async def test_there_are_as_many_parts_and_sessions_as_there_may_be(
    stage: Stage, client: TestClient, network: MemoryNetwork, tmp_path: Path
) -> None:
    config = stand_in_config(layers=MAX_PARTS + 1, rows=1)
    model = model_at(write_model(tmp_path / "model", config), tmp_path)

    async with giving(network.at("client"), "w0", model):
        for layer in range(MAX_PARTS):
            part = (await client.ask("part.load", load_params(model, layer, layer + 1, MAX_PARTS + 1)))["part"]
        with pytest.raises(Refused, match="16 parts, all in use") as refused:
            await client.ask("part.load", load_params(model, MAX_PARTS, MAX_PARTS + 1, MAX_PARTS + 1))
        assert refused.value.code == "full"
        first = next(iter(stage.stages.cache.parts))
        await client.ask("part.free", {"part": first})
        last = load_params(model, MAX_PARTS, MAX_PARTS + 1, MAX_PARTS + 1)
        part = (await client.ask("part.load", last))["part"]
    for number in range(MAX_SESSIONS):
        await client.ask("session.open", open_params(f"s{number}", part, 1, 2))
    with pytest.raises(Refused, match="64 sessions are open"):
        await client.ask("session.open", open_params("more", part, 1, 2))
    await asyncio.sleep(2)
    assert len(stage.told[-1].parts) == MAX_PARTS


# ------------------------------------------------------------------------------------------------- directories, digests


def test_digests_are_kept_for_files_that_did_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path / "model", CONFIG)
    first = model_at(directory, tmp_path)
    read: list[int] = []
    real = open_model.__globals__["read_exactly"]
    monkeypatch.setitem(
        open_model.__globals__, "read_exactly", lambda file, start, size: read.append(size) or real(file, start, size)
    )
    again = model_at(directory, tmp_path)
    assert again == first
    assert not read
    kept = json.loads((tmp_path / "digests.json").read_text())
    for file in kept.values():  # as an earlier version kept them: xxh3-128
        file["digests"] = {name: digest[:32] for name, digest in file["digests"].items()}
    for damaged in ('{"a": 1}', json.dumps(kept)):
        read.clear()
        (tmp_path / "digests.json").write_text(damaged)
        assert model_at(directory, tmp_path) == first
        assert sum(read) > bytes_of(first, "")
    read.clear()
    raw = bytearray((directory / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (directory / "model.safetensors").write_bytes(raw)
    os.utime(directory / "model.safetensors", ns=(1, 1))
    changed = model_at(directory, tmp_path)
    assert changed.model != first.model
    assert [each.name for each, other in zip(changed.records, first.records, strict=True) if each != other] == [
        "head.weight"
    ]


def test_a_record_and_the_id_commit_to_every_byte(model: ModelDirectory) -> None:
    total = hashlib.blake2b(digest_size=28)
    for record in sorted(model.records, key=lambda each: each.name):
        digest = hashlib.blake2b(model.read(record.name, 0, record.size_bytes), digest_size=32).digest()
        assert record.digest == digest
    texts = [CONFIG.encode()]
    for record in sorted((each for each in model.records if each.dtype != FILE), key=lambda each: each.name):
        texts += record.name.encode(), f"{record.dtype} {record.shape}".encode(), record.digest
    for text in texts:
        total.update(struct.pack("<Q", len(text)) + text)
    assert model.model == total.hexdigest()
    assert is_id(model.model)


def test_directories_that_are_no_models_are_refused(tmp_path: Path) -> None:
    cache = DigestCache(RealDisk(), tmp_path / "digests.json")
    with pytest.raises(ConfigError, match="no weights"):
        open_model(tmp_path, cache)
    directory = write_model(tmp_path / "model", CONFIG)
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_model(directory, cache)
    (directory / "config.json").write_text(json.dumps({"x": "y" * 100_000}))
    with pytest.raises(StorageError, match="larger than"):
        open_model(directory, cache)
    (directory / "config.json").write_bytes(b"\xff")
    with pytest.raises(StorageError, match="not UTF-8 text"):
        open_model(directory, cache)
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid: .* is not JSON") as caught:
        open_model(directory, cache)
    assert caught.value.remedy


def test_only_small_files_of_a_model_are_given(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", CONFIG)
    for name in (".secret.json", "optimizer.safetensors", "id_rsa", "tokenizer.model", "notes.txt", "a b.json"):
        (directory / name).write_text("x")
    (directory / "sub.json").mkdir()
    model = model_at(directory, tmp_path)
    names = [each.name for each in model.records if each.dtype == FILE]
    assert names == ["config.json", "notes.txt", "tokenizer.json", "tokenizer.model"]
    assert bytes(model.read("notes.txt", 0, 1)) == b"x"


async def test_a_large_table_comes_in_pages(client: TestClient, network: MemoryNetwork, tmp_path: Path) -> None:
    config = stand_in_config(layers=1000, rows=1)
    model = model_at(write_model(tmp_path / "model", config), tmp_path)
    assert len(model.records) == 1005

    async with giving(network.at("client"), "w0", model):
        loaded = await client.ask("part.load", load_params(model, 990, 1000, 1000))
    assert loaded["received_bytes"] == bytes_of(
        model, *(f"layers.{index}." for index in range(990, 1000)), "norm", "head"
    )
