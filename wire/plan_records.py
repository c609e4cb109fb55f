"""A plan for the training of a split model, as a seed tells it (``ring.training_placement``)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from p2ptrain.core.errors import ProtocolError
from wire.records import Record

MAX_FIGURE = 2**53


@dataclass(frozen=True, slots=True)
class StagePlanInfo(Record):
    """One stage.

    Attributes:
        peers, names: the workers that hold it, one for each crew.
        start, stop: layers [start, stop).
        weights_bytes, need_bytes: of its weights, and of all that training takes.
        limit_bytes: the least that one of its workers gives; 0: unknown.
        in_flight: micro-batches.
        compute_s: of a micro-batch, both ways; None: unknown. hop_s: to the next stage and back.
    """

    stage: int
    peers: list[str]
    names: list[str]
    start: int
    stop: int
    weights_bytes: int
    need_bytes: int
    limit_bytes: int = 0
    in_flight: int = 1
    compute_s: float | None = None
    hop_s: float | None = None

    def check(self) -> None:
        """Raise ``ProtocolError`` where its layers or figures cannot be."""
        if not 0 <= self.start < self.stop:
            raise ProtocolError(f"a stage of layers [{self.start}, {self.stop})")
        _check_figures(self)


@dataclass(frozen=True, slots=True)
class TrainingPlanInfo(Record):
    """The whole.

    Attributes:
        stages, crews, micro_batches: of a step, of all crews.
        schedule: its name.
        bubble, efficiency: 0 to 1, of a step without what follows. None, as all that follows, where no speed is known.
        step_s, reduce_s: of a step; and, of that, what summing gradients takes.
        tokens_per_s: of all crews.
        exact: no plan is better, as far as is known.
        spares: names of the workers that have no place in it.
    """

    stages: int
    crews: int
    micro_batches: int
    schedule: str
    bubble: float | None = None
    efficiency: float | None = None
    step_s: float | None = None
    reduce_s: float | None = None
    tokens_per_s: float | None = None
    exact: bool = False
    spares: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Raise ``ProtocolError`` where its figures cannot be."""
        _check_figures(self)


def _check_figures(record: Record) -> None:
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if isinstance(value, int | float) and not 0 <= value <= MAX_FIGURE:  # nor is it so for what is not a number
            raise ProtocolError(f"a plan whose {item.name} is {value}")
