"""A model without attention is trained and saved as any other; ``test_served_part`` has its text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2ptrain.compute.model import ModelSpec, load_model
from tests.compute.saving import save
from tests.compute.tiny_trainer import run_step, state_bytes, tiny_trainer

LSTM = ModelSpec(architecture="lstm", hidden_size=30, layers=2, heads=7, kv_heads=3, context=2)
"""With values that do not apply."""


@pytest.mark.parametrize("tied", [True, False])
def test_an_lstm_learns_and_continues_from_a_checkpoint(text_file: Path, tmp_path: Path, tied: bool) -> None:
    spec = replace(LSTM, tie_embeddings=tied)
    trainer, again = tiny_trainer(text_file, model=spec), tiny_trainer(text_file, model=spec)
    losses = [run_step(trainer, step) for step in range(6)]
    assert losses[-1] < losses[0] - 0.1
    save(trainer, tmp_path, 6)
    model = load_model(tmp_path)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trainer.built.flat.model.get_parameter(name)), name
    again.state.load(tmp_path)
    assert run_step(again, 6) == run_step(trainer, 6)
    assert state_bytes(again) == state_bytes(trainer)
