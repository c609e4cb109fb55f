"""Passes whose drafts are kept or rejected by their probabilities, and what drafters do until a pass begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from p2ptrain.core.serving import DraftProbs
from roles.speculation import events as ev
from roles.verifier.drafting_source import NoDrafters
from roles.verifier.judging import Judging
from roles.verifier.target import Passed

DRAFTS, WEIGHTS = (2, 3), (0.5, 0.25)
RUN = ev.Run(4, (9, *DRAFTS), 3, 4, drafter=1)


class Session:
    """Rejects the first draft, and writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.now = 0.0

    async def judge(self, *, keep: int, ids: Sequence[int], draw: int, weights: Sequence[float]) -> Passed:
        self.asked.append(tuple(weights))
        return Passed((), 0.05, rejected=True)

    async def settle(self, draft_probs: DraftProbs | None) -> int:
        self.asked.append(draft_probs)
        self.now += 1.0  # another text's turn
        return 7

    async def run(self, **how: Any) -> Passed:
        self.asked.append(how)
        return Passed((2, 5, 1), 0.05)


class Drafters(NoDrafters):
    """Say after a tenth of a second what they drafted from."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def probs(self, drafter: int, position: int, token: int, weight: float) -> DraftProbs | None:
        self._session.now += 0.1
        return None


def judging() -> tuple[Judging, Session]:
    session = Session()
    judging = Judging(cast(Any, session), Drafters(session), lambda: session.now)
    judging.note(ev.Drafted(1, 0, 5, DRAFTS, WEIGHTS))
    judging.asked(RUN)
    return judging, session


async def test_one_that_is_lost_before_the_pass_begins_is_compared_with_the_verifiers_own_tokens() -> None:
    under_test, session = judging()
    under_test.note(ev.DrafterLost(1))
    done = await under_test.run(RUN)
    assert done.tokens == (2, 5, 1)
    assert session.asked == [{"keep": 4, "ids": (9, 2, 3), "picks": 3, "draw": 4, "prefill": False}]
    assert under_test.stats.rejections == under_test.stats.inexact == 0


@pytest.mark.parametrize(("epoch", "position"), [(1, 5), (0, 7)])
async def test_what_it_drafts_before_the_pass_begins_changes_nothing(epoch: int, position: int) -> None:
    under_test, session = judging()
    under_test.note(ev.Drafted(1, epoch, position, (1,), (1.0,)))
    done = await under_test.run(RUN)
    assert session.asked == [WEIGHTS, None]
    assert done.tokens == (7, 7, 7)
    assert done.stood_s == under_test.stats.stood_s == pytest.approx(0.1), "of the wait for the drafter alone"
    assert under_test.stats.inexact == 1


async def test_one_that_is_lost_while_the_pass_is_under_way_costs_a_token_its_chances() -> None:
    under_test, session = judging()
    judge = session.judge

    async def lost(**how: Any) -> Passed:
        under_test.note(ev.DrafterLost(1))
        return await judge(**how)

    session.judge = lost  # type: ignore[method-assign]
    await under_test.run(RUN)
    assert session.asked == [WEIGHTS, None]
    assert under_test.stats.inexact == 1
