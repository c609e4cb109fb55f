"""Split inference between real stages, with engines that notice whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from p2ptrain.core.serving import Sampling
from roles.model_directory import ModelDirectory
from roles.stage_stand_in import stand_in_config, tokens_of, write_model
from roles.worker.stage_testing import TestChain, chain_of, model_at, sampling_params
from wire.memory import MemoryNetwork
from wire.virtual import run_virtual

CONFIG = stand_in_config(layers=6)
PROMPT = [5, 80, 11, 11, 3]
GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    return model_at(write_model(tmp_path / "model", CONFIG), tmp_path)


def with_chain(
    tmp_path: Path, model: ModelDirectory, cuts: tuple[int, ...], test: Callable[[TestChain], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with chain_of(MemoryNetwork(), tmp_path, model, cuts) as chain:
            await test(chain)
        assert not [problem for stage in chain.stages for problem in stage.problems]

    run_virtual(main())


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 2, 3, 6)])
def test_a_chain_gives_what_one_part_gives(
    tmp_path: Path, model: ModelDirectory, cuts: tuple[int, ...], sampling: Sampling
) -> None:
    async def test(chain: TestChain) -> None:
        await chain.open("s1", **sampling_params(sampling))
        assert await chain.generate("s1", PROMPT, 12) == tokens_of(CONFIG, PROMPT, 12, sampling)

    with_chain(tmp_path, model, cuts, test)


def test_sessions_do_not_know_of_each_other(tmp_path: Path, model: ModelDirectory) -> None:
    prompts = {f"s{number}": [number + 1, 7, 7 * number] for number in range(1)}

    async def test(chain: TestChain) -> None:
        for session in prompts:
            await chain.open(session)
        made = await asyncio.gather(*(chain.generate(session, prompt, 8) for session, prompt in prompts.items()))
        assert made == [tokens_of(CONFIG, prompt, 8, GREEDY) for prompt in prompts.values()]

    with_chain(tmp_path, model, (0, 2, 4, 6), test)
