"""Shows plans: which workers hold or train which layers, and the predicted speed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.cli.output import number, print_json, print_table, printable
from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.texts import human_bytes
from ring.placement import Placement
from wire.records import StagePlanInfo, TrainingPlanInfo

if TYPE_CHECKING:
    from configs.schema import Profile

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
            f"{stage.start}–{stage.stop - 1}" if stage.stop - stage.start > 1 else str(stage.start),
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
    right = tuple(name for name in _TRAINING if name not in ("PEER", "LAYERS"))
    print_table(_TRAINING, rows, right=right, cut=("PEER",))
    for line in prediction(info):
        typer.echo(line)


def show_shards(profile: Profile, *, memory_bytes: int = 0, dry_run: bool = True, as_json: bool = False) -> None:
    """Print what each worker of a sharded job needs, in a dry run. Raises ``ResourceError`` if it is more than
    ``memory_bytes`` (0: unknown); see also ``shape_of``."""
    from p2ptrain.cli.model_sizes import shape_of
    from p2ptrain.core.footprint import head_kept_bytes, layer_kept_bytes, shard_training_bytes

    shape = shape_of(profile, None if dry_run else lambda _: None)
    if shape is None:
        if dry_run:
            raise UserError(f"the sizes of the model at {profile.model.path} are not known: it is not here")
        return
    tokens, shards = profile.batch.micro_batch_sequences * profile.data.sequence_tokens, profile.stages
    kept = layer_kept_bytes(tokens, width=shape.width, inner=shape.inner)
    if profile.device.gradient_checkpointing:
        kept += shape.sizes.layers * 4 * tokens * shape.width
    else:
        kept *= shape.sizes.layers
    rows, beside = shard_training_bytes(
        shape.sizes,
        kept + head_kept_bytes(tokens, vocab=shape.vocab),
        shards=shards,
        accumulate=profile.sharded.accumulate,
        on_host=True,
    )
    if 0 < memory_bytes < rows + beside:
        raise ResourceError(
            f"each of {shards} shards needs about {human_bytes(rows + beside)}, and a worker may use "
            f"{human_bytes(memory_bytes)}",
            remedy="set sharded.shards higher, sharded.accumulate = false or device.gradient_checkpointing = true",
        )
    plan = {"shards": shards, "replicas": profile.job.workers // shards, "rows_bytes": rows, "beside_bytes": beside}
    if dry_run and as_json:
        print_json(plan)
    elif dry_run:
        typer.echo(
            f"{plan['replicas']} replica{'s' * (plan['replicas'] != 1)} of {shards} shards; each worker needs about "
            f"{human_bytes(rows)} for its rows of parameters, gradients and moments, and {human_bytes(beside)} for "
            "gathered layers, what a micro-batch keeps, and, with sharded.accumulate, whole gradients"
        )


def show_robust(profile: Profile, *, as_json: bool = False) -> None:
    """Print what the vectors of a job's robust rule cost each worker, in a dry run. Raises as ``shape_of``."""
    from p2ptrain.cli.model_sizes import shape_of

    shape = shape_of(profile)
    if shape is None:
        raise UserError(f"the sizes of the model at {profile.model.path} are not known: it is not here")
    vector = shape.sizes.weights_bytes(0, shape.sizes.layers)
    if profile.job.strategy == "server":
        need_bytes, number = profile.server.buffer * vector, profile.server.buffer
        text = (
            f"with robust.rule = {profile.robust.rule!r} the server needs about {human_bytes(need_bytes)} more memory"
        )
        print_json({"vectors_bytes": need_bytes}) if as_json else typer.echo(f"{text}, for {number} gradients")
        return
    members = profile.job.workers
    cost = {"members": members, "vectors_bytes": members * vector, "sent_bytes": (members - 1) * vector}
    if as_json:
        print_json(cost)
        return
    typer.echo(
        f"with robust.rule = {profile.robust.rule!r} each of {members} workers needs about "
        f"{human_bytes(cost['vectors_bytes'])} more memory, for all vectors, and sends "
        f"{human_bytes(cost['sent_bytes'])} in a step, not {human_bytes(2 * (members - 1) * vector // members)}; "
        "with LoRA or model.freeze less"
    )


def prediction(info: TrainingPlanInfo) -> list[str]:
    replicas = f"{info.replicas} replica{'s' * (info.replicas != 1)} of {info.stages} stages, {info.schedule}"
    if info.step_s is None or info.bubble is None:
        told = [f"{replicas}: no worker has reported its speed, so nothing is predicted"]
    else:
        told = [
            f"{replicas}, {info.micro_batches} micro-batches a step, predicted: {number(info.step_s, '.3g')} s a step, "
            f"{number(info.tokens_per_s, ',.0f')} tokens/s, bubble {100 * info.bubble:.0f} %, the busiest stage works "
            f"{100 * (info.efficiency or 0):.0f} % of the time"
            + (f", {number(info.reduce_s, '.3g')} s of it to sum gradients" if info.reduce_s else "")
        ]
    if info.spares:
        told.append(f"more replicas of the job, or spares: {', '.join(map(printable, info.spares))}")
    return told


def short(info: TrainingPlanInfo, stages: list[StagePlanInfo]) -> str:
    """The plan in one line."""
    places = (f"layers {stage.start}–{stage.stop - 1} {'+'.join(map(printable, stage.names))}" for stage in stages)
    rate = f"; {number(info.tokens_per_s, ',.0f')} tokens/s predicted" if info.tokens_per_s is not None else ""
    return f"plan: {', '.join(places)}{rate}"


def local_plan(
    profile: Profile, *, workers: int, memory_bytes: int, flops: float = 0.0, link: str = ""
) -> tuple[TrainingPlanInfo, list[StagePlanInfo]] | None:
    """The plan for ``workers`` equal workers of this machine; None if the model's sizes are unknown.

    Args:
        memory_bytes, flops: of each worker; 0: unknown.
        link: preset of the emulated link between them.

    Raises:
        ResourceError, UserError, ConfigError, StorageError: the model does not fit, or is invalid.
    """
    from p2ptrain.cli.model_sizes import shape_of
    from ring.order import LinkQuality
    from ring.training_costs import CandidateWorker
    from ring.training_placement import plan
    from roles.seed.jobs import training_of
    from wire.emulate import preset_named

    shape = shape_of(profile)
    training = training_of(profile, shape.to_map()) if shape is not None else None
    if training is None:
        return None
    # Equal workers form as many replicas as possible.
    replicas = min(workers // training.stages, training.micro_batches)
    training = replace(training, replicas=max(replicas, training.replicas))
    there = [
        CandidateWorker(f"worker-{number:02}", f"worker-{number}", memory_bytes, flops)
        for number in range(1, workers + 1)
    ]
    preset = preset_named(link) if link else None
    way = LinkQuality(preset.delay_ms / 1e3, preset.rate_bps or None) if preset else None
    ids = [candidate.id for candidate in there]
    links = {(one, other): way for one in ids for other in ids if one != other and way is not None}
    return plan(training, there, links)
