"""A part: consecutive layers of a causal language model that compute the same bits as in the whole model.

``ModelLayout`` builds the whole model with transformers' own classes on the meta device, where nothing is allocated,
and removes everything but the part. What is left runs transformers' own ``forward``, so what an architecture does
around its layers (positions, masks of each kind of layer, scales, soft-capping) is written nowhere here. The result
would be silently wrong without these rules:

- ``layer_idx`` of every submodule counts from 0 in the part, because it indexes the cache. A layer keeps what it
  derived from its index at construction (its kind of attention, a scale). So the whole model is built first.
- ``num_hidden_layers`` and the configuration's per-layer lists (``layer_types``) describe the part only. The cache and
  the masks are made from them.
- Only the first stage has what comes before the layers, and only the last stage what comes after them. If input and
  output share one matrix, both stages have it. On any other stage the first layer takes the hidden states exactly as
  they came, and what leaves the last one is passed on, whatever ``forward`` does before and after.

``PartAssembly`` collects the part's weights; ``compute.stored`` says which tensors of the files these are. Before an
architecture is used, ``compute.split_check`` compares its parts with the whole model.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from p2ptrain.compute.activations import fill
from p2ptrain.compute.model import DRAWING, first_line
from p2ptrain.compute.stored import REMEDY as _REMEDY
from p2ptrain.compute.stored import StoredTensors
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.model_config import SPLIT_FAMILIES
from p2ptrain.core.tensor_files import TensorTable

_Auto: Any = AutoModelForCausalLM  # its annotations are partial

FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
OnBytes = Callable[[int, int], None]
"""Called with (bytes placed, total bytes)."""


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [start, stop) of ``layers``. Raises ``ConfigError`` if the range is empty or out of bounds."""

    start: int
    stop: int
    layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.layers:
            raise ConfigError(f"layers {self.start} to {self.stop} are not a part of a model of {self.layers} layers")

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == self.layers

    def __len__(self) -> int:
        return self.stop - self.start


class NotSplit(ConfigError):
    """The model's architecture does not split."""


def refused(config: PretrainedConfig, why: str) -> NotSplit:
    return NotSplit(
        f"a {config.model_type!r} model cannot be split: {why}",
        remedy=f"run it whole, on one machine, or use one of these: {', '.join(SPLIT_FAMILIES)}",
    )


def part_config(config: PretrainedConfig, part: LayerRange) -> PretrainedConfig:
    """A copy of ``config`` that describes only the layers of ``part``."""
    sliced = copy.deepcopy(config)
    for key, values in per_layer_lists(config).items():
        setattr(sliced, key, values[part.start : part.stop])
    sliced.num_hidden_layers = len(part)
    return sliced


def per_layer_lists(config: PretrainedConfig) -> dict[str, list[Any]]:
    """The lists in ``config`` with one entry per layer, such as ``layer_types``, by key."""
    layers = config.num_hidden_layers
    return {
        key: list(value)
        for key, value in vars(config).items()
        if "layer" in key and isinstance(value, list | tuple) and len(value) == layers
    }


LAYER_CACHES = {DynamicLayer, DynamicSlidingWindowLayer}
"""Kinds of a layer's cache that ``KeyValueCache`` has rollback for."""
_TRACED_POSITIONS = 3
"""Positions in a tracing run (``ModelLayout._trace``). Their number must be the third size of what a layer caches."""

_MOST_KINDS = 16  # of layers: each one takes a tracing run


class _Traced(Exception):
    """Ends a tracing run: a layer caches keys and values of these shapes."""


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns 0 if code reads a single value of a tensor (``Tensor.item``). On the meta device tensors have no values,
    but some models read the largest position in this way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


class _TracingCache(DynamicCache):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise _Traced(key_states.shape, value_states.shape)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a layer caches of one position: keys and values, each (heads, width of a head)."""

    keys: tuple[int, int]
    values: tuple[int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.keys) + math.prod(self.values)


@functools.lru_cache(maxsize=64)
def _traces_of(model_type: str, config: str) -> list[tuple[set[str], list[CacheShape]]]:
    """A list for the result of tracing this configuration. It is empty at first; the caller adds the result, so that
    each configuration is traced once."""
    return []


class ModelLayout:
    """A whole model on the meta device, with the roles of its modules. Runs of the model's own code there, where
    nothing is computed, show which modules come before the layers and what the layers cache.

    Attributes:
        model: transformers' model. base: its module without the head.
        layers: those of the model; after ``cut`` those of the part.
        tied: names of the tensor that input and output share, the embedding's first; empty for an untied model.
        first, last: the modules with weights that are called before the layers (embedding, learned positions) and
            after them (norm, an untied head), by name.
        cache_shapes: what each layer of the whole model caches.
        units: the modules that together hold all weights, by name: ``first``, each layer, ``last``. Parts are made of
            whole units.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        self._config = config
        try:
            with DRAWING, torch.device("meta"):
                self.model = _Auto.from_config(copy.deepcopy(config), dtype=dtype)
        except Exception as error:  # each architecture validates in its own way and with its own exceptions
            raise refused(config, first_line(error)) from error
        self.base: Any = self.model.base_model
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        modules, layers = self.model.named_modules(), config.num_hidden_layers
        lists = [(name, it) for name, it in modules if isinstance(it, nn.ModuleList) and len(it) == layers]
        if not lists or head is None or embedding is None:
            raise refused(config, "its layers, embedding or head were not found")
        self._layers_name, self.layers = lists[0][0], list(lists[0][1])  # others are inside a layer
        tensors = self.model.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            for pattern, kept_dtype in self.model._get_dtype_plan(dtype).items():
                tensor.data = tensor.data.to(kept_dtype) if pattern in name else tensor.data
        is_tied = head.weight is embedding.weight
        self.tied = tuple(name for name, tensor in tensors.items() if is_tied and tensor is head.weight)
        owners = dict.fromkeys(name.rpartition(".")[0] for name in tensors if name not in self.tied[1:])
        outside = {
            name: self.model.get_submodule(name) for name in owners if not name.startswith(f"{self._layers_name}.")
        }
        found = _traces_of(config.model_type, config.to_json_string(use_diff=False))
        if not found:
            found.append((self._trace(0, outside)[0], self._all_cache_shapes()))
        called, self.cache_shapes = found[0]
        self.first = {name: module for name, module in outside.items() if name in called}
        self.last = {name: module for name, module in outside.items() if name not in called}
        by_name = {f"{self._layers_name}.{index}": layer for index, layer in enumerate(self.layers)}
        self.units: dict[str, nn.Module] = self.first | by_name | self.last

    def bytes_of(self, units: Iterable[nn.Module]) -> int:
        return sum(tensor.nbytes for unit in units for tensor in unit.state_dict().values())

    @property
    def tied_bytes(self) -> int:
        return self.model.get_input_embeddings().weight.nbytes if self.tied else 0

    def _all_cache_shapes(self) -> list[CacheShape]:
        known: dict[str, CacheShape] = {}
        shapes = []
        lists = per_layer_lists(self._config).values()
        for index, layer in enumerate(self.layers):
            weights = [(name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items()]
            kind = repr((weights, [values[index] for values in lists]))
            if kind not in known:
                if len(known) == _MOST_KINDS:
                    raise refused(self._config, f"its layers are of more than {_MOST_KINDS} kinds")
                known[kind] = self._trace(index)[1]
            shapes.append(known[kind])
        return shapes

    def _trace(self, index: int, names: Iterable[str] = ()) -> tuple[set[str], CacheShape]:
        """Run the model's code until layer ``index`` caches its keys and values. Returns which of the modules ``names``
        it called before, and the shapes of what the layer caches for a position."""
        config, layers, called = self.model.config, self.layers, set[str]()
        sliced = part_config(config, LayerRange(index, index + 1, len(layers)))
        self._set_layers([layers[index]], sliced)
        model = copy.deepcopy(self.model)  # the code may replace buffers of the model by tensors of this run
        self._set_layers(layers, config)
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name))
        shapes: tuple[Any, ...] = ()
        try:
            with torch.device("meta"), torch.no_grad(), _NoValues():  # type: ignore[no-untyped-call]
                ids = torch.zeros(1, _TRACED_POSITIONS, dtype=torch.int64)
                positions = torch.arange(_TRACED_POSITIONS)[None]
                cache = _TracingCache(config=sliced)
                model.base_model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        except _Traced as found:
            shapes = found.args
        except Exception as error:  # whatever the architecture needs and does not get
            raise refused(self._config, first_line(error)) from error
        if any(len(shape) != 4 or shape[2] != _TRACED_POSITIONS for shape in shapes) or not shapes:
            raise refused(self._config, "its layers do not cache keys and values of each position")
        return called, CacheShape(*((shape[1], shape[3]) for shape in shapes))

    def _set_layers(self, layers: list[nn.Module], config: PretrainedConfig) -> None:
        self.model.set_submodule(self._layers_name, nn.ModuleList(layers))
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel):
                module.config = config  # it keeps the attention setting

    def cut(self, part: LayerRange) -> dict[str, str]:
        """Remove all modules outside ``part`` from ``model``, and number its layers from 0. Returns the name of each
        tensor that is left → its name in the whole model."""
        if part.layers != len(self.layers):
            raise ConfigError(f"the model has {len(self.layers)} layers, not {part.layers}")
        self.layers = self.layers[part.start : part.stop]
        for index, layer in enumerate(self.layers):
            for module in cast("Iterable[Any]", layer.modules()):
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index
        self._set_layers(self.layers, part_config(self.model.config, part))
        for name in [*([] if part.first else self.first), *([] if part.last else self.last)]:
            self.model.set_submodule(name, _Absent())
        if not part.last:
            self.model.set_output_embeddings(_Absent())
        prefix = f"{self._layers_name}."
        return {name: _whole_name(name, prefix, part.start) for name in self.model.state_dict()}


def _whole_name(name: str, layers_prefix: str, start: int) -> str:
    if not name.startswith(layers_prefix):
        return name
    index, _, rest = name.removeprefix(layers_prefix).partition(".")
    return f"{layers_prefix}{int(index) + start}.{rest}"


class _Absent(nn.Module):
    """Replaces a module that another stage holds. It returns hidden states unchanged. For any other input, such as the
    ids of learned positions, it returns 0, which changes nothing when the model adds it to the hidden states."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.ndim == 3 and x.is_floating_point():
            return x
        return torch.zeros((), device=x.device)  # zero-dimensional: the sum keeps the other operand's dtype


# --------------------------------------------------------------------------------------------------------------- sizes


def layer_sizes(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> ModelSizes:
    """The sizes that placement needs; nothing is allocated. Raises ``ConfigError`` if the model cannot be split."""
    whole = ModelLayout(config, dtype)
    return ModelSizes(
        layers_bytes=tuple(whole.bytes_of([layer]) for layer in whole.layers),
        cache_bytes=tuple(shape.numel * dtype.itemsize for shape in whole.cache_shapes),
        first_bytes=whole.bytes_of(whole.first.values()),
        last_bytes=whole.bytes_of(whole.last.values()) + whole.tied_bytes,
        tied_bytes=whole.tied_bytes,
    )


def part_bytes(config: PretrainedConfig, part: LayerRange, dtype: torch.dtype) -> int:
    """Bytes of the part's weights; nothing is allocated. Raises as ``layer_sizes``."""
    return layer_sizes(config, dtype).weights_bytes(part.start, part.stop)


# ------------------------------------------------------------------------------------------------------------- weights


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


# ----------------------------------------------------------------------------------------------------------- computing


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


# --------------------------------------------------------------------------------------------------------------- cache


class _Room:
    """Keys and values of one layer, of shapes (1, heads, positions, head width)."""

    def __init__(self, shape: CacheShape, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(heads: int, width: int) -> Tensor:
            return torch.zeros(1, heads, positions, width, dtype=dtype, device=device)  # commits the memory

        self.keys, self.values = zeros(*shape.keys), zeros(*shape.values)

    def write(self, start: int, keys: Tensor, values: Tensor) -> int:
        """Write new positions after the first ``start``. Returns the new number of positions."""
        stop = start + keys.shape[-2]
        if stop > self.keys.shape[2]:
            raise ValueError(f"a cache of {self.keys.shape[2]} positions cannot hold {stop}")
        self.keys[:, :, start:stop], self.values[:, :, start:stop] = keys, values
        return stop

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]


class _FullLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    def __init__(self, room: _Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.room = room
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.length = self.room.write(self.length, key_states, value_states)
        return self.room.read(0, self.length)

    def get_seq_length(self) -> int:
        return self.length

    def cut(self, keep: int) -> None:
        self.length = keep


class _WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Attends to the last positions but keeps all: a rollback needs those before the window again. transformers' own
    ``get_mask_sizes`` makes a mask that fits the result of ``update``."""

    def __init__(self, room: _Room, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.is_initialized = True
        self.room = room

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = self.cumulative_length
        self.cumulative_length = self.room.write(before, key_states, value_states)
        return self.room.read(max(0, before - self.sliding_window + 1), self.cumulative_length)

    def cut(self, keep: int) -> None:
        self.cumulative_length = keep


class KeyValueCache(DynamicCache):
    """Keys and values of one session: ``positions`` positions in each layer of ``config``, a part's configuration.

    transformers' own caches copy their whole content for each token, and drop what is before a sliding window. This
    cache allocates all memory when the session opens, writes a token after the last one, and rolls back by moving the
    end. Attention gets the same numbers in the same order.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        shapes: Sequence[CacheShape],
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config=config)
        self.positions = positions
        made: list[_FullLayer | _WindowLayer] = []
        for layer, shape in zip(cast("list[Any]", self.layers), shapes, strict=True):
            room = _Room(shape, positions, dtype, device)
            is_window = type(layer) is DynamicSlidingWindowLayer
            made.append(_WindowLayer(room, layer.sliding_window) if is_window else _FullLayer(room))
        self._own = made
        self.layers = cast("list[Any]", made)

    @property
    def length(self) -> int:
        return self._own[0].get_seq_length()

    @property
    def nbytes(self) -> int:
        return sum(layer.room.keys.nbytes + layer.room.values.nbytes for layer in self._own)

    def cut(self, keep: int) -> None:
        """Keep the first ``keep`` positions. Raises ``ValueError`` if a layer has fewer."""
        fewest = min(layer.get_seq_length() for layer in self._own)
        if not 0 <= keep <= fewest:
            raise ValueError(f"cannot keep {keep} of {fewest} positions")
        for layer in self._own:
            layer.cut(keep)

    def cut_to_at_most(self, keep: int) -> None:
        """After a failed forward pass: cut all layers to the same length, at most ``keep``."""
        self.cut(min(keep, *(layer.get_seq_length() for layer in self._own)))
