"""The part of a job's model that a member trains: checked before anything is allocated, then built.

Tied models. The first and the last stage each hold the embedding matrix, and the gradient of their own use of it. Both
gradients are summed (a + b equals b + a, so the bits are equal); then both stages make the same update of the same
weights. The global norm counts the matrix once, on the first stage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from p2ptrain.compute.compiling import BlockCompiler
from p2ptrain.compute.data import PREFERENCE, DataSpec
from p2ptrain.compute.device import ComputeDevice, constant_arithmetic, flushed_denormals, matrix_products
from p2ptrain.compute.flat import FlatModel, OptimizerSpec, Segment, trained_parameters
from p2ptrain.compute.fsdp import ShardedModel, ShardSpec, assemble_rows, check_shard_memory
from p2ptrain.compute.layout import LayerRange
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec, build_model, model_config, outline
from p2ptrain.compute.optimizer import hidden_matrices
from p2ptrain.compute.part import PartModel
from p2ptrain.compute.split_check import check_splits
from p2ptrain.compute.stage import StageSpec, build_training_part, fit_training, initial_digest
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.tuning import ALL_OF_IT, Tuning, TuningSpec
from p2ptrain.compute.update import CLIPPED_FACTOR
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import LOCAL_FACTOR, kept_moments
from p2ptrain.core.tokenizer_files import check_fit


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """Everything that determines the result of a training run, independent of the cluster. ``configs.schema`` has
    checked the values.

    Attributes:
        micro_batches: micro-batches in a global batch, M.
        micro_batch_sequences: sequences in a micro-batch, B.
        exact: exact mode, for a model that is not split. CPU kernels use ``device.threads`` threads, which must be the
            same at all members, or one thread if it is 0. They never use one thread per core by default.
        local: each micro-batch is an inner step (``compute.local``); None: their gradients are summed.
        beta: of DPO, see ``compute.preferences``.
        clip_norm: largest gradient of a micro-batch, which is one sequence (``ClippedGradients``); 0: not clipped. A
            sequence counts once in a step.
        keep_optimizer: begin with the moments that are beside the weights of ``model.path``.
    """

    model: ModelSpec
    data: DataSpec
    optimizer: OptimizerSpec
    steps: int
    seed: int
    micro_batches: int
    micro_batch_sequences: int
    validation_batches: int = 0
    precision: str = "fp32"
    exact: bool = False
    local: LocalSpec | None = None
    clip_norm: float = 0.0
    keep_optimizer: bool = False
    tuning: TuningSpec = ALL_OF_IT
    gradient_checkpointing: bool = False
    beta: float = 0.1
    compile: str = "off"

    @property
    def is_preference(self) -> bool:
        """Whether a sample is a pair of answers (``compute.preferences``)."""
        return self.data.format == PREFERENCE

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_sequences * self.data.sequence_tokens * (2 if self.is_preference else 1)

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the weights that a model computes with, and of what enters a stage."""
        return torch.bfloat16 if self.precision == "bf16-weights" else torch.float32

    @property
    def withholds_losses(self) -> bool:
        """Whether contributions are clipped: then losses would tell about the text."""
        return self.clip_norm > 0 or (self.local is not None and self.local.clip_norm > 0)


@dataclass(frozen=True, slots=True)
class BuiltPart:
    """A member's part of the model, in memory.

    Attributes:
        flat: what trains, as flat arrays.
        stage: the layers of a split model; None for a whole model or a shard, which transformers' own model computes.
        tied: the matrix that the first and the last stage share, if it trains.
    """

    flat: FlatModel
    stage: PartModel | None
    tied: Segment | None


class ModelRecipe:
    """How a member's part of the model is made.

    Args:
        stage: the stage to hold; None for the whole model.
        shard: the rows of the whole model to hold; None for all.

    Attributes:
        config: of the whole model.
        base: the directory with the weights to begin with; None: they are random.
        part: the layers that this member holds.
        in_flight: micro-batches between forward and backward pass that fit into memory.

    Raises:
        ConfigError, UserError, ResourceError: see ``model_config``, ``Tuning``, ``fit_training``,
            ``check_shard_memory``.
    """

    def __init__(
        self, spec: TrainingSpec, device: ComputeDevice, stage: StageSpec | None = None, shard: ShardSpec | None = None
    ) -> None:
        self.spec, self.device, self.shard = spec, device, shard
        self.tokenizer, self.config = tokenizer_and_config(spec.model)
        self.base = spec.model.base
        if spec.tuning.rank and self.base is None:
            text = f"lora.rank = {spec.tuning.rank}: {spec.model.path} has no weights, and LoRA needs a trained model"
            raise ConfigError(text, remedy="name the directory of one: model.path; or set lora.rank = 0")
        context = getattr(self.config, "max_position_embeddings", None)
        if context is not None and spec.data.sequence_tokens > context:
            raise ConfigError(
                f"data.sequence_tokens = {spec.data.sequence_tokens} is more than model.context = {context}",
                remedy="make the context at least as long as a sequence",
            )
        self.stage = stage or StageSpec(0, (0, self.config.num_hidden_layers))
        self.part: LayerRange = self.stage.parts[self.stage.stage]
        if not self.stage.is_whole:
            check_splits(self.config)
        self.tuning = Tuning(self.config, spec.tuning, spec.seed, self.base, precision=spec.precision)
        self.in_flight = self._check_memory()

    def _check_memory(self) -> int:
        """Refuse what does not fit. Returns the micro-batches that may be in flight."""
        spec, tokens, kept = self.spec, self.spec.micro_batch_tokens, not self.spec.gradient_checkpointing
        moments = kept_moments(spec.optimizer.name, self._hidden_share() if spec.optimizer.name == "muon" else 0.0)
        if self.shard is not None:
            check_shard_memory(
                self.config, self.shard, self.device, micro_batch_tokens=tokens, moments=moments, layers_kept=kept
            )
            return self.stage.in_flight
        factor = LOCAL_FACTOR if spec.local else CLIPPED_FACTOR if spec.clip_norm else 1.0
        return fit_training(
            self.config,
            self.stage,
            self.device,
            micro_batch_tokens=tokens,
            most=max(spec.micro_batches, self.stage.in_flight),
            exact=spec.exact,
            trained=self.tuning.trained * factor,
            held=self.tuning.held,
            moments=moments,
            precision=spec.precision,
            layers_kept=kept,
        )

    def _hidden_share(self) -> float:
        """Share of the hidden layers' matrices in what trains; of a stage as of the whole model."""
        if self.spec.tuning != ALL_OF_IT:  # adapters are matrices; what is frozen may be
            return float(self.spec.tuning.rank > 0)
        model = outline(self.config)
        names = hidden_matrices(model)
        numel = sum(parameter.numel() for name, parameter in model.named_parameters() if name in names)
        return numel / sum(parameter.numel() for parameter in model.parameters())

    @property
    def is_on_host(self) -> bool:
        """Whether parameters and gradients are in the host's memory."""
        return self.device.kind == "cpu" or (self.shard is not None and self.shard.offload)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Compute inside the block: denormals are flushed, in exact mode the arithmetic is constant, and with precision
        ``tf32`` products of fp32 are made in TF32."""
        constant = constant_arithmetic(self.device.threads or 1) if self.spec.exact else nullcontext()
        with flushed_denormals(), constant, matrix_products(self.spec.precision):
            yield

    # ------------------------------------------------------------------------------------------------------ building

    def block_compiler(self, model: nn.Module) -> BlockCompiler | None:
        """What compiles the blocks of the built model; None: nothing does."""
        spec, device = self.spec, self.device
        refused = spec.exact or spec.precision == "tf32"  # torch.compile checks that TF32 is not switched meanwhile
        if refused or spec.compile == "off" or (spec.compile == "auto" and device.kind != "cuda"):
            return None
        return BlockCompiler(model, device, always=spec.compile == "on")

    def build(self) -> BuiltPart:
        """Build the part, with the weights of step 0. Raises ``ConfigError``, ``StorageError``, ``ResourceError``: see
        ``build_model``, ``build_training_part``, ``assemble_rows``."""
        with self.arithmetic():  # kernel threads start here and inherit that denormals are flushed
            if self.shard is not None:
                assembly = assemble_rows(self.config, self.shard, self.base, self.spec.seed)
                module = assembly.build_model().module.train()  # with its parameters on the meta device
                module.config.use_cache = False
                self._checkpoint_activations(module)
                bf16, device = self.spec.precision.startswith("bf16"), self.device.torch_device
                return BuiltPart(ShardedModel(assembly, module, self.shard, device, bf16=bf16), None, None)
            module, stage = self._build_module()
            flat = FlatModel(module, self.device.torch_device, self.spec.weights_dtype)
        name = stage.tied_name if stage is not None else ""
        return BuiltPart(flat, stage, next((segment for segment in flat.segments if segment.name == name), None))

    def initial_tensors(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, Tensor]:
        """The weights of step 0 of what trains, by name. ``shapes``: those of ``FlatModel.shapes``."""
        with self.arithmetic():
            if self.tuning.adapters:
                return self.tuning.initial({name: tuple(shape) for name, shape in shapes.items()})
            if self.shard is not None:
                return assemble_rows(self.config, self.shard, self.base, self.spec.seed).rows
            return trained_parameters(self._build_module()[0])

    def initial_module(self) -> nn.Module:
        """The model as it was before any step."""
        return self._build_module()[0]

    @cached_property
    def initial_digest(self) -> bytes:
        """Digest of the whole initial model. See ``stage.initial_digest``."""
        return initial_digest(self.config, self.base, self.spec.seed, self.stage.bounds)

    def _build_module(self) -> tuple[nn.Module, PartModel | None]:
        spec, names, stage = self.spec, dict[str, str](), None
        if self.stage.is_whole:
            config = copy.deepcopy(self.config)  # training changes its setting of attention
            module: Any = build_model(spec.model, self.tokenizer.vocab_size, spec.seed, config=config)
        else:
            stage = build_training_part(self.config, self.part, self.base, spec.seed)
            module, names = stage.module, dict(stage.names)
        self._checkpoint_activations(module)
        self.tuning.prepare(module, names)
        return cast(nn.Module, module), stage

    def _checkpoint_activations(self, module: Any) -> None:
        if not self.spec.gradient_checkpointing:
            return
        enable = getattr(module, "activation_checkpointing_enable", None)  # the name from transformers 5.20 on
        try:
            (enable or module.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            text = f"a {self.config.model_type!r} model cannot be trained with device.gradient_checkpointing"
            raise ConfigError(text, remedy="leave it out") from error


def stage_bounds(model: ModelSpec, stages: int, cuts: Sequence[int] = ()) -> tuple[int, ...]:
    """Bounds (``StageSpec``) of a model that is not built yet: ``cuts``, or about equally many layers for each stage.
    Raises ``ConfigError``: the model has fewer layers, or the cuts make other parts; see also ``model_config``."""
    layers = tokenizer_and_config(model)[1].num_hidden_layers
    bounds = (0, *cuts, layers) if cuts else tuple(layers * stage // stages for stage in range(stages + 1))
    if len(bounds) != stages + 1 or any(start >= stop for start, stop in pairwise(bounds)):
        text = f"bounds {', '.join(map(str, bounds))} do not cut {layers} layers into {stages} parts"
        raise ConfigError(text, remedy=f"use 1 to {layers} pipeline.stages, and correct pipeline.cuts or leave it out")
    return bounds


def tokenizer_and_config(model: ModelSpec) -> tuple[Tokenizer, PretrainedConfig]:
    """Raises ``ConfigError``: as ``model_config``; the tokenizer is not there, or does not fit the model."""
    if model.path is not None:
        config = model_config(model, 0)
        check_fit(model.path, model.tokenizer, getattr(config.get_text_config(), "vocab_size", None))
    if model.tokenizer is not None:
        tokenizer = Tokenizer.of_new_model(model.tokenizer)
    else:
        tokenizer = Tokenizer.of_bytes() if model.path is None else Tokenizer.of_directory(model.path)
    if model.path is None:
        special = {"bos_token_id": tokenizer.begin[:1], "eos_token_id": tokenizer.end[-1:]}
        model = replace(model, extra={key: ids[0] for key, ids in special.items() if ids} | dict(model.extra))
        config = model_config(model, tokenizer.vocab_size)
    return tokenizer, config
