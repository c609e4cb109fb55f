"""The operators' requests about the cluster: its peers, links, parts and serving peers, and its tickets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations

from p2ptrain.core.errors import Refused
from p2ptrain.core.world import Clock
from ring.planning.measurements import known_link
from roles.seed.enrolment import EnrolmentPolicy
from roles.seed.events import first_that_fit, newest_that_fit
from roles.seed.links import Survey
from roles.seed.operator_api import Method, Params, Result, text_of
from roles.seed.overview import Overview
from roles.seed.peers import ConnectedPeer, PeerTable, clipped, did_you_mean
from roles.seed.serving import part_infos
from wire.connection import Connection
from wire.enrol import RENEW
from wire.records import LinkInfo

MAX_LINKED = 32
"""Largest number of workers whose links an answer has."""
SPEED_WAIT_S = 20.0
"""How long a plan waits for workers to report their speed. They load their libraries first."""


async def measure_workers(workers: Sequence[ConnectedPeer], survey: Survey) -> None:
    """Wait until the workers have reported their speed, and measure the links between them."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SPEED_WAIT_S):
            await asyncio.gather(*(worker.speed_reported.wait() for worker in workers if worker.flops is None))
    await survey.measure_among([worker.id for worker in workers], lambda: None)


class PeerRequests:
    """``drop_unwelcome`` closes the connections whose certificate is no longer honoured."""

    def __init__(
        self,
        clock: Clock,
        overview: Overview,
        peers: PeerTable,
        survey: Survey,
        enrolment: EnrolmentPolicy,
        drop_unwelcome: Callable[[], None],
    ) -> None:
        self._clock, self._overview, self._peers, self._survey = clock, overview, peers, survey
        self._enrolment, self._drop_unwelcome = enrolment, drop_unwelcome

    def methods(self) -> dict[str, Method]:
        return {
            "cluster.info": self._cluster_info,
            "links.list": self._links_list,
            "peers.list": self._peers_list,
            "peers.evict": self._peers_evict,
            "parts.list": self._parts_list,
            "serving.list": self._serving_list,
            "tickets.new": self._enrolment.tickets_new,
            "tickets.list": self._enrolment.tickets_list,
            "tickets.revoke": self._tickets_revoke,
            "tickets.rotate": self._enrolment.tickets_rotate,
            RENEW: self._enrolment.renew,
            "probe.clock": self._probe_clock,
        }

    async def _cluster_info(self, params: Params, connection: Connection) -> Result:
        return {"cluster": self._overview.cluster_info().to_map()}

    async def _peers_list(self, params: Params, connection: Connection) -> Result:
        infos = self._overview.peer_infos()
        return {"peers": newest_that_fit(info.to_map() for info in infos), "total": len(infos)}

    async def _links_list(self, params: Params, connection: Connection) -> Result:
        workers = [peer for peer in self._peers.connected.values() if peer.trains][:MAX_LINKED]
        await measure_workers(workers, self._survey)
        known, infos = self._survey.table.known, list[LinkInfo]()
        for one, other in combinations([worker.id for worker in workers], 2):
            if (way := known_link(known, one, other)) is not None:
                infos.append(LinkInfo(one, other, way.latency_s, way.bandwidth_bps))
        return {"links": first_that_fit(info.to_map() for info in infos)}

    async def _parts_list(self, params: Params, connection: Connection) -> Result:
        infos = part_infos(self._peers.connected.values())
        return {"parts": first_that_fit(info.to_map() for info in infos), "total": len(infos)}

    async def _serving_list(self, params: Params, connection: Connection) -> Result:
        infos = self._overview.serving_infos()
        return {"serving": first_that_fit(info.to_map() for info in infos), "total": len(infos)}

    async def _peers_evict(self, params: Params, connection: Connection) -> Result:
        peer_id, name = self._find(params)
        await self._enrolment.evict(peer_id, name)
        self._drop_unwelcome()
        return {"evicted": peer_id, "name": name}

    def _find(self, params: Params) -> tuple[str, str]:
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
        raise Refused("unknown-peer", f"there is no peer {clipped(text, 80)!r}{hint}", remedy="see p2ptrain peers list")

    async def _tickets_revoke(self, params: Params, connection: Connection) -> Result:
        result = await self._enrolment.tickets_revoke(params, connection)
        self._drop_unwelcome()
        return result

    async def _probe_clock(self, params: Params, connection: Connection) -> Result:
        return {"wall": self._clock.wall()}
