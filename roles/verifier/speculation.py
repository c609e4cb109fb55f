"""The core of drafts for one text: how many the next pass takes and waits for, and what drafters are told. Pure.

The model is never idle for long: a pass without drafts is a step of plain decoding (``roles.serving.decoding``). A
*line* (``DraftLine``) is what one drafter drafted after the tokens that it knew to be the text's. Late drafts, for
positions that the text has already, are compared with the text, and the line is kept if they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from p2ptrain.core.errors import ProtocolError
from roles.drafter.drafting import DraftVerdict
from roles.serving.decoding import Decoding, PassOutcome
from roles.verifier.cost_model import DEPTH, MOST_DRAFTS, CostModel, DrafterModel, choose
from roles.verifier.draft_line import DraftLine

RESTING_TOKENS = 32
"""A resting drafter gets the text, too, so many tokens at a time."""


class Speculation:
    """The drafts of one text. It ends with ``end``.

    Args:
        model: cost model that all texts of the verifier share.
        vocab_size: token ids are below it.
        most_drafts: most drafts in a pass; at least 1.

    Attributes:
        right: right drafts in passes, by drafter, in the order in which they were ready.
    """

    def __init__(
        self, decoding: Decoding, model: CostModel, *, vocab_size: int, most_drafts: int = MOST_DRAFTS
    ) -> None:
        self.right: list[int] = []
        self.opening_depth = 0 if model.resting else DEPTH
        self.decoding, self._model, self._vocab_size = decoding, model, vocab_size
        self._most_drafts = max(1, most_drafts)
        self._guide = 0  # place in ``right`` of the drafter whose drafts the pass contains
        self._line: DraftLine | None = None  # of the drafter, of which there is one at a time
        self._waited_s = 0.0  # before the pass under way
        self._rate = (0.0, 0.0)  # tokens and seconds, with decay
        self._is_over = False
        model.sessions += 1

    def end(self) -> None:
        """End, perhaps before the text does. May be called twice."""
        if not self._is_over:
            self._is_over = True
            self._model.sessions -= 1

    # -------------------------------------------------------------------------------------------------------- drafters

    def begin_line(self, known: int, drafter: DrafterModel, now: float) -> None:
        """A drafter has processed the first ``known`` ids of the text. The drafter before it, if any, is lost.

        ``drafter``: averages of this drafter; its link writes the latency there.
        """
        size = len(self.decoding.ids)
        if not self.decoding.prompt_tokens <= known <= size:
            raise ValueError(f"a drafter's session began with {known} of {size} tokens")
        self._line = DraftLine(known, self.opening_depth, drafter, now)
        self.right.append(0)

    def receive_untrusted(self, epoch: int, position: int, tokens: Sequence[int], now: float) -> None:
        """Take drafts of the line that began with verdict ``epoch``. Raises ``ProtocolError``: no correct drafter
        sends them; the line is dropped."""
        line = self._line
        if line is None:
            return
        try:
            if not all(0 <= token < self._vocab_size for token in tokens):
                raise ProtocolError("a token is not in the model's vocabulary")
            line.receive_untrusted(epoch, position, tokens, self.decoding.ids, now)
        except ProtocolError:
            self.drop_line()
            raise
        self.decoding.stats.drafted += len(tokens)
        self._count_wasted(line)

    def drop_line(self) -> None:
        """The drafter is gone, or refuses to continue."""
        self._line = None

    def next_verdict(self, now: float) -> DraftVerdict | None:
        """The verdict that is due: on new text, or that the drafter shall rest or draft again."""
        line, ids = self._line, self.decoding.ids
        if line is None or self.decoding.ended:
            return None
        news, rests = len(ids) - line.verdicts.size, not line.verdicts.depth
        if rests == self._model.resting and news < (RESTING_TOKENS if rests else 1):
            return None
        return line.make_verdict(ids, 0 if self._model.resting else DEPTH, now)

    def _count_wasted(self, line: DraftLine) -> None:
        self.decoding.stats.wasted += line.wasted
        line.wasted = 0

    # ---------------------------------------------------------------------------------------------------------- passes

    def next_drafts(self, now: float) -> tuple[tuple[int, ...], float]:
        """The drafts of the next pass, and 0.0; or no drafts, and how long to wait before the next call."""
        if self.decoding.in_prompt:
            return (), 0.0
        count, wait_s = self._choose(now)
        if wait_s > 0:
            return (), wait_s
        self._guide = len(self.right) - 1
        self._waited_s = now - self.decoding.result_at
        self.decoding.stats.wait_s += self._waited_s
        return tuple(islice(self._line.ahead, count)) if self._line is not None else (), 0.0

    def _choose(self, now: float) -> tuple[int, float]:
        """How many drafts the next pass takes, and how long it waits for them."""
        passes, line = self._model.passes, self._line
        if not passes.known or line is None:
            return 0, 0.0
        room = min(self.decoding.draft_room, self._most_drafts, passes.most_drafts)
        step_s = passes.seconds(0)
        tokens, seconds = self._rate
        return choose(
            line.waits_s(len(self.decoding.ids), room, now),
            line.model.alpha,
            passes.seconds,
            max(1 / step_s, tokens / seconds if seconds else 0.0),
            line_s=min(1.1 * step_s, line.anew_s),
            most_loss_s=self._model.most_loss_s - (now - self.decoding.result_at),
        )

    def end_pass(self, outcome: PassOutcome) -> None:
        """A pass has ended: measure it, and compare the line with the new text."""
        line = self._line
        if not outcome.prefill:
            self._measure(outcome)
        if outcome.accepted:
            self.right[self._guide] += outcome.accepted
        if line is not None:
            line.compare_growth(outcome.tokens)
            self._count_wasted(line)

    def _measure(self, outcome: PassOutcome) -> None:
        model, took_s = self._model, outcome.took_s
        if not model.resting:
            model.passes.add(outcome.drafts, took_s)
        tokens = len(outcome.tokens)
        self._rate = 0.9 * self._rate[0] + tokens, 0.9 * self._rate[1] + max(outcome.since_s, 1e-6)
        if self._line is not None:
            model.add_pass(outcome.drafts, tokens, self._waited_s + took_s)

    def validate(self) -> None:
        if self._line is not None:
            self._line.validate(len(self.decoding.ids))
