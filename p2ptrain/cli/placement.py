"""Shows models that are split over workers: the plan, the predicted speed, and where a token's time went."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.cli.output import number, print_json, print_table
from p2ptrain.core.activations import IDS, activation_bytes
from p2ptrain.core.texts import human_bytes, layers_text, printable
from ring.planning.serving import Placement
from wire.records import StagePlanInfo, TrainingPlanInfo

if TYPE_CHECKING:
    from p2ptrain.cluster.split_model import PlannedSplit
    from roles.serving.chain import StageChain

_TRAINING = ("STAGE", "PEER", "LAYERS", "WEIGHTS", "TRAINING", "LIMIT", "IN FLIGHT", "MS/MICRO", "HOP MS")
_STAGE_FACTS = ("start", "stop", "weights_bytes", "cache_bytes", "compute_s", "hop_s")
_CHAIN = ("PEER", "LAYERS", "WEIGHTS", "CACHE", "LIMIT", "MS", "HOP MS", "TOKENS/S")


def placement_map(placement: Placement) -> dict[str, Any]:
    """A placement for programs. An unbounded rate is null, because JSON has no infinity."""
    return {
        "stages": [
            {"stage": index, "peer": stage.peer.id, "name": stage.peer.name, "limit_bytes": stage.peer.memory_bytes}
            | {name: getattr(stage, name) for name in _STAGE_FACTS}
            | {"tokens_per_s": _finite(stage.tokens_per_s)}
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


def _ms(value: float | None, factor: float = 1e3) -> str:
    """``value`` in seconds; with ``factor`` 1 in milliseconds."""
    if value is None:
        return "-"
    return f"{factor * value:,.2f}" if factor * value < 100 else f"{factor * value:,.0f}"


def _rate(tokens_per_s: float) -> str:
    if math.isinf(tokens_per_s):
        return "–"
    return f"{tokens_per_s:,.2f}" if tokens_per_s < 10 else f"{tokens_per_s:,.0f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show_split_plan(plan: PlannedSplit, *, as_json: bool) -> None:
    """Print the plan, for ``--dry-run``."""
    placement, is_loaded = plan.plan.placement, plan.plan.loaded
    if as_json:
        print_json({"checkpoint": plan.label, "loaded": is_loaded, "plan": placement_map(placement)})
        return
    print_placement(placement)
    if is_loaded:
        typer.echo("The workers have these parts loaded already.")


# ------------------------------------------------------------------------------------------------------ the figures


def split_facts(chain: StageChain) -> dict[str, Any]:
    """What each stage holds, and where a token's time goes, for programs. Times are per token; None before the first
    token.

    ``rest_ms`` is neither computing nor measured links: it is queueing, event loops of the stages, and this program.
    """
    times = chain.times
    tokens = times.tokens
    compute_ms = sum(times.stages_us) / 1e3 / tokens if tokens else None
    token_ms = 1e3 * times.took_s / tokens if tokens else None
    placement = chain.plan.placement
    link_ms = 1e3 * (placement.client_hop_s + sum(stage.hop_s for stage in placement.stages))
    stages = []
    for index, (stage, loaded) in enumerate(zip(chain.plan.stages, chain.loaded, strict=True)):
        is_last = index == len(chain.plan.stages) - 1
        stages.append(
            {
                "stage": index,
                "peer": stage.peer.id,
                "name": stage.peer.name,
                "device": loaded.device,
                "start": stage.start,
                "stop": stage.stop,
                "read_bytes": loaded.read_bytes,
                "received_bytes": loaded.received_bytes,
                "weights_bytes": loaded.weights_bytes,
                "resident_bytes": loaded.resident_bytes,
                "compute_ms": times.stages_us[index] / 1e3 / tokens if tokens else None,
                "wire_bytes": activation_bytes(IDS if is_last else chain.encodings[0] or chain.dtype, 1, loaded.width),
            }
        )
    return {
        "stages": stages,
        "token_ms": token_ms,
        "compute_ms": compute_ms,
        "link_ms": link_ms,
        "rest_ms": None if token_ms is None or compute_ms is None else max(0.0, token_ms - compute_ms - link_ms),
        "prompt_ms": 1e3 * times.prompt_s / times.prompts if times.prompts else None,
        "mendings": [{"lost": name, "seconds": seconds} for name, seconds in times.mendings],
    }


def print_split_facts(facts: dict[str, Any]) -> None:
    """Print these facts: a table of 80 columns, and a line. ``WIRE``: bytes of one token's hop."""
    columns = ("PEER", "LAYERS", "READ", "RECEIVED", "WEIGHTS", "MEMORY", "MS/TOKEN", "WIRE")
    rows = [
        [
            stage["name"],
            layers_text(stage["start"], stage["stop"]),
            *(human_bytes(stage[f"{kind}_bytes"]) for kind in ("read", "received", "weights", "resident")),
            _ms(stage["compute_ms"], 1),
            human_bytes(stage["wire_bytes"]),
        ]
        for stage in facts["stages"]
    ]
    print_table(columns, rows, right=columns[2:])
    if facts["token_ms"] is not None:
        typer.echo(
            f"a token took {_ms(facts['token_ms'], 1)} ms: {_ms(facts['compute_ms'], 1)} computing"
            f" + {_ms(facts['link_ms'], 1)} on the way + {_ms(facts['rest_ms'], 1)} the rest;"
            f" a prompt {_ms(facts['prompt_ms'], 1)} ms"
        )
    for mending in facts["mendings"]:
        typer.echo(f"{mending['lost']} was lost; the text went on {mending['seconds']:.2f} s later")


# --------------------------------------------------------------------------------------------------- split training


def plan_map(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> dict[str, Any]:
    return {"plan": info.to_map(), "stages": [stage.to_map() for stage in stages]}


def print_training_plan(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> None:
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
    for line in describe_prediction(info):
        typer.echo(line)


def describe_prediction(info: TrainingPlanInfo) -> list[str]:
    replicas = f"{info.replicas} replica{'s' * (info.replicas != 1)} of {info.stages} stages"
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


def describe_plan(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> str:
    """The plan in one line."""
    places = (f"layers {stage.start}–{stage.stop - 1} {'+'.join(map(printable, stage.names))}" for stage in stages)
    rate = f"; {number(info.tokens_per_s, ',.0f')} tokens/s predicted" if info.tokens_per_s is not None else ""
    return f"plan: {', '.join(places)}{rate}"
