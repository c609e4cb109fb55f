"""A part of a model: its weights, collected from files or from peers, and its computation.

The tensors of a model's files need not have the names of the model's own (GPT-NeoX' ``embed_out`` is its ``lm_head``;
files of a base model lack its prefix), and one tensor of the model may be several in the files (the experts of
Mixtral). ``StoredTensors`` applies transformers' mapping to names, as ``from_pretrained`` does. So a ``PartAssembly``
can ask for the tensors that it needs, and make a ``PartModel`` of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import str_to_torch_dtype

from p2ptrain.compute.activations import bytes_of, tensor_of
from p2ptrain.compute.key_value_cache import BatchCache, KeyValueMemory, PaddedCache, SessionCache
from p2ptrain.compute.layout import LayerRange, ModelLayout, split_refusal
from p2ptrain.compute.model import DRAWING
from p2ptrain.compute.quantized import QuantizedLinear, choose_weights, packed_shapes, quantize_linears
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.tensor_files import TensorTable

_PACKED_DTYPES = {"I32": torch.int32}
DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
OnBytes = Callable[[int, int], None]
"""Called with (bytes placed, total bytes)."""
_REMEDY = "use config.json and *.safetensors of one model, as save_pretrained writes them"


@dataclass(slots=True)
class Conversion:
    """Tensors of the files that are converted together.

    Attributes:
        target: name of the tensor that they become; of several, the first.
        converter: None if the one source is the target.
        sources: names in the files, in the converter's order, with the pattern that each one matches.
    """

    target: str
    converter: WeightConverter | None
    sources: dict[str, str] = field(default_factory=dict)

    def convert(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name, made of the sources' ``tensors``."""
        if self.converter is None:
            return {self.target: tensors[next(iter(self.sources))]}
        work: Any = deepcopy(self.converter)
        for name, pattern in self.sources.items():
            work.add_tensor(self.target, name, pattern, tensors[name])
        made = work.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class StoredTensors:
    """The conversions from the files' tensors to those of ``model``, a whole one, by ``Conversion.target``."""

    def __init__(self, model: Any, names: Collection[str]) -> None:
        self._model = model
        mapping: list[Any] = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, places = model.base_model_prefix, model.state_dict()
        self._prefix = f"{prefix}."
        self._by_name: dict[str, Conversion] = {}
        self.conversions: dict[str, Conversion] = {}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, places)
            if target not in places and name in places:  # it has the model's own name already
                target, pattern = name, None
            if target in places:
                converter = by_pattern[pattern] if pattern is not None else None
                found = self.conversions.setdefault(target, Conversion(target, converter))
                found.sources[name] = pattern or name
                self._by_name[name] = found
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]  # for ``revert_weight_conversion``

    def sources_of(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Conversion]]:
        """What in the files becomes ``tensors`` of the model (on the meta device), by name: a tensor of its shape and
        dtype, and its conversion. Raises ``ConfigError``: the files lack one, or have one that the configuration does
        not know."""
        sources: dict[str, tuple[Tensor, Conversion]] = {}
        converted: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found = self.conversions.get(name)
            if found is None or found.converter is not None:
                converted[name] = tensor
            else:
                sources[next(iter(found.sources))] = tensor, found
        for written, tensor in revert_weight_conversion(self._model, converted).items():
            name = written if written in self._by_name else written.removeprefix(self._prefix)
            if name not in self._by_name or self._by_name[name].converter is None:
                raise ConfigError(f"the model's files lack {written}", remedy=_REMEDY)
            sources[name] = tensor, self._by_name[name]
        for _, found in sources.values():
            if extra := [name for name in found.sources if name not in sources]:
                raise ConfigError(f"the model's files have {extra[0]}, which config.json does not know", remedy=_REMEDY)
        return sources


class PartAssembly:
    """Builds a part from tensors that arrive one by one. Only placed tensors are allocated.

    Args:
        config: configuration of the whole model, without dropout (see ``compute.model.without_dropout``).
        names: names of all tensors in the model's files.
        weights: as in ``PartSpec``: each linear layer's weights are quantized when they are placed.

    Attributes:
        wanted: shape of every tensor that the part owns, by its name in the model's files.
        weights_bytes: size of all tensors when they are placed.

    Raises:
        ConfigError: the files lack a tensor, or the architecture cannot be split.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        part: LayerRange,
        names: Collection[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weights: str = "",
    ) -> None:
        self._config, self._part = config, part
        self._dtype, self._device = dtype, torch.device(device)
        self._whole = ModelLayout(config, dtype)
        shapes = self._whole.cache_shapes[part.start : part.stop]
        self.cache_position_bytes = sum(shape.numel for shape in shapes) * dtype.itemsize
        tensors = self._whole.model.state_dict()
        weights, is_packed = choose_weights(config, weights), getattr(config, "quantization_config", None) is not None
        known = {name.removesuffix("_packed") for name in names} if is_packed else names
        stored = StoredTensors(self._whole.model, known)
        tied = [name for name in self._whole.tied if name in stored.conversions]
        self._tied_files = [file for name in tied for file in stored.conversions[name].sources]
        self._names = self._whole.cut(part)
        quantize_linears(self._whole.layers, weights)
        self.weights_bytes = tensors_bytes(self._whole.model)
        self._places: dict[str, list[str]] = {}  # by name in the whole model, of tied tensors the first that is stored
        for place, name in self._names.items():
            self._places.setdefault(tied[0] if tied and name in self._whole.tied else name, []).append(place)
        self._sources = stored.sources_of({name: tensors[name] for name in self._places})
        wanted: dict[str, tuple[int, ...]] = {}
        self._packed: dict[str, str] = {}  # tensor of files that are quantized → the weight that it is a part of
        for name, (tensor, conversion) in self._sources.items():
            stored_shapes = {name: tuple(tensor.shape)}
            if is_packed and self._quantized_at(conversion.target):
                stored_shapes = packed_shapes(config, name, tuple(tensor.shape))
                self._packed |= dict.fromkeys(stored_shapes, name)
            wanted |= stored_shapes
        self.wanted: Mapping[str, tuple[int, ...]] = wanted
        if missing := [name for name in wanted if is_packed and name not in names]:
            raise ConfigError(f"the model's quantized files lack {missing[0]}", remedy=_REMEDY)
        self._incomplete: dict[str, dict[str, Tensor]] = {}  # by target, of conversions that lack other sources
        self._missing = set(self.wanted)

    def place_tensor(self, name: str, tensor: Tensor) -> None:
        """Place a copy of ``tensor``. Raises as ``place``."""
        self.place(name, DTYPE_NAMES[tensor.dtype], bytes_of(tensor))

    def place(self, name: str, dtype: str, data: memoryview) -> None:
        """Place a tensor from its bytes in safetensors' ``dtype``. Raises ``ConfigError``: the part has no such tensor,
        the dtype is not usable, or the size is wrong."""
        shape = self._shape_of(name)
        dtypes = _PACKED_DTYPES if name in self._packed and name.endswith("_packed") else FILE_DTYPES
        if dtype not in dtypes:
            text = f"{name} has dtype {dtype}; a part supports only {', '.join(dtypes)}"
            raise ConfigError(text, remedy="use the model's unquantized weights")
        size_bytes = math.prod(shape) * dtypes[dtype].itemsize
        if data.nbytes != size_bytes:
            text = f"{name} as {dtype} has {data.nbytes} bytes; config.json requires {size_bytes}"
            raise ConfigError(text, remedy=_REMEDY)
        tensor = tensor_of(data, dtypes[dtype], shape)
        if name in self._packed:
            self._adopt_packed(self._packed[name], name, tensor.to(self._device))
            return
        self._adopt(name, tensor.to(self._device, self._sources[name][0].dtype))

    def place_all(self, table: TensorTable, on_bytes: OnBytes = lambda done_bytes, total_bytes: None) -> None:
        """Read the part's tensors, and no other bytes, from a model directory. Raises ``ConfigError``: a tensor has a
        wrong shape or dtype; ``StorageError``: a file cannot be read."""
        self._check_tied(table)
        done_bytes, total_bytes = 0, sum(table.entries[name].size_bytes for name in self.wanted)
        for name, shape in self.wanted.items():
            entry = table.entries[name]
            if tuple(entry.shape) != shape:
                raise ConfigError(f"{name} has shape {entry.shape}; config.json requires {shape}", remedy=_REMEDY)
            self.place(name, entry.dtype, memoryview(table.read(name)))
            done_bytes += entry.size_bytes
            on_bytes(done_bytes, total_bytes)

    def _check_tied(self, table: TensorTable) -> None:
        """Refuse files that hold both of two tied tensors with different values. transformers loads these as two
        parameters, so stages that treat them as one would compute another model."""
        stored = sorted(self._tied_files)
        if len(stored) < 2 or self.wanted.keys().isdisjoint(stored):
            return
        if len({hashlib.blake2b(table.read(name)).digest() for name in stored}) > 1:
            text = f"{' and '.join(stored)} differ in {table.directory}, but config.json ties them"
            raise ConfigError(text, remedy="set tie_word_embeddings to false in its config.json")

    def allocate_quantized(self) -> None:
        """Allocate the layers that hold their weights in fewer bits (``QuantizedLinear.allocate``)."""
        for layer in self._whole.model.modules():
            if isinstance(layer, QuantizedLinear):
                layer.allocate(self._device)

    def build_model(self) -> PartModel:
        """The part. Raises ``ConfigError`` if a tensor was not placed, or a buffer cannot be computed."""
        if self._missing:
            raise ConfigError(f"tensor {min(self._missing)} is missing", remedy=_REMEDY)
        self._compute_buffers()
        return PartModel(self._whole, self._config, self._part, self._names, self._dtype)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        if name not in self.wanted:
            raise ConfigError(f"{name} is not part of layers {self._part.start} to {self._part.stop}", remedy=_REMEDY)
        return self.wanted[name]

    def _adopt(self, name: str, tensor: Tensor) -> None:
        """Take over a tensor of the files, which has no other owner; the last source of a conversion is converted."""
        conversion = self._sources[name][1]
        sources = self._incomplete.setdefault(conversion.target, {})
        sources[name] = tensor
        self._missing.discard(name)
        if len(sources) == len(conversion.sources):
            del self._incomplete[conversion.target]
            for target, converted in conversion.convert(self._whole.model, sources).items():
                self._install(target, converted)

    def _adopt_packed(self, weight: str, name: str, tensor: Tensor) -> None:
        halves = self._incomplete.setdefault(weight, {})
        halves[name] = tensor
        self._missing.discard(name)
        if len(halves) == 2:
            del self._incomplete[weight]
            for owner in self._quantized_at(self._sources[weight][1].target):
                owner.take(halves[f"{weight}_packed"], halves[f"{weight}_scale"])

    def _quantized_at(self, target: str) -> list[QuantizedLinear]:
        """The layers that hold the weight ``target`` in fewer bits."""
        places = [place.rpartition(".") for place in self._places.get(target, ()) if place.endswith(".weight")]
        owners = [self._whole.model.get_submodule(module) for module, _, _ in places]
        return [owner for owner in owners if isinstance(owner, QuantizedLinear)]

    def _install(self, target: str, tensor: Tensor) -> None:
        for owner in (quantized := self._quantized_at(target)):
            owner.hold(tensor)
        parameter = nn.Parameter(tensor)
        for place in self._places[target] if not quantized else ():
            module, _, leaf = place.rpartition(".")
            owner = self._whole.model.get_submodule(module)
            if leaf in owner._parameters:
                owner._parameters[leaf] = parameter
            else:
                owner._buffers[leaf] = tensor

    def _compute_buffers(self) -> None:
        """Buffers that are in no file, such as rotary frequencies, as transformers makes them after it has loaded."""
        for tensor in self._whole.model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        for module in self._whole.model.modules():
            buffers = {
                name: torch.empty_like(buffer, device=self._device)
                for name, buffer in module._buffers.items()
                if buffer is not None and buffer.is_meta
            }
            if not buffers:
                continue
            for buffer in buffers.values():
                if buffer.is_floating_point():
                    buffer.fill_(torch.nan)
            module._buffers.update(buffers)
            with DRAWING, torch.no_grad():
                self._whole.model._init_weights(module)
            if any(buffer.isnan().any() for buffer in buffers.values()):
                raise split_refusal(
                    self._config, f"it is not known how its {type(module).__name__} makes {min(buffers)}"
                )


def build_part(config: PretrainedConfig, part: LayerRange, weights: Mapping[str, Tensor]) -> PartModel:
    """The part with copies of a whole model's fp32 ``weights``. Raises ``ConfigError``."""
    assembly = PartAssembly(config, part, weights)
    for name in assembly.wanted:
        assembly.place_tensor(name, weights[name])
    return assembly.build_model()


class PartModel:
    """A part, ready to compute.

    Args:
        layout: cut to ``part``, with all tensors in place.
        config: of the whole model.

    Attributes:
        module: transformers' model, reduced to the part.
        names: name of each tensor in ``module`` → its name in a whole model's ``state_dict``.
        width: elements of the hidden state of one position.
        tied_name: name in ``module`` of the matrix that the model's input and output share, if the first and the last
            stage each hold a copy and this is one of them; else "".
        context, switches: see ``context_limit``.
    """

    def __init__(
        self,
        layout: ModelLayout,
        config: PretrainedConfig,
        part: LayerRange,
        names: Mapping[str, str],
        dtype: torch.dtype,
    ) -> None:
        self.module: Any = layout.model.eval()
        self.part, self.names = part, names
        self.config = cast(PretrainedConfig, self.module.config)
        self.tied_name = ""
        if layout.tied and part.first != part.last:
            ends = self.module.get_input_embeddings() if part.first else self.module.get_output_embeddings()
            named = self.module.named_parameters()
            self.tied_name = next(name for name, parameter in named if parameter is ends.weight)
        self.width: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.context, self.switches = context_limit(config, is_whole=part.first and part.last)
        self.weights_bytes = tensors_bytes(self.module)
        self._cache_shapes = layout.cache_shapes[part.start : part.stop]
        self.cache_position_bytes = sum(shape.numel for shape in self._cache_shapes) * dtype.itemsize
        self._base, self._dtype = layout.base, dtype
        self._hidden = _HiddenStates()
        if not part.first:
            layout.layers[0].register_forward_pre_hook(self._hidden.enter, with_kwargs=True)
        if not part.last:
            layout.layers[-1].register_forward_hook(self._hidden.leave)

    def new_memory(self) -> KeyValueMemory:
        """Memory for keys and values of no position yet."""
        return KeyValueMemory(self.config, self._cache_shapes, self._dtype, next(self.module.parameters()).device)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cache: SessionCache | BatchCache | PaddedCache | None = None,
        *,
        logits: int | Tensor = 0,
        **attention: Any,
    ) -> Tensor:
        """Run the part's layers over new positions.

        Args:
            x: on the first stage token ids, int64 (B, T); else the previous stage's hidden states (B, T, width).
            positions: int64 (T,), the same for every sequence; they are those of ``cache``. Without a cache also
                (B, T): a position that does not follow the one before begins a text that is kept apart.
            cache: new positions attend to its positions and are added to it. None (training): no earlier positions.
            logits: on the last stage, the number of final positions to compute logits for, or their indices; 0 for all.
            attention: in training, see ``TrainingAttention.arguments``; ``rows`` of a pass of many sessions.

        Returns:
            hidden states (B, T, width); on the last stage logits (B, T or as ``logits`` says, vocab).
        """
        common = {
            "input_ids" if self.part.first else "inputs_embeds": x,
            "position_ids": positions if positions.ndim == 2 else positions[None],
            "past_key_values": cache,
            "use_cache": cache is not None,
            "return_dict": True,
            **attention,
        }
        self._hidden.entering = x
        try:
            if self.part.last:
                return cast(Tensor, self.module(**common, logits_to_keep=logits).logits)
            self._base(**common)
            return cast(Tensor, self._hidden.leaving)
        finally:
            self._hidden.entering = self._hidden.leaving = None  # they would keep the graph of the backward pass


def tensors_bytes(module: nn.Module) -> int:
    """Size of a module's parameters and buffers; shared ones count once."""
    return sum({id(tensor): tensor.nbytes for tensor in module.state_dict(keep_vars=True).values()}.values())


class _HiddenStates:
    """What enters the first layer of a part, and what leaves the last one, during a pass. The layers' hooks refer to it
    and not to the part: that reference cycle would keep the part's memory."""

    entering: Tensor | None = None
    leaving: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the first layer the hidden states as they came: some models scale them first, as they do embeddings."""
        if args:
            return (self.entering, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.entering}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.leaving = output[0] if isinstance(output, tuple) else output


def context_limit(config: PretrainedConfig, *, is_whole: bool) -> tuple[int | None, list[int]]:
    """The most positions of a model, None: no limit is set; and *switches*: numbers of positions beyond which
    ``longrope`` takes other frequencies, so that cached keys must be computed again. Only a whole model has the token
    ids for that; a part ends there."""
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    tables = [rope, *(table for table in rope.values() if isinstance(table, dict))]  # for all layers, or per kind
    lengths = [t.get("original_max_position_embeddings") for t in tables if t.get("rope_type") == "longrope"]
    switches = sorted({length for length in lengths if isinstance(length, int)})
    context = getattr(config, "max_position_embeddings", None)
    if is_whole:
        return context, switches
    return min([*([context] if isinstance(context, int) else []), *switches], default=None), []
