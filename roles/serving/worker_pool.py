"""Planning of a chain: the model, the workers, their offers, the links between them, and which worker holds which
layers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError, ProtocolError, Refused, UserError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.ids import is_id
from p2ptrain.core.serving import round_to_blocks
from p2ptrain.core.threads import Thread
from ring.planning.measurements import CandidateWorker, LinkQuality
from ring.planning.serving import PlacedStage, Placement, place_model, price_chain
from ring.planning.workloads import ServingWorkload
from roles.model_directory import CACHE_FILE, FILE, DigestCache, ModelDirectory, open_model
from roles.seed.links import measured_untrusted
from roles.serving.worker_peer import ClientContext, WorkerAddress, WorkerPeer
from roles.worker.model_loading import ModelReceiver, give
from wire.address import parse_address
from wire.records import ABSENT_STATES, PeerInfo
from wire.schema import Bound, Count, Id, Record

SeedRequest = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""A request to the seed, such as ``SeedClient.request``."""

OFFER_S = 120.0  # before its first offer a worker measures its memory speed, and it may be busy with others
MEASURE_S = 1.5  # of links between workers
MODEL_OPEN_S = 600.0  # a worker hashes a model before it first sends it: seconds per gigabyte


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model as the client of a chain knows it.

    Attributes:
        id: hex of blake2b over its config and the name, dtype, shape and digest of each tensor.
        config: text of its ``config.json``.
        source: its directory on this machine, from which this client sends it; None: ``sender`` sends it.
        sender: the worker that sends it while this client is connected to that worker.
        path: directory where workers may have the model themselves, which saves a transfer; empty: unknown.
    """

    id: str
    name: str
    config: str
    source: ModelDirectory | None = None
    sender: WorkerAddress | None = None
    path: str = ""

    def load_params(self) -> dict[str, Any]:
        """Parameters of ``part.load``: what the model is, and which peer sends it."""
        sender = self.sender.to_map() if self.sender is not None else None
        return {"model": self.id, "name": self.name, "config": self.config, "path": self.path, "sender": sender}


async def model_of_directory(context: ClientContext, directory: Path) -> ModelReference:
    """Open the model in a directory of this machine. This client sends its tensors to the stages that lack them.

    Digests of tensors are cached in ``context.state``. Raises ``ConfigError``, ``StorageError``.
    """
    cache = DigestCache(context.world.disk, context.state / CACHE_FILE) if context.state is not None else None
    async with _disk(context) as disk:
        source = await disk.submit(lambda: open_model(directory.resolve(), cache))
    return ModelReference(source.model, source.name, source.config, source=source, path=str(source.directory))


@asynccontextmanager
async def sending_model(context: ClientContext, source: ModelDirectory, worker: WorkerAddress) -> AsyncIterator[None]:
    """Send this client's copy of a model to ``worker`` within the block. Raises as ``wire.handshake.dial``."""
    connection = await context.dial(worker, "give", job=source.model)
    async with _disk(context) as disk:
        task = asyncio.create_task(give(connection, source, disk), name=f"give to {worker.name}")
        try:
            yield
        finally:
            task.cancel()
            with suppress(P2PTrainError, asyncio.CancelledError):  # the load reports what went wrong
                await task
            connection.abort()


@asynccontextmanager
async def _disk(context: ClientContext) -> AsyncIterator[Thread]:
    thread = context.world.threads.start("model files")
    try:
        yield thread
    finally:
        thread.close()


async def workers_of(ask: SeedRequest, wanted: dict[str, Any] | None = None) -> list[WorkerAddress]:
    """The workers that the seed reports as reachable. Raises what ``ask`` raises.

    ``wanted``: of a verifier, what it needs (``roles.seed.pool.WorkersWanted``); then those that it may use.
    """
    answer = await (ask("peers.list", {}) if wanted is None else ask("workers.list", wanted))
    peers = answer.get("peers")
    if not isinstance(peers, list):
        raise ProtocolError("the seed answered peers.list without a list of peers")
    found = []
    for item in peers:
        info = PeerInfo.from_map_untrusted(item)
        if "worker" not in info.roles or info.state in ABSENT_STATES or not is_id(info.id):
            continue
        try:
            host, port = parse_address(info.address)
        except UserError as error:
            raise ProtocolError(f"the seed listed a peer at {info.address[:80]!r}: {error.message}") from error
        found.append(WorkerAddress(info.id, info.name, host, port, info.device))
    return found


class OfferedPart(Record):
    model: str
    start: Count
    stop: Count
    layers: Count
    dtype: str
    weights: str
    weights_bytes: Count


class Offer(Record):
    """The answer to ``part.offer``. ``memory_bytes``: its limit less the parts in use or being loaded;
    idle parts count as free."""

    memory_bytes: Count
    stream_bps: Annotated[float, Bound(1.0, 1e18)]
    device: Annotated[str, Bound(0, 80)]
    parts: Annotated[list[OfferedPart], Bound(0, 64)]


class ModelMeasurement(Record):
    """The answer to ``model.measure``. ``dtype``: in which it is computed. ``width``: elements of a hidden state."""

    layers_bytes: Annotated[list[Count], Bound(1, 4096)]
    cache_bytes: Annotated[list[Count], Bound(1, 4096)]
    first_bytes: Count
    last_bytes: Count
    tied_bytes: Count
    dtype: Annotated[str, Bound(pattern="fp32|bf16|fp16")]
    width: Annotated[int, Bound(1, 1 << 24)]

    def check(self) -> None:
        try:
            _ = self.sizes
        except ValueError as problem:
            raise ProtocolError(f"invalid sizes of a model: {problem}") from None

    @property
    def sizes(self) -> ModelSizes:
        outside = self.first_bytes, self.last_bytes, self.tied_bytes
        return ModelSizes(tuple(self.layers_bytes), tuple(self.cache_bytes), *outside)


class LoadedPart(Record):
    part: Id
    encoding: Annotated[str, Bound(0, 16)]
    device: Annotated[str, Bound(0, 80)]
    width: Count
    vocab_size: Annotated[int, Bound(1, 1 << 31)]
    weights_bytes: Count
    read_bytes: Count
    received_bytes: Count
    resident_bytes: Count


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A chain that can be loaded.

    Attributes:
        dtype, weights: as in ``PartSpec``.
        wanted: the requirements it was made for, with links. A lost stage is placed by the same requirements.
        loaded: it was found among the parts that the workers hold already.
    """

    dtype: str
    weights: str
    wanted: ServingWorkload
    placement: Placement
    spares: tuple[CandidateWorker, ...]
    loaded: bool

    @property
    def stages(self) -> tuple[PlacedStage, ...]:
        return self.placement.stages

    @property
    def positions(self) -> int:
        return self.wanted.positions


class WorkerPool:
    """The connected workers: those of a chain and its spares. ``refused``: worker name → why it is not in the pool."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context
        self.peers: dict[str, WorkerPeer] = {}
        self.offers: dict[str, Offer] = {}
        self.refused: dict[str, str] = {}
        self.links: dict[tuple[str, str], LinkQuality] = {}

    @classmethod
    async def connect(cls, context: ClientContext, workers: Sequence[WorkerAddress]) -> Self:
        """Dial all workers concurrently and get their offers. Workers that do not answer in time are left out. Raises
        ``NetworkError`` if none answers, ``UserError`` if there is none."""
        if not workers:
            raise UserError("there is no worker to hold a part of the model", remedy="start one: p2ptrain join")
        pool = cls(context)
        await asyncio.gather(*(pool._try(worker) for worker in workers))
        if not pool.peers:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in pool.refused.items())
            raise NetworkError(f"no worker can be used: {reasons}", remedy="run p2ptrain check on this machine")
        return pool

    async def _try(self, worker: WorkerAddress) -> None:
        try:
            await self.admit(worker)
        except P2PTrainError as problem:
            self.refused[worker.name] = problem.message

    async def admit(self, worker: WorkerAddress) -> WorkerPeer:
        """Dial one more worker, or a lost one again. Raises ``P2PTrainError``: it cannot be used."""
        peer = WorkerPeer(self.context, worker, await self.context.dial(worker, "chain"))
        try:
            latency_s = await peer.measure()
            await self.renew(peer)
        except BaseException:
            await peer.close()
            raise
        before = self.peers.get(worker.peer_id)
        self.peers[worker.peer_id] = peer
        self.links[self.context.peer_id, worker.peer_id] = LinkQuality(latency_s)
        if before is not None:
            await before.close()
        return peer

    async def renew(self, peer: WorkerPeer) -> None:
        """Get the current offer of a peer. Raises ``P2PTrainError``."""
        self.offers[peer.worker.peer_id] = Offer.from_map_untrusted(await peer.ask("part.offer", {}, timeout_s=OFFER_S))

    def candidate_of(self, peer: WorkerPeer) -> CandidateWorker:
        offer = self.offers[peer.worker.peer_id]
        return CandidateWorker(peer.worker.peer_id, peer.name, offer.memory_bytes, byte_s=1 / offer.stream_bps)

    async def measure_model(self, config: str, dtype: str, weights: str = "") -> ModelMeasurement:
        """Ask a worker for the sizes of a model's parts, by the text of its ``config.json``: it has torch loaded, so
        this process need not load it. Raises ``Refused`` if the model does not split, else the last worker's error."""
        problem: P2PTrainError = NetworkError(
            "no worker is there to measure the model", remedy="start one: p2ptrain join"
        )
        for peer in [peer for peer in self.peers.values() if not peer.lost]:
            try:
                params = {"config": config, "dtype": dtype, "weights": weights}
                answer = await peer.ask("model.measure", params, timeout_s=OFFER_S)
                return ModelMeasurement.from_map_untrusted(answer)
            except (NetworkError, PeerError) as error:
                if isinstance(error, Refused) and error.code == "bad-spec":  # the model's fault: others say the same
                    raise
                problem = error
        raise problem

    async def plan(
        self,
        model: ModelReference,
        sizes: ModelSizes,
        *,
        positions: int,
        activation_bytes: int,
        dtype: str = "",
        weights: str = "",
        stages: int | None = None,
        without: Collection[str] = (),
    ) -> ChainPlan:
        """Measure the relevant links and place the model. A chain of parts that are loaded already is used again.

        Args:
            positions: cache positions of all sessions together.
            activation_bytes: size of one position's hidden state between stages.
            stages: number of stages; None: the best number.
            without: ids of workers that are not used.

        Raises:
            UserError, ResourceError: as ``ring.planning.serving.place_model``.
        """
        there = [peer for id, peer in self.peers.items() if not peer.lost and id not in without]
        seats = [self.candidate_of(peer) for peer in there]
        await self._measure(seats)
        wanted = ServingWorkload(
            sizes, round_to_blocks(positions), activation_bytes, self.context.peer_id, dict(self.links)
        )
        loaded = self._find_loaded_chain(wanted, seats, (model.id, dtype, weights), stages)
        made = loaded or place_model(wanted, seats, stages=stages)
        used = {stage.peer.id for stage in made.stages}
        spares = tuple(seat for seat in seats if seat.id not in used)
        return ChainPlan(dtype, weights, wanted, made, spares, loaded is not None)

    async def model_at(self, path: str, peer_id: str) -> ModelReference:
        """Open the model in the directory ``path`` of a connected worker, which sends it to others while this client
        stays. Raises ``Refused``: it has no model there; ``NetworkError``, ``ProtocolError``: the worker fails."""
        peer = self.peers[peer_id]
        answer = await peer.ask("model.open", {"path": path}, timeout_s=MODEL_OPEN_S)
        model_id, config = answer.get("model"), answer.get("config")
        if not isinstance(model_id, str) or not is_id(model_id) or not isinstance(config, str):
            raise ProtocolError(f"{peer.name} answered model.open without a model")
        name = path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] or path
        return ModelReference(model_id, name, config, sender=peer.worker, path=path)

    async def files(self, model: ModelReference, names: Sequence[str]) -> dict[str, bytes]:
        """Fetch files that come with a worker's model, such as its tokenizer's. Missing files are left out. Raises
        ``NetworkError``, ``PeerError``: the sender fails."""
        assert model.sender is not None, "the other models are in a directory of this machine"
        connection = await self.context.dial(model.sender, "model", job=model.id)
        async with _disk(self.context) as disk:
            receiver = ModelReceiver(model.id, disk)
            async with receiver.taking(connection, model.sender.name):
                table = await receiver.table(model.config)
                wanted = [table[name] for name in names if name in table and table[name].dtype == FILE]
                return {record.name: bytes(data) async for record, data in receiver.tensors(wanted)}

    async def close(self) -> None:
        """Disconnect all workers. Their parts stay loaded. Never raises."""
        await asyncio.gather(*(peer.close() for peer in self.peers.values()))

    # ------------------------------------------------------------------------------------------------------ internals

    async def _measure(self, seats: Sequence[CandidateWorker]) -> None:
        likely = sorted(seats, key=lambda seat: (-min(seat.memory_bytes / seat.byte_s, 1e300), seat.id))
        chosen = [seat.id for seat in likely[:8]]
        await asyncio.gather(*(self._measure_from(here, chosen) for here in chosen))

    async def _measure_from(self, here: str, others: Sequence[str]) -> None:
        me = self.peers[here]
        # Each pair is measured from one side: a link is assumed to be symmetric.
        wanted = [self.peers[other].worker for other in others if here < other and (here, other) not in self.links]
        if not wanted:
            return
        params = {"peers": [worker.to_map() for worker in wanted], "deadline_s": MEASURE_S}
        try:
            answer = await me.ask("links.measure", params, timeout_s=MEASURE_S + 0.5)
            found = measured_untrusted(answer, {worker.peer_id for worker in wanted})
        except P2PTrainError as problem:  # an unknown link counts as the median
            self.context.notify("info", "links", f"{me.name} did not measure its links: {problem.message}")
            return
        for there, link in found.items():
            self.links[here, there] = link

    def _find_loaded_chain(
        self, wanted: ServingWorkload, seats: Sequence[CandidateWorker], kind: tuple[str, str, str], stages: int | None
    ) -> Placement | None:
        """The chain of the fewest loaded parts. ``kind``: id of their model, dtype and weights."""
        layers = wanted.sizes.layers
        held = [
            (seat, part.start, part.stop)
            for seat in seats
            for part in self.offers[seat.id].parts
            if (part.model, part.dtype, part.weights, part.layers) == (*kind, layers)
            and part.start < part.stop <= layers
        ]
        chains: dict[int, list[tuple[CandidateWorker, int, int]]] = {layers: []}  # first layer -> parts up to the end
        for part in sorted(held, key=lambda part: -part[1]):
            seat, start, stop = part
            behind = chains.get(stop)
            if behind is None or any(other.id == seat.id for other, _, _ in behind):
                continue
            if start not in chains or len(behind) + 1 < len(chains[start]):
                chains[start] = [part, *behind]
        chain = chains.get(0, [])
        return price_chain(wanted, seats, chain) if chain and stages in (None, len(chain)) else None
