"""The core of drafts for one text: how many the next pass takes and waits for, and what drafters are told. Pure.

The model is never idle for long: a pass without drafts is a step of plain decoding (``roles.serving.model``). While a
pass is under way in a split model, another one begins with the drafts after it if that saves time.

A *line* is what one drafter drafted after the tokens that it knew to be verified. Its *epoch* is the number of the
verdict that began it, 0 for the opening. The verifier compares the line with the text as both grow; late drafts, for
positions that the text has already, too. If they differ, the line is *dead*. A verdict tells the drafter, which cuts
its line and begins a new one. The new line's epoch is that verdict's number, and it starts where that verdict's tokens
end or later. Until then the drafts of the dead line are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import inf

from p2ptrain.core.errors import ProtocolError
from roles.drafter.drafting import GROUP, DraftVerdict
from roles.serving.model import Decoding, PassOutcome
from roles.verifier.cost_model import DEPTH, MOST_DRAFTS, CostModel, DrafterModel, choose

SHORTEST_WAIT_S = 0.0005
"""Shortest wait for a missing draft: a wait that rounds to zero would never end."""


class DraftLine:
    """One drafter's line in one text.

    Args:
        known: number of tokens that the drafter was opened with. depth: drafts beyond them that it may make.
        model: averages of the drafter, which this line updates.

    Attributes:
        epoch: epoch of the line. dead: the line contradicts the text.
        ahead: drafts of the line from the end of the text on.
        wasted: drafts that were wrong or based on a wrong token.
        depth: in the last verdict: most drafts beyond ``size``; 0: the drafter rests.
        sizes: tokens of the text in each verdict, by its number; at 0 in the opening.
    """

    def __init__(self, known: int, depth: int, model: DrafterModel, now: float = 0.0) -> None:
        self.depth, self.sizes = depth, [known]
        self._reach = depth  # drafts beyond ``size`` that may still arrive
        self.model = model
        self.epoch = 0
        self.dead = False
        self.ahead: deque[int] = deque()
        self.wasted = 0
        self._end = self._matched = known  # next draft's position; position up to which line and text agree
        self._drafts_at = now  # time of the last drafts
        self._cut_at: float | None = None  # time of the verdict that ended the line
        self._cut_size = 0  # size of the text in that verdict

    @property
    def size(self) -> int:
        """Tokens of the text that the drafter knows, or will know without a further message."""
        return self.sizes[-1]

    def receive_untrusted(
        self, epoch: int, position: int, tokens: Sequence[int], text: Sequence[int], now: float
    ) -> None:
        """Add drafts, and compare them with ``text``. Raises ``ProtocolError``: no correct drafter sends them."""
        begins = self._check(epoch, position, tokens)
        if begins:
            self._waste_ahead()
            self.epoch, self.dead = epoch, False
        follows = not begins and position == self._end
        self._end = position + len(tokens)
        if self.dead:
            self.wasted += len(tokens)
            return
        if begins:
            self._cut_at = None
        elif follows:
            self.model.draft.add((now - self._drafts_at) / len(tokens))
        self._drafts_at = now
        known = text[position : self._end]
        agreed = next((at for at, token in enumerate(known) if token != tokens[at]), len(known))
        self._matched = min(position + agreed, len(text))
        if agreed < len(known):
            self.dead = True
            self.wasted += len(tokens) - agreed
            self._waste_ahead()
        else:
            self.ahead.extend(tokens[agreed:])
        self.model.add_comparison(agreed, failed=self.dead)

    def _check(self, epoch: int, position: int, tokens: Sequence[int]) -> bool:
        """Raise ``ProtocolError`` for drafts that no correct drafter sends. Returns whether they begin a new line."""
        last, stop, limit = len(self.sizes) - 1, position + len(tokens), self.size + self._reach
        if not 0 <= epoch <= last:
            raise ProtocolError(f"drafts name verdict {epoch}, but the last one sent is {last}")
        if not tokens:
            raise ProtocolError("drafts without a token")
        if not 0 <= position <= stop <= limit:
            raise ProtocolError(f"drafts end at position {stop}, but the limit is {limit}")
        if epoch < self.epoch:
            raise ProtocolError(f"drafts for verdict {epoch} arrived after drafts for verdict {self.epoch}")
        if epoch > self.epoch:
            first = self.sizes[epoch]
            if not first <= position <= self.size:
                raise ProtocolError(f"drafts start at position {position}, expected {first} to {self.size}")
            return True
        if not self._end <= position <= max(self.size, self._end):
            raise ProtocolError(f"drafts continue at position {position}, expected {self._end}, or at most {self.size}")
        return False

    def compare_growth(self, tokens: Sequence[int]) -> None:
        """Compare the line with ``tokens``, by which the text has grown."""
        agreed, failed = 0, False
        for token in tokens:
            if not self.ahead or failed:
                break
            failed = self.ahead[0] != token
            if failed:
                self.dead = True
                self._waste_ahead()
            else:
                self.ahead.popleft()
                agreed += 1
        self._matched += agreed
        self.model.add_comparison(agreed, failed=failed)

    def _waste_ahead(self) -> None:
        self.wasted += len(self.ahead)
        self.ahead.clear()

    def make_verdict(self, text: Sequence[int], depth: int, now: float) -> DraftVerdict:
        """Make a verdict that brings the drafter to all tokens of the text."""
        rested, start = not self.depth, max(self.size, self._matched)
        right = start - self.size
        self.depth = depth
        self._reach = max(self._reach, depth)
        self.sizes.append(len(text))
        if self.dead and depth and (self._cut_at is None or rested):
            self._cut_at, self._cut_size = now, len(text)
        return DraftVerdict(len(self.sizes) - 1, right, tuple(text[start:]), depth)

    @property
    def anew_s(self) -> float:
        """Expected time until the first drafts of a new line."""
        return self.model.restart_s + 2 * GROUP * self.model.draft.seconds

    def waits_s(self, size: int, most: int, now: float) -> list[float]:
        """Expected seconds until one draft beyond the text's ``size`` tokens is there, two, and so on, as far as
        predictable."""
        draft_s = self.model.draft.seconds
        waits = [0.0] * min(len(self.ahead), most)
        if self.dead:
            if self._cut_at is None or not self.depth:
                return waits
            first, since = self._cut_size, self._cut_at + self.model.restart_s - draft_s
        else:
            first, since = self._end, self._drafts_at
        overdue = 0.0
        for position in range(size + len(waits), min(size + most, self.size + self.depth)):
            due = since + (position - first + 1) * draft_s
            if due <= now:  # overdue: expect it to be as late again
                overdue = max(overdue, now - due, SHORTEST_WAIT_S)
            waits.append(max(due - now, SHORTEST_WAIT_S) + overdue)
        return waits


RESTING_TOKENS = 32
"""A resting drafter gets the text, too, so many tokens at a time."""


class Speculation:
    """The drafts of one text. It ends with ``end``.

    Args:
        model: cost model that all texts of the verifier share.

    Attributes:
        right: right drafts in passes, by drafter, in the order in which they were ready.
    """

    def __init__(self, decoding: Decoding, model: CostModel) -> None:
        self.right: list[int] = []
        self.opening_depth = 0 if model.resting else DEPTH
        self.decoding, self._model = decoding, model
        self._line: DraftLine | None = None  # of the drafter, of which there is one at a time
        self._begun: deque[tuple[float, int]] = deque()  # of passes: wait for drafts, place in ``right`` of the drafter
        self._free_at = 0.0  # another pass may begin then
        self._rate = (0.0, 0.0)  # tokens and seconds, with decay
        self._is_over = False
        model.sessions += 1

    def end(self) -> None:
        """End, perhaps before the text does. May be called twice."""
        if not self._is_over:
            self._is_over = True
            self._model.sessions -= 1

    def begin_line(self, known: int, drafter: DrafterModel, now: float) -> None:
        """A drafter has processed the first ``known`` ids of the text. The drafter before it, if any, is lost.

        ``drafter``: averages of this drafter; its link writes the latency there.
        """
        self._line = DraftLine(known, self.opening_depth, drafter, now)
        self.right.append(0)

    def receive_untrusted(self, epoch: int, position: int, tokens: Sequence[int], now: float) -> None:
        """Take drafts of the line that began with verdict ``epoch``. Raises ``ProtocolError``: no correct drafter
        sends them; the line is dropped."""
        line = self._line
        if line is None:
            return
        try:
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
        news, rests = len(ids) - line.size, not line.depth
        if rests == self._model.resting and news < (RESTING_TOKENS if rests else 1):
            return None
        depth = DEPTH if self.decoding.most_passes == 1 else 2 * DEPTH
        return line.make_verdict(ids, 0 if self._model.resting else depth, now)

    def _count_wasted(self, line: DraftLine) -> None:
        self.decoding.stats.wasted += line.wasted
        line.wasted = 0

    def next_drafts(self, now: float) -> tuple[tuple[int, ...], float]:
        """The drafts of the next pass, and 0.0; or no drafts, and how long to wait before the next call, if neither
        drafts nor an answer come before."""
        if self.decoding.in_prompt:
            return (), 0.0
        follows, start = self.decoding.needs_drafts, len(self.decoding.assumed)
        count, wait_s = self._choose(now, follows=follows)
        if wait_s > 0:
            return (), wait_s
        waited_s = 0.0 if follows else now - self.decoding.result_at
        self._begun.append((waited_s, len(self.right) - 1))
        self.decoding.stats.draft_s += waited_s
        # As many passes as are allowed are under way during the time of one.
        rows, model = max(count - follows, 0), self._model
        self._free_at = now + max(model.free_s(rows), model.passes.seconds(rows) / self.decoding.most_passes)
        return tuple(islice(self._line.ahead, start, start + count)) if self._line is not None else (), 0.0

    def _choose(self, now: float, *, follows: bool) -> tuple[int, float]:
        """How many drafts the next pass takes, and how long it waits for them. ``follows``: it begins with a draft."""
        passes, line, decoding = self._model.passes, self._line, self.decoding
        nothing = (0, inf if follows else 0.0)
        if not passes.known or line is None or (follows and self._model.resting):
            return nothing
        assumed = len(decoding.assumed)
        room = min(decoding.draft_room, MOST_DRAFTS, passes.most_drafts)
        waits_s = line.waits_s(len(decoding.ids), assumed + room, now)[assumed:]
        step_s = passes.seconds(0)
        tokens, seconds = self._rate
        rows, wait_s = choose(
            [max(wait_s, self._free_at - now) for wait_s in waits_s] if follows else [0.0, *waits_s],
            line.model.alpha,
            passes.seconds,
            passes.seconds if decoding.most_passes == 1 else self._model.free_s,
            max(1 / step_s, tokens / seconds if seconds else 0.0),
            line_s=min(1.1 * step_s, line.anew_s),
            most_loss_s=self._model.most_loss_s - (0.0 if follows else now - decoding.result_at),
            chance=line.model.alpha ** (assumed + 1) if follows else 1.0,
        )
        return (rows - (not follows), wait_s) if rows else nothing

    def end_pass(self, outcome: PassOutcome) -> None:
        """A pass has ended: measure it, and compare the line with the new text."""
        line = self._line
        if self._begun and not outcome.prefill:
            waited_s, guide = self._begun.popleft()
            self._measure(outcome, waited_s + outcome.took_s)
            if outcome.accepted:
                self.right[guide] += outcome.accepted
        if line is not None:
            line.compare_growth(outcome.tokens)
            self._count_wasted(line)

    def _measure(self, outcome: PassOutcome, step_s: float) -> None:
        model, tokens = self._model, len(outcome.tokens)
        if not (model.resting and model.passes.known):
            model.passes.add(outcome.rows - 1, outcome.took_s)
            model.busy.add(outcome.rows - 1, outcome.busy_s)
        self._rate = 0.9 * self._rate[0] + tokens, 0.9 * self._rate[1] + max(outcome.since_s, 1e-6)
        if self._line is not None:
            model.add_pass(outcome.drafts, tokens, min(step_s, outcome.since_s), step_s)
