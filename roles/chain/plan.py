"""Who holds which layers: workers that are there, what they offer, the links between them, and the chain made of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import ring.placement as placing
from p2ptrain.core.errors import NetworkError, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.ids import is_id
from ring.order import LinkQuality
from ring.placement import Placement, Wanted
from ring.training_costs import ModelSizes
from roles.chain.around import Around, WorkerAt
from roles.chain.models import Model, small_files
from roles.chain.peer import Peer
from roles.seed.links import measured_untrusted
from wire.address import parse_address
from wire.records import PeerInfo

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

OFFER_S = 30.0
"""A worker measures how fast it reads memory before its first offer, and may compute for others meanwhile."""
MEASURED_PEERS = 8
"""Peers between which links are measured: those that may come into the chain."""
ANSWER_S = 0.5
"""Of the time for measuring: the answers' way back."""
AS_GOOD = 1.5
"""Parts that are loaded already are used where that costs no more than this factor of time: others have to be loaded
first, and what is predicted of idle peers on a busy machine differs by a third from one time to the next."""
MODEL_OPEN_S = 600.0
"""A worker hashes a model that it never gave before: seconds per gigabyte."""
MAX_PARTS = 64
LOOKED_AT = 10_000
"""Beginnings of chains of loaded parts: there are as many as orders of the peers, where each has many parts."""
_GONE = frozenset({"lost", "away", "leaving", "failed"})


async def workers_of(ask: Ask) -> list[WorkerAt]:
    """The workers that a seed knows to be there. ``ask`` is ``SeedClient.request``. Raises what it raises."""
    answer = await ask("peers.list", {})
    peers = answer.get("peers")
    if not isinstance(peers, list):
        raise ProtocolError("the seed answered peers.list without a list of peers")
    found = []
    for item in peers:
        info = PeerInfo.from_map_untrusted(item)
        if "worker" not in info.roles or info.state in _GONE or not is_id(info.id):
            continue
        try:
            host, port = parse_address(info.address)
        except UserError as error:
            raise ProtocolError(f"the seed tells of a peer at {info.address[:80]!r}: {error.message}") from error
        found.append(WorkerAt(info.id, info.name, host, port, info.device))
    return found


# -------------------------------------------------------------------------------------------------------------- offers


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part that a worker has loaded."""

    model: str
    start: int
    stop: int
    layers: int
    dtype: str
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker has for parts. ``memory_bytes``: of its limit, what is not in use or promised."""

    memory_bytes: int
    limit_bytes: int
    stream_bps: float
    device: str
    parts: tuple[HeldPart, ...]


def offer_untrusted(answer: dict[str, Any]) -> Offer:
    """The answer to ``part.offer``. Raises ``ProtocolError``."""
    parts = answer.get("parts")
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise ProtocolError("an offer without a list of parts")
    device = answer.get("device")
    rate = answer.get("stream_bps")
    if not isinstance(device, str) or not isinstance(rate, int | float) or isinstance(rate, bool):
        raise ProtocolError("an offer without a device, or its speed")
    if not math.isfinite(rate) or not 0 < rate < 1e18:
        raise ProtocolError(f"an offer of {rate} bytes per second")
    return Offer(
        _count(answer, "memory_bytes"),
        _count(answer, "limit_bytes"),
        float(rate),
        device[:80],
        tuple(_part_untrusted(item) for item in parts),
    )


def _part_untrusted(item: object) -> HeldPart:
    if not isinstance(item, dict):
        raise ProtocolError("a part that is no map")
    model, dtype = item.get("model"), item.get("dtype")
    if not isinstance(model, str) or not isinstance(dtype, str):
        raise ProtocolError("a part without model or dtype")
    counts = [_count(item, name) for name in ("start", "stop", "layers", "weights_bytes")]
    return HeldPart(model, counts[0], counts[1], counts[2], dtype, counts[3])


def _count(source: dict[str, Any], name: str) -> int:
    value = source.get(name)
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise ProtocolError(f"{name} is no count")
    return value


# --------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan. ``loaded``: the peer holds the part already."""

    worker: WorkerAt
    start: int
    stop: int
    loaded: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A chain that can be loaded.

    Attributes:
        dtype: of ``PartSpec``.
        wanted: for what it was made, links included: a lost stage's place is given away by the same measure.
        placement: how it was found, and what it is predicted to do.
        spares: who else was there, as placement sees them.
    """

    stages: tuple[StagePlan, ...]
    dtype: str
    wanted: Wanted
    placement: Placement
    spares: tuple[placing.Peer, ...]

    @property
    def layers(self) -> int:
        return self.wanted.sizes.layers

    @property
    def positions(self) -> int:
        """To have cache for, of all sessions together."""
        return self.wanted.positions


@dataclass
class Crew:
    """The workers that are dialled: those of a chain and their spares. Kept connected until ``close``.

    Attributes:
        peers: by id.
        offers: of each, as it said last.
        refused: name → why a worker is not of the crew.
        links: measured so far.
    """

    around: Around
    peers: dict[str, Peer]
    offers: dict[str, Offer]
    refused: dict[str, str] = field(default_factory=dict)
    links: dict[tuple[str, str], LinkQuality] = field(default_factory=dict)

    @classmethod
    async def meet(cls, around: Around, workers: Sequence[WorkerAt], *, timeout_s: float = 5.0) -> Self:
        """Dial all, side by side, and hear what they offer; who does not answer in time is left out.

        Raises:
            NetworkError: nobody answered; it says why for each.
            UserError: there is no worker.
        """
        if not workers:
            raise UserError("no worker is there to hold a part of the model", remedy="start some: p2ptrain join")
        crew = cls(around, {}, {})
        await asyncio.gather(*(crew._meet(worker, timeout_s) for worker in workers))
        if not crew.peers:
            said = "; ".join(f"{name}: {reason}" for name, reason in crew.refused.items())
            raise NetworkError(f"no worker can be used: {said}", remedy="see p2ptrain check, on this machine")
        return crew

    async def _meet(self, worker: WorkerAt, timeout_s: float) -> None:
        try:
            await self.admit(worker, timeout_s=timeout_s)
        except P2PTrainError as problem:
            self.refused[worker.name] = problem.message

    async def admit(self, worker: WorkerAt, *, timeout_s: float = 5.0) -> Peer:
        """Dial one more, or one that was lost. Raises ``P2PTrainError``: it cannot be used."""
        peer = await Peer.dial(self.around, worker, timeout_s=timeout_s)
        try:
            latency_s = await peer.measure()
            await self.renew(peer)
        except BaseException:
            await peer.close()
            raise
        before = self.peers.get(worker.peer_id)
        self.peers[worker.peer_id] = peer
        self.links[self.around.peer_id, worker.peer_id] = LinkQuality(latency_s)
        if before is not None:
            await before.close()
        return peer

    async def renew(self, peer: Peer) -> Offer:
        """What a peer offers now. Raises ``P2PTrainError``."""
        offer = offer_untrusted(await peer.ask("part.offer", {}, timeout_s=OFFER_S))
        self.offers[peer.worker.peer_id] = offer
        return offer

    def seen(self, peer: Peer) -> placing.Peer:
        """As placement sees it."""
        offer = self.offers[peer.worker.peer_id]
        return placing.Peer(peer.worker.peer_id, peer.name, offer.memory_bytes, 1 / offer.stream_bps)

    async def plan(
        self,
        model: Model,
        sizes: ModelSizes,
        *,
        positions: int,
        activation_bytes: int,
        dtype: str = "",
        stages: int | None = None,
        measure_s: float = 2.0,
    ) -> Plan:
        """Measure the links that matter and place the model.

        Args:
            positions: to have cache for, of all sessions together.
            activation_bytes: of one position between stages.
            stages: how many; None for the best number.
            measure_s: what measuring may take.

        Raises:
            UserError, ResourceError: as ``ring.placement.place``.
        """
        there = [peer for peer in self.peers.values() if not peer.lost]
        seats = [self.seen(peer) for peer in there]
        await self._measure(seats, measure_s)
        wanted = Wanted(sizes, positions, activation_bytes, self.around.peer_id, dict(self.links))
        made = placing.place(wanted, seats, stages=stages)
        loaded = self._loaded(wanted, model, dtype, seats, stages)
        if loaded is not None and _as_good(loaded, made):
            made = loaded
        planned = []
        for stage in made.stages:
            held = self._holds(stage.peer.id, model, dtype, sizes.layers)
            worker = self.peers[stage.peer.id].worker
            planned.append(StagePlan(worker, stage.start, stage.stop, (stage.start, stage.stop) in held))
        used = {stage.peer.id for stage in made.stages}
        spares = tuple(seat for seat in seats if seat.id not in used)
        return Plan(tuple(planned), dtype, wanted, made, spares)

    async def model_at(self, path: str, *, worker: str = "") -> Model:
        """A model that lies on a worker, which gives it from now on: for as long as this client is connected.

        Args:
            path: of its directory there. worker: its name or id; empty: whoever has it.

        Raises:
            Refused: nobody has a model there. UserError: there is no such worker.
        """
        asked = [peer for peer in self.peers.values() if worker in ("", peer.name, peer.worker.peer_id)]
        if not asked:
            names = ", ".join(sorted(peer.name for peer in self.peers.values()))
            raise UserError(f"there is no worker {worker!r}", remedy=f"there are: {names}")
        problems = []
        for peer in asked:
            try:
                answer = await peer.ask("model.open", {"path": path}, timeout_s=MODEL_OPEN_S)
                model_id, config = answer.get("model"), answer.get("config")
                if not isinstance(model_id, str) or not is_id(model_id) or not isinstance(config, str):
                    raise ProtocolError(f"{peer.name} answered model.open without a model")
            except (Refused, NetworkError, ProtocolError) as problem:
                problems.append(problem.message)
                continue
            name = path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] or path
            return Model(model_id, name, config, giver=peer.worker, path=path)
        text = f"no worker has a model at {path}: {'; '.join(problems)}"
        raise Refused("no-model", text, remedy="name a directory with config.json and *.safetensors on one of them")

    async def files(self, model: Model, names: Sequence[str]) -> dict[str, bytes]:
        """As ``roles.chain.models.small_files``."""
        return await small_files(self.around, model, names)

    async def close(self) -> None:
        """Let all go. Parts stay loaded there. Never raises."""
        await asyncio.gather(*(peer.close() for peer in self.peers.values()))

    # ------------------------------------------------------------------------------------------------------ internals

    async def _measure(self, seats: Sequence[placing.Peer], measure_s: float) -> None:
        """The links between the peers that are likely to come into the chain: the largest and fastest of them."""
        likely = sorted(seats, key=lambda seat: (-min(seat.memory_bytes / seat.byte_s, 1e300), seat.id))
        chosen = [seat.id for seat in likely[:MEASURED_PEERS]]
        if len(chosen) > 1 and measure_s > ANSWER_S:
            await asyncio.gather(*(self._measure_from(here, chosen, measure_s) for here in chosen))

    async def _measure_from(self, here: str, others: Sequence[str], measure_s: float) -> None:
        me = self.peers[here]
        # Each pair is measured from one side: a link is taken to be alike both ways until it is known better.
        wanted = [self.peers[other].worker for other in others if here < other and (here, other) not in self.links]
        if not wanted:
            return
        peers = [{"id": each.peer_id, "host": each.seen_from(me.worker), "port": each.port} for each in wanted]
        params = {"peers": peers, "deadline_s": measure_s - ANSWER_S}
        try:
            answer = await me.ask("links.measure", params, timeout_s=measure_s)
            found = measured_untrusted(answer, {each.peer_id for each in wanted})
        except P2PTrainError as problem:  # what is not known counts as the median
            self.around.notify("info", "links", f"{me.name} did not measure its links: {problem.message}")
            return
        for there, link in found.items():
            self.links[here, there] = link

    def _holds(self, peer_id: str, model: Model, dtype: str, layers: int) -> list[tuple[int, int]]:
        """The layers of ``model`` that a peer has loaded."""
        parts = self.offers[peer_id].parts
        return [
            (part.start, part.stop)
            for part in parts
            if (part.model, part.dtype, part.layers) == (model.id, dtype, layers) and part.start < part.stop <= layers
        ]

    def _loaded(
        self, wanted: Wanted, model: Model, dtype: str, seats: Sequence[placing.Peer], stages: int | None
    ) -> Placement | None:
        """The best chain of parts that are loaded already; None where they make none."""
        layers = wanted.sizes.layers
        held = [(seat, start, stop) for seat in seats for start, stop in self._holds(seat.id, model, dtype, layers)]
        chains: list[list[tuple[placing.Peer, int, int]]] = [[]]
        whole: list[list[tuple[placing.Peer, int, int]]] = []
        leads = {layers}  # layers from which parts lead to the end
        for _, start, stop in sorted(held, key=lambda part: -part[1]):
            if stop in leads:
                leads.add(start)
        held = [part for part in held if part[2] in leads]
        for _ in range(LOOKED_AT):
            if not chains or len(whole) >= MAX_PARTS:
                break
            chain = chains.pop()
            at = chain[-1][2] if chain else 0
            if at == layers:
                whole.append(chain)
                continue
            used = {seat.id for seat, _, _ in chain}
            chains += [[*chain, part] for part in held if part[1] == at and part[0].id not in used]
        priced = [made for chain in whole if (made := placing.priced(wanted, seats, chain)) is not None]
        fitting = [made for made in priced if stages in (None, len(made.stages))]
        return min(fitting, key=lambda made: (made.bottleneck_s, made.token_s), default=None)


def _as_good(one: Placement, other: Placement) -> bool:
    return one.token_s <= AS_GOOD * other.token_s and one.bottleneck_s <= AS_GOOD * other.bottleneck_s
