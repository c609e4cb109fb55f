"""The table of docs/robust.md: the loss after 60 steps of a tiny model, for each robust rule and each attack.

    python examples/robust_rules.py

Members with equal states compute equal things, so one trainer stands for all honest members and another for the
attackers. Rules, gradients and updates are those of a real run. Takes about half an hour on one core. The attacks:

- ``sign-flip``: ``FLIP`` times the true vector.
- ``scale``: ``SCALE`` times the true vector.
- ``noise``: normal noise, as long as the true vector times ``NOISE``.
- ``alie``: "A Little Is Enough" (Baruch et al., arXiv 1902.06156): mean minus ``ALIE_Z`` standard deviations of each
  coordinate. The others' vectors are not known, so both are estimated from this member's own micro-batches. The
  deviation is that of a mean over as many micro-batches as a member has. For 'sync', from two micro-batches on.
- ``label-flip``: the true vector of wrong targets: byte v becomes the last byte minus v.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from configs.loader import load
from p2ptrain.compute.data import NO_TARGET
from p2ptrain.compute.device import Device, pick_device
from p2ptrain.compute.gradients import OnFinal
from p2ptrain.compute.robust import aggregate, middle_of
from p2ptrain.compute.trainer import Trainer, TrainingSpec
from p2ptrain.core.errors import JobFailed
from roles.worker.build import training_spec

STEPS = 60
RULES = (
    "mean", "median", "trimmed_mean", "geometric_median", "centered_clipping", "krum", "multi_krum", "bulyan",
)  # fmt: skip
SETS = [
    f"job.steps={STEPS}", "model.hidden_size=32", "model.layers=1", "model.heads=2", "model.kv_heads=2",
    "model.intermediate_size=64", "data.path=stdlib/email", "data.sequence_tokens=32", "batch.micro_batch_sequences=2",
    "optimizer.warmup_steps=5", "optimizer.lr=1e-2", "validation.batches=16",
]  # fmt: skip

ATTACKS = ("sign-flip", "scale", "noise", "alie", "label-flip")
FLIP, SCALE, NOISE, ALIE_Z = -4.0, 100.0, 10.0, 1.5
LAST_BYTE = 255


class Attacker(Trainer):
    """``attack``: one of ``ATTACKS``."""

    def __init__(self, spec: TrainingSpec, device: Device, attack: str) -> None:
        super().__init__(spec, device)
        self._attack, self._random = attack, np.random.default_rng(spec.seed)
        self._trains = False
        self._seen: list[npt.NDArray[Any]] = []  # with 'alie': the sums of gradients after each micro-batch

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        self._seen = []
        return super().begin_step(step, first, count)

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None, *, counts: bool = True) -> None:
        self._trains = True
        super().micro_batch(step, index, counts=counts)  # nothing is final before ``finish_gradients``
        self._trains = False
        if self._attack == "alie":
            self._seen.append(self._flat.gradients[:-1].cpu().numpy().copy())

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        super().finish_gradients()
        vector = self.reduce_buffer[: -self.scalars]
        if self._attack == "sign-flip":
            vector *= np.float32(FLIP)
        elif self._attack == "scale":
            vector *= np.float32(SCALE)
        elif self._attack == "noise":
            noise = self._random.standard_normal(vector.size, np.float32)
            vector[:] = noise * np.float32(NOISE * np.linalg.norm(vector) / np.sqrt(vector.size))
        elif self._attack == "alie" and (count := len(self._seen)) > 1:
            each = np.diff(np.stack(self._seen), axis=0, prepend=np.float32(0))
            vector -= np.float32(ALIE_Z * np.sqrt(count)) * each.std(axis=0, ddof=1)  # of the sum of ``count``

    def _batch(self, windows: Any) -> Any:
        batch = super()._batch(windows)
        if self._attack != "label-flip" or not self._trains:
            return batch
        wrong = (LAST_BYTE - batch.targets).clamp(min=0)
        return replace(batch, targets=torch.where(batch.targets == NO_TARGET, batch.targets, wrong))


def final_loss(rule: str, attack: str, members: int, byzantine: int) -> float:
    """Validation loss after ``STEPS`` steps; NaN if a step was not finite."""
    spec = training_spec(load("tiny", {}, [*SETS, f"batch.micro_batches={2 * members}"]).profile)
    device = pick_device("cpu", 1)
    honest = Trainer(spec, device)
    wrong = Attacker(spec, device, attack) if attack else honest
    for trainer in (honest, wrong):
        trainer.load_initial()
    rows = np.empty((members, honest.reduce_buffer.size), np.float32)
    numel, center = rows.shape[1] - honest.scalars, None
    for step in range(STEPS):
        for rank in range(members):
            trainer = wrong if rank >= members - byzantine else honest
            trainer.begin_step(step, 2 * rank, 2)
            for index in (2 * rank, 2 * rank + 1):
                trainer.micro_batch(step, index)
            trainer.finish_gradients()
            rows[rank] = trainer.reduce_buffer * members
        out = np.empty(numel, np.float32)
        aggregate(rule, byzantine, [rows[:, :numel]], out, center)
        center = out
        try:
            for trainer in {honest, wrong}:
                trainer.reduce_buffer[:numel], trainer.reduce_buffer[numel:] = out, middle_of(rows[:, numel:], rule)
                trainer.apply(step, trainer.partial_square_sum(0, trainer.reduce_buffer.size))
        except JobFailed:
            return math.nan
    total, targets = honest.validate(0, honest.validation_batches())
    return total / targets


def main() -> None:
    for members, byzantine in ((7, 1), (11, 2)):
        print(f"\n{byzantine} of {members} members attack\n")
        print(f"| rule | none | {' | '.join(ATTACKS)} |\n|---|{'---|' * (len(ATTACKS) + 1)}", flush=True)
        for rule in RULES:
            losses = [final_loss(rule, attack, members, byzantine) for attack in ("", *ATTACKS)]
            print(f"| `{rule}` | {' | '.join(f'{loss:.2f}' for loss in losses)} |", flush=True)


if __name__ == "__main__":
    main()
