"""A client and real stages, whose engines notice whatever goes wrong: the tokens are those of one undivided model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
from roles.serving.chain import StageChain
from roles.serving.worker_pool import WorkerPool
from roles.worker.stages import MAX_REQUESTS
from tests.roles.serving.decoding import Generation, generate
from tests.roles.stage_stand_in import sizes_of, tokens_of
from wire.chain_messages import NEXT_LOST, ChainBroken

from .scene import CONFIG, Scene, play

GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)
PROMPT = [5, 80, 11, 11, 3]
NEAR_S = 0.0005


async def collected(session: Generation) -> list[int]:
    return [token async for token in session]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_three_stages_give_what_one_model_gives(tmp_path: Path, sampling: Sampling) -> None:
    async def test(scene: Scene) -> None:
        async with scene.chain() as chain:
            assert [(stage.start, stage.stop) for stage in chain.plan.stages] == [(0, 2), (2, 4), (4, 6)]
            async with await generate(chain, PROMPT, max_new_tokens=12, sampling=sampling) as session:
                made: list[int] = []
                async for token in session:
                    made.append(token)
                    result = session.result
                    assert len(result.spent_us) == 3
                    assert 0.02 <= sum(result.spent_us) / 1e6 < result.took_s < 0.1
                assert session.ended == "length"
            assert made == tokens_of(CONFIG, PROMPT, 12, sampling)
        assert set(scene.sessions().values()) == {0}
        assert [len(stage.stages.cache.parts) for stage in scene.workers.values()] == [1, 1, 1, 0]  # they stay
        done = [item for item in scene.progress if item.ready]
        assert sorted(item.index for item in done) == [0, 1, 2]
        assert all(item.done_bytes == item.total_bytes > 0 for item in done)

    async def timed(scene: Scene) -> None:
        for worker in scene.workers.values():
            worker.threads.call_s["compute"] = 0.01
        await test(scene)

    play(tmp_path, timed, delay_s=lambda source, target: NEAR_S)


def test_a_stage_dies_under_more_sessions_than_a_worker_answers_requests_at_a_time(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        for worker in scene.workers.values():
            worker.threads.call_s["compute"] = 0.01
        async with scene.chain(positions=2000) as chain:

            async def one(number: int) -> list[int]:
                async with await generate(chain, [number, 7], max_new_tokens=6, sampling=GREEDY) as session:
                    return await collected(session)

            running = [asyncio.create_task(one(number)) for number in range(MAX_REQUESTS + 8)]
            await asyncio.sleep(2)  # virtual: all are open
            assert scene.sessions() == {"w0": len(running), "w1": len(running), "w2": len(running), "w3": 0}
            scene.kill("w1")
            for number, made in enumerate(await asyncio.gather(*running)):
                assert made == tokens_of(CONFIG, [number, 7], 6, GREEDY)
            assert [kind for _, kind, _ in scene.told].count("stage-replaced") == 1, "sought once for all"
            await asyncio.sleep(1)  # virtual: what was told of their ends arrives
            assert not any(stage.stages.requests.sessions for stage in scene.workers.values())

    play(tmp_path, test, delay_s=lambda source, target: NEAR_S)


def disturbed(
    tmp_path: Path,
    happens: Callable[[Scene, Generation, int], Awaitable[None]],
    *,
    prompt: list[int] = PROMPT,
    tokens: int = 12,
    names: tuple[str, ...] = ("w0", "w1", "w2", "w3"),
    prefill_encoding: str = "",
) -> tuple[Scene, Generation]:
    """Generate, with ``happens`` called before each token, and compare."""
    kept: list[tuple[Scene, Generation]] = []

    async def test(scene: Scene) -> None:
        for worker in scene.workers.values():
            worker.threads.call_s["compute"] = 0.01
        async with scene.chain(positions=6000, encodings=("", prefill_encoding)) as chain:
            session = await generate(chain, prompt, max_new_tokens=tokens, sampling=SEEDED)
            kept.append((scene, session))
            made: list[int] = []
            async with session:
                await happens(scene, session, 0)
                async for token in session:
                    made.append(token)
                    await happens(scene, session, len(made))
            assert made == tokens_of(CONFIG, prompt, tokens, SEEDED)

    play(tmp_path, test, names=names, delay_s=lambda source, target: NEAR_S)
    return kept[0]


@pytest.mark.parametrize(("victim", "prefill_encoding"), [("w0", ""), ("w1", "int8"), ("w2", "")])
def test_a_stage_dies_while_it_decodes(tmp_path: Path, victim: str, prefill_encoding: str) -> None:
    async def happens(scene: Scene, session: Generation, number: int) -> None:
        if number == 5:
            await asyncio.sleep(0.012)  # the work of the sixth token is under way
            scene.kill(victim)

    scene, session = disturbed(tmp_path, happens, prefill_encoding=prefill_encoding)
    ((what, took_s),) = session.mendings
    assert victim in what
    assert 0 < took_s < 0.5
    assert scene.workers["w3"].sessions == 0  # closed in the end


@pytest.mark.parametrize("victim", ["w0", "w2"])
def test_a_stage_dies_while_it_takes_the_prompt(tmp_path: Path, victim: str) -> None:
    async def happens(scene: Scene, session: Generation, number: int) -> None:
        if number == 0:
            await asyncio.sleep(0.025)  # of three chunks, one is through the first stages
            scene.kill(victim)

    disturbed(tmp_path, happens, prompt=[(7 * each) % 97 for each in range(4500)], tokens=2)


@pytest.mark.parametrize("victim", ["w1", "w2"])
def test_a_stage_dies_between_two_turns(tmp_path: Path, victim: str) -> None:
    async def test(scene: Scene) -> None:
        async with scene.chain() as chain:
            session = await generate(chain, PROMPT, max_new_tokens=5, sampling=SEEDED, positions=60)
            first = await collected(session)
            scene.kill(victim)
            await asyncio.sleep(1)
            assert len(session.mendings) == 1  # before anybody waits for it
            again = [*PROMPT, *first, 40, 41]
            session.go_on(again, max_new_tokens=6)
            assert await collected(session) == tokens_of(CONFIG, again, 6, SEEDED)
            assert session.tokens == tokens_of(CONFIG, again, 6, SEEDED)

    play(tmp_path, test)


@pytest.mark.parametrize("second", ["w2", "w3"], ids=["another stage", "the spare that takes over"])
def test_another_worker_dies_while_a_stage_is_replaced(tmp_path: Path, second: str) -> None:
    for later_s in (0.0, 0.04, 0.1):

        async def happens(scene: Scene, session: Generation, number: int, later_s: float = later_s) -> None:
            if number == 5:
                scene.kill("w1")
                await asyncio.sleep(later_s)
                scene.kill(second)

        directory = tmp_path / f"{later_s}"
        directory.mkdir()
        disturbed(directory, happens, names=("w0", "w1", "w2", "w3", "w4"))


def test_a_peer_with_room_takes_a_second_stage(tmp_path: Path) -> None:
    async def happens(scene: Scene, session: Generation, number: int) -> None:
        if number == 5:
            scene.kill("w1")

    scene, session = disturbed(tmp_path, happens, names=("w0", "w1", "w2"))
    assert len(session.mendings) == 1
    assert sorted(len(stage.stages.cache.parts) for stage in scene.workers.values()) == [1, 1, 2]


@pytest.mark.parametrize("victim", ["w0", "w2"])
def test_a_frozen_stage_is_noticed_within_two_seconds(tmp_path: Path, victim: str) -> None:
    frozen_s: list[float] = []

    async def happens(scene: Scene, session: Generation, number: int) -> None:
        now = asyncio.get_running_loop().time
        if number == 5:
            frozen_s.append(now())
            scene.freeze(victim)
        if number == 6:
            frozen_s.append(now())

    _, session = disturbed(tmp_path, happens)
    assert frozen_s[1] - frozen_s[0] < 2.5
    assert len(session.mendings) == 1


def test_a_broken_link_between_two_stages_is_dialled_again(tmp_path: Path) -> None:
    async def happens(scene: Scene, session: Generation, number: int) -> None:
        if number == 5:
            scene.network.cut("w0", "w1")
            scene.network.mend("w0", "w1")

    scene, session = disturbed(tmp_path, happens)
    assert len(session.mendings) == 0 or "w3" not in session.mendings[0][0]
    assert not [news for news in scene.told if news[1] == "stage-lost"]  # it was dialled again


def test_a_stage_that_the_one_before_cannot_reach_is_replaced(tmp_path: Path) -> None:
    async def happens(scene: Scene, session: Generation, number: int) -> None:
        if number == 5:
            scene.network.cut("w0", "w1")

    scene, _ = disturbed(tmp_path, happens)
    assert [text for _, kind, text in scene.told if kind == "stage-lost"]
    assert len(scene.workers["w3"].stages.cache.parts) == 1


def test_reports_of_a_stage_that_a_peer_no_longer_holds_are_ignored(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        async with scene.chain() as chain, await generate(chain, PROMPT, max_new_tokens=3, sampling=GREEDY) as session:
            first = chain.pool.peers["w0"]
            with pytest.raises(ProtocolError, match="reported stage 2"):
                session.session.take_untrusted(
                    first, ChainBroken(session.session.id, 1, 2, NEXT_LOST, "the next stage is lost")
                )
            session.session.take_untrusted(first, ChainBroken(session.session.id, 0, 2, NEXT_LOST, "it is lost"))
            assert await collected(session) == tokens_of(CONFIG, PROMPT, 3, GREEDY)
            assert not session.mendings

    play(tmp_path, test)


def test_a_chain_without_a_spare_fails_with_a_remedy(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        async with scene.chain() as chain:
            session = await generate(chain, PROMPT, max_new_tokens=50, sampling=SEEDED)
            made: list[int] = []

            async def all_of_it() -> None:
                async for token in session:
                    made.append(token)
                    if len(made) == 5:
                        scene.kill("w1")

            with pytest.raises(NetworkError) as caught:
                await all_of_it()
            assert 5 <= len(made) < 50
            assert made == tokens_of(CONFIG, PROMPT, 50, SEEDED)[: len(made)]
            assert session.tokens == made
            assert "cannot be repaired" in caught.value.message
            assert "layers 2 to 3" in caught.value.message
            assert "p2ptrain join" in caught.value.remedy
            with pytest.raises(P2PTrainError):  # another one is refused, and says why
                await generate(chain, PROMPT, max_new_tokens=5, sampling=SEEDED)

    # Memory for one part and its sessions, not for two.
    play(tmp_path, test, names=("w0", "w1", "w2"), limit_bytes=58_000)


def test_a_session_that_does_not_fit_is_refused_without_replacing_a_stage(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        async with scene.chain() as chain:
            with pytest.raises(PeerError, match="positions"):
                await generate(chain, PROMPT, max_new_tokens=900, sampling=SEEDED)
            assert not scene.told
            session = await generate(chain, PROMPT, max_new_tokens=5, sampling=SEEDED)
            assert await collected(session) == tokens_of(CONFIG, PROMPT, 5, SEEDED)
            session.go_on(PROMPT, max_new_tokens=50)
            with pytest.raises(UserError, match="positions"):
                await collected(session)

    play(tmp_path, test, limit_bytes=58_000)


def test_a_worker_that_cannot_load_is_replaced(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        replica = await scene.replica()
        model = await scene.model()
        plan = await scene.plan(replica, model)
        scene.workers["w1"].stages.cache.limit_bytes = 100  # since it made its offer
        chain = await StageChain.load(replica, model, plan)
        assert [stage.peer.name for stage in chain.plan.stages] == ["w0", "w3", "w2"]
        session = await generate(chain, PROMPT, max_new_tokens=5, sampling=SEEDED)
        assert await collected(session) == tokens_of(CONFIG, PROMPT, 5, SEEDED)
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

    play(tmp_path, test)


def test_a_model_that_does_not_split_is_refused_as_the_users_mistake(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        replica = await scene.replica()
        with pytest.raises(Refused, match="not a stand-in") as caught:
            await replica.measure_model('{"model_type": "other"}', "")
        assert caught.value.exit_code == UserError.exit_code
        await replica.close()

    play(tmp_path, test)


def test_another_worker_measures_the_model_if_one_does_not_answer(tmp_path: Path) -> None:
    async def nonsense(_: object, config: str, dtype: str) -> dict[str, Any]:
        asked.append(config)
        return asdict(sizes_of(config)) | {"dtype": "int8", "width": 8}

    asked = list[str]()

    async def test(scene: Scene) -> None:
        replica = await scene.replica()
        scene.freeze("w0")
        scene.workers["w1"].stages._measure = nonsense
        found = await replica.measure_model(CONFIG, "")
        assert (found.dtype, asked) == ("fp32", [CONFIG])
        for name in scene.workers:
            scene.kill(name)
        with pytest.raises(NetworkError):
            await replica.measure_model(CONFIG, "bf16")
        await replica.close()

    play(tmp_path, test)


def test_the_next_client_finds_the_parts_loaded(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        async with scene.chain(without="w0") as chain:
            assert sum(each.received_bytes for each in chain.loaded) > 0
        async with scene.chain() as chain:  # w0 would be as good, and the lowest id decides between equals
            assert [stage.peer.name for stage in chain.plan.stages] == ["w1", "w2", "w3"]
            assert chain.plan.loaded
            assert [each.received_bytes for each in chain.loaded] == [0, 0, 0]

    play(tmp_path, test)


def test_a_model_on_a_worker_is_sent_to_the_others(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        local = await scene.model()
        replica = await scene.replica()
        model = await replica.model_at(str(tmp_path / "model"), worker="w3")
        assert model.id == local.id
        assert model.sender is not None
        files = await replica.files(model, ["tokenizer.json", "config.json", "none.json"])
        assert files["config.json"].decode() == CONFIG
        assert set(files) == {"tokenizer.json", "config.json"}
        assert await replica.files(local, ["config.json"]) == {"config.json": CONFIG.encode()}
        plan = await scene.plan(replica, model)
        chain = await StageChain.load(replica, model, plan)
        assert all(each.read_bytes > 0 for each in chain.loaded)  # they have that directory, too: one machine
        session = await generate(chain, PROMPT, max_new_tokens=5, sampling=SEEDED)
        assert await collected(session) == tokens_of(CONFIG, PROMPT, 5, SEEDED)
        await chain.close()
        with pytest.raises(Refused, match="no worker has a model"):
            await replica.model_at(str(tmp_path / "nothing"))
        with pytest.raises(UserError, match="no worker 'w9'"):
            await replica.model_at("x", worker="w9")
        await replica.close()

    play(tmp_path, test)


def test_a_worker_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
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

    play(tmp_path, test)
