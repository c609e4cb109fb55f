"""What a checkpoint of one stage holds, as plans: a part's weights as one of the files of the whole model, and its
optimizer beside it.

All stages' files in one directory are an ordinary Hugging Face model: the first stage writes what is not of one stage
(configuration, tokenizer, index). Where the first and the last stage both have the embedding's matrix it is in the
first stage's file only; the last one keeps its copy beside its moments, so that each stage can go on from its own files
alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from p2ptrain.compute.checkpoint_files import (
    ELEMENT_BYTES,
    PlannedTensor,
    parameters_range,
    safetensors_plan,
    small_files,
)
from p2ptrain.compute.flat import FlatModel, Segment
from p2ptrain.compute.model import ATTENTION
from p2ptrain.compute.split import Part, PartModel, owned_names
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import StorageError
from p2ptrain.core.tensor_files import INDEX_FILE
from p2ptrain.core.training import BlobRange, FilePlan
from p2ptrain.core.weights_index import shard_name, weights_index

_Auto: Any = AutoModelForCausalLM  # its annotations are partial
_TIED = "tied"


class PartFiles:
    """The plans of one stage's checkpoints, and how to read them.

    Args:
        part: of which ``flat`` holds the parameters.
        config: of the whole model.
        parts: of all stages.
        copied: the parameter that is the first stage's too, on the last stage of a tied model.
    """

    def __init__(
        self,
        flat: FlatModel,
        part: PartModel,
        config: PretrainedConfig,
        parts: list[Part],
        tokenizer: Tokenizer,
        *,
        copied: Segment | None,
    ) -> None:
        self._flat, self._part, self._config, self._parts = flat, part, config, parts
        self._tokenizer = tokenizer
        self._copied = copied
        stage = parts.index(part.part)
        self.weights = shard_name("model", stage, len(parts))
        self.optimizer = shard_name("optimizer", stage, len(parts))
        self.training = shard_name("training", stage, len(parts), ".json")
        self._fixed: list[FilePlan] = []

    def of_step(self, step: int, *, moments: list[str], corpus: str) -> list[FilePlan]:
        """The files of this stage's checkpoint after ``step`` applied steps.

        Raises:
            StorageError: there is no room for temporary files.
        """
        if not self._fixed:
            self._fixed = self._made(moments)
        notes = {
            "format": 1,
            "layout": self._flat.layout,
            "layers": [self._part.part.start, self._part.part.stop],
            "corpus": corpus,
            "step": step,
        }
        return [*self._fixed, FilePlan(self.training, (json.dumps(notes, indent=1).encode(),))]

    def read(self, directory: Path) -> Callable[[], Mapping[str, Tensor]]:
        """What reads the part's parameters from a checkpoint, by their names in the module.

        It raises ``StorageError`` where they are of other shapes, and what reading raises.
        """

        def weights() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            with safe_open(directory / self.weights, "pt") as file:
                for name in self._written:
                    found[name] = file.get_tensor(self._part.names[name])
            if self._copied is not None:
                with safe_open(directory / self.optimizer, "pt") as file:
                    found[self._copied.name] = file.get_tensor(_TIED)
            if {name: tuple(tensor.shape) for name, tensor in found.items()} != self._flat.shapes:
                raise StorageError(f"{directory / self.weights} has tensors of other shapes than this part")
            return found

        return weights

    @property
    def _written(self) -> list[str]:
        """Names, within the module, of what goes into the model's file."""
        return [segment.name for segment in self._flat.segments if segment != self._copied]

    def _made(self, moments: list[str]) -> list[FilePlan]:
        written = set(self._written)
        weights: list[PlannedTensor] = []
        for segment in self._flat.segments:
            pieces = [parameters_range(segment.offset, segment.numel)]
            if segment.name in written:
                weights.append((self._part.names[segment.name], "F32", segment.shape, pieces))
        whole = self._flat.numel * ELEMENT_BYTES
        optimizer: list[PlannedTensor] = [
            (name, "F32", (self._flat.numel,), [BlobRange(name, 0, whole)]) for name in moments
        ]
        if self._copied is not None:
            place = parameters_range(self._copied.offset, self._copied.numel)
            optimizer.append((_TIED, "F32", self._copied.shape, [place]))
        return [
            *(self._of_the_whole() if self._part.part.first else []),
            safetensors_plan(self.weights, weights, {"format": "pt"}),
            safetensors_plan(self.optimizer, optimizer, {"layout": self._flat.layout}),
        ]

    def _of_the_whole(self) -> list[FilePlan]:
        """What stands once for all stages. The index follows from the configuration: every stage names its tensors as
        the whole model does."""
        with torch.device("meta"):
            model: PreTrainedModel = _Auto.from_config(self._config, attn_implementation=ATTENTION, dtype=torch.float32)
        model.config.use_cache = False  # as a model in training, see ``build_model``
        names = list(dict(model.named_parameters()))  # tied ones once
        placed: set[str] = set()
        shards: dict[str, dict[str, int]] = {}
        for stage, part in enumerate(self._parts):
            owned = owned_names(self._config, part, names)
            shards[shard_name("model", stage, len(self._parts))] = {
                name: ELEMENT_BYTES * math.prod(shape) for name, shape in owned.items() if name not in placed
            }
            placed |= set(owned)
        return [*small_files(model, self._tokenizer), FilePlan(INDEX_FILE, (weights_index(shards),))]
