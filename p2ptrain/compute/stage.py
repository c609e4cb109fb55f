"""The stage of a model that a worker trains: its layers, its initial weights and its memory. A whole model is a single
stage with all layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from p2ptrain.compute.activations import bytes_of
from p2ptrain.compute.device import HOST, SMALLER, ComputeDevice, available_bytes, check_limit, check_memory
from p2ptrain.compute.layout import LayerRange, ModelLayout, layer_sizes, split_refusal
from p2ptrain.compute.model import initialize, parameter_count
from p2ptrain.compute.part import PartAssembly, PartModel
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import (
    copies,
    head_kept_bytes,
    in_flight_that_fit,
    layer_kept_bytes,
    part_training_bytes,
)
from p2ptrain.core.tensor_files import TensorTable

A = TypeVar("A", bound=PartAssembly)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Which part of the model a worker trains, and how.

    Attributes:
        bounds: stage s has layers [bounds[s], bounds[s + 1]).
        activations: encoding of activations between stages, a key of ``core.activations.ENCODINGS``.
        gradients: encoding of gradients by the activations: ``fp32`` or ``bf16``.
        in_flight: fewest micro-batches between forward and backward pass that the schedule needs. Memory is checked
            for as many.
        memory_bytes: the operator's memory limit for the part; 0: most of the free memory.
    """

    stage: int
    bounds: tuple[int, ...]
    activations: str = "fp32"
    gradients: str = "fp32"
    recompute: bool = False
    in_flight: int = 1
    memory_bytes: int = 0

    @property
    def parts(self) -> list[LayerRange]:
        return [LayerRange(start, stop, self.bounds[-1]) for start, stop in pairwise(self.bounds)]

    @property
    def is_whole(self) -> bool:
        return len(self.bounds) == 2

    def check(self, layers: int) -> LayerRange:
        """This stage's part of a model of ``layers`` layers. Raises ``ConfigError``."""
        bounds = ", ".join(map(str, self.bounds))
        if self.bounds[:1] != (0,) or self.bounds[-1] != layers or any(a >= b for a, b in pairwise(self.bounds)):
            raise ConfigError(
                f"bounds {bounds} do not cut {layers} layers into parts",
                remedy="correct pipeline.cuts, or leave it out",
            )
        if not 0 <= self.stage < len(self.bounds) - 1:
            raise ConfigError(f"there is no stage {self.stage} with bounds {bounds}")
        return self.parts[self.stage]


# ------------------------------------------------------------------------------------------------------- first weights


def build_training_part(config: PretrainedConfig, part: LayerRange, directory: Path | None, seed: int) -> PartModel:
    """The part on the CPU, in training mode, with the weights that ``build_model`` gives the whole model. Raises
    ``ConfigError``, ``StorageError``: see ``first_weights``."""
    built = first_weights(lambda names: PartAssembly(config, part, names), config, directory, seed).build_model()
    built.module.train()
    return built


def first_weights(
    make: Callable[[Collection[str]], A], config: PretrainedConfig, directory: Path | None, seed: int
) -> A:
    """The assembly that ``make`` returns for the names of a model's tensors, with the weights in ``directory``, or with
    random ones. Raises as ``PartAssembly.place_all`` and ``initial_tensors``."""
    if directory is not None:
        table = TensorTable(directory)
        assembly = make(table.entries)
        assembly.place_all(table)
        return assembly
    whole = ModelLayout(config, torch.float32)
    assembly = make([f"{name}.{leaf}" for name, unit in whole.units.items() for leaf in unit.state_dict()])
    for name, tensor in initial_tensors(whole, seed, set(assembly.wanted)):
        assembly.place_tensor(name, tensor)
    return assembly


def initial_tensors(whole: ModelLayout, seed: int, wanted: set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Initial weights by name, equal to ``build_model``'s. Only one unit of the model is in memory at a time.

    Args:
        wanted: names to yield; None for all.

    Raises:
        ConfigError: ``_init_weights`` does not set all weights of a unit.
        ResourceError: there is too little memory for a unit.
    """
    for name, unit in whole.units.items():
        if wanted is not None and wanted.isdisjoint(f"{name}.{leaf}" for leaf in unit.state_dict()):
            continue
        need_bytes = 4 * sum(parameter.numel() for parameter in unit.parameters())
        check_memory(need_bytes, HOST, f"initializing {name} of a {whole.model.config.model_type!r}", SMALLER)
        unit.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in unit.state_dict().values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
            initialize(whole.model, unit, seed, name)
        for leaf, tensor in unit.state_dict().items():
            if tensor.is_floating_point() and tensor.isnan().any():
                raise split_refusal(whole.model.config, f"its initialization does not set {name}.{leaf}")
            if wanted is None or f"{name}.{leaf}" in wanted:
                yield f"{name}.{leaf}", tensor
        unit.to(device="meta")


def initial_digest(config: PretrainedConfig, directory: Path | None, seed: int, bounds: tuple[int, ...]) -> bytes:
    """Digest of the whole initial model and of ``bounds``, 16 bytes. Stages with different digests do not train
    together. This initializes or reads the whole model, piece by piece. Raises ``ConfigError``, ``StorageError``,
    ``ResourceError``: see ``TensorTable.read``, ``initial_tensors``."""
    total = hashlib.blake2b(",".join(map(str, bounds)).encode(), digest_size=16)

    def add(name: str, data: bytes | bytearray | memoryview) -> None:
        total.update(len(name).to_bytes(8, "little") + name.encode())
        total.update(hashlib.blake2b(data, digest_size=16).digest())

    if directory is None:
        for name, tensor in initial_tensors(ModelLayout(config, torch.float32), seed):
            add(name, bytes_of(tensor))
    else:
        table = TensorTable(directory)
        for name in sorted(table.entries):
            add(name, table.read(name))
    return total.digest()


# -------------------------------------------------------------------------------------------------------------- memory


def kept_bytes(config: PretrainedConfig, tokens: int, part: LayerRange, *, layers_kept: bool = True) -> int:
    """Bytes kept from a micro-batch's forward pass to its backward pass: a lower bound, see ``core.footprint``.

    Args:
        layers_kept: whether each layer keeps what its backward pass needs; else only its input.
    """
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    kept = layer_kept_bytes(tokens, width=config.hidden_size, inner=inner)
    kept = len(part) * kept if layers_kept else len(part) * 4 * tokens * config.hidden_size + kept
    return kept + (head_kept_bytes(tokens, vocab=config.vocab_size) if part.last else 0)


class TrainingMemory:
    """The memory that training a part, or a whole model, takes on ``device``. ``core.footprint`` explains the count.

    Args:
        exact: count an int64 reduce buffer beside the gradients, and its copy on the host.
        trained, held: see ``core.footprint.copies``.
        layers_kept: see ``kept_bytes``.

    Raises:
        ConfigError: see ``parameter_count``, ``layer_sizes``.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        spec: StageSpec,
        device: ComputeDevice,
        *,
        micro_batch_tokens: int,
        exact: bool = False,
        trained: float = 1.0,
        held: float = 0.0,
        layers_kept: bool = True,
    ) -> None:
        part, tokens = spec.parts[spec.stage], micro_batch_tokens
        self._spec, self._device, self._part, self._tokens = spec, device, part, tokens
        if spec.is_whole:
            self._weights_bytes = 4 * parameter_count(config)
        else:
            self._weights_bytes = layer_sizes(config).weights_bytes(part.start, part.stop)
        copied = copies(on_host=device.kind == "cpu", trained=trained, held=held)
        self._copies_bytes = int(copied * self._weights_bytes)
        self._kept_bytes = kept_bytes(config, tokens, part, layers_kept=layers_kept)
        self._inputs_bytes = 0 if part.first else activation_bytes(spec.activations, tokens, config.hidden_size)
        buffer_bytes = int(trained * self._weights_bytes) * (2 if exact else 1)  # the reduce buffer
        self._sum_bytes = buffer_bytes if exact else 0
        is_built_on_host = device.kind != "cpu" or held > 0  # in fp32; the reduce buffer is there, too
        self._host_bytes = self._weights_bytes + buffer_bytes if is_built_on_host else 0

    def check(self) -> None:
        """Raise ``ResourceError``, with the numbers, if there is too little."""
        spec, part = self._spec, self._part
        need = self._sum_bytes + part_training_bytes(
            self._copies_bytes, self._kept_bytes, self._inputs_bytes, in_flight=spec.in_flight, recompute=spec.recompute
        )
        what = (
            f"training layers {part.start} to {part.stop} ({self._weights_bytes / 4e6:.2f} M parameters) with "
            f"{spec.in_flight} micro-batches of {self._tokens:,} tokens in flight"
        )
        remedy = "give it more (--memory), smaller parts (pipeline.cuts, pipeline.stages) or pipeline.recompute=true"
        check_limit(need, spec.memory_bytes, what, remedy)  # placement may have used no sizes, or wrong ones
        check_memory(need, self._device, what, SMALLER)
        if self._host_bytes:
            check_memory(self._host_bytes, HOST, what, SMALLER)

    def most_in_flight(self, most: int) -> int:
        """Micro-batches that may be in flight here, from ``StageSpec.in_flight`` to ``most``: as many as memory allows,
        to hide slow links. Call before anything is allocated."""
        spec = self._spec
        room = 0.8 * available_bytes(self._device)  # the rest is for uncounted memory and other programs
        if spec.memory_bytes:
            room = min(room, spec.memory_bytes)
        left = int(room - self._copies_bytes)
        fit = in_flight_that_fit(left, self._kept_bytes, self._inputs_bytes, recompute=spec.recompute, most=most)
        return max(spec.in_flight, fit)
