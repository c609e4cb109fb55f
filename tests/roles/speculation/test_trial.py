"""Drafters that are no gain rest, however right they are; what a verifier learned is there for its next texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from roles.speculation.events import Began, Cancel, Drafted, DrafterReady, Drop, PassDone, Run, Tell
from roles.speculation.experience import (
    LOOK_PASSES,
    LOOK_WITHIN,
    MOST_DEBT,
    MOST_DRAFTERS,
    MOST_LOOK_PASSES,
    SHORTEST,
    Experience,
)
from roles.speculation.lines import Line
from roles.speculation.outlook import Outlook
from roles.speculation.simulation import DrafterSetting, Outcome, Setting, constant, mean_token_s, simulate
from roles.speculation.trial import (
    BETWEEN_TOKENS,
    EVIDENT_TOKENS,
    GRACE_TOKENS,
    LOOK_TOKENS,
    RENEWED_TOKENS,
    REST_TOKENS,
    TRY_TOKENS,
    Trial,
)
from roles.speculation.verifying import SHARED_CHUNK, Verifying

STEP_S = 0.05
EVIDENT = int(EVIDENT_TOKENS)


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether drafters are worth it."""
    monkeypatch.setattr(Trial, "passed", lambda *args, **how: None)


@dataclass(eq=False)
class Text:
    """A text's trial, without the text: passes as they are told."""

    experience: Experience
    context: int = 100
    slowed: float = 1.0
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
            self.trial.passed(place, tokens, seconds, began_at, drafts=drafts, slowed=self.slowed)
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
    assert experience.debt == 0
    good = DrafterSetting(0.9)
    outcome = simulate(Setting((good,), constant(STEP_S), 256, experience=experience, at_s=1000.0))
    assert outcome.seconds <= 1.1 * simulate(Setting((good,), constant(STEP_S), 256)).seconds


def test_what_one_text_lost_by_itself_is_owed_by_no_other() -> None:
    experience = Experience(STEP_S)
    text = Text(experience, slowed=1.0)
    text.passes(EVIDENT, seconds=2 * STEP_S, drafts=1)
    text.passes(LOOK_PASSES)
    assert text.trial.resting
    assert experience.debt == 0


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
    text = Text(experience, slowed=2.0)
    text.passes(EVIDENT, seconds=2 * STEP_S, drafts=1)
    text.passes(LOOK_PASSES)
    assert 300 < experience.debt < MOST_DEBT
    other = Text(experience)
    assert other.trial.resting
    assert 300 < text.rest() < MOST_DEBT
    other.passes(1)
    assert not other.trial.resting


def test_the_next_text_begins_with_what_was_learned() -> None:
    experience = Experience()
    drafter = DrafterSetting(0.8)
    cold = [simulate(Setting((drafter,), constant(STEP_S), 256, seed=seed)) for seed in range(4)]
    warm = texts(0.8, experience)
    assert mean_token_s(warm) < 0.99 * mean_token_s(cold)
    assert experience.measured(experience.place(600))


def test_a_step_alone_is_looked_at_first_and_then_rarely() -> None:
    text = Text(Experience(1.0))  # measured before anybody asked, and wrong
    text.passes(LOOK_TOKENS // 4, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert text.trial.resting
    text.passes(LOOK_PASSES)
    assert not text.trial.resting
    assert text.experience.step_s() == pytest.approx(STEP_S)
    assert 0.4 < text.trial.share < 0.6
    text.passes((RENEWED_TOKENS - 4) // 4, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert not text.trial.resting
    text.passes(1, tokens=4, seconds=2 * STEP_S, drafts=6)
    assert text.trial.resting


def test_a_step_alone_is_a_mean_as_what_tokens_take_is() -> None:
    text = Text(Experience())
    text.passes(LOOK_TOKENS, seconds=1.15, drafts=1)
    text.looks(*[2.0, 1.0, 1.0, 1.0] * 2)  # the mean is 1.25
    assert not text.trial.resting
    assert text.experience.step_s() == pytest.approx(1.25)
    assert text.experience.alone().usual_s == 1.0


def test_one_step_that_stood_still_does_not_count() -> None:
    text = Text(Experience())
    text.passes(LOOK_TOKENS, seconds=STEP_S, drafts=1)
    text.looks(*[STEP_S] * 7, 1000 * STEP_S)
    assert text.experience.step_s() < 1.5 * STEP_S
    text = Text(Experience(STEP_S))
    text.passes(1, seconds=STEP_S, drafts=1)
    text.passes(1, seconds=1000 * STEP_S, drafts=1)
    assert text.trial.share < 5


def test_steps_that_differ_are_looked_at_longer_and_one_by_chance_is_not_owed() -> None:
    alike, differ = Text(Experience(), slowed=2.0), Text(Experience(), slowed=2.0)
    for text in (alike, differ):
        text.passes(LOOK_TOKENS, seconds=1.1 * STEP_S, drafts=1)
    alike.passes(LOOK_PASSES)
    differ.looks(*[0.5 * STEP_S, 1.5 * STEP_S] * 5)
    assert alike.experience.debt > 60
    assert differ.experience.looking  # not sure yet
    differ.looks(*[0.5 * STEP_S, 1.5 * STEP_S])
    assert differ.trial.resting
    assert not differ.experience.looking
    assert differ.experience.debt < 10


def test_nobody_rests_because_of_a_step_of_another_moment() -> None:
    text = Text(Experience(STEP_S))
    text.passes(LOOK_TOKENS // 2, tokens=2, seconds=STEP_S, drafts=1)
    text.passes(LOOK_PASSES)
    while not text.experience.looking:
        text.passes(1, tokens=2, seconds=3 * STEP_S, drafts=1)  # the machine has other work, too
    text.passes(MOST_LOOK_PASSES, seconds=3 * STEP_S)
    assert not text.trial.resting
    assert text.experience.debt == 0


def test_times_that_waver_make_no_gain_rest() -> None:
    drafter = DrafterSetting(0.8)
    free = [Setting((drafter,), constant(STEP_S), 300, seed=seed, noise=0.5) for seed in range(6)]
    judged_s = mean_token_s([simulate(replace(setting, experience=Experience())) for setting in free])
    with pytest.MonkeyPatch.context() as unjudged:
        unjudged.setattr(Trial, "passed", lambda *args, **how: None)
        free_s = mean_token_s([simulate(setting) for setting in free])
    assert judged_s <= 1.12 * free_s


def test_longer_contexts_are_measured_for_themselves() -> None:
    experience = Experience()
    text = Text(experience)
    text.passes(LOOK_TOKENS, drafts=1)
    text.passes(LOOK_PASSES)
    text.rest()
    text.context = 4 * SHORTEST
    text.passes(EVIDENT // 2, seconds=4 * STEP_S, tokens=2, drafts=6)
    assert text.trial.resting
    text.passes(LOOK_PASSES, seconds=3 * STEP_S)
    assert not text.trial.resting
    assert experience.step_s(experience.place(100)) == pytest.approx(STEP_S)
    assert experience.step_s(experience.place(4 * SHORTEST)) == pytest.approx(3 * STEP_S)


def test_while_any_drafter_works_no_step_is_alone() -> None:
    experience = Experience(STEP_S)
    other = Text(experience)
    text = Text(experience)
    text.passes(LOOK_TOKENS, drafts=1)
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
    stuck.passes(LOOK_TOKENS, drafts=1)
    assert experience.looking
    other.passes(LOOK_WITHIN)
    assert not experience.looking
    gone = Text(experience)
    gone.passes(LOOK_TOKENS + EVIDENT, seconds=2 * STEP_S, drafts=1)
    gone.trial.end()
    assert not experience.looking


def test_rests_become_longer_until_there_is_a_gain() -> None:
    text, rests = Text(Experience(STEP_S)), []
    text.passes(LOOK_TOKENS, drafts=1)
    assert text.rest() == LOOK_PASSES  # chance may decide the first judgement, and a try does no harm
    text.passes(LOOK_TOKENS, drafts=1)
    for _ in range(6):
        rests.append(text.rest())
        text.passes(TRY_TOKENS, seconds=1.01 * STEP_S, drafts=3)
    assert rests == [REST_TOKENS[0], 128, 256, 512, *[REST_TOKENS[1]] * 2]
    text.rest()
    text.passes(TRY_TOKENS, seconds=0.93 * STEP_S, drafts=3)
    assert not text.trial.resting  # measured in the rest
    text.passes(BETWEEN_TOKENS - 1, seconds=0.93 * STEP_S, drafts=3)
    assert not text.trial.resting
    text.passes(EVIDENT, seconds=3 * STEP_S, drafts=3)
    text.passes(LOOK_PASSES)
    assert text.trial.resting


def test_what_comes_before_the_first_drafts_does_not_count() -> None:
    text = Text(Experience(STEP_S))
    text.passes(GRACE_TOKENS - 1, seconds=9.0)
    text.passes(LOOK_TOKENS // 4, tokens=4, drafts=4)
    text.passes(LOOK_PASSES)
    assert not text.trial.resting
    slow = Text(Experience(STEP_S))
    slow.passes(GRACE_TOKENS - 1, seconds=2 * STEP_S)  # they never come
    slow.passes(int(EVIDENT_TOKENS * 1.25 / 2) + 1, seconds=2 * STEP_S)
    assert slow.trial.resting


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
    known.acceptance.add(40, failed=True)
    assert experience.drafter("peer, a model", 0.2, 0.005) is known
    assert known.pace.latency_s == 0.2
    assert experience.drafter("peer, another model", 0.1, 0.005) is not known
    assert experience.drafter("", 0.1, 0.005) is not experience.drafter("", 0.1, 0.005)
    for number in range(MOST_DRAFTERS):
        experience.drafter(f"{number}", 0.1, 0.005)
    assert experience.drafter("peer, a model", 0.1, 0.005) is not known
