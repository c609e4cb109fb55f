"""The layout of a model, and its cut into parts that compute the same bits as in the whole model. A part is a range of
consecutive layers of a causal language model.

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

Before an architecture is used, ``compute.split_check`` compares its parts with the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from p2ptrain.compute.key_value_cache import CacheShape
from p2ptrain.compute.model import first_line, outline
from p2ptrain.compute.quantized import choose_weights, quantize_linears
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.tensor_files import SPLIT_FAMILIES


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


def split_refusal(config: PretrainedConfig, why: str) -> NotSplit:
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


_TRACED_POSITIONS = 3
"""Positions in a tracing run (``ModelLayout._trace``). Their number must be the third size of what a layer caches."""

_MOST_KINDS = 16  # of layers: each one takes a tracing run

_FOUND: dict[tuple[str, torch.dtype], tuple[frozenset[str], tuple[CacheShape, ...]]] = {}
"""Configuration, and type of the weights → what tracing runs found: the modules called before the layers, and what each
layer caches. The parts of one model are made one after another, each from a layout of its own."""
_MOST_FOUND = 32


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
            self.model = cast(Any, outline(copy.deepcopy(config), dtype))
        except ConfigError as error:
            raise split_refusal(config, error.message) from error
        self.base: Any = self.model.base_model
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        modules, layers = self.model.named_modules(), config.num_hidden_layers
        lists = [
            (name, module) for name, module in modules if isinstance(module, nn.ModuleList) and len(module) == layers
        ]
        if not lists or head is None or embedding is None:
            raise split_refusal(config, "its layers, embedding or head were not found")
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
        key = config.to_json_string(use_diff=False), dtype
        if key not in _FOUND:
            while len(_FOUND) >= _MOST_FOUND:
                del _FOUND[next(iter(_FOUND))]
            _FOUND[key] = frozenset(self._trace(0, outside)[0]), tuple(self._all_cache_shapes())
        called, self.cache_shapes = _FOUND[key]
        self.first = {name: module for name, module in outside.items() if name in called}
        self.last = {name: module for name, module in outside.items() if name not in called}
        by_name = {f"{self._layers_name}.{index}": layer for index, layer in enumerate(self.layers)}
        self.units: dict[str, nn.Module] = self.first | by_name | self.last

    def _all_cache_shapes(self) -> list[CacheShape]:
        """Trace one layer of each kind."""
        known: dict[str, CacheShape] = {}
        shapes = []
        lists = per_layer_lists(self._config).values()
        for index, layer in enumerate(self.layers):
            weights = [(name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items()]
            kind = repr((weights, [values[index] for values in lists]))
            if kind not in known:
                if len(known) == _MOST_KINDS:
                    raise split_refusal(self._config, f"its layers are of more than {_MOST_KINDS} kinds")
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
            raise split_refusal(self._config, first_line(error)) from error
        if any(len(shape) != 4 or shape[2] != _TRACED_POSITIONS for shape in shapes) or not shapes:
            raise split_refusal(self._config, "its layers do not cache keys and values of each position")
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
        names = {}
        for name in self.model.state_dict():
            index, _, leaf = name.removeprefix(f"{self._layers_name}.").partition(".")
            is_in_layer = name.startswith(f"{self._layers_name}.")
            names[name] = f"{self._layers_name}.{int(index) + part.start}.{leaf}" if is_in_layer else name
        return names


class _Absent(nn.Module):
    """Replaces a module that another stage holds. It returns hidden states unchanged. For any other input, such as the
    ids of learned positions, it returns 0, which changes nothing when the model adds it to the hidden states."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.ndim == 3 and x.is_floating_point():
            return x
        return torch.zeros((), device=x.device)  # zero-dimensional: the sum keeps the other operand's dtype


def layer_sizes(config: PretrainedConfig, dtype: torch.dtype = torch.float32, weights: str = "") -> ModelSizes:
    """The sizes that placement needs, with ``weights`` as in ``PartSpec``; nothing is allocated. Raises ``ConfigError``
    if the model cannot be split."""

    def bytes_of(units: Iterable[nn.Module]) -> int:
        return sum(tensor.nbytes for unit in units for tensor in unit.state_dict().values())

    whole = ModelLayout(config, dtype)
    quantize_linears(whole.layers, choose_weights(config, weights))
    tied_bytes = whole.model.get_input_embeddings().weight.nbytes if whole.tied else 0
    return ModelSizes(
        layers_bytes=tuple(bytes_of([layer]) for layer in whole.layers),
        cache_bytes=tuple(shape.numel * dtype.itemsize for shape in whole.cache_shapes),
        first_bytes=bytes_of(whole.first.values()),
        last_bytes=bytes_of(whole.last.values()) + tied_bytes,
        tied_bytes=tied_bytes,
    )
