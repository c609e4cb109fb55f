"""The seed's shell: it admits peers, handles their messages, detects losses, assigns jobs and shows the state.

The seed dials a peer back before it admits it. Neighbours could hardly reach a peer that the seed cannot reach. Such a
peer is refused at once, with a remedy, instead of breaking a ring later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from configs.schema import Profile
from p2ptrain import __version__
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.ids import new_id
from p2ptrain.core.world import World
from ring import coordination as co
from ring.detector import FailureDetector, beat_defaults
from ring.view import TERM_BITS, View
from roles.background import started_in
from roles.seed.authority import Authority
from roles.seed.checkpoints import Catalogue
from roles.seed.enrolment import EnrolmentPolicy
from roles.seed.events import EventLog, Map, Subscription, Subscriptions
from roles.seed.jobs import History, JobController, history
from roles.seed.links import Survey
from roles.seed.operator_api import OperatorApi
from roles.seed.peers import (
    NAME_CHARS,
    Link,
    check_hello,
    check_step,
    checked_report,
    checkpoint_id,
    clipped,
    say,
    say_last,
)
from roles.seed.serving import ASKED_BY, Services, infos_of, part_infos
from roles.seed.store import TERM_FACT, JobRecord, Records, Store
from wire.address import format_address, how_to_open, is_loopback, to_dial
from wire.chain_messages import PartsHeld
from wire.connection import Connection, last_word
from wire.enrol import RENEW
from wire.handshake import PERMITTED, dial, local_hello, local_welcome
from wire.job_messages import LEAVE, CheckpointSaved, LedgerRows, Release, Report, StepMetrics, ViewAnnounced
from wire.messages import (
    EventNotice,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leave,
    Message,
    RefusalCode,
    Refuse,
    Request,
    Response,
    Welcome,
)
from wire.records import ClusterInfo, JobInfo, PeerInfo
from wire.text_messages import Serving
from wire.transport import is_out_of_files


async def cluster_id(store: Store) -> str:
    """The seed's peer id, which also identifies the cluster. It is made once. Raises ``StorageError``."""
    return await store.call(Records.fact, "cluster-id", new_id)


MAX_PEERS = 1024
DIAL_BACK_S = 10.0
"""For a peer that the seed dials back. It may be loading torch on a slow machine."""
MAX_OPERATORS = 64
GROUP_DEATH_S = 10.0


class Acceptor:
    """Answers every ``Hello`` with a welcome or a refusal. ``Seed`` serves the admitted peers.

    Attributes:
        host: the address on which the seed listens.
        measured: round trip in ms to each admitted peer, until ``Seed`` serves it.
    """

    def __init__(self, seed: Seed) -> None:
        self.closed = False
        self.host = "127.0.0.1"
        self.measured: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        self.operators: dict[Connection, str] = {}  # with their software
        self._foreign_jobs: set[str] = set()  # of which people were told
        self._seed = seed

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if self.closed:
            return Refuse(RefusalCode.SHUTTING_DOWN, "the seed is stopping", "try again when it is back")
        self._seed.gate.judge(connection)
        if hello.cluster == self._seed.cluster_id and hello.term > self._seed.term:
            text = "a seed that was restored from a backup has replaced this one"
            return Refuse(RefusalCode.STALE_TERM, text, "stop this seed, and use the restored one")
        match hello.purpose:
            case "peer":
                return await self._decide_peer(hello, connection)
            case "probe" if hello.port:  # `check` asks whether this seed can reach it
                return await self._decide_peer(hello, connection)
            case "operator" if len(self.operators) >= MAX_OPERATORS:
                return Refuse(RefusalCode.FULL, f"{MAX_OPERATORS} operators are connected", "close one of them")
            case "operator" | "probe":
                return self._welcome(0.0, 0.0)
            case "enrol" if self._seed.gate.encrypted:
                return self._welcome(0.0, 0.0)
        text = f"this is a seed: it accepts no connection for {hello.purpose[:40]!r}"
        return Refuse(RefusalCode.ROLE, text, "dial the member itself")

    async def _decide_peer(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        check_hello(hello)
        if hello.purpose == "peer" and (len(hello.roles) != 1 or hello.roles[0] not in PERMITTED["peer"]):
            text = "a peer must have one role: worker, verifier or drafter"
            return Refuse(RefusalCode.ROLE, text, "set the role with p2ptrain join --role")
        if hello.job and hello.cluster not in ("", self._seed.cluster_id):
            return self._refuse_foreign(hello)
        host = hello.host or connection.ends.remote[0]
        old = self._seed.links.get(hello.peer_id)
        if old is not None and not self._is_replaced(old, host, hello.port):
            text = f"a {old.role} with this id ({hello.peer_id}) is already here, as {old.name} at {old.host}"
            return Refuse(RefusalCode.DUPLICATE_PEER, text, "stop the other one, or give this one its own --state")
        listens = hello.capabilities.get("listens")
        if isinstance(listens, str) and is_loopback(listens) and not is_loopback(self.host):
            text = "this peer listens on the loopback only, so members on other machines cannot reach it"
            return Refuse(RefusalCode.LOOPBACK_ONLY, text, "join with --host 0.0.0.0")
        if len(self._seed.links) >= MAX_PEERS:
            return Refuse(RefusalCode.FULL, f"{MAX_PEERS} peers are connected, the limit", "start another seed")
        began = self._seed.world.clock.now()
        try:
            await self.dial_back(host, hello.port, hello.peer_id)
        except P2PTrainError as problem:
            return self._refuse_unreached(problem, hello.port)
        rtt_ms = (self._seed.world.clock.now() - began) / 2 * 1e3  # TCP's handshake is one round trip, ours another
        if (least_s := connection.least_rtt_s) is not None:
            rtt_ms = min(rtt_ms, least_s * 1e3)  # the kernel answers in time, even while the worker loads libraries
        self.measured[connection] = rtt_ms
        return self._welcome(*beat_defaults(rtt_ms))

    def _refuse_foreign(self, hello: Hello) -> Refuse:
        """Refuse a worker that holds a job of another cluster: here the job would be over, and the worker drop it."""
        name, job = hello.name[:NAME_CHARS], hello.job[:64]
        text = f"{name} works on job {job} of cluster {hello.cluster[:64]}, whose records are not here"
        remedy = "restore them (p2ptrain seed --restore DIR), or stop the worker and join again, which gives the job up"
        if job not in self._foreign_jobs and len(self._foreign_jobs) < MAX_PEERS:
            self._foreign_jobs.add(job)
            self._seed.alarm("foreign-job", clipped(f"{text}. The worker is refused, and trains on: {remedy}"))
        return Refuse(RefusalCode.UNKNOWN_JOB, text, remedy)

    def _is_replaced(self, old: Link, host: str, port: int) -> bool:
        silent_s = self._seed.world.clock.now() - old.connection.last_heard
        closed = old.connection.closed.is_set() or old.connection.close_cause is not None
        return closed or silent_s > 2 * old.detector.heartbeat_s or (old.host, old.port) == (host, port)

    @staticmethod
    def _refuse_unreached(problem: P2PTrainError, port: int) -> Refuse:
        """The answer to a peer that was not reached back: it may try again if it, or this seed, is only busy."""
        slow = isinstance(problem, Refused) and problem.code in (RefusalCode.BUSY, RefusalCode.TOO_SLOW)
        if slow or isinstance(problem, DeadlineExceeded) or is_out_of_files(problem.__cause__):
            text = f"the seed dialled this machine back: {problem.message}"
            return Refuse(RefusalCode.TOO_SLOW, text, problem.remedy)
        text = f"the seed cannot reach this machine back: {problem.message}"
        return Refuse(RefusalCode.UNREACHABLE, text, how_to_open(port))

    async def dial_back(self, host: str, port: int, peer_id: str) -> None:
        """Check that a peer can be reached. Raises ``P2PTrainError`` if it cannot."""
        cluster_id = self._seed.cluster_id
        hello = local_hello(
            peer_id=cluster_id,
            name=self._seed.name,
            roles=["seed"],
            purpose="probe",
            cluster=cluster_id,
            term=self._seed.term,
        )
        network = self._seed.world.network
        connection, _ = await dial(network, host, port, hello, timeout_s=DIAL_BACK_S, expect_peer=peer_id)
        await connection.close()

    def _welcome(self, heartbeat_s: float, death_s: float) -> Welcome:
        return local_welcome(
            peer_id=self._seed.cluster_id,
            name=self._seed.name,
            wall=self._seed.world.clock.wall(),
            cluster_id=self._seed.cluster_id,
            heartbeat_s=heartbeat_s,
            death_s=death_s,
            term=self._seed.term,
        )


class Seed:
    """The seed's state and tasks. Created by ``open``; ``run_seed`` runs it."""

    def __init__(
        self,
        world: World,
        store: Store,
        cluster_id: str,
        name: str,
        authority: Authority | None,
        ticket_host: str,
        term: int,
    ) -> None:
        self.world = world
        self.store = store
        self.subscriptions = Subscriptions(self.render)
        self.links: dict[str, Link] = {}
        self.controllers: dict[str, JobController] = {}  # oldest first
        self.checkpoints = Catalogue(self)
        self.event_log = EventLog(world.clock, store, self.subscriptions)
        self.note = self.event_log.note
        self.cluster_id, self.name, self.term = cluster_id, name, term
        self._started_at = world.clock.wall()
        self._address = ""
        self._lost: dict[str, Link] = {}
        self.tasks: asyncio.TaskGroup | None = None
        self.gate = EnrolmentPolicy(authority, world.clock, ticket_host, self.note)
        self.acceptor = Acceptor(self)
        self.operator_api = OperatorApi(self)
        self.services = Services(self.links, self._served)
        self.survey = Survey(world.clock, self.links, self._measured_links)
        self.minted_below = term << TERM_BITS  # generations up to this one may be of an earlier term
        self.copy_soon: Callable[[], None] = lambda: None  # asks for a backup
        self.on_alarm: Callable[[str], None] = lambda text: None
        self.check_trackers: Callable[[Profile], None] = lambda profile: None  # of a new job; raises ``Refused``

    @classmethod
    async def open(
        cls, world: World, store: Store, *, name: str, authority: Authority | None, ticket_host: str
    ) -> Seed:
        """Create a seed from its store. ``authority``: None on a plain seed. Raises ``StorageError``."""
        term = int(await store.call(Records.known_fact, TERM_FACT) or 0)
        seed = cls(world, store, await cluster_id(store), name[:NAME_CHARS], authority, ticket_host, term)
        await seed.event_log.load()
        for record, spec in await store.call(Records.jobs):
            known = await store.call(history, record.id)
            seed.controllers[record.id] = JobController(seed, record, spec, known)
        await seed.checkpoints.load()
        return seed

    def start(self, tasks: asyncio.TaskGroup, address: tuple[str, int]) -> None:
        self.tasks = tasks
        self.survey.start(tasks)
        self._address, self.acceptor.host = self.address_to_dial(address), address[0]
        for controller in self.controllers.values():
            tasks.create_task(controller.run(), name=f"job {controller.id}")
        tasks.create_task(self.store.run(), name="store")
        tasks.create_task(self._age(), name="ages")

    def address_to_dial(self, address: tuple[str, int]) -> str:
        """The address for other machines of a seed that listens on ``address``."""
        return format_address(to_dial(address[0], self.gate.host), address[1])

    def stop(self) -> None:
        """Tell all connected peers and operators that the seed stops. Workers train on and look for it again."""
        self.acceptor.closed = True
        last_word = Refuse(RefusalCode.SHUTTING_DOWN, "the seed is stopping", "training continues; restart the seed")
        for connection in [link.connection for link in self.links.values()] + list(self.acceptor.operators):
            if not connection.closed.is_set() and connection.close_cause is None:
                say(connection, last_word)
        self.subscriptions.end(ConnectionLost("the seed is stopping", remedy="connect again when it is back"))

    # ------------------------------------------------------------------------------------------------------ connections

    def alarm(self, kind: str, text: str) -> None:
        """Note an error, and tell the person at this machine."""
        self.note("error", kind, text, "", "")
        self.on_alarm(text)

    async def serve(self, connection: Connection, hello: Hello) -> None:
        if hello.purpose == "peer":
            await self._serve_peer(connection, hello)
        elif hello.purpose == "enrol":
            await self.gate.enrol(connection, hello)
        elif hello.purpose == "operator":
            self.acceptor.operators[connection] = hello.software[:64]
            try:
                await self.operator_api.serve(connection)
            except P2PTrainError as problem:
                say_last(connection, problem)
                raise
            finally:
                self.acceptor.operators.pop(connection, None)

    # ------------------------------------------------------------------------------------------------------------ peers

    async def _serve_peer(self, connection: Connection, hello: Hello) -> None:
        rtt_ms = self.acceptor.measured.pop(connection)
        host = hello.host or connection.ends.remote[0]
        clock, (heartbeat_s, death_s) = self.world.clock, beat_defaults(rtt_ms)
        detector = FailureDetector(heartbeat_s=heartbeat_s, death_s=death_s, late_s=death_s)
        link = Link(connection, hello, host, hello.port, rtt_ms, clock.wall(), detector)
        if link.group:  # a script's Python code may hold the interpreter, and with it the heartbeats, for seconds
            detector.death_s = max(death_s, GROUP_DEATH_S)
        old = self.links.get(link.id)
        if old is not None:
            old.connection.abort()
            self._gone(old, co.PeerLost(link.id, "it connected again"))
        self._lost.pop(link.id, None)
        self.links[link.id] = link
        what = "joined" if link.trains else f"joined as a {link.role}"
        self.note("info", "joined", f"{link.name} {what} from {format_address(link.host, link.port)}", link.id, "")
        self.subscriptions.touch("cluster", "")
        farewell: co.PeerLost = co.PeerLost(link.id, "the seed closed its connection")
        try:
            self.services.joined(link)
            if link.trains:
                self._take_back(link)
            farewell = await self._listen(link)
        except P2PTrainError as problem:
            farewell = co.PeerLost(link.id, problem.message)
            say_last(connection, problem)
            raise
        finally:
            if not self.acceptor.closed and self.links.get(link.id) is link:
                self._gone(link, farewell)

    def _take_back(self, link: Link) -> None:
        controller = self.controllers.get(link.hello.job)
        stages = link.hello.capabilities.get("stages", controller.stages if controller else 1)
        if controller is not None and controller.live and stages == controller.stages:
            link.job = controller.id
            controller.post(co.PeerReturned(controller.peer(link), link.hello.generation))
            controller.told_view.set()
        elif link.hello.job:
            link.last_job = link.hello.job
            why = "the job is over" if controller is None or not controller.live else "the job has other parts now"
            link.say(Release(link.hello.job[:64], why))
        self.assign_free()

    async def _listen(self, link: Link) -> co.PeerLost:
        while True:
            received = await link.receive()
            if isinstance(received.message, Leave):
                return co.PeerLost(link.id, clipped(received.message.reason), left=True)
            await self._heard(link, received.message)

    async def _heard(self, link: Link, message: Message) -> None:
        match message:
            case Heartbeat():
                controller = self.controllers.get(link.job)
                if link.beaten(message) and controller is not None and controller.stages > 1:
                    controller.post(co.PeerTold(controller.peer(link)))
                link.connection.send(HeartbeatAck(message.seq))
                self.subscriptions.touch("peers", link.id)
            case EventNotice():
                job = message.job if message.job in self.controllers else ""
                self.note(
                    message.level, message.kind, f"{link.name}: {message.text}", link.id, job, age_s=message.age_s
                )
                if self.store.crowded:
                    await self.store.flush()
            case Response():
                link.calls.answered(message)
            case Request() if message.method == LEAVE and link.trains:
                link.leaves = True
                stay = [other.id for other in self.links.values() if other.job == link.job and not other.leaves]
                controller = self.controllers.get(link.job)
                is_last = controller is not None and controller.core.is_last_holder(link.id, stay)
                link.say(Response(message.id, {"last": is_last}))
            case Request() if message.method not in ASKED_BY.get(link.role, {RENEW}):
                text = f"a {link.role} may not ask for {clipped(message.method, 80)!r}"
                link.say(Response(message.id, {}, "unknown-method", text))
            case Request():
                link.say(await self.operator_api.answer(message, link.connection))
            case Serving() if link.role in ("verifier", "drafter"):
                self.services.told(link, message)
            case _ if link.trains:
                await self._heard_of_work(link, message)
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from a {link.role}")

    async def _heard_of_work(self, link: Link, message: Message) -> None:
        """Handle a worker's message. While a restored seed does not know the job's newest view, messages are queued;
        views are taken in at once."""
        controller = self.controllers.get(link.job)
        early = controller is not None and (link.early or not controller.settled.is_set())
        if controller is None or not early or isinstance(message, PartsHeld):
            await self._heard_of_job(link, controller, message)
        elif isinstance(message, ViewAnnounced):
            controller.view_told(link.id, View.of(message))
        elif isinstance(message, LedgerRows) and controller.keeps_early(message):
            pass  # its sender may be gone when the job is settled
        else:
            if len(link.early) >= 4096:
                await controller.settled.wait()
            link.early.append(message)

    def settled(self, controller: JobController) -> None:
        assert self.tasks is not None
        for link in self.links.values():
            if link.job == controller.id:
                started_in(self.tasks, self._catch_up(link), "what was said early")
        self.assign_free()

    async def _catch_up(self, link: Link) -> None:
        try:
            while link.early and self.links.get(link.id) is link:
                await self._heard_of_job(link, self.controllers.get(link.job), link.early[0])
                link.early.popleft()
        except P2PTrainError as problem:
            link.early.clear()
            say_last(link.connection, problem)
            link.connection.abort(problem)

    async def _heard_of_job(self, link: Link, controller: JobController | None, message: Message) -> None:
        match message:
            case Report() if controller is not None and message.job == controller.id:
                await self._reported(link, controller, checked_report(message, controller.record.steps_total))
            case StepMetrics() if (trained := self._trained_by(link, message.job)) is not None:
                check_step(message, trained.record.steps_total)
                await trained.committed(message)
            case LedgerRows() if (trained := self._trained_by(link, message.job)) is not None:
                trained.told_rows(message)
                if self.store.crowded:
                    await self.store.flush()
            case CheckpointSaved() if message.job in self.controllers:
                check_step(message, self.controllers[message.job].record.steps_total)
                await self.checkpoints.saved(link, message)
            case PartsHeld():
                before, link.parts = link.parts, infos_of(link.id, link.name, message)
                both = {**before, **link.parts}
                changed = [part for part in both if before.get(part) != link.parts.get(part)]
                self.subscriptions.touch("parts", *changed)
            case Report() | StepMetrics() | CheckpointSaved() | LedgerRows() | ViewAnnounced():
                pass  # about a job that the worker is no longer on
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from a worker")

    def _served(self, *peer_ids: str) -> None:
        self.subscriptions.touch("serving", *peer_ids)
        self.subscriptions.touch("peers", *peer_ids)

    def drop_unwelcome(self) -> None:
        """Close the connections whose certificate is no longer honoured."""
        asyncio.get_running_loop().call_soon(self._drop_unwelcome)  # after the current answer is sent

    def _drop_unwelcome(self) -> None:
        for link in list(self.links.values()):
            if problem := self._unwelcome(link.connection):
                self._gone(link, co.PeerLost(link.id, problem.message, left=True), end="evicted")
        for connection in list(self.acceptor.operators):
            self._unwelcome(connection)

    def _unwelcome(self, connection: Connection) -> Refused | None:
        try:
            self.gate.judge(connection)
        except Refused as problem:
            say(connection, last_word(problem.code, problem))
            assert self.tasks is not None
            started_in(self.tasks, connection.close(), "let go")
            return problem
        return None

    async def _reported(self, link: Link, controller: JobController, report: Report) -> None:
        event = co.PeerReported(link.id, report)
        link.rows = range(report.first_row, report.applied + 1)
        if report.status == "following":
            link.fetched = report
            self.subscriptions.touch("peers", link.id)
        await controller.told_windows(report.windows)
        if report.status == "ready":
            await self.checkpoints.loaded(link, controller, report.applied)

        def let_in() -> None:
            if self.links.get(link.id) is link and link.job == controller.id:
                controller.post(event)

        self.survey.drop(link.id)
        if report.status != "ready" or not self.survey.before(link, controller.core.peer_ids, let_in):
            await controller.post(event)

    def _measured_links(self, peer_ids: Collection[str]) -> None:
        self.subscriptions.touch("peers", *peer_ids)
        self.subscriptions.touch(
            "jobs", *{self.links[peer_id].job for peer_id in peer_ids if peer_id in self.links} - {""}
        )

    def _trained_by(self, link: Link, job: str) -> JobController | None:
        """The job, if it is the worker's present or last one. Reports kept while the link was down arrive late."""
        return self.controllers.get(job) if job and job in (link.job, link.last_job) else None

    def _gone(self, link: Link, event: co.PeerLost, end: str = "") -> None:
        now = self.world.clock.now()
        verb, level = ("left", "info") if event.left else ("is lost", "warning")
        self.note(level, verb.split()[-1], f"{link.name} {verb}: {event.reason}", link.id, link.job)
        del self.links[link.id]
        self.survey.drop(link.id)
        self.subscriptions.touch("parts", *link.parts)
        self.services.gone(link)
        link.lost(now, end or verb.split()[-1])
        self._lost[link.id] = link
        for other in self.controllers.values():  # a job that released the worker for cause may take it when it returns
            if other.live:
                other.post(event)
        self.subscriptions.touch("peers", link.id)
        self.subscriptions.touch("cluster", "")

    def assign_free(self) -> None:
        """Give free workers to the oldest job that wants them. If a job still lacks some, paused jobs yield theirs."""
        for link in self.links.values():
            if link.job or not link.trains:
                continue
            controller = next(
                (
                    controller
                    for controller in self.controllers.values()
                    if controller.settled.is_set() and not controller.core.refusal(link.id)
                ),
                None,
            )
            if controller is None:
                self._tell_idle(link)
            else:
                link.job, link.idle = controller.id, ""
                controller.post(co.PeerOffered(controller.peer(link)))
                self.subscriptions.touch("peers", link.id)
        waiting = [
            controller for controller in self.controllers.values() if controller.core.phase is co.JobPhase.WAITING
        ]
        if any(controller.core.short for controller in waiting):
            for controller in self.controllers.values():
                if self.may_yield(controller):
                    controller.post(co.Signal.YIELD)
        self.subscriptions.touch("jobs", *(controller.id for controller in waiting))

    def _tell_idle(self, link: Link) -> None:
        jobs = [item for item in self.controllers.values() if item.live]
        reasons = (f"job {item.record.name} {item.core.refusal(link.id) or 'is being restored'}" for item in jobs)
        idle = clipped("idle: " + ("; ".join(reasons) or "`p2ptrain jobs create` starts a job"))
        if idle != link.idle:
            link.idle = idle
            link.say(EventNotice("info", "kept-out", idle, ""))

    def may_yield(self, controller: JobController) -> bool:
        """Whether a paused job can release its workers, because its state is in a checkpoint on their disks."""
        if not controller.settled.is_set():
            return False
        survivors = controller.core.paused_survivors()
        if not survivors:
            return survivors is not None
        step = max(report.applied for report in survivors.values())
        at_step = [peer_id for peer_id, report in survivors.items() if report.applied == step]
        return controller.whole(
            peer_id
            for peer_id in at_step
            if checkpoint_id(controller.id, step, peer_id, controller.stage_of(peer_id)) in self.checkpoints.known
        )

    # ------------------------------------------------------------------------------------------------------------- jobs

    async def create_job(self, record: JobRecord, spec: str) -> None:
        """Add a job. It starts when enough workers are ready. Raises ``StorageError``."""
        await self.store.call(Records.add_job, record, spec)
        controller = self.controllers[record.id] = JobController(self, record, spec, History())
        assert self.tasks is not None
        started_in(self.tasks, controller.run(), f"job {controller.id}")
        self.copy_soon()
        self.note("info", "job-created", f"job {record.name} ({record.id}) was created", "", record.id)
        self.subscriptions.touch("jobs", record.id)
        self.subscriptions.touch("cluster", "")
        self.assign_free()

    async def forget_job(self, controller: JobController) -> None:
        """Remove an ended job and its records. Its checkpoints stay on the workers' disks."""
        controller.retire()
        del self.controllers[controller.id]
        self.checkpoints.forget(controller.id)
        self.subscriptions.touch("jobs", controller.id)
        self.subscriptions.touch("cluster", "")
        await self.store.call(Records.forget_job, controller.id)

    # -------------------------------------------------------------------------------------------------- what people see

    def cluster_info(self) -> ClusterInfo:
        return ClusterInfo(
            self.cluster_id,
            self.name,
            __version__,
            self._address,
            self._started_at,
            len(self.links),
            len(self.controllers),
        )

    def job_infos(self) -> list[JobInfo]:
        return [controller.info() for controller in self.controllers.values()]

    def peer_infos(self) -> list[PeerInfo]:
        now = self.world.clock.now()
        return [self._peer_info(link, now) for link in [*self.links.values(), *self._lost.values()]]

    def _peer_info(self, link: Link, now: float) -> PeerInfo:
        controller = self.controllers.get(link.job)
        if controller is None and link.lost_at is not None:
            controller = next((item for item in self.controllers.values() if item.holds(link.id)), None)
        view = controller.running_view if controller else None
        rank = view.rank_of(link.id) if view else None
        edge = controller.edge_from(view, rank) if controller and view and rank is not None else None
        shares = controller.shares(view) if controller and view else ()
        stage = (controller.stage_of(link.id), controller.stages) if controller else (None, 1)
        job_state = controller.core.state if controller else ""
        return link.info(now, view, edge, shares, *stage, job_state=job_state)

    @contextmanager
    def watching(self) -> Iterator[Subscription]:
        """A subscription to all records of state, and to all changes within the block."""
        with self.subscriptions.open() as feed:
            feed.touch("cluster", [""])
            feed.touch("peers", [info.id for info in self.peer_infos()])
            feed.touch("jobs", self.controllers)
            feed.touch("checkpoints", self.checkpoints.known)
            feed.touch("parts", [part.id for part in part_infos(self.links.values())])
            feed.touch("serving", [info.id for info in self.services.infos()])
            yield feed

    def render(self, topic: str, item_id: str) -> Map | None:
        if topic == "cluster":
            return self.cluster_info().to_map()
        if topic == "peers":
            link = self.links.get(item_id) or self._lost.get(item_id)
            return self._peer_info(link, self.world.clock.now()).to_map() if link else None
        if topic == "jobs":
            controller = self.controllers.get(item_id)
            return controller.info().to_map() if controller else None
        holder = self.links.get(item_id.partition("/")[0])  # a part's id begins with that of its worker
        if topic == "parts":
            return holder.parts[item_id].to_map() if holder and item_id in holder.parts else None
        if topic == "serving":
            return holder.serving.to_map() if holder and holder.serving else None
        kept = self.checkpoints.known.get(item_id)
        return kept.to_map() if kept else None

    async def _age(self) -> None:
        """Once a second, update the ages that people see, and remove peers lost more than a minute ago."""
        while True:
            await asyncio.sleep(1.0)
            now = self.world.clock.now()
            for link in [link for link in self._lost.values() if now - (link.lost_at or 0.0) > 60.0]:
                del self._lost[link.id]
                self.subscriptions.touch("peers", link.id)
            self.subscriptions.touch("peers", *self.links)
