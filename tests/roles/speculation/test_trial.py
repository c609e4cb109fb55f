"""Drafters that are no gain rest, however right they are; what a verifier learned is there for its next texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp, inf, isinf

import pytest

from roles.speculation.estimates import Acceptance, Passed, PassTimes
from roles.speculation.events import Began, Cancel, Drafted, DrafterReady, Drop, PassDone, Run, Tell
from roles.speculation.experience import (
    FRESH_TOKENS,
    LOOK_WITHIN,
    MOST_DEBT,
    MOST_DRAFTERS,
    SHORTEST,
    Experience,
)
from roles.speculation.lines import Line
from roles.speculation.outlook import Outlook
from roles.speculation.policy import Guard
from roles.speculation.simulation import DrafterSetting, Outcome, Setting, constant, growing, mean_token_s, simulate
from roles.speculation.trial import (
    BLOCK_TOKENS,
    GRACE_TOKENS,
    LOOK_PASSES,
    LOOK_TOKENS,
    REST_TOKENS,
    Trial,
)
from roles.speculation.verifying import SHARED_CHUNK, Verifying

STEP_S = 0.05


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether drafters are worth it."""
    monkeypatch.setattr(Trial, "passed", lambda *args, **how: None)


@dataclass(eq=False)
class Text:
    """A text's trial, without the text: passes as they are told."""

    experience: Experience
    context: int = 100
    now: float = 0.0
    trial: Trial = field(init=False)

    def __post_init__(self) -> None:
        self.trial = Trial(self.experience)
        self.works()

    def works(self) -> None:
        if not self.trial.resting:
            self.experience.works(self)

    def looks(self, *seconds: float) -> None:
        for each in seconds:
            self.passes(1, seconds=each)

    def passes(self, count: int, *, tokens: int = 1, seconds: float = STEP_S, drafts: int = 0) -> None:
        for _ in range(count):
            began_at, self.now = self.now, self.now + seconds
            place = self.experience.place(self.context)
            self.trial.passed(place, Passed(drafts, tokens, 0.0, 0.0, seconds, began_at))
            if self.trial.resting:
                self.experience.rests(self, self.now)
            else:
                self.experience.works(self)

    def rest(self, seconds: float = STEP_S) -> int:
        """Steps until it begins again; how many tokens that was."""
        for count in range(5000):
            if not self.trial.resting:
                return count
            self.passes(1, seconds=seconds)
        raise AssertionError("it rests for good")


def until_it_looks(text: Text, *, seconds: float = STEP_S, tokens: int = 1, drafts: int = 0) -> None:
    for _ in range(4 * BLOCK_TOKENS):
        if text.trial.resting:
            return
        text.passes(1, seconds=seconds, tokens=tokens, drafts=drafts)
    raise AssertionError("it does not look")


def texts(alpha: float, experience: Experience, *, shared: float = 0.0, round_trip_s: float = 0.0) -> list[Outcome]:
    drafter = DrafterSetting(alpha, round_trip_s=round_trip_s)
    made = []
    for seed in range(4):
        setting = Setting((drafter,), constant(STEP_S), 256, 500, seed, shared, experience, at_s=100.0 * seed)
        made.append(simulate(setting))
    return made


def test_who_shares_the_processors_is_used_only_where_that_is_a_gain() -> None:
    for alpha in (0.0, 0.3, 0.6):
        assert mean_token_s(texts(alpha, Experience(STEP_S), shared=1.5)) <= 1.05 * STEP_S
    assert mean_token_s(texts(0.9, Experience(STEP_S), shared=1.5)) < 0.7 * STEP_S


@pytest.mark.usefixtures("unjudged")
def test_nothing_else_sees_that() -> None:
    assert mean_token_s(texts(0.3, Experience(STEP_S), shared=1.5)) > 1.1 * STEP_S


def test_a_gain_is_looked_after_at_little_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = (0.0, 0.02, 0.08, 0.2)
    judged = [mean_token_s(texts(0.8, Experience(STEP_S), round_trip_s=way)) for way in ways]
    monkeypatch.setattr(Trial, "passed", lambda *args, **how: None)
    free = [mean_token_s(texts(0.8, Experience(STEP_S), round_trip_s=way)) for way in ways]
    assert all(each <= 1.03 * other for each, other in zip(judged, free, strict=True))


def test_a_text_of_no_use_makes_no_other_rest() -> None:
    experience = Experience(STEP_S)
    texts(0.0, experience)
    assert experience.worth("").debt == 0
    good = DrafterSetting(0.9)
    outcome = simulate(Setting((good,), constant(STEP_S), 256, experience=experience, at_s=1000.0))
    assert outcome.seconds <= 1.1 * simulate(Setting((good,), constant(STEP_S), 256)).seconds


def test_what_one_text_lost_by_itself_is_owed_by_no_other() -> None:
    experience = Experience(STEP_S)
    text = Text(experience)
    text.passes(4 * BLOCK_TOKENS, seconds=1.05 * STEP_S, drafts=1)
    text.passes(LOOK_PASSES)
    assert text.trial.resting
    assert experience.worth("").debt == 0


def test_a_drafter_that_rested_is_not_thought_slow() -> None:
    known = Experience().drafter("", 0.1, 0.005)
    outlook = Outlook(Line(3, 8), known, 0.0, resting=False)
    usual_s = known.pace.restart_s
    assert not outlook.receive_untrusted(0, 3, (9, 9), [1, 2, 3, 4], 0.01)[0]  # wrong
    outlook.verdict(4, 0.02)
    outlook.rest(4)
    outlook.verdict(5, 0.25)
    assert outlook.waits_s(5, 4, 0.25) == []
    outlook.begin(100)
    number, _, _ = outlook.verdict(100, 5.0)
    assert min(outlook.waits_s(100, 4, 5.0)) >= usual_s - 0.005
    assert not outlook.receive_untrusted(number, 100, (1, 1), [1] * 100, 9.0)[0]  # it took in the text first
    assert known.pace.restart_s == pytest.approx(usual_s)


def test_what_slows_the_verifier_down_is_owed_by_all_texts() -> None:
    experience = Experience(STEP_S)
    text = Text(experience)
    until_it_looks(text, seconds=2 * STEP_S, drafts=1)
    text.passes(LOOK_PASSES)
    assert 150 < experience.worth("").debt < MOST_DEBT
    other = Text(experience)
    assert other.trial.resting
    assert 150 < text.rest() < MOST_DEBT
    other.passes(1)
    assert not other.trial.resting


def owed(experience: Experience, *, step_s: float, pass_s: float) -> float:
    """By a text whose drafters are no gain: steps take ``step_s`` while they work, and each fifth pass, with drafts,
    the other. It is paid."""
    text = Text(experience)
    for number in range(8 * BLOCK_TOKENS):
        while text.trial.resting and not experience.worth("").debt:
            text.passes(1)
        if experience.worth("").debt:
            break
        drafts = 0 if number % 5 else 3
        text.passes(1, seconds=step_s if not drafts else pass_s, drafts=drafts)
    debt = experience.worth("").debt
    text.rest()
    text.trial.end()
    return debt


def test_who_slows_steps_down_again_and_again_is_tried_less_and_less() -> None:
    experience = Experience(STEP_S)
    debts = [owed(experience, step_s=1.3 * STEP_S, pass_s=1.3 * STEP_S) for _ in range(8)]
    assert 0 < debts[1] < 200
    assert debts[-1] == MOST_DEBT
    gains = Text(experience)
    gains.passes(4 * BLOCK_TOKENS, tokens=3, drafts=3)
    assert 0 < owed(experience, step_s=1.3 * STEP_S, pass_s=1.3 * STEP_S) < 300


def test_who_is_only_wrong_is_not() -> None:
    experience = Experience(STEP_S)
    assert all(0 < owed(experience, step_s=STEP_S, pass_s=2.5 * STEP_S) < 300 for _ in range(8))


def test_texts_that_drafters_foresee_are_not_held_up_by_others() -> None:
    """Those whose likeliest tokens are picked gain as much, whether drawn ones that gain nothing come in between."""
    experience, at_s, seconds = Experience(STEP_S), 0.0, {"likeliest": 0.0, "coupled": 0.0}
    sigma, tokens, count = 0.2, 200, 10
    for seed in range(count):
        for picked, alpha in (("likeliest", 0.95), ("coupled", 0.5)):
            drafters, pass_s = (DrafterSetting(alpha, STEP_S / 4),), growing(STEP_S, 0.1)
            setting = Setting(drafters, pass_s, tokens, 100, seed, 1.0, experience, at_s, noise=sigma, picked=picked)
            outcome = simulate(setting)
            at_s += outcome.seconds + 1.0
            seconds[picked] += outcome.seconds
    alone = count * (tokens - 1) * STEP_S * exp(sigma**2 / 2)
    assert seconds["likeliest"] < alone / 1.5
    assert seconds["coupled"] < 1.05 * alone


def test_the_next_text_begins_with_what_was_learned() -> None:
    experience = Experience()
    drafter = DrafterSetting(0.8)
    cold = [simulate(Setting((drafter,), constant(STEP_S), 256, seed=seed)) for seed in range(4)]
    warm = texts(0.8, experience)
    assert mean_token_s(warm) < 0.99 * mean_token_s(cold)
    assert experience.doubt(experience.place(600)) < 1


def test_a_step_alone_is_looked_at_first_and_then_rarely() -> None:
    text = Text(Experience(1.0))  # measured before anybody asked, and wrong
    text.passes(BLOCK_TOKENS // 4, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert text.trial.resting
    text.passes(LOOK_PASSES)
    assert not text.trial.resting
    assert text.experience.step_s() == pytest.approx(STEP_S)
    assert 0.4 < text.trial.share < 0.65
    text.passes(4 * BLOCK_TOKENS, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert not text.trial.resting  # it is sure, and of long ago
    until_it_looks(text, tokens=4, seconds=3.6 * STEP_S, drafts=6)


def test_steps_that_differ_are_looked_at_again() -> None:
    """Half of them take a third of the others: few say little, and there is little doubt about more."""
    text = Text(Experience())
    looks = 0
    for _ in range(8):
        text.passes(BLOCK_TOKENS // 2, tokens=2, seconds=1.6 * STEP_S, drafts=2)
        looks += text.trial.resting
        while text.trial.resting:
            text.looks(0.5 * STEP_S, 1.5 * STEP_S)
    assert 2 <= looks <= 6


def test_a_pass_that_stood_still_does_not_count() -> None:
    text = Text(Experience())
    until_it_looks(text, tokens=2, seconds=STEP_S, drafts=1)
    text.looks(*[STEP_S] * 3, 1000 * STEP_S)
    assert text.experience.step_s() < 2 * STEP_S
    text = Text(Experience(STEP_S))
    text.passes(1, seconds=STEP_S, drafts=1)
    text.passes(1, seconds=1000 * STEP_S, drafts=1)
    assert text.trial.share < 2


def test_nobody_rests_because_of_a_step_of_another_moment() -> None:
    text = Text(Experience(STEP_S))
    until_it_looks(text, tokens=2, seconds=STEP_S, drafts=1)
    text.passes(LOOK_PASSES)
    text.passes(FRESH_TOKENS, tokens=2, seconds=STEP_S, drafts=1)
    until_it_looks(text, tokens=2, seconds=3 * STEP_S, drafts=1)  # the machine has other work, too
    text.passes(LOOK_PASSES, seconds=3 * STEP_S)
    assert not text.trial.resting
    assert text.experience.worth("").debt == 0


def test_steps_that_became_shorter_while_drafters_worked_are_looked_at() -> None:
    """The step alone is of a busier machine, so drafters seem a gain, and are none."""
    text = Text(Experience())
    until_it_looks(text, tokens=2, seconds=2 * STEP_S, drafts=2)
    text.passes(LOOK_PASSES, seconds=2 * STEP_S)
    text.passes(2 * BLOCK_TOKENS, tokens=2, seconds=2 * STEP_S, drafts=2)
    assert not text.trial.resting
    for _ in range(2 * BLOCK_TOKENS):
        text.passes(3)
        text.passes(1, seconds=1.8 * STEP_S, drafts=2)
        if text.trial.resting:
            break
    assert text.trial.resting
    text.passes(LOOK_PASSES)
    assert text.experience.step_s() == pytest.approx(STEP_S)
    assert text.trial.resting


def test_what_several_texts_see_of_that_counts_once() -> None:
    text = Text(Experience())
    until_it_looks(text, tokens=2, seconds=2 * STEP_S, drafts=2)
    text.passes(LOOK_PASSES, seconds=2 * STEP_S)
    every = [text, Text(text.experience), Text(text.experience)]
    for _ in range(BLOCK_TOKENS):
        for each in every:
            each.passes(1)
            each.passes(1, tokens=2, drafts=2)
    assert text.experience.step_s() == pytest.approx(STEP_S)
    assert not any(each.trial.resting for each in every)


def test_a_pass_that_began_behind_others_is_no_step() -> None:
    """Its time from the result before to its own is a part of what it took."""
    experience, drafter = Experience(STEP_S), DrafterSetting(0.8, 0.3 * STEP_S, round_trip_s=0.6 * STEP_S)
    for seed in range(6):
        setting = Setting(
            (drafter,), constant(STEP_S), 400, 500, seed, 0.0, experience, 100.0 * seed, turn_s=STEP_S / 5
        )
        simulate(setting)
        assert experience.step_s() == pytest.approx(STEP_S, rel=0.01)


def test_nobody_rests_when_no_step_could_be_measured() -> None:
    experience = Experience(STEP_S)
    Text(experience)  # another one, whose drafters do not stop
    text = Text(experience)
    until_it_looks(text, seconds=2 * STEP_S, drafts=1)
    text.passes(LOOK_TOKENS)
    assert not text.trial.resting
    assert not experience.looking


def test_a_text_that_does_not_go_on_keeps_no_other_from_measuring_a_step() -> None:
    experience = Experience(STEP_S)
    Text(experience)  # who reads it is slow, so its drafters are not told to rest
    text = Text(experience)
    for _ in range(3):
        assert experience.worth("").debt == 0
        until_it_looks(text, seconds=2 * STEP_S, drafts=1)
        text.passes(LOOK_TOKENS)
    assert text.trial.resting
    assert experience.worth("").debt > 0


def settings(alpha: float, *, sigma: float, shared: float, share: float) -> list[Setting]:
    """Of a verifier on processors that others use, too: its passes are short, and their times waver."""
    drafter = DrafterSetting(alpha, 0.0012)
    pass_s = growing(0.005, share)
    return [
        Setting((drafter,), pass_s, tokens, 50, seed, shared, at_s=seed * 10.0, noise=sigma)
        for seed, tokens in enumerate((64, 128) * 8)
    ]


def speed_up(made: list[Setting], sigma: float, experience: Experience | None) -> float:
    outcomes = [simulate(replace(setting, experience=experience)) for setting in made]
    return sum(each.alone_s for each in outcomes) * exp(sigma**2 / 2) / sum(each.seconds for each in outcomes)


@pytest.mark.parametrize(("sigma", "shared", "share"), [(0.15, 0.15, 0.05), (0.35, 0.0, 0.15), (0.35, 0.15, 0.05)])
def test_times_that_waver_make_no_gain_rest(sigma: float, shared: float, share: float) -> None:
    for alpha in (0.74, 0.85):
        made = settings(alpha, sigma=sigma, shared=shared, share=share)
        judged = speed_up(made, sigma, Experience())
        with pytest.MonkeyPatch.context() as known:  # what passes take, and how often drafts are right: nothing rests
            mean_s = (1 + shared) * exp(sigma**2 / 2)
            known.setattr(Trial, "passed", lambda *args, **how: None)
            known.setattr(Guard, "most_loss_s", lambda *args: inf)
            known.setattr(Acceptance, "alpha", alpha)
            known.setattr(PassTimes, "most", 64)
            known.setattr(PassTimes, "seconds", lambda self, drafts: made[0].pass_s(drafts) * mean_s)  # noqa: B023
            best = speed_up(made, sigma, None)
        assert judged - 1 >= 0.85 * (best - 1), (alpha, judged, best)


@pytest.mark.parametrize("sigma", [0.15, 0.35])
def test_nor_do_they_let_a_drafter_that_slows_the_verifier_down_work_on(sigma: float) -> None:
    for alpha, shared in ((0.2, 0.3), (0.5, 0.3), (0.3, 1.0)):
        made = settings(alpha, sigma=sigma, shared=shared, share=0.15)
        assert speed_up(made, sigma, Experience()) >= 0.95, (alpha, shared)


def test_texts_that_end_before_a_look_leave_it_to_the_next() -> None:
    experience = Experience()
    short = Text(experience)
    short.passes(BLOCK_TOKENS, seconds=2 * STEP_S)
    experience.rests(short, short.now)
    short.trial.end()
    text = Text(experience, now=short.now)
    assert text.trial.resting
    text.passes(LOOK_PASSES)
    assert not text.trial.resting
    assert experience.step_s() == pytest.approx(STEP_S)
    assert not Text(experience).trial.resting


def test_longer_contexts_are_measured_for_themselves() -> None:
    experience = Experience()
    text = Text(experience)
    until_it_looks(text, drafts=1)
    text.passes(LOOK_PASSES)
    text.rest()
    text.context = 4 * SHORTEST
    until_it_looks(text, seconds=4 * STEP_S, tokens=2, drafts=6)
    text.passes(LOOK_PASSES, seconds=3 * STEP_S)
    assert not text.trial.resting
    assert experience.step_s(experience.place(100)) == pytest.approx(STEP_S)
    assert experience.step_s(experience.place(4 * SHORTEST)) == pytest.approx(3 * STEP_S)


def test_a_step_of_very_long_ago_is_measured_anew() -> None:
    text = Text(Experience())
    until_it_looks(text, tokens=2, drafts=1)
    text.passes(LOOK_PASSES)
    place, text.context = text.experience.place(100), 4 * SHORTEST
    while not isinf(text.experience.doubt(place)):
        text.passes(100, tokens=60, drafts=60)
    text.context = 100
    until_it_looks(text, tokens=2, seconds=2 * STEP_S, drafts=1)
    text.passes(LOOK_PASSES, seconds=2 * STEP_S)
    assert text.experience.step_s(place) == pytest.approx(2 * STEP_S)


def test_who_says_that_a_draft_takes_an_hour_keeps_nobody_from_measuring_a_step() -> None:
    experience = Experience()
    core = Verifying([1, 2, 3], max_new_tokens=200, vocab_size=9, experience=experience)
    core.handle(Began(), 0.0)
    core.handle(DrafterReady(1, 3, 0.1, 3600.0), 0.0)
    for number in range(1, 100):
        core.handle(PassDone((5,), STEP_S), STEP_S * number)
    assert experience.step_s(experience.place(100)) == pytest.approx(STEP_S)


def test_passes_that_take_no_time_at_all_are_no_mistake() -> None:
    text = Text(Experience())
    until_it_looks(text, seconds=0.0, drafts=1)
    text.passes(LOOK_PASSES, seconds=0.0)
    until_it_looks(text, seconds=STEP_S, drafts=1)
    assert text.trial.share > 1


def test_while_any_drafter_works_no_step_is_alone() -> None:
    experience = Experience(STEP_S)
    other = Text(experience)
    text = Text(experience)
    until_it_looks(text, drafts=1)
    assert experience.looking
    text.passes(LOOK_PASSES, seconds=9.0)
    assert experience.looking  # the other one has not heard
    experience.rests(other, text.now + 1.0)
    text.passes(1, seconds=9.0)  # began before that
    text.passes(LOOK_PASSES - 1, seconds=STEP_S)
    assert experience.looking
    text.passes(1, seconds=STEP_S)
    assert not experience.looking
    assert experience.step_s(experience.place(100)) == pytest.approx(STEP_S)


def test_who_looks_and_does_not_go_on_holds_up_nobody() -> None:
    experience = Experience(STEP_S)
    stuck, other = Text(experience), Text(experience)
    until_it_looks(stuck, drafts=1)
    other.passes(LOOK_WITHIN)
    assert not experience.looking
    gone = Text(experience)
    until_it_looks(gone, seconds=2 * STEP_S, drafts=1)
    gone.trial.end()
    assert not experience.looking


def test_rests_become_longer_until_there_is_a_gain() -> None:
    text, rests = Text(Experience(STEP_S)), []
    until_it_looks(text, seconds=1.01 * STEP_S, drafts=1)
    text.passes(LOOK_PASSES)
    for _ in range(9):
        rests.append(text.rest())
        while not text.trial.resting:
            text.passes(1, seconds=1.01 * STEP_S, drafts=3)
    assert rests[-3:] == [REST_TOKENS[1]] * 3
    assert rests == sorted(rests)
    text.rest()
    text.passes(4 * BLOCK_TOKENS, tokens=3, seconds=2 * STEP_S, drafts=3)
    assert not text.trial.resting
    while not text.trial.resting:
        text.passes(1, seconds=3 * STEP_S, drafts=3)
    text.passes(LOOK_PASSES)
    assert text.trial.resting


def test_what_comes_before_the_first_drafts_does_not_count() -> None:
    text = Text(Experience(STEP_S))
    text.passes(GRACE_TOKENS - 1, seconds=9.0)
    text.passes(BLOCK_TOKENS // 4, tokens=4, drafts=4)
    text.passes(LOOK_PASSES)
    assert not text.trial.resting
    slow = Text(Experience(STEP_S))
    slow.passes(GRACE_TOKENS - 1, seconds=2 * STEP_S)  # they never come
    until_it_looks(slow, seconds=2 * STEP_S)


def test_resting_drafters_hear_little() -> None:
    setting = Setting((DrafterSetting(0.0),), constant(STEP_S), 1500, shared=2.0, experience=Experience(STEP_S))
    made = simulate(setting)  # the text is checked there
    assert made.stats.drafted < 150
    assert made.token_bytes < 6


def test_a_drafter_that_was_opened_before_a_rest_may_do_what_it_was_told() -> None:
    experience = Experience(STEP_S)
    core = Verifying([1, 2, 3], max_new_tokens=100, vocab_size=9, experience=experience)
    depth = core.opening_depth
    assert depth
    experience.look("another text")
    told = core.handle(DrafterReady(1, 3, 0.001), 0.0)
    assert [(item.depth, item.tokens) for item in told if isinstance(item, Tell)] == [(0, ())]
    out = core.handle(Drafted(1, 0, 3, (4,) * depth), 0.0)
    assert not [item for item in out if isinstance(item, Drop)]
    assert Verifying([1], max_new_tokens=9, vocab_size=9, experience=experience).opening_depth == 0


def test_a_long_prompt_leaves_room_for_other_texts() -> None:
    experience = Experience()
    first = Verifying([1] * 600, max_new_tokens=9, vocab_size=9, experience=experience)
    assert [len(run.ids) for run in first.handle(Began(), 0.0) if isinstance(run, Run)] == [600]
    second = Verifying([1] * 600, max_new_tokens=9, vocab_size=9, experience=experience)
    assert [len(run.ids) for run in second.handle(Began(), 0.0) if isinstance(run, Run)] == [SHARED_CHUNK]
    first.handle(Cancel(), 0.1)
    assert [len(run.ids) for run in second.handle(PassDone((), 0.1), 0.1) if isinstance(run, Run)] == [600 - 256]
    assert experience.sessions == 1


def test_drafters_are_remembered_by_name_and_model_and_not_all() -> None:
    experience = Experience()
    known = experience.drafter("peer, a model", 0.1, 0.005)
    known.acceptance[""].add(40, failed=True)
    assert experience.drafter("peer, a model", 0.2, 0.005) is known
    assert known.pace.latency_s == 0.2
    assert experience.drafter("peer, another model", 0.1, 0.005) is not known
    assert experience.drafter("", 0.1, 0.005) is not experience.drafter("", 0.1, 0.005)
    for number in range(MOST_DRAFTERS):
        experience.drafter(f"{number}", 0.1, 0.005)
    assert experience.drafter("peer, a model", 0.1, 0.005) is not known
