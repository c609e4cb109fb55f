"""What a job's member tells of its steps: to the person here, and as rank 0 to the seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ring.view import View
from roles.engine import Applied, Stage
from roles.strategies import StageLoad
from wire.chain_messages import HeldPart
from wire.job_messages import StepMetrics
from wire.messages import Message

KEPT = 256
"""Newest rows that a member remembers for the one that should tell of them."""


@dataclass(slots=True)
class _Row:
    """``told``: by this member."""

    step: int
    values: dict[str, float]
    told: bool = False


class StepTeller:
    """Remembers the steps applied last: whoever should have told of them may have died before it did, or before the
    seed was back.

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
        self._rows: deque[_Row] = deque(maxlen=KEPT)

    def forget(self) -> None:
        """The state was replaced."""
        self._last = None
        self._rows.clear()

    def applied(self, last: Applied) -> None:
        self._last = last
        self._rows.append(_Row(last.step, _metrics_of(last)))

    def loss(self, applied: int) -> float | None:
        """That of step ``applied``, if this member saw it."""
        return self._last.loss if self._last is not None and self._last.step == applied else None

    def tell(self, applied: int, view: View, rank: int, values: dict[str, float]) -> None:
        """Step ``applied`` is over. ``values``: beside the engine's own."""
        if self._last is None or self._last.step != applied:
            return  # this member was healed to here: it did not see the step
        row = self._rows[-1]
        row.values |= values
        if rank == 0:
            self._say_row(row, view)
        self._on_step(applied, self._steps_total, row.values)

    def tell_what_was_cut_off(self, view: View, rank: int) -> None:
        """Who told of the steps before this view may have died before it did, or before the seed was back: rank 0 tells
        of those that it saw. The seed knows which it has."""
        if rank == 0:
            for row in self._rows:
                if not row.told and 0 < row.step <= view.step:
                    self._say_row(row, view)

    def _say_row(self, row: _Row, view: View) -> None:
        row.told = True
        self._say(StepMetrics(self._job, view.generation, row.step, row.values))


def described(view: View, peer_id: str) -> str:
    """A view that begins, for the person here."""
    names = " → ".join(member.name for member in view.members)
    rank = view.rank_of(peer_id)
    share = view.members[rank].count if rank is not None else 0
    return (
        f"generation {view.generation}: rank {rank} of {view.size}, {share} micro-batches a step, "
        f"from step {view.step} ({names})"
    )


def held(
    job: str, stage: Stage, load: StageLoad, *, dtype: str, state_bytes: int, limit_bytes: int, tokens_per_s: float
) -> HeldPart:
    """A stage that trains, for people, who see it where they see the parts that serve.

    Args:
        dtype: activations travel in it.
        state_bytes: parameters, moments and gradients.
        limit_bytes: what this worker gives to parts.
    """
    return HeldPart(
        part=f"{job}.{stage.index}",
        model=job,
        name=job,
        start=load.start,
        stop=load.stop,
        layers=load.layers,
        dtype=dtype,
        weights_bytes=state_bytes,
        cache_bytes=0,
        limit_bytes=limit_bytes,
        sessions=0,
        compute_ms=1e3 * load.micro_batch_s,
        busy=load.busy,
        tokens_per_s=tokens_per_s,
        out_position_bytes=load.token_bytes,
        next=load.next,
    )


def _metrics_of(applied: Applied) -> dict[str, float]:
    return {"loss": applied.loss, "lr": applied.lr, "grad_norm": applied.grad_norm}
