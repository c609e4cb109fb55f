"""Whether what was drawn has the probabilities that it should have: Pearson's chi-square test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def p_value(counts: Mapping[Any, int], probs: Mapping[Any, float]) -> float:
    """The chance of counts at least as far from what is expected; 0 where something came that cannot come.

    Args:
        counts: how often each came. probs: of each, 1 together.
    """
    total = sum(counts.values())
    if any(not probs.get(each) for each, count in counts.items() if count):
        return 0.0
    cells = {each: prob * total for each, prob in probs.items() if prob}
    assert min(cells.values()) >= 5, "too few draws for these chances"
    distance = sum((counts.get(each, 0) - expected) ** 2 / expected for each, expected in cells.items())
    half = torch.tensor([(len(cells) - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
