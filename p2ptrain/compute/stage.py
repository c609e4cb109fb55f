"""Which part of a model a stage trains, whether there is memory for it, and its first weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from p2ptrain.compute.anatomy import Anatomy, Part
from p2ptrain.compute.device import HOST, Device, available_bytes, check_memory
from p2ptrain.compute.initial import InitialWeights
from p2ptrain.compute.model import kept_bytes
from p2ptrain.compute.split import LayerSizes, PartAssembly, PartModel, layer_sizes, load_part, part_bytes, read_from
from p2ptrain.core.activations import ENCODINGS, activation_bytes
from p2ptrain.core.errors import ConfigError, ResourceError
from p2ptrain.core.footprint import DEVICE_COPIES, HOST_COPIES, in_flight_that_fit, part_training_bytes
from p2ptrain.core.tensor_files import TensorTable
from p2ptrain.core.units import human_bytes

FREE_SHARE = 0.8
"""Of what is free: the rest is for what is not counted, and for others."""
GRADIENT_ENCODINGS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Which part of the model it is, and how it is trained.

    Attributes:
        stage: counted from 0.
        bounds: stage s has layers [bounds[s], bounds[s + 1]).
        activations: how they travel, a key of ``core.activations.ENCODINGS``.
        gradients: how those by the activations travel, one of ``GRADIENT_ENCODINGS``.
        recompute: see the module.
        in_flight: micro-batches whose backward pass is still to come, that the schedule asks for at least; memory is
            checked for as many.
        memory_bytes: that a person gives to the part; 0: most of what is free.
    """

    stage: int
    bounds: tuple[int, ...]
    activations: str = "fp32"
    gradients: str = "fp32"
    recompute: bool = False
    in_flight: int = 1
    memory_bytes: int = 0

    @property
    def parts(self) -> list[Part]:
        """Of all stages."""
        return [Part(start, stop, self.bounds[-1]) for start, stop in pairwise(self.bounds)]

    def check(self, layers: int) -> Part:
        """This stage's part of a model of so many layers. Raises ``ConfigError``."""
        bounds = ", ".join(map(str, self.bounds))
        if self.bounds[:1] != (0,) or self.bounds[-1] != layers or any(a >= b for a, b in pairwise(self.bounds)):
            raise ConfigError(
                f"bounds {bounds} do not cut {layers} layers into parts",
                remedy="correct pipeline.cuts, or leave it out",
            )
        if not 0 <= self.stage < len(self.bounds) - 1:
            raise ConfigError(f"there is no stage {self.stage} with bounds {bounds}")
        if self.activations not in ENCODINGS:
            raise ConfigError(
                f"pipeline.activations = {self.activations!r} is not known", remedy=f"use {', '.join(ENCODINGS)}"
            )
        if self.gradients not in GRADIENT_ENCODINGS:
            raise ConfigError(
                f"gradients of activations do not travel as {self.gradients!r}",
                remedy=f"use {' or '.join(GRADIENT_ENCODINGS)}",
            )
        if self.in_flight < 1:
            raise ConfigError(f"pipeline.max_in_flight = {self.in_flight} is less than 1")
        return self.parts[self.stage]


@dataclass(slots=True)
class PartBuilder:
    """Makes the part with its first weights, as often as it is asked; ``first`` is what it made first."""

    config: PretrainedConfig
    part: Part
    directory: Path | None
    seed: int
    first: PartModel | None = None

    def __call__(self) -> nn.Module:
        built = build_training_part(self.config, self.part, self.directory, self.seed)
        self.first = self.first or built
        return built.module


def build_training_part(config: PretrainedConfig, part: Part, directory: Path | None, seed: int) -> PartModel:
    """The part on the CPU, in training mode: the same weights as ``build_model``'s whole model has.

    Raises:
        ConfigError, ResourceError: see ``split.load_part``, ``initial.InitialWeights``.
        StorageError: a file of ``directory`` cannot be read.
    """
    if directory is not None:
        table = TensorTable(directory)
        built = load_part(config, part, table)
        _check_tied(config, built, table)
    else:
        initial = InitialWeights(config)
        assembly = PartAssembly(config, part, initial.names)
        drawn = initial.draw(seed, assembly.wanted)
        for name in list(drawn):
            assembly.place(name, drawn.pop(name))
        built = assembly.finish()
    untrained = next(_saved_buffers(built.module), None)
    if untrained is not None:
        raise ConfigError(
            f"a {config.model_type!r} model has a tensor that is not trained ({untrained}), which parts do not save",
            remedy="train it whole, or use a model of the llama, qwen2, qwen3, mistral or gpt2 family",
        )
    built.module.train()
    return built


def trained_sizes(config: PretrainedConfig) -> LayerSizes:
    """Of the weights as they are trained. Raises ``ConfigError``, see ``layer_sizes``."""
    return layer_sizes(config, torch.float32)


def even_bounds(config: PretrainedConfig, stages: int) -> tuple[int, ...]:
    """Bounds (``StageSpec``) of so many parts, the largest of which has as few bytes of weights as can be.

    Embedding and head count: they take memory as layers do. The computing may want other cuts: ``pipeline.cuts``.

    Raises:
        ConfigError: there are not so many layers, or the architecture does not split.
    """
    sizes, layers = trained_sizes(config), config.num_hidden_layers
    if not 1 <= stages <= layers:
        raise ConfigError(f"{layers} layers do not make {stages} parts", remedy=f"pipeline.stages at most {layers}")

    def cut(most_bytes: int) -> list[int] | None:
        """Each part as long as ``most_bytes`` allow, as long as a layer is left for each that follows."""
        bounds = [0]
        for stage in range(stages):
            last, furthest = stage == stages - 1, layers - (stages - 1 - stage)
            stop = layers if last else bounds[-1] + 1
            while stop < furthest and sizes.part(Part(bounds[-1], stop + 1, layers)) <= most_bytes:
                stop += 1
            if sizes.part(Part(bounds[-1], stop, layers)) > most_bytes:
                return None
            bounds.append(stop)
        return bounds

    low, high = 0, sizes.part(Part(0, layers, layers)) + sizes.tied_bytes
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(middle) else (middle + 1, high)
    return tuple(cut(low) or ())


def initial_digest(config: PretrainedConfig, directory: Path | None, seed: int, bounds: Sequence[int]) -> bytes:
    """Of the whole initial model, and of how it is cut: equal on all stages, which agree on both or do not train
    together. All of the model is drawn, or read, one tensor after the other. 16 bytes.

    Raises:
        StorageError, ResourceError: see ``TensorTable.read``, ``InitialWeights.digests``.
    """
    if directory is None:
        digests = InitialWeights(config).digests(seed)
    else:
        table = TensorTable(directory)
        digests = {name: hashlib.blake2b(table.read(name), digest_size=16).digest() for name in table.entries}
    total = hashlib.blake2b(",".join(map(str, bounds)).encode(), digest_size=16)
    for name in sorted(digests):
        total.update(len(name).to_bytes(8, "little") + name.encode() + digests[name])
    return total.digest()


def check_part_memory(
    config: PretrainedConfig, part: Part, stage: StageSpec, device: Device, *, micro_batch_tokens: int
) -> int:
    """Refuse a part that cannot be trained here; returns the bytes of its weights.

    Counted as in ``core.footprint``, on the host as ``model.check_training_memory`` does.

    Raises:
        ResourceError: with the numbers.
    """
    weights = part_bytes(config, part, torch.float32)
    need = part_training_bytes(
        weights,
        kept_bytes(config, micro_batch_tokens, layers=len(part), has_head=part.last),
        0 if part.first else activation_bytes(stage.activations, micro_batch_tokens, config.hidden_size),
        in_flight=stage.in_flight,
        recompute=stage.recompute,
        on_host=device.kind == "cpu",
    )
    what = (
        f"training layers {part.start} to {part.stop} ({weights / 4e6:.2f} M parameters) with {stage.in_flight} "
        f"micro-batches of {micro_batch_tokens:,} tokens in flight"
    )
    if stage.memory_bytes and need > stage.memory_bytes:  # placed by other sizes than it has, or by none
        raise ResourceError(
            f"{what} needs about {human_bytes(need)}, and this worker gives {human_bytes(stage.memory_bytes)}",
            remedy="give it more (--memory), smaller parts (pipeline.cuts, pipeline.stages) or pipeline.recompute=true",
        )
    check_memory(need, device, what)
    if device.kind != "cpu":
        check_memory(weights * 2, HOST, what)
    return weights


def most_in_flight(
    config: PretrainedConfig, part: Part, stage: StageSpec, device: Device, *, micro_batch_tokens: int, most: int
) -> int:
    """Micro-batches that may be in flight here, so that slow links are hidden as far as there is memory: what the
    schedule asks for at least, ``most`` at most. Asked for before anything is allocated."""
    room = FREE_SHARE * available_bytes(device)
    if stage.memory_bytes:
        room = min(room, stage.memory_bytes)
    copies = HOST_COPIES if device.kind == "cpu" else DEVICE_COPIES
    fit = in_flight_that_fit(
        int(room) - copies * part_bytes(config, part, torch.float32),
        kept_bytes(config, micro_batch_tokens, layers=len(part), has_head=part.last),
        0 if part.first else activation_bytes(stage.activations, micro_batch_tokens, config.hidden_size),
        recompute=stage.recompute,
        most=most,
    )
    return max(stage.in_flight, fit)


def _check_tied(config: PretrainedConfig, part: PartModel, table: TensorTable) -> None:
    """Files may hold both of two tied tensors. Where they differ they are two parameters to transformers; stages that
    take them for one would add up gradients of different matrices."""
    if not part.tied or part.part.first == part.part.last:
        return
    whole = Anatomy(config, torch.float32)
    names = [name for tied in whole.tied for name in {tied, tied.removeprefix(whole.base_prefix)} & set(table.entries)]
    read = read_from(table)
    if len(names) == 2 and not torch.equal(read(names[0]), read(names[1])):
        raise ConfigError(
            f"{names[0]} and {names[1]} differ in {table.directory}, and config.json says that they are one",
            remedy="set tie_word_embeddings to false in its config.json",
        )


def _saved_buffers(module: nn.Module) -> Iterator[str]:
    """Names of what belongs to a model's files and is not trained."""
    trained = dict(module.named_parameters(remove_duplicate=False))
    return (name for name in module.state_dict() if name not in trained)
