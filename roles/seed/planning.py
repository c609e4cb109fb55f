"""What ``jobs.create`` and ``jobs.plan`` are given, checked; and the plan for a split job, made before there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError, Refused, ResourceError, UserError
from ring.training_costs import ModelShape, Trainee, Training, shape_untrusted
from roles.seed.links import Survey
from roles.seed.peers import Link
from roles.seed.specs import device_of, seen_for, training_of
from roles.seed.updates import first_that_fit
from wire.records import StagePlanInfo, TrainingPlanInfo

if TYPE_CHECKING:
    from ring.training_placement import StagePlan, TrainingPlan

ANSWER_BYTES = 40 << 10
TELL_S = 20.0
"""For workers to load their libraries and tell how fast they are; the plan is made without who did not."""
MAX_SHOWN = 64
"""Workers that one stage of an answer names."""


REMEDY = "make the job with p2ptrain jobs create"


def checked_profile(spec: str) -> Profile:
    """The profile of a job that is to be made. Raises ``Refused``."""
    try:
        return Profile.from_spec_untrusted(spec)
    except ProtocolError as problem:
        raise Refused("bad-spec", problem.message, remedy=REMEDY) from problem


def checked_shape(params: Mapping[str, Any], profile: Profile) -> ModelShape | None:
    """The sizes of the model in a request; None where it has none. Raises ``Refused``."""
    if params.get("shape") is None or profile.stages < 2:
        return None
    try:
        shape = shape_untrusted(params["shape"])
    except ProtocolError as problem:
        raise Refused("bad-shape", problem.message, remedy=REMEDY) from problem
    layers, cuts = shape.sizes.layers, profile.pipeline.cuts
    if not profile.model.path and layers != profile.model.layers:
        text = f"the sizes are of {layers} layers, and the profile says {profile.model.layers}"
        raise Refused("bad-shape", text, remedy=REMEDY)
    if layers < profile.stages or (cuts and cuts[-1] >= layers):
        text = f"a model of {layers} layers, and pipeline.stages = {profile.stages}, pipeline.cuts = {cuts}"
        raise Refused("bad-shape", text, remedy=f"pipeline.stages at most {layers}, and cuts below that")
    return shape


async def planned(profile: Profile, shape: ModelShape, links: Mapping[str, Link], survey: Survey) -> dict[str, Any]:
    """The plan for a job that was made now, of the workers that are free, as a map.

    Raises:
        Refused: too few are; it does not fit; with the numbers.
    """
    from ring.training_placement import plan

    spec = profile.to_spec()
    training, device = training_of(spec, shape.to_map()), device_of(spec)
    assert training is not None
    workers = [link for link in links.values() if link.trains]
    free = [link for link in workers if not link.job]
    if len(free) < training.workers:
        busy = f", {len(workers) - len(free)} more work for other jobs" if len(workers) > len(free) else ""
        text = f"the job begins with {training.workers} workers, and {len(free)} of them are free{busy}"
        raise Refused("too-few", text, remedy="start more: p2ptrain join; or set job.workers to what there is")
    with suppress(TimeoutError):
        async with asyncio.timeout(TELL_S):
            await asyncio.gather(*(link.told.wait() for link in free if link.flops is None))
    ways = await survey.measured_among([link.id for link in free])
    peers = [seen_for(device, link.peer) for link in free if links.get(link.id) is link]
    there = [Trainee(peer.peer_id, peer.name, peer.memory_bytes, peer.flops or 0.0, peer.on_host) for peer in peers]
    try:
        found = plan(training, there, ways)
    except (ResourceError, UserError) as problem:
        raise Refused("does-not-fit", problem.message, remedy=problem.remedy) from problem
    return plan_maps(training, found, there)


def plan_maps(training: Training, found: TrainingPlan, there: Collection[Trainee]) -> dict[str, Any]:
    """A plan as ``{"plan": ..., "stages": [...]}`` of ``wire.records``."""
    known, used = found.tokens_per_s is not None, {trainee.id for stage in found.stages for trainee in stage.trainees}
    spares = [trainee.name for trainee in there if trainee.id not in used]
    info = TrainingPlanInfo(
        stages=training.stages,
        crews=training.crews,
        micro_batches=training.micro_batches,
        schedule=found.schedule,
        bubble=found.bubble if known else None,
        efficiency=found.efficiency if known else None,
        step_s=found.step_s if known else None,
        reduce_s=found.reduce_s if known else None,
        tokens_per_s=found.tokens_per_s,
        spares=spares[:MAX_SHOWN],
    )
    stages = [_stage_info(number, stage, known=known) for number, stage in enumerate(found.stages)]
    return {"plan": info.to_map(), "stages": first_that_fit((stage.to_map() for stage in stages), ANSWER_BYTES)}


def _stage_info(number: int, stage: StagePlan, *, known: bool) -> StagePlanInfo:
    limits = [trainee.memory_bytes for trainee in stage.trainees if trainee.memory_bytes]
    return StagePlanInfo(
        stage=number,
        peers=[trainee.id for trainee in stage.trainees[:MAX_SHOWN]],
        names=[trainee.name for trainee in stage.trainees[:MAX_SHOWN]],
        start=stage.start,
        stop=stage.stop,
        weights_bytes=stage.weights_bytes,
        need_bytes=stage.need_bytes,
        limit_bytes=min(limits, default=0),
        in_flight=stage.in_flight,
        compute_s=stage.compute_s if known else None,
        hop_s=stage.hop_s if known else None,
    )
