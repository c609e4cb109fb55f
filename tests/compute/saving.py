"""A checkpoint's files, written without ceremony; and a model directory with all that a checkpoint must keep."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.checkpoints import pieces

from .families import make_of_bytes


def save(trainer: Trainer, directory: Path, step: int = 0) -> None:
    """Write the trainer's present state, called that of ``step``, into ``directory``, which is made if needed."""
    directory.mkdir(exist_ok=True)
    blobs = {blob.name: blob.view for blob in trainer.state.blobs()}
    for file in trainer.state.checkpoint_files(step):
        (directory / file.name).write_bytes(b"".join(pieces(file, blobs)))


def make_given(directory: Path, dtype: torch.dtype) -> None:
    """A model of ``dtype`` as people give it: with dropout, two end tokens, and a setting that transformers moves."""
    make_of_bytes("gpt2", directory, dtype=dtype, attn_pdrop=0.1, resid_pdrop=0.2)
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": None, "own": {"a": 1}}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"eos_token_id": [1, 3], "do_sample": True, "temperature": 0.6, "own": 1}
    (directory / "generation_config.json").write_text(json.dumps(settings))


def check_kept(given: Path, saved: Path, *, adapter: bool = False) -> None:
    """All that ``saved`` says of anything but weights is what ``given`` says."""
    for path in given.iterdir():
        if path.suffix != ".safetensors" and not (adapter and path.name == "config.json"):
            assert (saved / path.name).read_bytes() == path.read_bytes(), path.name
    dtypes = {tensor.dtype for path in given.glob("*.safetensors") for tensor in load_file(path).values()}
    for path in saved.glob("model*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} == dtypes
