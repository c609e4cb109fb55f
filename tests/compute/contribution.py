"""What one micro-batch adds to an exact sum, also in a process of its own: which loads no more than it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from p2ptrain.compute import first_import

with first_import():
    from p2ptrain.compute.trainer import Trainer
    from tests.compute.tiny_trainer import tiny_trainer


def contribution(trainer: Trainer, step: int, index: int) -> bytes:
    """Found as the difference of two sums: integers forget nothing."""
    before = trainer.reduce_buffer.copy()
    trainer.micro_batch(step, index)
    return bytes((trainer.reduce_buffer - before).data)


def in_another_process(text: Path, others: list[int], answer: Any) -> None:
    trainer = tiny_trainer(text, exact=True)
    trainer.begin_step(5)
    for index in others:
        trainer.micro_batch(5, index)
    answer.put(contribution(trainer, 5, 2))
