"""Requests and answers: numbered calls over any connection, and the operators' typed requests to a seed."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, Self, TypeVar

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.ids import new_id
from p2ptrain.core.world import Network
from wire.connection import Connection, Received
from wire.handshake import dial, local_hello
from wire.messages import Message, Refuse, Request, Response, Update, Welcome
from wire.records import (
    TOPICS,
    CheckpointInfo,
    ClusterInfo,
    EventInfo,
    JobInfo,
    LedgerPage,
    LinkInfo,
    MetricRow,
    PartInfo,
    PeerInfo,
    RecoveryInfo,
    ServingInfo,
    StagePlanInfo,
    TicketInfo,
    TrainingPlanInfo,
    ViewBegan,
)
from wire.schema import Record


class PendingCalls:
    """Requests of one side that wait for answers. ``last_id`` is the newest request's."""

    def __init__(self) -> None:
        self._pending: dict[int, asyncio.Future[Response]] = {}
        self.last_id = 0

    async def ask(
        self,
        send: Callable[[Message], object],
        method: str,
        params: dict[str, Any],
        *,
        whom: str,
        timeout_s: float,
        named: bool = True,
    ) -> dict[str, Any]:
        """Send a request to ``whom`` and wait for the result. If ``named``, the text of a refusal starts with ``whom``.

        Raises:
            Refused: the answer is an error.
            DeadlineExceeded, ConnectionLost: no answer came.
        """
        self.last_id += 1
        number = self.last_id
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            send(Request(number, method, params))
            async with asyncio.timeout(timeout_s):
                response = await answer
        except TimeoutError:
            text = f"{whom} did not answer {method} within {timeout_s:g} s"
            raise DeadlineExceeded(text, remedy="it may be overloaded; try again") from None
        finally:
            del self._pending[number]
        if response.error_code:
            text = f"{whom}: {response.error_message}" if named else response.error_message
            raise Refused(response.error_code, text, remedy=response.error_remedy)
        return response.result

    def resolve(self, response: Response) -> bool:
        """Give an answer to the call that waits for it. Return False, and drop it, if none does."""
        answer = self._pending.get(response.id)
        if answer is None or answer.done():
            return False
        answer.set_result(response)
        return True

    def fail_all(self, whom: str, why: P2PTrainError | None = None) -> None:
        for answer in self._pending.values():
            if not answer.done():
                error = ConnectionLost(why.message, remedy=why.remedy) if why else ConnectionLost(f"{whom} is gone")
                answer.set_exception(error)


async def answer_request(request: Request, result: Awaitable[dict[str, Any]]) -> Response:
    try:
        return Response(request.id, await result)
    except P2PTrainError as problem:
        return Response(request.id, {}, problem.code, problem.message, problem.remedy)


R = TypeVar("R", bound=Record)

PAGE = 200
"""Rows of metrics, or events, in one answer."""
SILENCE_S = 15.0
"""After this many seconds without a frame the client probes the seed, which has as long again to answer."""
MAX_UPDATES = 1024
"""Updates that may wait for a viewer. More end the connection, because dropping one would leave a wrong picture."""


class SeedRequests(ABC):
    """The operators' requests to a seed, typed. All of them raise as ``request``."""

    @abstractmethod
    async def request(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float = 20.0
    ) -> dict[str, Any]:
        """Send a request and wait for its result; the methods below wrap it. Requests may overlap.

        Args:
            timeout_s: must be longer than the seed waits for a worker that it asks.

        Raises:
            Refused: the seed answered with an error.
            DeadlineExceeded: no answer came in time; the connection stays open.
            ConnectionLost: the connection ended.
        """

    # ------------------------------------------------------------------------------- who is there, and what is served

    async def cluster(self) -> ClusterInfo:
        return ClusterInfo.from_map_untrusted(await self._value("cluster.info", "cluster"))

    async def watch_link(self) -> str:
        """The link that opens the seed's web page, with the key of those who only look."""
        return str(_checked(await self.request("cluster.watch_link"), "link", str))

    async def peers(self) -> list[PeerInfo]:
        return await self._records(PeerInfo, "peers.list", "peers")

    async def links(self) -> list[LinkInfo]:
        """Links between workers, after the workers have measured their speed and these links: up to half a minute."""
        return _records(LinkInfo, await self.request("links.list", timeout_s=30.0), "links")

    async def evict(self, peer: str) -> tuple[str, str]:
        result = await self.request("peers.evict", {"peer": peer})
        return _checked(result, "evicted", str), _checked(result, "name", str)

    async def parts(self) -> tuple[list[PartInfo], int]:
        """Parts of split models, as many as fit an answer, and their total number."""
        result = await self.request("parts.list")
        return _records(PartInfo, result, "parts"), _checked(result, "total", int)

    async def serving(self) -> list[ServingInfo]:
        return await self._records(ServingInfo, "serving.list", "serving")

    # ------------------------------------------------------------------------------------------------------------ jobs

    async def jobs(self) -> list[JobInfo]:
        """All jobs, oldest first."""
        return await self._records(JobInfo, "jobs.list", "jobs")

    async def job(self, job: str) -> tuple[JobInfo, str]:
        """Find a job by its id, the start of its id, or its name. Return it and its profile as JSON, not validated."""
        result = await self.request("jobs.show", {"job": job})
        return JobInfo.from_map_untrusted(result.get("job")), _checked(result, "spec", str)

    async def create_job(self, name: str, profile: str, spec: str, **more: Any) -> str:
        """Create a job and return its id. ``more``: ``shape``, the sizes of a model to split."""
        params = {"name": name, "profile": profile, "spec": spec, **more}
        return str(await self._value("jobs.create", "job", str, **params))

    async def plan(self, spec: str, shape: object) -> tuple[TrainingPlanInfo, list[StagePlanInfo]]:
        """Plan which workers would train which layers of a split job. The seed first measures their links."""
        result = await self.request("jobs.plan", {"spec": spec, "shape": shape}, timeout_s=30.0)
        stages = _records(StagePlanInfo, result, "stages")
        if not stages:
            raise ProtocolError("the seed sent a training plan without stages")
        return TrainingPlanInfo.from_map_untrusted(result.get("plan")), stages

    async def tell_job(self, job: str, verb: str) -> str:
        """Send ``pause``, ``resume``, ``save``, ``cancel`` or ``forget`` to a job. Return its id."""
        return str(await self._value(f"jobs.{verb}", "job", str, job=job))

    async def change_settings(self, job: str, values: Mapping[str, Any]) -> str:
        """Change settings of a job, by their dotted keys, at its next step boundary. Return its id."""
        texts = {key: json.dumps(value) for key, value in values.items()}
        return str(await self._value("jobs.set", "job", str, job=job, values=texts))

    async def recoveries(self, job: str, limit: int) -> list[RecoveryInfo]:
        return await self._records(RecoveryInfo, "recoveries.list", "recoveries", job=job, limit=limit)

    async def ledger(self, job: str, after_step: int) -> LedgerPage:
        return LedgerPage.from_map_untrusted(await self.request("jobs.ledger", {"job": job, "after_step": after_step}))

    async def views(self, job: str, after_generation: int) -> list[ViewBegan]:
        """The next views, in order of generation."""
        views = await self._records(ViewBegan, "jobs.views", "views", job=job, after_generation=after_generation)
        _check_order("views", after_generation, [view.generation for view in views])
        return views

    async def metrics(self, job: str, after_step: int, limit: int) -> list[MetricRow]:
        """The next rows, in order of step. ``after_step``: -1 for the first ones."""
        params = {"job": job, "after_step": after_step, "limit": limit}
        rows = await self._records(MetricRow, "metrics.history", "rows", **params)
        _check_order("metrics", after_step, [row.step for row in rows])
        return rows

    async def all_metrics(self, job: str) -> AsyncIterator[MetricRow]:
        """All steps of a job that are on record, in order."""
        after = -1
        while page := await self.metrics(job, after, PAGE):
            for row in page:
                yield row
            after = page[-1].step

    async def events(self, after_id: int, limit: int) -> list[EventInfo]:
        """The next events; for a negative ``after_id``, so many of the newest ones."""
        found = await self._records(EventInfo, "events.list", "events", after_id=after_id, limit=limit)
        _check_order("events", after_id, [event.id for event in found])
        return found

    async def all_events(self, after_id: int) -> AsyncIterator[EventInfo]:
        """All later events, in order."""
        while page := await self.events(after_id, PAGE):
            for event in page:
                yield event
            after_id = page[-1].id

    # ---------------------------------------------------------------------------------------- checkpoints and tickets

    async def checkpoints(self, job: str = "") -> list[CheckpointInfo]:
        params = {"job": job} if job else {}
        return await self._records(CheckpointInfo, "checkpoints.list", "checkpoints", **params)

    async def restore(self, checkpoint: str, shards: int = 0) -> str:
        """Return a job to a checkpoint, which its holder first verifies (up to a minute). Return the job's id.
        ``shards``: hold its model in so many from now on; 0: as before."""
        params = {"id": checkpoint} | ({"shards": shards} if shards else {})
        result = await self.request("checkpoints.restore", params, timeout_s=75.0)
        return str(_checked(result, "job", str))

    async def delete_checkpoint(self, checkpoint: str) -> None:
        await self.request("checkpoints.delete", {"id": checkpoint})

    async def new_ticket(self, role: str, expires_s: float, uses: int | None, host: str) -> tuple[TicketInfo, str]:
        """Create a ticket. Return it and its text, which is secret. ``host``: empty for the seed's own."""
        optional = {name: value for name, value in (("uses", uses), ("host", host)) if value}
        return _ticket(await self.request("tickets.new", {"role": role, "expires_s": expires_s, **optional}))

    async def new_code(self, role: str) -> tuple[str, float]:
        """Open a code with which one peer can join. Return its digits, and its end in Unix seconds."""
        result = await self.request("tickets.code", {"role": role})
        return str(_checked(result, "code", str)), float(_checked(result, "expires_at", float))

    async def rotate_tickets(self) -> tuple[TicketInfo, str]:
        """Replace all tickets. Return a new one and its text."""
        return _ticket(await self.request("tickets.rotate"))

    async def tickets(self) -> list[TicketInfo]:
        return await self._records(TicketInfo, "tickets.list", "tickets")

    async def revoke_ticket(self, ticket: str) -> TicketInfo:
        """Revoke a ticket, by the start of its id, and all certificates issued for it."""
        return TicketInfo.from_map_untrusted(await self._value("tickets.revoke", "ticket", id=ticket))

    # -------------------------------------------------------------------------------------------------------- the clock

    async def clock(self) -> float:
        return float(await self._value("probe.clock", "wall", float))

    async def _value(self, method: str, key: str, kind: type = dict, **params: Any) -> Any:
        return _checked(await self.request(method, params), key, kind)

    async def _records(self, kind: type[R], method: str, key: str, **params: Any) -> list[R]:
        return _records(kind, await self.request(method, params), key)


class SeedClient(SeedRequests):
    """Operator connection to a seed.

    Attributes:
        welcome: the seed's answer to the handshake.
        connection: the connection underneath, for bulk probes.
    """

    def __init__(self, connection: Connection, welcome: Welcome, *, silence_s: float = SILENCE_S) -> None:
        self.connection = connection
        self.welcome = welcome
        self._silence_s = silence_s
        self._calls = PendingCalls()
        self._updates: deque[Update] = deque()
        self._news = asyncio.Event()
        self._lost: ConnectionLost | None = None
        self._receiver = asyncio.get_running_loop().create_task(self._receive_all(), name="wire.client.receive")

    @classmethod
    async def connect(
        cls, network: Network, host: str, port: int, *, name: str, peer_id: str = "", timeout_s: float = 5.0
    ) -> Self:
        """Dial a seed as an operator. Raises as ``wire.handshake.dial``.

        On an encrypted network ``peer_id`` must be the one in this operator's certificate.
        """
        hello = local_hello(peer_id=peer_id or new_id(), name=name, roles=[], purpose="operator")
        return cls(*await dial(network, host, port, hello, timeout_s=timeout_s, expect_role="seed"))

    async def request(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float = 20.0
    ) -> dict[str, Any]:
        send, whom = self.connection.send, "the seed"
        return await self._calls.ask(send, method, params or {}, whom=whom, timeout_s=timeout_s, named=False)

    async def news(self) -> AsyncIterator[list[Record]]:
        """Subscribe, and yield the records of one update at a time; of those that are gone, an empty list.

        Always ends with ``ConnectionLost``, or with ``ProtocolError`` if the seed sends an invalid record.
        """
        await self.request("subscribe")
        async for update in self.updates():
            kind = TOPICS.get(update.topic)
            yield [kind.from_map_untrusted(item) for item in update.items] if kind is not None else []

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates after ``request("subscribe")``, for one reader. Always ends with ``ConnectionLost``."""
        while True:
            while self._updates:
                yield self._updates.popleft()
            if self._lost is not None:
                raise self._lost.with_traceback(None)
            self._news.clear()
            await self._news.wait()  # ends at the latest when the seed is silent too long

    async def close(self) -> None:
        """Close the connection; waiting calls get ``ConnectionLost``. Never raises, may be called twice."""
        await self.connection.close()
        await asyncio.wait([self._receiver])  # it ends with the connection

    async def _receive_all(self) -> None:
        try:
            while True:
                self._take((await self._receive()).message)
        except P2PTrainError as error:
            self.connection.abort(error)
            self._lost = ConnectionLost(error.message, remedy=error.remedy)
        self._calls.fail_all("the seed", self._lost)
        self._news.set()

    async def _receive(self) -> Received:
        """Return the next frame. A seed that falls silent is probed once, and then counts as lost."""
        with suppress(DeadlineExceeded):
            return await self.connection.receive(timeout_s=self._silence_s)
        self._calls.last_id += 1
        self.connection.send(Request(self._calls.last_id, "probe.clock"))  # its answer is not waited for
        return await self.connection.receive(timeout_s=self._silence_s)

    def _take(self, message: Message) -> None:
        if isinstance(message, Update):
            if len(self._updates) >= MAX_UPDATES:
                raise ConnectionLost(f"this viewer fell {MAX_UPDATES} updates behind", remedy="connect again")
            self._updates.append(message)
            self._news.set()
        elif isinstance(message, Response) and 0 < message.id <= self._calls.last_id:
            self._calls.resolve(message)  # dropped if the caller gave up waiting
        elif not isinstance(message, Refuse):  # a Refuse explains the end that follows it
            raise ProtocolError(f"the seed sent an unexpected {type(message).__name__}")


def _checked(result: dict[str, Any], key: str, kind: type) -> Any:
    value = result.get(key)
    if not isinstance(value, kind):
        raise ProtocolError(
            f"the seed's answer has no {key!r} of type {kind.__name__}", remedy="do both sides run the same version?"
        )
    return value


def _records(kind: type[R], result: dict[str, Any], key: str) -> list[R]:
    return [kind.from_map_untrusted(item) for item in _checked(result, key, list)]


def _check_order(what: str, after: int, numbers: list[int]) -> None:
    if any(later <= earlier for earlier, later in pairwise([after, *numbers])):
        raise ProtocolError(f"the seed sent {what} that are not in order")


def _ticket(result: dict[str, Any]) -> tuple[TicketInfo, str]:
    return TicketInfo.from_map_untrusted(result.get("ticket")), str(_checked(result, "text", str))
