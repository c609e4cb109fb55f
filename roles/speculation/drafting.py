"""The core of a drafter: one session. It drafts behind what is verified, and is told by verdicts what that is.

What it has of the session's tokens is ``verified`` and, behind that, its *line*: what it drafted. A verdict that agrees
with the line, or tells what lies beyond it, leaves the line's *epoch* as it is. One that contradicts it cuts it there,
and its number is the new epoch. So both sides know which drafts stand on what, whatever was under way meanwhile.

The pick of a run stands on all tokens that the run saw. If one of these was cut off while it ran, the pick is nothing
worth, and what the model holds is right only up to the cut: the next run's ``keep`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.core.errors import ProtocolError
from roles.speculation.events import Began, Run, RunDone, Send, VerdictReceived

CHUNK = 2048
"""Positions in one run, at most."""
GROUP = 2
"""Drafts that are sent together: a message costs more than a token."""


class Drafting:
    """One session of a drafter.

    Args:
        ids: tokens so far.
        prompt: how many of the session's tokens are the prompt: the pick at this position has draw 0.
        positions: that the session may grow to.
        depth: drafts beyond what is verified, at most.

    Attributes:
        epoch: of the line. number: of the last verdict.
        ready: the ids from the opening are taken in.
    """

    def __init__(self, ids: Sequence[int], *, prompt: int, positions: int, depth: int) -> None:
        if not 0 < prompt <= len(ids) <= positions:
            raise ProtocolError("a session with no prompt, or with more tokens than it may have")
        self.epoch = 0
        self.number = 0
        self.ready = False
        self._prompt = prompt
        self._positions = positions
        self._depth = depth
        self._ids = list(ids)  # verified, then the line
        self._verified = len(ids)
        self._opened = len(ids)
        self._sent = len(ids)  # positions that the verifier has or will have without our saying more
        self._held = 0  # positions that the model holds, and that are right
        self._reach = 0  # positions that the model will hold after the run under way
        self._running = False

    @property
    def known(self) -> int:
        return self._verified

    @property
    def verified(self) -> tuple[int, ...]:
        return tuple(self._ids[: self._verified])

    def handle(self, event: Began | VerdictReceived | RunDone, now: float) -> list[Run | Send]:
        """Take an event; what is to be done.

        Raises:
            ProtocolError: a verdict that no correct verifier says.
        """
        match event:
            case Began():
                pass
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
            raise ProtocolError(f"verdict {verdict.number} after verdict {self.number}")
        if not self._verified <= start <= len(self._ids):
            raise ProtocolError(f"a verdict from position {start}, with {self._verified} to {len(self._ids)} known")
        if end > self._positions:
            raise ProtocolError(f"a verdict up to position {end} of a session of {self._positions}")
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
        if self._running or self._held == size:  # nothing new since the model picked what the verifier does not know
            return []
        if self.ready and size >= self._limit:
            if self._depth:
                return []
            # At rest: all but the last token is taken in, and a pick made for nothing, so that it is soon done when
            # drafts are asked for: some models' draws are made one after the other.
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
        self._held = self._reach  # less than was asked for, if tokens that the run saw were cut off meanwhile
        self.ready = self.ready or self._held >= self._opened
        if self._held == len(self._ids) < self._positions:
            self._ids += samples

    @property
    def _limit(self) -> int:
        return min(self._verified + self._depth, self._positions)

    def _sends(self) -> list[Run | Send]:
        stop = min(len(self._ids), self._limit)
        bare = self._sent == self._verified  # the verifier has no draft: it is better to have few than none
        ended = self._held == len(self._ids) and not self._running  # the model picked what the verifier does not know
        if stop <= self._sent or (stop - self._sent < GROUP and not ended and not (bare and stop == self._limit)):
            return []
        send = Send(self.epoch, self._sent, tuple(self._ids[self._sent : stop]))
        self._sent = stop
        return [send]

    def validate(self) -> None:
        """Raises ``AssertionError`` where what must always hold does not."""
        assert self._prompt <= self._verified <= len(self._ids) <= self._positions
        assert self._verified <= self._sent <= len(self._ids)
        assert self._held <= len(self._ids)
        assert self.epoch <= self.number
