"""The weights of a base model with a LoRA adapter merged into them: W + scale B A, in the dtype of W's file.

``MergedTable`` reads like the files of the merged model. So a server that loads from it computes what it would compute
from the files that ``write_merged`` makes of it, and those equal peft's ``merge_and_unload``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from p2ptrain.compute.activations import bytes_of
from p2ptrain.compute.model import directory_config, outline
from p2ptrain.compute.part import FILE_DTYPES, Conversion, OnBytes, StoredTensors
from p2ptrain.core.adapters import Adapter
from p2ptrain.core.disk import RealDisk, new_directory
from p2ptrain.core.errors import ConfigError, DiskFull, StorageError, UserError
from p2ptrain.core.tensor_files import ADAPTER_FILE, INDEX_FILE, WEIGHTS_FILE, TensorEntry, TensorTable
from p2ptrain.core.texts import human_bytes
from p2ptrain.core.tokenizer_files import TEXT_FILES

_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A matrix that the adapter changes. ``is_transposed``: it is stored as (in, out)."""

    module: str
    down: str  # names of A and B in the adapter's file
    up: str
    scale: float
    is_transposed: bool


class MergedTable(TensorTable):
    """The tensors of the merged model, by their names in the base's files. One merged tensor is in memory at a time.

    Attributes:
        adapted: name of each tensor that the adapter changes → name of the model's parameter.

    Raises:
        ConfigError: the adapter does not fit the base, or has tensors that cannot be merged.
        StorageError: a file is damaged, missing or cannot be read.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.base)
        self._adapter, self._factors = adapter, TensorTable(adapter.directory, ADAPTER_FILE)
        self._changes = dict(self._pair_factors())
        self.adapted = {name: f"{change.module}.weight" for name, change in self._changes.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        change = self._changes.get(name)
        if change is None:
            return super().read(name, start, stop)
        return bytearray(bytes_of(self._sum(name, change)))[start:stop]

    def tensor(self, name: str) -> Tensor:
        return _tensor_of(self.read(name), self.entries[name])

    def factors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of each layer that the adapter changes: its name in the model, A (rank, in) and scale B (out, rank), fp32."""
        for change in self._changes.values():
            down, up = self._read_factors(change)
            yield change.module, down, up * change.scale

    def _read_factors(self, change: _Adapted) -> tuple[Tensor, Tensor]:
        names = (change.down, change.up)
        down, up = (_tensor_of(self._factors.read(name), self._factors.entries[name]).float() for name in names)
        return down, up

    def _sum(self, name: str, change: _Adapted) -> Tensor:
        down, up = self._read_factors(change)
        product = (up @ down) * change.scale
        weight = _tensor_of(super().read(name), self.entries[name])
        return (weight.float() + (product.T if change.is_transposed else product)).to(weight.dtype)

    def _pair_factors(self) -> list[tuple[str, _Adapted]]:
        where, model = self._adapter.directory, outline(directory_config(self._adapter.base))
        stored, found = StoredTensors(model, self.entries).conversions, dict[str, dict[str, str]]()
        for name in self._factors.entries:
            match = _FACTOR.fullmatch(name)
            if match is None:
                raise _unfit(where, f"has {name[:100]}, which is no factor of a linear layer")
            found.setdefault(match[1], {})[match[2]] = name
        return [
            self._check_fit(model, stored.get(f"{module}.weight"), module, found[module]) for module in sorted(found)
        ]

    def _check_fit(
        self, model: Any, conversion: Conversion | None, module: str, factors: dict[str, str]
    ) -> tuple[str, _Adapted]:
        where = self._adapter.directory
        if conversion is None or conversion.converter is not None or factors.keys() != {"A", "B"}:
            raise _unfit(where, f"changes {module}, which {self.directory} does not have as one tensor")
        name, layer = next(iter(conversion.sources)), model.get_submodule(module)
        if not isinstance(layer, nn.Linear | Conv1D):
            raise _unfit(where, f"changes {module}, which is not a linear layer")
        down, up, weight = *(self._factors.entries[factors[side]] for side in "AB"), self.entries[name]
        is_transposed, rank = isinstance(layer, Conv1D), (*down.shape, 0)[0]
        shape = weight.shape[::-1] if is_transposed else weight.shape
        if rank < 1 or len(shape) != 2 or (up.shape, down.shape) != ((shape[0], rank), (rank, shape[1])):
            text = f"has factors of shapes {up.shape} and {down.shape} for {module}, of shape {shape}"
            raise _unfit(where, text)
        if any(entry.dtype not in FILE_DTYPES for entry in (down, up, weight)):
            raise _unfit(where, f"or its base has {module} in another type than {', '.join(FILE_DTYPES)}")
        return name, _Adapted(module, factors["A"], factors["B"], self._adapter.scale(rank), is_transposed)


def write_merged(adapter: Adapter, out: Path, on_bytes: OnBytes = lambda done_bytes, total_bytes: None) -> MergedTable:
    """Write the merged model to the new directory ``out``, in the base's files and dtypes. A failure leaves none.
    Raises ``UserError``: ``out`` exists; ``DiskFull``, ``StorageError``: it cannot be written; ``ConfigError``: as
    ``MergedTable``."""
    if out.exists():
        raise UserError(f"{out} exists", remedy="name a directory that does not exist yet")
    table, disk = MergedTable(adapter), RealDisk()
    files: dict[str, list[str]] = {}
    for name, entry in sorted(table.entries.items(), key=lambda item: item[1].start):
        files.setdefault(entry.file, []).append(name)
    total_bytes = sum(entry.size_bytes for entry in table.entries.values())
    disk.make_dir(out.parent)
    if (free := disk.free_bytes(out.parent)) < total_bytes:
        text = f"the merged model has {human_bytes(total_bytes)}, and {out.parent} has {human_bytes(free)} free"
        raise DiskFull(text, remedy="free some space, or name another directory")
    done_bytes = 0
    with new_directory(disk, out) as path:
        for name in (*TEXT_FILES, *([] if WEIGHTS_FILE in files else [INDEX_FILE])):
            if (source := adapter.file(name)).is_file():
                disk.write_file(path / name, source.read_bytes())
        for file, names in files.items():
            disk.make_dir((path / file).parent)
            # The header: of equal tensors.
            disk.write_file(path / file, disk.read_range(table.directory / file, 0, table.entries[names[0]].start))
            for name in names:
                disk.append_file(path / file, memoryview(table.read(name)))
                done_bytes += table.entries[name].size_bytes
                on_bytes(done_bytes, total_bytes)
            if disk.size(path / file) != disk.size(table.directory / file):
                raise StorageError(f"{table.directory / file} has tensors that {INDEX_FILE} does not name")
    return table


def _unfit(directory: Path, why: str) -> ConfigError:
    return ConfigError(f"the adapter {directory} {why}", remedy="is its base model the right one? peft may merge it")


def _tensor_of(data: bytearray, entry: TensorEntry) -> Tensor:
    return torch.frombuffer(data, dtype=FILE_DTYPES[entry.dtype]).view(entry.shape)
