"""Model ``convlm``: a small language model of causal convolutions, in the format of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class ConvConfig(PretrainedConfig):
    """The names are those of transformers, so ``[model]`` sets them. ``kernel`` is this model's own setting."""

    model_type = "convlm"
    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 2
    kernel: int = 4
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True


class ConvBlock(nn.Module):
    """Mixes each token with the ``kernel - 1`` before it."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, config.kernel, padding=config.kernel - 1)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.mix(self.norm(hidden).transpose(1, 2))[..., : hidden.shape[1]]
        mixed = self.out(nn.functional.silu(mixed.transpose(1, 2)))
        return hidden + mixed


class ConvForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ConvConfig
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: ConvConfig) -> None:
        super().__init__(config)
        self.embedding: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(ConvBlock(config) for _ in range(config.num_hidden_layers))
        self.head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of one module. p2ptrain calls it with a generator that depends on the module's name."""
        super()._init_weights(module)
        if isinstance(module, nn.Conv1d):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> CausalLMOutput:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss, logits)
