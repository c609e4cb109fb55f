"""The core of a verifier: one session. It says what the target is to compute next, and what drafters are to be told.

The text is the target's alone: each pass takes the last token and the drafts behind it, and picks behind each of them.
The first pick is right whatever the drafts are; a next one is right while the drafts before it equal the picks before
it. So the text is that of plain decoding, whatever drafters say; they decide only how much of it a pass gives.

The target is never idle: a pass without drafts is a step of plain decoding. What drafts come to late, because the text
is there already, are compared with it, and the line goes on where they agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice

from roles.speculation import policy
from roles.speculation.behind import LEAST_CHANCE, Behind
from roles.speculation.estimates import Passed, PassTimes, Recent
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
from roles.speculation.experience import Experience
from roles.speculation.lines import Line
from roles.speculation.outlook import Outlook
from roles.speculation.rota import Rota
from roles.speculation.stats import POSITIONS, Stats
from roles.speculation.trial import Trial

CHUNK, SHARED_CHUNK = 2048, 256
"""Positions of a prompt in one pass, at most: by itself, and where other texts wait for their next token meanwhile."""
RATE_DECAY = 0.9
"""Weight of a pass in the rate when the next one comes."""
OPENING_DEPTH = 8
TOLD_AT_REST = 32
"""Tokens that a drafter at rest is told of at a time."""


class Verifying:
    """One session of a verifier.

    Args:
        ids: the prompt.
        max_new_tokens: it ends after so many.
        stop_ids: it ends after one of these.
        vocab_size: token ids are below it.
        cached: positions of the prompt that the target has already; the last one is computed in any case.
        experience: of the verifier, which all its sessions share; None: this one is its first.
        most_drafts: that a pass takes; at least 1.
        picked: how tokens are, as of ``Experience.worth``.

    Attributes:
        tokens: new ones, in order.
        ended: why there are no more: ``length``, ``stop``, ``cancelled``; empty while there are.
        stats: of this session. right_of: drafts of each drafter that were right and in a pass.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        vocab_size: int,
        cached: int = 0,
        experience: Experience | None = None,
        most_drafts: int = policy.MOST_DRAFTS,
        picked: str = "",
    ) -> None:
        if not ids or max_new_tokens < 1:
            raise ValueError("a generation has a prompt, and makes a token")
        if most_drafts < 1:
            raise ValueError("a pass without any drafts needs no drafters")
        self.ended = ""
        self.stats = Stats()
        self.right_of = Counter[int]()
        self._text = list(ids)
        self._prompt = len(ids)
        self._stop = len(ids) + max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._vocab_size = vocab_size
        self._most_drafts = most_drafts
        self._held = min(cached, len(ids) - 1)  # positions that the target has and that are right
        self._pass: Run | None = None  # under way
        self._behind = Behind()
        self._drafters: dict[int, Outlook] = {}
        self._idle_since = 0.0
        self._due: float | None = None
        self._experience = experience or Experience()
        self._began = False
        self._rota = Rota(self._drafters)
        self._guard = policy.Guard()
        self._trial, self._picked = Trial(self._experience, picked), picked
        self._between = Recent(0.0)  # from a result to the next pass, but for waiting for drafts
        self._opening_depth = 0 if self._all_rest else OPENING_DEPTH
        self._guide: int | None = None  # whose drafts the pass under way has
        self._waited_s = 0.0  # before it
        self._was_behind = False  # it began behind others: its ids are all drafts
        self._arrived_s = 0.0  # drafters' work on drafts that came while nothing was computed
        self._rate_tokens = 0.0
        self._rate_s = 0.0

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
        return self._opening_depth

    @property
    def _all_rest(self) -> bool:
        """No drafter is to work now."""
        return self._trial.resting or self._experience.looking

    @property
    def _pass_times(self) -> PassTimes:
        return self._experience.pass_times(len(self._text))

    def line(self, drafter: int) -> Line:
        """What is known of a drafter. Raises ``KeyError``: it is none of this session's."""
        return self._drafters[drafter].line

    def handle(self, event: VerifierEvent, now: float) -> list[VerifierInstruction]:
        """Take an event; what is to be done. After ``Finished`` nothing is."""
        if self.ended:
            return []
        out = self._handled(event, now)
        if isinstance(out[-1] if out else None, Finished):
            self.leave(now)
            return out
        if self._pass is None:
            out += self._next_pass(now)
        if self._pass is not None:
            out += self._pass_behind(now)
        return out

    def _handled(self, event: VerifierEvent, now: float) -> list[VerifierInstruction]:
        out: list[VerifierInstruction] = []
        match event:
            case Began():
                self._began = True
                self._experience.sessions += 1
            case Tick():
                pass
            case PassDone():
                out += self._passed(event, now)
            case DrafterReady():
                out += self._ready(event, now)
            case DrafterLost(drafter):
                out += self._lost(drafter, now)
            case Drafted():
                out += self._drafted(event, now)
            case Latency(drafter, latency_s):
                if drafter in self._drafters:
                    self._drafters[drafter].pace.latency_s = latency_s
            case Cancel():
                self.ended = "cancelled"
                out.append(Finished(self.ended))
        return out

    def leave(self, now: float) -> None:
        """The verifier's other texts go on without this one. For who does not go on to the end; may be called twice."""
        self._trial.end()
        for outlook in self._drafters.values():
            self._experience.rests(outlook, now + outlook.stops_s)
        if self._began:
            self._began = False
            self._experience.sessions -= 1

    def next_deadline(self) -> float | None:
        """When a ``Tick`` is due."""
        return self._due

    # ------------------------------------------------------------------------------------------------------ drafters

    def _ready(self, event: DrafterReady, now: float) -> list[VerifierInstruction]:
        drafter, known = event.drafter, event.known
        if not self._prompt <= known <= len(self._text):
            raise ValueError(f"a drafter was opened with {known} of {len(self._text)} tokens")
        line = Line(known, self.opening_depth)
        known_of_it = self._experience.drafter(event.name, event.latency_s, event.step_s)
        outlook = Outlook(line, known_of_it, now, resting=self._all_rest, picked=self._picked)
        self._drafters[drafter] = outlook
        if line.depth:
            self._experience.works(outlook)
        changed = (line.depth == 0) != outlook.resting  # all rest, or go on, since it was opened
        return [self._tell(drafter, now)] if changed or known < len(self._text) else []

    def _drafted(self, event: Drafted, now: float) -> list[VerifierInstruction]:
        outlook = self._drafters.get(event.drafter)
        if outlook is None:
            return []
        fault = "a token that the model does not know"
        if all(0 <= token < self._vocab_size for token in event.tokens):
            fault, compared = outlook.receive_untrusted(event.epoch, event.position, event.tokens, self._text, now)
        if fault:
            return [Drop(event.drafter, fault), *self._lost(event.drafter, now)]
        self.stats.drafted += len(event.tokens)
        self.stats.late += compared.agreed
        if self._pass is None:
            self._arrived_s += len(event.tokens) * outlook.pace.step.seconds
        self._count_wasted(outlook)
        return []

    def _lost(self, drafter: int, now: float) -> list[VerifierInstruction]:
        if (outlook := self._drafters.pop(drafter, None)) is not None:
            self._experience.rests(outlook, now)
        return self._reviewed(now)

    def _count_wasted(self, outlook: Outlook) -> None:
        self.stats.wasted += outlook.line.dropped
        outlook.line.dropped = 0

    def _reviewed(self, now: float) -> list[VerifierInstruction]:
        """Drafters that begin, or come to rest, are told so."""
        times = self._pass_times
        step_s = times.seconds(0) if times.known else 0.0
        changed = self._rota.review(len(self._text), step_s, all_rest=self._all_rest)
        return [self._tell(drafter, now) for drafter in changed]

    def _tells(self, now: float) -> list[VerifierInstruction]:
        """What drafters are told when the text has grown."""
        size = len(self._text)
        out = self._reviewed(now)
        for drafter, outlook in self._drafters.items():
            if size - outlook.line.told >= (TOLD_AT_REST if outlook.resting else 1):
                out.append(self._tell(drafter, now))
        return out

    def _tell(self, drafter: int, now: float) -> Tell:
        outlook = self._drafters[drafter]
        number, start, right = outlook.verdict(len(self._text), now)
        if outlook.line.depth:
            self._experience.works(outlook)
        else:
            self._experience.rests(outlook, now + outlook.stops_s)
        return Tell(drafter, number, start, tuple(self._text[start:]), outlook.line.depth, right)

    # -------------------------------------------------------------------------------------------------------- passes

    def _next_pass(self, now: float) -> list[VerifierInstruction]:
        self._due = None
        if len(self._text) == self._prompt:
            chunk = CHUNK if self._experience.sessions <= 1 else SHARED_CHUNK
            stop = min(self._held + chunk, self._prompt)
            ids = tuple(self._text[self._held : stop])
            self._pass = Run(self._held, ids, int(stop == self._prompt), 0, prefill=True)
            self._behind.front(self._pass, now)
            return [self._pass]
        drafts: tuple[int, ...] = ()
        self._guide = None
        if self._pass_times.known:
            choice, self._guide = self._choose(now)
            if choice.wait_s > 0:
                self._due = now + choice.wait_s
                return []
            if self._guide is not None:
                drafts = tuple(islice(self._drafters[self._guide].line.ahead, choice.drafts))
        draw = len(self._text) - self._prompt
        self._waited_s, self._was_behind = now - self._idle_since, False
        drafting_s = min(self._waited_s, self._arrived_s)
        self.stats.draft_s += drafting_s
        self.stats.wait_s += self._waited_s - drafting_s
        whose = (self._guide or 0) if drafts else 0
        self._pass = Run(len(self._text) - 1, (self._text[-1], *drafts), len(drafts) + 1, draw, drafter=whose)
        self._behind.front(self._pass, now)
        return [self._pass]

    def _pass_behind(self, now: float) -> list[VerifierInstruction]:
        """One more pass, where the target has room for it and it may be of use."""
        behind, front, times = self._behind, self._pass, self._pass_times
        assert front is not None
        self._due = None
        if front.prefill or behind.full or not times.known:
            return []
        step_s = times.seconds(0)
        apart_s, flying = self._apart_s(step_s), tuple(behind.drafts)
        room = min(self._stop - len(self._text) - len(flying) - 1, self._most_drafts, times.most)
        if not apart_s or room < 1:
            return []
        drafts, alpha = tuple[int, ...](), 0.0
        guide = 0
        for drafter, outlook in self._drafters.items():
            ahead = tuple(islice(outlook.line.ahead, len(flying) + room))
            if ahead[: len(flying)] == flying and len(ahead) > len(flying) and outlook.acceptance.alpha > alpha:
                guide, drafts, alpha = drafter, ahead[len(flying) :], outlook.acceptance.alpha
        chance = alpha ** (len(flying) + 1)
        if chance < LEAST_CHANCE:
            return []
        if now < behind.last_at + apart_s:
            self._due = behind.last_at + apart_s
            return []
        hardly = chance * step_s < (1 - chance) * apart_s or self._guard.most_loss_s(step_s) < apart_s
        if hardly and behind.answer_within(apart_s, step_s, now):
            return []
        draw = len(self._text) - self._prompt + len(flying) + 1
        run = Run(len(self._text) + len(flying), drafts, len(drafts), draw)
        behind.begin(run, guide, now)
        return [run]

    def _apart_s(self, step_s: float) -> float:
        """As of ``Behind``."""
        return self._behind.apart_s(step_s, self._experience.sessions)

    def _choose(self, now: float) -> tuple[policy.Choice, int | None]:
        """What the next pass takes, after which wait, and whose drafts."""
        times, between_s = self._pass_times, self._between.seconds
        room = min(self._stop - len(self._text) - 1, self._most_drafts, times.most)
        step_s = times.seconds(0) + between_s
        rate = max(1 / step_s, self._rate_tokens / self._rate_s if self._rate_s else 0.0)
        most_wait_s = self._idle_since + policy.LONGEST_WAIT * step_s - now
        if self._apart_s(step_s):  # what comes later has a pass of its own
            most_wait_s = 0.0
        most_loss_s = self._guard.most_loss_s(step_s) - (now - self._idle_since)
        best, found = policy.Choice(0, 0.0, -math.inf), None
        for drafter, outlook in self._drafters.items():
            waits_s = outlook.waits_s(len(self._text), room, now)
            choice = policy.choose(
                waits_s,
                outlook.acceptance.alpha,
                lambda drafts: times.seconds(drafts) + between_s,
                rate,
                late=outlook.late(len(self._text)),
                kept_s=min(policy.KEPT * step_s, outlook.anew_s),
                most_wait_s=most_wait_s,
                most_loss_s=most_loss_s,
            )
            if choice.worth > best.worth:
                best, found = choice, drafter
        return best, found

    def _passed(self, event: PassDone, now: float) -> list[VerifierInstruction]:
        if self._behind.answered(event.turn_s):
            return []
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
            self._count(len(drafts), accepted, min(event.took_s, now - self._idle_since))
            self._measure(event.took_s, len(drafts), len(fresh), now)
            if self._guide is not None:
                self.right_of[self._guide] += accepted
        self._idle_since, self._arrived_s = now, 0.0
        self.stats.tokens += len(fresh)
        out: list[VerifierInstruction] = [Give(fresh)]
        for drafter, outlook in self._drafters.items():
            late = outlook.grew(fresh).agreed - (accepted if drafter == self._guide else 0)
            self.stats.late += max(0, late)
            self._count_wasted(outlook)
        if self.ended:
            return [*out, Finished(self.ended)]
        if (found := self._behind.next_in_front(self._text)) is not None:
            self._pass, self._guide = found
            self._waited_s, self._was_behind = 0.0, True
        return [*out, *self._tells(now)]

    def _measure(self, took_s: float, drafts: int, tokens: int, now: float) -> None:
        """A pass behind the prompt gave tokens: what it tells of passes, of drafters, and of what was lost by them."""
        times, experience, since_s = self._pass_times, self._experience, now - self._idle_since
        working = any(not outlook.resting for outlook in self._drafters.values())
        if (working and not self._behind.delayed) or not times.known:
            times.add(drafts, took_s)
        step_s = times.seconds(0)
        took_s = min(took_s, since_s)  # before, others were in front
        # Whoever reads may be slow, and a machine may sleep; between several texts' passes are the others', mostly.
        between_s = min(max(since_s - self._waited_s - took_s, 0.0), step_s) if experience.sessions <= 1 else 0.0
        passed = Passed(drafts + self._was_behind, tokens, between_s, self._waited_s, took_s, now - took_s)
        self._between.add(between_s)
        self._rate_tokens = RATE_DECAY * self._rate_tokens + tokens
        self._rate_s = RATE_DECAY * self._rate_s + max(since_s, 1e-6)
        # What a pass took more than such passes take is chance, and would be counted against drafts alone.
        chance_s = max(0.0, took_s - times.seconds(drafts))
        if not drafts and not self._apart_s(step_s):
            chance_s = took_s + between_s - step_s - self._between.seconds
        self._guard.passed(passed.seconds - chance_s, tokens, step_s + self._between.seconds)
        if self._drafters or self._trial.resting:
            self._trial.passed(experience.place(len(self._text)), passed)

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
        self._behind.validate()
        for outlook in self._drafters.values():
            outlook.line.validate(len(self._text))
