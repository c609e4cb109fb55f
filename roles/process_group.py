"""Rings for process groups: members find each other in a store, and operations of other threads run on an event loop.

A process has one ``GroupHost``: a thread with an event loop, and a listener. Each group is a view of its own, whose job
is named after the group. Members publish where they listen in the store that all of them share; no seed takes part.
Members on one machine connect over the loopback. Members of different machines need an encrypted network. The seed that
signed their certificates lists each process, while it is there, as a member of its first group.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import json
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import numpy as np

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.texts import shortened
from p2ptrain.core.world import Network, real_world
from ring.direct import CHANNEL, DirectMessages
from ring.dtypes import REDUCTIONS, Array, divide, storage_dtype
from ring.links import Inbound
from ring.session import RingSession
from ring.view import View
from roles.seed_link import KnownSeeds, SeedLink, is_transient
from wire.connection import Connection
from wire.handshake import local_hello, local_welcome, serve
from wire.job_messages import MemberRecord
from wire.messages import Heartbeat, Hello, Message, RefusalCode, Refuse, Welcome
from wire.schema import Bound, Declared, Host, Id, Port, instance_untrusted
from wire.transport import every_interface

if TYPE_CHECKING:  # the thread of the groups needs no torch
    from p2ptrain.compute.process_group import GroupMessage

HEARTBEAT_S, SILENCE_S = 0.5, 10.0
"""A killed process is noticed at once, by its closed sockets. Python code may hold the interpreter, and with it the
heartbeats, for seconds; so only a long silence counts as death."""
LEAVE_S = 2.0
MAX_PLACE_BYTES = 2048
LOOPBACK = "127.0.0.1"
T = TypeVar("T")
Done = Callable[[], None]


class GroupStore(Protocol):
    """The part of torch's stores that a rendezvous needs. They raise ``RuntimeError``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class GroupPlace(Declared):
    """Where a member listens, as it writes it into the store. ``host``: for other machines than ``machine``."""

    peer_id: Id
    host: Host
    port: Port
    machine: Annotated[str, Bound(1, 400)]


@dataclass(frozen=True, slots=True)
class GroupNetwork:
    """The network of a process's groups.

    Attributes:
        host: this machine's address for the others.
        encrypted: whether the network is.
        seed: host and port of the seed that lists the groups; None if there is none.
    """

    network: Network
    host: str = ""
    encrypted: bool = False
    seed: tuple[str, int] | None = None


class RingOperations:
    """Carries out ``p2ptrain.compute.process_group.Operations`` over the session of a ring.

    Args:
        loop: the session's event loop, which runs on another thread than the callers.
        direct: for ``exchange``; None: this group has no messages.
        leave: called by ``close``.

    Attributes:
        session: may be replaced by that of a new view of as many members, on the loop's thread.
        patience_s: upper bound of the time without progress in which an operation fails.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: RingSession,
        *,
        direct: DirectMessages | None = None,
        leave: Done = lambda: None,
    ) -> None:
        self.session, self.patience_s = session, math.inf
        self._loop, self._direct, self.close = loop, direct, leave

    def all_reduce(self, array: Array, dtype: str, reduction: str, timeout_s: float, done: Done) -> Future[int]:
        stored, how, finish = self._reduced(array, dtype, reduction, done)
        begin = partial(RingSession.submit, buffer=stored, dtype=dtype, reduction=how)
        return self._begin(begin, timeout_s, finish)

    def reduce_scatter(
        self, source: Array, into: Array, dtype: str, reduction: str, timeout_s: float, done: Done
    ) -> Future[int]:
        stored, how, finish = self._reduced(into, dtype, reduction, done)
        source = source.view(stored.dtype)
        begin = partial(RingSession.reduce_scatter, source=source, into=stored, dtype=dtype, reduction=how)
        return self._begin(begin, timeout_s, finish)

    def all_gather(self, array: Array, timeout_s: float, done: Done) -> Future[int]:
        return self._begin(partial(RingSession.gather, buffer=array), timeout_s, done)

    def broadcast(self, array: Array, root: int, timeout_s: float, done: Done) -> Future[int]:
        return self._begin(partial(RingSession.broadcast, buffer=array, root=root), timeout_s, done)

    def exchange(
        self, sends: Sequence[GroupMessage], receives: Sequence[GroupMessage], timeout_s: float, done: Done
    ) -> Future[int]:
        def begin(session: RingSession, *, patience_s: float) -> asyncio.Future[Any]:
            direct = self._direct
            if direct is None:
                raise ValueError("this group has no messages between members, only collective operations")
            begun = [direct.send(item.array, item.peer or 0, item.tag, timeout_s=timeout_s) for item in sends]
            begun += [direct.receive(item.array, item.peer, item.tag, timeout_s=timeout_s) for item in receives]
            return asyncio.gather(asyncio.sleep(0, -1), *begun)

        return self._begin(begin, timeout_s, done)

    def _reduced(self, array: Array, dtype: str, reduction: str, done: Done) -> tuple[Array, np.ufunc, Done]:
        """The array as elements of its type, the ring's reduction, and what follows it. Raises ``ValueError``."""
        mean, stored = reduction == "avg", array.view(storage_dtype(dtype))
        if mean and "float" not in dtype:
            raise ValueError(f"a mean (avg) is for floating-point elements, these are {dtype}")

        def finish() -> None:
            if mean:
                divide(stored, self.session.size, dtype)
            done()

        return stored, REDUCTIONS["sum" if mean else reduction], finish

    def _begin(self, begin: Callable[..., asyncio.Future[Any]], timeout_s: float, done: Done) -> Future[int]:
        """Begin an operation of the session on the loop's thread. Calls of one thread are begun in their order."""
        result: Future[int] = Future()
        result.set_running_or_notify_cancel()

        def ended(operation: asyncio.Future[Any]) -> None:
            try:
                value = operation.result()
                done()
            except BaseException as error:  # noqa: BLE001 - carried to the caller
                result.set_exception(error)
            else:
                result.set_result(value[-1] if isinstance(value, list) else -1)

        def run() -> None:
            try:
                patience_s = min(timeout_s, self.patience_s)
                begin(self.session, patience_s=patience_s).add_done_callback(ended)
            except Exception as error:  # noqa: BLE001 - carried to the caller
                result.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            result.set_exception(ConnectionLost("the event loop of the process group has ended"))
        return result


class _Group:
    """This process in one group: what a ring needs of a member (``ring.links.ThisMember``)."""

    def __init__(self, host: GroupHost, view: View, rank: int) -> None:
        self.world, self.peer_id, self.seed_host = host.world, host.peer_id, LOOPBACK
        self.name, self.rank = view.members[rank].name, rank
        self.view = view
        self.inbound = Inbound(max_held=view.size)
        self.direct = DirectMessages(self, view, rank)
        self.session: RingSession | None = None

    async def form(self, timeout_s: float) -> RingSession:
        self.session = await RingSession.form(self, self.view, timeout_s=timeout_s)
        self.direct.attach(self.session)
        return self.session

    def find_service(self, hello: Hello) -> DirectMessages | Inbound:
        return self.direct if hello.capabilities.get("channel") == CHANNEL else self.inbound

    async def leave(self) -> None:
        self.direct.close()
        await self.direct.wait_closed()
        if self.session is not None:
            self.session.close("the process group was destroyed")
            await self.session.links.wait_closed()


class GroupHost:
    """The thread, the event loop and the listener of all process groups of this process. ``start`` makes it.

    Attributes:
        peer_id: of this process in all of its groups.
        process: the id of this process; a child that was forked later has no such thread.
    """

    def __init__(self, group_network: GroupNetwork, peer_id: str) -> None:
        self.world = real_world(group_network.network)
        self.peer_id, self.process = peer_id, os.getpid()
        self._host, self._encrypted, self._seed = group_network.host, group_network.encrypted, group_network.seed
        self._link: SeedLink | None = None
        self._port = 0
        self._groups: dict[str, _Group] = {}
        self.loop = asyncio.get_running_loop()

    async def listen(self) -> None:
        host = every_interface() if self._encrypted else LOOPBACK
        server = await serve(
            self.world.network, host, 0, decide=self._decide, serve=self._serve, on_problem=lambda *_: None
        )
        self._port = server.address[1]

    def join(
        self, store: GroupStore, group: str, rank: int, size: int, names: Sequence[str], timeout_s: float
    ) -> RingOperations:
        """Form the ring of a group; blocks the calling thread until all members are there.

        Args:
            store: of this group only.
            names: of its members, for messages.

        Raises:
            UserError: members on different machines need an encrypted network.
            DeadlineExceeded: a member did not come.
            ProtocolError: the store holds what no member has written.
            NetworkError, Refused: see ``RingSession.form``.
        """
        round_of_store = store.add(f"joined/{rank}", 1)  # the group may have existed before, in the same store
        own = GroupPlace(self.peer_id, self._host, self._port, _machine())
        store.set(f"{round_of_store}/{rank}", json.dumps(asdict(own)))
        keys = [f"{round_of_store}/{other}" for other in range(size)]
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [name for name, key in zip(names, keys, strict=True) if not store.check([key])]
            if not missing:
                raise
            text = f"{shortened(', '.join(missing), 200)} did not come to the group within {timeout_s:g} s"
            raise DeadlineExceeded(text, remedy="see whether it runs, and what it says") from error
        places = [_place_untrusted(store.get(key)) for key in keys]
        away = next((index for index, place in enumerate(places) if place.machine != own.machine), None)
        if away is not None and not self._encrypted:
            raise UserError(
                f"{names[away]} runs on another machine, and connections between machines must be encrypted",
                remedy="set P2PTRAIN_TICKET to a ticket of a seed on all of them: p2ptrain ticket new, at the seed",
            )
        members = tuple(
            MemberRecord(
                place.peer_id,
                names[index],
                LOOPBACK if place.machine == own.machine else place.host,
                place.port,
                first=index,
                count=1,
                healthy=True,
            )
            for index, place in enumerate(places)
        )
        job = hashlib.blake2b(f"{group} {[item.peer_id for item in members]}".encode(), digest_size=12).hexdigest()
        view = View(job, round_of_store, 0, "0" * 32, members, heartbeat_s=HEARTBEAT_S, death_s=SILENCE_S)
        joined = self._groups[job] = _Group(self, view, rank)
        try:
            session = self._run(joined.form(timeout_s))
        except BaseException:
            self._groups.pop(job, None)
            raise
        self._run(self._show(joined))
        return RingOperations(self.loop, session, direct=joined.direct, leave=lambda: self._leave(job))

    def close(self) -> None:
        for job in list(self._groups) if self.process == os.getpid() else ():
            self._leave(job)

    def _leave(self, job: str) -> None:
        group = self._groups.pop(job, None)
        if group is not None:
            with contextlib.suppress(TimeoutError, RuntimeError):
                asyncio.run_coroutine_threadsafe(self._left(group), self.loop).result(LEAVE_S)

    async def _left(self, group: _Group) -> None:
        await group.leave()
        if not self._groups and self._link is not None:
            link, self._link = self._link, None
            await link.leave("it left its process group")
            self._showing.cancel()

    async def _show(self, group: _Group) -> None:
        """Have the seed list this process until it has left its groups. Without the seed they go on."""
        if self._seed is None or self._link is not None:
            return
        program = Path(sys.argv[0]).name.replace("-c", "") or "python"
        hello = local_hello(
            peer_id=self.peer_id, name=f"{program} {group.name}", roles=["worker"], purpose="peer", port=self._port,
            capabilities={"group": f"{program}/{group.view.job[:8]}", "rank": group.rank},
        )  # fmt: skip
        self._link = SeedLink(
            world=self.world, seeds=KnownSeeds([self._seed], {}, on_term=lambda: None),
            retry_time_s=lambda problem: math.inf if is_transient(problem) else 0.0,
            hello=lambda: hello, pulse=lambda: Heartbeat(0, 0, 0, "training", {}), on_message=_heard_from_seed,
            on_up=lambda welcome: None, on_down=lambda problem: None,
        )  # fmt: skip
        self._showing = asyncio.create_task(self._shown(self._link), name="seed link")

    async def _shown(self, link: SeedLink) -> None:
        try:
            await link.run()
        except P2PTrainError as problem:
            logging.getLogger(__name__).warning("the seed does not show this process group: %s", problem.message)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if hello.purpose == "probe":  # the seed's
            return local_welcome(peer_id=self.peer_id, name="", wall=self.world.clock.wall())
        group = self._groups.get(hello.job)
        if group is None:
            return Refuse(RefusalCode.BUSY, "this process has not formed that group yet", "try again")
        refusal = group.find_service(hello).decide(hello)
        return refusal or local_welcome(peer_id=self.peer_id, name=group.name, wall=self.world.clock.wall())

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        if (group := self._groups.get(hello.job)) is not None:
            await group.find_service(hello).serve(connection, hello)


def start_host(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
    open_network: Callable[[str], Awaitable[GroupNetwork]],
) -> GroupHost:
    """Start the thread of this process's groups. It leaves all groups when the process ends.

    Args:
        open_network: called with the peer id of this process.

    Raises what ``open_network`` raises, and ``UserError`` if no port is free.
    """
    started: Future[GroupHost] = Future()

    async def live() -> None:
        try:
            peer_id = new_id()
            host = GroupHost(await open_network(peer_id), peer_id)
            await host.listen()
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            started.set_exception(error)
            return
        started.set_result(host)
        await asyncio.Event().wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(live())

    threading.Thread(target=run, name="process groups", daemon=True).start()
    host = started.result()
    atexit.register(host.close)
    return host


def _heard_from_seed(message: Message) -> None:
    if isinstance(message, Refuse):  # it stops, or a person evicted this process
        raise Refused(message.code, message.message, remedy=message.remedy)


def _machine() -> str:
    """Equal for processes that reach each other over the loopback."""
    marks = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has them
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        marks.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "/".join(marks)[:400]


def _place_untrusted(written: bytes) -> GroupPlace:
    try:
        place = json.loads(written[:MAX_PLACE_BYTES])
    except (ValueError, RecursionError):
        raise ProtocolError("the store of the process group holds what no member has written") from None
    return instance_untrusted(GroupPlace, place)
