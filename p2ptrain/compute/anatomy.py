"""A causal language model on the meta device: which of its modules is what, and how all but a part is taken out.

The whole model is built, with transformers' own classes, where nothing is allocated. What must be set right when layers
are taken out, for the result is silently wrong otherwise:

- ``layer_idx`` of every submodule counts from 0 in the part: the cache is indexed with it. Whatever a layer took from
  its index when it was made (its kind of attention, a scale) it keeps, which is why the whole model is built first.
- ``num_hidden_layers`` and what the configuration lists for each layer (``layer_types``) are the part's: the cache and
  the masks are made from them.
- There is no embedding but on the first stage, no norm and no head but on the last. Where input and output share one
  matrix both stages have it. Learned positions (GPT-2) are added on the first stage only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from p2ptrain.compute.model import ATTENTION, first_line
from p2ptrain.core.errors import ConfigError

_Auto: Any = AutoModelForCausalLM  # its annotations are partial

_LAYERS = ("layers", "h")
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
_POSITIONS = "wpe"
_REMEDY = "run it whole (p2ptrain generate), or use a model of the llama, qwen2, qwen3, mistral or gpt2 family"


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


class NotSplit(ConfigError):
    """The refusal to split a model of this architecture.

    Attributes:
        why: of it, without its name.
    """

    def __init__(self, config: PretrainedConfig, why: str) -> None:
        super().__init__(f"a {config.model_type!r} model cannot be split: {why}", remedy=_REMEDY)
        self.why = why


def refused(config: PretrainedConfig, why: str) -> NotSplit:
    """A model of this architecture cannot be split."""
    return NotSplit(config, why)


class Anatomy:
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
        name = base_name(self.model)
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


def base_name(model: nn.Module) -> str:
    """Of the module that holds all but the head."""
    return cast(str, model.base_model_prefix)
