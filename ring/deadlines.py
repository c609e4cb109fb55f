"""Named deadlines: armed, looked at, passed."""

from __future__ import annotations


class Deadlines:
    """Of one phase. Pure; ``now`` is passed in.

    Attributes:
        passed: names of those that did, until the phase ends.
    """

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self._at: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def next(self) -> list[float]:
        """When each of them is due."""
        return list(self._at.values())

    def arm(self, name: str, at: float) -> None:
        """Due at ``at``, whatever was so far."""
        self._at[name] = at

    def start(self, name: str, at: float) -> None:
        """The same, unless it runs or has passed."""
        if name not in self.passed:
            self._at.setdefault(name, at)

    def hasten(self, name: str, at: float) -> None:
        """Due at ``at`` at the latest."""
        self._at[name] = min(self._at[name], at)

    def drop(self, *names: str) -> None:
        """They are not armed and have not passed."""
        for name in names:
            self._at.pop(name, None)
            self.passed.discard(name)

    def clear(self, *, keep: str = "") -> None:
        """All but ``keep`` are over with their phase."""
        self._at = {name: at for name, at in self._at.items() if name == keep}
        self.passed.clear()

    def expire(self, now: float) -> set[str]:
        """Names of those that pass now."""
        due = {name for name, at in self._at.items() if at <= now}
        self._at = {name: at for name, at in self._at.items() if name not in due}
        self.passed |= due
        return due
