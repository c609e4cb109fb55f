"""Split inference between real stages, with engines that notice whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import ProtocolError, Refused, ResourceError
from p2ptrain.core.serving import Sampling
from p2ptrain.lab.memory import MemoryNetwork
from roles.model_directory import ModelDirectory
from roles.worker import forward_requests
from roles.worker.forward_requests import ROOM_S
from roles.worker.stage_links import send_forward
from roles.worker.stage_session import MOST_QUEUED, QUEUED_FROM_STAGE
from tests.roles.stage_doubles import (
    PORT,
    Generation,
    Stage,
    TestChain,
    as_stage,
    chain_of,
    client_of,
    ids_work,
    lost,
    model_at,
    open_params,
)
from tests.roles.stage_stand_in import StandIns, stand_in_config, tokens_of, write_model
from wire.chain_messages import CHAIN_STREAM, ChainBroken, ForwardBatch, ForwardRequest
from wire.handshake import dial, local_hello

CONFIG = stand_in_config(layers=6)
PROMPT = [5, 80, 11, 11, 3]
GREEDY = Sampling(temperature=0)

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    return model_at(write_model(tmp_path / "model", CONFIG), tmp_path)


@pytest.fixture
async def chain(
    tmp_path: Path, model: ModelDirectory, network: MemoryNetwork, request: pytest.FixtureRequest
) -> AsyncIterator[TestChain]:
    """Two stages. Nothing may be left of a session."""
    async with chain_of(network, tmp_path, model, (0, 3, 6), **getattr(request, "param", {})) as made:
        yield made
    await asyncio.sleep(60)  # virtual: what is still being computed ends
    for stage in made.stages:
        assert not stage.stages.requests.sessions
        assert not stage.sessions, f"{stage.name} kept a session that is over"


def fail_once(session: str, keep: int, count: int) -> None:
    if session == "s1" and keep == 5:
        raise MemoryError("no room for the cache")


# ------------------------------------------------------------------------------------------------------------ mending


def place(stage: Stage) -> dict[str, Any]:
    return {"peer": stage.name, "host": stage.name, "port": PORT}


async def test_a_result_of_an_older_epoch_is_dropped(chain: TestChain) -> None:
    await chain.open("s1")
    for stage in chain.stages:
        stage.threads.call_s["compute"] = 1.0
    generation = Generation("s1", PROMPT, 1)
    chain.clients[0].give(*generation.work())
    await asyncio.sleep(1.5)  # virtual: the second stage computes
    resume = {"session": "s1", "epoch": 1, "keep": 0}
    assert await chain.clients[1].ask("session.resume", {**resume, "index": 1, "next": None}) == {"position": 0}
    await chain.clients[0].ask("session.resume", {**resume, "index": 0, "next": place(chain.stages[1])})
    assert chain.stages[1].stand_ins.engines[0].length("s1") == len(PROMPT), "it was not computing"
    assert chain.clients[1].heard.empty()
    generation.epoch = 1
    while len(generation.made) < 4:
        chain.clients[0].give(*generation.work())
        generation.take(await chain.answer())
    assert generation.made == tokens_of(CONFIG, PROMPT, 4, GREEDY)


@pytest.mark.parametrize(
    "chain", [{"stand_ins": lambda: StandIns(on_run=fail_once)}], indirect=True, ids=[pytest.HIDDEN_PARAM]
)
async def test_an_engine_that_fails_breaks_the_session_and_no_other(chain: TestChain) -> None:
    await chain.open("s1")
    await chain.open("s2")
    generation = Generation("s1", PROMPT, 1)
    chain.clients[0].give(*generation.work())
    generation.take(await chain.answer())
    chain.clients[0].give(*generation.work())
    broken = await chain.clients[0].next()
    assert isinstance(broken, ChainBroken)
    assert (broken.lost, broken.code) == (0, "failed")
    assert "no room for the cache" in broken.reason
    chain.clients[0].give(*generation.work())  # of a session that is broken: forgotten
    assert await chain.generate("s2", PROMPT, 3) == tokens_of(CONFIG, PROMPT, 3, GREEDY)
    assert chain.clients[0].heard.empty()


# --------------------------------------------------------------------------------------------------- hostile neighbours

LIES: list[tuple[str, str, dict[str, Any], int]] = [
    ("client", "session is for 64", {"count": 65}, 260),
    ("client", "token ids", {"encoding": "fp32"}, 160),
    ("client", "ends at", {"last": 2}, 20),
    ("client", "cannot sample 6 tokens", {"samples": 6}, 20),
    ("client", "cannot sample 1 tokens", {"samples": 1, "last": 0}, 20),
    ("client", "score 6 at 5", {"targets": bytes(24)}, 20),
    ("client", "score 1 at 5", {"targets": bytes(5)}, 20),
    ("client", "score 1 at 0", {"last": 0, "targets": bytes(4)}, 20),
    ("client", "invalid sample index 65", {"sample_index": 65}, 20),
    ("client", "1 stage times at stage 0", {"spent_us": [1]}, 20),
    ("client", "epoch", {"epoch": 1}, 20),
    ("client", "not open here", {"session": "nobody", "encoding": "fp32"}, 20),
    ("client", "bulk", {}, 19),
    ("stage", "not open here", {"session": "nobody", "encoding": "ids"}, 20),
    ("stage", "bulk", {"session": "nobody"}, 161),
    ("stage", "hidden states in 'ids', expected", {"encoding": "ids"}, 20),
    ("stage", "ends at", {"last": 0}, 160),
    ("stage", "epoch", {"epoch": 9}, 160),
    ("stage", "bulk", {}, 161),
    ("stage", "bulk", {"encoding": "int8", "prefill": True}, 160),
]
WORK: dict[str, Any] = {"session": "s2", "epoch": 0, "number": 0, "keep": 0, "count": 5, "last": 1, "sample_index": 0}
HONEST = {
    "client": WORK | {"encoding": "ids", "samples": 0, "spent_us": []},
    "stage": WORK | {"encoding": "fp32", "samples": 1, "spent_us": [3]},
}


async def test_a_stage_before_may_send_requests_of_one_client_only(chain: TestChain, network: MemoryNetwork) -> None:
    await chain.open("s1")
    async with client_of(network.at("other"), "w1", peer_id="other") as other:
        await other.ask("session.open", open_params("s2", chain.parts[1], 1, 2))
        connection = await as_stage(network, "s2", 1)
        work = ForwardRequest(**HONEST["stage"] | {"session": "s1"})
        connection.send(ForwardBatch([work]))
        await lost(connection)
    assert "another client" in chain.stages[1].problems[0].message
    assert await chain.generate("s1", PROMPT, 2) == tokens_of(CONFIG, PROMPT, 2, GREEDY)


async def test_a_stage_before_is_held_back_by_the_requests_that_wait(chain: TestChain, network: MemoryNetwork) -> None:
    """Of all sessions together. Those of a session that is not open are dropped."""
    for session in ("s1", "s2"):
        await chain.clients[1].ask("session.open", open_params(session, chain.parts[1], 1, 2))
    chain.stages[1].threads.call_s["compute"] = 1.0
    connection = await as_stage(network, "s1", 1)
    work = [ForwardRequest(**HONEST["stage"] | {"session": session, "count": 1}) for session in ("s1", "s2", "gone")]
    for _ in range(QUEUED_FROM_STAGE):
        send_forward(connection, [(each, memoryview(bytes(32))) for each in work])
    await asyncio.sleep(0.5)  # virtual: the first is being computed
    queued = [len(stage.core.queue) for stage in chain.stages[1].stages.requests.sessions.values()]
    assert QUEUED_FROM_STAGE - 1 <= sum(queued) <= QUEUED_FROM_STAGE + 1
    await asyncio.sleep(10)
    assert sum(len(stage.core.queue) for stage in chain.stages[1].stages.requests.sessions.values()) in (
        QUEUED_FROM_STAGE,
        QUEUED_FROM_STAGE + 1,
    ), "it is read again"
    connection.abort()


async def test_sessions_share_the_connection_to_the_next_stage(chain: TestChain) -> None:
    """It stays for the next session. If it is lost each of its sessions hears of it."""
    for session in ("s1", "s2"):
        await chain.open(session)
    [link] = {stage.link for stage in chain.stages[0].stages.requests.sessions.values()}
    await chain.clients[0].ask("session.close", {"session": "s1", "index": 0})
    assert await chain.generate("s2", PROMPT, 3) == tokens_of(CONFIG, PROMPT, 3, GREEDY)
    await chain.clients[0].ask("session.close", {"session": "s2", "index": 0})
    for session in ("s1", "s2"):
        await chain.clients[1].ask("session.close", {"session": session, "index": 1})
        await chain.open(session)
    assert {stage.link for stage in chain.stages[0].stages.requests.sessions.values()} == {link}
    assert await chain.generate("s1", PROMPT, 3) == tokens_of(CONFIG, PROMPT, 3, GREEDY)
    [client] = chain.stages[1].stages._clients
    client.incoming[0].abort()
    broken = [await chain.clients[0].next(), await chain.clients[0].next()]
    assert {(item.session, item.code) for item in broken if isinstance(item, ChainBroken)} == {
        ("s1", "next-stage"),
        ("s2", "next-stage"),
    }


@pytest.mark.parametrize("small", [1, 8])
async def test_sessions_are_computed_together_and_all_stages_are_busy(
    chain: TestChain, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """Small batches are not divided, because that saves no time."""
    monkeypatch.setattr(forward_requests, "SMALL_BATCH", small)
    names = ["s1", "s2", "s3", "s4"]
    generations = [Generation(name, [*PROMPT, at], 1) for at, name in enumerate(names)]
    for name in names:
        await chain.open(name)
    for _ in range(3):
        chain.clients[0].give_all([generation.work() for generation in generations])
        for _ in names:
            answer = await chain.answer()
            generations[names.index(answer.session)].take(answer)
    for generation in generations:
        prompt = [*PROMPT, generations.index(generation)]
        assert generation.made == tokens_of(CONFIG, prompt, 3, GREEDY)
    for stage in chain.stages:
        assert stage.stand_ins.engines[0].batches == [names, *2 * ([names[:2], names[2:]] if small == 1 else [names])]


async def test_a_session_that_ends_or_breaks_within_a_batch_leaves_the_others(
    chain: TestChain, network: MemoryNetwork
) -> None:
    """Three are computed together. Meanwhile one gets a new epoch, and the client of another one leaves."""
    for name in ("s0", "s1", "s2"):
        await chain.open(name)
    at = network.at("other")
    async with client_of(at, "w1", peer_id="other") as last, client_of(at, "w0", peer_id="other") as other:
        await last.ask("session.open", open_params("s9", chain.parts[1], 1, 2))
        await other.ask("session.open", open_params("s9", chain.parts[0], 0, 2, "w1"))
        chain.stages[0].threads.call_s["compute"] = 1.0
        chain.clients[0].give(*ids_work("s0", PROMPT, keep=0, last=0, samples=0))
        await asyncio.sleep(0.5)  # virtual
        kept, renewed = Generation("s2", PROMPT, 1), Generation("s1", PROMPT, 1)
        chain.clients[0].give_all([kept.work(), renewed.work()])
        other.give(*ids_work("s9", PROMPT, keep=0, last=0, samples=0))
        await asyncio.sleep(1)  # virtual: they are being computed
        assert sorted(chain.stages[0].stand_ins.engines[0].batches[1]) == ["s1", "s2", "s9"]
        for index, following in ((1, None), (0, place(chain.stages[1]))):
            params = {"session": "s1", "index": index, "epoch": 1, "keep": 0, "next": following}
            assert await chain.clients[index].ask("session.resume", params) == {"position": 0}
    renewed.epoch = 1
    for generation in (kept, renewed):
        while len(generation.made) < 3:
            if generation is renewed or generation.made:
                chain.clients[0].give(*generation.work())
            answer = await chain.answer()
            if answer.session != "s0":
                generation.take(answer)
        assert generation.made == tokens_of(CONFIG, PROMPT, 3, GREEDY)


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_session_whose_positions_were_dropped_waits_for_room(chain: TestChain, is_closed: bool) -> None:
    """Both sessions fit so far. The second one grows, but the first is older, though it was opened later."""
    now = chain.stages[0].stages._context.world.clock.wall()
    for name, order in (("s2", now + 2), ("s1", now + 1)):
        await chain.open(name, order=order, positions=500)
        chain.clients[0].give(*ids_work(name, [1] * 250, keep=0, last=1))
        await chain.answer()
    chain.clients[0].give(*ids_work("s2", [1] * 10, keep=250, last=1))
    broken = await chain.answer()
    assert isinstance(broken, ChainBroken)
    assert (broken.session, broken.lost, broken.code) == ("s2", 0, "preempted")
    params = {"session": "s2", "index": 0, "epoch": 1, "keep": 250, "next": place(chain.stages[1])}
    waiting = asyncio.create_task(chain.clients[0].ask("session.resume", params, timeout_s=100))
    chain.clients[0].give(*ids_work("s1", [1] * 100, keep=250, last=1))
    assert not isinstance(await chain.answer(), ChainBroken)
    await asyncio.sleep(ROOM_S - 5)  # virtual
    assert not waiting.done()
    if is_closed:
        await chain.clients[0].ask("session.close", {"session": "s1", "index": 0})
        await asyncio.sleep(1)
        assert waiting.done()
    assert await waiting == {"position": 0}


async def test_a_client_gets_no_memory_of_those_that_were_there_before_it_came(
    chain: TestChain, network: MemoryNetwork
) -> None:
    await asyncio.sleep(1)  # virtual
    async with client_of(network.at("other"), "w1", peer_id="other") as other:
        now = chain.stages[1].stages._context.world.clock.wall()
        await chain.clients[1].ask("session.open", open_params("s1", chain.parts[1], 1, 2, order=now))
        await asyncio.sleep(1)  # virtual
        async with client_of(network.at("third"), "w1", peer_id="third") as third:
            await third.ask("session.open", open_params("s3", chain.parts[1], 1, 2, order=0.0))
            await other.ask("session.open", open_params("s2", chain.parts[1], 1, 2, order=now))
            assert list(chain.stages[1].stand_ins.engines[0].sessions) == ["s1", "s2", "s3"]


async def test_a_smaller_need_of_memory_that_fails_leaves_a_larger_one_accounted_for(chain: TestChain) -> None:
    stages = chain.stages[0].stages
    part, requests = stages.cache.parts[chain.parts[0]], stages.requests
    reserve, failures = part.engine.reserve, [ResourceError("too little memory")]

    def failing(positions: int) -> None:
        if failures:
            raise failures.pop()
        reserve(positions)

    part.engine.reserve = failing  # type: ignore[method-assign]
    first = asyncio.create_task(requests.reserve(part, stages.cache.grow(part, 640)))
    await asyncio.sleep(0)
    await requests.reserve(part, stages.cache.grow(part, 1280))
    with pytest.raises(ResourceError):
        await first
    assert part.pool_positions == part.reserved_positions == 1280


async def test_a_message_of_too_many_positions_ends_the_connection(chain: TestChain) -> None:
    await chain.open("s1", positions=4000)
    work, _ = ids_work("s1", [1] * 1025, keep=0, last=1)
    chain.clients[0].connection.send(ForwardBatch([work, work]))
    await lost(chain.clients[0].connection)
    assert "more than 2048 positions" in chain.stages[0].problems[0].message


@pytest.mark.parametrize(("sender", "reason", "changes", "payload_bytes"), LIES)
async def test_a_sender_that_lies_loses_its_connection_and_nothing_else_happens(
    chain: TestChain, network: MemoryNetwork, sender: str, reason: str, changes: dict[str, Any], payload_bytes: int
) -> None:
    await chain.open("s1")
    async with client_of(network.at("liar"), "w0", peer_id="liar") as liar:
        await chain.clients[1].ask("session.open", open_params("s2", chain.parts[1], 1, 2))
        connection = liar.connection
        if sender == "client":
            await liar.ask("session.open", open_params("s2", chain.parts[0], 0, 2, "w1"))
        else:
            connection = await as_stage(network, "s2", 1)
        connection.send(ForwardBatch([ForwardRequest(**HONEST[sender] | changes)]))
        if payload_bytes:
            connection.send_bulk(memoryview(bytes(payload_bytes)), generation=0, stream=CHAIN_STREAM)
        await lost(connection)
    stage = chain.stages[sender == "stage"]
    [problem] = stage.problems
    assert isinstance(problem, ProtocolError)
    assert reason in problem.message
    assert await chain.generate("s1", PROMPT, 3) == tokens_of(CONFIG, PROMPT, 3, GREEDY)
    assert stage.stand_ins.engines[0].length("s1") == len(PROMPT) + 2
    if sender == "client":
        assert list(stage.stages.requests.sessions) == [("s1", 0)]
    else:
        assert stage.stand_ins.engines[0].length("s2") == 0


async def test_a_peer_that_is_no_stage_of_the_session_is_refused(
    chain: TestChain, network: MemoryNetwork, model: ModelDirectory
) -> None:
    await chain.open("s1")
    for session, index in (("s1", 2), ("other", 1), ("", 0)):
        with pytest.raises(Refused, match="not open here"):
            await as_stage(network, session, index)
    hello = local_hello(peer_id="x", name="x", roles=[], purpose="stage", job="s1", generation=1)
    with pytest.raises(Refused, match="only workers"):
        await dial(network.at("x"), "w1", PORT, hello, timeout_s=5)
    hello = local_hello(peer_id="x", name="x", roles=[], purpose="give", job=model.model)
    with pytest.raises(Refused, match="must be a client"):
        await dial(network.at("x"), "w1", PORT, hello, timeout_s=5)
    hello = local_hello(peer_id="x", name="x", roles=["worker"], purpose="model", job=model.model)
    with pytest.raises(Refused, match=r"model .* is not open here"):
        await dial(network.at("x"), "w1", PORT, hello, timeout_s=5)


async def test_a_client_cannot_change_anothers_session(chain: TestChain, network: MemoryNetwork) -> None:
    await chain.open("s1")
    async with client_of(network.at("other"), "w0", peer_id="other") as other:
        with pytest.raises(Refused, match="not open here"):
            await other.ask("session.close", {"session": "s1", "index": 0})
        params = {"session": "s1", "index": 0, "epoch": 5, "keep": 0, "next": place(chain.stages[1])}
        with pytest.raises(Refused, match="not open here"):
            await other.ask("session.resume", params)
        with pytest.raises(Refused, match="open here already"):
            await other.ask("session.open", open_params("s1", chain.parts[0], 0, 2, "w1"))
        await other.ask("part.free", {"part": chain.parts[0]})
        other.give(*ids_work("s1", PROMPT, keep=0, last=1))
        await lost(other.connection)
    assert await chain.generate("s1", PROMPT, 3) == tokens_of(CONFIG, PROMPT, 3, GREEDY)


BAD_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("session.open", {"next": None}, "must have a next stage"),
    ("session.open", {"stages": 3}, "reach the next"),
    ("session.open", {"index": 2, "stages": 3, "next": None}, "are not stage 2"),
    ("session.open", {"positions": 5000}, "model knows 4096"),
    ("session.open", {"part": "none"}, "not loaded here"),
    ("session.open", {"sampling": {"temperature": float("nan")}}, "temperature"),
    ("session.open", {"next": {"peer": "w1", "host": "w1", "port": 0}}, "port is 0"),
    ("session.resume", {"index": 0, "epoch": 1, "keep": 0, "next": None}, "not open here"),
    ("part.load", {}, "lacks"),
    ("part.free", {"part": 7}, "type int"),
    ("model.open", {"path": "/" + "x" * 300}, "cannot read"),
    ("links.measure", {}, "MeasureLinks"),
    ("jobs.create", {}, "does not support the request"),
]


@pytest.mark.parametrize(("method", "changes", "reason"), BAD_REQUESTS)
async def test_an_invalid_request_is_refused_with_the_reason(
    chain: TestChain, method: str, changes: dict[str, Any], reason: str
) -> None:
    params = {"session": "s1", **changes}
    if method == "session.open":
        params = open_params("s1", chain.parts[0], 0, 2, "w1") | changes
    if method == "part.load":
        params = {}
    with pytest.raises(Refused, match=reason):
        await chain.clients[0].ask(method, params)
    assert not chain.stages[0].stages.requests.sessions
    await chain.open("s2")
    assert await chain.generate("s2", PROMPT, 2) == tokens_of(CONFIG, PROMPT, 2, GREEDY)


# ---------------------------------------------------------------------------------------------- who is gone or slow


async def test_the_sessions_of_a_silent_client_end(chain: TestChain, network: MemoryNetwork) -> None:
    await chain.open("s1", silence_s=2.0)
    network.silence("client", "w0")
    await asyncio.sleep(1.9)
    assert chain.stages[0].sessions == 1
    await asyncio.sleep(1.0)
    assert chain.stages[0].sessions == 0


async def test_a_client_may_not_flood_a_stage(chain: TestChain) -> None:
    await chain.open("s1", positions=4000)
    chain.stages[0].threads.call_s["compute"] = 1.0
    for number in range(MOST_QUEUED + 5):
        chain.clients[0].give(*ids_work("s1", [1], keep=number, last=0, number=number, samples=0))
    await lost(chain.clients[0].connection)
    assert f"more than {MOST_QUEUED} requests" in chain.stages[0].problems[0].message


async def test_held_parts_are_reported_to_the_seed(chain: TestChain, model: ModelDirectory) -> None:
    await asyncio.sleep(2)
    [held] = chain.stages[0].told[-1].parts
    assert (held.part, held.model, held.start, held.stop, held.layers) == (chain.parts[0], model.model, 0, 3, 6)
    assert (held.sessions, held.tokens_per_s, held.next) == (0, 0.0, "")
    await chain.open("s1")
    chain.stages[0].threads.call_s["compute"] = 0.25
    await chain.generate("s1", PROMPT, 6)
    told = len(chain.stages[0].told)
    await asyncio.sleep(1)
    [held] = chain.stages[0].told[-1].parts
    engine = chain.stages[0].stand_ins.engines[0]
    assert (held.sessions, held.next, held.weights_bytes) == (1, "w1", engine.weights_bytes)
    assert held.cache_bytes == 512 * engine.cache_position_bytes
    assert held.compute_ms == pytest.approx(250)
    assert held.busy > 0.3
    assert held.out_position_bytes == 32
    await asyncio.sleep(100)
    assert len(chain.stages[0].told) - told < 8, "it tells though nothing changes"
    assert chain.stages[0].told[-1].parts[0].busy == 0
