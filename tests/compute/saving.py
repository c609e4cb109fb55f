"""A checkpoint's files, written without ceremony."""

from __future__ import annotations

from pathlib import Path

from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.checkpoints import pieces


def save(trainer: Trainer | Trainer, directory: Path, step: int = 0) -> None:
    """Write the trainer's present state, called that of ``step``, into ``directory``."""
    blobs = {blob.name: blob.view for blob in trainer.state()}
    for file in trainer.checkpoint_files(step):
        (directory / file.name).write_bytes(b"".join(pieces(file, blobs)))
