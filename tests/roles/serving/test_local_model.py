"""A whole model's sessions: whose turn it is, how many there may be, and what is left of those that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import ConfigError, ConnectionLost, P2PTrainError, Refused, ResourceError, UserError
from p2ptrain.core.serving import BLOCK_POSITIONS, Pass, Ran, Sampling
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock
from roles.compute_thread import ComputeThread
from roles.serving.local_model import LocalModel, load_local_engine
from roles.serving.model import Decoding, ModelSession, PassRequest
from tests.roles.stage_stand_in import StandInStage, stand_in_config, stand_in_part, tokens_of

from .decoding import decode

CONFIG = stand_in_config(layers=3, context=200)
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)
PROMPT = [5, 80, 11, 11, 3]
PASS_S = 0.5


@asynccontextmanager
async def target_of(engine: StandInStage, **options: Any) -> AsyncIterator[LocalModel]:
    threads = LoopThreads()
    threads.call_s["compute"] = PASS_S
    target = LocalModel(engine, ComputeThread(threads), LoopClock(), context=200, **options)
    try:
        yield target
    finally:
        await target.close()
        assert not engine.sessions
        assert not target.sessions


def engine_of(config: str = CONFIG, **options: Any) -> StandInStage:
    return stand_in_part(config, 0, 3, **options)


def batches_of(engine: StandInStage) -> list[dict[str, int]]:
    """The batches that the engine computes from now on: positions by session."""
    batches: list[dict[str, int]] = []
    run = engine.run

    def record(passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
        batches.append({name: work.count for name, work in passes.items()})
        return run(passes)

    engine.run = record  # type: ignore[method-assign]
    return batches


@pytest.mark.virtual_time
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("drafts", [0, 1, 4, 16])
async def test_the_tokens_are_those_of_plain_decoding(sampling: Sampling, drafts: int) -> None:
    wanted = tokens_of(CONFIG, PROMPT, 40, sampling)
    async with target_of(engine_of()) as target:
        assert (target.vocab_size, target.context) == (97, 200)
        for seed in range(5):
            session = await target.open(positions=60, sampling=sampling, sample_from=1)
            made = await decode(session, PROMPT, wanted, drafts=drafts, seed=seed, chunk=2)
            assert made.stats.passes + made.stats.accepted == 39
            assert bool(made.stats.accepted) == bool(drafts)
            await session.close()


@pytest.mark.virtual_time
async def test_passes_of_all_sessions_are_computed_together() -> None:
    engine = engine_of()
    batches = batches_of(engine)
    async with target_of(engine) as target:
        sessions = [await target.open(positions=60, sampling=GREEDY, sample_from=1) for _ in range(3)]

        async def three_passes(session: ModelSession) -> list[float]:
            passed = [await session.append(PassRequest(each, (each,), 1)) for each in range(3)]
            return [each.took_s for each in passed]

        times = await asyncio.gather(*(three_passes(session) for session in sessions))
        assert times == [[pytest.approx(PASS_S)] * 3] * 3
        assert [len(batch) for batch in batches] == [3, 3, 3]


@pytest.mark.virtual_time
async def test_engine_that_does_not_batch_computes_one_text_after_another() -> None:
    engine = engine_of()
    engine.is_batched = False  # type: ignore[misc]
    batches = batches_of(engine)
    async with target_of(engine) as target:
        sessions = [await target.open(positions=60, sampling=GREEDY, sample_from=1) for _ in range(2)]
        await asyncio.gather(*(session.append(PassRequest(0, (1,), 1)) for session in sessions))
        results = await asyncio.gather(*(session.append(PassRequest(1, (1,), 1)) for session in sessions))
        assert [list(batch.values()) for batch in batches[1:]] == [[1]] * 2
        assert [result.took_s for result in results] == [pytest.approx(PASS_S)] * 2, "only its own time counts"


@pytest.mark.virtual_time
async def test_wrong_drafts_are_cut_off() -> None:
    wanted = tokens_of(CONFIG, PROMPT, 6, GREEDY)
    async with target_of(engine_of()) as target:
        session = await target.open(positions=60, sampling=GREEDY, sample_from=len(PROMPT))
        size = len(PROMPT)
        requests = [
            PassRequest(0, tuple(PROMPT), 1),
            PassRequest(size, (*wanted[:2], 3), 3),  # the last draft is wrong
            PassRequest(size + 2, (wanted[2], wanted[3]), 2),
            PassRequest(size + 3, (wanted[3], wanted[4]), 2),
        ]
        tokens = [list((await session.append(request)).tokens) for request in requests]
        assert tokens == [wanted[:1], [*wanted[1:3], tokens[1][2]], wanted[3:5], wanted[4:6]]
        await session.close()


@pytest.mark.virtual_time
async def test_prompt_is_computed_in_chunks_while_another_text_is_written() -> None:
    engine = engine_of(stand_in_config(layers=3))
    batches = batches_of(engine)
    async with target_of(engine) as target:
        target.context = None
        one, other = [
            await target.open(positions=2000, sampling=GREEDY, sample_from=sample_from) for sample_from in (1, 1000)
        ]
        await one.append(PassRequest(0, (1,), 1))
        prompt = asyncio.create_task(other.append(PassRequest(0, tuple(range(90)) * 11, 1, targets=(5,) * 300)))
        at = 1
        while not prompt.done():
            await one.append(PassRequest(at, (1,), 1))
            at += 1
        mixed = [batch for batch in batches if other.name in batch]
        assert [batch.get(one.name) for batch in mixed] == [1] * 7, "each chunk is computed beside a token"
        assert [batch[other.name] for batch in mixed] == [*5 * [128], 50, 300], "what is scored stays together"
        result = await prompt
        assert result.took_s == pytest.approx(7 * PASS_S)
        await one.close()
        third = await target.open(positions=2000, sampling=GREEDY, sample_from=1000)
        again = await third.append(PassRequest(0, tuple(range(90)) * 11, 1, targets=(5,) * 300))
        assert (again.tokens, again.scores) == (result.tokens, result.scores)
        assert batches[-1] == {third.name: 990}


@pytest.mark.virtual_time
async def test_pass_that_is_cancelled_leaves_the_queue() -> None:
    engine = engine_of()
    async with target_of(engine) as target:
        one, other = [await target.open(positions=60, sampling=GREEDY, sample_from=1) for _ in range(2)]
        running = asyncio.create_task(other.append(PassRequest(0, (1,), 1)))
        await asyncio.sleep(PASS_S / 5)
        waiting = asyncio.create_task(one.append(PassRequest(0, (2,), 1)))
        await asyncio.sleep(PASS_S / 5)
        waiting.cancel()
        assert (await running).tokens
        await asyncio.wait([waiting])
        assert engine.length(one.name) == 0
        await one.close()


@pytest.mark.virtual_time
async def test_a_session_that_is_closed_in_a_pass_releases_its_memory_after_it() -> None:
    engine = engine_of()
    async with target_of(engine) as target:
        session = await target.open(positions=60, sampling=GREEDY, sample_from=1)
        running = asyncio.create_task(session.append(PassRequest(0, (1,), 1)))
        await asyncio.sleep(PASS_S / 5)
        await asyncio.gather(session.close(), session.close())
        assert not engine.sessions, "the cache is let go behind the pass"
        with pytest.raises(ConnectionLost):
            await running
        with pytest.raises(RuntimeError):
            await session.append(PassRequest(1, (1,), 1))


@pytest.mark.virtual_time
async def test_a_pass_that_fails_ends_its_session_and_no_other() -> None:
    def on_run(name: str, keep: int, count: int) -> None:
        if count == 3:
            raise MemoryError("no room")

    async with target_of(engine_of(on_run=on_run)) as target:
        one, other = [await target.open(positions=60, sampling=GREEDY, sample_from=1) for _ in range(2)]
        with pytest.raises(P2PTrainError, match="no room"):
            await one.append(PassRequest(0, (1, 2, 3), 1))
        assert (await other.append(PassRequest(0, (1,), 1))).tokens
        await one.close()
        third = await target.open(positions=60, sampling=GREEDY, sample_from=1)
        assert (await third.append(PassRequest(0, (1,), 1))).tokens


def refused(kind: type[P2PTrainError], words: str) -> Any:
    return pytest.raises(kind, match=words)


@pytest.mark.virtual_time
async def test_sessions_and_their_memory_are_bounded() -> None:
    engine = engine_of()
    position_bytes = engine.cache_position_bytes
    async with target_of(engine, max_sessions=2, cache_bytes=150 * position_bytes) as target:
        with refused(UserError, "context of 200") as caught:
            await target.open(positions=201, sampling=GREEDY, sample_from=1)
        assert "200" in caught.value.remedy
        with refused(UserError, "there is memory for 192"):
            await target.open(positions=193, sampling=GREEDY, sample_from=1)
        with refused(UserError, "0 positions"):
            await target.open(positions=0, sampling=GREEDY, sample_from=1)
        one, _ = [await target.open(positions=100, sampling=GREEDY, sample_from=1) for _ in range(2)]
        with refused(Refused, "2 sessions are open"):
            await target.open(positions=1, sampling=GREEDY, sample_from=1)
        await one.close()
        await target.open(positions=60, sampling=GREEDY, sample_from=1)
    with refused(Refused, "being released"):
        await target.open(positions=1, sampling=GREEDY, sample_from=1)


@pytest.mark.virtual_time
async def test_texts_are_those_of_plain_decoding_where_memory_runs_out() -> None:
    engine = engine_of()
    async with target_of(engine, cache_bytes=4 * BLOCK_POSITIONS * engine.cache_position_bytes) as target:

        async def write(number: int) -> None:
            prompt = [number, *range(10 + 20 * number)]
            sampling = Sampling(temperature=1.0, seed=number)
            session = await target.open(positions=199, sampling=sampling, sample_from=len(prompt), ids=prompt)
            await decode(session, prompt, tokens_of(CONFIG, prompt, 100, sampling), drafts=2, seed=number)
            await session.close()

        await asyncio.gather(*map(write, range(5)))
        assert target.preemptions > 0
        assert engine.free_positions == 4 * BLOCK_POSITIONS


@pytest.mark.virtual_time
async def test_session_that_is_preempted_waits_until_there_is_room() -> None:
    engine = engine_of()
    batches = batches_of(engine)
    async with target_of(engine, cache_bytes=4 * BLOCK_POSITIONS * engine.cache_position_bytes) as target:
        old, young, third = [await target.open(positions=200, sampling=GREEDY, sample_from=1) for _ in range(3)]
        ids = tuple(range(60))
        await asyncio.gather(old.append(PassRequest(0, ids, 1)), young.append(PassRequest(0, ids, 1)))
        waiting = asyncio.create_task(third.append(PassRequest(0, (1,), 1)))
        grown = await asyncio.gather(old.append(PassRequest(60, 2 * ids + ids[:15], 1)), asyncio.sleep(10 * PASS_S))
        assert grown[0].tokens
        asked = asyncio.create_task(young.append(PassRequest(60, (1,), 1)))
        await asyncio.sleep(10 * PASS_S)
        assert not asked.done()
        assert not waiting.done(), "an older one waits, too"
        assert target.preemptions == 1
        count = len(batches)
        await old.close()
        assert (await asked).tokens
        assert (await waiting).tokens
        assert batches[count] == {young.name: 61, third.name: 1}, "it is computed again"


@pytest.mark.virtual_time
@pytest.mark.parametrize("cached", [0, 64])
async def test_session_whose_memory_an_ended_one_took_is_computed_again(cached: int) -> None:
    engine = engine_of()
    ids = list(range(90 if cached else 60))
    async with target_of(engine, cache_bytes=4 * BLOCK_POSITIONS * engine.cache_position_bytes) as target:
        first = await target.open(positions=200, sampling=GREEDY, sample_from=1, ids=ids)
        await first.append(PassRequest(0, (*ids, *[1] * (37 * bool(cached))), 1))
        await first.close()
        old = await target.open(positions=200, sampling=GREEDY, sample_from=1)
        await old.append(PassRequest(0, (1,), 1))
        young = await target.open(positions=200, sampling=GREEDY, sample_from=len(ids), ids=ids)
        assert young.cached == cached
        if not cached:
            await young.append(PassRequest(0, tuple(ids[:-1]), 1))
        await old.append(PassRequest(1, (1,) * 194, 1))
        await old.close()
        keep = cached or len(ids) - 1
        result = await young.append(PassRequest(keep, tuple(ids[keep:]), 1))
        assert list(result.tokens) == tokens_of(CONFIG, ids, 1, GREEDY)


@pytest.mark.virtual_time
async def test_memory_grows_with_the_sessions_as_far_as_there_is_some() -> None:
    engine = engine_of()
    reserve = engine.reserve

    def limited(positions: int) -> None:
        if positions > 256:
            raise ResourceError("too little memory")
        reserve(positions)

    engine.reserve = limited  # type: ignore[method-assign]
    async with target_of(engine, usual_positions=100) as target:
        pools = []
        for positions in (60, 70, 100):
            await target.open(positions=positions, sampling=GREEDY, sample_from=1)
            pools.append(engine.pool_blocks)
        assert pools == [2, 3, 3]


@pytest.mark.virtual_time
async def test_texts_that_begin_alike_share_what_is_computed() -> None:
    engine = engine_of()
    batches = batches_of(engine)
    prompt = [number % 90 for number in range(128)]
    async with target_of(engine) as target:

        async def write(prompt: list[int], cached: int, tokens: int) -> list[int]:
            session = await target.open(positions=199, sampling=SAMPLED, sample_from=len(prompt), ids=prompt)
            assert session.cached == cached
            wanted = tokens_of(CONFIG, prompt, tokens, SAMPLED)
            made = Decoding(prompt, max_new_tokens=tokens, cached=cached)
            while not made.ended:
                made.take_samples((await session.append(made.next_pass())).tokens, 0.0, 0.0)
            assert list(made.tokens) == wanted
            await session.close()
            return made.ids

        await write(prompt, 0, 5)
        await write(prompt, 64, 5)  # its last position is computed
        ids = await write(prompt[:100], 64, 40)
        count = len(batches)
        await write(ids[:139], 128, 2)
        assert list(batches[count].values()) == [11], "new tokens are remembered, too"
        await write([3, *prompt[1:]], 0, 2)


@pytest.mark.virtual_time
async def test_text_that_tells_no_ids_leaves_the_remembered_blocks_alone() -> None:
    engine = engine_of()
    async with target_of(engine) as target:
        session = await target.open(positions=199, sampling=GREEDY, sample_from=1)
        await session.append(PassRequest(0, (1,) * 130, 1))
        assert not engine.remembered


@pytest.mark.virtual_time
async def test_model_computes_new_sessions_after_a_defect() -> None:
    engine = engine_of()
    run, engine.run = engine.run, lambda passes: {}  # type: ignore[method-assign]
    unexpected: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unexpected.append(context["exception"]))
    async with target_of(engine) as target:
        session = await target.open(positions=60, sampling=GREEDY, sample_from=1)
        with refused(ResourceError, "queue failed"):
            await session.append(PassRequest(0, (1,), 1))
        engine.run = run  # type: ignore[method-assign]
        again = await target.open(positions=60, sampling=GREEDY, sample_from=1)
        async with asyncio.timeout(60):
            assert (await again.append(PassRequest(0, (1,), 1))).tokens
        await session.close()
        await again.close()
    assert len(unexpected) == 1


@pytest.mark.virtual_time
async def test_drafts_that_were_cut_off_are_remembered_as_what_they_are() -> None:
    engine = engine_of()
    same, wrong, right = list(range(60)), [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    async with target_of(engine) as target:
        first = await target.open(positions=199, sampling=GREEDY, sample_from=60, ids=same)
        for ids in (same, wrong, right):
            await first.append(PassRequest(0 if ids is same else 60, tuple(ids), 1))
        for ids in (wrong, right):
            session = await target.open(positions=199, sampling=GREEDY, sample_from=65, ids=same + ids)
            assert session.cached == 64
            result = await session.append(PassRequest(64, (ids[-1],), 1))
            assert list(result.tokens) == tokens_of(CONFIG, same + ids, 1, GREEDY)


async def test_a_missing_model_is_refused_and_the_thread_goes_on(tmp_path: Path) -> None:
    compute = ComputeThread()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json") as caught:
        await load_local_engine(tmp_path, compute)
    assert caught.value.remedy
    assert await compute.run(lambda: 3) == 3
    compute.close()


async def test_loading_that_is_cancelled_ends_at_the_next_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load_whole(directory: Path, *, on_bytes: Callable[[int, int], None], **how: str) -> None:
        loop.call_soon_threadsafe(asked.set)
        while True:
            on_bytes(1, 2)

    monkeypatch.setattr("p2ptrain.compute.served_part.load_whole", load_whole)
    compute = ComputeThread()
    loading = asyncio.create_task(load_local_engine(tmp_path, compute))
    await asked.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert await compute.run(lambda: 3) == 3  # it is free again
    compute.close()
