"""How a text came about, and how a verifier fares, in figures for people and programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roles.speculation.stats import Stats
from roles.verifier.drafting_source import DrafterFacts
from wire.frame import HEADER

WINDOW_S = 5.0
"""Over which a rate is taken."""
_GRAIN_S = 0.25
MOST_TOLD = 32
"""Drafters of one text, those that were right most often: figures have to fit a message, whoever came."""


class WritingStats:
    """Of one text.

    Args:
        core: its session's sums.
        cached_tokens: of the prompt, that were there already.
    """

    def __init__(self, core: Stats, *, began_at: float, prompt_tokens: int, cached_tokens: int) -> None:
        self._core = core
        self._began_at, self._first_at, self._last_at = began_at, 0.0, 0.0
        self._ended_at: float | None = None
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._tokens = 0
        self._asked_at = 0.0
        self._turns_s = 0.0  # behind the first token; of others, or of whoever reads

    def asked(self, now: float) -> None:
        """The core wants a pass."""
        self._asked_at = now

    def passed(self, now: float, took_s: float, *, prefill: bool) -> None:
        """The pass is done. What it took longer than the model was others' turn, or that of whoever reads."""
        if not prefill:
            self._turns_s += max(0.0, now - self._asked_at - took_s)
        self._asked_at = now  # of those behind it: before, this one was in front

    def given(self, count: int, now: float) -> None:
        """So many tokens came."""
        if not self._tokens:
            self._first_at = now
        self._tokens += count
        self._last_at = now

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds of the tokens behind the first: all of them, and by what they were spent on."""
        core = self._core
        return {
            "all": self._last_at - self._first_at,
            "verify": core.verify_s,
            "draft": core.draft_s,
            "wire": core.wait_s,
            "wait": self._turns_s,
        }

    def ended(self, now: float) -> None:
        """No more come."""
        self._ended_at = now if self._ended_at is None else self._ended_at

    def as_map(self, now: float, drafters: Sequence[DrafterFacts], right_of: Mapping[int, int]) -> dict[str, Any]:
        """All of it. Milliseconds are of a token behind the first, which is the prompt's; None where there is none:
        ``verify_ms`` computing, ``draft_ms`` waiting for drafts to be made, ``wire_ms`` for their way, ``wait_ms`` for
        the model's turn, or the reader. ``right_of``: drafts of each drafter that were right and in a pass."""
        core, after = self._core, self._tokens - 1
        spent_s = self.spent_s
        writing_s = spent_s.pop("all")
        headers = HEADER.size * sum(each.frames for each in drafters)
        bytes_in, bytes_out = sum(each.bytes_in for each in drafters), sum(each.bytes_out for each in drafters)

        def each_ms(seconds: float) -> float | None:
            return 1e3 * seconds / after if after > 0 else None

        return {
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "tokens": self._tokens,
            "seconds": (now if self._ended_at is None else self._ended_at) - self._began_at,
            "first_s": self._first_at - self._began_at if self._tokens else None,
            "tokens_per_s": after / writing_s if after > 0 and writing_s > 0 else None,
            "token_ms": each_ms(writing_s),
            **{f"{name}_ms": each_ms(seconds) for name, seconds in spent_s.items()},
            "rest_ms": each_ms(max(0.0, writing_s - sum(spent_s.values()))),
            **speculation_map(core),
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
            "bytes_per_token": (bytes_in + bytes_out) / self._tokens if self._tokens else None,
            "frame_bytes_per_token": (bytes_in + bytes_out + headers) / self._tokens if self._tokens else None,
            "drafters": _told(drafters, right_of),
        }


def _told(drafters: Sequence[DrafterFacts], right_of: Mapping[int, int]) -> list[dict[str, Any]]:
    """One for each peer, however often it came and went."""
    found: dict[str, dict[str, Any]] = {}
    for each in drafters:
        told = each.as_map() | {"accepted": right_of.get(each.drafter, 0)}
        if (before := found.get(each.peer_id)) is not None:
            told |= {name: told[name] + before[name] for name in ("bytes_in", "bytes_out", "accepted")}
        found[each.peer_id] = told
    best = sorted(found, key=lambda peer_id: -found[peer_id]["accepted"])[:MOST_TOLD]
    return [told for peer_id, told in found.items() if peer_id in best]


def speculation_map(core: Stats) -> dict[str, Any]:
    """What drafts were good for. ``acceptance_at``: by place in the pass, as far as any pass went."""
    reached = [(right, tried) for right, tried in zip(core.accepted_at, core.tried_at, strict=True) if tried]
    return {
        "passes": core.passes,
        "self_steps": core.self_steps,
        "alpha": core.alpha if core.verified else None,
        "accepted_length": (core.tokens - 1) / core.passes if core.passes else None,
        "acceptance_at": [right / tried for right, tried in reached],
        "drafted": core.drafted,
        "verified": core.verified,
        "accepted": core.accepted,
        "wasted": core.wasted,
    }


class Rate:
    """Events a second over the last ``WINDOW_S``."""

    def __init__(self) -> None:
        self._grains: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        """So many now."""
        if self._grains and now - self._grains[-1][0] < _GRAIN_S:
            since, sum_before = self._grains.pop()
            self._grains.append((since, sum_before + count))
        else:
            self._grains.append((now, count))
        self._forget(now)

    def per_s(self, now: float) -> float:
        """0 where nothing came."""
        self._forget(now)
        if not self._grains:
            return 0.0
        return sum(count for _, count in self._grains) / max(now - self._grains[0][0], 1.0)

    def _forget(self, now: float) -> None:
        while self._grains and now - self._grains[0][0] > WINDOW_S:
            self._grains.popleft()


def summed(stats: Iterable[Stats]) -> Stats:
    """All of them together."""
    total = Stats()
    for each in stats:
        total.add(each)
    return total
