"""What a job's member tells of its steps: to the person here, and as rank 0 to the seed."""

from __future__ import annotations

from collections.abc import Callable

from ring.view import View
from roles.engine import Applied
from wire.messages import Message, StepMetrics


class StepTeller:
    """Remembers the step applied last, for whoever should have told of it may die before it did.

    Args:
        say: to the seed.
        on_step: to the person: (applied, total, values).
    """

    def __init__(
        self,
        *,
        job: str,
        steps_total: int,
        say: Callable[[Message], None],
        on_step: Callable[[int, int, dict[str, float]], None],
    ) -> None:
        self._job, self._steps_total = job, steps_total
        self._say, self._on_step = say, on_step
        self._last: Applied | None = None
        self._row: tuple[int, int, dict[str, float]] = (0, 0, {})  # generation, step, metrics

    def forget(self) -> None:
        """The state was replaced."""
        self._last, self._row = None, (0, 0, {})

    def applied(self, last: Applied) -> None:
        self._last, self._row = last, (0, last.step, _metrics_of(last))

    def loss(self, applied: int) -> float | None:
        """That of step ``applied``, if this member saw it."""
        return self._last.loss if self._last is not None and self._last.step == applied else None

    def tell(self, applied: int, view: View, rank: int, values: dict[str, float]) -> None:
        """Step ``applied`` is over. ``values``: beside the engine's own."""
        if self._last is None or self._last.step != applied:
            return  # this member was healed to here: it did not see the step
        values = {**_metrics_of(self._last), **values}
        self._row = (view.generation, applied, values)
        if rank == 0:
            self._say(StepMetrics(self._job, view.generation, applied, values))
        self._on_step(applied, self._steps_total, values)

    def tell_what_was_cut_off(self, view: View, rank: int) -> None:
        """Who told of the step that the view begins with may have died before it did: rank 0 tells, if it saw it."""
        generation, step, values = self._row
        if generation != view.generation and step == view.step > 0 and rank == 0:
            self._say(StepMetrics(self._job, view.generation, step, values))
            self._row = (view.generation, step, values)


def described(view: View, peer_id: str) -> str:
    """A view that begins, for the person here."""
    names = " → ".join(member.name for member in view.members)
    rank = view.rank_of(peer_id)
    share = view.members[rank].count if rank is not None else 0
    return (
        f"generation {view.generation}: rank {rank} of {view.size}, {share} micro-batches a step, "
        f"from step {view.step} ({names})"
    )


def _metrics_of(applied: Applied) -> dict[str, float]:
    return {"loss": applied.loss, "lr": applied.lr, "grad_norm": applied.grad_norm}
