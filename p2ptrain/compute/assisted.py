"""The rival of speculative decoding over a network: transformers' assisted generation, both models in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig as _GenerationConfig

from p2ptrain.compute.device import check_memory, pick_device
from p2ptrain.compute.model import ModelSpec, load_model, model_config, parameter_count
from p2ptrain.compute.served_part import dtype_of
from p2ptrain.compute.text import ModelText
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.serving import COLDEST, Sampling

GenerationConfig: Any = _GenerationConfig  # its annotations are partial


@dataclass(frozen=True, slots=True)
class Written:
    """New tokens, without the prompt, and how long they took, the prompt's own pass included."""

    tokens: tuple[int, ...]
    seconds: float


class AssistedPair:
    """Two models on one device, and transformers' ``generate`` with one, or with both. Each is computed in what its
    files hold, as parts are.

    Args:
        verifier, drafter: directories with models of the same tokenizer.
        threads: of CPU kernels; 0 leaves them as they are.

    Attributes:
        text: the verifier's text side.
        can_assist: transformers' way is to be had. It is not where vocabularies are padded to different sizes.

    Raises:
        UserError: there is no such device.
        ConfigError: a directory holds no model, or they do not know the same tokens.
        ResourceError: they do not fit into memory.
    """

    def __init__(self, verifier: Path, drafter: Path, *, device: str = "auto", threads: int = 0) -> None:
        self._place = pick_device(device, threads)
        self.text, own = ModelText(verifier), ModelText(drafter)
        if self.text.tokenizer.vocab_size != own.tokenizer.vocab_size:
            sizes = f"{self.text.tokenizer.vocab_size} and {own.tokenizer.vocab_size} tokens"
            remedy = "take two models of one family, or train a pair: p2ptrain up --profile pair"
            raise ConfigError(f"{verifier} and {drafter} know other tokens: {sizes}", remedy=remedy)
        self._verifier = self._loaded(verifier, self.text)
        self._drafter = self._loaded(drafter, own)
        self._sizes = self._verifier.config.vocab_size, self._drafter.config.vocab_size
        self.can_assist = self._sizes[0] == self._sizes[1]

    def _loaded(self, directory: Path, text: ModelText) -> Any:
        config = model_config(ModelSpec(path=directory), text.tokenizer.vocab_size)
        dtype = dtype_of(config)
        check_memory(parameter_count(config) * dtype.itemsize, self._place, f"the model in {directory}")
        model: Any = load_model(directory, dtype, config=config)
        model.generation_config = GenerationConfig()  # as ``generate.LocalModel`` has it
        return model.to(self._place.torch_device).eval()

    def plain(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Written:
        """The verifier by itself."""
        return self._written(self._verifier, ids, max_new_tokens, sampling)

    def assisted(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling, *, depth: int = 0) -> Written:
        """Both, as transformers has it: greedily the same tokens as ``plain``, sampled other ones of equal probability.

        Args:
            depth: drafts a pass, always; 0: transformers' own choice, which follows the drafter's confidence.

        Raises:
            ConfigError: transformers does not do that with these two.
        """
        if not self.can_assist:
            text = "transformers' assisted generation wants vocabularies of one size, and these have {} and {} entries"
            raise ConfigError(text.format(*self._sizes), remedy="compare with the verifier alone")
        # Both settings are read of the assistant; 0 switches off that a drafter in doubt stops before.
        own = {"num_assistant_tokens": depth, "num_assistant_tokens_schedule": "constant"} if depth else {}
        sure = {"assistant_confidence_threshold": 0.0} if depth else {}
        self._drafter.generation_config = GenerationConfig(**own, **sure)
        try:
            return self._written(self._verifier, ids, max_new_tokens, sampling, assistant_model=self._drafter)
        finally:
            self._drafter.generation_config = GenerationConfig()

    def _written(self, model: Any, ids: Sequence[int], max_new_tokens: int, sampling: Sampling, **more: Any) -> Written:
        sampled = sampling.temperature > COLDEST
        shape = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=sampled,
            use_cache=True,
            pad_token_id=0,
            **(shape if sampled else {}),
        )
        place = self._place.torch_device
        prompt = torch.tensor([list(ids)], dtype=torch.int64, device=place)
        mask = torch.ones_like(prompt)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(sampling.seed)
            started = time.perf_counter()
            made = model.generate(prompt, attention_mask=mask, generation_config=settings, **more)
            tokens = tuple(made[0, len(ids) :].tolist())  # waits for a device
            return Written(tokens, time.perf_counter() - started)
