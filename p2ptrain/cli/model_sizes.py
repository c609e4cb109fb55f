"""What a command must know of the model that a person names. Workers measure a model that they serve
(``roles.serving.worker_pool.WorkerPool.measured``). The sizes of one to be trained are computed here for a new model of
the Llama family, which needs no torch, and measured for others."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.output import json_output
from p2ptrain.cluster.console import Console
from p2ptrain.core.adapters import is_adapter, is_model
from p2ptrain.core.errors import ConfigError, P2PTrainError, ResourceError, StorageError
from p2ptrain.core.footprint import LLAMAS, llama_sizes
from p2ptrain.core.model_config import MAX_CONFIG_BYTES, config_untrusted
from p2ptrain.core.tensor_files import adapter_alone
from ring.planning.workloads import ModelShape

if TYPE_CHECKING:
    from configs.schema import Profile

BYTES_VOCAB = 256  # the tokens of a new model are bytes (``compute.tokenizer``)
_known = dict[str, ModelShape]()


def check_stages(layers: int, stages: int | None) -> None:
    """Refuse more stages than layers. A ``ConfigError``, because no further worker changes that."""
    if (stages or 0) > layers:
        text = f"a model of {layers} layers cannot have {stages} stages"
        raise ConfigError(text, remedy=f"give --split {layers} at most, or no number for the fastest chain")


def config_text(directory: Path, stages: int | None = None) -> str:
    """The text of a model's ``config.json``. Raises ``ConfigError`` if it says that the model has fewer layers than
    ``stages``, or if there is only an adapter; ``StorageError`` or ``ProtocolError`` if it cannot be read."""
    if is_adapter(directory):
        raise adapter_alone(directory)
    path = directory / "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    table = config_untrusted(text)
    layers = table.get("num_hidden_layers", table.get("n_layer"))
    if isinstance(layers, int):  # if it has another name, a worker knows it (``split.measured``)
        check_stages(layers, stages)
    return text


def shape_of(profile: Profile, warn: Callable[[str], object] | None = None) -> ModelShape | None:
    """The shape of the model that the profile trains; None if its directory is not on this machine. With
    ``warn`` it is also None if the model cannot be measured here, and ``warn`` gets the reason.

    Raises:
        ConfigError: it is invalid, or cannot be trained in parts.
        ResourceError, StorageError: without ``warn``: there is too little memory to measure it, or it cannot be read.
    """
    if not profile.model.path and profile.model.architecture in LLAMAS:
        sizes = llama_sizes(profile.model, BYTES_VOCAB)
        return ModelShape.of(sizes, profile.model.hidden_size, profile.model.intermediate_size, BYTES_VOCAB)
    if profile.model.path and not is_model(profile.model.path):
        return None
    key = profile.model.model_dump_json()
    if key not in _known:
        try:
            _known[key] = _measured_apart(profile)
        except P2PTrainError as error:
            if warn is None or isinstance(error, ConfigError):
                raise
            warn(f"the workers cut the model by its weights, because it could not be measured: {error.message}")
    return _known.get(key)


def _measured_apart(profile: Profile) -> ModelShape:
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # In a process of its own: this one may be a seed, or run for days, and torch's memory would stay.
    try:
        other = ProcessPoolExecutor(1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
        with Console(quiet=json_output.wanted).during(lambda: "measuring the model"), other:
            return other.submit(_measured, profile).result()
    except (BrokenProcessPool, OSError) as error:
        text = "the process that measures the model was killed or could not start"
        raise ResourceError(text, remedy="free some memory: it loads torch") from error


def _measured(profile: Profile) -> ModelShape:
    from p2ptrain.compute import split_check
    from p2ptrain.compute.layout import layer_sizes
    from p2ptrain.compute.model import model_config
    from roles.worker.build import training_spec

    config = model_config(training_spec(profile).model, 1 if profile.model.path else BYTES_VOCAB)
    split_check.check_splits(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelShape.of(layer_sizes(config), config.hidden_size, inner, config.vocab_size)
