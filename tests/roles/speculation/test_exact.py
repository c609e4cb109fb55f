"""Whatever drafters say, and whenever, the text is that of plain decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2ptrain.core.errors import ProtocolError
from roles.drafter.drafting import DraftedText, DraftInstruction, DraftSending, DraftVerdict
from roles.serving.model import Decoding, PassRequest
from roles.verifier.cost_model import CostModel, DrafterModel
from roles.verifier.speculation import Speculation
from tests.invariants import check_invariants
from tests.roles.drafter_hosts import measured

VOCAB = 7
STOP_ID = 6


def target(prefix: tuple[int, ...]) -> int:
    """The model to write with: any function of the prefix."""
    return crc32(bytes(prefix)) % VOCAB


def guess(prefix: tuple[int, ...], alpha: float, seed: int) -> int:
    """A small model, which agrees so often."""
    dice = crc32(bytes((seed + 100, *prefix)))
    return target(prefix) if dice % 1000 < alpha * 1000 else dice // 1000 % VOCAB


def plain(prompt: tuple[int, ...], length: int, stop_ids: frozenset[int]) -> list[int]:
    text: list[int] = []
    while len(text) < length and not (text and text[-1] in stop_ids):
        text.append(target((*prompt, *text)))
    return text


class Model:
    """What a shell has: a history that runs cut and extend."""

    def __init__(self) -> None:
        self.history: list[int] = []

    def run(self, run: PassRequest) -> list[tuple[int, ...]]:
        """The prefixes that picks are asked for."""
        assert 0 < len(run.ids) <= 2048, run
        assert run.keep <= len(self.history), run
        del self.history[run.keep :]
        self.history += run.ids
        stop = len(self.history)
        return [tuple(self.history[:end]) for end in range(stop - run.samples + 1, stop + 1)]


@dataclass
class Drafter:
    """A drafter and the wires to and from it; ``core`` is None where only nonsense comes from it."""

    core: DraftedText | None
    alpha: float
    seed: int
    gaps: bool
    model: Model = field(default_factory=Model)
    running: PassRequest | None = None
    inbox: deque[DraftVerdict] = field(default_factory=deque)
    outbox: deque[Callable[[], None]] = field(default_factory=deque)
    opened: bool = False
    known: int = 0


class SpeculativeText(RuleBasedStateMachine):
    """A verifier whose drafters, one at a time, are good, bad, lost, or talk nonsense. Everything may take any time."""

    @initialize(
        length=st.integers(1, 40),
        prompt=st.integers(1, 3).flatmap(lambda size: st.tuples(*[st.integers(0, VOCAB - 1)] * size)),
        stop=st.booleans(),
        cached=st.integers(0, 2),
        known=st.booleans(),
        passes=st.integers(1, 4),
    )
    def begin(
        self, length: int, prompt: tuple[int, ...], stop: bool, cached: int, known: bool, passes: int = 1
    ) -> None:
        stop_ids = frozenset({STOP_ID}) if stop else frozenset[int]()
        self.prompt, self.length = prompt, length
        self.expected = plain(prompt, length, stop_ids)
        # Here time means nothing: where a step alone is known it is so long that drafts are always a gain.
        self.cost = measured(100.0) if known else CostModel()
        self.decoding = Decoding(prompt, max_new_tokens=length, stop_ids=stop_ids, cached=cached, most_passes=passes)
        self.stale = 0
        self.core = Speculation(self.decoding, self.cost)
        self.model = Model()
        self.model.history = list(prompt[: min(cached, len(prompt) - 1)])
        self.running: deque[PassRequest] = deque()
        self.drafters: dict[int, Drafter] = {}
        self.now = 0.0
        self.waits = False
        self.numbers: dict[int, int] = {}
        self.go_on()

    def go_on(self, act: Callable[[], None] = lambda: None) -> None:
        """Something happens at the verifier; then its next pass begins if it can."""
        self.now += 0.01
        if self.decoding.ended:
            return
        act()
        if self.decoding.ended:
            self.core.end()
        else:
            self.waits = False
            while self.decoding.may_begin and not self.waits:
                drafts, self.wait_s = self.core.next_drafts(self.now)
                self.waits = self.wait_s > 0
                if not self.waits:
                    self.running.append(self.decoding.next_pass(drafts))
        check_invariants(self.decoding)
        check_invariants(self.core)

    def receive(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        with suppress(ProtocolError):
            self.core.receive_untrusted(epoch, position, tokens, self.now)
            return
        (drafter,) = self.drafters
        assert self.drafters.pop(drafter).core is None

    def begin_line(self, known: int) -> None:
        self.core.begin_line(known, DrafterModel(), self.now)
        self.send_verdict()

    def send_verdict(self) -> None:
        if (verdict := self.core.next_verdict(self.now)) is not None:
            (drafter,) = self.drafters
            assert 0 <= verdict.right <= len(self.decoding.ids) - len(verdict.tokens)
            assert verdict.number == self.numbers.get(drafter, 0) + 1
            self.numbers[drafter] = verdict.number
            self.drafters[drafter].inbox.append(verdict)

    # ---------------------------------------------------------------------------------------------------- the target

    @precondition(lambda self: self.running)
    @rule(quick=st.booleans())
    def computes(self, quick: bool = False) -> None:
        if quick:  # the drafters are sooner done than the target
            for number, drafter in list(self.drafters.items()):
                if drafter.core is not None:
                    self.hurries(number, drafter)
        run = self.running.popleft()
        samples = tuple(target(prefix) for prefix in self.model.run(run))
        if self.decoding._stale:
            self.stale += 1
        elif not self.decoding.ended:  # passes under way at the end of a text are dropped
            assert self.model.history[: run.keep] == self.decoding.ids[: run.keep]
            assert run.sample_index(len(self.prompt)) == len(self.decoding.tokens)

        def end_pass() -> None:
            self.core.end_pass(self.decoding.take_samples(samples, 0.05, self.now, 0.001))
            self.send_verdict()

        self.go_on(end_pass)

    @rule(seed=st.integers(0, 3), passes=st.integers(1, 20))
    def is_drafted_for_promptly(self, seed: int, passes: int) -> None:
        """A drafter that is right most of the time is heard before each pass: passes carry drafts, also wrong ones."""
        self.joins(alpha=0.8, seed=seed, gaps=False, again=False)
        for _ in range(passes):
            if self.running and not self.may_wait():
                self.computes(quick=True)
            elif not self.decoding.ended:
                self.waits_no_longer()

    # --------------------------------------------------------------------------------------------------- the drafters

    @rule(alpha=st.sampled_from([0.0, 0.5, 0.9, 1.0]), seed=st.integers(0, 3), gaps=st.booleans(), again=st.booleans())
    def joins(self, alpha: float, seed: int, gaps: bool, again: bool) -> None:
        if self.drafters:
            return
        number = next(n for n in range(100) if n not in self.drafters) if again else len(self.numbers) + 50
        history = tuple(self.decoding.ids)
        core = DraftedText(history, prompt=len(self.prompt), positions=100, depth=self.core.opening_depth)
        self.drafters[number] = drafter = Drafter(core, alpha, seed, gaps, known=len(history))
        self.numbers[number] = 0
        self.drafts(drafter, core.next_instructions())

    @rule()
    def joins_in_nonsense(self) -> None:
        if self.drafters:
            return
        number = 1000 + len(self.numbers)
        self.drafters[number] = Drafter(None, 0.0, 0, gaps=False)
        self.numbers[number] = 0
        self.go_on(lambda: self.begin_line(len(self.decoding.ids)))

    def drafts(self, drafter: Drafter, instructions: Sequence[DraftInstruction]) -> None:
        assert drafter.core is not None
        for item in instructions:
            match item:
                case PassRequest():
                    assert drafter.running is None
                    drafter.running = item
                case DraftSending(epoch, position, tokens):
                    drafter.outbox.append(partial(self.receive, epoch, position, tokens))
        check_invariants(drafter.core)
        if drafter.core.ready and not drafter.opened:
            drafter.opened = True
            drafter.outbox.appendleft(partial(self.begin_line, drafter.known))

    def hears(self, drafter: Drafter) -> None:
        assert drafter.core is not None
        self.drafts(drafter, drafter.core.take_verdict(drafter.inbox.popleft()))

    def some(self, data: Any) -> tuple[int, Drafter] | None:
        real = [(number, drafter) for number, drafter in self.drafters.items() if drafter.core is not None]
        return data.draw(st.sampled_from(real)) if real else None

    @rule(data=st.data())
    def drafter_computes(self, data: Any) -> None:
        if (found := self.some(data)) and found[1].running:
            self.computes_draft(found[1])

    def computes_draft(self, drafter: Drafter) -> None:
        run, drafter.running = drafter.running, None
        assert run is not None
        assert drafter.core is not None
        samples = tuple(guess(prefix, drafter.alpha, drafter.seed) for prefix in drafter.model.run(run))
        unknown = drafter.gaps and crc32(bytes(drafter.model.history)) % 3 == 0  # no token of the verifier's
        self.drafts(drafter, drafter.core.take_samples(() if unknown else samples))

    def hurries(self, number: int, drafter: Drafter) -> None:
        """All that a drafter has to hear, to compute and to say is done now."""
        while self.drafters.get(number) is drafter and (drafter.inbox or drafter.running or drafter.outbox):
            if drafter.inbox:
                self.hears(drafter)
            elif drafter.running:
                self.computes_draft(drafter)
            else:
                self.go_on(drafter.outbox.popleft())

    @rule(data=st.data())
    def drafter_hears(self, data: Any) -> None:
        if (found := self.some(data)) and found[1].inbox:
            self.hears(found[1])

    @rule(data=st.data())
    def verifier_hears(self, data: Any) -> None:
        if (found := self.some(data)) and found[1].outbox:
            self.go_on(found[1].outbox.popleft())

    @rule(data=st.data())
    def drafter_dies(self, data: Any) -> None:
        if self.drafters:
            number = data.draw(st.sampled_from(sorted(self.drafters)))
            del self.drafters[number]
            self.go_on(lambda: self.core.drop_line())

    @rule(
        epoch=st.integers(-1, 5),
        offset=st.integers(-4, 20),
        tokens=st.lists(st.integers(-1, VOCAB), max_size=12),
    )
    def nonsense(self, epoch: int, offset: int, tokens: list[int]) -> None:
        if any(drafter.core is None for drafter in self.drafters.values()):
            self.go_on(lambda: self.receive(epoch, len(self.decoding.ids) + offset, tuple(tokens)))

    @rule(resting=st.sampled_from([False, False, False, True]))
    def another_text_finds_what_drafters_are_worth(self, resting: bool) -> None:
        self.cost.resting = resting or not self.cost.step_s

    def may_wait(self) -> bool:
        return not self.decoding.ended and self.waits and self.wait_s < inf

    @precondition(may_wait)
    @rule()
    def waits_no_longer(self) -> None:
        self.now += self.wait_s
        self.go_on()

    # ------------------------------------------------------------------------------------------------------ what holds

    @invariant()
    def text_is_that_of_plain_decoding(self) -> None:
        tokens = list(self.decoding.tokens)
        assert tokens == self.expected[: len(tokens)]
        assert bool(self.decoding.ended) == (len(tokens) == len(self.expected))
        assert self.decoding.ended or self.running or self.waits

    def teardown(self) -> None:
        """All that is under way arrives: then both sides agree, and the text goes on to its end."""
        if not hasattr(self, "core"):
            return
        for drafter in list(self.drafters.values()):
            while drafter.core and (drafter.inbox or drafter.outbox or drafter.running):
                if drafter.inbox:
                    self.hears(drafter)
                elif drafter.outbox:
                    self.go_on(drafter.outbox.popleft())
                elif drafter.running:
                    run, drafter.running = drafter.running, None
                    samples = tuple(target(prefix) for prefix in drafter.model.run(run))
                    self.drafts(drafter, drafter.core.take_samples(samples))
            if drafter.core and not self.decoding.ended:
                line = self.core._line
                assert line is not None
                size = line.size
                assert size == drafter.core.known
                assert len(line.sizes) - 1 == drafter.core.number
                assert drafter.core._ids[:size] == self.decoding.ids[:size]
                fresh = drafter.core.epoch > line.epoch  # it was cut, and has not drafted since
                untold = line.depth == 0 and size < len(self.decoding.ids)  # it rests, and hears of it later
                assert fresh or (line.epoch == drafter.core.epoch and (untold or not line.dead))
        while not self.decoding.ended:
            if self.running:
                self.computes()
            else:
                self.waits_no_longer()
        assert list(self.decoding.tokens) == self.expected
        assert self.cost.sessions == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("passes", [1, 3])
def test_the_scenario_has_passes_with_right_and_with_wrong_drafts(seed: int, passes: int) -> None:
    machine = SpeculativeText()
    machine.begin(length=40, prompt=(1, 2), stop=False, cached=0, known=True, passes=passes)
    machine.is_drafted_for_promptly(seed=seed, passes=200)
    assert bool(machine.stale) == (passes > 1)
    machine.text_is_that_of_plain_decoding()
    assert machine.decoding.ended
    assert 0 < machine.decoding.stats.accepted < machine.decoding.stats.verified


SpeculativeText.TestCase.settings = settings(max_examples=60, stateful_step_count=80)
TestExact = SpeculativeText.TestCase
