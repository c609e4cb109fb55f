"""Builds a worker's engines and ``Holding``; its only module that imports torch, and only inside functions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
from pydantic import BaseModel

from configs.schema import Profile, Sharded
from p2ptrain.compute import first_import
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.ids import new_id
from p2ptrain.core.plugins import MOST_OFFERED, installed
from p2ptrain.core.serving import PartSpec
from p2ptrain.core.text_files import STDLIB
from roles.engine import WHOLE, Engine, PartBuilder, Stage
from roles.gauges import free_memory_bytes, gpu_name
from roles.strategies.federated import slots
from roles.worker.context import BuildEngine
from roles.worker.stages import Holding
from wire.messages import Scalar

if TYPE_CHECKING:
    from p2ptrain.compute.device import ComputeDevice
    from p2ptrain.compute.fsdp import ShardSpec
    from p2ptrain.compute.island import Island, IslandTrainer
    from p2ptrain.compute.model import ModelSpec
    from p2ptrain.compute.recipe import TrainingSpec
    from p2ptrain.compute.stage import StageSpec

FREE_SHARE = 0.8
"""Share of the free memory at a worker's start that parts may take, if no limit is given."""


def capabilities(device: str) -> dict[str, Scalar]:
    """Describe this machine for people and for placement. Does not import torch, so that joining does not wait for it.
    ``device``: the requested one; empty if the profile decides."""
    gpu = gpu_name()
    if device:
        shown = device
    elif gpu:
        shown = f"cuda {gpu}"
    elif sys.platform == "darwin" and platform.machine() == "arm64":
        shown = "mps Apple GPU"
    else:
        shown = f"cpu ({os.cpu_count()} cores)"
    return {
        "device": shown[:80],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "memory_total_bytes": psutil.virtual_memory().total,
        "plugins": ",".join([*installed()][:MOST_OFFERED]),
    }


def warm_up() -> None:
    """Import what models and parts need (seconds), on the compute thread, while the worker joins.

    Imports of torch's libraries hold up the event loop (0.8 s at once on a busy machine), and a session's short silence
    limit would expire. No session can be open yet: the offer to clients is measured on the same thread after this. What
    the first part of an architecture imports later holds up the loop for 0.02 s.
    """
    with first_import():
        import p2ptrain.compute.served_part
        import p2ptrain.compute.trainer  # noqa: F401 - for its cost


def with_data(profile: Profile, path: str) -> Profile:
    """The profile with a worker's own text, if the job's data is private and a path is given.

    Raises:
        ConfigError: none is given, and the job names none.
    """
    if profile.data.private and not path and profile.data.path == STDLIB:
        raise ConfigError("in this job each worker has its own text", remedy="name it: p2ptrain join --data PATH")
    if not path or not profile.data.private:
        return profile
    return profile.model_copy(update={"data": profile.data.model_copy(update={"path": path})})


def inputs_dir() -> Path:
    """Where what a job reads is kept, if it came from other workers: beside the tokens that are made here."""
    from p2ptrain.compute.token_store import stores_dir

    return stores_dir()


def engine_builder(
    *,
    device: str = "",
    threads: int = 0,
    memory_bytes: int = 0,
    on_progress: Callable[[str, float], None] = lambda text, share: None,
) -> BuildEngine:
    """Return the builder of a worker's engines. ``memory_bytes``: memory that the person allows for a part of a split
    model; 0: most of what is free. ``on_progress``: see ``load_corpus``."""

    def build(profile: Profile, stage: Stage = WHOLE) -> Engine:
        from p2ptrain.compute.device import pick_device
        from p2ptrain.compute.recipe import ModelRecipe
        from p2ptrain.compute.trainer import Trainer

        of_job = profile.device.threads  # an exact job takes no other number: it decides a gradient's last bits
        count = (of_job or 1) if profile.job.exact else (threads or of_job)
        spec, chosen = training_spec(profile), pick_device(device or profile.device.kind, count)
        if not stage.split:
            recipe = ModelRecipe(spec, chosen)
        elif profile.job.strategy == "sharded":
            recipe = ModelRecipe(spec, chosen, shard=shard_spec(stage, profile.sharded, chosen, memory_bytes))
        else:
            recipe = ModelRecipe(spec, chosen, stage_spec(stage, profile, spec.model, memory_bytes))
        return Trainer(recipe, on_progress=on_progress)

    return build


def stage_spec(stage: Stage, profile: Profile, model: ModelSpec, memory_bytes: int) -> StageSpec:
    """A stage of a pipeline. Raises as ``stage_bounds``."""
    from p2ptrain.compute.recipe import stage_bounds
    from p2ptrain.compute.stage import StageSpec

    split = profile.pipeline
    return StageSpec(
        stage.index,
        stage_bounds(model, stage.count, split.cuts),
        activations=split.activations,
        gradients="fp32" if split.activations == "fp32" else "bf16",
        recompute=split.recompute,
        in_flight=min(stage.count - stage.index, profile.batch.micro_batches),
        memory_bytes=memory_bytes,
    )


def shard_spec(stage: Stage, sharded: Sharded, device: ComputeDevice, memory_bytes: int) -> ShardSpec:
    """A shard whose process group has no operations yet: the strategy gives them in each view. Raises ``ConfigError``
    if the device cannot hold shards."""
    from p2ptrain.compute.fsdp import ShardSpec, mesh_of
    from p2ptrain.compute.process_group import RingProcessGroup

    if device.kind == "mps":
        raise ConfigError("FSDP2, which shards models, does not run on MPS", remedy="device.kind = 'cpu'")
    group = RingProcessGroup(stage.index, stage.count, cast(Any, None), group_name=f"replica-{new_id()}")
    return ShardSpec(mesh_of(group, device.kind), sharded.accumulate, sharded.offload, memory_bytes)


def island_builder(island: Island, device: ComputeDevice, memory_bytes: int = 0) -> BuildEngine:
    """Return the builder of engines of an island (``compute.island``) at its leader. ``memory_bytes``: as below."""

    def build(profile: Profile, stage: Stage) -> Engine:
        check_island(profile)
        if stage.split:
            raise ConfigError(f"a worker of several processes (--devices) cannot hold {stage}")
        return island.build(profile.to_spec(), lambda: island_trainer(profile, island, device, memory_bytes))

    return build


def island_trainer(profile: Profile, island: Island, device: ComputeDevice, memory_bytes: int = 0) -> IslandTrainer:
    """The engine at one process of an island. ``memory_bytes``: limit for all of them together; 0: what is free. The
    leader checks it, because all need the same."""
    from p2ptrain.compute.island import IslandTrainer

    return IslandTrainer(training_spec(profile), device, island, memory_bytes // island.place.size)


def check_island(profile: Profile) -> None:
    """Raise ``ConfigError`` if an island cannot train a job."""
    needed = {
        "job.strategy": ("sync", "local"), "job.exact": (False,), "lora.rank": (0,), "privacy.epsilon": (0,),
        "local.fragments": (1,), "optimizer.name": ("adamw", "sgd"),
    }  # fmt: skip
    for key, allowed in needed.items():
        if (value := profile.value(key)) not in allowed:
            text = f"a worker of several processes (--devices) cannot train a job with {key} = {value!r}"
            remedy = "give each device to a worker of its own"
            raise ConfigError(text, remedy=f"{remedy}: p2ptrain join --device cuda:0, p2ptrain join --device cuda:1")


def build_holding(*, device: str, threads: int, memory_bytes: int) -> Holding:
    """Return what a worker needs to hold parts of split models.

    Args:
        device, threads: as requested; empty and 0 for the default.
        memory_bytes: limit of parts and their caches; 0: most of what the device has free now.
    """

    def build_part(spec: PartSpec, names: tuple[str, ...]) -> PartBuilder:
        from p2ptrain.compute.device import pick_device
        from p2ptrain.compute.served_part import ServedPartBuilder

        pick_device(spec.device, threads)
        return ServedPartBuilder(spec, names)

    def stream_bps() -> float:
        from p2ptrain.compute.device import stream_bps as measured

        return measured(device or "auto")

    def compute_flops() -> float:
        from p2ptrain.compute.device import compute_flops as measured

        return measured(device or "auto", threads)

    def measure(config: str, dtype: str, weights: str) -> dict[str, Any]:
        from p2ptrain.compute.served_part import measure_model

        return measure_model(config, dtype, weights)

    return Holding(
        compute_flops=compute_flops,
        measure=measure,
        build_part=build_part,
        limit_bytes=memory_bytes or int(FREE_SHARE * free_memory_bytes(device)),
        stream_bps=stream_bps,
        device=device or "auto",
    )


def training_spec(profile: Profile) -> TrainingSpec:
    from p2ptrain.compute.data import DataSpec
    from p2ptrain.compute.flat import OptimizerSpec
    from p2ptrain.compute.local import LocalSpec
    from p2ptrain.compute.model import ModelSpec
    from p2ptrain.compute.recipe import TrainingSpec
    from p2ptrain.compute.tuning import TuningSpec

    model = profile.model
    local, clip_norm = None, (profile.privacy.clip_norm if profile.privacy.epsilon else 0.0)
    if profile.job.strategy == "local":
        local = LocalSpec(**profile.local.model_dump(), clip_norm=clip_norm)
    elif profile.job.strategy == "federated":
        averaged: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "fresh": True}  # the members' average
        local = LocalSpec(**averaged, proximal=profile.federated.proximal, clip_norm=clip_norm, slots=slots(profile))
    freeze_a = profile.job.strategy == "federated" and profile.federated.average == "frozen-a"
    spec: TrainingSpec = fill_from(
        TrainingSpec,
        *(profile.job, profile.batch, model, profile.device, profile.preference),
        model=fill_from(
            ModelSpec,
            model,
            path=Path(model.path) if model.path else None,
            tokenizer=Path(model.tokenizer) if model.tokenizer else None,
            extra=profile.plugins.settings_of(model.architecture),
        ),
        data=DataSpec(**profile.data.model_dump(), reader=profile.plugins.settings_of(profile.data.format)),
        optimizer=OptimizerSpec(**profile.optimizer.model_dump()),
        validation_batches=profile.validation.batches,
        local=local,
        clip_norm=0.0 if local else clip_norm,
        tuning=TuningSpec(**profile.lora.model_dump(), freeze=model.freeze, freeze_a=freeze_a),
    )
    return spec


def fill_from(kind: Any, *tables: BaseModel, **values: Any) -> Any:
    """An instance of the dataclass ``kind``: ``values``, and what a profile's tables have for its other fields."""
    names = {field.name for field in fields(kind)} - values.keys()
    found = ((name, getattr(table, name)) for table in tables for name in names & type(table).model_fields.keys())
    return kind(**dict(found), **values)
