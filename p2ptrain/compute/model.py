"""Hugging Face causal language models, from a ``[model]`` table or from a local directory.

Nothing is downloaded, and no code of a model directory is run. Dropout is off, because every member must compute the
same gradient for the same micro-batch.

Initial weights are a pure function of (seed, module's name): the architecture's ``_init_weights`` runs on each module
with a generator seeded by both. So a part gets exactly the whole model's weights for its modules, without initializing
the rest (``compute.stage.initial_tensors``).

``architecture = "lstm"`` is a small recurrent language model of this module's own, in the format of transformers:
ids -> embedding -> torch.nn.LSTM (Hochreiter and Schmidhuber, 1997) -> head -> logits. It shows that nothing here needs
attention, positions or a cache that can be cut. It does not split. Another program must ``import
p2ptrain.compute.model`` before ``AutoModelForCausalLM.from_pretrained`` opens its checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import ModelOutput

from p2ptrain.core import plugins
from p2ptrain.core.adapters import is_adapter
from p2ptrain.core.errors import ConfigError, P2PTrainError
from p2ptrain.core.tensor_files import NEEDED_FILES, adapter_alone
from p2ptrain.core.texts import did_you_mean
from p2ptrain.core.tokenizer_files import is_without_weights

transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
Auto: Any = AutoModelForCausalLM  # its annotations are partial

DRAWING = Lock()
"""Held while torch's default generator is in use, or transformers' functions that initialize or leave that out: all
threads share them."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The ``[model]`` table, whose values ``configs.schema`` has checked. ``tokenizer``: a directory or a file; None:
    that of ``path``, or bytes. ``extra``: further fields of the architecture's configuration."""

    architecture: str = "llama"
    path: Path | None = None
    tokenizer: Path | None = None
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 344
    context: int = 256
    tie_embeddings: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path | None:
        """The directory with the weights to begin with; None: they are random."""
        return None if self.path is None or is_without_weights(self.path) else self.path


def model_config(spec: ModelSpec, vocab_size: int) -> PretrainedConfig:
    """The checked configuration of the model; nothing is allocated. ``vocab_size``: the tokenizer's vocabulary size; a
    directory's model has its own, which may differ. Raises ``ConfigError``: a key of ``[model]``, which the message
    names, is invalid."""
    if spec.path is not None:
        return directory_config(spec.path)
    check_architecture(spec.architecture)
    config = AutoConfig.for_model(spec.architecture)
    known = set(config.to_dict()) | set(config.attribute_map)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.hidden_size // spec.heads,
        "intermediate_size": spec.intermediate_size,
        "n_inner": spec.intermediate_size,
        "max_position_embeddings": spec.context,
        "initializer_range": spec.hidden_size**-0.5,  # the usual 0.02 fits a width of 2,500
    }
    chosen = {key: value for key, value in sizes.items() if key in known}
    ungrouped = "num_attention_heads" in known and "num_key_value_heads" not in known
    if ungrouped and spec.kv_heads != spec.heads:
        raise ConfigError(f"{spec.architecture!r} has no model.kv_heads", remedy="set kv_heads to the value of heads")
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # defaults are for other vocabularies
    if strange := spec.extra.keys() - known - special.keys():
        text = f"a {spec.architecture!r} model has no setting {min(strange)!r}"
        raise ConfigError(text, remedy=f"correct [plugins.{spec.architecture}]: it may have what its configuration has")
    try:
        config = AutoConfig.for_model(
            spec.architecture, **{**chosen, "tie_word_embeddings": spec.tie_embeddings, **special, **spec.extra}
        )
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        raise ConfigError(f"the [model] table is not a valid {spec.architecture!r}: {first_line(error)}") from error
    return without_dropout(config)


def outline(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model on the meta device, where nothing is allocated. Raises ``ConfigError``: the architecture cannot be
    built with these sizes."""
    try:
        with DRAWING, torch.device("meta"):
            return cast(PreTrainedModel, Auto.from_config(config, dtype=dtype))
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        raise ConfigError(f"a {config.model_type!r} model cannot be built: {first_line(error)}") from error


def parameter_count(config: PretrainedConfig) -> int:
    """Number of parameters; shared ones count once. Raises as ``outline``."""
    return sum(parameter.numel() for parameter in outline(config).parameters())


def flops_per_token(config: PretrainedConfig, sequence_tokens: int) -> int:
    """FLOP of a token's forward and backward pass by the formula of PaLM (arXiv 2204.02311, appendix B): 6 for each
    parameter of a matrix product, and the attention to ``sequence_tokens``, of which no mask is subtracted. Raises as
    ``outline``."""
    model: Any = outline(config)
    sizes, output = config.get_text_config(), model.get_output_embeddings()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(output.weight)} if output is not None else set()  # a tied one is the output's matrix
    numel: int = sum(each.numel() for each in model.parameters() if each.ndim > 1 and id(each) not in looked_up)
    heads = getattr(sizes, "num_attention_heads", 0)
    width: int = heads * (getattr(sizes, "head_dim", None) or sizes.hidden_size // heads) if heads else 0
    return 6 * numel + 12 * int(sizes.num_hidden_layers) * width * sequence_tokens


def build_model(
    spec: ModelSpec, vocab_size: int, seed: int, *, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """The fp32 model on the CPU, in training mode, with random weights from ``seed`` or with the directory's weights.

    Equal arguments give equal bits with the same torch version. The global random state is unchanged.

    Args:
        config: result of ``model_config(spec, vocab_size)``, if the caller has it.

    Raises:
        ConfigError: see ``model_config``, ``load_model``; or the architecture cannot be initialized here.
    """
    config = config or model_config(spec, vocab_size)
    if spec.base is not None:
        model = load_model(spec.base, config=config)
    else:
        remedy = "use another architecture, such as llama, qwen3 or gpt2"
        with DRAWING, torch.random.fork_rng(devices=[]):
            try:
                with no_init_weights():  # ``initialize`` does that below
                    model = cast(PreTrainedModel, Auto.from_config(config, dtype=torch.float32))
                model.tie_weights()
            except Exception as error:  # each architecture validates in its own way and with its own exceptions
                text = f"a {config.model_type!r} model cannot be built here: {first_line(error)}"
                raise ConfigError(text, remedy=remedy) from error
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        embedding, head = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
        tied = head is not None and embedding is not None and head.weight is embedding.weight
        initialize(model, model, seed, "", skipped=head if tied else None)
        if undrawn := [name for name, parameter in model.named_parameters() if parameter.isnan().any()]:
            text = f"a {config.model_type!r} model cannot be built here: {undrawn[0]} has no initialization"
            raise ConfigError(text, remedy=remedy)
    model.config.use_cache = False
    model.train()
    return model


def initialize(
    model: PreTrainedModel, module: nn.Module, seed: int, name: str, *, skipped: nn.Module | None = None
) -> None:
    """Initialize the modules inside ``module``, then ``module``, each from ``seed`` and its name. The order is that of
    transformers' ``initialize_weights``.

    Args:
        model: the model whose ``_init_weights`` is called.
        name: name of ``module`` in the whole model.
        skipped: a module not to initialize: an output that is tied to the input.
    """
    model = module if isinstance(module, PreTrainedModel) else model
    for child_name, child in module.named_children():
        if child is not skipped:
            initialize(model, child, seed, f"{name}.{child_name}" if name else child_name, skipped=skipped)
    with DRAWING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, name))
        model._init_weights(module)  # type: ignore[no-untyped-call]


def seed_of(seed: int, name: str) -> int:
    """Seed of the generator for what is called ``name``, in a job of ``seed``."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def load_model(
    directory: Path, dtype: torch.dtype = torch.float32, *, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Load a model from a local directory to the CPU, from safetensors only. Raises ``ConfigError``."""
    try:
        model, report = Auto.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # each architecture fails in its own way and with its own exceptions
        text = f"cannot load a model from {directory}: {first_line(error)}"
        raise ConfigError(text, remedy=NEEDED_FILES) from error
    if missing := sorted(report["missing_keys"]):
        text = f"the weights in {directory} lack {missing[0]} and {len(missing) - 1} other tensors"
        remedy = "copy all *.safetensors of the model there, with the config.json that belongs to them"
        raise ConfigError(text, remedy=remedy)
    return cast(PreTrainedModel, model)


def directory_config(directory: Path) -> PretrainedConfig:
    """The configuration in a model directory. Raises ``ConfigError``: it is none, such as an adapter."""
    path = directory / "config.json"
    if is_adapter(directory):
        raise adapter_alone(directory)
    try:
        check_architecture(json.loads(path.read_bytes()).get("model_type", ""))
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except P2PTrainError:
        raise
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        text = f"{directory} is not a model directory: {first_line(error)}"
        remedy = NEEDED_FILES if isinstance(error, OSError) else "correct its config.json, or use another model"
        raise ConfigError(text, remedy=remedy) from error
    return without_dropout(config)


def check_architecture(name: str) -> None:
    """Raise ``ConfigError`` if there is no causal language model of ``model_type`` ``name``. Imports a plugin's, and
    registers it with transformers. Raises as ``plugins.load``."""
    known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, LstmConfig.model_type]
    if name not in known and f"models:{name}" in plugins.installed():
        kind: Any = plugins.load(f"models:{name}", PreTrainedModel)
        AutoConfig.register(name, kind.config_class, exist_ok=True)
        AutoModelForCausalLM.register(kind.config_class, kind, exist_ok=True)
    elif name not in known:
        text = f"model.architecture = {name!r} is not a causal language model of transformers, nor of a plugin here"
        remedy = f"{did_you_mean(name, known)}see the documentation of transformers for its names, or install the "
        raise ConfigError(text, remedy=f"{remedy}package of the plugin (docs/plugins.md)")


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
            setattr(config, key, 0.0)
    return config


def first_line(error: BaseException) -> str:
    """First line of another library's error message, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


# ----------------------------------------------------------------------------------------------------------------- lstm


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
    _input_embed_layer = "embedding"
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
