"""Passes of a text whose drafts are kept or rejected by their probabilities (``Sampling.rejects``).

What comes in place of a rejected draft depends on all that its drafter could have said there: the drafter is asked for
that once, and the verifier draws. Whether a draft is used must not depend on what it says, or texts would be others
than the verifier's: it depends on when drafts come, which is the same whatever they say, and on the text before.

A drafter that is gone by then takes its probabilities with it. What was rejected cannot be unseen: the token is drawn
without them (``DraftProbs`` None), and counted: its chances are not quite right, unless the drafter was certain. Where
it is gone before the pass begins, which may wait for a slow reader, nothing is rejected: drafts are compared with the
verifier's own tokens, which are right whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2ptrain.core.serving import DraftProbs
from roles.speculation import events as ev
from roles.speculation.offers import Offers
from roles.verifier.drafting_source import Drafting
from roles.verifier.target import JudgingSession

CERTAIN = 1.0


@dataclass(slots=True)
class JudgingStats:
    """Sums of one text.

    Attributes:
        rejections: drafts that were rejected. asked: of them, those whose drafter was asked what else it could say.
        probs_bytes: of what it said. stood_s: in which the verifier waited for it.
        inexact: tokens that were drawn without.
    """

    rejections: int = 0
    asked: int = 0
    probs_bytes: int = 0
    stood_s: float = 0.0
    inexact: int = 0

    def as_map(self) -> dict[str, Any]:
        """Milliseconds for a rejection, on average."""
        return {
            "rejections": self.rejections,
            "asked": self.asked,
            "probs_bytes": self.probs_bytes,
            "stood_ms": 1e3 * self.stood_s / self.asked if self.asked else 0.0,
            "inexact": self.inexact,
        }


class Judging:
    """Of one text, beside its core.

    Args:
        session: of the target. now: seconds.
    """

    def __init__(self, session: JudgingSession, drafting: Drafting, now: Callable[[], float]) -> None:
        self.stats = JudgingStats()
        self._session, self._drafting, self._now = session, drafting, now
        self._offers = Offers()
        self._weights: tuple[float, ...] = ()  # of the drafts of the pass that was asked for; see ``run``

    def note(self, event: ev.VerifierEvent) -> None:
        """What drafters do, before the core hears of it."""
        match event:
            case ev.Drafted():
                self._offers.came(event)
            case ev.DrafterLost(drafter):
                self._offers.lost(drafter)

    def asked(self, run: ev.Run) -> None:
        """The core wants a pass, which may begin later: what drafters do until then changes nothing about its drafts.
        Raises ``KeyError``: they never came."""
        position = run.keep + 1
        self._offers.grew(position)
        self._weights = self._offers.of(run.drafter, position, run.ids[1:]) if run.drafter else ()

    async def run(self, run: ev.Run) -> ev.PassDone:
        """The pass with drafts that was asked for. The picks behind a rejected draft mean nothing: the core does not
        look at them.

        Raises:
            P2PTrainError: as the target's session.
        """
        drafts, weights = run.ids[1:], self._weights
        if not self._offers.has(run.drafter):
            own = await self._session.run(keep=run.keep, ids=run.ids, picks=run.picks, draw=run.draw, prefill=False)
            return ev.PassDone(own.tokens, own.took_s)
        passed = await self._session.judge(keep=run.keep, ids=run.ids, draw=run.draw, weights=weights)
        if not passed.rejected:
            return ev.PassDone(passed.tokens, passed.took_s)
        kept, began = len(passed.tokens), self._now()
        self.stats.rejections += 1
        probs = await self._probs(run.drafter, run.keep + 1 + kept, drafts[kept], weights[kept])
        stood_s = self._now() - began
        self.stats.stood_s += stood_s
        token = await self._session.settle(probs)
        return ev.PassDone((*passed.tokens, *[token] * (run.picks - kept)), passed.took_s, stood_s)

    async def _probs(self, drafter: int, position: int, token: int, weight: float) -> DraftProbs | None:
        if weight == CERTAIN:
            return DraftProbs.certain(token)
        self.stats.asked += 1
        probs = await self._drafting.probs(drafter, position, token, weight)
        if probs is None:
            self.stats.inexact += 1
            return None
        self.stats.probs_bytes += probs.nbytes
        return probs
