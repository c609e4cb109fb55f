"""Models: Hugging Face causal language models, from a ``[model]`` table or from a local directory.

Nothing is downloaded and no code of a model directory is run. Random initialization is a pure function of the seed,
and dropout is off: every member must compute the same gradient for the same micro-batch, whoever it is.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from p2ptrain.compute.device import HOST, Device, check_memory
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import head_kept_bytes, layer_kept_bytes

transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
_Auto: Any = AutoModelForCausalLM  # its annotations are partial

_LOAD_ERRORS = (
    *(
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
    ),  # ImportError: quantized ones
    SafetensorError,
)

ATTENTION = "sdpa"
"""On a CPU with the demo's model it is as fast as ``eager`` at 128 tokens and 10 to 30 % faster at 256."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The ``[model]`` table.

    Attributes:
        architecture: a ``model_type`` of transformers with a causal language model, such as ``llama``, ``qwen3``,
        ``gpt2``. path: a local model directory (``config.json`` and safetensors); it overrides every other field.
        vocab_size: None for the tokenizer's. context: the most positions the model is told of, in tokens. extra:
        further fields of the architecture's configuration.
    """

    architecture: str = "llama"
    path: Path | None = None
    vocab_size: int | None = None
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 344
    context: int = 256
    tie_embeddings: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


def model_config(spec: ModelSpec, vocab_size: int) -> PretrainedConfig:
    """The configuration of the model, checked; nothing is allocated.

    Args:
        vocab_size: of the tokenizer; the model's may be larger.

    Raises:
        ConfigError: names the key of ``[model]`` that cannot be.
    """
    if spec.path is not None:
        return _directory_config(spec.path, vocab_size)
    _check_sizes(spec)
    check_architecture(spec.architecture)
    vocab = vocab_size if spec.vocab_size is None else spec.vocab_size
    if vocab < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {vocab} is less than the tokenizer's {vocab_size}", remedy="leave it out"
        )
    config = AutoConfig.for_model(spec.architecture)
    known = set(config.to_dict()) | set(config.attribute_map)
    for key in spec.extra:
        if key not in known:
            raise ConfigError(
                f"model.extra.{key} is not a setting of {spec.architecture!r}", remedy=_closest(key, known)
            )
    sizes = {
        "vocab_size": vocab,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.hidden_size // spec.heads,
        "intermediate_size": spec.intermediate_size,
        "n_inner": spec.intermediate_size,
        "max_position_embeddings": spec.context,
        "initializer_range": spec.hidden_size
        ** -0.5,  # the usual 0.02 is that of a width of 2,500; small models want more
    }
    chosen = {key: value for key, value in sizes.items() if key in known}
    if "num_key_value_heads" not in known and spec.kv_heads != spec.heads:
        raise ConfigError(f"{spec.architecture!r} has no model.kv_heads", remedy="set kv_heads to the value of heads")
    special = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }  # the defaults name ids of other vocabularies
    try:
        config = AutoConfig.for_model(
            spec.architecture, **{**chosen, "tie_word_embeddings": spec.tie_embeddings, **special, **spec.extra}
        )
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        raise ConfigError(f"the [model] table does not make a {spec.architecture!r}: {first_line(error)}") from error
    return without_dropout(config)


def parameter_count(config: PretrainedConfig) -> int:
    """Trainable numbers, shared ones once. Computed on the meta device: no memory is allocated.

    Raises:
        ConfigError: the architecture cannot be built with these sizes.
    """
    try:
        with torch.device("meta"):
            model = _Auto.from_config(config, attn_implementation=ATTENTION)
    except Exception as error:
        raise ConfigError(f"the [model] table does not make a {config.model_type!r}: {first_line(error)}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def check_training_memory(
    config: PretrainedConfig, device: Device, *, micro_batch_tokens: int = 0, exact: bool = False
) -> int:
    """Refuse a model that cannot be trained here; returns its parameter count.

    Counted per parameter, in fp32: on the device the weight, the gradient and two Adam moments; on the host the reduce
    buffer. On a CPU the gradient is the reduce buffer, and a clipped copy of it is made. ``exact``: the reduce buffer
    is one of int64 beside the gradient, wherever that is, and has a copy on the host.

    Beside that, what is kept of a micro-batch: ``kept_bytes``.

    Raises:
        ResourceError: with the numbers.
        ConfigError: see ``parameter_count``.
    """
    count = parameter_count(config)
    what = f"training {count / 1e6:.2f} M parameters"
    kept = kept_bytes(config, micro_batch_tokens, layers=config.num_hidden_layers, has_head=True)
    if micro_batch_tokens:
        what += f" with micro-batches of {micro_batch_tokens:,} tokens"
    if device.kind == "cpu":
        check_memory(count * 4 * (7 if exact else 5) + kept, device, what)
    else:
        check_memory(count * 4 * (6 if exact else 4) + kept, device, what)
        # The reduce buffer, and the weights while they are built.
        check_memory(count * 4 * (3 if exact else 2), HOST, what)
    return count


def kept_bytes(config: PretrainedConfig, tokens: int, *, layers: int, has_head: bool) -> int:
    """Of a micro-batch, from its forward pass to its backward pass: see ``core.footprint``. A lower bound."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    kept = layers * layer_kept_bytes(tokens, width=config.hidden_size, inner=inner)
    return kept + (head_kept_bytes(tokens, vocab=config.vocab_size) if has_head else 0)


def build_model(
    spec: ModelSpec,
    vocab_size: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """The model on the CPU, in training mode: random weights from ``seed``, or the directory's.

    Equal arguments give equal bits (same torch version). The global random state is left as it was.

    Args:
        config: where the caller already has that of ``model_config(spec, vocab_size)``.

    Raises:
        ConfigError: see ``model_config``; the directory has no readable safetensors; the architecture cannot be
            trained here.
    """
    config = config or model_config(spec, vocab_size)
    if spec.path is not None:
        model = load_model(spec.path, dtype, config=config)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                model = cast(PreTrainedModel, _Auto.from_config(config, attn_implementation=ATTENTION, dtype=dtype))
            except Exception as error:  # each architecture validates in its own way and with its own exceptions
                raise ConfigError(
                    f"a {config.model_type!r} model cannot be built here: {first_line(error)}",
                    remedy="use another architecture, such as llama, qwen3 or gpt2",
                ) from error
    model.config.use_cache = False
    model.train()
    return model


def load_model(
    directory: Path, dtype: torch.dtype = torch.float32, *, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """The model of a local directory, on the CPU, from safetensors only. Raises ``ConfigError``."""
    try:
        model, report = _Auto.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise ConfigError(
            f"cannot load a model from {directory}: {first_line(error)}",
            remedy="it needs config.json and *.safetensors, as save_pretrained writes them",
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"the weights in {directory} lack {missing[0]} and {len(missing) - 1} others")
    return cast(PreTrainedModel, model)


def _directory_config(directory: Path, vocab_size: int) -> PretrainedConfig:
    path = directory / "config.json"
    try:
        model_type = json.loads(path.read_bytes()).get("model_type", "")
        check_architecture(model_type)
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except ConfigError:
        raise
    except _LOAD_ERRORS as error:
        raise ConfigError(
            f"model.path = {str(directory)!r} is not a model directory: {first_line(error)}",
            remedy="it needs config.json and *.safetensors, as save_pretrained writes them",
        ) from error
    if config.vocab_size < vocab_size:
        raise ConfigError(f"the model in {directory} knows {config.vocab_size} tokens, its tokenizer {vocab_size}")
    return without_dropout(config)


def _check_sizes(spec: ModelSpec) -> None:
    for key in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "context"):
        if getattr(spec, key) < 1:
            raise ConfigError(f"model.{key} = {getattr(spec, key)} is not positive")
    if spec.hidden_size % spec.heads:
        raise ConfigError(
            f"model.hidden_size = {spec.hidden_size} is not a multiple of model.heads = {spec.heads}",
            remedy=f"use hidden_size = {-(-spec.hidden_size // spec.heads) * spec.heads}, or another number of heads",
        )
    if spec.hidden_size // spec.heads % 2:
        raise ConfigError(
            f"model.hidden_size / model.heads = {spec.hidden_size // spec.heads} is odd",
            remedy="rotary positions turn pairs: make a head's size even",
        )
    if spec.heads % spec.kv_heads:
        raise ConfigError(f"model.heads = {spec.heads} is not a multiple of model.kv_heads = {spec.kv_heads}")


def check_architecture(name: str) -> None:
    """Raises ``ConfigError`` where transformers has no causal language model of that ``model_type``."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model.architecture = {name!r} is not a causal language model of transformers",
            remedy=_closest(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        )


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """``config``, with every dropout of it set to 0."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
            setattr(config, key, 0.0)
    return config


def _closest(name: str, known: object) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3)  # type: ignore[call-overload]
    return f"did you mean {' or '.join(matches)}?" if matches else "see the transformers documentation for the names"


def first_line(error: BaseException) -> str:
    """What a foreign error says, short enough to be shown."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
