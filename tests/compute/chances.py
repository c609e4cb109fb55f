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
    return p_value_behind({None: counts}, {None: probs})


def p_value_behind(counts: Mapping[Any, Mapping[Any, int]], probs: Mapping[Any, Mapping[Any, float]]) -> float:
    """The same of what came behind something: ``counts`` and ``probs`` by what was before (Billingsley, "Statistical
    methods in Markov chains", 1961)."""
    distance = free = 0.0
    for before, found in counts.items():
        total, likely = sum(found.values()), {each: prob for each, prob in probs[before].items() if prob}
        if set(found) - set(likely):
            return 0.0
        assert min(likely.values()) * total >= 5, "too few draws for these chances"
        distance += sum((found.get(each, 0) - prob * total) ** 2 / (prob * total) for each, prob in likely.items())
        free += len(likely) - 1
    half = torch.tensor([free / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
