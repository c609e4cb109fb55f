"""The core of a drafter: one session. It drafts ahead of the verified text, and verdicts tell it what is verified.

Its tokens are the ``verified`` ones followed by its *line*, the tokens that it drafted. A verdict that agrees with the
line, or continues beyond its end, keeps the line's *epoch*. A verdict that contradicts the line cuts it there, and the
verdict's number is the new epoch. So both sides know on which tokens a draft is based, whatever was on its way.

A run's sample is based on all tokens that the run saw. If one of these tokens was cut off during the run, the sample is
dropped, and the model's cache is valid only up to the cut. The next run's ``keep`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.core.errors import ProtocolError
from roles.drafter.events import Run, RunDone, Send, Signal, VerdictReceived

CHUNK = 2048
"""Largest number of positions in one run."""
GROUP = 2
"""Drafts that are sent together: a message costs more than a token."""


class Drafting:
    """One session of a drafter. Its arguments are as in ``wire.text_messages.DraftOpen``.

    Attributes:
        epoch: epoch of the line. number: number of the last verdict.
        ready: the model has processed the ids from the opening.
    """

    def __init__(self, ids: Sequence[int], *, prompt: int, positions: int, depth: int) -> None:
        if not 0 < prompt <= len(ids) <= positions:
            raise ProtocolError("the session has no prompt, or more tokens than positions")
        self.epoch = 0
        self.number = 0
        self.ready = False
        self._prompt = prompt
        self._positions = positions
        self._depth = depth
        self._ids = list(ids)  # verified tokens, then the line
        self._verified = len(ids)
        self._opened = len(ids)
        self._sent = len(ids)  # positions that the verifier has, or will have, without a further message
        self._held = 0  # valid positions in the model's cache
        self._reach = 0  # valid positions after the run under way
        self._running = False

    @property
    def known(self) -> int:
        return self._verified

    def handle(self, event: Signal | VerdictReceived | RunDone, now: float) -> list[Run | Send]:
        """Process an event and return instructions.

        Raises:
            ProtocolError: a verdict that no correct verifier sends.
        """
        match event:
            case VerdictReceived():
                self._told(event)
            case RunDone(samples):
                self._done(samples)
        sends = self._sends()
        return [*sends, *self._runs()]

    # ------------------------------------------------------------------------------------------------------ verdicts

    def _told(self, verdict: VerdictReceived) -> None:
        start, end = verdict.start, verdict.start + len(verdict.tokens)
        if verdict.number != self.number + 1:
            raise ProtocolError(f"verdict {verdict.number} arrived after verdict {self.number}")
        if not self._verified <= start <= len(self._ids):
            raise ProtocolError(f"a verdict starts at position {start}, expected {self._verified} to {len(self._ids)}")
        if end > self._positions:
            raise ProtocolError(f"a verdict ends at position {end}, but the session has {self._positions}")
        self.number = verdict.number
        self._depth = verdict.depth
        cut = next(
            (at for at, token in enumerate(verdict.tokens, start) if at < len(self._ids) and self._ids[at] != token),
            None,
        )
        if cut is not None:
            del self._ids[cut:]
            self.epoch = verdict.number
            self._held = min(self._held, cut)
            self._reach = min(self._reach, cut)
            self._sent = min(self._sent, cut)
        self._ids += verdict.tokens[len(self._ids) - start :]
        self._verified = end
        self._sent = max(self._sent, end)

    # ---------------------------------------------------------------------------------------------------------- runs

    def _runs(self) -> list[Run | Send]:
        size = len(self._ids)
        if self._running or self._held == size:  # the last sample is no token of the verifier
            return []
        if self.ready and size >= self._limit:
            if self._depth:
                return []
            # At rest the model takes in all but the last token, so that drafting can start soon. The sample is unused:
            # for some models samples must be taken in order.
            size = self._verified - 1
            if self._held >= size:
                return []
        stop = min(self._held + CHUNK, size)
        samples = int(stop == size)
        self._running = True
        self._reach = stop
        ids = tuple(self._ids[self._held : stop])
        sample_index = size - self._prompt if samples else 0
        return [Run(self._held, ids, samples, sample_index, prefill=not self.ready)]

    def _done(self, samples: Sequence[int]) -> None:
        if not self._running:
            return
        self._running = False
        self._held = self._reach  # fewer than requested if tokens were cut off meanwhile
        self.ready = self.ready or self._held >= self._opened
        if self._held == len(self._ids) < self._positions:
            self._ids += samples

    @property
    def _limit(self) -> int:
        return min(self._verified + self._depth, self._positions)

    def _sends(self) -> list[Run | Send]:
        stop = min(len(self._ids), self._limit)
        bare = self._sent == self._verified  # the verifier has no draft: a few are better than none
        ended = self._held == len(self._ids) and not self._running  # the last sample is no token of the verifier
        if stop <= self._sent or (stop - self._sent < GROUP and not ended and not (bare and stop == self._limit)):
            return []
        send = Send(self.epoch, self._sent, tuple(self._ids[self._sent : stop]))
        self._sent = stop
        return [send]

    def validate(self) -> None:
        assert self._prompt <= self._verified <= len(self._ids) <= self._positions
        assert self._verified <= self._sent <= len(self._ids)
        assert self._held <= len(self._ids)
        assert self.epoch <= self.number
