"""What commands show of the plan for a split job: who trains which layers, and how fast that is predicted to be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.cli.output import number, print_table, printable
from p2ptrain.core.texts import human_bytes
from wire.client import plan_of
from wire.records import StagePlanInfo, TrainingPlanInfo

if TYPE_CHECKING:
    from configs.schema import Profile

_COLUMNS = ("STAGE", "PEER", "LAYERS", "WEIGHTS", "TRAINING", "LIMIT", "IN FLIGHT", "MS/MICRO", "HOP MS")


def to_json(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> dict[str, Any]:
    """The plan for programs."""
    return {"plan": info.to_map(), "stages": [stage.to_map() for stage in stages]}


def print_plan(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> None:
    """The stages as a table, in their order, and what the whole is predicted to do."""
    rows = [
        (
            str(stage.stage),
            ", ".join(stage.names),
            f"{stage.start}–{stage.stop - 1}" if stage.stop - stage.start > 1 else str(stage.start),
            human_bytes(stage.weights_bytes),
            human_bytes(stage.need_bytes),
            human_bytes(stage.limit_bytes) if stage.limit_bytes else "-",
            str(stage.in_flight),
            _ms(stage.compute_s),
            _ms(stage.hop_s) if stage.stage + 1 < info.stages else "",
        )
        for stage in stages
    ]
    print_table(_COLUMNS, rows, right=tuple(name for name in _COLUMNS if name not in ("PEER", "LAYERS")))
    for line in prediction(info):
        typer.echo(line)


def prediction(info: TrainingPlanInfo) -> list[str]:
    """What the whole is predicted to do."""
    crews = f"{info.crews} crew{'s' * (info.crews != 1)} of {info.stages} stages, {info.schedule}"
    if info.step_s is None or info.bubble is None:
        told = [f"{crews}: no worker has told how fast it is, so nothing is predicted"]
    else:
        told = [
            f"{crews}, {info.micro_batches} micro-batches a step, predicted: {number(info.step_s, '.3g')} s a step, "
            f"{number(info.tokens_per_s, ',.0f')} tokens/s, bubble {100 * info.bubble:.0f} %, the busiest stage works "
            f"{100 * (info.efficiency or 0):.0f} % of the time"
            + (f", {number(info.reduce_s, '.3g')} s of it to sum gradients" if info.reduce_s else "")
        ]
    if info.spares:
        told.append(f"more crews of the job, or spares: {', '.join(map(printable, info.spares))}")
    return told


def short(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> str:
    """The plan in a line."""
    places = (f"layers {stage.start}–{stage.stop - 1} {'+'.join(map(printable, stage.names))}" for stage in stages)
    rate = f"; {number(info.tokens_per_s, ',.0f')} tokens/s predicted" if info.tokens_per_s is not None else ""
    return f"plan: {', '.join(places)}{rate}"


def local_plan(
    profile: Profile, *, workers: int, memory_bytes: int, flops: float = 0.0, link: str = ""
) -> tuple[TrainingPlanInfo, list[StagePlanInfo]] | None:
    """The plan for so many equal workers of this machine; None where the model's sizes are not known.

    Args:
        memory_bytes, flops: of each; 0: unknown.
        link: preset of the emulated link between them.

    Raises:
        ResourceError, UserError, ConfigError, StorageError: it does not fit, or is none.
    """
    from p2ptrain.cli.training_shape import shape_of
    from ring.order import LinkQuality
    from ring.training_costs import Trainee
    from ring.training_placement import plan
    from roles.seed.jobs import training_of
    from roles.seed.operator_api import plan_maps
    from wire.emulate import preset_named

    shape = shape_of(profile)
    training = training_of(profile.to_spec(), shape.to_map()) if shape is not None else None
    if training is None:
        return None
    crews = min(workers // training.stages, training.micro_batches)  # of equals all come into crews that can be made
    training = replace(training, crews=max(crews, training.crews))
    there = [
        Trainee(f"worker-{number:02}", f"worker-{number}", memory_bytes, flops) for number in range(1, workers + 1)
    ]
    preset = preset_named(link) if link else None
    way = LinkQuality(preset.delay_ms / 1e3, preset.rate_bps or None) if preset else None
    ids = [trainee.id for trainee in there]
    links = {(one, other): way for one in ids for other in ids if one != other and way is not None}
    return plan_of(plan_maps(training, plan(training, there, links), there))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"
