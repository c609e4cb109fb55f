"""A run of consecutive layers of a causal language model, computed as the whole model computes them, to the last bit.

The layers are transformers' own: the whole model is built on the meta device, where nothing is allocated, and all but
the part is taken out of it. What must be set right for that, for the result is silently wrong otherwise:

- ``layer_idx`` of every submodule counts from 0 in the part: the cache is indexed with it. Whatever a layer took from
  its index when it was made (its kind of attention, a scale) it keeps, which is why the whole model is built first.
- ``num_hidden_layers`` and what the configuration lists for each layer (``layer_types``) are the part's: the cache and
  the masks are made from them.
- There is no embedding but on the first stage, no norm and no head but on the last. Where input and output share one
  matrix both stages have it. Learned positions (GPT-2) are added on the first stage only.
- Rotary frequencies are in no file: they are made anew from the configuration.

``check_splits`` (in ``compute.split_check``) compares split and whole for each architecture before it is used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from p2ptrain.compute.cache import PartCache, kv_shape
from p2ptrain.compute.model import ATTENTION, first_line
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.tensor_files import TensorTable

_Auto: Any = AutoModelForCausalLM  # its annotations are partial

Read = Callable[[str], Tensor]
"""The tensor of a name, as it stands in the model's files."""

FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LAYERS = ("layers", "h")
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
_POSITIONS = "wpe"
REMEDY = "run it whole (p2ptrain generate), or use a model of the llama, qwen2, qwen3, mistral or gpt2 family"


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [start, stop) of ``layers``. Raises ``ConfigError`` where there are none such."""

    start: int
    stop: int
    layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.layers:
            raise ConfigError(f"layers {self.start} to {self.stop} are no part of a model of {self.layers} layers")

    @property
    def first(self) -> bool:
        """Whether token ids go in."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether logits come out."""
        return self.stop == self.layers

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of a model's weights by where they go: what decides which peer can hold which part.

    Attributes:
        layers: of each layer.
        embedding: of what the first stage has besides its layers.
        head: of what the last stage has besides its layers; where the matrices are tied it is in ``embedding``, too.
        tied: bytes that are in both, which a part that is first and last has once.
        cache_position: of keys and values that one position takes in each layer.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    tied: int
    cache_position: tuple[int, ...]

    def part(self, part: Part) -> int:
        """Bytes of the weights of ``part``."""
        once = self.tied if part.first and part.last else 0
        ends = self.embedding * part.first + self.head * part.last - once
        return sum(self.layers[part.start : part.stop]) + ends


def part_config(config: PretrainedConfig, part: Part) -> PretrainedConfig:
    """A copy of ``config`` that tells of the layers of ``part`` only."""
    sliced = copy.deepcopy(config)
    for key, values in per_layer_lists(config).items():
        setattr(sliced, key, values[part.start : part.stop])
    sliced.num_hidden_layers = len(part)
    return sliced


def per_layer_lists(config: PretrainedConfig) -> dict[str, list[Any]]:
    """What ``config`` says of each layer, by key, such as ``layer_types``."""
    layers = config.num_hidden_layers
    return {
        key: list(value)
        for key, value in vars(config).items()
        if "layer" in key and isinstance(value, list | tuple) and len(value) == layers
    }


def layer_sizes(config: PretrainedConfig, dtype: torch.dtype) -> LayerSizes:
    """What placement needs to know; nothing is allocated.

    Raises:
        ConfigError: the architecture is none that splits.
    """
    whole = _Anatomy(config, dtype)
    per_layer = tuple(_bytes(layer) for layer in whole.layers)
    embedding = _bytes(whole.embedding) + (_bytes(whole.positions) if whole.positions is not None else 0)
    head = _bytes(whole.head) + _bytes(whole.norm)
    tied = _bytes(whole.embedding) if whole.tied else 0
    cache = 2 * math.prod(kv_shape(config, 1)) * dtype.itemsize
    return LayerSizes(per_layer, embedding, head, tied, (cache,) * len(per_layer))


def part_bytes(config: PretrainedConfig, part: Part, dtype: torch.dtype) -> int:
    """Bytes of the weights of ``part``; nothing is allocated. Raises ``ConfigError``, see ``layer_sizes``."""
    return layer_sizes(config, dtype).part(part)


def owned_names(config: PretrainedConfig, part: Part, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Names, as they stand in the files, of the tensors that ``part`` is made of, with their shapes.

    Args:
        names: of all tensors in the model's files.

    Raises:
        ConfigError: one is missing, or the architecture is none that splits.
    """
    return PartAssembly(config, part, names).wanted


def build_part(
    config: PretrainedConfig,
    part: Part,
    read: Read,
    names: Collection[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PartModel:
    """The part with the weights that ``read`` gives, which are asked for one after the other and copied.

    Args:
        names: of all tensors in the model's files.

    Raises:
        ConfigError: see ``PartAssembly``; a tensor has another shape than the configuration says.
    """
    assembly = PartAssembly(config, part, names, dtype=dtype, device=device)
    for name in assembly.wanted:
        assembly.place(name, read(name))
    return assembly.finish()


def read_from(table: TensorTable) -> Read:
    """Reads tensors from a model directory, exactly their bytes. Raises what ``TensorTable.read`` does, and
    ``ConfigError`` for a dtype that is not computed with."""

    def read(name: str) -> Tensor:
        entry = table.entries[name]
        data = table.read(name)
        dtype = file_dtype(name, entry.dtype)
        return torch.frombuffer(data, dtype=dtype).view(entry.shape) if data else torch.empty(entry.shape, dtype=dtype)

    return read


def file_dtype(name: str, dtype: str) -> torch.dtype:
    """What safetensors calls ``dtype``. Raises ``ConfigError`` where ``name`` is of one that is not computed with."""
    if dtype not in FILE_DTYPES:
        raise ConfigError(
            f"{name} is of dtype {dtype}; a part computes from {', '.join(FILE_DTYPES)}",
            remedy="use the model's unquantized weights",
        )
    return FILE_DTYPES[dtype]


class PartAssembly:
    """A part on its way. Nothing but the tensors that were placed is allocated.

    Attributes:
        wanted: every tensor that the part owns, by its name in the model's files, with its shape.
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
            config: of the whole model, without dropout (see ``compute.model.without_dropout``).
            names: of all tensors in the model's files.

        Raises:
            ConfigError: the files lack a tensor, or the architecture is none that splits.
        """
        self._config, self._part = config, part
        self._dtype, self._device = dtype, torch.device(device)
        whole = _Anatomy(config, dtype)
        whole.cut(part)
        self._model = whole.model
        self._base_prefix: str = whole.base_prefix
        self._tied: tuple[str, ...] = whole.tied
        self._names = whole.names_within(part)
        self._places: dict[str, list[str]] = {}
        self.wanted: dict[str, tuple[int, ...]] = {}
        for place, tensor in self._model.state_dict(keep_vars=True).items():
            written = self._in_files(self._names[place], names)
            self._places.setdefault(written, []).append(place)
            self.wanted[written] = tuple(tensor.shape)

    def place(self, name: str, tensor: Tensor) -> None:
        """Take over a copy of ``tensor``, converted to the computing dtype.

        Raises:
            ConfigError: it has another shape than the configuration says, or is none of real numbers.
        """
        self.check(name, tuple(tensor.shape), is_real=tensor.is_floating_point())
        # A copy always: a view would keep whatever it is a view of, such as a whole file, alive or mapped.
        self.adopt(name, tensor.detach().to(self._device, self._dtype, copy=True))

    def check(self, name: str, shape: tuple[int, ...], *, is_real: bool) -> None:
        """Raises ``ConfigError`` where a tensor of that shape cannot be ``name``."""
        if name not in self.wanted:
            raise ConfigError(f"{name} is no tensor of layers {self._part.start} to {self._part.stop}")
        if shape != self.wanted[name] or not is_real:
            expected = "x".join(map(str, self.wanted[name]))
            raise ConfigError(
                f"{name} has {'x'.join(map(str, shape))} elements{'' if is_real else ', none of them real numbers'}; "
                f"by config.json it has {expected}",
                remedy="use the config.json that belongs to the weights",
            )

    def adopt(self, name: str, tensor: Tensor) -> None:
        """Make ``tensor`` itself the part's: of the right shape, dtype and device, and nobody else's."""
        parameter = nn.Parameter(tensor)
        for place in self._places[name]:
            owner, leaf = self._owner(place)
            if leaf in owner._parameters:
                owner._parameters[leaf] = parameter
            else:
                owner._buffers[leaf] = tensor

    def finish(self) -> PartModel:
        """The part. Raises ``ConfigError`` where a tensor was not placed, or one that is in no file cannot be made."""
        for name, places in self._places.items():
            owner, leaf = self._owner(places[0])
            if getattr(owner, leaf).is_meta:
                raise ConfigError(f"{name} was not given", remedy="load the part again")
        if self._part.first and self._part.last and self._tied:
            self._tie()
        self._make_computed_buffers()
        return PartModel(self._model, self._config, self._part, self._names, tied=bool(self._tied))

    def _tie(self) -> None:
        """Files may hold both of two tied tensors; where their values differ transformers does not tie them."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if head.weight is not embedding.weight and torch.equal(head.weight, embedding.weight):
            head.weight = embedding.weight

    def _owner(self, place: str) -> tuple[nn.Module, str]:
        module, _, leaf = place.rpartition(".")
        return self._model.get_submodule(module), leaf

    def _make_computed_buffers(self) -> None:
        """Rotary frequencies: in no file, and without values as yet."""
        for module in self._model.modules():
            if not any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
                continue
            try:
                fresh = type(module)(config=self._config)
            except Exception as error:  # whatever it needs that is not known here
                raise refused(self._config, f"{type(module).__name__} cannot be made alone") from error
            for name, buffer in fresh._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)

    def _in_files(self, name: str, names: Collection[str]) -> str:
        """How the tensor ``name`` of a whole model is called in the files. Those of a bare base model lack its prefix;
        of two tied ones the files need only have one."""
        others = [other for other in self._tied if other != name] if name in self._tied else []
        for candidate in (name, *others):
            for written in (candidate, candidate.removeprefix(self._base_prefix)):
                if written in names:
                    return written
        raise ConfigError(
            f"the model's files lack {name}, which layers {self._part.start} to {self._part.stop} need",
            remedy="use config.json and *.safetensors of one model, as save_pretrained writes them",
        )


class PartModel:
    """A part, ready to compute.

    Attributes:
        module: transformers' model without what the part does not have.
        names: name of each parameter in ``module`` to its name in a whole model's ``state_dict``. Tied ones once.
        width: elements of the hidden state of one position.
        tied: whether the model's input and output share one matrix: the first and the last stage have a copy each.
        context: the most positions that the model knows; None where it does not say.
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
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self._base = cast(nn.Module, getattr(module, _base_name(module)))

    @property
    def weights_bytes(self) -> int:
        return _bytes(self.module)

    def new_cache(self, positions: int, *, batch: int = 1) -> PartCache:
        """An empty cache with room for so many positions. Raises ``ConfigError`` where what a layer keeps cannot be
        taken back."""
        parameter = next(self.module.parameters())
        try:
            return PartCache(self.config, positions, parameter.dtype, parameter.device, batch=batch)
        except TypeError as error:
            raise refused(self.config, str(error)) from error

    def forward(self, x: Tensor, positions: Tensor, cache: PartCache | None = None, *, logits: int = 0) -> Tensor:
        """The part's layers over new positions.

        Args:
            x: on the first stage token ids, int64 (B, T); else the hidden states that the stage before gave, (B, T,
                width).
            positions: int64 (T,), the same for every sequence; they go on from those in ``cache``.
            cache: what it has is seen by the new positions, which are added. None: the new ones see each other only
                (training).
            logits: on the last stage, for so many of the last positions; 0 for all.

        Returns:
            hidden states (B, T, width); on the last stage logits (B, T or ``logits``, vocab).
        """
        source = {"input_ids": x} if self.part.first else {"inputs_embeds": x}
        common = {
            **source,
            "position_ids": positions[None],
            "past_key_values": cache,
            "use_cache": cache is not None,
            "return_dict": True,
        }
        if self.part.last:
            return cast(Tensor, self.module(**common, logits_to_keep=logits).logits)
        return cast(Tensor, self._base(**common).last_hidden_state)


def refused(config: PretrainedConfig, why: str) -> ConfigError:
    """The refusal to split a model of this architecture."""
    return ConfigError(f"a {config.model_type!r} model cannot be split: {why}", remedy=REMEDY)


class _Anatomy:
    """A whole model on the meta device, and which of its modules is what.

    Attributes:
        base_prefix: of the names of all but the head.
        tied: names of the tensor that input and output share; empty where they do not.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        try:
            with torch.device("meta"):
                self.model = _Auto.from_config(copy.deepcopy(config), attn_implementation=ATTENTION, dtype=dtype)
        except Exception as error:  # each architecture validates in its own way and with its own exceptions
            raise refused(config, first_line(error)) from error
        self._config = config
        name = _base_name(self.model)
        self.base_prefix = f"{name}."
        self.base: Any = getattr(self.model, name, None)
        self._layers_name = self._one_of(_LAYERS, "list of layers")
        self._norm_name = self._one_of(_NORMS, "final norm")
        self.layers = cast(nn.ModuleList, getattr(self.base, self._layers_name))
        self.norm = cast(nn.Module, getattr(self.base, self._norm_name))
        self.positions = cast("nn.Module | None", getattr(self.base, _POSITIONS, None))
        self.embedding = cast(nn.Module, self.model.get_input_embeddings())
        self.head = cast(nn.Module, self.model.get_output_embeddings())
        self._check_known()
        pair = [name for name, tensor in self.model.state_dict(keep_vars=True).items() if tensor is self.head.weight]
        self.tied = tuple(pair) if self.head.weight is self.embedding.weight else ()

    def _one_of(self, names: tuple[str, ...], what: str) -> str:
        found = [name for name in names if isinstance(getattr(self.base, name, None), nn.Module)]
        if len(found) != 1:
            raise refused(self._config, f"its {what} was not found")
        return found[0]

    def _check_known(self) -> None:
        """Refuse a model with weights whose role is not known: there is no saying on which stage they belong."""
        if len(self.layers) != self._config.num_hidden_layers or self.head is None or self.embedding is None:
            raise refused(self._config, "its layers, embedding or head were not found")
        known = {
            id(parameter)
            for module in (self.layers, self.norm, self.positions, self.embedding, self.head)
            if module is not None
            for parameter in module.parameters()
        }
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise refused(self._config, f"it is not known which stage {name} belongs to")

    def cut(self, part: Part) -> None:
        """Leave the modules of ``part`` only, in place."""
        if part.layers != len(self.layers):
            raise ConfigError(f"the model has {len(self.layers)} layers, not {part.layers}")
        kept = list(self.layers)[part.start : part.stop]
        for index, layer in enumerate(kept):
            for module in cast("Iterable[Any]", layer.modules()):
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index
        setattr(self.base, self._layers_name, nn.ModuleList(kept))
        sliced = part_config(self.model.config, part)  # with the attention that it was built with
        self.model.config = self.base.config = sliced
        if not part.first:
            self.base.set_input_embeddings(nn.Identity())
            if self.positions is not None:
                setattr(self.base, _POSITIONS, _NoPositions())
            if hasattr(self.base, "drop"):
                self.base.drop = nn.Identity()
        if not part.last:
            setattr(self.base, self._norm_name, nn.Identity())
            self.model.set_output_embeddings(nn.Identity())

    def names_within(self, part: Part) -> dict[str, str]:
        """After ``cut``: name of each tensor that a file must have, to its name in a whole model."""
        prefix = f"{self.base_prefix}{self._layers_name}."
        return {name: _whole_name(name, prefix, part.start) for name in self.model.state_dict()}


def _whole_name(name: str, layers_prefix: str, start: int) -> str:
    if not name.startswith(layers_prefix):
        return name
    index, _, rest = name.removeprefix(layers_prefix).partition(".")
    return f"{layers_prefix}{int(index) + start}.{rest}"


class _NoPositions(nn.Module):
    """Learned positions of a stage that is not the first: nothing is added, and no matrix of zeros allocated."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)  # of no dimension: it leaves the other's dtype as it is


def _base_name(model: nn.Module) -> str:
    return cast(str, model.base_model_prefix)


def _bytes(module: nn.Module) -> int:
    """Of the parameters, shared ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
