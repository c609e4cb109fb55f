"""What ``p2ptrain up`` runs to train: a seed, and workers on this machine.

A profile with a drafter trains a pair of models; then a verifier and a drafter serve them. The drafter is trained
first. Its job is short, so the user sees within a minute that all is well. Each start reads the seed's records and does
only what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from p2ptrain.cluster.console import LEAVING, Console, unless_stopped
from p2ptrain.cluster.jobs import UNSAVED, JobObserver, JobSummary, create_job, newest_of, show_step, summarize_job
from p2ptrain.cluster.local_cluster import LOOPBACK, LocalCluster, PeerProcess, end_all, part_bytes, threads_each
from p2ptrain.core.adapters import is_model
from p2ptrain.core.errors import JobFailed, P2PTrainError, ProtocolError, Refused, UserError
from wire.address import format_address
from wire.records import FINISHED_STATES, CheckpointInfo, EventInfo, JobInfo, MetricRow

if TYPE_CHECKING:
    from configs.schema import Profile
    from wire.client import SeedClient
    from wire.schema import Record

DRAFTER, VERIFIER = "drafter", "verifier"
SAVE_S, SAVE_LOOK_S = 60.0, 0.1
"""How long an interrupted run may take to save its state, and how often to look."""
JOIN_S, RETRY_S = 120.0, 0.2
"""How long a worker may take to join with the checkpoint of a job that goes on, and how often to look."""
_UNDER_WAY = ("running", "forming")


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A training run and, if the profile has a drafter, the serving of both models.

    Attributes:
        http: where the verifier answers HTTP requests. api_keys: an absolute path; None: no key is needed.
        texts: of each worker, for private data; empty: the profile's.
        straggler: the last worker computes so many times slower.
    """

    profile_name: str
    profile: Profile
    workers: int
    new: bool
    link: str
    http: tuple[str, int] | None = None
    api_keys: Path | None = None
    texts: tuple[str, ...] = ()
    straggler: float = 1.0

    @property
    def is_pair(self) -> bool:
        return bool(self.profile.drafter.layers)

    def models(self) -> dict[str, tuple[str, Profile]]:
        """Role → name and settings of its job, in the order of training. A single model has the role ``""``."""
        name = Path(self.profile_name).stem
        if not self.is_pair:
            return {"": (name, self.profile)}
        return {DRAFTER: (f"{name}-drafter", self.profile.of_drafter()), VERIFIER: (name, self.profile.alone())}


@dataclass(frozen=True, slots=True)
class ServedPair:
    """Both models of a pair, while they are served. ``http``: the verifier's address; empty: none."""

    seed: str
    http: str
    models: dict[str, JobSummary]  # by role
    commands: list[str]  # that use them, for people


async def train(
    plan: TrainingPlan,
    cluster: LocalCluster,
    console: Console,
    stop: asyncio.Event,
    on_served: Callable[[ServedPair], object],
    *,
    full_screen: bool = False,
) -> JobSummary | None:
    """Train the models that are not trained yet; serve a pair until ``stop`` is set. At the end ``cluster`` is ended.

    Returns:
        The summary of the job; for a pair, both by role and an overall ``state``. None if both models were served.

    Raises:
        P2PTrainError: something could not be started, or a process ended; the error has the process's last words.
    """
    if plan.http is not None:
        from roles.verifier.http_app import check_place

        await check_place(*plan.http, plan.api_keys)  # fail before the training, not after it
    run = TrainingRun(plan, cluster, console, on_served)
    try:
        await run.begin()
        run.view = FullScreenView(run.cluster.port) if full_screen else None
        working = asyncio.create_task(run.work(), name="up")
        try:
            if run.view is not None and await run.view.show(working):
                console.event("info", LEAVING)
                stop.set()
            elif run.view is not None and not working.done():
                run.leave_view()
            await unless_stopped(stop, working)
        finally:
            working.cancel()
            await asyncio.wait({working})
            console.finish()
        return await run.outcome()
    finally:
        console.finish()
        await run.end()


class TrainingRun:
    """The processes of one ``up``, and their progress.

    Args:
        on_step: shows a step: the console, the step's metrics, the number of all steps, and a label; default: one line.

    Attributes:
        view: it has the terminal, and shows warnings and errors; None: the console shows everything.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        cluster: LocalCluster,
        console: Console,
        on_served: Callable[[ServedPair], object],
        on_step: Callable[[Console, MetricRow, int, str], object] = show_step,
    ) -> None:
        self.cluster, self._on_step = cluster, on_step
        self.view: FullScreenView | None = None
        self._plan, self._console, self._on_served = plan, console, on_served
        self._workers: list[PeerProcess] = []
        self._client: SeedClient  # of the seed that ``begin`` starts
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(cluster.end)
        self._observers: dict[str, JobObserver] = {}  # role → observer of a job that is not done yet
        self._trained: dict[str, JobSummary] = {}  # role → summary of a job that is done
        self._served: ServedPair | None = None
        self._has_begun = False  # a step was trained

    async def begin(self) -> None:
        """Start the seed, find the jobs that are left, and start workers if there are any.

        Raises ``P2PTrainError`` as ``train`` does; ``UserError`` if the seed has an unfinished job with other settings.
        """
        plan, console = self._plan, self._console
        with console.during(lambda: "starting the seed"):
            await self.cluster.start_seed()
        if self.cluster.url:
            console.event("info", f"watch in a browser: {self.cluster.url}")
        self._client = client = await self._stack.enter_async_context(self.cluster.operator())
        profiles = [profile for _, profile in plan.models().values()]
        lengthened = dict[str, tuple[str, int]]()
        unfinished = await resume_unfinished(client, profiles, self.cluster.root, cancel_others=plan.new)
        for role, (name, profile) in plan.models().items():
            job = unfinished.get(profile.to_spec(), "")
            if job:
                console.event("info", f"going on with job {name} ({job}) from its last checkpoint")
            elif plan.is_pair and not plan.new and (summary := await find_trained(client, profile)):
                self._trained[role] = summary
                console.event("info", f"the {role} is trained: {summary['checkpoint']}")
                continue
            else:
                job = "" if plan.new else await self._find_finished(profile)
                if job:
                    lengthened[role] = job, profile.job.steps
                    continue
                job = await create_job(client, name, plan.profile_name, profile, console)
                console.event("info", f"created job {name} ({job}) from profile {plan.profile_name}")
            await self._observe(role, job)
        if not self._observers and not lengthened:
            return
        memory = str(part_bytes(plan.profile.device.kind) // plan.workers)
        threads, straggler = plan.profile.device.threads, plan.straggler
        own = {"memory": memory, "link": plan.link}
        await self.cluster.start_workers(plan.workers, threads=threads, straggler=straggler, texts=plan.texts, **own)
        self._workers = list(self.cluster.peers.values())
        console.event("info", self.cluster.start_notice(plan.workers))
        for role, (job, steps) in lengthened.items():
            await self._lengthen(job, steps)
            await self._observe(role, job)

    async def _find_finished(self, profile: Profile) -> str:
        """The job of these settings that is done after fewer steps, and can go on; empty if there is none. Raises
        ``UserError`` if it had more steps."""
        async for job in done_jobs(self._client, profile, steps=profile.job.steps):
            text = f"job {job.name} ({job.id}) of these settings is done at step {job.step:,}"
            if job.steps_total == profile.job.steps:
                self._console.event("info", f"{text}; a new one begins at step 0")
                return ""
            if job.steps_total < profile.job.steps:
                self._console.event("info", f"{text}; it goes on to step {profile.job.steps:,}")
                return job.id
            remedy = "--new begins another one at step 0"
            raise UserError(f"{self.cluster.root}: {text}, more than job.steps = {profile.job.steps:,}", remedy=remedy)
        return ""

    async def _lengthen(self, job: str, steps: int) -> None:
        """Let a job that is done go on, once a worker that has its checkpoint is here."""
        until = time.monotonic() + JOIN_S
        while True:
            try:
                await self._client.change_settings(job, {"job.steps": steps})
                return
            except Refused as refusal:
                if refusal.code != "holder-away" or time.monotonic() > until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _observe(self, role: str, job: str) -> None:
        width = max(map(len, self._plan.models()))
        label = f"{role:<{width}}  " if role else ""

        def on_step(row: MetricRow) -> None:
            self._has_begun = True
            if self.view is None and observer.info is not None:
                self._on_step(self._console, row, observer.info.steps_total, label)

        self._observers[role] = observer = JobObserver(job, on_step=on_step)
        await observer.begin(self._client)

    async def work(self) -> None:
        """Train. Then serve a pair until a needed process ends, which raises ``JobFailed``. Returns if a job failed."""
        if self._observers:
            await self.cluster.while_alive(
                self._watch_jobs(), needed=[self.cluster.seed], others=self._workers, least=1, on_end=self._report_end
            )
            self._console.finish()
            if not self._plan.is_pair:
                return
            await end_all(self._workers)  # they would compete with the serving processes for the cores
            self.cluster.peers.clear()  # their end must not count as a failure
            for role, observer in self._observers.items():
                summary = await self._summarize(observer)
                if summary["state"] != "done":
                    return
                self._trained[role] = summary
            self._observers.clear()
        await self._serve()

    def _report_end(self, worker: PeerProcess) -> None:
        if (worker.process.returncode or 0) < 0:  # one that was not killed has told the seed why it ended
            problem = worker.failure()
            self._report("warning", f"{problem.message}; the other workers go on ({problem.remedy})")

    def _report(self, level: str, text: str) -> None:
        if self.view is not None:
            self.view.show_notice(level, text)
        else:
            self._console.event(level, text)

    def leave_view(self) -> None:
        """Go on at the console."""
        self.view = None
        if self._served is not None:
            self._on_served(self._served)
        else:
            self._console.event("info", "the view is closed; the run continues here. Ctrl+C stops everything")

    # ------------------------------------------------------------------------------------------------------- training

    async def _watch_jobs(self) -> None:
        """Show the progress until all jobs have ended, or one has failed."""
        observers, shown = list(self._observers.values()), ""
        began = (await self._client.cluster()).started_at
        async for records in self._client.news():
            for record in records:
                self._report_news(record, began)
                for observer in observers:
                    observer.take(record)
            peers = sorted((peer.name, peer.state) for peer in observers[0].peers.values())
            waiting = ", ".join(f"{name} {state}" for name, state in peers)
            if self.view is None and not self._has_begun and waiting != shown:
                self._console.progress(f"waiting for the first step: {waiting}")
                shown = waiting
            states = {observer.state for observer in observers}
            if states <= FINISHED_STATES or states & (FINISHED_STATES - {"done"}):
                return

    def _report_news(self, record: Record, began: float) -> None:
        """Report trouble since this start, and that a job stops or goes on. Called before the observers take it."""
        match record:
            case EventInfo() if (
                (record.level != "info" or record.kind in ("building", "compiling"))
                and record.wall >= began
                and self.view is None
            ):
                self._console.event(record.level, record.text, record.wall)
            case JobInfo():
                before = next(
                    (known.state for known in self._observers.values() if known.job == record.id), record.state
                )
                job = f"job {record.name}"
                if record.state == before:
                    return
                if record.state == "paused":
                    resume = f"p2ptrain jobs resume {record.id}{self.cluster.seed_option}"
                    self._report("info", f"{job} is paused at step {record.step:,}: {resume} continues it")
                elif record.state == "saving":
                    self._report("warning", f"{job} is trained, but cannot end: {record.reason}")
                elif record.state == "waiting" and record.reason:
                    self._report("info", f"{job} waits at step {record.step:,}: {record.reason}")
                elif before == "paused":
                    self._report("info", f"{job} goes on")

    # --------------------------------------------------------------------------------------------------------- the end

    async def outcome(self) -> JobSummary | None:
        """Let the workers save and leave. Returns the outcome; see ``train``."""
        if self._served is not None:
            return None
        await self._save()
        await self._name_others()
        await end_all(self._workers)  # before the seed, so that it records what they saved
        found = dict(self._trained)
        for role, observer in self._observers.items():
            found[role] = await self._summarize(observer)
        if not self._plan.is_pair:
            return found[""]
        bad = [item["state"] for item in found.values() if item["state"] in FINISHED_STATES - {"done"} | {UNSAVED}]
        return {"state": bad[0] if bad else "interrupted", **found}

    async def _save(self) -> None:
        """Pause the jobs and let the workers save them, so that the next start continues from here."""
        try:
            async with asyncio.timeout(SAVE_S):
                for observer in self._observers.values():
                    info, _ = await self._client.job(observer.job)
                    if info.state not in _UNDER_WAY:
                        continue
                    await self._client.tell_job(info.id, "pause")
                    saved: list[CheckpointInfo] = []
                    while info.state in _UNDER_WAY or (info.state == "paused" and not _is_saved(info, saved)):
                        await asyncio.sleep(SAVE_LOOK_S)
                        info, _ = await self._client.job(info.id)
                        saved = await self._client.checkpoints(info.id)
        except (TimeoutError, P2PTrainError) as error:
            text = error.message if isinstance(error, P2PTrainError) else f"it took longer than {SAVE_S:g} s"
            self._console.event("warning", f"the newest steps may not be saved: {text}")

    async def _name_others(self) -> None:
        """Name the jobs that were created meanwhile, and that are not over."""
        own, state = {observer.job for observer in self._observers.values()}, quote(str(self.cluster.root))
        with suppress(P2PTrainError):  # the seed may be lost
            for job in await self._client.jobs():
                if job.state not in FINISHED_STATES and job.id not in own:
                    go_on = f"run `p2ptrain seed --state {state}`, and `p2ptrain join` for each worker"
                    self._console.event("warning", f"job {job.name} ({job.id}) is not done; to go on with it {go_on}")

    async def _summarize(self, observer: JobObserver) -> JobSummary:
        """The summary of a job; one that goes on is interrupted now."""
        info, newest, is_saved = observer.info, None, True
        assert info is not None, "each observer has begun"
        with suppress(P2PTrainError):  # the seed may be lost: then the newest report counts
            info, _ = await self._client.job(observer.job)
            saved = await self._client.checkpoints(observer.job)
            newest, is_saved = newest_of(saved), _is_saved(info, saved)
        summary = summarize_job(info, newest)
        if info.state in FINISHED_STATES:
            return summary
        if is_saved:
            return summary | {"state": "interrupted", "reason": ""}  # why it has no members now is no news
        text = f"the steps up to {info.step:,} are lost, if no worker elsewhere keeps them"
        return summary | {"state": UNSAVED, "reason": text}

    async def end(self) -> None:
        await self._stack.aclose()

    # -------------------------------------------------------------------------------------------------------- serving

    async def _serve(self) -> None:
        """Start a verifier and a drafter, and wait. Raises ``JobFailed`` when a needed process ends."""
        plan, cluster = self._plan, self.cluster
        for role, summary in self._trained.items():
            check_whole(role, summary)
        self._report("info", "both models are trained; a verifier and a drafter load them")
        device = plan.profile.device.kind
        for role in (VERIFIER, DRAFTER):
            threads = str(plan.profile.device.threads or threads_each(2))
            options = ["--role", role, "--model", self._trained[role]["checkpoint"], "--threads", threads]
            options += ["--device", device] * (device != "auto") + ["--link", plan.link] * bool(plan.link)
            if role == VERIFIER and plan.http is not None:
                options += ["--http", format_address(*plan.http)]
                options += [] if plan.api_keys is None else ["--api-key-file", str(plan.api_keys)]
            await cluster.start_peer(role, 1, *options)
        http = (await cluster.wait_until_serving({VERIFIER, DRAFTER}))[VERIFIER].http
        commands = [f'p2ptrain generate "def " --stats{cluster.seed_option}', f"p2ptrain chat{cluster.seed_option}"]
        if http:
            key = "" if plan.api_keys is None else f' -H "Authorization: Bearer $(cat {quote(str(plan.api_keys))})"'
            commands.append(f"curl {http}/models{key}")
        self._served = ServedPair(cluster.address, http, self._trained, commands)
        if self.view is None:
            self._on_served(self._served)
        else:
            self.view.show_served("\n".join(["from another terminal:", *commands]))
        await cluster.while_alive(
            asyncio.Event().wait(),
            needed=[cluster.seed, cluster.peers[VERIFIER]],
            others=[cluster.peers[DRAFTER]],
            on_end=lambda end: self._report("warning", f"{end.failure().message}; the verifier continues without it"),
        )


# ----------------------------------------------------------------------------------------------- the seed's records


async def resume_unfinished(
    client: SeedClient, profiles: Collection[Profile], root: Path, *, cancel_others: bool
) -> dict[str, str]:
    """Settings → id of the unfinished job that has them, whatever number of workers it began with. A paused job is
    resumed.

    Args:
        cancel_others: cancel unfinished jobs with other settings.

    Raises:
        UserError: there is a job with other settings, and ``cancel_others`` is False.
    """
    found: dict[str, str] = {}
    for job in await client.jobs():
        if job.state in FINISHED_STATES:
            continue
        _, spec = await client.job(job.id)
        matching = (profile.to_spec() for profile in profiles if _has_settings_of(spec, profile))
        if own := next((text for text in matching if text not in found), ""):
            found[own] = job.id
            if job.state == "paused":
                await client.tell_job(job.id, "resume")
        elif cancel_others:
            await client.tell_job(job.id, "cancel")
        else:
            remedy = "give the same settings to continue it, --new to cancel it, or another --state"
            raise UserError(f"{root} holds an unfinished job {job.name} ({job.id}) of other settings", remedy=remedy)
    return found


async def find_trained(client: SeedClient, profile: Profile) -> JobSummary | None:
    """Summary of the newest finished job of this profile whose model is still on this machine.

    The number of workers that the job began with does not matter.
    """
    async for job in done_jobs(client, profile):
        newest = newest_of(await client.checkpoints(job.id))
        if newest is not None and newest.stage is None and is_model(newest.path):
            return summarize_job(job, newest)
    return None


async def done_jobs(client: SeedClient, profile: Profile, **ignored: int) -> AsyncIterator[JobInfo]:
    """Finished jobs of this profile, the newest first. ``ignored``: settings of ``job`` that do not matter."""
    for job in reversed(await client.jobs()):
        _, spec = await client.job(job.id)
        if job.state == "done" and _has_settings_of(spec, profile, **ignored):
            yield job


def _has_settings_of(spec: str, profile: Profile, **job: int) -> bool:
    """Whether the settings are the same but for the number of workers, and those of ``job``."""
    from configs.schema import Profile

    try:
        found = Profile.from_spec_untrusted(spec)
    except ProtocolError:
        return False  # of another version
    job |= {"workers": profile.job.workers}
    return found.model_copy(update={"job": found.job.model_copy(update=job)}) == profile


def _is_saved(job: JobInfo, saved: Iterable[CheckpointInfo]) -> bool:
    """Whether the whole model, or every stage of it, is among ``saved`` at the job's step."""
    parts = {item.stage for item in saved if item.step == job.step}
    return not job.step or None in parts or len(parts) == job.stages


def check_whole(role: str, summary: JobSummary) -> None:
    """Raises ``JobFailed`` if the job left no checkpoint of the whole model."""
    if not summary["whole"]:
        text = f"the {role}'s job {summary['job']} is done, and left no checkpoint of the whole model"
        raise JobFailed(text, remedy="the workers' logs say why; `p2ptrain checkpoints list` shows what there is")


# ------------------------------------------------------------------------------------------------ the full-screen view


class FullScreenView:
    """The full-screen view of the seed at this port."""

    def __init__(self, port: int) -> None:
        from p2ptrain.cluster.viewing import new_app

        self.app = new_app(f"{LOOPBACK}:{port}")

    async def show(self, work: asyncio.Task[Any]) -> bool:
        """Show the view until the user leaves it. Returns whether that was by Ctrl+C. The view reports the end of
        ``work``."""
        work.add_done_callback(self._show_end)
        try:
            return bool(await self.app.run_async())
        finally:
            work.remove_done_callback(self._show_end)

    def show_notice(self, level: str, text: str) -> None:
        if level != "info":
            self.app.show_message(level, "Trouble", text)

    def show_served(self, text: str) -> None:
        """Show that the models are served, and how to use them."""
        from tui.app import SERVING

        self.app.action_view(SERVING)
        self.app.show_message("info", "The models are served", text)

    def _show_end(self, work: asyncio.Task[Any]) -> None:
        if work.cancelled():
            return
        leaves = "q closes the view and stops what was started here"
        problem = work.exception()
        if problem is None:
            self.app.show_message("info", "The run has ended", leaves)
            return
        text = f"{type(problem).__name__}: {problem}"
        if isinstance(problem, P2PTrainError):
            text = "\n".join(filter(None, (problem.message, problem.remedy)))
        self.app.show_message("error", "The run has failed", f"{text}\n{leaves}")
