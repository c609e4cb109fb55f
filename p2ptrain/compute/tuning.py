"""What of a model trains: all of it, all but the parameters that ``model.freeze`` names, or LoRA adapters beside it.

LoRA (Hu et al., arXiv 2106.09685), made by peft: a linear layer y = W x becomes y = W x + (alpha / rank) B A x. W stays
as it is; A (rank, in) and B (out, rank) train. What is frozen is outside the flat arrays (``compute.flat``), so it is
neither exchanged nor healed nor optimized. Members compare its digest instead.

Everything is a pure function of the job's settings, so that any cut of the model trains the same adapters. A is drawn
from (seed, layer's name in the whole model), B is zero. A dropout mask depends on (seed, step, micro-batch, layer's
name, position) alone. It is computed with integers, so it has the same bits on every device, and when a forward pass is
repeated.

The frozen linear layers can be held in bf16, or in NF4 (Dettmers et al., arXiv 2305.14314) by bitsandbytes.
"""

from __future__ import annotations

import fnmatch
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import xxhash
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from configs.schema import Lora
from p2ptrain.compute.activations import bytes_of
from p2ptrain.compute.flat import trained_parameters
from p2ptrain.compute.model import DRAWING, outline, seed_of
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.footprint import held_copies
from p2ptrain.core.texts import did_you_mean, install_command, join_some

ALL_LINEAR = "all-linear"
ADAPTER_NAME = "default"  # peft's name of the only adapter
_LINEAR = (nn.Linear, Conv1D)


class TuningSpec(Lora):
    """The ``[lora]`` table, and ``model.freeze``. ``freeze_a``: train only the factors B (FFA-LoRA, arXiv
    2403.12313)."""

    freeze_a: bool = False
    freeze: list[str] = Field(default=[])


ALL_OF_IT = TuningSpec()


class Tuning:
    """Prepares a model, or a part of it, so that only what trains requires gradients.

    Args:
        config: configuration of the whole model.
        base: directory of the base model, for the adapter's configuration.
        precision: ``device.precision``.

    Attributes:
        adapters: name of each trained parameter in the prepared module → its name in peft's files; empty without LoRA.
        trained, held: copies of the whole model's weights: that train, with their gradients and moments; that do not.
        frozen_digest: of what does not train in the prepared module, hex; empty if all of it trains.

    Raises:
        ConfigError: a name or pattern fits nothing, or nothing is left to train; see also ``outline``.
    """

    def __init__(
        self, config: PretrainedConfig, spec: TuningSpec, seed: int, base: Path | None, *, precision: str
    ) -> None:
        self._spec, self._seed, self._base = spec, seed, base
        self._dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
        self.adapters: dict[str, str] = {}
        self.frozen_digest = ""
        self._micro_batch: tuple[int, int] | None = None
        self._dropouts = WeakKeyDictionary[_Dropout, str]()  # the layer's name in the whole model
        self.trained, self.held = 1.0, 0.0
        self._frozen: frozenset[str] = frozenset()
        self._adapted: dict[str, Any] = {}
        if not (spec.rank or spec.freeze):
            return
        whole: Any = outline(config)
        total = sum(parameter.numel() for parameter in whole.parameters())
        if spec.rank:
            self._adapted = _match_layers(whole, spec.targets)
            self._saved_targets = _shorten_targets(whole, self._adapted, spec.targets)
            self.trained = spec.rank * sum(sum(layer.weight.shape) for layer in self._adapted.values()) / total
            in_layers = sum(layer.weight.numel() for layer in whole.modules() if _is_held(layer, whole)) / total
            self.held = in_layers * held_copies(spec.base, precision) + (1 - in_layers) * held_copies("fp32", precision)
        else:
            self._frozen = _match_frozen(whole, spec.freeze)
            parameters = whole.named_parameters()
            self.held = sum(parameter.numel() for name, parameter in parameters if name in self._frozen) / total
            self.trained = 1 - self.held

    def prepare(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Freeze parameters of ``module``, or add adapters to it, in place.

        Args:
            module: on the CPU, in fp32.
            names: name of each tensor in ``module`` → its name in the whole model; empty if that is the same.

        Raises:
            ConfigError: nothing in ``module`` trains. UserError: a package is missing.
        """
        if not (self._adapted or self._frozen):
            return
        named = {name: (names.get(name, name), parameter) for name, parameter in module.named_parameters()}
        for whole_name, parameter in named.values():
            parameter.requires_grad_(not self._adapted and whole_name not in self._frozen)
        digest = xxhash.xxh3_128()
        for whole_name, parameter in sorted(named.values(), key=lambda item: item[0]):
            if not parameter.requires_grad:
                digest.update(f"{whole_name} {tuple(parameter.shape)} ".encode())
                digest.update(bytes_of(parameter))
        self.frozen_digest = digest.hexdigest()
        if self._adapted:
            self._adapt(module, {name: whole_name for name, (whole_name, _) in named.items()})
        if not any(parameter.requires_grad for parameter in module.parameters()):
            text = "nothing trains in these layers: " + ("lora.targets" if self._adapted else "model.freeze")
            raise ConfigError(f"{text} leaves no parameter of them", remedy="name other layers, or move pipeline.cuts")

    def initial(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The first adapters of a prepared module, by name: A as peft draws it, B zero."""
        made = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for name, tensor in made.items():
            if ".lora_A." in name:
                generator = torch.Generator().manual_seed(seed_of(self._seed, self.adapters[name]))
                nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        return made

    def draw_masks(self, micro_batch: tuple[int, int] | None, device: torch.device) -> None:
        """Choose the dropout masks of a micro-batch, by its step and index, on ``device``. None: no dropout."""
        if micro_batch == self._micro_batch:
            return
        self._micro_batch = micro_batch
        drawn = []
        if micro_batch is not None:
            step, index = micro_batch
            drawn = [seed_of(self._seed, f"{step} {index} {name}") & 0xFFFFFFFF for name in self._dropouts.values()]
        keys = torch.tensor(drawn, dtype=torch.int64).to(device, non_blocking=True)
        for dropout, key in zip_longest(self._dropouts, keys):
            dropout.key = key

    @contextmanager
    def without_adapters(self, module: nn.Module) -> Iterator[None]:
        """Compute as the base inside the block."""
        layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "lora_A")]
        for layer in layers:
            layer._disable_adapters = True  # ``enable_adapters`` would change what requires gradients, too
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def config_file(self) -> bytes:
        from peft import LoraConfig

        config = LoraConfig(
            r=self._spec.rank,
            lora_alpha=self._spec.alpha,
            lora_dropout=self._spec.dropout,
            target_modules=self._saved_targets,
            fan_in_fan_out=self._transposed,
            base_model_name_or_path=str(cast(Path, self._base).absolute()),
            task_type="CAUSAL_LM",
            inference_mode=True,
        )
        table: dict[str, Any] = cast(Any, config).to_dict()
        return json.dumps(table | {"target_modules": self._saved_targets}, indent=2, sort_keys=True).encode()

    # ---------------------------------------------------------------------------------------------------------- inside

    @property
    def _transposed(self) -> bool:
        return any(isinstance(layer, Conv1D) for layer in self._adapted.values())

    def _adapt(self, module: nn.Module, whole_names: Mapping[str, str]) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        places = {name.rpartition(".")[0]: whole.rpartition(".")[0] for name, whole in whole_names.items()}
        places = {place: whole for place, whole in places.items() if whole in self._adapted}
        if not places:
            return
        config = LoraConfig(
            r=self._spec.rank,
            lora_alpha=self._spec.alpha,
            target_modules=list(places),
            fan_in_fan_out=self._transposed,
        )
        with DRAWING, torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # ``initial`` draws again
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, module)
        if config.target_parameters:  # peft takes the names for those of experts
            text = (
                f"peft has no adapters for the feed-forward layers of a {cast(Any, module).config.model_type!r} model"
            )
            raise ConfigError(text, remedy="name its attention's layers in lora.targets, such as q_proj,v_proj")
        for place, whole in places.items():
            layer: Any = module.get_submodule(place)
            for factor in ("lora_A", "lora_B"):
                self.adapters[f"{place}.{factor}.{ADAPTER_NAME}.weight"] = f"base_model.model.{whole}.{factor}.weight"
            if self._spec.dropout:
                layer.lora_dropout[ADAPTER_NAME] = dropout = _Dropout(self._spec.dropout)
                self._dropouts[dropout] = whole
        shapes = {name: tuple(parameter.shape) for name, parameter in trained_parameters(module).items()}
        with torch.no_grad():
            for name, tensor in self.initial(shapes).items():
                module.get_parameter(name).copy_(tensor)
        if self._spec.freeze_a:
            for name in shapes:
                module.get_parameter(name).requires_grad_(".lora_A." not in name)
        self._hold(module)

    def _hold(self, module: nn.Module) -> None:
        """Hold the frozen linear layers as ``lora.base`` says."""
        for name, layer in [*module.named_modules()]:
            if not _is_held(layer, module) or layer.weight.requires_grad:
                continue
            if self._spec.base == "bf16":
                layer.weight.data = layer.weight.data.bfloat16()
            elif self._spec.base == "nf4":
                module.set_submodule(name, _in_4_bits(layer, self._dtype))


class _Dropout(nn.Module):
    """Dropout of a layer's input, before A. It is active while the trainer computes a micro-batch, not in a validation.
    So the model can stay in training mode.

    Attributes:
        key: of the micro-batch's mask, int64, shape (); None: no dropout. A tensor, so that compiled code fits every
            micro-batch. Never changed in place: a backward pass may draw the mask again.
    """

    key: Tensor | None = None

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        return x if self.key is None else x * self.mask(self.key, x)

    def mask(self, key: Tensor, like: Tensor) -> Tensor:
        """Factors for an input: 0 or 1 / (1 - p), of the shape of ``like``."""
        # A hash of each position, of 32 bits (https://github.com/skeeto/hash-prospector). Products stay below 2^63.
        bits = torch.arange(like.numel(), device=like.device) ^ key
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
        bits = bits ^ (bits >> 15)
        kept = bits >= int(self._share * 2**32)
        return kept.view(like.shape).to(like.dtype) / (1 - self._share)


def _in_4_bits(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A frozen linear layer that holds its weights in NF4 and computes in ``dtype``."""
    try:
        from bitsandbytes import nn as bitsandbytes_nn
    except ImportError as error:
        text = "lora.base = 'nf4' needs the package bitsandbytes"
        raise UserError(text, remedy=f"run: {install_command('nf4')}") from error
    library: Any = bitsandbytes_nn  # its annotations are partial
    weight = cast(Tensor, layer.weight).detach()
    if isinstance(layer, Conv1D):
        weight = weight.T.contiguous()
    width, inputs = weight.shape
    with torch.device("meta"):
        held = library.Linear4bit(
            inputs, width, bias=False, compute_dtype=dtype, compress_statistics=False, quant_type="nf4"
        )
    held.bias = cast(Any, layer.bias)
    # Without gradients and in evaluation mode a processor with AVX512-BF16 would pack the weights for inference, and
    # later backward passes would give zeros.
    held.support_avx512bf16_for_cpu = False
    held.weight = library.Params4bit(
        weight, requires_grad=False, compress_statistics=False, quant_type="nf4", module=held
    ).to("cpu")  # packs them
    return cast(nn.Module, held)


# ---------------------------------------------------------------------------------------------------------------- names


def _is_held(layer: Any, model: Any) -> bool:
    """Whether ``layer`` is a linear layer inside the model, and not its output."""
    head = model.get_output_embeddings()
    return isinstance(layer, _LINEAR) and layer is not head and layer is not getattr(head, "base_layer", None)


def _match_frozen(whole: nn.Module, patterns: Iterable[str]) -> frozenset[str]:
    """Names of the parameters that do not train. A tied parameter has all of its names."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    frozen: set[str] = set()
    for pattern in patterns:
        fit = [names for names in aliases.values() if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        if not fit:
            known = [name for names in aliases.values() for name in names]
            raise _no_match(f"model.freeze has {pattern!r}, which fits no parameter of the model", pattern, known)
        frozen |= {name for names in fit for name in names}
    if len(frozen) == sum(map(len, aliases.values())):
        raise ConfigError("model.freeze fits every parameter: nothing is left to train", remedy="freeze fewer of them")
    return frozenset(frozen)


def _match_layers(whole: Any, targets: Iterable[str]) -> dict[str, Any]:
    """The linear layers that get adapters, by name."""
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    linear = {name: layer for name, layer in whole.named_modules() if isinstance(layer, _LINEAR)}
    adapted: dict[str, Any] = {}
    for target in targets:
        fit = {
            name: layer
            for name, layer in linear.items()
            if (layer is not head if target == ALL_LINEAR else f".{name}".endswith(f".{target}"))
        }
        if not fit:
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            raise _no_match(f"lora.targets has {target!r}, which fits no linear layer of the model", target, leaves)
        adapted |= fit
    if head is not None and head in adapted.values() and head.weight is embedding.weight:
        text = "lora.targets names the output layer, whose matrix is the input embedding's, too"
        raise ConfigError(text, remedy=f"use {ALL_LINEAR}, or leave that layer out")
    return adapted


def _shorten_targets(whole: nn.Module, adapted: Mapping[str, nn.Module], targets: Iterable[str]) -> list[str]:
    """``target_modules`` of ``adapter_config.json``: the last parts of the layers' names if they fit no other module,
    else the whole names."""
    named = set(targets)
    short = named if ALL_LINEAR not in named else {name.rpartition(".")[2] for name in adapted}
    endings = tuple(f".{name}" for name in short)
    fit = {name for name, _ in whole.named_modules() if f".{name}".endswith(endings)}
    return sorted(short if fit == set(adapted) else adapted)


def _no_match(problem: str, pattern: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(problem, remedy=f"{did_you_mean(pattern, known)}there are {join_some(known)}")
