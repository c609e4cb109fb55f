"""Rules that join the checkpoints of a split model's stages into one directory with the whole model.

Each stage saves its own directory, with file names that no other stage uses. The first stage also saves the files that
describe the whole model, such as the index, ``model.safetensors.index.json``: tensor → file. So the files of all stages
together are an ordinary checkpoint, as ``save_pretrained`` would write it. Only LoRA adapters need more: peft reads a
single file, which is made of those of all stages (``add_whole_adapter``); and the files of shards, which hold rows of
every tensor (``join_rows``). A whole checkpoint of a sharded model has no parts: each shard takes its rows out of all
of it. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from p2ptrain.core.checkpoints import WRITE_BYTES, CheckpointEntry, Draft, Meta
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import ProtocolError, StorageError
from p2ptrain.core.tensor_files import (
    ADAPTER_FILE,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    WEIGHTS_FILE,
    TensorEntry,
    header_entries_untrusted,
    header_of,
)

STAGE, STAGES, LINEAGE = "stage", "stages", "lineage"
"""Keys of a part's meta: the stage, the number of stages, and the lineage of the whole model's state."""

ADAPTER = "adapter_model"
"""A stage's own file with its adapters is ``adapter_model-00001-of-00002.safetensors``."""

ROWS = "rows-"
"""Prefix of a shard's own files, ``rows-model-00001-of-00002.safetensors``. A tensor ``exp_avg/NAME`` is the piece of
the flat array ``exp_avg`` for the tensor NAME (``compute.flat``)."""
_ALIGN_BYTES = 64  # of a tensor in a flat array

_OF_STAGE = re.compile(r".*-(\d{5})-of-(\d{5})\.\w+")


def is_of_stage(name: str, stage: int, stages: int) -> bool:
    """Whether a file belongs to the stage: ``model-00002-of-00003.safetensors`` is the second stage's. A name without
    such a mark belongs to the first stage, because the file describes the whole model."""
    if name == ADAPTER_FILE and stages > 1:
        return False  # it is made of the stages' files
    mark = _OF_STAGE.fullmatch(name)
    return (int(mark[1]), int(mark[2])) == (stage + 1, stages) if mark is not None else stage == 0


def part_of(entry: CheckpointEntry, stage: int, stages: int) -> tuple[Meta, dict[str, tuple[int, str]]]:
    """Meta and files of one stage, from its own checkpoint or from a whole one. Raises ``StorageError``."""
    if is_part(entry) and (entry.meta.get(STAGE), entry.meta.get(STAGES)) != (stage, stages):
        raise StorageError(f"{entry.path} is not a checkpoint of part {stage} of {stages}")
    all_of_it = WEIGHTS_FILE in entry.files  # every shard needs rows of it
    files = {name: facts for name, facts in entry.files.items() if all_of_it or is_of_stage(name, stage, stages)}
    if not files:
        raise StorageError(f"{entry.path} has no files of part {stage} of {stages}")
    return entry.meta | {STAGE: stage, STAGES: stages}, files


def of_the_whole(meta: Meta) -> Meta:
    return {key: value for key, value in meta.items() if key not in (STAGE, STAGES)}


def is_part(entry: CheckpointEntry) -> bool:
    return entry.meta.get(STAGES) is not None


def shard_name(kind: str, stage: int, stages: int, suffix: str = ".safetensors") -> str:
    """Hugging Face's name for the file of stage ``stage``, from 0: ``model-00001-of-00002.safetensors`` for stage 0."""
    return f"{kind}-{stage + 1:05d}-of-{stages:05d}{suffix}"


def add_whole_adapter(disk: Disk, draft: Draft) -> None:
    """Add ``ADAPTER_FILE`` to a whole checkpoint with the adapters of several stages. Blocks.

    Raises:
        StorageError: a stage's file is not one of tensors, or two have the same tensor; see also ``Disk``.
    """
    entries: dict[str, TensorEntry] = {}
    data: list[tuple[str, int, int]] = []  # file, start, stop
    for file in sorted(name for name in draft.sums if name.startswith(f"{ADAPTER}-")):
        found, _ = _tensors(disk, draft, file)
        if twice := entries.keys() & found.keys():
            raise StorageError(f"{min(twice)} is in two files of adapters")
        entries |= found
        size_bytes = draft.sums[file][0]
        data.append((file, min((entry.start for entry in found.values()), default=size_bytes), size_bytes))
    if not data:
        return
    tensors = [(name, entry.dtype, entry.shape, entry.size_bytes) for name, entry in entries.items()]
    _write(disk, draft, ADAPTER_FILE, header_of(tensors, {"format": "pt"}), data)


def join_rows(disk: Disk, draft: Draft) -> None:
    """Replace the files of all shards in a whole checkpoint by those of a model that is not sharded. Blocks.

    Raises:
        StorageError: a shard's file is not one of tensors, or they do not fit together; see also ``Disk``.
    """
    for kind in ("model", "optimizer"):
        files = sorted(name for name in draft.sums if name.startswith(f"{ROWS}{kind}-"))
        if not files:
            continue
        read = [_tensors(disk, draft, file) for file in files]
        tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}  # dtype, shape and size of the whole
        data: list[tuple[str, int, int]] = []
        for name in read[0][0]:
            rows = [found[name] for found, _ in read if name in found]
            dtype, rest = rows[0].dtype, rows[0].shape[1:]
            if len(rows) > 1 and any(not it.shape or (it.dtype, it.shape[1:]) != (dtype, rest) for it in rows):
                raise StorageError(f"the rows of {name} do not fit together")
            data += [(it.file, it.start, it.stop) for it in rows]
            size_bytes = sum(it.size_bytes for it in rows)
            shape = (sum(it.shape[0] for it in rows), *rest) if len(rows) > 1 else rows[0].shape
            array, is_piece, _ = name.partition("/")
            if is_piece:  # the next one begins on a boundary
                padding = -size_bytes % _ALIGN_BYTES
                data.append(("", 0, padding))
                size_bytes += padding + (tensors[array][2] if array in tensors else 0)
                shape = (size_bytes // ITEM_BYTES[dtype],)
            tensors[array] = dtype, shape, size_bytes
        header = header_of(((name, *facts) for name, facts in tensors.items()), read[0][1])
        _write(disk, draft, f"{kind}.safetensors", header, data)
        for file in files:
            draft.drop(file)


def _tensors(disk: Disk, draft: Draft, file: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file in the order of their bytes, and its metadata. Raises ``StorageError``."""
    path, size_bytes = draft.path / file, draft.sums[file][0]
    start = 8 + int.from_bytes(disk.read_range(path, 0, min(8, size_bytes)), "little")
    if start > min(size_bytes, MAX_HEADER_BYTES):
        raise StorageError(f"{file} is not a file of tensors")
    header = disk.read_range(path, 8, start)
    try:
        found = header_entries_untrusted(header, file, size_bytes)
    except ProtocolError as error:
        raise StorageError(error.message) from error
    metadata = json.loads(header).get("__metadata__", {}).items()
    metadata = {name: value for name, value in metadata if isinstance(value, str)}
    return dict(sorted(found.items(), key=lambda item: item[1].start)), metadata


def _write(disk: Disk, draft: Draft, file: str, header: bytes, data: Iterable[tuple[str, int, int]]) -> None:
    """Write a file of the header and of bytes [start, stop) of other files of the draft; of no file: zeros."""
    draft.begin(file)
    draft.add(header)
    for source, start, stop in data:
        for at in range(start, stop, WRITE_BYTES):
            end = min(at + WRITE_BYTES, stop)
            draft.add(disk.read_range(draft.path / source, at, end) if source else bytes(end - at))
    draft.end()


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
