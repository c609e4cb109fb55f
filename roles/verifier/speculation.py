"""The core of one verifier session: decides what the *target*, its own model, computes, and what drafters are sent.

The text is the target's alone. Each pass takes the last token and the drafts after it, and samples after each of them.
The first sample is right whatever the drafts are. A later sample is right if all drafts before it equal the samples
before it. So the text is that of plain decoding, whatever drafters send; they decide only how much of it a pass gives.

The target is never idle for long: a pass without drafts is a step of plain decoding. A *line* (``Line``, not the
connection of ``roles.line``) is what one drafter drafted after the tokens that it knew to be ours. Late drafts, for
positions that the text has already, are compared with the text, and the line is kept if they agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice

from roles.drafter.events import (
    Drafted,
    DrafterReady,
    Drop,
    Finished,
    Give,
    PassDone,
    Run,
    SendVerdict,
    Signal,
    VerifierEvent,
    VerifierInstruction,
)
from roles.verifier.cost_model import MOST_DRAFTS, Average, CostModel, choose
from roles.verifier.draft_line import Line

CHUNK, SHARED_CHUNK = 2048, 256
"""Positions of a prompt in one pass: with one session, and while other texts wait for their next token."""
PLACES = 16
"""Places in a pass that have counters of their own."""


@dataclass(slots=True)
class Stats:
    """Sums over one session, or over many.

    Attributes:
        passes: passes of the target after the prompt. self_steps: passes without drafts.
        tokens: new tokens of the text. verified: drafts in passes. accepted: right drafts in passes.
        drafted: drafts received. wasted: drafts that were wrong or based on a wrong one.
        tried_at, accepted_at: by place in the pass: drafts whose predecessors were right, and the right ones of these.
        verify_s: time in passes after the prompt. wait_s: time of waits for drafts between passes.
    """

    passes: int = 0
    self_steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    drafted: int = 0
    wasted: int = 0
    tried_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    accepted_at: list[int] = field(default_factory=lambda: [0] * PLACES)
    verify_s: float = 0.0
    wait_s: float = 0.0

    def add(self, other: Stats) -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            both = [a + b for a, b in zip(mine, theirs, strict=True)] if isinstance(mine, list) else mine + theirs
            setattr(self, item.name, both)


class Verifying:
    """One session of a verifier.

    Args:
        ids: the prompt.
        max_new_tokens, stop_ids: the text ends after so many tokens, or after one of these.
        vocab_size: token ids are below it.
        cached: positions of the prompt that the target has already; the last position is always computed.
        model: cost model that all sessions of the verifier share.
        most_drafts: most drafts in a pass; at least 1.

    Attributes:
        ended: why the text ended: ``length``, ``stop``, ``cancelled``; empty while it goes on.
        stats: sums of this session. right: right drafts in passes, by drafter, in the order in which they were ready.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        vocab_size: int,
        cached: int = 0,
        model: CostModel | None = None,
        most_drafts: int = MOST_DRAFTS,
    ) -> None:
        if not ids or max_new_tokens < 1:
            raise ValueError("a generation needs a prompt and at least one new token")
        self.ended = ""
        self.stats = Stats()
        self.right: list[int] = []
        self._model = model or CostModel()
        self._text = list(ids)
        self._prompt = len(ids)
        self._stop = len(ids) + max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._vocab_size = vocab_size
        self._most_drafts = max(1, most_drafts)
        self._cached = min(cached, len(ids) - 1)  # valid positions in the target's cache
        self._pass: Run | None = None  # under way
        self._guide = 0  # place in ``right`` of the drafter whose drafts it contains
        self._line: Line | None = None  # of the drafter, of which there is one at a time
        self._idle_since = 0.0
        self._waited_s = 0.0  # before the pass under way
        self._due: float | None = None
        self._began = False
        self._between = Average()  # from a result to the next pass, without waiting for drafts
        self._rate = (0.0, 0.0)  # tokens and seconds, with decay
        self.opening_depth = 0 if self._model.resting else 8  # drafts that a drafter may make before its first verdict

    @property
    def history(self) -> tuple[int, ...]:
        return tuple(self._text)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._text[self._prompt :])

    def handle(self, event: VerifierEvent, now: float) -> list[VerifierInstruction]:
        """Process an event and return instructions. After ``Finished`` there are none."""
        if self.ended:
            return []
        out = self._handled(event, now)
        if out and isinstance(out[-1], Finished):
            self.leave(now)
        elif self._pass is None and self._began:
            out += self._next_pass(now)
        return out

    def _handled(self, event: VerifierEvent, now: float) -> list[VerifierInstruction]:
        match event:
            case Signal.BEGAN:
                self._began = True
                self._model.sessions += 1
            case PassDone():
                return self._passed(event, now)
            case DrafterReady():
                return self._ready(event, now)
            case Signal.LOST:
                self._lost(now)
            case Drafted():
                return self._drafted(event, now)
            case Signal.CANCEL:
                self.ended = "cancelled"
                return [Finished(self.ended)]
            case Signal.TICK:
                pass
        return []

    def leave(self, now: float) -> None:
        """End the session, perhaps early because its target or reader is lost. May be called twice."""
        self.ended = self.ended or "cancelled"
        if self._began:
            self._began = False
            self._model.sessions -= 1
            self._works(now)

    def next_deadline(self) -> float | None:
        return self._due

    # ------------------------------------------------------------------------------------------------------ drafters

    def _ready(self, event: DrafterReady, now: float) -> list[VerifierInstruction]:
        if not self._prompt <= event.known <= len(self._text):
            raise ValueError(f"a drafter's session began with {event.known} of {len(self._text)} tokens")
        self._line = Line(event.known, self.opening_depth, event.model, now)
        self.right.append(0)
        return self._tells(now)

    def _drafted(self, event: Drafted, now: float) -> list[VerifierInstruction]:
        line = self._line
        if line is None:
            return []
        if not all(0 <= token < self._vocab_size for token in event.tokens):
            fault = "a token is not in the model's vocabulary"
        else:
            fault = line.receive_untrusted(event.epoch, event.position, event.tokens, self._text, now)
        if fault:
            self._lost(now)
            return [Drop(fault)]
        self.stats.drafted += len(event.tokens)
        self.stats.wasted += line.wasted
        line.wasted = 0
        return []

    def _lost(self, now: float) -> None:
        self._works(now)
        self._line = None

    def _tells(self, now: float) -> list[VerifierInstruction]:
        """The verdict that is due: on new text, or that the drafter shall rest or draft again."""
        line = self._line
        if line is None:
            return []
        # A resting drafter gets the text, too, 32 tokens at a time.
        untold, rests = len(self._text) - line.told, not line.depth
        if rests == self._model.resting and untold < (32 if rests else 1):
            return []
        self._works(now)
        depth = 0 if self._model.resting else line.model.depth
        number, start, right = line.verdict(len(self._text), depth, now)
        return [SendVerdict(number, start, tuple(self._text[start:]), depth, right)]

    def _works(self, now: float) -> None:
        """Tell the cost model how long the drafter may still compute: the verdict must reach it, and its draft end."""
        line = self._line
        if line is not None and line.depth:
            self._model.works_until(now + line.model.latency_s + min(2 * line.model.draft.seconds, 1.0))

    # -------------------------------------------------------------------------------------------------------- passes

    def _next_pass(self, now: float) -> list[VerifierInstruction]:
        self._due = None
        if len(self._text) == self._prompt:
            chunk = CHUNK if self._model.sessions <= 1 else SHARED_CHUNK
            stop = min(self._cached + chunk, self._prompt)
            ids = tuple(self._text[self._cached : stop])
            self._pass = Run(self._cached, ids, int(stop == self._prompt), 0, prefill=True)
            return [self._pass]
        count, wait_s = self._choose(now)
        if wait_s > 0:
            self._due = now + wait_s
            return []
        drafts = tuple(islice(self._line.ahead, count)) if self._line is not None else ()
        self._guide = len(self.right) - 1
        self._waited_s = now - self._idle_since
        self.stats.wait_s += self._waited_s
        sample_index = len(self._text) - self._prompt
        self._pass = Run(len(self._text) - 1, (self._text[-1], *drafts), len(drafts) + 1, sample_index)
        return [self._pass]

    def _choose(self, now: float) -> tuple[int, float]:
        """How many drafts the next pass takes, and how long it waits for them."""
        passes, line = self._model.passes, self._line
        if not passes.known or line is None:
            return 0, 0.0
        size, between_s = len(self._text), self._between.seconds
        room = min(self._stop - size - 1, self._most_drafts, passes.most_drafts)
        step_s = passes.seconds(0) + between_s
        tokens, seconds = self._rate
        return choose(
            line.waits_s(size, room, now),
            line.model.alpha,
            lambda drafts: passes.seconds(drafts) + between_s,
            max(1 / step_s, tokens / seconds if seconds else 0.0),
            line_s=min(1.1 * step_s, line.anew_s),
            most_loss_s=self._model.most_loss_s - (now - self._idle_since),
        )

    def _passed(self, event: PassDone, now: float) -> list[VerifierInstruction]:
        run, self._pass = self._pass, None
        if run is None or len(event.tokens) != run.samples:
            raise ValueError(f"unexpected result of a pass: {len(event.tokens)} sampled tokens")
        accepted = 0
        if run.prefill:
            self._cached = run.keep + len(run.ids)
            if not run.samples:
                return []
            fresh = self._grow(event.tokens)
        else:
            drafts = run.ids[1:]
            accepted = next((at for at, token in enumerate(drafts) if token != event.tokens[at]), len(drafts))
            fresh = self._grow(event.tokens[: accepted + 1])
            self._count(len(drafts), accepted, min(event.took_s, now - self._idle_since))
            self._measure(event.took_s, len(drafts), len(fresh), now)
        if accepted:
            self.right[self._guide] += accepted
        self._idle_since = now
        self.stats.tokens += len(fresh)
        if (line := self._line) is not None:
            line.grew(fresh)
            self.stats.wasted += line.wasted
            line.wasted = 0
        if self.ended:
            return [Give(fresh), Finished(self.ended)]
        return [Give(fresh), *self._tells(now)]

    def _measure(self, took_s: float, drafts: int, tokens: int, now: float) -> None:
        model, since_s = self._model, now - self._idle_since
        step_s = model.step_s or took_s
        if not model.resting:
            model.passes.add(drafts, took_s)
        # The reader may be slow, and a machine may sleep. With several texts other passes lie between.
        between_s = min(max(since_s - self._waited_s - took_s, 0.0), step_s) if model.sessions <= 1 else 0.0
        self._between.add(between_s)
        self._rate = 0.9 * self._rate[0] + tokens, 0.9 * self._rate[1] + max(since_s, 1e-6)
        if self._line is not None:
            model.passed(drafts, tokens, between_s + self._waited_s + took_s, began_at=now - took_s)

    def _grow(self, samples: Sequence[int]) -> tuple[int, ...]:
        size = len(self._text)
        for token in samples:
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
        for place in range(min(accepted + 1, tried, PLACES)):
            stats.tried_at[place] += 1
            stats.accepted_at[place] += place < accepted

    def validate(self) -> None:
        assert self._prompt <= len(self._text) <= self._stop
        assert self.ended or len(self._text) < self._stop
        if self._line is not None:
            self._line.validate(len(self._text))
