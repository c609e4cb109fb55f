"""A whole model that does not split, run as transformers' ``generate`` runs it.

This module knows nothing about the model's layers and their cache: ``prepare_inputs_for_generation`` makes the inputs
of each pass. The cache of some models cannot be rolled back. So only a pass that adds one token at the end uses the
cache. Any other pass computes the session again from the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import ALL_CACHE_NAMES

from p2ptrain.compute.layout import LayerRange
from p2ptrain.compute.part import context_of


@dataclass(slots=True)
class TokenHistory:
    """The cache of one session, with the interface of ``KeyValueCache``.

    Attributes:
        ids: token ids of all positions so far, shape (length,).
        state: keyword arguments for ``prepare_inputs_for_generation`` of the next token, with the model's own cache.
            Empty if there is no cache that fits ``ids``: then the next pass starts from the first token.
        nbytes: 0, because the size of the model's cache is not known.
    """

    positions: int
    ids: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)

    def cut(self, keep: int) -> None:
        if keep < self.length:
            self.cut_to_at_most(keep)

    def cut_to_at_most(self, keep: int) -> None:
        self.ids, self.state = self.ids[:keep], {}


class WholeModel:
    """All layers of a model; its attributes and methods are those of ``PartModel`` that serving needs."""

    cache_position_bytes = 0  # not known

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        config = model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        self.part = LayerRange(0, layers, layers)
        self.width, self.vocab_size = getattr(config, "hidden_size", 0), int(config.vocab_size)
        self.context, self.switches = context_of(config, is_whole=True)
        self.weights_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def new_cache(self, positions: int) -> TokenHistory:
        return TokenHistory(positions, torch.zeros(0, dtype=torch.int64, device=self._model.device))

    def forward(self, x: Tensor, positions: Tensor, cache: TokenHistory, *, logits: int) -> Tensor:
        """Logits (1, ``logits``, vocab) of the last of the token ids ``x`` (1, T), which follow those in ``cache``."""
        model, goes_on = self._model, bool(cache.state) and x.shape[1] == 1
        ids = torch.cat([cache.ids, x[0]])[None]
        state = cache.state if goes_on else {"attention_mask": torch.ones_like(ids), "use_cache": True}
        if model._supports_logits_to_keep():
            state = state | {"logits_to_keep": logits}
        wanted = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if goes_on else None, is_first_iteration=not goes_on, **state
        )
        outputs = model(**wanted, return_dict=True)
        state = model._update_model_kwargs_for_generation(outputs, state)
        cache.ids, cache.state = ids[0], state if any(state.get(name) is not None for name in ALL_CACHE_NAMES) else {}
        return cast(Tensor, outputs.logits[:, -logits:])
