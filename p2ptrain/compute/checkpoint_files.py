"""Plans for the files of a checkpoint, of a model or of one stage, and the reading of its weights.

A plan lists literal bytes and ranges of the flat state. The files are those of transformers' ``save_pretrained``, and
the optimizer's. ``core.tensor_files`` has the format, which is so simple that a file can be written without torch, from
a copy of the state.

The files of all stages in one directory are an ordinary Hugging Face model. The first stage writes the files of the
whole model (configuration, tokenizer, index). Those of a model that came from a directory are copied from there
unchanged, and its weights keep their types. A tied embedding matrix is only in the first stage's weights file. The
last stage stores its copy beside its moments, so that each stage can resume from its own files alone.

A shard writes its rows of every tensor and of every moment. Those of all shards are joined into the files of a whole
model (``core.checkpoints.join_rows``), from which any number of shards can resume, or none.

Weights that do not train are written from the module's own memory. With LoRA the files are those of peft, without the
model; the optimizer's file then has the adapters, too.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from p2ptrain.compute.activations import bytes_of, tensor_of
from p2ptrain.compute.flat import Segment
from p2ptrain.compute.fsdp import ShardedModel
from p2ptrain.compute.local import MERGED
from p2ptrain.compute.model import outline
from p2ptrain.compute.part import DTYPE_NAMES, PartAssembly
from p2ptrain.compute.recipe import BuiltPart, ModelRecipe
from p2ptrain.core.checkpoints import ADAPTER, NOTES, ROWS, shard_name, weights_index
from p2ptrain.core.errors import StorageError
from p2ptrain.core.tensor_files import (
    ADAPTER_CONFIG,
    INDEX_FILE,
    ITEM_BYTES,
    WEIGHTS_FILE,
    TensorTable,
    header_of,
)
from p2ptrain.core.training import BlobRange, FilePlan

PARAMETERS = "parameters"
_TIED = "tied"
MAX_NOTES_BYTES = 1 << 20
_ELEMENT_BYTES = 4  # the state is fp32

PlannedTensor = tuple[str, str, tuple[int, ...], list[bytes | BlobRange]]
"""Name, safetensors' dtype, shape, content."""


class CheckpointNames(NamedTuple):
    """Names of the files that a member writes: its weights, the optimizer's arrays, and notes."""

    weights: str
    optimizer: str
    notes: str

    @classmethod
    def of(cls, recipe: ModelRecipe, built: BuiltPart, *, merged: bool) -> CheckpointNames:
        kind = ADAPTER if recipe.tuning.adapters and not merged else "model"
        if isinstance(built.flat, ShardedModel):
            index, count = built.flat.shard.index, built.flat.shard.count
            rows, moments = (shard_name(f"{ROWS}{files}", index, count) for files in (kind, "optimizer"))
            return cls(rows, moments, NOTES)
        if built.stage is None:
            return cls(f"{kind}.safetensors", "optimizer.safetensors", NOTES)
        index, count = recipe.stage.stage, len(recipe.stage.parts)
        return cls(
            shard_name(kind, index, count),
            shard_name("optimizer", index, count),
            shard_name("training", index, count, ".json"),
        )


def copied_segment(built: BuiltPart) -> Segment | None:
    """The tied matrix, on the last stage, which stores its copy beside its moments."""
    return built.tied if built.stage is not None and built.stage.part.last else None


class CheckpointPlanner:
    """Plans the checkpoints of one model or stage. All plans except that with the step are made once.

    Args:
        corpus: digest of the corpus.
        merged: of exact averages (``ExactAverage``): name of a parameter → its place in the blob ``MERGED``. The
            weights file has the whole model then.
    """

    def __init__(self, recipe: ModelRecipe, built: BuiltPart, corpus: str, merged: Mapping[str, Segment]) -> None:
        self._recipe, self._flat, self._stage, self._corpus = recipe, built.flat, built.stage, corpus
        self._names = CheckpointNames.of(recipe, built, merged=bool(merged))
        self._merged = {name: _range(segment.offset, segment.numel, blob=MERGED) for name, segment in merged.items()}
        self._copied = copied_segment(built)
        base = recipe.base
        stored = TensorTable(base).entries if base is not None else {}
        self._dtypes = {name: entry.dtype for name, entry in stored.items()}
        self._usual_dtype = max(stored.values(), key=lambda entry: entry.size_bytes).dtype if stored else "F32"
        self._fixed: list[FilePlan] = []

    @property
    def _has_model(self) -> bool:
        """Whether the weights file has the model, and not only adapters."""
        return bool(self._merged) or not self._recipe.tuning.adapters

    @property
    def _has_halves(self) -> bool:
        """Whether weights are saved in 16 bits, because the base's are."""
        return self._has_model and not _HALVES.keys().isdisjoint(self._dtypes.values())

    def files_of(self, step: int, moments: Mapping[str, int], *, earlier_steps: int = 0) -> list[FilePlan]:
        """The files of a checkpoint after ``step`` applied steps. ``moments``: the state's other arrays: name → number
        of elements. ``earlier_steps``: see ``SummedGradients``. Raises ``StorageError``: there is no room for temporary
        files (some KB, but MB for a tokenizer)."""
        if not self._fixed:
            self._fixed = self._plans(moments)
        if isinstance(self._flat, ShardedModel) and self._flat.shard.index:
            return self._fixed  # the first shard writes the notes
        notes: dict[str, Any] = {"format": 1, "layout": self._flat.layout, "corpus": self._corpus, "step": step}
        if earlier_steps:
            notes["earlier_steps"] = earlier_steps
        if self._recipe.tuning.frozen_digest:
            notes["frozen"] = self._recipe.tuning.frozen_digest
        if self._stage is not None:
            notes["layers"] = [self._stage.part.start, self._stage.part.stop]
        return [*self._fixed, FilePlan(self._names.notes, (json.dumps(notes, indent=1).encode(),))]

    def _plans(self, moments: Mapping[str, int]) -> list[FilePlan]:
        flat, part = self._flat, self._stage
        is_first = not isinstance(flat, ShardedModel) or not flat.shard.index
        adapters = self._recipe.tuning.adapters
        # The parameters in fp32, too: training goes on from them. With LoRA it needs no other file.
        arrays = {**moments, **({PARAMETERS: flat.numel} if self._has_halves or adapters else {})}
        optimizer: list[PlannedTensor] = [
            (name, "F32", (numel,), [BlobRange(name, 0, numel * _ELEMENT_BYTES)]) for name, numel in arrays.items()
        ]
        if isinstance(flat, ShardedModel):  # by tensor, so that those of all shards can be joined
            optimizer = [
                (f"{name}/{segment.name}", "F32", segment.shape, [_range(segment.offset, segment.numel, blob=name)])
                for name in arrays
                for segment in flat.segments
            ]
        if self._copied is not None:
            optimizer.append((_TIED, "F32", self._copied.shape, [_range(self._copied.offset, self._copied.numel)]))
        parameters = flat.model.named_parameters()
        frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
        if adapters and not self._merged:
            config = FilePlan(ADAPTER_CONFIG, (self._recipe.tuning.config_file(),))
            small = [config, *self._small_files()] if part is None or part.part.first else []
            names, buffers = adapters, []
            frozen = {name: weight for name, weight in frozen.items() if name in adapters}
        elif part is None:
            small = self._small_files() if is_first else []
            names = {name: name.replace(".base_layer.", ".") for name, _ in flat.model.named_parameters()}
            buffers = list(_buffers(flat.model)) if is_first else []
        else:
            small = self._of_all_stages() if part.part.first else []
            names = dict(part.names)
            buffers = [(names[name], dtype, shape, data) for name, dtype, shape, data in _buffers(part.module)]
            if part.part.last:
                frozen.pop(part.tied_name, None)  # the first stage saves it
        weights = [
            self._weight(names[segment.name], segment.shape, _range(segment.offset, segment.numel))
            for segment in flat.segments
            if segment != self._copied and not self._merged
        ]
        weights += [
            self._weight(
                names[name],
                tuple(weight.shape),
                self._merged.get(name) or BlobRange(partial(bytes_of, weight), 0, weight.nbytes),
            )
            for name, weight in frozen.items()
        ]
        return [
            *small,
            _safetensors_plan(self._names.weights, [*weights, *buffers], {"format": "pt"}),
            _safetensors_plan(self._names.optimizer, optimizer, {"layout": flat.layout}),
        ]

    def _of_all_stages(self) -> list[FilePlan]:
        """The files of the whole model. The index follows from the configuration alone."""
        model = self._outline()
        buffers = _saved_buffers(model)
        names = [*dict(model.named_parameters()), *buffers]  # tied ones once
        placed: set[str] = set()
        shards: dict[str, dict[str, int]] = {}
        parts = self._recipe.stage.parts
        for stage, part in enumerate(parts):
            owned = PartAssembly(self._recipe.config, part, names).wanted
            shards[shard_name("model", stage, len(parts))] = {
                name: (_ELEMENT_BYTES if name in buffers else ITEM_BYTES[self._type_of(name)]) * math.prod(shape)
                for name, shape in owned.items()
                if name not in placed
            }
            placed |= set(owned)
        return [*self._small_files(), FilePlan(INDEX_FILE, (weights_index(shards),))]

    def _type_of(self, name: str) -> str:
        """The type in which a tensor came, if training can be saved in it."""
        dtype = self._dtypes.get(name, self._usual_dtype)
        return dtype if self._has_halves and dtype in _HALVES else "F32"

    def _weight(self, name: str, shape: tuple[int, ...], span: BlobRange) -> PlannedTensor:
        dtype = self._type_of(name)
        return name, dtype, shape, [replace(span, halve=_HALVES.get(dtype))]

    def _outline(self) -> PreTrainedModel:
        config = copy.deepcopy(self._recipe.config)
        config.use_cache = True  # it is off in training
        return outline(config)

    def _small_files(self) -> list[FilePlan]:
        """The files beside the weights: copies of the base's, or those of a new model."""
        spec, base, place = self._recipe.spec, self._recipe.base, self._recipe.spec.model.path
        try:
            with tempfile.TemporaryDirectory() as name:
                directory = Path(name)
                if base is None:
                    self._outline().save_pretrained(directory, state_dict={})
                elif self._has_model:
                    shutil.copyfile(base / "config.json", directory / "config.json")
                if place is not None and (settings := place / "generation_config.json").is_file():
                    shutil.copyfile(settings, directory / "generation_config.json")
                self._recipe.tokenizer.save(directory, chat=spec.data.format == "chat")
                paths = sorted(path for path in directory.iterdir() if path.suffix != ".safetensors")
                return [FilePlan(path.name, (path.read_bytes(),)) for path in paths]
        except (OSError, SafetensorError) as error:
            text = f"cannot copy the files beside the weights through {tempfile.gettempdir()}: {error}"
            raise StorageError(text, remedy="free some space there, or set TMPDIR") from error


class CheckpointReader:
    """Reads a checkpoint into the arrays of one model, stage or shard."""

    def __init__(self, recipe: ModelRecipe, built: BuiltPart) -> None:
        self._recipe, self._flat, self._stage = recipe, built.flat, built.stage
        self._names = CheckpointNames.of(recipe, built, merged=False)
        self._copied = copied_segment(built)

    def optimizer_steps_of(self, directory: Path) -> int:
        """Number of steps that the moments of a whole model's checkpoint have seen. Raises ``StorageError``."""
        try:
            notes = self._notes_in(directory)
            return int(notes["step"]) + int(notes.get("earlier_steps", 0))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise StorageError(f"cannot read the checkpoint {directory}: {error}") from error

    def read(self, directory: Path, arrays: Mapping[str, Tensor]) -> None:
        """Read a checkpoint into ``arrays``, by name. Raises ``StorageError``: the checkpoint does not fit this part,
        or cannot be read. Nothing has changed."""
        moments = arrays.keys() - {PARAMETERS}
        try:
            layout, frozen, loaded = self._stored_arrays(directory, moments)
            if (layout, frozen) != (self._flat.layout, self._recipe.tuning.frozen_digest):
                raise StorageError(
                    f"the checkpoint {directory} is of another model",
                    remedy="restore it into a job with its [model] table",
                )
            if not loaded.keys() >= moments or any(arrays[name].shape != loaded[name].shape for name in loaded):
                raise StorageError(
                    f"the optimizer's arrays in {directory} do not fit this job",
                    remedy="restore it into a job with the same optimizer.name",
                )
            if PARAMETERS not in loaded:
                self._flat.copy_tensors(self._stored_weights(directory))
        except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
            raise StorageError(f"cannot read the checkpoint {directory}: {error}") from error
        for name, array in loaded.items():
            arrays[name].copy_(array)

    def _stored_arrays(self, directory: Path, moments: Collection[str]) -> tuple[str, str, dict[str, Tensor]]:
        """The layout, the digest of what does not train, and the flat arrays that the optimizer's file has."""
        if isinstance(self._flat, ShardedModel):
            layout, rows = self._rows_in(directory, moments, self._flat)
            return layout, "", rows
        notes = self._notes_in(directory)
        with safe_open(directory / self._names.optimizer, "pt") as file:
            loaded = {name: file.get_tensor(name) for name in {*moments, PARAMETERS} & set(file.keys())}
        return notes["layout"], notes.get("frozen", ""), loaded

    def _notes_in(self, directory: Path) -> Any:
        path = directory / self._names.notes
        if path.stat().st_size > MAX_NOTES_BYTES:  # it may have come from another worker
            raise ValueError(f"{path.name} is too large")
        return json.loads(path.read_bytes())

    def _stored_weights(self, directory: Path) -> dict[str, Tensor]:
        """The parameters by name in the module. Raises the readers' own errors."""
        names = {} if self._stage is None else self._stage.names
        found: dict[str, Tensor] = {}
        with safe_open(directory / self._names.weights, "pt") as file:
            for segment in self._flat.segments:
                if segment != self._copied:
                    found[segment.name] = file.get_tensor(names.get(segment.name, segment.name))
        if self._copied is not None:
            with safe_open(directory / self._names.optimizer, "pt") as file:
                found[self._copied.name] = file.get_tensor(_TIED)
        return found

    def _rows_in(self, directory: Path, moments: Collection[str], flat: ShardedModel) -> tuple[str, dict[str, Tensor]]:
        """The layout, and a shard's flat arrays, from its own checkpoint or from that of a whole model, of which only
        its rows are read. No arrays if the layout is that of another model. Raises ``ValueError`` if a tensor does not
        fit, and the readers' own errors."""
        own = (directory / self._names.optimizer).is_file()
        arrays = {name: torch.zeros(flat.numel) for name in (PARAMETERS, *moments)}
        with (
            safe_open(directory / (self._names.weights if own else WEIGHTS_FILE), "pt") as weights,
            safe_open(directory / (self._names.optimizer if own else "optimizer.safetensors"), "pt") as optimizer,
        ):
            layout, stored = (optimizer.metadata() or {}).get("layout", ""), set(optimizer.keys())
            if layout != flat.layout:
                return layout, {}
            for segment, (whole, own_rows) in zip(flat.segments, flat.own_rows(), strict=True):
                start, stop = own_rows.start, own_rows.stop
                width, at = math.prod(whole.shape[1:]), segment.offset
                for name, array in arrays.items():
                    key = f"{name}/{segment.name}" if own else name
                    if key not in stored and name == PARAMETERS:  # the weights file has all of their digits
                        rows = weights.get_slice(segment.name)[0 if own else start : stop - start if own else stop]
                    elif own:
                        rows = optimizer.get_tensor(key)
                    else:
                        rows = optimizer.get_slice(key)[whole.offset + start * width : whole.offset + stop * width]
                    if rows.numel() != (stop - start) * width:
                        raise ValueError(f"{segment.name} has another shape than in this model")
                    array[at : at + rows.numel()] = rows.flatten()
        return layout, arrays


def _safetensors_plan(name: str, tensors: list[PlannedTensor], metadata: dict[str, str]) -> FilePlan:
    sizes = [(key, dtype, shape, FilePlan(key, tuple(parts)).size_bytes) for key, dtype, shape, parts in tensors]
    return FilePlan(name, (header_of(sizes, metadata), *(part for *_, parts in tensors for part in parts)))


def _range(start: int, numel: int, *, blob: str = PARAMETERS) -> BlobRange:
    return BlobRange(blob, start * _ELEMENT_BYTES, (start + numel) * _ELEMENT_BYTES)


def _halve(dtype: torch.dtype, data: memoryview) -> memoryview:
    """fp32 to the nearest finite number of a dtype of 16 bits."""
    values, limit = tensor_of(data, torch.float32, (data.nbytes // 4,)), torch.finfo(dtype).max
    return bytes_of(values.clamp(-limit, limit).to(dtype))


_HALVES = {"BF16": partial(_halve, torch.bfloat16), "F16": partial(_halve, torch.float16)}


def _buffers(model: nn.Module) -> Iterator[PlannedTensor]:
    for name, buffer in _saved_buffers(model).items():
        yield name, DTYPE_NAMES[buffer.dtype], tuple(buffer.shape), [bytes(bytes_of(buffer))]


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    trained = dict(model.named_parameters(remove_duplicate=False)).keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in trained}
