"""The table of docs/robust.md: the loss after 60 steps of a tiny model, for each robust rule and each attack.

    python examples/robust_rules.py [docs/robust-rules.svg]

Members with equal states compute equal things, so one trainer stands for all honest members and another for the
attackers (``p2ptrain.lab.attacker`` describes the attacks). Rules, gradients and updates are those of a real run.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from configs.loader import load
from p2ptrain.compute.device import pick_device
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.robust import aggregate, aggregate_scalars
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import JobFailed
from p2ptrain.lab.attacker import ATTACKS, add_attack
from roles.worker.build import training_spec

STEPS = 60
SIZES = ((7, 1), (11, 2))
"""Members, and how many of them attack."""
RULES = (
    "mean", "median", "trimmed_mean", "geometric_median", "centered_clipping", "krum", "multi_krum", "bulyan",
)  # fmt: skip
SETS = [
    f"job.steps={STEPS}", "model.hidden_size=32", "model.layers=1", "model.heads=2", "model.kv_heads=2",
    "model.intermediate_size=64", "data.path=stdlib/email", "data.sequence_tokens=32", "batch.micro_batch_sequences=4",
    "optimizer.warmup_steps=5", "optimizer.lr=1e-2", "validation.batches=8",
]  # fmt: skip
WORSE = 0.5
"""Nats above the best loss of a table at which the colour of a cell is full."""


def final_loss(rule: str, attack: str, members: int, byzantine: int) -> float:
    """Validation loss after ``STEPS`` steps; NaN if a step was not finite."""
    spec = training_spec(load("tiny", {}, [*SETS, f"batch.micro_batches={members}"]).profile)
    device = pick_device("cpu", 1)
    honest = Trainer(ModelRecipe(spec, device))
    wrong = add_attack(Trainer(ModelRecipe(spec, device)), attack, micro_batches=members, seed=1) if attack else honest
    for trainer in (honest, wrong):
        trainer.state.load_initial()
    rows = np.empty((members, honest.reduce_buffer.size), np.float32)
    numel, center = rows.shape[1] - honest.scalars, None
    for step in range(STEPS):
        for rank in range(members):
            trainer = wrong if rank >= members - byzantine else honest
            trainer.begin_step(step, rank, 1)
            trainer.micro_batch(step, rank)
            trainer.finish_gradients()
            rows[rank] = trainer.reduce_buffer * members
        out = np.empty(numel, np.float32)
        aggregate(rule, byzantine, [rows[:, :numel]], out, center, measured=False)
        center = out
        try:
            for trainer in {honest, wrong}:
                trainer.reduce_buffer[:numel], trainer.reduce_buffer[numel:] = (
                    out,
                    aggregate_scalars(rows[:, numel:], rule),
                )
                trainer.apply(step, trainer.partial_square_sum(0, trainer.reduce_buffer.size))
        except JobFailed:
            return math.nan
    total, targets = honest.validate(0, honest.data.validation_batches)
    return total / targets


def heatmap(tables: dict[tuple[int, int], list[list[float]]]) -> str:
    """An SVG of the tables side by side, each with a row for each rule. The redder, the worse."""
    wide, high, left, top = 74, 26, 140, 54
    parts = []
    for place, ((members, byzantine), table) in enumerate(tables.items()):
        at, best = left + place * (wide * (len(ATTACKS) + 1) + 24), min(map(min, table))
        parts.append(f'<text x="{at}" y="20" font-weight="bold">{byzantine} of {members} members attack</text>')
        for column, name in enumerate(("none", *ATTACKS)):
            x = at + column * wide
            middle = f'x="{x + wide / 2}" text-anchor="middle"'
            cells = [f'<text {middle} y="{top - 10}">{name}</text>']
            for row, losses in enumerate(table):
                loss, y = losses[column], top + row * high
                pale = 255 * (1 - min(max((loss - best) / WORSE, 0.0), 1.0)) if math.isfinite(loss) else 0
                fill = f"rgb(255,{pale:.0f},{pale:.0f})"
                cells.append(f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" fill="{fill}"/>')
                cells.append(f'<text {middle} y="{y + 17}">{loss:.2f}</text>')
            parts.append("".join(cells))
    parts += [f'<text x="10" y="{top + row * high + 17}">{rule}</text>' for row, rule in enumerate(RULES)]
    width, height = left + len(tables) * (wide * (len(ATTACKS) + 1) + 24), top + len(RULES) * high + 10
    style = 'font-family="sans-serif" font-size="13"'
    lines = "\n".join(parts)
    return f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>
<rect width="{width}" height="{height}" fill="white"/>
{lines}
</svg>
'''


def main() -> None:
    tables: dict[tuple[int, int], list[list[float]]] = {}
    for members, byzantine in SIZES:
        print(f"\n{byzantine} of {members} members attack\n")
        print(f"| rule | none | {' | '.join(ATTACKS)} |\n|---|{'---|' * (len(ATTACKS) + 1)}", flush=True)
        tables[members, byzantine] = table = []
        for rule in RULES:
            table.append([final_loss(rule, attack, members, byzantine) for attack in ("", *ATTACKS)])
            print(f"| `{rule}` | {' | '.join(f'{loss:.2f}' for loss in table[-1])} |", flush=True)
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(heatmap(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
