"""What no correct peer says: a drafter is dropped with the reason, a verifier is refused."""

from __future__ import annotations

import pytest

from p2ptrain.core.errors import ProtocolError
from roles.drafter.drafting import Drafting
from roles.drafter.events import (
    Drafted,
    DrafterReady,
    Drop,
    Give,
    PassDone,
    Run,
    RunDone,
    Send,
    Signal,
    VerdictReceived,
)
from roles.verifier.cost_model import CostModel, DrafterModel
from roles.verifier.speculation import Verifying

PROMPT = (1, 2, 3)


def verifier() -> Verifying:
    """With drafter 1, which was told of two tokens: verdicts 1 and 2, text up to position 5."""
    core = Verifying(PROMPT, max_new_tokens=50, vocab_size=10, model=CostModel(0.1))
    core.handle(Signal.BEGAN, 0.0)
    core.handle(DrafterReady(len(PROMPT), DrafterModel()), 0.0)
    core.handle(PassDone((4,), 0.1), 0.1)
    core.handle(PassDone((5,), 0.1), 0.2)
    line = core._line
    assert line is not None
    assert (line.told, line.number) == (5, 2)
    return core


@pytest.mark.parametrize(
    ("epoch", "position", "tokens", "reason"),
    [
        (0, 3, (10,), "a token is not in the model's vocabulary"),
        (0, 3, (), "drafts without a token"),
        (0, 99, (1,), "drafts end at position 100"),
        (0, -1, (1, 1), "drafts end at position 1"),
        (3, 5, (1,), "drafts name verdict 3, but the last one sent is 2"),
        (0, 2, (3,), "drafts continue at position 2, expected 3"),
        (0, 6, (1,), "drafts continue at position 6, expected 3, or at most 5"),
        (2, 4, (5,), "drafts start at position 4, expected 5 to 5"),
    ],
)
def test_a_drafter_that_says_nonsense_is_dropped(
    epoch: int, position: int, tokens: tuple[int, ...], reason: str
) -> None:
    core = verifier()
    (drop,) = core.handle(Drafted(epoch, position, tokens), 0.25)
    assert isinstance(drop, Drop)
    assert drop.reason.startswith(reason)
    assert core.handle(Drafted(0, 3, (4,)), 0.26) == []  # it is forgotten
    assert Give((6,)) in core.handle(PassDone((6,), 0.1), 0.3)


def drafter() -> Drafting:
    """It sent a line of four from position 3."""
    core = Drafting(PROMPT, prompt=3, positions=20, depth=4)
    (run,) = core.handle(Signal.BEGAN, 0.0)
    assert run == Run(0, PROMPT, 1, 0, prefill=True)
    sent: list[Send] = []
    for token in (4, 5, 6, 7):
        sent += [item for item in core.handle(RunDone((token,)), 0.0) if isinstance(item, Send)]
    assert [item.tokens for item in sent] == [(4, 5), (6, 7)]
    return core


@pytest.mark.parametrize(
    "told",
    [
        VerdictReceived(2, 3, (4,), 4),
        VerdictReceived(1, 2, (3,), 4),
        VerdictReceived(1, 3, (4,) * 18, 4),
    ],
)
def test_a_verdict_that_no_verifier_says(told: VerdictReceived) -> None:
    with pytest.raises(ProtocolError):
        drafter().handle(told, 0.0)


def test_a_verdict_that_agrees_leaves_the_line_and_one_that_does_not_cuts_it() -> None:
    core = drafter()
    assert core.handle(VerdictReceived(1, 5, (6,), 4), 0.0) == [Run(6, (7,), 1, 4)]
    assert (core.epoch, core._ids[: core.known]) == (0, [1, 2, 3, 4, 5, 6])
    assert core.handle(VerdictReceived(2, 6, (9,), 4), 0.0) == []
    assert (core.epoch, core._ids[: core.known]) == (2, [1, 2, 3, 4, 5, 6, 9])
    (run,) = core.handle(RunDone((8,)), 0.0)  # its pick stood on what was cut: it is dropped
    assert run == Run(6, (9,), 1, 4)
    core.handle(RunDone((1,)), 0.0)
    send = core.handle(RunDone((2,)), 0.0)[0]
    assert send == Send(2, 7, (1, 2))
