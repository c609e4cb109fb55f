"""What ``bench speculate`` measures: a plan's settings, and the texts of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

from p2ptrain.core.errors import JobFailed
from roles.speculation.policy import MOST_DRAFTS
from roles.speculation.simulation import drafting_ahead_s, synchronous_s

GOALS_MS = {0.0: 20.0, 20.0: 22.5, 80.0: 31.5, 200.0: 42.5}
"""Of a token, by round trip, with these:"""
GOAL_ALPHA, GOAL_PASS_S, GOAL_DRAFT_S = 0.8, 0.05, 0.005
NEVER_SLOWER = 1.05
CHAIN_TIMES = 3.0
CHAIN_RING_S, CHAIN_STAGES = 0.08, 2
"""Of a split verifier: what its token travels, to the stages, between them, and back."""
SIMULATED_RUNS = 12
ALONE_TOKENS = 64
"""Of the text that is written without a drafter: all of its tokens take as long."""
SETTLED = 64
"""Tokens after which a text's drafter is known."""
AUTO = 0
"""Of depths: how many drafts a pass takes is the verifier's own choice."""
START_S = 3.0
"""Before a setting's texts, about."""


@dataclass(frozen=True, slots=True)
class Where:
    """One setting. ``depth``: the most drafts that a pass takes, or ``AUTO``."""

    round_trip_ms: float
    alpha: float
    depth: int = AUTO

    def __str__(self) -> str:
        return f"{self.round_trip_ms:g} ms, alpha {self.alpha:g}" + (f", depth {self.depth}" if self.depth else "")

    @property
    def round_trip_s(self) -> float:
        return self.round_trip_ms / 1e3

    @property
    def most_drafts(self) -> int:
        return self.depth or MOST_DRAFTS


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        alphas: how often a draft is right where all before it are.
        jitter_ms: by which a message may be later than half of the round trip, at most.
        pass_s: that a pass of the verifier takes. growth: of it, that each draft adds. draft_s: that a draft takes.
        tokens: new ones of a text. texts: of each setting.
        chain: the verifier is split over ``CHAIN_STAGES``: each pass travels for ``CHAIN_RING_S`` as well.
        kill: whether drafters are killed in the midst of a text.
        depths: as of ``Where``.
        virtual: all sides are in one process, on virtual time.
    """

    alphas: list[float]
    round_trips_ms: list[float]
    jitter_ms: float = 0.0
    pass_s: float = GOAL_PASS_S
    growth: float = 0.0
    draft_s: float = GOAL_DRAFT_S
    tokens: int = 512
    texts: int = 2
    chain: bool = False
    kill: bool = False
    threads: int = 1
    depths: list[int] = field(default_factory=lambda: [AUTO])
    virtual: bool = False

    def settings(self) -> Iterator[Where]:
        """Near ones first."""
        return (Where(*each) for each in product(self.round_trips_ms, self.alphas, self.depths))

    @property
    def alone_s(self) -> float:
        """A pass without drafts, travelling included."""
        return self.pass_s + (CHAIN_RING_S if self.chain else 0.0)

    @property
    def row_s(self) -> float:
        """That each draft adds to a pass."""
        return self.pass_s * self.growth

    def passes_s(self, drafts: int) -> float:
        """A pass with so many drafts."""
        return self.alone_s + self.row_s * drafts

    def ahead_s(self, where: Where) -> float:
        """Of a token, by the formula."""
        most = MOST_DRAFTS if self.chain else where.most_drafts  # a chain's passes go one behind the other
        return drafting_ahead_s(where.alpha, self.draft_s, self.alone_s, where.round_trip_s, most_drafts=most)

    def in_turns_s(self, where: Where, drafts: int) -> float:
        """The same of a protocol whose sides wait for each other."""
        return synchronous_s(drafts, where.alpha, self.draft_s, self.passes_s, where.round_trip_s)

    def drafts_in_turns(self, where: Where) -> int:
        """That such a protocol asks for at a time: by itself, those that are best by the formula."""
        return where.depth or min(range(1, MOST_DRAFTS + 1), key=lambda drafts: self.in_turns_s(where, drafts))

    def expected_s(self, where: Where) -> float:
        """What this setting takes to measure, about."""
        in_turns_s = self.in_turns_s(where, self.drafts_in_turns(where))
        token_s = self.texts * self.ahead_s(where) + in_turns_s
        return START_S + self.tokens * token_s + min(ALONE_TOKENS, self.tokens) * self.alone_s

    def goal_s(self, where: Where, alone_s: float) -> float | None:
        """Of a token; None where none was set. ``alone_s``: that one takes without a drafter."""
        if where.depth:
            return None
        if self.chain:
            return alone_s / CHAIN_TIMES if where.alpha == GOAL_ALPHA else None
        mine = (where.alpha, self.pass_s, self.growth, self.draft_s, self.jitter_ms)
        if mine != (GOAL_ALPHA, GOAL_PASS_S, 0.0, GOAL_DRAFT_S, 0.0) or where.round_trip_ms not in GOALS_MS:
            return None
        return GOALS_MS[where.round_trip_ms] / 1e3


@dataclass(slots=True)
class Texts:
    """Some texts of one way to write them. ``stats``: of each, empty for the rival's."""

    at_s: list[list[float]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, texts: Sequence[dict[str, Any]], expected: Sequence[Sequence[int]], what: str) -> Texts:
        """Raises ``JobFailed``: one is not what it is to be."""
        for number, (text, wanted) in enumerate(zip(texts, expected, strict=True), 1):
            if text["ids"] != list(wanted):
                raise JobFailed(f"text {number}, {what}: not the verifier's own text; its times count for nothing")
        return cls.told(texts)

    @classmethod
    def told(cls, texts: Sequence[dict[str, Any]]) -> Texts:
        """Whatever they are."""
        return cls([text["at_s"] for text in texts], [text.get("stats", {}) for text in texts])

    def add(self, other: Texts) -> None:
        """Others of the same way."""
        self.at_s += other.at_s
        self.stats += other.stats

    @property
    def token_s(self) -> float:
        """From the first token of each text to its last."""
        return sum(at_s[-1] for at_s in self.at_s) / max(1, sum(len(at_s) - 1 for at_s in self.at_s))

    @property
    def settled_s(self) -> float:
        """Of a token behind the first ``SETTLED`` ones; 0 where there is none."""
        long = [at_s for at_s in self.at_s if len(at_s) > SETTLED + 1]
        return sum(at_s[-1] - at_s[SETTLED] for at_s in long) / max(1, sum(len(at_s) - 1 - SETTLED for at_s in long))

    def total(self, name: str) -> float:
        """A sum over the texts."""
        return float(sum(stats.get(name) or 0 for stats in self.stats))

    def each(self, name: str, per: str) -> float:
        """One sum for each of another."""
        return self.total(name) / max(1.0, self.total(per))


@dataclass(slots=True)
class Row:
    """One setting. ``drafts``: that the rival asks for at a time."""

    where: Where
    drafts: int
    alone: Texts
    ahead: Texts
    in_turns: Texts
    simulated_s: float


@dataclass(slots=True)
class Kill:
    """A drafter killed in the midst of a text. ``pause_s``: the longest from then on between two pieces."""

    round_trip_ms: float
    killed_at: int
    pause_s: float
    before_s: float
    limit_s: float

    @property
    def held(self) -> bool:
        return self.pause_s <= self.limit_s


def pauses(at_s: Sequence[float], first: int) -> float:
    """The longest time between a token from number ``first`` on and the one before it."""
    return max((later - before for before, later in pairwise(at_s[max(0, first - 1) :])), default=0.0)
