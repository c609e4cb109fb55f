"""How soon a text comes, whatever the drafter, its link and the verifier's model are like.

Real drafters and verifiers on virtual time: nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from p2ptrain.lab.memory import run_virtual
from tests.roles.drafter_hosts import DrafterHost, Wobbly, Written, measured, write
from tests.roles.test_drafters import GREEDY, Scene, expected

PASS_S, DRAFT_S = 0.05, 0.005
GOALS_S = {0.0: 0.0205, 0.02: 0.0232, 0.08: 0.0323, 0.2: 0.0439}
"""Round trip: time per token."""


def texts(
    engine: Wobbly,
    lengths: list[int],
    *,
    round_trip_s: float = 0.0,
    draft_s: float = DRAFT_S,
    happens: Callable[[Scene, DrafterHost], Any] = lambda scene, host: None,
    **options: Any,
) -> list[Written]:
    """Texts that one verifier writes one after the other, with a drafter."""

    async def main() -> list[Written]:
        step_s = PASS_S + (options.get("stages", 1) + 1) * options.get("hop_s", 0.0)
        scene, cost_model = Scene(one_way_ms=500 * round_trip_s), measured(step_s)
        host = scene.host("d1", engine, step_s=draft_s)
        written: list[Written] = []
        async with scene.running(host):
            options.update(happens(scene, host) or {})
            for number, tokens in enumerate(lengths):
                prompt = [number, 2, 3]
                written.append(
                    await write(scene.drafters, prompt, tokens, GREEDY, pass_s=PASS_S, cost_model=cost_model, **options)
                )
                assert written[-1].tokens == expected(prompt, tokens, GREEDY)
        return written

    return run_virtual(main())


def seconds(written: Written) -> float:
    """From the first token to the last one."""
    return written.ends[-1] - written.ends[0]


@pytest.mark.parametrize("round_trip_s", GOALS_S)
def test_a_good_drafter_at_any_distance(round_trip_s: float) -> None:
    written = [text for seed in range(2) for text in texts(Wobbly(0.8, seed=seed), [256], round_trip_s=round_trip_s)]
    assert sum(map(seconds, written)) / (2 * 255) <= GOALS_S[round_trip_s]
    assert sum(facts.bytes_in + facts.bytes_out for text in written for facts in text.facts) / (2 * 256) < 68


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_it_is_never_slower_than_the_verifier_alone(share: float) -> None:
    """A pass takes ``share`` longer for each draft. Of the first text the verifier knows nothing of the drafter."""
    for alpha, round_trip_s in itertools.product((0.0, 0.5, 0.9), (0.0, 0.08)):
        lengths = [64, 64, 128]
        written = texts(Wobbly(alpha), lengths, round_trip_s=round_trip_s, row_s=share * PASS_S)
        for tokens, text in zip(lengths, written, strict=True):
            assert seconds(text) <= 1.05 * (tokens - 1) * PASS_S, (alpha, round_trip_s, tokens)


class Worsening(Wobbly):
    def _said(self, position: int, right: int) -> int:
        self._alpha = 0.9 if position < 120 else 0.0
        return super()._said(position, right)


@pytest.mark.parametrize("round_trip_s", [0.0, 0.08])
def test_a_drafter_that_gets_worse_in_the_text_does_no_harm(round_trip_s: float) -> None:
    (whole,) = texts(Worsening(0.9), [400], round_trip_s=round_trip_s, row_s=0.3 * PASS_S)
    (good,) = texts(Worsening(0.9), [117], round_trip_s=round_trip_s, row_s=0.3 * PASS_S)
    assert seconds(whole) - seconds(good) <= 1.05 * (400 - 117) * PASS_S


@pytest.mark.parametrize("until_s", [0.7, 1.11, 1.4321])
def test_a_drafter_that_dies_is_hardly_missed(until_s: float) -> None:
    def happens(scene: Scene, host: DrafterHost) -> None:
        asyncio.get_running_loop().call_later(until_s, scene.memory.crash, "d1")

    (text,) = texts(Wobbly(0.8), [100], round_trip_s=0.02, happens=happens)
    assert max(after - before for before, after in pairwise(text.ends)) <= 2 * PASS_S + 1e-9


@pytest.mark.parametrize("slowed", [0.1, 1.5])
@pytest.mark.parametrize(("alpha", "noise"), [(0.3, 0.0), (0.8, 0.1)])
def test_a_drafter_that_slows_the_verifier_down_costs_little(slowed: float, alpha: float, noise: float) -> None:
    """They share processors: that its drafts are right is not enough."""
    times = random.Random(5)

    def happens(scene: Scene, host: DrafterHost) -> dict[str, Any]:
        return {"slowed": lambda: times.lognormvariate(0.0, noise) * (1 + slowed * host.computes)}

    lengths = [256] * 3
    written = texts(Wobbly(alpha), lengths, draft_s=0.02, row_s=0.3 * PASS_S, happens=happens)
    assert sum(map(seconds, written)) <= 1.05 * sum(tokens - 1 for tokens in lengths) * PASS_S


@pytest.mark.parametrize(("share", "gain"), [(0.0, 1.08), (0.3, 1.25)])
def test_over_a_chain_the_next_pass_begins_before_the_last_one_is_judged(share: float, gain: float) -> None:
    """Four stages, 80 ms apart: a pass takes long, but another one can begin after a fourth of its computing."""
    chain = {"round_trip_s": 0.08, "row_s": share * PASS_S, "stages": 4, "hop_s": 0.04}
    turns, ahead = (
        sum(seconds(text) for text in texts(Wobbly(0.8), [64, 192], most_passes=most, **chain)[1:]) for most in (1, 8)
    )
    assert turns >= gain * ahead


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_over_a_chain_drafts_are_never_slower_than_the_verifier_alone(alpha: float) -> None:
    step_s = PASS_S + 5 * 0.01
    written = texts(
        Wobbly(alpha), [64, 128], round_trip_s=0.02, row_s=0.5 * PASS_S, stages=4, hop_s=0.01, most_passes=8
    )
    for tokens, text in zip([64, 128], written, strict=True):
        assert seconds(text) <= 1.05 * (tokens - 1) * step_s


def test_texts_that_share_a_chain_are_not_slowed_down_by_each_others_drafts() -> None:
    """Four texts keep four stages busy: a pass that begins early takes the time of others."""

    async def seconds_of(most_passes: int) -> float:
        scene, cost_model = Scene(), measured(PASS_S)
        host, turns = scene.host("d1", Wobbly(0.8), step_s=0.002), [asyncio.Lock() for _ in range(4)]
        chain: dict[str, Any] = {"stages": 4, "turns": turns, "most_passes": most_passes}
        async with scene.running(host):
            began = asyncio.get_running_loop().time()
            prompts = [[number, 2, 3] for number in range(4)]
            texts = [write(scene.drafters, prompt, 64, GREEDY, cost_model=cost_model, **chain) for prompt in prompts]
            await asyncio.gather(*texts)
            return asyncio.get_running_loop().time() - began

    assert run_virtual(seconds_of(8)) <= 1.05 * run_virtual(seconds_of(1))
