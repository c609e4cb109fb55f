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
from p2ptrain.core.footprint import (
    MOMENTS,
    copies,
    in_flight_that_fit,
    layers_kept_bytes,
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
    ``wanted``: names to yield; None for all. Raises ``ConfigError``: ``_init_weights`` does not set all weights of a
    unit; ``ResourceError``: there is too little memory for a unit."""
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
    ``layers_kept``: whether each layer keeps what its backward pass needs; else only its input."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    vocab = config.vocab_size if part.last else 0
    return layers_kept_bytes(
        len(part), tokens, width=config.hidden_size, inner=inner, vocab=vocab, layers_kept=layers_kept
    )


def fit_training(
    config: PretrainedConfig,
    spec: StageSpec,
    device: ComputeDevice,
    *,
    micro_batch_tokens: int,
    most: int = 1,
    exact: bool = False,
    trained: float = 1.0,
    held: float = 0.0,
    moments: float = MOMENTS,
    precision: str = "fp32",
    layers_kept: bool = True,
) -> int:
    """Refuse a part, or a whole model, whose training does not fit into memory. Call before anything is allocated.
    ``core.footprint`` explains the count.

    Args:
        most: micro-batches that the schedule can use at a time.
        exact: count an int64 reduce buffer beside the gradients, and its copy on the host.
        trained, held, moments, precision: see ``core.footprint.copies``.
        layers_kept: see ``kept_bytes``.

    Returns:
        micro-batches that may be in flight, from ``StageSpec.in_flight`` to ``most``: as many as memory allows, to hide
        slow links.

    Raises:
        ResourceError: it does not fit; the message has the numbers.
        ConfigError: see ``parameter_count``, ``layer_sizes``.
    """
    part, tokens, recompute = spec.parts[spec.stage], micro_batch_tokens, spec.recompute
    if spec.is_whole:
        weights_bytes = 4 * parameter_count(config)
    else:
        weights_bytes = layer_sizes(config).weights_bytes(part.start, part.stop)
    factor = copies(on_host=device.kind == "cpu", trained=trained, held=held, moments=moments, precision=precision)
    copies_bytes = int(factor * weights_bytes)
    kept = kept_bytes(config, tokens, part, layers_kept=layers_kept)
    inputs = 0 if part.first else activation_bytes(spec.activations, tokens, config.hidden_size)
    buffer_bytes = int(trained * weights_bytes) * (2 if exact else 1)  # the reduce buffer
    need = part_training_bytes(copies_bytes, kept, inputs, in_flight=spec.in_flight, recompute=recompute)
    need += buffer_bytes if exact else 0
    what = (
        f"training layers {part.start} to {part.stop} ({weights_bytes / 4e6:.2f} M parameters) with "
        f"{spec.in_flight} micro-batches of {tokens:,} tokens in flight"
    )
    remedy = "give it more (--memory), smaller parts (pipeline.cuts, pipeline.stages) or pipeline.recompute=true"
    check_limit(need, spec.memory_bytes, what, remedy)  # placement may have used no sizes, or wrong ones
    check_memory(need, device, what, SMALLER)
    if device.kind != "cpu" or held > 0:  # it is built on the host, in fp32; the reduce buffer is there, too
        check_memory(weights_bytes + buffer_bytes, HOST, what, SMALLER)
    room = 0.8 * available_bytes(device)  # the rest is for uncounted memory and other programs
    room = min(room, spec.memory_bytes or room) - copies_bytes
    return max(spec.in_flight, in_flight_that_fit(int(room), kept, inputs, recompute=recompute, most=most))
