"""How a verifier has fared of late, over all texts that drafters may have a part in. Pure.

*Sums* only grow: of each text, and so of all of them together. What grew within the last tokens are the figures of
late. They stand still while nothing is written, and then say how it was when something was. What tokens would have
taken without drafts is added up as they come, by what a step alone took then: a machine's load changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from roles.speculation.stats import POSITIONS, Stats

Sums = Mapping[str, float]

RECENT_TOKENS = 512
"""Figures of late are of so many, at least once there were as many."""
SURE_TOKENS = 16
"""After fewer, nothing is said of the speed-up: a single slow pass would decide it."""
_GRAIN_TOKENS = 32
BY = "by "
"""Before the peer id of a drafter: drafts of its that were right and in a pass. Without one: of this process' own."""
_PARTS = ("verify", "draft", "wire", "wait")


def sums_of(core: Stats, spent_s: Mapping[str, float], *, bytes_moved: int, right_by: Mapping[str, int]) -> Sums:
    """Those of one text.

    Args:
        spent_s: seconds of the tokens behind the first, by what they were spent on; ``all``: the whole of it.
        right_by: drafts that were right and in a pass, by their drafter's peer id.
    """
    first = 1 if core.tokens else 0  # it is the prompt's
    return {
        "tokens": core.tokens,
        "after": core.tokens - first,
        "passes": core.passes,
        "alone": core.self_steps,
        "drafted": core.drafted,
        "wasted": core.wasted,
        "pass_s": core.verify_s + core.draft_s + core.wait_s,
        "bytes": bytes_moved,
        **{f"{name}_s": seconds for name, seconds in spent_s.items()},
        **{f"tried {place}": tried for place, tried in enumerate(core.tried_at, 1)},
        **{f"right {place}": right for place, right in enumerate(core.accepted_at, 1)},
        **{f"{BY}{peer_id}": right for peer_id, right in right_by.items()},
    }


def added(sums: Iterable[Sums]) -> dict[str, float]:
    """All of them together."""
    total: dict[str, float] = {}
    for each in sums:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total


class Recent:
    """What grew of late."""

    def __init__(self) -> None:
        self._known: deque[Sums] = deque([{}])
        self._compared = {"compared": 0.0, "compared_s": 0.0, "alone_s": 0.0}

    def note(self, sums: Sums, step_s: float) -> None:
        """The sums as they are now. ``step_s``: of a step of the verifier alone, now; 0: it is not known."""
        known = self._known
        if step_s > 0:
            after, pass_s = (sums.get(name, 0.0) - known[-1].get(name, 0.0) for name in ("after", "pass_s"))
            for name, more in (("compared", after), ("compared_s", pass_s), ("alone_s", step_s * after)):
                self._compared[name] += more
        if len(known) > 1 and _tokens(sums) - _tokens(known[-2]) < _GRAIN_TOKENS:
            known.pop()
        known.append({**sums, **self._compared})
        while len(known) > 2 and _tokens(known[-1]) - _tokens(known[1]) >= RECENT_TOKENS:
            known.popleft()

    @property
    def grown(self) -> dict[str, float]:
        """By how much the sums have."""
        newest, oldest = self._known[-1], self._known[0]
        return {name: value - oldest.get(name, 0.0) for name, value in newest.items()}


def _tokens(sums: Sums) -> float:
    return sums.get("tokens", 0.0)


def figures_of(grown: Sums, step_s: float) -> dict[str, float]:
    """Figures for people and programs, of what is known.

    Args:
        step_s: of a step of the verifier alone, now; 0: it is not known.

    Returns:
        ``alpha``, and by place in the pass ``right_at_1`` and so on; ``accepted_length`` in tokens a pass;
        ``alone_share`` of the passes that had no drafts; ``wasted_share`` of the drafts; ``bytes_per_token``;
        ``token_ms`` and its parts, as of ``WritingStats.as_map``; ``alone_ms`` that each would have taken without
        drafts, and ``speed_up``: how many times as fast the model's passes gave tokens; ``look_up_share`` of the
        right drafts.
    """
    found: dict[str, float] = {}

    def share(name: str, part: float, whole: float) -> None:
        if whole > 0:
            found[name] = part / whole

    places = range(1, POSITIONS + 1)
    right, tried = ([grown.get(f"{what} {place}", 0.0) for place in places] for what in ("right", "tried"))
    share("alpha", sum(right), sum(tried))
    for place in places:
        share(f"right_at_{place}", right[place - 1], tried[place - 1])
    after, passes = grown.get("after", 0.0), grown.get("passes", 0.0)
    share("accepted_length", after, passes)
    share("alone_share", grown.get("alone", 0.0), passes)
    share("wasted_share", grown.get("wasted", 0.0), grown.get("drafted", 0.0))
    share("bytes_per_token", grown.get("bytes", 0.0), grown.get("tokens", 0.0))
    for name in ("token", *_PARTS):
        seconds = grown.get("all_s" if name == "token" else f"{name}_s", 0.0)
        share(f"{name}_ms", 1e3 * seconds, after)
    if after > 0:
        found["rest_ms"] = max(0.0, found["token_ms"] - sum(found[f"{name}_ms"] for name in _PARTS))
    compared, alone_s = grown.get("compared", 0.0), grown.get("alone_s", 0.0)
    if compared >= SURE_TOKENS:
        share("speed_up", alone_s, grown.get("compared_s", 0.0))
        share("alone_ms", 1e3 * alone_s, compared)
    elif step_s > 0:
        found["alone_ms"] = 1e3 * step_s
    shares = shares_of(grown)
    if "" in shares:
        found["look_up_share"] = shares[""]
    return found


def shares_of(grown: Sums) -> dict[str, float]:
    """Of the drafts that were right and in a pass, by the drafter's peer id; empty where there was none."""
    right = {name.removeprefix(BY): value for name, value in grown.items() if name.startswith(BY)}
    total = sum(right.values())
    return {peer_id: value / total for peer_id, value in right.items()} if total > 0 else {}
