"""The operators' connections, and their requests that read or change nothing but members and tickets.

Each request is a method that checks its parameters; ``methods`` names them. ``roles.seed.job_requests`` has those that
change jobs. What a request refuses is an answer (``Refused``); the connection lives on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, ProtocolError, Refused
from p2ptrain.core.texts import did_you_mean
from ring.planning.measurements import known_link
from roles.seed import events
from roles.seed.admission import EnrolmentPolicy
from roles.seed.events import Map, first_that_fit, newest_that_fit
from roles.seed.job_table import JobTable
from roles.seed.jobs import JobController, JobPorts
from roles.seed.links import Survey
from roles.seed.overview import Overview
from roles.seed.peers import NAME_CHARS, ConnectedPeer, clip
from roles.seed.pool import Pool, WorkersWanted
from roles.seed.store import RECOVERIES_KEPT, Records
from wire.client import answer_request
from wire.connection import Connection
from wire.enrol import RENEW
from wire.messages import Request, Response
from wire.records import LinkInfo, runs_of
from wire.schema import Record, instance_untrusted

Params = dict[str, Any]
Result = dict[str, Any]
Method = Callable[[Params, Any], Awaitable[Result]]
"""Carries out a request with these parameters. The second argument is the connection that it came over."""
Find = Callable[[], Sequence[Record]]
Choose = Callable[[Iterable[Map]], list[Map]]

MAX_ROWS = 200
MAX_LINKED = 32
"""Largest number of workers whose links an answer has."""
SPEED_WAIT_S = 20.0
"""How long a plan waits for workers to report their speed. They load their libraries first."""
IDLE_S = 120.0
"""An operator that neither asks nor watches for this long is disconnected. Clients ask for the clock more often."""
_SLOW = frozenset({"links.list", "checkpoints.restore", "checkpoints.delete", "jobs.plan"})


def text_of(params: Params, name: str, limit: int) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise Refused("bad-parameter", f"{name} must be text", remedy=f"give {name}")
    if len(value) > limit or len(value.encode(errors="replace")) > limit:
        raise Refused("bad-parameter", f"{name} has more than {limit} bytes", remedy="make it shorter")
    return value


def job_of(params: Params, jobs: JobTable) -> JobController:
    return jobs.find(text_of(params, "job", 128))


def label_of(params: Params, name: str) -> str:
    label = clip(text_of(params, name, NAME_CHARS), NAME_CHARS)
    if not label:
        raise Refused("bad-parameter", f"{name} has no printable characters", remedy=f"give {name}")
    return label


def whole_of(params: Params, name: str, default: int | None, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``. If it is missing: ``default``, or ``Refused`` if that is None."""
    value = params.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise Refused("bad-parameter", f"{name} must be a whole number from {least} to {most}", remedy=f"change {name}")
    return value


class OperatorApi:
    """Answers operators. ``methods``: by the names of the requests. ``watch`` sends updates over a connection until
    cancelled."""

    def __init__(self, methods: Mapping[str, Method], watch: Callable[[Connection], Coroutine[Any, Any, None]]) -> None:
        self._methods, self._watch = methods, watch

    async def serve(self, connection: Connection) -> None:
        """Serve one operator until it disconnects. Answers come in order, except those that wait for a worker."""
        background, watching, slow = Background(), None, None
        try:
            while True:
                try:
                    received = await connection.receive(timeout_s=IDLE_S)
                except DeadlineExceeded:
                    if watching is None or watching.done():
                        raise
                    continue  # it only watches; its updates end if the operator stops reading
                request = received.message
                if not isinstance(request, Request):
                    raise ProtocolError(f"unexpected message {type(request).__name__} from an operator")
                if request.method == "subscribe":
                    connection.send(Response(request.id))
                    watching = watching or background.start(self._watch(connection), "watch")
                elif request.method in _SLOW:  # answers to other requests show the operator that the seed is alive
                    if slow is not None:
                        await slow
                    slow = background.start(self._answer_later(request, connection), request.method)
                else:
                    connection.send(await self.answer(request, connection))
        finally:
            await background.stop()

    async def _answer_later(self, request: Request, connection: Connection) -> None:
        response = await self.answer(request, connection)
        with suppress(ConnectionLost):  # ``serve`` sees the loss too
            connection.send(response)

    async def answer(self, request: Request, connection: Connection | None = None) -> Response:
        """``connection``: None if it comes from this process, which asks nothing about a connection."""
        return await answer_request(request, self._result(request, connection))

    async def _result(self, request: Request, connection: Connection | None) -> Result:
        method = self._methods.get(request.method)
        if method is None:
            problem = f"there is no request {clip(request.method, 80)!r}"
            raise Refused("unknown-method", problem, remedy=did_you_mean(request.method, self._methods).rstrip())
        return await method(request.params, connection)


async def measure_workers(workers: Sequence[ConnectedPeer], survey: Survey) -> None:
    """Wait until the workers have reported their speed, and measure the links between them."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SPEED_WAIT_S):
            await asyncio.gather(*(worker.speed_reported.wait() for worker in workers if worker.flops is None))
    await survey.measure_among([worker.id for worker in workers])


class ClusterRequests:
    """The requests about members, tickets and what was recorded. ``drop_unwelcome`` closes the connections whose
    certificate is no longer honoured."""

    def __init__(
        self,
        ports: JobPorts,
        jobs: JobTable,
        overview: Overview,
        pool: Pool,
        enrolment: EnrolmentPolicy,
        drop_unwelcome: Callable[[], None],
    ) -> None:
        self._ports, self._jobs, self._overview, self._pool = ports, jobs, overview, pool
        self._enrolment, self._drop_unwelcome = enrolment, drop_unwelcome

    def methods(self) -> dict[str, Method]:
        return {
            "cluster.info": self._cluster_info,
            "cluster.watch_link": self._cluster_watch_link,
            "links.list": self._links_list,
            "peers.list": partial(self._list, "peers", newest_that_fit, self._overview.peer_infos),
            "workers.list": self._workers_list,
            "peers.evict": self._peers_evict,
            "parts.list": partial(self._list, "parts", first_that_fit, self._overview.part_infos),
            "serving.list": partial(self._list, "serving", first_that_fit, self._overview.serving_infos),
            "tickets.new": self._enrolment.tickets_new,
            "tickets.code": self._enrolment.tickets_code,
            "tickets.list": self._enrolment.tickets_list,
            "tickets.revoke": self._tickets_revoke,
            "tickets.rotate": self._enrolment.tickets_rotate,
            RENEW: self._enrolment.renew,
            "probe.clock": self._probe_clock,
            "jobs.ledger": self._jobs_ledger,
            "jobs.views": self._jobs_views,
            "recoveries.list": self._recoveries_list,
            "metrics.history": self._metrics_history,
            "events.list": self._events_list,
        }

    async def watch(self, connection: Connection) -> None:
        """Send updates until cancelled, after the newest rows of jobs that are not over."""
        with self._overview.watching(with_events=True) as updates:
            controllers = self._jobs.controllers
            live = [controller.id for controller in controllers.values() if controller.live]
            for job in (live or list(controllers)[-1:])[:4]:
                updates.add(await self._ports.store.call(Records.last_metrics, job, 300))
                updates.add(await self._ports.store.call(Records.recoveries, job, 100))
            try:
                async for some in updates.rounds():
                    for update in some:
                        connection.send(update)
                        await connection.flush(timeout_s=events.PATIENCE_S)
            except DeadlineExceeded as slow:
                connection.abort(DeadlineExceeded(f"a subscriber was dropped: {slow.message}", remedy=slow.remedy))
            except ConnectionLost:
                pass  # ``OperatorApi.serve`` sees the loss too

    async def _cluster_info(self, params: Params, connection: Connection) -> Result:
        return {"cluster": self._overview.cluster_info().to_map()}

    async def _cluster_watch_link(self, params: Params, connection: Connection) -> Result:
        if not self._overview.watch_link:
            text = "this seed has no web page for other machines"
            raise Refused("no-page", text, remedy="start it with --http 0.0.0.0:8443")
        return {"link": self._overview.watch_link}

    async def _links_list(self, params: Params, connection: Connection) -> Result:
        workers = [peer for peer in self._ports.peers.connected.values() if peer.trains][:MAX_LINKED]
        await measure_workers(workers, self._ports.survey)
        known, infos = self._ports.survey.table.known, list[LinkInfo]()
        for first, second in combinations([worker.id for worker in workers], 2):
            if (link := known_link(known, first, second)) is not None:
                infos.append(LinkInfo(first, second, link.latency_s, link.bandwidth_bps))
        return {"links": first_that_fit(info.to_map() for info in infos)}

    async def _list(self, name: str, choose: Choose, find: Find, params: Params, connection: Connection) -> Result:
        infos = find()
        return {name: choose(info.to_map() for info in infos), "total": len(infos)}

    async def _workers_list(self, params: Params, connection: Connection) -> Result:
        """The workers that a verifier may use for a split model, as ``peers.list`` lists them."""
        connected = self._ports.peers.connected.values()
        verifier = next((peer for peer in connected if peer.connection is connection), None)
        if verifier is None:
            raise Refused("unknown-method", "only a verifier asks for workers", remedy="see p2ptrain peers list")
        workers = self._pool.take_demand(verifier, instance_untrusted(WorkersWanted, params, lenient=True))
        return {"peers": first_that_fit(self._overview.peer_info(worker).to_map() for worker in workers)}

    async def _peers_evict(self, params: Params, connection: Connection) -> Result:
        peer_id, name = self._find_peer(params)
        await self._enrolment.evict(peer_id, name)
        asyncio.get_running_loop().call_soon(self._drop_unwelcome)  # after the answer is sent
        return {"evicted": peer_id, "name": name}

    def _find_peer(self, params: Params) -> tuple[str, str]:
        """The id and the name of the peer that a request names. Raises ``Refused``."""
        text = text_of(params, "peer", 128)
        infos = {info.id: info.name for info in self._overview.peer_infos()}
        if text in infos or self._enrolment.knows(text):
            return text, infos.get(text, text)
        named = [(peer_id, name) for peer_id, name in infos.items() if name == text]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(peer_id for peer_id, _ in named[:4])
            raise Refused("ambiguous", f"{len(named)} peers are called {text!r}: {ids}", remedy="give the id")
        hint = did_you_mean(text, [*infos, *infos.values()])
        raise Refused("unknown-peer", f"there is no peer {clip(text, 80)!r}", remedy=f"{hint}see p2ptrain peers list")

    async def _tickets_revoke(self, params: Params, connection: Connection) -> Result:
        result = await self._enrolment.tickets_revoke(params, connection)
        asyncio.get_running_loop().call_soon(self._drop_unwelcome)
        return result

    async def _probe_clock(self, params: Params, connection: Connection) -> Result:
        return {"wall": self._ports.clock.wall()}

    async def _jobs_ledger(self, params: Params, connection: Connection) -> Result:
        controller, after = job_of(params, self._jobs), whole_of(params, "after_step", 0, 0, 2**53)
        head = await self._ports.store.call(Records.ledger_head, controller.id)
        rows = await self._ports.store.call(Records.ledger_rows, controller.id, after, 512)
        runs = (run.to_map() for run in runs_of(rows))
        begins = head.to_map() if head else None
        return {"head": begins, "runs": first_that_fit(runs), "windows": controller.record.windows}

    async def _jobs_views(self, params: Params, connection: Connection) -> Result:
        controller, after = job_of(params, self._jobs), whole_of(params, "after_generation", 0, 0, 2**53)
        views = await self._ports.store.call(Records.views, controller.id, after, MAX_ROWS)
        return {"views": first_that_fit(view.to_map() for view in views)}

    async def _recoveries_list(self, params: Params, connection: Connection) -> Result:
        controller, limit = job_of(params, self._jobs), whole_of(params, "limit", MAX_ROWS, 1, RECOVERIES_KEPT)
        found = await self._ports.store.call(Records.recoveries, controller.id, limit)
        return {"recoveries": newest_that_fit(item.to_map() for item in found), "total": len(found)}

    async def _metrics_history(self, params: Params, connection: Connection) -> Result:
        controller, limit = job_of(params, self._jobs), whole_of(params, "limit", MAX_ROWS, 1, MAX_ROWS)
        after = whole_of(params, "after_step", -1, -1, 2**53)
        rows = await self._ports.store.call(Records.metrics, controller.id, after, limit)
        return {"rows": [row.to_map() for row in rows]}

    async def _events_list(self, params: Params, connection: Connection) -> Result:
        after = whole_of(params, "after_id", 0, -MAX_ROWS, 2**53)
        limit = whole_of(params, "limit", MAX_ROWS, 1, MAX_ROWS)
        choose = newest_that_fit if after < 0 else first_that_fit
        after += await self._ports.store.call(Records.last_event_id) if after < 0 else 0  # so many of the newest ones
        found = await self._ports.store.call(Records.events, after, limit)
        return {"events": choose(event.to_map() for event in found)}
