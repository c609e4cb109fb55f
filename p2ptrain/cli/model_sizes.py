"""What a command must know of the model that a person names. Workers measure a model that they serve
(``roles.chain.plan.WorkerPool.measured``); the sizes of one to be trained are measured here."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.inputs import is_model
from p2ptrain.cli.output import Console, json_output
from p2ptrain.core.errors import ResourceError, StorageError, UserError
from p2ptrain.core.model_config import MAX_CONFIG_BYTES, config_untrusted
from ring.training_costs import ModelShape

if TYPE_CHECKING:
    from configs.schema import Profile

BYTES_VOCAB = 256  # the tokens of a new model are bytes (``compute.tokenizer``)
_known = dict[str, ModelShape]()


def check_stages(directory: Path, stages: int) -> None:
    """Refuse more stages than layers, before any worker is asked.

    Raises:
        UserError: the model has fewer layers.
        StorageError, ProtocolError: its configuration cannot be read.
    """
    path = directory / "config.json"
    try:
        with path.open("rb") as file:
            table = config_untrusted(file.read(MAX_CONFIG_BYTES + 1).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    layers = table.get("num_hidden_layers", table.get("n_layer"))
    if isinstance(layers, int) and stages > layers:
        text = f"a model of {layers} layers cannot have {stages} stages"
        raise UserError(text, remedy=f"give --split {layers} at most, or no number for the fastest chain")


def shape_of(profile: Profile) -> ModelShape | None:
    """The shape of the model that the profile trains in parts; None if its directory is not on this machine.

    Raises:
        UserError: the model is not split.
        ConfigError, StorageError: it is invalid, or cannot be trained in parts.
        ResourceError: there is too little memory to measure it.
    """
    if profile.stages < 2:
        raise UserError(
            "the model of this job is not split: every worker trains all of it, so there is nothing to plan",
            remedy="leave --dry-run out, or set job.strategy=pipeline and pipeline.stages",
        )
    if profile.model.path and not is_model(profile.model.path):
        return None
    key = profile.model.model_dump_json()
    if key not in _known:
        # In a process of its own: this one may be a seed, or run for days, and torch's memory would stay.
        other = ProcessPoolExecutor(1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
        try:
            with Console(quiet=json_output.wanted).during(lambda: "measuring the model"), other:
                _known[key] = other.submit(_measured, profile).result()
        except BrokenProcessPool as error:
            text = "the process that measures the model was killed"
            raise ResourceError(text, remedy="free some memory: it loads torch") from error
    return _known[key]


def _measured(profile: Profile) -> ModelShape:
    from p2ptrain.compute import split_check
    from p2ptrain.compute.model import model_config
    from p2ptrain.compute.part import layer_sizes
    from roles.worker.build import training_spec

    config = model_config(training_spec(profile).model, 1 if profile.model.path else BYTES_VOCAB)
    split_check.check_splits(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelShape.of(layer_sizes(config), config.hidden_size, inner, config.vocab_size)


def shape_param(profile: Profile) -> dict[str, Any]:
    """The optional parameter of a request that creates a job; empty if the shape is unknown. Raises as ``shape_of``."""
    shape = shape_of(profile) if profile.stages > 1 else None
    return {"shape": shape.to_map()} if shape is not None else {}
