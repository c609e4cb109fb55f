"""Shows plans: which workers hold or train which layers, and the predicted speed."""

from __future__ import annotations

import math
from typing import Any

import typer

from p2ptrain.cli.output import number, print_table
from p2ptrain.core.texts import human_bytes, layers_text, printable
from ring.planning.serving import Placement
from wire.records import StagePlanInfo, TrainingPlanInfo

_TRAINING = ("STAGE", "PEER", "LAYERS", "WEIGHTS", "TRAINING", "LIMIT", "IN FLIGHT", "MS/MICRO", "HOP MS")
_CHAIN = ("PEER", "LAYERS", "WEIGHTS", "CACHE", "LIMIT", "MS", "HOP MS", "TOKENS/S")


def placement_map(placement: Placement) -> dict[str, Any]:
    """A placement for programs. An unbounded rate is null, because JSON has no infinity."""
    return {
        "stages": [
            {
                "stage": index,
                "peer": stage.peer.id,
                "name": stage.peer.name,
                "start": stage.start,
                "stop": stage.stop,
                "weights_bytes": stage.weights_bytes,
                "cache_bytes": stage.cache_bytes,
                "limit_bytes": stage.peer.memory_bytes,
                "compute_s": stage.compute_s,
                "hop_s": stage.hop_s,
                "tokens_per_s": _finite(stage.tokens_per_s),
            }
            for index, stage in enumerate(placement.stages)
        ],
        "client_hop_s": placement.client_hop_s,
        "token_s": placement.token_s,
        "bottleneck_s": placement.bottleneck_s,
        "tokens_per_s": _finite(placement.tokens_per_s),
    }


def print_placement(placement: Placement) -> None:
    """Print the stages as a table of 80 columns, and the prediction. ``MS``: computing a token. ``LIMIT``: for weights
    and cache together."""
    rows = [
        (
            stage.peer.name,
            layers_text(stage.start, stage.stop),
            human_bytes(stage.weights_bytes),
            human_bytes(stage.cache_bytes),
            human_bytes(stage.peer.memory_bytes),
            _ms(stage.compute_s),
            _ms(stage.hop_s),
            _rate(stage.tokens_per_s),
        )
        for stage in placement.stages
    ]
    right = tuple(name for name in _CHAIN if name not in ("PEER", "LAYERS"))
    print_table(_CHAIN, rows, right=right, less=("CACHE",), cut=("PEER",))
    print_prediction(placement)


def print_prediction(placement: Placement) -> None:
    count = len(placement.stages)
    typer.echo(
        f"{count} stage{'s' if count != 1 else ''}, predicted at best: {_ms(placement.token_s)} ms a token"
        f" ({_rate(1 / placement.token_s if placement.token_s else math.inf)} tokens/s) for one session,"
        f" {_rate(placement.tokens_per_s)} tokens/s with the chain full"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.2f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def _rate(tokens_per_s: float) -> str:
    if math.isinf(tokens_per_s):
        return "–"
    return f"{tokens_per_s:,.2f}" if tokens_per_s < 10 else f"{tokens_per_s:,.0f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --------------------------------------------------------------------------------------------------- split training


def to_json(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> dict[str, Any]:
    return {"plan": info.to_map(), "stages": [stage.to_map() for stage in stages]}


def print_plan(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> None:
    """Print the stages as a table, in order, and the prediction."""
    rows = [
        (
            str(stage.stage),
            ", ".join(stage.names),
            layers_text(stage.start, stage.stop),
            human_bytes(stage.weights_bytes),
            human_bytes(stage.need_bytes),
            human_bytes(stage.limit_bytes) if stage.limit_bytes else "-",
            str(stage.in_flight),
            _ms(stage.compute_s),
            _ms(stage.hop_s) if stage.stage + 1 < info.stages else "",
        )
        for stage in stages
    ]
    right = tuple(name for name in _TRAINING if name not in ("PEER", "LAYERS"))
    print_table(_TRAINING, rows, right=right, cut=("PEER",))
    for line in prediction(info):
        typer.echo(line)


def prediction(info: TrainingPlanInfo) -> list[str]:
    replicas = f"{info.replicas} replica{'s' * (info.replicas != 1)} of {info.stages} stages, {info.schedule}"
    if info.step_s is None or info.bubble is None:
        lines = [f"{replicas}: no worker has reported its speed, so nothing is predicted"]
    else:
        lines = [
            f"{replicas}, {info.micro_batches} micro-batches a step, predicted: {number(info.step_s, '.3g')} s a step, "
            f"{number(info.tokens_per_s, ',.0f')} tokens/s, bubble {100 * info.bubble:.0f} %, the busiest stage works "
            f"{100 * (info.efficiency or 0):.0f} % of the time"
            + (f", {number(info.reduce_s, '.3g')} s of it to sum gradients" if info.reduce_s else "")
        ]
    if info.spares:
        lines.append(f"more replicas of the job, or spares: {', '.join(map(printable, info.spares))}")
    return lines


def short(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> str:
    """The plan in one line."""
    places = (f"layers {stage.start}–{stage.stop - 1} {'+'.join(map(printable, stage.names))}" for stage in stages)
    rate = f"; {number(info.tokens_per_s, ',.0f')} tokens/s predicted" if info.tokens_per_s is not None else ""
    return f"plan: {', '.join(places)}{rate}"
