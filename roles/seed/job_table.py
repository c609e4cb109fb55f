"""All jobs of a seed: made, found and forgotten. ``roles.seed.pool`` gives them workers."""

from __future__ import annotations

import asyncio

from p2ptrain.core.background import start_in
from p2ptrain.core.errors import Refused
from p2ptrain.core.texts import did_you_mean
from ring import coordination as co
from roles.seed.checkpoints import checkpoint_id, checkpoints_event
from roles.seed.job_history import StoredHistory, read_history
from roles.seed.jobs import JobController, JobPorts
from roles.seed.peers import ConnectedPeer, clip
from roles.seed.store import JobRecord, Records
from wire.job_messages import Release
from wire.records import JobInfo


class JobTable:
    """The controllers of all jobs. ``controllers``: job id → controller, the oldest first."""

    def __init__(self, ports: JobPorts) -> None:
        self.controllers: dict[str, JobController] = {}
        self._ports = ports
        self._tasks: asyncio.TaskGroup | None = None

    async def load(self) -> None:
        """Read all jobs from the store. Raises ``StorageError``."""
        for record, spec in await self._ports.store.call(Records.jobs):
            history = await self._ports.store.call(read_history, record.id)
            self.controllers[record.id] = JobController(self._ports, record, spec, history)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        for controller in self.controllers.values():
            tasks.create_task(controller.run(), name=f"job {controller.id}")

    async def create(self, record: JobRecord, spec: str) -> None:
        """Add a job. It starts when enough workers are ready. Raises ``StorageError``."""
        await self._ports.store.call(Records.add_job, record, spec)
        controller = self.controllers[record.id] = JobController(self._ports, record, spec, StoredHistory())
        assert self._tasks is not None
        start_in(self._tasks, controller.run(), f"job {controller.id}")
        self._ports.request_backup()
        text = f"job {record.name} ({record.id}) was created"
        self._ports.announcements.note("info", "job-created", text, job=record.id)
        self._touch(controller)
        self._ports.assign_workers()

    async def forget(self, controller: JobController) -> None:
        """Remove an ended job and its records. Its checkpoints stay on the workers' disks."""
        controller.retire()
        del self.controllers[controller.id]
        self._ports.checkpoints.forget_job(controller.id)
        self._touch(controller)
        await self._ports.store.call(Records.forget_job, controller.id)

    def _touch(self, controller: JobController) -> None:
        self._ports.announcements.touch("jobs", controller.id)
        self._ports.announcements.touch("cluster", "")

    def find(self, text: str) -> JobController:
        """Find a job by id, by the beginning of its id, or by name (the newest of that name). Raises ``Refused``."""
        if text in self.controllers:
            return self.controllers[text]
        controllers = list(self.controllers.values())
        if named := [controller for controller in controllers if controller.record.name == text]:
            return named[-1]
        begun = [controller for controller in controllers if controller.id.startswith(text)]
        if len(begun) == 1:
            return begun[0]
        if begun:
            ids = ", ".join(controller.id for controller in begun[:4])
            raise Refused("ambiguous", f"several jobs begin with {text!r}: {ids}", remedy="give more of the id")
        hint = did_you_mean(text, [*self.controllers, *(controller.record.name for controller in controllers)])
        raise Refused("unknown-job", f"there is no job {clip(text, 80)!r}", remedy=f"{hint}see p2ptrain jobs list")

    def trained_by(self, peer: ConnectedPeer, job: str) -> JobController | None:
        """The job, if it is the worker's present or last one. Reports stored without a connection arrive late."""
        return self.controllers.get(job) if job and job in (peer.job, peer.last_job) else None

    def post_checkpoints(self, job: str) -> None:
        if job in self.controllers:
            self.controllers[job].post(checkpoints_event(self._ports.checkpoints.of_job(job)))

    def info(self, controller: JobController) -> JobInfo:
        """The record that people see."""
        is_waiting = controller.core.phase is co.JobPhase.WAITING and not controller.core.peer_ids
        queued = is_waiting and any(other.live and other.core.peer_ids for other in self.controllers.values())
        return controller.info(queued=queued)

    def return_worker(self, peer: ConnectedPeer) -> None:
        """Give a worker that connected again to the job that it still holds, or tell it to drop that job."""
        controller = self.controllers.get(peer.hello.job)
        stages = peer.hello.capabilities.get("stages", controller.stages if controller else 1)
        if controller is not None and controller.live and stages == controller.stages:
            controller.take_back(peer)
        elif peer.hello.job:
            peer.last_job = peer.hello.job
            is_over = controller is None or not controller.live
            peer.send(Release(peer.hello.job[:64], "the job is over" if is_over else "the job has other parts now"))
        self._ports.assign_workers()

    def may_yield(self, controller: JobController) -> bool:
        """Whether a paused job can release its workers, because its state is in a checkpoint on their disks."""
        if not controller.census.settled.is_set():
            return False
        survivors, known = controller.core.paused_survivors(), self._ports.checkpoints.known
        if not survivors:
            return survivors is not None
        step = max(report.applied for report in survivors.values())
        at_step = [peer_id for peer_id, report in survivors.items() if report.applied == step]
        ids = {peer: checkpoint_id(controller.id, step, peer, controller.stage_of(peer)) for peer in at_step}
        return controller.has_whole_model(peer for peer in at_step if ids[peer] in known)
