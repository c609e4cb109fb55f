"""A part of a model: its weights, collected from files or from peers, and its computation.

The tensors of a model's files need not have the names of the model's own (GPT-NeoX' ``embed_out`` is its ``lm_head``;
files of a base model lack its prefix), and one tensor of the model may be several in the files (the experts of
Mixtral). ``StoredTensors`` applies transformers' mapping to names, as ``from_pretrained`` does. So a ``PartAssembly``
can ask for the tensors that it needs, and make a ``PartModel`` of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
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

from p2ptrain.compute.activations import fill
from p2ptrain.compute.key_value_cache import KeyValueCache
from p2ptrain.compute.layout import LayerRange, ModelLayout, refused
from p2ptrain.compute.model import DRAWING
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.tensor_files import TensorTable

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
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
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
        model._weight_conversions = [each for each in mapping if each.was_used()]  # for ``revert_weight_conversion``

    def wanted(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Conversion]]:
        """By name in the files, what becomes ``tensors`` of the model: a tensor of its shape and dtype, on the meta
        device as ``tensors`` are, and its conversion.

        Raises:
            ConfigError: the files lack one, or have one that the configuration does not know.
        """
        wanted: dict[str, tuple[Tensor, Conversion]] = {}
        converted: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found = self.conversions.get(name)
            if found is None or found.converter is not None:
                converted[name] = tensor
            else:
                wanted[next(iter(found.sources))] = tensor, found
        for written, tensor in revert_weight_conversion(self._model, converted).items():
            name = written if written in self._by_name else written.removeprefix(self._prefix)
            if name not in self._by_name or self._by_name[name].converter is None:
                raise ConfigError(f"the model's files lack {written}", remedy=_REMEDY)
            wanted[name] = tensor, self._by_name[name]
        for _, found in wanted.values():
            if extra := [name for name in found.sources if name not in wanted]:
                raise ConfigError(f"the model's files have {extra[0]}, which config.json does not know", remedy=_REMEDY)
        return wanted


class PartAssembly:
    """Builds a part from tensors that arrive one by one. Only placed tensors are allocated.

    Attributes:
        wanted: shape of every tensor that the part owns, by its name in the model's files.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        part: LayerRange,
        names: Collection[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            config: configuration of the whole model, without dropout (see ``compute.model.without_dropout``).
            names: names of all tensors in the model's files.

        Raises:
            ConfigError: the files lack a tensor, or the architecture cannot be split.
        """
        self._config, self._part = config, part
        self._dtype, self._device = dtype, torch.device(device)
        self._whole = ModelLayout(config, dtype)
        shapes = self._whole.cache_shapes[part.start : part.stop]
        self.cache_position_bytes = sum(shape.numel for shape in shapes) * dtype.itemsize
        tensors = self._whole.model.state_dict()
        stored = StoredTensors(self._whole.model, names)
        tied = [name for name in self._whole.tied if name in stored.conversions]
        self._tied_files = [file for name in tied for file in stored.conversions[name].sources]
        self._names = self._whole.cut(part)
        self._places: dict[str, list[str]] = {}  # by name in the whole model, of tied tensors the first that is stored
        for place, name in self._names.items():
            self._places.setdefault(tied[0] if tied and name in self._whole.tied else name, []).append(place)
        self._conversions = stored.wanted({name: tensors[name] for name in self._places})
        self.wanted: Mapping[str, tuple[int, ...]] = {
            name: tuple(it[0].shape) for name, it in self._conversions.items()
        }
        self._partial: dict[str, tuple[Tensor, int]] = {}  # with the bytes received so far
        self._gathered: dict[str, dict[str, Tensor]] = {}  # by target, of conversions that lack other sources
        self._missing = set(self.wanted)

    def place(self, name: str, tensor: Tensor) -> None:
        """Place a copy of ``tensor``, converted to the computing dtype.

        Raises:
            ConfigError: the shape differs from the configuration's, or the dtype is not floating point.
        """
        expected = self._shape(name)
        shape = tuple(tensor.shape)
        if shape != expected or not tensor.is_floating_point():
            raise ConfigError(
                f"{name} has shape {shape} and {tensor.dtype}; config.json requires floats of shape {expected}",
                remedy=_REMEDY,
            )
        # Always a copy: a view would keep its base, such as a whole file, alive or mapped.
        self._adopt(name, tensor.detach().to(self._device, self._conversions[name][0].dtype, copy=True))

    def place_bytes(self, name: str, dtype: str, data: memoryview, start: int = 0) -> None:
        """Place bytes [start, ...) of a tensor in safetensors' ``dtype``. Pieces come in order, each of whole elements;
        the last one completes the tensor.

        Raises:
            ConfigError: the part has no such tensor, the dtype is not usable, or the piece exceeds the tensor.
            ValueError: the piece is out of order or cuts an element.
        """
        shape = self._shape(name)
        if dtype not in FILE_DTYPES:
            raise ConfigError(
                f"{name} has dtype {dtype}; a part supports only {', '.join(FILE_DTYPES)}",
                remedy="use the model's unquantized weights",
            )
        source = FILE_DTYPES[dtype]
        if start == 0:
            self._partial[name] = torch.empty_like(self._conversions[name][0], device=self._device), 0
        tensor, done = self._partial.get(name, (None, 0))
        total = math.prod(shape) * source.itemsize
        if start + data.nbytes > total:
            raise ConfigError(
                f"{name} as {dtype} has {start + data.nbytes} bytes or more; config.json requires {total}",
                remedy=_REMEDY,
            )
        if tensor is None or start != done or data.nbytes % source.itemsize:
            raise ValueError(f"invalid piece of {name}: {data.nbytes} bytes from byte {start}, after {done} of {total}")
        fill(tensor.view(-1)[start // source.itemsize :], data, source)
        self._partial[name] = tensor, start + data.nbytes
        if start + data.nbytes == total:
            del self._partial[name]
            self._adopt(name, tensor)

    def place_all(self, table: TensorTable, on_bytes: OnBytes = lambda done_bytes, total_bytes: None) -> None:
        """Read the part's tensors, and no other bytes, from a model directory, in small pieces.

        Raises:
            ConfigError: a tensor has a wrong shape or dtype. StorageError: a file cannot be read.
        """
        self._check_tied(table)
        sizes = {name: table.entries[name].size_bytes for name in self.wanted}
        done_bytes, total_bytes, piece_bytes = 0, sum(sizes.values()), 4 << 20
        for name, size_bytes in sizes.items():
            entry = table.entries[name]
            if tuple(entry.shape) != self.wanted[name]:
                text = f"{name} has shape {entry.shape}; config.json requires {self.wanted[name]}"
                raise ConfigError(text, remedy=_REMEDY)
            for start in range(0, max(1, size_bytes), piece_bytes):
                data = table.read(name, start, min(size_bytes, start + piece_bytes))
                self.place_bytes(name, entry.dtype, memoryview(data), start)
                done_bytes += len(data)
                on_bytes(done_bytes, total_bytes)

    def _check_tied(self, table: TensorTable) -> None:
        """Refuse files that hold both of two tied tensors with different values. transformers loads these as two
        parameters, so stages that treat them as one would compute another model."""
        stored = sorted(self._tied_files)
        if len(stored) < 2 or self.wanted.keys().isdisjoint(stored):
            return
        if len({hashlib.blake2b(table.read(name)).digest() for name in stored}) > 1:
            raise ConfigError(
                f"{' and '.join(stored)} differ in {table.directory}, but config.json ties them",
                remedy="set tie_word_embeddings to false in its config.json",
            )

    def finish(self) -> PartModel:
        """Return the part. Raises ``ConfigError`` if a tensor was not placed, or a buffer cannot be computed."""
        if self._missing:
            raise ConfigError(f"tensor {min(self._missing)} is missing or incomplete", remedy=_REMEDY)
        self._make_computed_buffers()
        return PartModel(self._whole, self._config, self._part, self._names, self._dtype)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.wanted:
            raise ConfigError(f"{name} is not part of layers {self._part.start} to {self._part.stop}", remedy=_REMEDY)
        return self.wanted[name]

    def _adopt(self, name: str, tensor: Tensor) -> None:
        """Take over a tensor of the files, which has no other owner; the last source of a conversion is converted."""
        conversion = self._conversions[name][1]
        gathered = self._gathered.setdefault(conversion.target, {})
        gathered[name] = tensor
        self._missing.discard(name)
        if len(gathered) == len(conversion.sources):
            del self._gathered[conversion.target]
            for target, made in conversion.convert(self._whole.model, gathered).items():
                self._install(target, made)

    def _install(self, target: str, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor)
        for place in self._places[target]:
            module, _, leaf = place.rpartition(".")
            owner = self._whole.model.get_submodule(module)
            if leaf in owner._parameters:
                owner._parameters[leaf] = parameter
            else:
                owner._buffers[leaf] = tensor

    def _make_computed_buffers(self) -> None:
        """Buffers that are in no file, such as rotary frequencies, as transformers makes them after it has loaded."""
        for tensor in self._whole.model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        for module in self._whole.model.modules():
            lacking = {
                name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
            }
            if not lacking:
                continue
            made = {name: torch.empty_like(buffer, device=self._device) for name, buffer in lacking.items()}
            for buffer in made.values():
                if buffer.is_floating_point():
                    buffer.fill_(torch.nan)
            module._buffers.update(made)
            with DRAWING, torch.no_grad():
                self._whole.model._init_weights(module)
            if any(buffer.isnan().any() for buffer in made.values()):
                raise refused(self._config, f"it is not known how its {type(module).__name__} makes {min(made)}")


def build_part(config: PretrainedConfig, part: LayerRange, weights: Mapping[str, Tensor]) -> PartModel:
    """The part with copies of a whole model's fp32 ``weights``. Raises ``ConfigError``."""
    assembly = PartAssembly(config, part, weights)
    for name in assembly.wanted:
        assembly.place(name, weights[name])
    return assembly.finish()


class PartModel:
    """A part, ready to compute.

    Attributes:
        module: transformers' model, reduced to the part.
        names: name of each tensor in ``module`` → its name in a whole model's ``state_dict``.
        width: elements of the hidden state of one position.
        tied_name: name in ``module`` of the matrix that the model's input and output share, if the first and the last
            stage each hold a copy and this is one of them; else "".
        context: most positions; None: no limit is set.
        switches: as in ``context_of``.
    """

    def __init__(
        self,
        layout: ModelLayout,
        config: PretrainedConfig,
        part: LayerRange,
        names: Mapping[str, str],
        dtype: torch.dtype,
    ) -> None:
        """``layout`` is cut to ``part``, with all tensors in place; ``config`` is of the whole model."""
        self.module: Any = layout.model.eval()
        self.part = part
        self.config = cast(PretrainedConfig, self.module.config)
        self.names = names
        self.tied_name = ""
        if layout.tied and part.first != part.last:
            ends = self.module.get_input_embeddings() if part.first else self.module.get_output_embeddings()
            self.tied_name = next(name for name, it in self.module.named_parameters() if it is ends.weight)
        self.width: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.context, self.switches = context_of(config, is_whole=part.first and part.last)
        stored = {id(tensor): tensor.nbytes for tensor in self.module.state_dict(keep_vars=True).values()}
        self.weights_bytes = sum(stored.values())
        self._cache_shapes = layout.cache_shapes[part.start : part.stop]
        self.cache_position_bytes = sum(shape.numel for shape in self._cache_shapes) * dtype.itemsize
        self._base, self._dtype = layout.base, dtype
        self._hidden = _HiddenStates()
        if not part.first:
            layout.layers[0].register_forward_pre_hook(self._hidden.enter, with_kwargs=True)
        if not part.last:
            layout.layers[-1].register_forward_hook(self._hidden.leave)

    def new_cache(self, positions: int) -> KeyValueCache:
        """An empty cache with room for ``positions`` positions of one sequence."""
        device = next(self.module.parameters()).device
        return KeyValueCache(self.config, self._cache_shapes, positions, self._dtype, device)

    def forward(self, x: Tensor, positions: Tensor, cache: KeyValueCache | None = None, *, logits: int = 0) -> Tensor:
        """Run the part's layers over new positions.

        Args:
            x: on the first stage token ids, int64 (B, T); else the previous stage's hidden states (B, T, width).
            positions: int64 (T,), the same for every sequence; they continue those in ``cache``. Without a cache also
                (B, T): a position that does not follow the one before begins a text that is kept apart.
            cache: new positions attend to its positions and are added to it. None (training): no earlier positions.
            logits: on the last stage, the number of final positions to compute logits for; 0 for all.

        Returns:
            hidden states (B, T, width); on the last stage logits (B, T or ``logits``, vocab).
        """
        common = {
            "input_ids" if self.part.first else "inputs_embeds": x,
            "position_ids": positions if positions.ndim == 2 else positions[None],
            "past_key_values": cache,
            "use_cache": cache is not None,
            "return_dict": True,
        }
        with self._hidden.of_pass(x):
            if self.part.last:
                return cast(Tensor, self.module(**common, logits_to_keep=logits).logits)
            self._base(**common)
            return cast(Tensor, self._hidden.leaving)


class _HiddenStates:
    """What enters the first layer of a part, and what leaves the last one, during a pass. Hooks on the layers."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        self.leaving: Tensor | None = None

    @contextmanager
    def of_pass(self, x: Tensor) -> Iterator[None]:
        self.entering = x
        try:
            yield
        finally:
            self.entering = self.leaving = None  # they would keep the graph of the backward pass in memory

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the first layer the hidden states as they came: some models scale them first, as they do embeddings."""
        if args:
            return (self.entering, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.entering}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.leaving = output[0] if isinstance(output, tuple) else output


def context_of(config: PretrainedConfig, *, is_whole: bool) -> tuple[int | None, list[int]]:
    """The most positions, and the switches: numbers of positions beyond which ``longrope`` takes other frequencies, so
    that cached keys must be computed again. Only a whole model has the token ids for that; a part ends there."""
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # for all layers, or per kind of layer
    changes = [each.get("original_max_position_embeddings") for each in ropes if each.get("rope_type") == "longrope"]
    switches = sorted({each for each in changes if isinstance(each, int)})
    most = getattr(config, "max_position_embeddings", None)
    if is_whole:
        return most, switches
    return min([*([most] if isinstance(most, int) else []), *switches], default=None), []
