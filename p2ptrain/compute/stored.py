"""Which tensors of a model's files become which tensors of the model.

They need not have the same names (GPT-NeoX' ``embed_out`` is the model's ``lm_head``; files of a base model lack its
prefix), and one tensor of the model may be several in the files (the experts of Mixtral). transformers has the mapping;
this applies it to names, as ``from_pretrained`` does, so that a part can ask for the tensors that it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from p2ptrain.core.errors import ConfigError

REMEDY = "use config.json and *.safetensors of one model, as save_pretrained writes them"


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
                raise ConfigError(f"the model's files lack {written}", remedy=REMEDY)
            wanted[name] = tensor, self._by_name[name]
        for _, found in wanted.values():
            if extra := [name for name in found.sources if name not in wanted]:
                raise ConfigError(f"the model's files have {extra[0]}, which config.json does not know", remedy=REMEDY)
        return wanted
