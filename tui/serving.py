"""Who writes text for whom, and how well: verifiers with their drafters, out of what each says that it serves. Pure.

Figures that are not known are None. Those of a verifier are of the last tokens that it wrote: while it writes none they
tell how it was, and are to be shown so (``Verifier.idle``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wire.records import ServingInfo

MOST_PLACES = 16
SPENT = ("verify", "draft", "wire", "wait", "rest")


@dataclass(frozen=True, slots=True)
class Drafter:
    """One of a verifier's. ``peer`` is empty for one within the verifier's process.

    Attributes:
        alpha: which part of its drafts is right, if those before are. share: of the right drafts, how many were its.
        latency_ms: one way. pace: drafts a second, for all its verifiers.
    """

    peer: str
    name: str
    model: str
    alpha: float | None
    latency_ms: float | None
    share: float | None
    pace: float | None
    sessions: int


@dataclass(frozen=True, slots=True)
class Verifier:
    """One that writes, and its drafters: those of whom most of the right drafts came first."""

    info: ServingInfo
    drafters: tuple[Drafter, ...]

    def figure(self, name: str) -> float | None:
        """One of its ``stats``."""
        return self.info.stats.get(name)

    @property
    def pace(self) -> float:
        """Tokens a second, in the last seconds."""
        return self.info.stats.get("tokens_per_s", 0.0)

    @property
    def idle(self) -> bool:
        """It writes nothing now: its other figures are of before."""
        return not self.info.sessions

    @property
    def wrote(self) -> bool:
        """There are figures of what it wrote."""
        return self.figure("token_ms") is not None

    @property
    def spent_ms(self) -> list[tuple[str, float]]:
        """Milliseconds of a token, by what they were spent on."""
        return [(name, max(0.0, self.figure(f"{name}_ms") or 0.0)) for name in SPENT]

    @property
    def right_at(self) -> list[float]:
        """Acceptance by place in the pass, as far as it is known."""
        found: list[float] = []
        for place in range(1, MOST_PLACES + 1):
            value = self.figure(f"right_at_{place}")
            if value is None:
                break
            found.append(min(1.0, max(0.0, value)))
        return found


def verifiers_of(serving: Mapping[str, ServingInfo]) -> list[Verifier]:
    """All verifiers: those that write first, then by name."""
    found = [Verifier(info, _drafters(info, serving)) for info in serving.values() if info.role == "verifier"]
    return sorted(found, key=lambda each: (each.idle, each.info.name, each.info.id))


def unused(serving: Mapping[str, ServingInfo]) -> list[ServingInfo]:
    """Drafters that no verifier is connected to, by name."""
    used = {peer for info in serving.values() for peer in info.drafters}
    found = [info for info in serving.values() if info.role == "drafter" and info.id not in used]
    return sorted(found, key=lambda info: (info.name, info.id))


def models_of(serving: Iterable[ServingInfo]) -> int:
    """Different models that verifiers write with."""
    return len({info.model for info in serving if info.role == "verifier"})


def _drafters(info: ServingInfo, serving: Mapping[str, ServingInfo]) -> tuple[Drafter, ...]:
    found = [_drafter(info, at, serving.get(peer)) for at, peer in enumerate(info.drafters)]
    return tuple(sorted(found, key=lambda each: (-(each.share or 0.0), not each.peer, each.name, each.peer)))


def _drafter(info: ServingInfo, at: int, itself: ServingInfo | None) -> Drafter:
    known = [values[at] if at < len(values) else -1.0 for values in _figures(info)]
    alpha, latency_ms, share = (value if value >= 0 else None for value in known)
    peer = info.drafters[at]
    if itself is None:
        return Drafter(peer, peer, "", alpha, latency_ms, share, None, 0)
    pace = itself.stats.get("tokens_per_s")
    return Drafter(peer, itself.name, itself.model, alpha, latency_ms, share, pace, itself.sessions)


def _figures(info: ServingInfo) -> tuple[list[float], list[float], list[float]]:
    return info.drafter_alpha, info.drafter_latency_ms, info.drafter_share
