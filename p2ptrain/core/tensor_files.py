"""The files of a model directory: positions of the tensors, so that the bytes of a single one can be read, and the
check of ``config.json``.

A safetensors file has 8 bytes (the header's length, little-endian), a JSON header with every tensor's dtype, shape and
position, and the tensors' bytes (https://github.com/huggingface/safetensors#format). A model is one such file,
``model.safetensors``, or several files with an index from tensor to file, ``model.safetensors.index.json``.

A directory may come from anywhere, and a peer sends a configuration. So both are checked before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from p2ptrain.core.disk import Disk, RealDisk, read_exactly, translating
from p2ptrain.core.errors import ConfigError, ProtocolError, StorageError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
NEEDED_FILES = "it needs config.json and *.safetensors, as save_pretrained writes them"
"""The remedy for a directory that is no model."""
MAX_HEADER_BYTES = 16 << 20
"""The header of a hundred thousand tensors takes about 12 MB; the largest single-file models have fewer."""
MAX_TENSORS = 1 << 17
MAX_DIMS = 8
_DISK = RealDisk()
_LENGTH_BYTES = 8
_SAMPLE_BYTES = 64
_AGAIN = "fetch or save it again"
_MAX_NAME = 512
_MAX_FILES = 4096
_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}/){0,8}[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}\.safetensors")

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes per element of each supported safetensors dtype. Half-byte floats are refused: nothing here uses them."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Position of a tensor: bytes [start, stop) of ``file``. ``dtype`` is a key of ``ITEM_BYTES``."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


def parse_header_untrusted(header: bytes, file: str, file_bytes: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Parse the JSON ``header`` (without its length) of a file of ``file_bytes`` bytes: the tensors in the order of
    their bytes, and the metadata. Raises ``ProtocolError``: it is not a header, or its tensors overlap or do not fill
    the file exactly."""
    named = _json_object_untrusted(header, f"the header of {file}")
    metadata = named.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ProtocolError(f"the header of {file} has ill-typed metadata")
    data_start = _LENGTH_BYTES + len(header)
    parsed = {name: _entry_untrusted(name, item, file, data_start) for name, item in named.items()}
    entries = dict(sorted(parsed.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = data_start
    for entry in entries.values():
        if entry.start != end:
            raise ProtocolError(f"the tensors of {file} overlap, or there are bytes between them")
        end = entry.stop
    if end != file_bytes:
        raise ProtocolError(f"{file} has {file_bytes} bytes, but its header describes {end}")
    return entries, {name: value for name, value in metadata.items() if isinstance(value, str)}


def read_header(disk: Disk, directory: Path, file: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """As ``parse_header_untrusted``, of a file. Raises ``StorageError``."""
    path = directory / file
    size = disk.size(path)
    length = int.from_bytes(disk.read_range(path, 0, min(size, _LENGTH_BYTES)), "little")
    if length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise StorageError(f"{path} is damaged: its header claims {length} bytes", remedy=_AGAIN)
    with _of_storage(directory):
        return parse_header_untrusted(disk.read_range(path, _LENGTH_BYTES, _LENGTH_BYTES + length), file, size)


@contextmanager
def _of_storage(directory: Path) -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise StorageError(f"the model in {directory} is damaged: {error.message}", remedy=_AGAIN) from error


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with ``tensors``, each with name, dtype, shape and size in bytes, in that order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, size_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end := end + size_bytes]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def index_files_untrusted(encoded: bytes) -> dict[str, str]:
    """Parse a ``model.safetensors.index.json``: tensor name → file name. Raises ``ProtocolError``: it is not an index,
    or a file name is not of a safetensors file below the directory."""
    where = _json_object_untrusted(encoded, INDEX_FILE).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ProtocolError(f"{INDEX_FILE} has no weight_map")
    for name, file in where.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file) or len(name) > _MAX_NAME:
            raise ProtocolError(f"{INDEX_FILE} has an invalid name of a file or tensor")
    if len(set(where.values())) > _MAX_FILES:
        raise ProtocolError(f"{INDEX_FILE} names more than {_MAX_FILES} files")
    return where


class TensorTable:
    """Every tensor of a model directory, by its name in the files.

    Attributes:
        entries: position of each tensor.
    """

    def __init__(self, directory: Path, file: str = "") -> None:
        """Read the headers, or only that of ``file``.

        Raises:
            ConfigError: the directory has no safetensors model.
            StorageError: a file is damaged, missing or cannot be read.
        """
        self.directory = directory
        with translating("read", directory):  # such as a name that is too long
            if (directory / (file or WEIGHTS_FILE)).is_file():  # transformers ignores an index beside it, too
                self.entries, _ = read_header(_DISK, directory, file or WEIGHTS_FILE)
            elif not file and (directory / INDEX_FILE).is_file():
                self.entries = self._read_index()
            else:
                if not file and (directory / ADAPTER_CONFIG).is_file():
                    raise adapter_alone(directory)
                if pickled := sorted(path.name for path in directory.glob("*.bin")):
                    text = f"the weights in {directory} are pickled ({pickled[0]}), and loading them could run any code"
                    remedy = "save them as safetensors: load the model with transformers, then save_pretrained"
                    raise ConfigError(text, remedy=remedy)
                raise ConfigError(f"{directory} has no weights in safetensors", remedy=NEEDED_FILES)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        """Read bytes [start, stop) of a tensor; by default all. Raises ``KeyError``, ``ValueError``: no such tensor or
        range. ``StorageError``: the file cannot be read, or became shorter."""
        entry = self.entries[name]
        end = entry.size_bytes if stop is None else stop
        if not 0 <= start <= end <= entry.size_bytes:
            raise ValueError(f"{name} has {entry.size_bytes} bytes, not {start} to {stop}")
        path = self.directory / entry.file
        with translating("read", path), path.open("rb", buffering=0) as file:
            return read_exactly(file, entry.start + start, end - start)

    def fingerprint(self) -> str:
        """A fingerprint that distinguishes weights with the same name: 32 hex digits, in milliseconds.

        It samples a few bytes of each tensor, so it does not protect against a malicious peer. Raises as ``read``.
        """
        total = hashlib.blake2b(digest_size=16)
        for name, entry in sorted(self.entries.items()):
            start = max(0, entry.size_bytes - _SAMPLE_BYTES) // 2
            sample = self.read(name, start, min(start + _SAMPLE_BYTES, entry.size_bytes))
            total.update(f"{name}\0{entry.dtype}\0{entry.shape}\0".encode("utf-8", "surrogatepass") + sample)
        return total.hexdigest()

    def _read_index(self) -> dict[str, TensorEntry]:
        path = self.directory / INDEX_FILE
        with _of_storage(self.directory):
            where = index_files_untrusted(_DISK.read(path, max_bytes=MAX_HEADER_BYTES))
        files = {file: read_header(_DISK, self.directory, file)[0] for file in sorted(set(where.values()))}
        lost = next((name for name, file in where.items() if name not in files[file]), None)
        if lost is not None:
            raise StorageError(f"{path} lists {lost} in {where[lost]}, which lacks it", remedy=_AGAIN)
        return {name: files[file][name] for name, file in where.items()}


def adapter_alone(directory: Path) -> ConfigError:
    """The error where an adapter is named, but only a whole model will do."""
    text = f"{directory} holds an adapter (LoRA), not a whole model"
    return ConfigError(text, remedy=f"merge it with its base: p2ptrain checkpoints merge {directory} OUT, and use OUT")


def _entry_untrusted(name: str, item: Any, file: str, data_start: int) -> TensorEntry:
    if len(name) > _MAX_NAME or not isinstance(item, dict):
        raise ProtocolError(f"the header of {file} has an ill-typed tensor")
    dtype, shape, place = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ProtocolError(f"the header of {file} has a tensor of an unknown dtype")
    if not (_are_sizes(shape) and len(shape) <= MAX_DIMS and _are_sizes(place) and len(place) == 2):
        raise ProtocolError(f"the header of {file} has a tensor with an invalid shape or offset")
    start, stop = place
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ProtocolError(f"the header of {file} has a tensor whose offsets do not match its shape")
    return TensorEntry(file, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Whether ``values`` is a list of plausible sizes. The bound keeps the product of ``MAX_DIMS`` of them cheap."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _json_object_untrusted(encoded: bytes, what: str) -> dict[str, Any]:
    if len(encoded) > MAX_HEADER_BYTES:
        raise ProtocolError(f"{what} is longer than {MAX_HEADER_BYTES} bytes")
    try:
        value = json.loads(encoded, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON ({type(error).__name__})") from error
    if not isinstance(value, dict) or len(value) > MAX_TENSORS:
        raise ProtocolError(f"{what} is not a table of at most {MAX_TENSORS} entries")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name occurs twice")
    return value


# ------------------------------------------------------------------------------------------------------ config.json

SPLIT_FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "phi3", "gemma", "gemma2", "gemma3_text", "granite",
    "gpt2", "gpt_neox", "falcon", "opt", "deepseek_v3",
)  # fmt: skip
"""``model_type`` of the models that are known to split. Others may: ``compute.split_check`` tries them."""
MAX_CONFIG_BYTES = 64 << 10
_MAX_LAYERS = 1024
_MOST_EXPERTS = 1024  # each expert may be a module
_MOST = 1 << 24
"""A bound above any model's vocabulary or width."""
_MOST_LENGTH = 1 << 40  # a model whose context is a tensor is refused later, when its size is known
_LENGTHS = ("theta", "position", "length", "window", "seq", "token_id", "seed")
_LAYER_KEYS = ("num_hidden_layers", "n_layer")
_CODE = ("auto_map", "trust_remote_code")
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def config_untrusted(text: str) -> dict[str, Any]:
    """Parse a ``config.json`` as transformers does: ``{"__float__": "Infinity"}`` is a number. Its sizes are bounded,
    so that the model can be built on torch's meta device in little time and memory. Keys that select code to run are
    removed.

    Raises:
        ProtocolError: the text is not a valid configuration.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise ProtocolError(f"a model's configuration has more than {MAX_CONFIG_BYTES} characters")
    try:
        table = json.loads(text, object_hook=_float_or_table)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a model's configuration is not JSON ({type(error).__name__})") from error
    if not isinstance(table, dict) or not isinstance(table.get("model_type"), str):
        raise ProtocolError("a model's configuration has no model_type")
    for key, value in _numbers(table):
        most = _MOST_EXPERTS if "experts" in key else _MOST_LENGTH if any(word in key for word in _LENGTHS) else _MOST
        if abs(value) > most:
            raise ProtocolError(f"a model's configuration has {key[:64]} = {value}, which is out of range")
    for key in _LAYER_KEYS:
        if key in table and not (type(table[key]) is int and 1 <= table[key] <= _MAX_LAYERS):
            raise ProtocolError(f"a model's configuration must have 1 to {_MAX_LAYERS} layers")
    return {key: value for key, value in table.items() if key not in _CODE and not key.startswith("_")}


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)


def _float_or_table(table: dict[str, Any]) -> Any:
    name = table.get("__float__") if len(table) == 1 else None
    return _FLOATS.get(name, table) if isinstance(name, str) else table
