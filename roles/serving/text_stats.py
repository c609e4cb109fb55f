"""Figures of one text and of many, for people and programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roles.gauges import Rate
from roles.serving.model import DecodingStats
from wire.records import percentile

MOST_DRAFTERS = 32
"""Most drafters in the figures of a text, the most often right ones: the figures must fit a message."""
RECENT_TOKENS = 512
"""Approximate window of recent figures, in tokens."""
PARTS = ("verify", "draft", "wait")
_COUNTS = ("passes", "self_steps", "drafted", "verified", "accepted", "wasted")

TextSums = Mapping[str, float]
"""Sums of one text or of all texts. They never decrease."""


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter of one text, for people and programs.

    Attributes:
        model: its model. latency_ms: one-way latency. accepted: its right drafts in passes.
        bytes_in, bytes_out: sizes of the session's message bodies from and to it.
    """

    peer_id: str
    name: str
    model: str
    latency_ms: float
    bytes_in: int
    bytes_out: int
    accepted: int


RECENT_S, RECENT_TIMES = 300.0, 4096
"""Window of the figures of pace, and how many times of each kind it has at most."""


class RecentPace:
    """How the texts of the last minutes were written: time to the first token, and between tokens."""

    def __init__(self) -> None:
        self._prompt_rate = Rate()
        self._prompts = deque[tuple[float, int, int]](maxlen=RECENT_TIMES)  # time, tokens, cached ones
        # When, and how long it was waited.
        self._first, self._between = (deque[tuple[float, float]](maxlen=RECENT_TIMES) for _ in range(2))

    def add_first(self, waited_s: float, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """A text's first token came, ``waited_s`` after the text was asked for."""
        self._first.append((now, waited_s))
        self._prompts.append((now, prompt_tokens, cached_tokens))
        self._prompt_rate.add(prompt_tokens, now)

    def add_next(self, waited_s: float, now: float) -> None:
        """More tokens of a text came, ``waited_s`` after the ones before."""
        self._between.append((now, waited_s))

    def as_map(self, now: float) -> dict[str, float]:
        """``prompt_tokens_per_s``, of the last seconds; as far as known, of the last minutes: ``cached_share`` of the
        prompts' tokens; ``first_ms`` and ``between_ms``, the medians, and ``first_p95_ms`` and ``between_p95_ms``."""
        found, oldest = {"prompt_tokens_per_s": self._prompt_rate.per_s(now)}, now - RECENT_S
        if prompts := [tokens for at, *tokens in self._prompts if at > oldest]:
            found["cached_share"] = sum(cached for _, cached in prompts) / sum(tokens for tokens, _ in prompts)
        for kind, times in (("first", self._first), ("between", self._between)):
            recent_s = [waited_s for at, waited_s in times if at > oldest]
            for name, part in ((f"{kind}_ms", 0.5), (f"{kind}_p95_ms", 0.95)):
                if (value_s := percentile(recent_s, part)) is not None:
                    found[name] = 1e3 * value_s
        return found


class TextStats:
    """Figures of one text.

    Args:
        core: sums of its session.
        began_at: when it was asked for.
        cached_tokens: tokens of the prompt that were computed before.
        pace: of all texts, which this one adds to.
    """

    def __init__(
        self,
        core: DecodingStats,
        *,
        began_at: float,
        prompt_tokens: int,
        cached_tokens: int,
        pace: RecentPace,
    ) -> None:
        self._core, self._pace = core, pace
        self._began_at, self._first_at, self._last_at = began_at, 0.0, 0.0
        self._ended_at: float | None = None
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._tokens = 0
        self._turns_s = 0.0  # after the first token: turns of other texts, or the reader

    def add_pass(self, waited_s: float, took_s: float, *, prefill: bool) -> None:
        """Add a pass, ``waited_s`` after it was due. The model computed for ``took_s``; other texts and the reader took
        the rest."""
        if not prefill:
            self._turns_s += max(0.0, waited_s - took_s)

    def add_tokens(self, count: int, now: float) -> None:
        if not self._tokens:
            self._first_at = now
            self._pace.add_first(now - self._began_at, self._prompt_tokens, self._cached_tokens, now)
        else:
            self._pace.add_next(now - self._last_at, now)
        self._tokens += count
        self._last_at = now

    def sums(self, drafters: Sequence[DrafterFacts]) -> TextSums:
        """Those of its passes, and of the tokens after the first: ``after``, their number; ``all_s``, their seconds;
        ``wait_s`` of these for a turn or the reader."""
        core = self._core
        return {
            **asdict(core),
            "after": core.tokens - bool(core.tokens),  # the first token belongs to the prompt
            "all_s": self._last_at - self._first_at,
            "wait_s": self._turns_s,
            "bytes": sum(facts.bytes_in + facts.bytes_out for facts in drafters),
        }

    def end(self, now: float) -> None:
        self._ended_at = now if self._ended_at is None else self._ended_at

    def as_map(self, now: float, drafters: Sequence[DrafterFacts]) -> dict[str, Any]:
        """All figures. Milliseconds are per token after the first, which belongs to the prompt; None: there is none."""
        core, after, sums = self._core, self._tokens - 1, self.sums(drafters)
        figures, writing_s = figures_of(sums, 0.0), sums["all_s"]
        named = (
            "token_ms",
            *(f"{name}_ms" for name in PARTS),
            "rest_ms",
            "alpha",
            "accepted_length",
            "bytes_per_token",
        )
        return {
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "tokens": self._tokens,
            "seconds": (now if self._ended_at is None else self._ended_at) - self._began_at,
            "first_s": self._first_at - self._began_at if self._tokens else None,
            "tokens_per_s": after / writing_s if after > 0 and writing_s > 0 else None,
            **{name: figures.get(name) for name in named},
            **{name: getattr(core, name) for name in _COUNTS},
            "bytes_in": sum(facts.bytes_in for facts in drafters),
            "bytes_out": sum(facts.bytes_out for facts in drafters),
            "drafters": _by_peer(drafters),
        }


def _by_peer(drafters: Sequence[DrafterFacts]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for facts in drafters:
        table = asdict(facts)
        if (before := found.get(facts.peer_id)) is not None:
            table |= {name: table[name] + before[name] for name in ("bytes_in", "bytes_out", "accepted")}
        found[facts.peer_id] = table
    best = sorted(found, key=lambda peer_id: -found[peer_id]["accepted"])[:MOST_DRAFTERS]
    return [table for peer_id, table in found.items() if peer_id in best]


def add_sums(sums: Iterable[TextSums]) -> dict[str, float]:
    total: dict[str, float] = {}
    for parts in sums:
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value
    return total


class RecentSums:
    """Recent growth of the sums of all texts. Older growth fades as tokens come."""

    def __init__(self) -> None:
        self.grown: dict[str, float] = {}
        self._known: TextSums = {}

    def add(self, sums: TextSums) -> float:
        """Add the current sums. Returns by how many tokens they have grown."""
        more = {name: value - self._known.get(name, 0.0) for name, value in sums.items()}
        self._known = sums
        tokens = more.get("tokens", 0.0)
        fade = (1 - 1 / RECENT_TOKENS) ** tokens
        self.grown = add_sums([{name: fade * value for name, value in self.grown.items() if fade * value > 1e-3}, more])
        return tokens


def figures_of(grown: TextSums, step_s: float) -> dict[str, float]:
    """Figures for people and programs, as far as known.

    Args:
        step_s: current time of a step of the verifier alone; 0: unknown.

    Returns:
        ``alpha``; ``accepted_length`` in tokens per pass; ``alone_share``: passes without drafts; ``wasted_share`` of
        the drafts; ``bytes_per_token``;
        ``token_ms`` and its parts, as of ``TextStats.as_map``; ``alone_ms``: time per token without drafts;
        ``speed_up``: rate of tokens from the model's passes, relative to that without drafts.
    """
    found: dict[str, float] = {}

    def share(name: str, part: float, whole: float) -> None:
        if whole > 0:
            found[name] = part / whole

    share("alpha", grown.get("right", 0.0), grown.get("judged", 0.0))
    after, passes = grown.get("after", 0.0), grown.get("passes", 0.0)
    share("accepted_length", after, passes)
    share("alone_share", grown.get("self_steps", 0.0), passes)
    share("wasted_share", grown.get("wasted", 0.0), grown.get("drafted", 0.0))
    share("bytes_per_token", grown.get("bytes", 0.0), grown.get("tokens", 0.0))
    share("token_ms", 1e3 * grown.get("all_s", 0.0), after)
    for name in PARTS:
        share(f"{name}_ms", 1e3 * grown.get(f"{name}_s", 0.0), after)
    if after > 0:
        found["rest_ms"] = max(0.0, found["token_ms"] - sum(found[f"{name}_ms"] for name in PARTS))
    if step_s > 0:
        found["alone_ms"] = 1e3 * step_s
        if after >= 16:  # with fewer tokens one slow pass would dominate
            share("speed_up", step_s * after, grown.get("verify_s", 0.0) + grown.get("draft_s", 0.0))
    return found
