"""The index of a model in several files: ``model.safetensors.index.json``, which says which tensor is in which.

The stages of a split model each write the tensors that they hold. With this index their files are one model, as
``save_pretrained`` would write it. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from p2ptrain.core.errors import ProtocolError, StorageError
from p2ptrain.core.tensor_files import MAX_HEADER_BYTES, TensorEntry, header_entries_untrusted

_LENGTH_BYTES = 8


def shard_name(kind: str, stage: int, stages: int, suffix: str = ".safetensors") -> str:
    """Name of a file of stage ``stage``, counted from 0, as Hugging Face names those of a model:
    ``model-00001-of-00002.safetensors``."""
    return f"{kind}-{stage + 1:05d}-of-{stages:05d}{suffix}"


def weights_index(shards: Mapping[str, Mapping[str, int]]) -> bytes:
    """The index's bytes.

    Args:
        shards: of each file, the bytes of each of its tensors.

    Raises:
        StorageError: a tensor is in two files: which of them counts is not known.
    """
    places: dict[str, str] = {}
    total = 0
    for file in sorted(shards):
        for name, size_bytes in shards[file].items():
            if name in places:
                raise StorageError(
                    f"{name} is in {places[name]} and in {file}", remedy="use the files of one checkpoint"
                )
            places[name] = file
            total += size_bytes
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def directory_index(directory: Path) -> bytes:
    """The index of all stages' files in ``directory``, made from their headers.

    Raises:
        StorageError: a stage's file is missing, damaged or cannot be read, or they are of several checkpoints.
    """
    paths = sorted(directory.glob("model-*-of-*.safetensors"))
    expected = [shard_name("model", stage, len(paths)) for stage in range(len(paths))]
    if not paths or [path.name for path in paths] != expected:
        found = ", ".join(path.name for path in paths) or "none"
        raise StorageError(
            f"{directory} does not have the files of all stages: {found}",
            remedy="put the files of all stages' checkpoints of one step together",
        )
    sizes = {}
    for path in paths:
        sizes[path.name] = {name: entry.size_bytes for name, entry in _entries(path).items()}
    return weights_index(sizes)


def _entries(path: Path) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(file_bytes - _LENGTH_BYTES, MAX_HEADER_BYTES):
                raise StorageError(f"{path} is damaged: its header would have {length} bytes")
            return header_entries_untrusted(file.read(length), path.name, file_bytes)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except ProtocolError as error:
        raise StorageError(f"{path} is damaged: {error.message}", remedy="fetch or save it again") from error
