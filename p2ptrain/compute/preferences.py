"""Direct preference optimization (DPO, arXiv 2305.18290) with LoRA: from pairs of answers, of which one is preferred.

A row has a prompt, a chosen and a rejected answer: texts, or lists of messages. With log p(y) the sum of the log
probabilities of an answer's tokens, of the model and of the reference, the loss of a pair is::

    -log sigmoid(beta ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))))

The reference is the model without its adapters, so it takes no memory of its own, and no worker can have another one.
The loss of a step is the mean over its pairs. A pair is one sample: a window of two sequences, each the prompt with one
of the answers, cut to ``data.sequence_tokens``.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from p2ptrain.compute.data import NO_TARGET


def sequence_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the log probabilities of each sequence's targets, shape (N,), of logits (N, T, vocab), targets (N, T)."""
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return -each.view(targets.shape).sum(1)


def preference_loss(log_probs: Tensor, reference: Tensor, counts: Tensor, beta: float) -> Tensor:
    """Sum of the losses of B pairs. ``log_probs``, ``reference``: (2 B,). ``counts``: (B,), whether a pair counts."""
    chosen, rejected = (log_probs - reference).view(-1, 2).unbind(1)
    return -(F.logsigmoid(beta * (chosen - rejected)) * counts).sum()


def counted_pairs(targets: Tensor) -> Tensor:
    """Whether each of B pairs counts, shape (B,), of targets (2 B, T)."""
    return (targets != NO_TARGET).any(1)[::2]
