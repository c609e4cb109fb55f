"""The processes that ``p2ptrain up`` runs on this machine: a seed, and workers that train or hold a model.

A profile with a drafter trains a pair of models; then a verifier and a drafter serve them. The drafter is trained
first. Its job is short, so the user sees within a minute that all is well. Each start reads the seed's records and does
only what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.cli.output import number, print_json, print_pairs
from p2ptrain.cli.runtime import DEFAULT_PORT, create_job
from p2ptrain.cli.watch import UNSAVED, JobProgress, Summary, newest_saved, summed_up
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.local_cluster import LOOPBACK, LocalCluster, PeerProcess, end_all, part_bytes, threads_each
from p2ptrain.cluster.operator import operator
from p2ptrain.core.adapters import is_model
from p2ptrain.core.errors import ConnectionLost, JobFailed, P2PTrainError, ProtocolError, UserError
from wire.address import format_address
from wire.records import FINISHED_STATES, EventInfo, JobInfo, PeerInfo

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.split import PlannedSplit
    from roles.serving.chain import StageChain
    from wire.client import SeedClient

DRAFTER, VERIFIER = "drafter", "verifier"
SAVE_S, SAVE_LOOK_S = 60.0, 0.1
"""How long an interrupted run may take to save its state, and how often to look."""
_UNDER_WAY = ("running", "forming")


def http_place(http: str, api_keys: Path | None, profile: Profile) -> tuple[str, int] | None:
    """Read ``up --http``; None if it is not given. Raises ``UserError`` if no verifier would answer, or for a bad
    address."""
    from p2ptrain.cli.runtime import HTTP_EXAMPLE, check_http, host_and_port

    place = host_and_port("--http", http, HTTP_EXAMPLE)
    check_http(place, api_keys)
    if place is not None and not profile.drafter.layers:
        remedy = "choose a profile with a [drafter], such as pair, or leave it out"
        raise UserError("--http needs a verifier, and this profile trains none", remedy=remedy)
    return place


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A training run and, if the profile has a drafter, the serving of both models.

    Attributes:
        http: where the verifier answers HTTP requests. api_keys: an absolute path; None: no key is needed.
    """

    profile_name: str
    profile: Profile
    workers: int
    root: Path
    port: int
    new: bool
    link: str
    http: tuple[str, int] | None = None
    api_keys: Path | None = None
    texts: tuple[str, ...] = ()  # of each worker, for private data; empty: the profile's
    straggler: float = 1.0  # the last worker computes so many times slower
    web: str = ""  # where the seed answers HTTP

    @property
    def is_pair(self) -> bool:
        return bool(self.profile.drafter.layers)

    def models(self) -> dict[str, tuple[str, Profile]]:
        """Role → name and settings of its job, in the order of training. A single model has the role ``""``."""
        name = Path(self.profile_name).stem
        if not self.is_pair:
            return {"": (name, self.profile)}
        return {DRAFTER: (f"{name}-drafter", self.profile.of_drafter()), VERIFIER: (name, self.profile.alone())}

    def threads(self, processes: int) -> str:
        return str(self.profile.device.threads or threads_each(processes))


async def train(plan: TrainingPlan, *, full_screen: bool, as_json: bool) -> Summary | None:
    """Train the models that are not trained yet; serve a pair until Ctrl+C.

    Returns:
        The summary of the job; for a pair, both by role and an overall ``state``. None if both models were served.

    Raises:
        P2PTrainError: something could not be started, or a process ended; the error has the process's last words.
    """
    from p2ptrain.cluster.stopping import LEAVING, stoppable, unless_stopped

    if plan.http is not None:
        from roles.verifier.http_app import check_place

        await check_place(*plan.http, plan.api_keys)  # fail before the training, not after it
    console, stop = stoppable()
    console.quiet = as_json
    run = TrainingRun(plan, console, as_json=as_json)
    try:
        await run.begin()
        run.quiet = full_screen
        working = asyncio.create_task(run.work(), name="up")
        try:
            if full_screen:
                run.view = FullScreenView(run.cluster.port)
                if await run.view.show(working):
                    console.event("info", LEAVING)
                    stop.set()
                else:
                    run.aloud()
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

    Attributes:
        quiet: a full-screen view has the terminal; messages wait until ``aloud``.
        view: that view; it shows warnings and errors at once.
    """

    def __init__(self, plan: TrainingPlan, console: Console, *, as_json: bool) -> None:
        self.quiet = False
        self.view: FullScreenView | None = None
        self.cluster = LocalCluster(plan.root, plan.port, web=plan.web, shown=True)
        self._plan, self._console, self._as_json = plan, console, as_json
        self._unsaid: list[tuple[str, str, float]] = []
        self._workers: list[PeerProcess] = []
        self._client: SeedClient | None = None
        self._jobs: dict[str, str] = {}  # role → id of a job that is not done yet
        self._followed: dict[str, JobProgress] = {}  # id of such a job → what the seed said of it
        self._trained: dict[str, Summary] = {}  # role → summary of a job that is done
        self._served = False
        self._http_at = ""

    @property
    def client(self) -> SeedClient:
        assert self._client is not None
        return self._client

    async def begin(self) -> None:
        """Start the seed, find the jobs that are left, and start workers if there are any.

        Raises ``P2PTrainError`` as ``train`` does; ``UserError`` if the seed has an unfinished job with other settings.
        """
        plan = self._plan
        with self._console.during(lambda: "starting the seed"):
            await self.cluster.start_seed()
        if self.cluster.url:
            self._console.event("info", f"watch in a browser: {self.cluster.url}")
        self._client = client = await self.cluster.connect()
        profiles = [profile for _, profile in plan.models().values()]
        begun = await unfinished(client, profiles, plan.root, cancel=plan.new)
        for role, (name, profile) in plan.models().items():
            done = None
            if plan.is_pair and not plan.new and profile.to_spec() not in begun:
                done = await trained_before(client, profile)
            if done is None:
                if not plan.new and profile.to_spec() not in begun:
                    await self._tell_finished(profile)
                self._jobs[role] = await self._job_for(name, profile, begun)
            else:
                self._trained[role] = done
                self._report("info", f"the {role} is trained: {done['checkpoint']}")
        if not self._jobs:
            return
        memory = str(part_bytes(plan.profile.device.kind) // plan.workers)
        options = [
            "--threads",
            plan.threads(plan.workers),
            "--memory",
            memory,
            *["--link", plan.link] * bool(plan.link),
        ]
        await self.cluster.start_workers(plan.workers, *options, straggler=plan.straggler, texts=plan.texts)
        self._workers = list(self.cluster.peers.values())
        self._report("info", self.cluster.workers_start(plan.workers))

    async def _tell_finished(self, profile: Profile) -> None:
        """Say that a job of these settings is done. Raises ``UserError`` if it had another number of steps: the person
        may want to go on, and not to begin again."""
        for job in reversed(await self.client.jobs()):
            _, spec = await self.client.job(job.id)
            if job.state != "done" or not _has_settings_of(spec, profile, steps=profile.job.steps):
                continue
            text = f"job {job.name} ({job.id}) of these settings is done at step {job.step:,}"
            if job.steps_total == profile.job.steps:
                self._console.event("info", f"{text}; a new one begins at step 0")
                return
            newest = await newest_saved(self.client, job.id)
            place = "its checkpoint" if newest is None or newest.stage is not None else newest.path
            raise UserError(
                f"{self._plan.root}: {text}, and one of {profile.job.steps:,} steps would begin at step 0",
                remedy=f"--set model.path={place} goes on from its weights, with a learning rate that rises again; "
                "--new begins at step 0",
            )

    async def _job_for(self, name: str, profile: Profile, begun: Mapping[str, str]) -> str:
        if (job := begun.get(profile.to_spec())) is None:
            return await create_job(self.client, name, self._plan.profile_name, profile, self._console)
        self._console.event("info", f"going on with job {name} ({job}) from its last checkpoint")
        return job

    async def work(self) -> None:
        """Train. Then serve a pair until a needed process ends, which raises ``JobFailed``. Returns if a job failed."""
        if self._jobs:
            await self.cluster.while_alive(
                self._follow(), needed=[self.cluster.seed], others=self._workers, least=1, on_end=self._tell_ended
            )
            self._console.finish()
            if not self._plan.is_pair:
                return
            await end_all(self._workers)  # they would compete with the serving processes for the cores
            self.cluster.peers.clear()  # their end must not count as a failure
            for role, summary in (await self._summaries(interrupted=False)).items():
                if summary["state"] != "done":
                    return
                self._trained[role] = summary
            self._jobs.clear()
        await self._serve()

    def _tell_ended(self, worker: PeerProcess) -> None:
        if (worker.process.returncode or 0) < 0:  # one that was not killed has told the seed why it ended
            problem = worker.failed()
            self._report("warning", f"{problem.message}; the other workers go on ({problem.remedy})")

    def aloud(self) -> None:
        """Print the messages that waited for the view to close, and the current state."""
        self.quiet = False
        for notice in self._unsaid:
            self._console.event(*notice)
        self._unsaid.clear()
        if self._served:
            self._tell_serving()
        else:
            self._console.event("info", "the view is closed; the run continues here. Ctrl+C stops everything")

    async def outcome(self) -> Summary | None:
        """Let the workers save and leave. Returns the outcome; see ``train``."""
        if self._served:
            return None
        await self._save()
        await end_all(self._workers)  # before the seed, so that it records what they saved
        found = {**self._trained, **(await self._summaries(interrupted=True))}
        if not self._plan.is_pair:
            return found[""]
        bad = [item["state"] for item in found.values() if item["state"] in FINISHED_STATES - {"done"} | {UNSAVED}]
        return {"state": bad[0] if bad else "interrupted", **found}

    async def _save(self) -> None:
        """Pause the jobs and let the workers save them, so that the next start continues from here."""
        try:
            async with asyncio.timeout(SAVE_S):
                for job in self._jobs.values():
                    info, _ = await self.client.job(job)
                    if info.state not in _UNDER_WAY:
                        continue
                    await self.client.tell_job(job, "pause")
                    while info.state in _UNDER_WAY or (info.state == "paused" and not await self._is_saved(info)):
                        await asyncio.sleep(SAVE_LOOK_S)
                        info, _ = await self.client.job(job)
        except (TimeoutError, P2PTrainError) as error:
            text = error.message if isinstance(error, P2PTrainError) else f"it took longer than {SAVE_S:g} s"
            self._console.event("warning", f"the newest steps may not be saved: {text}")

    async def _is_saved(self, job: JobInfo) -> bool:
        """Whether the whole model, or every stage of it, is saved at the job's step."""
        parts = {item.stage for item in await self.client.checkpoints(job.id) if item.step == job.step}
        return not job.step or None in parts or len(parts) == job.stages

    async def end(self) -> None:
        if self._client is not None:
            await self._client.close()
        await self.cluster.end()

    def _report(self, level: str, text: str) -> None:
        if self.quiet:
            self._unsaid.append((level, text, time.time()))
            if self.view is not None:
                self.view.show_notice(level, text)
        else:
            self._console.event(level, text)

    # ------------------------------------------------------------------------------------------------------- training

    async def _follow(self) -> None:
        width, peers, waiting = max(map(len, self._jobs)), dict[str, str](), ""
        begun = (await self.client.cluster()).started_at
        for role, job in self._jobs.items():
            label = f"{role:<{width}}  " if len(self._jobs) > 1 else ""
            self._followed[job] = JobProgress((await self.client.job(job))[0], self._console, label)
        async for records in self.client.news():
            for item in records:
                if isinstance(item, JobInfo) and item.id in self._followed:
                    self._tell_standstill(self._followed[item.id].info.state, item)
                if isinstance(item, EventInfo) and item.level != "info" and item.wall >= begun and not self.quiet:
                    self._console.event(item.level, item.text, item.wall)
                for followed in self._followed.values():
                    followed.take(item, quiet=self.quiet)
                if isinstance(item, PeerInfo):
                    peers[item.name] = item.state
            if not self.quiet and not any(followed.began for followed in self._followed.values()):
                there = ", ".join(f"{name} {state}" for name, state in sorted(peers.items()))
                if there != waiting:
                    self._console.progress(f"waiting for the first step: {there}")
                waiting = there
            states = {followed.info.state for followed in self._followed.values()}
            if states <= FINISHED_STATES or states & (FINISHED_STATES - {"done"}):
                return
        raise ConnectionLost("the seed ended")

    def _tell_standstill(self, before: str, job: JobInfo) -> None:
        if job.state == "paused" != before:
            resume = f"p2ptrain jobs resume {job.id}{self._seed_option}"
            self._report("info", f"job {job.name} is paused at step {job.step:,}: {resume} continues it")
        elif job.state == "saving" != before:
            self._report("warning", f"job {job.name} is trained, but cannot end: {job.reason}")
        elif job.state == "waiting" != before and job.reason:
            self._report("info", f"job {job.name} waits at step {job.step:,}: {job.reason}")
        elif before == "paused" != job.state:
            self._report("info", f"job {job.name} goes on")

    async def _summaries(self, *, interrupted: bool) -> dict[str, Summary]:
        found = {}
        for role, job in self._jobs.items():
            known, newest = self._followed.get(job), None
            shown = known.info if known else None  # in case the seed is lost
            with suppress(P2PTrainError):
                shown, _ = await self.client.job(job)
                newest = await newest_saved(self.client, job)
            found[role] = summed_up(job, shown, newest)
            if interrupted and shown is not None and shown.state not in FINISHED_STATES:
                # Why the job has no members now is no news.
                found[role] |= {"state": "interrupted", "reason": ""}
                with suppress(P2PTrainError):
                    if not await self._is_saved(shown):
                        text = f"the steps up to {shown.step:,} are lost, if no worker elsewhere keeps them"
                        found[role] |= {"state": UNSAVED, "reason": text}
        return found

    # -------------------------------------------------------------------------------------------------------- serving

    async def _serve(self) -> None:
        """Start a verifier and a drafter, and wait. Raises ``JobFailed`` when a needed process ends."""
        plan, cluster = self._plan, self.cluster
        for role, summary in self._trained.items():
            check_whole(role, summary)
        self._report("info", "both models are trained; a verifier and a drafter load them")
        device = plan.profile.device.kind
        for role in (VERIFIER, DRAFTER):
            options = ["--role", role, "--model", self._trained[role]["checkpoint"], "--threads", plan.threads(2)]
            options += ["--device", device] * (device != "auto") + ["--link", plan.link] * bool(plan.link)
            if role == VERIFIER and plan.http is not None:
                options += ["--http", format_address(*plan.http)]
                options += [] if plan.api_keys is None else ["--api-key-file", str(plan.api_keys)]
            await cluster.start_peer(role, 1, *options)
        serving = await cluster.serving({VERIFIER, DRAFTER})
        verifier, drafter = cluster.peers[VERIFIER], cluster.peers[DRAFTER]
        self._http_at = serving[VERIFIER].http
        self._served = True
        if not self.quiet:
            self._tell_serving()
        elif self.view is not None:
            self.view.serves("\n".join(["from another terminal:", *self._ways()]))

        def alone(child: PeerProcess) -> None:
            self._report("warning", f"{child.failed().message}; the verifier continues without it")

        await cluster.while_alive(forever(), needed=[cluster.seed, verifier], others=[drafter], on_end=alone)

    def _tell_serving(self) -> None:
        if self._as_json:
            where = {"state": "serving", "seed": self.cluster.address, "directory": str(self._plan.root)}
            print_json({**where, "http": self._http_at, **self._trained})
            return
        rows = []
        for role in (VERIFIER, DRAFTER):
            summary = self._trained[role]
            loss = f"validation {number(summary['val_loss'])} nats/token"
            rows.append((role, f"job {summary['job']}, {summary['step']} steps, {loss}; {summary['checkpoint']}"))
        print_pairs(rows)
        typer.echo("\nThe models are served. From another terminal:\n")
        for way in [*self._ways(), f"p2ptrain tui {self.cluster.address}"]:
            typer.echo(f"  {way}")
        typer.echo("\nCtrl+C stops everything; the same command serves them again at once.")

    @property
    def _seed_option(self) -> str:
        return f" --seed {self.cluster.address}" * (self.cluster.port != DEFAULT_PORT)

    def _ways(self) -> list[str]:
        ways = [f'p2ptrain generate "def " --stats{self._seed_option}', f"p2ptrain chat{self._seed_option}"]
        if self._http_at:
            keys = self._plan.api_keys
            key = "" if keys is None else f' -H "Authorization: Bearer $(cat {quote(str(keys))})"'
            ways.append(f"curl {self._http_at}/models{key}")
        return ways


async def forever() -> None:
    await asyncio.Event().wait()


# ----------------------------------------------------------------------------------------------- the seed's records


async def unfinished(client: SeedClient, profiles: Collection[Profile], root: Path, *, cancel: bool) -> dict[str, str]:
    """Settings → id of the unfinished job that has them, whatever number of workers it began with. A paused job is
    resumed.

    Args:
        cancel: cancel unfinished jobs with other settings.

    Raises:
        UserError: there is a job with other settings, and ``cancel`` is False.
    """
    found: dict[str, str] = {}
    for job in await client.jobs():
        if job.state in FINISHED_STATES:
            continue
        _, spec = await client.job(job.id)
        matching = [
            profile.to_spec()
            for profile in profiles
            if _has_settings_of(spec, profile) and profile.to_spec() not in found
        ]
        if matching:
            found[matching[0]] = job.id
            if job.state == "paused":
                await client.tell_job(job.id, "resume")
        elif cancel:
            await client.tell_job(job.id, "cancel")
        else:
            raise UserError(
                f"{root} holds an unfinished job {job.name} ({job.id}) of other settings",
                remedy="give the same settings to continue it, --new to cancel it, or another --state",
            )
    return found


async def trained_before(client: SeedClient, profile: Profile) -> Summary | None:
    """Summary of the newest finished job of this profile whose model is still on this machine.

    The number of workers that the job began with does not matter.
    """
    for job in reversed(await client.jobs()):
        if job.state != "done":
            continue
        _, spec = await client.job(job.id)
        newest = await newest_saved(client, job.id) if _has_settings_of(spec, profile) else None
        if newest is not None and newest.stage is None and is_model(newest.path):
            return summed_up(job.id, job, newest)
    return None


def _has_settings_of(spec: str, profile: Profile, **job: int) -> bool:
    """Whether the settings are the same but for the number of workers, and those of ``job``."""
    from configs.schema import Profile

    try:
        found = Profile.from_spec_untrusted(spec)
    except ProtocolError:
        return False  # of another version
    job |= {"workers": profile.job.workers}
    return found.model_copy(update={"job": found.job.model_copy(update=job)}) == profile


def check_whole(role: str, summary: Summary) -> None:
    """Raises ``JobFailed`` if the job left no checkpoint of the whole model."""
    if summary["checkpoint"] is None or not summary["whole"]:
        text = f"the {role}'s job {summary['job']} is done, and left no checkpoint of the whole model"
        raise JobFailed(text, remedy="the workers' logs say why; `p2ptrain checkpoints list` shows what there is")


# ------------------------------------------------------------------------------------------------------- a split model


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Workers that hold a split model. ``spares``: additional workers, which replace workers that die."""

    stages: int
    spares: int
    checkpoint: Path
    memory: str
    dtype: str
    root: Path
    port: int
    link: str
    web: str = ""

    @property
    def workers(self) -> int:
        return self.stages + self.spares

    def options(self) -> list[str]:
        """Options of each worker. Stages compute at once and share the cores; a spare computes only in place of a lost
        stage."""
        memory = ["--memory", self.memory] * bool(self.memory)
        return ["--threads", str(threads_each(self.stages)), *memory, *["--link", self.link] * bool(self.link)]


async def hold(plan: SplitPlan, *, as_json: bool) -> None:
    """Start a seed and workers, load the model, and wait for Ctrl+C. Raises ``P2PTrainError``."""
    from p2ptrain.cli.split import LEAVE_S, conversation_positions, planned, within
    from p2ptrain.cli.text_options import SplitOptions
    from p2ptrain.cluster.stopping import stoppable, unless_stopped

    console, stop = stoppable()
    cluster = LocalCluster(plan.root, plan.port, web=plan.web, shown=True)

    async def work() -> None:
        await cluster.start_seed()
        if cluster.url:
            console.event("info", f"watch in a browser: {cluster.url}")
        await cluster.start_workers(plan.workers, *plan.options())
        console.event("info", cluster.workers_start(plan.workers))
        await cluster.joined(list(cluster.peers))
        workers = list(cluster.peers.values())
        options = SplitOptions(plan.stages, plan.dtype)
        found = planned(options, plan.checkpoint, "", cluster.address, conversation_positions, console)
        async with found as loading:
            chain = await cluster.while_alive(loading.load(), needed=[cluster.seed, *workers])
            try:
                _tell_held(loading, chain, plan, cluster, as_json=as_json)
                await cluster.while_alive(
                    forever(),
                    needed=[cluster.seed],
                    others=workers,
                    least=1,
                    on_end=lambda child: console.event("warning", child.failed().message),
                )
            finally:
                await within(LEAVE_S, chain.close())

    try:
        await unless_stopped(stop, work())
    finally:
        console.finish()
        await cluster.end()


def _tell_held(
    loaded: PlannedSplit, chain: StageChain, plan: SplitPlan, cluster: LocalCluster, *, as_json: bool
) -> None:
    from p2ptrain.cli.placement import placement_map, print_prediction
    from p2ptrain.cli.split import print_split_facts, split_facts

    placement, facts = chain.plan.placement, split_facts(chain)
    seed_at = cluster.address
    if as_json:
        where = {"seed": seed_at, "state": str(plan.root), "checkpoint": loaded.label}
        print_json({**where, "workers": plan.workers, "split": facts, "plan": placement_map(placement)})
        return
    print_split_facts(facts)
    print_prediction(placement)
    options = f"--split {plan.stages} -c {loaded.label}" + f" --dtype {plan.dtype}" * bool(plan.dtype)
    options += f" --seed {seed_at}" * (cluster.port != DEFAULT_PORT)
    typer.echo("\nThe model is loaded and stays loaded. From another terminal:\n")
    typer.echo(f'  p2ptrain generate "Once upon a time" {options}')
    typer.echo(f"  p2ptrain chat {options}")
    typer.echo(f"  p2ptrain tui {seed_at}\n\nCtrl+C stops everything.")


# ------------------------------------------------------------------------------------------------ the full-screen view


class FullScreenView:
    """The full-screen view of the seed at this port."""

    def __init__(self, port: int) -> None:
        from tui.app import P2PTrainApp
        from tui.source import SeedSource

        self.app = P2PTrainApp(SeedSource(partial(operator, (LOOPBACK, port)), f"{LOOPBACK}:{port}"))

    async def show(self, work: asyncio.Task[Any]) -> bool:
        """Show the view until the user leaves it. Returns whether that was by Ctrl+C. The view reports the end of
        ``work``."""
        work.add_done_callback(self._over)
        try:
            return bool(await self.app.run_async())
        finally:
            work.remove_done_callback(self._over)

    def show_notice(self, level: str, text: str) -> None:
        if level != "info":
            self.app.tell(level, "Trouble", text)

    def serves(self, text: str) -> None:
        """Show that the models are served, and how to use them."""
        from tui.app import SERVING

        self.app.go_to(SERVING)
        self.app.tell("info", "The models are served", text)

    def _over(self, work: asyncio.Task[Any]) -> None:
        if work.cancelled():
            return
        leaves = "q closes the view and stops what was started here"
        problem = work.exception()
        if problem is None:
            self.app.tell("info", "The run has ended", leaves)
        elif isinstance(problem, P2PTrainError):
            remedy = f"\n{problem.remedy}" if problem.remedy else ""
            self.app.tell("error", "The run has failed", f"{problem.message}{remedy}\n{leaves}")
        else:
            self.app.tell("error", "The run has failed", f"{type(problem).__name__}: {problem}\n{leaves}")
