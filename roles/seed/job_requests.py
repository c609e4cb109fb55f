"""The operators' requests that change jobs and checkpoints, and the plan of a split job before it is made.

Each checks its parameters and the state of the job, and posts an event to the job's controller.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError, Refused, ResourceError, UserError
from ring import coordination as co
from ring.coordination import ENDED, JobPhase
from ring.parts import candidate_of
from ring.planning.workloads import ModelShape
from roles.seed.events import first_that_fit, newest_that_fit
from roles.seed.job_history import SETTLE_S
from roles.seed.job_table import JobTable
from roles.seed.jobs import JobController, JobPorts, NewLayout, offer_to
from roles.seed.links import Survey
from roles.seed.operator_api import Method, Params, Result, job_of, label_of, measure_workers, text_of, whole_of
from roles.seed.peers import PeerTable
from roles.seed.store import JobRecord
from roles.training_shape import training_of
from wire.connection import Connection
from wire.handshake import SOFTWARE
from wire.job_messages import MAX_STAGES
from wire.records import CheckpointInfo

MAX_SHOWN = 64
"""Largest number of workers that an answer names for one stage, and of spare workers."""
MAX_SPEC_BYTES = 32 << 10


def checked_profile(spec: str, remedy: str) -> Profile:
    """The profile of a new job. Raises ``Refused``."""
    try:
        return Profile.from_spec_untrusted(spec)
    except ProtocolError as problem:
        raise Refused("bad-spec", problem.message, remedy=remedy) from problem


def checked_shape(params: Mapping[str, Any], profile: Profile, remedy: str) -> ModelShape | None:
    """The model's sizes in a request; None if it has none, or the job is not split by layers. Raises ``Refused``."""
    if params.get("shape") is None or profile.pipeline.stages < 2:
        return None
    try:
        shape = ModelShape.from_map_untrusted(params["shape"])
    except ProtocolError as problem:
        raise Refused("bad-shape", problem.message, remedy=remedy) from problem
    layers, cuts = shape.sizes.layers, profile.pipeline.cuts
    if not profile.model.path and layers != profile.model.layers:
        text = f"the model sizes have {layers} layers, but model.layers = {profile.model.layers}"
        raise Refused("bad-shape", text, remedy=remedy)
    if layers < profile.stages or (cuts and cuts[-1] >= layers):
        text = f"a model of {layers} layers does not fit pipeline.stages = {profile.stages}, pipeline.cuts = {cuts}"
        raise Refused("bad-shape", text, remedy=f"use at most {layers} stages, and cuts below {layers}")
    return shape


async def plan_job(profile: Profile, shape: ModelShape, peers: PeerTable, survey: Survey) -> dict[str, Any]:
    """Plan a new job on the workers that are free now: ``{"plan": ..., "stages": [...]}``, maps of records. Raises
    ``Refused``, with the numbers, if too few workers are free or the model does not fit."""
    from ring.planning.pipeline import plan_pipeline

    training, device = training_of(profile, shape.to_map()), profile.device.kind
    assert training is not None
    workers = [peer for peer in peers.connected.values() if peer.trains]
    free = [peer for peer in workers if not peer.job]
    if len(free) < training.workers:
        busy = f", {len(workers) - len(free)} work on other jobs" if len(workers) > len(free) else ""
        text = f"the job needs {training.workers} workers, but only {len(free)} are free{busy}"
        raise Refused("too-few", text, remedy="start more with p2ptrain join, or lower job.workers")
    await measure_workers(free, survey)
    candidates = [candidate_of(offer_to(device, peer.offer)) for peer in free if peers.is_current(peer)]
    try:
        info, stages = plan_pipeline(training, candidates, survey.table.known)
    except (ResourceError, UserError) as problem:
        raise Refused("does-not-fit", problem.message, remedy=problem.remedy) from problem
    shown = [
        dataclasses.replace(stage, peers=stage.peers[:MAX_SHOWN], names=stage.names[:MAX_SHOWN]) for stage in stages
    ]
    return {
        "plan": dataclasses.replace(info, spares=info.spares[:MAX_SHOWN]).to_map(),
        "stages": first_that_fit(stage.to_map() for stage in shown),
    }


_VERBS = {
    "pause": ("paused", co.Signal.PAUSE, "was asked to pause", "only a job that is neither paused nor over can be"),
    "resume": ("resumed", co.Signal.RESUME, "was asked to resume", "only a paused job can be"),
    "cancel": ("cancelled", co.Signal.CANCEL, "was cancelled", "it is over"),
    "save": ("saved", co.Signal.SAVE, "was asked to save a checkpoint", "only a running job can save a checkpoint"),
}
"""What operators tell a job → what it then is, the event, what is noted; and why it may be refused."""


class JobRequests:
    """The requests that change jobs and checkpoints. ``callers``: each operator's connection → its software.
    ``check_profile`` raises ``Refused`` if the seed cannot run a new job with this profile."""

    def __init__(
        self,
        jobs: JobTable,
        ports: JobPorts,
        callers: Mapping[Connection, str],
        check_profile: Callable[[Profile], None],
    ) -> None:
        self._jobs, self._ports, self._callers, self._check_profile = jobs, ports, callers, check_profile

    def methods(self) -> dict[str, Method]:
        return {
            "jobs.create": self._jobs_create,
            "jobs.plan": self._jobs_plan,
            "jobs.list": self._jobs_list,
            "jobs.show": self._jobs_show,
            **{f"jobs.{verb}": partial(self._tell, verb) for verb in _VERBS},
            "jobs.set": self._jobs_set,
            "jobs.forget": self._jobs_forget,
            "checkpoints.list": self._checkpoints_list,
            "checkpoints.restore": self._checkpoints_restore,
            "checkpoints.delete": self._checkpoints_delete,
        }

    def _note(self, controller: JobController, what: str) -> None:
        text = f"job {controller.record.name} {what}"
        self._ports.announcements.note("info", "operator", text, job=controller.id)

    async def _jobs_create(self, params: Params, connection: Connection) -> Result:
        spec = text_of(params, "spec", MAX_SPEC_BYTES)
        profile = checked_profile(spec, remedy := self._same_version(connection))
        shape = checked_shape(params, profile, remedy)
        self._check_profile(profile)
        record = JobRecord(
            id=self._ports.new_id(),
            name=label_of(params, "name"),
            profile=label_of(params, "profile"),
            strategy=profile.job.strategy,
            workers=profile.job.workers,
            micro_batches=profile.batch.micro_batches,
            steps_total=profile.job.steps,
            created_at=self._ports.clock.wall(),
            shape=shape.to_map() if shape else None,
        )
        await self._jobs.create(record, spec)
        return {"job": record.id}

    def _same_version(self, connection: Connection | None) -> str:
        caller = self._callers.get(connection, "") if connection else ""
        return f"install the same version on both: the seed is {SOFTWARE}, the caller {caller or 'not known'}"

    async def _jobs_plan(self, params: Params, connection: Connection) -> Result:
        profile = checked_profile(text_of(params, "spec", MAX_SPEC_BYTES), remedy := self._same_version(connection))
        shape = checked_shape(params, profile, remedy)
        if shape is None:
            raise Refused("bad-shape", "a plan requires a split model and its sizes", remedy="give shape")
        return await plan_job(profile, shape, self._ports.peers, self._ports.survey)

    async def _jobs_list(self, params: Params, connection: Connection) -> Result:
        controllers = list(self._jobs.controllers.values())
        # those that do not fit are cut off first
        controllers.sort(key=lambda controller: (bool(controller.core.peer_ids), controller.live))
        infos = (self._jobs.info(controller) for controller in controllers)
        jobs = newest_that_fit(info.to_map() for info in infos)
        return {"jobs": sorted(jobs, key=lambda job: float(job["created_at"])), "total": len(controllers)}

    async def _jobs_show(self, params: Params, connection: Connection) -> Result:
        controller = job_of(params, self._jobs)
        return {"job": self._jobs.info(controller).to_map(), "spec": controller.effective_spec}

    async def _tell(self, verb: str, params: Params, connection: Connection) -> Result:
        controller, (done, signal, what, why) = job_of(params, self._jobs), _VERBS[verb]
        core = controller.core
        is_possible = {
            "pause": core.phase not in ENDED and not core.paused,
            "resume": core.paused,
            "cancel": core.phase not in ENDED,
            "save": core.phase is JobPhase.RUNNING or core.state == "saving",
        }[verb]
        if not is_possible:
            raise _wrong_state(controller, done, why)
        return await self._post(controller, signal, what)

    async def _jobs_set(self, params: Params, connection: Connection) -> Result:
        controller = job_of(params, self._jobs)
        values = params.get("values")
        if not (isinstance(values, dict) and all(isinstance(item, str) for pair in values.items() for item in pair)):
            raise Refused(
                "bad-parameter", "values must map settings to JSON", remedy='such as {"optimizer.lr": "1e-3"}'
            )
        async with controller.planning:
            return await self._change(controller, values)

    async def _change(self, controller: JobController, values: Mapping[str, str]) -> Result:
        try:
            event = controller.plan_changes(values)
        except ProtocolError as problem:
            remedy = "correct the value; with settings that cannot change begin another job: p2ptrain jobs create"
            raise Refused("bad-setting", problem.message, remedy=remedy) from problem
        asked = {str(key) for _, key, *_ in controller.record.asked_changes} | {item.key for item in event.changes}
        if not event.changes and not (controller.core.phase is JobPhase.DONE and asked):
            raise Refused(
                "unchanged", f"job {controller.record.name} has these settings", remedy="see jobs show --spec"
            )
        what = f"gets {', '.join(f'{change.key} = {change.value}' for change in event.changes)}"
        if controller.core.phase not in ENDED:
            return await self._post(controller, event, what)
        if controller.core.phase is not JobPhase.DONE or "job.steps" not in asked:
            raise _wrong_state(controller, "changed", "it is over", "a job that is done goes on with more job.steps")
        newest = self._ports.checkpoints.find_newest(controller.id)
        restored = await self._verify(newest, controller, controller.stages)
        await self._post(controller, event, what)
        return await self._post(controller, restored, f"goes on from step {newest.step}")

    async def _post(self, controller: JobController, event: co.Event | NewLayout, what: str) -> Result:
        if not controller.census.settled.is_set():
            text = f"the seed was restored, and waits for the members of job {controller.record.name}"
            raise Refused("busy", text, remedy=f"try again in {SETTLE_S:g} s")
        self._note(controller, what)
        if not await controller.post(event):
            raise Refused("unknown-job", f"job {controller.record.name} was forgotten meanwhile")
        return {"job": controller.id}

    async def _jobs_forget(self, params: Params, connection: Connection) -> Result:
        controller = job_of(params, self._jobs)
        if controller.live:
            raise _wrong_state(controller, "forgotten", "only a job that is over can be", "cancel it first")
        self._note(controller, "was forgotten")
        await self._jobs.forget(controller)
        return {"job": controller.id}

    async def _checkpoints_list(self, params: Params, connection: Connection) -> Result:
        job = job_of(params, self._jobs).id if "job" in params else ""
        found = [item for item in self._ports.checkpoints.known.values() if item.job == job or not job]
        return {"checkpoints": newest_that_fit(item.to_map() for item in found), "total": len(found)}

    async def _checkpoints_restore(self, params: Params, connection: Connection) -> Result:
        checkpoint = self._ports.checkpoints.find(text_of(params, "id", 256))
        shards, spec = whole_of(params, "shards", 0, 0, MAX_STAGES), ""
        controller = self._jobs.controllers.get(checkpoint.job)
        if controller is None:
            raise Refused("unknown-job", f"the job {checkpoint.job} of that checkpoint is not known here")
        if shards:
            spec = in_shards(controller.spec, shards)
        if shards not in (0, controller.stages):
            checkpoint = self._ports.checkpoints.find_whole(checkpoint)
        restored = await self._verify(checkpoint, controller, controller.stages)  # before newer ones are set aside
        text = f"goes back to step {checkpoint.step}"
        if shards in (0, controller.stages):
            return await self._post(controller, restored, text)
        return await self._post(controller, NewLayout(spec, restored), f"{text}, with its model in {shards} shards")

    async def _verify(self, checkpoint: CheckpointInfo, controller: JobController, stages: int) -> co.Restore:
        """The event that goes back to a checkpoint, whose holder has it and is free. Raises ``Refused``."""
        lineage = await self._ports.checkpoints.verify(checkpoint, stages)
        holder = self._ports.checkpoints.find_holder(checkpoint)
        other = self._jobs.controllers.get(holder.job)
        if other is not None and other is not controller and self._jobs.may_yield(other):
            await other.post(co.Signal.YIELD)
        if holder.job not in ("", controller.id):
            text = f"{holder.name}, which holds that checkpoint, works on job {holder.job}"
            raise Refused("busy", text, remedy="pause or cancel that job first")
        return co.Restore(checkpoint.step, checkpoint.peer_id, lineage)

    async def _checkpoints_delete(self, params: Params, connection: Connection) -> Result:
        checkpoint = self._ports.checkpoints.find(text_of(params, "id", 256))
        controller = self._jobs.controllers.get(checkpoint.job)
        await self._ports.checkpoints.delete(checkpoint, controller.stages if controller else 0)
        return {"deleted": checkpoint.id}


def _wrong_state(controller: JobController, verb: str, why: str, remedy: str = "see p2ptrain jobs show") -> Refused:
    text = f"job {controller.record.name} is {controller.core.state} and cannot be {verb}: {why}"
    return Refused("wrong-state", text, remedy=remedy)


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
