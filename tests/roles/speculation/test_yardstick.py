"""Drafters that are no gain rest, however right they are."""

from __future__ import annotations

from roles.speculation.events import Drafted, DrafterReady, Drop, Tell
from roles.speculation.simulation import DrafterSetting, Setting, constant, mean_token_s, simulate
from roles.speculation.verifying import Verifying
from roles.speculation.yardstick import (
    BETWEEN_TOKENS,
    EVIDENT_TOKENS,
    LOOK_PASSES,
    LOOK_TOKENS,
    RENEWED_TOKENS,
    REST_TOKENS,
    SETTLE_PASSES,
    Phase,
    Yardstick,
)

STEP_S = 0.05
LOOK = SETTLE_PASSES + LOOK_PASSES


class Unmeasured(Yardstick):
    def passed(self, tokens: int, seconds: float, *, drafts: int) -> None:
        pass


def token_s(
    alpha: float, yardstick: Yardstick, *, round_trip_s: float = 0.0, shared: float = 0.0, texts: int = 6
) -> float:
    drafter = DrafterSetting(alpha, round_trip_s=round_trip_s)
    made = [
        simulate(Setting((drafter,), constant(STEP_S), 256, seed=seed, shared=shared, yardstick=yardstick))
        for seed in range(6)
    ]
    return mean_token_s(made)


def passes(yardstick: Yardstick, count: int, *, tokens: int = 1, seconds: float = STEP_S, drafts: int = 0) -> None:
    for _ in range(count):
        yardstick.passed(tokens, seconds, drafts=drafts)


def test_who_shares_the_processors_is_used_only_where_that_is_a_gain() -> None:
    for alpha in (0.0, 0.3, 0.6):
        assert token_s(alpha, Yardstick(STEP_S), shared=1.5) <= 1.05 * STEP_S
    assert token_s(0.6, Unmeasured(), shared=1.5) > 1.2 * STEP_S
    assert token_s(0.9, Yardstick(STEP_S), shared=1.5) < 0.7 * STEP_S


def test_a_gain_is_looked_after_at_little_cost() -> None:
    for round_trip_s in (0.0, 0.02, 0.08, 0.2):
        free = token_s(0.8, Unmeasured(), round_trip_s=round_trip_s)
        assert token_s(0.8, Yardstick(STEP_S), round_trip_s=round_trip_s) <= 1.03 * free


def test_a_step_that_nobody_measured_is_looked_at_once() -> None:
    yardstick = Yardstick()
    passes(yardstick, LOOK_TOKENS // 4, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert yardstick.phase is Phase.LOOKING
    passes(yardstick, LOOK)
    assert yardstick.phase is Phase.WORKING
    assert yardstick.step_s == STEP_S
    assert 0.4 < yardstick.share < 0.6
    passes(yardstick, (RENEWED_TOKENS - 4) // 4, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert yardstick.phase is Phase.WORKING
    passes(yardstick, 1, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert yardstick.phase is Phase.LOOKING


def test_what_settles_is_not_measured() -> None:
    yardstick = Yardstick(STEP_S)
    passes(yardstick, EVIDENT_TOKENS, seconds=2 * STEP_S, drafts=3)
    assert yardstick.resting
    passes(yardstick, 1, tokens=3, seconds=9.0, drafts=3)  # under way when the look began
    passes(yardstick, SETTLE_PASSES, seconds=9.0)
    passes(yardstick, LOOK_PASSES, seconds=1.5 * STEP_S)
    assert yardstick.step_s == 1.5 * STEP_S


def test_rests_become_longer_until_there_is_a_gain() -> None:
    yardstick, rests = Yardstick(STEP_S), []
    for _ in range(6):
        passes(yardstick, EVIDENT_TOKENS, seconds=2 * STEP_S, drafts=3)
        passes(yardstick, LOOK)
        assert yardstick.phase is Phase.RESTING
        rest = 0
        while yardstick.phase is Phase.RESTING:
            passes(yardstick, 1)
            rest += 1
        rests.append(rest)
    assert rests == [REST_TOKENS[0], 256, 1024, *[REST_TOKENS[1]] * 3]
    passes(yardstick, LOOK_TOKENS, seconds=0.93 * STEP_S, drafts=3)
    passes(yardstick, LOOK)
    assert yardstick.phase is Phase.WORKING
    passes(yardstick, BETWEEN_TOKENS - 1, seconds=0.93 * STEP_S, drafts=3)
    assert yardstick.phase is Phase.WORKING
    passes(yardstick, EVIDENT_TOKENS, seconds=3 * STEP_S, drafts=3)
    passes(yardstick, LOOK)
    assert yardstick.phase is Phase.RESTING
    passes(yardstick, REST_TOKENS[0])
    assert yardstick.phase is Phase.WORKING


def test_resting_drafters_hear_little() -> None:
    made = simulate(
        Setting((DrafterSetting(0.0),), constant(STEP_S), 1500, shared=2.0, yardstick=Yardstick(STEP_S))
    )  # the text is checked there
    assert made.stats.drafted < 150
    assert made.token_bytes < 6


def test_a_drafter_that_was_opened_before_a_look_may_do_what_it_was_told() -> None:
    yardstick = Yardstick(STEP_S)
    core = Verifying([1, 2, 3], max_new_tokens=100, vocab_size=9, yardstick=yardstick)
    depth = core.opening_depth
    assert depth
    passes(yardstick, EVIDENT_TOKENS, seconds=2 * STEP_S, drafts=3)
    assert yardstick.resting
    told = core.handle(DrafterReady(1, 3, 0.001), 0.0)
    assert [(item.depth, item.tokens) for item in told if isinstance(item, Tell)] == [(0, ())]
    out = core.handle(Drafted(1, 0, 3, (4,) * depth), 0.0)
    assert not [item for item in out if isinstance(item, Drop)]
    assert Verifying([1], max_new_tokens=9, vocab_size=9, yardstick=yardstick).opening_depth == 0
