"""A client and real stages, whose engines notice whatever goes wrong: the tokens are those of one undivided model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import (
    NetworkError,
    P2PTrainError,
    PeerError,
    ProtocolError,
    Refused,
    ResourceError,
    UserError,
)
from p2ptrain.core.serving import Sampling
from roles.serving import chain_core
from roles.serving.chain import MOST_SESSIONS, StageChain
from roles.serving.chain_core import ChainPhase, ChainSessionCore
from roles.serving.chain_session import ChainSession
from roles.serving.model import PassRequest
from roles.serving.worker_pool import WorkerPool
from roles.worker.forward_requests import ROOM_S
from roles.worker.stage_requests import MeasureRequest
from tests.roles.stage_stand_in import sizes_of, tokens_of
from wire.chain_messages import NEXT_LOST, ChainBroken

from .decoding import decode
from .scene import CONFIG, Scene, scene_of

pytestmark = pytest.mark.virtual_time

GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)
BELOW_ZERO = Sampling(temperature=1.5, seed=-4)
PROMPT = [5, 80, 11, 11, 3]
COMPUTE_S = 0.01
CHUNK = 4


def slow_down(scene: Scene) -> None:
    for worker in scene.workers.values():
        worker.threads.call_s["compute"] = COMPUTE_S


async def open_session(chain: StageChain, sampling: Sampling = SAMPLED, positions: int = 60) -> ChainSession:
    return await chain.open(positions=positions, sampling=sampling, sample_from=1)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, BELOW_ZERO])
@pytest.mark.parametrize("stages", [1, 3])
async def test_the_tokens_are_those_of_plain_decoding(scene: Scene, sampling: Sampling, stages: int) -> None:
    slow_down(scene)
    wanted = tokens_of(CONFIG, PROMPT, 30, sampling)
    async with scene.chain(stages=stages) as chain:
        assert (chain.vocab_size, chain.context, chain.dtype) == (97, 6000, "fp32")
        for drafts, passes in ((0, 1), (1, 1), (4, 3), (16, 1), (2, 8)):
            session = await open_session(chain, sampling)
            made = await decode(session, PROMPT, wanted, drafts=drafts, seed=drafts, chunk=2, passes=passes)
            assert bool(made.stats.accepted) == bool(drafts)
            await session.close()
    await asyncio.sleep(1)  # virtual: what was told of their ends arrives
    assert set(scene.sessions().values()) == {0}
    assert sum(len(worker.stages.cache.parts) for worker in scene.workers.values()) == stages, "parts stay"
    last = {index: (done_bytes, total_bytes) for index, done_bytes, total_bytes in scene.progress}
    assert sorted(last) == list(range(stages))
    assert all(done_bytes == total_bytes > 0 for done_bytes, total_bytes in last.values())


# --------------------------------------------------------------------------------------------------- whatever is lost


def validate(core: ChainSessionCore) -> None:
    """Raise ``AssertionError`` where what must always be so is not."""
    numbers = [request.number for request in core.awaited if request.due]
    assert numbers == sorted(set(numbers))
    assert not numbers or numbers[-1] <= core.last_number
    size = len(core.ids)
    for each in core.passes:
        assert each.work.keep <= size, "a pass keeps more than there is"
        size = each.work.keep + len(each.work.ids)
    for index, stage in enumerate(core._stages):
        assert stage.epoch <= core.epoch
        assert stage.seat >= 0 or not (stage.opened or stage.ask)
        if core.phase is ChainPhase.RUNNING:
            assert core._ready(index)
    assert (core._mending_since is None) == (core.phase is ChainPhase.RUNNING) or core.phase is ChainPhase.ENDED
    if core.phase is ChainPhase.RUNNING:
        assert core.awaited == core.passes
        assert all(each.due for each in core.passes), "a pass waits without a deadline"


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are validated after each event, and rebuild stages in many small requests."""
    handle = ChainSessionCore.handle

    def checked(core: ChainSessionCore, event: chain_core.ChainEvent, now: float) -> list[Any]:
        instructions = handle(core, event, now)
        validate(core)
        return instructions

    monkeypatch.setattr(ChainSessionCore, "handle", checked)
    monkeypatch.setattr(chain_core, "SHARED_CHUNK", CHUNK)


Fault = tuple[float, Callable[[Scene], None]]


async def decode_amid(
    directory: Path, stages: int, faults: list[Fault], rng: random.Random, *, prompt: list[int], drafts: int
) -> int:
    """Decode 12 tokens while these faults happen, each at its time. Returns the number of mendings."""
    names = [f"w{number}" for number in range(stages + 4)]
    async with (
        scene_of(directory, names=names, delay_s=lambda *_: rng.choice([0.0, 0.001, 0.01])) as scene,
        scene.chain(stages=stages) as chain,
    ):
        slow_down(scene)
        for at_s, happens in faults:
            asyncio.get_running_loop().call_later(at_s, happens, scene)
        session = await open_session(chain)
        wanted = tokens_of(CONFIG, prompt, 12, SAMPLED)
        passes = rng.randrange(1, 5)
        await decode(
            session, prompt, wanted, drafts=drafts, right=0.8, seed=rng.randrange(99), chunk=CHUNK, passes=passes
        )
        await session.close()
        return len(chain.times.mendings)


def cut_for_a_while(one: str, other: str, seconds: float) -> Callable[[Scene], None]:
    def happens(scene: Scene) -> None:
        scene.network.cut(one, other)
        asyncio.get_running_loop().call_later(seconds, scene.network.mend, one, other)

    return happens


def killed(name: str) -> Callable[[Scene], None]:
    return lambda scene: scene.kill(name)


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize("seed", range(20))
async def test_the_same_tokens_come_whatever_is_lost(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randrange(1, 5)
    names = [f"w{number}" for number in range(stages + 1)]
    faults: list[Fault] = [(rng.uniform(0, 0.8), killed(name)) for name in rng.sample(names, rng.randrange(3))]
    for _ in range(rng.randrange(3)):
        one, other = rng.sample(names, 2)
        faults.append((rng.uniform(0, 0.8), cut_for_a_while(one, other, rng.choice([0.0, 0.2]))))
    prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 30))]
    await decode_amid(tmp_path, stages, faults, rng, prompt=prompt, drafts=rng.choice([0, 3, 6]))


@pytest.mark.usefixtures("validated")
async def test_a_loss_at_every_moment(tmp_path: Path) -> None:
    """A stage is lost at each moment of a run, and another one, or its successor, while the first is replaced."""
    pairs = [("w0", "w1", 0.01), ("w1", "w2", 0.05), ("w2", "w3", 0.03), ("w1", "w3", 0.02), ("w2", "w0", 0.09)]
    mendings = 0
    for moment in range(25):
        first, second, later_s = pairs[moment % len(pairs)]
        directory = tmp_path / f"{moment}"
        directory.mkdir()
        faults = [(0.01 * moment, killed(first)), (0.01 * moment + later_s, killed(second))]
        mendings += await decode_amid(directory, 3, faults, random.Random(moment), prompt=[*range(8)], drafts=3)
    assert mendings > 10, "most faults meet a session that runs"


async def disturb(
    scene: Scene, happens: Callable[[], object], *, prefill_encoding: str = ""
) -> list[tuple[str, float]]:
    """Decode; this happens before the sixth token. Returns the mendings."""

    async def before(tokens: int) -> None:
        if tokens == 5:
            happens()

    slow_down(scene)
    async with scene.chain(encodings=("", prefill_encoding)) as chain:
        session = await open_session(chain)
        await decode(session, PROMPT, tokens_of(CONFIG, PROMPT, 12, SAMPLED), before=before)
        await session.close()
    return chain.times.mendings


@pytest.mark.parametrize("encoding", ["", "int8"])
async def test_a_stage_that_dies_is_replaced_once(scene: Scene, encoding: str) -> None:
    def happens() -> None:
        asyncio.get_running_loop().call_later(0.012, scene.kill, "w1")  # it computes then

    ((what, took_s),) = await disturb(scene, happens, prefill_encoding=encoding)
    assert "w1" in what
    assert 0 < took_s < 0.5
    assert scene.workers["w3"].sessions == 0  # closed in the end


async def test_a_stage_dies_under_many_sessions(scene: Scene) -> None:
    slow_down(scene)
    async with scene.chain(positions=4000) as chain:
        barrier = asyncio.Barrier(41)

        async def wait_for_others(tokens: int) -> None:
            if tokens == 3:
                await barrier.wait()

        async def write(number: int) -> None:
            session = await open_session(chain, GREEDY, 8)
            await decode(session, [number, 7], tokens_of(CONFIG, [number, 7], 6, GREEDY), before=wait_for_others)
            await session.close()

        running = [asyncio.create_task(write(number)) for number in range(40)]
        await barrier.wait()
        assert scene.sessions() == {"w0": len(running), "w1": len(running), "w2": len(running), "w3": 0}
        scene.kill("w1")
        await asyncio.gather(*running)
        assert [kind for _, kind, _ in scene.told].count("stage-replaced") == 1, "sought once for all"
        [engine] = scene.workers["w3"].stand_ins.engines
        assert max(map(len, engine.batches)) > 8, "it computes what was lost of several sessions together"
        await asyncio.sleep(1)  # virtual: what was told of their ends arrives
        assert not any(stage.stages.requests.sessions for stage in scene.workers.values())


@pytest.mark.parametrize("victim", ["w1", "w2"])
async def test_a_stage_dies_between_two_turns(scene: Scene, victim: str) -> None:
    async with scene.chain() as chain:
        session = await open_session(chain)
        first = await decode(session, PROMPT, tokens_of(CONFIG, PROMPT, 5, SAMPLED))
        scene.kill(victim)
        await asyncio.sleep(1)
        assert len(chain.times.mendings) == 1  # before anybody waits for it
        again = [*PROMPT, *first.tokens, 40, 41]
        await decode(session, again, tokens_of(CONFIG, again, 6, SAMPLED), cached=len(PROMPT) + 4)
        await session.close()


async def test_a_peer_with_room_takes_a_second_stage(tmp_path: Path) -> None:
    async with scene_of(tmp_path, names=("w0", "w1", "w2")) as scene:
        assert len(await disturb(scene, lambda: scene.kill("w1"))) == 1
        assert sorted(len(stage.stages.cache.parts) for stage in scene.workers.values()) == [1, 1, 2]


@pytest.mark.parametrize("victim", ["w0", "w2"])
async def test_a_frozen_stage_is_replaced_within_two_seconds(scene: Scene, victim: str) -> None:
    ((_, took_s),) = await disturb(scene, lambda: scene.freeze(victim))
    assert took_s < 2.5


async def test_a_broken_link_between_two_stages_is_dialled_again(scene: Scene) -> None:
    def happens() -> None:
        scene.network.cut("w0", "w1")
        scene.network.mend("w0", "w1")

    assert not any("w3" in what for what, _ in await disturb(scene, happens))
    assert not [news for news in scene.told if news[1] == "stage-lost"]


async def test_a_stage_that_the_one_before_cannot_reach_is_replaced(scene: Scene) -> None:
    await disturb(scene, lambda: scene.network.cut("w0", "w1"))
    assert [text for _, kind, text in scene.told if kind == "stage-lost"]
    assert len(scene.workers["w3"].stages.cache.parts) == 1


async def test_reports_of_a_stage_that_a_peer_no_longer_holds_are_ignored(scene: Scene) -> None:
    async with scene.chain() as chain:
        session = await open_session(chain, GREEDY)
        first = chain.pool.peers["w0"]
        with pytest.raises(ProtocolError, match="reported stage 2"):
            session.take_untrusted(first, ChainBroken(session.id, 1, 2, NEXT_LOST, "the next stage is lost"))
        session.take_untrusted(first, ChainBroken(session.id, 0, 2, NEXT_LOST, "it is lost"))
        await decode(session, PROMPT, tokens_of(CONFIG, PROMPT, 3, GREEDY))
        assert not chain.times.mendings


async def test_a_chain_without_a_spare_fails_with_a_remedy(tmp_path: Path) -> None:
    async with scene_of(tmp_path, names=("w0", "w1", "w2"), limit_bytes=58000) as scene:

        async def before(tokens: int) -> None:
            if tokens == 5:
                scene.kill("w1")

        async with scene.chain() as chain:
            session = await open_session(chain)
            with pytest.raises(NetworkError) as caught:
                await decode(session, PROMPT, tokens_of(CONFIG, PROMPT, 50, SAMPLED), before=before)
            assert "cannot be repaired" in caught.value.message
            assert "layers 2 to 3" in caught.value.message
            assert "p2ptrain join" in caught.value.remedy
            with pytest.raises(P2PTrainError):  # another one is refused, and says why
                await open_session(chain)


# ------------------------------------------------------------------------------------------------ sessions and passes


async def test_several_sessions_are_in_the_chain_at_once(scene: Scene) -> None:
    slow_down(scene)
    wanted = tokens_of(CONFIG, PROMPT, 12, SAMPLED)
    now = asyncio.get_running_loop().time
    async with scene.chain() as chain:

        async def write() -> float:
            session = await open_session(chain)
            began = now()
            await decode(session, PROMPT, wanted)
            took_s = now() - began
            await session.close()
            return took_s

        alone_s = await write()
        together_s = max(await asyncio.gather(write(), write(), write()))
        assert together_s < 1.5 * alone_s


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize("victim", ["", "w1"])
async def test_texts_that_need_more_memory_than_there_is_are_written_one_after_the_other(
    scene: Scene, victim: str
) -> None:
    """Each of them fits alone. The last comers lose their positions, wait, and are computed again."""
    slow_down(scene)
    async with scene.chain(positions=128) as chain:

        async def write(number: int) -> None:
            prompt = [number, *range(50)]
            session = await open_session(chain, positions=80)
            await decode(session, prompt, tokens_of(CONFIG, prompt, 29, SAMPLED), drafts=3)
            await session.close()

        began = asyncio.get_running_loop().time()
        running = [asyncio.create_task(write(number)) for number in range(3 if victim else 18)]
        if victim:
            asyncio.get_running_loop().call_later(0.3, scene.kill, victim)
        await asyncio.gather(*running)
        assert asyncio.get_running_loop().time() - began < ROOM_S, "those that wait do not hold up those that end"
    engines = [engine for worker in scene.workers.values() for engine in worker.stand_ins.engines]
    assert any(engine.preemptions for engine in engines)
    assert chain.preemptions > 0
    assert {engine.pool_blocks for engine in engines} == {2}


async def test_sessions_that_begin_alike_compute_it_once(scene: Scene) -> None:
    slow_down(scene)
    async with scene.chain(positions=600) as chain:
        prompt = [number % 97 for number in range(150)]
        first = await chain.open(positions=200, sampling=SAMPLED, sample_from=150, ids=prompt)
        assert first.cached == 0
        made = await decode(first, prompt, tokens_of(CONFIG, prompt, 45, SAMPLED), chunk=50, drafts=2)
        await first.close()
        again = [*made.ids, 7]
        for ids, cached in ((again, 192), (again[:193], 192), (again[:192], 128), ([3, *again], 0)):
            session = await chain.open(positions=230, sampling=SAMPLED, sample_from=len(ids), ids=ids)
            assert session.cached == cached
            await decode(session, ids, tokens_of(CONFIG, ids, 5, SAMPLED), cached=cached)
            await session.close()
        scene.kill("w1")
        await asyncio.sleep(1)
        session = await chain.open(positions=230, sampling=SAMPLED, sample_from=len(again), ids=again)
        assert session.cached == 0, "a stage is new"
        await decode(session, again, tokens_of(CONFIG, again, 5, SAMPLED))
        await session.close()


async def test_invalid_sessions_and_passes_are_refused(scene: Scene) -> None:
    async with scene.chain() as chain:
        for positions, words in ((6001, "context of 6000"), (0, "0 positions")):
            with pytest.raises(UserError, match=words):
                await open_session(chain, positions=positions)
        sessions = [await open_session(chain, positions=10) for _ in range(MOST_SESSIONS)]
        with pytest.raises(Refused, match="64 sessions are open"):
            await open_session(chain, positions=10)
        for session in sessions:
            await session.close()
        session = await open_session(chain, positions=10)
        with pytest.raises(UserError, match="11 positions are too many"):
            await session.append(PassRequest(8, (1, 2, 3), 1))
        await session.close()
        await chain.close()
        with pytest.raises(UserError, match="closed"):
            await open_session(chain, positions=10)


async def test_a_session_that_is_closed_within_a_pass(scene: Scene) -> None:
    slow_down(scene)
    async with scene.chain() as chain:
        session = await open_session(chain)
        running = asyncio.create_task(session.append(PassRequest(0, (1, 2), 2)))
        await asyncio.sleep(COMPUTE_S)
        await session.close()
        for late in (running, session.append(PassRequest(0, (1,), 1))):
            with pytest.raises(P2PTrainError, match="closed"):
                await late
        other = await open_session(chain)
        cancelled = asyncio.create_task(other.append(PassRequest(0, (1, 2), 2)))
        await asyncio.sleep(COMPUTE_S)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await other.close()
    await asyncio.sleep(1)  # virtual: what was told of their ends arrives
    assert set(scene.sessions().values()) == {0}


async def test_a_session_that_does_not_fit_is_refused_without_replacing_a_stage(tmp_path: Path) -> None:
    async with scene_of(tmp_path, limit_bytes=58000) as scene, scene.chain() as chain:
        with pytest.raises(PeerError, match="positions"):
            await open_session(chain, positions=905)
        assert not scene.told
        session = await open_session(chain, positions=10)
        await decode(session, PROMPT, tokens_of(CONFIG, PROMPT, 5, SAMPLED))


# --------------------------------------------------------------------------------------------------- pools and models


async def test_a_worker_that_cannot_load_is_replaced(scene: Scene) -> None:
    replica = await scene.replica()
    model = await scene.model()
    plan = await scene.plan(replica, model)
    scene.workers["w1"].stages.cache.limit_bytes = 100  # since it made its offer
    chain = await StageChain.load(replica, model, plan)
    assert [stage.peer.name for stage in chain.plan.stages] == ["w0", "w3", "w2"]
    await decode(await open_session(chain), PROMPT, tokens_of(CONFIG, PROMPT, 5, SAMPLED))
    await chain.close()
    for worker in scene.workers.values():
        worker.stages.cache.limit_bytes = 100
    with pytest.raises(ResourceError) as caught:
        await StageChain.load(replica, model, await scene.plan(replica, model, stages=4))
    assert "w" in caught.value.message
    assert caught.value.remedy
    for worker in scene.workers.values():
        worker.stages.cache.limit_bytes = 1 << 20
    await replica.close()


async def test_a_model_that_does_not_split_is_refused_as_the_users_mistake(scene: Scene) -> None:
    replica = await scene.replica()
    with pytest.raises(Refused, match="not a stand-in") as caught:
        await replica.measure_model('{"model_type": "other"}', "")
    assert caught.value.exit_code == UserError.exit_code
    await replica.close()


async def test_another_worker_measures_the_model_if_one_does_not_answer(scene: Scene) -> None:
    asked: list[str] = []

    async def nonsense(request: MeasureRequest) -> dict[str, Any]:
        asked.append(request.config)
        return asdict(sizes_of(request.config)) | {"dtype": "int8", "width": 8}

    replica = await scene.replica()
    first, second, *_ = replica.peers.values()
    scene.freeze(first.name)
    scene.workers[second.name].stages._measure = nonsense
    found = await replica.measure_model(CONFIG, "")
    assert (found.dtype, asked) == ("fp32", [CONFIG])
    for name in scene.workers:
        scene.kill(name)
    with pytest.raises(NetworkError):
        await replica.measure_model(CONFIG, "bf16")
    await replica.close()


async def test_parts_with_other_weights_are_loaded_beside_each_other(scene: Scene) -> None:
    async with scene.chain() as chain:
        layers = [(stage.start, stage.stop) for stage in chain.plan.stages]
    for loaded in (False, True):
        async with scene.chain(weights="int8") as chain:
            assert chain.plan.loaded == loaded
            assert [(stage.start, stage.stop) for stage in chain.plan.stages] == layers
    held = [part for worker in scene.workers.values() for part in worker.stages.cache.parts.values()]
    assert sorted(part.spec.weights for part in held) == 3 * [""] + 3 * ["int8"]


async def test_the_next_client_finds_the_parts_loaded(scene: Scene) -> None:
    async with scene.chain(without="w0") as chain:
        assert sum(each.received_bytes for each in chain.loaded) > 0
    async with scene.chain() as chain:  # w0 would be as good, and the lowest id decides between equals
        assert [stage.peer.name for stage in chain.plan.stages] == ["w1", "w2", "w3"]
        assert chain.plan.loaded
        assert [each.received_bytes for each in chain.loaded] == [0, 0, 0]


async def test_a_model_on_a_worker_is_sent_to_the_others(tmp_path: Path, scene: Scene) -> None:
    local = await scene.model()
    replica = await scene.replica()
    model = await replica.model_at(str(tmp_path / "model"), "w3")
    assert model.id == local.id
    assert model.sender is not None
    files = await replica.files(model, ["tokenizer.json", "config.json", "none.json"])
    assert files["config.json"].decode() == CONFIG
    assert set(files) == {"tokenizer.json", "config.json"}
    plan = await scene.plan(replica, model)
    chain = await StageChain.load(replica, model, plan)
    assert all(each.read_bytes > 0 for each in chain.loaded)  # they have that directory, too: one machine
    await decode(await open_session(chain), PROMPT, tokens_of(CONFIG, PROMPT, 5, SAMPLED))
    await chain.close()
    with pytest.raises(Refused, match="w3"):
        await replica.model_at(str(tmp_path / "nothing"), "w3")
    await replica.close()


async def test_a_worker_that_does_not_answer_is_left_out(scene: Scene) -> None:
    scene.kill("w1")
    scene.network.silence("w2", "client")
    began = asyncio.get_running_loop().time()
    replica = await scene.replica()
    assert asyncio.get_running_loop().time() - began < 6
    assert sorted(replica.peers) == ["w0", "w3"]
    assert set(replica.refused) == {"w1", "w2"}
    await replica.close()
    scene.kill("w0")
    scene.kill("w3")
    with pytest.raises(NetworkError, match="w0: "):
        await scene.replica()
    with pytest.raises(UserError, match="no worker"):
        await WorkerPool.connect(scene.context, [])
    scene.network.mend("w2", "client")
