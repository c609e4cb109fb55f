"""The data and the models that a person names: checked before any process starts, fetched from the hub, and measured.

Workers measure a model that they serve (``roles.serving.worker_pool.WorkerPool.measure_model``). The sizes of one to be
trained are computed here for a new model of the Llama family, which needs no torch, and measured for others.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cluster.console import Console
from p2ptrain.core.adapters import is_adapter, is_model
from p2ptrain.core.errors import ConfigError, NetworkError, P2PTrainError, ResourceError, StorageError, UserError
from p2ptrain.core.footprint import LLAMAS, llama_sizes
from p2ptrain.core.plugins import installed, lacking
from p2ptrain.core.tensor_files import MAX_CONFIG_BYTES, adapter_alone, config_untrusted
from p2ptrain.core.text_files import find_files, format_of, kind_of
from p2ptrain.core.texts import human_bytes
from p2ptrain.core.tokenizer_files import check_fit, embedding_of, is_without_weights, tokenizer_file, vocabulary_size
from ring.planning.workloads import ModelShape

if TYPE_CHECKING:
    from configs.schema import Data, Profile

FETCHED = ("*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja")
"""Files of a model that are read here. Others, such as pickles, are not fetched."""
_BYTES_VOCAB = 256  # the tokens of a new model without a tokenizer are bytes (``compute.tokenizer``)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w][\w.-]{0,95}", re.ASCII)
_known_shapes = dict[str, ModelShape]()


# ---------------------------------------------------------------------------------------------------- what is trained


def load_for(
    workers: int, name: str, sets: Sequence[str], usual: Mapping[str, tuple[object, str]] | None = None
) -> Profile:
    """Load a profile for this number of workers. The job begins with all of them, unless the user's own settings say
    that fewer are enough. A job that needs more of them would wait for ever. ``usual``: as for ``load``.

    Raises ``UserError``.
    """
    from configs.loader import load

    loaded = load(name, os.environ, sets, {"job.workers": (workers, f"--workers {workers}"), **(usual or {})})
    check_workers(loaded.profile, workers, loaded.sources["job.workers"])
    return loaded.profile


def check_workers(profile: Profile, workers: int, source: str) -> None:
    """Refuse a job that needs more workers to begin. ``source``: of that number. Raises ``UserError``."""
    if (wanted := profile.job.workers) > workers:
        remedy = f"give --workers {wanted}, or --set job.workers={workers}"
        text = f"{source}: the job needs {wanted} workers to begin, and {workers} would be started"
        raise UserError(text, remedy=remedy)


def resolve_inputs(profile: Profile, *, download: bool = False, quiet: bool = False) -> Profile:
    """The profile, with the directory of a model that was fetched. Raises ``UserError`` if data or model are missing,
    and as ``model_directory``."""
    if lacks := lacking(profile.needs, ",".join(installed())):
        raise ConfigError(f"this machine {lacks}")
    if not profile.data.private:
        _check_size(profile.data, find_files(profile.data.path, profile.data.format))
    tokenizer = Path(profile.model.tokenizer) if profile.model.tokenizer else None
    if not profile.model.path:
        _vocabulary(profile)
        return profile
    found = model_directory(profile.model.path, download=download, key="model.path", quiet=quiet)
    if is_adapter(found):
        raise adapter_alone(found)
    if not is_model(found):
        text = f"model.path = {profile.model.path!r} holds no model: it has no config.json"
        raise ConfigError(text, remedy="name a directory as save_pretrained writes it")
    check_fit(found, tokenizer, embedding_of(found))
    if is_without_weights(found):
        Console(quiet=quiet).event("info", f"{found} has no weights: a new model of its config.json begins")
    model = profile.model.model_copy(update={"path": str(found)})
    return profile.model_copy(update={"model": model})


def _check_size(data: Data, files: Sequence[Path]) -> None:
    """Refuse plain text that is too short with any tokenizer; workers count its tokens. Raises ``ConfigError``."""
    if any(format_of(file, data.format) != "text" or kind_of(file)[1] for file in files):
        return
    most, least = sum(file.stat().st_size + 3 for file in files), 2 if data.validation_fraction else 1
    if most < least * data.sequence_tokens:  # a token has a byte at least; some more begin and end a text
        text = f"data.path = {data.path!r} is too short for {least} sequences of {data.sequence_tokens} tokens"
        raise ConfigError(text, remedy="name more text, or set a smaller data.sequence_tokens")


def model_directory(name: str, *, download: bool = False, key: str = "", quiet: bool = False) -> Path:
    """The directory ``name``; or, with ``download``, that of the hub's model with this id. ``key``: the setting with
    this name; empty: it is an option's.

    Raises:
        UserError: there is none, or it has no weights in safetensors.
        NetworkError: the hub does not answer.
    """
    if Path(name).is_dir():
        return Path(name)
    what = f"{key} = {name}" if key else name
    if not _HUB_ID.fullmatch(name):
        remedy = f"name the directory of a model{f', --set {key}=DIR' if key else ''}; "
        remedy += "`p2ptrain checkpoints list` shows where jobs store theirs"
        raise UserError(f"{what} is not a directory", remedy=remedy)
    if not download:
        remedy = "if it is a model of the Hugging Face hub, --download fetches it"
        raise UserError(f"{what} is not a directory on this machine", remedy=remedy)
    found = _fetch_model(name, quiet=quiet)
    if not any(found.glob("*.safetensors")):
        raise UserError(f"{name} has no weights in safetensors", remedy="choose a model that has; pickles are not read")
    return found


def _fetch_model(name: str, *, quiet: bool) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when it is imported
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    place = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")

    def text() -> str:
        there_bytes = sum(path.stat().st_size for path in place.glob("blobs/*"))
        return f"fetching {name}: {human_bytes(there_bytes)}"

    try:
        with Console(quiet=quiet).during(text):
            return Path(
                snapshot_download(
                    name,
                    allow_patterns=list(FETCHED),
                    ignore_patterns=["*/*"],
                    endpoint=os.environ.get("HF_ENDPOINT"),
                )
            )
    except RepositoryNotFoundError as error:
        remedy = "check its name; for a private or gated model set HF_TOKEN"
        raise UserError(f"the Hugging Face hub does not show {name}", remedy=remedy) from error
    except Exception as error:
        patterns = " ".join(f"--include '{pattern}'" for pattern in FETCHED)
        local = name.rpartition("/")[2]
        raise NetworkError(
            f"cannot fetch {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            remedy=f"on a machine that reaches the hub run: hf download {name} {patterns} --local-dir {local}"
            "; copy the directory here, and give its path",
        ) from error


def shape_of(profile: Profile, *, quiet: bool = False) -> ModelShape | None:
    """The shape of the model that the profile trains; None if its directory is not on this machine.

    Raises:
        ConfigError: it is invalid, or cannot be trained in parts.
        ResourceError, StorageError: there is too little memory to measure it, or it cannot be read.
    """
    if not profile.model.path and profile.model.architecture in LLAMAS:
        sizes = llama_sizes(profile.model, vocabulary := _vocabulary(profile))
        return ModelShape.of(sizes, profile.model.hidden_size, profile.model.intermediate_size, vocabulary)
    if profile.model.path and not is_model(profile.model.path):
        return None
    key = profile.model.model_dump_json()
    if key not in _known_shapes:
        _known_shapes[key] = _measure_apart(profile, quiet=quiet)
    return _known_shapes[key]


def _vocabulary(profile: Profile) -> int:
    """Size of a new model's vocabulary. Raises ``ConfigError``: the tokenizer is not on this machine."""
    place = profile.model.tokenizer
    return vocabulary_size(tokenizer_file(Path(place))) if place else _BYTES_VOCAB


def shape_if_known(profile: Profile, console: Console) -> ModelShape | None:
    """As ``shape_of``, but None, with a warning, if the model cannot be measured here. Raises ``ConfigError``."""
    try:
        return shape_of(profile, quiet=console.quiet)
    except ConfigError:
        raise
    except P2PTrainError as error:
        text = "the workers cut the model by its weights, because it could not be measured"
        console.event("warning", f"{text}: {error.message}")
        return None


def _measure_apart(profile: Profile, *, quiet: bool) -> ModelShape:
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # In a process of its own: this one may be a seed, or run for days, and torch's memory would stay.
    try:
        other = ProcessPoolExecutor(1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
        with Console(quiet=quiet).during(lambda: "measuring the model"), other:
            return other.submit(_measure, profile).result()
    except (BrokenProcessPool, OSError) as error:
        text = "the process that measures the model was killed or could not start"
        raise ResourceError(text, remedy="free some memory: it loads torch") from error


def _measure(profile: Profile) -> ModelShape:
    from p2ptrain.compute import split_check
    from p2ptrain.compute.layout import layer_sizes
    from p2ptrain.compute.model import model_config
    from roles.worker.build import training_spec

    config = model_config(training_spec(profile).model, 1 if profile.model.path else _vocabulary(profile))
    split_check.check_splits(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelShape.of(layer_sizes(config), config.hidden_size, inner, config.vocab_size)


# ----------------------------------------------------------------------------------------------------- what is served


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """How to split a model over workers.

    Attributes:
        stages: number of stages; None: the best number.
        dtype, weights: as in ``PartSpec``.
        wire: type in which hidden states travel; empty: as computed; int8: only those of prompts.
        positions: cache positions of all sessions together; 0: as many as are needed.
    """

    stages: int | None
    dtype: str = ""
    wire: str = ""
    positions: int = 0
    weights: str = ""

    @property
    def encodings(self) -> tuple[str, str]:
        """Encoding of hidden states while decoding, and of those of prompts; empty: as computed."""
        return ("", "int8") if self.wire == "int8" else (self.wire, self.wire)


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
    if isinstance(layers, int):  # if it has another name, a worker knows it (``split_model``)
        check_stages(layers, stages)
    return text
