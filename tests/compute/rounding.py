"""A model of transformers whose weights are rounded for a pass."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def rounded_call(model: Any, inputs: Tensor) -> Tensor:
    """Logits (B, T, vocab) in bf16 of token ids (B, T). The gradients of the parameters stay in fp32."""
    weights = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    arguments = {"input_ids": inputs, "use_cache": False}
    return cast(Tensor, torch.func.functional_call(model, weights, (), arguments).logits)
