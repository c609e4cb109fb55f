"""A chain of stages without asyncio, on which everything is late in an order that a random number decides.

What each stage does is written down here once more, from the design and not from the worker's code: a session with an
epoch, a history, what it gave on. Whatever travels waits in a queue of its link and is delivered when it is drawn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2ptrain.core.errors import ResourceError
from roles.serving import chain_core as ev
from roles.serving.chain_core import ChainPhase, ChainSessionCore
from wire.chain_messages import ChainBroken

PRIME = 1_000_003
VOCAB = 5_003


def mixed(stage: int, position: int, before: int, value: int) -> int:
    """A stage's state after a position: of its own state before and what came in."""
    return (31 * before + 7 * value + 13 * position + 101 * stage + 1) % PRIME


def picked(state: int, sample_index: int) -> int:
    return (state * 17 + sample_index * 7919) % VOCAB


def reference(stages: int, ids: Sequence[int]) -> list[int]:
    """The last stage's state after each position."""
    values = list(ids)
    for stage in range(stages):
        before, states = 0, []
        for position, value in enumerate(values):
            before = mixed(stage, position, before, value)
            states.append(before)
        values = states
    return values


@dataclass(frozen=True)
class ForwardRequest:
    epoch: int
    number: int
    keep: int
    values: tuple[int, ...]
    last: int
    samples: int
    sample_index: int
    spent: tuple[int, ...] = ()


@dataclass
class Stage:
    """A peer that holds a part. Its session: ``epoch`` is -1 where there is none."""

    index: int
    seat: int
    alive: bool = True
    epoch: int = -1
    states: list[int] = field(default_factory=list)
    next: Link | None = None
    closed: bool = False


@dataclass
class Link:
    """What one stage sends another, in order. ``end`` is taken out when a side is gone."""

    source: Stage
    target: Stage
    queue: deque[ForwardRequest] = field(default_factory=deque)
    whole: bool = True


class Chain:
    """See the module's docstring. ``spares``: peers that may take the places of lost ones."""

    def __init__(self, stages: int, spares: int, rng: random.Random) -> None:
        self.rng = rng
        self.spares = spares
        self.core = ChainSessionCore([1] * stages, 0.0)
        self.now = 0.0
        self.stages = [Stage(index, 1) for index in range(stages)]
        self.to_stage: dict[int, deque[tuple[Stage, object]]] = {i: deque() for i in range(stages)}
        self.to_client: dict[int, deque[ev.ChainEvent]] = {i: deque() for i in range(stages)}
        self.notices: list[ev.ChainEvent] = []  # in any order
        self.links: list[Link] = []
        self.seeking: set[int] = set()
        self.sent_after_close: list[object] = []
        self.done: list[ev.PassAnswered] = []
        self.mended: list[ev.SessionReady] = []
        self.failed: ev.SessionFailed | None = None
        self.replaced: list[ev.StageReplace] = []
        self.on_done: Callable[[ev.PassAnswered], None] = lambda done: None
        self.handled = 0

    # --------------------------------------------------------------------------------------------------- the client

    def hand(self, event: ev.ChainEvent) -> None:
        self.now += 0.001
        self.handled += 1
        instructions = self.core.handle(event, self.now)
        validate(self.core)
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: ev.ChainInstruction) -> None:
        match instruction:
            case ev.PassAnswered():
                self.done.append(instruction)
                self.on_done(instruction)
            case ev.SessionReady():
                self.mended.append(instruction)
            case ev.SessionFailed():
                self.failed = instruction
            case ev.StageReplace(stage, seat, _):
                self.replaced.append(instruction)
                if seat >= 0 and self.stages[stage].seat == seat:
                    self.kill(stage, told=False)
                if stage in self.seeking or self.stages[stage].alive:
                    return
                self.seeking.add(stage)
                if self.spares:
                    self.spares -= 1
                    self.notices.append(ev.StageAssigned(stage, self.stages[stage].seat + 1))
                else:
                    self.notices.append(ev.StageUnassigned(stage, ResourceError(f"nobody can take stage {stage}")))
            case ev.ForwardSend(seat) | ev.StageAsk(_, _, seat) | ev.StageClose(_, seat):
                index = 0 if isinstance(instruction, ev.ForwardSend) else instruction.stage
                stage = self.stages[index]
                if stage.seat == seat and stage.alive:
                    self.to_stage[index].append((stage, instruction))

    # ---------------------------------------------------------------------------------------------------- what happens

    def kill(self, index: int, *, told: bool = True) -> None:
        """The stage's peer ends: what it was sent and has not done is lost, and so is what it said and nobody heard."""
        stage = self.stages[index]
        if not stage.alive:
            return
        stage.alive = False
        self.to_stage[index].clear()
        for link in self.links:
            if stage in (link.source, link.target) and link.whole:
                link.whole = False
                if link.target is stage and link.source.alive:
                    self._tell_broken(link.source, index, ev.NEXT_LOST)
        if told:
            # After what it had said before; some of that may be lost.
            for _ in range(self.rng.randrange(3)):
                if self.to_client[index]:
                    self.to_client[index].pop()
            self.to_client[index].append(ev.StageLost(index, stage.seat, "killed"))

    def cut(self, index: int) -> None:
        """The link from a stage to the next breaks, both live."""
        link = self.stages[index].next
        if link is not None and link.whole:
            link.whole = False
            link.queue.clear()
            self._tell_broken(link.source, index + 1, ev.NEXT_LOST)

    def forget(self, index: int) -> None:
        """The stage drops the session without a word, but that its end of the link from the stage before is closed."""
        stage = self.stages[index]
        stage.epoch, stage.states = -1, []
        for link in self.links:
            if link.target is stage and link.whole:
                link.whole = False
                self._tell_broken(link.source, index, ev.NEXT_LOST)

    def _tell_broken(self, stage: Stage, lost: int, code: str) -> None:
        if stage.epoch >= 0:
            broken = ChainBroken("", stage.epoch, lost, code, "it broke")
            self.to_client[stage.index].append(ev.StageBroken(stage.index, broken))

    def step(self) -> bool:
        """Deliver one thing, drawn at random; False where nothing is on its way."""
        choices: list[tuple[str, int]] = [("notice", i) for i in range(len(self.notices))]
        choices += [("to", i) for i, queue in self.to_stage.items() if queue]
        choices += [("from", i) for i, queue in self.to_client.items() if queue]
        choices += [("link", i) for i, link in enumerate(self.links) if link.whole and link.queue]
        if not choices:
            return False
        kind, which = self.rng.choice(choices)
        match kind:
            case "notice":
                event = self.notices.pop(which)
                if isinstance(event, ev.StageAssigned) and event.seat > 1:
                    self.seeking.discard(event.stage)
                    self.stages[event.stage] = Stage(event.stage, event.seat)
                self.hand(event)
            case "from":
                self.hand(self.to_client[which].popleft())
            case "to":
                stage, instruction = self.to_stage[which].popleft()
                self._asked(stage, instruction)
            case "link":
                link = self.links[which]
                work = link.queue.popleft()
                if link.target.alive:
                    self._work(link.target, work)
        return True

    # ---------------------------------------------------------------------------------------------------------- a stage

    def _say(self, stage: Stage, event: ev.ChainEvent) -> None:
        if stage.alive:
            self.to_client[stage.index].append(event)

    def _asked(self, stage: Stage, asked: object) -> None:
        if not stage.alive:
            return
        match asked:
            case ev.ForwardSend():
                assert asked.last < len(self.stages)
                work = asked.work
                wanted = (work.keep, work.ids, asked.last, work.samples, work.sample_index)
                self._work(stage, ForwardRequest(asked.epoch, asked.number, *wanted))
            case ev.StageAsk("open"):
                assert stage.epoch < 0, "a session is opened once"
                stage.epoch, stage.states, stage.next = asked.epoch, [], None
                if self._dialled(stage, asked.ask, asked.next_seat):
                    self._say(stage, ev.StageAnswered(stage.index, asked.ask))
                else:
                    stage.epoch = -1
            case ev.StageAsk("resume"):
                if stage.epoch < 0:
                    self._say(stage, ev.StageDeclined(stage.index, asked.ask, ev.UNKNOWN_SESSION, "no such session"))
                    return
                assert asked.epoch > stage.epoch
                stage.epoch = asked.epoch
                del stage.states[asked.keep :]
                if self._dialled(stage, asked.ask, asked.next_seat):
                    self._say(stage, ev.StageAnswered(stage.index, asked.ask, len(stage.states)))
            case ev.StageClose():
                self.forget(stage.index)
                if stage.next is not None:
                    stage.next.whole = False
                    stage.next = None

    def _dialled(self, stage: Stage, ask: int, next_seat: int) -> bool:
        """Whether the stage leads to the next one, dialling it where need be; else it declined."""
        if stage.index + 1 == len(self.stages):
            return True
        target = self.stages[stage.index + 1]
        link = stage.next
        if link is not None and link.whole and link.target is target and target.alive and target.epoch >= 0:
            return True
        if link is not None:
            link.whole = False
        if not target.alive or target.seat != next_seat or target.epoch < 0:
            self._say(stage, ev.StageDeclined(stage.index, ask, ev.NEXT_LOST, "the next stage does not answer"))
            stage.next = None
            return False
        stage.next = Link(stage, target)
        self.links.append(stage.next)
        return True

    def _work(self, stage: Stage, work: ForwardRequest) -> None:
        if work.epoch < stage.epoch:
            return  # of an older epoch
        if stage.epoch < 0:  # it was forgotten, or spoilt
            unknown = ChainBroken("", work.epoch, stage.index, "failed", "there is no such session")
            self._say(stage, ev.StageBroken(stage.index, unknown))
            return
        assert work.epoch == stage.epoch, "no work comes before its epoch was made known"
        assert work.keep <= len(stage.states), "no work of this epoch finds less history than it keeps"
        del stage.states[work.keep :]
        for value in work.values:
            before = stage.states[-1] if stage.states else 0
            stage.states.append(mixed(stage.index, len(stage.states), before, value))
        spent = (*work.spent, 10 + stage.index)
        if stage.index == work.last:
            first = len(stage.states) - work.samples
            tokens = tuple(picked(state, work.sample_index + i) for i, state in enumerate(stage.states[first:]))
            self._say(stage, ev.SamplesArrived(work.epoch, work.number, tokens, spent))
            return
        if stage.next is not None and stage.next.whole:
            out = tuple(stage.states[len(stage.states) - len(work.values) :])
            stage.next.queue.append(
                ForwardRequest(
                    work.epoch, work.number, work.keep, out, work.last, work.samples, work.sample_index, spent
                )
            )

    @property
    def running(self) -> bool:
        return self.core.phase is ChainPhase.RUNNING


def validate(core: ChainSessionCore) -> None:
    """Raise ``AssertionError`` where what must always be so is not."""
    numbers = [request.number for request in core.awaited if request.due]
    assert numbers == sorted(set(numbers))
    assert not numbers or numbers[-1] <= core.last_number
    assert core.current is None or core.current.work.keep <= len(core.ids), "a pass keeps more than there is"
    for index, stage in enumerate(core._stages):
        assert stage.epoch <= core.epoch
        assert stage.seat >= 0 or not (stage.opened or stage.ask)
        if core.phase is ChainPhase.RUNNING:
            assert core._ready(index)
    assert (core._mending_since is None) == (core.phase is ChainPhase.RUNNING) or core.phase is ChainPhase.ENDED
    if core.phase is ChainPhase.RUNNING:
        assert core.current is None or core.current.due, "a pass waits without a deadline"
