"""One process of a benchmark. It carries out orders, and holds what is measured: a ring, Gloo, plain sockets, a
training, a stage of a pipeline, the models of transformers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import Network
from p2ptrain.lab.bench.sockets import PIECE_BYTES, SocketRing, peer_id
from p2ptrain.lab.ring_member import LocalMember, local_view
from ring.chain import Payload
from ring.codecs import Codec, codec_named
from ring.planning.schedule import StageSchedule
from ring.session import RingSession
from ring.view import View
from roles.compute_thread import ComputeThread
from roles.strategies.pipeline import StageRunner
from wire.credentials import Credentials
from wire.emulate import EmulatedNetwork, preset_named
from wire.tls import TlsNetwork
from wire.transport import TcpNetwork

if TYPE_CHECKING:
    from p2ptrain.compute.gloo import GlooGroup
    from p2ptrain.compute.rivals import TransformersWriter
    from p2ptrain.lab.bench.training import TrainingMember

TILE_NUMEL = 262_147  # a prime, so that the repeated pattern differs on every chunk and sub-chunk

Answer = dict[str, Any]


async def run_member(rank: int, size: int) -> None:
    """Carry out orders until standard input ends; then exit at once."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries goes to the log
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1)  # the next order comes after the answer
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(orders.put_nowait, json.loads(line))
        os._exit(0)  # there is nothing to save, and a rival may block the event loop

    threading.Thread(target=read, name="orders", daemon=True).start()
    member = BenchMember(rank, size)
    while True:
        order = await orders.get()
        try:
            act: Callable[..., Awaitable[Answer]] = getattr(member, order.pop("do"))
            answer = await act(**order)
        except P2PTrainError as error:
            answer = {"failed": error.message, "remedy": error.remedy}
        except OSError as error:  # ``ssl.SSLError`` is one
            answer = {"failed": f"a plain socket ended: {error}", "remedy": ""}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


class BenchMember:
    """The state of one member between orders. Every public method is an order. One that begins something, such as
    ``form``, sets what later orders use."""

    _local: LocalMember
    _session: RingSession
    _training: TrainingMember
    _stage: StageRunner
    _writer: TransformersWriter

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._gloo: GlooGroup | None = None
        self._sockets: dict[str, SocketRing] = {}
        self._buffer: npt.NDArray[np.float32 | np.uint8] = np.zeros(0, np.float32)
        self._landed: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._tiles: list[npt.NDArray[np.float32]] = []
        self._codec: Codec | None = None

    # -------------------------------------------------------------------------------------------------- coming together

    async def listen(self, *, link: str, credentials: str) -> Answer:
        """Listen for ring connections, over an emulated link and with TLS if these are given."""
        network: Network = TcpNetwork()
        if own := self._load(credentials):
            network = TlsNetwork(network, own, require_client_certificate=True)
        if link:
            network = EmulatedNetwork(network, preset_named(link), seed=self.rank)
        self._local = LocalMember(peer_id(self.rank), network, seed=self.rank)
        return {"port": await self._local.listen()}

    async def form(self, *, ports: list[int], sub_chunk_bytes: int, streams: int, codec: str) -> Answer:
        """Form the ring. ``codec`` is for gradients; ``prepare`` sets that of an all-reduce."""
        self._session = await self._local.form(
            self._view_of(ports),
            codec=codec,
            death_s=600.0,  # a rival may block the loop as long as an order takes
            streams=streams,
            sub_chunk_bytes=sub_chunk_bytes,
            timeout_s=30.0,
        )
        return {}

    @staticmethod
    def _view_of(ports: list[int]) -> View:
        return local_view({peer_id(rank): port for rank, port in enumerate(ports)})

    async def listen_plainly(self, *, name: str, credentials: str) -> Answer:
        """Listen for plain sockets beside the ring, under this name."""
        self._sockets[name] = SocketRing(self._load(credentials))
        return {"port": self._sockets[name].port}

    def _load(self, credentials: str) -> Credentials | None:
        return Credentials.load(RealDisk(), Path(credentials, peer_id(self.rank))) if credentials else None

    async def connect_plainly(self, *, name: str, ports: list[int]) -> Answer:
        self._sockets[name].connect(ports[(self.rank + 1) % self.size])
        return {}

    async def open_gloo(self, *, store_port: int, timeout_s: float, backends: list[str]) -> Answer:
        """Form groups of these backends. ``missing`` in the answer says why there is none."""
        from p2ptrain.compute import gloo

        missing = gloo.why_no_gloo()
        if not missing:
            self._gloo = gloo.GlooGroup(self.rank, self.size, store_port, backends, timeout_s=timeout_s)
        return {"missing": missing, "torch": gloo.TORCH_VERSION}

    # ------------------------------------------------------------------------------------------------------- all-reduce

    async def prepare(self, *, numel: int, codec: str) -> Answer:
        """Allocate the tensor, and the pattern with which each rank fills it, which resembles gradients."""
        self._codec = codec_named(codec) if codec != "fp32" else None
        generators = map(np.random.default_rng, range(self.size))
        self._tiles = [generator.standard_normal(TILE_NUMEL, np.float32) for generator in generators]
        self._buffer, self._landed = np.zeros(0, np.float32), np.zeros(0, np.uint8)  # free the old ones first
        self._buffer = np.empty(numel, np.float32)
        self._landed = np.zeros(self._buffer.nbytes, np.uint8)
        self._fill()
        gc.collect()
        gc.freeze()  # keeps torch's many objects out of the garbage collections of samples
        return {}

    async def sample(self, *, contender: str, repeat: int) -> Answer:
        """After a barrier, seconds of one operation: the mean of ``repeat`` in a row."""
        self._fill()
        gc.disable()
        try:
            await self._session.barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                await self._reduce(contender)
            return {"seconds": (time.perf_counter() - began) / repeat}
        finally:
            gc.enable()

    async def check(self, *, contender: str) -> Answer:
        """Reduce once more; return the digest of the result, and its relative error against the known sum."""
        self._fill()
        await self._reduce(contender)
        expected = sum(self._tiles, start=np.zeros(TILE_NUMEL))
        lost = total = 0.0
        for start in range(0, self._buffer.size, TILE_NUMEL):
            part = self._buffer[start : start + TILE_NUMEL].astype(np.float64)
            lost += float(np.square(part - expected[: part.size]).sum())
            total += float(np.square(expected[: part.size]).sum())
        digest = xxhash.xxh3_128_hexdigest(self._buffer.view(np.uint8).data)
        return {"digest": digest, "error": (lost / total) ** 0.5 if total else 0.0}

    async def _reduce(self, contender: str) -> None:
        match contender:
            case "ring":
                await self._session.submit(self._buffer, "float32", codec=self._codec)
            case "ring plain":
                await self._session.submit(self._buffer, "float32")
            case "gloo" | "p2p":
                assert self._gloo is not None
                self._gloo.all_reduce(self._buffer, contender)
            case _:  # sockets move what an all-reduce moves: 2 (n - 1) / n of the tensor out, and as much in
                total_bytes = max(1, 2 * (self.size - 1) * self._buffer.nbytes // self.size)
                self._sockets[contender].exchange(
                    self._buffer.view(np.uint8).data,
                    self._landed.data,
                    send_bytes=total_bytes,
                    receive_bytes=total_bytes,
                    piece_bytes=PIECE_BYTES,
                )

    def _fill(self) -> None:
        tile, buffer = self._tiles[self.rank], self._buffer
        for start in range(0, buffer.size, TILE_NUMEL):
            part = buffer[start : start + TILE_NUMEL]
            part[:] = tile[: part.size]

    # ------------------------------------------------------------------------------------------------------------- link

    async def ping(self, *, name: str, count: int) -> Answer:
        """Measure round trips between the two members. The first ones wake the processor and do not count."""
        sockets = self._sockets[name]
        sockets.ping(self.rank == 0, 50)
        return {"seconds": sockets.ping(self.rank == 0, count)}

    async def transfer(self, *, name: str, total_bytes: int, piece_bytes: int, both: bool) -> Answer:
        """Measure the seconds of ``total_bytes`` from the first member to the second, or in ``both`` directions."""
        if self._buffer.nbytes != 2 * piece_bytes:
            self._buffer = np.zeros(2 * piece_bytes, np.uint8)
        await self._session.barrier()
        began = time.perf_counter()
        self._sockets[name].exchange(
            self._buffer[:piece_bytes].data,
            self._buffer[piece_bytes:].data,
            send_bytes=total_bytes if both or self.rank == 0 else 0,
            receive_bytes=total_bytes if both or self.rank == 1 else 0,
            piece_bytes=piece_bytes,
        )
        return {"seconds": time.perf_counter() - began}

    # ------------------------------------------------------------------------------------------------ other benchmarks

    async def build(self, **how: Any) -> Answer:
        """As ``TrainingMember.build``."""
        from p2ptrain.lab.bench.training import TrainingMember

        self._training = TrainingMember(self._session, self._gloo)
        return await self._training.build(**how)

    async def train(self, *, contender: str, first: int, count: int) -> Answer:
        await self._session.barrier()
        return await self._training.train(contender, first, count)

    async def form_chain(self, *, ports: list[int], payload_bytes: int) -> Answer:
        """Form the chain of a pipeline. Returns the measured round trip of the hop to the next stage, with payloads."""
        chain = await self._local.form_chain(
            replace(self._view_of(ports), heartbeat_s=0.5, death_s=30.0),
            activation_bytes=payload_bytes,
            gradient_bytes=payload_bytes,
            timeout_s=60.0,
        )
        self._stage = StageRunner(chain, ComputeThread())
        return {"round_trip_s": chain.round_trip_s}

    async def run_stage(
        self, *, micro_batches: int, warm_ups: list[int], forward_s: float, backward_s: float, payload_bytes: int
    ) -> Answer:
        """Run one step of a stage whose passes only take time. Returns its seconds."""
        payload = np.zeros(payload_bytes, np.uint8)

        def forward(index: int, inputs: Payload | None) -> Payload | None:
            time.sleep(forward_s)
            return None if self.rank == self.size - 1 else payload.copy()

        def backward(index: int, gradient: Payload | None) -> Payload | None:
            time.sleep(backward_s)
            return None if self.rank == 0 else payload.copy()

        schedule = StageSchedule(micro_batches, tuple(warm_ups))
        await self._stage.run(schedule, forward, backward, patience_s=120.0)
        return {"seconds": self._stage.step_s}

    async def make_model(self, *, directory: str, **how: Any) -> Answer:
        """``how``: arguments of ``write_random_model``."""
        from p2ptrain.lab.bench.generate import write_random_model

        await asyncio.to_thread(write_random_model, Path(directory), **how)
        return {}

    async def open_writer(self, *, model: str, drafter: str = "", **how: int) -> Answer:
        """Load models for ``write_texts``. ``how``: arguments of ``TransformersWriter``."""
        from p2ptrain.compute.gloo import TORCH_VERSION
        from p2ptrain.compute.rivals import TransformersWriter

        load = partial(TransformersWriter, Path(model), Path(drafter) if drafter else None, **how)
        self._writer = writer = await asyncio.to_thread(load)
        return {"torch": TORCH_VERSION, "can_assist": writer.can_assist}

    async def make_prompt(self, *, seed: int, tokens: int) -> Answer:
        return {"prompt": self._writer.prompt(seed, tokens)}

    async def write_texts(
        self, *, prompts: list[str], tokens: int, temperature: float = 0.0, seed: int = 0, **how: bool
    ) -> Answer:
        """``how``: arguments of ``TransformersWriter.write``."""
        from p2ptrain.core.serving import SamplingOptions

        options = SamplingOptions(temperature=temperature, seed=seed)
        texts, seconds = await asyncio.to_thread(self._writer.write, prompts, tokens, options, **how)
        return {"texts": texts, "seconds": seconds}
