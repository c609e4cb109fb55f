"""What a job's profile says of how its workers are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError
from ring.coordination import Peer
from ring.order import Wishes
from ring.training_costs import Training, shape_untrusted


def stages_of(spec: str) -> int:
    """Into how many parts a job's profile splits the model; a profile of another version: into none."""
    try:
        return Profile.from_spec_untrusted(spec).stages
    except ProtocolError:
        return 1


def device_of(spec: str) -> str:
    """On what a job computes; a profile of another version does not tell."""
    try:
        return Profile.from_spec_untrusted(spec).device.kind
    except ProtocolError:
        return ""


def seen_for(device: str, peer: Peer) -> Peer:
    """The worker as a job sees it that computes on ``device``: what it says of a GPU counts for nothing on a CPU."""
    if device == "cpu" and not peer.on_host:
        return replace(peer, memory_bytes=0, flops=0.0, on_host=True)
    return peer


def training_of(spec: str, shape: object, cuts: Sequence[int] = ()) -> Training | None:
    """A split job as placement sees it; None where it is none, or the model's sizes are not known.

    Args:
        cuts: that were planned; empty: what the profile says.
    """
    try:
        profile, known = Profile.from_spec_untrusted(spec), shape_untrusted(shape) if shape else None
    except ProtocolError:
        return None
    split, data, batch = profile.pipeline, profile.data, profile.batch
    if known is None or profile.stages < 2:
        return None
    return Training(
        known,
        stages=profile.stages,
        crews=profile.job.workers // profile.stages,
        tokens=batch.micro_batch_sequences * data.sequence_tokens,
        sequence_tokens=data.sequence_tokens,
        micro_batches=batch.micro_batches,
        schedule=split.schedule,
        activations=split.activations,
        recompute=split.recompute,
        max_in_flight=split.max_in_flight,
        cuts=tuple(cuts or split.cuts),
    )


def cut_spec(spec: str, cuts: Sequence[int]) -> str:
    """The profile with the cuts that were planned in it; as it is where none were."""
    if not cuts:
        return spec
    profile = Profile.from_spec_untrusted(spec)
    return profile.model_copy(update={"pipeline": profile.pipeline.model_copy(update={"cuts": list(cuts)})}).to_spec()


def wishes_of(spec: str) -> Wishes:
    """What a job's profile says of its ring; a profile of another version says nothing."""
    try:
        profile = Profile.from_spec_untrusted(spec)
    except ProtocolError:
        return Wishes()
    ring, exact = profile.ring, profile.job.exact
    return Wishes(ring.order, ring.streams, ring.sub_chunk_bytes, "fp32" if exact else ring.codec, ring.error_budget)
