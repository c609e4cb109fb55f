"""Decides that a job ends early: its privacy budget is spent (``roles.worker.privacy``), or its validation loss did not
improve for ``validation.patience`` validations. Pure.

All members must decide alike. So they validate at the same steps and count the same losses. When a view begins, the
members that hold the job's state send each other their counts, and all take the count that most of them sent: newcomers
learn it, and a lying minority can neither end the job nor prolong it. When the end is due, each member sets
``Flag.STOP`` in its token of the next step, which is the job's last. Checkpoints store the count.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from p2ptrain.core.checkpoints import Meta
from roles.worker.privacy import Budget

_WIRE = struct.Struct("!QdQQ")
_KEYS = ("validated_step", "best_val_loss", "best_val_step", "validations_since_best")


@dataclass(frozen=True, slots=True)
class ValidationCount:
    """``step``: of the newest validation; ``best_loss``: least loss, first reached at ``best_step``; ``since_best``:
    number of validations since then."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    since_best: int = 0

    def with_loss(self, step: int, loss: float) -> ValidationCount:
        if loss < self.best_loss:
            return ValidationCount(step, loss, step)
        return ValidationCount(step, self.best_loss, self.best_step, self.since_best + 1)


class EarlyStop:
    """Args: ``patience``: validations without improvement after which the job ends; 0: it never does. ``budget``: of a
    private job."""

    def __init__(self, patience: int, budget: Budget | None = None) -> None:
        self._patience, self.budget = patience, budget
        self._count = ValidationCount()

    @property
    def is_due(self) -> bool:
        """Whether the next step is the job's last."""
        return 0 < self._patience <= self._count.since_best or (self.budget is not None and self.budget.is_due)

    @property
    def reason(self) -> str:
        """Why the job ends early; empty if it does not."""
        if self.budget is not None and self.budget.is_due:
            return self.budget.reason
        if not self.is_due:
            return ""
        count = self._count
        best = f"no better validation loss than {count.best_loss:.4g} (step {count.best_step})"
        return f"stopped early: {best} in {count.since_best} validation{'s'[: count.since_best != 1]}"

    def spent_privacy(self) -> dict[str, float]:
        """The privacy that the job has spent, to be reported with a step; empty if it has no budget."""
        return {} if self.budget is None else {"epsilon": self.budget.epsilon, "delta": self.budget.delta}

    def message(self) -> bytes:
        return _WIRE.pack(*astuple(self._count))

    def agree_untrusted(self, messages: Sequence[bytes], applied: int) -> None:
        """Take the count that most ``messages`` have; of two with equally many, the one that ends the job later.

        Args:
            messages: of all members that hold the state. Invalid and impossible ones are ignored.
            applied: steps that these members have applied.
        """
        counts = [ValidationCount(*_WIRE.unpack(message)) for message in messages if len(message) == _WIRE.size]
        votes = Counter(count for count in counts if max(count.best_step, count.since_best, 1) <= count.step <= applied)
        ranked = sorted(votes, key=lambda count: (-votes[count], count.since_best, -count.step))
        self._count = ranked[0] if ranked else ValidationCount()

    def add_validation(self, step: int, loss: float) -> None:
        if not self.is_due:  # otherwise this validation follows the last step, and must not change the reason
            self._count = self._count.with_loss(step, loss)

    def meta(self) -> Meta:
        has_count = self._count.step and self._patience
        count = dict(zip(_KEYS, astuple(self._count), strict=True)) if has_count else {}
        return count | self.budget.meta() if self.budget is not None else count

    def resume_from(self, meta: Meta) -> None:
        """Restore the count from a checkpoint's ``meta``, or start afresh if it has no valid one."""
        if self.budget is not None:
            self.budget.resume_from(meta)
        step, best_loss, best_step, since_best = (meta.get(key) for key in _KEYS)
        valid = all(isinstance(number, int) and number >= 0 for number in (step, best_step, since_best))
        if valid and isinstance(best_loss, float):
            self._count = ValidationCount(step, best_loss, best_step, since_best)  # type: ignore[arg-type]
        else:
            self._count = ValidationCount()
