"""The core of a verifier: one session. It says what the target is to compute next, and what drafters are to be told.

The text is the target's alone: each pass takes the last token and the drafts behind it, and picks behind each of them.
The first pick is right whatever the drafts are; a next one is right while the drafts before it equal the picks before
it. So the text is that of plain decoding, whatever drafters say; they decide only how much of it a pass gives.

The target is never idle: a pass without drafts is a step of plain decoding. What drafts come to late, because the text
is there already, are compared with it, and the line goes on where they agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from roles.speculation.events import (
    Began,
    Cancel,
    Drafted,
    DrafterLost,
    DrafterReady,
    Drop,
    Finished,
    Give,
    Latency,
    PassDone,
    Run,
    Tell,
    Tick,
    VerifierEvent,
    VerifierInstruction,
)
from roles.speculation.lines import Line
from roles.speculation.stats import POSITIONS, Stats

CHUNK = 2048
"""Positions of a prompt in one pass, at most."""
DEPTH = 8


class Verifying:
    """One session of a verifier.

    Args:
        ids: the prompt.
        max_new_tokens: it ends after so many.
        stop_ids: it ends after one of these.
        vocab_size: token ids are below it.
        cached: positions of the prompt that the target has already; the last one is computed in any case.

    Attributes:
        tokens: new ones, in order.
        ended: why there are no more: ``length``, ``stop``, ``cancelled``; empty while there are.
        stats: of this session.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        vocab_size: int,
        cached: int = 0,
    ) -> None:
        if not ids or max_new_tokens < 1:
            raise ValueError("a generation has a prompt, and makes a token")
        self.ended = ""
        self.stats = Stats()
        self._text = list(ids)
        self._prompt = len(ids)
        self._stop = len(ids) + max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._vocab_size = vocab_size
        self._held = min(cached, len(ids) - 1)  # positions that the target has and that are right
        self._pass: Run | None = None  # under way
        self._lines: dict[int, Line] = {}
        self._idle_since: float | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new text."""
        return tuple(self._text[self._prompt :])

    @property
    def history(self) -> tuple[int, ...]:
        """Prompt and new text: what a drafter is opened with. The target has it but for the last token."""
        return tuple(self._text)

    @property
    def opening_depth(self) -> int:
        """The depth that a drafter is opened with."""
        return DEPTH

    def line(self, drafter: int) -> Line:
        """What is known of a drafter. Raises ``KeyError``: it is none of this session's."""
        return self._lines[drafter]

    def handle(self, event: VerifierEvent, now: float) -> list[VerifierInstruction]:
        """Take an event; what is to be done. After ``Finished`` nothing is."""
        if self.ended:
            return []
        out: list[VerifierInstruction] = []
        match event:
            case Began() | Tick():
                pass
            case PassDone():
                out += self._passed(event, now)
            case DrafterReady(drafter, known):
                out += self._ready(drafter, known)
            case DrafterLost(drafter):
                self._lines.pop(drafter, None)
            case Drafted():
                out += self._drafted(event)
            case Latency():
                pass
            case Cancel():
                self.ended = "cancelled"
                return [Finished(self.ended)]
        if not self.ended and self._pass is None:
            out += self._next_pass(now)
        return out

    def next_deadline(self) -> float | None:
        """When a ``Tick`` is due."""
        return None

    # ------------------------------------------------------------------------------------------------------ drafters

    def _ready(self, drafter: int, known: int) -> list[VerifierInstruction]:
        if not self._prompt <= known <= len(self._text):
            raise ValueError(f"a drafter was opened with {known} of {len(self._text)} tokens")
        self._lines[drafter] = Line(known, self.opening_depth)
        return [self._tell(drafter)] if known < len(self._text) else []

    def _drafted(self, event: Drafted) -> list[VerifierInstruction]:
        line = self._lines.get(event.drafter)
        if line is None:
            return []
        fault = "a token that the model does not know"
        if all(0 <= token < self._vocab_size for token in event.tokens):
            fault, compared = line.receive_untrusted(event.epoch, event.position, event.tokens, self._text)
        if fault:
            del self._lines[event.drafter]
            return [Drop(event.drafter, fault)]
        self.stats.drafted += len(event.tokens)
        self.stats.late += compared.agreed
        return []

    def _tell(self, drafter: int) -> Tell:
        line = self._lines[drafter]
        number, start = line.verdict(len(self._text), DEPTH)
        return Tell(drafter, number, start, tuple(self._text[start:]), DEPTH)

    # -------------------------------------------------------------------------------------------------------- passes

    def _next_pass(self, now: float) -> list[VerifierInstruction]:
        if len(self._text) == self._prompt:
            stop = min(self._held + CHUNK, self._prompt)
            ids = tuple(self._text[self._held : stop])
            self._pass = Run(self._held, ids, int(stop == self._prompt), 0, prefill=True)
            return [self._pass]
        room = self._stop - len(self._text) - 1
        best = max(self._lines.values(), key=lambda line: len(line.ahead), default=None)
        drafts = tuple(islice(best.ahead, min(room, DEPTH))) if best else ()
        draw = len(self._text) - self._prompt
        self._pass = Run(len(self._text) - 1, (self._text[-1], *drafts), len(drafts) + 1, draw)
        return [self._pass]

    def _passed(self, event: PassDone, now: float) -> list[VerifierInstruction]:
        run, self._pass = self._pass, None
        if run is None or len(event.tokens) != run.picks:
            raise ValueError(f"a pass with {len(event.tokens)} picks, which was not asked for")
        if run.prefill:
            self._held = run.keep + len(run.ids)
            self.stats.prefill_s += event.took_s
            if not run.picks:
                return []
        drafts = run.ids[1:] if not run.prefill else ()
        accepted = next((at for at, token in enumerate(drafts) if token != event.tokens[at]), len(drafts))
        fresh = self._grow(event.tokens[: accepted + 1])
        if not run.prefill:
            self._count(len(drafts), accepted, event.took_s)
        self.stats.tokens += len(fresh)
        out: list[VerifierInstruction] = [Give(fresh)]
        for line in self._lines.values():
            line.grew(fresh)
        if self.ended:
            return [*out, Finished(self.ended)]
        return [*out, *(self._tell(drafter) for drafter in self._lines)]

    def _grow(self, picks: Sequence[int]) -> tuple[int, ...]:
        """Take picks into the text, up to its end."""
        size = len(self._text)
        for token in picks:
            self._text.append(token)
            if token in self._stop_ids:
                self.ended = "stop"
                break
            if len(self._text) == self._stop:
                self.ended = "length"
                break
        return tuple(self._text[size:])

    def _count(self, tried: int, accepted: int, took_s: float) -> None:
        stats = self.stats
        stats.passes += 1
        stats.self_steps += not tried
        stats.verified += tried
        stats.accepted += accepted
        stats.verify_s += took_s
        for place in range(min(accepted + 1, tried, POSITIONS)):
            stats.tried_at[place] += 1
            stats.accepted_at[place] += place < accepted

    def validate(self) -> None:
        """Raises ``AssertionError`` where what must always hold does not."""
        assert self._prompt <= len(self._text) <= self._stop
        assert self.ended or len(self._text) < self._stop
        for line in self._lines.values():
            line.validate(len(self._text))
