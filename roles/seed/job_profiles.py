"""A job's profile as the seed uses it: the coordinator's options, the copy for workers, and another layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError, Refused
from ring.coordination import JobOptions, JobWorker
from ring.planning.ring_plan import RingOptions
from roles.seed.store import JobRecord
from roles.strategies import least_members, share_rule_of
from roles.training_shape import training_of


def profile_of(spec: str) -> Profile | None:
    """The profile of a stored job; None if another release wrote it and this one cannot read it."""
    try:
        return Profile.from_spec_untrusted(spec)
    except ProtocolError:
        return None


def offer_to(device: str, peer: JobWorker) -> JobWorker:
    """The worker as seen by a job that computes on ``device``. A job on the CPU ignores the figures of a GPU."""
    if device == "cpu" and not peer.on_host:
        return replace(peer, memory_bytes=0, flops=0.0, on_host=True)
    return peer


def in_shards(spec: str, shards: int) -> str:
    """The stored profile of a job whose model is from now on in so many shards; 1: whole. It keeps as many replicas as
    its number of workers allows. Raises ``Refused``."""
    profile = Profile.from_spec_untrusted(spec)
    if profile.job.strategy not in ("sync", "sharded"):
        text = f"a job of strategy {profile.job.strategy!r} keeps its layout; shards are for 'sharded' and 'sync'"
        raise Refused("wrong-strategy", text, remedy="leave --shards out, or start a new job from the checkpoint")
    tables = profile.model_dump()
    workers = shards * max(profile.job.workers // shards, 1)
    tables["job"] |= {"strategy": "sharded" if shards > 1 else "sync", "workers": workers}
    tables["sharded"]["shards"] = max(shards, 2)
    try:
        return Profile.from_spec_untrusted(json.dumps(tables)).to_spec()
    except ProtocolError as problem:
        raise Refused(
            "bad-parameter", f"{shards} shards: {problem.message}", remedy="choose another number"
        ) from problem


def assigned_spec(spec: str, cuts: Sequence[int], created_at: float) -> str:
    """The profile for a worker of the job: with its cuts, and with the date of its creation for chat templates."""
    profile, changes = profile_of(spec), dict[str, Any]()
    if profile is None:
        return spec  # the worker says that it cannot read it
    if cuts:
        changes["pipeline"] = profile.pipeline.model_copy(update={"cuts": list(cuts)})
    if profile.data.format == "chat" and not profile.data.date:
        day = datetime.fromtimestamp(created_at, UTC).date().isoformat()
        changes["data"] = profile.data.model_copy(update={"date": day})
    return profile.model_copy(update=changes).to_spec() if changes else spec


def _ring_options_of(profile: Profile) -> RingOptions:
    ring, exact = profile.ring, profile.job.exact
    return RingOptions(
        ring.order, ring.streams, ring.sub_chunk_bytes, "fp32" if exact else ring.codec, ring.error_budget
    )


def options_of(record: JobRecord, profile: Profile | None, *, minted_below: int) -> JobOptions:
    """The coordinator's options. Without a profile it starts nothing, but people can still end the job."""
    if profile is None:
        return JobOptions(record.workers, record.micro_batches, minted_below=minted_below)
    return JobOptions(
        replicas=record.workers // profile.stages,
        micro_batches=record.micro_batches,
        ring_options=_ring_options_of(profile),
        minted_below=minted_below,
        share_rule=share_rule_of(profile),
        parts=profile.stages,
        least=least_members(profile),
        asynchronous=profile.job.strategy == "server",
        training=training_of(profile, record.shape, record.cuts),
        least_steps=least_steps(profile),
        masked=profile.federated.secure,
    )


def least_steps(profile: Profile) -> int:
    may_end_early = profile.validation.patience or profile.privacy.epsilon
    return 0 if may_end_early else profile.job.steps
