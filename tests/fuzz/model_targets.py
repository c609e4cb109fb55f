"""What a model directory may hold that came from anywhere: the headers of its files, and their index."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.tensor_files import (
    ITEM_BYTES,
    MAX_DIMS,
    MAX_TENSORS,
    header_entries_untrusted,
    index_files_untrusted,
)

from .engine import Target
from .strategies import FREE, mostly, mutated

_FILE_BYTES = 1 << 20
_DTYPES = st.sampled_from([*ITEM_BYTES, "F4", "", "f32"])


@st.composite
def _headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header, and how many bytes its file has."""
    end = 0
    named: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(["a", "b.weight", "c" * 600, "", "__metadata__"]), max_size=4)):
        dtype = draw(mostly(st.sampled_from(sorted(ITEM_BYTES)), _DTYPES))
        shape = draw(mostly(st.lists(st.integers(0, 5), max_size=3), st.lists(FREE, max_size=12)))
        size = math.prod(shape) * ITEM_BYTES.get(dtype, 1) if all(type(n) is int for n in shape) else 0
        place = draw(mostly(st.just([end, end + size]), st.lists(FREE, max_size=3)))
        item = {"dtype": dtype, "shape": shape, "data_offsets": place}
        named[name] = draw(mostly(st.just(item), FREE))
        end += size
    header = json.dumps(named).encode()
    return header, draw(mostly(st.just(8 + len(header) + end), st.integers(-(2**40), 2**63)))


_HUGE = st.integers(0, 2**62).map(lambda n: {"a": {"dtype": "F32", "shape": [n] * 7, "data_offsets": [0, n]}})
_ODD: Any = st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"9" * 5000, b'{"a":1,"a":1}', b""])


def _check_header(case: tuple[bytes, int]) -> None:
    header, file_bytes = case
    try:
        entries = header_entries_untrusted(header, "model.safetensors", file_bytes)
    except ProtocolError:
        return
    covered = 8 + len(header)
    for entry in sorted(entries.values(), key=lambda each: (each.start, each.stop)):
        assert entry.start == covered
        assert entry.size_bytes == math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        assert len(entry.shape) <= MAX_DIMS
        covered = entry.stop
    assert covered == file_bytes


_FILES = mostly(st.sampled_from(["model-00001-of-00002.safetensors", "model.safetensors"]), FREE)
_PATHS = st.sampled_from(["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".x.safetensors", "x", "x\x00"])
_INDEXES = st.fixed_dictionaries(
    {"weight_map": mostly(st.dictionaries(st.text(max_size=8), _FILES | _PATHS, max_size=4), FREE), "metadata": FREE}
)


def _check_index(encoded: bytes) -> None:
    try:
        where = index_files_untrusted(encoded)
    except ProtocolError:
        return
    assert 0 < len(where) <= MAX_TENSORS
    for file in where.values():
        assert file.endswith(".safetensors")
        assert not set(file) & set("/\\\x00")
        assert not file.startswith(".")


_MODULE = "p2ptrain.core.tensor_files."
_JSON = f"{_MODULE}_json_object_untrusted"

HEADERS = Target(
    "tensor-headers",
    _headers()
    | st.tuples(mutated(_headers().map(lambda case: case[0])), st.integers(0, _FILE_BYTES))
    | st.tuples(_HUGE.map(lambda named: json.dumps(named).encode()) | _ODD | st.binary(max_size=40), st.just(64)),
    _check_header,
    (f"{_MODULE}header_entries_untrusted", f"{_MODULE}_entry_untrusted", _JSON),
    peak_bytes=8 << 20,  # a thousand levels of nesting, until it is refused
)
INDEX = Target(
    "tensor-index",
    mutated(_INDEXES.map(lambda index: json.dumps(index).encode()), most=2) | _ODD | st.binary(max_size=40),
    _check_index,
    (f"{_MODULE}index_files_untrusted", _JSON),
    peak_bytes=8 << 20,
)

TARGETS = (HEADERS, INDEX)
