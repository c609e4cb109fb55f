"""What passes between whatever computes a stage of a split model and whatever moves its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2ptrain.core.errors import UserError

COLDEST = 1e-4
"""Below this temperature the scaled logits overflow and sampling has no distribution: it is the likeliest token."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Which part of which model, and how it is computed.

    Attributes:
        config: the model's ``config.json``, as text.
        start, stop: layers [start, stop) of ``layers``.
        dtype: of weights, cache and arithmetic: ``fp32``, ``bf16`` or ``fp16``; empty: what the model's files hold.
        device: as of ``compute.device.pick_device``.
    """

    config: str
    start: int
    stop: int
    layers: int
    dtype: str = ""
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last stage picks a token, as transformers' ``generate`` does.

    Attributes:
        temperature: 0 for the likeliest token each time.
        top_k: sample from the k likeliest only; 0 for all.
        top_p: sample from the fewest that have this probability together; 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def check_sampling(sampling: Sampling) -> None:
    """Raises ``UserError`` for what cannot be."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise UserError(f"temperature = {sampling.temperature} cannot be", remedy="use 0 (the likeliest token) or more")
    if sampling.top_k < 0:
        raise UserError(f"top_k = {sampling.top_k} is negative", remedy="use 0 for all tokens")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p = {sampling.top_p} is not above 0 and at most 1", remedy="use 1 for all tokens")
    if not -(2**63) <= sampling.seed < 2**64:
        raise UserError(f"seed = {sampling.seed} does not have 64 bits", remedy="use a smaller number")


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one ``StageEngine.run``.

    Attributes:
        payload: hidden states of the new positions in ``out_encoding``; empty on the last stage. It stays unchanged.
        tokens: picked for the last ``picks`` positions, in order; empty but on the last stage.
    """

    payload: memoryview
    tokens: tuple[int, ...]
