"""The core of a session, event by event. Whole conversations, in which anything is lost, are in ``test_chain.py``."""

from __future__ import annotations

import pytest

from p2ptrain.core.serving import hash_blocks
from roles.pass_queue import SHARED_CHUNK
from roles.serving import chain_core as ev
from roles.serving.chain_core import MOST_STALLS, ChainPhase, ChainSessionCore
from roles.serving.model import PassRequest, PassResult
from wire.chain_messages import ChainBroken

PATIENCE_S = ev.ANSWER_S + ev.POSITION_S * ev.MAX_REQUEST_POSITIONS


def running(stages: int = 2, sample_from: int = 0) -> ChainSessionCore:
    """One whose stages have opened the session, the last one first."""
    core = ChainSessionCore([1] * stages, 0.0, sample_from)
    core.handle(ev.Tick(), 0.0)
    for ask, stage in enumerate(reversed(range(stages)), start=1):
        core.handle(ev.StageAnswered(stage, ask), 0.0)
    assert core.phase is ChainPhase.RUNNING
    return core


def asks_of(instructions: list[ev.ChainInstruction]) -> list[ev.StageAsk]:
    return [item for item in instructions if isinstance(item, ev.StageAsk)]


def test_a_session_is_opened_from_the_last_stage_on() -> None:
    core = ChainSessionCore([1, 1], 0.0, 0)
    out = core.handle(ev.Tick(), 0.0)
    assert out == [ev.StageAsk("open", 1, 1, 1, 1, PATIENCE_S)]  # it is dialled by the one before
    assert core.handle(ev.StageAnswered(1, 1), 0.0) == [ev.StageAsk("open", 0, 1, 2, 1, PATIENCE_S, 1)]
    assert core.handle(ev.StageAnswered(0, 2), 0.0) == [ev.SessionReady((), 0.0)]


def test_answers_of_an_older_epoch_are_dropped() -> None:
    core = running()
    core.handle(PassRequest(0, (5,), 1), 0.0)
    core.handle(ev.SamplesArrived(1, core.last_number, (7,), (1, 1)), 0.0)
    core.handle(PassRequest(1, (7,), 1), 0.0)
    late = ev.SamplesArrived(1, core.last_number, (9,), (1, 1))
    (asked,) = asks_of(core.handle(ev.StageBroken(0, ChainBroken("", 1, 1, ev.NEXT_LOST, "cut")), 1.0))
    assert core.epoch == 2
    assert core.handle(late, 1.0) == []
    (asked,) = asks_of(core.handle(ev.StageAnswered(1, asked.ask, 0), 1.0))
    (again,) = core.handle(ev.StageAnswered(0, asked.ask, 0), 1.0)
    assert isinstance(again, ev.ForwardSend)
    assert core.handle(late, 1.0) == [], "another answer is awaited"
    assert core.ids == [5]


def test_a_missing_answer_raises_the_epoch_and_then_ends_the_session() -> None:
    """All live, nothing is answered: the epoch is raised, which costs a hung stage its place; then it is over."""
    core = running()
    assert core.next_deadline() is None
    core.handle(PassRequest(0, (5,), 1), 0.0)
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
    core = running()
    core.handle(PassRequest(0, (5,), 1), 0.0)
    out = core.handle(ev.StageBroken(1, ChainBroken("", 1, 1, "failed", "out of memory")), 1.0)
    assert [type(item) for item in out] == [ev.StageClose, ev.StageClose, ev.SessionFailed]


def test_a_stage_that_drops_positions_for_older_sessions_gets_them_again() -> None:
    """However often, up to a bound. The other stage keeps what it has."""
    core = running()
    (send,) = core.handle(PassRequest(0, (5, 6), 1), 0.0)
    assert isinstance(send, ev.ForwardSend)
    core.handle(ev.SamplesArrived(1, send.number, (7,), (1, 1)), 0.0)
    core.handle(PassRequest(2, (7,), 1), 0.0)
    for _ in range(ev.MOST_SETBACKS):
        asks = asks_of(core.handle(ev.StageBroken(1, ChainBroken("", core.epoch, 1, ev.PREEMPTED, "no room")), 1.0))
        assert [(item.kind, item.stage, item.keep) for item in asks] == [("resume", 1, 2), ("resume", 0, 2)]
        core.handle(ev.StageAnswered(1, asks[0].ask, 0), 1.0)
        (send,) = core.handle(ev.StageAnswered(0, asks[1].ask, 2), 1.0)
        assert isinstance(send, ev.ForwardSend)
        assert (send.work.keep, send.work.ids, send.last) == (0, (5, 6), 1)
    *_, failed = core.handle(ev.StageBroken(1, ChainBroken("", core.epoch, 1, ev.PREEMPTED, "no room")), 1.0)
    assert isinstance(failed, ev.SessionFailed)
    assert "failed 101 times without any progress" in failed.error.message
    assert core.phase is ChainPhase.ENDED


def test_the_last_stage_gets_the_whole_history_again_after_a_break() -> None:
    """Also the positions that it has at once, because other sessions computed them."""
    core = running()
    (send,) = core.handle(PassRequest(0, (5, 6), 1), 0.0)
    assert isinstance(send, ev.ForwardSend)
    assert send.history == (5, 6)
    core.handle(ev.SamplesArrived(1, send.number, (7,), (1, 1)), 0.0)
    (send,) = core.handle(PassRequest(2, (7, 8), 2), 0.0)
    assert isinstance(send, ev.ForwardSend)
    assert send.history == (7, 8)
    core.handle(ev.StageLost(1, 1, "gone"), 1.0)
    (asked,) = asks_of(core.handle(ev.StageAssigned(1, 2), 1.0))
    (asked,) = asks_of(core.handle(ev.StageAnswered(1, asked.ask, 2), 1.0))
    *_, send = core.handle(ev.StageAnswered(0, asked.ask, 2), 1.0)
    assert isinstance(send, ev.ForwardSend)
    assert (send.work.keep, send.history) == (2, (5, 6, 7, 8))


def test_a_session_begins_with_what_all_stages_have() -> None:
    prompt = tuple(range(200))
    core = ChainSessionCore([1, 1], 0.0, 200, prompt)
    (asked,) = asks_of(core.handle(ev.Tick(), 0.0))
    assert asked.block_hashes == hash_blocks(prompt)
    (asked,) = asks_of(core.handle(ev.StageAnswered(1, asked.ask, 192), 0.0))
    assert asked.block_hashes == hash_blocks(prompt)
    assert core.handle(ev.StageAnswered(0, asked.ask, 64), 0.0) == [ev.SessionReady((), 0.0)]
    assert core.ids == list(prompt[:64])
    text = [*prompt, 5, 6]
    for keep, stop, new in ((64, 150, (1,)), (150, 200, (2,)), (200, 202, ())):
        (send,) = core.handle(PassRequest(keep, tuple(text[keep:stop])), 0.0)
        assert isinstance(send, ev.ForwardSend)
        assert send.block_hashes == tuple(hash_blocks(text)[at] for at in new)
        core.handle(ev.SamplesArrived(1, send.number, (), (1, 1)), 0.0)
    (resumed,) = asks_of(core.handle(ev.StageLost(0, 1, "killed"), 1.0))
    core.handle(ev.StageAnswered(1, resumed.ask, 202), 1.0)
    (asked,) = asks_of(core.handle(ev.StageAssigned(0, 2), 1.0))
    assert asked.block_hashes == hash_blocks(text)
    send, *_ = [
        item for item in core.handle(ev.StageAnswered(0, asked.ask, 64), 1.0) if isinstance(item, ev.ForwardSend)
    ]
    assert (send.work.keep, send.last) == (64, 0), "only what the new stage lacks"


def test_a_refusal_that_another_peer_would_repeat_ends_the_session() -> None:
    core = ChainSessionCore([1, 1], 0.0, 0)
    core.handle(ev.Tick(), 0.0)
    out = core.handle(ev.StageDeclined(1, 1, "memory", "no memory for so many positions", "ask for fewer"), 0.0)
    assert [type(item) for item in out] == [ev.SessionFailed]


def test_a_new_stage_gets_the_whole_history_through_those_before_it() -> None:
    core = running(3)
    core.handle(PassRequest(0, tuple(range(1000)), 1), 0.0)
    core.handle(ev.SamplesArrived(1, core.last_number, (1,), (1, 1, 1)), 10.0)
    core.handle(PassRequest(1000, (5,), 1), 10.0)
    (resumed,) = asks_of(core.handle(ev.StageLost(1, 1, "killed"), 11.0))
    core.handle(ev.StageAnswered(2, resumed.ask, 1000), 11.0)
    (opened,) = asks_of(core.handle(ev.StageAssigned(1, 2), 11.0))
    (resumed,) = asks_of(core.handle(ev.StageAnswered(1, opened.ask), 11.0))
    sent = [
        item for item in core.handle(ev.StageAnswered(0, resumed.ask, 1000), 11.0) if isinstance(item, ev.ForwardSend)
    ]
    chunks = [(start, min(SHARED_CHUNK, 1000 - start), 1) for start in range(0, 1000, SHARED_CHUNK)]
    assert [(send.work.keep, len(send.work.ids), send.last) for send in sent] == chunks
    for send in sent:
        assert core.phase is ChainPhase.MENDING, "the request under way waits"
        out = core.handle(ev.SamplesArrived(2, send.number, (), (1, 1)), 12.0)
    (send,) = [send for send in out if isinstance(send, ev.ForwardSend)]
    assert (send.work.keep, send.work.ids, send.last) == (1000, (5,), 2)


def test_a_prompt_and_what_was_written_are_computed_again_apart() -> None:
    core = running(1, sample_from=6)
    for keep, count in ((0, 4), (4, 2), (6, 1), (7, 2)):  # a prompt in two requests, a token, a verified draft
        (send,) = core.handle(PassRequest(keep, tuple(range(count))), 0.0)
        assert isinstance(send, ev.ForwardSend)
        core.handle(ev.SamplesArrived(1, send.number, (), (1,)), 0.0)
    core.handle(ev.StageLost(0, 1, "killed"), 1.0)
    (asked,) = core.handle(ev.StageAssigned(0, 2), 1.0)
    assert isinstance(asked, ev.StageAsk)
    sends = core.handle(ev.StageAnswered(0, asked.ask), 1.0)
    assert [(keep, len(ids)) for keep, ids, _ in forwarded(sends)] == [(0, 6), (6, 3)]


@pytest.mark.parametrize(("tokens", "scores"), [((7, 8), bytes(8)), ((7,), bytes(4)), ((7,), b"")])
def test_a_peer_that_sends_an_invalid_answer_is_replaced(tokens: tuple[int, ...], scores: bytes) -> None:
    """One token and two scores were wanted."""
    core = running()
    (send,) = core.handle(PassRequest(0, (5, 6), 1, (6, 1)), 0.0)
    assert isinstance(send, ev.ForwardSend)
    out = core.handle(ev.SamplesArrived(1, send.number, tokens, (1, 1), scores), 0.0)
    assert [item for item in out if isinstance(item, ev.StageReplace)] == [
        ev.StageReplace(1, 1, f"it sent an invalid answer to request {send.number}")
    ]


def forwarded(instructions: list[ev.ChainInstruction]) -> list[tuple[int, tuple[int, ...], int]]:
    return [(x.work.keep, x.work.ids, x.number) for x in instructions if isinstance(x, ev.ForwardSend)]


def test_passes_under_way_are_sent_at_once_and_answered_in_order() -> None:
    core = running(1)
    sent = []
    for keep, ids in ((0, (5, 6)), (2, (7,)), (1, (8,))):  # the last one cuts both off
        sent += forwarded(core.handle(PassRequest(keep, ids, 1), 0.0))
    assert [(keep, ids) for keep, ids, _ in sent] == [(0, (5, 6)), (2, (7,)), (1, (8,))]
    for (_, _, number), token, ids in zip(sent, (1, 2, 3), ([5, 6], [5, 6, 7], [5, 8]), strict=True):
        (answer,) = core.handle(ev.SamplesArrived(1, number, (token,), (1,)), 0.0)
        assert isinstance(answer, PassResult)
        assert (answer.tokens, core.ids) == ((token,), ids)


def test_passes_under_way_are_sent_again_after_what_the_first_of_them_keeps() -> None:
    """The last pass cuts off what the first one needs: it is computed again, too."""
    core = running(1)
    (first,) = forwarded(core.handle(PassRequest(0, (1, 2, 3, 4), 1), 0.0))
    core.handle(ev.SamplesArrived(1, first[2], (9,), (1,)), 0.0)
    for keep, ids in ((4, (5, 6)), (2, (7,))):
        core.handle(PassRequest(keep, ids, 1), 0.0)
    assert core.committed == 2
    (asked,) = asks_of(core.handle(ev.StageBroken(0, ChainBroken("", 1, 1, ev.NEXT_LOST, "cut")), 1.0))
    assert asked.keep == 2
    (again,) = forwarded(core.handle(ev.StageAnswered(0, asked.ask, 2), 1.0))
    assert again[:2] == (2, (3, 4))
    out = core.handle(ev.SamplesArrived(2, again[2], (), (1,)), 1.0)
    assert [send[:2] for send in forwarded(out)] == [(4, (5, 6)), (2, (7,))]
    assert core.phase is ChainPhase.RUNNING
