"""When a job ends early: after ``validation.patience`` validations without a better loss, or when its privacy budget is
spent (``roles.worker.privacy``). Pure.

When a view begins its members exchange what they know, and all go on from what most of those know that hold the state.
So all reach the same verdict from then on, and one member can neither end the job nor keep it from its end. Each says
``Flag.STOP`` with the step after that validation, which is the job's last. What is known travels in the checkpoints.
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
class Validations:
    """``step``: of the newest validation; ``best``: least loss, first reached at ``best_step``; ``since``: validations
    since then."""

    step: int = 0
    best: float = math.inf
    best_step: int = 0
    since: int = 0

    def with_loss(self, step: int, loss: float) -> Validations:
        if loss < self.best:
            return Validations(step, loss, step)
        return Validations(step, self.best, self.best_step, self.since + 1)


class EarlyStop:
    """Args: ``patience``: validations without improvement after which the job ends; 0: it never does. ``budget``: of a
    private job."""

    def __init__(self, patience: int, budget: Budget | None = None) -> None:
        self._patience, self.budget = patience, budget
        self._known = Validations()

    @property
    def is_due(self) -> bool:
        return 0 < self._patience <= self._known.since or (self.budget is not None and self.budget.is_due)

    @property
    def reason(self) -> str:
        """Why the job ends early; empty if it does not."""
        if self.budget is not None and self.budget.is_due:
            return self.budget.reason
        known = self._known
        least = f"no better validation loss than {known.best:.4g} (step {known.best_step})"
        return f"stopped early: {least} in {known.since} validation{'s'[: known.since != 1]}" if self.is_due else ""

    def spent_privacy(self) -> dict[str, float]:
        """The privacy that the job has spent, to be reported with a step; empty if it has no budget."""
        return {} if self.budget is None else {"epsilon": self.budget.epsilon, "delta": self.budget.delta}

    def message(self) -> bytes:
        return _WIRE.pack(*astuple(self._known))

    def agree_untrusted(self, messages: Sequence[bytes], step: int) -> None:
        """Take up what most members know that know anything; of equally many, what ends the job last.

        Args:
            messages: of each member (``message``). What cannot be known counts as nothing.
            step: that the members have applied.
        """
        told = [Validations(*_WIRE.unpack(message)) for message in messages if len(message) == _WIRE.size]
        votes = Counter(known for known in told if max(known.best_step, known.since, 1) <= known.step <= step)
        self._known = min(votes, key=lambda known: (-votes[known], known.since, -known.step), default=Validations())

    def add_validation(self, step: int, loss: float) -> None:
        if not self.is_due:  # else this is the validation of the last step
            self._known = self._known.with_loss(step, loss)

    def meta(self) -> Meta:
        known = dict(zip(_KEYS, astuple(self._known), strict=True)) if self._known.step and self._patience else {}
        return known | self.budget.meta() if self.budget is not None else known

    def resume_from(self, meta: Meta) -> None:
        """Go on from a checkpoint's ``meta``, or from nothing. The state was replaced by that of another step."""
        if self.budget is not None:
            self.budget.resume_from(meta)
        step, best, best_step, since = (meta.get(key) for key in _KEYS)
        self._known = Validations()
        if isinstance(best, float) and all(
            isinstance(number, int) and number >= 0 for number in (step, best_step, since)
        ):
            self._known = Validations(step, best, best_step, since)  # type: ignore[arg-type]
