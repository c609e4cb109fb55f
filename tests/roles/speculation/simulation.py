"""Speculation in virtual time: the real cores, with drafters, a target and links that only take time.

The text is a row of random tokens; a drafter that has the right tokens before it picks the right one so often as
``alpha`` says, by dice of the position, and one that has a wrong token before it picks a wrong one. All times are in
seconds. The same setting is the same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from roles.drafter.drafting import DraftedText, DraftInstruction, DraftSending, DraftVerdict, pack_tokens
from roles.serving.model import Decoding, DecodingStats, PassRequest
from roles.verifier.cost_model import CostModel, DrafterModel
from roles.verifier.speculation import Speculation
from wire.codec import encode
from wire.text_messages import Drafts, Verdict

VOCAB = 150_000


@dataclass(frozen=True, slots=True)
class DrafterSetting:
    """A drafter.

    Attributes:
        alpha: how often its draft is right if those before are. draft_s: that a draft takes it.
        round_trip_s: of the link to it; each way takes half.
        until_s: it is lost then.
        alphas: other values of ``alpha``, from a position of the text on each.
    """

    alpha: float
    draft_s: float = 0.005
    round_trip_s: float = 0.0
    until_s: float = float("inf")
    alphas: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A generation.

    Attributes:
        pass_s: that a pass with so many drafts takes the target.
        shared: a pass that begins while a drafter computes takes so much longer: they share processors.
        model: as of ``Speculation``; None: a step alone is known. at_s: it begins then.
        noise: of a pass's time, as sigma of a log-normal factor with median 1.
    """

    drafters: tuple[DrafterSetting, ...]
    pass_s: Callable[[int], float]
    tokens: int
    prompt: int = 500
    seed: int = 0
    shared: float = 0.0
    model: CostModel | None = None
    at_s: float = 0.0
    noise: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What came of it.

    Attributes:
        seconds: from the prompt's end, which gave the first token, to the last token.
        alone_s: in which the target would have been there by itself.
        gaps: between two passes' ends, longest first.
    """

    tokens: int
    seconds: float
    alone_s: float
    payload_bytes: int
    stats: DecodingStats
    gaps: list[float] = field(default_factory=list)


def constant(pass_s: float) -> Callable[[int], float]:
    """A pass that takes as long whatever it has: as on an accelerator, which waits for its memory."""
    return lambda drafts: pass_s


def growing(pass_s: float, share: float) -> Callable[[int], float]:
    """A pass that takes ``share`` longer for each draft: as on processors."""
    return lambda drafts: pass_s * (1 + share * drafts)


class _Drafter:
    """A drafter, its model and its link."""

    def __init__(self, number: int, setting: DrafterSetting, run: Simulation) -> None:
        self.number = number
        self.setting = setting
        self._run = run
        self._dice = random.Random(f"{run.setting.seed} {number}")
        self._lots = [self._dice.random() for _ in run.truth]
        self._core: DraftedText | None = None
        self._known = 0
        self._drafted = 0
        self._right = 0  # tokens that the model's history begins with and that are those of the text
        self._arrivals = {True: 0.0, False: 0.0}
        self._ready = False
        self._model = DrafterModel(setting.round_trip_s / 2, setting.draft_s)
        self.lost = self.busy = False

    def open(self) -> None:
        ids, depth = tuple(self._run.decoding.ids), self._run.core.opening_depth
        self._known = len(ids)

        def begin() -> None:
            self._core = DraftedText(ids, prompt=self._run.setting.prompt, positions=len(self._run.truth), depth=depth)
            self._carry_out(self._core.next_instructions())

        self._send(True, begin)

    def take_verdict(self, verdict: DraftVerdict) -> None:
        self._run.payload_bytes += len(
            encode(Verdict(verdict.right, verdict.depth, pack_tokens(verdict.tokens, VOCAB)))
        )
        self._send(True, lambda: self._carry_out(self._text.take_verdict(verdict)))

    @property
    def _text(self) -> DraftedText:
        assert self._core is not None
        return self._core

    def _send(self, there: bool, act: Callable[[], None]) -> None:
        delay = self.setting.round_trip_s / 2
        self._arrivals[there] = max(self._arrivals[there], self._run.now + delay)
        self._run.at(self._arrivals[there], lambda: None if self.lost else act())

    def _carry_out(self, instructions: Sequence[DraftInstruction]) -> None:
        core = self._run.core
        self._text.validate()
        if self._text.ready and not self._ready:
            self._ready = True

            def begin_line() -> None:
                core.begin_line(self._known, self._model, self._run.now)
                self._run.send_verdict()

            self._send(False, lambda: self._run.go_on(begin_line))
        for item in instructions:
            match item:
                case PassRequest():
                    self.busy = True
                    self._run.after(self.setting.draft_s, partial(self._ran, item))
                case DraftSending(epoch, position, tokens):
                    self._run.payload_bytes += len(
                        encode(Drafts(0 if position == self._drafted else position, pack_tokens(tokens, VOCAB)))
                    )
                    self._drafted = position + len(tokens)
                    receive = partial(self._run.receive, epoch, position, tokens)
                    self._send(False, partial(self._run.go_on, receive))

    def _ran(self, run: PassRequest) -> None:
        self.busy = False
        if self.lost:
            return
        truth = self._run.truth
        end = run.keep + len(run.ids)
        right = min(self._right, run.keep)
        while right < end and run.keep <= right and run.ids[right - run.keep] == truth[right]:
            right += 1
        self._right = right
        samples = (self._pick(end),) if run.samples and end < len(truth) else ()
        self._carry_out(self._text.take_samples(samples))

    def _pick(self, end: int) -> int:
        truth = self._run.truth
        alpha = self.setting.alpha
        for place, other in self.setting.alphas:
            alpha = other if end - self._run.setting.prompt >= place else alpha
        right = self._lots[end] < alpha and self._right == end
        return truth[end] if right else (truth[end] + 1) % VOCAB


class Simulation:
    """One generation."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        dice = random.Random(setting.seed)
        self.truth = [dice.randrange(VOCAB) for _ in range(setting.prompt + setting.tokens)]
        self.decoding = Decoding(self.truth[: setting.prompt], max_new_tokens=setting.tokens)
        self.core = Speculation(
            self.decoding,
            setting.model or CostModel(setting.pass_s(0)),
            vocab_size=VOCAB,
        )
        self._is_computing = False
        self._due = float("inf")  # until then the next pass waits for drafts
        self.now = setting.at_s
        self.payload_bytes = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._drafters = [_Drafter(number, item, self) for number, item in enumerate(setting.drafters, 1)]
        self._ends: list[float] = []
        self._history: list[int] = []  # of the target
        self._times = random.Random(f"{setting.seed} times")

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something then."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after so long."""
        self.at(self.now + seconds, act)

    def receive(self, epoch: int, position: int, tokens: Sequence[int]) -> None:
        """Drafts arrive at the verifier."""
        self.core.receive_untrusted(epoch, position, tokens, self.now)

    def send_verdict(self) -> None:
        """If one is due."""
        if (verdict := self.core.next_verdict(self.now)) is not None:
            self._drafters[0].take_verdict(verdict)

    def go_on(self, act: Callable[[], None] = lambda: None) -> None:
        """Something happens at the verifier; then its next pass begins if it can."""
        if self.decoding.ended:
            return
        act()
        if not self._is_computing and not self.decoding.ended:
            drafts, wait_s = self.core.next_drafts(self.now)
            self._due = self.now + wait_s if wait_s > 0 else float("inf")
            if wait_s <= 0:
                self._begin_pass(self.decoding.next_pass(drafts))
        self.decoding.validate()
        self.core.validate()

    def _begin_pass(self, request: PassRequest) -> None:
        self._is_computing = True
        drafts = 0 if self.decoding.in_prompt else len(request.ids) - 1
        busy = any(drafter.busy for drafter in self._drafters)
        seconds = (
            self.setting.pass_s(drafts)
            * (1 + self.setting.shared * busy)
            * self._times.lognormvariate(0.0, self.setting.noise)
        )
        self.after(seconds, partial(self.go_on, partial(self._end_pass, request, seconds)))

    def _end_pass(self, request: PassRequest, seconds: float) -> None:
        self._is_computing = False
        self._history[request.keep :] = request.ids
        end = len(self._history)
        truth = self.truth
        right = next((at for at, token in enumerate(self._history) if token != truth[at]), end)
        # Behind what is wrong the model picks other tokens.
        samples = tuple(
            truth[at] if at < len(truth) and at <= right else VOCAB - 1
            for at in range(end - request.samples + 1, end + 1)
        )
        outcome = self.decoding.take_samples(samples, seconds, self.now)
        self.core.end_pass(outcome)
        if outcome.tokens:
            self._ends.append(self.now)
        self.send_verdict()

    def _lose(self, drafter: _Drafter) -> None:
        drafter.lost = True
        self.go_on(lambda: self.core.drop_line())

    def run(self) -> Outcome:
        """To its end."""
        for drafter in self._drafters:
            self.after(0.0, drafter.open)
            if drafter.setting.until_s < float("inf"):
                self.after(drafter.setting.until_s, partial(self._lose, drafter))
        self.after(0.0, self.go_on)
        while not self.decoding.ended:
            if self._due < float("inf") and (not self._heap or self._due <= self._heap[0][0]):
                self.now = max(self.now, self._due)
                self.go_on()
                continue
            self.now, _, act = heapq.heappop(self._heap)
            act()
        text = self.truth[self.setting.prompt :]
        self.core.end()
        assert list(self.decoding.tokens) == text, "not the text of plain decoding"
        ends = self._ends
        gaps = sorted((after - before for before, after in pairwise(ends)), reverse=True)
        seconds = ends[-1] - ends[0]
        alone_s = (len(text) - 1) * self.setting.pass_s(0)
        return Outcome(len(text), seconds, alone_s, self.payload_bytes, self.decoding.stats, gaps)


def simulate(setting: Setting) -> Outcome:
    """Run a generation in virtual time."""
    return Simulation(setting).run()


def mean_token_s(outcomes: Sequence[Outcome]) -> float:
    """Over several runs."""
    return sum(item.seconds for item in outcomes) / sum(item.tokens - 1 for item in outcomes)
