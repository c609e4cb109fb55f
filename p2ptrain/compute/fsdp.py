"""A model whose parameters are sharded by rows over the members of a replica, with PyTorch's FSDP2 (``fully_shard``).

Each layer is a unit of its own, and the rest of the model is one more: a unit's parameters are whole only while it
computes. Member s of p holds rows [s c, (s + 1) c) of each tensor of n rows, with c = ceil(n / p), as ``torch.chunk``
cuts. It holds them as views of flat arrays (``compute.flat``), which FSDP2 gathers from and adds gradients to in place.
So AdamW, the ring between replicas, healing and checkpoints need nothing new. A tensor takes c rows in the arrays of
every member; rows that the model lacks stay zero.

Which group runs the collectives is not known here: ``mesh`` holds it. Gradients are summed over its members.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PretrainedConfig

from p2ptrain.compute.device import HOST, SMALLER, ComputeDevice, check_limit, check_memory
from p2ptrain.compute.flat import FlatModel, Segment, place_segments, trained_parameters
from p2ptrain.compute.layout import LayerRange, layer_sizes
from p2ptrain.compute.part import PartAssembly
from p2ptrain.compute.process_group import Operations, RingProcessGroup
from p2ptrain.compute.stage import first_weights, kept_bytes
from p2ptrain.core.errors import ConfigError, ConnectionLost
from p2ptrain.core.footprint import shard_training_bytes

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BYTES, _LARGE_LAYER_BYTES = 1 << 20, 8 << 20


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The shard of a model that a member holds.

    Attributes:
        mesh: of one dimension, over the replica's members; this member's place in it is its shard.
        accumulate: keep whole gradients from one micro-batch of a step to the next, and sum them over the replica once.
            False: sum after every micro-batch, so that gradients take 1/p of the memory.
        offload: keep parameters, gradients and moments in the host's memory.
        memory_bytes: the operator's memory limit for the shard; 0: most of the free memory.
    """

    mesh: DeviceMesh
    accumulate: bool = True
    offload: bool = False
    memory_bytes: int = 0

    @property
    def index(self) -> int:
        return self.mesh.get_group().rank()

    @property
    def count(self) -> int:
        return self.mesh.size()


def shard_rows(rows: int, index: int, count: int) -> range:
    """The rows of shard ``index`` of ``count``, of a tensor of ``rows`` rows; maybe none."""
    most = -(-rows // count)
    return range(min(index * most, rows), min((index + 1) * most, rows))


def mesh_of(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    """A mesh of one dimension over a group that ``init_process_group`` did not make. ``device``: type of the computing
    device, such as ``cuda``."""
    name = group.group_name
    torch._C._distributed_c10d._register_process_group(name, group)  # where FSDP2 looks it up
    mesh = DeviceMesh(device, torch.arange(group.size()), _init_backend=False, _rank=group.rank())
    mesh._dim_group_names, mesh._pg_registry[name] = [name], group
    return mesh


def check_shard_memory(
    config: PretrainedConfig,
    shard: ShardSpec,
    device: ComputeDevice,
    *,
    micro_batch_tokens: int,
    moments: float,
    layers_kept: bool,
) -> None:
    """Refuse a shard that does not fit into memory, before it is built. See ``fit_training``.
    Raises ``ResourceError``: it does not fit; the message has the numbers; ``ConfigError``: see ``layer_sizes``."""
    sizes, on_host = layer_sizes(config), device.kind == "cpu" or shard.offload
    kept = kept_bytes(config, micro_batch_tokens, LayerRange(0, sizes.layers, sizes.layers), layers_kept=layers_kept)
    rows, other = shard_training_bytes(
        sizes, kept, shards=shard.count, accumulate=shard.accumulate, on_host=on_host, moments=moments
    )
    whole = sizes.weights_bytes(0, sizes.layers)
    what = f"training 1/{shard.count} of {whole / 4e6:.2f} M parameters on {micro_batch_tokens:,} tokens at a time"
    remedy = "sharded.shards higher, sharded.accumulate = false, or device.gradient_checkpointing = true"
    check_limit(rows + other, shard.memory_bytes, what, remedy=f"give it more (--memory), set {remedy}")
    if device.kind != "cpu" and shard.offload:
        check_memory(other, device, what, SMALLER)
        check_memory(rows, HOST, what, SMALLER)
    else:
        check_memory(rows + other, device, what, SMALLER)


# ------------------------------------------------------------------------------------------------------------- building


class RowAssembly(PartAssembly):
    """Builds a whole model, of whose parameters only this member's rows are kept; they stay on the meta device.

    Attributes:
        rows: this member's rows of each parameter, by name.
        layers: the model's layers.
    """

    def __init__(self, config: PretrainedConfig, names: Collection[str], shard: ShardSpec) -> None:
        super().__init__(config, LayerRange(0, config.num_hidden_layers, config.num_hidden_layers), names)
        self.rows: dict[str, Tensor] = {}
        self.layers: Sequence[nn.Module] = self._whole.layers
        self._shard = shard
        self._parameters = trained_parameters(self._whole.model).keys()

    def _install(self, target: str, tensor: Tensor) -> None:
        place = next((place for place in self._places[target] if place in self._parameters), "")
        if not place:  # a buffer, which every member needs
            super()._install(target, tensor)
            return
        own = shard_rows(len(tensor), self._shard.index, self._shard.count)
        self.rows[place] = tensor[own.start : own.stop].clone()  # the rest is freed


def assemble_rows(config: PretrainedConfig, shard: ShardSpec, directory: Path | None, seed: int) -> RowAssembly:
    """Read or draw this member's rows of the weights that ``build_model`` gives the model. Only one of its modules, or
    tensors, is whole in memory. This changes a setting of the process's allocator, see ``return_freed_memory``. Raises
    ``ConfigError``, ``StorageError``, ``ResourceError``: see ``stage.first_weights``."""

    def make(names: Collection[str]) -> RowAssembly:
        assembly = RowAssembly(config, names, shard)
        return_freed_memory(assembly.layers)
        return assembly

    return first_weights(make, config, directory, seed)


def return_freed_memory(layers: Sequence[nn.Module]) -> None:
    """Have glibc return large arrays of this process to the system when they are freed. Else small ones, which live
    until the backward pass, are put into the memory of freed layers, and each layer takes new memory: a model of 16
    layers of 13 MB in 4 shards took twice as much. Small layers are not worth the time that new memory costs. With
    another libc this does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    largest_bytes = max(sum(weight.nbytes for weight in layer.parameters()) for layer in layers)
    if mallopt is not None and largest_bytes >= _LARGE_LAYER_BYTES:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class ShardedModel(FlatModel):
    """This member's rows of a model as flat arrays. ``layout`` is that of the whole model's arrays; ``shapes`` are
    those of the rows. A segment has room for as many rows as the first member has.

    Attributes:
        whole: where each parameter lies in the flat arrays of the whole model.

    Args:
        assembly, module: with all tensors, and what it built; the module is wrapped in place.
        device: where it computes.
        bf16: gather parameters and compute in bf16; gradients are summed in fp32.
    """

    def __init__(
        self, assembly: RowAssembly, module: nn.Module, shard: ShardSpec, device: torch.device, *, bf16: bool = False
    ) -> None:
        named = dict(reversed(trained_parameters(module).items()))
        if scalar := next((name for name, parameter in named.items() if not parameter.ndim), ""):
            raise ConfigError(f"a model with the single number {scalar} cannot be sharded", remedy="use 'sync'")
        whole = {name: tuple(parameter.shape) for name, parameter in named.items()}
        room = {name: (-(-shape[0] // shard.count), *shape[1:]) for name, shape in whole.items()}
        self._allocate(room, whole, torch.device("cpu") if shard.offload else device)
        self.whole, self.shard, self._passes_left = place_segments(whole)[0], shard, 0
        for submodule in module.modules():
            buffers = submodule._buffers
            buffers.update({name: buffer.to(device) for name, buffer in buffers.items() if buffer is not None})
        policies: dict[str, Any] = {
            "mesh": shard.mesh,
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if shard.offload else OffloadPolicy(),
        }
        units = [fully_shard(unit, **policies) for unit in (*assembly.layers, module)]
        for unit in units:
            unit.set_gradient_divide_factor(1.0)  # sum, not mean
            unit.set_force_sum_reduction_for_comms(True)
        self.model, self._root = module, units[-1]
        self._in_use = self.gradients  # of none yet
        self.compute_with(self.parameters)
        self.copy_tensors(assembly.rows)

    def compute_with(self, parameters: Tensor) -> None:
        """Make FSDP2's shards views of ``parameters`` and of the gradients. It keeps them: it compares storages, not
        tensors."""
        if parameters is self._in_use:
            return
        self._in_use = parameters
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        segments = {segment.name: segment for segment in self.segments}
        for record in _sharded_parameters(self.model):
            segment = segments[names[id(record.sharded_param)]]
            own_rows = record.sharded_size[0]
            values, gradients = (self._view(flat, segment) for flat in (parameters, self.gradients))
            record._sharded_param_data = values.view(-1)
            record.sharded_param = nn.Parameter(record.to_sharded_dtensor(values[:own_rows]))
            record.sharded_param.grad = record.to_sharded_dtensor(gradients[:own_rows])
            record._setattr_on_modules(record.sharded_param)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {segment.name: (len(rows), *segment.shape[1:]) for segment, rows in self.own_rows()}

    def own_rows(self) -> Iterator[tuple[Segment, range]]:
        """Each parameter of the model (its place in ``whole``), in the order of ``segments``, and this member's rows
        of it."""
        for segment in self.whole:
            yield segment, shard_rows(segment.shape[0], self.shard.index, self.shard.count)

    def norm(self, flat: Tensor) -> float:
        total = flat.square().sum(dtype=torch.float64)
        self.shard.mesh.get_group().allreduce(total).wait()
        return float(total.sqrt())

    # -------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, count: int) -> None:
        """Begin a step of ``count`` micro-batches, for all members together. Drops what an aborted step left behind."""
        if self._passes_left:
            self._root.reset_iter_state()
            for record in _sharded_parameters(self.model):
                record.unsharded_accumulated_grad = None  # ``reset_iter_state`` leaves these
                if hasattr(record, "_unsharded_param"):
                    record._unsharded_param.grad = None
        self._passes_left = -(-count // self.shard.count)

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        """Make a forward and a backward pass inside the block. Raises ``ConnectionLost``."""
        self._root.set_requires_gradient_sync(self._passes_left == 1 or not self.shard.accumulate)
        with translate_lost_members():
            yield
        self._passes_left -= 1

    def connect(self, operations: Operations) -> None:
        """Run the collectives of the mesh's group, which is a ``RingProcessGroup``, by ``operations`` from now on."""
        cast(RingProcessGroup, self.shard.mesh.get_group()).operations = operations


@contextmanager
def translate_lost_members() -> Iterator[None]:
    try:
        yield
    except dist.DistBackendError as error:
        raise ConnectionLost(f"lost a member of the replica: {error}") from error


def _sharded_parameters(module: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of its parameters."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13, and 2.12
            for group in groups:
                yield from group.fsdp_params
