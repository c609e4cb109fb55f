"""What a checkpoint of a model holds, as plans: literal bytes, and ranges of the flat state.

The files are those of transformers' ``save_pretrained`` and the optimizer's beside them. A safetensors file is eight
bytes (the header's length, little-endian), a JSON header, and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors#format): so it can be written without torch, from a copy of the state.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from p2ptrain.compute.flat import FlatModel
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import StorageError
from p2ptrain.core.training import BlobRange, FilePlan

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINING_FILE = "training.json"
PARAMETERS = "parameters"

ELEMENT_BYTES = 4  # the state is fp32
_ALIGN_BYTES = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

PlannedTensor = tuple[str, str, tuple[int, ...], list[bytes | BlobRange]]
"""Name, safetensors' dtype, shape, bytes."""


class CheckpointFiles:
    """The plans of one model's checkpoints. All but the step is the same each time, and made once.

    Args:
        moments: names of the other arrays of the state, each as long as the parameters.

    Raises:
        StorageError: there is no room for temporary files (some KB; a tokenizer has MB).
    """

    def __init__(self, flat: FlatModel, tokenizer: Tokenizer, *, moments: list[str], corpus: str) -> None:
        model = cast(PreTrainedModel, flat.model)
        self._notes = {"format": 1, "layout": flat.layout, "corpus": corpus}
        whole = flat.numel * ELEMENT_BYTES
        optimizer: list[PlannedTensor] = [(name, "F32", (flat.numel,), [BlobRange(name, 0, whole)]) for name in moments]
        self._fixed = [
            *small_files(model, tokenizer),
            safetensors_plan(WEIGHTS_FILE, [*_weights(flat, model), *_buffers(model)], {"format": "pt"}),
            safetensors_plan(OPTIMIZER_FILE, optimizer, {"layout": flat.layout}),
        ]

    def of_step(self, step: int) -> list[FilePlan]:
        """The files of a checkpoint after ``step`` applied steps."""
        notes = json.dumps(self._notes | {"step": step}, indent=1).encode()
        return [*self._fixed, FilePlan(TRAINING_FILE, (notes,))]


def small_files(model: PreTrainedModel, tokenizer: Tokenizer) -> list[FilePlan]:
    """Configuration, generation settings and tokenizer, as the libraries write them."""
    try:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model.save_pretrained(directory, state_dict={})
            tokenizer.save(directory)
            return [
                FilePlan(path.name, (path.read_bytes(),))
                for path in sorted(directory.iterdir())
                if path.name != WEIGHTS_FILE
            ]
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write to the directory for temporary files: {error}", remedy="free some space there, or set TMPDIR"
        ) from error


def safetensors_plan(name: str, tensors: list[PlannedTensor], metadata: dict[str, str]) -> FilePlan:
    """A safetensors file of these tensors, in this order."""
    header: dict[str, object] = {"__metadata__": metadata}
    parts: list[bytes | BlobRange] = []
    offset = 0
    for key, dtype, shape, pieces in tensors:
        end = offset + FilePlan(key, tuple(pieces)).size_bytes
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        parts, offset = parts + pieces, end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGN_BYTES)
    return FilePlan(name, (len(encoded).to_bytes(8, "little") + encoded, *parts))


def _weights(flat: FlatModel, model: PreTrainedModel) -> list[PlannedTensor]:
    """Every parameter, tied ones once, under the names and in the shapes that the architecture's files have.

    transformers joins some tensors as it loads them (the experts of a mixture, say) and takes them apart again as it
    saves. Where that is more than other names, it is done to the elements' numbers instead of their values, which
    tells which range each tensor is. What is not a few ranges stays joined: transformers opens that, too.
    """
    views = _views(flat, flat.parameters)
    renamed = revert_weight_conversion(model, dict(views))
    places = {name: _place(tensor, flat.parameters) for name, tensor in renamed.items()}
    if None in places.values():
        renamed = revert_weight_conversion(model, _views(flat, torch.arange(flat.numel)))
        places = {name: _numbered(tensor) for name, tensor in renamed.items()}
    if None in places.values():
        renamed, places = views, {name: _place(tensor, flat.parameters) for name, tensor in views.items()}
    return [
        (name, "F32", tuple(renamed[name].shape), [parameters_range(start, renamed[name].numel())])
        for name, start in sorted(places.items(), key=lambda item: item[1] or 0)
        if start is not None
    ]


def _views(flat: FlatModel, array: Tensor) -> dict[str, Tensor]:
    """The parameters' parts of a flat array."""
    return {s.name: array[s.offset : s.offset + s.numel].view(s.shape) for s in flat.segments}


def _place(tensor: Tensor, flat: Tensor) -> int | None:
    """Where in ``flat`` the tensor lies, in elements; None where it is no contiguous view of it."""
    shares = tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    return int(tensor.storage_offset()) if shares and tensor.is_contiguous() else None


def _numbered(numbers: Tensor) -> int | None:
    """The first of consecutive numbers; None where they are not."""
    ordered = numbers.flatten()
    start = int(ordered[0])
    return start if torch.equal(ordered, torch.arange(start, start + len(ordered))) else None


def parameters_range(start: int, numel: int) -> bytes | BlobRange:
    """Elements [start, start + numel) of the flat parameters."""
    return BlobRange(PARAMETERS, start * ELEMENT_BYTES, (start + numel) * ELEMENT_BYTES)


def _buffers(model: PreTrainedModel) -> Iterator[PlannedTensor]:
    """What belongs to the model's files and is not trained."""
    saved = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            host = buffer.detach().cpu().contiguous()
            yield name, _DTYPES[host.dtype], tuple(host.shape), [host.flatten().view(torch.uint8).numpy().tobytes()]
