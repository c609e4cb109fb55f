"""What no correct peer says: a drafter is dropped with the reason, a verifier is refused."""

from __future__ import annotations

import pytest

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import ProtocolError
from roles.drafter.drafting import DraftedText, DraftSending, DraftVerdict, ids_untrusted
from roles.serving.model import Decoding, PassRequest
from roles.verifier.cost_model import DrafterModel
from roles.verifier.speculation import Speculation
from tests.roles.drafter_hosts import measured

PROMPT = (1, 2, 3)


def end_pass(decoding: Decoding, core: Speculation, token: int, now: float) -> None:
    decoding.next_pass(core.next_drafts(now)[0])
    core.end_pass(decoding.take_samples((token,), 0.1, now))


def verifier() -> tuple[Decoding, Speculation]:
    """A drafter knows two new tokens: verdicts 1 and 2, text up to position 5."""
    decoding = Decoding(PROMPT, max_new_tokens=50)
    core = Speculation(decoding, measured(0.1))
    core.begin_line(len(PROMPT), DrafterModel(), 0.0)
    for number, token in enumerate((4, 5), 1):
        end_pass(decoding, core, token, 0.1 * number)
        verdict = core.next_verdict(0.1 * number)
        assert verdict is not None
        assert verdict.number == number
    return decoding, core


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ProtocolError, match="vocabulary of 10 tokens"):
        ids_untrusted(encode_ids([1, 10]), vocab_size=10)


@pytest.mark.parametrize(
    ("epoch", "position", "tokens", "reason"),
    [
        (0, 3, (), "drafts without a token"),
        (0, 99, (1,), "drafts end at position 100"),
        (0, -1, (1, 1), "drafts end at position 1"),
        (3, 5, (1,), "drafts name verdict 3, but the last one sent is 2"),
        (0, 2, (3,), "drafts continue at position 2, expected 3"),
        (0, 6, (1,), "drafts continue at position 6, expected 3, or at most 5"),
        (2, 4, (5,), "drafts start at position 4, expected 5 to 5"),
    ],
)
def test_a_drafter_that_sends_invalid_drafts_is_dropped(
    epoch: int, position: int, tokens: tuple[int, ...], reason: str
) -> None:
    decoding, core = verifier()
    with pytest.raises(ProtocolError) as problem:
        core.receive_untrusted(epoch, position, tokens, 0.25)
    assert problem.value.message.startswith(reason)
    core.receive_untrusted(0, 3, (4,), 0.26)  # it is forgotten
    assert decoding.stats.drafted == 0
    end_pass(decoding, core, 6, 0.3)
    assert decoding.tokens == (4, 5, 6)


def drafter() -> DraftedText:
    """It sent a line of four from position 3."""
    core = DraftedText(PROMPT, prompt=3, positions=20, depth=4)
    (run,) = core.next_instructions()
    assert run == PassRequest(0, PROMPT, 1)
    sent: list[DraftSending] = []
    for token in (4, 5, 6, 7):
        sent += [item for item in core.take_samples((token,)) if isinstance(item, DraftSending)]
    assert [item.tokens for item in sent] == [(4, 5), (6, 7)]
    return core


@pytest.mark.parametrize(
    "told",
    [
        DraftVerdict(2, 0, (4,), 4),
        DraftVerdict(1, 5, (3,), 4),
        DraftVerdict(1, 0, (4,) * 18, 4),
    ],
)
def test_an_invalid_verdict_is_refused(told: DraftVerdict) -> None:
    with pytest.raises(ProtocolError):
        drafter().take_verdict(told)


def test_a_verdict_that_agrees_leaves_the_line_and_one_that_does_not_cuts_it() -> None:
    core = drafter()
    assert core.take_verdict(DraftVerdict(1, 2, (6,), 4)) == [PassRequest(6, (7,), 1)]
    assert (core.epoch, core._ids[: core.known]) == (0, [1, 2, 3, 4, 5, 6])
    assert core.take_verdict(DraftVerdict(2, 0, (9,), 4)) == []
    assert (core.epoch, core._ids[: core.known]) == (2, [1, 2, 3, 4, 5, 6, 9])
    (run,) = core.take_samples((8,))  # its sample was based on what was cut: it is dropped
    assert run == PassRequest(6, (9,), 1)
    core.take_samples((1,))
    send = core.take_samples((2,))[0]
    assert send == DraftSending(2, 7, (1, 2))
