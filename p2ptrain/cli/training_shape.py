"""What the model of a profile weighs, layer by layer: what a seed needs to place its training. Without torch.

The sizes of a new model of the families that split follow from the ``[model]`` table by arithmetic; those of a
directory from the names in its files. Any other architecture is built on torch's meta device, which takes seconds to
import.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.model_sizes import anatomy
from p2ptrain.core.errors import ConfigError, P2PTrainError, StorageError
from p2ptrain.core.model_config import MAX_CONFIG_BYTES, config_untrusted
from p2ptrain.core.tensor_files import TensorTable
from ring.training_costs import ModelShape, ModelSizes
from wire.chain_messages import TensorRecord

if TYPE_CHECKING:
    from configs.schema import Model, Profile

BYTES_VOCAB = 256
"""Of a new model: its tokens are bytes (``compute.tokenizer``)."""
_FP32 = 4
_LLAMAS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def wants_plan(profile: Profile) -> bool:
    """Whether a job of this profile is cut and placed by the seed."""
    return profile.stages > 1


def shape_of(profile: Profile, *, may_build: bool = True) -> ModelShape | None:
    """The shape of the model that the profile trains; None where it cannot be known here: its directory is not on this
    machine, or it would take torch and ``may_build`` is False.

    Raises:
        ConfigError, StorageError: the model's directory, or table, is none that can be trained in parts.
    """
    model = profile.model
    if model.path:
        directory = Path(model.path)
        return _of_directory(directory) if (directory / "config.json").is_file() else None
    if model.architecture in _LLAMAS:
        return _like_llama(model)
    if model.architecture == "gpt2":
        return _like_gpt2(model)
    return _by_building(profile) if may_build else None


def shape_param(profile: Profile, *, may_build: bool = True) -> dict[str, Any]:
    """What is added to a request that creates a job; nothing where the shape is not known. Raises nothing: the worker
    that builds the model tells what is wrong with it."""
    if not wants_plan(profile):
        return {}
    try:
        shape = shape_of(profile, may_build=may_build)
    except P2PTrainError:
        return {}
    return {"shape": shape.to_map()} if shape is not None else {}


def _like_llama(model: Model) -> ModelShape:
    width, inner = model.hidden_size, model.intermediate_size
    head, keys = width // model.heads, model.kv_heads * (width // model.heads)
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    if model.architecture == "qwen2":
        layer += width + 2 * keys  # biases of queries, keys and values
    if model.architecture == "qwen3":
        layer += 2 * head  # norms of queries and keys
    matrix = BYTES_VOCAB * width
    return _shape(model, layer, first=matrix, norm=width, inner=inner)


def _like_gpt2(model: Model) -> ModelShape:
    width, inner = model.hidden_size, model.intermediate_size
    layer = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    first = BYTES_VOCAB * width + model.context * width
    return _shape(model, layer, first=first, norm=2 * width, inner=4 * width)


def _shape(model: Model, layer: int, *, first: int, norm: int, inner: int) -> ModelShape:
    matrix = BYTES_VOCAB * model.hidden_size
    sizes = ModelSizes(
        (_FP32 * layer,) * model.layers,
        (0,) * model.layers,
        _FP32 * first,
        _FP32 * (matrix + norm),
        _FP32 * matrix if model.tie_embeddings else 0,
    )
    return ModelShape(sizes, model.hidden_size, inner, BYTES_VOCAB)


def _of_directory(directory: Path) -> ModelShape:
    """Raises ``ConfigError``, ``StorageError``, ``ProtocolError``."""
    path = directory / "config.json"
    try:
        with path.open("rb") as file:
            config = file.read(MAX_CONFIG_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    entries = TensorTable(directory).entries
    records = {
        name: TensorRecord(name, entry.dtype, list(entry.shape), entry.size_bytes, bytes(16))
        for name, entry in entries.items()
    }
    found, table = anatomy(config, records, "fp32"), config_untrusted(config)
    vocab, inner = table.get("vocab_size"), table.get("intermediate_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(f"{path} does not say how many tokens it knows", remedy="add vocab_size to it")
    sizes = found.sizes
    without_cache = ModelSizes(
        sizes.layers_bytes, (0,) * sizes.layers, sizes.first_bytes, sizes.last_bytes, sizes.tied_bytes
    )
    return ModelShape(without_cache, found.width, inner if isinstance(inner, int) else 4 * found.width, vocab)


def _by_building(profile: Profile) -> ModelShape:
    """Raises ``ConfigError``."""
    from p2ptrain.compute.model import model_config
    from p2ptrain.compute.part import layer_sizes
    from roles.worker.build import trainer_arguments

    config = model_config(trainer_arguments(profile)["model"], BYTES_VOCAB)
    found = layer_sizes(config)
    sizes = ModelSizes(
        found.layers_bytes, (0,) * len(found.layers_bytes), found.first_bytes, found.last_bytes, found.tied_bytes
    )
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelShape(sizes, config.hidden_size, inner, int(config.vocab_size))
