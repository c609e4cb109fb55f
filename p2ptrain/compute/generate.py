"""Text from a checkpoint directory, handed out as it is made."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers.generation.streamers import BaseStreamer

from p2ptrain.compute.device import check_memory, pick_device
from p2ptrain.compute.model import ModelSpec, load_model, model_config, parameter_count
from p2ptrain.compute.picking import COLDEST, check_sampling
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import UserError


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What was made. ``text`` and ``tokens`` (a count) are without the prompt; ``seconds`` without the loading."""

    text: str
    tokens: int
    seconds: float


def generate(
    directory: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    on_text: Callable[[str], None],
) -> GenerateResult:
    """Continue ``prompt`` with the model in ``directory``.

    Args:
        temperature: 0 for the likeliest token each time.
        top_k: sample from the k likeliest only; 0 for all.
        top_p: sample from the fewest that have this probability together; 1 for all.
        seed: the same seed gives the same text on the same device.
        device: see ``pick_device``.
        on_text: called with each new piece of text, whole characters only.

    Raises:
        UserError: an argument is out of range, or prompt and continuation are longer than the model's context.
        ConfigError: the directory holds no model, or no tokenizer.
        ResourceError: the model does not fit into memory.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {max_new_tokens} is out of range", remedy="ask for at least one")
    check_sampling(temperature, top_k, top_p, seed)
    place = pick_device(device)
    tokenizer = Tokenizer.of_directory(directory)
    config = model_config(ModelSpec(path=directory), tokenizer.vocab_size)
    check_memory(parameter_count(config) * 4, place, f"the model in {directory}")
    ids = torch.tensor([tokenizer.encode([prompt]).tolist()], dtype=torch.int64)
    _check_context(ids.shape[1], max_new_tokens, getattr(config, "max_position_embeddings", None))
    model: Any = load_model(directory, config=config)
    model.to(place.torch_device).eval()
    streamer = _TextStreamer(tokenizer, on_text)
    sampled = temperature > COLDEST
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if sampled else {}
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[place.torch_device] if place.kind == "cuda" else []), torch.inference_mode():
        torch.manual_seed(seed)
        ids = ids.to(place.torch_device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=sampled,
            use_cache=True,
            pad_token_id=0,
            streamer=streamer,
            **sampling,
        )
    return GenerateResult(streamer.text, len(streamer.ids), time.perf_counter() - started)


class _TextStreamer(BaseStreamer):
    """Turns ids into text as they come; bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], None]) -> None:
        self.ids: list[int] = []
        self.text = ""
        self._backend = tokenizer.backend
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._on_text = on_text
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:  # transformers hands over the prompt first
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self.ids.append(token)
            self._emit(self._decoder.step(self._backend, token) or "")

    def end(self) -> None:
        whole = self._backend.decode(self.ids, skip_special_tokens=True)
        if whole.startswith(self.text):  # a character that was never finished
            self._emit(whole[len(self.text) :])

    def _emit(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._on_text(piece)


def _check_context(prompt_tokens: int, max_new_tokens: int, context: int | None) -> None:
    if not prompt_tokens:
        raise UserError("the prompt is empty", remedy="give the model something to go on with")
    if context is not None and prompt_tokens + max_new_tokens > context:
        raise UserError(
            f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones are more than the context of {context}",
            remedy=f"ask for at most {max(0, context - prompt_tokens)} new tokens, or shorten the prompt",
        )
