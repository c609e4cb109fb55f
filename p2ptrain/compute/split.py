"""A run of consecutive layers of a causal language model, computed as the whole model computes them, to the last bit.

The layers are transformers' own (``compute.anatomy`` takes the others out), the weights are read for them alone, and
rotary frequencies, which are in no file, are made anew from the configuration. ``compute.split_check`` compares split
and whole for each architecture before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from p2ptrain.compute.activations import fill
from p2ptrain.compute.anatomy import Anatomy, Part, base_name, part_config, refused
from p2ptrain.compute.cache import PartCache, kv_shape
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.tensor_files import TensorTable

__all__ = [
    "LayerSizes",
    "Part",
    "PartAssembly",
    "PartModel",
    "build_part",
    "layer_sizes",
    "load_part",
    "owned_names",
    "part_bytes",
    "part_config",
    "read_from",
]

Read = Callable[[str], Tensor]
"""The tensor of a name, as it stands in the model's files."""

FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_REMEDY = "use config.json and *.safetensors of one model, as save_pretrained writes them"
PIECE_BYTES = 4 << 20
"""Read from a file at once: what is allocated beside the part's tensors while it is loaded."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of a model's weights by where they go: what decides which peer can hold which part.

    Attributes:
        layers_bytes: of each layer.
        cache_bytes: of each layer, of the keys and values of one position.
        first_bytes: of what the first stage has besides its layers: the embedding.
        last_bytes: of what the last stage has besides its layers: norm and head, be its matrix the embedding or not.
        tied_bytes: of ``last_bytes``, what the first stage has, too; a part that is first and last has it once.
    """

    layers_bytes: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    first_bytes: int
    last_bytes: int
    tied_bytes: int

    def part(self, part: Part) -> int:
        """Bytes of the weights of ``part``."""
        once = self.tied_bytes if part.first and part.last else 0
        ends = self.first_bytes * part.first + self.last_bytes * part.last - once
        return sum(self.layers_bytes[part.start : part.stop]) + ends


def layer_sizes(config: PretrainedConfig, dtype: torch.dtype) -> LayerSizes:
    """What placement needs to know; nothing is allocated.

    Raises:
        ConfigError: the architecture is none that splits.
    """
    whole = Anatomy(config, dtype)
    per_layer = tuple(_bytes(layer) for layer in whole.layers)
    embedding = _bytes(whole.embedding) + (_bytes(whole.positions) if whole.positions is not None else 0)
    head = _bytes(whole.head) + _bytes(whole.norm)
    tied = _bytes(whole.embedding) if whole.tied else 0
    cache = 2 * math.prod(kv_shape(config, 1)) * dtype.itemsize
    return LayerSizes(per_layer, (cache,) * len(per_layer), embedding, head, tied)


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


def load_part(
    config: PretrainedConfig,
    part: Part,
    table: TensorTable,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PartModel:
    """The part with the weights of a model directory, of which exactly its own bytes are read, in small pieces.

    Raises:
        ConfigError: see ``PartAssembly``; a tensor has another shape or dtype than it should.
        StorageError: a file cannot be read.
    """
    assembly = PartAssembly(config, part, table.entries, dtype=dtype, device=device)
    for name in assembly.wanted:
        entry = table.entries[name]
        for start in range(0, max(1, entry.size_bytes), PIECE_BYTES):
            data = table.read(name, start, min(entry.size_bytes, start + PIECE_BYTES))
            assembly.place_bytes(name, entry.dtype, memoryview(data), start)
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
        whole = Anatomy(config, dtype)
        whole.cut(part)
        self._model = whole.model
        self._base_prefix: str = whole.base_prefix
        self._partial: dict[str, tuple[Tensor, int]] = {}  # with how many bytes of each are there
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
        expected = self._shape(name)
        shape = tuple(tensor.shape)
        if shape != expected or not tensor.is_floating_point():
            raise ConfigError(
                f"{name} is of shape {shape} and {tensor.dtype}; by config.json it has real numbers, {expected}",
                remedy=_REMEDY,
            )
        # A copy always: a view would keep whatever it is a view of, such as a whole file, alive or mapped.
        self._adopt(name, tensor.detach().to(self._device, self._dtype, copy=True))

    def place_bytes(self, name: str, dtype: str, data: memoryview, start: int = 0) -> None:
        """Take over bytes [start, ...) of a tensor in safetensors' ``dtype``; pieces come in order, of any size that is
        whole elements. With the last one the tensor is the part's.

        Raises:
            ConfigError: the part has no such tensor, the dtype cannot be used, or there are bytes beyond its end.
            ValueError: it is not the piece that comes next, or cuts an element.
        """
        shape = self._shape(name)
        source = file_dtype(name, dtype)
        if start == 0:
            self._partial[name] = torch.empty(shape, dtype=self._dtype, device=self._device), 0
        tensor, done = self._partial.get(name, (None, 0))
        total = math.prod(shape) * source.itemsize
        if start + data.nbytes > total:
            raise ConfigError(
                f"{name} as {dtype} has {start + data.nbytes} bytes or more; by config.json it has {total}",
                remedy=_REMEDY,
            )
        if tensor is None or start != done or data.nbytes % source.itemsize:
            raise ValueError(f"{data.nbytes} bytes of {name} from {start} on, where {done} of {total} are there")
        fill(tensor.view(-1)[start // source.itemsize :], data, source)
        self._partial[name] = tensor, start + data.nbytes
        if start + data.nbytes == total:
            del self._partial[name]
            self._adopt(name, tensor)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.wanted:
            raise ConfigError(f"{name} is no tensor of layers {self._part.start} to {self._part.stop}", remedy=_REMEDY)
        return self.wanted[name]

    def _adopt(self, name: str, tensor: Tensor) -> None:
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
                raise ConfigError(f"{name} was not given, or not all of it", remedy=_REMEDY)
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
            lacking = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
            if not lacking:
                continue
            try:
                fresh = type(module)(config=self._config)
                module._buffers.update({name: fresh.get_buffer(name).to(self._device) for name in lacking})
            except Exception as error:  # whatever it needs that is not known here
                raise refused(self._config, f"{type(module).__name__} cannot be made alone") from error

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
            remedy=_REMEDY,
        )


class PartModel:
    """A part, ready to compute.

    Attributes:
        module: transformers' model without what the part does not have.
        names: name of each parameter in ``module`` to its name in a whole model's ``state_dict``. Tied ones once.
        width: elements of the hidden state of one position.
        tied: whether the model's input and output share one matrix: the first and the last stage have a copy each.
        context: the most positions that the model knows, and that are the same however many are computed at a time;
            None where it does not say.
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
        self._base = cast(nn.Module, getattr(module, base_name(module)))

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


def _context(config: PretrainedConfig) -> int | None:
    """See ``PartModel``. Where rotary frequencies are others beyond a length (``longrope``), what a position is depends
    on how far the forward pass goes that computes it: keys that are cached, or computed again, would not agree."""
    said = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    ropes = [said, *(each for each in said.values() if isinstance(each, dict))]  # of all layers, or of each kind
    changes = [each.get("original_max_position_embeddings") for each in ropes if each.get("rope_type") == "longrope"]
    knows = [getattr(config, "max_position_embeddings", None), *changes]
    return min((each for each in knows if isinstance(each, int)), default=None)


def _bytes(module: nn.Module) -> int:
    """Of the parameters, shared ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
