"""The operators' requests, with every parameter checked, and the placement plan for a split job before it is made."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import TYPE_CHECKING, Any

from configs.schema import Profile
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    Refused,
    ResourceError,
    UserError,
)
from p2ptrain.core.ids import new_id
from ring import coordination as co
from ring.coordination import ENDED, JobPhase
from ring.parts import candidate_of
from ring.planning.measurements import known_link
from ring.planning.workloads import ModelShape
from roles.seed.events import first_that_fit, newest_that_fit
from roles.seed.jobs import SETTLE_S, NewLayout, in_shards, seen_for
from roles.seed.links import Survey
from roles.seed.peers import NAME_CHARS, Link, clipped, did_you_mean
from roles.seed.serving import part_infos
from roles.seed.store import RECOVERIES_KEPT, JobRecord, Records
from roles.training_shape import training_of
from wire.client import answer_to
from wire.connection import Connection
from wire.enrol import RENEW
from wire.handshake import SOFTWARE
from wire.job_messages import MAX_STAGES
from wire.messages import Request, Response
from wire.records import LinkInfo, runs_of

if TYPE_CHECKING:
    from roles.seed.jobs import JobController
    from roles.seed.server import Seed

Params = dict[str, Any]
Result = dict[str, Any]


def text_of(params: Params, name: str, limit: int) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise Refused("bad-parameter", f"{name} must be text", remedy=f"give {name}")
    if len(value) > limit or len(value.encode(errors="replace")) > limit:
        raise Refused("bad-parameter", f"{name} has more than {limit} bytes", remedy="make it shorter")
    return value


def label_of(params: Params, name: str) -> str:
    label = clipped(text_of(params, name, NAME_CHARS), NAME_CHARS)
    if not label:
        raise Refused("bad-parameter", f"{name} has no printable characters", remedy=f"give {name}")
    return label


def whole_of(params: Params, name: str, default: int | None, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``. If it is missing: ``default``, or ``Refused`` if that is None."""
    value = params.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise Refused("bad-parameter", f"{name} must be a whole number from {least} to {most}", remedy=f"change {name}")
    return value


TELL_S = 20.0
"""How long a plan waits for workers to report their speed. They load their libraries first."""
MAX_SHOWN = 64
"""Largest number of workers that an answer names for one stage, and of spare workers."""


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


async def planned(profile: Profile, shape: ModelShape, links: Mapping[str, Link], survey: Survey) -> dict[str, Any]:
    """Plan a new job on the workers that are free now: ``{"plan": ..., "stages": [...]}``, maps of records.

    Raises ``Refused``, with the numbers, if too few workers are free or the model does not fit.
    """
    from ring.planning.pipeline import plan_pipeline

    training, device = training_of(profile, shape.to_map()), profile.device.kind
    assert training is not None
    workers = [link for link in links.values() if link.trains]
    free = [link for link in workers if not link.job]
    if len(free) < training.workers:
        busy = f", {len(workers) - len(free)} work on other jobs" if len(workers) > len(free) else ""
        text = f"the job needs {training.workers} workers, but only {len(free)} are free{busy}"
        raise Refused("too-few", text, remedy="start more with p2ptrain join, or lower job.workers")
    await measured(free, survey)
    candidates = [candidate_of(seen_for(device, link.peer)) for link in free if links.get(link.id) is link]
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


async def measured(workers: Sequence[Link], survey: Survey) -> None:
    """Wait until the workers have reported their speed, and measure the links between them."""
    with suppress(TimeoutError):
        async with asyncio.timeout(TELL_S):
            await asyncio.gather(*(link.told.wait() for link in workers if link.flops is None))
    await survey.measure_among([link.id for link in workers], lambda: None)


IDLE_S = 120.0
"""An operator that neither asks nor watches for this long is disconnected. Clients ask for the clock more often."""
MAX_SPEC_BYTES = 32 << 10
MAX_ROWS = 200

MAX_LINKED = 32
"""Largest number of workers whose links an answer has."""
_SLOW = frozenset({"links.list", "checkpoints.restore", "checkpoints.delete", "jobs.plan"})


class OperatorApi:
    def __init__(self, seed: Seed) -> None:
        self._seed = seed
        self._methods: dict[str, Callable[[Params, Any], Awaitable[Result]]] = {
            "cluster.info": self._cluster_info,
            "links.list": self._links_list,
            "peers.list": self._peers_list,
            "peers.evict": self._peers_evict,
            "parts.list": self._parts_list,
            "serving.list": self._serving_list,
            "tickets.new": seed.gate.tickets_new,
            "tickets.list": seed.gate.tickets_list,
            "tickets.revoke": self._tickets_revoke,
            "tickets.rotate": seed.gate.tickets_rotate,
            RENEW: seed.gate.renew,
            "jobs.create": self._jobs_create,
            "jobs.plan": self._jobs_plan,
            "jobs.list": self._jobs_list,
            "jobs.show": self._jobs_show,
            "jobs.pause": self._jobs_pause,
            "jobs.resume": self._jobs_resume,
            "jobs.cancel": self._jobs_cancel,
            "jobs.save": self._jobs_save,
            "jobs.forget": self._jobs_forget,
            "jobs.ledger": self._jobs_ledger,
            "jobs.views": self._jobs_views,
            "recoveries.list": self._recoveries_list,
            "metrics.history": self._metrics_history,
            "events.list": self._events_list,
            "checkpoints.list": self._checkpoints_list,
            "checkpoints.restore": self._checkpoints_restore,
            "checkpoints.delete": self._checkpoints_delete,
            "probe.clock": self._probe_clock,
        }

    async def serve(self, connection: Connection) -> None:
        """Serve one operator until it disconnects. Answers come in order, except those that wait for a worker."""
        feed: asyncio.Task[None] | None = None
        slow: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    received = await connection.receive(timeout_s=IDLE_S)
                except DeadlineExceeded:
                    if feed is None or feed.done():
                        raise
                    continue  # it only watches; the feed ends if the operator stops reading
                request = received.message
                if not isinstance(request, Request):
                    raise ProtocolError(f"unexpected message {type(request).__name__} from an operator")
                if request.method == "subscribe":
                    connection.send(Response(request.id))
                    feed = feed or asyncio.create_task(self._watch(connection), name="feed")
                elif request.method in _SLOW:  # answers to other requests show the operator that the seed is alive
                    if slow is not None:
                        await slow
                    slow = asyncio.create_task(self._answer_later(request, connection), name=request.method)
                else:
                    connection.send(await self.answer(request, connection))
        finally:
            if tasks := [task for task in (feed, slow) if task is not None]:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _answer_later(self, request: Request, connection: Connection) -> None:
        response = await self.answer(request, connection)
        with suppress(ConnectionLost):  # ``serve`` sees the loss too
            connection.send(response)

    async def answer(self, request: Request, connection: Connection | None = None) -> Response:
        """``connection``: None if it comes from this process, which asks nothing about a connection."""
        return await answer_to(request, self._result(request, connection))

    async def _result(self, request: Request, connection: Connection | None) -> Result:
        method = self._methods.get(request.method)
        if method is None:
            hint = did_you_mean(request.method, self._methods)
            raise Refused("unknown-method", f"there is no request {clipped(request.method, 80)!r}{hint}")
        return await method(request.params, connection)

    async def _watch(self, connection: Connection) -> None:
        seed = self._seed
        with seed.watching() as feed:
            feed.add(seed.event_log.recent)
            live = [controller.id for controller in seed.controllers.values() if controller.live]
            for job in (live or list(seed.controllers)[-1:])[:4]:
                feed.add(await seed.store.call(Records.last_metrics, job, 300))
                feed.add(await seed.store.call(Records.recoveries, job, 100))
            try:
                await feed.run(connection)
            except DeadlineExceeded as slow:
                connection.abort(DeadlineExceeded(f"a subscriber was dropped: {slow.message}", remedy=slow.remedy))
            except ConnectionLost:
                pass  # ``serve`` sees the loss too

    # ------------------------------------------------------------------------------------------------ cluster and peers

    async def _cluster_info(self, params: Params, connection: Connection) -> Result:
        return {"cluster": self._seed.cluster_info().to_map()}

    async def _peers_list(self, params: Params, connection: Connection) -> Result:
        infos = self._seed.peer_infos()
        return {"peers": newest_that_fit(info.to_map() for info in infos), "total": len(infos)}

    async def _links_list(self, params: Params, connection: Connection) -> Result:
        workers = [link for link in self._seed.links.values() if link.trains and link.lost_at is None][:MAX_LINKED]
        await measured(workers, self._seed.survey)
        known, infos = self._seed.survey.table.known, list[LinkInfo]()
        for one, other in combinations([link.id for link in workers], 2):
            if (way := known_link(known, one, other)) is not None:
                infos.append(LinkInfo(one, other, way.latency_s, way.bandwidth_bps))
        return {"links": first_that_fit(info.to_map() for info in infos)}

    async def _parts_list(self, params: Params, connection: Connection) -> Result:
        infos = part_infos(self._seed.links.values())
        return {"parts": first_that_fit(info.to_map() for info in infos), "total": len(infos)}

    async def _serving_list(self, params: Params, connection: Connection) -> Result:
        infos = self._seed.services.infos()
        return {"serving": first_that_fit(info.to_map() for info in infos), "total": len(infos)}

    async def _peers_evict(self, params: Params, connection: Connection) -> Result:
        peer_id, name = self._peer(params)
        await self._seed.gate.evict(peer_id, name)
        self._seed.drop_unwelcome()
        return {"evicted": peer_id, "name": name}

    def _peer(self, params: Params) -> tuple[str, str]:
        text = text_of(params, "peer", 128)
        infos = {info.id: info.name for info in self._seed.peer_infos()}
        if text in infos or self._seed.gate.knows(text):
            return text, infos.get(text, text)
        named = [(peer_id, name) for peer_id, name in infos.items() if name == text]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(peer_id for peer_id, _ in named[:4])
            raise Refused("ambiguous", f"{len(named)} peers are called {text!r}: {ids}", remedy="give the id")
        hint = did_you_mean(text, [*infos, *infos.values()])
        raise Refused("unknown-peer", f"there is no peer {clipped(text, 80)!r}{hint}", remedy="see p2ptrain peers list")

    # ------------------------------------------------------------------------------------------------------- tickets

    async def _tickets_revoke(self, params: Params, connection: Connection) -> Result:
        result = await self._seed.gate.tickets_revoke(params, connection)
        self._seed.drop_unwelcome()
        return result

    # ------------------------------------------------------------------------------------------------------------- jobs

    async def _jobs_create(self, params: Params, connection: Connection) -> Result:
        spec = text_of(params, "spec", MAX_SPEC_BYTES)
        profile = checked_profile(spec, remedy := self._same_version(connection))
        shape = checked_shape(params, profile, remedy)
        self._seed.check_trackers(profile)
        record = JobRecord(
            id=new_id(),
            name=label_of(params, "name"),
            profile=label_of(params, "profile"),
            strategy=profile.job.strategy,
            workers=profile.job.workers,
            micro_batches=profile.batch.micro_batches,
            steps_total=profile.job.steps,
            keep=profile.checkpoint.keep,
            created_at=self._seed.world.clock.wall(),
            shape=shape.to_map() if shape else None,
        )
        await self._seed.create_job(record, spec)
        return {"job": record.id}

    def _same_version(self, connection: Connection | None) -> str:
        caller = self._seed.acceptor.operators.get(connection, "") if connection else ""
        return f"install the same version on both: the seed is {SOFTWARE}, the caller {caller or 'not known'}"

    async def _jobs_plan(self, params: Params, connection: Connection) -> Result:
        profile = checked_profile(text_of(params, "spec", MAX_SPEC_BYTES), remedy := self._same_version(connection))
        shape = checked_shape(params, profile, remedy)
        if shape is None:
            raise Refused("bad-shape", "a plan requires a split model and its sizes", remedy="give shape")
        return await planned(profile, shape, self._seed.links, self._seed.survey)

    async def _jobs_list(self, params: Params, connection: Connection) -> Result:
        controllers = list(self._seed.controllers.values())
        # those that do not fit are cut off first
        controllers.sort(key=lambda controller: (bool(controller.core.peer_ids), controller.live))
        infos = (controller.info() for controller in controllers)
        jobs = newest_that_fit(info.to_map() for info in infos)
        return {"jobs": sorted(jobs, key=lambda job: float(job["created_at"])), "total": len(controllers)}

    async def _jobs_show(self, params: Params, connection: Connection) -> Result:
        controller = self._controller(params)
        return {"job": controller.info().to_map(), "spec": controller.spec}

    async def _jobs_pause(self, params: Params, connection: Connection) -> Result:
        controller = self._controller(params)
        if controller.core.phase in ENDED or controller.core.paused:
            raise _wrong_state(controller, "paused", "only a job that is neither paused nor over can be")
        return await self._tell(controller, co.Signal.PAUSE, "was asked to pause")

    async def _jobs_resume(self, params: Params, connection: Connection) -> Result:
        controller = self._controller(params)
        if not controller.core.paused:
            raise _wrong_state(controller, "resumed", "only a paused job can be")
        return await self._tell(controller, co.Signal.RESUME, "was asked to resume")

    async def _jobs_cancel(self, params: Params, connection: Connection) -> Result:
        controller = self._controller(params)
        if controller.core.phase in ENDED:
            raise _wrong_state(controller, "cancelled", "it is over")
        return await self._tell(controller, co.Signal.CANCEL, "was cancelled")

    async def _jobs_save(self, params: Params, connection: Connection) -> Result:
        controller = self._controller(params)
        if controller.core.phase is not JobPhase.RUNNING and controller.core.state != "saving":
            raise _wrong_state(controller, "saved", "only a running job can save a checkpoint")
        return await self._tell(controller, co.Signal.SAVE, "was asked to save a checkpoint")

    async def _tell(self, controller: JobController, event: co.Event | NewLayout, what: str) -> Result:
        if not controller.settled.is_set():
            text = f"the seed was restored, and waits for the members of job {controller.record.name}"
            raise Refused("busy", text, remedy=f"try again in {SETTLE_S:g} s")
        self._seed.note("info", "operator", f"job {controller.record.name} {what}", "", controller.id)
        if not await controller.post(event):
            raise Refused("unknown-job", f"job {controller.record.name} was forgotten meanwhile")
        return {"job": controller.id}

    async def _jobs_forget(self, params: Params, connection: Connection) -> Result:
        controller = self._controller(params)
        if controller.live:
            raise _wrong_state(controller, "forgotten", "only a job that is over can be", "cancel it first")
        self._seed.note("info", "operator", f"job {controller.record.name} was forgotten", "", controller.id)
        await self._seed.forget_job(controller)
        return {"job": controller.id}

    def _controller(self, params: Params) -> JobController:
        """Find a job by id, by the beginning of its id, or by name (the newest of that name). Raises ``Refused``."""
        text, controllers = text_of(params, "job", 128), self._seed.controllers
        if text in controllers:
            return controllers[text]
        named = [controller for controller in controllers.values() if controller.record.name == text]
        if named:
            return named[-1]
        begun = [controller for controller in controllers.values() if controller.id.startswith(text)]
        if len(begun) == 1:
            return begun[0]
        if begun:
            ids = ", ".join(controller.id for controller in begun[:4])
            raise Refused("ambiguous", f"several jobs begin with {text!r}: {ids}", remedy="give more of the id")
        known = [*controllers, *(controller.record.name for controller in controllers.values())]
        hint = did_you_mean(text, known)
        raise Refused("unknown-job", f"there is no job {clipped(text, 80)!r}{hint}", remedy="see p2ptrain jobs list")

    # ------------------------------------------------------------------------------------------- ledger and recoveries

    async def _jobs_ledger(self, params: Params, connection: Connection) -> Result:
        controller, after = self._controller(params), whole_of(params, "after_step", 0, 0, 2**53)
        head = await self._seed.store.call(Records.ledger_head, controller.id)
        rows = await self._seed.store.call(Records.ledger_rows, controller.id, after, 512)
        runs = (run.to_map() for run in runs_of(rows))
        begins = dataclasses.asdict(head) if head else None
        return {"head": begins, "runs": first_that_fit(runs), "windows": controller.record.windows}

    async def _jobs_views(self, params: Params, connection: Connection) -> Result:
        controller, after = self._controller(params), whole_of(params, "after_generation", 0, 0, 2**53)
        views = await self._seed.store.call(Records.views, controller.id, after, MAX_ROWS)
        items = [dataclasses.asdict(view) | {"members": list(view.members)} for view in views]
        return {"views": first_that_fit(items)}

    async def _recoveries_list(self, params: Params, connection: Connection) -> Result:
        controller, limit = self._controller(params), whole_of(params, "limit", MAX_ROWS, 1, RECOVERIES_KEPT)
        found = await self._seed.store.call(Records.recoveries, controller.id, limit)
        return {"recoveries": newest_that_fit(item.to_map() for item in found), "total": len(found)}

    # ----------------------------------------------------------------------------------------------- metrics and events

    async def _metrics_history(self, params: Params, connection: Connection) -> Result:
        controller, limit = self._controller(params), whole_of(params, "limit", MAX_ROWS, 1, MAX_ROWS)
        after = whole_of(params, "after_step", -1, -1, 2**53)
        rows = await self._seed.store.call(Records.metrics, controller.id, after, limit)
        return {"rows": [row.to_map() for row in rows]}

    async def _events_list(self, params: Params, connection: Connection) -> Result:
        after = whole_of(params, "after_id", 0, -MAX_ROWS, 2**53)
        limit = whole_of(params, "limit", MAX_ROWS, 1, MAX_ROWS)
        if after < 0:  # so many of the newest ones
            last = await self._seed.store.call(Records.last_event_id)
            events = await self._seed.store.call(Records.events, last + after, limit)
            return {"events": newest_that_fit(event.to_map() for event in events)}
        events = await self._seed.store.call(Records.events, after, limit)
        return {"events": first_that_fit(event.to_map() for event in events)}

    # ------------------------------------------------------------------------------------------------------ checkpoints

    async def _checkpoints_list(self, params: Params, connection: Connection) -> Result:
        job = self._controller(params).id if "job" in params else ""
        found = [item for item in self._seed.checkpoints.known.values() if item.job == job or not job]
        return {"checkpoints": newest_that_fit(item.to_map() for item in found), "total": len(found)}

    async def _checkpoints_restore(self, params: Params, connection: Connection) -> Result:
        checkpoint = self._seed.checkpoints.named(text_of(params, "id", 256))
        shards, spec = whole_of(params, "shards", 0, 0, MAX_STAGES), ""
        controller = self._seed.controllers.get(checkpoint.job)
        if controller is None:
            raise Refused("unknown-job", f"the job {checkpoint.job} of that checkpoint is not known here")
        if shards:
            spec = in_shards(controller.spec, shards)
        if shards not in (0, controller.stages):
            checkpoint = self._seed.checkpoints.whole(checkpoint)
        # before newer checkpoints are set aside
        lineage = await self._seed.checkpoints.verified(controller, checkpoint)
        holder = self._seed.checkpoints.holder(checkpoint)
        other = self._seed.controllers.get(holder.job)
        if other is not None and other is not controller and self._seed.may_yield(other):
            await other.post(co.Signal.YIELD)
        if holder.job not in ("", controller.id):
            text = f"{holder.name}, which holds that checkpoint, works on job {holder.job}"
            raise Refused("busy", text, remedy="pause or cancel that job first")
        restored = co.Restore(checkpoint.step, checkpoint.peer_id, lineage)
        text = f"goes back to step {checkpoint.step}"
        if shards in (0, controller.stages):
            return await self._tell(controller, restored, text)
        return await self._tell(controller, NewLayout(spec, restored), f"{text}, with its model in {shards} shards")

    async def _checkpoints_delete(self, params: Params, connection: Connection) -> Result:
        checkpoint = self._seed.checkpoints.named(text_of(params, "id", 256))
        was_there = await self._seed.checkpoints.delete(checkpoint)
        return {"deleted": checkpoint.id, "was_there": was_there}

    # ----------------------------------------------------------------------------------------------------------- probes

    async def _probe_clock(self, params: Params, connection: Connection) -> Result:
        return {"wall": self._seed.world.clock.wall()}


def _wrong_state(controller: JobController, verb: str, why: str, remedy: str = "see p2ptrain jobs show") -> Refused:
    text = f"job {controller.record.name} is {controller.core.state} and cannot be {verb}: {why}"
    return Refused("wrong-state", text, remedy=remedy)
