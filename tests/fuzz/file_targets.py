"""What lies in a directory that a person was given: a checkpoint's manifest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from p2ptrain.core.checkpoints import MANIFEST, MAX_MANIFEST_BYTES, CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ProtocolError, StorageError
from roles.worker.checkpoint_assembler import offered_untrusted
from wire.job_messages import FilesRequest

from .engine import Target
from .strategies import FREE, mostly, mutated

_ROOT = Path("nowhere")
_STEP = 7
_DIGEST = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class _OneCheckpoint(RealDisk):
    """A disk with one checkpoint, whose manifest is ``manifest`` and whose files are empty."""

    manifest: bytes

    def read(self, path: Path, *, max_bytes: int) -> bytes:
        assert path == _ROOT / f"step-{_STEP:08d}" / MANIFEST
        assert max_bytes == MAX_MANIFEST_BYTES
        return self.manifest

    def list_dir(self, path: Path) -> list[str]:
        assert path == _ROOT
        return [f"step-{_STEP:08d}"]

    def make_dir(self, path: Path, *, mode: int = 0o755) -> None: ...

    def sync_dir(self, path: Path) -> None:
        assert path == _ROOT, "it flushed what is outside of the checkpoints"

    def is_dir(self, path: Path) -> bool:
        return True

    def size(self, path: Path) -> int:
        assert path.parent.parent == _ROOT, "it looked outside of the checkpoint"
        return 0

    def hash_file(self, path: Path) -> str:
        assert path.parent.parent == _ROOT, "it looked outside of the checkpoint"
        return _DIGEST


_FILES = st.dictionaries(
    st.sampled_from(["model.safetensors", "../x", "/etc/passwd", "a/b", "..", "", ".x", "manifest.json", "a\x00b"]),
    mostly(
        st.fixed_dictionaries({"size_bytes": mostly(st.just(0), FREE), "sha256": mostly(st.just(_DIGEST), FREE)}), FREE
    ),
    max_size=3,
)
_MANIFESTS = st.fixed_dictionaries(
    {
        "format": mostly(st.just(1), FREE),
        "step": mostly(st.just(_STEP), FREE),
        "meta": mostly(st.dictionaries(st.text(max_size=8), FREE, max_size=3), FREE),
        "files": mostly(_FILES, FREE),
    }
)
_ODD: Any = st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"9" * 5000, b'"\\ud800"', b""])


def _check_manifest(manifest: bytes) -> None:
    store = CheckpointStore(_OneCheckpoint(manifest), _ROOT, 2)
    told: list[str] = []
    good = store.newest_good(lambda path, why: told.append(why))
    assert (good is None) == bool(told)
    assert [entry.step for entry in store.entries()] in ([], [_STEP])
    try:
        entry = store.find(_STEP)
    except StorageError:
        assert good is None
        return
    assert entry == good or "nan" in repr(entry)


CHECKPOINT = Target(
    "checkpoint-manifests",
    mutated(_MANIFESTS.map(lambda manifest: json.dumps(manifest).encode()), most=2) | _ODD | st.binary(max_size=40),
    _check_manifest,
    (),
    peak_bytes=8 << 20,  # a thousand levels of nesting, until it is refused
)

_ASKED = FilesRequest("job1", _STEP, "", 1, 2)
_META = {"job": "job1", "stage": 1, "stages": 2, "lineage": "ab" * 16}
_PART_NAMES = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "config.json", "manifest.json"]
_PART = st.fixed_dictionaries(
    {
        "format": st.just(1),
        "step": mostly(st.just(_STEP), FREE),
        "meta": mostly(st.just(_META), FREE),
        "files": mostly(
            st.dictionaries(
                st.sampled_from(_PART_NAMES),
                st.fixed_dictionaries({"size_bytes": mostly(st.just(9), FREE), "sha256": st.just(_DIGEST)}),
                max_size=3,
            ),
            FREE,
        ),
    }
)


def _check_offer(manifest: bytes) -> None:
    try:
        meta, files = offered_untrusted(manifest, _ASKED)
    except ProtocolError:
        return
    assert (meta["job"], meta["stage"], meta["stages"]) == ("job1", 1, 2)
    assert set(files) == {"model-00002-of-00002.safetensors"}, "a file of another stage"
    assert all(0 <= size <= 1 << 48 for size, _ in files.values())


OFFER = Target(
    "part-manifests",
    mutated(_PART.map(lambda manifest: json.dumps(manifest).encode()), most=2) | _ODD | st.binary(max_size=40),
    _check_offer,
    ("p2ptrain.core.checkpoints.manifest_untrusted", "roles.worker.checkpoint_assembler.offered_untrusted"),
    peak_bytes=8 << 20,
)

TARGETS = (CHECKPOINT, OFFER)
