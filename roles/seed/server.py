"""The seed's shell: it serves admitted peers, gives their messages to those who handle them, and detects losses.

A message of a worker is for its job's controller, for the catalogue of checkpoints or for the records; requests of
peers are answered as those of operators. A peer is lost if its connection ends, or if it is silent for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from configs.schema import Profile
from p2ptrain.core.background import start_in
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.world import World
from ring import coordination as co
from ring.detector import FailureDetector
from ring.view import View
from roles.circuits import MADE, OPEN
from roles.line import receive_in_time
from roles.seed.admission import Acceptor, EnrolmentPolicy
from roles.seed.authority import Authority
from roles.seed.checkpoints import CheckpointCatalogue
from roles.seed.circuits import CircuitBroker
from roles.seed.events import Announcements
from roles.seed.job_requests import JobRequests
from roles.seed.job_table import JobTable
from roles.seed.jobs import JobController, JobPorts
from roles.seed.links import Survey
from roles.seed.operator_api import ClusterRequests, OperatorApi
from roles.seed.overview import Overview, SeedIdentity
from roles.seed.peers import (
    ASKED_BY,
    EVERY_PEER_ASKS,
    ConnectedPeer,
    PeerTable,
    Services,
    addresses_of,
    check_step,
    clean_report,
    clip,
    part_infos_of,
    seed_beats,
    send_if_open,
)
from roles.seed.pool import Pool
from roles.seed.store import SeedStore
from wire.address import dialable_host, format_address
from wire.chain_messages import PartsHeld
from wire.circuits import CircuitNetwork
from wire.connection import Connection, last_word
from wire.job_messages import (
    LEAVE,
    MAX_SENDERS,
    MEMBERS,
    CheckpointSaved,
    JobMembers,
    LedgerRows,
    Report,
    StepMetrics,
    ViewAnnounced,
)
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
)
from wire.records import EventInfo
from wire.text_messages import Serving

GROUP_DEATH_S = 10.0
GATHER_S = 2.0
"""From the first pair of peers that is found to reach each other directly until their links are measured again. Other
pairs are found meanwhile, and rings form again once for all of them."""
MAX_EARLY_MESSAGES = 4096
"""Messages of a job's workers that wait until it is settled. With more the seed reads nothing from them."""


class Seed:
    """The connections of a seed, and what it consists of. ``serving_seed`` loads and runs it.

    Args:
        authority: None on a plain seed.
        ticket_host: the address of this machine that tickets carry.
        circuits: reaches peers behind routers, and relays the circuits for which there is no other relay, as far as
            its limits permit; None: neither.
        request_backup: asks for a backup of the store soon.
        on_event: called with each new event.
        check_profile: raises ``Refused`` if the seed cannot run a new job with this profile.
        policy: as of ``Pool``.
    """

    def __init__(
        self,
        world: World,
        store: SeedStore,
        identity: SeedIdentity,
        *,
        authority: Authority | None,
        ticket_host: str,
        circuits: CircuitNetwork | None,
        request_backup: Callable[[], None],
        on_event: Callable[[EventInfo], None],
        check_profile: Callable[[Profile], None],
        policy: str,
    ) -> None:
        clock = world.clock
        self.world, self.store = world, store
        self._tasks: asyncio.TaskGroup | None = None
        self.announcements = Announcements(
            clock, store, lambda topic, item_id: self.overview.render(topic, item_id), on_event
        )
        self.peers = PeerTable()
        self.survey = Survey(clock, self.peers.connected)
        relay = circuits if circuits is not None and circuits.limits.circuits else None
        self.circuits = CircuitBroker(world, self.peers, relay, self._on_direct)
        if circuits is not None:
            circuits.request = self.circuits.open_here
        self._direct: set[frozenset[str]] = set()  # pairs whose link is about to be measured again
        self.checkpoints = CheckpointCatalogue(
            store, clock, self.peers, self.announcements, lambda job: self.jobs.post_checkpoints(job)
        )
        ports = JobPorts(
            clock,
            store,
            self.announcements,
            self.peers,
            self.survey,
            self.checkpoints,
            identity.minted_below,
            request_backup,
            assign_workers=lambda: self.pool.assign(),
            take_early_messages=self._take_early_messages,
            new_id=world.new_id,
            probe=world.probe,
        )
        self.jobs = JobTable(ports)
        self.services = Services(self.peers.connected, partial(self.announcements.touch, "serving"))
        self.pool = Pool(ports, self.jobs, self.services, policy)
        self.overview = Overview(identity, ports, self.jobs, self.pool)
        self.gate = EnrolmentPolicy(authority, world, ticket_host, self.announcements.note)
        self.acceptor = Acceptor(identity, world, self.gate, self.peers)
        cluster = ClusterRequests(ports, self.jobs, self.overview, self.pool, self.gate, self._drop_unwelcome)
        jobs = JobRequests(self.jobs, ports, self.acceptor.operators, check_profile)
        methods = {OPEN: self.circuits.open, MADE: self.circuits.made}
        self.operator_api = OperatorApi(cluster.methods() | jobs.methods() | methods, cluster.watch)

    async def load(self) -> None:
        """Read events, jobs and checkpoints from the store. Raises ``StorageError``."""
        await self.announcements.load()
        await self.jobs.load()
        await self.checkpoints.load()

    def start(self, tasks: asyncio.TaskGroup, address: tuple[str, int]) -> None:
        self._tasks = tasks
        self.survey.start(tasks)
        self.overview.address, self.acceptor.host = self.address_to_dial(address), address[0]
        self.jobs.start(tasks)
        tasks.create_task(self.store.run(), name="store")
        tasks.create_task(self.overview.run(), name="ages")
        tasks.create_task(self.pool.run(), name="pool")

    def address_to_dial(self, address: tuple[str, int]) -> str:
        """The address for other machines of a seed that listens on ``address``."""
        return format_address(dialable_host(address[0], self.gate.host), address[1])

    def stop(self) -> None:
        """Tell all connected peers and operators that the seed stops. Workers train on and look for it again."""
        self.acceptor.closed = True
        refusal = Refuse(RefusalCode.SHUTTING_DOWN, "the seed is stopping", "training continues; restart the seed")
        connections = [peer.connection for peer in self.peers.connected.values()]
        for connection in [*connections, *self.acceptor.operators]:
            send_if_open(connection, refusal)
        self.announcements.end(ConnectionLost("the seed is stopping", remedy="connect again when it is back"))

    # ------------------------------------------------------------------------------------------------------ connections

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
                send_if_open(connection, last_word(problem))
                raise
            finally:
                self.acceptor.operators.pop(connection, None)

    async def _serve_peer(self, connection: Connection, hello: Hello) -> None:
        host, rtt_ms, unreached = self.acceptor.reached.pop(connection)
        clock, (heartbeat_s, death_s) = self.world.clock, seed_beats(rtt_ms, len(self.peers.connected))
        detector = FailureDetector(heartbeat_s=heartbeat_s, death_s=death_s, late_s=death_s)
        peer = ConnectedPeer(connection, hello, host, hello.port, rtt_ms, clock.wall(), detector)
        if peer.group:  # a script's Python code may hold the interpreter, and with it the heartbeats, for seconds
            detector.death_s = max(death_s, GROUP_DEATH_S)
        before = self.peers.connected.get(peer.id)
        if before is not None:
            before.connection.abort()
            self._lose(before, co.PeerLost(peer.id, "it connected again"))
        self.peers.add(peer)
        what = "joined" if peer.trains else f"joined as a {peer.role}"
        where = f"behind a router at {peer.origin}: {unreached}" if unreached else format_address(peer.host, peer.port)
        text = f"{peer.name} {what} from {where}"
        self.announcements.note("info", "joined", text, peer.id)
        self.announcements.touch("cluster", "")
        end = co.PeerLost(peer.id, "the seed closed its connection")
        try:
            self.services.send_drafters([peer])
            if peer.trains:
                self.jobs.return_worker(peer)
            end = await self._receive(peer)
        except P2PTrainError as problem:
            end = co.PeerLost(peer.id, problem.message)
            send_if_open(connection, last_word(problem))
            raise
        finally:
            if not self.acceptor.closed and self.peers.is_current(peer):
                self._lose(peer, end)

    def _lose(self, peer: ConnectedPeer, event: co.PeerLost, end: str = "") -> None:
        verb, level = ("left", "info") if event.left else ("is lost", "warning")
        kind = verb.split()[-1]
        self.announcements.note(level, kind, f"{peer.name} {verb}: {event.reason}", peer.id, peer.job)
        self.survey.drop(peer.id)
        self.circuits.forget(peer.id)
        self.announcements.touch("parts", *peer.parts)
        self.peers.remove(peer, self.world.clock.now(), end or kind)
        self.services.lost(peer)
        for controller in self.jobs.controllers.values():  # one that released it for cause may take it when it returns
            if controller.live:
                controller.post(event)
        self.announcements.touch("peers", peer.id)
        self.announcements.touch("cluster", "")

    def _drop_unwelcome(self) -> None:
        """Close the connections whose certificate is no longer honoured."""
        for peer in list(self.peers.connected.values()):
            if problem := self._close_unwelcome(peer.connection):
                self._lose(peer, co.PeerLost(peer.id, problem.message, left=True), end="evicted")
        for connection in list(self.acceptor.operators):
            self._close_unwelcome(connection)

    def _close_unwelcome(self, connection: Connection) -> Refused | None:
        try:
            self.gate.judge(connection)
        except Refused as problem:
            send_if_open(connection, last_word(problem))
            assert self._tasks is not None
            start_in(self._tasks, connection.close(), "close")
            return problem
        return None

    def _on_direct(self, ends: frozenset[str]) -> None:
        if not self._direct and self._tasks is not None:
            start_in(self._tasks, self._use_direct(), "direct paths")
        self._direct.add(ends)

    async def _use_direct(self) -> None:
        """Measure the links that are direct now, and have the rings with both of their ends form again, each once."""
        await asyncio.sleep(GATHER_S)
        found, self._direct = self._direct, set()
        for ends in found:
            self.survey.table.forget(ends)
            await self.survey.measure_among(sorted(ends))
        here = self.peers.connected
        pairs = [[here[peer_id].name for peer_id in sorted(ends)] for ends in found if ends <= here.keys()]
        self.announcements.note("info", "direct", f"without a relay from now on: {', '.join(map(' – '.join, pairs))}")
        for controller in self.jobs.controllers.values():
            if any(all(map(controller.holds, ends)) for ends in found):
                controller.post(co.Signal.REFORM)

    # --------------------------------------------------------------------------------------------------------- messages

    async def _receive(self, peer: ConnectedPeer) -> co.PeerLost:
        while True:
            received = await receive_in_time(peer.connection, peer.detector, peer.name)
            if isinstance(received.message, Leave):
                return co.PeerLost(peer.id, clip(received.message.reason), left=True)
            with suppress(ConnectionLost):  # the answer comes too late; a Leave may follow, received before the end
                await self._handle(peer, received.message)

    async def _handle(self, peer: ConnectedPeer, message: Message) -> None:
        controller = self.jobs.controllers.get(peer.job)
        match message:
            case Heartbeat():
                if peer.take_heartbeat(message) and controller is not None and controller.stages > 1:
                    controller.post(co.PeerTold(controller.offer_of(peer)))
                peer.connection.send(HeartbeatAck(message.seq))
            case EventNotice(level=level, kind=kind):
                job = message.job if message.job in self.jobs.controllers else ""
                text = f"{peer.name}: {message.text}"
                self.announcements.note(level, kind, text, peer.id, job, age_s=message.age_s)
                await self.store.make_room()
            case Response():
                peer.calls.resolve(message)
            case Request() if message.method == LEAVE and peer.trains:
                peer.is_leaving = True
                is_last = controller is not None and controller.is_last_holder(peer)
                peer.send(Response(message.id, {"last": is_last}))
            case Request() if message.method == MEMBERS and peer.trains:
                others = [other for other in self.peers.of_job(peer.job) if peer.job and other is not peer]
                found = addresses_of(other.offer for other in others[:MAX_SENDERS])
                peer.send(Response(message.id, asdict(JobMembers(found))))
            case Request() if message.method not in ASKED_BY.get(peer.role, EVERY_PEER_ASKS):
                text = f"a {peer.role} may not ask for {clip(message.method, 80)!r}"
                peer.send(Response(message.id, {}, "unknown-method", text))
            case Request():
                peer.send(await self.operator_api.answer(message, peer.connection))
            case Serving() if peer.role in ("verifier", "drafter") or peer.task.startswith("draft/"):
                self.services.reported(peer, message)
            case Serving() if peer.trains and "draft" in peer.allowed:
                pass  # its drafts were ended meanwhile
            case _ if peer.trains:
                await self._handle_of_worker(peer, controller, message)
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from a {peer.role}")

    async def _handle_of_worker(self, peer: ConnectedPeer, controller: JobController | None, message: Message) -> None:
        """Handle a worker's message. While a restored seed does not know the job's newest view, messages are queued;
        views are taken in at once."""
        census = controller.census if controller is not None else None
        if census is None or census.over.is_set() or isinstance(message, PartsHeld):
            await self._handle_of_job(peer, controller, message)
        elif isinstance(message, ViewAnnounced):
            assert controller is not None
            controller.check_changes_untrusted(message.changes)
            census.report(peer.id, View.of(message))
        elif len(census.early_messages) < MAX_EARLY_MESSAGES:
            census.early_messages.append((peer, message))
        else:
            await census.over.wait()
            await self._handle_of_job(peer, controller, message)

    def _take_early_messages(self, job: str) -> None:
        assert self._tasks is not None
        start_in(self._tasks, self._catch_up(self.jobs.controllers[job]), "early messages")
        self.pool.assign()

    async def _catch_up(self, controller: JobController) -> None:
        early = controller.census.early_messages
        while early:
            peer, message = early[0]
            try:
                if self.peers.is_current(peer):
                    await self._handle_of_job(peer, self.jobs.controllers.get(peer.job), message)
            except P2PTrainError as problem:
                send_if_open(peer.connection, last_word(problem))
                peer.connection.abort(problem)
            early.popleft()
        controller.census.over.set()

    async def _handle_of_job(self, peer: ConnectedPeer, controller: JobController | None, message: Message) -> None:
        match message:
            case Report() if controller is not None and message.job == controller.id:
                await controller.take_report(peer, clean_report(message, controller.record.steps_total))
            case StepMetrics() if (trained := self.jobs.trained_by(peer, message.job)) is not None:
                check_step(message, trained.record.steps_total)
                await trained.record_step(message)
            case LedgerRows() if (trained := self.jobs.trained_by(peer, message.job)) is not None:
                trained.record_rows(message)
                await self.store.make_room()
            case CheckpointSaved() if (saved_by := self.jobs.controllers.get(message.job)) is not None:
                check_step(message, saved_by.record.steps_total)
                await self.checkpoints.record(peer, message, saved_by.stages)
            case PartsHeld():
                before, peer.parts = peer.parts, part_infos_of(peer.id, peer.name, message)
                changed = [part for part in before | peer.parts if before.get(part) != peer.parts.get(part)]
                self.announcements.touch("parts", *changed)
            case Report() | StepMetrics() | CheckpointSaved() | LedgerRows() | ViewAnnounced():
                pass  # about a job that the worker is no longer on
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from a worker")
