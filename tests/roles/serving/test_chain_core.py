"""The core of a session: whatever dies, whenever, the same tokens come."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from p2ptrain.core.errors import ResourceError
from roles.serving import chain_core as ev
from roles.serving.chain_core import MOST_STALLS, ChainPhase, ChainSessionCore
from roles.serving.model import Decoding
from roles.serving.text_service import common_prefix
from wire.chain_messages import ChainBroken

from .fake_chain import VOCAB, Chain, picked, reference

MOST_STEPS = 40_000
PATIENCE_S = ev.ANSWER_S + ev.POSITION_S * ev.MAX_REQUEST_POSITIONS


def undisturbed(stages: int, prompt: list[int], tokens: int) -> list[int]:
    """What a chain generates of which nothing is ever lost, computed in one go."""
    ids, made = list(prompt), list[int]()
    for sample_index in range(tokens):
        made.append(picked(reference(stages, ids)[-1], sample_index))
        ids.append(made[-1])
    return made


def generate(
    chain: Chain,
    prompt: list[int],
    tokens: int,
    disturb: Callable[[Chain], None] = lambda chain: None,
    *,
    chunk: int = 2048,
) -> list[int]:
    """Run plain decoding to its end, disturbed before each step."""
    decoding = Decoding(prompt, max_new_tokens=tokens, cached=common_prefix(chain.core.ids, prompt))

    def submit() -> None:
        request = decoding.next_pass(chunk=chunk)
        index, prefill = request.sample_index(len(prompt)), request.keep < len(prompt)
        chain.hand(ev.PassSubmitted(request.ids, request.keep, request.samples, index, prefill))

    def done(answer: ev.PassAnswered) -> None:
        decoding.take_samples(answer.tokens, answer.took_s, 0.0)
        if not decoding.ended:
            submit()

    chain.on_done = done
    submit()
    for _ in range(MOST_STEPS):
        if decoding.ended or chain.failed:
            return list(decoding.tokens)
        disturb(chain)
        assert chain.step(), f"nothing is on its way, {decoding.tokens} so far"
    raise AssertionError("it never ends")


def asks_of(instructions: list[ev.ChainInstruction]) -> list[ev.StageAsk]:
    return [item for item in instructions if isinstance(item, ev.StageAsk)]


def test_an_undisturbed_chain_gives_the_tokens_of_one_model() -> None:
    for stages in (1, 2, 3, 5):
        chain = Chain(stages, 0, random.Random(stages))
        prompt = list(range(10, 17))
        assert generate(chain, prompt, 6) == undisturbed(stages, prompt, 6)
        assert [done.spent_us for done in chain.done] == [tuple(10 + i for i in range(stages))] * 6
        assert not chain.replaced


def disturbing(rng: random.Random, deaths: int, other: int) -> Callable[[Chain], None]:
    left = {"kill": deaths, "other": other}

    def disturb(chain: Chain) -> None:
        index = rng.randrange(len(chain.stages))
        if left["kill"] and rng.random() < 0.04 and chain.stages[index].alive:
            left["kill"] -= 1
            chain.kill(index)
        if left["other"] and rng.random() < 0.02:
            left["other"] -= 1
            chain.cut(index)

    return disturb


@pytest.mark.parametrize("seed", range(40))
def test_the_same_tokens_come_whatever_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("roles.serving.chain_core.CHUNK_AGAIN", 4)
    stages, deaths, other = rng.randrange(1, 6), rng.randrange(7), rng.randrange(4)
    # A stage that is blamed costs a peer, too.
    chain = Chain(stages, deaths + 3 * other + 2 * deaths, rng)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    tokens = rng.randrange(1, 12)
    made = generate(chain, prompt, tokens, disturbing(rng, deaths, other), chunk=4)
    assert chain.failed is None
    assert made == undisturbed(stages, prompt, tokens)


@pytest.mark.parametrize("seed", range(40))
def test_passes_with_drafts_give_the_same_samples_whatever_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in speculative decoding: each pass may cut off what earlier ones brought."""
    rng = random.Random(seed)
    monkeypatch.setattr("roles.serving.chain_core.MAX_REQUEST_POSITIONS", 5)
    monkeypatch.setattr("roles.serving.chain_core.CHUNK_AGAIN", 5)
    stages, deaths, other = rng.randrange(1, 6), rng.randrange(7), rng.randrange(4)
    chain = Chain(stages, deaths + 3 * other + 2 * deaths, rng)
    disturb = disturbing(rng, deaths, other)
    expected: list[tuple[int, ...]] = []
    ids: list[int] = []
    for _ in range(60):
        if chain.core.current is None:
            keep = max(0, len(ids) - rng.randrange(12)) if rng.random() < 0.5 else len(ids)
            new = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6)))
            samples, sample_index = rng.randrange(len(new) + 1), rng.randrange(100)
            chain.hand(ev.PassSubmitted(new, keep, samples, sample_index))
            ids = [*ids[:keep], *new]
            states = reference(stages, ids)[len(ids) - samples :]
            expected.append(tuple(picked(state, sample_index + place) for place, state in enumerate(states)))
        for _ in range(rng.randrange(30)):
            disturb(chain)
            chain.step()
    while len(chain.done) < len(expected):
        assert chain.step(), "nothing is on its way"
    assert chain.failed is None
    assert [done.tokens for done in chain.done] == expected
    assert chain.core.ids == ids


def killing(kills: dict[int, int]) -> Callable[[Chain], None]:
    """Kill a stage before each of these steps."""
    clock = iter(range(MOST_STEPS))

    def disturb(chain: Chain) -> None:
        index = kills.get(next(clock))
        if index is not None:
            chain.kill(index)

    return disturb


def test_a_loss_at_every_single_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage killed before each step of one run, the mending included: a second one dies some steps later."""
    monkeypatch.setattr("roles.serving.chain_core.CHUNK_AGAIN", 3)
    stages, prompt, tokens = 3, list(range(20, 28)), 4
    wanted = undisturbed(stages, prompt, tokens)
    mended = 0
    for moment in range(70):
        for first, second, later in ((0, 0, 3), (1, 1, 5), (2, 1, 9), (1, 0, 7), (0, 2, 14), (2, 2, 4)):
            chain = Chain(stages, 2, random.Random(moment))
            kills = {moment: first, moment + later: second}
            assert generate(chain, prompt, tokens, killing(kills), chunk=3) == wanted
            assert chain.failed is None
            mended += len(chain.mended) - 1
    assert mended > 150  # some kills meet a session that is only being opened


def test_a_stage_without_a_spare_ends_the_session() -> None:
    chain = Chain(3, 1, random.Random(5))
    killed = iter([2, 1])

    def disturb(chain: Chain) -> None:
        if len(chain.done) >= 3 * (len(chain.replaced) + 1) and chain.running:
            chain.kill(next(killed))

    made = generate(chain, [1, 2, 3], 20, disturb)
    assert chain.failed is not None
    assert isinstance(chain.failed.error, ResourceError)
    assert 3 <= len(made) < 20
    assert made == undisturbed(3, [1, 2, 3], 20)[: len(made)]
    assert chain.core.phase is ChainPhase.ENDED
    assert chain.core.handle(ev.StageLost(0, 1, "late"), 1.0) == []


def test_answers_of_an_older_epoch_are_dropped() -> None:
    core = ChainSessionCore([1, 1], 0.0)
    out = core.handle(ev.Tick(), 0.0)
    assert out == [ev.StageAsk("open", 1, 1, 1, 1, PATIENCE_S)]  # from the last one: it is dialled by the one before
    assert core.handle(ev.StageAnswered(1, 1), 0.0) == [ev.StageAsk("open", 0, 1, 2, 1, PATIENCE_S, 1)]
    assert core.handle(ev.StageAnswered(0, 2), 0.0) == [ev.SessionReady((), 0.0)]
    (send,) = core.handle(ev.PassSubmitted((5,), 0, 1, 0), 0.0)
    assert isinstance(send, ev.ForwardSend)
    core.handle(ev.StageBroken(0, ChainBroken("", 1, 1, ev.NEXT_LOST, "cut")), 1.0)
    assert core.epoch == 2
    assert core.handle(ev.SamplesArrived(1, send.number, (7,), (1, 1)), 1.0) == []
    assert core.ids == []


def test_a_missing_answer_raises_the_epoch_and_then_ends_the_session() -> None:
    """All live, nothing is answered: the epoch is raised, which costs a hung stage its place; then it is over."""
    core = ChainSessionCore([1, 1], 0.0)
    core.handle(ev.Tick(), 0.0)
    core.handle(ev.StageAnswered(1, 1), 0.0)
    core.handle(ev.StageAnswered(0, 2), 0.0)
    assert core.next_deadline() is None
    core.handle(ev.PassSubmitted((5,), 0, 1, 0), 0.0)
    due = core.next_deadline()
    assert due is not None
    assert due > 100  # nothing was measured yet
    assert core.handle(ev.Tick(), due - 1) == []
    for _ in range(MOST_STALLS):
        began = due
        asks = asks_of(core.handle(ev.Tick(), began))
        assert [item.stage for item in asks] == [1, 0]
        core.handle(ev.StageAnswered(1, asks[0].ask), began)
        out = core.handle(ev.StageAnswered(0, asks[1].ask), began)
        assert any(isinstance(item, ev.ForwardSend) for item in out)
        due = core.next_deadline() or 0.0
        assert due - began > 100
    (*_, failed) = core.handle(ev.Tick(), due)
    assert isinstance(failed, ev.SessionFailed)
    assert "did not answer" in failed.error.message


def test_a_stage_that_failed_ends_the_session() -> None:
    core = ChainSessionCore([1, 1], 0.0)
    core.handle(ev.Tick(), 0.0)
    core.handle(ev.StageAnswered(1, 1), 0.0)
    core.handle(ev.StageAnswered(0, 2), 0.0)
    core.handle(ev.PassSubmitted((5,), 0, 1, 0), 0.0)
    out = core.handle(ev.StageBroken(1, ChainBroken("", 1, 1, "failed", "out of memory")), 1.0)
    assert [type(item) for item in out] == [ev.StageClose, ev.StageClose, ev.SessionFailed]


def test_a_refusal_that_another_peer_would_repeat_ends_the_session() -> None:
    core = ChainSessionCore([1, 1], 0.0)
    core.handle(ev.Tick(), 0.0)
    out = core.handle(ev.StageDeclined(1, 1, "memory", "no memory for so many positions", "ask for fewer"), 0.0)
    assert [type(item) for item in out] == [ev.SessionFailed]


def test_a_new_stage_gets_the_whole_history_through_those_before_it() -> None:
    core = ChainSessionCore([1, 1, 1], 0.0)
    core.handle(ev.Tick(), 0.0)
    for ask, stage in enumerate((2, 1, 0), start=1):
        core.handle(ev.StageAnswered(stage, ask), 0.0)
    core.handle(ev.PassSubmitted(tuple(range(1000)), 0, 1, 0), 0.0)
    core.handle(ev.SamplesArrived(1, core.last_number, (1,), (1, 1, 1)), 10.0)
    core.handle(ev.PassSubmitted((5,), 1000, 1, 0), 10.0)
    (resumed,) = asks_of(core.handle(ev.StageLost(1, 1, "killed"), 11.0))
    core.handle(ev.StageAnswered(2, resumed.ask, 1000), 11.0)
    (opened,) = asks_of(core.handle(ev.StageAssigned(1, 2), 11.0))
    (resumed,) = asks_of(core.handle(ev.StageAnswered(1, opened.ask), 11.0))
    sent = [
        item for item in core.handle(ev.StageAnswered(0, resumed.ask, 1000), 11.0) if isinstance(item, ev.ForwardSend)
    ]
    assert [(send.work.keep, len(send.work.ids), send.last) for send in sent] == [
        (0, 256, 1),
        (256, 256, 1),
        (512, 256, 1),
        (768, 232, 1),
    ]
    for send in sent:
        assert core.phase is ChainPhase.MENDING, "the request under way waits"
        out = core.handle(ev.SamplesArrived(2, send.number, (), (1, 1)), 12.0)
    (send,) = [send for send in out if isinstance(send, ev.ForwardSend)]
    assert (send.work.keep, send.work.ids, send.last) == (1000, (5,), 2)


def test_positions_are_computed_again_as_they_were() -> None:
    core = ChainSessionCore([1], 0.0)
    core.handle(ev.Tick(), 0.0)
    core.handle(ev.StageAnswered(0, 1), 0.0)
    # A prompt in two requests, a token, a draft of two that is verified, another prompt of one token.
    for keep, count, prefill in ((0, 4, True), (4, 2, True), (6, 1, False), (7, 2, False), (9, 1, True)):
        (send,) = core.handle(ev.PassSubmitted(tuple(range(count)), keep, 0, 0, prefill), 0.0)
        assert isinstance(send, ev.ForwardSend)
        assert send.work.prefill == prefill
        core.handle(ev.SamplesArrived(1, send.number, (), (1,)), 0.0)
    core.handle(ev.StageLost(0, 1, "killed"), 1.0)
    (asked,) = core.handle(ev.StageAssigned(0, 2), 1.0)
    assert isinstance(asked, ev.StageAsk)
    sends = core.handle(ev.StageAnswered(0, asked.ask), 1.0)
    again = [(len(send.work.ids), send.work.prefill) for send in sends if isinstance(send, ev.ForwardSend)]
    assert again == [(6, True), (3, False), (1, True)]


def test_a_peer_that_sends_an_invalid_answer_is_replaced() -> None:
    core = ChainSessionCore([1, 1], 0.0)
    core.handle(ev.Tick(), 0.0)
    core.handle(ev.StageAnswered(1, 1), 0.0)
    core.handle(ev.StageAnswered(0, 2), 0.0)
    (send,) = core.handle(ev.PassSubmitted((5, 6), 0, 1, 0), 0.0)
    assert isinstance(send, ev.ForwardSend)
    out = core.handle(ev.SamplesArrived(1, send.number, (7, 8), (1, 1)), 0.0)  # two tokens, one was wanted
    assert [item for item in out if isinstance(item, ev.StageReplace)] == [
        ev.StageReplace(1, 1, f"it sent an invalid answer to request {send.number}")
    ]
