"""A whole model that does not split, run as transformers' ``generate`` runs it.

Nothing is known here of its layers, nor of what they keep: ``prepare_inputs_for_generation`` says what the model wants
for its next token. A layer's state may be one from which no position can be taken back, so a session goes on from the
end, a token at a time; whatever else is asked for is computed anew from the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import ALL_CACHE_NAMES

from p2ptrain.compute.part import Part, context_of


@dataclass(slots=True)
class History:
    """The tokens of a session, and what the model keeps of them; as ``PartCache``.

    Attributes:
        state: what ``prepare_inputs_for_generation`` is given for the next token; empty: nothing is kept.
    """

    positions: int
    ids: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0  # nothing is promised

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
        self.part = Part(0, layers, layers)
        self.width, self.vocab_size = getattr(config, "hidden_size", 0), int(config.vocab_size)
        self.context = context_of(config)
        self.weights_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def new_cache(self, positions: int) -> History:
        return History(positions, torch.zeros(0, dtype=torch.int64, device=self._model.device))

    def forward(self, x: Tensor, positions: Tensor, cache: History, *, logits: int) -> Tensor:
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
