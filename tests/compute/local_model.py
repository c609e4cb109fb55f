"""Text from a checkpoint directory whose whole model is on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import DynamicCache
from transformers import GenerationConfig as _GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from p2ptrain.compute.device import check_memory, pick_device
from p2ptrain.compute.model import ModelSpec, load_model, model_config, parameter_count
from p2ptrain.compute.text import ModelText, check_arguments
from p2ptrain.core.serving import COLDEST, Sampling

GenerationConfig: Any = _GenerationConfig  # its annotations are partial


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What was made.

    Attributes:
        text: without the prompt and without what ended it.
        tokens: how many were made, the end token included.
        seconds: without the loading.
        ended: ``"stop"``, ``"end"`` or ``"length"``, as of ``TextWriter``.
    """

    text: str
    tokens: int
    seconds: float
    ended: str


class LocalModel:
    """A checkpoint on this machine, loaded when the first token is asked for, and what it computed last.

    Attributes:
        text: its text side.

    Raises:
        UserError: there is no such device.
        ConfigError: the directory holds no model, or no tokenizer.
    """

    def __init__(self, directory: Path, *, device: str = "auto") -> None:
        self._place = pick_device(device)
        self.text = ModelText(directory)
        self._config = model_config(ModelSpec(path=directory), self.text.tokenizer.vocab_size)
        self._directory = directory
        self._model: Any = None
        self._cached: list[int] = []  # the ids that the cache has
        self._cache: DynamicCache | None = None

    def load(self) -> None:
        """Read the weights, where they are not there yet.

        Raises:
            ConfigError: they cannot be read.
            ResourceError: they do not fit into memory.
        """
        if self._model is None:
            need_bytes = parameter_count(self._config) * 4
            check_memory(need_bytes, self._place, f"the model in {self._directory}")
            model: Any = load_model(self._directory, config=self._config)
            # What the directory says of sampling counts as little here as on peers that hold a part of the model.
            model.generation_config = GenerationConfig()
            self._model = model.to(self._place.torch_device).eval()

    def tokens(
        self, ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling, on_token: Callable[[int], bool]
    ) -> None:
        """Make tokens that follow ``ids``, each handed to ``on_token``, until that says no more (``False``).

        What these ids have in common with those of the call before is not computed again where the model's cache can
        be cut. Equal arguments give equal tokens on the same device, up to the rounding of what is not computed again.

        Raises:
            ConfigError, ResourceError: as ``load``.
        """
        self.load()
        place = self._place.torch_device
        cache, seen = self._reusable(ids)
        self._cache = None  # of no use where what follows is broken off
        sampled = sampling.temperature > COLDEST
        shape = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=sampled,
            use_cache=True,
            eos_token_id=sorted(self.text.end_tokens) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            **(shape if sampled else {}),
        )
        prompt = torch.tensor([list(ids)], dtype=torch.int64, device=place)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(sampling.seed)
            made = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([_Handed(on_token)]),
                **({"past_key_values": cache} if seen else {}),
            )
        self._cached = made.sequences[0, :-1].tolist()  # the last token was not fed
        self._cache = getattr(made, "past_key_values", None)

    def _reusable(self, ids: Sequence[int]) -> tuple[DynamicCache | None, int]:
        """The cache, cut to what it has in common with ``ids``, and how many positions that are."""
        pairs = zip(self._cached, ids[:-1], strict=False)  # one at least must be fed
        seen = next((at for at, (have, want) in enumerate(pairs) if have != want), min(len(self._cached), len(ids) - 1))
        layers: list[Any] = self._cache.layers if isinstance(self._cache, DynamicCache) else []
        # Exactly these: others, as of sliding windows, do not keep what they would be cut to.
        if not seen or not layers or any(type(layer) is not DynamicLayer for layer in layers):
            return None, 0
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, :seen], layer.values[:, :, :seen]
        return self._cache, seen


def generate(
    model: LocalModel,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - it is frozen
    stop: Sequence[str] = (),
    on_text: Callable[[str], None],
) -> GenerateResult:
    """Continue ``prompt``.

    Args:
        sampling: the same seed gives the same text on the same device.
        stop: the text ends before the first of these.
        on_text: called with each new piece of text, whole characters only, nothing of a stop string.

    Raises:
        UserError: an argument is out of range, or prompt and continuation are longer than the model's context.
        ConfigError, ResourceError: as ``LocalModel.load``.
    """
    check_arguments(max_new_tokens, sampling)
    ids = model.text.checked(model.text.prompt_ids(prompt), max_new_tokens)
    writer = model.text.writer(ids, stop=stop)
    model.load()

    def take(token: int) -> bool:
        if piece := writer.take(token):
            on_text(piece)
        return not writer.ended

    started = time.perf_counter()
    model.tokens(ids, max_new_tokens=max_new_tokens, sampling=sampling, on_token=take)
    if piece := writer.finish():
        on_text(piece)
    return GenerateResult(writer.text, writer.tokens, time.perf_counter() - started, writer.ended)


class _Handed(StoppingCriteria):
    """Hands each new token on, and ends the generation once nobody wants more.

    (A streamer would hear of a token only after it was decided whether another one is computed.)
    """

    def __init__(self, on_token: Callable[[int], bool]) -> None:
        self._on_token = on_token
        self._ended = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
        if not self._ended:
            self._ended = not self._on_token(int(input_ids[0, -1]))
        return cast(torch.BoolTensor, torch.full((input_ids.shape[0],), self._ended, device=input_ids.device))
