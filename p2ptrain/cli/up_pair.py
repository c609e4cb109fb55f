"""``p2ptrain up`` with a profile that names a drafter: the same workers train two models, one after the other; then a
verifier and a drafter serve them until Ctrl+C.

The drafter's job is the first one: it is short, so that within a minute a person sees that all is well. Each start
looks up what there is of both in the seed's record, and does the rest.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.cli.children import Child, end_all
from p2ptrain.cli.output import number, print_json, print_pairs
from p2ptrain.cli.runtime import DEFAULT_PORT, operator_name
from p2ptrain.cli.up import Plan, start_seed, start_worker, workers_start
from p2ptrain.cli.up_jobs import Watcher, job_for, newest_saved, summed_up, unfinished
from p2ptrain.cli.up_view import View
from p2ptrain.core.errors import ConnectionLost, JobFailed, ProtocolError, UserError
from wire.records import FINISHED_STATES
from wire.transport_base import format_address

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.console import Console
    from wire.client import SeedClient

DRAFTER, VERIFIER = "drafter", "verifier"
SERVE_S = 120.0
"""Until both serve: they import torch first, on few cores one after the other."""


@dataclass(frozen=True, slots=True)
class Model:
    """One of the two. ``job``: what its job is called."""

    role: str
    job: str
    profile: Profile


def models_of(plan: Plan) -> list[Model]:
    """In the order in which they are trained."""
    name = Path(plan.profile_name).stem
    return [
        Model(DRAFTER, f"{name}-drafter", plan.profile.of_drafter()),
        Model(VERIFIER, name, plan.profile.alone()),
    ]


@dataclass(frozen=True, slots=True)
class HttpWish:
    """Where programs shall be answered. ``key_file``: absolute; None: without a key."""

    host: str
    port: int
    key_file: Path | None

    async def check(self) -> None:
        """Raise ``UserError`` where the verifier could not listen there: it would be known after the training."""
        from roles.verifier.http import check_place

        await check_place(self.host, self.port, self.key_file)

    def options(self) -> list[str]:
        """Of ``join``."""
        key = [] if self.key_file is None else ["--api-key-file", str(self.key_file)]
        return ["--http", format_address(self.host, self.port), *key]

    def example(self, address: str) -> str:
        """What asks for the model that answers at ``address``."""
        if self.key_file is None:
            return f"curl {address}/models"
        return f'curl {address}/models -H "Authorization: Bearer $(cat {quote(str(self.key_file))})"'


def http_wish(http: str, key_file: Path | None, profile: Profile) -> HttpWish | None:
    """What ``up --http`` asks for. Raises ``UserError`` where nobody would answer, or it names no place."""
    from p2ptrain.cli.join import host_and_port

    if not http:
        if key_file is not None:
            raise UserError("--api-key-file is for an HTTP endpoint", remedy="add --http HOST:PORT, or leave it out")
        return None
    if not profile.drafter.layers:
        remedy = "choose a profile with a [drafter], such as pair, or leave it out"
        raise UserError("--http is answered by a verifier, and this profile trains none", remedy=remedy)
    place = host_and_port("--http", http, "such as 127.0.0.1:8000, where programs shall reach it")
    assert place is not None
    return HttpWish(*place, None if key_file is None else key_file.absolute())


async def pair(plan: Plan, http: HttpWish | None, *, full_screen: bool, as_json: bool) -> dict[str, Any] | None:
    """Do what of it is still to be done, and stay until Ctrl+C.

    Args:
        http: where the verifier answers programs; None: nowhere.

    Returns:
        None where both served; else what came of the training of each, by role, and the ``state`` of the whole:
        ``interrupted``, ``failed`` or ``cancelled``.

    Raises:
        P2PTrainError: something could not be started, or a process ended: with its last words.
    """
    from p2ptrain.cli.stopping import LEAVING, stoppable

    if http is not None:
        await http.check()
    console, stop = stoppable()
    cluster = PairCluster(plan, http, console, as_json=as_json)
    try:
        await cluster.begin()
        cluster.quiet = full_screen
        working = asyncio.create_task(cluster.work(), name="pair")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            if full_screen:
                view = View(plan.port)
                cluster.view = view
                if await view.show(working):
                    console.event("info", LEAVING)
                    stop.set()
                else:
                    cluster.aloud()
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.wait({working})
            console.finish()
        return await cluster.outcome()
    finally:
        console.finish()
        await cluster.end()


class PairCluster:
    """The processes on this machine, and how far they are.

    Attributes:
        quiet: a full-screen view has the terminal; what is to be said waits until ``aloud``.
        view: that view; trouble is told there at once, too.
    """

    def __init__(self, plan: Plan, http: HttpWish | None, console: Console, *, as_json: bool) -> None:
        self.quiet = False
        self.view: View | None = None
        self._plan, self._console, self._as_json = plan, console, as_json
        self._http, self._http_at = http, ""
        self._unsaid: list[tuple[str, str]] = []
        self._seed: list[Child] = []
        self._workers: list[Child] = []
        self._servers: list[Child] = []
        self._client: SeedClient | None = None
        self._watcher: Watcher | None = None
        self._jobs: dict[str, str] = {}  # of the models that are still to be trained, by role
        self._trained: dict[str, dict[str, Any]] = {}  # what came of the others' jobs
        self._served = False
        self._began = time.monotonic()

    async def begin(self) -> None:
        """Start the seed, find out what is to be done, and start workers where there is something to train.

        Raises:
            P2PTrainError: see ``pair``; of ``UserError``, the seed has an unfinished job that is none of these.
        """
        plan = self._plan
        self._seed.append(await start_seed(plan))
        self._client = client = await self._connected()
        models = models_of(plan)
        begun = await unfinished(client, [model.profile.to_spec() for model in models], plan.root, cancel=plan.new)
        for model in models:
            done = None
            if model.profile.to_spec() not in begun and not plan.new:
                done = await trained_before(client, model.profile)
            if done is not None:
                self._trained[model.role] = done
                self._say("info", f"the {model.role} is trained: {done['checkpoint']}")
            else:
                job = await job_for(client, model.job, plan.profile_name, model.profile, begun, self._console)
                self._jobs[model.role] = job
        if self._jobs:
            for index in range(1, plan.workers + 1):
                self._workers.append(await start_worker(plan, index))
            self._say("info", workers_start(plan))
            names = {job: role if len(self._jobs) > 1 else "" for role, job in self._jobs.items()}
            self._watcher = Watcher(client, names, [*self._seed, *self._workers], self._console, quiet=False)

    async def work(self) -> None:
        """Train, then serve until a process that is needed ends, which is raised. Returns where a job failed."""
        if self._watcher is not None:
            self._watcher.quiet = self.quiet
            await self._watcher.run()
            self._console.finish()
            await end_all(self._workers)  # they are done, and would keep the cores from those that serve
            for role, summary in (await self._summaries()).items():
                if summary["state"] != "done":
                    return
                self._trained[role] = summary
            self._jobs.clear()
        for role, summary in self._trained.items():
            _check_whole(role, summary)
        await self._serve()
        self._served = True
        if not self.quiet:
            self._tell()
        elif self.view is not None:
            self.view.serves("\n".join(["from another terminal:", *self._ways()]))
        await self._watch()

    def aloud(self) -> None:
        """The view is closed: say what waited, and how it stands."""
        self.quiet = False
        for level, text in self._unsaid:
            self._console.event(level, text)
        self._unsaid.clear()
        if self._served:
            self._tell()
            return
        self._console.event("info", "the view is closed; it goes on here. Ctrl+C stops everything")
        if self._watcher is not None:
            self._watcher.quiet = False

    async def outcome(self) -> dict[str, Any] | None:
        """At the end: see ``pair``. Workers save what they have, and leave."""
        if self._served:
            return None
        await end_all(self._workers)  # before the seed, so that it hears of it
        found = {**self._trained, **(await self._summaries())}
        bad = [item["state"] for item in found.values() if item["state"] in FINISHED_STATES - {"done"}]
        return {"state": bad[0] if bad else "interrupted", **found}

    async def end(self) -> None:
        """End all processes, the seed last."""
        await end_all([*self._servers, *self._workers])
        if self._client is not None:
            await self._client.close()
        await end_all(self._seed)

    def _say(self, level: str, text: str) -> None:
        if self.quiet:
            self._unsaid.append((level, text))
            if self.view is not None:
                self.view.say(level, text)
        else:
            self._console.event(level, text)

    async def _connected(self) -> SeedClient:
        from wire.client import SeedClient
        from wire.transport import TcpNetwork

        return await SeedClient.connect(TcpNetwork(), "127.0.0.1", self._plan.port, name=operator_name())

    async def _summaries(self) -> dict[str, dict[str, Any]]:
        watcher = self._watcher
        if watcher is None:
            return {}
        return {role: await watcher.summary(job, interrupted=True) for role, job in self._jobs.items()}

    # -------------------------------------------------------------------------------------------------------- serving

    async def _serve(self) -> None:
        """Start both, and return when both are ready. Raises ``JobFailed``."""
        self._say("info", "both are trained; a verifier and a drafter load them")
        for role in (VERIFIER, DRAFTER):
            self._servers.append(await self._start(role))
        client = await self._connected()
        try:
            serving = await self._or_ended(_both_serve(client))
            self._http_at = str(serving[VERIFIER].get("http", ""))
        finally:
            await client.close()

    async def _start(self, role: str) -> Child:
        plan, device = self._plan, self._plan.profile.device
        threads = device.threads or max(1, (os.cpu_count() or 1) // 2)  # both compute at the same time
        arguments = ["join", f"127.0.0.1:{plan.port}", "--state", str(plan.root), "--role", role, "--slot", "1"]
        arguments += ["--name", role, "--model", self._trained[role]["checkpoint"], "--threads", str(threads)]
        arguments += ["--device", device.kind] * (device.kind != "auto")
        arguments += ["--link", plan.link] * bool(plan.link)
        arguments += self._http.options() if role == VERIFIER and self._http is not None else []
        return await Child.start(role, arguments, plan.root / "logs" / f"{role}.log")

    async def _or_ended(self, work: Any) -> Any:
        """The result of ``work``. Raises ``JobFailed`` where a process ends before."""
        task = asyncio.ensure_future(work)
        ends = {asyncio.create_task(child.process.wait()): child for child in [*self._servers, *self._seed]}
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if ended := next((child for end, child in ends.items() if end.done()), None):
                raise ended.failed(f"the {ended.name} ended")
            return task.result()
        finally:
            for each in (task, *ends):
                each.cancel()
            await asyncio.wait({task})

    async def _watch(self) -> None:
        """Until the seed or the verifier is gone, which raises ``JobFailed``. Without its drafter it writes alone."""
        verifier, drafter = self._servers
        ends = {asyncio.create_task(child.process.wait()): child for child in (*self._seed, verifier, drafter)}
        try:
            while True:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for child in [ends.pop(end) for end in done]:
                    failure = child.failed(f"the {child.name} ended")
                    if child is not drafter:
                        raise failure
                    self._say("warning", f"{failure.message}; the verifier goes on alone")
        finally:
            for end in ends:
                end.cancel()

    def _tell(self) -> None:
        """What is there now, and how to use it."""
        plan = self._plan
        seed_at = f"127.0.0.1:{plan.port}"
        if self._as_json:
            seconds = round(time.monotonic() - self._began, 1)
            where = {"state": "serving", "seed": seed_at, "directory": str(plan.root), "http": self._http_at}
            print_json({**where, "seconds": seconds, **self._trained})
            return
        print_pairs([(role, _line(self._trained[role])) for role in (VERIFIER, DRAFTER)])
        typer.echo("\nThey serve. From another terminal:\n")
        for way in [*self._ways(), f"p2ptrain tui {seed_at}"]:
            typer.echo(f"  {way}")
        typer.echo("\nCtrl+C stops everything; the same command serves them again at once.")

    def _ways(self) -> list[str]:
        """Commands that ask them."""
        port = self._plan.port
        options = f" --seed 127.0.0.1:{port}" * (port != DEFAULT_PORT)
        ways = [f'p2ptrain generate "def " --stats{options}', f"p2ptrain chat{options}"]
        if self._http is not None and self._http_at:
            ways.append(self._http.example(self._http_at))
        return ways


async def trained_before(client: SeedClient, profile: Profile) -> dict[str, Any] | None:
    """What came of the newest job of such a profile that is done and whose model is still on this machine.

    It does not matter with how many workers it began.
    """
    for item in reversed((await client.request("jobs.list"))["jobs"]):
        if item["state"] != "done":
            continue
        shown = await client.request("jobs.show", {"job": item["id"]})
        if not _alike(shown["spec"], profile):
            continue
        newest = await newest_saved(client, item["id"])
        if newest is not None and newest.get("stage") is None and _is_model(newest["path"]):
            record = shown["job"]
            took_s = (record.get("finished_at") or 0.0) - (record.get("started_at") or 0.0)
            return summed_up(item["id"], record, newest, took_s)
    return None


def _is_model(path: str) -> bool:
    return Path(path, "config.json").is_file()


def _alike(spec: str, profile: Profile) -> bool:
    from configs.schema import Profile

    try:
        found = Profile.from_spec_untrusted(spec)
    except ProtocolError:
        return False  # of another version
    return found.model_copy(update={"job": found.job.model_copy(update={"workers": profile.job.workers})}) == profile


def _check_whole(role: str, summary: dict[str, Any]) -> None:
    """Raises ``JobFailed`` where there is no model to serve."""
    if summary["checkpoint"] is None or not summary["whole"]:
        text = f"the {role}'s job {summary['job']} is done, and left no checkpoint of the whole model"
        raise JobFailed(text, remedy="the workers' logs say why; `p2ptrain checkpoints list` shows what there is")


async def _both_serve(client: SeedClient) -> dict[str, dict[str, Any]]:
    """What a verifier and a drafter serve, once both do, by role. Raises ``JobFailed`` when it takes too long."""
    there: dict[str, dict[str, Any]] = {}
    try:
        async with asyncio.timeout(SERVE_S):
            await client.request("subscribe")
            async for update in client.updates():
                if update.topic == "serving":
                    there |= {str(item["role"]): item for item in update.items}
                if there.keys() >= {VERIFIER, DRAFTER}:
                    return there
            raise ConnectionLost("the seed ended")
    except TimeoutError:
        missing = " and the ".join(sorted({VERIFIER, DRAFTER} - there.keys()))
        text = f"the {missing} did not serve within {SERVE_S:.0f} s"
        raise JobFailed(text, remedy="the logs say what is waited for") from None


def _line(summary: dict[str, Any]) -> str:
    loss = f"validation {number(summary['val_loss'])} nats/token"
    return f"job {summary['job']}, {summary['step']} steps, {loss}; {summary['checkpoint']}"


def print_outcome(outcome: dict[str, Any]) -> None:
    """What came of it where nothing was served, for people."""
    rows = []
    for role in (DRAFTER, VERIFIER):
        if (summary := outcome.get(role)) is not None:
            reason = f": {summary['reason']}" if summary["reason"] else ""
            steps = f"step {summary['step']} of {summary['steps']}"
            rows.append((role, f"{summary['state']}{reason}; {steps}; {summary['checkpoint'] or 'no checkpoint'}"))
    print_pairs([("state", outcome["state"]), *rows])
