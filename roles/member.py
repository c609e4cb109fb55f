"""Members of a cluster: processes that a seed lists, that serve callers, and that leave cleanly.

``MemberProcess`` is the base of all. A worker (``roles.worker.worker``) is one. Verifiers and drafters are
``ServingMember``: each runs a *program*, a coroutine that starts with the first welcome of the seed and runs until the
member leaves. It declares which callers it answers (``answer``) and what it serves (``serves``). It goes on while the
seed is away; the link reconnects as a worker's does.

::

    async def program(member: ServingMember) -> None:
        model = await load()                               # meanwhile callers are refused as "busy"
        member.answer("draft", serve_drafts)
        member.serves(lambda: [Serving(...)])              # from now on the seed tells verifiers about it
        ...                                                # until cancelled
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

from p2ptrain.core.disk import Disk, Lock, write_atomic
from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused, StorageError, UserError, first_error
from p2ptrain.core.ids import is_id, new_id
from p2ptrain.core.texts import printable
from p2ptrain.core.world import World
from roles.circuits import RELAYS, SeedCircuits
from roles.gauges import Gauges
from roles.seed_link import KnownSeeds, Notify, RetryTimeS, SeedLink, load_terms, no_retry, store_terms
from wire.address import advertised_host
from wire.circuits import CircuitNetwork
from wire.connection import Connection
from wire.enrol import LOOK_S, RunMembership
from wire.handshake import Refusals, local_hello, local_welcome, serve
from wire.messages import (
    CircuitOffer,
    CircuitOrder,
    EventNotice,
    Heartbeat,
    Hello,
    Message,
    RefusalCode,
    Refuse,
    Request,
    Response,
    Scalar,
    Welcome,
)
from wire.text_messages import DrafterAddress, DrafterList, Serving

MAX_SLOTS = 64
PURPOSES = {"verifier": ("generate", "http"), "drafter": ("draft",)}
"""Role → the purposes for which its members are dialled."""
ASK_S = 5.0
"""For the seed to arrange a circuit: it only sends messages."""
REPORT_S = 0.5
"""Interval of checks whether a ``Serving`` record changed."""

ALLOW = "allow"
"""Capability in a ``Hello``: the kinds of tasks that a worker's owner allows, with commas between."""

Serve = Callable[[Connection, Hello], Awaitable[None]]
"""Serves one caller until it returns or raises ``P2PTrainError``. Cancelled when the member leaves."""
Program: TypeAlias = "Callable[[ServingMember], Awaitable[None]]"
"""What a ``ServingMember`` runs until it leaves."""
Judge = Callable[[Hello], Refuse | None]
"""Returns the refusal of a caller, or None to admit it."""


class CallerService(Protocol):
    """Admits and serves the callers of one purpose; as ``Judge`` and ``Serve``."""

    def decide(self, hello: Hello) -> Refuse | None: ...
    async def serve(self, connection: Connection, hello: Hello) -> None: ...


def allowed_kinds(capabilities: Mapping[str, Scalar]) -> frozenset[str]:
    """Kinds of tasks that a worker's owner allows: ``train``, ``serve``, ``draft``."""
    return frozenset(str(capabilities.get(ALLOW, "train,serve")).split(","))


@dataclass(frozen=True, slots=True)
class Identity:
    """A claimed slot of the state directory. It stays claimed until ``lock`` is closed."""

    peer_id: str
    name: str
    directory: Path
    lock: Lock

    def release(self) -> None:
        self.lock.close()


def claim(
    disk: Disk, root: Path, *, role: str, name: str = "", slot: int | None = None, fresh_id: Callable[[], str] = new_id
) -> Identity:
    """Claim slot ``slot`` of ``root``, or the first free one. ``fresh_id``: makes the id of a new peer.

    A second worker on the same machine takes the next slot. A restarted worker finds its old slot, and so its
    checkpoints, again.

    Raises:
        UserError: that slot, or every slot, is in use.
        StorageError: the directory cannot be written.
    """
    for number in [slot] if slot is not None else range(1, MAX_SLOTS + 1):
        directory = root / f"{role}-{number}"
        disk.make_dir(directory)
        lock = disk.try_lock(directory / "lock")
        if lock is not None:
            peer_id = _peer_id(disk, directory / "peer-id", fresh_id)
            host = socket.gethostname().split(".")[0] or "peer"
            usual = f"{host}-{number}" if role == "worker" else f"{host}-{role}-{number}"
            return Identity(peer_id, name or usual, directory, lock)
    if slot is not None:
        raise UserError(
            f"{role}-{slot} in {root} is in use by another process", remedy="stop it, or use another --state"
        )
    raise UserError(f"all {MAX_SLOTS} {role} slots in {root} are in use", remedy="use another --state")


def _peer_id(disk: Disk, path: Path, fresh_id: Callable[[], str]) -> str:
    with suppress(StorageError, UnicodeDecodeError):
        found = disk.read(path, max_bytes=64).decode().strip()
        if is_id(found):
            return found
    fresh = fresh_id()
    write_atomic(disk, path, fresh.encode())
    return fresh


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """A member's options, chosen by a person.

    Attributes:
        role: a key of ``PURPOSES``, or ``worker``.
        seed, others: host and port of the seed to join, and of others to try if it stays away.
        listen: host and port to listen on (port 0: any free one; None: as ``wire.handshake.serve``).
        advertise: the address told to others; "" or 0: the one that the seed sees.
        capabilities: device and memory, shown to people and used for placement.
        retry_time_s: for a seed that does not answer yet.
        circuits: the lowest part of the world's network that reaches peers behind routers; None: it has none.
    """

    role: str
    seed: tuple[str, int]
    listen: tuple[str, int | None]
    advertise: tuple[str, int]
    capabilities: dict[str, Scalar]
    others: tuple[tuple[str, int], ...] = ()
    retry_time_s: RetryTimeS = no_retry
    circuits: CircuitNetwork | None = None


class MemberProcess(ABC):
    """A process that registers with a seed, listens for callers, and leaves cleanly.

    Args:
        notify: (level, kind, text) for the person at this terminal.
        membership: the certificate that the world's network uses; None in a plain cluster.

    Attributes:
        gauges: measurements of this machine.
    """

    def __init__(
        self,
        world: World,
        identity: Identity,
        options: MemberOptions,
        *,
        notify: Notify,
        membership: RunMembership | None,
    ) -> None:
        self.world, self.identity, self.role = world, identity, options.role
        self._options, self._membership = options, membership
        self._notify_here = notify
        self.gauges = Gauges(world.clock.now)
        self._disk = world.threads.start("disk")
        self._leaving = False
        self._problem: P2PTrainError | None = None
        self._tasks = asyncio.TaskGroup()
        self._port = options.listen[1] or 0
        self._renewing: asyncio.Task[NoReturn] | None = None
        self._terms = load_terms(world.disk, identity.directory)
        self._link = SeedLink(
            world=world,
            seeds=KnownSeeds([options.seed, *options.others], self._terms, self._on_term),
            retry_time_s=options.retry_time_s,
            hello=self._make_hello,
            pulse=self._pulse,
            on_message=self._on_message,
            on_up=self._on_connected,
            on_down=self._on_disconnected,
        )
        self._circuits: SeedCircuits | None = None
        if options.circuits is not None:
            ask = partial(self._link.ask, timeout_s=ASK_S)
            self._circuits = SeedCircuits(options.circuits, ask, lambda: self._link.address)

    # --------------------------------------------------------------------------------------------- what each role does

    @abstractmethod
    async def _run_role(self) -> None:
        """Run until cancelled. The member leaves if this returns or raises ``P2PTrainError``."""

    @abstractmethod
    def _on_welcome(self, welcome: Welcome) -> None: ...

    @abstractmethod
    def _continuing_work(self) -> str:
        """What continues without the seed, in words; empty if nothing does."""

    @abstractmethod
    def _make_heartbeat(self) -> Heartbeat: ...

    def _pulse(self) -> Heartbeat:
        circuits = self._options.circuits
        ways = circuits.ways() if circuits is not None else {}
        return replace(self._make_heartbeat(), gpus=self.gauges.gpus(), ways=ways)

    @abstractmethod
    def _find_refusal(self, hello: Hello) -> Refuse | None: ...

    @abstractmethod
    async def _serve(self, connection: Connection, hello: Hello) -> None: ...

    def _on_message(self, message: Message) -> None:
        match message:
            case EventNotice(level=level, text=text):
                self._notify_here(level, "seed", printable(text))
            case Refuse():
                raise Refused(message.code, message.message, remedy=message.remedy)
            case CircuitOffer() | CircuitOrder():
                if self._circuits is not None:
                    self._circuits.take(message)
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from the seed to a {self.role}")

    def _make_hello(self) -> Hello:
        circuits = self._options.circuits
        relays = circuits is not None and circuits.limits.circuits > 0
        return local_hello(
            peer_id=self.peer_id,
            name=self.name,
            roles=[self.role],
            purpose="peer",
            capabilities={**self._options.capabilities, "listens": self._options.listen[0], RELAYS: relays},
            host=self._options.advertise[0],
            port=self._options.advertise[1] or self._port,
        )

    def _job_id(self) -> str:
        return ""

    # ------------------------------------------------------------------------------------------------ common to all

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def port(self) -> int:
        return self._port

    def notify(self, level: str, kind: str, text: str) -> None:
        self._notify_here(level, kind, text)
        self._link.send(EventNotice(level, kind, text, self._job_id()))

    async def run(self, stop: asyncio.Event) -> None:
        """Be a member until ``stop`` is set, then leave within two seconds.

        Raises:
            NetworkError, Refused: the seed cannot be reached, or refuses this member.
            UserError: the port is in use.
            P2PTrainError: raised by ``_run_role``.
        """
        host, port = self._options.listen
        refusals = Refusals(partial(self._notify_here, "warning", "refused"))
        server = await serve(
            self.world.network, host, port, decide=self._decide, serve=self._serve, on_problem=refusals
        )
        self._port = server.address[1]
        try:
            async with self._tasks:
                link = self._tasks.create_task(self._link.run(), name="seed link")
                living = self._tasks.create_task(self._run_role_until_problem(), name=self.role)
                stopped = self._tasks.create_task(stop.wait(), name="stop")
                await asyncio.wait({link, living, stopped}, return_when=asyncio.FIRST_COMPLETED)
                self._end_renewal()
                stopped.cancel()
                if not link.done():  # else it raised, and the group ends with its error
                    await self._leave()  # first, so that others turn to other members while sessions end here
                living.cancel()
                link.cancel()
        except* P2PTrainError as group:
            raise first_error(group) from None
        finally:
            await server.close()
            if self._circuits is not None:
                await self._circuits.stop()
            self._disk.close()
        if self._problem is not None:
            raise self._problem

    async def _run_role_until_problem(self) -> None:
        try:
            await self._run_role()
        except* P2PTrainError as group:  # caught here, so that the seed is told why this member leaves
            self._problem = first_error(group)

    async def _leave(self) -> None:
        self._leaving = True
        await self._link.leave(self._problem.message if self._problem else "its user stopped it")

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self._find_refusal(hello) or local_welcome(
            peer_id=self.peer_id, name=self.name, wall=self.world.clock.wall()
        )

    def _machine_stats(self) -> dict[str, float]:
        stats = self.gauges.machine()
        if self._link.rtt_ms is not None:
            stats["rtt_ms"] = self._link.rtt_ms
        return stats

    def _on_connected(self, welcome: Welcome) -> None:
        if self._membership is not None:
            self._renewing = self._tasks.create_task(self._renew(self._membership), name="certificate")
        self._notify_here("info", "joined", f"joined {welcome.name} ({welcome.cluster_id})")
        if welcome.unreached:
            text = f"behind a router or a firewall, as the seed sees it: {printable(welcome.unreached)}"
            self._notify_here("info", "behind-router", f"{text}; others reach this machine over circuits")
        self._on_welcome(welcome)

    def _on_disconnected(self, problem: P2PTrainError) -> None:
        self._end_renewal()
        text, continuing = f"lost the seed: {problem.message}; trying to find it again", self._continuing_work()
        self.notify("warning", "seed-lost", f"{text}; {continuing}" if continuing else text)

    async def _renew(self, membership: RunMembership) -> NoReturn:
        while True:
            try:
                # 10 s, because the seed first stores the new state, on a disk that may be busy.
                await membership.keep_fresh(partial(self._link.ask, timeout_s=10.0))
            except P2PTrainError as problem:
                self.notify("warning", "certificate", f"the certificate is not renewed yet: {problem.message}")
                await asyncio.sleep(LOOK_S)

    def _end_renewal(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    def _on_term(self) -> None:
        self._tasks.create_task(self._store_terms(), name="keep terms")

    async def _store_terms(self) -> None:
        try:
            await self._disk.submit(partial(store_terms, self.world.disk, self.identity.directory, self._terms))
        except StorageError as problem:
            self.notify("warning", "terms", f"cannot store the seed's term: {problem.message}")


class ServingMember(MemberProcess):
    """A member with a program; see the module's docstring.

    Args:
        program: called with this member. If it returns or raises a ``P2PTrainError``, the member leaves. When the
            member leaves, the program is cancelled and must end within a second.

    Attributes:
        drafters: the drafters that the seed named last, each with a host that can be dialled from here (verifiers
            only). They are kept while the seed is away.
    """

    def __init__(
        self,
        world: World,
        identity: Identity,
        options: MemberOptions,
        *,
        program: Program,
        notify: Notify,
        membership: RunMembership | None = None,
    ) -> None:
        super().__init__(world, identity, options, notify=notify, membership=membership)
        self.drafters: tuple[DrafterAddress, ...] = ()
        self._program = program
        self._doors: dict[str, tuple[Serve, Judge]] = {}
        self._serving: Callable[[], Sequence[Serving]] = tuple
        self._is_waiting: Callable[[], bool] = lambda: False
        self._announced: dict[str, Serving] = {}  # by model
        self._on_drafters: Callable[[tuple[DrafterAddress, ...]], None] = lambda drafters: None
        self._welcomed = asyncio.Event()

    # ----------------------------------------------------------------------------------------------- for the program

    @property
    def seed_host(self) -> str:
        """The host at which the current or last seed was dialled. Peers on the seed's machine are reached there."""
        return self._link.host

    def answer(self, purpose: str, serve: Serve, *, judge: Judge = lambda hello: None) -> None:
        """Admit callers with this purpose from now on. Over TLS ``wire.handshake`` checks that they may have it."""
        self._doors[purpose] = (serve, judge)

    def serves(
        self, serving: Callable[[], Sequence[Serving]], *, is_waiting: Callable[[], bool] = lambda: False
    ) -> None:
        """Report each model of ``serving()`` to the seed from now on, within ``REPORT_S`` of a change. Models,
        vocabularies and tokenizers must stay the same. Neither function may block.

        Args:
            is_waiting: returns whether a model waits for workers.
        """
        self._serving, self._is_waiting = serving, is_waiting

    def on_drafters(self, callback: Callable[[tuple[DrafterAddress, ...]], None]) -> None:
        """Call ``callback`` now, and again whenever ``drafters`` changes."""
        self._on_drafters = callback
        callback(self.drafters)

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float = 10.0) -> dict[str, Any]:
        """Send a request to the seed. A verifier may send the list requests of operators (``peers.list``, ...).

        Raises ``Refused``, ``DeadlineExceeded`` or ``ConnectionLost``.
        """
        return await self._link.ask(method, params, timeout_s=timeout_s)

    # ------------------------------------------------------------------------------------------------- as every member

    async def _run_role(self) -> None:
        reporting = self._tasks.create_task(self._report_serving(), name="serving")
        try:
            await self._welcomed.wait()
            await self._program(self)
        finally:
            reporting.cancel()

    def _continuing_work(self) -> str:
        return "sessions go on" if any(model.is_ready for model in self._serving()) else ""

    def _make_heartbeat(self) -> Heartbeat:
        state, stats = "building", self._machine_stats()
        if serving := [model for model in self._serving() if model.is_ready]:
            is_busy = any(model.sessions for model in serving)
            state = "waiting" if self._is_waiting() else "serving" if is_busy else "idle"
            stats["tokens_per_s"] = sum(model.stats.get("tokens_per_s", 0.0) for model in serving)
        return Heartbeat(0, 0, 0, "leaving" if self._leaving else state, stats)

    async def _report_serving(self) -> None:
        while True:
            for serving in self._serving() if self._link.up else ():
                if serving != self._announced.get(serving.model):
                    self._link.send(serving)
                    self._announced[serving.model] = serving
            await asyncio.sleep(REPORT_S)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._announced.clear()
        self._welcomed.set()

    def _on_message(self, message: Message) -> None:
        match message:
            case DrafterList() if self.role == "verifier":
                self.drafters = tuple(
                    replace(item, host=advertised_host(self.seed_host, item.host)) for item in message.drafters
                )
                self._on_drafters(self.drafters)
            case Request():
                text = f"a {self.role} does not support the request {message.method[:80]!r}"
                self._link.send(Response(message.id, {}, "unknown-method", text))
            case _:
                super()._on_message(message)

    def _find_refusal(self, hello: Hello) -> Refuse | None:
        if hello.purpose == "probe":
            return None
        if hello.purpose not in PURPOSES[self.role]:
            text = f"this is a {self.role}: it accepts no connection for {hello.purpose[:40]!r}"
            return Refuse(RefusalCode.ROLE, text, "use the seed's address")
        if self._leaving:
            return Refuse(RefusalCode.SHUTTING_DOWN, f"this {self.role} is leaving", "use another one")
        if hello.purpose not in self._doors:
            return Refuse(RefusalCode.BUSY, f"this {self.role} is loading its model", "try again in a moment")
        return self._doors[hello.purpose][1](hello)

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        if hello.purpose in self._doors:
            await self._doors[hello.purpose][0](connection, hello)
