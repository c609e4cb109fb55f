"""An island: one worker that is several processes, each with a device of its own, such as all GPUs of a machine.

Process 0 *leads*: it is the worker that the seed knows, and its ``IslandTrainer`` is the worker's engine. The others
*follow*. Whatever the leader is asked for it sends them as a command, and all do it together::

    leader     micro_batch(8) -- command --> micro-batch 8 ------.                        .-- apply
    follower 1                               micro-batch 9 ------+-- sum --> the ring ----+-- apply
    follower 2                               micro-batch 10 -----'                        '-- apply

A *round* is one micro-batch at each process. FSDP2 needs a pass of every process, so in the last round of a share some
may compute one that does not count: of 4 micro-batches at 3 processes the first round has 0, 1 and 2, and in the second
all three compute 3, which counts at the leader. Every process holds rows of each tensor (``compute.fsdp``), with their
gradients and moments. The leader gathers the gradients when the share is computed, in the layout of a worker of one
process, so they meet in one ring; then each process takes its rows of the ring's sum. With ``local`` an inner step is a
round: the mean of its gradients.

The processes are ``torch.distributed``'s: NCCL between GPUs, Gloo for commands and between CPUs. A command is one
msgpack list, after its size. Nothing is pickled.

If a process is lost, so is the island: the leader ends, the seed sees one worker leave, and the others go on.
"""

from __future__ import annotations

import gc
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh

from p2ptrain.compute.checkpoint_files import PARAMETERS, CheckpointPlanner, CheckpointReader
from p2ptrain.compute.device import ComputeDevice
from p2ptrain.compute.flat import FlatModel
from p2ptrain.compute.fsdp import ShardedModel, ShardSpec, shard_rows
from p2ptrain.compute.gloo import line_of
from p2ptrain.compute.recipe import BuiltPart, ModelRecipe, TrainingSpec
from p2ptrain.compute.reduce_buffer import ReduceBuffer
from p2ptrain.compute.trainer import Trainer, TrainingState, blob_of
from p2ptrain.compute.update import StepUpdate
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, ResourceError
from p2ptrain.core.island import IslandPlace
from p2ptrain.core.training import Blob, FilePlan, OnFinal, SettingsPeriod

SILENCE_S = 600.0
"""Longest wait of a process for another one. Reading a large text may take minutes."""
BEAT_S = 60.0
"""Time between two commands when there is nothing to do, so that no wait is longer."""
LEAVE_S = 5.0
"""How long a call that met a lost process waits for the end of this one, instead of reporting a failure of the job."""
MAX_COMMAND_BYTES = 1 << 20
STATUS_BYTES = 512

COMMANDS: dict[str, tuple[type, ...]] = {
    "beat": (),
    "end": (),
    "build": (str,),
    "share_cores": (int,),
    "use_settings_as_json": (str,),
    "begin_step": (int, int, int),
    "micro_batch": (int, int),
    "finish_gradients": (),
    "take": (int, float),
    "validate_round": (int,),
    "load_initial": (),
    "give_state": (),
    "take_state": (),
}
"""Command → types of its arguments. Most are methods of ``IslandTrainer``."""
STATE_COMMANDS = ("load_initial", "give_state", "take_state")
"""Those that are methods of ``IslandState``."""


def command_untrusted(body: bytes) -> list[Any]:
    """A command's name and arguments. Raises ``ProtocolError``."""
    try:
        command = msgpack.unpackb(body, max_array_len=8, max_map_len=0, max_str_len=MAX_COMMAND_BYTES)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"an unreadable command in the island: {error}") from error
    if not isinstance(command, list) or not command or not isinstance(command[0], str):
        raise ProtocolError("a command in the island has no name")
    if COMMANDS.get(command[0]) != tuple(map(type, command[1:])):
        raise ProtocolError(f"unknown command {command[0][:40]!r} in the island, or wrong arguments")
    return command


def meet(place: IslandPlace, device: ComputeDevice, listener: socket.socket | None = None) -> DeviceMesh:
    """A mesh over an island's processes. Waits until all are there, at most ``SILENCE_S``. ``listener``: a socket of
    the leader that listens at ``place.port``; None: make one. Raises ``ConnectionLost``: another process did not
    come."""
    at = (place.address, place.port, place.size, place.leads, timedelta(seconds=SILENCE_S))
    try:
        bound = None if listener is None else listener.detach()
        # torchrun has a store of its own, which ``torch.distributed`` finds.
        store = None if dist.is_torchelastic_launched() else TCPStore(*at, master_listen_fd=bound)
        backend = "cpu:gloo,cuda:nccl" if device.kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=at[-1])
    except (RuntimeError, ValueError) as error:
        text = f"the processes of this worker did not meet: {line_of(error)}"
        raise ConnectionLost(text, remedy="start all of them") from error
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, device.kind)


class Island:
    """The processes of an island, seen by one of them. ``compute.island`` describes it.

    Args:
        mesh: over the processes; its group has the host's tensors, too.
        on_lost: called at the leader, on any thread, when a process is lost.
    """

    def __init__(
        self,
        place: IslandPlace,
        device: ComputeDevice,
        mesh: DeviceMesh,
        on_lost: Callable[[P2PTrainError], None] = lambda problem: None,
    ) -> None:
        self.place, self.mesh, self._group, self._on_lost = place, mesh, mesh.get_group(), on_lost
        self.label = f"{place.size} processes (gloo), {device.kind}"
        if device.kind == "cuda":
            self.label = f"{place.size} x {torch.cuda.get_device_name(device.torch_device)} (nccl)"
        self._turn, self._over = threading.Lock(), threading.Event()
        self._spoke_at = time.monotonic()
        if place.leads:
            threading.Thread(target=self._beat, name="island", daemon=True).start()

    # ------------------------------------------------------------------------------------------------------- commands

    @contextmanager
    def command(self, name: str, *arguments: Any) -> Iterator[None]:
        """Have the followers do the same as this block. At a follower, which was told, it is only the block.

        Whatever fails in it leaves the processes apart, so it ends the island.
        """
        if not self.place.leads:
            yield
            return
        with self._turn:
            try:
                self._send(msgpack.packb([name, *arguments]))
                yield
            except BaseException as error:
                self._over.set()
                problem = error if isinstance(error, P2PTrainError) else lost(error)
                self._on_lost(problem)
                time.sleep(LEAVE_S)
                raise problem from error
            finally:
                self._spoke_at = time.monotonic()

    def next_command(self) -> list[Any]:
        """The leader's next command. Raises ``ConnectionLost``, ``ProtocolError``."""
        size_bytes = torch.zeros(1, dtype=torch.int64)
        self.fill_from_leader(size_bytes)
        if not 0 < int(size_bytes) <= MAX_COMMAND_BYTES:
            raise ProtocolError(f"a command of {int(size_bytes)} bytes in the island; the limit is {MAX_COMMAND_BYTES}")
        body = torch.zeros(int(size_bytes), dtype=torch.uint8)
        self.fill_from_leader(body)
        return command_untrusted(body.numpy().tobytes())

    def _send(self, body: bytes) -> None:
        self.fill_from_leader(torch.tensor([len(body)]))
        self.fill_from_leader(torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S / 4):
            if time.monotonic() - self._spoke_at > BEAT_S:
                try:
                    with self.command("beat"):
                        pass
                except P2PTrainError:
                    return  # told by ``on_lost``

    def end(self) -> None:
        """At the leader: let the followers end, if nothing is under way."""
        self._over.set()
        if self._turn.acquire(timeout=LEAVE_S):
            try:
                self._send(msgpack.packb(["end"]))
            except P2PTrainError:
                pass  # one is gone, and the others end because this process does
            finally:
                self._turn.release()

    # --------------------------------------------------------------------------------------------------------- tensors

    def fill_from_leader(self, tensor: Tensor) -> None:
        with _translated():
            self._group.broadcast(tensor, 0).wait()

    def sum_at_leader(self, tensor: Tensor) -> None:
        """Elsewhere ``tensor`` has no meaning afterwards."""
        with _translated():
            self._group.reduce(tensor, 0).wait()

    def send(self, tensor: Tensor, rank: int) -> None:
        with _translated():
            self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        with _translated():
            self._group.recv([tensor], rank, 0).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes (on the host), by rank."""
        tensors = [torch.zeros_like(tensor) for _ in range(self.place.size)]
        with _translated():
            self._group.allgather([tensors], [tensor]).wait()
        return tensors

    # --------------------------------------------------------------------------------------------------------- engines

    def build(self, spec: str, make: Callable[[], IslandTrainer]) -> IslandTrainer:
        """At the leader: build an engine at all processes. ``spec``: from which a follower builds its own.

        Raises what ``make`` raises; ``ResourceError`` if another process cannot build it.
        """
        with self.command("build", spec):
            outcome = self._build_together(make)
        if isinstance(outcome, P2PTrainError):
            raise outcome
        return outcome

    def follow(self, build: Callable[[str], IslandTrainer]) -> None:
        """At a follower: do what the leader says until it ends. Raises ``P2PTrainError``."""
        trainer: IslandTrainer | P2PTrainError = ProtocolError("a command in the island came before a model")
        while (command := self.next_command())[0] != "end":
            name, *arguments = command
            if name == "build":
                del trainer
                gc.collect()  # FSDP2's modules refer to each other
                trainer = self._build_together(partial(build, *arguments))
            elif name != "beat":
                if isinstance(trainer, P2PTrainError):
                    raise trainer
                getattr(trainer.state if name in STATE_COMMANDS else trainer, name)(*arguments)

    def _build_together(self, make: Callable[[], IslandTrainer]) -> IslandTrainer | P2PTrainError:
        """The engine, or the first problem of any process; then none of them has one."""
        message = b""
        try:
            outcome: IslandTrainer | P2PTrainError = make()
        except P2PTrainError as error:
            outcome, message = error, error.message.encode()[:STATUS_BYTES] or b"?"
        status = torch.tensor(list(message.ljust(STATUS_BYTES, b"\0")), dtype=torch.uint8)
        for rank, other in enumerate(self.all_gather(status)):
            text = bytes(other.tolist()).rstrip(b"\0").decode(errors="replace")
            if text and not isinstance(outcome, P2PTrainError):
                outcome = ResourceError(f"process {rank} of this worker: {text}", remedy="see its log")
        return outcome


class IslandTrainer(Trainer):
    """The engine of an island, at each of its processes. The leader's is the worker's engine (``roles.engine``): its
    ``reduce_buffer`` and its ``state.blobs()`` are those of the whole model, in the host's memory.

    Args:
        memory_bytes: limit for each process; 0: what is free.
    """

    state: IslandState

    def __init__(self, spec: TrainingSpec, device: ComputeDevice, island: Island, memory_bytes: int = 0) -> None:
        device.enter_thread()  # FSDP2 asks for the thread's device
        shard = ShardSpec(island.mesh, accumulate=False, memory_bytes=memory_bytes)
        super().__init__(
            ModelRecipe(spec, device, shard=shard),
            processes=island.place.size,
            make_buffer=partial(IslandBuffer, island),
            make_state=partial(IslandState, island),
        )
        self._island, self.device = island, island.label

    def share_cores(self, workers: int) -> None:
        with self._island.command("share_cores", workers):
            super().share_cores(workers * self._island.place.local_size)

    def use_settings(self, periods: Sequence[SettingsPeriod]) -> None:
        self.use_settings_as_json(json.dumps([asdict(period) for period in periods]))

    def use_settings_as_json(self, periods: str) -> None:
        with self._island.command("use_settings_as_json", periods):
            super().use_settings([SettingsPeriod(**period) for period in json.loads(periods)])

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        count = self._spec.micro_batches if count < 0 else count
        with self._island.command("begin_step", step, first, count):
            return super().begin_step(step, first, count)

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None, *, counts: bool = True) -> None:
        """Compute the round that begins with ``index``. The round has the next micro-batches, too, so calls for these
        do nothing."""
        start, count = self.batches.round_of(index)
        if index != start:
            return
        with self._island.command("micro_batch", step, index):
            rank = self._island.place.rank
            mine = min(rank, count - 1)  # FSDP2 needs a pass of every process
            super().micro_batch(step, index + mine, counts=mine == rank)

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        with self._island.command("finish_gradients"):
            super().finish_gradients(on_final)

    def take(self, step: int, norm: float) -> tuple[float, float]:
        with self._island.command("take", step, norm):
            return super().take(step, norm)

    # ------------------------------------------------------------------------------------------------------- validation

    def validate(self, index: int) -> tuple[float, int]:
        if index not in self.state.validated:
            self.validate_round(index)
        return self.state.validated[index]

    def validate_round(self, first: int) -> None:
        """Compute validation micro-batches from ``first`` on, one at each process, and keep the results: the worker
        asks for one after the other."""
        with self._island.command("validate_round", first):
            index = min(first + self._island.place.rank, self.batches.validation_count - 1)
            own = torch.tensor(super().validate(index), dtype=torch.float64)
            results = self._island.all_gather(own)
        for rank, result in enumerate(results):
            self.state.validated[first + rank] = float(result[0]), int(result[1])


class IslandBuffer(ReduceBuffer):
    """The contribution of an island: the leader's ``array`` is that of the whole model."""

    def __init__(self, island: Island, recipe: ModelRecipe, built: BuiltPart, update: StepUpdate) -> None:
        super().__init__(recipe, built, update)
        assert isinstance(built.flat, ShardedModel)
        self._copier = None  # it would measure this process's rows: the leader measures ``array``
        self._rows, self._numel = RowExchange(island, built.flat), built.flat.numel
        self._total: Tensor | None = None
        if island.place.leads:
            numel = self._rows.whole.numel + self.scalars
            self._total = torch.zeros(numel, pin_memory=recipe.device.kind == "cuda")
            self.array, self.codec_numel = self._total.numpy(), self._rows.whole.decayed_numel

    def finish(self, on_final: OnFinal | None) -> None:
        self._update.finish()
        contribution, numel = self._update.contribution, self._numel
        self._rows.island.sum_at_leader(contribution[-1:])  # the losses; other numbers are equal at all processes
        self._rows.gather(contribution[:numel], self._total)
        if self._total is not None:
            self._total[self._rows.whole.numel :].copy_(contribution[numel:])

    def copy_back(self) -> None:
        contribution, numel = self._update.contribution, self._numel
        if self._total is not None:
            contribution[numel:].copy_(self._total[self._rows.whole.numel :])
        self._rows.island.fill_from_leader(contribution[numel:])
        self._rows.scatter(self._total, contribution[:numel])

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        return [(0, len(self.array))]


class IslandState(TrainingState):
    """The state of an island: the leader's blobs and checkpoints are those of the whole model.

    Attributes:
        validated: sum of losses and number of targets of validation micro-batches, until the state changes.
    """

    def __init__(self, island: Island, recipe: ModelRecipe, built: BuiltPart, update: StepUpdate, corpus: str) -> None:
        super().__init__(recipe, built, update, corpus)
        assert isinstance(built.flat, ShardedModel)
        self._rows = RowExchange(island, built.flat)
        self._whole = self._rows.whole
        self._gathered: dict[str, Tensor] = {}  # the leader's blobs, until the state changes
        self.validated: dict[int, tuple[float, int]] = {}
        if island.place.leads:
            whole = BuiltPart(self._whole, None, None)
            self._planner = CheckpointPlanner(recipe, whole, corpus, {})
            self._reader = CheckpointReader(recipe, whole)

    def blobs(self) -> list[Blob]:
        with self._rows.island.command("give_state"):
            self.give_state()
        return [blob_of(name, array) for name, array in self._gathered.items()]

    def give_state(self) -> None:
        """Collect the rows of all processes in the leader's blobs."""
        arrays = self.arrays()
        self._gathered = {name: torch.zeros(self._whole.numel) for name in arrays} if self._rows.leads else {}
        for name, array in arrays.items():
            self._rows.gather(array, self._gathered.get(name))

    def load_initial(self) -> None:
        with self._rows.island.command("load_initial"):
            super().load_initial()

    def refresh(self, step: int) -> None:
        with self._rows.island.command("take_state"):
            self.take_state()

    def take_state(self) -> None:
        """Replace the state of all processes with what the leader's blobs hold."""
        for name, array in self.arrays().items():
            self._rows.scatter(self._gathered.get(name), array)
        self._forget_derived()

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        return self._planner.files_of(step, dict.fromkeys(self._update.shared, self._whole.numel))

    def load(self, directory: Path) -> None:
        self.blobs()
        self._whole.parameters = self._gathered[PARAMETERS]
        self._reader.read(directory, self._gathered)
        self.refresh(-1)

    def changed(self) -> None:
        super().changed()
        self._gathered, self.validated = {}, {}
        self._whole.parameters = self._whole.gradients


class RowExchange:
    """Moves rows between the processes' flat arrays and the leader's array of the whole model."""

    def __init__(self, island: Island, shard: ShardedModel) -> None:
        self.island, self.whole, self.leads = island, _WholeLayout(shard), island.place.leads

    def gather(self, rows: Tensor, whole: Tensor | None) -> None:
        """Bring the rows of all processes, flat, to the leader's array ``whole``; None at the others."""
        if whole is None:
            self.island.send(rows, 0)
            return
        for rank in range(self.island.place.size):
            theirs = rows if not rank else self.island.receive(torch.empty_like(rows), rank)
            for here, there in self.whole.ranges(rank, self.island.place.size):
                whole[here].copy_(theirs[there])

    def scatter(self, whole: Tensor | None, rows: Tensor) -> None:
        """The other way."""
        if whole is None:
            self.island.receive(rows, 0)
            return
        for rank in reversed(range(self.island.place.size)):  # its own last
            theirs = torch.zeros_like(rows) if rank else rows
            for here, there in self.whole.ranges(rank, self.island.place.size):
                theirs[there].copy_(whole[here])
            if rank:
                self.island.send(theirs, rank)


class _WholeLayout(FlatModel):
    """The layout of the whole model of which ``shard`` has some rows. It has no memory for tensors."""

    def __init__(self, shard: ShardedModel) -> None:
        shapes = {segment.name: segment.shape for segment in shard.whole}
        self._allocate(shapes, shapes, torch.device("meta"))
        self.model, self._shard = shard.model, shard

    def ranges(self, rank: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Where the rows of a process are: in an array of the whole model, and in its own."""
        for ours, theirs in zip(self.segments, self._shard.segments, strict=True):
            row = math.prod(ours.shape[1:])
            rows = shard_rows(ours.shape[0], rank, size)
            start, numel = ours.offset + row * rows.start, row * len(rows)
            yield slice(start, start + numel), slice(theirs.offset, theirs.offset + numel)


def lost(error: BaseException) -> ConnectionLost:
    """The error of a call that torch could not complete."""
    text = f"a process of this worker was lost, or failed: {line_of(error)}"
    return ConnectionLost(text, remedy="see what the others say, and start it again")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # another process closed its connections, or was silent for too long
        raise lost(error) from error
