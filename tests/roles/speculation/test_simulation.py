"""The cores in virtual time: how soon the text comes, whatever the drafters, the links and the target are like.

Nothing here depends on how fast this machine is: the same setting is the same run.
"""

from __future__ import annotations

import itertools

import pytest

from roles.verifier.cost_model import CostModel
from tests.roles.speculation.simulation import (
    DrafterSetting,
    Outcome,
    Setting,
    constant,
    growing,
    mean_token_s,
    simulate,
)

PASS_S, DRAFT_S = 0.05, 0.005
ROUND_TRIPS_S = (0.0, 0.02, 0.08, 0.2)
GOALS_S = dict(zip(ROUND_TRIPS_S, (0.0195, 0.0222, 0.0308, 0.0418), strict=True))


def runs(drafter: DrafterSetting, *, tokens: int, seeds: int, pass_s: float = PASS_S) -> list[Outcome]:
    return [simulate(Setting((drafter,), constant(pass_s), tokens, seed=seed)) for seed in range(seeds)]


@pytest.mark.parametrize("round_trip_s", ROUND_TRIPS_S)
def test_a_good_drafter_at_any_distance(round_trip_s: float) -> None:
    outcomes = runs(DrafterSetting(0.8, DRAFT_S, round_trip_s), tokens=512, seeds=10)
    token_s = mean_token_s(outcomes)
    assert token_s <= GOALS_S[round_trip_s]
    assert sum(item.payload_bytes for item in outcomes) / sum(item.tokens for item in outcomes) < 16


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_it_is_never_slower_than_the_verifier_alone(share: float) -> None:
    for alpha, round_trip_s in itertools.product((0.0, 0.3, 0.6, 0.8, 0.9, 1.0), ROUND_TRIPS_S):
        model = CostModel(PASS_S)
        for seed, tokens in enumerate((64, 64, 256)):  # the first knows nothing of the drafter
            drafter = DrafterSetting(alpha, DRAFT_S, round_trip_s)
            at_s = 100.0 * seed
            setting = Setting((drafter,), growing(PASS_S, share), tokens, seed=seed, model=model, at_s=at_s)
            outcome = simulate(setting)
            assert outcome.seconds <= 1.05 * outcome.alone_s, (alpha, round_trip_s, tokens, seed)


def test_a_drafter_that_gets_worse_in_the_text_does_no_harm() -> None:
    for round_trip_s, share in itertools.product(ROUND_TRIPS_S, (0.0, 0.3)):
        drafter = DrafterSetting(0.9, DRAFT_S, round_trip_s, alphas=((200, 0.0),))
        whole = simulate(Setting((drafter,), growing(PASS_S, share), 1000))
        good = simulate(Setting((DrafterSetting(0.9, DRAFT_S, round_trip_s),), growing(PASS_S, share), 200))
        assert whole.seconds - good.seconds <= 1.05 * 800 * PASS_S


def test_a_drafter_that_dies_is_hardly_missed() -> None:
    for until_s in (0.7, 1.11, 1.4321, 2.0):
        outcome = simulate(Setting((DrafterSetting(0.8, DRAFT_S, 0.02, until_s=until_s),), constant(PASS_S), 200))
        assert outcome.gaps[0] <= 2 * PASS_S


@pytest.mark.parametrize("slowed", [0.1, 0.5, 1.5])
def test_a_drafter_that_slows_the_verifier_down_costs_little(slowed: float) -> None:
    """They share processors: that its drafts are right is not enough."""
    for alpha, noise in ((0.3, 0.0), (0.8, 0.1)):
        model = CostModel(PASS_S)
        outcomes = [
            simulate(
                Setting(
                    (DrafterSetting(alpha, 0.02),),
                    growing(PASS_S, 0.3),
                    512,
                    seed=seed,
                    shared=slowed,
                    noise=noise,
                    model=model,
                    at_s=1e3 * seed,
                )
            )
            for seed in range(4)
        ]
        assert sum(each.seconds for each in outcomes) <= 1.05 * sum(each.alone_s for each in outcomes), (alpha, noise)
