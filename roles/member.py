"""A member that trains nothing: a process that a seed lists, that answers callers, and that leaves cleanly.

Verifiers and drafters are such members. What they do is a *program*: a coroutine that is run from the first welcome of
the seed until the member leaves. It says which callers it answers (``answer``) and what it serves (``serves``), and
hears from the seed. When the seed is lost all of that goes on; the link is looked for as a worker does.

::

    async def program(member: ServingMember) -> None:
        model = await load()                               # callers are asked to wait meanwhile
        member.answer("draft", serve_drafts)
        member.serves(lambda: Serving(...))                # from now on verifiers are told of it
        ...                                                # until cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused, first_error
from p2ptrain.core.ids import is_id
from p2ptrain.core.texts import printable
from p2ptrain.core.world import World
from roles.gauges import Gauges
from roles.identity import Identity
from roles.seed_link import HeartbeatStats, Membership, Notify
from wire.address import is_loopback, told_of
from wire.connection import Connection
from wire.enrol import Member
from wire.handshake import RefusalCode, local_hello, local_welcome, serve
from wire.messages import EventNotice, Hello, Message, Refuse, Request, Response, Scalar, Welcome
from wire.text_messages import MAX_DRAFTERS, DrafterAt, DrafterList, Serving

PURPOSES = {"verifier": ("generate",), "drafter": ("draft",)}
"""Role → what its members are dialled for."""
TELL_S = 1.0
"""Between two looks at what is served, while nobody says that it changed."""
TELL_AT_MOST_S = 0.1

Serve = Callable[[Connection, Hello], Awaitable[None]]
"""Serves one caller, until it ends or raises ``P2PTrainError``; cancelled when the member leaves."""
Judge = Callable[[Hello], Refuse | None]
"""Why a caller is not let in; None where it is."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """What the person chose.

    Attributes:
        role: a key of ``PURPOSES``, or ``worker``.
        seed, others: host and port of the seed to join, and of those to try when it stays away.
        listen: host and port on which others reach this member (port 0: any free one).
        advertise: the address told to others, where it differs from what the seed sees; ("", 0) where it does not.
        capabilities: shown to people and used for placement: device, memory.
    """

    role: str
    seed: tuple[str, int]
    listen: tuple[str, int]
    advertise: tuple[str, int]
    capabilities: dict[str, Scalar]
    others: tuple[tuple[str, int], ...] = ()


def _anybody(hello: Hello) -> Refuse | None:
    return None


class ServingMember:
    """See the module's docstring.

    Args:
        program: what this member does, called with it. Where it raises a ``P2PTrainError``, or returns, the member
            leaves. It is cancelled when the member leaves, and has to end within a second then.
        notify: (level, kind, text) for the person at this terminal.
        membership: its certificate, whose network is the world's; None in a plain cluster.

    Attributes:
        world, identity: its own. role: what it is.
        drafters: of a verifier: whom the seed last said to be there, each with a host that can be dialled from here.
            They are kept while the seed is away.
    """

    def __init__(
        self,
        world: World,
        identity: Identity,
        options: MemberOptions,
        *,
        program: Callable[[ServingMember], Awaitable[None]],
        notify: Notify,
        membership: Member | None = None,
    ) -> None:
        self.world, self.identity, self.role = world, identity, options.role
        self.drafters: tuple[DrafterAt, ...] = ()
        self._options, self._program = options, program
        self._notify_person = notify
        self._doors: dict[str, tuple[Serve, Judge]] = {}
        self._serving: Callable[[], Serving] | None = None
        self._told: Serving | None = None
        self._on_drafters: Callable[[tuple[DrafterAt, ...]], None] = lambda drafters: None
        self._gauges = Gauges(world.clock.now)
        self._disk = world.threads.start("disk")
        self._changed = asyncio.Event()
        self._welcomed = asyncio.Event()
        self._leaving = False
        self._problem: P2PTrainError | None = None
        self._tasks = asyncio.TaskGroup()
        self._port = options.listen[1]
        self._membership = Membership(
            world,
            identity.directory,
            [options.seed, *options.others],
            membership,
            tasks=self._tasks,
            thread=self._disk,
            hello=self._hello,
            pulse=self._pulse,
            on_message=self._message,
            going_on=lambda: "sessions go on" if self._serving is not None else "",
            notify=self.notify,
            tell=notify,
            on_up=self._seed_up,
        )
        self._link = self._membership.link

    # ----------------------------------------------------------------------------------------------- for the program

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def port(self) -> int:
        return self._port

    @property
    def seed_host(self) -> str:
        """Of the seed that leads, or led last, as it was dialled; peers on the seed's own machine are there."""
        return self._link.host

    def answer(self, purpose: str, serve: Serve, *, judge: Judge = _anybody) -> None:
        """Let callers of a purpose in from now on. Over TLS their certificates permit it (``wire.handshake``)."""
        if purpose not in PURPOSES[self.role]:
            raise ValueError(f"a {self.role} is not dialled for {purpose!r}")
        self._doors[purpose] = (serve, judge)

    def serves(self, serving: Callable[[], Serving]) -> None:
        """Tell the seed what is served, from now on: when ``changed`` is called, and once a second where it is another.
        Model, vocabulary and tokenizer stay the same; ``serving`` must not block."""
        self._serving = serving
        self.changed()

    def changed(self) -> None:
        """What is served is another now: the seed is told within ``TELL_AT_MOST_S``."""
        self._changed.set()

    def on_drafters(self, told: Callable[[tuple[DrafterAt, ...]], None]) -> None:
        """Call ``told`` whenever ``drafters`` is another; once now."""
        self._on_drafters = told
        told(self.drafters)

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float = 10.0) -> dict[str, Any]:
        """A request to the seed. A verifier may ask what operators ask to see who is there (``peers.list``, ...).

        Raises:
            Refused: its answer. DeadlineExceeded, ConnectionLost: it is away.
        """
        return await self._link.ask(method, params, timeout_s=timeout_s)

    def notify(self, level: str, kind: str, text: str) -> None:
        self._notify_person(level, kind, text)
        self._link.send(EventNotice(level, kind, text, ""))

    # ------------------------------------------------------------------------------------------------------- its life

    async def run(self, stop: asyncio.Event) -> None:
        """Be a member until ``stop`` is set or the program ends, then leave within two seconds.

        Raises:
            NetworkError, Refused: the seed is not there, or does not want this member.
            UserError: the port is in use. P2PTrainError: what the program raised.
        """
        host, port = self._options.listen
        server = await serve(
            self.world.network, host, port, decide=self._decide, serve=self._serve, on_problem=self._stranger
        )
        self._port = server.address[1]
        try:
            async with self._tasks:
                link = self._tasks.create_task(self._link.run(), name="seed link")
                telling = self._tasks.create_task(self._tell(), name="serving")
                program = self._tasks.create_task(self._run_program(), name=self.role)
                stopped = self._tasks.create_task(stop.wait(), name="stop")
                await asyncio.wait({link, program, stopped}, return_when=asyncio.FIRST_COMPLETED)
                self._membership.end()
                telling.cancel()
                stopped.cancel()
                await self._leave()  # first: verifiers turn to other drafters while sessions end here
                program.cancel()
                link.cancel()
        except* P2PTrainError as group:
            raise first_error(group) from None
        finally:
            await server.close()
            self._disk.close()
        if self._problem is not None:
            raise self._problem

    async def _run_program(self) -> None:
        await self._welcomed.wait()
        try:
            await self._program(self)
        except* P2PTrainError as group:  # not the task group's: the seed is to hear why this member leaves
            self._problem = first_error(group)

    async def _leave(self) -> None:
        self._leaving = True
        await self._link.leave(self._problem.message if self._problem else "the person stopped it")

    # -------------------------------------------------------------------------------------------------- the seed link

    def _hello(self) -> Hello:
        return local_hello(
            peer_id=self.peer_id,
            name=self.name,
            roles=[self.role],
            purpose="peer",
            capabilities={**self._options.capabilities, "listens": self._options.listen[0]},
            host=self._options.advertise[0],
            port=self._options.advertise[1] or self._port,
        )

    def _pulse(self) -> HeartbeatStats:
        stats = self._gauges.machine()
        if self._link.rtt_ms is not None:
            stats["rtt_ms"] = self._link.rtt_ms
        state = "building"
        if self._serving is not None:
            said = self._serving()
            state = "serving" if said.sessions else "idle"
            stats["tokens_per_s"] = said.stats.get("tokens_per_s", 0.0)
        return HeartbeatStats(0, 0, "leaving" if self._leaving else state, stats)

    async def _tell(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await self._changed.wait()
            self._changed.clear()
            if self._serving is not None and self._link.up and (said := self._serving()) != self._told:
                self._link.send(said)
                self._told = said
            await asyncio.sleep(TELL_AT_MOST_S)  # what changes meanwhile is told together

    def _seed_up(self, welcome: Welcome) -> None:
        self._told = None
        self.changed()
        self._welcomed.set()

    def _message(self, message: Message) -> None:
        match message:
            case DrafterList() if self.role == "verifier":
                self.drafters = drafters_untrusted(message, self.seed_host)
                self._on_drafters(self.drafters)
            case EventNotice(text=text) if self.role == "drafter":
                self._notify_person("warning", "seed", printable(text))
            case Request():
                text = f"a {self.role} does not know {message.method[:80]!r}"
                self._link.send(Response(message.id, {}, "unknown-method", text))
            case Refuse():
                raise Refused(message.code, message.message, remedy=message.remedy)
            case _:
                raise ProtocolError(f"a seed does not say {type(message).__name__} to a {self.role}")

    # --------------------------------------------------------------------------------------------------------- callers

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if refusal := self._refusal(hello):
            return refusal
        return local_welcome(peer_id=self.peer_id, name=self.name, wall=self.world.clock.wall())

    def _refusal(self, hello: Hello) -> Refuse | None:
        if hello.purpose == "probe":
            return None
        if hello.purpose not in PURPOSES[self.role]:
            text = f"this is a {self.role}: it does not answer {hello.purpose[:40]!r}"
            return Refuse(RefusalCode.ROLE, text, "use the seed's address")
        if self._leaving:
            return Refuse(RefusalCode.SHUTTING_DOWN, f"this {self.role} is leaving", "use another one")
        if hello.purpose not in self._doors:
            return Refuse(RefusalCode.BUSY, f"this {self.role} is loading its model", "try again in a moment")
        return self._doors[hello.purpose][1](hello)

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        if hello.purpose in self._doors:
            await self._doors[hello.purpose][0](connection, hello)

    def _stranger(self, problem: P2PTrainError, address: tuple[str, int]) -> None:
        self._notify_person("warning", "stranger", told_of(address, problem.message))


def drafters_untrusted(message: DrafterList, seed_host: str) -> tuple[DrafterAt, ...]:
    """The drafters that a seed tells of, each with a host to dial: an empty one means the seed's machine.

    Raises:
        ProtocolError: there are too many, one is named twice, or is where nobody can be.
    """
    if len(message.drafters) > MAX_DRAFTERS:
        raise ProtocolError(f"the seed tells of {len(message.drafters)} drafters; {MAX_DRAFTERS} is the most")
    if len({item.peer_id for item in message.drafters}) < len(message.drafters):
        raise ProtocolError("the seed tells of a drafter twice")
    return tuple(_drafter(item, seed_host) for item in message.drafters)


def _drafter(item: DrafterAt, seed_host: str) -> DrafterAt:
    if not is_id(item.peer_id) or not 0 < item.port < 65536 or len(item.host) > 255 or item.vocab_size < 0:
        raise ProtocolError("the seed tells of a drafter that cannot be")
    at_seed = not item.host or (is_loopback(item.host) and not is_loopback(seed_host))
    return replace(item, host=seed_host if at_seed else item.host)
