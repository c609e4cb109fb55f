"""The rival of speculative decoding over a network: transformers' assisted generation, both models in one process.

And what can be said of a pair without any network: how often the drafter draws what the verifier draws, which decides
what drafts are worth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig as _GenerationConfig

from p2ptrain.compute.device import check_memory, pick_device
from p2ptrain.compute.model import ModelSpec, load_model, model_config, parameter_count
from p2ptrain.compute.picking import Picker
from p2ptrain.compute.served_part import dtype_of
from p2ptrain.compute.text import ModelText
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.serving import COLDEST, Sampling

GenerationConfig: Any = _GenerationConfig  # its annotations are partial
PASSES = (2, 3, 5, 8)
"""Rows of passes, beside steps of one row and one pass over all, between which rounding is measured."""
FURTHER = 4.0
"""Rounding may be so many times what was measured: that is of some ways to compute a place, and there are others."""
TRIES = 400
"""Of logits that differ by it."""


@dataclass(frozen=True, slots=True)
class Written:
    """New tokens, without the prompt, and how long they took, the prompt's own pass included."""

    tokens: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a drafter foresees a verifier's text, over some texts.

    Attributes:
        positions: new tokens of the verifier that were looked at.
        alike: those that the drafter would have drawn too: same draw, same tokens before it.
        passes: that the verifier would have needed with drafts of ``depth`` tokens, all there at once.
    """

    positions: int
    alike: int
    passes: int
    depth: int

    @property
    def alpha(self) -> float:
        """Share of the drafts that are right where all before them are."""
        return self.alike / max(1, self.positions)

    @property
    def tokens_a_pass(self) -> float:
        return self.positions / max(1, self.passes)


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding makes of the logits of one place.

    Attributes:
        most: by which a logit differs, at most, where passes have other numbers of rows; at least a unit in the last
            place of the largest.
        decides: each of the tokens that were asked about is picked with logits that differ by no more than
            ``FURTHER`` times that.
    """

    most: float
    decides: bool


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

    def drafter_alone(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Written:
        """The drafter by itself: what a draft costs."""
        return self._written(self._drafter, ids, max_new_tokens, sampling)

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

    def agreement(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, *, depth: int = 8
    ) -> Agreement:
        """How often both pick the same with the same draw behind the same text, which is the verifier's own.

        A draft counts only where all before it were right, so the verifier's text is all that the drafter need see.
        """
        positions = alike = passes = 0
        known, drawn = self._sizes[1] - 1, replace(sampling, vocab_size=self._sizes[0])
        for ids in prompts:
            text = self.plain(ids, max_new_tokens, sampling).tokens
            row = torch.tensor([[*ids, *text[:-1]]], dtype=torch.int64, device=self._place.torch_device)
            with torch.inference_mode():
                logits = self._drafter(input_ids=row.clamp(max=known)).logits[0, len(ids) - 1 :]
            drafts = Picker(drawn).pick(logits, 0)
            right = [draft == token for draft, token in zip(drafts, text, strict=True)]
            positions, alike = positions + len(right), alike + sum(right)
            passes += passes_with(right, depth)
        return Agreement(positions, alike, passes, depth)

    def rounding(self, ids: Sequence[int], tokens: Sequence[int], sampling: Sampling, draw: int) -> Rounding:
        """Whether rounding decides which of ``tokens`` the verifier picks behind ``ids``, a text with its prompt. The
        same row of logits differs in its last bits with the rows that are computed beside it.

        Args:
            draw: number of the pick.
        """
        row = torch.tensor([list(ids)], dtype=torch.int64, device=self._place.torch_device)
        with torch.inference_mode():
            (step, *others) = (self._last_logits(row, rows) for rows in (1, *PASSES, len(ids)))
        last_place = torch.finfo(self._verifier.dtype).eps * float(step.abs().max())
        most = max(last_place, *(float((other - step).abs().max()) for other in others))
        picker, generator = Picker(sampling), torch.Generator().manual_seed(0)
        picked = set(picker.pick(step[None], draw))
        for _ in range(TRIES):
            if picked.issuperset(tokens):
                break
            off = torch.empty_like(step).uniform_(-FURTHER * most, FURTHER * most, generator=generator)
            picked.update(picker.pick((step + off)[None], draw))
        return Rounding(most, picked.issuperset(tokens))

    def _last_logits(self, row: Tensor, rows: int) -> Tensor:
        """(entries,), float32, on the CPU: those of the last position, which has so many rows in its pass."""
        before = max(0, row.shape[1] - rows)
        how = {"use_cache": True, "logits_to_keep": 1}
        past = self._verifier(input_ids=row[:, :before], **how).past_key_values if before else None
        out = self._verifier(input_ids=row[:, before:], past_key_values=past, **how)
        return cast(Tensor, out.logits[0, -1].to(device="cpu", dtype=torch.float32))

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


def passes_with(right: Sequence[bool], depth: int) -> int:
    """Passes for a text whose drafts are right or wrong as ``right`` says, each checking up to ``depth`` of them.

    Every pass gives what is right of its drafts and one token more, the verifier's own.
    """
    passes = at = 0
    while at < len(right):
        drafts = right[at : at + depth]
        at += (drafts.index(False) if False in drafts else len(drafts)) + 1
        passes += 1
    return passes
