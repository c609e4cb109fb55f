"""What a job trains, as placement and the predictions see it."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.footprint import held_copies
from ring.planning.workloads import ModelShape, TrainingWorkload


def training_of(profile: Profile | None, shape: object, cuts: Sequence[int] = ()) -> TrainingWorkload | None:
    """A job split by layers as placement sees it; None if it is not, or the model's sizes are not known.

    ``cuts``: the planned cuts; if empty, those of the profile.
    """
    try:
        known = ModelShape.from_map_untrusted(shape) if shape else None
    except ProtocolError:
        return None
    if known is None or profile is None or profile.pipeline.stages < 2:
        return None
    return of_profile(profile, known, cuts)


def of_profile(profile: Profile, known: ModelShape, cuts: Sequence[int] = ()) -> TrainingWorkload:
    """What a job trains, whether it is split or not. ``cuts``: as in ``training_of``."""
    split, data, batch = profile.pipeline, profile.data, profile.batch
    return TrainingWorkload(
        known,
        stages=profile.stages,
        replicas=profile.job.workers // profile.stages,
        tokens=batch.micro_batch_sequences * data.sequence_tokens * (2 if data.format == "preference" else 1),
        sequence_tokens=data.sequence_tokens,
        micro_batches=batch.micro_batches,
        activations=split.activations,
        recompute=split.recompute,
        cuts=tuple(cuts or split.cuts),
        # A layer of n weights, about square, has adapters of 2 rank n / width.
        trained=min(1.0, 2 * profile.lora.rank / known.width) if profile.lora.rank else 1.0,
        held=held_copies(profile.lora.base, profile.device.precision) if profile.lora.rank else 0.0,
        optimizer=profile.optimizer.name,
        precision=profile.device.precision,
    )
