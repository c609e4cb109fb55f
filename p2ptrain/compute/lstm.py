"""``architecture = "lstm"``: a small recurrent language model, in the format of transformers.

It shows that nothing here needs attention, positions or a cache that can be cut: it is trained, saved and served as any
other whole model. It does not split. Importing this module registers it, so p2ptrain opens its checkpoints as they are;
another program must ``import p2ptrain.compute.lstm`` before ``AutoModelForCausalLM.from_pretrained``.

    ids -> embedding -> torch.nn.LSTM (Hochreiter and Schmidhuber, 1997) -> head -> logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput


class LstmConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Sizes. There is no longest context: the state has one size for any number of tokens."""

    model_type = "lstm"
    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 2
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True


@dataclass
class LstmOutput(ModelOutput):
    """``logits`` (B, T, vocab); ``state``: of each layer after the last token, two tensors (layers, B, width)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: tuple[Tensor, Tensor] | None = None


class _Lstm(nn.LSTM):
    def flatten_parameters(self) -> None:
        """Leave the weights where they are. cuDNN's copy would part them from the flat arrays of training."""


class LstmForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """``GenerationMixin`` hands ``LstmOutput.state`` to the next call, as for RWKV."""

    config_class = LstmConfig
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012 - as transformers declares it
    _is_stateful = True  # ``generate`` refuses what would take tokens back

    def __init__(self, config: LstmConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embedding: nn.Module = nn.Embedding(config.vocab_size, width)
        self.lstm = _Lstm(width, width, config.num_hidden_layers, batch_first=True)
        self.head: nn.Module = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        state: tuple[Tensor, Tensor] | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        **_: Any,
    ) -> LstmOutput:
        """Logits of the last ``logits_to_keep`` of the tokens (B, T) that follow those of ``state``; 0: of all.
        ``attention_mask`` is ignored, so a batch must not be padded on the left."""
        hidden = self.embedding(input_ids)
        with torch.autocast(hidden.device.type, enabled=False):  # not every CPU has an LSTM in bf16
            hidden, state = self.lstm(hidden, state)
        logits = self.head(hidden[:, -logits_to_keep:])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return LstmOutput(loss, logits, state if use_cache else None)


AutoConfig.register(LstmConfig.model_type, LstmConfig, exist_ok=True)
AutoModelForCausalLM.register(LstmConfig, LstmForCausalLM, exist_ok=True)
