"""A part: consecutive layers of a causal language model that compute the same bits as in the whole model.

``ModelLayout`` builds the whole model with transformers' own classes on the meta device, where nothing is allocated,
and removes everything but the part. The result would be silently wrong without these rules:

- ``layer_idx`` of every submodule counts from 0 in the part, because it indexes the cache. A layer keeps what it
  derived from its index at construction (its kind of attention, a scale). So the whole model is built first.
- ``num_hidden_layers`` and the configuration's per-layer lists (``layer_types``) describe the part only. The cache and
  the masks are made from them.
- Only the first stage has an embedding, and only the last stage has norm and head. If input and output share one
  matrix, both stages have it. Only the first stage adds learned positions (GPT-2).

``PartAssembly`` collects the part's weights. Rotary frequencies are in no file; it computes them from the
configuration. Before an architecture is used, ``compute.split_check`` compares its parts with the whole model.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from p2ptrain.compute.activations import fill
from p2ptrain.compute.model import ATTENTION, first_line
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.tensor_files import TensorTable

_Auto: Any = AutoModelForCausalLM  # its annotations are partial

FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_REMEDY = "use config.json and *.safetensors of one model, as save_pretrained writes them"
OnBytes = Callable[[int, int], None]
"""Called with (bytes placed, total bytes)."""


@dataclass(frozen=True, slots=True)
class Part:
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


def refused(config: PretrainedConfig, why: str) -> ConfigError:
    return ConfigError(
        f"a {config.model_type!r} model cannot be split: {why}",
        remedy="run it whole (p2ptrain generate), or use a model of the llama, qwen2, qwen3, mistral or gpt2 family",
    )


def part_config(config: PretrainedConfig, part: Part) -> PretrainedConfig:
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


class ModelLayout:
    """A whole model on the meta device, with the roles of its modules.

    Attributes:
        base_prefix: prefix of all tensor names except the head's.
        tied: names of the tensor that input and output share, the embedding's first; empty for an untied model.
        units: the modules that together hold all weights, by name in the whole model: embedding, learned positions,
            each layer, norm, and an untied head. Parts are made of whole units.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        try:
            with torch.device("meta"):
                self.model = _Auto.from_config(copy.deepcopy(config), attn_implementation=ATTENTION, dtype=dtype)
        except Exception as error:  # each architecture validates in its own way and with its own exceptions
            raise refused(config, first_line(error)) from error
        self._config = config
        self.base_prefix: str = f"{self.model.base_model_prefix}."
        self.base: Any = getattr(self.model, self.model.base_model_prefix, None)
        self._layers_name = self._one_of(("layers", "h"), "list of layers")
        self._norm_name = self._one_of(("norm", "ln_f", "final_layernorm", "final_layer_norm"), "final norm")
        self.layers = cast(nn.ModuleList, getattr(self.base, self._layers_name))
        self.norm = cast(nn.Module, getattr(self.base, self._norm_name))
        self.positions = cast("nn.Module | None", getattr(self.base, "wpe", None))
        self.embedding = cast(nn.Module, self.model.get_input_embeddings())
        self.head = cast(nn.Module, self.model.get_output_embeddings())
        if len(self.layers) != config.num_hidden_layers or self.head is None or self.embedding is None:
            raise refused(config, "its layers, embedding or head were not found")
        tied = self.head.weight is self.embedding.weight
        places = self.model.state_dict(keep_vars=True)
        self.tied: tuple[str, ...] = tuple(
            name for name, tensor in places.items() if tied and tensor is self.head.weight
        )
        units = [self.embedding, self.positions, *self.layers, self.norm, None if tied else self.head]
        self.units = {name: module for name, module in self.model.named_modules() if any(module is u for u in units)}
        known = {id(parameter) for module in self.units.values() for parameter in module.parameters()}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise refused(config, f"its {name} belongs to no layer, embedding, norm or head")

    def _one_of(self, names: tuple[str, ...], what: str) -> str:
        found = [name for name in names if isinstance(getattr(self.base, name, None), nn.Module)]
        if len(found) != 1:
            raise refused(self._config, f"its {what} was not found")
        return found[0]

    def cut(self, part: Part) -> dict[str, str]:
        """Remove all modules outside ``part``, in place. Returns name in the part → name in the whole model."""
        if part.layers != len(self.layers):
            raise ConfigError(f"the model has {len(self.layers)} layers, not {part.layers}")
        kept = list(self.layers)[part.start : part.stop]
        for index, layer in enumerate(kept):
            for module in cast("Iterable[Any]", layer.modules()):
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index
        setattr(self.base, self._layers_name, nn.ModuleList(kept))
        self.model.config = self.base.config = part_config(self.model.config, part)  # it keeps the attention setting
        if not part.first:
            self.base.set_input_embeddings(nn.Identity())
            if self.positions is not None:
                self.base.wpe = _NoPositions()
            if hasattr(self.base, "drop"):
                self.base.drop = nn.Identity()
        if not part.last:
            setattr(self.base, self._norm_name, nn.Identity())
            self.model.set_output_embeddings(nn.Identity())
        prefix = f"{self.base_prefix}{self._layers_name}."
        return {name: _whole_name(name, prefix, part.start) for name in self.model.state_dict()}


def _whole_name(name: str, layers_prefix: str, start: int) -> str:
    if not name.startswith(layers_prefix):
        return name
    index, _, rest = name.removeprefix(layers_prefix).partition(".")
    return f"{layers_prefix}{int(index) + start}.{rest}"


class _NoPositions(nn.Module):
    """Replaces learned positions on stages after the first: adds zero without a matrix of zeros."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)  # zero-dimensional: the sum keeps the other operand's dtype


# --------------------------------------------------------------------------------------------------------------- sizes


def layer_sizes(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> ModelSizes:
    """The sizes that placement needs; nothing is allocated. Raises ``ConfigError`` if the model cannot be split."""
    whole = ModelLayout(config, dtype)
    per_layer = tuple(_bytes(layer) for layer in whole.layers)
    embedding = _bytes(whole.embedding) + (_bytes(whole.positions) if whole.positions is not None else 0)
    tied = _bytes(whole.embedding) if whole.tied else 0
    cache = 2 * math.prod(kv_shape(config, 1)) * dtype.itemsize
    return ModelSizes(per_layer, (cache,) * len(per_layer), embedding, _bytes(whole.head) + _bytes(whole.norm), tied)


def part_bytes(config: PretrainedConfig, part: Part, dtype: torch.dtype) -> int:
    """Bytes of the part's weights; nothing is allocated. Raises as ``layer_sizes``."""
    return layer_sizes(config, dtype).weights_bytes(part.start, part.stop)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# ------------------------------------------------------------------------------------------------------------- weights


class PartAssembly:
    """Builds a part from tensors that arrive one by one. Only placed tensors are allocated.

    Attributes:
        wanted: shape of every tensor that the part owns, by its name in the model's files.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        part: Part,
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
        whole = ModelLayout(config, dtype)
        self._names = whole.cut(part)
        self._model = whole.model
        self._base_prefix, self._tied = whole.base_prefix, whole.tied
        self._partial: dict[str, tuple[Tensor, int]] = {}  # with the bytes received so far
        self._places: dict[str, list[str]] = {}
        self.wanted: dict[str, tuple[int, ...]] = {}
        for place, tensor in self._model.state_dict(keep_vars=True).items():
            written = self._in_files(self._names[place], names)
            self._places.setdefault(written, []).append(place)
            self.wanted[written] = tuple(tensor.shape)

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
        self._adopt(name, tensor.detach().to(self._device, self._dtype, copy=True))

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
            self._partial[name] = torch.empty(shape, dtype=self._dtype, device=self._device), 0
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
        names = {name for tied in self._tied for name in (tied, tied.removeprefix(self._base_prefix))}
        stored = sorted(names & table.entries.keys())
        if len(stored) < 2 or self.wanted.keys().isdisjoint(stored):
            return
        if len({hashlib.blake2b(table.read(name)).digest() for name in stored}) > 1:
            raise ConfigError(
                f"{' and '.join(stored)} differ in {table.directory}, but config.json ties them",
                remedy="set tie_word_embeddings to false in its config.json",
            )

    def finish(self) -> PartModel:
        """Return the part. Raises ``ConfigError`` if a tensor was not placed, or a buffer cannot be computed."""
        for name, places in self._places.items():
            owner, leaf = self._owner(places[0])
            if getattr(owner, leaf).is_meta:
                raise ConfigError(f"tensor {name} is missing or incomplete", remedy=_REMEDY)
        self._make_computed_buffers()
        return PartModel(self._model, self._config, self._part, self._names, tied=bool(self._tied))

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.wanted:
            raise ConfigError(f"{name} is not part of layers {self._part.start} to {self._part.stop}", remedy=_REMEDY)
        return self.wanted[name]

    def _adopt(self, name: str, tensor: Tensor) -> None:
        """Install ``tensor`` without a copy. It has the right shape, dtype and device, and no other owner."""
        parameter = nn.Parameter(tensor)
        for place in self._places[name]:
            owner, leaf = self._owner(place)
            if leaf in owner._parameters:
                owner._parameters[leaf] = parameter
            else:
                owner._buffers[leaf] = tensor

    def _owner(self, place: str) -> tuple[nn.Module, str]:
        module, _, leaf = place.rpartition(".")
        return self._model.get_submodule(module), leaf

    def _make_computed_buffers(self) -> None:
        for module in self._model.modules():
            lacking = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
            if not lacking:
                continue
            try:
                fresh = type(module)(config=self._config)
                module._buffers.update({name: fresh.get_buffer(name).to(self._device) for name in lacking})
            except Exception as error:  # a module's constructor may raise anything
                raise refused(self._config, f"its {type(module).__name__} cannot be created separately") from error

    def _in_files(self, name: str, names: Collection[str]) -> str:
        """Name in the files of the whole model's tensor ``name``. Files of a bare base model lack the base prefix. All
        stages use the first tied name that the files have."""
        for candidate in self._tied if name in self._tied else (name,):
            for written in (candidate, candidate.removeprefix(self._base_prefix)):
                if written in names:
                    return written
        raise ConfigError(
            f"the model's files lack {name}, which layers {self._part.start} to {self._part.stop} need",
            remedy=_REMEDY,
        )


def build_part(config: PretrainedConfig, part: Part, weights: Mapping[str, Tensor]) -> PartModel:
    """The part with copies of a whole model's fp32 ``weights``. Raises ``ConfigError``."""
    assembly = PartAssembly(config, part, weights)
    for name in assembly.wanted:
        assembly.place(name, weights[name])
    return assembly.finish()


def load_part(
    config: PretrainedConfig, part: Part, table: TensorTable, *, dtype: torch.dtype = torch.float32
) -> PartModel:
    """The part on the CPU, with weights from a model directory. Raises as ``PartAssembly.place_all``."""
    assembly = PartAssembly(config, part, table.entries, dtype=dtype)
    assembly.place_all(table)
    return assembly.finish()


# ----------------------------------------------------------------------------------------------------------- computing


class PartModel:
    """A part, ready to compute.

    Attributes:
        module: transformers' model, reduced to the part.
        names: name of each parameter in ``module`` → its name in a whole model's ``state_dict``. Tied ones once.
        width: elements of the hidden state of one position.
        tied: whether the model's input and output share one matrix. The first and the last stage then each hold a copy.
        context: most positions for which results do not depend on how many are computed at once; None: no limit set.
    """

    def __init__(
        self, module: nn.Module, config: PretrainedConfig, part: Part, names: Mapping[str, str], *, tied: bool
    ) -> None:
        self.module = module.eval()
        self.part = part
        self.config = cast(PretrainedConfig, module.config)
        self.names = {name: names[name] for name, _ in module.named_parameters()}
        self.tied = tied
        self.width: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.context = _context(config)
        self._base = cast(nn.Module, getattr(module, str(module.base_model_prefix)))

    @property
    def weights_bytes(self) -> int:
        return _bytes(self.module)

    def new_cache(self, positions: int, *, batch: int = 1) -> PartCache:
        """An empty cache for ``positions`` positions. Raises as ``PartCache``."""
        parameter = next(self.module.parameters())
        return PartCache(self.config, positions, parameter.dtype, parameter.device, batch=batch)

    def forward(self, x: Tensor, positions: Tensor, cache: PartCache | None = None, *, logits: int = 0) -> Tensor:
        """Run the part's layers over new positions.

        Args:
            x: on the first stage token ids, int64 (B, T); else the previous stage's hidden states (B, T, width).
            positions: int64 (T,), the same for every sequence; they continue those in ``cache``.
            cache: new positions attend to its positions and are added to it. None (training): no earlier positions.
            logits: on the last stage, the number of final positions to compute logits for; 0 for all.

        Returns:
            hidden states (B, T, width); on the last stage logits (B, T or ``logits``, vocab).
        """
        common = {
            "input_ids" if self.part.first else "inputs_embeds": x,
            "position_ids": positions[None],
            "past_key_values": cache,
            "use_cache": cache is not None,
            "return_dict": True,
        }
        if self.part.last:
            return cast(Tensor, self.module(**common, logits_to_keep=logits).logits)
        return cast(Tensor, self._base(**common).last_hidden_state)


def _context(config: PretrainedConfig) -> int | None:
    """See ``PartModel.context``. ``longrope`` changes the rotary frequencies beyond a length. A key would depend on the
    length of the forward pass that computes it, so cached and recomputed keys would differ."""
    said = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    ropes = [said, *(each for each in said.values() if isinstance(each, dict))]  # for all layers, or per kind of layer
    changes = [each.get("original_max_position_embeddings") for each in ropes if each.get("rope_type") == "longrope"]
    knows = [getattr(config, "max_position_embeddings", None), *changes]
    return min((each for each in knows if isinstance(each, int)), default=None)


# --------------------------------------------------------------------------------------------------------------- cache


class _Room:
    """Keys and values of one layer, each of shape (batch, heads, positions, head width)."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # not empty(): zeros() commits the memory
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, start: int, keys: Tensor, values: Tensor) -> int:
        """Write new positions after the first ``start``. Returns the new number of positions."""
        stop = start + keys.shape[-2]
        if stop > self.keys.shape[2]:
            raise ValueError(f"a cache of {self.keys.shape[2]} positions cannot hold {stop}")
        self.keys[:, :, start:stop], self.values[:, :, start:stop] = keys, values
        return stop

    def seen(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]


class _FullLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    def __init__(self, room: _Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.room = room
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.length = self.room.write(self.length, key_states, value_states)
        return self.room.seen(0, self.length)

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
        return self.room.seen(max(0, before - self.sliding_window + 1), self.cumulative_length)

    def cut(self, keep: int) -> None:
        self.cumulative_length = keep


class PartCache(DynamicCache):
    """Keys and values of one session: ``positions`` positions in each layer of ``config``, a part's configuration.

    transformers' own caches copy their whole content for each token, and drop what is before a sliding window. This
    cache allocates all memory when the session opens, writes a token after the last one, and rolls back by moving the
    end. Attention gets the same numbers in the same order.

    Raises:
        ConfigError: a layer keeps another kind of state, which cannot be rolled back.
    """

    def __init__(
        self, config: PretrainedConfig, positions: int, dtype: torch.dtype, device: torch.device, *, batch: int = 1
    ) -> None:
        super().__init__(config=config)
        shape = (batch, *kv_shape(config, positions))
        self.positions = positions
        made: list[_FullLayer | _WindowLayer] = []
        for layer in self.layers:
            if type(layer) is DynamicLayer:
                made.append(_FullLayer(_Room(shape, dtype, device)))
            elif type(layer) is DynamicSlidingWindowLayer:
                made.append(_WindowLayer(_Room(shape, dtype, device), layer.sliding_window))
            else:
                raise refused(config, f"its cache ({type(layer).__name__}) cannot be rolled back")
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


def kv_shape(config: PretrainedConfig, positions: int) -> tuple[int, int, int]:
    """Shape (heads, positions, head width) of one layer's keys. Values have the same shape in models that split."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, positions, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
