"""The index of a model in several files, ``model.safetensors.index.json``: tensor → file.

Each stage of a split model writes the tensors that it holds. With this index their files are one model, as
``save_pretrained`` would write it. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from p2ptrain.core.errors import StorageError


def shard_name(kind: str, stage: int, stages: int, suffix: str = ".safetensors") -> str:
    """Hugging Face's name for the file of stage ``stage``, from 0: ``model-00001-of-00002.safetensors`` for stage 0."""
    return f"{kind}-{stage + 1:05d}-of-{stages:05d}{suffix}"


def weights_index(shards: Mapping[str, Mapping[str, int]]) -> bytes:
    """Encode the index.

    Args:
        shards: file name → tensor name → size in bytes.

    Raises:
        StorageError: a tensor is in two files.
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
